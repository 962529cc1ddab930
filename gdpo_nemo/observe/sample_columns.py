"""Conversion of a step's samples to Arrow tables, and of tables to dictionaries.

When a table is built, tokens are never converted to Python objects: a list column is the concatenation of the samples'
arrays, with offsets. Floats are stored without loss of precision. Missing values are null, for example a reward of None
or an advantage that was not computed. NaN stays NaN.
"""

from __future__ import annotations

import json
import math
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from gdpo_nemo.data.records import Group

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
        "turn_parents": pa.list_(pa.int32()),
        "reward_tokens": pa.string(),
        "thinking_tokens": pa.int32(),
        "position": pa.int64(),
        "spans": pa.list_(pa.struct({"version": pa.int64(), "tokens": pa.int64()})),
        "extra": pa.string(),
        "advantage": pa.float64(),
        "terms": _NUMBERS,
        "trainer_logprobs": pa.list_(pa.float32()),
        "entropies": pa.list_(pa.float32()),
        "routing": pa.list_(pa.int16()),
        "not_utf8": pa.string(),
    }
)
"""Columns of a sample file.

* ``position`` is the prompt index of the group in the run, or -1 if unknown.
* ``spans`` lists the weight versions that generated the policy's tokens, with the number of tokens of each version.
* ``extra`` is JSON.
* ``terms`` contains each component's contribution to the advantage.
* ``turn_tokens``, ``turn_rewards`` (JSON, one mapping per turn) and ``turn_advantages`` are set only for trajectories
  of several turns. ``turn_advantages`` also requires ``gdpo.credit: turn``. In this case, ``advantage`` is the mean of
  the turns' advantages over the tokens.
* ``turn_parents`` is set only if a turn does not continue the previous one. It lists the index of the turn that each
  turn continues, or -1 for the first turn of a context.
* ``reward_tokens`` (JSON, a list of [start, end) by component) lists the tokens that a component is about. It is set
  only if the verifier returned spans.
* ``thinking_tokens`` is set only if a rule of ``gdpo.shaping`` has ``thinking: false``.
* ``routing`` lists the experts that the sampler chose, by token of prompt and completion, layer and choice, or -1 if
  unknown. It is set only with ``policy.router_replay: sampler``.
* ``not_utf8`` is JSON with the original texts that contain an unpaired surrogate, by column. UTF-8 cannot encode
  surrogates, so the columns themselves contain question marks instead.
"""

TOKEN_FLOATS = ("logprobs", "trainer_logprobs", "entropies")
"""Columns with one float per completion token."""
_TEXTS = ("prompt_id", "prompt", "completion", "detail")
_DEFAULTS = {"detail": "", "turns": 1, "loss_mask": None, "position": -1, "spans": (), "extra": None, "advantage": None}
_DEFAULTS |= {"terms": None, "trainer_logprobs": None, "not_utf8": None}
LATER = (
    "turn_tokens",
    "turn_rewards",
    "turn_advantages",
    "turn_parents",
    "reward_tokens",
    "thinking_tokens",
    "entropies",
    "routing",
)
"""Columns that Parquet files of older runs lack. Readers fill these columns with nulls."""
_DEFAULTS |= dict.fromkeys(LATER)
"""Default values of keys that older JSONL files lack."""
_DROPPED = ("extra", "advantage", "terms", "trainer_logprobs", "not_utf8", *LATER)
"""Keys that are omitted from a record if they have no value."""
REQUIRED = frozenset(name for name in SCHEMA.names if _DEFAULTS.get(name, "") is not None)
"""Columns whose values are never null."""


def table_of(
    groups: Sequence[Group],
    advantages: np.ndarray | None = None,
    terms: Mapping[str, np.ndarray] | None = None,
    trainer_logprobs: Sequence[np.ndarray | None] | None = None,
    turn_advantages: Sequence[np.ndarray] | None = None,
    entropies: Sequence[np.ndarray | None] | None = None,
) -> pa.Table:
    """Convert the trajectories of ``groups`` to a table with the columns of ``SCHEMA`` and one row per trajectory.

    Args:
        advantages: advantage of each trajectory, in the order of the groups. Shape: [trajectories].
        terms: contribution of each component to the advantages. Shape: [trajectories].
        trainer_logprobs: for each trajectory, log-probs from the trainer. Shape: [completion tokens]. None if unknown.
        turn_advantages: for each trajectory, advantages of its turns. Shape: [turns].
        entropies: for each trajectory, entropies in nats. Shape: [completion tokens]. None if unknown.
    """
    samples = [trajectory for group in groups for trajectory in group.trajectories]
    prompts = [trajectory.prompt for trajectory in samples]
    count = len(samples)
    positions = [group.position for group in groups for _ in group.trajectories]
    turn_tokens = [trajectory.turn_tokens if trajectory.turns > 1 else None for trajectory in samples]
    unknown = [None] * count
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
        "turn_tokens": _lists(turn_tokens, np.int32),
        "turn_rewards": _json([t.turn_rewards if t.turns > 1 else None for t in samples]),
        "turn_advantages": _lists(unknown if turn_advantages is None else turn_advantages, np.float64),
        "turn_parents": _lists([t.turn_parents or None for t in samples], np.int32),
        "reward_tokens": _json([t.reward_tokens for t in samples]),
        "thinking_tokens": pa.array([t.thinking_tokens or None for t in samples], pa.int32()),
        "position": pa.array(positions, pa.int64()),
        "spans": _span_lists([t.spans for t in samples]),
        "extra": _json([t.extra for t in samples]),
        "advantage": _doubles(advantages, count),
        "terms": _maps(_term_rows(terms, count)),
        "trainer_logprobs": _lists(unknown if trainer_logprobs is None else trainer_logprobs, np.float32),
        "entropies": _lists(unknown if entropies is None else entropies, np.float32),
        "routing": _lists([None if t.routing is None else t.routing.ravel() for t in samples], np.int16),
        "not_utf8": _not_utf8(texts, count),
    }
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def with_required(table: pa.Table) -> pa.Table:
    """Return the table unchanged. Raise ValueError if a value is missing in a column that every sample has."""
    for name in REQUIRED.intersection(table.column_names):
        if table.column(name).null_count:
            row = table.column(name).is_null().to_pylist().index(True)
            raise ValueError(f"{name} of sample {row + 1} is null")
    return table


def completed(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Select the columns ``names`` of a table. Columns that the table lacks are filled with nulls."""
    for name in names:
        if name not in table.column_names:
            table = table.append_column(SCHEMA.field(name), pa.nulls(len(table), SCHEMA.field(name).type))
    return table.select(list(names))


def records_of(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Convert a table to one dictionary of JSON values per row. NaN and missing values become None."""
    columns = {name: values_of(table.column(name)) for name in table.schema.names}
    return [_plain(dict(zip(columns, row))) for row in zip(*columns.values())]


def values_of(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Return the values of a column.

    Lists of numbers become NumPy arrays that share the column's memory. Maps become dictionaries.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return [value for chunk in chunks for value in _chunk_values(chunk)]


def with_half_pairs(texts: dict[str, list[str]], not_utf8: pa.ChunkedArray) -> dict[str, list[str]]:
    """Restore the original texts that UTF-8 cannot encode from the column ``not_utf8``.

    Args:
        texts: texts by column name, which are changed in place.
    """
    for row, original in enumerate(not_utf8.to_pylist()):
        for name, text in json.loads(original or "{}").items():
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
    offsets = chunk.offsets.to_numpy().tolist()
    is_valid = chunk.is_valid().to_pylist()
    return [numbers[start:end] if valid else None for start, end, valid in zip(offsets, offsets[1:], is_valid)]


def table_of_records(records: Iterable[Mapping[str, Any]], names: Sequence[str]) -> pa.Table:
    """Convert the columns ``names`` of records from a JSONL file to a table.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: if the records are not samples.
    """
    rows = list(records)
    columns = []
    for name in names:
        if name == "not_utf8":  # JSON files contain texts with unpaired surrogates directly.
            texts = {text: [record.get(text, "") for record in rows] for text in _TEXTS}
            columns.append(_not_utf8(texts, len(rows)))
            continue
        if name in _DEFAULTS:
            values = [record.get(name, _DEFAULTS[name]) for record in rows]
        else:
            values = [record[name] for record in rows]
        if name in _FROM_JSON:
            columns.append(_FROM_JSON[name](values))
        else:
            columns.append(pa.array(values, SCHEMA.field(name).type))
    return pa.table(columns, schema=pa.schema([SCHEMA.field(name) for name in names]))


# -- building columns -------------------------------------------------------------------------------------------------


def _strings(values: Sequence[str]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        return pa.array([value.encode("utf-8", "replace").decode() for value in values], pa.string())


def _not_utf8(texts: Mapping[str, Sequence[str]], count: int) -> pa.Array:
    """Build the column ``not_utf8`` from texts by column name."""
    found: list[dict[str, str]] = [{} for _ in range(count)]
    for name in _TEXTS:
        for index, value in enumerate(texts[name]):
            if not _encodable(value):
                found[index][name] = value
    return _json(found)


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lists(arrays: Sequence[Any], kind: Any) -> pa.Array:
    """Build a list column from one array per row. None becomes null."""
    parts = [np.ascontiguousarray([] if values is None else values, kind) for values in arrays]
    # np.concatenate would release the GIL for every part, and wait 5 ms to get it back if another thread is busy.
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
    if any(row is None for row in rows):  # A map column encodes nulls in its offsets.
        *starts, end = offsets.to_pylist()
        nullable = [None if row is None else start for row, start in zip(rows, starts)]
        offsets = pa.array([*nullable, end], pa.int32())
    return pa.MapArray.from_arrays(offsets, keys, pa.array(items, pa.float64()))


def _term_rows(terms: Mapping[str, np.ndarray] | None, count: int) -> Sequence[Mapping[str, float] | None]:
    if terms is None:
        return [None] * count
    if not terms:
        return [{}] * count
    columns = [np.asarray(values, np.float64).tolist() for values in terms.values()]
    return [dict(zip(terms, row)) for row in zip(*columns)]


def _doubles(values: np.ndarray | None, count: int) -> pa.Array:
    if values is None:
        return pa.nulls(count, pa.float64())
    return pa.array(np.asarray(values, np.float64))


def _json(values: Sequence[Any]) -> pa.Array:
    """Build a column of JSON texts. Empty values become null."""
    return pa.array([json.dumps(value) if value else None for value in values], pa.string())


def _span_lists(spans: Sequence[Sequence[tuple[int, int]]]) -> pa.Array:
    flat = np.array([pair for row in spans for pair in row], np.int64).reshape(-1, 2)
    columns = [pa.array(column) for column in np.ascontiguousarray(flat.T)]
    pairs = pa.StructArray.from_arrays(columns, ["version", "tokens"])
    return pa.ListArray.from_arrays(_offsets(spans), pairs)


def _int_lists(rows: Sequence[Any]) -> pa.Array:
    return _lists(rows, np.int32)


def _float_lists(rows: Sequence[Any]) -> pa.Array:
    """Build a list column of floats from lists of JSON. None in a list becomes NaN."""
    return _lists([None if row is None else np.array(row, np.float32) for row in rows], np.float32)


_FROM_JSON: dict[str, Callable[[Sequence[Any]], pa.Array]] = {
    **dict.fromkeys(_TEXTS, _strings),
    **dict.fromkeys(("prompt_ids", "completion_ids", "turn_tokens", "turn_parents"), _int_lists),
    **dict.fromkeys(TOKEN_FLOATS, _float_lists),
    **dict.fromkeys(("rewards", "terms"), _maps),
    **dict.fromkeys(("turn_rewards", "reward_tokens", "extra"), _json),
    "loss_mask": lambda rows: _lists(rows, np.bool_),
    "spans": _span_lists,
    "turn_advantages": lambda rows: _lists(rows, np.float64),
    "routing": lambda rows: _lists(rows, np.int16),
}
"""Functions that build a column from JSON values. Columns without a function use ``pa.array``."""


# -- reading columns -------------------------------------------------------------------------------------------------


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Convert the values of one row to JSON values, and omit keys without a value."""
    record.update(json.loads(record["not_utf8"] or "{}"))
    if record["extra"]:
        record["extra"] = json.loads(record["extra"])
    mask = record["loss_mask"]
    record["loss_mask"] = None if mask is None else mask.astype(int).tolist()
    record["spans"] = [[span["version"], span["tokens"]] for span in record["spans"]]
    for name in ("turn_rewards", "reward_tokens"):
        if record.get(name):
            record[name] = json.loads(record[name])
    unset = [name for name in _DROPPED if record.get(name) is None]
    numbers = ("turn_tokens", "turn_advantages", "turn_parents", "routing")
    for name in ("prompt_ids", "completion_ids", *TOKEN_FLOATS, *numbers):
        record[name] = _finite_list(record.get(name))
    for name in ("rewards", "terms"):
        record[name] = {key: _number(value) for key, value in (record[name] or {}).items()}
    record["advantage"] = _number(record["advantage"])
    return {name: value for name, value in record.items() if name not in unset and name != "not_utf8"}


def _finite_list(values: np.ndarray | None) -> list[float | None]:
    """Convert an array to Python numbers. NaN becomes None, because JSON has no NaN."""
    if values is None:
        return []
    plain: list[float | None] = values.tolist()
    if values.dtype.kind == "f" and np.isnan(values).any():
        return [_number(value) for value in plain]
    return plain


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
