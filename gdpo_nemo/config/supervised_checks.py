"""Checks of supervised and preference training: the objective's options, and the form of the rows."""

from __future__ import annotations

from gdpo_nemo.config.algorithm_choice import PREFERENCES, rows_of
from gdpo_nemo.config.example_types import TRAINED, check_example_type
from gdpo_nemo.config.layout import samples_per_step
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError


def check_supervised(config: Config) -> None:
    """Refuses what the built-in algorithms that do not sample cannot train. Raises ConfigError."""
    kind = rows_of(config)
    if kind is None:
        return
    name = config.algorithm.type
    for split in ("train", "validation"):
        data = getattr(config.data, split)
        if data is None:
            continue
        if data.path is None:
            raise ConfigError(f"data.{split}.path: must be set: algorithm {name} trains on answers that rows hold")
        check_example_type(split, data.type, kind)
        if data.train_on not in TRAINED:
            raise ConfigError(f"data.{split}.train_on: unknown {data.train_on!r}; known: {', '.join(TRAINED)}")
        if data.train_on != "assistant" and kind != "sft":
            raise ConfigError(f"data.{split}.train_on: {name} compares whole answers; leave it out")
    if config.policy.generation.temperature != 1:
        raise ConfigError(
            f"policy.generation.temperature: must be 1 with algorithm {name}, whose losses are of the model's own "
            "probabilities"
        )
    if config.loss_fn.aggregation == "constant":
        raise ConfigError(f"loss_fn.aggregation: constant is a mean over samples of one limit, which {name} has not")
    if config.policy.skip_zero_advantage:
        raise ConfigError(f"policy.skip_zero_advantage: algorithm {name} has no advantages")
    if name in PREFERENCES:
        _check_preferences(config, name)


def _check_preferences(config: Config, name: str) -> None:
    try:
        config.preference.check(name)
    except ValueError as error:
        raise ConfigError(f"preference.{error}") from None
    size = config.policy.train_global_batch_size or samples_per_step(config)
    if name == "reward_model" and config.policy.lora.rank:
        raise ConfigError(
            "policy.lora.rank: reward_model trains the whole model; its head would be no part of an adapter"
        )
    if PREFERENCES[name] == "pairs" and size % 2:
        raise ConfigError(f"policy.train_global_batch_size: {size} cuts a pair of answers in two; take an even number")
    if name == "kto" and size < 2:
        raise ConfigError(
            "gdpo.num_prompts_per_step: kto estimates its KL from the other answers of an update, which has to have two"
        )
