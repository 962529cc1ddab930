"""Rows of a dataset as plain dictionaries, from JSON Lines, JSON, CSV, TSV or Parquet files, Hugging Face datasets, a
function, or an environment that makes its own. Needs no tokenizer, so that a dry run can check everything here.
"""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any, Iterator, Mapping

from gdpo_nemo.config.example_types import is_transform
from gdpo_nemo.config.files import DATA_SUFFIXES, check_data_file, data_places, is_rows_function
from gdpo_nemo.config.messages import first_line, nearest
from gdpo_nemo.config.objects import load_object
from gdpo_nemo.config.reading import HalfPair, check_pairs, open_file, parse_json
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.transforms import transformed
from gdpo_nemo.errors import ConfigError

PROMPT_KEYS = ("messages", "prompt", "question", "problem")
"""Columns that are taken for the prompt when the config names none, in this order."""

Row = dict[str, Any]


def environment_of(dataset: DatasetConfig, environments: Mapping[str, Any], split: str) -> str:
    """The name in ``env`` of the environment that verifies this split's prompts. Raises ConfigError.

    With ``environment_key`` it is that of the rows which name none, and may be empty; and so it is without
    environments, where nothing is sampled.
    """
    if not environments and dataset.environment is None and dataset.path is not None:
        return ""
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
    if not environments:
        return environment_of(dataset, environments, split)
    named = row.get(dataset.environment_key) if dataset.environment_key is not None else None
    name = environment_of(dataset, environments, split) if named is None else named
    if not isinstance(name, str) or name not in environments:
        what = f"env has no {name!r}{nearest(str(name), environments)}" if name else "names no environment"
        raise ConfigError(f"data.{split}.environment_key: row {index}: {what}")
    return name


def load_rows(
    dataset: DatasetConfig, environments: Mapping[str, Any], split: str, seed: int, at_most: int | None = None
) -> list[Row]:
    """The rows of one split, cut at ``dataset.size``, transformed and columns renamed, each with a unique ``id``.

    A column ``id`` is the id; without one it is ``<split>/<row index>``.

    Args:
        dataset: the section ``data.<split>``.
        environments: the built environments by their names in the section ``env``.
        split: train or validation; also what an environment is asked for when ``dataset.split`` is null.
        seed: for environments that draw their rows.
        at_most: rows to read from the beginning of the data, where less of it is enough; None: all.

    Raises:
        ConfigError: a missing or malformed file (with file and line), an unknown dataset or column, a transform that
            fails, no rows, an id that occurs twice.
    """
    if dataset.path is None:
        rows = _rows_of_environment(dataset, environments, split, seed)
    else:
        rows = transformed(_rows_of_path(dataset, split, at_most)[: dataset.size], dataset, split)
        if is_transform(dataset.type):
            _check_texts(rows, f"data.{split}.type: {dataset.type}")
        if dataset.columns:
            rows = [_renamed(row, dataset.columns, split, index) for index, row in enumerate(rows)]
        rows = _read_by_environment(rows, dataset, environments, split)
    if not rows:
        raise ConfigError(f"data.{split}: {dataset.path or 'the environment'} has no rows")
    return _identified(rows, split)


def _rows_of_environment(dataset: DatasetConfig, environments: Mapping[str, Any], split: str, seed: int) -> list[Row]:
    name = environment_of(dataset, environments, split)
    environment = environments[name]
    if not environment.makes_rows:
        raise ConfigError(f"data.{split}.path: must be set, the environment {name!r} makes no prompts of its own")
    rows = [dict(row) for row in environment.rows(dataset.split or split, dataset.size, seed)]
    _check_texts(rows, f"data.{split}: {name!r} made a row that cannot be used")
    return rows


def _read_by_environment(
    rows: list[Row], dataset: DatasetConfig, environments: Mapping[str, Any], split: str
) -> list[Row]:
    """Rows in a form of their environment's own, read by it; the column that names the environment stays."""
    made = []
    for index, row in enumerate(rows):
        name = environment_of_row(row, dataset, environments, split, index)
        if not environments:
            made.append(row)
            continue
        named = {key: row[key] for key in (dataset.environment_key,) if key in row}
        try:
            made.append({**environments[name].read_row(row), **named})
        except ConfigError as error:
            raise ConfigError(f"data.{split}: row {index} {error}") from None
    return made


def _rows_of_path(dataset: DatasetConfig, split: str, at_most: int | None) -> list[Row]:
    key = f"data.{split}"
    check_data_file(key, dataset)
    rows: list[Row] = []
    for place in data_places(key, dataset):
        rows += _rows_of_place(
            place, dataset.split or split, f"{key}.path", None if at_most is None else at_most - len(rows)
        )
    return rows


def _rows_of_place(place: str, split: str, key: str, at_most: int | None) -> list[Row]:
    path = Path(os.path.expanduser(place))
    if is_rows_function(place):
        return _rows_of_function(place, key)[:at_most]
    if not path.is_file():
        return _rows_of_hugging_face(place, split, key, at_most)
    try:
        return list(islice(_READERS[path.suffix](path), at_most))
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror or first_line(error)}") from error


def _rows_of_function(place: str, key: str) -> list[Row]:
    """What the function gives: a list of rows, or a dataset of Hugging Face's."""
    try:
        rows = [dict(row) for row in load_object(place)()]
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except (Exception, SystemExit) as error:  # the function is the user's
        raise ConfigError(f"{key}: {place} gave no rows: {first_line(error)}") from error
    _check_texts(rows, f"{key}: {place}")
    return rows


def _check_texts(rows: list[Row], where: str) -> None:
    """Refuse rows of user code that hold half a surrogate pair; files are checked as they are read."""
    for index, row in enumerate(rows):
        try:
            check_pairs(json.dumps(row, ensure_ascii=False, default=str, skipkeys=True))
        except HalfPair as error:
            raise ConfigError(f"{where}: row {index}: {error}") from None


def _read_jsonl(path: Path) -> Iterator[Row]:
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except HalfPair as error:
                raise ConfigError(f"{path}:{number}: {error}; correct or remove the row") from None
            except ValueError as error:  # both bad JSON and bad UTF-8 are ValueErrors
                raise ConfigError(f"{path}:{number}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: a row must be a JSON object, not {type(row).__name__}")
            yield row


def _read_json(path: Path) -> Iterator[Row]:
    try:
        rows = parse_json(path.read_bytes())
    except HalfPair as error:
        raise ConfigError(f"{path}: {error}; correct or remove the row") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: must hold a list of JSON objects")
    yield from rows


def _read_csv(path: Path, delimiter: str = ",", kind: str = "CSV") -> Iterator[Row]:
    """The first line names the columns; a cell may hold line breaks between quotes, numbers become numbers."""
    from pyarrow import ArrowException, csv

    try:
        table = csv.read_csv(path, parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True))
    except (ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable {kind} file: {first_line(error)}") from error
    yield from table.to_pylist()


def _read_tsv(path: Path) -> Iterator[Row]:
    return _read_csv(path, "\t", "TSV")


def _read_parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except ArrowException as error:
        raise ConfigError(f"{path}: not a readable Parquet file: {first_line(error)}") from error


_READERS = dict(zip(DATA_SUFFIXES, (_read_jsonl, _read_json, _read_csv, _read_parquet, _read_tsv), strict=True))


def _rows_of_hugging_face(place: str, wanted: str, key: str, at_most: int | None) -> list[Row]:
    """Rows of a dataset on the hub (``name`` or ``name:configuration``), or of a local folder of either kind."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    name, _, configuration = place.partition(":")
    folder = Path(os.path.expanduser(name))
    name = str(folder) if folder.is_dir() else name
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            table = datasets.load_from_disk(name)
            table = table[wanted] if isinstance(table, datasets.DatasetDict) else table
        else:
            table = datasets.load_dataset(name, configuration or None, split=wanted)
    except Exception as error:  # the library raises many kinds; all mean that these rows cannot be had
        _check_configuration(key, name, configuration, error)
        raise ConfigError(f"{key}: cannot load split {wanted!r} of {place}: {first_line(error)}") from error
    rows: list[Row] = (table if at_most is None else table.take(min(at_most, len(table)))).to_list()
    return rows


def _check_configuration(key: str, name: str, configuration: str, error: Exception) -> None:
    """Where a failure to load is about the dataset's configuration: refuse with those it has. Raises ConfigError."""
    import datasets

    if "config" not in str(error).lower():
        return
    try:
        known = datasets.get_dataset_config_names(name)
    except Exception:  # noqa: BLE001 - as when loading; then the first failure is the one to tell
        return
    if configuration in known or known == ["default"]:
        return
    if configuration:
        raise ConfigError(
            f"{key}: {name} has no configuration {configuration!r}{nearest(configuration, known)}"
        ) from error
    raise ConfigError(
        f"{key}: {name} has several configurations, {', '.join(known)}; write {name}:{known[0]}"
    ) from error


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
