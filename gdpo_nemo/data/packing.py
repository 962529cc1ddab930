"""From trajectories to packed micro-batches, balanced over the data-parallel ranks.

The driver decides which sequence goes where (``assign``); each rank lays its own tokens out, so what travels is small
and every peer of a tensor-, pipeline- or context-parallel group sees the same assignment.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import chain
from typing import Any, Callable, Mapping, Sequence

import numpy as np


@dataclass
class TrainSequence:
    """One trajectory as the policy trains on it.

    ``weight`` is what each of its completion tokens counts in the loss; the weights of a whole update add up to the
    mean that ``loss_fn.aggregation`` names, so no layout can change the gradient. 0 leaves the sequence out of the
    loss.
    """

    prompt_ids: np.ndarray
    """int32 [prompt tokens]"""
    completion_ids: np.ndarray
    """int32 [completion tokens], at least one"""
    sampler_logprobs: np.ndarray
    """float32 [completion tokens]; never read where the mask is false"""
    advantage: float | np.ndarray = 0.0
    """One of all tokens, or float32 [completion tokens]; never read where the mask is false."""
    weight: float = 0.0
    old_logprobs: np.ndarray | None = None
    """float32 [completion tokens]; None: the log-probs of the update itself (ratio 1)."""
    reference_logprobs: np.ndarray | None = None
    """float32 [completion tokens], of the reference model."""
    old_values: np.ndarray | None = None
    """float32 [completion tokens]: what the value head said of the state before each token, before the step; None:
    there is no such head."""
    returns: np.ndarray | None = None
    """float32 [completion tokens]: what the values are to become. Like those never read where the mask is false."""
    loss_mask: np.ndarray | None = None
    """bool [completion tokens]: the tokens that the policy wrote. The others are context: no log-prob, no loss, no
    metric. None: all."""
    staleness: np.ndarray | None = None
    """int32 [completion tokens]: version that is trained minus the version that sampled the token; never read where the
    mask is false. None: 0, or nobody reads it."""
    chosen: np.ndarray | None = None
    """bool [completion tokens]: those that the loss kl_cov penalises (``TokenFields.chosen``). None: none."""
    pair: int = 0
    """Number of its pair of completions in the update, from 1, negative for the rejected or undesirable one; both are
    computed in one micro-batch. 0: of none."""
    shared: int = 0
    """Leading tokens that the sequence before it in its micro-batch has, too, and that are computed with that one; set
    where a rank lays sequences out (``prefixes.shared_prefixes``)."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def num_policy_tokens(self) -> int:
        """Completion tokens that the policy wrote."""
        return len(self.completion_ids) if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))

    @property
    def has_advantage(self) -> bool:
        """Whether some token has an advantage that is not 0, NaN among them."""
        return bool(self.advantage.any() if isinstance(self.advantage, np.ndarray) else self.advantage)

    def token_advantages(self) -> np.ndarray:
        """float32 [completion tokens]"""
        return np.broadcast_to(np.asarray(self.advantage, np.float32), self.completion_ids.shape)

    def where_written(self, values: np.ndarray) -> np.ndarray:
        """Of the values [completion tokens] those of tokens that the policy wrote."""
        return values if self.loss_mask is None else values[self.loss_mask]


def with_gradient(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Those whose advantage and weight are not 0; if there is none, the shortest one: a schedule needs a sequence."""
    return [s for s in sequences if s.has_advantage and s.weight] or [min(sequences, key=len)]


Assignment = list[list[list[int]]]
"""[data-parallel rank][micro-batch][place in the batch]"""


def assign(
    lengths: Sequence[int],
    ranks: int,
    token_budget: int,
    multiple_of: int = 1,
    quadratic: float = 0.0,
    costs: Sequence[float] | None = None,
) -> Assignment:
    """Spread sequences over ``ranks``, in as few micro-batches of at most ``token_budget`` tokens as a greedy fit
    finds (above 64 a rank, to within 1/64).

    Every rank gets the same number of micro-batches (whole rounds of ``multiple_of``, as interleaved pipelines need);
    a micro-batch may be empty when there are fewer sequences than micro-batches. The dearest sequences are placed
    first, each into the cheapest micro-batch with room for it, and micro-batches are dealt to the ranks to and fro, so
    that micro-batches and ranks cost about the same. Deterministic.

    Args:
        multiple_of: stages of an interleaved pipeline; 1: it is not interleaved.
        quadratic: what a sequence of n tokens costs is n + quadratic * n^2 (see ``attention_cost``).
        costs: what each costs where that does not follow from its length.

    Raises:
        ValueError: a sequence is longer than ``token_budget``.
    """
    if lengths and max(lengths) > token_budget:
        raise ValueError(f"a sequence of {max(lengths)} tokens exceeds the micro-batch budget of {token_budget}")
    costs = [cost_of(length, quadratic) for length in lengths] if costs is None else costs
    count = math.ceil(_least_micro_batches(lengths, token_budget) / ranks)
    while True:
        count = _whole_rounds(count, multiple_of)
        bins = _fit(lengths, count * ranks, token_budget, costs)
        if bins is not None:
            return _distribute(bins, ranks)
        count += max(1, count // 64)  # one by one, thousands of micro-batches would take seconds of attempts


def assign_singly(count: int, ranks: int, multiple_of: int = 1) -> Assignment:
    """Every sequence in a micro-batch of its own, equally many per rank (some may be empty)."""
    each = _whole_rounds(max(1, math.ceil(count / ranks)), multiple_of)
    bins = [[i] for i in range(count)] + [[] for _ in range(each * ranks - count)]
    return [bins[rank::ranks] for rank in range(ranks)]


def _whole_rounds(count: int, stages: int) -> int:
    """Micro-batches of whole rounds through an interleaved pipeline, two or more.

    In the only round, Megatron's last stages begin their backward passes while the first ones, which count all of it as
    warm-up, still send forward and receive nothing. With shapes that are exchanged ahead, both then wait for ever.
    """
    rounds = math.ceil(count / stages)
    return stages * (max(2, rounds) if stages > 1 else rounds)


def _least_micro_batches(lengths: Sequence[int], budget: int) -> int:
    """A number of micro-batches below which nothing fits, so that no fit is tried in vain: of the n longest each takes
    at most as many as fit of the shortest among them."""
    if not lengths:
        return 1
    longest = np.sort(np.asarray(lengths))[::-1]
    by_number = -(-np.arange(1, len(longest) + 1) // (budget // longest))
    return max(1, math.ceil(sum(lengths) / budget), int(by_number.max()))


def _fit(lengths: Sequence[int], count: int, budget: int, costs: Sequence[float]) -> list[list[int]] | None:
    """``count`` micro-batches, dearest first; None when the greedy fit finds no room."""
    heap = [(0.0, 0, index) for index in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    # Longest first is dearest first, and leaves neighbours in a pack of similar length.
    for place in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        passed = []
        while heap and heap[0][1] + lengths[place] > budget:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, tokens, index = heapq.heappop(heap)
        bins[index].append(place)
        heapq.heappush(heap, (cost + costs[place], tokens + lengths[place], index))
        for entry in passed:
            heapq.heappush(heap, entry)
    return sorted(bins, key=lambda members: -sum(costs[i] for i in members))


def _distribute(bins: list[list[int]], ranks: int) -> Assignment:
    shares: Assignment = [[] for _ in range(ranks)]
    for turn in range(0, len(bins), ranks):
        order = range(ranks) if turn // ranks % 2 == 0 else reversed(range(ranks))
        for rank, members in zip(order, bins[turn : turn + ranks]):
            shares[rank].append(members)
    return shares


def cost_of(tokens: int, quadratic: float, shared: int = 0) -> float:
    """What a sequence costs whose ``shared`` leading tokens are computed with another, in units of one token's matrix
    products."""
    return tokens - shared + quadratic * (tokens * tokens - shared * shared)


def attention_cost(model: Mapping[str, Any]) -> float:
    """The ``quadratic`` of a model, from its Hugging Face configuration.

    Multiplications: a token meets every active weight once (and the head); causal attention multiplies queries with
    keys and weights with values, heads * head size * n^2 / 2 each. The ratio is 1e-5 to 1e-4 for models of billions.
    """
    hidden = model["hidden_size"]
    heads = model["num_attention_heads"]
    groups = model.get("num_key_value_heads") or heads
    size = model.get("head_dim") or hidden // heads
    width = model["intermediate_size"]
    active = 1
    if experts := model.get("num_experts_per_tok"):
        width = model.get("moe_intermediate_size") or width
        active = experts
    layer = hidden * size * 2 * (heads + groups) + 3 * hidden * width * active
    layers = model["num_hidden_layers"]
    per_token: float = layers * heads * size / (layers * layer + hidden * model["vocab_size"])
    return per_token


METRICS = {
    "packing/padding_share": ("share", "Tokens computed for nothing but the layout's multiples"),
    "packing/micro_batches": ("", "Micro-batches of a rank in an update, mean over the step's updates"),
    "packing/imbalance": ("", "How much dearer the dearest rank's share of an update is than the mean; 0: all alike"),
    "packing/shared_tokens": ("tokens", "Tokens of an update that begin several sequences and were not computed again"),
    "packing/saved_share": ("share", "The same as a share of the update's tokens"),
}


def measure(
    assignment: Assignment,
    lengths: Sequence[int],
    multiple: int,
    total_multiple: int,
    quadratic: float,
    shared: Sequence[int] | None = None,
) -> dict[str, float]:
    """How well an update is packed.

    Args:
        shared: of every sequence the leading tokens that are computed with another; None: none.

    Returns:
        padding_share: tokens computed for nothing but the layout's multiples. micro_batches: per rank.
        imbalance: how much dearer the dearest rank is than the mean (0: all alike). shared_tokens: tokens that were
        not computed. saved_share: the same as a share of all.
    """
    shared = [0] * len(lengths) if shared is None else shared
    real = padded = 0
    for members in chain.from_iterable(assignment):
        own = [lengths[i] - shared[i] for i in members]
        real += sum(own)
        padded += sum(pad_lengths(own or [1], multiple, total_multiple))
    costs = rank_costs(assignment, lengths, shared, quadratic)
    mean = sum(costs) / len(costs)
    saved = sum(shared)
    return {
        "padding_share": 1.0 - real / padded,
        "micro_batches": float(len(assignment[0])),
        "imbalance": max(costs) / mean - 1.0 if mean else 0.0,
        "shared_tokens": float(saved),
        "saved_share": saved / (real + saved) if saved else 0.0,
    }


def rank_costs(assignment: Assignment, lengths: Sequence[int], shared: Sequence[int], quadratic: float) -> list[float]:
    """What the share of each data-parallel rank costs (see ``cost_of``)."""
    return [sum(cost_of(lengths[i], quadratic, shared[i]) for i in chain.from_iterable(share)) for share in assignment]


@dataclass
class PackedRows:
    """One micro-batch laid out for one rank of a context-parallel group.

    ``rows`` are the local tokens whose successor is a completion token that the policy wrote; every other per-row array
    is aligned with it. A token that sequences share is there once, and is a row of each of them: the last token of a
    prompt predicts the first one of every completion.
    """

    tokens: np.ndarray
    """int64 [local tokens]"""
    padded_lengths: list[int]
    """Tokens each sequence takes in the whole pack: those that it does not share, padding included."""
    shared: list[int]
    """Leading tokens of each sequence that stand with the sequence before it (see ``TrainSequence.shared``)."""
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


def pack_rows(
    sequences: Sequence[TrainSequence],
    members: Sequence[int],
    *,
    context_rank: int = 0,
    context_size: int = 1,
    total_multiple: int = 1,
    positions: Callable[[int, int, int], Any] | None = None,
) -> PackedRows:
    """Lay out the sequences at ``members`` of the batch, in that order; an empty micro-batch becomes one padded token
    row.

    Args:
        positions: function (length, rank, size) -> places of a sequence held by a context rank,
            a list, array or tensor of integers; None for one rank.
        total_multiple: the pack's length is padded to this (tensor x context ranks under sequence parallelism).
    """
    multiple = 2 * context_size if context_size > 1 else 1
    shared = [sequences[i].shared for i in members] or [0]
    lengths = [len(sequences[i]) - sequences[i].shared for i in members] or [1]
    padded = pad_lengths(lengths, multiple, total_multiple)
    tokens = []
    columns: list[tuple[np.ndarray, ...]] = []
    rows_of = np.zeros(0, np.int64)
    start = 0
    for i, length in zip(members, padded):
        s = sequences[i]
        whole = np.zeros(length, np.int64)
        whole[: len(s) - s.shared] = _tokens_from(s, s.shared)
        places = np.arange(length)
        if positions is not None and context_size > 1:
            places = np.asarray(positions(length, context_rank, context_size))
        tokens.append(whole[places])
        own = np.full(length, -1, np.int64)
        own[places] = start + np.arange(len(places))
        rows_of = np.concatenate((rows_of[: s.shared], own))
        columns.append(_evaluated(i, s, rows_of))
        start += len(places)
    if not members:
        tokens = [np.zeros(padded[0] // context_size, np.int64)]
        columns = [(np.zeros(0, np.int64),) * 4]
    rows, targets, sequence, offset = (np.concatenate(column).astype(np.int64) for column in zip(*columns))
    return PackedRows(np.concatenate(tokens), padded, shared, rows, targets, sequence, offset)


def _tokens_from(sequence: TrainSequence, start: int) -> np.ndarray:
    """The tokens of a sequence from place ``start`` on."""
    prompt = len(sequence.prompt_ids)
    if start >= prompt:
        return sequence.completion_ids[start - prompt :]
    return np.concatenate((sequence.prompt_ids[start:], sequence.completion_ids))


def _evaluated(place: int, sequence: TrainSequence, rows_of: np.ndarray) -> tuple[np.ndarray, ...]:
    """(rows, targets, sequence, offset) of one sequence, where ``rows_of`` holds the local row of each of its tokens,
    -1 for those of other context ranks."""
    before = len(sequence.prompt_ids) - 1
    rows = rows_of[before : before + len(sequence.completion_ids)]
    here = rows >= 0
    if sequence.loss_mask is not None:
        here = here & sequence.loss_mask
    offset = np.flatnonzero(here)
    return rows[offset], sequence.completion_ids[offset], np.full(len(offset), place, np.int64), offset
