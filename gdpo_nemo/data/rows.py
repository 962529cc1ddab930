"""Rows of a dataset as plain dictionaries, from a JSON Lines, JSON or Parquet file, a Hugging Face dataset, or an
environment that makes its own. Needs no tokenizer, so that a dry run can check everything here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping

from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.wording import first_line, nearest
from gdpo_nemo.errors import ConfigError

PROMPT_KEYS = ("messages", "prompt", "question", "problem")
"""Columns that are taken for the prompt when the config names none, in this order."""

Row = dict[str, Any]


def environment_of(dataset: DatasetConfig, environments: Mapping[str, Any], split: str) -> str:
    """The name in ``env`` of the environment that verifies this split's prompts. Raises ConfigError.

    With ``environment_key`` it is that of the rows which name none, and may be empty.
    """
    if dataset.environment is not None:
        if dataset.environment not in environments:
            hint = nearest(dataset.environment, environments)
            raise ConfigError(f"data.{split}.environment: env has no {dataset.environment!r}{hint}")
        return dataset.environment
    if dataset.environment_key is not None and len(environments) != 1:
        return ""
    if len(environments) != 1:
        names = ", ".join(environments) or "none"
        raise ConfigError(
            f"data.{split}.environment: must be set unless env has exactly one environment (it has: {names})"
        )
    return next(iter(environments))


def environment_of_row(
    row: Row, dataset: DatasetConfig, environments: Mapping[str, Any], split: str, index: int
) -> str:
    """The name in ``env`` of the environment that verifies row ``index``. Raises ConfigError."""
    named = row.get(dataset.environment_key) if dataset.environment_key is not None else None
    name = environment_of(dataset, environments, split) if named is None else named
    if not isinstance(name, str) or name not in environments:
        what = f"env has no {name!r}{nearest(str(name), environments)}" if name else "names no environment"
        raise ConfigError(f"data.{split}.environment_key: row {index}: {what}")
    return name


def load_rows(dataset: DatasetConfig, environments: Mapping[str, Any], split: str, seed: int) -> list[Row]:
    """The rows of one split, columns renamed and cut at ``dataset.size``, each with an ``id`` that is unique.

    A column ``id`` is the id; without one it is ``<split>/<row index>``.

    Args:
        dataset: the section ``data.<split>``.
        environments: the built environments by their names in the section ``env``.
        split: train or validation; also what an environment is asked for when ``dataset.split`` is null.
        seed: for environments that draw their rows.

    Raises:
        ConfigError: a missing or malformed file (with file and line), an unknown dataset or column, no rows, an id
            that occurs twice.
    """
    if dataset.path is None:
        rows = _rows_of_environment(dataset, environments, split, seed)
    else:
        rows = _rows_of_path(dataset, split)[: dataset.size]
        if dataset.columns:
            rows = [_renamed(row, dataset.columns, split, index) for index, row in enumerate(rows)]
        rows = _read_by_environment(rows, dataset, environments, split)
    if not rows:
        raise ConfigError(f"data.{split}: {dataset.path or 'the environment'} has no rows")
    return _identified(rows, split)


def _rows_of_environment(dataset: DatasetConfig, environments: Mapping[str, Any], split: str, seed: int) -> list[Row]:
    name = environment_of(dataset, environments, split)
    environment = environments[name]
    if not hasattr(environment, "rows"):
        raise ConfigError(f"data.{split}.path: must be set, the environment {name!r} makes no prompts of its own")
    return [dict(row) for row in environment.rows(dataset.split or split, dataset.size, seed)]


def _read_by_environment(
    rows: list[Row], dataset: DatasetConfig, environments: Mapping[str, Any], split: str
) -> list[Row]:
    """Rows in a form of their environment's own, read by it; the column that names the environment stays."""
    made = []
    for index, row in enumerate(rows):
        name = environment_of_row(row, dataset, environments, split, index)
        read = getattr(environments[name], "read_row", None)
        if read is None:
            made.append(row)
            continue
        named = {key: row[key] for key in (dataset.environment_key,) if key in row}
        try:
            made.append({**read(row), **named})
        except ConfigError as error:
            raise ConfigError(f"data.{split}: row {index} {error}") from None
    return made


def _rows_of_path(dataset: DatasetConfig, split: str) -> list[Row]:
    path = Path(dataset.path).expanduser()
    if path.is_dir():
        return _rows_of_hugging_face(dataset, split)
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    looks_like_file = path.suffix in readers or dataset.path.startswith((".", "/", "~"))
    if not path.is_file():
        if looks_like_file:
            raise ConfigError(f"data.{split}.path: no such file: {path}")
        return _rows_of_hugging_face(dataset, split)
    if path.suffix not in readers:
        raise ConfigError(f"data.{split}.path: {path} must end with one of {', '.join(readers)}")
    try:
        return readers[path.suffix](path)
    except OSError as error:
        raise ConfigError(f"data.{split}.path: cannot read {path}: {error.strerror or first_line(error)}") from error


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # both bad JSON and bad UTF-8 are ValueErrors
                raise ConfigError(f"{path}:{number}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: a row must be a JSON object, not {type(row).__name__}")
            rows.append(row)
    return rows


def _read_json(path: Path) -> list[Row]:
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: must hold a list of JSON objects")
    return rows


def _read_parquet(path: Path) -> list[Row]:
    from pyarrow import ArrowException, parquet

    try:
        return parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise ConfigError(f"{path}: not a readable Parquet file: {first_line(error)}") from error


def _rows_of_hugging_face(dataset: DatasetConfig, split: str) -> list[Row]:
    """Rows of a dataset on the hub (``name`` or ``name:configuration``), or of a local folder of either kind."""
    import datasets

    wanted = dataset.split or split
    name, _, configuration = dataset.path.partition(":")
    folder = Path(name).expanduser()
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            table = datasets.load_from_disk(str(folder))
            table = table[wanted] if isinstance(table, datasets.DatasetDict) else table
        else:
            name = str(folder) if folder.is_dir() else name
            table = datasets.load_dataset(name, configuration or None, split=wanted)
    except Exception as error:  # the library raises many kinds; all mean that these rows cannot be had
        raise ConfigError(
            f"data.{split}.path: cannot load split {wanted!r} of {dataset.path}: {first_line(error)}"
        ) from error
    return table.to_list()


def _renamed(row: Row, columns: Mapping[str, str], split: str, index: int) -> Row:
    """The row with columns renamed by ``{new: old}``; an old name ``a.b`` reaches into a nested object."""
    values = {new: _column(row, old, split, index) for new, old in columns.items()}
    return {**{name: value for name, value in row.items() if name not in columns.values()}, **values}


def _column(row: Row, name: str, split: str, index: int) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(f"data.{split}.columns: row {index} has no column {name!r}{nearest(name, row)}")
        value = value[part]
    return value


def _identified(rows: list[Row], split: str) -> list[Row]:
    seen: dict[str, int] = {}
    for index, row in enumerate(rows):
        given = row.get("id")
        row["id"] = f"{split}/{index}" if given is None else str(given)
        if row["id"] in seen:
            raise ConfigError(f"data.{split}: rows {seen[row['id']]} and {index} have the same id {row['id']!r}")
        seen[row["id"]] = index
    return rows
