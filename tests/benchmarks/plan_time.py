"""The plan's seconds per step beside those of real runs on a CPU that it was not calibrated on.

    python tests/benchmarks/plan_time.py [--steps 8] [--folder DIR] [--only K]

Trains the demo's model three times through the launcher: 4 and 16 prompts of 8 samples, on which the plan is
calibrated, then 8 prompts with 16 samples and a smaller micro-batch, which it predicts. Medians of the steps after the
first; the machine should have nothing else to do. With --folder runs are kept and used again, and --only K makes the
K-th of the three runs and no more, so that a shared machine need not be held for all of them at once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
CALIBRATION = ((4, 8, 3072), (16, 8, 3072))
PREDICTED = (8, 16, 2048)


def main() -> None:
    """Makes the runs, then prints predicted and measured seconds of every phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", help="keeps the runs; default: a temporary folder")
    parser.add_argument("--only", type=int, choices=(1, 2, 3), help="make this run only, compare nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary).resolve()
        sizes = (*CALIBRATION, PREDICTED)
        runs = [
            _train(folder, arguments.steps, *size)
            for number, size in enumerate(sizes, start=1)
            if arguments.only in (None, number)
        ]
        if arguments.only is None:
            _compare(runs)


def _compare(folders: list[Path]) -> None:
    from gdpo_nemo.planning.calibrate import calibrate, read_run
    from gdpo_nemo.planning.hardware import CPU_RATES, host
    from gdpo_nemo.planning.speed import step_time

    *known, run = [read_run(folder) for folder in folders]
    rates = calibrate(known, host(), CPU_RATES)
    guess = step_time(run.resolved, run.shape, host(), rates)
    print(rates.describe())
    print(f"{'phase':<12}{'predicted s':>12}{'measured s':>12}{'ratio':>8}")
    for name, key, value in (
        ("generation", "time/rollout", guess.generation),
        ("training", "time/train", guess.training),
        ("weights", "time/sync", guess.sync),
        ("step", "time/step", guess.step),
    ):
        measured = median(row[key] for row in run.rows)
        print(f"{name:<12}{value:>12.3f}{measured:>12.3f}{value / measured:>8.2f}")


def _model(folder: Path) -> Path:
    if folder.exists():
        return folder
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import make_tiny_model; "
        "make_tiny_model.make_tiny_model(sys.argv[2], 0, steps=30)"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(ROOT / "examples"), str(folder)],
        check=True,
        env=_environment(),
    )
    return folder


def _train(folder: Path, steps: int, prompts: int, samples: int, budget: int) -> Path:
    """The folder of the run, which is made unless it is there, finished."""
    run_dir = folder / f"{prompts}x{samples}"
    model = _model(folder / "model")
    if (run_dir / "report.html").exists():
        return run_dir
    overrides = [
        f"run.dir={run_dir}", f"policy.model_name={model}", f"gdpo.max_num_steps={steps}",
        f"gdpo.num_prompts_per_step={prompts}",
        f"gdpo.num_generations_per_prompt={samples}", f"policy.micro_batch_tokens={budget}", "gdpo.val_period=0",
        "gdpo.val_at_start=false",
        "data.validation=null", "checkpointing.enabled=false", "checkpointing.metric_name=null",
        "checkpointing.export_hf=false",
        "logger.console=plain", "gdpo.val_prompts=null", "checkpointing.save_period=10",
    ]  # fmt: skip
    command = [sys.executable, str(ROOT / "examples" / "run_gdpo.py"), *overrides]
    subprocess.run(command, check=True, cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL)
    return run_dir


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}


if __name__ == "__main__":
    main()
