"""What is logged of a step's trajectories and updates: the metrics, what they mean, and how they are measured."""

from __future__ import annotations

from collections import Counter
from typing import Sequence

import numpy as np

from gdpo_nemo.algorithms.pass_at_k import mean_pass_at_k
from gdpo_nemo.data.records import NOT_CONTIGUOUS, Group, Outcome, Trajectory
from gdpo_nemo.data.results import UpdateResult
from gdpo_nemo.errors import RunError

METRICS = {
    "rollout/tokens": ("tokens", "Tokens that the policy wrote in the step's batch"),
    "rollout/mean_length": ("tokens", "Tokens that the policy wrote in a trajectory, mean", {"label": "length"}),
    "rollout/turns": ("turns", "Turns of a trajectory, mean; where environments have turns"),
    "rollout/not_contiguous": ("share", "Trajectories masked because their turns do not continue each other"),
    "rollout/truncated": (
        "share",
        "Trajectories cut by a limit of length",
        {
            "max": 0.5,
            "advisory": True,
            "why": "half of the samples have no end",
            "remedy": "a larger max_new_tokens, loss_fn.mask_truncated, a reward for short answers",
        },
    ),
    "rollout/env_failed": (
        "share",
        "Trajectories that no environment could judge; they are masked, never a reward of 0",
        {
            "label": "failed",
            "max": 0.05,
            "why": "verdicts are missing",
            "remedy": "gdpo-nemo env check, and rollout.env_timeout_s",
        },
    ),
    "rollout/env_failed/NAME": ("share", "Trajectories of environment NAME that it could not judge"),
    "rollout/skipped_zero_adv": (
        "share",
        "Sequences of advantage or weight 0, left out by policy.skip_zero_advantage: trained tokens are the others'",
    ),
    "rollout/aborted": (
        "share",
        "Trajectories cut as stragglers, once their group had enough verdicts",
        {
            "max": 0.2,
            "advisory": True,
            "why": "what takes long is not trained, so it is not learnt",
            "remedy": "a larger rollout.group_timeout_s, fewer tokens or turns",
        },
    ),
    "rollout/duplicates": (
        "share",
        "Samples whose tokens another sample of their prompt has, too",
        {
            "label": "duplicates",
            "max": 0.95,
            "advisory": True,
            "why": "the samples of a group are one: there is nothing to compare",
            "remedy": "a higher temperature, loss_fn.entropy_bonus, harder prompts; the seeds of a sampler of your own",
        },
    ),
    "rollout/versions": (
        "versions",
        "Weights that wrote a trajectory, mean; above 1 some arrived while it was sampled",
    ),
    "staleness/tokens/NAME": ("share", "Tokens of the policy that weights of NAME versions before wrote"),
    "staleness/mean": ("updates", "Weight versions between sampling and training of a trajectory, mean"),
    "staleness/max": (
        "updates",
        "Weight versions between sampling and training of the oldest trajectory",
        {"label": "staleness"},
    ),
    "validation/NAME": ("reward", "Component NAME on the held-out prompts, mean over the samples that have it"),
    "validation/NAME/pass_at/NAME": (
        "reward",
        "Component NAME, unbiased pass@k (gdpo.val_pass_at_k): the expected best of k samples of a held-out prompt",
    ),
    "validation/mean_length": ("tokens", "Tokens that the policy wrote to a held-out prompt, mean"),
    "validation/env_failed": ("share", "Held-out samples without a verdict"),
    "loss": ("", "Loss of the step's optimizer updates, mean", {"label": "loss"}),
    "grad_norm": (
        "",
        "Norm of the gradient before clipping, mean over the step's updates",
        {
            "label": "grad norm",
            "max": 100.0,
            "required": True,
            "why": "sound runs here stay below 2",
            "remedy": "a lower learning rate, optimizer.clip_grad",
        },
    ),
    "lr": ("", "Learning rate of the step's last update"),
    "policy/entropy": (
        "nats/token",
        "Entropy of the policy at the trained tokens, mean",
        {
            "label": "entropy",
            "min": 0.02,
            "why": "collapsed: the samples of a group are one",
            "remedy": "a higher temperature, loss_fn.entropy_bonus, a larger ratio_clip_max, a KL penalty",
        },
    ),
    "policy/clip_fraction": (
        "share",
        "Trained tokens whose gradient the ratio's clip took away (CISPO: whose weight it bounded)",
        {
            "max": 0.3,
            "why": "a third of the tokens trains nothing",
            "remedy": "a lower learning rate, fewer updates per step, less staleness",
        },
    ),
    "policy/ratio_mean": ("", "Probability ratio of new to old policy, mean over the trained tokens"),
    "policy/NAME": ("", "Metric NAME of a loss of your own, mean over the trained tokens"),
    "policy/ratio_max": (
        "",
        "Probability ratio of new to old policy, the largest",
        {
            "max": 100.0,
            "advisory": True,
            "why": "sound runs here, four steps stale, stay below 30",
            "remedy": "less staleness, fewer updates per step, loss_fn.ratio_clip_c",
        },
    ),
    "policy/ratio_min": (
        "",
        "Probability ratio of new to old policy, the smallest",
        {
            "min": 0.0001,
            "advisory": True,
            "why": "tokens that were sampled have all but gone",
            "remedy": "less staleness, fewer updates per step, a lower learning rate",
        },
    ),
    "policy/clip_low": (
        "share",
        "Trained tokens that the lower clip took, of policy/clip_fraction",
        {
            "max": 0.2,
            "advisory": True,
            "why": "what is to become rarer has become so before",
            "remedy": "a lower learning rate, fewer updates per step",
        },
    ),
    "policy/clip_high": (
        "share",
        "Trained tokens that the upper clip took, of policy/clip_fraction; the dual clip's are not among them",
        {
            "max": 0.2,
            "advisory": True,
            "why": "good tokens that are rare are held back",
            "remedy": "a larger loss_fn.ratio_clip_max (DAPO: 0.28), fewer updates per step",
        },
    ),
    "policy/clip_dual": (
        "share",
        "Trained tokens of negative advantage that the dual clip (loss_fn.ratio_clip_c) took, of policy/clip_fraction",
    ),
    "parity/mean_abs": (
        "nats",
        "|log-prob of trainer - of sampler| at equal weights, mean over the trained tokens",
        {
            # NeMo-RL calls e^0.05 suspect (token_mult_prob_error 1.05); float32 has no rounding of that size.
            "max": {"float32": 0.001, "bfloat16": 0.05},
            "why": "above it trainer and sampler are two models; NeMo-RL warns from the same 5 % on",
            "remedy": "gdpo-nemo parity",
        },
    ),
    "parity/max_abs": ("nats", "|log-prob of trainer - of sampler| at equal weights, the largest", {"label": "parity"}),
    "parity/max_prob": ("", "|probability of trainer - of sampler|, the largest; unlikely tokens weigh little"),
    "parity/kl": ("nats/token", "KL of the sampler to the trainer at equal weights (estimator k3)"),
    "sampler_gap/mean_abs": (
        "nats",
        "|log-prob of trainer before its updates - of sampler|, mean over the trained tokens, at any staleness",
    ),
    "sampler_gap/max_abs": ("nats", "|log-prob of trainer before its updates - of sampler|, the largest"),
    "sampler_gap/kl": ("nats/token", "KL of the weights that sampled to those that are trained (estimator k3)"),
}


def rollout_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """The keys ``rollout/...`` and ``staleness/...`` of a step trained on weights of ``version``."""
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
    """Share of samples whose tokens another sample of the same prompt has, too."""
    counts = Counter((t.prompt.id, t.completion_ids.tobytes()) for t in trajectories)
    return sum(count for count in counts.values() if count > 1) / len(trajectories)


def _token_ages(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How the policy's tokens spread over the versions that wrote them."""
    spans = [t.spans or ((t.policy_version, t.num_policy_tokens),) for t in trajectories]
    tokens: dict[int, int] = {}
    for of_version, count in (span for of_one in spans for span in of_one):
        tokens[version - of_version] = tokens.get(version - of_version, 0) + count
    total = max(1, sum(tokens.values()))
    shares = {f"staleness/tokens/{age}": tokens[age] / total for age in sorted(tokens)}
    return {"rollout/versions": float(np.mean([len(of_one) for of_one in spans])), **shares}


def _turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns per trajectory, and the share that was masked because its turns do not continue each other; where there are
    turns at all."""
    if all(t.loss_mask is None for t in trajectories):
        return {}
    broken = [t.detail.startswith(NOT_CONTIGUOUS) for t in trajectories]
    return {
        "rollout/turns": float(np.mean([t.turns for t in trajectories])),
        "rollout/not_contiguous": float(np.mean(broken)),
    }


def _failed_by_environment(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Share of each environment's samples that it failed to judge, by metric key."""
    by_name: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        by_name.setdefault(trajectory.prompt.environment, []).append(trajectory.outcome is Outcome.ENV_FAILED)
    return {f"rollout/env_failed/{name}": float(np.mean(failed)) for name, failed in by_name.items()}


def logged_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The keys ``reward_function/NAME``: what reward functions gave to ``log_metric``.

    A value counts once for each sample of the call that logged it, so that the mean of a function's own means is that
    of the step, into however many calls the workers have cut it.
    """
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values.setdefault(name, []).append(value)
    return {f"reward_function/{name}": float(np.mean(values[name])) for name in sorted(values)}


def check_failures(trajectories: Sequence[Trajectory], limit: float) -> None:
    """Stop rather than train on what is left when too many verifications failed.

    Raises:
        RunError: the share of failed samples exceeds ``limit``.
    """
    failed = [t for t in trajectories if t.outcome is Outcome.ENV_FAILED]
    if len(failed) > limit * len(trajectories):
        raise RunError(
            f"{len(failed)} of {len(trajectories)} samples failed in the environment "
            f"{failed[0].prompt.environment!r} (rollout.max_env_failure_share is {limit}): {failed[0].detail}"
        )


def validation_metrics(groups: Sequence[Group], pass_at: Sequence[int] = ()) -> dict[str, float]:
    """The keys ``validation/...``: every component's mean over the samples that have it and its pass@k for the k of
    ``pass_at``, their length, and what failed."""
    trajectories = [t for group in groups for t in group.trajectories]
    row = {}
    for name in dict.fromkeys(name for t in trajectories for name in t.rewards):
        values = [value for t in trajectories if (value := t.rewards.get(name)) is not None]
        if values:
            row[f"validation/{name}"] = float(np.mean(values))
        rows = [[t.rewards.get(name) for t in group.trajectories] for group in groups]
        best = {f"validation/{name}/pass_at/{k}": mean_pass_at_k(rows, k) for k in pass_at}
        row.update({key: value for key, value in best.items() if value is not None})
    row["validation/mean_length"] = float(np.mean([t.num_policy_tokens for t in trajectories]))
    row["validation/env_failed"] = float(np.mean([not t.trains for t in trajectories]))
    return row | {f"validation/{name}": value for name, value in logged_metrics(trajectories).items()}


def update_metrics(results: Sequence[UpdateResult], on_policy: bool) -> dict[str, float]:
    """Metrics of a step's optimizer updates (``UpdateResult``), averaged over their tokens.

    ``sampler_gap/...`` compares sampler and trainer at any staleness. ``parity/...`` compares them at equal weights, so
    it is measured where the rollout is on-policy only: ``max_abs`` and ``mean_abs`` of log-probs, ``max_prob`` of
    probabilities, where unlikely tokens, whose log-probs bfloat16 knows to some tenths only, weigh little.
    """
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for result in results:
        for name, value in result.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in result.maxima.items():
            maxima[name] = max(value, maxima.get(name, value))
    tokens = max(sums.pop("tokens", 0.0), 1.0)
    row = {
        "loss": float(np.mean([r.loss for r in results])),
        "grad_norm": float(np.mean([r.grad_norm for r in results])),
        "lr": results[-1].lr,
    }
    for name in results[0].packing:
        row[f"packing/{name}"] = float(np.mean([r.packing[name] for r in results]))
    if results[0].skipped_sequences is not None:
        row["rollout/skipped_zero_adv"] = sum(r.skipped_sequences or 0 for r in results) / sum(
            r.sequences for r in results
        )
    known = {
        "entropy": "policy/entropy",
        "clipped": "policy/clip_fraction",
        "clipped_dual": "policy/clip_dual",
        "ratio": "policy/ratio_mean",
    }
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
