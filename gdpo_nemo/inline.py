"""Reward functions and rows of this process, as sections of a config and as files of the run's folder.

The sections name the files, so that a run can be resumed, evaluated and repeated from its folder alone. Functions that
a fresh process can import are named by their place instead, and read from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence, Union

from omegaconf import DictConfig, OmegaConf

from gdpo_nemo.config.load import (
    ConfigSource,
    Overrides,
    build_config,
    merge_sources,
    read_config,
    read_overrides,
)
from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.objects import PICKLE
from gdpo_nemo.config.schema import Config, DatasetConfig
from gdpo_nemo.config.writing import write_whole
from gdpo_nemo.errors import ConfigError, RunError

RewardFunction = Union[Callable[..., Any], str, Mapping[str, Any]]
"""A function, or what the option ``functions`` of the environment ``functions`` takes: a name, a place, or a mapping
with arguments."""
Reward = Union[RewardFunction, tuple[RewardFunction, float]]
"""With its weight; 1 without."""
Place = Union[str, "os.PathLike[str]"]
Rows = Union[Place, Sequence[Place], Iterable[Mapping[str, Any]]]
"""What ``data.train.path`` takes, or rows: a list of dictionaries, a ``datasets.Dataset``."""

_ENVIRONMENT = "functions"
_PICKLED = f"functions{PICKLE}"


@dataclass
class InlineRun:
    """A config, and the files of the run's folder that it names, by their names there."""

    config: Config
    files: dict[str, bytes] = field(default_factory=dict)


def inline_run(
    config: ConfigSource,
    rewards: Mapping[str, Reward] | None,
    data: Rows | None,
    validation: Rows | None,
    overrides: Overrides,
) -> InlineRun:
    """``config`` with these rewards and rows in place of its own, then the overrides; writes nothing.

    Raises:
        ConfigError: an argument is of the wrong form, a function or a row cannot be written down.
    """
    merged = merge_sources(read_config(config))
    files: dict[str, bytes] = {}
    if rewards is not None:
        files |= _use_rewards(merged, rewards, validation is not None)
    for split, rows in (("train", data), ("validation", validation)):
        if rows is not None:
            merged, file = _use_rows(merged, split, rows)
            files |= file
    return InlineRun(build_config(merge_sources(read_overrides(overrides), merged)), files)


def _use_rewards(merged: DictConfig, rewards: Mapping[str, Reward], validated: bool) -> dict[str, bytes]:
    """Put the functions in place of the config's environments and rewards; returns the file they need."""
    if not isinstance(rewards, Mapping) or not rewards:
        raise ConfigError("rewards: expected a mapping {component: function, or (function, weight)}")
    weights: dict[str, float] = {}
    entries: dict[str, str | Mapping[str, Any]] = {}
    pickled: dict[str, Callable[..., Any]] = {}
    for component, reward in rewards.items():
        function, weights[component] = _weighted(component, reward)
        if isinstance(function, (str, Mapping)):
            entries[component] = function
        elif place := _place(function):
            entries[component] = place
        else:
            pickled[component] = function
            entries[component] = f"${{run.dir}}/{_PICKLED}:{component}"
    before: Any = {} if OmegaConf.is_missing(merged, "env") else OmegaConf.to_container(merged.env, resolve=False)
    kinds = {name: (options or {}).get("plugin", name) for name, options in before.items()}
    name = next((name for name, kind in kinds.items() if kind == _ENVIRONMENT), _ENVIRONMENT)
    merged.env = {name: {**(before.get(name) or {}), "functions": entries}}
    merged.gdpo.rewards = weights
    _verify_with(merged, name, validated)
    return {_PICKLED: _dumped(pickled)} if pickled else {}


def _weighted(name: Any, reward: Reward) -> tuple[RewardFunction, float]:
    if not isinstance(name, str) or not name or ":" in name:
        raise ConfigError(f"rewards: {name!r} cannot name a component")
    function, weight = reward if isinstance(reward, tuple) and len(reward) == 2 else (reward, 1.0)
    if not (callable(function) or isinstance(function, (str, Mapping))):
        raise ConfigError(f"rewards.{name}: expected a function, or (function, weight), got {reward!r}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(f"rewards.{name}: expected a number as its weight, got {weight!r}")
    return function, float(weight)


def _verify_with(merged: DictConfig, environment: str, validated: bool) -> None:
    """Hand both splits to the environment. Held-out prompts that another one made are none any more."""
    held_out = merged.data.validation
    if held_out is not None and held_out.path is None and not validated:
        merged.data.validation = None
        merged.gdpo.val_period = 0
        merged.gdpo.val_at_start = False
        merged.checkpointing.metric_name = None
    for split in ("train", "validation"):
        if merged.data[split] is not None:
            merged.data[split].environment = environment
            merged.data[split].environment_key = None


def _place(function: Callable[..., Any]) -> str | None:
    """``module.name`` where a fresh process finds the function by that; None: it has to be pickled."""
    module = getattr(function, "__module__", None) or "__main__"
    name = getattr(function, "__qualname__", "")
    if not _importable(module) or not name.isidentifier():  # a lambda, a method, what a function has inside
        return None
    return f"{module}.{name}" if getattr(sys.modules.get(module), name, None) is function else None


def _importable(module: str) -> bool:
    """Whether another process, with the same sys.path, can import it; it runs no code."""
    return module != "__main__" and PathFinder.find_spec(module.partition(".")[0]) is not None


def _dumped(functions: Mapping[str, Callable[..., Any]]) -> bytes:
    """The functions with everything of ``__main__``, and of modules that nobody else can import, that they use."""
    import cloudpickle

    homes = {getattr(function, "__module__", None) or type(function).__module__ for function in functions.values()}
    modules = [sys.modules[name] for name in homes if name != "__main__" and not _importable(name)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        for name, function in functions.items():
            try:
                cloudpickle.dumps(function)
            except Exception as error:  # whatever the objects that it holds raise
                raise ConfigError(
                    f"rewards.{name}: cannot be handed to the processes that verify ({first_line(error)}); make what "
                    "it uses inside of it, or put it into a module"
                ) from error
        return bytes(cloudpickle.dumps(dict(functions)))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _use_rows(merged: DictConfig, split: str, rows: Rows) -> tuple[DictConfig, dict[str, bytes]]:
    """The config with these rows in place of those of the split, and the file they need."""
    key = "data" if split == "train" else split
    files = {}
    if isinstance(rows, (str, os.PathLike)):
        path: Any = os.fspath(rows)
    elif isinstance(rows, (list, tuple)) and rows and all(isinstance(row, (str, os.PathLike)) for row in rows):
        path = [os.fspath(row) for row in rows]
    else:
        content = _json_lines(key, rows)
        # By its content: a run never meets other rows under a name that it knows.
        name = f"data/{split}-{hashlib.sha256(content).hexdigest()[:12]}.jsonl"
        files[name] = content
        path = f"${{run.dir}}/{name}"
    if merged.data[split] is None:
        merged.data[split] = DatasetConfig(environment=merged.data.train.environment)
    return merge_sources([(key, {"data": {split: {"path": path, "split": None}}}, False)], merged), files


def _json_lines(key: str, rows: Any) -> bytes:
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        splits = f"; it has {', '.join(map(str, rows))}: pass one of them" if isinstance(rows, Mapping) else ""
        raise ConfigError(f"{key}: expected a path or a list of rows, got {type(rows).__name__}{splits}")
    lines = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{key}: row {index}: expected columns by name, got {type(row).__name__}")
        _check_json(f"{key}: row {index}", row)
        lines.append(json.dumps(dict(row), ensure_ascii=False) + "\n")
    if not lines:
        raise ConfigError(f"{key}: has no rows")
    return "".join(lines).encode()


def _check_json(place: str, value: Any) -> None:
    """``value`` comes back from a file as it is, but for tuples, which become lists. Raises ConfigError."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"{place}: the name {name!r} is no text")
            _check_json(f"{place}: {name}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_json(place, item)
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise ConfigError(f"{place}: holds a {type(value).__name__}; numbers, texts, lists and mappings are possible")


@contextlib.contextmanager
def written(folder: Path, files: Mapping[str, bytes]) -> Iterator[None]:
    """Write the files into the folder; put back what was there if the block refuses the config.

    Raises:
        RunError: they cannot be written.
    """
    paths = {folder / name: content for name, content in files.items()}
    new = [p for path in paths for p in path.parents if not p.exists()]
    before = {path: path.read_bytes() if path.is_file() else None for path in paths}
    try:
        for path, content in paths.items():
            if before[path] != content:
                _write(path, content)
        yield
    except ConfigError:
        for path, old in before.items():
            if old is None:
                path.unlink(missing_ok=True)
            else:
                _write(path, old)
        for made in sorted(set(new), reverse=True):
            with contextlib.suppress(OSError):  # it holds something else by now
                made.rmdir()
        raise


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from None
