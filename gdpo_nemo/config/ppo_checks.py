"""Checks of PPO: its section, and what cannot go with a value head."""

from __future__ import annotations

from gdpo_nemo.algorithms.losses import LOSSES
from gdpo_nemo.config.algorithm_choice import PPO, has_value_head
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError


def check_ppo(config: Config) -> None:
    """Refuses what a policy with a value head cannot train. Raises ConfigError."""
    if not has_value_head(config):
        return
    try:
        config.ppo.check()
    except ValueError as error:
        raise ConfigError(f"ppo.{error}") from None
    if config.policy.lora.rank:
        raise ConfigError(
            f"policy.lora.rank: {PPO} trains the whole model; its value head would be no part of an adapter"
        )
    if config.policy.skip_zero_advantage:
        raise ConfigError(
            f"policy.skip_zero_advantage: would change the gradient: {PPO}'s values learn from all samples"
        )
    loss = config.loss_fn
    if loss.type in LOSSES and LOSSES[loss.type].by_group:
        raise ConfigError(f"loss_fn.type: {loss.type} has no advantages of tokens, which {PPO} makes")
    if loss.off_policy.sequence_mask_threshold is not None:
        raise ConfigError(f"loss_fn.off_policy.sequence_mask_threshold: judges whole samples, not {PPO}'s tokens")
    if config.gdpo.dynamic_sampling.enabled and config.gdpo.num_generations_per_prompt < 2:
        raise ConfigError(
            "gdpo.dynamic_sampling.enabled: drops groups whose samples are alike; a group of one sample "
            "(gdpo.num_generations_per_prompt) always is"
        )
