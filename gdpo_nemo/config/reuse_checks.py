"""Checks of what is used twice: groups that are trained again, and prompts that are drawn again."""

from __future__ import annotations

from gdpo_nemo.config.rollout_bounds import new_groups
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError

_KEY = "rollout.replay_buffer"


def saves_all_groups(config: Config) -> bool:
    """Whether the samples of every group are written, where any are (``rollout.save_groups``)."""
    kept = config.rollout.save_groups
    return kept is None or kept >= config.gdpo.num_prompts_per_step


def check_reuse(config: Config) -> None:
    """Refuse what could not be used again as it was asked for.

    Raises:
        ConfigError: names the key, with the arithmetic.
    """
    kept = config.rollout.save_groups
    groups = config.gdpo.num_prompts_per_step
    if kept is not None and kept > groups:
        raise ConfigError(
            f"rollout.save_groups: {kept} of the {groups} groups of a step (gdpo.num_prompts_per_step); null writes all"
        )
    if config.rollout.replay_buffer.groups:
        _check_amount(config)
        _check_surroundings(config)
    dynamic = config.gdpo.dynamic_sampling
    if dynamic.enabled and dynamic.reroll_after and dynamic.leave_one_out:
        raise ConfigError(
            "gdpo.dynamic_sampling.reroll_after: cannot go with leave_one_out, which drops samples and not groups"
        )


def _check_amount(config: Config) -> None:
    """New groups are enough to choose from, and young enough when they come again."""
    buffer = config.rollout.replay_buffer
    groups = config.gdpo.num_prompts_per_step
    staleness = config.rollout.max_staleness
    if not staleness:
        raise ConfigError(
            f"{_KEY}.groups: {buffer.groups} groups of earlier weights cannot be trained with rollout.max_staleness 0, "
            "which is exactly on-policy; set it to 1 or more"
        )
    offered = max(0, new_groups(config)) * buffer.reuse
    if buffer.groups > offered:
        raise ConfigError(
            f"{_KEY}.groups: {buffer.groups} of {groups} (gdpo.num_prompts_per_step) leave {new_groups(config)} new a "
            f"step, which with reuse {buffer.reuse} are trained {offered} times again; use at most "
            f"{groups * buffer.reuse // (buffer.reuse + 1)}"
        )
    if staleness >= buffer.max_age:
        raise ConfigError(
            f"{_KEY}.max_age: {buffer.max_age} keeps no group that was rollout.max_staleness {staleness} steps old "
            f"when it was trained, and is {staleness + 1} in the next step; use at least {staleness + 1}"
        )


def _check_surroundings(config: Config) -> None:
    if config.loss_fn.old_logprobs != "trainer":
        raise ConfigError(
            f"{_KEY}.groups: groups that are trained again need loss_fn.old_logprobs: trainer, which works out anew "
            "what their ratio starts from"
        )
    if not config.rollout.save_samples:
        raise ConfigError(
            f"{_KEY}.groups: needs rollout.save_samples, because a run that resumes reads its groups from the samples"
        )
    if not saves_all_groups(config):
        raise ConfigError(
            f"{_KEY}.groups: needs rollout.save_groups null, because a run that resumes reads its groups from the "
            "samples"
        )
    if config.gdpo.group_by == "prompt":
        raise ConfigError(
            f"{_KEY}.groups: needs gdpo.group_by row; by prompt, old samples would be compared with new ones"
        )
