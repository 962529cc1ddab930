"""Formats of rubrics in public data and servers, converted to the format of ``rubrics.read_rubric``.

=================  ===================================================================================================
source             criterion
=================  ===================================================================================================
HealthBench        ``{criterion, points, tags}`` (column ``rubrics``)
tinker-cookbook    ``{rubric_str, extraction_regex, grader_output_format_instruction}`` (column ``rubric_items``)
multichallenge     ``{question, pass_criteria, weight}`` (server of NeMo Gym)
inverse_if         ``{id, criteria}`` in rows and ``{criterion_id, criteria}`` in replies (server of NeMo Gym)
finance_agent_v2   ``{criteria, operator, modifiers: {severity, category}}`` in rows, as a JSON text, and ``{criteria,
                   severity, must_pass}`` in replies (server of NeMo Gym)
RaR                ``{title, description, weight}`` (Rubrics as Rewards, arXiv 2507.17746)
=================  ===================================================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gdpo_nemo.utils.errors import ConfigError, nearest

_NAMES = {
    "criterion": ("criterion", "criteria", "question", "rubric_str", "description"),
    "weight": ("weight", "points", "severity"),
    "id": ("id", "criterion_id"),
    "required": ("required", "must_pass"),
    "scale": ("scale",),
}
"""Names in public data for each key of a criterion."""
_EXPECTED = "pass_criteria"
_INSTRUCTION = "grader_output_format_instruction"
_MODIFIERS = "modifiers"
_IGNORED = ("tags", "title", "axis", "category", "source", "operator", "extraction_regex", "metadata")
"""Keys of public data that do not affect the reward."""
_KNOWN = (*(name for names in _NAMES.values() for name in names), _EXPECTED, _INSTRUCTION, _MODIFIERS, *_IGNORED)
_RANGE = re.compile(r"between\s+(-?\d+(?:\.\d+)?)\s+and\s+(-?\d+(?:\.\d+)?)")


def listed(value: Any) -> Any:
    """Return a rubric that is a JSON text as a list. Other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def canonical(entry: Mapping[str, Any], strict: bool = True) -> dict[str, Any]:
    """Return a criterion with the keys criterion, weight, id, required and scale, without those that are not set.

    Args:
        entry: criterion in any of the formats. A key with the value null is not set.
        strict: True to refuse unknown keys. Replies of servers have further keys with details of the judgement.

    Raises:
        ConfigError: if a key is unknown, or two keys have the same meaning.
    """
    given = {key: value for key, value in entry.items() if value is not None}
    if strict:
        for key in given:
            if key not in _KNOWN:
                raise ConfigError(f"unknown key {key!r}{nearest(str(key), _KNOWN)}")
    found: dict[str, Any] = {}
    for key, names in _NAMES.items():
        present = [name for name in names if name in given]
        if len(present) > 1:
            raise ConfigError(f"{present[0]} and {present[1]} have the same meaning; remove one")
        if present:
            found[key] = given[present[0]]
    found |= _of_modifiers(given)
    if _INSTRUCTION in given and "scale" not in found:
        found["scale"] = _scale(str(given[_INSTRUCTION]))
    expected = str(given.get(_EXPECTED, "YES"))
    if expected.upper() != "YES" and "criterion" in found:
        found["criterion"] = f"{found['criterion']} (expected answer: {expected})"
    return found


def _of_modifiers(given: Mapping[str, Any]) -> dict[str, Any]:
    modifiers = given.get(_MODIFIERS)
    if not isinstance(modifiers, Mapping):
        return {}
    found = {"required": True} if modifiers.get("category") == "must_pass" else {}
    return found if modifiers.get("severity") is None else {**found, "weight": modifiers["severity"]}


def _scale(instruction: str) -> tuple[float, float]:
    found = _RANGE.search(instruction)
    if found is None:
        raise ConfigError(f"{_INSTRUCTION} has no range such as 'between 1 and 5'; add the key scale")
    return float(found[1]), float(found[2])
