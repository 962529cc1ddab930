"""Conversion of the state of user code to JSON and back, including NumPy arrays."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from gdpo_nemo.utils.files import parse_json

_ARRAY = "__array__"
_LARGEST = 32 << 20
"""Maximum size of a state in bytes, as JSON."""


def to_json(state: Any) -> Any:
    """Convert a state to plain JSON data, from which ``from_json`` returns an equal state.

    A state consists of lists, dictionaries with text keys, text, numbers, booleans, None, and NumPy arrays and scalars.
    Tuples become lists.

    Raises:
        ValueError: if a value has another type, or the state is too large. The message contains the place of the value.
    """
    try:
        plain = _plain(state, "state")
        text = json.dumps(plain)
    except RecursionError:
        raise ValueError("state: is nested too deeply") from None
    if len(text) > _LARGEST:
        raise ValueError(f"state: has {len(text) >> 20} MiB as JSON; the maximum is {_LARGEST >> 20} MiB")
    try:
        parse_json(text)
    except ValueError as error:
        raise ValueError(f"state: could not be read again: {error}") from None
    return plain


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {_ARRAY: [value.dtype.str, shape, base64.b64encode(value.tobytes()).decode()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and _ARRAY not in value:
        return {key: _plain(item, f"{place}[{key!r}]") for key, item in value.items()}
    raise ValueError(
        f"{place}: cannot save {type(value).__name__}; use lists, dictionaries with text keys, text, numbers and NumPy "
        "arrays of numbers"
    )


def from_json(plain: Any) -> Any:
    """Return the state that ``to_json`` has converted. Arrays are writable."""
    if isinstance(plain, list):
        return [from_json(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if _ARRAY in plain:
        dtype, shape, content = plain[_ARRAY]
        values = np.frombuffer(base64.b64decode(content), np.dtype(dtype))
        return values[0] if shape is None else values.reshape(shape).copy()
    return {key: from_json(item) for key, item in plain.items()}
