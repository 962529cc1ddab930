"""Conversion of YAML files and command-line overrides to a typed, checked ``Config``.

Each source (file, mapping or override) is checked against the schema before it is merged, so that a message can name
the file with the mistake. OmegaConf then merges the sources, resolves ``${...}`` and builds the dataclasses. Hydra's
groups, sweeps and ``+key`` syntax are deliberately not supported: a run is one file, its parents and a list of
``key=value``.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import io
import math
import operator
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from gdpo_nemo.algorithms.noise import resolved
from gdpo_nemo.config.algorithm_choice import ALGORITHMS, spec_named
from gdpo_nemo.config.allowed_values import CHOICES, CUSTOM_FUNCTIONS, SECTIONS_OFF
from gdpo_nemo.config.environment_algorithms import (
    EnvironmentAlgorithm,
    check_own_keys,
    default_rewards,
    own_configs,
)
from gdpo_nemo.config.interpolations import check_interpolations
from gdpo_nemo.config.objective_checks import environment_weights
from gdpo_nemo.config.schema import Config, GdpoConfig
from gdpo_nemo.utils.errors import (
    SHORTEST_SECRET,
    ConfigError,
    mask_urls,
    message_line,
    remember_secret,
    without_secrets,
)
from gdpo_nemo.utils.files import Refused, check_yaml, read_text, write_whole
from gdpo_nemo.utils.source import DEMO, REPOSITORY, find_file

MOST_FILES = 100
"""Maximum number of inherited files. A file that is inherited twice is counted twice."""
_SCALARS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}

ConfigSource = Union[str, "os.PathLike[str]", Mapping[str, Any], Config, None]
"""A YAML file, its content as a mapping, a loaded config, or None for the demo config."""
Overrides = Sequence[str] | Mapping[str, Any]
"""List of ``section.key=value`` texts, or mapping of dotted keys to Python values."""
Sources = list[tuple[str, dict[str, Any], bool]]
"""List of (name for messages, content, complete). If ``complete`` is True, a mapping of rewards or environments in the
content replaces earlier entries. If it is False, the new entries are added to the earlier entries."""
_LISTS = ("env", *ALGORITHMS, *(f"{name}.{key}" for name in ALGORITHMS for key in ("rewards", "weighting")))
"""Keys for which the value of an override is a complete mapping of rewards, options of a rule, or environments."""


def load_config(config: ConfigSource = None, overrides: Overrides = ()) -> Config:
    """Read a config with its parents (``defaults:``), apply the overrides and return the typed config.

    Files are searched in the working directory first, then in the package. In a config that a run has written,
    ``run.dir`` is the folder that contains the file. See ``_in_its_folder``.

    Raises:
        ConfigError: if anything does not fit the schema. The message has one line.
    """
    sources, changes = read_config(config), read_overrides(overrides)
    if isinstance(config, (Mapping, Config)):  # may hold values that cannot be pickled
        return build_config(merge_sources([*sources, *changes]))
    return build_config(merge_sources(changes, pickle.loads(_merged(pickle.dumps(sources)))))


def read_config(config: ConfigSource) -> Sources:
    """Return a config's parents, oldest first, followed by the config itself. Raises ConfigError."""
    if isinstance(config, Config):
        return [("config", config_to_dict(config), True)]
    if isinstance(config, Mapping):
        content = _plain(config)
        parents = _read_parents(content, Path("config"), (), count())
        return [*((source, parent, True) for source, parent in parents), ("config", content, True)]
    if config is not None and not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"config: expected a YAML file or a mapping, got {type(config).__name__}")
    path = DEMO if config is None else find_file(config) or Path(config)
    *parents, (source, content) = _read_with_parents(path, (), count())
    return [(name, content, True) for name, content in (*parents, (source, _in_its_folder(content, path)))]


CONFIG = "config.yaml"
"""Name of the config in a run folder."""
CONFIG_HISTORY = "config_history"
"""Folder in the run folder with all configs of the run."""


def _in_its_folder(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a config file. If a run wrote the file and its folder has been moved or copied since then,
    replace the old folder in ``run.dir`` and in all paths, so that the run is continued in the folder of the file.
    """
    history = path.parent.name == CONFIG_HISTORY
    folder = path.parent.parent if history else path.parent
    run = content.get("run")
    before = run.get("dir") if isinstance(run, dict) else None
    if not isinstance(before, str) or "${" in before or not (history or path.name == CONFIG):
        return content
    if not (folder / CONFIG_HISTORY).is_dir() or os.path.realpath(before) == os.path.realpath(folder):
        return content
    return cast(dict[str, Any], _moved(content, before.rstrip("/"), os.path.abspath(folder)))


def _moved(node: Any, before: str, now: str) -> Any:
    """Return YAML data in which texts that are in the folder ``before`` are in the folder ``now``."""
    if isinstance(node, dict):
        return {key: _moved(value, before, now) for key, value in node.items()}
    if isinstance(node, list):
        return [_moved(value, before, now) for value in node]
    inside = isinstance(node, str) and (node.rstrip("/") == before or node.startswith(f"{before}/"))
    return now + node[len(before) :] if inside else node


def read_overrides(overrides: Overrides) -> Sources:
    """Return the overrides as sources, in the given order. Raises ConfigError."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: expected a list or a mapping, got the text {overrides!r}")
    if isinstance(overrides, Mapping):
        return [("overrides", _nested(str(key), _plain(value)), str(key) in _LISTS) for key, value in overrides.items()]
    return [(*_read_override(text), text.partition("=")[0] in _LISTS) for text in overrides]


def merge_sources(sources: Sources, merged: DictConfig | None = None) -> DictConfig:
    """Check each source against the schema and merge all of them in order. Raises ConfigError.

    Args:
        merged: config to merge into, which is changed in place. None: a new config with the schema's defaults.
    """
    merged = pickle.loads(_merged()) if merged is None else merged
    named: list[tuple[str, str]] = []
    algorithms = {merged.algorithm.type}
    for source, raw, complete in sources:
        content, names = _with_shared_section(raw, source)
        named += [(name, source) for name in names if name != "gdpo"]
        content = _switch_off(content, merged)
        _check(content, Config, "", source)
        try:
            if complete:
                _replace_listed(merged, content)
            merged.merge_with(content)
        except OmegaConfBaseException as error:
            raise _translated(error, source) from None
        algorithms.add(merged.algorithm.type)
    for name, source in named:
        if name not in algorithms:
            raise ConfigError(
                f"{name}: algorithm.type is {merged.algorithm.type}; name this section gdpo or set "
                f"algorithm.type to {name}{_where(source)}"
            )
    return merged


def _with_shared_section(raw: dict[str, Any], source: str) -> tuple[dict[str, Any], list[str]]:
    """Return ``raw`` with the section that all algorithms share under its name ``gdpo``, and its names in ``raw``.

    As in NeMo-RL, a config may give this section the name of its algorithm: ``sft.max_num_steps``. The section ``ppo``
    then contains keys of both ``gdpo`` and ``ppo``. Raises ConfigError if the section has two names or an unknown key.
    """
    content, names = dict(raw), ["gdpo"] * ("gdpo" in raw)
    shared, sections = _field_types(GdpoConfig), _field_types(Config)
    for name in [name for name in raw if name in ALGORITHMS and name != "gdpo"]:
        own = _field_types(sections[name]) if name in sections else {}
        found: dict[str, dict[str, Any]] = {"gdpo": {}, name: {}}
        for key, value in _mapping(content.pop(name), name, source).items():
            if key not in shared and key not in own:
                hint = _nearest_key(name, str(key), {**own, **shared})
                raise ConfigError(f"{name}.{key}: unknown key{_where(source)}{hint}")
            found[name if key in own else "gdpo"][key] = value
        if found["gdpo"] and names:
            raise ConfigError(f"{name}: names the same section as {names[0]}; use one of the names{_where(source)}")
        names += [name] * bool(found["gdpo"])
        content |= {section: keys for section, keys in found.items() if keys}
    return content, names


@functools.lru_cache(maxsize=16)
def _merged(sources: bytes = b"") -> bytes:
    """Return the pickled schema, merged with pickled sources. Loading it takes a tenth of the time of creating it."""
    return pickle.dumps(merge_sources(pickle.loads(sources)) if sources else OmegaConf.structured(Config))


_field_types = functools.cache(get_type_hints)


def _switch_off(content: dict[str, Any], merged: DictConfig) -> dict[str, Any]:
    """Return ``content`` with each null section replaced by its disabling key, and reset that section in ``merged``."""
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
    """Return a copy of nested mappings with ``value`` at ``path``."""
    name, *inner = path
    return {**content, name: _with_value(content[name], inner, value) if inner else value}


def _plain(value: Any) -> Any:
    """Convert a value to YAML types: mappings to dictionaries, sequences to lists, and paths to strings."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return nested mappings that contain ``value`` at the dotted ``key``. Raises ConfigError."""
    if not all(key.split(".")):
        raise ConfigError(f"{key!r}: expected an override of the form section.key")
    content: Any = value
    for name in reversed(key.split(".")):
        content = {name: content}
    return dict(content)


def _replace_listed(merged: DictConfig, content: Mapping[str, Any]) -> None:
    """Remove the rewards, options of ``gdpo.weighting`` and environments from ``merged`` that a complete mapping in
    ``content`` does not list.

    An environment that is listed in both keeps its earlier options. Overrides such as ``gdpo.rewards.format=2`` and
    ``env.mine.strict=true`` only change single entries.
    """
    for name in ("rewards", "weighting"):
        if (content.get("gdpo") or {}).get(name) is not None:
            merged.gdpo[name] = {}
    listed = content.get("env")
    if isinstance(listed, Mapping) and not OmegaConf.is_missing(merged, "env"):
        for name in [name for name in merged.env if name not in listed]:
            del merged.env[name]


def config_to_dict(config: Config) -> dict[str, Any]:
    """Return the config as nested dictionaries, in the order of the schema."""
    return dataclasses.asdict(config)


_WRITTEN: dict[tuple[Any, ...], tuple[Any, str]] = {}
"""(value, original text) of config values from environment variables, by path, for all configs of this process."""
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)[^}]*\}")


def recorded(config: Config) -> dict[str, Any]:
    """Return the config as it is displayed and stored.

    A value from an environment variable (``${oc.env:NAME}``) is replaced by its original text. Passwords in URLs are
    masked.
    """
    content = config_to_dict(config)
    for path, (value, written) in _WRITTEN.items():
        node: Any = content
        for name in path[:-1]:
            try:
                node = node[name]
            except (IndexError, KeyError, TypeError):  # the config has no value at this path
                node = None
        if isinstance(node, (dict, list)) and _leaves(node).get((path[-1],)) == value:
            node[path[-1]] = written
    return cast(dict[str, Any], _masked(content))


def _masked(node: Any) -> Any:
    if isinstance(node, dict):  # YAML 1.1 reads the key `on` of a condition as true
        return {"on" if key is True else key: _masked(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_masked(value) for value in node]
    return mask_urls(node) if isinstance(node, str) else node


def _leaves(node: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return the leaf values of nested dictionaries and lists, by path."""
    if not isinstance(node, (dict, list)):
        return {path: node}
    branches = node.items() if isinstance(node, dict) else enumerate(node)
    found: dict[tuple[Any, ...], Any] = {}
    for name, branch in branches:
        found |= _leaves(branch, (*path, name))
    return found


def _note_environment(before: Any, after: Any) -> None:
    """Record the config values from environment variables, by comparing a config before and after its interpolations
    are resolved."""
    resolved = _leaves(after)
    texts = {path: text for path, text in _leaves(before).items() if isinstance(text, str) and "${" in text}
    direct = {path for path, text in texts.items() if "${oc.env:" in text}
    secrets = [value for path in direct if len(value := str(resolved.get(path, ""))) >= SHORTEST_SECRET]
    for path, text in texts.items():
        if path not in resolved:
            continue
        if path in direct or any(secret in str(resolved[path]) for secret in secrets):
            _WRITTEN[path] = (resolved[path], text)


def _remember_secrets(written: Any) -> None:
    """Register the values of environment variables, so that all later messages mask them."""
    for text in _leaves(written).values():
        for found in _FROM_ENVIRONMENT.finditer(text if isinstance(text, str) else ""):
            if found[1] in os.environ:
                remember_secret(os.environ[found[1]], found[0])


def save_config(config: Config, path: str | Path) -> None:
    """Write the resolved config as YAML. The file is replaced atomically and synced to disk."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_yaml(config), sync=True)


def to_yaml(config: Config) -> str:
    """Return the resolved config as YAML text.

    ``load_config`` restores an equal config from this text if the environment variables are the same (see
    ``recorded``).
    """
    return OmegaConf.to_yaml(OmegaConf.create(recorded(config)))


def _read_with_parents(path: Path, children: tuple[Path, ...], read: Iterator[int]) -> list[tuple[str, dict[str, Any]]]:
    """Return a file's parents, oldest first, followed by the file itself, each as (name for messages, content).

    ``children`` are the files that inherit from this file, outermost first. ``read`` counts the files read so far.
    """
    resolved = Path(os.path.realpath(path))  # Unlike Path.resolve, realpath never raises.
    if resolved in children:
        chain = " -> ".join(p.name for p in (*children, resolved))
        raise ConfigError(f"defaults: {path} inherits from itself ({chain})")
    if next(read) == MOST_FILES:
        raise ConfigError(
            f"defaults: {(*children, path)[0]} inherits from more than {MOST_FILES} files, including repetitions"
        )
    content = _read_yaml(path)
    return [*_read_parents(content, path, (*children, resolved), read), (str(path), content)]


def _read_parents(
    content: dict[str, Any], path: Path, children: tuple[Path, ...], read: Iterator[int]
) -> list[tuple[str, dict[str, Any]]]:
    """Remove ``defaults:`` from ``content`` and return the files that it lists, each preceded by its parents."""
    parents = content.pop("defaults", None) or []
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(p, str) for p in parents):
        raise ConfigError(f"defaults: expected a file name or a list of file names ({path})")
    sources = []
    for parent in parents:
        sources += _read_with_parents(_parent(path, parent), children, read)
    return sources


def _parent(path: Path, name: str) -> Path:
    """Return the path of a parent file, searched next to the file that names it and then in the repository."""
    sibling = path.parent / name
    return REPOSITORY / name if not sibling.exists() and (REPOSITORY / name).is_file() else sibling


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = _parse(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: config file not found{_nearest_file(path) or _elsewhere(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except Refused as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_message(error, path)) from None
    except (OmegaConfBaseException, ValueError) as error:  # ValueError: a number with thousands of digits
        raise ConfigError(f"{path}: {message_line(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected sections (run:, gdpo:, policy:, ...), found a list")
    return copy.deepcopy(content)


@functools.lru_cache(maxsize=16)
def _parse(text: str) -> Any:
    """Return the content of a YAML text, which callers must copy. Raises Refused and errors of YAML and OmegaConf."""
    check_yaml(text)
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))


def _read_override(text: str) -> tuple[str, dict[str, Any]]:
    key, equals, _ = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{text}: expected an override of the form section.key=value")
    try:
        check_yaml(text.partition("=")[2])
        content = OmegaConf.from_dotlist([text])
    except Refused as error:
        raise ConfigError(f"{key}: {error}") from None
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"{key}: {text.partition('=')[2]!r} is not a valid YAML value; it may need quotes") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {message_line(error)}") from None
    return "command line", cast(dict[str, Any], OmegaConf.to_container(content, resolve=False))


def build_config(merged: DictConfig) -> Config:
    """Resolve interpolations, check the resolved values and build the dataclasses. Raises ConfigError."""
    written = OmegaConf.to_container(merged)
    _remember_secrets(written)
    check_interpolations(written)
    try:
        _check_choice("algorithm.type", OmegaConf.select(merged, "algorithm.type"))  # determines the mandatory keys
        samples = spec_named(merged.algorithm.type).samples
        if OmegaConf.is_missing(merged.gdpo, "rewards"):
            environments = cast(dict[str, Any], OmegaConf.to_container(merged.env)) if samples else {}
            weights = environment_weights(environments) or default_rewards(environments)
            if weights or not samples:
                merged.gdpo.rewards = weights
                written = OmegaConf.to_container(merged)
        content: Any = written
        texts = [value for value in _leaves(written).values() if isinstance(value, str)]
        if MISSING in texts:
            missing = sorted(OmegaConf.missing_keys(merged))
            raise ConfigError(f"{missing[0]}: must be set (gdpo-nemo explain {missing[0]} describes it)")
        if any("${" in text for text in texts):
            _resolve(merged)
            content = OmegaConf.to_container(merged)
            _note_environment(written, content)
        config = cast(Config, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise _translated(error, "") from None
    _check(content, Config, "", "")
    config.gdpo.noise = _measured(config.gdpo)
    for key in CHOICES:
        _check_choice(key, functools.reduce(operator.getitem, key.split("."), content))
    _check_own_algorithms(config)
    return config


def _check_own_algorithms(config: Config) -> None:
    """Check keys, types and choices of the algorithms of single environments. Raises ConfigError."""
    for name, options in config.env.items():
        if isinstance(options, dict) and "algorithm" in options:
            _check(options["algorithm"], EnvironmentAlgorithm, f"env.{name}.algorithm", "")
            check_own_keys(name, options["algorithm"])
    for name, own in own_configs(config).items():
        content = dataclasses.asdict(own)
        for key in CHOICES:
            try:
                _check_choice(key, functools.reduce(operator.getitem, key.split("."), content))
            except ConfigError as error:
                raise error.within(f"env.{name}.algorithm") from None


def _measured(gdpo: GdpoConfig) -> dict[str, Any]:
    """Return ``gdpo.noise`` with the values of its file, so that the config of a run does not depend on the file."""
    try:
        return resolved(gdpo.noise, gdpo.rewards)
    except ValueError as error:
        raise ConfigError(f"gdpo.{error}") from None


def _resolve(merged: DictConfig) -> None:
    """Resolve interpolations. Raises OmegaConf's errors, with the key of the wrong value."""
    try:
        OmegaConf.resolve(merged)
    except OmegaConfBaseException:
        OmegaConf.missing_keys(merged)  # visits each value, and its error has the key, which is missing in `resolve`
        raise


def _check(node: Any, hint: Any, key: str, source: str) -> None:  # noqa: C901
    """Check a value against the type ``hint``. Raises ConfigError at the first unknown key or wrong type."""
    if isinstance(node, str) and ("${" in node or node == MISSING):
        return  # Interpolations are checked after resolving, and mandatory values after merging.
    if get_origin(hint) in (Union, UnionType):
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
        raise ConfigError(f"{key}: is empty; add keys or remove it{_where(source)}")
    if not isinstance(node, Mapping):
        raise _wrong(key, "keys and values", node, source)
    return node


def _fits(value: Any, kind: type) -> bool:
    """Return whether a value has the type ``kind``. OmegaConf is less strict: it accepts 3.7 as an integer and 2 as
    true."""
    if isinstance(value, bool):
        return kind is bool
    if kind is int:
        return isinstance(value, int)
    if kind is float:
        return isinstance(value, (int, float)) and not math.isnan(value)
    return kind is str and isinstance(value, (str, int, float))


def _check_choice(key: str, value: Any) -> None:
    """Raise ConfigError if the value of a key is neither listed in ``CHOICES`` nor a permitted import path."""
    names = CHOICES[key]
    if value is None or value in names or (key in CUSTOM_FUNCTIONS and ":" in str(value)):
        return
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"{key}: {value!r} is not a valid value; {hint}(accepted: {', '.join(names)})")


def all_keys(section: type = Config, prefix: str = "") -> list[str]:
    """Return all dotted keys of the schema in order, including those of sections."""
    keys = []
    for name, hint in _field_types(section).items():
        keys.append(_join(prefix, name))
        inner = next((a for a in (hint, *get_args(hint)) if isinstance(a, type) and dataclasses.is_dataclass(a)), None)
        if inner:
            keys += all_keys(inner, keys[-1])
    return keys


def nearest_key(key: str) -> str | None:
    """Return the valid key most similar to ``key``, preferably one with the same last part. None if no key is
    similar."""
    keys = all_keys()
    same_name = [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]]
    near = difflib.get_close_matches(key, same_name or keys, n=1, cutoff=0.0 if same_name else 0.6)
    return near[0] if near else None


def _nearest_key(section: str, name: str, siblings: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(siblings), n=1, cutoff=0.7)
    best = _join(section, near[0]) if near else nearest_key(_join(section, name))
    known = f"; known keys of {section or 'the top level'}: {', '.join(siblings)}"
    return f", did you mean {best}?" if best else known


def _elsewhere(path: Path) -> str:
    """Return where a relative path is searched, for a message about a missing file. Empty for an absolute path."""
    where = f" in the working directory or the package; the demo is {DEMO.relative_to(REPOSITORY)}"
    return "" if path.is_absolute() else where


def _nearest_file(path: Path) -> str:
    files = [*path.parent.glob("*.yaml"), *(REPOSITORY / path.parent).glob("*.yaml")]
    names = [file.name for file in files]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f", did you mean {path.parent / near[0]}?" if near else ""


def _wrong(key: str, expected: str, value: Any, source: str) -> ConfigError:
    # Secrets are masked before the text is cut, because a partial secret would not be found.
    got = "null" if value is None else without_secrets(repr(value))
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
        return ConfigError(f"{key}: {message_line(error)}; ${{...}} requires the full dotted key of another value")
    return ConfigError(f"{key}: {message_line(error)}{_where(source)}")
