"""Groups become updates: rewards to advantages, trajectories to training sequences."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Callable, Mapping, Sequence

import numpy as np

from gdpo_nemo.algorithms import LossSettings, apply_shaping, token_weights
from gdpo_nemo.algorithms.covariance import clip_cov, kl_cov
from gdpo_nemo.algorithms.rewards import creates
from gdpo_nemo.config.algorithm_choice import old_logprobs_source
from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import Group, Outcome, Trajectory
from gdpo_nemo.errors import RunError
from gdpo_nemo.rollouts.own_objective import own_estimator, own_rules
from gdpo_nemo.rollouts.turn_credit import TurnAdvantages, turn_rows

if TYPE_CHECKING:  # it imports torch, which a run's start does without until its processes are under way
    from gdpo_nemo.algorithms import Advantages


def reward_columns(trajectories: Sequence[Trajectory], config: Config) -> dict[str, np.ndarray]:
    """Every component of the trajectories after ``gdpo.shaping``: float64 [trajectories], NaN for "not applicable".

    A weighted component that none of these trajectories has is there too, missing throughout.
    """
    rules = config.gdpo.shaping
    columns = {
        name: np.array([_number(t.rewards.get(name)) for t in trajectories], np.float64)
        for name in _component_names(trajectories, config)
    }
    if not rules:
        return columns
    shaped: dict[str, np.ndarray] = apply_shaping(
        columns,
        rules,
        lengths=np.array([t.num_policy_tokens for t in trajectories]),
        max_length=longest_completion(config),
        truncated=np.array([t.finish_reason == "length" and t.outcome is not Outcome.OK for t in trajectories]),
        functions=own_rules(config),
    )
    return shaped


def _component_names(trajectories: Sequence[Trajectory], config: Config) -> list[str]:
    given = dict.fromkeys(name for t in trajectories for name in t.rewards)
    # What a rule will create must not be there before it, all missing: whatever is added to missing stays missing.
    created = {rule["component"] for rule in config.gdpo.shaping if creates(rule)}
    names = [*(name for name in config.gdpo.rewards if name in given or name not in created), *given]
    return list(dict.fromkeys(names))


def advantages_of(groups: Sequence[Group], config: Config, kl: np.ndarray | None = None) -> Advantages | TurnAdvantages:
    """Advantages of all trajectories of a step, in group order, over the whole batch at once; with ``gdpo.credit:
    turn`` those of their turns.

    Components without a weight take part with weight 0, for the metrics.

    Args:
        kl: ``log_ratios`` [trajectories], where ``gdpo.kl_in_reward`` is set.

    Raises:
        RunError: no trajectory carries any weighted reward, the user's own estimator failed, or gave what is not
        finite.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    ids = np.repeat(_group_ids(groups, config.gdpo.group_by), [len(group.trajectories) for group in groups])
    valid = np.array([t.trains for t in trajectories])
    if config.gdpo.credit == "turn":
        rows = turn_rows(trajectories, _component_names(trajectories, config), config.gdpo.discount)
        of_rows = rows.ids(ids, config.gdpo.turn_baseline), valid[rows.trajectory], rows.tokens
        of_turns = _estimated(lambda: rows.columns, *of_rows, config)
        return TurnAdvantages(rows, of_turns, reward_columns(trajectories, config), valid)
    lengths = np.array([t.num_policy_tokens for t in trajectories])
    return _estimated(lambda: reward_columns(trajectories, config), ids, valid, lengths, config, kl)


def _estimated(
    rewards: Callable[[], Mapping[str, np.ndarray]],
    ids: np.ndarray,
    valid: np.ndarray,
    lengths: np.ndarray,
    config: Config,
    kl: np.ndarray | None = None,
) -> Advantages:
    """``compute_advantages`` as the config has it, of trajectories or of turns. Raises RunError."""
    from gdpo_nemo.algorithms import compute_advantages

    gdpo = config.gdpo
    own = own_estimator(config)
    try:
        columns = rewards()
        return compute_advantages(
            columns,
            ids,
            weights={name: gdpo.rewards.get(name, 0.0) for name in columns},
            valid=valid,
            lengths=lengths,
            kl=kl,
            kl_coefficient=gdpo.kl_in_reward,
            estimator=own or gdpo.estimator,
            preset=gdpo.preset,
            batch_norm=gdpo.batch_norm,
            epsilon=gdpo.epsilon,
            **gdpo.options,
        )
    except ValueError as error:
        raise RunError(f"advantages: {error}") from error
    except Exception as error:
        if own is None:
            raise
        raise RunError(f"gdpo.estimator: {gdpo.estimator} raised {first_line(error)}") from error


def _group_ids(groups: Sequence[Group], by: str) -> np.ndarray:
    """int64 [groups]: the places of the groups, or of the first with the same prompt tokens."""
    if by == "row":
        return np.arange(len(groups))
    first: dict[bytes, int] = {}
    return np.array([first.setdefault(group.prompt.token_ids.tobytes(), place) for place, group in enumerate(groups)])


def log_ratios(sequences: Sequence[TrainSequence], reference: Sequence[np.ndarray]) -> np.ndarray:
    """log p_sampler - log p_reference, summed over the tokens that the policy wrote: float64 [sequences].

    An estimate of KL(sampler || reference) of each trajectory, positive where the policy has become surer of what it
    wrote than the reference was. NaN where no token has both log-probs.
    """
    gaps = [
        s.where_written(s.sampler_logprobs - r).astype(np.float64) for s, r in zip(sequences, reference, strict=True)
    ]
    return np.array([np.nan if np.isnan(gap).all() else np.nansum(gap) for gap in gaps])


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)


def updates_of(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray | Sequence[float | np.ndarray],
    config: Config,
    version: int | None = None,
    trained: Sequence[bool] | None = None,
) -> list[list[TrainSequence]]:
    """The training sequences of each optimizer update of a step; token weights add up per update.

    Args:
        advantages: [trajectories]; see ``TrainSequence.advantage``.
        trained: bool [trajectories]; the others get weight 0. None: those that ``is_trained`` accepts.
        version: of the weights that the step starts from; every token gets its staleness to it, where loss or
            correction read that.
    """
    loss = config.loss_fn
    size = config.policy.train_global_batch_size or len(trajectories)
    if trained is None:
        trained = [is_trained(t, loss) for t in trajectories]
    updates = []
    for start in range(0, len(trajectories), size):
        part = slice(start, start + size)
        updates.append(_weighted(trajectories[part], advantages[part], trained[part], config))
    if version is not None and loss.reads_staleness:
        for trajectory, sequence in zip(trajectories, chain.from_iterable(updates), strict=True):
            sequence.staleness = token_staleness(trajectory, version)
    return updates


def choose_by_covariance(
    update: Sequence[TrainSequence], now: Sequence[np.ndarray], loss: LossSettings, seed: Sequence[int]
) -> float:
    """Mark the tokens of an update that the losses clip_cov (advantage 0) and kl_cov (``TrainSequence.chosen``) choose.

    Args:
        now: log-probs of each sequence's completion, of the weights that the update starts from.
        seed: of clip_cov's draw.

    Returns:
        the share of the trained tokens that was chosen.
    """
    written = [np.ones(len(s.completion_ids), bool) if s.loss_mask is None else s.loss_mask for s in update]
    trained = [mask if s.weight else np.zeros_like(mask) for s, mask in zip(update, written)]
    values, advantages, old = (
        np.concatenate([part[mask] for part, mask in zip(parts, trained)]).astype(np.float64)
        for parts in (now, [s.token_advantages() for s in update], _old_logprobs(update, now))
    )
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
    for sequence, mask, mine in zip(
        update, trained, np.split(chosen, np.cumsum([mask.sum() for mask in trained])[:-1])
    ):
        marks = np.zeros(len(mask), bool)
        marks[mask] = mine
        if loss.type == "kl_cov":
            sequence.chosen = marks
        else:
            sequence.advantage = np.where(marks, np.float32(0), sequence.token_advantages())
    return float(chosen.mean()) if len(chosen) else 0.0


def _old_logprobs(update: Sequence[TrainSequence], now: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the ratios of an update refer to; without anything, its own log-probs."""
    return [values if s.old_logprobs is None else s.old_logprobs for s, values in zip(update, now)]


def token_staleness(trajectory: Trajectory, version: int) -> np.ndarray:
    """Versions between the weights that sampled a token and those of ``version``: int32 [completion tokens]; 0 where
    the policy did not write."""
    spans = trajectory.spans or ((trajectory.policy_version, trajectory.num_policy_tokens),)
    versions, tokens = np.array(spans, np.int64).T
    written = np.repeat(version - versions, tokens).astype(np.int32)
    if trajectory.loss_mask is None:
        return written
    staleness = np.zeros(len(trajectory.completion_ids), np.int32)
    staleness[trajectory.loss_mask] = written
    return staleness


def is_trained(trajectory: Trajectory, loss: LossSettings) -> bool:
    """Return whether the loss reads the trajectory's tokens: it has rewards and ``mask_truncated`` does not apply."""
    return trajectory.trains and not (loss.mask_truncated and trajectory.outcome is Outcome.TRUNCATED)


def _weighted(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray | Sequence[float | np.ndarray],
    trained: Sequence[bool],
    config: Config,
) -> list[TrainSequence]:
    loss = config.loss_fn
    weights = token_weights(
        [t.num_policy_tokens if keep else 0 for t, keep in zip(trajectories, trained)],
        loss.aggregation,
        constant_length=loss.constant_length or longest_completion(config),
    )
    from_sampler = old_logprobs_source(config) == "sampler"
    return [
        TrainSequence(
            prompt_ids=t.prompt.token_ids,
            completion_ids=t.completion_ids,
            sampler_logprobs=t.logprobs,
            advantage=0.0 if not keep else a if isinstance(a, np.ndarray) else float(a),
            weight=float(w),
            old_logprobs=t.logprobs if from_sampler else None,
            loss_mask=t.loss_mask,
        )
        for t, a, w, keep in zip(trajectories, advantages, weights, trained)
    ]


def longest_completion(config: Config) -> int:
    """Tokens that the policy may write in one trajectory."""
    per_turn = config.policy.generation.max_new_tokens
    turns = config.rollout.turns
    return turns.max_tokens or per_turn * turns.max_turns
