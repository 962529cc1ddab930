"""Descriptions and computation of the metrics of trajectories, validations and optimizer updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from itertools import chain

import numpy as np

from gdpo_nemo.algorithms.diagnostics import mean_pass_at_k, present_values
from gdpo_nemo.algorithms.rubrics import family_name
from gdpo_nemo.data.records import NOT_CONTIGUOUS, Group, Outcome, Trajectory, UpdateResult, trajectories_of
from gdpo_nemo.utils.errors import RunError

METRICS = {
    "rollout/tokens": ("tokens", "Tokens that the policy wrote in the step's batch"),
    "rollout/mean_length": (
        "tokens",
        "Mean number of tokens that the policy wrote in a trajectory",
        {"label": "length"},
    ),
    "rollout/turns": ("turns", "Mean number of turns in a trajectory; only for environments with several turns"),
    "rollout/contexts": (
        "sequences",
        "Mean number of training sequences of a trajectory; above 1 if agents edit their history or have sub-agents",
    ),
    "rollout/not_contiguous": (
        "share",
        "Trajectories masked because TRL's rollout function returned tokens that were not sampled one after the other",
    ),
    "rollout/truncated": (
        "share",
        "Trajectories truncated by a length limit",
        {
            "max": 0.5,
            "advisory": True,
            "why": "half of the samples are truncated",
            "remedy": "a larger max_new_tokens, loss_fn.mask_truncated, a reward for short answers",
        },
    ),
    "rollout/env_failed": (
        "share",
        "Trajectories that the environment failed to score; they are masked and do not get a reward of 0",
        {
            "label": "failed",
            "max": 0.05,
            "why": "rewards are missing",
            "remedy": "gdpo-nemo env check, and rollout.env_timeout_s",
        },
    ),
    "rollout/env_failed/NAME": ("share", "Trajectories that environment NAME failed to score"),
    "rollout/skipped_zero_adv": (
        "share",
        "Sequences without trained tokens (advantage or weight 0) that policy.skip_zero_advantage skips",
    ),
    "rollout/aborted": (
        "share",
        "Trajectories aborted because they took longer than rollout.group_timeout_s or the other samples of the group",
        {
            "max": 0.2,
            "advisory": True,
            "why": "long trajectories are not trained",
            "remedy": "a larger rollout.group_timeout_s, fewer tokens or turns",
        },
    ),
    "rollout/duplicates": (
        "share",
        "Samples with the same tokens as another sample of their prompt",
        {
            "label": "duplicates",
            "max": 0.95,
            "advisory": True,
            "why": "the samples of a group are identical, so they cannot be compared",
            "remedy": "a higher temperature, loss_fn.entropy_bonus, harder prompts; the seeds of a custom sampler",
        },
    ),
    "rollout/versions": (
        "versions",
        "Mean number of weight versions that sampled a trajectory; above 1 if weights changed during sampling",
    ),
    "staleness/tokens/NAME": ("share", "Tokens sampled by weights that are NAME versions old"),
    "staleness/mean": ("updates", "Mean number of weight versions between sampling and training of a trajectory"),
    "staleness/max": (
        "updates",
        "Largest number of weight versions between sampling and training of a trajectory",
        {"label": "staleness"},
    ),
    "validation/NAME": (
        "reward",
        "Mean of component NAME over the held-out prompts; a prompt has the mean of its samples that have NAME",
    ),
    "validation/NAME/pass_at/NAME": (
        "reward",
        "Component NAME, unbiased pass@k (gdpo.val_pass_at_k): expected best reward of k samples of a held-out prompt",
    ),
    "validation/NAME/error": (
        "reward",
        "Standard error of component NAME's mean over the held-out prompts (for goals in gdpo.stop_when)",
    ),
    "validation/mean_length": ("tokens", "Mean number of tokens that the policy wrote for a held-out prompt"),
    "validation/env_failed": ("share", "Held-out samples that the environment failed to score"),
    "loss": ("", "Mean loss of the step's optimizer updates", {"label": "loss"}),
    "grad_norm": (
        "",
        "Mean gradient norm of the step's optimizer updates, before clipping",
        {
            "label": "grad norm",
            "max": 100.0,
            "required": True,
            "why": "healthy runs of the included configs stay below 2",
            "remedy": "a lower learning rate, optimizer.clip_grad",
        },
    ),
    "lr": ("", "Learning rate of the step's last optimizer update"),
    "policy/entropy": (
        "nats/token",
        "Mean entropy of the policy at the trained tokens",
        {
            "label": "entropy",
            "min": 0.02,
            "why": "entropy has collapsed: the samples of a group are identical",
            "remedy": "a higher temperature, loss_fn.entropy_bonus, a larger ratio_clip_max, a KL penalty",
        },
    ),
    "policy/clip_fraction": (
        "share",
        "Trained tokens whose gradient is 0 because their ratio is clipped (CISPO: whose weight is clipped)",
        {
            "max": 0.3,
            "why": "almost a third of the tokens have no gradient",
            "remedy": "a lower learning rate, fewer updates per step, less staleness",
        },
    ),
    "policy/ratio_mean": ("", "Mean probability ratio of new to old policy over the trained tokens"),
    "policy/NAME": ("", "Mean of metric NAME of a custom loss over the trained tokens"),
    "policy/ratio_max": (
        "",
        "Largest probability ratio of new to old policy",
        {
            "max": 100.0,
            "advisory": True,
            "why": "healthy runs of the included configs stay below 30 at a staleness of four steps",
            "remedy": "less staleness, fewer updates per step, loss_fn.ratio_clip_c",
        },
    ),
    "policy/ratio_min": (
        "",
        "Smallest probability ratio of new to old policy",
        {
            "min": 0.0001,
            "advisory": True,
            "why": "sampled tokens have become very unlikely",
            "remedy": "less staleness, fewer updates per step, a lower learning rate",
        },
    ),
    "policy/clip_low": (
        "share",
        "Trained tokens clipped at the lower bound, part of policy/clip_fraction",
        {
            "max": 0.2,
            "advisory": True,
            "why": "tokens with negative advantage have already become less likely",
            "remedy": "a lower learning rate, fewer updates per step",
        },
    ),
    "policy/clip_high": (
        "share",
        "Trained tokens clipped at the upper bound, part of policy/clip_fraction; excludes the dual clip",
        {
            "max": 0.2,
            "advisory": True,
            "why": "rare tokens with positive advantage are held back",
            "remedy": "a larger loss_fn.ratio_clip_max (DAPO: 0.28), fewer updates per step",
        },
    ),
    "policy/clip_dual": (
        "share",
        "Trained tokens with negative advantage at the dual clip (loss_fn.ratio_clip_c), part of policy/clip_fraction",
    ),
    "routing/differing": (
        "share",
        "Choices (of a token in an MoE layer) of which the trainer's would differ from the sampler's (router_replay)",
    ),
    "vision/tower_images": (
        "images",
        "Images that the vision towers of all ranks processed in the step; a frozen tower caches its outputs",
    ),
    "parity/mean_abs": (
        "nats",
        "Mean |trainer log-prob - sampler log-prob| at equal weights, over the trained tokens",
        {
            # NeMo-RL warns at e^0.05 (token_mult_prob_error 1.05). Rounding errors of float32 are much smaller.
            "max": {"float32": 0.001, "bfloat16": 0.05},
            "why": "trainer and sampler compute different models; NeMo-RL also warns from 5 %",
            "remedy": "gdpo-nemo parity",
        },
    ),
    "parity/max_abs": ("nats", "Largest |trainer log-prob - sampler log-prob| at equal weights", {"label": "parity"}),
    "parity/max_prob": (
        "",
        "Largest |trainer probability - sampler probability| at equal weights; unlikely tokens have little effect",
    ),
    "parity/kl": ("nats/token", "KL(sampler || trainer) at equal weights (estimator k3)"),
    "sampler_gap/mean_abs": (
        "nats",
        "Mean |trainer log-prob before the updates - sampler log-prob| over the trained tokens, at any staleness",
    ),
    "sampler_gap/max_abs": (
        "nats",
        "Largest |trainer log-prob before the updates - sampler log-prob|, at any staleness",
    ),
    "sampler_gap/kl": ("nats/token", "KL(sampling weights || trained weights) (estimator k3)"),
}


def reward_names(trajectories: Sequence[Trajectory]) -> dict[str, None]:
    """Return the components for which a trajectory has a reward or None, in order of appearance. A family of criteria
    is one component."""
    criteria = dict.fromkeys(chain.from_iterable(t.criteria for t in trajectories))
    names = dict.fromkeys(chain.from_iterable(t.rewards for t in trajectories))
    return dict.fromkeys(family_name(name) if name in criteria else name for name in names)


def rollout_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return the metrics ``rollout/...`` and ``staleness/...`` of a step that starts from weights of ``version``."""
    tokens = sum(t.num_policy_tokens for t in trajectories)
    stale = [version - t.policy_version for t in trajectories]
    outcomes = [t.outcome for t in trajectories]
    return {
        "rollout/tokens": float(tokens),
        "rollout/mean_length": tokens / len(trajectories),
        **_turn_metrics(trajectories),
        "rollout/truncated": outcomes.count(Outcome.TRUNCATED) / len(outcomes),
        "rollout/env_failed": outcomes.count(Outcome.ENV_FAILED) / len(outcomes),
        "rollout/aborted": outcomes.count(Outcome.ABORTED) / len(outcomes),
        "rollout/duplicates": _duplicates(trajectories),
        **_failed_by_environment(trajectories),
        **logged_metrics(trajectories),
        "staleness/mean": float(np.mean(stale)),
        "staleness/max": float(max(stale)),
        **(_token_ages(trajectories, version) if any(stale) else {}),
    }


def _duplicates(trajectories: Sequence[Trajectory]) -> float:
    """Return the fraction of samples with the same tokens as another sample of their prompt."""
    # Completions of different lengths differ, so most tokens are not read.
    lengths = Counter((t.prompt.id, len(t.completion_ids)) for t in trajectories)
    candidates = [t for t in trajectories if lengths[t.prompt.id, len(t.completion_ids)] > 1]
    counts = Counter((t.prompt.id, t.completion_ids.tobytes()) for t in candidates)
    return sum(count for count in counts.values() if count > 1) / len(trajectories)


def _token_ages(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return the distribution of policy tokens over staleness, and the mean number of versions per trajectory."""
    versions = []
    tokens: Counter[int] = Counter()
    for trajectory in trajectories:
        spans = trajectory.spans or ((trajectory.policy_version, trajectory.num_policy_tokens),)
        versions.append(len(spans))
        for span_version, count in spans:
            tokens[version - span_version] += count
    total = max(1, tokens.total())
    row = {"rollout/versions": float(np.mean(versions))}
    for age in sorted(tokens):
        row[f"staleness/tokens/{age}"] = tokens[age] / total
    return row


def _turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of multi-turn trajectories. The result is empty if no environment is multi-turn."""
    if all(t.loss_mask is None for t in trajectories):
        return {}
    broken = [t.detail.startswith(NOT_CONTIGUOUS) for t in trajectories]
    return {
        "rollout/turns": float(np.mean([t.turns for t in trajectories])),
        "rollout/contexts": float(np.mean([t.num_contexts for t in trajectories])),
        "rollout/not_contiguous": float(np.mean(broken)),
    }


def _failed_by_environment(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the fraction of samples that each environment failed to verify, by metric key."""
    by_name: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        by_name.setdefault(trajectory.prompt.environment, []).append(trajectory.outcome is Outcome.ENV_FAILED)
    return {f"rollout/env_failed/{name}": float(np.mean(failed)) for name, failed in by_name.items()}


def logged_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics ``reward_function/NAME``: means of the values that reward functions passed to ``log_metric``.

    Each value is weighted by the number of samples in the call that logged the value. The mean therefore does not
    depend on how the samples are split into calls.
    """
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values.setdefault(name, []).append(value)
    return {f"reward_function/{name}": float(np.mean(values[name])) for name in sorted(values)}


def check_failures(trajectories: Sequence[Trajectory], limit: float) -> None:
    """Check that not too many verifications failed.

    Raises:
        RunError: if the fraction of failed samples exceeds ``limit``.
    """
    failed = [t for t in trajectories if t.outcome is Outcome.ENV_FAILED]
    if len(failed) > limit * len(trajectories):
        raise RunError(
            f"{len(failed)} of {len(trajectories)} samples failed in the environment "
            f"{failed[0].prompt.environment!r} (rollout.max_env_failure_share is {limit}): {failed[0].detail}"
        )


def _component_metrics(
    name: str, rewards: Sequence[Sequence[float | None]], pass_at: Sequence[int], direction: int
) -> dict[str, float]:
    """Return mean and pass@k of one component over the prompts. See ``present_values``.

    Args:
        rewards: reward of each sample, by group. A reward is None if the component does not apply.
        pass_at: values of k.
        direction: 1 if larger rewards are better, otherwise -1.
    """
    row = {}
    mean = mean_pass_at_k(rewards, 1)
    if mean is not None:
        row[f"validation/{name}"] = mean
    for k in pass_at:
        best = mean_pass_at_k(rewards, k, direction)
        if best is not None:
            row[f"validation/{name}/pass_at/{k}"] = best
    return row


def _rewards_of(group: Group, name: str) -> list[float | None]:
    """Return a component's reward of each sample, None if the component does not apply."""
    return [t.component_rewards.get(name) for t in group.trajectories]


def validation_metrics(
    groups: Sequence[Group],
    pass_at: Sequence[int] = (),
    directions: Mapping[str, int] | None = None,
    errors_of: Container[str] = (),
) -> dict[str, float]:
    """Return the metrics ``validation/...`` of the held-out samples.

    The metrics are the mean and pass@k of each component, the mean length, the fraction of failures, and logged
    metrics. If the prompts have several environments, mean and pass@k are also measured for each environment.

    Args:
        pass_at: values of k for pass@k.
        directions: result of ``component_weights.directions``.
        errors_of: components whose standard error is included.
    """
    trajectories = trajectories_of(groups)
    environments = list(dict.fromkeys(group.prompt.environment for group in groups))
    row: dict[str, float] = {}
    for name in reward_names(trajectories):
        rewards = [_rewards_of(group, name) for group in groups]
        direction = (directions or {}).get(name, 1)
        row |= _component_metrics(name, rewards, pass_at, direction)
        for environment in environments if len(environments) > 1 else ():
            own = [_rewards_of(group, name) for group in groups if group.prompt.environment == environment]
            row |= _component_metrics(f"{environment}/{name}", own, pass_at, direction)
        means = [float(np.mean(values)) for values in present_values(rewards)]
        if name in errors_of and len(means) > 1:
            row[f"validation/{name}/error"] = float(np.std(means, ddof=1) / np.sqrt(len(means)))
    row["validation/mean_length"] = float(np.mean([t.num_policy_tokens for t in trajectories]))
    row["validation/env_failed"] = float(np.mean([not t.trains for t in trajectories]))
    for name, value in logged_metrics(trajectories).items():
        row[f"validation/{name}"] = value
    return row


def update_metrics(results: Sequence[UpdateResult], on_policy: bool) -> dict[str, float]:  # noqa: C901
    """Return the metrics of a step's optimizer updates, averaged over their tokens.

    ``sampler_gap/...`` compares sampler and trainer at any staleness. ``parity/...`` compares sampler and trainer at
    equal weights, so this metric requires an on-policy rollout. ``max_abs`` and ``mean_abs`` compare log-probs.
    ``max_prob`` compares probabilities, so that unlikely tokens have little effect. The log-probs of unlikely tokens in
    bfloat16 are accurate only to a few tenths.
    """
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for result in results:
        for name, value in result.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in result.maxima.items():
            maxima[name] = max(value, maxima.get(name, value))
    tokens = max(sums.pop("tokens", 0.0), 1.0)
    decisions = sums.pop("routing_decisions", 0.0)
    differing = sums.pop("routing_differing", 0.0)
    tower_images = sums.pop("tower_images", None)
    row = {
        "loss": float(np.mean([r.loss for r in results])),
        "grad_norm": float(np.mean([r.grad_norm for r in results])),
        "lr": results[-1].lr,
    }
    for name in results[0].packing:
        row[f"packing/{name}"] = float(np.mean([r.packing[name] for r in results]))
    if results[0].skipped_sequences is not None:
        skipped = sum(r.skipped_sequences or 0 for r in results)
        row["rollout/skipped_zero_adv"] = skipped / sum(r.sequences for r in results)
    known = {
        "entropy": "policy/entropy",
        "clipped": "policy/clip_fraction",
        "clipped_dual": "policy/clip_dual",
        "ratio": "policy/ratio_mean",
    }
    if decisions:
        row["routing/differing"] = differing / decisions
    if tower_images is not None:
        row["vision/tower_images"] = tower_images
    if "clipped_low" in sums:
        low = sums.pop("clipped_low")
        row["policy/clip_low"] = low / tokens
        row["policy/clip_high"] = (sums["clipped"] - low - sums.get("clipped_dual", 0.0)) / tokens
    for name, value in sums.items():
        if not name.startswith("parity_"):
            row[known.get(name, f"policy/{name}")] = value / tokens
    if "ratio" in maxima:
        row["policy/ratio_max"] = maxima["ratio"]
    if "ratio_negated" in maxima:
        row["policy/ratio_min"] = -maxima["ratio_negated"]
    if "parity_abs" in maxima:
        row["sampler_gap/max_abs"] = maxima["parity_abs"]
        row["sampler_gap/mean_abs"] = sums["parity_abs"] / tokens
        row["sampler_gap/kl"] = sums["parity_kl"] / tokens
    if on_policy and "parity_abs" in maxima:
        row["parity/max_abs"] = maxima["parity_abs"]
        row["parity/max_prob"] = maxima["parity_prob"]
        row["parity/mean_abs"] = sums["parity_abs"] / tokens
        row["parity/kl"] = sums["parity_kl"] / tokens
    return row
