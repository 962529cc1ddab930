"""From YAML files and command-line overrides to a typed, checked ``Config``.

Every source is checked against the schema by itself before anything is merged, so a message can name the file that
holds the mistake. OmegaConf then merges, resolves ``${...}`` and builds the dataclasses. Left out on purpose: Hydra's
groups, sweeps and ``+key`` syntax; a run is one file, its parents and a list of ``key=value``.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import io
import math
import os
import re
from itertools import count
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence, Union, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from gdpo_nemo.config.algorithm_choice import declares_sampling
from gdpo_nemo.config.choices import CHOICES, OWN_FUNCTIONS, SECTIONS_OFF
from gdpo_nemo.config.files import DEMO, REPOSITORY, find_file
from gdpo_nemo.config.interpolation_bound import check_interpolations
from gdpo_nemo.config.messages import message_line
from gdpo_nemo.config.reading import Refused, check_yaml, read_text
from gdpo_nemo.config.reward_weights import weights_beside_rewards
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.writing import write_whole
from gdpo_nemo.errors import SHORTEST_SECRET, ConfigError, mask_urls, remember_secret, without_secrets

MOST_FILES = 100
"""Files that a config may inherit from, each as often as it is named: two parents with two each are six."""
_SCALARS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


ConfigSource = Union[str, "os.PathLike[str]", Mapping[str, Any], Config, None]
"""A YAML file, what stands in one, a config that was loaded, or None for the demo."""
Overrides = Union[Sequence[str], Mapping[str, Any]]
"""Texts ``section.key=value``, or a mapping {"section.key": value} of Python values."""
Sources = list[tuple[str, dict[str, Any], bool]]
"""For each its name in messages, its content, and whether mappings of rewards and environments in it are all there
are."""
_LISTS = ("gdpo", "gdpo.rewards", "env")
"""Keys under which an override lists rewards or environments as a whole."""


def load_config(config: ConfigSource = None, overrides: Overrides = ()) -> Config:
    """Read ``config`` with its ``defaults:``, apply the overrides and return the typed config.

    Files are looked up from the working directory, then among those that come with the package.

    Raises:
        ConfigError: in one line, for anything that does not fit the schema.
    """
    return build_config(merge_sources([*read_config(config), *read_overrides(overrides)]))


def read_config(config: ConfigSource) -> Sources:
    """The config's parents, oldest first, then itself. Raises ConfigError."""
    if isinstance(config, Config):
        return [("config", config_to_dict(config), True)]
    if isinstance(config, Mapping):
        content = _plain(config)
        parents = _read_parents(content, Path("config"), (), count())
        return [*((source, parent, True) for source, parent in parents), ("config", content, True)]
    if config is not None and not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"config: expected a YAML file or a mapping, got {type(config).__name__}")
    path = DEMO if config is None else find_file(config) or Path(config)
    return [(source, content, True) for source, content in _read_with_parents(path, (), count())]


def read_overrides(overrides: Overrides) -> Sources:
    """The overrides in order. Raises ConfigError."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: expected a list or a mapping, got the text {overrides!r}")
    if isinstance(overrides, Mapping):
        return [("overrides", _nested(str(key), _plain(value)), str(key) in _LISTS) for key, value in overrides.items()]
    return [(*_read_override(text), text.partition("=")[0] in _LISTS) for text in overrides]


def merge_sources(sources: Sources, merged: DictConfig | None = None) -> DictConfig:
    """Check every source against the schema and merge them in order, into ``merged`` if given. Raises ConfigError.

    ``merged`` is changed in place.
    """
    merged = copy.deepcopy(_schema()) if merged is None else merged
    for source, given, whole in sources:
        content = _switch_off(given, merged)
        _check(content, Config, "", source)
        try:
            if whole:
                _replace_listed(merged, content)
            merged.merge_with(content)
        except OmegaConfBaseException as error:
            raise _translated(error, source) from None
    return merged


@functools.cache
def _schema() -> DictConfig:
    """The schema with its defaults, for copies: a copy takes a fifth of the time."""
    return cast(DictConfig, OmegaConf.structured(Config))


_field_types = functools.cache(get_type_hints)


def _switch_off(content: dict[str, Any], merged: DictConfig) -> dict[str, Any]:
    """Return ``content`` with its null sections switched off, and give these sections their defaults in ``merged``."""
    for key, (switch, value) in SECTIONS_OFF.items():
        *outer, name = key.split(".")
        node: Any = content
        for part in outer:
            node = node.get(part) if isinstance(node, Mapping) else None
        if isinstance(node, Mapping) and name in node and node[name] is None:
            section = OmegaConf.get_type(OmegaConf.select(merged, key))
            OmegaConf.update(merged, key, OmegaConf.structured(section), merge=False)
            content = _with_value(content, [*outer, name], {switch: value})
    return content


def _with_value(content: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of nested mappings with another value at a path."""
    name, *inner = path
    return {**content, name: _with_value(content[name], inner, value) if inner else value}


def _plain(value: Any) -> Any:
    """Mappings as dictionaries, sequences as lists and paths as texts, as YAML would have them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _nested(key: str, value: Any) -> dict[str, Any]:
    """``value`` under the dotted ``key``. Raises ConfigError."""
    if not all(key.split(".")):
        raise ConfigError(f"{key!r}: an override is named section.key")
    content: Any = value
    for name in reversed(key.split(".")):
        content = {name: content}
    return dict(content)


def _replace_listed(merged: DictConfig, content: Mapping[str, Any]) -> None:
    """Take out of ``merged`` what a mapping in ``content`` stands for as a whole.

    Rewards and environments given as a mapping are all there are; an environment of the same name keeps the options it
    had. ``gdpo.rewards.format=2`` and ``env.mine.strict=true`` change one of them.
    """
    if (content.get("gdpo") or {}).get("rewards") is not None:
        merged.gdpo.rewards = {}
    listed = content.get("env")
    if isinstance(listed, Mapping) and not OmegaConf.is_missing(merged, "env"):
        for name in [name for name in merged.env if name not in listed]:
            del merged.env[name]


def config_to_dict(config: Config) -> dict[str, Any]:
    """The config as plain nested dictionaries, in the order of the schema."""
    return dataclasses.asdict(config)


_WRITTEN: dict[tuple[Any, ...], tuple[Any, str]] = {}
"""By its place in a config that this process built: a value that came from the environment, and the text it came by."""
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)[^}]*\}")


def recorded(config: Config) -> dict[str, Any]:
    """The config as it may be shown and kept: what came from the environment (``${oc.env:NAME}``) stands as it was
    written, and passwords in URLs are masked."""
    content = config_to_dict(config)
    for place, (value, written) in _WRITTEN.items():
        node: Any = content
        for name in place[:-1]:
            inside = isinstance(node, dict) or (isinstance(node, list) and isinstance(name, int) and name < len(node))
            node = node[name] if inside and (isinstance(node, list) or name in node) else None
        if isinstance(node, (dict, list)) and _leaves(node).get((place[-1],)) == value:
            node[place[-1]] = written
    return cast(dict[str, Any], _masked(content))


def _masked(node: Any) -> Any:
    if isinstance(node, dict):  # YAML 1.1 has read the key `on` of a condition as true
        return {"on" if key is True else key: _masked(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_masked(value) for value in node]
    return mask_urls(node) if isinstance(node, str) else node


def _leaves(node: Any, place: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """The values in a tree of dictionaries and lists, by their place."""
    if not isinstance(node, (dict, list)):
        return {place: node}
    branches = node.items() if isinstance(node, dict) else enumerate(node)
    return {inner: value for name, branch in branches for inner, value in _leaves(branch, (*place, name)).items()}


def _note_environment(before: Any, after: Any) -> None:
    """Remember which values of a config come from the environment, be it by way of another value."""
    resolved = _leaves(after)
    texts = {place: text for place, text in _leaves(before).items() if isinstance(text, str) and "${" in text}
    direct = {place for place, text in texts.items() if "${oc.env:" in text}
    secrets = [str(resolved[place]) for place in direct if place in resolved]
    secrets = [secret for secret in secrets if len(secret) >= SHORTEST_SECRET]
    for place, text in texts.items():
        if place not in resolved:
            continue
        if place in direct or any(secret in str(resolved[place]) for secret in secrets):
            _WRITTEN[place] = (resolved[place], text)


def _remember_secrets(written: Any) -> None:
    """Keep the environment's values out of messages, those about values that cannot be resolved among them."""
    for text in _leaves(written).values():
        for found in _FROM_ENVIRONMENT.finditer(text if isinstance(text, str) else ""):
            if found[1] in os.environ:
                remember_secret(os.environ[found[1]], found[0])


def save_config(config: Config, path: str | Path) -> None:
    """Write the resolved config as YAML. The file appears whole or not at all, and outlives a loss of power."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_yaml(config), sync=True)


def to_yaml(config: Config) -> str:
    """The resolved config as YAML text that ``load_config`` reads back to an equal config, where the environment is the
    same (see ``recorded``)."""
    return OmegaConf.to_yaml(OmegaConf.create(recorded(config)))


def _read_with_parents(path: Path, children: tuple[Path, ...], read: Iterator[int]) -> list[tuple[str, dict[str, Any]]]:
    """The file's parents, oldest first, then the file itself, each as (name for messages, content)."""
    resolved = Path(os.path.realpath(path))  # unlike Path.resolve, never raises
    if resolved in children:
        chain = " -> ".join(p.name for p in (*children, resolved))
        raise ConfigError(f"defaults: {path} inherits from itself ({chain})")
    if next(read) == MOST_FILES:
        raise ConfigError(
            f"defaults: {(*children, path)[0]} inherits from more than {MOST_FILES} files, repetitions counted"
        )
    content = _read_yaml(path)
    return [*_read_parents(content, path, (*children, resolved), read), (str(path), content)]


def _read_parents(
    content: dict[str, Any], path: Path, children: tuple[Path, ...], read: Iterator[int]
) -> list[tuple[str, dict[str, Any]]]:
    """What ``defaults:``, which is taken out of ``content``, names, with its own parents."""
    parents = content.pop("defaults", None) or []
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(p, str) for p in parents):
        raise ConfigError(f"defaults: expected a file name or a list of file names ({path})")
    return [source for parent in parents for source in _read_with_parents(_parent(path, parent), children, read)]


def _parent(path: Path, name: str) -> Path:
    """A file beside the config that names it, or else one of the repository, wherever the config lies."""
    beside = path.parent / name
    return REPOSITORY / name if not beside.exists() and (REPOSITORY / name).is_file() else beside


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
        check_yaml(text)
        content = OmegaConf.load(io.StringIO(text))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file{_nearest_file(path) or _elsewhere(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except Refused as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_message(error, path)) from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {message_line(error)}") from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{path}: {message_line(error)}") from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path}: expected sections (run:, gdpo:, policy:, ...), found a list")
    return cast(dict[str, Any], OmegaConf.to_container(content, resolve=False))


def _read_override(text: str) -> tuple[str, dict[str, Any]]:
    key, equals, _ = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{text}: an override is written section.key=value")
    try:
        check_yaml(text.partition("=")[2])
        content = OmegaConf.from_dotlist([text])
    except Refused as error:
        raise ConfigError(f"{key}: {error}") from None
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"{key}: {text.partition('=')[2]!r} is not a YAML value (quote it?)") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {message_line(error)}") from None
    return "command line", cast(dict[str, Any], OmegaConf.to_container(content, resolve=False))


def build_config(merged: DictConfig) -> Config:
    """Resolve interpolations, check what only shows then, and build the dataclasses. Raises ConfigError."""
    unresolved = OmegaConf.to_container(merged)
    _remember_secrets(unresolved)
    check_interpolations(unresolved)
    try:
        _check_chosen(merged, "algorithm.type")  # first, because what must be set depends on it
        if not declares_sampling(merged.algorithm.type) and OmegaConf.is_missing(merged.gdpo, "rewards"):
            merged.gdpo.rewards = {}
        if OmegaConf.is_missing(merged.gdpo, "rewards"):
            if weights := weights_beside_rewards(cast(dict[str, Any], OmegaConf.to_container(merged.env))):
                merged.gdpo.rewards = weights
        written = OmegaConf.to_container(merged)
        values = _leaves(written).values()
        if any(isinstance(value, str) and (value == MISSING or "${" in value) for value in values):
            _resolve(merged)  # visits every value twice, so only if there is something to find
        config = cast(Config, OmegaConf.to_object(merged))
        content = OmegaConf.to_container(merged)
        _note_environment(written, content)
    except OmegaConfBaseException as error:
        raise _translated(error, "") from None
    _check(content, Config, "", "")
    for key in CHOICES:
        _check_chosen(merged, key)
    return config


def _resolve(merged: DictConfig) -> None:
    """Resolve interpolations. Raises ConfigError if a mandatory value is missing, OmegaConf's error as it is."""
    if missing := sorted(OmegaConf.missing_keys(merged)):
        raise ConfigError(f"{missing[0]}: must be set (gdpo-nemo explain {missing[0]} says what it is)")
    OmegaConf.resolve(merged)


def _check_chosen(merged: DictConfig, key: str) -> None:
    """Refuse a value of a key of ``CHOICES`` that is none of them, nor the place of a function. Raises ConfigError."""
    value = OmegaConf.select(merged, key)
    if not (key in OWN_FUNCTIONS and ":" in str(value)):
        _check_choice(key, value, CHOICES[key])


def _check(node: Any, hint: Any, key: str, source: str) -> None:
    """Walk ``node`` along the type ``hint``; raises ConfigError for the first unknown key or wrong type."""
    if isinstance(node, str) and ("${" in node or node == MISSING):
        return  # Interpolations are checked once resolved, mandatory values once merged.
    if get_origin(hint) is Union:
        if node is None:
            return
        hint = next(a for a in get_args(hint) if a is not type(None))
    if hint is Any:
        return
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        _check_section(node, hint, key, source)
    elif get_origin(hint) is dict:
        for name, value in _mapping(node, key, source).items():
            _check(value, get_args(hint)[1], _join(key, name), source)
    elif get_origin(hint) is list:
        if not isinstance(node, list):
            raise _wrong(key, "a list", node, source)
        for index, value in enumerate(node):
            _check(value, get_args(hint)[0], f"{key}[{index}]", source)
    elif not _fits(node, hint):
        raise _wrong(key, _SCALARS[hint], node, source)


def _check_section(node: Any, section: type, key: str, source: str) -> None:
    hints = _field_types(section)
    for name, value in _mapping(node, key, source).items():
        if name not in hints:
            raise ConfigError(f"{_join(key, name)}: unknown key{_where(source)}{_nearest_key(key, str(name), hints)}")
        _check(value, hints[name], _join(key, name), source)


def _mapping(node: Any, key: str, source: str) -> Mapping[Any, Any]:
    if node is None:
        raise ConfigError(f"{key}: is empty; give it keys or remove it{_where(source)}")
    if not isinstance(node, Mapping):
        raise _wrong(key, "keys and values", node, source)
    return node


def _fits(value: Any, kind: type) -> bool:
    """Stricter than OmegaConf, which takes 3.7 for an integer and 2 for true."""
    if isinstance(value, bool):
        return kind is bool
    if kind is int:
        return isinstance(value, int)
    if kind is float:
        return isinstance(value, (int, float)) and not math.isnan(value)
    if kind is str:
        return isinstance(value, (str, int, float))
    return False


def _check_choice(key: str, value: str | None, names: Sequence[str]) -> None:
    if value is None or value in names:
        return
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"{key}: {value!r} is not one of its values; {hint}(accepted: {', '.join(names)})")


def all_keys(section: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, sections included, in order."""
    keys = []
    for name, hint in _field_types(section).items():
        keys.append(_join(prefix, name))
        inner = next((a for a in (hint, *get_args(hint)) if isinstance(a, type) and dataclasses.is_dataclass(a)), None)
        if inner:
            keys += all_keys(inner, keys[-1])
    return keys


def nearest_key(key: str) -> str | None:
    """The valid key most like ``key``: one with its last name anywhere, else the closest spelling."""
    keys = all_keys()
    same_name = [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]]
    near = difflib.get_close_matches(key, same_name or keys, n=1, cutoff=0.0 if same_name else 0.6)
    return near[0] if near else None


def _nearest_key(section: str, name: str, siblings: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(siblings), n=1, cutoff=0.7)
    best = _join(section, near[0]) if near else nearest_key(_join(section, name))
    if best:
        return f", did you mean {best}?"
    return f"; {section or 'the top level'} has {', '.join(siblings)}"


def _elsewhere(path: Path) -> str:
    """Describe where a relative path is looked up, and what is found there."""
    if path.is_absolute():
        return ""
    demo = DEMO.relative_to(REPOSITORY)
    return f" in the working directory or among those of the package; {demo} is the demo"


def _nearest_file(path: Path) -> str:
    folders = [folder for folder in (path.parent, REPOSITORY / path.parent) if folder.is_dir()]
    names = [file.name for folder in folders for file in folder.glob("*.yaml")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f", did you mean {path.parent / near[0]}?" if near else ""


def _wrong(key: str, expected: str, value: Any, source: str) -> ConfigError:
    got = "null" if value is None else without_secrets(repr(value))  # first: a part of a secret is not found any more
    got = got if len(got) <= 60 else got[:57] + "..."
    return ConfigError(f"{key or 'config'}: expected {expected}, got {got}{_where(source)}")


def _where(source: str) -> str:
    return f" ({source})" if source else ""


def _join(section: str, name: Any) -> str:
    return f"{section}.{name}" if section else str(name)


def _yaml_message(error: yaml.YAMLError, path: Path) -> str:
    mark = getattr(error, "problem_mark", None)
    line = f", line {mark.line + 1}" if mark else ""
    return f"{path}{line}: invalid YAML ({getattr(error, 'problem', None) or message_line(error)})"


def _translated(error: OmegaConfBaseException, source: str) -> ConfigError:
    key = getattr(error, "full_key", None) or "config"
    if isinstance(error, InterpolationKeyError):
        return ConfigError(f"{key}: {message_line(error)}; ${{...}} takes the full dotted key of another value")
    return ConfigError(f"{key}: {message_line(error)}{_where(source)}")
