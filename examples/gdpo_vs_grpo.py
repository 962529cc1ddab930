"""GDPO against GRPO on a CPU, through the real trainer: where normalising each reward first helps, and where it does
not.

    uv run examples/gdpo_vs_grpo.py            three seeds, two settings and the control, under 30 minutes on two cores
    uv run examples/gdpo_vs_grpo.py --quick    two seeds, one setting and the control, under 8 minutes

A small language model sorts digits for three rewards: correct (C), well-formed (F), short (L). Every run is one of
``examples/run_gdpo.py``, with Megatron, vLLM and Ray. All methods start, seed by seed, from the same warmed-up model,
with the same prompts and sample seeds, so differences between methods are taken within a seed. What is shown are the
raw flags, whatever the trained rewards are. Two settings and a control:

* scaled and conditioned: C pays -3 or 3, and L pays only if the answer is right (scale and conditioning of the GDPO
  paper). Summed, the small and conditioned rewards drown in the large one. GDPO is expected to win here.
* equal: all three pay 0 or 1. Nothing drowns, and nothing is expected to differ.
* control: GRPO in the first setting with weights (1/6, 1, 1), which undo the scale by hand.

What GDPO does not do: it does not learn correctness faster, it does not find skills that the model lacks (the warm-up
taught this one, reinforcement selects it), and it takes scale that was meant as priority away: use weights for that.

Runs that are finished are not run again; ``--report`` only draws what is there. Results are in
``results/gdpo_vs_grpo``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdpo_nemo.observe.metrics import read_metrics

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
LEARNING_RATE_REMARK = (
    "The learning rate moves more than the estimator. Measured once in the first setting with a plain PyTorch loop, "
    "six seeds, GRPO / GDPO, All at the end: .226 / .316 at 5e-5, .515 / .583 at 1.5e-4 (used here), .679 / .680 at "
    "5e-4. The sign of the gap is the same throughout, but GRPO at 5e-4 beats GDPO at 1.5e-4."
)

Curves = dict[tuple[str, str], np.ndarray]
"""(setting, method) -> float [seeds, steps, flags]; the seeds of a setting are the same for all its methods."""


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
        """The run's own folder."""
        return self.out / "runs" / f"{self.setting}_{self.method}_{self.seed}"

    @property
    def model(self) -> Path:
        """The warmed-up model that all runs of the seed start from."""
        return self.out / "models" / f"small_{self.seed}"

    def overrides(self) -> list[str]:
        """What distinguishes the run from the demo; nothing is measured or written that the comparison does not
        read."""
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
        """Whether the metrics of all steps are there."""
        return (self.folder / "metrics.jsonl").exists() and len(_steps(self.folder)) == STEPS

    def start(self) -> None:
        """Run to the end; a run that was cut short starts anew, since it saves no checkpoints."""
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
    """Run a command with its output in a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    with open(log, "w") as file:
        status = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=HERE.parent
        ).returncode
    if status:
        sys.exit(f"{shlex.join(command[:2])} ended with status {status}; see {log}")


def _make_model(run: Run) -> None:
    if not run.model.is_dir():
        command = [sys.executable, str(HERE / "make_tiny_model.py"), str(run.model), "--seed", str(run.seed), "--small"]
        _call(command, run.out / "models" / f"small_{run.seed}.log")


def plan(settings: list[str], methods: set[str], seeds: list[int], out: Path, cores: int) -> list[Run]:
    """All runs, seed by seed, so that whatever is finished when somebody stops is paired."""
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
    """The raw flags C, F, L and All of every step's batch, whatever was trained: [steps, 4]."""
    table = []
    for row in _steps(run.folder):
        correct = row["reward/correctness/mean"]
        correct = (correct + 3) / 6 if run.setting == "scaled" else correct
        short = row["reward/length_flag/mean"] if run.setting == "scaled" else row["reward/length/mean"]
        table.append((correct, row["reward/format/mean"], short, row["reward/all/mean"]))
    return np.array(table)


def collect(runs: list[Run]) -> tuple[Curves, dict[str, list[int]]]:
    """Curves of the finished runs, and the seeds of every setting for which all its methods are finished."""
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
    """Mean over the last five steps, [seeds, steps - 4, flags]; the first belongs to step 5."""
    return np.lib.stride_tricks.sliding_window_view(curves, WINDOW, axis=1).mean(axis=-1)


def steps_to(curves: np.ndarray) -> np.ndarray:
    """First step at which the trailing mean reaches each goal, STEPS + 1 where none does: [seeds, flags]."""
    reached = trailing(curves) >= np.array(list(GOALS.values()))
    return np.where(reached.any(axis=1), reached.argmax(axis=1) + WINDOW, STEPS + 1)


def standard_error(values: np.ndarray) -> np.ndarray:
    """Over seeds, axis 0; NaN for one seed."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    return values.std(axis=0, ddof=1) / np.sqrt(len(values))


def _cells(values: np.ndarray, form: str) -> list[str]:
    """Mean ± standard error of every column of [seeds, columns]."""
    pairs = zip(values.mean(axis=0), standard_error(values))
    return [f"{mean:{form}}" + ("" if np.isnan(error) else f" ± {error:{form.lstrip('+')}}") for mean, error in pairs]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ends_table(curves: Curves) -> str:
    """End values and steps to the goals."""
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
    """Paired differences of the mean over all steps."""
    rows = []
    for (setting, method), runs in curves.items():
        if method != "gdpo":
            gap = curves[setting, "gdpo"].mean(axis=1) - runs.mean(axis=1)
            rows.append([SETTINGS[setting][0], f"GDPO minus {METHODS[method][0]}", *_cells(gap, "+.3f")])
    return _table(["setting", "", *FLAGS], rows)


def headline(curves: Curves) -> str:
    """What the settings show, with their reservations, in sentences filled in from the numbers."""
    to_all = {m: _cells(steps_to(curves["scaled", m]), ".1f")[3] for m in ("gdpo", "grpo", "control")}
    end = {m: _cells(trailing(curves["scaled", m])[:, -1], ".3f")[0] for m in ("gdpo", "grpo")}
    text = (
        "With C in {-3, 3} and L paid only if C, GDPO has all three right in 40 % of the samples after "
        f"{to_all['gdpo']} steps, GRPO on the raw scales after {to_all['grpo']}, GRPO with weights chosen by hand "
        f"after {to_all['control']} ({STEPS + 1}: not within {STEPS}). Correctness ends at {end['gdpo']} with GDPO "
        f"and {end['grpo']} with GRPO."
    )
    if ("equal", "gdpo") in curves:
        gap = _cells(curves["equal", "gdpo"].mean(axis=1) - curves["equal", "grpo"].mean(axis=1), "+.3f")
        text += (
            f" With rewards of equal scale GDPO minus GRPO is {gap[0]} in C and {gap[3]} in All, averaged over the run."
        )
    return text


def report(curves: Curves, complete: dict[str, list[int]], command: str) -> str:
    """The whole result as Markdown."""
    seeds = "; ".join(f"{', '.join(map(str, found))} ({SETTINGS[setting][0]})" for setting, found in complete.items())
    about = (
        f"Made by `{command}`, seeds {seeds}. Each run is the real trainer on a model of 224,256 parameters after 250 "
        f"warm-up steps: {STEPS} steps of 16 prompts x 8 samples, learning rate 1.5e-4, one update a step, no KL. "
        f"Values are raw flags of the training batches, at the end the mean of the last {WINDOW} steps. ± is the "
        "standard error over so few seeds that it is itself uncertain."
    )
    limits = (
        "What this does not show: that GDPO learns correctness faster, or finds what the model lacks (the warm-up "
        "taught sorting; reinforcement selects it). Equal scales, or weights that undo the scales, leave GDPO little "
        "to gain; and where a larger scale was meant as priority, GDPO takes it away: use weights for that."
    )
    paired = f"Paired differences of the mean over all {STEPS} steps (same seed, same model, same prompts):"
    texts = [
        "# GDPO against GRPO on a CPU",
        _wrapped(headline(curves)),
        _wrapped(about),
        ends_table(curves),
        paired,
    ] + [differences_table(curves), _wrapped(limits), _wrapped(LEARNING_RATE_REMARK)]
    return "\n\n".join(texts) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def draw(curves: Curves, path: Path) -> None:
    """Four panels a setting, one line a method: mean over seeds and a band of one standard error."""
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
    for place, (band, setting) in enumerate(zip(bands, settings)):
        count = len(curves[setting, "gdpo"])
        title = f"Rewards: {SETTINGS[setting][0]}" + ("" if setting == "scaled" else ", all three alike")
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
            if place == len(settings) - 1:
                axes.set_xlabel("step")
            if k == 0:
                axes.set_ylabel("share of samples")
    note = f"mean of the last {WINDOW} steps; band: one standard error over the seeds"
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False, title=note
    )
    figure.savefig(path, dpi=120)


def main() -> int:
    """Command line; see the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, the first setting with its control")
    parser.add_argument("--seeds", type=int, help="number of seeds, from 0 on (3; 2 with --quick)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    parser.add_argument(
        "--out", type=Path, default=Path("results/gdpo_vs_grpo"), help="folder of runs and results (%(default)s)"
    )
    parser.add_argument("--report", action="store_true", help="run nothing; report what is finished")
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
