"""From trajectories to packed micro-batches, balanced over the data-parallel ranks.

The driver decides which sequence goes where (``assign``); each rank lays its own tokens out, so what travels is small and
every peer of a tensor-, pipeline- or context-parallel group sees the same assignment.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Sequence

import numpy as np


@dataclass
class TrainSequence:
    """One trajectory as the policy trains on it.

    ``weight`` is what each of its completion tokens counts in the loss; the weights of a whole update add up to the mean
    that ``loss_fn.aggregation`` names, so no layout can change the gradient. 0 leaves the sequence out of the loss.
    """

    prompt_ids: np.ndarray
    """int32 [prompt tokens]"""
    completion_ids: np.ndarray
    """int32 [completion tokens], at least one"""
    sampler_logprobs: np.ndarray
    """float32 [completion tokens]"""
    advantage: float = 0.0
    weight: float = 0.0
    old_logprobs: np.ndarray | None = None
    """float32 [completion tokens]; None: the log-probs of the update itself (ratio 1)."""
    reference_logprobs: np.ndarray | None = None
    """float32 [completion tokens], of the reference model."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


Assignment = list[list[list[int]]]
"""[data-parallel rank][micro-batch][place in the batch]"""


def assign(lengths: Sequence[int], ranks: int, token_budget: int, multiple_of: int = 1) -> Assignment:
    """Spread sequences over ``ranks``, in as few micro-batches of at most ``token_budget`` tokens as a greedy fit finds.

    Every rank gets the same number of micro-batches (a multiple of ``multiple_of``, which interleaved pipelines need);
    a micro-batch may be empty when there are fewer sequences than micro-batches. Longest sequences are placed first, each
    into the emptiest micro-batch, which keeps both micro-batches and ranks balanced. Deterministic.

    Raises:
        ValueError: a sequence is longer than ``token_budget``.
    """
    if lengths and max(lengths) > token_budget:
        raise ValueError(f"a sequence of {max(lengths)} tokens exceeds the micro-batch budget of {token_budget}")
    count = max(1, math.ceil(sum(lengths) / (ranks * token_budget)))
    while True:
        count = math.ceil(count / multiple_of) * multiple_of
        bins = _fit(lengths, count * ranks, token_budget)
        if bins is not None:
            return [bins[rank::ranks] for rank in range(ranks)]
        count += 1


def _fit(lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    heap = [(0, index) for index in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for place in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, index = heapq.heappop(heap)
        if tokens + lengths[place] > budget:
            return None
        bins[index].append(place)
        heapq.heappush(heap, (tokens + lengths[place], index))
    # Neighbours in a pack should be of similar length; the fullest bins first, dealt out in turn.
    bins = [sorted(members, key=lambda i: (-lengths[i], i)) for members in bins]
    return sorted(bins, key=lambda members: -sum(lengths[i] for i in members))


@dataclass
class PackedRows:
    """One micro-batch laid out for one rank of a context-parallel group.

    ``rows`` are the local tokens whose successor is a completion token; every other per-row array is aligned with it.
    """

    tokens: np.ndarray
    """int64 [local tokens]"""
    padded_lengths: list[int]
    """Tokens each sequence takes in the whole pack, padding included."""
    rows: np.ndarray
    """int64 [rows]"""
    targets: np.ndarray
    """int64 [rows]: the completion token that follows"""
    sequence: np.ndarray
    """int64 [rows]: place of the row's sequence in the batch"""
    offset: np.ndarray
    """int64 [rows]: place of the target in its completion"""


def pad_lengths(lengths: Sequence[int], multiple: int, total_multiple: int) -> list[int]:
    """Round each length up to ``multiple``, and the last one further until the sum divides by ``total_multiple``."""
    padded = [math.ceil(length / multiple) * multiple for length in lengths]
    while sum(padded) % total_multiple:
        padded[-1] += multiple
    return padded


def lay_out(
    sequences: Sequence[TrainSequence],
    members: Sequence[int],
    *,
    context_rank: int = 0,
    context_size: int = 1,
    total_multiple: int = 1,
    positions=None,
) -> PackedRows:
    """Lay out the sequences at ``members`` of the batch, in that order; an empty micro-batch becomes one padded token row.

    Args:
        positions: function (length, rank, size) -> places of a sequence held by a context rank; None for one rank.
        total_multiple: the pack's length is padded to this (tensor x context ranks under sequence parallelism).
    """
    multiple = 2 * context_size if context_size > 1 else 1
    lengths = [len(sequences[i]) for i in members] or [1]
    padded = pad_lengths(lengths, multiple, total_multiple)
    tokens, rows, targets, sequence, offset = [], [], [], [], []
    start = 0
    for i, length in zip(members, padded):
        whole = np.zeros(length, np.int64)
        s = sequences[i]
        p, n = len(s.prompt_ids), len(s)
        whole[:p], whole[p:n] = s.prompt_ids, s.completion_ids
        places = np.arange(length) if context_size == 1 else np.asarray(positions(length, context_rank, context_size))
        tokens.append(whole[places])
        local = np.flatnonzero((places >= p - 1) & (places < n - 1))
        rows.append(start + local)
        targets.append(whole[places[local] + 1])
        sequence.append(np.full(len(local), i, np.int64))
        offset.append(places[local] + 1 - p)
        start += len(places)
    if not members:
        tokens, rows = [np.zeros(padded[0] // context_size, np.int64)], [np.zeros(0, np.int64)]
        targets = sequence = offset = rows
    return PackedRows(
        np.concatenate(tokens),
        padded,
        *(np.concatenate(x).astype(np.int64) for x in (rows, targets, sequence, offset)),
    )
