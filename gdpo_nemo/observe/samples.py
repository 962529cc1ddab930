"""Sample files ``rollouts/step_*.parquet``: all samples of a step with rewards and advantages."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_nemo.data.records import Group
from gdpo_nemo.observe import sample_images
from gdpo_nemo.observe.sample_values import NO_VALUES, SampleValues
from gdpo_nemo.utils.errors import first_line
from gdpo_nemo.utils.files import open_file, parse_json, whole_file

if TYPE_CHECKING:  # Commands that do not read samples avoid the import of pyarrow, which takes 0.2 s.
    import pyarrow as pa
    import pyarrow.parquet as pq


FOLDER = "rollouts"
VALIDATION = "validation"
"""Separate folder for validation samples, so that readers of ``rollouts`` see only trained samples."""
_NAME = re.compile(r"step_(\d+)\.(parquet|jsonl)")
_PARTIAL = ".partial"
_TOKENS_AT_ONCE = 1 << 22
"""Approximate number of tokens in a row group. The writer and readers need about 50 MB of memory per row group."""
_ROWS_AT_ONCE = 64
"""Number of samples that ``iter_rollouts`` converts to dictionaries at once."""


def rollout_path(run_dir: str | Path, step: int) -> Path:
    """Return the path of a step's sample file, which is a JSONL file in runs of older versions."""
    path = Path(run_dir) / FOLDER / f"step_{step:04d}.parquet"
    older = path.with_suffix(".jsonl")
    return older if older.exists() and not path.exists() else path


def rollout_files(run_dir: str | Path) -> Iterator[tuple[int, Path]]:
    """Yield (step, path) of every sample file of the training steps, in order."""
    for step in _steps(Path(run_dir) / FOLDER, "step_*"):
        yield step, rollout_path(run_dir, step)


def validation_path(run_dir: str | Path, step: int) -> Path:
    """Return the path of the sample file of the validation after ``step`` steps."""
    return Path(run_dir) / VALIDATION / f"step_{step:04d}.parquet"


def validation_files(run_dir: str | Path) -> Iterator[tuple[int, Path]]:
    """Yield (step, path) of every sample file of a validation, in order."""
    for step in _steps(Path(run_dir) / VALIDATION, "step_*.parquet"):
        yield step, validation_path(run_dir, step)


def _steps(folder: Path, pattern: str) -> list[int]:
    """Return the steps that have a sample file, in order."""
    return sorted({int(match[1]) for path in folder.glob(pattern) if (match := _NAME.fullmatch(path.name))})


def remove_rollouts_after(run_dir: str | Path, step: int) -> None:
    """Remove the files of steps after ``step``, which a resumed run writes again. Also remove unfinished files."""
    for folder in (FOLDER, VALIDATION):
        for path in (Path(run_dir) / folder).glob("step_*"):
            match = _NAME.fullmatch(path.name)
            if (match and int(match[1]) > step) or path.suffix == _PARTIAL:
                path.unlink()


# -- writing --------------------------------------------------------------------------------------------------------


def write_rollouts(
    run_dir: str | Path,
    step: int,
    groups: Sequence[Group],
    values: SampleValues = NO_VALUES,
    *,
    validation: bool = False,
) -> Path:
    """Write the trajectories of ``groups`` to the sample file of a step, and return its path.

    Args:
        validation: True for samples of held-out prompts after ``step`` steps, which are written to a separate file.

    Raises:
        ValueError: if the length of a column of ``values`` differs from the number of trajectories.
    """
    values.check(sum(len(group.trajectories) for group in groups))
    path = validation_path(run_dir, step) if validation else Path(run_dir) / FOLDER / f"step_{step:04d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    images = sample_images.images_of(groups)
    sample_images.store_images(Path(run_dir) / sample_images.FOLDER, images.values())
    with whole(path) as partial:
        _write_table(partial, _tables(groups, values), bool(images))
    return path


def _tables(groups: Sequence[Group], values: SampleValues) -> Iterator[pa.Table]:
    """Yield tables with about ``_TOKENS_AT_ONCE`` tokens each. Groups are not split."""
    from gdpo_nemo.observe.sample_columns import table_of

    start = row = 0
    while start < len(groups):
        end = start
        last = row
        tokens = 0
        while end < len(groups) and tokens < _TOKENS_AT_ONCE:
            tokens += sum(len(t.completion_ids) for t in groups[end].trajectories)
            last += len(groups[end].trajectories)
            end += 1
        yield table_of(groups[start:end], values.part(slice(row, last)))
        start = end
        row = last


def _write_table(path: Path, tables: Iterator[pa.Table], images: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from gdpo_nemo.observe.sample_columns import IMAGES, SCHEMA, TOKEN_FLOATS

    schema = SCHEMA if images else SCHEMA.remove(SCHEMA.get_field_index(IMAGES))

    # Byte-stream splitting of log-probs saves 10 % of the space at the same speed. It would also shrink token ids, but
    # apart from Arrow, only recent readers support byte-stream splitting of integers. Dictionary encoding of token ids
    # costs time without saving space, but Parquet would store an expert's number in 32 bits.
    texts = [field.name for field in SCHEMA if pa.types.is_string(field.type) and field.name != "completion"]
    split = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in TOKEN_FLOATS}
    names = [*texts, "rewards.key_value.key", "terms.key_value.key", "routing.list.element"]
    names += ["images.list.element.sha256"] if images else []
    # The writer receives a path, because writing to a Python file would need the GIL for every page.
    with pq.ParquetWriter(
        path, schema, compression="zstd", compression_level=1, use_dictionary=names, column_encoding=split
    ) as writer:
        for table in tables:
            writer.write_table(table.select(schema.names))
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_samples(path: Path, groups: Sequence[Group]) -> Path:
    """Write a JSONL file atomically, with one JSON object per trajectory of ``groups``, and their images beside it."""
    from gdpo_nemo.observe.sample_columns import records_of, table_of

    sample_images.store_images(path.parent / sample_images.FOLDER, sample_images.images_of(groups).values())
    with whole_file(path) as file:
        for group in groups:
            file.writelines(json.dumps(record).encode() + b"\n" for record in records_of(table_of([group])))
    return path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path for writing a file atomically.

    If the block succeeds, the temporary file is renamed to ``path``. Otherwise, it is removed.
    """
    partial = path.with_name(path.name + _PARTIAL)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


# -- reading --------------------------------------------------------------------------------------------------------


def read_rollouts(path: str | Path) -> list[dict[str, Any]]:
    """Read the samples of one file as dictionaries, which need about thirty times the file's size in memory.

    Raises the exceptions of ``iter_rollouts``.
    """
    return list(iter_rollouts(path))


def iter_rollouts(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of one file as dictionaries, with only a few samples in memory at a time.

    Raises:
        OSError: if the file cannot be opened.
        ValueError: if the file is not a rollout file.
    """
    path = Path(path)
    if path.suffix != ".parquet":
        with open_file(path) as lines:
            yield from (parse_json(line, half_pairs=True) for line in lines)
        return
    from gdpo_nemo.observe.sample_columns import SCHEMA, records_of

    with _parquet(path, SCHEMA.names) as file:
        for batch in file.iter_batches(_ROWS_AT_ONCE):
            yield from records_of(batch)


def read_columns(path: str | Path, names: Sequence[str], rows: int | None = None) -> pa.Table:
    """Read the columns ``names`` of one file. Other columns of a Parquet file are not read.

    Args:
        rows: number of rows to read from the start. None reads all rows.

    Raises:
        OSError: if the file cannot be opened.
        ValueError, KeyError, TypeError, AttributeError: if the file is not a rollout file.
    """
    import pyarrow as pa

    from gdpo_nemo.observe.sample_columns import SCHEMA, completed, table_of_records, with_required

    path = Path(path)
    if path.suffix != ".parquet":
        records = read_rollouts(path)
        try:
            table = table_of_records(records, names)
        except OverflowError as error:  # A token id such as 1e400 in JSON is infinite.
            raise ValueError(str(error)) from None
        return with_required(table if rows is None else table.slice(0, rows))
    with _parquet(path, names) as file:
        existing = [name for name in names if name in file.schema_arrow.names]
        if rows is None:
            return completed(with_required(file.read(columns=existing)), names)
        first = next(file.iter_batches(max(1, rows), columns=existing), None)
        schema = pa.schema([SCHEMA.field(name) for name in existing])
        return completed(pa.Table.from_batches([] if first is None else [first], schema).slice(0, rows), names)


def missing_images(run_dir: str | Path, paths: Iterable[Path]) -> list[str]:
    """Return the SHA-256 of each image in sample files whose content is not in the run folder.

    Raises the exceptions of ``read_columns``.
    """
    found: dict[str, None] = {}
    for path in paths:
        if path.suffix == ".parquet":  # JSONL files were written before samples had images
            for rows in read_columns(path, ["images"]).column("images").to_pylist():
                found |= dict.fromkeys(row["sha256"] for row in rows or ())
    return [name for name in found if sample_images.image_path(run_dir, name) is None]


@contextlib.contextmanager
def _parquet(path: Path, names: Sequence[str]) -> Iterator[pq.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from gdpo_nemo.observe.sample_columns import LATER

    with open_file(path) as source:
        try:
            with pq.ParquetFile(source) as file:
                if missing := [name for name in names if name not in (*file.schema_arrow.names, *LATER)]:
                    raise ValueError(f"no column {missing[0]}")
                yield file
        except (pa.ArrowException, OSError) as error:  # An incomplete page raises an OSError without an errno.
            raise ValueError(f"damaged ({first_line(error)})") from None
