"""Small reward functions about the form of a completion, for the ``functions`` environment or any TRL-style trainer.

Each returns 0 or 1 per completion (``length`` with a ``cut_off`` also values between).
"""

from __future__ import annotations

import json
import re
from typing import Any, Mapping, Sequence

JSON_CHARACTERS = 200_000
"""A completion longer than this is not parsed as JSON; it counts as invalid."""


def regex(completions: Sequence[Any], pattern: str, **_: Any) -> list[float]:
    """1 where ``pattern`` matches the whole completion, surrounding white space aside; a dot matches line breaks."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(completion_text(completion).strip()) is not None) for completion in completions]


def json_schema(
    completions: Sequence[Any], schema: Mapping[str, Any] | Sequence[Any] | None = None, **_: Any
) -> list[float]:
    """1 where the completion is a JSON text and valid under ``schema``.

    Without a schema well-formed JSON is enough. When ``schema`` is a column, each row has its own.
    """
    schemas = schema if isinstance(schema, (list, tuple)) else [schema] * len(completions)
    return [float(_valid(completion_text(completion), one)) for completion, one in zip(completions, schemas)]


def length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    max_tokens: int,
    cut_off: int | None = None,
    **_: Any,
) -> list[float]:
    """1 up to ``max_tokens`` tokens (the end token counts), then 0, or falling linearly to 0 at ``cut_off``."""
    return [_length_reward(len(ids), max_tokens, cut_off) for ids in completion_ids]


def completion_text(completion: Any) -> str:
    """The text of a completion in either of TRL's forms: a text, or a list of messages."""
    return completion if isinstance(completion, str) else "".join(str(m.get("content") or "") for m in completion)


def _valid(text: str, schema: Mapping[str, Any] | None) -> bool:
    import jsonschema

    if len(text) > JSON_CHARACTERS:
        return False
    try:
        value = json.loads(text, parse_constant=_refuse)
        if schema is not None:
            jsonschema.validate(value, schema)
    except (ValueError, RecursionError, jsonschema.ValidationError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _length_reward(tokens: int, max_tokens: int, cut_off: int | None) -> float:
    if tokens <= max_tokens:
        return 1.0
    if cut_off is None or tokens >= cut_off:
        return 0.0
    return (cut_off - tokens) / (cut_off - max_tokens)
