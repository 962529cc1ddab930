"""``rollouts/step_*.parquet``: every sample of a step with its rewards and advantage; a file a step, a row a sample.
``validation/step_*.parquet`` are alike, of the held-out prompts after so many steps.

Parquet, compressed with zstd; ``sample_columns.SCHEMA`` says what the columns are. Numbers keep their bits, so a step
can be computed again. A file appears whole or not at all. Older runs have ``step_*.jsonl``, one JSON object per sample,
which is read as before; ``gdpo-nemo rollouts`` writes such objects.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.reading import open_file, parse_json
from gdpo_nemo.config.writing import whole_file
from gdpo_nemo.data.records import Group

if TYPE_CHECKING:  # pyarrow takes 0.2 s to import: commands that read no samples do without
    import pyarrow as pa
    import pyarrow.parquet as pq

FOLDER = "rollouts"
VALIDATION = "validation"
"""A folder of its own: what reads all of ``rollouts`` reads what was trained."""
_NAME = re.compile(r"step_(\d+)\.(parquet|jsonl)")
_PARTIAL = ".partial"
_TOKENS_AT_ONCE = 1 << 22
"""Tokens of a row group: what writer and readers hold beside the samples, some 50 MB."""
_ROWS_AT_ONCE = 64
"""Samples that become dictionaries at once where a file is read one by one."""


def rollout_path(run_dir: str | Path, step: int) -> Path:
    """The file of one step; of the older kind where the run has that one only."""
    path = Path(run_dir) / FOLDER / f"step_{step:04d}.parquet"
    older = path.with_suffix(".jsonl")
    return older if older.exists() and not path.exists() else path


def rollout_files(run_dir: str | Path) -> Iterator[tuple[int, Path]]:
    """(step, file) of every step that was written, in order."""
    folder = Path(run_dir) / FOLDER
    found = {int(match[1]) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))}
    yield from ((step, rollout_path(run_dir, step)) for step in sorted(found))


def validation_path(run_dir: str | Path, step: int) -> Path:
    """The file of the validation after ``step`` steps."""
    return Path(run_dir) / VALIDATION / f"step_{step:04d}.parquet"


def validation_files(run_dir: str | Path) -> Iterator[tuple[int, Path]]:
    """(step, file) of every validation whose samples were written, in order."""
    folder = Path(run_dir) / VALIDATION
    found = {int(match[1]) for path in folder.glob("step_*.parquet") if (match := _NAME.fullmatch(path.name))}
    yield from ((step, validation_path(run_dir, step)) for step in sorted(found))


def remove_rollouts_after(run_dir: str | Path, step: int) -> None:
    """Remove the files of later steps, which a resumed run will write again, and what a dead writer left."""
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
    advantages: np.ndarray | None = None,
    trainer_logprobs: Sequence[np.ndarray | None] | None = None,
    terms: Mapping[str, np.ndarray] | None = None,
    turn_advantages: Sequence[np.ndarray] | None = None,
    entropies: Sequence[np.ndarray | None] | None = None,
    validation: bool = False,
) -> Path:
    """Write the trajectories of ``groups`` as the samples of a step.

    Args:
        advantages: [trajectories], in the order of the groups.
        trainer_logprobs: per trajectory, [completion tokens], in the same order; None: not known of that one.
        terms: [trajectories] by component: its weighted share in the advantage.
        turn_advantages: per trajectory, [turns], with ``gdpo.credit: turn``.
        entropies: as ``trainer_logprobs``: of the distribution that each token was drawn from, in nats.
        validation: they are of held-out prompts, after ``step`` steps, and get a file beside the step's.

    Raises:
        ValueError: an argument has another length than there are trajectories.
    """
    count = sum(len(group.trajectories) for group in groups)
    given = {"advantages": advantages, "trainer_logprobs": trainer_logprobs, "turn_advantages": turn_advantages}
    given |= {"entropies": entropies}
    for name, column in {**given, **(terms or {})}.items():
        if column is not None and len(column) != count:
            raise ValueError(f"{name}: {len(column)} entries for {count} trajectories")
    path = validation_path(run_dir, step) if validation else Path(run_dir) / FOLDER / f"step_{step:04d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as partial:
        _write_table(partial, _tables(groups, advantages, trainer_logprobs, terms, turn_advantages, entropies))
    return path


def _tables(
    groups: Sequence[Group],
    advantages: np.ndarray | None,
    trainer_logprobs: Sequence[np.ndarray | None] | None,
    terms: Mapping[str, np.ndarray] | None,
    turn_advantages: Sequence[np.ndarray] | None,
    entropies: Sequence[np.ndarray | None] | None,
) -> Iterator[pa.Table]:
    """Tables of whole groups, as many in each as make ``_TOKENS_AT_ONCE`` tokens."""
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
        rows = slice(row, last)
        yield table_of(
            groups[start:end],
            None if advantages is None else advantages[rows],
            None if terms is None else {name: values[rows] for name, values in terms.items()},
            None if trainer_logprobs is None else trainer_logprobs[rows],
            None if turn_advantages is None else turn_advantages[rows],
            None if entropies is None else entropies[rows],
        )
        start = end
        row = last


def _write_table(path: Path, tables: Iterator[pa.Table]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from gdpo_nemo.observe.sample_columns import SCHEMA, TOKEN_FLOATS

    # Log-probs: the bytes of a float apart, 10 % smaller and as fast. Token ids stay plain: that makes them smaller,
    # too, but readers other than Arrow came to know it late. Dictionaries of token ids cost time and save nothing.
    texts = [field.name for field in SCHEMA if pa.types.is_string(field.type) and field.name != "completion"]
    split = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in TOKEN_FLOATS}
    names = [*texts, "rewards.key_value.key", "terms.key_value.key"]
    # A path and no file of Python's, which would need Python's lock for every page.
    with pq.ParquetWriter(
        path, SCHEMA, compression="zstd", compression_level=1, use_dictionary=names, column_encoding=split
    ) as writer:
        for table in tables:
            writer.write_table(table)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_samples(path: Path, groups: Sequence[Group]) -> Path:
    """Write one JSON object per trajectory of ``groups``; the file appears whole or not at all."""
    from gdpo_nemo.observe.sample_columns import records_of, table_of

    with whole_file(path) as file:
        for group in groups:
            file.writelines(json.dumps(record).encode() + b"\n" for record in records_of(table_of([group])))
    return path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; what was written gets the name ``path`` when the block ends well, and is
    removed when it does not."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


# -- reading --------------------------------------------------------------------------------------------------------


def read_rollouts(path: str | Path) -> list[dict[str, Any]]:
    """The samples of one file as dictionaries of plain values: in memory some thirty times the file's size. Errors as
    of ``iter_rollouts``."""
    return list(iter_rollouts(path))


def iter_rollouts(path: str | Path) -> Iterator[dict[str, Any]]:
    """The samples of one file, a few of them in memory at a time.

    Raises:
        OSError: the file cannot be opened. ValueError: it is not one of rollouts.
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
    """The columns ``names`` of one file, and of the file no other part is read.

    Args:
        rows: the first so many; None: all.

    Raises:
        OSError: the file cannot be opened. ValueError, KeyError, TypeError, AttributeError: it is not one of rollouts.
    """
    import pyarrow as pa

    from gdpo_nemo.observe.sample_columns import SCHEMA, completed, table_of_records

    path = Path(path)
    if path.suffix != ".parquet":
        records = read_rollouts(path)
        try:
            table = table_of_records(records, names)
        except OverflowError as error:  # a token id of JSON's 1e400, which is infinite
            raise ValueError(str(error)) from None
        return table if rows is None else table.slice(0, rows)
    with _parquet(path, names) as file:
        there = [name for name in names if name in file.schema_arrow.names]
        if rows is None:
            return completed(file.read(columns=there), names)
        first = next(file.iter_batches(max(1, rows), columns=there), None)
        wanted = pa.schema([SCHEMA.field(name) for name in there])
        return completed(pa.Table.from_batches([] if first is None else [first], wanted).slice(0, rows), names)


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
        except (pa.ArrowException, OSError) as error:  # a torn page is an OSError without an errno
            raise ValueError(f"damaged ({first_line(error)})") from None
