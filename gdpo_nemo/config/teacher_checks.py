"""Checks of distillation: the teacher's folder beside the policy's model, and how samples are drawn and trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gdpo_nemo.algorithms.losses import LOSSES
from gdpo_nemo.config.algorithm_choice import DISTILLATION
from gdpo_nemo.config.files import check_model, known_model_config, may_be_on_the_hub
from gdpo_nemo.config.layout import Layout
from gdpo_nemo.config.policy_section import LoraConfig
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError

_KEY = "teacher.model_name"


def check_teacher(config: Config, layout: Layout) -> None:
    """Refuses what distillation cannot learn from. Raises ConfigError."""
    if config.algorithm.type != DISTILLATION:
        return
    _check_sampling(config)
    name = config.teacher.model_name
    if not name:
        raise ConfigError(f"{_KEY}: must be set with algorithm {DISTILLATION}: a Hugging Face folder or a hub name")
    on_the_hub = not Path(name).exists() and may_be_on_the_hub(name)
    if not on_the_hub and not (Path(name) / "config.json").is_file():
        raise ConfigError(f"{_KEY}: {name} is no folder of a Hugging Face model")
    policy = replace(config.policy, model_name=name, model_factory=None, tokenizer_name=None, lora=LoraConfig())
    teacher = replace(config, policy=policy)
    try:
        check_model(teacher, layout)
        fields = known_model_config(teacher) or {}
    except ConfigError as error:
        raise ConfigError(f"{_KEY}: {str(error).removeprefix('policy.model_name: ')}") from None
    own = (known_model_config(config) or {}).get("vocab_size", 0)
    if fields and fields.get("vocab_size", 0) < own:  # the hub's model may not be known yet
        raise ConfigError(
            f"{_KEY}: {name} knows {fields.get('vocab_size')} tokens, the policy's model may write {own}; take a "
            "teacher of the same vocabulary"
        )


def _check_sampling(config: Config) -> None:
    """The sampler's log-probs are those of the model itself, and the loss takes an advantage for each token. Raises
    ConfigError."""
    generation = config.policy.generation
    for key, usual in (("temperature", 1.0), ("top_p", 1.0), ("top_k", -1)):
        if getattr(generation, key) != usual:
            raise ConfigError(
                f"policy.generation.{key}: must be {usual:g} with algorithm {DISTILLATION}, which compares the model's "
                "own probabilities with the teacher's"
            )
    loss = config.loss_fn
    if loss.type in LOSSES and LOSSES[loss.type].by_group:
        raise ConfigError(f"loss_fn.type: {loss.type} has no advantages of tokens, which {DISTILLATION} makes")
    if loss.off_policy.sequence_mask_threshold is not None:
        raise ConfigError(
            f"loss_fn.off_policy.sequence_mask_threshold: judges whole samples, not {DISTILLATION}'s tokens"
        )
