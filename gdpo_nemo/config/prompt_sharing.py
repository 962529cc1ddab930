"""``policy.share_prompts``: whether samples that begin with the same tokens have these computed once."""

from __future__ import annotations

from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError


def prompt_sharing(config: Config) -> bool | None:
    """What the key means on the devices of the config: always, never, or where it pays (None). ``auto`` is never on
    GPUs, where nothing of it was measured."""
    chosen = config.policy.share_prompts
    if chosen == "auto":
        return False if config.cluster.gpus_per_node else None
    return bool(chosen)


def check_prompt_sharing(config: Config) -> None:
    """The key has one of its values, and the attention of the config knows shared keys. Raises ConfigError."""
    chosen = config.policy.share_prompts
    if not isinstance(chosen, bool) and chosen != "auto":
        raise ConfigError(f"policy.share_prompts: {chosen!r} is not one of its values (accepted: auto, true, false)")
    megatron = config.policy.megatron_cfg
    engine = megatron.attention_backend != "sdpa" and megatron.transformer_engine is not False
    if chosen is True and config.cluster.gpus_per_node and engine:
        raise ConfigError(
            "policy.share_prompts: TransformerEngine's attention is given no keys that several sequences share; use "
            "auto, or policy.megatron_cfg.attention_backend: sdpa"
        )
