"""Packed micro-batches: built with NumPy, then copied to the device in one asynchronous transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from gdpo_nemo.algorithms.losses import TOKEN_INPUTS, TokenFields, TokenInput
from gdpo_nemo.data.packing import PackedRows, TrainSequence
from gdpo_nemo.megatron.attention import PackedAttention
from gdpo_nemo.megatron.flex_attention import block_mask
from gdpo_nemo.megatron.packing import Packing, packing_arrays, packing_of
from gdpo_nemo.megatron.vision import Vision

_INPUTS = {"sampler_logprobs": TokenInput(np.float32), **TOKEN_INPUTS}
"""Per-token inputs of the loss."""
_FIELD = "field."
"""Prefix of the names of arrays that are fields of ``TokenFields``."""
_ALIGNMENT = 16
"""Alignment of every array in bytes: sufficient for all data types and for the widest loads of a kernel."""


@dataclass
class MicroBatch:
    """Inputs of the model and of the loss, on the device. Each row is a target token."""

    rows: PackedRows
    """Layout of the micro-batch on the host."""
    tokens: torch.Tensor
    """int64 [1, local tokens], token ids."""
    token_indices: torch.Tensor
    """int64 [rows]: index of the local token that precedes each target."""
    targets: torch.Tensor
    """int64 [rows]: token ids of the targets."""
    packing: Packing
    fields: TokenFields | None
    """Inputs of the loss for the trained rows, or None if no loss is computed."""
    trained: torch.Tensor | None
    """int64 [trained rows]: indices of the rows with a weight above 0, or None if all rows are trained."""

    def row_count(self) -> torch.Tensor:
        """Return the number of rows, int32 [].

        The tensor is created on the device, because a copy from the host would wait for the device. Megatron's pipeline
        schedule requires this token count to divide the gradients, but `model._finalize` omits the division.
        """
        return torch.full((), len(self.rows.rows), dtype=torch.int, device=self.targets.device)


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy the arrays to the device in one asynchronous transfer. On a CPU, the tensors share the arrays' memory."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]).tolist()
    host = np.zeros(ends[-1], np.uint8)
    starts = dict(zip(arrays, [0, *ends]))
    for name, array in arrays.items():
        host[starts[name] : starts[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
    # torch does not reuse the pinned memory until the copy is done.
    buffer = torch.from_numpy(host).pin_memory().to(device, non_blocking=True)
    tensors = {}
    for name, array in arrays.items():
        part = buffer[starts[name] : starts[name] + array.nbytes]
        dtype = torch.from_numpy(array[:0].reshape(-1)).dtype
        tensors[name] = part.view(dtype).view(array.shape)
    return tensors


def make_micro_batch(
    rows: PackedRows,
    sequences: Sequence[TrainSequence],
    context: tuple[int, int],
    device: torch.device,
    *,
    attention: PackedAttention | None,
    with_fields: bool,
    rectangles: bool = False,
    sequence_ids: bool = False,
    vision: Vision | None = None,
) -> MicroBatch:
    """Create a packed micro-batch on the device.

    Args:
        rows: layout of the micro-batch.
        sequences: sequences of this data-parallel rank, to which ``rows`` refers.
        context: context-parallel rank and size.
        attention: attention of any layer, or None for TransformerEngine's attention, which needs only the bounds.
        with_fields: True if a loss is computed.
        rectangles: True if recurrent layers need the arrays of ``PackedAttention``.
        sequence_ids: True if recurrent layers use kernels, which need the sequence of each token.
        vision: images of the model, for the chunk with the vision tower.
    """
    arrays = {"tokens": rows.tokens, "rows": rows.rows, "targets": rows.targets}
    if attention is None or rectangles:
        arrays |= packing_arrays(rows.padded_lengths, *context, rectangles=rectangles, shared=rows.shared)
    if attention is not None:
        arrays |= attention.arrays(rows.padded_lengths, *context, shared=rows.shared)
    if rows.routing is not None:
        arrays["routing"] = rows.routing
    if rows.rope_positions is not None:
        arrays["rope_positions"] = rows.rope_positions
    if vision is not None:
        arrays |= vision.arrays(rows.images)
    if sequence_ids:
        arrays["seq_idx"] = np.repeat(np.arange(len(rows.padded_lengths), dtype=np.int32), rows.padded_lengths)[None]
    if with_fields:
        fields, trained = _field_arrays(sequences, rows)
        arrays |= {_FIELD + name: array for name, array in fields.items()}
        if len(trained) < len(rows.rows):
            arrays["trained"] = trained
    tensors = to_device(arrays, device)
    packing = packing_of(rows.padded_lengths, tensors)
    packing.block_mask = block_mask(tensors)
    packing.window_block_mask = block_mask(tensors, windowed=True)
    packing.routing = tensors.get("routing")
    packing.rope_positions = tensors.get("rope_positions")
    packing.images = vision and vision.inputs(rows.images, tensors)
    packing.seq_idx = tensors.get("seq_idx")
    inputs: dict[str, Any] = {
        name.removeprefix(_FIELD): tensor for name, tensor in tensors.items() if name.startswith(_FIELD)
    }
    return MicroBatch(
        rows,
        tensors["tokens"][None],
        tensors["rows"],
        tensors["targets"],
        packing,
        TokenFields(num_sequences=len(sequences), **inputs) if with_fields else None,
        tensors.get("trained"),
    )


def _field_arrays(sequences: Sequence[TrainSequence], rows: PackedRows) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the fields of the trained rows, by their names in ``TokenFields``, and the indices of the trained rows."""
    # The rows of a sequence are adjacent, so each sequence is read only once.
    starts = np.flatnonzero(np.diff(rows.sequence, prepend=-1))
    members = [sequences[i] for i in rows.sequence[starts].tolist()]
    counts = np.diff(starts, append=len(rows.sequence))
    offsets = np.split(rows.offset, starts[1:])
    weights = np.repeat(np.array([member.weight for member in members], np.float32), counts)
    # Select the rows on the host: with a mask on the device, the CPU would have to wait for the number of rows.
    trained = np.flatnonzero(weights > 0)
    advantages = _advantages(members, counts, offsets)

    def values_of_rows(name: str, dtype: Any) -> np.ndarray:
        parts = [getattr(member, name)[tokens] for member, tokens in zip(members, offsets)]
        return np.asarray(np.concatenate(parts) if parts else np.zeros(0), dtype)

    fields = {
        "advantages": advantages,
        "weights": weights,
        "sequence_ids": _trajectory_numbers(sequences)[rows.sequence],
    }
    if not sequences or any(sequence.pair for sequence in sequences):
        fields["pairs"] = _pair_numbers(sequences)[rows.sequence]
    for name, (dtype, _) in _INPUTS.items():
        # A rank without sequences does not know which optional fields the other ranks have, so it creates all fields.
        # These fields are empty, which is valid for every loss.
        if not sequences or getattr(sequences[0], name) is not None:
            fields[name] = values_of_rows(name, dtype)
    if len(trained) < len(weights):
        fields = {name: array[trained] for name, array in fields.items()}
    return fields, trained


def _advantages(members: Sequence[TrainSequence], counts: np.ndarray, offsets: Sequence[np.ndarray]) -> np.ndarray:
    """Return float32 [rows]: the advantage of each row's token, which may be the advantage of its whole sequence."""
    if not any(isinstance(member.advantage, np.ndarray) for member in members):
        return np.repeat(np.array([member.advantage for member in members], np.float32), counts)
    return np.concatenate([member.token_advantages()[tokens] for member, tokens in zip(members, offsets)])


def _trajectory_numbers(sequences: Sequence[TrainSequence]) -> np.ndarray:
    """Return int64 [sequences]: the index of the first sequence of each sequence's trajectory.

    All sequences of a trajectory thus have the same ``TokenFields.sequence_ids``.
    """
    first: dict[int, int] = {}
    numbers = np.arange(len(sequences), dtype=np.int64)
    for i, sequence in enumerate(sequences):
        if sequence.trajectory >= 0:
            numbers[i] = first.setdefault(sequence.trajectory, i)
    return numbers


def _pair_numbers(sequences: Sequence[TrainSequence]) -> np.ndarray:
    """Return int64 [sequences]: the number of each sequence's pair, counted from 1 on this data-parallel rank.

    The number is negative for a rejected or undesirable completion. All ranks with the same sequences compute the same
    numbers.
    """
    pairs = np.array([sequence.pair for sequence in sequences], np.int64)
    numbers: np.ndarray = np.unique(np.abs(pairs), return_inverse=True)[1] + 1
    return numbers * np.sign(pairs)


class MicroBatches:
    """Iterator over micro-batches, which can prepare a micro-batch while the device processes the previous one.

    Args:
        make: function that creates a micro-batch of the sequences with the given indices and starts its copy.
        assignment: indices of the sequences of each micro-batch.
    """

    def __init__(self, make: Callable[[Sequence[int]], MicroBatch], assignment: Sequence[Sequence[int]]):
        self._remaining = iter([partial(make, members) for members in assignment])
        self._ready: MicroBatch | None = None

    def __next__(self) -> MicroBatch:
        ready = self._ready
        self._ready = None
        return next(self._remaining)() if ready is None else ready

    def prefetch(self) -> None:
        """Prepare the next micro-batch. If the device has queued work, the copy overlaps with this work."""
        if self._ready is None and (make := next(self._remaining, None)) is not None:
            self._ready = make()
