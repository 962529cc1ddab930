"""Output of ``gdpo-nemo explain-advantages``: a step's rewards, its advantages, and the advantages of summed rewards.

The training code recomputes the advantages from the recorded rewards, so the effect of another config can be seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group as Lines, RenderableType
from rich.table import Table
from rich.text import Text

from gdpo_nemo.algorithms import Advantages
from gdpo_nemo.algorithms.loss_selection import is_import_path
from gdpo_nemo.algorithms.noise import error_rates
from gdpo_nemo.algorithms.rewards import rule_name
from gdpo_nemo.algorithms.rubrics import criterion_id, restored
from gdpo_nemo.algorithms.settings import PRESETS
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.objective_checks import check_recorded_advantages, kl_in_reward
from gdpo_nemo.config.rollout_checks import saves_all_groups
from gdpo_nemo.config.schema import Config, GdpoConfig
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.sample_columns import values_of
from gdpo_nemo.observe.sample_images import RecordedImages, split_images
from gdpo_nemo.observe.samples import read_columns, rollout_files
from gdpo_nemo.rollouts.credit import TurnAdvantages, advantages_of, reward_columns
from gdpo_nemo.rollouts.families import criterion_terms
from gdpo_nemo.tools.interop.rollout_dumps import TRAINERS, read_dump
from gdpo_nemo.utils.errors import ConfigError, nearest
from gdpo_nemo.utils.files import real_path

_EQUAL = 1e-5
"""Tolerance for equal advantages, relative to the largest advantage and above differences caused by epsilon."""
_PAIRS_SHOWN = 3
_CRITERIA_SHOWN = 5
"""Largest number of criteria that are shown of a group."""
_LONGEST_CRITERION = 50
"""Number of characters that are shown of a criterion."""
_COLUMNS = (
    "prompt_id", "sample_index", "environment", "prompt", "completion", "rewards", "outcome", "finish_reason",
    "policy_version", "prompt_ids", "completion_ids", "logprobs", "turns", "loss_mask", "advantage", "turn_tokens",
    "turn_rewards", "thinking_tokens", "criteria", "images",
)  # fmt: skip
"""Columns of a rollout file that are needed to compute and show advantages."""


def explain_step(
    path: str | Path, config_path: str | Path | None, overrides: Sequence[str], shown: int
) -> RenderableType:
    """Explain the advantages in one file of ``rollouts/``. Returns a renderable for a rich console.

    Args:
        config_path: config file. None means the config.yaml of the run that contains the rollout file.
        overrides: config overrides ``section.key=value``.
        shown: number of groups to show as tables. Groups in which summed rewards hide the most differences come first.

    Raises:
        ConfigError: if the file or config does not exist, the file is not a rollout file, or the config in the run
            folder names a custom function.
    """
    path = Path(path)
    if any(override.startswith("gdpo.weighting") for override in overrides):
        raise ConfigError("gdpo.weighting: depends on earlier steps; use gdpo-nemo replay --instead")
    groups, recorded = read_step(path)
    config = load_config(config_path or _run_config_path(path), overrides)
    if config_path is None:
        _refuse_custom_code(config.gdpo, overrides, _run_config_path(path))
    if not any(override.startswith("gdpo.rewards") for override in overrides):
        run_dir = real_path(path).parent.parent
        step = next((step for step, file in rollout_files(run_dir) if file.name == path.name), 0)
        config = with_weights_of(run_dir, step, config)
    check_recorded_advantages(config)
    return _explanation(path, groups, recorded, config, shown)


def with_weights_of(run_dir: Path, step: int, config: Config) -> Config:
    """Replace the weights that a constraint, schedule or rule changes by the weights of a step, from the run's
    metrics."""
    changed = config.gdpo.constraints or config.gdpo.schedules or config.gdpo.weighting
    row = next((row for row in read_metrics(run_dir) if row["step"] == step and "lr" in row), {}) if changed else {}
    weights = {name: row.get(f"reward/{name}/weight", weight) for name, weight in config.gdpo.rewards.items()}
    return replace(config, gdpo=replace(config.gdpo, rewards=weights))


def explain_dump(
    path: str | Path, trainer: str, config_path: str | Path | None, overrides: Sequence[str], shown: int
) -> RenderableType:
    """Explain the advantages in a rollout dump of another trainer. See ``explain_step`` and ``read_dump``.

    Without a config file and without overrides of ``gdpo.rewards``, each component has the weight 1.

    Raises:
        ConfigError: if the trainer is not supported, or the settings require tokens, which dumps do not contain.
    """
    if trainer not in TRAINERS:
        raise ConfigError(
            f"--from: {trainer!r} is not supported; use one of {', '.join(TRAINERS)}. The dumps of NeMo-RL, slime and "
            "prime-rl contain only the sum of the rewards"
        )
    path = Path(path)
    groups, recorded = read_dump(trainer, path)
    if config_path is None and not any(override.startswith("gdpo.rewards") for override in overrides):
        weights = dict.fromkeys(groups[0].trajectories[0].rewards, 1.0)
        overrides = [*overrides, f"gdpo.rewards={json.dumps(weights)}"]
    config = load_config(config_path, overrides)
    gdpo = config.gdpo
    unit = gdpo.options.get("batch_unit", PRESETS[gdpo.preset].batch_unit if gdpo.preset else "sequence")
    if unit == "token" or gdpo.shaping or gdpo.credit == "turn" or kl_in_reward(gdpo):
        raise ConfigError(
            f"{path}: contains no tokens; statistics over tokens, gdpo.shaping, gdpo.credit: turn and "
            "gdpo.kl_in_reward require them"
        )
    # TRL's rewards and advantages are float32 tensors. verl records no advantages.
    return _explanation(path, groups, recorded, config, shown, PRESETS["trl"].epsilon)


COLUMNS_EXPLAINED = (
    "effective: share of the variance of the advantages; dead groups: groups whose samples all have the same reward, "
    "up to a range of 1e-9 x max(1, |reward|); "
    "missing: samples without the reward (None); saturation: position of the mean between "
    "the smallest and the largest reward; term: normalised reward times weight; if summed: advantage of the weighted "
    "sum (TRL: sum_then_normalize)"
)


def _explanation(
    path: Path,
    groups: list[Group],
    recorded: np.ndarray,
    config: Config,
    shown: int,
    float32_epsilon: float | None = None,
) -> RenderableType:
    """Return the diagnostics of a step and tables of its groups.

    Args:
        float32_epsilon: epsilon of the trainer, if it computed the recorded advantages in float32. None: float64.
    """
    if shown < 0:
        raise ConfigError(f"--groups: must be 0 or more, got {shown}")
    _check_components(groups, config.gdpo, path)
    step = _Step(groups, config)
    parts: list[RenderableType] = [
        _heading(path, step),
        Text(step.advantages.diagnostics.describe()),
        Text(COLUMNS_EXPLAINED),
        Text(_agreement(step, recorded, float32_epsilon)),
    ]
    parts += [Text(line) for line in _collapse_lines(step)]
    by_interest = sorted(range(len(groups)), key=lambda g: (-len(step.collapsed_pairs(g)), -step.spread(g), g))
    for group_index in by_interest[:shown]:
        parts += [Text(""), _group_table(step, group_index), *(Text(line) for line in _pair_lines(step, group_index))]
        parts += _criteria_tables(step, group_index)
    return Lines(*parts)


def _refuse_custom_code(gdpo: GdpoConfig, overrides: Sequence[str], beside: Path) -> None:
    """Raise ConfigError if the config in the run folder names a custom function and ``overrides`` do not replace it.

    Viewing the samples of an untrusted folder must not run its code.
    """
    names_by_key = {"gdpo.estimator": [gdpo.estimator], "gdpo.shaping": list(map(rule_name, gdpo.shaping))}
    for key, names in names_by_key.items():
        chosen = any(override.startswith(key + "=") for override in overrides)
        code = [] if chosen else [name for name in names if is_import_path(name)]
        if code:
            raise ConfigError(f"{key}: {beside} names code ({code[0]}); pass --config {beside} to run it")


def _check_components(groups: Sequence[Group], gdpo: GdpoConfig, path: Path) -> None:
    recorded: set[str] = set()
    for group in groups:
        recorded.update(*(t.component_rewards for t in group.trajectories))
    for name, weight in gdpo.rewards.items():
        if weight and name not in recorded:
            raise ConfigError(f"gdpo.rewards.{name}: {path} has no such component{nearest(name, recorded)}")


def read_step(path: Path) -> tuple[list[Group], np.ndarray]:
    """Return the groups of a recorded step and its recorded advantages, which are NaN if they were not recorded.

    A new group starts when the prompt changes or the sample index does not increase. A prompt that was sampled twice in
    a step thus gives two groups.

    Raises:
        ConfigError: if the file cannot be read or is not a rollout file.
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
        raise ConfigError(f"{path}: is not a rollout file ({type(error).__name__}: {error})") from None
    if not groups:
        raise ConfigError(f"{path}: contains no trajectories")
    return groups, table.column("advantage").to_numpy().astype(np.float64)


def _trajectory(record: dict[str, Any]) -> Trajectory:
    texts = record["prompt"], record["environment"]
    images, _ = split_images(RecordedImages().placed(record["images"]), len(record["prompt_ids"]))
    return Trajectory(
        prompt=Prompt(record["prompt_id"], record["prompt_ids"], *texts, images=images),
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
        criteria=restored(json.loads(record["criteria"] or "{}")),
        thinking_tokens=int(np.nan_to_num(np.float64(record["thinking_tokens"] or 0))),
    )


def _run_config_path(path: Path) -> Path:
    config = real_path(path).parent.parent / "config.yaml"
    if not config.is_file():
        raise ConfigError(
            f"{path}: config.yaml not found in its run folder {config.parent}; specify a file with --config"
        )
    return config


class _Step:
    """Shaped rewards of a step, its advantages, and the advantages that GRPO computes from summed rewards."""

    def __init__(self, groups: list[Group], config: Config):
        self.config = config
        self.groups = groups
        self.trajectories = [t for group in groups for t in group.trajectories]
        self.advantages: Advantages | TurnAdvantages = advantages_of(groups, config)
        rates = {name: config.gdpo.noise[name] for name in error_rates(config.gdpo.noise)}
        summing = replace(
            config.gdpo, estimator="grpo", preset=None, options={}, noise=rates, batch_norm=None, epsilon=1e-6
        )
        self.summed = advantages_of(groups, replace(config, gdpo=summing)).values.numpy()
        self.values, self.terms = self.advantages.values.numpy(), self.advantages.components.numpy()
        columns = reward_columns(self.trajectories, config)
        self.weighted = [name for name, weight in config.gdpo.rewards.items() if weight]
        self.rewards = np.stack([columns[name] for name in self.weighted], axis=1)
        self.criterion_terms = criterion_terms(self.advantages.criteria, self.trajectories, config.gdpo.group_by)
        self.columns = list(map(self.advantages.names.index, self.weighted))
        """Columns of the weighted components in ``terms``."""
        self._rows: list[range] = []
        for group in groups:
            start = self._rows[-1].stop if self._rows else 0
            self._rows.append(range(start, start + len(group.trajectories)))

    def rows(self, group_index: int) -> range:
        """Return the row indices of one group."""
        return self._rows[group_index]

    def spread(self, group_index: int) -> float:
        """Return the largest difference between two advantages of a group."""
        return float(np.ptp(self.values[self.rows(group_index)]))

    def collapsed_pairs(self, group_index: int) -> list[tuple[int, int]]:
        """Return pairs of rows that differ in rewards and advantages but have equal advantages from summed rewards."""
        trained = [i for i in self.rows(group_index) if self.trajectories[i].trains]
        pairs = []
        for i, j in combinations(trained, 2):
            has_equal_rewards = np.array_equal(self.rewards[i], self.rewards[j], equal_nan=True)
            has_equal_rewards &= self._verdicts(i) == self._verdicts(j)
            if not has_equal_rewards and _same(self.summed, i, j) and not _same(self.values, i, j):
                pairs.append((i, j))
        return pairs

    def _verdicts(self, row: int) -> dict[str, float | None]:
        """Return the rewards of a row's criteria, in which a missing reward is None."""
        rewards = self.trajectories[row].rewards
        found = {}
        for name in self.trajectories[row].criteria:
            value = rewards.get(name)
            found[name] = None if value is None or np.isnan(value) else value
        return found


def _same(values: np.ndarray, i: int, j: int) -> bool:
    return bool(abs(values[i] - values[j]) <= _EQUAL * max(np.abs(values).max(), 1e-12))


def _heading(path: Path, step: _Step) -> Text:
    gdpo = step.config.gdpo
    weights = " + ".join(f"{gdpo.rewards[name]:g} {name}" for name in step.weighted)
    variant = f", preset {gdpo.preset}" if gdpo.preset else ""
    counts = f"{len(step.groups)} group{'s' * (len(step.groups) > 1)}, {len(step.trajectories)} samples"
    return Text(f"{path.name}: {counts}; {weights} by {gdpo.estimator}{variant}\n", style="bold")


_FLOAT64_GAP = 1e-6
"""Largest difference between equal advantages that were computed in float64."""


def _agreement(step: _Step, recorded: np.ndarray, float32_epsilon: float | None) -> str:
    """Describe whether the recorded advantages agree with the recomputed advantages."""
    known = np.isfinite(recorded)
    if not known.any():
        return "The file does not contain advantages, so they are computed from its rewards."
    gaps = np.abs(step.values - recorded)[known]
    if gaps.max() <= _FLOAT64_GAP:
        return "The run recorded the same advantages."
    if float32_epsilon is not None and (gaps <= _float32_errors(step, float32_epsilon)[known]).all():
        return f"The run recorded the same advantages, up to the rounding of float32 ({gaps.max():.2g})."
    if saves_all_groups(step.config):
        reason = "the run used another estimator, preset, epsilon or weights"
    else:
        reason = "the file contains only some groups of the batch"
    return f"The advantages recorded by the run differ by up to {gaps.max():.3g}: {reason}."


def _float32_errors(step: _Step, epsilon: float) -> np.ndarray:
    """Return the rounding errors to expect of a trainer that computes the advantages in float32: [samples].

    torch adds n numbers pairwise, so the mean of n rewards of size M has an error of about log2(n) u M, with the unit
    roundoff u, and a z-score has twice this error divided by the standard deviation. In a group of equal rewards, it is
    divided by epsilon, unless the sums are exact. The mean and the deviation of the batch add their errors.
    """

    def rounding(count: int) -> float:
        return float(np.finfo(np.float32).eps * (1 + np.log2(count)))  # eps is 2 u

    weights = np.array([abs(step.config.gdpo.rewards[name]) for name in step.weighted])
    errors = np.zeros(len(step.trajectories))
    for group_index in range(len(step.groups)):
        rows = list(step.rows(group_index))
        rewards, count = step.rewards[rows], len(rows)
        low, high = (np.where(np.isnan(rewards), end, rewards) for end in (np.inf, -np.inf))
        spread = high.max(axis=0) - low.min(axis=0)  # -inf if all rewards are missing
        size = np.abs(np.nan_to_num(rewards)).max(axis=0)
        sums = size * np.arange(1, count + 1)[:, None]
        exact = (sums.astype(np.float32) == sums).all(axis=0)
        gain = np.ptp(step.terms[rows][:, step.columns], axis=0) / np.where(spread > 0, spread, 1.0)
        gain = np.where(spread > 0, gain, np.where(exact, 0.0, weights / epsilon))
        errors[rows] = rounding(count) * (size * gain).sum()
    sizes = 1 + np.abs(step.values)
    scaled = errors + np.sqrt((errors**2).mean()) * sizes
    scale = step.advantages.scale if isinstance(step.advantages, Advantages) else 1.0  # dumps contain no turns
    return np.asarray(scaled * scale + rounding(len(errors)) * sizes)


def _collapse_lines(step: _Step) -> list[str]:
    pairs = [len(step.collapsed_pairs(group_index)) for group_index in range(len(step.groups))]
    if not any(pairs):
        return ["Summing the rewards would distinguish the same pairs of samples as these advantages."]
    return [
        f"Summing the rewards would give the same advantage to {sum(pairs)} pairs of samples that these advantages "
        f"distinguish, in {sum(map(bool, pairs))} of {len(pairs)} groups."
    ]


def _group_table(step: _Step, group_index: int) -> Table:
    """Return a table of rewards, weighted terms and advantage for each sample of a group."""
    table = Table(title=f"prompt {step.groups[group_index].prompt.id}", title_justify="left", title_style="bold")
    table.add_column("sample", justify="right")
    for name in step.weighted:
        table.add_column(name, justify="right")
    for name in step.weighted:
        table.add_column(f"{name}\nterm", justify="right")
    table.add_column("advantage", justify="right", style="bold")
    table.add_column("if summed", justify="right")
    table.add_column("outcome")
    for i in step.rows(group_index):
        trajectory = step.trajectories[i]
        rewards = ["-" if np.isnan(value) else f"{value:g}" for value in step.rewards[i]]
        terms = [f"{step.terms[i, k]:+.3f}" for k in step.columns]
        ends = [f"{step.values[i]:+.4f}", f"{step.summed[i]:+.4f}", str(trajectory.outcome)]
        table.add_row(str(trajectory.sample_index), *rewards, *terms, *ends)
    return table


def _criteria_tables(step: _Step, group_index: int) -> list[RenderableType]:
    """Return a table of the criteria with the largest terms in a group. Empty without criteria."""
    rows = step.rows(group_index)
    criteria = step.trajectories[rows.start].criteria
    terms = {}
    for name in criteria:
        terms[name] = np.array([step.criterion_terms[i].get(name, 0.0) for i in rows])
    order = sorted(criteria, key=lambda name: -np.abs(terms[name]).max())
    if not order:
        return []
    table = Table(title=f"{min(len(order), _CRITERIA_SHOWN)} of {len(order)} criteria", title_justify="left")
    for head in ("criterion", "weight", "required", "mean", "missing", "smallest term", "largest term"):
        table.add_column(head, justify="left" if head == "criterion" else "right")
    for name in order[:_CRITERIA_SHOWN]:
        verdicts = [step.trajectories[i].rewards.get(name) for i in rows]
        known = [value for value in verdicts if value is not None and not np.isnan(value)]
        text = f"{criterion_id(name)}: {criteria[name].text}"
        table.add_row(
            Text(text if len(text) <= _LONGEST_CRITERION else f"{text[:_LONGEST_CRITERION]}..."),
            f"{criteria[name].weight:g}",
            "yes" if criteria[name].required else "",
            f"{np.mean(known):.3f}" if known else "-",
            str(len(rows) - len(known)),
            f"{terms[name].min():+.3f}",
            f"{terms[name].max():+.3f}",
        )
    return [table]


def _pair_lines(step: _Step, group_index: int) -> list[str]:
    """Describe the first few pairs of samples that summed rewards would not distinguish."""
    pairs = step.collapsed_pairs(group_index)
    lines = []
    for i, j in pairs[:_PAIRS_SHOWN]:
        samples = " and ".join(f"{step.trajectories[k].sample_index} ({_rewards(step, k)})" for k in (i, j))
        advantages = f"{step.values[i]:+.4f} and {step.values[j]:+.4f}"
        lines.append(f"  samples {samples}: {advantages}; summed, both {step.summed[i]:+.4f}")
    if len(pairs) > _PAIRS_SHOWN:
        lines.append(f"  and {len(pairs) - _PAIRS_SHOWN} more pairs")
    return lines


def _rewards(step: _Step, row: int) -> str:
    values = ("missing" if np.isnan(value) else f"{value:g}" for value in step.rewards[row])
    return ", ".join(f"{name} {value}" for name, value in zip(step.weighted, values))
