"""JSON Schema of a config, for completion and hover texts in editors that use YAML's language server.

The schema checks keys, types, ranges and accepted values of one file. Rules between keys, and whether inherited and own
keys fit together, are only checked when a run loads the config. Draft 7 is the newest draft that the language server
supports completely (https://github.com/redhat-developer/yaml-language-server).
"""

from __future__ import annotations

import math
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from gdpo_nemo.algorithms.ranges import LARGEST, Range, fields_of
from gdpo_nemo.commands.explain import Key, keys_of, section_of
from gdpo_nemo.config.algorithm_choice import ALGORITHMS
from gdpo_nemo.config.allowed_values import SECTIONS_OFF
from gdpo_nemo.config.schema import Config

_DRAFT = "http://json-schema.org/draft-07/schema#"
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}|^\?\?\?$"}
"""Text that OmegaConf replaces by the value of another key, or that marks a mandatory key."""
_IMPORT_PATH = {"type": "string", "pattern": r".+:\w+"}


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config file."""
    schema = _section(Config, "")
    sections = schema["properties"]
    shared, ppo = sections["gdpo"], sections["ppo"]
    both = {**shared, "properties": {**ppo["properties"], **shared["properties"]}}
    sections |= {name: {"$ref": "#/definitions/gdpo"} for name in ALGORITHMS} | {"ppo": both}
    sections["defaults"] = {
        "description": "File or files whose keys this config inherits.",
        "type": ["string", "array"],
        "items": {"type": "string"},
    }
    return {"$schema": _DRAFT, "title": "Config of gdpo-nemo", "definitions": {"gdpo": shared}, **schema}


def _section(section: type, path: str, optional: bool = False) -> dict[str, Any]:
    hints = get_type_hints(section)
    ranges = {field.name: field.range for field in fields_of(section)}
    properties = {key.name: _property(key, hints[key.name], ranges[key.name]) for key in keys_of(section, path)}
    kinds = ["object", "string"] + ["null"] * (optional or path in SECTIONS_OFF)
    return {**_INTERPOLATION, "type": kinds, "properties": properties, "additionalProperties": False}


def _property(key: Key, hint: Any, valid: Range | None) -> dict[str, Any]:
    about = {"description": key.about}
    if (section := section_of(hint)) is not None:
        return {**about, **_section(section, key.path, _is_optional(hint))}
    about["description"] += f" Default: {key.default}."
    if not key.choices:
        return {**about, **_value(hint, valid)}
    accepted: list[dict[str, Any]] = [{"enum": [*key.choices, *[None] * _is_optional(hint)]}, _INTERPOLATION]
    return {**about, "anyOf": accepted + [_IMPORT_PATH] * key.accepts_custom}


def _value(hint: Any, valid: Range | None) -> dict[str, Any]:
    """Return the schema of a value that is not a section, from its type and the range of its numbers."""
    if hint is Any:
        return {}
    if _is_optional(hint):
        inner = _value(get_args(hint)[0], valid)
        return {"anyOf": [*inner.pop("anyOf", [inner]), {"type": "null"}]}
    if get_origin(hint) is dict:
        return {"anyOf": [{"type": "object", "additionalProperties": _value(get_args(hint)[1], valid)}, _INTERPOLATION]}
    if get_origin(hint) is list:
        return {"anyOf": [{"type": "array", "items": _value(get_args(hint)[0], valid)}, _INTERPOLATION]}
    if hint is str:
        return {"type": "string"}
    numbers = [{"type": _TYPES[hint], **(_bounds(valid) if valid else {})}]
    also = [{"enum": list(valid.also)}] if valid and valid.also else []
    return {"anyOf": [*numbers, *also, _INTERPOLATION]}


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _bounds(valid: Range) -> dict[str, float]:
    bounds = {}
    if not math.isinf(valid.above):
        bounds["exclusiveMinimum"] = valid.above
    elif valid.least != -LARGEST:
        bounds["minimum"] = valid.least
    if not math.isinf(valid.below):
        bounds["exclusiveMaximum"] = valid.below
    elif valid.most != LARGEST and not math.isinf(valid.most):
        bounds["maximum"] = valid.most
    return bounds
