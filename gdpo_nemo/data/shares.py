"""What one data-parallel rank gets of an update: its own sequences, as a handful of arrays however many they are.

Ray maps large arrays into the ranks' memory without a copy, but pickles every small object; so the sequences travel end
to end, and a rank cuts views of them out again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Sequence

import numpy as np

from gdpo_nemo.data.packing import Assignment, TrainSequence
from gdpo_nemo.data.results import TokenValues
from gdpo_nemo.errors import RunError

TRAINING = (
    "sampler_logprobs", "old_logprobs", "reference_logprobs", "old_values", "returns", "loss_mask", "staleness",
    "chosen",
)  # fmt: skip
"""What an update reads of every completion token besides the token itself."""
SCORING = ("loss_mask",)
"""What evaluating log-probs reads."""
_MISSING = {"loss_mask": (bool, True), "staleness": (np.int32, 0), "chosen": (bool, False)}
"""(type, value) where some sequences leave out what others have; the rest is of all sequences or of none."""


@dataclass(frozen=True)
class Share:
    """Sequences of one data-parallel rank, in the order of its micro-batches; read-only once it has travelled."""

    sizes: list[int]
    """Sequences of each micro-batch."""
    prompt_lengths: np.ndarray
    """int64 [sequences]"""
    completion_lengths: np.ndarray
    """int64 [sequences]"""
    prompt_ids: np.ndarray
    """int32 [prompt tokens of all sequences]"""
    completion_ids: np.ndarray
    """int32 [completion tokens of all sequences]"""
    advantages: np.ndarray
    """float64 [sequences], or float32 [completion tokens of all sequences] where one of them has its own by token."""
    by_token: bool
    """Whether ``advantages`` are of tokens."""
    weights: np.ndarray
    """float64 [sequences]"""
    columns: dict[str, np.ndarray]
    """[completion tokens of all sequences] for each further field of ``TrainSequence`` that the sequences have."""
    pairs: np.ndarray | None = None
    """int64 [sequences]: as ``TrainSequence.pair``; None: there are no pairs."""
    shared: np.ndarray | None = None
    """int64 [sequences]: leading tokens that the sequence before it in its micro-batch computes; None: none."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[TrainSequence],
        micro_batches: Sequence[Sequence[int]],
        fields: Sequence[str] = TRAINING,
        shared: Sequence[int] | None = None,
    ) -> Share:
        """The share whose ``micro_batches`` hold places in ``sequences``, of which each leaves its first ``shared``
        tokens to the one before it. Raises RunError: see ``_column``."""
        places = list(chain.from_iterable(micro_batches))
        mine = [sequences[i] for i in places]
        by_token = any(isinstance(s.advantage, np.ndarray) for s in mine)
        columns: dict[str, np.ndarray] = {}
        for name in fields:
            # Sampled and old log-probs are often the same arrays: pickled once, if they still are.
            same = name == "old_logprobs" and all(s.old_logprobs is s.sampler_logprobs for s in mine)
            column = columns.get("sampler_logprobs") if same else _column(mine, name)
            if column is not None:
                columns[name] = column
        return cls(
            sizes=[len(members) for members in micro_batches],
            prompt_lengths=np.array([len(s.prompt_ids) for s in mine], np.int64),
            completion_lengths=np.array([len(s.completion_ids) for s in mine], np.int64),
            prompt_ids=_joined([s.prompt_ids for s in mine]),
            completion_ids=_joined([s.completion_ids for s in mine]),
            advantages=(
                _joined([s.token_advantages() for s in mine])
                if by_token
                else np.array([s.advantage for s in mine], np.float64)
            ),
            by_token=by_token,
            weights=np.array([s.weight for s in mine], np.float64),
            columns=columns,
            pairs=np.array([s.pair for s in mine], np.int64) if any(s.pair for s in mine) else None,
            shared=None if shared is None else np.array([shared[i] for i in places], np.int64),
        )

    @property
    def micro_batches(self) -> list[list[int]]:
        """Places in ``sequences()`` of the members of each micro-batch."""
        ends = np.cumsum(self.sizes).tolist()
        return [list(range(end - size, end)) for size, end in zip(self.sizes, ends)]

    def sequences(self) -> list[TrainSequence]:
        """Views of every sequence; log-probs of a sampler that did not travel are NaN."""
        unknown = np.broadcast_to(np.float32(np.nan), self.completion_ids.shape)
        columns = {"sampler_logprobs": unknown, **self.columns}
        parts = {name: cut(values, self.completion_lengths) for name, values in columns.items()}
        advantages = cut(self.advantages, self.completion_lengths) if self.by_token else self.advantages.tolist()
        tokens = zip(cut(self.prompt_ids, self.prompt_lengths), cut(self.completion_ids, self.completion_lengths))
        return [
            TrainSequence(
                prompt_ids=prompt,
                completion_ids=completion,
                advantage=advantages[i],
                weight=float(self.weights[i]),
                pair=0 if self.pairs is None else int(self.pairs[i]),
                shared=0 if self.shared is None else int(self.shared[i]),
                **{name: part[i] for name, part in parts.items()},
            )
            for i, (prompt, completion) in enumerate(tokens)
        ]

    def flat(self, found: TokenValues, whole: bool) -> FlatValues:
        """The values of this share's completion tokens, end to end.

        Args:
            whole: ``found`` has every token that the policy wrote; else those of one context-parallel rank.
        """
        starts = np.cumsum(self.completion_lengths) - self.completion_lengths
        places = starts[found.sequence] + found.offset
        if not whole:
            return FlatValues(found.values, places.astype(np.int32))
        values = np.full((len(self.completion_ids), *found.values.shape[1:]), np.nan, np.float32)
        values[places] = found.values
        return FlatValues(values, None)


@dataclass(frozen=True)
class FlatValues:
    """Values of a share's completion tokens, as a rank sends them to the driver."""

    values: np.ndarray
    """float32 [tokens], or [tokens, values of each]."""
    places: np.ndarray | None
    """int32 [tokens]: where in the share's completions; None: all of them, in order, NaN where the policy wrote
    nothing."""


def by_sequence(
    sequences: Sequence[TrainSequence], assignment: Assignment, found: Sequence[tuple[int, FlatValues | None]]
) -> list[np.ndarray]:
    """float32 [completion tokens] for each sequence, or [completion tokens, values of each], from what the ranks
    found; NaN where no rank has a value.

    Args:
        found: (data-parallel rank, its values) of every rank; None where a rank does not report.
    """
    out = [np.zeros(0, np.float32)] * len(sequences)
    of_each = next((part.values.shape[1:] for _, part in found if part is not None), ())
    for rank, micro_batches in enumerate(assignment):
        members = list(chain.from_iterable(micro_batches))
        lengths = np.array([len(sequences[i].completion_ids) for i in members], np.int64)
        flat = np.full((int(lengths.sum()), *of_each), np.nan, np.float32)
        for place, part in found:
            if place == rank and part is not None:
                flat[slice(None) if part.places is None else part.places] = part.values
        for i, values in zip(members, cut(flat, lengths)):
            out[i] = values
    return out


def cut(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Views of consecutive stretches of ``values``, one of each length."""
    ends = np.cumsum(lengths).tolist()
    return [values[end - length : end] for end, length in zip(ends, lengths.tolist())]


def _column(sequences: Sequence[TrainSequence], name: str) -> np.ndarray | None:
    """A field of all sequences end to end; None where no sequence has it.

    Raises:
        RunError: some have it and others do not, and there is nothing that could stand for it.
    """
    values = [getattr(s, name) for s in sequences]
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        if name not in _MISSING:
            raise RunError(f"{name}: some sequences of an update have it and others do not; give it to all or to none")
        dtype, default = _MISSING[name]
        lengths = [len(s.completion_ids) for s in sequences]
        values = [np.full(n, default, dtype) if v is None else v for v, n in zip(values, lengths)]
    return _joined(values)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
