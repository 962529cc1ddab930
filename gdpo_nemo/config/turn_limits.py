"""How many turns of agents may be under way: their tokens are kept until the episodes have been read."""

from __future__ import annotations

from gdpo_nemo.config.rollout_bounds import resolved_bound, resolved_depth, steps_ahead
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError

TURNS_KEPT = 65_536
"""Turns of episodes under way that the endpoint remembers; the oldest give way."""


def check_turns_kept(config: Config, held_out: int | None = None) -> None:
    """Refuses agents with more turns at once than the endpoint keeps: the samples whose turns are lost would fail.

    Args:
        held_out: prompts of a validation, once they have been counted.

    Raises:
        ConfigError: names the keys, with the arithmetic.
    """
    if not config.rollout.endpoint.enabled:
        return
    gdpo = config.gdpo
    turns = config.rollout.turns.max_turns
    samples = gdpo.num_generations_per_prompt
    what = "a step of"
    prompts = ("gdpo.num_prompts_per_step", gdpo.num_prompts_per_step)
    if steps_ahead(config) > 0:
        what = "a depth of"
        prompts = ("rollout.depth", resolved_depth(config) or resolved_bound(config))
    _check(what, prompts, ("gdpo.num_generations_per_prompt", samples), turns)
    if config.data.validation is None or not (gdpo.val_period or gdpo.val_at_start):
        return
    known = held_out if held_out is not None else gdpo.val_prompts
    if known is not None:
        prompts = ("gdpo.val_prompts", known)
        samples = gdpo.val_generations_per_prompt
        _check("a validation of", prompts, ("gdpo.val_generations_per_prompt", samples), turns)


def _check(what: str, prompts: tuple[str, int], samples: tuple[str, int], turns: int) -> None:
    most = prompts[1] * samples[1] * turns
    if most > TURNS_KEPT:
        raise ConfigError(
            f"rollout.turns.max_turns: {what} {prompts[1]:,} prompts x {samples[1]:,} samples x {turns:,} turns "
            f"has up to {most:,} turns, and the endpoint keeps {TURNS_KEPT:,} of agents until they are done; "
            f"lower it, {prompts[0]} or {samples[0]}"
        )
