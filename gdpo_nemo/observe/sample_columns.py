"""Conversion of a step's samples to Arrow tables, and of tables to dictionaries.

When a table is built, tokens are never converted to Python objects: a list column is the concatenation of the samples'
arrays, with offsets. Floats are stored without loss of precision. Missing values are null, for example a reward of None
or an advantage that was not computed. NaN stays NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from gdpo_nemo.data.records import Group, Trajectory
from gdpo_nemo.observe.sample_images import image_rows
from gdpo_nemo.observe.sample_values import NO_VALUES, SampleValues

_NUMBERS = pa.map_(pa.string(), pa.float64())
IMAGES = "images"
"""Column that a file has only if a sample has images."""
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
        "criteria": pa.string(),
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
        IMAGES: pa.list_(
            pa.struct({"sha256": pa.string()} | dict.fromkeys(("width", "height", "start", "tokens"), pa.int32()))
        ),
        "not_utf8": pa.string(),
    }
)
"""Columns of a sample file.

* ``position`` is the prompt index of the group in the run, or -1 if unknown.
* ``spans`` lists the weight versions that generated the policy's tokens, with the number of tokens of each version.
* ``extra`` is JSON.
* ``terms`` contains each component's contribution to the advantage, and that of each criterion of a family.
* ``turn_tokens``, ``turn_rewards`` (JSON, one mapping per turn) and ``turn_advantages`` are set only for trajectories
  of several turns. ``turn_advantages`` also requires ``gdpo.credit: turn``. In this case, ``advantage`` is the mean of
  the turns' advantages over the tokens.
* ``turn_parents`` is set only if a turn does not continue the previous one. It lists the index of the turn that each
  turn continues, or -1 for the first turn of a context.
* ``criteria`` (JSON, one criterion by component) is set only for rows with a rubric (``algorithms.rubrics``).
* ``reward_tokens`` (JSON, a list of [start, end) by component) lists the tokens that a component is about. It is set
  only if the verifier returned spans.
* ``thinking_tokens`` is set only if a rule of ``gdpo.shaping`` has ``thinking: false``.
* ``routing`` lists the experts that the sampler chose, by token of prompt and completion, layer and choice, or -1 if
  unknown. It is set only with ``policy.router_replay: sampler``.
* ``images`` lists the images of prompt and completion, with the index of each image's first placeholder among the
  tokens of both, and the number of its placeholders. Files in ``images/`` (``sample_images``) contain the images.
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
    "criteria",
    "reward_tokens",
    "thinking_tokens",
    "entropies",
    "routing",
    IMAGES,
)
"""Columns that Parquet files of older runs lack. Readers fill these columns with nulls."""
_DEFAULTS |= dict.fromkeys(LATER)
"""Default values of keys that older JSONL files lack."""
_DROPPED = ("extra", "advantage", "terms", "trainer_logprobs", "not_utf8", *LATER)
"""Keys that are omitted from a record if they have no value."""
REQUIRED = frozenset(name for name in SCHEMA.names if _DEFAULTS.get(name, "") is not None)
"""Columns whose values are never null."""


def table_of(groups: Sequence[Group], values: SampleValues = NO_VALUES) -> pa.Table:
    """Convert the trajectories of ``groups`` to a table with the columns of ``SCHEMA`` and one row per trajectory."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for group in groups:
        for trajectory in group.trajectories:
            for name, value in _fields(group, trajectory).items():
                columns[name].append(value)
    count = len(columns["prompt_id"])
    unknown = [None] * count
    computed = {
        "advantage": unknown if values.advantages is None else np.asarray(values.advantages, np.float64).tolist(),
        "terms": _term_rows(values, count),
        "trainer_logprobs": unknown if values.trainer_logprobs is None else values.trainer_logprobs,
        "turn_advantages": unknown if values.turn_advantages is None else values.turn_advantages,
        "entropies": unknown if values.entropies is None else values.entropies,
    }
    return _table({**columns, **computed}, SCHEMA.names)


def _fields(group: Group, trajectory: Trajectory) -> dict[str, Any]:
    """Return the values of the columns that do not depend on training, in the forms that ``_BUILDERS`` expects."""
    t = trajectory
    return {
        "prompt_id": t.prompt.id,
        "sample_index": t.sample_index,
        "environment": t.prompt.environment,
        "prompt": t.prompt.text,
        "completion": t.text,
        "rewards": t.rewards,
        "outcome": str(t.outcome),
        "detail": t.detail,
        "finish_reason": t.finish_reason,
        "policy_version": t.policy_version,
        "prompt_ids": t.prompt.token_ids,
        "completion_ids": t.completion_ids,
        "logprobs": t.logprobs,
        "turns": t.turns,
        "loss_mask": t.loss_mask,
        "turn_tokens": t.turn_tokens if t.turns > 1 else None,
        "turn_rewards": t.turn_rewards if t.turns > 1 else None,
        "turn_parents": t.turn_parents or None,
        "criteria": dict(zip(t.criteria, map(asdict, t.criteria.values()))),
        "reward_tokens": t.reward_tokens,
        "thinking_tokens": t.thinking_tokens or None,
        "position": group.position,
        "spans": t.spans,
        "extra": t.extra,
        "routing": None if t.routing is None else t.routing.ravel(),
        IMAGES: image_rows((*t.prompt.images, *t.images)),
    }


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
    return list(chain.from_iterable(map(_chunk_values, chunks)))


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
    columns: dict[str, Sequence[Any]] = {}
    for name in names:
        if name in _DEFAULTS:
            columns[name] = [record.get(name, _DEFAULTS[name]) for record in rows]
        else:
            columns[name] = [record[name] for record in rows]
    if "not_utf8" in names:  # JSON files contain texts with unpaired surrogates directly.
        for name in set(_TEXTS).difference(names):
            columns[name] = [record.get(name, "") for record in rows]
    return _table(columns, names)


def _table(columns: Mapping[str, Sequence[Any]], names: Sequence[str]) -> pa.Table:
    """Build the columns ``names`` from values by column. ``not_utf8`` is built from the columns with texts."""
    arrays = []
    for name in names:
        if name == "not_utf8":
            arrays.append(_not_utf8(columns))
        elif name in _BUILDERS:
            arrays.append(_BUILDERS[name](columns[name]))
        else:
            arrays.append(pa.array(columns[name], SCHEMA.field(name).type))
    return pa.table(arrays, schema=pa.schema([SCHEMA.field(name) for name in names]))


# -- building columns -------------------------------------------------------------------------------------------------


def _strings(values: Sequence[str]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        return pa.array([value.encode("utf-8", "replace").decode() for value in values], pa.string())


def _not_utf8(columns: Mapping[str, Sequence[str]]) -> pa.Array:
    """Build the column ``not_utf8`` from the columns with texts."""
    found: list[dict[str, str]] = [{} for _ in columns["prompt_id"]]
    for name in _TEXTS:
        for index, value in enumerate(columns[name]):
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
    names, items = [], []
    for row in rows:
        for name, value in (row or {}).items():
            names.append(name)
            items.append(None if value is None else float(value))
    offsets = _offsets([row or () for row in rows])
    if None in rows:  # A map column encodes nulls in its offsets.
        nullable = offsets.to_pylist()
        for index, row in enumerate(rows):
            if row is None:
                nullable[index] = None
        offsets = pa.array(nullable, pa.int32())
    return pa.MapArray.from_arrays(offsets, pa.array(names, pa.string()), pa.array(items, pa.float64()))


def _term_rows(values: SampleValues, count: int) -> Sequence[Mapping[str, float] | None]:
    terms = values.terms
    if terms is None:
        return [None] * count
    if not terms:
        return [{}] * count
    columns = [np.asarray(column, np.float64).tolist() for column in terms.values()]
    rows = [dict(zip(terms, row)) for row in zip(*columns)]
    for row, of_criteria in zip(rows, values.criterion_terms or ()):
        row.update(of_criteria)
    return rows


def _json(values: Sequence[Any]) -> pa.Array:
    """Build a column of JSON texts. Empty values become null."""
    return pa.array([json.dumps(value) if value else None for value in values], pa.string())


def _span_lists(spans: Sequence[Sequence[tuple[int, int]]]) -> pa.Array:
    flat = np.array(list(chain.from_iterable(spans)), np.int64).reshape(-1, 2)
    versions, tokens = np.ascontiguousarray(flat.T)
    pairs = pa.StructArray.from_arrays([pa.array(versions), pa.array(tokens)], ["version", "tokens"])
    return pa.ListArray.from_arrays(_offsets(spans), pairs)


def _float_lists(rows: Sequence[Any]) -> pa.Array:
    """Build a list column of floats from arrays, or from lists of JSON in which None becomes NaN."""
    return _lists([None if row is None else np.asarray(row, np.float32) for row in rows], np.float32)


_BUILDERS: dict[str, Callable[[Sequence[Any]], pa.Array]] = {
    **dict.fromkeys(_TEXTS, _strings),
    **dict.fromkeys(("prompt_ids", "completion_ids", "turn_tokens", "turn_parents"), partial(_lists, kind=np.int32)),
    **dict.fromkeys(TOKEN_FLOATS, _float_lists),
    **dict.fromkeys(("rewards", "terms"), _maps),
    **dict.fromkeys(("turn_rewards", "criteria", "reward_tokens", "extra"), _json),
    "loss_mask": partial(_lists, kind=np.bool_),
    "spans": _span_lists,
    "turn_advantages": partial(_lists, kind=np.float64),
    "routing": partial(_lists, kind=np.int16),
}
"""Functions that build a column from JSON values or arrays. Columns without a function use ``pa.array``."""


# -- reading columns -------------------------------------------------------------------------------------------------


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Convert the values of one row to JSON values, and omit keys without a value."""
    record.update(json.loads(record["not_utf8"] or "{}"))
    if record["extra"]:
        record["extra"] = json.loads(record["extra"])
    mask = record["loss_mask"]
    record["loss_mask"] = None if mask is None else mask.astype(int).tolist()
    record["spans"] = [[span["version"], span["tokens"]] for span in record["spans"]]
    for name in ("turn_rewards", "criteria", "reward_tokens"):
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
