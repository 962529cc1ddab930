"""One packed micro-batch: laid out in NumPy, then brought to the device in one copy that nobody waits for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Mapping, Sequence

import numpy as np
import torch

from gdpo_nemo.algorithms import TokenFields
from gdpo_nemo.data.packing import PackedRows, TrainSequence
from gdpo_nemo.megatron.attention import Packing, packing_arrays, packing_of

_KINDS = {"staleness": np.int32, "chosen": bool}
"""Types of the columns that are not float32."""
_ALIGNMENT = 16
"""Bytes: of every type's elements, and of the widest loads of a kernel."""


@dataclass
class MicroBatch:
    """What the model and the loss take, on the device."""

    rows: PackedRows
    tokens: torch.Tensor
    """int64 [1, local tokens]"""
    places: torch.Tensor
    """int64 [rows]: local tokens whose successor is evaluated."""
    targets: torch.Tensor
    """int64 [rows]"""
    packing: Packing
    fields: TokenFields | None
    """Of the trained rows, those of a weight above 0; None where no loss is computed."""
    trained: torch.Tensor | None
    """int64 [trained rows] into ``places``; None: all of them."""


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy the arrays to the device, all at once and without waiting; on a CPU they stay where they are."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]).tolist()
    host = np.zeros(ends[-1], np.uint8)
    starts = dict(zip(arrays, [0, *ends]))
    for name, array in arrays.items():
        host[starts[name] : starts[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
    # torch keeps the pinned block from its next user until the copy is done.
    buffer = torch.from_numpy(host).pin_memory().to(device, non_blocking=True)
    return {
        name: buffer[starts[name] : starts[name] + array.nbytes]
        .view(torch.from_numpy(array[:0].reshape(-1)).dtype)
        .view(array.shape)
        for name, array in arrays.items()
    }


def make_micro_batch(
    rows: PackedRows,
    sequences: Sequence[TrainSequence],
    context: tuple[int, int],
    device: torch.device,
    *,
    rectangles: bool,
    with_fields: bool,
) -> MicroBatch:
    """Bring a packed micro-batch to the device.

    Args:
        sequences: the batch that the rows are of.
        context: context-parallel rank and size.
        rectangles: whether attention reads positions and rectangles (see ``attention.packing_arrays``).
        with_fields: whether a loss is computed.
    """
    arrays = {"tokens": rows.tokens, "rows": rows.rows, "targets": rows.targets}
    arrays |= packing_arrays(rows.padded_lengths, *context, rectangles=rectangles, shared=rows.shared)
    fields: dict[str, np.ndarray] = {}
    if with_fields:
        fields, trained = _field_arrays(sequences, rows)
        arrays |= {f"field.{name}": array for name, array in fields.items()}
        if len(trained) < len(rows.rows):
            arrays["trained"] = trained
    here = to_device(arrays, device)
    given = {name: here[f"field.{name}"] for name in fields}
    return MicroBatch(
        rows,
        here["tokens"][None],
        here["rows"],
        here["targets"],
        packing_of(rows.padded_lengths, here),
        TokenFields(**given, num_sequences=len(sequences)) if with_fields else None,
        here.get("trained"),
    )


def _field_arrays(sequences: Sequence[TrainSequence], rows: PackedRows) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The fields of the trained rows by their names in ``TokenFields``, and the places of those rows."""
    # The rows of a sequence stand together, so each sequence is read once.
    starts = np.flatnonzero(np.diff(rows.sequence, prepend=-1))
    members = [sequences[i] for i in rows.sequence[starts].tolist()]
    counts = np.diff(starts, append=len(rows.sequence))
    offsets = np.split(rows.offset, starts[1:])
    each = np.array([member.weight for member in members], np.float32)
    weights = np.repeat(each, counts)
    # Here, where the weights are known: a mask on the device would have to be read back to know how many remain.
    trained = np.flatnonzero(weights > 0)
    advantages = _advantages(members, counts, offsets)

    def column(name: str, kind: Any) -> np.ndarray:
        parts = [getattr(member, name)[places] for member, places in zip(members, offsets)]
        return np.asarray(np.concatenate(parts) if parts else np.zeros(0), kind)

    found = {"advantages": advantages, "weights": weights, "sequence_ids": rows.sequence}
    if not sequences or any(sequence.pair for sequence in sequences):
        found["pairs"] = _pair_numbers(sequences)[rows.sequence]
    for name in ("sampler_logprobs", "old_logprobs", "reference_logprobs", "old_values", "returns", *_KINDS):
        # Of a rank without a sequence nobody knows what the others have; no token of anything is right for all.
        if not sequences or getattr(sequences[0], name) is not None:
            found[name] = column(name, _KINDS.get(name, np.float32))
    if len(trained) < len(weights):
        found = {name: array[trained] for name, array in found.items()}
    return found, trained


def _advantages(members: Sequence[TrainSequence], counts: np.ndarray, offsets: Sequence[np.ndarray]) -> np.ndarray:
    """Advantage of every row, float32: that of its sequence, or of its own token."""
    if not any(isinstance(member.advantage, np.ndarray) for member in members):
        return np.repeat(np.array([member.advantage for member in members], np.float32), counts)
    return np.concatenate([member.token_advantages()[places] for member, places in zip(members, offsets)])


def _pair_numbers(sequences: Sequence[TrainSequence]) -> np.ndarray:
    """int64 [sequences]: the signed number of each one's pair among those of this rank, from 1. The same on all ranks
    that share the sequences."""
    pairs = np.array([sequence.pair for sequence in sequences], np.int64)
    numbers: np.ndarray = np.unique(np.abs(pairs), return_inverse=True)[1] + 1
    return numbers * np.sign(pairs)


class MicroBatches:
    """Iterates over the micro-batches of a pass; each can be prepared while the device computes the one before.

    Args:
        make: lays out the micro-batch of these places in the batch and starts its copy.
    """

    def __init__(self, make: Callable[[Sequence[int]], MicroBatch], places: Sequence[Sequence[int]]):
        self._coming = iter([partial(make, members) for members in places])
        self._ready: MicroBatch | None = None

    def __next__(self) -> MicroBatch:
        ready = self._ready
        self._ready = None
        return next(self._coming)() if ready is None else ready

    def prefetch(self) -> None:
        """Prepare the next micro-batch now. For when the device has work: its copy then runs behind that work."""
        if self._ready is None and (make := next(self._coming, None)) is not None:
            self._ready = make()
