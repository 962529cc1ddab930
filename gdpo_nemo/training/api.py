"""Python API: ``gdpo_nemo.train``, which accepts reward functions and rows of the calling process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gdpo_nemo.config.layout import Resolved
from gdpo_nemo.config.load import (
    ConfigSource,
    Overrides,
    build_config,
    merge_sources,
    read_config,
    read_overrides,
)
from gdpo_nemo.config.model_checks import check_creatable_folder
from gdpo_nemo.config.schema import Config, DatasetConfig
from gdpo_nemo.observe.display import NORMAL, QUIET, shown
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.ownership import check_free
from gdpo_nemo.training.supervisor import FIRST_ATTEMPT, Attempt
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError, RunError, first_line
from gdpo_nemo.utils.files import write_whole
from gdpo_nemo.utils.import_path import PICKLE
from gdpo_nemo.utils.import_trial import imports_tried
from gdpo_nemo.utils.progress import phase, quiet_torch
from gdpo_nemo.utils.signals import STOPPED

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class TrainResult:
    """Result of ``train``."""

    status: int
    """Exit status, as on the command line: 0 if the run is complete, or 130, 143 or 129 if it was ended early by
    SIGINT, SIGTERM or SIGHUP."""
    run_dir: Path
    """Run folder, with ``config.yaml``, ``metrics.jsonl``, ``report.html``, ``rollouts/`` and ``checkpoints/``."""
    model: Path | None
    """Folder with the final weights in Hugging Face's format.

    None if the run ended early, or if ``checkpointing.export_hf`` is false.
    """
    metrics: dict[str, float] = field(repr=False)
    """Metrics of the last step, by key. Empty if no step was completed."""
    validation: dict[str, float] = field(repr=False)
    """Metrics of the last validation, by key. Empty if no validation was run."""
    config: Config = field(repr=False)
    """Resolved config of the run."""

    @property
    def complete(self) -> bool:
        """True if the run completed all steps."""
        return self.status == 0

    def history(self) -> list[dict[str, Any]]:
        """Return all rows of ``metrics.jsonl`` in order. Rows of training steps contain a loss, and rows of validations
        do not."""
        return read_metrics(self.run_dir)


def train(
    config: ConfigSource = None,
    *,
    rewards: Mapping[str, Reward] | None = None,
    data: Rows | None = None,
    validation: Rows | None = None,
    overrides: Overrides = (),
) -> TrainResult:
    """Train until the last step. If the run folder already contains a run, resume it.

    Args:
        config: YAML file, its content as a mapping, a loaded config, or None for the demo config.
        rewards: reward functions by component name, with TRL's signature ``f(completions, **columns) -> list[float |
            None]``, or tuples (function, weight). The functions replace the environments and rewards of the config.
        data: training prompts, which replace those of the config: rows (dictionaries or a ``datasets.Dataset``), a
            file, or a dataset on the hub.
        validation: held-out prompts, of the same types as ``data``. None: the held-out prompts of the config. If
            ``rewards`` replace the environment that generates the held-out prompts, validation is disabled.
        overrides: mapping {"section.key": value}, or list of texts ``section.key=value``. Overrides are applied last.

    Raises:
        ConfigError: if an argument or the config is invalid. In this case, no file has been changed.
        RunError: if the run failed.
    """
    begin = time.time()
    quiet_torch()
    inline = inline_run(config, rewards, data, validation, overrides)
    check_creatable_folder("run.dir", inline.config.run.dir)
    check_free(Path(inline.config.run.dir))
    with written(Path(inline.config.run.dir), inline.files), imports_tried():
        return run(validate(inline.config), Attempt(begin=begin))


def run(resolved: Resolved, attempt: Attempt = FIRST_ATTEMPT) -> TrainResult:
    """Run a validated config. A process can have only one run at a time.

    Raises:
        ConfigError: if the config or an input is invalid.
        RunError: if the run failed, or this process already has a run.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise RunError("this process already has a run in flight; wait until it ends, or train in another process")
    try:
        with shown(sys.stdout, NORMAL, attempt.begin) as display:
            if resolved.config.logger.console == "quiet":
                display.level = QUIET
            with phase("imports"):
                from gdpo_nemo.training.trainer import run as fit

            status = fit(resolved, attempt)
    except SystemExit as end:  # The run received a signal before training had started, or a second signal.
        if end.code not in STOPPED:
            raise RunError(f"the run was ended by sys.exit({end.code!r})") from end
        status = int(end.code)
    finally:
        _one_at_a_time.release()
    return _result(resolved.config, status)


def _result(config: Config, status: int) -> TrainResult:
    run_dir = Path(config.run.dir).absolute()
    steps: dict[str, float] = {}
    validation: dict[str, float] = {}
    for row in read_metrics(run_dir):
        if "loss" in row:
            steps = row
        else:
            validation = row
    exported = status == 0 and config.checkpointing.export_hf
    return TrainResult(status, run_dir, run_dir / "model" if exported else None, steps, validation, config)


RewardFunction = Callable[..., Any] | str | Mapping[str, Any]
"""A function, or any value that the option ``functions`` of the environment ``functions`` accepts: a name, an import
path, or a mapping with arguments."""
Reward = RewardFunction | tuple[RewardFunction, float]
"""A reward function, or a tuple of a reward function and its weight. The default weight is 1."""
PathLike = str | os.PathLike[str]
Rows = PathLike | Sequence[PathLike] | Iterable[Mapping[str, Any]]
"""A value of ``data.train.path``, or the rows themselves: a list of dictionaries or a ``datasets.Dataset``."""

_ENVIRONMENT = "functions"
_PICKLED = f"functions{PICKLE}"


@dataclass
class InlineRun:
    """A config, and the contents of the files in the run folder that it refers to, by file name."""

    config: Config
    files: dict[str, bytes] = field(default_factory=dict)


def inline_run(
    config: ConfigSource,
    rewards: Mapping[str, Reward] | None,
    data: Rows | None,
    validation: Rows | None,
    overrides: Overrides,
) -> InlineRun:
    """Return ``config`` with the given rewards and rows, and with the overrides applied last. Writes no file.

    Raises:
        ConfigError: if an argument is invalid, or a function or row cannot be serialised.
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
    """Replace the environments and rewards of the config by functions. Returns the file with pickled functions, if
    any."""
    if not isinstance(rewards, Mapping) or not rewards:
        raise ConfigError("rewards: expected a mapping {component: function, or (function, weight)}")
    weights: dict[str, float] = {}
    entries: dict[str, str | Mapping[str, Any]] = {}
    pickled: dict[str, Callable[..., Any]] = {}
    for component, reward in rewards.items():
        function, weights[component] = _function_and_weight(component, reward)
        if isinstance(function, (str, Mapping)):
            entries[component] = function
        elif path := _import_path(function):
            entries[component] = path
        else:
            pickled[component] = function
            entries[component] = f"${{run.dir}}/{_PICKLED}:{component}"
    before: Any = {} if OmegaConf.is_missing(merged, "env") else OmegaConf.to_container(merged.env, resolve=False)
    kinds = {name: (options or {}).get("plugin", name) for name, options in before.items()}
    name = next((name for name, kind in kinds.items() if kind == _ENVIRONMENT), _ENVIRONMENT)
    merged.env = {name: {**(before.get(name) or {}), "functions": entries}}
    merged.gdpo.rewards = weights
    _assign_environment(merged, name, validated)
    return {_PICKLED: _pickled(pickled)} if pickled else {}


def _function_and_weight(name: Any, reward: Reward) -> tuple[RewardFunction, float]:
    if not isinstance(name, str) or not name or ":" in name:
        raise ConfigError(f"rewards: {name!r} is not a valid component name")
    function, weight = reward if isinstance(reward, tuple) and len(reward) == 2 else (reward, 1.0)
    if not (callable(function) or isinstance(function, (str, Mapping))):
        raise ConfigError(f"rewards.{name}: expected a function, or (function, weight), got {reward!r}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(f"rewards.{name}: expected a number as its weight, got {weight!r}")
    return function, float(weight)


def _assign_environment(merged: DictConfig, environment: str, validated: bool) -> None:
    """Select ``environment`` to verify both splits. Held-out prompts that another environment generates are removed."""
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


def _import_path(function: Callable[..., Any]) -> str | None:
    """Return ``module.name`` if another process can import the function, or None if it must be pickled."""
    module = getattr(function, "__module__", None) or "__main__"
    name = getattr(function, "__qualname__", "")
    if not _importable(module) or not name.isidentifier():  # a lambda, a method or a nested function
        return None
    return f"{module}.{name}" if getattr(sys.modules.get(module), name, None) is function else None


def _importable(module: str) -> bool:
    """Return True if another process with the same sys.path can import the module. The module is not executed."""
    return module != "__main__" and PathFinder.find_spec(module.partition(".")[0]) is not None


def _pickled(functions: Mapping[str, Callable[..., Any]]) -> bytes:
    """Pickle functions together with the objects that they use from ``__main__`` and from modules that are not
    importable. Raises ConfigError."""
    import cloudpickle

    homes = {getattr(function, "__module__", None) or type(function).__module__ for function in functions.values()}
    modules = [sys.modules[name] for name in homes if name != "__main__" and not _importable(name)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        for name, function in functions.items():
            try:
                cloudpickle.dumps(function)
            except Exception as error:  # Pickling may raise any exception of the contained objects.
                raise ConfigError(
                    f"rewards.{name}: cannot be pickled for the verification processes ({first_line(error)}); create "
                    "the objects that it uses inside it, or move it to a module"
                ) from error
        return bytes(cloudpickle.dumps(dict(functions)))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _use_rows(merged: DictConfig, split: str, rows: Rows) -> tuple[DictConfig, dict[str, bytes]]:
    """Return the config with these rows for a split, and the contents of the file to write."""
    key = "data" if split == "train" else split
    files = {}
    if isinstance(rows, (str, os.PathLike)):
        path: Any = os.fspath(rows)
    elif isinstance(rows, (list, tuple)) and rows and all(isinstance(row, (str, os.PathLike)) for row in rows):
        path = [os.fspath(row) for row in rows]
    else:
        content = _json_lines(key, rows)
        # The name contains a checksum, so that a resumed run never reads other rows under the same name.
        name = f"data/{split}-{hashlib.sha256(content).hexdigest()[:12]}.jsonl"
        files[name] = content
        path = f"${{run.dir}}/{name}"
    if merged.data[split] is None:
        merged.data[split] = DatasetConfig(environment=merged.data.train.environment)
    return merge_sources([(key, {"data": {split: {"path": path, "split": None}}}, False)], merged), files


def _json_lines(key: str, rows: Any) -> bytes:
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        splits = f" with the splits {', '.join(map(str, rows))}; pass one of them" if isinstance(rows, Mapping) else ""
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


def _check_json(key: str, value: Any) -> None:
    """Check that JSON preserves ``value``. Tuples are accepted, although they become lists.

    Raises:
        ConfigError: if JSON cannot represent the value. The message begins with ``key``.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"{key}: the name {name!r} must be a string")
            _check_json(f"{key}: {name}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_json(key, item)
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise ConfigError(f"{key}: expected numbers, strings, lists and mappings, got {type(value).__name__}")


@contextlib.contextmanager
def written(folder: Path, files: Mapping[str, bytes]) -> Iterator[None]:
    """Write files into the folder. If the block raises ConfigError, restore the previous state.

    Raises:
        RunError: if the files cannot be written.
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
        for created in sorted(set(new), reverse=True):
            with contextlib.suppress(OSError):  # The folder may not be empty any more.
                created.rmdir()
        raise


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from None
