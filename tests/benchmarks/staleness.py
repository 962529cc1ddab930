"""What off-policyness costs the demo's learning, and what the correction gives back.

    uv run tests/benchmarks/staleness.py --out /tmp/staleness          27 runs
    uv run tests/benchmarks/staleness.py --out /tmp/staleness --report

Every run is the demo, ``examples/run_gdpo.py`` with ``configs/gdpo_tiny_cpu.yaml``: S = 0, and S = 1 and 4 with
``rollout.kv`` drain, recompute and keep. ``rollout.depth`` is the bound, so that every batch is as old as S allows,
which is more than ``auto`` would make it. Seed by seed all start from the same model, with the same prompts. Finished
runs are not run again; ``--report`` only draws what is there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdpo_nemo.observe.metrics import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 60
PROMPTS = 16
WINDOW = 5
TRAINER = ["loss_fn.old_logprobs=trainer"]
TRUNCATED = [*TRAINER, "loss_fn.off_policy={mode: truncate, ratio_max: 2.0}"]
OBJECTIVES = {
    "corrected": ("clip from the trainer's log-probs, weight cut at 2", TRUNCATED),
    "uncorrected": ("clip from the trainer's log-probs, no weight", [*TRAINER, "loss_fn.off_policy.mode=none"]),
    "sampler": ("clip from the sampler's log-probs", ["loss_fn.old_logprobs=sampler"]),
}


@dataclass(frozen=True)
class Variant:
    """What is compared: a bound of staleness, what becomes of samples under way, an objective."""

    staleness: int
    kv: str
    objective: str

    @property
    def name(self) -> str:
        """Of its runs' folders."""
        return f"s{self.staleness}_{self.kv}_{self.objective}"

    @property
    def title(self) -> str:
        """In tables and legends."""
        if not self.staleness:
            return "S = 0"
        return f"S = {self.staleness}, {self.kv}" + ("" if self.objective == "corrected" else f", {self.objective}")

    def overrides(self) -> list[str]:
        """What distinguishes it from the demo."""
        if not self.staleness:
            return []
        depth = (self.staleness + 1) * PROMPTS
        return [
            f"rollout.max_staleness={self.staleness}",
            f"rollout.kv={self.kv}",
            f"rollout.depth={depth}",
            *OBJECTIVES[self.objective][1],
        ]


VARIANTS = [
    Variant(0, "drain", "sampler"),
    *(Variant(staleness, kv, "corrected") for staleness in (1, 4) for kv in ("drain", "recompute", "keep")),
    Variant(4, "recompute", "uncorrected"),
    Variant(4, "recompute", "sampler"),
]


@dataclass(frozen=True)
class Run:
    """One training run."""

    variant: Variant
    seed: int
    out: Path
    cores: int

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.out / f"{self.variant.name}_{self.seed}"

    def rows(self) -> list[dict]:
        """Metrics of the trained steps."""
        return [row for row in read_metrics(self.folder) if "loss" in row]

    def finished(self) -> bool:
        """Whether the metrics of all steps are there."""
        return (self.folder / "metrics.jsonl").exists() and len(self.rows()) == STEPS

    def start(self) -> None:
        """Run to the end; a run that was cut short starts anew, since it saves no checkpoints."""
        if self.finished():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        begun = time.monotonic()
        command = [
            sys.executable, str(REPOSITORY / "examples" / "run_gdpo.py"),
            "--config", str(REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml"),
            f"run.dir={self.folder}", f"run.seed={self.seed}", f"policy.model_name={self.out}/model_{self.seed}",
            f"gdpo.max_num_steps={STEPS}", f"gdpo.val_period={STEPS}", "gdpo.val_at_start=false",
            "checkpointing.enabled=false", "checkpointing.metric_name=null", "checkpointing.export_hf=false",
            "logger.plot=false", "logger.tensorboard.enabled=false", "logger.console=plain",
            "rollout.save_samples=false", "health.checks=[]", f"cluster.cpus_per_node={self.cores}",
            *self.variant.overrides(),
        ]  # fmt: skip
        with open(self.folder.with_suffix(".log"), "w") as log:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY).returncode
        if status:
            sys.exit(f"{self.folder.name} ended with status {status}; see {log.name}")
        print(f"{self.folder.name}: {time.monotonic() - begun:.0f} s", flush=True)


def curves(runs: list[Run], key: str) -> np.ndarray:
    """A metric: [seeds, steps]."""
    return np.array([[row.get(key, 0.0) for row in run.rows()] for run in runs])


def by_variant(runs: list[Run]) -> dict[Variant, list[Run]]:
    """The finished runs of the seeds for which every variant is finished."""
    unfinished = {run.seed for run in runs if not run.finished()}
    found: dict[Variant, list[Run]] = {}
    for run in runs:
        if run.seed not in unfinished:
            found.setdefault(run.variant, []).append(run)
    return found


def _cell(values: np.ndarray, form: str = ".3f") -> str:
    """Mean ± standard error over the seeds."""
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return f"{values.mean():{form}} ± {error:{form.lstrip('+')}}"


def table(found: dict[Variant, list[Run]]) -> str:
    """Markdown: all three flags at the end, and over the run against S = 0 of the same seed."""
    head = [
        "",
        "mean staleness",
        "all three right, at the end",
        "mean over the run",
        "minus S = 0",
        "clipped",
        "weight",
    ]
    lines = [head, ["---"] * len(head)]
    on_policy = curves(next(iter(found.values())), "reward/all/mean").mean(axis=1)
    for variant, runs in found.items():
        values = curves(runs, "reward/all/mean")
        clipped = curves(runs, "policy/clip_fraction").mean()
        corrected = variant.staleness and variant.objective == "corrected"
        weight = curves(runs, "policy/importance_weight").mean() if corrected else 1.0
        lines.append(
            [
                variant.title,
                f"{curves(runs, 'staleness/mean').mean():.2f}",
                _cell(values[:, -WINDOW:].mean(axis=1)),
                _cell(values.mean(axis=1)),
                _cell(values.mean(axis=1) - on_policy, "+.3f") if variant.staleness else "",
                f"{clipped:.3f}",
                f"{weight:.3f}",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(found: dict[Variant, list[Run]], path: Path) -> None:
    """Left what S and ``rollout.kv`` cost, right what the objectives do at S = 4: means of the last steps over seeds,
    with a band of one standard error."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    colours = {0: "#222222", 1: "#2a6fbb", 4: "#c8553d"}
    objective_colours = {"corrected": "#c8553d", "uncorrected": "#b88a1e", "sampler": "#3a8f5c"}
    dashes = {"drain": (0, (1.5, 1.2)), "recompute": "solid", "keep": (0, (5, 2))}
    steps = np.arange(WINDOW, STEPS + 1)
    for place, axes in enumerate(figure.subplots(1, 2, sharey=True)):
        for variant, runs in found.items():
            left = variant.objective == "corrected" or not variant.staleness
            right = variant.kv == "recompute" and variant.staleness == 4 or not variant.staleness
            if not (left, right)[place]:
                continue
            colour = colours[variant.staleness]
            if place and variant.staleness:
                colour = objective_colours[variant.objective]
            values = np.lib.stride_tricks.sliding_window_view(curves(runs, "reward/all/mean"), WINDOW, axis=1)
            values = values.mean(axis=-1)
            mean = values.mean(axis=0)
            error = values.std(axis=0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.zeros_like(mean)
            label = variant.title
            if place and variant.staleness:
                label = OBJECTIVES[variant.objective][0]
            line = "solid" if place or not variant.staleness else dashes[variant.kv]
            axes.plot(steps, mean, color=colour, linestyle=line, linewidth=1.8, label=label)
            axes.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.10, linewidth=0)
        axes.set_title(
            ("corrected: what staleness costs", "S = 4, recompute: what the objective does")[place], loc="left"
        )
        axes.set(xlabel="step", xlim=(WINDOW, STEPS), ylim=(0, 1))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9, loc=("lower right", "upper left")[place])
    figure.axes[0].set_ylabel(f"all three rewards right (last {WINDOW} steps)")
    figure.savefig(path, dpi=120)


def main() -> int:
    """Command line; see the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0 on (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/staleness"), help="folder of runs (%(default)s)")
    parser.add_argument("--report", action="store_true", help="run nothing; report what is finished")
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    cores = max(1, len(os.sched_getaffinity(0)) // chosen.jobs)
    runs = [Run(variant, seed, out, cores) for seed in range(chosen.seeds) for variant in VARIANTS]
    if not chosen.report:
        for seed in range(chosen.seeds):  # one at a time, so that two runs do not make the same model
            _make_model(out / f"model_{seed}", seed)
        with ThreadPoolExecutor(chosen.jobs) as pool:
            list(pool.map(Run.start, runs))
    found = by_variant(runs)
    if not found:
        sys.exit("no seed is finished yet")
    print(table(found))
    draw(found, out / "staleness.png")
    print(out / "staleness.png")
    return 0


def _make_model(folder: Path, seed: int) -> None:
    if not folder.is_dir():
        command = [
            sys.executable,
            str(REPOSITORY / "examples" / "make_tiny_model.py"),
            str(folder),
            "--seed",
            str(seed),
        ]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
