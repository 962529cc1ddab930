"""Rates measured by runs: what their metrics and samples say about the speed of this code on that machine.

Every step of every run is one observation of each phase: its seconds, its units and its ideal seconds at the lengths
that were sampled. Where observations differ enough in kind, both coefficients of a phase are fitted; otherwise the
assumed ones are scaled together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Callable, Sequence

import numpy as np

from gdpo_nemo.config.saved_config import load_saved_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.rollouts import read_columns, rollout_files, rollout_path
from gdpo_nemo.observe.run_files import is_number
from gdpo_nemo.planning.hardware import Device, Phase, Rates
from gdpo_nemo.planning.shape import Shape, model_shape
from gdpo_nemo.planning.simulation_records import Measured
from gdpo_nemo.planning.speed import Lengths, Work, generation_work, sync_work, training_work

WARM_UP = 1
"""Steps at the start of each run that are not counted."""
_MEASURED = ("time/rollout", "time/train", "time/sync", "time/idle", "rollout/tokens")
_DIVIDES = ("time/rollout", "time/train", "time/sync", "rollout/tokens")
_LONGEST = 1e12
"""Seconds of a phase or tokens of a step that are taken for a measurement."""
_SPREAD = 1.3
"""The ratio of ideal seconds to units has to vary by this factor before both coefficients are fitted."""


@dataclass(frozen=True)
class Observation:
    """One phase of one step."""

    work: Work
    seconds: float


@dataclass
class Run:
    """A finished run: its config, and per step the metrics and the lengths of its samples."""

    name: str
    config: Config
    shape: Shape
    rows: list[dict[str, Any]]
    lengths: list[Lengths]


def read_run(folder: str | Path, option: str = "--calibrate") -> Run:
    """The run in ``folder``, which ``option`` of the command line names.

    Raises:
        ConfigError: it holds no run, too few steps, no samples, or a model whose shape is not known here.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{option}: {folder} holds no run (no config.yaml)")
    config = load_saved_config(folder / "config.yaml")
    rows = read_metrics(folder)
    rows = [row for row in rows if "time/train" in row][WARM_UP:]
    if not rows:
        raise ConfigError(f"{option}: {folder} has fewer than {WARM_UP + 1} steps in metrics.jsonl")
    for row in rows:
        _check_times(row, f"{option}: {folder}/metrics.jsonl")
    shape = model_shape(config)
    if shape is None:
        raise ConfigError(f"{option}: the model {config.policy.model_name} of {folder} is not here")
    return Run(str(folder), config, shape, rows, [_lengths(folder, row, option) for row in rows])


def _check_times(row: dict[str, Any], where: str) -> None:
    """Refuse a row whose times or tokens rates cannot be computed from. Raises ConfigError."""
    for name in _MEASURED:
        value = row.get(name, 1.0)
        if not is_number(value) or not 0 <= value <= _LONGEST:
            raise ConfigError(
                f"{where}: {name} of step {row['step']} must be a number from 0 to {_LONGEST:g} ({value})"
            )
        if not value and name in _DIVIDES:
            raise ConfigError(f"{where}: {name} of step {row['step']} must be greater than 0")


def _lengths(folder: Path, row: dict[str, Any], option: str) -> Lengths:
    prompts, completions = _sampled(folder, row, option)
    return Lengths(float(np.mean(prompts)), float(np.mean(completions)), float(max(completions)))


def _sampled(folder: Path, row: dict[str, Any], option: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the prompts and of the completions of a step's samples."""
    import pyarrow.compute as pc

    # Of older runs step_*.jsonl.
    path = dict(rollout_files(folder)).get(row["step"], rollout_path(folder, row["step"]))
    try:
        table = read_columns(path, ["prompt_ids", "completion_ids"])
        prompts, completions = (pc.list_value_length(column).to_numpy() for column in table.columns)
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{option}: {path} is not a file of rollouts ({type(error).__name__}: {error})") from None
    if not len(completions):
        raise ConfigError(f"{option}: {path} is empty")
    return prompts, completions


def sampled_lengths(run: Run) -> Measured:
    """The completions' lengths of every step of a run, as a distribution."""
    lengths = [_sampled(Path(run.name), row, "--run")[1] for row in run.rows]
    return Measured(tuple(float(tokens) for step in lengths for tokens in step))


def calibrate(runs: Sequence[Run], device: Device, start: Rates) -> Rates:
    """Rates fitted to the steps of ``runs``; what they cannot tell stays as in ``start``."""

    def phase(name: str, work: Callable[[Run, Lengths], Work], initial: Phase) -> Phase:
        seen = [
            Observation(work(run, lengths), row[name])
            for run in runs
            for row, lengths in zip(run.rows, run.lengths)
            if name in row
        ]
        return fit(seen, initial) if seen else initial

    def share(value: Callable[[Config, Lengths], float]) -> float:
        return median(value(run.config, lengths) for run in runs for lengths in run.lengths)

    return replace(
        start,
        generation=phase(
            "time/rollout", lambda run, x: generation_work(run.config, run.shape, device, x), start.generation
        ),
        training=phase("time/train", lambda run, x: training_work(run.config, run.shape, device, x), start.training),
        sync=phase("time/sync", lambda run, x: sync_work(run.config, run.shape, device), start.sync),
        verify=_exposed_verification(runs),
        completion_share=share(lambda config, x: x.completion / config.policy.generation.max_new_tokens),
        longest_share=share(lambda config, x: x.longest / config.policy.generation.max_new_tokens),
        prompt_share=share(
            lambda config, x: (
                x.prompt / (config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens)
            )
        ),
        measured=[run.name for run in runs],
    )


def _exposed_verification(runs: Sequence[Run]) -> float:
    """Seconds per sample by which on-policy steps waited longer than generation took."""
    rows = [
        (row, x)
        for run in runs
        if not run.config.rollout.max_staleness
        for row, x in zip(run.rows, run.lengths)
        if all(name in row for name in ("time/idle", "time/rollout", "rollout/tokens"))
    ]
    waits = [max(0.0, row["time/idle"] - row["time/rollout"]) * x.completion / row["rollout/tokens"] for row, x in rows]
    return median(waits) if waits else 0.0


def fit(observations: Sequence[Observation], start: Phase) -> Phase:
    """The phase with the smallest mean absolute relative error, which a few disturbed steps move little."""
    units = np.array([o.work.units for o in observations])
    ideal = np.array([o.work.ideal for o in observations])
    seconds = np.array([o.seconds for o in observations])
    kinds = ideal / units
    if len(observations) > 2 and kinds.max() > _SPREAD * kinds.min():
        fixed, factor = _least_absolute(np.stack([units, ideal], axis=1) / seconds[:, None])
        if fixed >= 0 and factor >= 0:
            return Phase(fixed, factor)
    scale = float(np.median(seconds / (start.fixed * units + start.factor * ideal)))
    return Phase(start.fixed * scale, start.factor * scale)


def _least_absolute(table: np.ndarray, rounds: int = 50) -> tuple[float, float]:
    """x that minimises the sum of |table x - 1|, by least squares whose weights follow from the errors of the round
    before."""
    weights = np.ones(len(table))
    for _ in range(rounds):
        x, *_ = np.linalg.lstsq(table * weights[:, None], weights, rcond=None)
        weights = 1 / np.sqrt(np.maximum(np.abs(table @ x - 1), 1e-6))
    return float(x[0]), float(x[1])
