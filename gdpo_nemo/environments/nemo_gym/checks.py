"""Component ``well_formed`` of the environment ``nemo_gym_agent``: checks of the items in an agent's response.

The faults are those of NeMo-RL's ``reward_penalties``, which sets the reward of a sample with a fault to 0. Here they
are a component, on which ``gdpo.shaping`` can make other components conditional.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gdpo_nemo.environments.base import read_options
from gdpo_nemo.utils.errors import ConfigError

WELL_FORMED = "well_formed"
"""Name of the component and of the environment's option."""


@dataclass(frozen=True)
class Checks:
    """Faults for which ``well_formed`` is 0."""

    repeated_reasoning: bool
    """True to check for a message that repeats the reasoning before it."""
    empty_answer: bool
    """True to check for a missing or empty last message. A function call as the last item is not a fault."""
    unwanted_tokens: frozenset[int]
    """Tokens that the policy must not write."""
    think_tokens: tuple[int, int] | None
    """Tokens that begin and end reasoning. A turn must write an end if its prompt begins reasoning, and no other of
    these tokens. None for no check."""


def read_checks(given: Any) -> Checks | None:
    """Return the checks of the option ``well_formed``, or None without the option.

    Raises:
        ConfigError: if the option is invalid or has no check.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{WELL_FORMED}: must be a mapping of checks, not {given!r:.40}")
    chosen = read_options(
        f"nemo_gym_agent.{WELL_FORMED}",
        given,
        repeated_reasoning=False,
        empty_answer=False,
        unwanted_tokens=[],
        think_tokens=[],
    )
    for name in ("unwanted_tokens", "think_tokens"):
        if not all(type(token) is int and token >= 0 for token in getattr(chosen, name)):
            raise ConfigError(f"{WELL_FORMED}.{name}: must be a list of token ids, not {getattr(chosen, name)!r:.40}")
    think = tuple(chosen.think_tokens)
    if len(think) not in (0, 2):
        raise ConfigError(f"{WELL_FORMED}.think_tokens: must be [begin, end], not {chosen.think_tokens!r:.40}")
    found = Checks(chosen.repeated_reasoning, chosen.empty_answer, frozenset(chosen.unwanted_tokens), think or None)
    if not any((found.repeated_reasoning, found.empty_answer, found.unwanted_tokens, found.think_tokens)):
        raise ConfigError(f"{WELL_FORMED}: must have at least one check")
    return found


def well_formed(output: Sequence[Any], checks: Checks) -> float:
    """Return 1 if the output items of a response have none of the faults, otherwise 0."""
    items = [item for item in output if isinstance(item, Mapping)]
    if checks.repeated_reasoning and any(_repeats(*pair) for pair in pairwise(items)):
        return 0.0
    if checks.empty_answer and not _has_answer(items):
        return 0.0
    for added, written in _turns(items):
        if any(token in written for token in checks.unwanted_tokens):
            return 0.0
        if checks.think_tokens and not _thinks_properly(added, written, *checks.think_tokens):
            return 0.0
    return 1.0


def _repeats(reasoning: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    thought = _text(reasoning.get("summary")) if reasoning.get("type") == "reasoning" else ""
    return bool(thought) and thought == _text(message.get("content"))


def _has_answer(items: Sequence[Mapping[str, Any]]) -> bool:
    if items and items[-1].get("type") == "function_call":
        return True
    messages = [item for item in items if "content" in item]
    return bool(messages and _text(messages[-1]["content"]))


def _text(parts: Any) -> str:
    """Return the text of a message or of its first part, stripped."""
    first = parts[0] if isinstance(parts, list) and parts else parts
    text = first.get("text") if isinstance(first, Mapping) else first
    return text.strip() if isinstance(text, str) else ""


def _turns(items: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield the tokens that each turn adds to its prompt, and the tokens that the policy wrote."""
    seen: list[Any] = []
    for item in items:
        written = item.get("generation_token_ids")
        prompt = item.get("prompt_token_ids")
        if isinstance(written, list) and isinstance(prompt, list) and written:
            yield prompt[len(seen) :] if prompt[: len(seen)] == seen else prompt, written
            seen = prompt + written


def _thinks_properly(added: list[Any], written: list[Any], begin: int, end: int) -> bool:
    opened = added.count(begin) - added.count(end)
    return opened in (0, 1) and written.count(begin) == 0 and written.count(end) == opened
