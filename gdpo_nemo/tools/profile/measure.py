"""Measurements of ``gdpo-nemo profile``: samples of the start model, repeated verification and pass rates of rows.

The run's engines sample, and the run's environments verify, with the settings of the training.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gdpo_nemo.algorithms.component_weights import directions
from gdpo_nemo.algorithms.rubrics import family_name, is_family
from gdpo_nemo.commands.evaluate import sampler, say, without_policy
from gdpo_nemo.config.schema import Config, LoraConfig
from gdpo_nemo.data.records import Group, Outcome, Trajectory
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.tasks.reward_functions import Functions
from gdpo_nemo.observe.installation import require_libraries
from gdpo_nemo.rollouts.credit import reward_columns, with_noise
from gdpo_nemo.rollouts.metrics import check_failures, reward_names
from gdpo_nemo.rollouts.user_functions import load_estimator
from gdpo_nemo.training.inputs import read_inputs
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.files import write_whole
from gdpo_nemo.utils.progress import phase

if TYPE_CHECKING:
    from gdpo_nemo.tools.profile.criteria import CriteriaProfile
    from gdpo_nemo.tools.profile.reward_profile import RewardProfile


@dataclass
class Measured:
    """Result of ``measure``."""

    config: Config
    profile: RewardProfile
    rows: list[dict[str, Any]]
    """One record per row: id, pass rates and mean rewards. See ``row_records``."""
    groups: list[Group]
    tokens: float
    """Mean number of sampled tokens per sample."""
    sampling_s: float
    """Seconds until all samples were complete and verified, without the start of the engines."""
    seconds: dict[str, float]
    """Verification time in seconds per sample, by component. Components of one environment that is not ``functions``
    share its time."""
    failed: int
    """Number of further verifications of a sample that failed."""
    verifier_tokens: dict[str, float]
    """Means of the metrics of verifiers that count tokens, by metric."""
    criteria: dict[str, CriteriaProfile]
    """Profile of the criteria of each family."""


def measure(config: Config, rows: int, group: int | None = None, repeat: int = 2) -> Measured:
    """Sample ``group`` completions for each of the first ``rows`` prompts of the run, and profile their rewards.

    Changes ``config`` in place, so that the engines run without a policy.

    Args:
        group: samples per row. None means ``gdpo.num_generations_per_prompt``, but at least 2.
        repeat: number of further verifications. See ``verify_again``.

    Raises:
        ConfigError: if the config is invalid, or its algorithm does not use rewards.
        RunError: if an engine or environment fails, or no sample has a reward.
    """
    config.gdpo.val_generations_per_prompt = group or max(2, config.gdpo.num_generations_per_prompt)
    config.policy.lora = LoraConfig()  # new adapters do not change the model; an existing one is merged
    without_policy(config)
    resolved = validate(config)
    if not resolved.algorithm.samples or not config.gdpo.rewards:
        raise ConfigError(
            f"algorithm.type: {config.algorithm.type} does not use rewards, so there is nothing to profile"
        )
    require_libraries(config.cluster)
    inputs = read_inputs(resolved, ("train",))
    for line in inputs.alerts:
        say(line)
    prompts = inputs.prompts.batch(0, min(rows, len(inputs.prompts)))
    with sampler(resolved, inputs, "train") as (stream, _):
        say(f"sampling {len(prompts)} prompts x {config.gdpo.val_generations_per_prompt}")
        begin = time.perf_counter()
        with phase("samples", stream.progress):
            groups = stream.evaluate(prompts, as_in_training=True).result()
        sampling_s = time.perf_counter() - begin
    return profile_groups(config, groups, repeat, sampling_s)


def profile_groups(config: Config, groups: Sequence[Group], repeat: int, sampling_s: float) -> Measured:
    """Verify the samples of the groups ``repeat`` more times, and profile their rewards.

    Args:
        groups: verified groups.
        sampling_s: see ``Measured``.

    Raises:
        RunError: if too many verifications failed, an environment fails, or no sample has a reward.
    """
    from gdpo_nemo.tools.profile.criteria import profile_criteria
    from gdpo_nemo.tools.profile.reward_profile import profile_rewards

    gdpo = config.gdpo
    better = directions(gdpo.rewards, gdpo.constraints, gdpo.schedules)
    samples = _samples_of(groups)
    check_failures(samples, config.rollout.max_env_failure_share)
    columns = reward_columns(samples, config)
    with phase("repeats"):
        again = verify_again(config, samples, repeat, columns)
    rule = {"estimator": load_estimator(gdpo) or gdpo.estimator, "preset": gdpo.preset, "epsilon": gdpo.epsilon}
    lengths = np.array([t.num_policy_tokens for t in samples])
    try:
        profile = profile_rewards(
            columns,
            np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups]),
            weights=gdpo.rewards,
            valid=np.array([t.trains for t in samples]),
            lengths=lengths,
            repeats=again.rewards,
            repeated=again.verified,
            errors=again.errors,
            better=better,
            rule={**rule, "batch_norm": gdpo.batch_norm, **with_noise(gdpo)},
        )
    except ValueError as error:
        raise RunError(f"profile: {error}") from None
    counted: dict[str, float] = {}
    for name in sorted(set(chain.from_iterable(t.metrics for t in samples))):
        if "tokens" in name:
            counted[name] = float(np.mean([t.metrics.get(name, 0.0) for t in samples]))
    return Measured(
        config,
        profile,
        row_records(groups, columns, gdpo.rewards, better),
        list(groups),
        float(np.mean(lengths)),
        sampling_s,
        again.seconds,
        again.failed,
        counted,
        profile_criteria(groups, again.samples, again.verified),
    )


def _samples_of(groups: Sequence[Group]) -> list[Trajectory]:
    return list(chain.from_iterable(group.trajectories for group in groups))


class Repeated(NamedTuple):
    """Further verifications of the samples."""

    rewards: dict[str, np.ndarray]
    """float64 [verifications, samples] by component. Only those of verified samples count."""
    verified: np.ndarray
    """bool [verifications, samples]. False if the verification failed, or if the environment cannot verify again."""
    failed: int
    """Number of verifications that failed."""
    seconds: dict[str, float]
    """Seconds per sample by component."""
    errors: dict[str, float | None]
    """Standard deviation of a sample's reward over verifications, by component, or of a criterion, by family. None if
    no sample was verified again."""
    samples: list[list[Trajectory]]
    """The samples with the rewards of each verification."""


def verify_again(
    config: Config, samples: Sequence[Trajectory], repeat: int, columns: Mapping[str, np.ndarray]
) -> Repeated:
    """Verify the samples again.

    Each verification uses new environments with another seed, because the random generators of a worker are seeded
    with the run's seed, and because a judge may remember its replies. Each function of an environment ``functions`` is
    verified separately, so its time is known. Environments that play episodes cannot verify a sample again.
    """
    from gdpo_nemo.environments.execution.pools import EnvironmentPools

    originals = [t.rewards for t in samples]
    found: list[list[dict[str, float | None]]] = [list(map(dict, originals)) for _ in range(repeat)]
    verified = np.zeros((repeat, len(samples)), bool)
    failed = 0
    seconds: dict[str, float] = {}
    measured: set[str] = set()
    for name, options in config.env.items():
        environment = load_environment(name, options)
        rows = [i for i, t in enumerate(samples) if t.prompt.environment == name and t.trains]
        if environment.has_turns or environment.plays_with_endpoint or not environment.verifies or not rows:
            continue
        chosen = [replace(samples[i], rewards={}, extra={}, metrics={}) for i in rows]
        measured.update(reward_names([samples[i] for i in rows]))
        verified[:, rows] = True
        for number, i in product(range(repeat), rows):
            found[number][i] = {}
        first = [t for t in chosen if t.prompt.id == chosen[0].prompt.id]
        for part in _parts(environment, options or {}):
            for number in range(repeat):
                limits = config.rollout.env_workers, config.rollout.env_timeout_s, config.run.seed + 1 + number
                with EnvironmentPools({name: part}, *limits) as pool:
                    pool.verify(first)  # starts the workers
                    begin = time.perf_counter()
                    verdicts = pool.verify(chosen)
                    taken = (time.perf_counter() - begin) / len(chosen)
                for component in chain.from_iterable(verdict.component_rewards for verdict in verdicts):
                    seconds[component] = min(taken, seconds.get(component, math.inf))
                for i, verdict in zip(rows, verdicts):
                    found[number][i] |= verdict.rewards
                    verified[number, i] &= verdict.outcome is not Outcome.ENV_FAILED
        for number, i in product(range(repeat), rows):
            if not verified[number, i]:  # the rules of gdpo.shaping need rewards, which do not count
                found[number][i] = dict(samples[i].rewards)
                failed += 1
    # Components that no verifier returns are created by rules of gdpo.shaping.
    measured.update(seconds, columns.keys() - reward_names(samples).keys())
    again = [_with_rewards(samples, rewards) for rewards in found]
    stacked = _stacked_columns(again, measured, config)
    errors = _errors(columns, stacked, samples, found, verified)
    return Repeated(stacked, verified, failed, seconds, errors, again)


def _with_rewards(samples: Sequence[Trajectory], rewards: Sequence[dict[str, float | None]]) -> list[Trajectory]:
    return [replace(sample, rewards=own) for sample, own in zip(samples, rewards)]


def _errors(
    columns: Mapping[str, np.ndarray],
    again: Mapping[str, np.ndarray],
    samples: Sequence[Trajectory],
    found: Sequence[Sequence[Mapping[str, float | None]]],
    verified: np.ndarray,
) -> dict[str, float | None]:
    """Return ``Repeated.errors``."""
    from gdpo_nemo.tools.profile.reward_profile import error_deviation

    errors = {}
    for name, column in again.items():
        if is_family(name):
            errors[name] = error_deviation(_of_criteria(name, samples, found, verified))
        else:
            errors[name] = error_deviation(np.stack([columns[name], *np.where(verified, column, np.nan)]))
    return errors


def _of_criteria(
    family: str,
    samples: Sequence[Trajectory],
    found: Sequence[Sequence[Mapping[str, float | None]]],
    verified: np.ndarray,
) -> np.ndarray:
    """Return the rewards of a family's criteria in all verifications: float64 [1 + verifications, criteria]. NaN if
    missing."""
    values = []
    for i, sample in enumerate(samples):
        for name in sample.criteria:
            if family_name(name) == family:
                again = [rewards[i].get(name) if verified[number, i] else None for number, rewards in enumerate(found)]
                values.append([sample.rewards.get(name), *again])
    return np.array(values, np.float64).T


def _stacked_columns(
    verifications: Sequence[Sequence[Trajectory]], measured: set[str], config: Config
) -> dict[str, np.ndarray]:
    """Return the rewards of the measured components after ``gdpo.shaping``: float64 [verifications, samples]."""
    found: dict[str, list[np.ndarray]] = {}
    for samples in verifications:
        for name, column in reward_columns(samples, config).items():
            if name in measured:
                found.setdefault(name, []).append(column)
    return {name: np.stack(columns) for name, columns in found.items()}


def _parts(environment: Any, options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the options of the environment, or options with a single function each."""
    if not isinstance(environment, Functions):
        return [options]
    return [{**options, "functions": {name: entry}} for name, entry in options["functions"].items()]


def row_records(
    groups: Sequence[Group], columns: Mapping[str, np.ndarray], weights: Mapping[str, float], better: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return one record per group with pass rates. A sample passes a component if it has the best observed value.

    The record has ``pass_rate`` (share of the samples that pass every weighted component that they have), and by
    component ``passes`` and ``rewards`` (mean). A component is absent if no sample has it. ``live`` lists the
    components that vary, and ``tokens`` is the mean length.

    Args:
        better: 1 or -1 by component. See ``passes``.
    """
    from gdpo_nemo.tools.profile.reward_profile import passes

    trained = np.array([t.trains for t in _samples_of(groups)])
    present, passed = {}, {}
    for name, column in columns.items():
        present[name] = ~np.isnan(column) & trained
        passed[name] = np.zeros(len(trained), bool)
        passed[name][present[name]] = passes(column[present[name]], better.get(name, 1))
    records, start = [], 0
    for group in groups:
        part = slice(start, start := start + len(group.trajectories))
        every, scored = np.ones(len(group.trajectories), bool), np.zeros(len(group.trajectories), bool)
        pass_rates, means, live = {}, {}, []
        for name, column in columns.items():
            mask = present[name][part]
            if not mask.any():
                continue
            pass_rates[name] = float(passed[name][part][mask].mean())
            means[name] = float(column[part][mask].mean())
            if np.ptp(column[part][mask]) > 0:
                live.append(name)
            if weights.get(name):
                every &= passed[name][part] | ~mask
                scored |= mask
        records.append(
            {
                "id": group.prompt.id,
                "environment": group.prompt.environment,
                "samples": int(scored.sum()),
                "pass_rate": float(every[scored].mean()) if scored.any() else None,
                "passes": pass_rates,
                "rewards": means,
                "live": live,
                "tokens": float(np.mean([t.num_policy_tokens for t in group.trajectories])),
            }
        )
    return records


def write(out: Path, measured: Measured) -> None:
    """Write ``profile.json``, ``rows.jsonl`` and ``samples.jsonl`` into the folder.

    Raises:
        RunError: if a file cannot be written.
    """
    from gdpo_nemo.observe.samples import write_samples

    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "profile.json", json.dumps(_finite(content(measured)), indent=1) + "\n")
        write_whole(out / "rows.jsonl", "".join(json.dumps(record) + "\n" for record in measured.rows))
        write_samples(out / "samples.jsonl", measured.groups)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror})") from None


def content(measured: Measured) -> dict[str, Any]:
    """Return the content of ``profile.json``."""
    config = measured.config
    return {
        "model": config.policy.model_name,
        "rows": len(measured.rows),
        "samples_per_row": config.gdpo.val_generations_per_prompt,
        "temperature": config.policy.generation.temperature,
        "estimator": config.gdpo.estimator,
        "profile": asdict(measured.profile),
        "criteria": {name: asdict(one) for name, one in measured.criteria.items()},
        "cost": {
            "tokens_per_sample": measured.tokens,
            "sampling_s": measured.sampling_s,
            "verification_s_per_sample": measured.seconds,
            "failed_verifications": measured.failed,
            "verifier_tokens_per_sample": measured.verifier_tokens,
        },
    }


def _finite(value: Any) -> Any:
    """Replace NaN and infinite numbers by None, and named tuples by dictionaries."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return _finite(value._asdict())
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
