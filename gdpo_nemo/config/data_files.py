"""Checks of the data files that a config names: paths, patterns, functions that return rows, and hub names."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from gdpo_nemo.config.algorithm_choice import is_transform
from gdpo_nemo.config.schema import Config, DatasetConfig, DifficultyConfig
from gdpo_nemo.models.sources import HUB_NAME
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.import_path import ImportPath

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".tsv")
"""Supported suffixes of data files."""


def splits_to_read(config: Config) -> tuple[str, ...]:
    """Return the names of the dataset splits that a training run reads."""
    validates = config.data.validation and (config.gdpo.val_period or config.gdpo.val_at_start)
    return ("train", "validation") if validates else ("train",)


def check_data_file(key: str, data: DatasetConfig) -> None:
    """Check the paths, the transform and the difficulty of a split. Raises ConfigError.

    A path may be a file with rows, a folder, a function, or the name of a dataset on the hub.
    """
    for path in data_paths(key, data):
        _check_data_path(f"{key}.path", path)
    if is_transform(data.type) and is_rows_function(data.type):
        ImportPath(data.type).find_function(f"{key}.type")
    if data.difficulty is not None:
        check_difficulty(f"{key}.difficulty", data.difficulty, data.shuffle)


def check_difficulty(key: str, chosen: DifficultyConfig, shuffle: bool) -> None:
    """Check the section ``difficulty`` of a split and that its file exists. Raises ConfigError."""
    if chosen.order not in (None, "easy_first", "hard_first"):
        raise ConfigError(f"{key}.order: must be easy_first or hard_first, got {chosen.order!r}")
    if chosen.order is not None and shuffle:
        raise ConfigError(f"{key}.order: conflicts with shuffle; set {key.removesuffix('difficulty')}shuffle: false")
    if chosen.min > chosen.max:
        raise ConfigError(f"{key}.min: must be at most max ({chosen.max:g}), got {chosen.min:g}")
    if not Path(os.path.expanduser(chosen.path)).is_file():
        raise ConfigError(f"{key}.path: {chosen.path} is not a file; create it with gdpo-nemo profile")


def data_paths(key: str, data: DatasetConfig) -> list[str]:
    """Return the paths of a split, with each pattern replaced by its sorted matches. Empty if path is not set.

    Raises:
        ConfigError: if a value is not text, or a pattern has no matches.
    """
    if data.path is None:
        return []
    paths = data.path if isinstance(data.path, (list, tuple)) else [data.path]
    if not paths:
        raise ConfigError(f"{key}.path: must not be an empty list")
    found = []
    for path in paths:
        if not isinstance(path, str) or not path:
            raise ConfigError(f"{key}.path: must be a path or a list of paths, got {path!r}")
        found += _matches(f"{key}.path", path)
    return found


def _matches(key: str, path: str) -> list[str]:
    # A path that exists is not a pattern, even if it contains wildcard characters.
    if not glob.has_magic(path) or is_local(path):
        return [path]
    files = sorted(name for name in glob.glob(os.path.expanduser(path), recursive=True) if os.path.isfile(name))
    if not files:
        raise ConfigError(f"{key}: no file matches {path} (looked in {Path.cwd()})")
    return files


def _check_data_path(key: str, entry: str) -> None:
    path = Path(os.path.expanduser(entry))
    if is_rows_function(entry):
        ImportPath(entry).find_function(key)
    elif path.is_file():
        if path.suffix not in DATA_SUFFIXES:
            raise ConfigError(f"{key}: {path} must end with one of {', '.join(DATA_SUFFIXES)}")
        if path.stat().st_size == 0:
            raise ConfigError(f"{key}: {path} is empty")
    elif path.exists() and not path.is_dir():
        raise ConfigError(f"{key}: {path} is a pipe or a device, not a file")
    elif is_broken_link(path):
        raise ConfigError(f"{key}: {path} is a broken symbolic link")
    elif is_local(entry):
        return
    elif path.suffix in DATA_SUFFIXES or not may_be_on_the_hub(entry.partition(":")[0]):
        raise ConfigError(f"{key}: {path} not found (looked in {Path.cwd()})")


def is_rows_function(path: str) -> bool:
    """Return whether ``path`` names a function that returns rows, ``file.py:function``."""
    return ImportPath(path).is_in_file and re.fullmatch(r"\w+", ImportPath(path).name) is not None


def is_local(path: str) -> bool:
    """Return whether ``path`` is a local file or folder, possibly followed by a configuration
    (``folder:configuration``)."""
    return Path(os.path.expanduser(path)).exists() or Path(os.path.expanduser(path.partition(":")[0])).is_dir()


def is_broken_link(path: Path) -> bool:
    """Return whether ``path`` is a broken symbolic link. A broken link must not be looked up on the hub."""
    return os.path.lexists(path) and not os.path.exists(path)


def may_be_on_the_hub(name: str) -> bool:
    """Return whether ``name`` has the form ``organisation/name`` of a hub name.

    False if the first part is a local folder, because the name is then probably a misspelt path.
    """
    return bool(HUB_NAME.fullmatch(name)) and not Path(name.split("/")[0]).is_dir()
