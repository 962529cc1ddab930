"""The names that NeMo-RL and TRL give to metrics which a run here has, too: `logger.aliases`.

A name stands here only where both mean the same number. NeMo-RL's are those that its GRPO loop gives to trackers
(nemo_rl/algorithms/grpo.py, experience/rollouts.py); TRL's those of GRPOTrainer, with the ``train/`` and ``eval/`` that
transformers puts before them.
"""

from __future__ import annotations

import re
from typing import Any, Iterable, Mapping

from gdpo_nemo.observe.metric_registry import NAME

ALIASES: dict[str, dict[str, str]] = {
    "nemo_rl": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "lr": "train/lr",
        "reward/total/mean": "train/reward",
        "policy/reference_kl": "train/kl_penalty",
        "policy/entropy": "train/approx_entropy",
        "policy/ratio_mean": "train/probs_ratio",
        "policy/ratio_min": "train/probs_ratio_min",
        "policy/ratio_max": "train/probs_ratio_max",
        "parity/kl": "train/gen_kl_error",
        "rollout/mean_length": "train/mean_gen_tokens_per_sample",
        "rollout/truncated": "train/truncation_rate",
        "rollout/turns": "train/avg_turns_per_sample",
        "time/step": "timing/train/total_step_time",
        "time/advantages": "timing/train/advantage_calculation",
        "validation/total": "validation/accuracy",
        "validation/mean_length": "validation/avg_length",
    },
    "trl": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "lr": "train/learning_rate",
        "reward/total/mean": "train/reward",
        "reward/NAME/mean": "train/rewards/NAME/mean",
        "reward/NAME/std": "train/rewards/NAME/std",
        "policy/reference_kl": "train/kl",
        "policy/entropy": "train/entropy",
        "policy/clip_fraction": "train/clip_ratio/region_mean",
        "policy/clip_low": "train/clip_ratio/low_mean",
        "policy/clip_high": "train/clip_ratio/high_mean",
        "parity/mean_abs": "train/sampling/sampling_logp_difference/mean",
        "parity/max_abs": "train/sampling/sampling_logp_difference/max",
        "rollout/mean_length": "train/completions/mean_length",
        "rollout/truncated": "train/completions/clipped_ratio",
        "time/step": "train/step_time",
        "validation/total": "eval/reward",
        "validation/mean_length": "eval/completions/mean_length",
        "validation/NAME": "eval/rewards/NAME/mean",
    },
}
"""By program: our key, with NAME for a component, and theirs."""
_NO_COMPONENTS = ("validation/env_failed",)
"""Keys of a family's form that are none of its members."""


def alias_values(row: Mapping[str, Any], programs: Iterable[str]) -> dict[str, Any]:
    """The values of ``row`` under the names that ``programs`` give them."""
    return {name: value for program in programs for key, value in row.items() if (name := _alias(key, program))}


def _alias(key: str, program: str) -> str | None:
    table = ALIASES[program]
    if key in table or key in _NO_COMPONENTS:
        return table.get(key)
    for pattern, name in table.items():
        if NAME in pattern and (match := re.fullmatch(re.escape(pattern).replace(NAME, "([^/]+)"), key)):
            return name.replace(NAME, match[1])
    return None
