"""Rows changed by a function of the user's own (``data.<split>.type: file.py:function``), as ``map`` of Hugging Face's
``datasets`` would: the columns that it returns replace or join the row's, those of ``remove_columns`` go.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Mapping, Sequence

from gdpo_nemo.config.example_types import is_transform
from gdpo_nemo.config.messages import first_line, nearest
from gdpo_nemo.config.objects import load_object
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.errors import ConfigError

Row = dict[str, Any]
Transform = Callable[[Row], Mapping[str, Any]]
ALL_COLUMNS = "__all__"
"""Value of ``remove_columns`` with which axolotl's functions remove every column that they do not return."""
_FACTORY = "cfg"
"""Name of the first parameter of axolotl's functions, which are called once and return the function of a row."""


def transformed(rows: Sequence[Row], dataset: DatasetConfig, split: str) -> list[Row]:
    """The rows after the split's transform, without the columns that are to be removed.

    Raises:
        ConfigError: the function is not there, fails or returns no columns (with the row's index); no row has a column
            that is to be removed.
    """
    transform, removed = _transform(dataset, split)
    known = dict.fromkeys(column for row in rows for column in row)
    names = {*dataset.remove_columns, *(known if removed is None else removed)}
    for name in dataset.remove_columns:
        if name not in known:
            raise ConfigError(f"data.{split}.remove_columns: there is no column {name!r}{nearest(name, known)}")
    kept = [{name: value for name, value in row.items() if name not in names} for row in rows]
    if transform is None:
        return kept
    where = f"data.{split}.type: {dataset.type}: row"
    return [{**rest, **_columns(transform, row, f"{where} {n}")} for n, (row, rest) in enumerate(zip(rows, kept))]


def _columns(transform: Transform, row: Row, where: str) -> Row:
    """What the transform returns for a row. Raises ConfigError."""
    try:
        found = transform(dict(row))
    except (Exception, SystemExit) as error:  # the function is the user's
        raise ConfigError(f"{where}: {first_line(error)}") from error
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{where}: must return the row's columns by name, not {_short(found)}")
    return dict(found)


def _transform(dataset: DatasetConfig, split: str) -> tuple[Transform | None, list[str] | None]:
    """Return the function of a row, if there is one, and the columns that it wants removed; None: all of them.

    A column that no row has is left out, as in axolotl. Raises ConfigError.
    """
    if not is_transform(dataset.type):
        return None, []
    where = f"data.{split}.type: {dataset.type}"
    try:
        function = load_object(dataset.type)
    except ConfigError as error:
        raise ConfigError(f"data.{split}.type: {error}") from error
    if not callable(function):
        raise ConfigError(f"{where}: must be a function, not {_short(function)}")
    try:
        if next(iter(inspect.signature(function).parameters), None) != _FACTORY:
            return function, []
        made = function(dataset)
    except (Exception, SystemExit) as error:  # the function is the user's
        raise ConfigError(f"{where}: {first_line(error)}") from error
    transform, how = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    if not callable(transform) or not isinstance(how, Mapping):
        raise ConfigError(
            f"{where}: takes {_FACTORY}, so it must return a function of a row, alone or with a mapping of options, "
            f"not {_short(made)}"
        )
    for name in how:
        if name != "remove_columns":
            raise ConfigError(f"{where}: returns the option {name!r}; remove_columns is the one there is")
    removed = how.get("remove_columns", [])
    if removed == ALL_COLUMNS:
        return transform, None
    if not isinstance(removed, (list, tuple)) or not all(isinstance(name, str) for name in removed):
        raise ConfigError(f"{where}: remove_columns must be a list of names, not {_short(removed)}")
    return transform, list(removed)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
