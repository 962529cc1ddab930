"""Files of a NeMo Gym checkout: server instances in ``config_paths``, and names of reward components.

NeMo Gym's code is parsed, never imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import parse_json, parse_yaml, read_text

KINDS = ("resources_servers", "responses_api_agents", "responses_api_models")
"""Folders of a checkout with servers, which are also the kinds of servers in NeMo Gym's configuration."""
_COMPONENTS = "reward_components"


class Unknown(Exception):
    """The servers or reward components cannot be determined. The text is the reason."""


class Instance(NamedTuple):
    """A server in NeMo Gym's configuration."""

    kind: str
    implementation: str
    """Folder of the server's code."""
    settings: dict[str, Any]


def instances_of(contents: Iterable[Mapping[str, Any]]) -> dict[str, Instance]:
    """Return the servers by instance name. Later contents override earlier ones."""
    found: dict[str, Instance] = {}
    for content in contents:
        for name, section in content.items():
            for kind in KINDS:
                servers = section.get(kind) if isinstance(section, dict) else None
                for implementation, settings in servers.items() if isinstance(servers, dict) else ():
                    same = name in found and found[name].implementation == implementation
                    before = found[name].settings if same else {}
                    found[name] = Instance(kind, implementation, {**before, **(settings or {})})
    return found


def config_contents(paths: Any, checkout: Path, seen: set[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the files of ``config_paths``. Files that a file includes precede that file, which overrides them.

    Raises:
        Unknown: if a file is not in the checkout, or ``paths`` is not a list of files.
        ConfigError: if a file is not valid YAML.
    """
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise Unknown("config_paths must be a list of files")
    seen = set() if seen is None else seen
    for path in paths:
        if path in seen:
            continue
        seen.add(path)
        file = checkout / path
        if not file.is_file():
            raise Unknown(f"{path} was not found in {checkout}")
        content = read_config(file)
        included = content.get("config_paths") or []
        yield from config_contents([one for one in included if isinstance(one, str)], checkout, seen)
        yield content


def read_config(file: Path) -> dict[str, Any]:
    """Read a configuration file (empty if it is not a mapping). Raises ConfigError if it is not valid YAML."""
    try:
        content = parse_yaml(read_text(file))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {str(error).splitlines()[0]}") from None
    return content if isinstance(content, dict) else {}


def component_names(folder: Path, entrypoint: str) -> set[str]:
    """Return the components of a server, from its code and its recorded replies (empty for a single reward).

    Raises Unknown if the code computes the names, or if code and replies differ.
    """
    code = folder / entrypoint
    if not code.is_file():
        raise Unknown(f"{code} was not found")
    written = _names_in_code(read_text(code))
    recorded = _recorded_names(folder / "data" / "example_rollouts.jsonl")
    if written is None and not recorded:
        raise Unknown(f"{code} computes the names of its reward components, and no recorded reply contains them")
    if written and recorded and written != recorded:
        raise Unknown(
            f"the reward components of {folder.name} are {', '.join(sorted(written))} in {code.name}, but "
            f"{', '.join(sorted(recorded))} in its recorded replies"
        )
    return written or recorded


def _names_in_code(text: str) -> set[str] | None:
    """Return the keys of all dictionaries that a server assigns to ``reward_components`` (None if it computes them)."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    names: set[str] = set()
    for value in chain.from_iterable(map(_assigned, nodes)):
        if isinstance(value, ast.Name) and value.id == _COMPONENTS:
            continue
        keys: Sequence[ast.expr | None] = value.keys if isinstance(value, ast.Dict) else [None]
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
            return None
        names |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return names


def _assigned(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the values that a node assigns to the name, attribute, argument or key ``reward_components``.

    A value that is assigned to a single component of the dictionary is returned as a dictionary.
    """
    if isinstance(node, ast.keyword) and node.arg == _COMPONENTS:
        yield node.value
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
        for target in targets:
            if isinstance(target, ast.Subscript) and _is_components(target.value):
                yield ast.Dict([target.slice], [node.value])
            elif _is_components(target):
                yield node.value
    if isinstance(node, ast.Dict):
        yield from (v for k, v in zip(node.keys, node.values) if isinstance(k, ast.Constant) and k.value == _COMPONENTS)


def _is_components(target: object) -> bool:
    return getattr(target, "id", getattr(target, "attr", None)) == _COMPONENTS


def _recorded_names(file: Path) -> set[str]:
    """Return the components in the replies that a server's folder records (empty if there are none)."""
    names: set[str] = set()
    for line in read_text(file).splitlines() if file.is_file() else ():
        try:
            reply = parse_json(line)
        except ValueError:
            return set()
        components = reply.get(_COMPONENTS) if isinstance(reply, dict) else None
        names |= set(components) if isinstance(components, dict) else set()
    return names
