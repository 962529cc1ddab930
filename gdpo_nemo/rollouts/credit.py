"""Conversion of rewards to advantages and of trajectories to training sequences, with credit per sequence or turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.algorithms import LossSettings, apply_shaping, token_weights
from gdpo_nemo.algorithms.entropy import clip_cov, kl_cov
from gdpo_nemo.algorithms.loss_selection import reads_staleness
from gdpo_nemo.algorithms.noise import corrected
from gdpo_nemo.algorithms.rewards import creates
from gdpo_nemo.algorithms.rubrics import gates
from gdpo_nemo.config.algorithm_choice import old_logprobs_source
from gdpo_nemo.config.schema import Config, GdpoConfig
from gdpo_nemo.data.contexts import contexts_of
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import Group, Outcome, Trajectory, trajectories_of
from gdpo_nemo.rollouts.families import Family, families_of, group_key, slots_of
from gdpo_nemo.rollouts.metrics import reward_names
from gdpo_nemo.rollouts.user_functions import CustomFunctions, load_estimator, load_shaping_rules
from gdpo_nemo.utils.errors import RunError, first_line

if TYPE_CHECKING:  # A run imports torch only after the start of its processes.
    import torch

    from gdpo_nemo.algorithms import Advantages, Diagnostics


def with_weights(config: Config, weights: Mapping[str, float]) -> Config:
    """Return the config with other weights of some components in ``gdpo.rewards``."""
    if not weights:
        return config
    return replace(config, gdpo=replace(config.gdpo, rewards={**config.gdpo.rewards, **weights}))


def reward_columns(
    trajectories: Sequence[Trajectory], config: Config, functions: CustomFunctions | None = None
) -> dict[str, np.ndarray]:
    """Return the rewards of the trajectories by component, after the correction of ``gdpo.noise`` and ``gdpo.shaping``.

    Each column is float64 [trajectories], with NaN where the component does not apply. Every component with a weight
    has a column, even if no trajectory has a value for this component. The column of a family of criteria contains the
    score of each trajectory (``Family.scores``).

    Args:
        functions: the run's custom functions, for the one call per step that may change their state.

    Raises:
        RunError: if a reward with error rates in ``gdpo.noise`` is neither 0 nor 1.
    """
    columns, families = _criteria_columns(trajectories, config, functions)
    return {name: families[name].scores if name in families else column for name, column in columns.items()}


def _criteria_columns(
    trajectories: Sequence[Trajectory], config: Config, functions: CustomFunctions | None
) -> tuple[dict[str, np.ndarray], dict[str, Family]]:
    """Return the rewards by component, after ``gdpo.shaping``, and the families.

    A column is float64 [trajectories], or [slots, trajectories] for a family.
    """
    families = families_of(trajectories, config.gdpo.group_by)
    columns = {}
    for name in _component_names(trajectories, config.gdpo):
        if name in families:
            columns[name] = families[name].rewards
        else:  # NumPy converts None, a component that does not apply, to NaN.
            columns[name] = np.array([t.rewards.get(name) for t in trajectories], np.float64)
    try:
        columns = corrected(columns, config.gdpo.noise)
    except ValueError as error:
        raise RunError(str(error)) from None
    if not config.gdpo.shaping:
        return columns, families
    groups: dict[object, int] = {}
    shaped: dict[str, np.ndarray] = apply_shaping(
        columns,
        config.gdpo.shaping,
        lengths=np.array([t.num_policy_tokens for t in trajectories]),
        max_length=longest_completion(config),
        thinking=np.array([t.thinking_tokens for t in trajectories]),
        truncated=np.array([t.finish_reason == "length" and t.outcome is not Outcome.OK for t in trajectories]),
        groups=[groups.setdefault(group_key(t, config.gdpo.group_by), len(groups)) for t in trajectories],
        functions=load_shaping_rules(config.gdpo) if functions is None else functions.rules,
    )
    return shaped, {name: family.with_rewards(shaped[name]) for name, family in families.items()}


def _component_names(trajectories: Sequence[Trajectory], gdpo: GdpoConfig) -> list[str]:
    given = reward_names(trajectories)
    # Components that a shaping rule creates are omitted, because a column of NaN would make the result of the rule NaN.
    created = {rule["component"] for rule in gdpo.shaping if creates(rule)}
    names = [*(name for name in gdpo.rewards if name in given or name not in created), *given]
    return list(dict.fromkeys(names))


def advantages_of(
    groups: Sequence[Group],
    config: Config,
    kl: np.ndarray | None = None,
    functions: CustomFunctions | None = None,
) -> Advantages | TurnAdvantages:
    """Compute the advantages of all trajectories of a step, in group order.

    With ``gdpo.credit: turn``, compute the advantages of the turns instead. Components that are not in ``gdpo.rewards``
    get the weight 0, so that the metrics contain these components.

    Args:
        kl: result of ``log_ratios``, required if ``gdpo.kl_in_reward`` is set. Shape: [trajectories].
        functions: the run's custom functions, for the one call per step that may change their state. Without this
            argument, functions must not have state.

    Raises:
        RunError: if no trajectory has a reward with a weight, or a custom estimator fails or returns non-finite values.
    """
    trajectories = trajectories_of(groups)
    ids = trajectory_groups(groups, config.gdpo.group_by)
    valid = np.array([t.trains for t in trajectories])
    if config.gdpo.credit == "turn":
        families = families_of(trajectories, config.gdpo.group_by)
        names = _component_names(trajectories, config.gdpo)
        rows = turn_rows(trajectories, names, config.gdpo.discount, families)
        turn_ids = rows.ids(ids, config.gdpo.turn_baseline)
        of_turns = _compute(
            lambda: (rows.columns, rows.weights),
            turn_ids,
            valid[rows.trajectory],
            rows.tokens,
            config,
            functions,
            trajectory_ids=rows.trajectory if config.gdpo.turn_baseline == "group" else None,
        )
        return TurnAdvantages(rows, of_turns, reward_columns(trajectories, config, functions), valid)
    lengths = np.array([t.num_policy_tokens for t in trajectories])

    def rewards() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        columns, families = _criteria_columns(trajectories, config, functions)
        return slots_of(columns, families), {name: family.trained_weights.T for name, family in families.items()}

    return _compute(rewards, ids, valid, lengths, config, functions, kl=kl)


def _compute(
    rewards: Callable[[], tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]],
    ids: np.ndarray,
    valid: np.ndarray,
    lengths: np.ndarray,
    config: Config,
    functions: CustomFunctions | None,
    *,
    kl: np.ndarray | None = None,
    trajectory_ids: np.ndarray | None = None,
) -> Advantages:
    """Call ``compute_advantages`` with the config's settings, for trajectories or turns.

    Args:
        rewards: function that returns the columns and the weights of the families' criteria, for
            ``compute_advantages``. It is called here because a shaping rule may raise ValueError.

    Raises:
        RunError: if the rewards are invalid or the estimator fails.
    """
    from gdpo_nemo.algorithms import compute_advantages

    gdpo = config.gdpo
    custom = load_estimator(gdpo) if functions is None else functions.estimator
    try:
        columns, criterion_weights = rewards()
        return compute_advantages(
            columns,
            ids,
            weights={name: gdpo.rewards.get(name, 0.0) for name in columns},
            valid=valid,
            lengths=lengths,
            trajectory_ids=trajectory_ids,
            kl=kl,
            kl_coefficient=gdpo.kl_in_reward,
            criterion_weights=criterion_weights,
            family_scale=gdpo.family_scale,
            estimator=custom or gdpo.estimator,
            preset=gdpo.preset,
            batch_norm=gdpo.batch_norm,
            epsilon=gdpo.epsilon,
            **with_noise(gdpo),
        )
    except ValueError as error:
        raise RunError(f"advantages: {error}") from error
    except Exception as error:
        if custom is None:
            raise
        raise RunError(f"gdpo.estimator: {gdpo.estimator} raised {first_line(error)}") from error


def with_noise(gdpo: GdpoConfig) -> dict[str, Any]:
    """Return the options of the estimator, with ``gdpo.noise`` if it is set."""
    return {**gdpo.options, "noise": gdpo.noise} if gdpo.noise else gdpo.options


def trajectory_groups(groups: Sequence[Group], by: str) -> np.ndarray:
    """Return the group of each trajectory with which it is compared (``gdpo.group_by``). Shape: int64
    [trajectories]."""
    return np.repeat(_group_ids(groups, by), [len(group.trajectories) for group in groups])


def _group_ids(groups: Sequence[Group], by: str) -> np.ndarray:
    """Return an id for each group: the index of the group, or of the first group with the same prompt. Shape: int64
    [groups]."""
    if by == "row":
        return np.arange(len(groups))
    first: dict[bytes, int] = {}
    return np.array([first.setdefault(group.prompt.key, index) for index, group in enumerate(groups)])


def log_ratios(trajectories: Sequence[Trajectory], reference: Sequence[np.ndarray]) -> np.ndarray:
    """Return log p_sampler - log p_reference of each trajectory, summed over the tokens that the policy wrote.

    The sum estimates KL(sampler || reference) of a trajectory. The sum is positive if the sampled tokens are more
    likely under the sampler than under the reference. The sum is NaN if no token has both log-probs. Shape: float64
    [trajectories].
    """
    sums = []
    for trajectory, logprobs in zip(trajectories, reference, strict=True):
        gap = trajectory.where_written(trajectory.logprobs - logprobs).astype(np.float64)
        # The nansum of only NaN is 0, which would count as a trajectory without divergence.
        sums.append(np.nan if np.isnan(gap).all() else np.nansum(gap))
    return np.array(sums)


def updates_of(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray | Sequence[float | np.ndarray],
    config: Config,
    version: int | None = None,
    trained: Sequence[bool] | None = None,
) -> list[list[TrainSequence]]:
    """Split the trajectories of a step into optimizer updates and convert them to training sequences.

    A trajectory has several sequences if its turns have several contexts (``data.contexts``). Token weights are
    normalized within each update, over whole trajectories.

    Args:
        advantages: one number or array per trajectory. See ``TrainSequence.advantage``.
        version: version of the weights that the step starts from. If the loss or the off-policy correction reads
            staleness, every token gets its staleness relative to this version.
        trained: one boolean per trajectory. A trajectory with False gets weight 0. If the argument is None,
            ``is_trained`` provides the values.
    """
    loss = config.loss_fn
    size = config.policy.train_global_batch_size or len(trajectories)
    if trained is None:
        trained = [is_trained(t, loss) for t in trajectories]
    updates = []
    for start in range(0, len(trajectories), size):
        part = slice(start, start + size)
        updates.append(_weighted(trajectories[part], advantages[part], trained[part], config, start))
    if version is not None and reads_staleness(loss):
        staleness = [token_staleness(trajectory, version) for trajectory in trajectories]
        for sequence in chain.from_iterable(updates):
            sequence.staleness = staleness[sequence.trajectory][sequence.indices]
    return updates


def choose_by_covariance(
    update: Sequence[TrainSequence], now: Sequence[np.ndarray], loss: LossSettings, seed: Sequence[int]
) -> float:
    """Select the tokens of an update that the loss clip_cov or kl_cov treats separately.

    clip_cov sets the advantage of the selected tokens to 0. kl_cov stores the selection in ``TrainSequence.chosen``.

    Args:
        now: for each sequence, log-probs of its completion under the weights that the update starts from.
        seed: seed of clip_cov's random selection.

    Returns:
        Fraction of the trained tokens that is selected.
    """
    trained = []
    columns = []
    for sequence, logprobs in zip(update, now):
        written = sequence.loss_mask
        mask = np.full(len(sequence.completion_ids), bool(sequence.weight))
        trained.append(mask if written is None else mask & written)
        # Without old log-probs, the weights that the update starts from are the old policy, so the ratio is 1.
        old = logprobs if sequence.old_logprobs is None else sequence.old_logprobs
        columns.append(np.stack([logprobs, sequence.token_advantages(), old])[:, trained[-1]])
    values, advantages, old = np.concatenate(columns, axis=1).astype(np.float64)
    if loss.type == "kl_cov":
        chosen = kl_cov(values, advantages, ratio=loss.kl_cov_ratio)
    else:
        ratio = np.exp(values - old)
        bounded = advantages * ratio.clip(1 - loss.ratio_clip_min, 1 + loss.ratio_clip_max)
        bounds = (loss.clip_cov_lb, loss.clip_cov_ub)
        chosen = clip_cov(
            values, advantages, bounded < advantages * ratio, ratio=loss.clip_cov_ratio, bounds=bounds,
            draw=np.random.default_rng(list(seed)),
        )  # fmt: skip
    ends = np.cumsum([mask.sum() for mask in trained])
    for sequence, mask, chosen_of_sequence in zip(update, trained, np.split(chosen, ends[:-1])):
        selected = np.zeros(len(mask), bool)
        selected[mask] = chosen_of_sequence
        if loss.type == "kl_cov":
            sequence.chosen = selected
        else:
            sequence.advantage = np.where(selected, np.float32(0), sequence.token_advantages())
    return float(chosen.mean()) if len(chosen) else 0.0


def token_staleness(trajectory: Trajectory, version: int) -> np.ndarray:
    """Return the staleness of each token: ``version`` minus the version of the weights that sampled the token.

    The staleness is 0 for tokens that the policy did not write. Shape: int32 [completion tokens].
    """
    spans = trajectory.spans or ((trajectory.policy_version, trajectory.num_policy_tokens),)
    versions, tokens = np.array(spans, np.int64).T
    written = np.repeat(version - versions, tokens).astype(np.int32)
    if trajectory.loss_mask is None:
        return written
    staleness = np.zeros(len(trajectory.completion_ids), np.int32)
    staleness[trajectory.loss_mask] = written
    return staleness


def is_trained(trajectory: Trajectory, loss: LossSettings) -> bool:
    """Return True if the trajectory contributes to the loss.

    The trajectory must be trainable (``Trajectory.trains``). With ``mask_truncated``, truncated trajectories do not
    contribute.
    """
    return trajectory.trains and not (loss.mask_truncated and trajectory.outcome is Outcome.TRUNCATED)


def _advantage(given: float | np.ndarray, indices: np.ndarray | slice) -> float | np.ndarray:
    """Convert a single advantage to a Python float. Return the advantages at ``indices`` of an array with one advantage
    per token."""
    return given[indices] if isinstance(given, np.ndarray) else float(given)


def _weighted(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray | Sequence[float | np.ndarray],
    trained: Sequence[bool],
    config: Config,
    start: int,
) -> list[TrainSequence]:
    """Convert the trajectories of an update, whose first trajectory has the number ``start`` in its step."""
    loss = config.loss_fn
    weights = token_weights(
        [t.num_policy_tokens * bool(keep) for t, keep in zip(trajectories, trained)],
        loss.aggregation,
        constant_length=loss.constant_length or longest_completion(config),
    )
    # Otherwise the trainer computes the old log-probs before the first update of the step.
    from_sampler = old_logprobs_source(config) == "sampler"
    sequences = []
    for number, (t, a, w, keep) in enumerate(zip(trajectories, advantages, weights, trained), start):
        for tokens in contexts_of(t):
            logprobs = t.logprobs[tokens.indices]
            sequences.append(
                TrainSequence(
                    prompt_ids=tokens.prompt_ids,
                    completion_ids=t.completion_ids[tokens.indices],
                    sampler_logprobs=logprobs,
                    advantage=_advantage(a, tokens.indices) if keep else 0.0,
                    weight=float(w),
                    old_logprobs=logprobs if from_sampler else None,
                    loss_mask=tokens.loss_mask,
                    routing=tokens.routing,
                    images=tokens.images,
                    trajectory=number,
                    indices=tokens.indices,
                )
            )
    return sequences


_REST = 1e-12
"""Remainder of an advantage without its terms, relative to the largest term, below which it is rounding noise."""


def _named_terms(
    advantages: Advantages, index: int, row: np.ndarray, families: Mapping[str, Family]
) -> Iterator[tuple[str, float]]:
    """Yield the term of each component or criterion of a trajectory."""
    for name, term in zip(advantages.names, row):
        if name not in families:
            yield name, term
            continue
        terms = advantages.criteria[name][index] * advantages.scale
        yield from zip(families[name].names[index], terms)


def by_span(
    advantages: Advantages, trajectories: Sequence[Trajectory], group_by: str = "row"
) -> list[float | np.ndarray]:
    """Return ``TrainSequence.advantage`` of each trajectory with ``gdpo.credit: span``.

    The advantage of a token is the advantage of its trajectory without the terms of the components that are about other
    tokens. The factor of the batch norm is that of whole trajectories. If the reward of a component depends only on its
    span, the expected gradient is therefore the same as with ``credit: sequence``.

    Args:
        group_by: value of ``gdpo.group_by``, with which the advantages were computed.

    Returns:
        A single number for a trajectory without spans, otherwise float32 [completion tokens].
    """
    values = advantages.values.numpy()
    terms = advantages.components.numpy() * advantages.scale
    noise = _REST * np.abs(terms).max(initial=0.0)
    families = families_of(trajectories, group_by)
    found: list[float | np.ndarray] = []
    for index, (trajectory, value, row) in enumerate(zip(trajectories, values, terms, strict=True)):
        if not trajectory.reward_tokens:
            found.append(float(value))
            continue
        rest = value - row.sum()  # of the KL in the reward and the mean of the batch
        tokens = np.full(len(trajectory.completion_ids), 0.0 if abs(rest) <= noise else rest)
        for name, term in _named_terms(advantages, index, row, families):
            ranges = trajectory.reward_tokens.get(name, ((0, len(tokens)),))
            about = np.zeros(len(tokens), bool)
            for start, end in ranges:
                about[start:end] = True
            tokens[about] += term
        if trajectory.loss_mask is not None:
            tokens[~trajectory.loss_mask] = 0.0
        found.append(tokens.astype(np.float32))
    return found


def longest_completion(config: Config) -> int:
    """Return the maximum number of tokens that the policy may write in one trajectory, over all turns."""
    per_turn = config.policy.generation.max_new_tokens
    turns = config.rollout.turns
    return turns.max_tokens or per_turn * turns.max_turns


@dataclass(frozen=True)
class TurnRows:
    """Table with one row per turn, for all turns of all trajectories."""

    trajectory: np.ndarray
    """Index of the turn's trajectory. Shape: int64 [turns]."""
    turn: np.ndarray
    """Index of the turn in its trajectory. Shape: int64 [turns]."""
    tokens: np.ndarray
    """Number of tokens that the policy wrote in the turn. Shape: int64 [turns]."""
    columns: dict[str, np.ndarray]
    """Discounted return of each turn, by component. Shape: float64 [turns], or [turns, slots] for a family.

    The return is NaN in all turns of a trajectory that does not have the component.
    """
    weights: dict[str, np.ndarray]
    """Weights of the criteria, by family. Shape: float64 [turns, slots]."""

    def ids(self, groups: np.ndarray, baseline: str) -> np.ndarray:
        """Return a group id for each turn. Turns with equal ids are compared with each other. Shape: int64 [turns].

        Args:
            groups: non-negative group id of each trajectory. Shape: int64 [trajectories].
            baseline: value of ``gdpo.turn_baseline``.
        """
        of_group = groups[self.trajectory]
        if baseline == "turn":
            # The factor exceeds every turn index, so different pairs of group and turn get different ids.
            of_group = of_group * (int(self.turn.max()) + 1) + self.turn
        return np.asarray(of_group)


def turn_rows(
    trajectories: Sequence[Trajectory],
    names: Iterable[str],
    discount: float,
    families: Mapping[str, Family] | None = None,
) -> TurnRows:
    """Return the turns of ``trajectories``, with the discounted returns of the components ``names``."""
    tokens = [t.turn_tokens or (t.num_policy_tokens,) for t in trajectories]
    counts = list(map(len, tokens))
    families = families or {}
    of_turn = np.repeat(np.arange(len(trajectories)), counts)
    columns = {}
    for name in names:
        if name in families:
            parts = [_family_returns(t, i, families[name], discount) for i, t in enumerate(trajectories)]
        else:
            parts = [_returns(t, name, count, discount) for t, count in zip(trajectories, counts)]
        columns[name] = np.concatenate(parts)
    return TurnRows(
        trajectory=of_turn,
        turn=np.concatenate(list(map(np.arange, counts))),
        tokens=np.array(list(chain.from_iterable(tokens)), np.int64),
        columns=columns,
        weights={name: family.trained_weights.T[of_turn] for name, family in families.items()},
    )


def _family_returns(trajectory: Trajectory, index: int, family: Family, discount: float) -> np.ndarray:
    """Return the discounted returns of a family's criteria for each turn: float64 [turns, slots]."""
    turns = len(trajectory.turn_tokens) or 1
    returns = np.full((turns, len(family.rewards)), np.nan)
    factors = gates(trajectory.rewards, trajectory.criteria, family.name)
    for slot, name in enumerate(family.names[index]):
        if name in factors:  # the criteria of a group may be those of several rows
            returns[:, slot] = factors[name] * _returns(trajectory, name, turns, discount)
    return returns


def _returns(trajectory: Trajectory, name: str, turns: int, discount: float) -> np.ndarray:
    """Return the discounted return of a component for each turn. Shape: float64 [turns].

    The return is NaN if the trajectory does not have the component.
    """
    total = trajectory.rewards.get(name)
    if total is None:
        return np.full(turns, np.nan)
    found = earned(trajectory, name, turns)
    for turn in range(turns - 2, -1, -1):
        found[turn] += discount * found[turn + 1]
    return found


def earned(trajectory: Trajectory, name: str, turns: int) -> np.ndarray:
    """Return the reward of each turn for a component that the trajectory has. Shape: float64 [turns].

    If no turn has a reward for the component, the last turn gets the trajectory's reward.
    """
    found = [rewards.get(name) for rewards in trajectory.turn_rewards]
    if all(value is None for value in found):
        found = [*[None] * (turns - 1), trajectory.rewards.get(name)]
    return np.array([0.0 if value is None else value for value in found], np.float64)


@dataclass(frozen=True)
class TurnAdvantages:
    """Advantages of all turns of a batch.

    ``values`` and ``components`` have one value per trajectory, as in ``Advantages``: the mean over its policy tokens.
    """

    rows: TurnRows
    of_turns: Advantages
    """Advantages of the turns, in the order of ``rows``."""
    totals: Mapping[str, np.ndarray]
    """Rewards of the trajectories by component, NaN if not applicable. Shape: float64 [trajectories]."""
    valid: np.ndarray
    """True if the trajectory can be trained. Shape: bool [trajectories]."""

    @property
    def names(self) -> tuple[str, ...]:
        """Component names, in column order."""
        return tuple(self.totals)

    @property
    def values(self) -> torch.Tensor:
        """Mean advantage over the policy tokens of each trajectory. Shape: float64 [trajectories]."""
        return self._means(self.of_turns.values)

    @property
    def has_advantage(self) -> np.ndarray:
        """True if a turn of the trajectory has an advantage (``Advantages.has_advantage``). Shape: bool
        [trajectories]."""
        return np.bincount(self.rows.trajectory, self.of_turns.has_advantage, len(self.valid)) > 0

    @property
    def components(self) -> torch.Tensor:
        """Weighted term of each component, averaged like ``values``. Shape: float64 [trajectories, components]."""
        return self._means(self.of_turns.components)

    @property
    def criteria(self) -> dict[str, np.ndarray]:
        """Weighted terms of each family's criteria, averaged like ``values``. Shape: float64 [trajectories, slots]."""
        import torch

        terms = self.of_turns.criteria
        return {name: self._means(torch.from_numpy(of_turns)).numpy() for name, of_turns in terms.items()}

    @cached_property
    def by_turn(self) -> list[np.ndarray]:
        """Advantages of the turns of each trajectory. Shape: float64 [turns]."""
        # Every trajectory has at least one turn, so each 0 begins a trajectory.
        starts = np.flatnonzero(self.rows.turn == 0)[1:]
        return np.split(self.of_turns.values.numpy(), starts)

    def of_sequences(self, trajectories: Sequence[Trajectory]) -> list[float | np.ndarray]:
        """Return ``TrainSequence.advantage`` of each trajectory.

        The value is a single number for a trajectory with one turn, otherwise float32 [completion tokens]. Tokens that
        the policy did not write have advantage 0.
        """
        found: list[float | np.ndarray] = []
        for trajectory, values in zip(trajectories, self.by_turn):
            found.append(float(values[0]) if len(values) == 1 else spread(trajectory, values))
        return found

    @cached_property
    def diagnostics(self) -> Diagnostics:
        """Diagnostics of the advantages of turns.

        Mean, standard deviation, saturation and missing fraction of the rewards refer to trajectories.
        """
        from gdpo_nemo.algorithms.diagnostics import column_statistics
        from gdpo_nemo.algorithms.table import build_table

        found = self.of_turns.diagnostics
        table = build_table(dict(self.totals), np.arange(len(self.valid)), dict.fromkeys(self.names, 1.0), self.valid)
        missing = 1.0 - table.present.sum(axis=1) / max(1, self.valid.sum())
        return replace(found, **column_statistics(table), missing=missing)

    def _means(self, values: torch.Tensor) -> torch.Tensor:
        import torch

        rows = self.rows
        count = len(self.valid)
        tokens = np.maximum(rows.tokens, 1)  # A trajectory without policy tokens has one turn of 0 tokens.
        weights = tokens / np.bincount(rows.trajectory, tokens, count)[rows.trajectory]
        columns = values.numpy().reshape(len(weights), -1).T
        means = np.stack([np.bincount(rows.trajectory, weights * column, count) for column in columns], axis=1)
        return torch.from_numpy(means.reshape(count, *values.shape[1:]))


def spread(trajectory: Trajectory, values: np.ndarray) -> np.ndarray:
    """Expand the values of each turn, [turns, ...], to its policy tokens, with 0 elsewhere.

    Shape: float32 [completion tokens, ...].
    """
    written = np.repeat(values.astype(np.float32), trajectory.turn_tokens, axis=0)
    if trajectory.loss_mask is None:
        return written
    expanded = np.zeros((len(trajectory.completion_ids), *values.shape[1:]), np.float32)
    expanded[trajectory.loss_mask] = written
    return expanded
