"""How many turns of agents one batch may have: their tokens are kept until the whole batch has been read."""

from __future__ import annotations

from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError

TURNS_KEPT = 65_536
"""Turns of one batch that the endpoint remembers; the oldest give way."""


def check_turns_kept(config: Config, held_out: int | None = None) -> None:
    """Refuses batches of agents with more turns than the endpoint keeps: the samples whose turns are lost would fail.

    Args:
        held_out: prompts of a validation, once they have been counted.

    Raises:
        ConfigError: names the keys, with the arithmetic.
    """
    if not config.rollout.endpoint.enabled:
        return
    gdpo = config.gdpo
    turns = config.rollout.turns.max_turns
    prompts = ("gdpo.num_prompts_per_step", gdpo.num_prompts_per_step)
    samples = gdpo.num_generations_per_prompt
    _check("a step", prompts, ("gdpo.num_generations_per_prompt", samples), turns)
    if config.data.validation is None or not (gdpo.val_period or gdpo.val_at_start):
        return
    known = held_out if held_out is not None else gdpo.val_prompts
    if known is not None:
        prompts = ("gdpo.val_prompts", known)
        samples = gdpo.val_generations_per_prompt
        _check("a validation", prompts, ("gdpo.val_generations_per_prompt", samples), turns)


def _check(what: str, prompts: tuple[str, int], samples: tuple[str, int], turns: int) -> None:
    most = prompts[1] * samples[1] * turns
    if most > TURNS_KEPT:
        raise ConfigError(
            f"rollout.turns.max_turns: {what} of {prompts[1]:,} prompts x {samples[1]:,} samples x {turns:,} turns "
            f"has up to {most:,} turns, and the endpoint keeps {TURNS_KEPT:,} of agents until a batch is complete; "
            f"lower it, {prompts[0]} or {samples[0]}"
        )
