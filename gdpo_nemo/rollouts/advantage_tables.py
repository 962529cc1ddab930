"""What ``gdpo-nemo explain-advantages`` prints: a recorded step's rewards, the advantages they gave, and what a sum
hides.

The advantages are computed again from the recorded rewards, by the code that trains, so another config answers "what
if".
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, Sequence

import numpy as np
from rich.console import Group as Lines, RenderableType
from rich.table import Table
from rich.text import Text

from gdpo_nemo.algorithms import Advantages
from gdpo_nemo.algorithms.own_functions import is_place
from gdpo_nemo.algorithms.rewards import rule_name
from gdpo_nemo.config.algorithm_choice import has_value_head
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.messages import nearest
from gdpo_nemo.config.objective_checks import kl_in_reward
from gdpo_nemo.config.reading import real_path
from gdpo_nemo.config.reuse_checks import saves_all_groups
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.observe.rollouts import read_columns
from gdpo_nemo.observe.sample_columns import values_of
from gdpo_nemo.rollouts.learning import advantages_of, reward_columns
from gdpo_nemo.rollouts.turn_credit import TurnAdvantages

_EQUAL = 1e-5
"""Advantages closer than this, relative to the largest, count as equal: epsilon sets them apart by less."""
_PAIRS_SHOWN = 3
_COLUMNS = (
    "prompt_id", "sample_index", "environment", "prompt", "completion", "rewards", "outcome", "finish_reason",
    "policy_version", "prompt_ids", "completion_ids", "logprobs", "turns", "loss_mask", "advantage", "turn_tokens",
    "turn_rewards",
)  # fmt: skip
"""What advantages are computed from, and what is shown of it."""


def explain_step(
    path: str | Path, config_path: str | Path | None, overrides: Sequence[str], shown: int
) -> RenderableType:
    """The explanation of one file of ``rollouts/``, for a rich console.

    Args:
        config_path: None takes the config.yaml of the run that the file lies in.
        overrides: ``section.key=value`` changes to that config.
        shown: groups whose tables are shown; those in which the sum hides most come first.

    Raises:
        ConfigError: if there is no such file or config, if the file was not written by a run, or if the config beside
            the file names custom code.
    """
    path = Path(path)
    groups, recorded = read_step(path)
    config = load_config(config_path or _config_beside(path), overrides)
    if config_path is None:
        _check_runs_no_code(config, overrides, _config_beside(path))
    if kl_in_reward(config):
        raise ConfigError("gdpo.kl_in_reward: needs log-probs of the starting model, which rollouts do not record")
    if has_value_head(config):
        raise ConfigError("algorithm.type: ppo's advantages are of a value head, which rollouts do not record")
    if shown < 0:
        raise ConfigError(f"--groups: must be 0 or more, got {shown}")
    _check_recorded(groups, config, path)
    step = _Step(groups, config)
    parts: list[RenderableType] = [
        _heading(path, step),
        Text(step.ours.diagnostics.describe()),
        Text(_agreement(step, recorded)),
    ]
    parts += [Text(line) for line in _collapse_lines(step)]
    by_interest = sorted(range(len(groups)), key=lambda g: (-len(step.collapsed(g)), -step.spread(g), g))
    for place in by_interest[:shown]:
        parts += [Text(""), _group_table(step, place), *(Text(line) for line in _pair_lines(step, place))]
    return Lines(*parts)


def _check_runs_no_code(config: Config, overrides: Sequence[str], beside: Path) -> None:
    """Refuse custom functions that only the config beside the samples names: a folder from elsewhere must not get its
    code run because its samples are looked at. Raises ConfigError."""
    named = {"gdpo.estimator": [config.gdpo.estimator], "gdpo.shaping": list(map(rule_name, config.gdpo.shaping))}
    for key, names in named.items():
        chosen = any(override.startswith(key + "=") for override in overrides)
        code = [] if chosen else [name for name in names if is_place(name)]
        if code:
            raise ConfigError(f"{key}: {beside} names code ({code[0]}); pass --config {beside} to run it")


def _check_recorded(groups: Sequence[Group], config: Config, path: Path) -> None:
    recorded = {name for group in groups for t in group.trajectories for name in t.rewards}
    for name, weight in config.gdpo.rewards.items():
        if weight and name not in recorded:
            raise ConfigError(f"gdpo.rewards.{name}: {path} has no such component{nearest(name, recorded)}")


def read_step(path: Path) -> tuple[list[Group], np.ndarray]:
    """The groups of a recorded step, and the advantages that were recorded (NaN where none was).

    A group ends where the prompt changes or the samples are counted from the start again, so that a prompt that was
    drawn twice in a step stays two groups.

    Raises:
        ConfigError: the file cannot be read or is not one of rollouts.
    """
    groups: list[Group] = []
    try:
        table = read_columns(path, _COLUMNS)
        for row in zip(*(values_of(table.column(name)) for name in _COLUMNS)):
            trajectory = _trajectory(dict(zip(_COLUMNS, row)))
            last = groups[-1].trajectories[-1] if groups else None
            if last is None or last.prompt.id != trajectory.prompt.id or last.sample_index >= trajectory.sample_index:
                groups.append(Group(trajectory.prompt, []))
            groups[-1].trajectories.append(trajectory)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: is not a file of rollouts ({type(error).__name__}: {error})") from None
    if not groups:
        raise ConfigError(f"{path}: holds no trajectory")
    return groups, table.column("advantage").to_numpy().astype(np.float64)


def _trajectory(record: dict[str, Any]) -> Trajectory:
    for name in ("prompt_ids", "completion_ids", "rewards"):
        if record[name] is None:
            raise ValueError(f"{name} is null")
    return Trajectory(
        prompt=Prompt(record["prompt_id"], record["prompt_ids"], record["prompt"], record["environment"]),
        sample_index=record["sample_index"],
        completion_ids=record["completion_ids"],
        logprobs=record["logprobs"],
        policy_version=record["policy_version"],
        text=record["completion"],
        finish_reason=record["finish_reason"],
        rewards=record["rewards"],
        outcome=Outcome(record["outcome"]),
        loss_mask=record["loss_mask"],
        turns=record["turns"],
        turn_tokens=tuple(map(int, record["turn_tokens"] if record["turn_tokens"] is not None else ())),
        turn_rewards=tuple(json.loads(record["turn_rewards"] or "[]")),
    )


def _config_beside(path: Path) -> Path:
    config = real_path(path).parent.parent / "config.yaml"
    if not config.is_file():
        raise ConfigError(f"{path}: no config.yaml in its run folder {config.parent}; give one with --config")
    return config


class _Step:
    """A step's rewards as shaped, its advantages, and those of the same rewards summed (GRPO)."""

    def __init__(self, groups: list[Group], config: Config):
        self.config = config
        self.groups = groups
        self.trajectories = [t for group in groups for t in group.trajectories]
        self.ours: Advantages | TurnAdvantages = advantages_of(groups, config)
        summing = replace(config.gdpo, estimator="grpo", preset=None, options={}, batch_norm=None, epsilon=1e-6)
        self.summed = advantages_of(groups, replace(config, gdpo=summing)).values.numpy()
        self.values, self.terms = self.ours.values.numpy(), self.ours.components.numpy()
        columns = reward_columns(self.trajectories, config)
        self.weighted = [name for name, weight in config.gdpo.rewards.items() if weight]
        self.rewards = np.stack([columns[name] for name in self.weighted], axis=1)
        ends = np.cumsum([len(group.trajectories) for group in groups])
        self._rows = [range(end - len(group.trajectories), end) for end, group in zip(ends, groups)]

    def rows(self, place: int) -> range:
        """Rows of one group."""
        return self._rows[place]

    def spread(self, place: int) -> float:
        """Largest difference between two advantages of a group."""
        return float(np.ptp(self.values[self.rows(place)]))

    def collapsed(self, place: int) -> list[tuple[int, int]]:
        """Pairs of rows whose rewards differ and whose advantages do, though the summed rewards give them one value."""
        return [
            (i, j)
            for i, j in combinations([i for i in self.rows(place) if self.trajectories[i].trains], 2)
            if not np.array_equal(self.rewards[i], self.rewards[j], equal_nan=True)
            and _same(self.summed, i, j)
            and not _same(self.values, i, j)
        ]


def _same(values: np.ndarray, i: int, j: int) -> bool:
    return bool(abs(values[i] - values[j]) <= _EQUAL * max(np.abs(values).max(), 1e-12))


def _heading(path: Path, step: _Step) -> Text:
    gdpo = step.config.gdpo
    weights = " + ".join(f"{gdpo.rewards[name]:g} {name}" for name in step.weighted)
    variant = f", preset {gdpo.preset}" if gdpo.preset else ""
    counts = f"{len(step.groups)} group{'s' * (len(step.groups) > 1)}, {len(step.trajectories)} samples"
    return Text(f"{path.name}: {counts}; {weights} by {gdpo.estimator}{variant}\n", style="bold")


def _agreement(step: _Step, recorded: np.ndarray) -> str:
    """Whether the run computed what is shown here."""
    known = np.isfinite(recorded)
    if not known.any():
        return "The file records no advantages; these are computed from its rewards."
    gap = np.abs(step.values - recorded)[known].max()
    if gap <= 1e-6:
        return "The advantages recorded by the run are these."
    why = (
        "it ran with another config" if saves_all_groups(step.config) else "the file has some groups of its batch only"
    )
    return f"The advantages recorded by the run are others, by up to {gap:.3g}: {why}."


def _collapse_lines(step: _Step) -> list[str]:
    pairs = [len(step.collapsed(place)) for place in range(len(step.groups))]
    if not any(pairs):
        return ["Summing the rewards would have kept every pair of samples apart that these advantages keep apart."]
    return [
        f"Summing the rewards would have given one advantage to {sum(pairs)} pairs of samples that these keep apart, "
        f"in {sum(map(bool, pairs))} of {len(pairs)} groups."
    ]


def _group_table(step: _Step, place: int) -> Table:
    """Rewards, weighted terms and advantage of every sample of a group."""
    table = Table(title=f"prompt {step.groups[place].prompt.id}", title_justify="left", title_style="bold")
    table.add_column("sample", justify="right")
    for name in step.weighted:
        table.add_column(name, justify="right")
    for name in step.weighted:
        table.add_column(f"{name}\nterm", justify="right")
    table.add_column("advantage", justify="right", style="bold")
    table.add_column("if summed", justify="right")
    table.add_column("outcome")
    columns = [step.ours.names.index(name) for name in step.weighted]
    for i in step.rows(place):
        trajectory = step.trajectories[i]
        rewards = ["-" if np.isnan(value) else f"{value:g}" for value in step.rewards[i]]
        terms = [f"{step.terms[i, k]:+.3f}" for k in columns]
        ends = [f"{step.values[i]:+.4f}", f"{step.summed[i]:+.4f}", str(trajectory.outcome)]
        table.add_row(str(trajectory.sample_index), *rewards, *terms, *ends)
    return table


def _pair_lines(step: _Step, place: int) -> list[str]:
    """The first few pairs that the sum would not have told apart."""
    pairs = step.collapsed(place)
    lines = [
        f"  samples {step.trajectories[i].sample_index} ({_rewards(step, i)}) and {step.trajectories[j].sample_index} "
        f"({_rewards(step, j)}): {step.values[i]:+.4f} and {step.values[j]:+.4f}; summed, both {step.summed[i]:+.4f}"
        for i, j in pairs[:_PAIRS_SHOWN]
    ]
    return lines + [f"  and {len(pairs) - _PAIRS_SHOWN} more pairs"] * (len(pairs) > _PAIRS_SHOWN)


def _rewards(step: _Step, row: int) -> str:
    values = ("missing" if np.isnan(value) else f"{value:g}" for value in step.rewards[row])
    return ", ".join(f"{name} {value}" for name, value in zip(step.weighted, values))
