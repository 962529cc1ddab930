"""Compare GDPO with GRPO on a CPU, with the real trainer: when normalising each reward first helps, and when not.

    uv run examples/gdpo_vs_grpo.py            three seeds, two settings and the control, under 30 minutes on two cores
    uv run examples/gdpo_vs_grpo.py --quick    two seeds, one setting and the control, under 8 minutes

A small language model sorts digits for three rewards: correct (C), well-formed (F) and short (L). Every run is a run
of ``examples/run_gdpo.py``, with Megatron, vLLM and Ray. For each seed, all methods start from the same warmed-up model
and use the same prompts and sample seeds, so methods are compared within a seed. The report shows the raw flags C, F
and L, regardless of the rewards used for training. There are two settings and a control:

* scaled: C is -3 or 3, and L is paid only if the answer is correct (scale and condition of the GDPO paper). In a sum,
  the large reward dominates the small and the conditional one. GDPO is expected to win.
* equal: all three rewards are 0 or 1. No reward dominates, and no difference is expected.
* control: GRPO in the first setting with weights (1/6, 1, 1), which undo the scale by hand.

GDPO does not learn correctness faster. It does not find skills that the model lacks: the warm-up taught sorting, and
reinforcement learning selects it. If a reward has a larger scale because it matters
more, GDPO removes this effect; set the reward's weight instead.

Finished runs are not repeated, and ``--report`` only reports on them. Results are in ``results/gdpo_vs_grpo``. Its
``comparison.md`` is the page ``docs/gdpo_vs_grpo.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdpo_nemo import read_metrics
from gdpo_nemo.algorithms.diagnostics import student_factor

HERE = Path(__file__).resolve().parent
FLAGS = {"C": "correct", "F": "well-formed", "L": "short", "All": "all three at once"}
STEPS = 45
WINDOW = 5
GOALS = {"C": 0.5, "F": 0.8, "L": 0.9, "All": 0.4}

METHODS = {
    "gdpo": ("GDPO", ["gdpo.estimator=gdpo"]),
    "grpo": ("GRPO", ["gdpo.estimator=grpo"]),
    "dr_grpo": ("GRPO without std", ["gdpo.estimator=dr_grpo"]),
    "control": ("GRPO, weights 1/6, 1, 1", ["gdpo.estimator=grpo", f"gdpo.rewards.correctness={1 / 6}"]),
}
SCALED = ["env.digit_sort.correctness_values=[-3.0,3.0]", "env.digit_sort.length_if_correct=true"]
SETTINGS = {
    "scaled": ("C in {-3, 3}, L paid only if C", SCALED, ("gdpo", "grpo", "control", "dr_grpo")),
    "equal": ("C, F and L in {0, 1}", [], ("gdpo", "grpo", "dr_grpo")),
}
LEARNING_RATE = """## Learning rate

The learning rate has more effect than the estimator.
The final share *All* in the first setting was measured once with a plain PyTorch loop and six seeds:

| learning rate | GRPO | GDPO |
|---|---|---|
| 5e-5 | .226 | .316 |
| 1.5e-4 (used here) | .515 | .583 |
| 5e-4 | .679 | .680 |

GDPO is ahead at each learning rate, but GRPO at 5e-4 is better than GDPO at 1.5e-4."""

Curves = dict[tuple[str, str], np.ndarray]
"""(setting, method) -> float [seeds, steps, flags]. All methods of a setting have the same seeds."""


# -- runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training run."""

    setting: str
    method: str
    seed: int
    out: Path
    cores: int

    @property
    def folder(self) -> Path:
        """Run folder."""
        return self.out / "runs" / f"{self.setting}_{self.method}_{self.seed}"

    @property
    def model(self) -> Path:
        """Warmed-up model from which all runs of the seed start."""
        return self.out / "models" / f"small_{self.seed}"

    def overrides(self) -> list[str]:
        """Return the config overrides relative to the demo. Measurements and files that the comparison does not use
        are turned off."""
        return [
            f"run.name={self.folder.name}",
            f"run.dir={self.folder}",
            f"run.seed={self.seed}",
            f"policy.model_name={self.model}",
            "policy.model_factory=examples/make_tiny_model.py:make_small_model",
            "policy.megatron_cfg.optimizer.lr=1.5e-4",
            f"gdpo.max_num_steps={STEPS}",
            f"data.train.size={STEPS * 16}",
            "gdpo.val_period=0",
            "gdpo.val_at_start=false",
            "checkpointing.enabled=false",
            "checkpointing.export_hf=false",
            "logger.plot=false",
            "logger.tensorboard.enabled=false",
            "logger.console=plain",
            "rollout.save_samples=false",
            f"cluster.cpus_per_node={self.cores}",
            *SETTINGS[self.setting][1],
            *METHODS[self.method][1],
        ]

    def finished(self) -> bool:
        """Return whether the run has the metrics of all steps."""
        return (self.folder / "metrics.jsonl").exists() and len(_steps(self.folder)) == STEPS

    def start(self) -> None:
        """Run to the end. An interrupted run starts again at step 0, because it has no checkpoints."""
        if self.finished():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        begun = time.monotonic()
        command = [
            sys.executable,
            str(HERE / "run_gdpo.py"),
            "--config",
            str(HERE.parent / "configs" / "gdpo_tiny_cpu.yaml"),
        ]
        _call([*command, *self.overrides()], self.folder.with_suffix(".log"))
        print(f"{self.folder.name}: {time.monotonic() - begun:.0f} s", flush=True)


def _call(command: list[str], log: Path) -> None:
    """Run a command and write its output to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    with open(log, "w") as file:
        status = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=HERE.parent
        ).returncode
    if status:
        sys.exit(f"{shlex.join(command[:2])}: exit status {status}; see {log}")


def _make_model(run: Run) -> None:
    if not run.model.is_dir():
        command = [sys.executable, str(HERE / "make_tiny_model.py"), str(run.model), "--seed", str(run.seed), "--small"]
        _call(command, run.out / "models" / f"small_{run.seed}.log")


def plan(settings: list[str], methods: set[str], seeds: list[int], out: Path, cores: int) -> list[Run]:
    """Return all runs ordered by seed, so that after an interruption all methods have the same finished seeds."""
    return [
        Run(setting, method, seed, out, cores)
        for seed in seeds
        for setting in settings
        for method in SETTINGS[setting][2]
        if method in methods
    ]


def _steps(folder: Path) -> list[dict]:
    return [row for row in read_metrics(folder) if "loss" in row]


def flags_of(run: Run) -> np.ndarray:
    """Return the raw flags C, F, L and All of every step's batch, regardless of the rewards used for training.

    Shape: [steps, 4].
    """
    table = []
    for row in _steps(run.folder):
        correct = row["reward/correctness/mean"]
        correct = (correct + 3) / 6 if run.setting == "scaled" else correct
        short = row["reward/length_flag/mean"] if run.setting == "scaled" else row["reward/length/mean"]
        table.append((correct, row["reward/format/mean"], short, row["reward/all/mean"]))
    return np.array(table)


def collect(runs: list[Run]) -> tuple[Curves, dict[str, list[int]]]:
    """Return the curves of the finished runs, and for every setting the seeds whose runs are all finished."""
    curves: Curves = {}
    complete: dict[str, list[int]] = {}
    for setting in dict.fromkeys(run.setting for run in runs):
        here = [run for run in runs if run.setting == setting]
        open_seeds = {run.seed for run in here if not run.finished()}
        complete[setting] = sorted({run.seed for run in here} - open_seeds)
        for method in dict.fromkeys(run.method for run in here):
            found = [flags_of(run) for run in here if run.method == method and run.seed not in open_seeds]
            if found:
                curves[setting, method] = np.stack(found)
    return curves, complete


# -- figures and tables ---------------------------------------------------------------------------------------------


def trailing(curves: np.ndarray) -> np.ndarray:
    """Return the mean over the last five steps. Shape: [seeds, steps - 4, flags]; the first entry belongs to step 5."""
    return np.lib.stride_tricks.sliding_window_view(curves, WINDOW, axis=1).mean(axis=-1)


def steps_to(curves: np.ndarray) -> np.ndarray:
    """Return the first step at which the trailing mean reaches each goal, or STEPS + 1. Shape: [seeds, flags]."""
    reached = trailing(curves) >= np.array(list(GOALS.values()))
    return np.where(reached.any(axis=1), reached.argmax(axis=1) + WINDOW, STEPS + 1)


def standard_error(values: np.ndarray) -> np.ndarray:
    """Return the standard error over seeds (axis 0); NaN for one seed."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    return values.std(axis=0, ddof=1) / np.sqrt(len(values))


def _cells(values: np.ndarray, form: str) -> list[str]:
    """Format mean ± standard error of every column. ``values`` has the shape [seeds, columns]."""
    pairs = zip(values.mean(axis=0), standard_error(values))
    return [f"{mean:{form}}" + ("" if np.isnan(error) else f" ± {error:{form.lstrip('+')}}") for mean, error in pairs]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ends_table(curves: Curves) -> str:
    """Return a table of the values at the end and the steps to the goals."""
    goals = [f"steps to {flag} ≥ {goal:g}" for flag, goal in GOALS.items()]
    rows = [
        [
            SETTINGS[setting][0],
            METHODS[method][0],
            *_cells(trailing(runs)[:, -1], ".3f"),
            *_cells(steps_to(runs), ".1f"),
        ]
        for (setting, method), runs in curves.items()
    ]
    return _table(["setting", "method", *(f"{flag} at the end" for flag in FLAGS), *goals], rows)


def differences_table(curves: Curves) -> str:
    """Return a table of the paired differences of the mean over all steps."""
    rows = []
    for (setting, method), runs in curves.items():
        if method != "gdpo":
            gap = curves[setting, "gdpo"].mean(axis=1) - runs.mean(axis=1)
            rows.append([SETTINGS[setting][0], f"GDPO minus {METHODS[method][0]}", *_cells(gap, "+.3f")])
    return _table(["setting", "", *FLAGS], rows)


def interval_note(complete: dict[str, list[int]]) -> str:
    """Return a sentence about the confidence intervals of so few seeds."""
    counts = sorted({len(seeds) for seeds in complete.values()} - {0, 1})
    factors = " or ".join(f"{student_factor(count):.1f} (of {count} seeds)" for count in counts)
    return f"A 95 % interval is ± {factors} standard errors." if factors else "One seed has no standard error."


def headline(curves: Curves) -> str:
    """Return the main results as a Markdown list."""
    to_all = {m: _cells(steps_to(curves["scaled", m]), ".1f")[3] for m in ("gdpo", "grpo", "control")}
    end = {m: _cells(trailing(curves["scaled", m])[:, -1], ".3f")[0] for m in ("gdpo", "grpo")}
    lines = [
        "The runs show:",
        "",
        f"* In the first setting, 40 % of the samples meet all three conditions after {to_all['gdpo']} steps with GDPO "
        f"and after {to_all['grpo']} steps with GRPO.",
        f"  GRPO with manually chosen weights takes {to_all['control']} steps.",
        f"* Correctness ends at {end['gdpo']} with GDPO and {end['grpo']} with GRPO.",
    ]
    if ("equal", "gdpo") in curves:
        gap = _cells(curves["equal", "gdpo"].mean(axis=1) - curves["equal", "grpo"].mean(axis=1), "+.3f")
        lines += [
            "* In the second setting, the rewards have equal scales.",
            f"  Averaged over the run, GDPO minus GRPO is {gap[0]} in C and {gap[3]} in All.",
        ]
    return "\n".join(lines)


def report(curves: Curves, complete: dict[str, list[int]], command: str) -> str:
    """Return the results as a Markdown page."""
    named = {setting: ", ".join(map(str, found)) for setting, found in complete.items()}
    if len(set(named.values())) == 1:
        seeds = f"seeds {named['scaled']} in each setting"
    else:
        seeds = "; ".join(f"seeds {found} ({SETTINGS[setting][0]})" for setting, found in named.items())
    sections = [
        "# GDPO compared with GRPO on a CPU",
        "After reading this page, you can judge when GDPO helps, and by how much, from experiments on a small model.",
        f"```bash\n{command}\n```",
        "This command runs the experiments and writes this page.\n"
        "The model learns to sort digits with three rewards: C (correct), F (format) and L (length).\n"
        "*All* is the share of samples that meet all three conditions.",
        "* In the first setting C is in {-3, 3}, and L is given only if the answer is correct.\n"
        "* In the second setting, which `--quick` skips, C, F and L are in {0, 1}.",
        headline(curves),
        "GDPO does not learn correctness faster.\n"
        "GDPO also does not add skills: the warm-up taught sorting, and reinforcement learning selects this skill.\n"
        "If the rewards have equal scales, or weights that compensate for their scales, GDPO gains little.\n"
        "If a reward has a larger scale because it matters more, GDPO removes this effect.\n"
        "To give a reward more influence, set its weight.",
        "## Results",
        f"Method: the real trainer on a model of 224,256 parameters after 250 warm-up steps, with {seeds}.\n"
        f"Each run has {STEPS} steps of 16 prompts x 8 samples, learning rate 1.5e-4, one update per step and no KL.\n"
        "Values are the raw flags C, F and L of the training batches, independent of the rewards used for training.\n"
        f'"At the end" is the mean of the last {WINDOW} steps. {STEPS + 1} steps means "not within {STEPS} steps".\n'
        "The number after ± is the standard error.\n" + interval_note(complete),
        ends_table(curves),
        f"The table shows paired differences of the mean over all {STEPS} steps (same seed, model and prompts):",
        differences_table(curves),
        LEARNING_RATE,
    ]
    return "\n\n".join(sections) + "\n"


def draw(curves: Curves, path: Path) -> None:
    """Draw four panels per setting and one line per method: mean over seeds, with a band of one standard error."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    styles = {
        "gdpo": {"color": "#2a6fbb", "linewidth": 2.4, "zorder": 4},
        "grpo": {"color": "#c8553d", "linewidth": 1.8, "zorder": 3},
        "control": {"color": "#3a8f5c", "linewidth": 1.6, "linestyle": (0, (5, 2)), "zorder": 3},
        "dr_grpo": {"color": "#b88a1e", "linewidth": 1.6, "linestyle": (0, (1.5, 1.2)), "zorder": 2},
    }
    settings = list(dict.fromkeys(setting for setting, _ in curves))
    figure = Figure(figsize=(13, 3.2 * len(settings) + 0.7), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    bands = figure.subfigures(len(settings), 1, squeeze=False)[:, 0]
    handles = {}
    for row, (band, setting) in enumerate(zip(bands, settings)):
        count = len(curves[setting, "gdpo"])
        title = f"Rewards: {SETTINGS[setting][0]}" + ("" if setting == "scaled" else ", equal scale")
        band.suptitle(f"{title}   ({count} seed{'s' * (count > 1)})", x=0.01, ha="left", fontsize=11, fontweight="bold")
        for k, (axes, (flag, meaning)) in enumerate(zip(band.subplots(1, 4, sharey=True), FLAGS.items())):
            for method in (m for s, m in curves if s == setting):
                values = trailing(curves[setting, method])[:, :, k]
                steps = np.arange(WINDOW, STEPS + 1)
                mean = values.mean(axis=0)
                error = standard_error(values)
                (handles[METHODS[method][0]],) = axes.plot(steps, mean, **styles[method])
                axes.fill_between(
                    steps, mean - error, mean + error, color=styles[method]["color"], alpha=0.15, linewidth=0
                )
            axes.set_title(f"{flag}: {meaning}", loc="left", fontsize=10)
            axes.set(xlim=(WINDOW, STEPS), ylim=(0, 1.02))
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            if row == len(settings) - 1:
                axes.set_xlabel("step")
            if k == 0:
                axes.set_ylabel("share of samples")
    note = f"mean of the last {WINDOW} steps; band: one standard error over the seeds"
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False, title=note
    )
    figure.savefig(path, dpi=120)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, only the first setting and its control")
    parser.add_argument("--seeds", type=int, help="number of seeds, from seed 0 (default: 3, with --quick 2)")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at the same time (default: 2)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/gdpo_vs_grpo"),
        help="folder of runs and results (default: %(default)s)",
    )
    parser.add_argument("--report", action="store_true", help="start no runs; report on the finished ones")
    chosen = parser.parse_args()
    cores = max(1, len(os.sched_getaffinity(0)) // chosen.jobs)
    settings, methods = (["scaled"], {"gdpo", "grpo", "control"}) if chosen.quick else (list(SETTINGS), set(METHODS))
    seeds = list(range(chosen.seeds or (2 if chosen.quick else 3)))
    out = chosen.out.resolve()
    runs = plan(settings, methods, seeds, out, cores)
    if not chosen.report:
        begun = time.monotonic()
        with ThreadPoolExecutor(chosen.jobs) as pool:
            list(pool.map(_make_model, {run.seed: run for run in runs}.values()))
            list(pool.map(Run.start, runs))
        print(f"{len(runs)} runs in {(time.monotonic() - begun) / 60:.1f} minutes")
    curves, complete = collect(runs)
    if not all(("scaled", method) in curves for method in ("gdpo", "grpo", "control")):
        sys.exit("no seed of the first setting is finished yet")
    command = "uv run " + shlex.join(["examples/gdpo_vs_grpo.py", *(a for a in sys.argv[1:] if a != "--report")])
    text = report(curves, complete, command)
    (out / "comparison.md").write_text(text, encoding="utf-8")
    summary = {f"{setting}/{method}": values.tolist() for (setting, method), values in curves.items()}
    (out / "curves.json").write_text(json.dumps(summary), encoding="utf-8")
    draw(curves, out / "comparison.png")
    print(f"{text}\n{out / 'comparison.png'}, {out / 'comparison.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
