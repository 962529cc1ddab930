"""The samples of a step as columns: records of the driver into an Arrow table, and tables into one dictionary a sample.

Tokens never become Python objects on the way in: a column of lists is the concatenation of the samples' arrays and
their offsets. Floats keep their bits. Missing is null: a reward that is None, an advantage that nobody gave. NaN stays
NaN.
"""

from __future__ import annotations

import json
import math
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from gdpo_nemo.data.records import Group, Trajectory

_NUMBERS = pa.map_(pa.string(), pa.float64())
SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "sample_index": pa.int32(),
        "environment": pa.string(),
        "prompt": pa.string(),
        "completion": pa.string(),
        "rewards": _NUMBERS,
        "outcome": pa.string(),
        "detail": pa.string(),
        "finish_reason": pa.string(),
        "policy_version": pa.int64(),
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "turns": pa.int32(),
        "loss_mask": pa.list_(pa.bool_()),
        "turn_tokens": pa.list_(pa.int32()),
        "turn_rewards": pa.string(),
        "turn_advantages": pa.list_(pa.float64()),
        "position": pa.int64(),
        "spans": pa.list_(pa.struct({"version": pa.int64(), "tokens": pa.int64()})),
        "extra": pa.string(),
        "advantage": pa.float64(),
        "terms": _NUMBERS,
        "trainer_logprobs": pa.list_(pa.float32()),
        "entropies": pa.list_(pa.float32()),
        "not_utf8": pa.string(),
    }
)
"""Columns of a file. ``position`` is the group's place in the prompts of the run, -1 where that is unknown;
``spans`` (version, tokens) sum to the tokens of the policy; ``extra`` is JSON; ``terms`` are the components' shares in
the advantage; ``turn_tokens``, ``turn_rewards`` (JSON, a mapping a turn) and ``turn_advantages`` are of trajectories of
several turns, the last with ``gdpo.credit: turn``, where ``advantage`` is its mean over the tokens; ``not_utf8`` is
JSON of the texts of a sample that hold half a surrogate pair, which UTF-8 has no bytes for: their columns have a
question mark there."""

TOKEN_FLOATS = ("logprobs", "trainer_logprobs", "entropies")
"""Columns with a number for each token of a completion."""
_TEXTS = ("prompt_id", "prompt", "completion", "detail")
_WITHOUT = {"detail": "", "turns": 1, "loss_mask": None, "position": -1, "spans": (), "extra": None, "advantage": None}
_WITHOUT |= {"terms": None, "trainer_logprobs": None, "not_utf8": None}
LATER = ("turn_tokens", "turn_rewards", "turn_advantages", "entropies")
"""Columns that Parquet files of older runs lack; null there."""
_WITHOUT |= dict.fromkeys(LATER)
"""What older files, which lack these keys, mean by that."""
_DROPPED = ("extra", "advantage", "terms", "trainer_logprobs", "not_utf8", *LATER)
"""Keys that a record has only where there is something to say."""


def table_of(
    groups: Sequence[Group],
    advantages: np.ndarray | None = None,
    terms: Mapping[str, np.ndarray] | None = None,
    trainer_logprobs: Sequence[np.ndarray | None] | None = None,
    turn_advantages: Sequence[np.ndarray] | None = None,
    entropies: Sequence[np.ndarray | None] | None = None,
) -> pa.Table:
    """The trajectories of ``groups`` as a table of ``SCHEMA``, one row each.

    Args:
        advantages: [trajectories], in the order of the groups.
        terms: by component, [trajectories].
        trainer_logprobs: per trajectory, [completion tokens]; None: not known.
        turn_advantages: per trajectory, [turns].
        entropies: as ``trainer_logprobs``, in nats.
    """
    samples = [trajectory for group in groups for trajectory in group.trajectories]
    prompts = [trajectory.prompt for trajectory in samples]
    count = len(samples)
    spans = [trajectory.spans for trajectory in samples]
    places = [group.position for group in groups for _ in group.trajectories]
    texts = {
        "prompt_id": [prompt.id for prompt in prompts],
        "prompt": [prompt.text for prompt in prompts],
        "completion": [trajectory.text for trajectory in samples],
        "detail": [trajectory.detail for trajectory in samples],
    }
    columns = {
        **{name: _strings(values) for name, values in texts.items()},
        "sample_index": pa.array([t.sample_index for t in samples], pa.int32()),
        "environment": pa.array([prompt.environment for prompt in prompts], pa.string()),
        "rewards": _maps([t.rewards for t in samples]),
        "outcome": pa.array([str(t.outcome) for t in samples], pa.string()),
        "finish_reason": pa.array([t.finish_reason for t in samples], pa.string()),
        "policy_version": pa.array([t.policy_version for t in samples], pa.int64()),
        "prompt_ids": _lists([prompt.token_ids for prompt in prompts], np.int32),
        "completion_ids": _lists([t.completion_ids for t in samples], np.int32),
        "logprobs": _lists([t.logprobs for t in samples], np.float32),
        "turns": pa.array([t.turns for t in samples], pa.int32()),
        "loss_mask": _lists([t.loss_mask for t in samples], np.bool_),
        "turn_tokens": _lists([t.turn_tokens if t.turns > 1 else None for t in samples], np.int32),
        "turn_rewards": pa.array([_turn_rewards(t) for t in samples], pa.string()),
        "turn_advantages": _lists([None] * count if turn_advantages is None else turn_advantages, np.float64),
        "position": pa.array(places, pa.int64()),
        "spans": _span_lists(spans),
        "extra": pa.array([json.dumps(t.extra) if t.extra else None for t in samples], pa.string()),
        "advantage": _doubles(advantages, count),
        "terms": _maps(_rows(terms, count)),
        "trainer_logprobs": _lists([None] * count if trainer_logprobs is None else trainer_logprobs, np.float32),
        "entropies": _lists([None] * count if entropies is None else entropies, np.float32),
        "not_utf8": _not_utf8(texts, count),
    }
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def completed(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """The columns ``names`` of a table that may lack those of ``LATER``."""
    for name in names:
        if name not in table.column_names:
            table = table.append_column(SCHEMA.field(name), pa.nulls(len(table), SCHEMA.field(name).type))
    return table.select(list(names))


def records_of(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """One dictionary per row, of plain values that JSON has: NaN becomes None, as what is missing is."""
    columns = {name: values_of(table.column(name)) for name in table.schema.names}
    return [_plain(dict(zip(columns, row))) for row in zip(*columns.values())]


def values_of(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """The values of a column. Lists of numbers are NumPy arrays, in memory that they share; maps are dictionaries."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return [value for chunk in chunks for value in _chunk_values(chunk)]


def with_half_pairs(texts: dict[str, list[str]], not_utf8: pa.ChunkedArray) -> dict[str, list[str]]:
    """``texts`` by column, those that UTF-8 could not hold as they were, from the column ``not_utf8``."""
    for row, kept in enumerate(not_utf8.to_pylist()):
        for name, text in json.loads(kept or "{}").items():
            if name in texts:
                texts[name][row] = text
    return texts


def _chunk_values(chunk: pa.Array) -> list[Any]:
    if pa.types.is_map(chunk.type):
        return [None if pairs is None else dict(pairs) for pairs in chunk.to_pylist()]
    if not pa.types.is_list(chunk.type) or pa.types.is_nested(chunk.type.value_type):
        values: list[Any] = chunk.to_pylist()
        return values
    numbers = chunk.values.to_numpy(zero_copy_only=False)
    ends = chunk.offsets.to_numpy().tolist()
    there = chunk.is_valid().to_pylist()
    return [numbers[start:end] if valid else None for start, end, valid in zip(ends, ends[1:], there)]


def table_of_records(records: Iterable[Mapping[str, Any]], names: Sequence[str]) -> pa.Table:
    """The columns ``names`` of records of a JSONL file.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: these are no records of samples.
    """
    rows = list(records)
    columns = []
    for name in names:
        if name == "not_utf8":  # a JSON file holds such texts themselves
            columns.append(_not_utf8({text: [record.get(text, "") for record in rows] for text in _TEXTS}, len(rows)))
            continue
        values = [record.get(name, _WITHOUT[name]) if name in _WITHOUT else record[name] for record in rows]
        make = _FROM_JSON.get(name)
        columns.append(make(values) if make else pa.array(values, SCHEMA.field(name).type))
    return pa.table(columns, schema=pa.schema([SCHEMA.field(name) for name in names]))


# -- into columns ---------------------------------------------------------------------------------------------------


def _strings(values: Sequence[str]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        return pa.array([value.encode("utf-8", "replace").decode() for value in values], pa.string())


def _not_utf8(texts: Mapping[str, Sequence[str]], count: int) -> pa.Array:
    found: list[dict[str, str]] = [{} for _ in range(count)]
    for name in _TEXTS:
        for place, value in enumerate(texts[name]):
            if not _encodable(value):
                found[place][name] = value
    return pa.array([json.dumps(row) if row else None for row in found], pa.string())


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lists(arrays: Sequence[Any], kind: Any) -> pa.Array:
    """A column of lists from one array per row; None is null."""
    parts = [np.ascontiguousarray([] if values is None else values, kind) for values in arrays]
    # Not np.concatenate: it gives Python's lock back at every part, and beside a busy thread gets it 5 ms later.
    values = pa.array(np.frombuffer(b"".join(parts), kind))
    missing = np.array([values is None for values in arrays], bool)
    return pa.ListArray.from_arrays(_offsets(parts), values, mask=pa.array(missing) if missing.any() else None)


def _offsets(parts: Sequence[Any]) -> pa.Array:
    return pa.array(np.cumsum([0, *map(len, parts)]), pa.int32())


def _maps(rows: Sequence[Mapping[str, float | None] | None]) -> pa.Array:
    parts = [row or {} for row in rows]
    keys = pa.array([name for row in parts for name in row], pa.string())
    items = [None if value is None else float(value) for row in parts for value in row.values()]
    offsets = _offsets(parts)
    if any(row is None for row in rows):  # a map of nulls is told by its offsets
        starts = offsets.to_pylist()
        offsets = pa.array([*(None if row is None else at for row, at in zip(rows, starts)), starts[-1]], pa.int32())
    return pa.MapArray.from_arrays(offsets, keys, pa.array(items, pa.float64()))


def _rows(terms: Mapping[str, np.ndarray] | None, count: int) -> Sequence[Mapping[str, float] | None]:
    if terms is None:
        return [None] * count
    columns = [np.asarray(values, np.float64).tolist() for values in terms.values()]
    return [dict(zip(terms, row)) for row in zip(*columns)] if columns else [{}] * count


def _doubles(values: np.ndarray | None, count: int) -> pa.Array:
    return pa.nulls(count, pa.float64()) if values is None else pa.array(np.asarray(values, np.float64))


def _span_lists(spans: Sequence[Sequence[tuple[int, int]]]) -> pa.Array:
    flat = np.array([pair for row in spans for pair in row], np.int64).reshape(-1, 2)
    columns = [pa.array(column) for column in np.ascontiguousarray(flat.T)]
    pairs = pa.StructArray.from_arrays(columns, ["version", "tokens"])
    return pa.ListArray.from_arrays(_offsets(spans), pairs)


def _with_nan(rows: Sequence[Any]) -> list[Any]:
    return [None if row is None else np.array(row, np.float32) for row in rows]  # None in a list becomes NaN


_FROM_JSON: dict[str, Callable[[Sequence[Any]], pa.Array]] = {
    **dict.fromkeys(_TEXTS, _strings),
    **{name: lambda rows: _lists(rows, np.int32) for name in ("prompt_ids", "completion_ids")},
    **{name: lambda rows: _lists(_with_nan(rows), np.float32) for name in TOKEN_FLOATS},
    **dict.fromkeys(("rewards", "terms"), _maps),
    "loss_mask": lambda rows: _lists(rows, np.bool_),
    "spans": _span_lists,
    "turn_tokens": lambda rows: _lists(rows, np.int32),
    "turn_advantages": lambda rows: _lists(rows, np.float64),
    "turn_rewards": lambda rows: pa.array([json.dumps(row) if row else None for row in rows], pa.string()),
    "extra": lambda rows: pa.array([json.dumps(row) if row else None for row in rows], pa.string()),
}


def _turn_rewards(trajectory: Trajectory) -> str | None:
    return json.dumps(trajectory.turn_rewards) if trajectory.turns > 1 and trajectory.turn_rewards else None


# -- out of columns -------------------------------------------------------------------------------------------------


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    record.update(json.loads(record["not_utf8"] or "{}"))
    if record["extra"]:
        record["extra"] = json.loads(record["extra"])
    mask = record["loss_mask"]
    record["loss_mask"] = None if mask is None else mask.astype(int).tolist()
    record["spans"] = [[span["version"], span["tokens"]] for span in record["spans"]]
    if record.get("turn_rewards"):
        record["turn_rewards"] = json.loads(record["turn_rewards"])
    unset = [name for name in _DROPPED if record.get(name) is None]
    for name in ("prompt_ids", "completion_ids", *TOKEN_FLOATS, "turn_tokens", "turn_advantages"):
        record[name] = _finite_list(record.get(name))
    for name in ("rewards", "terms"):
        record[name] = {key: _number(value) for key, value in (record[name] or {}).items()}
    record["advantage"] = _number(record["advantage"])
    return {name: value for name, value in record.items() if name not in unset and name != "not_utf8"}


def _finite_list(values: np.ndarray | None) -> list[float | None]:
    """Python numbers; None for NaN, which JSON has not."""
    if values is None:
        return []
    plain: list[float | None] = values.tolist()
    if values.dtype.kind == "f" and np.isnan(values).any():
        return [_number(value) for value in plain]
    return plain


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
