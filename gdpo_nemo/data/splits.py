"""Which splits of the data a run reads, and how long their prompts may be."""

from __future__ import annotations

from gdpo_nemo.config.schema import Config


def wanted_splits(config: Config) -> tuple[str, ...]:
    """The splits that a training run reads."""
    validates = config.data.validation and (config.gdpo.val_period or config.gdpo.val_at_start)
    return ("train", "validation") if validates else ("train",)


def room_for_prompts(config: Config) -> int:
    """Tokens that a prompt may have at most."""
    return config.policy.max_total_sequence_length - 1
