"""Conversion of the state of user code to JSON and back, including NumPy arrays."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

_ARRAY = "__array__"
_LARGEST = 64 << 20
"""Maximum size of a state in bytes, as JSON."""


def to_json(state: Any) -> Any:
    """Convert a state to plain JSON data, from which ``from_json`` returns an equal state.

    Lists, dictionaries with text keys, text, numbers, booleans, None and NumPy arrays of numbers are supported.

    Raises:
        ValueError: if a value has another type, or the state is too large. The message contains the place of the value.
    """
    plain = _plain(state, "state")
    size = len(json.dumps(plain))
    if size > _LARGEST:
        raise ValueError(f"state: has {size >> 20} MiB as JSON; the maximum is {_LARGEST >> 20} MiB")
    return plain


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(type(key) is str for key in value) and _ARRAY not in value:
        return {key: _plain(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_ARRAY: [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    raise ValueError(
        f"{place}: {type(value).__name__} cannot be saved; use lists, dictionaries with text keys, text, numbers and "
        "NumPy arrays of numbers"
    )


def from_json(plain: Any) -> Any:
    """Return the state that ``to_json`` has converted. Arrays are writable."""
    if isinstance(plain, list):
        return [from_json(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if _ARRAY in plain:
        dtype, shape, content = plain[_ARRAY]
        return np.frombuffer(base64.b64decode(content), np.dtype(dtype)).reshape(shape).copy()
    return {key: from_json(item) for key, item in plain.items()}
