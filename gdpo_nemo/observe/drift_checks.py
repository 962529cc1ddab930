"""How far metrics may move in a sound run of any model: what no fixed bound finds, as it depends on where a run began.

All are warnings: a model that learns to reason writes longer, and a short run may end before it has learnt. A check of
the config with the same metric and ``of`` replaces one of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from gdpo_nemo.config.health_checks import Check
from gdpo_nemo.observe.metric_registry import find_metric


@dataclass(frozen=True)
class Drift:
    """A check with what a miss means and what to try."""

    check: Check
    why: str
    remedy: str


def _warning(metric: str, of: str, window: int, why: str, remedy: str, **bounds: float) -> Drift:
    return Drift(Check(metric, "every", window=window, optional=True, advisory=True, of=of, **bounds), why, remedy)


DRIFTS = (
    # After 40 steps the demo has risen by 5.5 or more, at staleness 4, too; uncorrected there, where it fails, by 2.
    _warning(
        "reward/total/mean",
        "rise",
        20,
        "what is trained does not get better",
        "a larger learning rate, easier prompts or more samples for each; the sign and the noise of the rewards",
        min=2.5,
    ),
    _warning(
        "policy/entropy",
        "start",
        5,
        "exploding: the samples become noise",
        "a lower learning rate, a smaller loss_fn.entropy_bonus, off_policy corrections",
        max=3.0,
    ),
    # 5.2 at most in sound runs of the demo at staleness 4, where half a batch can come from a stale group.
    _warning(
        "grad_norm",
        "before",
        1,
        "a spike: one batch outweighs those before",
        "optimizer.clip_grad, a lower learning rate; rewards of that step's samples",
        max=10.0,
    ),
    _warning(
        "rollout/mean_length",
        "start",
        5,
        "length drifts: the reward may pay for it",
        "a length rule in gdpo.shaping, loss_fn.aggregation token_mean, a look at the samples",
        min=0.33,
        max=3.0,
    ),
    _warning(
        "parity/mean_abs",
        "start",
        5,
        "trainer and sampler drift apart as the weights change",
        "gdpo-nemo parity, policy.generation.vllm_cfg.head_dtype float32",
        max=20.0,
    ),
)


def advice(check: Check) -> tuple[str, str]:
    """What a miss of ``check`` means and what to try; empty where nobody has said."""
    for drift in DRIFTS:
        if (drift.check.metric, drift.check.of) == (check.metric, check.of):
            return drift.why, drift.remedy
    metric = find_metric(check.metric)
    return (metric.why, metric.remedy) if metric and check.of == "value" else ("", "")
