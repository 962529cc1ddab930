"""Checks of what the update is made of: reward components and their shaping, the estimator's options, the loss.

Calls the algorithms' own checks, those parts of them that need no torch, so that the two cannot come to differ.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable

from gdpo_nemo.algorithms.loss_settings import LossSettings
from gdpo_nemo.algorithms.own_functions import Functions, is_place, loss_entry
from gdpo_nemo.algorithms.rewards import check_shaping, creates, parse_condition, rule_name
from gdpo_nemo.algorithms.selection import check_selection
from gdpo_nemo.config.algorithm_choice import (
    has_value_head,
    old_logprobs_source,
    resolved_loss,
    samples,
    trains_stale_samples_as_new,
)
from gdpo_nemo.config.files import find_function
from gdpo_nemo.config.layout import updates_per_step
from gdpo_nemo.config.reward_weights import check_reward_weights
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError


def check_learning(config: Config) -> None:
    """Refuses what would fail, or silently do nothing, once there are rewards.

    Raises:
        ConfigError: names the key and the remedy.
    """
    _check_loss(config)
    if not samples(config):
        return
    _check_shaping_alone(config)
    check_reward_weights(config)
    check_estimator(config)
    _check_credit(config)
    _check_dynamic_sampling(config)


def check_components(config: Config, known: Iterable[str]) -> None:
    """Refuses weights and shaping rules for components that nothing gives.

    Args:
        known: components that the environments may return.

    Raises:
        ConfigError: names the key, and what there is.
    """
    try:
        names = check_shaping(config.gdpo.shaping, sorted(known))
    except ValueError as error:
        raise ConfigError(f"gdpo.shaping: {error}") from None
    for name in config.gdpo.rewards:
        if name not in names:
            raise ConfigError(
                f"gdpo.rewards.{name}: no environment gives this component; available: {', '.join(names)}"
            )


def kl_in_reward(config: Config) -> bool:
    """Whether the reward needs the log-probs of the starting model."""
    return config.gdpo.kl_in_reward is not None


def objective_notes(config: Config) -> list[str]:
    """Return notes on what trains, but not as its paper or the age of the samples asks for."""
    return [*_loss_notes(config), *_stale_notes(config)] if samples(config) else []


_PUBLISHED_CLIPS = {
    "gspo": "gspo's paper (2507.18071) clips at 3e-4 and 4e-4, because a ratio of whole sequences stays near 1; use "
    "ratio_clip_min: 3e-4, ratio_clip_max: 4e-4",
    "cispo": "cispo's paper (2506.13585) has no lower bound, and ScaleRL (2510.13786) an upper one of 5; use "
    "ratio_clip_min: 1.0, ratio_clip_max: 4.0",
}
"""Published clips of each loss that differ from PPO's, and the keys that set them."""


def _loss_notes(config: Config) -> list[str]:
    loss = config.loss_fn
    default = LossSettings()
    told = (loss.ratio_clip_min, loss.ratio_clip_max) != (default.ratio_clip_min, default.ratio_clip_max)
    if told or loss.type not in _PUBLISHED_CLIPS:
        return []
    return [
        f"loss_fn.ratio_clip_min, ratio_clip_max: {default.ratio_clip_min:g} and {default.ratio_clip_max:g} are the "
        f"defaults of clipped_pg; {_PUBLISHED_CLIPS[loss.type]}"
    ]


def _stale_notes(config: Config) -> list[str]:
    """What is up to some steps old and trained as if it were new."""
    if not trains_stale_samples_as_new(config) or resolved_loss(config).off_policy.correction != "none":
        return []
    buffer = config.rollout.replay_buffer
    age = buffer.max_age if buffer.groups else config.rollout.max_staleness
    loss = config.loss_fn
    own = is_place(loss.type) and loss.off_policy.mode is None
    remedy = "use truncate, unless that loss corrects by itself" if own else "use null or truncate"
    return [
        f"loss_fn.off_policy.mode: none trains samples that are up to {age} steps old as if they were new; {remedy} "
        "(sampler_gap/* shows how far they are)"
    ]


def _check_shaping_alone(config: Config) -> None:
    """The rules by themselves, taking for granted that the components they name exist."""
    rules = config.gdpo.shaping
    try:
        named = {str(rule["component"]) for rule in rules if not creates(rule)}
        named |= {str(parse_condition(rule["condition"])[0]) for rule in rules if "condition" in rule}
        check_shaping(rules, sorted(named))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"gdpo.shaping: {error}") from None
    for rule in rules:
        _check_place("gdpo.shaping", rule_name(rule))


def _check_place(key: str, name: str) -> None:
    """Where a name is the place of a function in a file, it is there; the file is not run. Raises ConfigError."""
    if is_place(name) and name.rpartition(":")[0].endswith(".py"):
        find_function(key, name)


def check_estimator(config: Config, own: Callable[..., Any] | None = None) -> None:
    """The estimator and its options make sense together.

    Args:
        own: the function that ``gdpo.estimator`` names by its place; without it that place alone is checked.

    Raises:
        ConfigError: they do not.
    """
    gdpo = config.gdpo
    if own is None and is_place(gdpo.estimator):
        _check_place("gdpo.estimator", gdpo.estimator)
        return
    try:
        check_selection(own or gdpo.estimator, gdpo.preset, gdpo.batch_norm, gdpo.epsilon, gdpo.options, gdpo.rewards)
    except ValueError as error:
        key = "gdpo.options" if gdpo.options else "gdpo.preset" if gdpo.preset else "gdpo.estimator"
        raise ConfigError(f"{key}: {error}") from None
    except Exception as error:
        if own is None:
            raise
        raise ConfigError(f"gdpo.estimator: {gdpo.estimator} raised {type(error).__name__}: {error}") from error


def _check_loss(config: Config) -> None:
    loss = config.loss_fn
    size = config.policy.train_global_batch_size
    if old_logprobs_source(config) == "sampler" and loss.off_policy.correction != "none":
        because = "loss_fn.old_logprobs is sampler" if loss.old_logprobs else "rollout.max_staleness is above 0"
        raise ConfigError(
            "loss_fn.off_policy.mode: has no effect where the ratio starts from the sampler's log-probs, as it does "
            f"when {because}; set loss_fn.old_logprobs: trainer, or mode: none"
        )
    try:
        resolved_loss(config).check()
    except ValueError as error:
        raise ConfigError(f"loss_fn.{error}") from None
    if not loss.places:
        check_skipping(config)
    _check_place("loss_fn.type", loss.type)
    _check_place("loss_fn.off_policy.mode", loss.off_policy.correction)
    group = config.gdpo.num_generations_per_prompt
    if loss_entry(loss.type).by_group and size and size % group and updates_per_step(config) > 1:
        raise ConfigError(
            f"policy.train_global_batch_size: {size} splits groups of {group} samples between updates, which "
            f"loss_fn.type {loss.type} cannot have; use a multiple of gdpo.num_generations_per_prompt"
        )


def check_skipping(config: Config, functions: Functions | None = None) -> None:
    """``policy.skip_zero_advantage`` is set only where it leaves the gradient as it is. Raises ConfigError."""
    if config.policy.skip_zero_advantage and (why := config.loss_fn.why_all_sequences(functions)):
        raise ConfigError(f"policy.skip_zero_advantage: would change the gradient: {why}")


def _check_credit(config: Config) -> None:
    """Credit by turn, with nothing that only whole trajectories have. Raises ConfigError."""
    gdpo = config.gdpo
    if gdpo.credit != "turn":
        return
    whole = {
        "gdpo.shaping": bool(gdpo.shaping),
        "gdpo.kl_in_reward": kl_in_reward(config) and not has_value_head(config),
        f"loss_fn.type {config.loss_fn.type}": loss_entry(config.loss_fn.type).by_group,
        "loss_fn.off_policy.sequence_mask_threshold": config.loss_fn.off_policy.sequence_mask_threshold is not None,
    }
    for what, given in whole.items():
        if given:
            raise ConfigError(f"gdpo.credit: turn has no rewards of whole trajectories, which {what} works on")


def _check_dynamic_sampling(config: Config) -> None:
    if config.gdpo.dynamic_sampling.leave_one_out and loss_entry(config.loss_fn.type).by_group:
        raise ConfigError(
            "gdpo.dynamic_sampling.leave_one_out: leaves parts of groups, which loss_fn.type "
            f"{config.loss_fn.type} cannot train"
        )
    _check_replacement(config)


def _check_replacement(config: Config) -> None:
    """Groups that run ahead are whole and are replaced one by one: no round is drawn in excess, no group trained in
    part."""
    dynamic = config.gdpo.dynamic_sampling
    if not dynamic.enabled or not config.rollout.max_staleness:
        return
    why = {"batch_multiplier": dynamic.batch_multiplier is not None, "leave_one_out": dynamic.leave_one_out}
    for key, given in why.items():
        if given:
            raise ConfigError(
                f"gdpo.dynamic_sampling.{key}: needs rollout.max_staleness 0, not {config.rollout.max_staleness}; "
                "groups that are sampled ahead are replaced whole, one by one"
            )
