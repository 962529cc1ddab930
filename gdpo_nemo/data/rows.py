"""Loading of dataset rows from files, the Hugging Face Hub, functions or environments, and their transforms."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, concurrent

from gdpo_nemo.algorithms.rubrics import ALL, is_family, read_rubric
from gdpo_nemo.config.algorithm_choice import is_transform
from gdpo_nemo.config.data_files import DATA_SUFFIXES, check_data_file, check_difficulty, data_paths, is_rows_function
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.utils.errors import ConfigError, first_line, nearest
from gdpo_nemo.utils.exits import exits_contained
from gdpo_nemo.utils.files import HalfPair, check_pairs, open_file, parse_json
from gdpo_nemo.utils.import_path import ImportPath

PROMPT_KEYS = ("messages", "prompt", "question", "problem")
"""Default prompt columns. The first of these columns that a row contains is used."""

Row = dict[str, Any]
_DEEPEST = 64
"""Maximum nesting depth of a column. Deeper values exceed Python's recursion limit in environment workers."""


def environment_of(dataset: DatasetConfig, environments: Mapping[str, Any], split: str) -> str:
    """Return the default environment of a split's rows, by its name in ``env``.

    The name is empty if ``environment_column`` selects the environment of each row and no default exists. The name is
    also empty in a run without environments, which does not sample.

    Raises:
        ConfigError: if the config does not determine an environment, or names an unknown environment.
    """
    if not environments and dataset.environment is None and dataset.path is not None:
        return ""
    if dataset.environment is not None:
        if dataset.environment not in environments:
            hint = nearest(dataset.environment, environments)
            raise ConfigError(f"data.{split}.environment: env does not define {dataset.environment!r}{hint}")
        return dataset.environment
    if environment_column(dataset, environments) is not None and len(environments) != 1:
        return ""
    if len(environments) != 1:
        names = ", ".join(environments) or "none"
        raise ConfigError(
            f"data.{split}.environment: must be set unless env has exactly one environment (it has: {names})"
        )
    return next(iter(environments))


def environment_column(dataset: DatasetConfig, environments: Mapping[str, Any]) -> str | None:
    """Return the column that names the environment of each row, or None if all rows have the same environment."""
    if dataset.path is None and dataset.environment is None and len(environments) > 1:
        return "environment"  # written by ``_rows_of_environments``
    return dataset.environment_key


def environment_of_row(
    row: Row, dataset: DatasetConfig, environments: Mapping[str, Any], split: str, index: int
) -> str:
    """Return the environment of row ``index``, by its name in ``env``. Raises ConfigError if the environment is
    unknown."""
    if not environments:
        return environment_of(dataset, environments, split)
    key = environment_column(dataset, environments)
    named = row.get(key) if key is not None else None
    name = environment_of(dataset, environments, split) if named is None else named
    if not isinstance(name, str) or name not in environments:
        problem = (
            f"env does not define {name!r}{nearest(str(name), environments)}"
            if name
            else "the row does not select an environment"
        )
        raise ConfigError(f"data.{split}.environment_key: row {index}: {problem}")
    return name


def load_rows(
    dataset: DatasetConfig, environments: Mapping[str, Any], split: str, seed: int, at_most: int | None = None
) -> list[Row]:
    """Load the rows of one split, apply the transform and rename the columns.

    At most ``dataset.size`` rows are returned. Every row has a unique ``id``, taken from its column ``id``. Rows
    without this column get the id ``<split>/<row index>``.

    Args:
        dataset: the section ``data.<split>``.
        environments: environment objects by name in the section ``env``.
        split: ``train`` or ``validation``. An environment that generates rows receives this name if ``dataset.split``
            is null.
        seed: random seed for environments that generate rows.
        at_most: maximum number of rows to read (None reads all rows).

    Raises:
        ConfigError: if a file is missing or malformed, a dataset or column is unknown, a transform fails, the split is
            empty, two rows have the same id, or the rubric of a row is invalid.
    """
    if dataset.path is None:
        rows = _rows_of_environments(dataset, environments, split, seed)
    else:
        rows = transformed(_rows_of_path(dataset, split, at_most)[: dataset.size], dataset, split)
        if is_transform(dataset.type):
            _check_texts(rows, f"data.{split}.type: {dataset.type}")
        if dataset.columns:
            rows = [_renamed(row, dataset.columns, split, index) for index, row in enumerate(rows)]
        rows = _read_by_environment(rows, dataset, environments, split)
    if not rows:
        raise ConfigError(f"data.{split}: {dataset.path or 'the environment'} has no rows")
    rows = _identified(rows, split)
    _check_rubrics(rows, dataset, environments, split)
    return _by_difficulty(rows, dataset, split)


def _rows_of_environments(dataset: DatasetConfig, environments: Mapping[str, Any], split: str, seed: int) -> list[Row]:
    """Return the rows that the environment of the split generates, or all environments if the split names none."""
    column = environment_column(dataset, environments)
    if column is None:
        return _rows_of_environment(environment_of(dataset, environments, split), dataset, environments, split, seed)
    rows = []
    for name in environments:
        for row in _rows_of_environment(name, dataset, environments, split, seed):
            # Ids are unique only within an environment.
            own_id = {"id": f"{name}/{row['id']}"} if row.get("id") is not None else {}
            rows.append({**row, **own_id, column: name})
    return rows


def _rows_of_environment(
    name: str, dataset: DatasetConfig, environments: Mapping[str, Any], split: str, seed: int
) -> list[Row]:
    environment = environments[name]
    if not environment.makes_rows:
        raise ConfigError(f"data.{split}.path: must be set because the environment {name!r} does not generate prompts")
    try:
        rows: list[Row] = list(map(dict, environment.rows(dataset.split or split, dataset.size, seed)))
    except ConfigError as error:
        raise error.within(f"env.{name}") from None
    _check_texts(rows, f"data.{split}: {name!r} returned an invalid row")
    return rows


def _read_by_environment(
    rows: list[Row], dataset: DatasetConfig, environments: Mapping[str, Any], split: str
) -> list[Row]:
    """Convert each row with its environment's ``read_row``. Keep the column that selects the environment."""
    converted = []
    for index, row in enumerate(rows):
        name = environment_of_row(row, dataset, environments, split, index)
        if not environments:
            converted.append(row)
            continue
        key = dataset.environment_key
        environment_column = {key: row[key]} if key in row else {}
        try:
            converted.append({**environments[name].read_row(row), **environment_column})
        except ConfigError as error:
            raise ConfigError(f"data.{split}: row {index} {error}") from None
    return converted


def _rows_of_path(dataset: DatasetConfig, split: str, at_most: int | None) -> list[Row]:
    key = f"data.{split}"
    check_data_file(key, dataset)
    rows: list[Row] = []
    for path in data_paths(key, dataset):
        left = None if at_most is None else at_most - len(rows)
        found = _rows_of_entry(path, dataset.split or split, f"{key}.path", left)
        _check_depth(found, f"{key}.path: {path}")
        rows += found
    return rows


def _rows_of_entry(entry: str, split: str, key: str, at_most: int | None) -> list[Row]:
    path = Path(os.path.expanduser(entry))
    if is_rows_function(entry):
        return _rows_of_function(entry, key) if at_most is None else _rows_in_time(entry, key, at_most)
    if not path.is_file():
        return _rows_of_hugging_face(entry, split, key, at_most)
    try:
        return list(islice(_READERS[path.suffix](path), at_most))
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror or first_line(error)}") from error


def _rows_of_function(import_path: str, key: str) -> list[Row]:
    """Call a user-defined function that returns a list of rows or a Hugging Face dataset, and return its rows."""
    try:
        with exits_contained():
            rows: list[Row] = list(map(dict, ImportPath(import_path).load()()))
    except ConfigError as error:
        raise error.within(key) from error
    except Exception as error:  # user code may raise any exception
        raise ConfigError(f"{key}: {import_path} returned no rows: {first_line(error)}") from error
    _check_texts(rows, f"{key}: {import_path}")
    return rows


_CALL_S = 30.0
"""Maximum time in seconds that a dry run waits for a function that returns rows."""


class SlowRows(ConfigError):
    """Raised if a function that returns rows takes longer than a dry run waits."""


def _rows_in_time(import_path: str, key: str, at_most: int) -> list[Row]:
    """Return the first rows of ``_rows_of_function``, called in a separate process, which cannot block this one."""
    spawn: Any = {"context": multiprocessing.get_context("spawn")}  # pebble's annotation has another name
    call = concurrent.process(timeout=_CALL_S, **spawn)(_first_rows)
    try:
        return list(call(import_path, key, at_most).result())
    except FutureTimeout:
        raise SlowRows(f"{key}: {import_path} does not return within {_CALL_S:.3g} s") from None
    except ProcessExpired as error:
        raise ConfigError(f"{key}: {import_path} returned no rows: its process ended ({error.exitcode})") from None
    except ConfigError:
        raise
    except Exception as error:  # pickling can raise anything
        raise ConfigError(f"{key}: {import_path} returned rows that cannot be pickled: {first_line(error)}") from error


def _first_rows(import_path: str, key: str, at_most: int) -> list[Row]:
    return _rows_of_function(import_path, key)[:at_most]


def _check_texts(rows: list[Row], where: str) -> None:
    """Refuse rows from user code that contain lone surrogates. Rows from files are checked by the readers."""
    _check_depth(rows, where)
    as_json = json.JSONEncoder(ensure_ascii=False, default=_text_of, skipkeys=True).encode
    for index, row in enumerate(rows):
        try:
            check_pairs(as_json(row))
        except HalfPair as error:
            raise ConfigError(f"{where}: row {index}: {error}") from None


def _text_of(value: Any) -> str:
    """Return an object as text, except encoded images, whose text would be several times as large."""
    return "" if isinstance(value, bytes) else str(value)


def _check_depth(rows: list[Row], where: str) -> None:
    """Raise ConfigError if a column is nested more than ``_DEEPEST`` levels deep."""
    for index, row in enumerate(rows):
        for column, value in row.items():
            level = [value]
            depth = 0
            while level and depth <= _DEEPEST:
                level = list(chain.from_iterable(map(_values, level)))
                depth += 1
            if level:
                raise ConfigError(
                    f"{where}: row {index}: the column {column!r} is nested more than {_DEEPEST} levels deep"
                )


def _values(outer: Any) -> Iterable[Any]:
    if isinstance(outer, dict):
        return outer.values()
    return outer if isinstance(outer, (list, tuple)) else ()


def _read_jsonl(path: Path) -> Iterator[Row]:
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except HalfPair as error:
                raise ConfigError(f"{path}:{number}: {error}; correct or remove this row") from None
            except ValueError as error:  # invalid JSON or invalid UTF-8
                raise ConfigError(f"{path}:{number}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: a row must be a JSON object, got {type(row).__name__}")
            yield row


def _read_json(path: Path) -> Iterator[Row]:
    try:
        rows = parse_json(path.read_bytes())
    except HalfPair as error:
        raise ConfigError(f"{path}: {error}; correct or remove the row") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: must contain a list of JSON objects")
    yield from rows


def _read_csv(path: Path, delimiter: str = ",", kind: str = "CSV") -> Iterator[Row]:
    """Read a CSV file with column names in the first line. Quoted cells may contain line breaks, and numbers are
    parsed."""
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


def _rows_of_hugging_face(source: str, split_name: str, key: str, at_most: int | None) -> list[Row]:
    """Load a dataset from the Hub (``name`` or ``name:configuration``) or from a local folder.

    A folder is in the format of ``save_to_disk``, or contains files that ``load_dataset`` can read.
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    name, _, configuration = source.partition(":")
    folder = Path(os.path.expanduser(name))
    name = str(folder) if folder.is_dir() else name
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            table = datasets.load_from_disk(name)
            table = table[split_name] if isinstance(table, datasets.DatasetDict) else table
        else:
            table = datasets.load_dataset(name, configuration or None, split=split_name)
    except Exception as error:  # the library raises many exception types, which all mean that loading failed
        _check_configuration(key, name, configuration, error)
        raise ConfigError(f"{key}: cannot load split {split_name!r} of {source}: {first_line(error)}") from error
    rows: list[Row] = (table if at_most is None else table.take(min(at_most, len(table)))).to_list()
    return rows


def _check_configuration(key: str, name: str, configuration: str, error: Exception) -> None:
    """Raise ConfigError with the available configurations if loading failed because of a missing or wrong one."""
    import datasets

    if "config" not in str(error).lower():
        return
    try:
        known = datasets.get_dataset_config_names(name)
    except Exception:  # noqa: BLE001 - any error type is possible; the caller reports the first error
        return
    if configuration in known or known == ["default"]:
        return
    if configuration:
        raise ConfigError(
            f"{key}: {name} has no configuration {configuration!r}{nearest(configuration, known)}"
        ) from error
    raise ConfigError(
        f"{key}: {name} has several configurations ({', '.join(known)}); select a configuration, "
        f"for example {name}:{known[0]}"
    ) from error


def _renamed(row: Row, columns: Mapping[str, str], split: str, index: int) -> Row:
    """Rename columns according to ``{new: old}``. An old name ``a.b`` selects a nested field."""
    renamed = {name: value for name, value in row.items() if name not in columns.values()}
    for new, old in columns.items():
        renamed[new] = _column(row, old, split, index)
    return renamed


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
        row_id = row.get("id")
        row["id"] = f"{split}/{index}" if row_id is None else str(row_id)
        if row["id"] in seen:
            raise ConfigError(f"data.{split}: rows {seen[row['id']]} and {index} have the same id {row['id']!r}")
        seen[row["id"]] = index
    return rows


def _check_rubrics(rows: Sequence[Row], dataset: DatasetConfig, environments: Mapping[str, Any], split: str) -> None:
    """Check the columns with the rubrics of the rows, for environments whose rewards are families of components.

    Raises:
        ConfigError: if a rubric is invalid. The message contains the id of the row and the criterion.
    """
    columns: dict[str, list[str]] = {}
    for name, environment in environments.items():
        columns[name] = [reward.removesuffix(ALL) for reward in environment.reward_names if is_family(reward)]
    for index, row in enumerate(rows if any(columns.values()) else ()):
        for column in columns[environment_of_row(row, dataset, environments, split, index)]:
            if row.get(column) is not None:
                try:
                    read_rubric(row[column])
                except ConfigError as error:
                    raise ConfigError(f"data.{split}: row {row['id']}: {column}: {error}") from error


def _by_difficulty(rows: list[Row], dataset: DatasetConfig, split: str) -> list[Row]:
    """Select and sort the rows by the pass rates in ``dataset.difficulty``. Rows are matched by id.

    Raises:
        ConfigError: if the file is not that of a profile, the component does not exist, or no row is selected.
    """
    chosen = dataset.difficulty
    if chosen is None:
        return rows
    key = f"data.{split}.difficulty"
    check_difficulty(key, chosen, dataset.shuffle)
    rates = _pass_rates(Path(os.path.expanduser(chosen.path)), chosen.component, key)
    selected = []
    for row in rows:
        rate = rates.get(row["id"])
        if rate is not None and chosen.min <= rate <= chosen.max:
            selected.append(row)
    if not selected:
        raise ConfigError(
            f"{key}: no row has a pass rate from {chosen.min:g} to {chosen.max:g} in {chosen.path}; change min or max"
        )
    if chosen.order is not None:
        sign = -1 if chosen.order == "easy_first" else 1
        selected.sort(key=lambda row: sign * rates[row["id"]])
    return selected


def _pass_rates(path: Path, component: str | None, key: str) -> dict[str, float]:
    """Return the pass rates by row id in the file ``rows.jsonl`` of a profile. Raises ConfigError."""
    rates: dict[str, float] = {}
    names: set[str] = set()
    for record in _read_jsonl(path):
        passes = record.get("passes")
        if not isinstance(record.get("id"), str) or not isinstance(passes, dict):
            raise ConfigError(f"{key}.path: {path} is not the file rows.jsonl of a profile")
        names.update(passes)
        rate = record.get("pass_rate") if component is None else passes.get(component)
        if isinstance(rate, (int, float)):
            rates[record["id"]] = rate
    if component is not None and component not in names:
        raise ConfigError(f"{key}.component: {path} has no component {component!r}{nearest(component, names)}")
    return rates


Transform = Callable[[Row], Mapping[str, Any]]
ALL_COLUMNS = "__all__"
"""Value of ``remove_columns`` that removes all original columns, used by functions written for axolotl."""
_FACTORY = "cfg"
"""Name of the first parameter of functions written for axolotl. Functions written for axolotl return the transform of a
row."""


def transformed(rows: Sequence[Row], dataset: DatasetConfig, split: str) -> list[Row]:
    """Apply the split's transform to all rows, and remove the columns in ``remove_columns``.

    Raises:
        ConfigError: if the function is not found, fails, or returns an invalid value, or if no row has a column of
            ``dataset.remove_columns``.
    """
    transform, removed = _transform(dataset, split)
    known = dict.fromkeys(chain.from_iterable(rows))
    names = {*dataset.remove_columns, *(known if removed is None else removed)}
    for name in dataset.remove_columns:
        if name not in known:
            raise ConfigError(f"data.{split}.remove_columns: column {name!r} not found{nearest(name, known)}")
    converted = []
    for index, row in enumerate(rows):
        columns = {name: value for name, value in row.items() if name not in names}
        if transform is not None:
            columns |= _columns(transform, row, f"data.{split}.type: {dataset.type}: row {index}")
        converted.append(columns)
    return converted


def _columns(transform: Transform, row: Row, where: str) -> Row:
    """Return the columns that the transform returns for a row. Raises ConfigError if the transform fails."""
    try:
        with exits_contained():
            found = transform(dict(row))
    except Exception as error:  # user code may raise any exception
        raise ConfigError(f"{where}: {first_line(error)}") from error
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{where}: the function must return a mapping of columns, got {_short(found)}")
    return dict(found)


def _transform(dataset: DatasetConfig, split: str) -> tuple[Transform | None, list[str] | None]:  # noqa: C901
    """Return (transform of a row, or None if the split has none; columns to remove, or None for all columns).

    Raises:
        ConfigError: if the function is not found, or does not have the interface of a transform.
    """
    if not is_transform(dataset.type):
        return None, []
    where = f"data.{split}.type: {dataset.type}"
    try:
        function = ImportPath(dataset.type).load()
    except ConfigError as error:
        raise error.within(f"data.{split}.type") from error
    if not callable(function):
        raise ConfigError(f"{where}: must be a function, got {_short(function)}")
    try:
        if next(iter(inspect.signature(function).parameters), None) != _FACTORY:
            return function, []
        with exits_contained():
            result = function(dataset)
    except Exception as error:  # user code may raise any exception
        raise ConfigError(f"{where}: {first_line(error)}") from error
    transform, options = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not callable(transform) or not isinstance(options, Mapping):
        raise ConfigError(
            f"{where}: a function with the parameter {_FACTORY} must return a function of a row, optionally with a "
            f"mapping of options, got {_short(result)}"
        )
    for name in options:
        if name != "remove_columns":
            raise ConfigError(f"{where}: the function returns an unknown option {name!r}; known: remove_columns")
    removed = options.get("remove_columns", [])
    if removed == ALL_COLUMNS:
        return transform, None
    if not isinstance(removed, (list, tuple)) or not all(isinstance(name, str) for name in removed):
        raise ConfigError(f"{where}: remove_columns must be a list of names, got {_short(removed)}")
    return transform, list(removed)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
