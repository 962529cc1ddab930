"""Checks of prompts that are cut out of raw text (``data.<split>.strided``): lengths that fit, and an algorithm that
samples or at least reads prompts."""

from __future__ import annotations

from gdpo_nemo.config.algorithm_choice import rows_of, samples
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError


def check_strided(config: Config) -> None:
    """Refuses anchors that cannot be continued as their section says. Raises ConfigError."""
    policy = config.policy
    for split in ("train", "validation"):
        data = getattr(config.data, split)
        if data is None or data.strided is None:
            continue
        key = f"data.{split}.strided"
        context, answer = data.strided.context_length, data.strided.generate_max_len
        if rows_of(config) is not None:
            raise ConfigError(
                f"{key}: algorithm {config.algorithm.type} trains the answers that rows hold; anchors of a text are "
                "for algorithms that sample"
            )
        if data.chat:
            raise ConfigError(f"data.{split}.chat: anchors of a text ({key}) go to the model as they are, not as chat")
        if context + answer > policy.max_total_sequence_length:
            raise ConfigError(
                f"{key}.context_length: {context} tokens and {answer} behind them (generate_max_len) do not fit into "
                f"policy.max_total_sequence_length {policy.max_total_sequence_length}"
            )
        if samples(config) and policy.generation.max_new_tokens != answer:
            raise ConfigError(
                f"{key}.generate_max_len: must be policy.generation.max_new_tokens "
                f"({policy.generation.max_new_tokens}), got {answer}; the policy writes as much as the data has"
            )
