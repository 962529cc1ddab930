"""The sequences of an update that one data-parallel rank trains, in a fixed number of arrays.

Ray maps large arrays into a rank's memory without a copy, but pickles every small object. The sequences are therefore
concatenated for sending, and the rank creates views of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.losses import TOKEN_INPUTS, TokenInput
from gdpo_nemo.data.image_table import ImageTable
from gdpo_nemo.data.images import Images
from gdpo_nemo.data.packing import Assignment, TrainSequence, has_split_trajectory
from gdpo_nemo.data.records import TokenValues
from gdpo_nemo.utils.errors import RunError

TRAINING = ("sampler_logprobs", "loss_mask", *TOKEN_INPUTS)
"""Per-token fields of ``TrainSequence`` that an update reads, besides the token ids."""
SCORING = ("loss_mask",)
"""Per-token fields that the computation of log-probs reads."""
_OPTIONAL = {"loss_mask": TokenInput(bool, missing=True), **TOKEN_INPUTS}
"""Properties of the fields that may be missing in all sequences."""


@dataclass(frozen=True)
class Share:
    """Sequences of one data-parallel rank, in the order of its micro-batches. The arrays are read-only on the rank."""

    sizes: list[int]
    """Number of sequences in each micro-batch."""
    prompt_lengths: np.ndarray
    """int64 [sequences]"""
    completion_lengths: np.ndarray
    """int64 [sequences]"""
    prompt_ids: np.ndarray
    """int32 [prompt tokens of all sequences]"""
    completion_ids: np.ndarray
    """int32 [completion tokens of all sequences]"""
    advantages: np.ndarray
    """float64 [sequences], or float32 [completion tokens of all sequences] if a sequence has advantages per token."""
    by_token: bool
    """True if ``advantages`` has one value per token."""
    weights: np.ndarray
    """float64 [sequences]: loss weights (``TrainSequence.weight``)"""
    columns: dict[str, np.ndarray]
    """Other per-token fields of ``TrainSequence`` by name: [completion tokens of all sequences]. A field that no
    sequence has is absent."""
    pairs: np.ndarray | None = None
    """int64 [sequences]: ``TrainSequence.pair`` (None if no sequence belongs to a pair)."""
    shared: np.ndarray | None = None
    """int64 [sequences]: ``TrainSequence.shared`` (None if no tokens are shared)."""
    trajectories: np.ndarray | None = None
    """int64 [sequences]: ``TrainSequence.trajectory`` (None if each sequence belongs to a different trajectory)."""
    routing: np.ndarray | None = None
    """[tokens of all sequences, MoE layers * experts per token]: ``TrainSequence.routing`` (None if no sequence has
    it)."""
    images: ImageTable | None = None
    """Images of the sequences (None if no sequence has images)."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[TrainSequence],
        micro_batches: Sequence[Sequence[int]],
        fields: Sequence[str] = TRAINING,
        shared: Sequence[int] | None = None,
    ) -> Share:
        """Collect the sequences of one rank.

        Args:
            sequences: all sequences of the batch.
            micro_batches: indices of the sequences in each micro-batch of the rank.
            fields: names of the per-token fields to include.
            shared: for every sequence of the batch, the number of leading tokens shared with the previous one.

        Raises:
            RunError: if only some sequences have a field without a default.
        """
        indices = list(chain.from_iterable(micro_batches))
        ordered = [sequences[i] for i in indices]
        by_token = any(isinstance(s.advantage, np.ndarray) for s in ordered)
        columns: dict[str, np.ndarray] = {}
        for name in fields:
            # Sampler and old log-probs are often the same arrays. These arrays are sent only once.
            same = name == "old_logprobs" and all(s.old_logprobs is s.sampler_logprobs for s in ordered)
            column = columns.get("sampler_logprobs") if same else _column(ordered, name)
            if column is not None:
                columns[name] = column
        if by_token:
            advantages = _joined([s.token_advantages() for s in ordered])
        else:
            advantages = _numbers(ordered, "advantage", np.float64)
        pairs = _numbers(ordered, "pair", np.int64)
        prompts = [s.prompt_ids for s in ordered]
        completions = [s.completion_ids for s in ordered]
        return cls(
            sizes=list(map(len, micro_batches)),
            prompt_lengths=np.array(list(map(len, prompts)), np.int64),
            completion_lengths=np.array(list(map(len, completions)), np.int64),
            prompt_ids=_joined(prompts),
            completion_ids=_joined(completions),
            advantages=advantages,
            by_token=by_token,
            weights=_numbers(ordered, "weight", np.float64),
            columns=columns,
            pairs=pairs if pairs.any() else None,
            shared=None if shared is None else np.array([shared[i] for i in indices], np.int64),
            trajectories=_numbers(ordered, "trajectory", np.int64) if has_split_trajectory(ordered) else None,
            routing=_routing(ordered),
            images=ImageTable.of([s.images for s in ordered]),
        )

    @property
    def image_data(self) -> np.ndarray | None:
        """Encoded images, uint8 [bytes], or None if there are none. Only some ranks need them."""
        return None if self.images is None else self.images.data

    def with_image_data(self, data: np.ndarray | None) -> Share:
        """Return this share with ``image_data`` replaced."""
        return self if self.images is None else replace(self, images=replace(self.images, data=data))

    @property
    def micro_batches(self) -> list[list[int]]:
        """Indices into ``sequences()`` for each micro-batch."""
        ends = np.cumsum(self.sizes).tolist()
        return [list(range(end - size, end)) for size, end in zip(self.sizes, ends)]

    def sequences(self) -> list[TrainSequence]:
        """Return the sequences as views of the arrays. The sampler's log-probs are NaN if they were not sent."""
        unknown = np.broadcast_to(np.float32(np.nan), self.completion_ids.shape)
        columns = {"sampler_logprobs": unknown, **self.columns}
        parts = [cut(values, self.completion_lengths) for values in columns.values()]
        advantages = cut(self.advantages, self.completion_lengths) if self.by_token else self.advantages.tolist()
        routing: Sequence[np.ndarray | None] = [None] * len(self.weights)
        if self.routing is not None:
            routing = cut(self.routing, self.prompt_lengths + self.completion_lengths)
        images: Sequence[Images] = [()] * len(self.weights)
        if self.images is not None:
            images = self.images.images(len(self.weights))
        prompts = cut(self.prompt_ids, self.prompt_lengths)
        completions = cut(self.completion_ids, self.completion_lengths)
        sequences = []
        for i, (prompt, completion, *values) in enumerate(zip(prompts, completions, *parts)):
            sequence = TrainSequence(
                prompt_ids=prompt,
                completion_ids=completion,
                advantage=advantages[i],
                weight=float(self.weights[i]),
                pair=0 if self.pairs is None else int(self.pairs[i]),
                shared=0 if self.shared is None else int(self.shared[i]),
                trajectory=-1 if self.trajectories is None else int(self.trajectories[i]),
                routing=routing[i],
                images=images[i],
                **dict(zip(columns, values)),
            )
            sequences.append(sequence)
        return sequences

    def flat(self, found: TokenValues, *, complete: bool) -> FlatValues:
        """Convert token values to one array over the completion tokens of all sequences.

        Args:
            complete: True if ``found`` contains all tokens that the policy wrote. False if it contains only the tokens
                of one context-parallel rank.
        """
        starts = np.cumsum(self.completion_lengths) - self.completion_lengths
        indices = starts[found.sequence] + found.offset
        if not complete:
            return FlatValues(found.values, indices.astype(np.int32))
        values = np.full((len(self.completion_ids), *found.values.shape[1:]), np.nan, np.float32)
        values[indices] = found.values
        return FlatValues(values, None)


@dataclass(frozen=True)
class FlatValues:
    """Values of completion tokens that a rank returns to the driver."""

    values: np.ndarray
    """float32 [tokens] or [tokens, values per token]"""
    indices: np.ndarray | None
    """int32 [tokens]: index of each token in ``Share.completion_ids``. None if ``values`` contains all of these tokens
    in order, with NaN for tokens that the policy did not write."""


def by_sequence(
    sequences: Sequence[TrainSequence], assignment: Assignment, found: Sequence[tuple[int, FlatValues | None]]
) -> list[np.ndarray]:
    """Combine the values from all ranks into one array per sequence.

    Args:
        found: (data-parallel rank, values) from every rank. The values are None if the rank does not return any.

    Returns:
        float32 [completion tokens] or [completion tokens, values per token] for each sequence. Tokens without a value
        are NaN.
    """
    out = [np.zeros(0, np.float32)] * len(sequences)
    value_shape = next((part.values.shape[1:] for _, part in found if part is not None), ())
    for rank, micro_batches in enumerate(assignment):
        members = list(chain.from_iterable(micro_batches))
        lengths = np.array([len(sequences[i].completion_ids) for i in members], np.int64)
        flat = np.full((int(lengths.sum()), *value_shape), np.nan, np.float32)
        for source, part in found:
            if source == rank and part is not None:
                flat[slice(None) if part.indices is None else part.indices] = part.values
        for i, values in zip(members, cut(flat, lengths)):
            out[i] = values
    return out


def cut(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Split ``values`` into consecutive views with these lengths."""
    ends = np.cumsum(lengths).tolist()
    return [values[end - length : end] for end, length in zip(ends, lengths.tolist())]


def _column(sequences: Sequence[TrainSequence], name: str) -> np.ndarray | None:
    """Concatenate a per-token field of all sequences. Return None if no sequence has it.

    Raises:
        RunError: if only some sequences have the field, and it has no default.
    """
    values = [getattr(s, name) for s in sequences]
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        dtype, default = _OPTIONAL[name]
        if default is None:
            raise RunError(
                f"{name}: only some sequences of an update have this field; set it for all sequences or for none"
            )
        lengths = [len(s.completion_ids) for s in sequences]
        values = [np.full(n, default, dtype) if v is None else v for v, n in zip(values, lengths)]
    return _joined(values)


def _routing(sequences: Sequence[TrainSequence]) -> np.ndarray | None:
    """Concatenate ``TrainSequence.routing``. The rows of sequences without routing are unknown (-1)."""
    known = next((s.routing for s in sequences if s.routing is not None), None)
    if known is None:
        return None
    width = known.shape[1]
    parts = []
    for s in sequences:
        parts.append(np.full((len(s), width), -1, known.dtype) if s.routing is None else s.routing)
    return _joined(parts)


def _numbers(sequences: Sequence[TrainSequence], name: str, dtype: Any) -> np.ndarray:
    """Return a field with one number per sequence as an array."""
    return np.array([getattr(s, name) for s in sequences], dtype)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
