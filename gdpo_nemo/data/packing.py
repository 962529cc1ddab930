"""Packing of trajectories into micro-batches, balanced over the data-parallel ranks.

The driver assigns sequences to micro-batches (``assign``), and each rank packs the tokens of its sequences
(``pack_rows``). All ranks of a tensor-, pipeline- or context-parallel group therefore use the same assignment, and
little data is sent.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.losses import TokenInputs
from gdpo_nemo.data.image_rows import Cut, Grid, ImagePacker, ImageRows
from gdpo_nemo.data.images import Images
from gdpo_nemo.data.state_keys import state_keys
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.weights import weight_table


@dataclass
class TrainSequence(TokenInputs[np.ndarray]):
    """One trajectory as training data for the policy, or one of its contexts (``data.contexts``)."""

    prompt_ids: np.ndarray
    """int32 [prompt tokens]"""
    completion_ids: np.ndarray
    """int32 [completion tokens], at least one"""
    sampler_logprobs: np.ndarray
    """float32 [completion tokens]: the sampler's log-probs. Values of masked tokens are not read."""
    advantage: float | np.ndarray = 0.0
    """One value for all tokens, or float32 [completion tokens]. Values of masked tokens are not read."""
    weight: float = 0.0
    """Weight of each completion token in the loss; 0 excludes the sequence.

    The weighted sum over an update is the mean that ``loss_fn.aggregation`` selects, so the layout cannot change the
    gradient.
    """
    loss_mask: np.ndarray | None = None
    """bool [completion tokens]: True for tokens that the policy wrote (None if it wrote all tokens). The other tokens
    are only context, without log-probs, loss or metrics."""
    routing: np.ndarray | None = None
    """int8 or int16 [tokens, MoE layers * experts per token]: experts that the sampler chose for each token of prompt
    and completion, or -1 if unknown. The policy uses these experts instead of its choice. None if all are unknown."""
    images: Images = ()
    """Images of prompt and completion."""
    pair: int = 0
    """Pair of completions in the update, numbered from 1 (0 for no pair). The number is negative for the rejected or
    undesirable completion. Both completions are in the same micro-batch."""
    shared: int = 0
    """Number of leading tokens shared with the previous sequence in the micro-batch, which computes them. This field is
    set when a rank packs its sequences (``prefixes.shared_prefixes``)."""
    trajectory: int = -1
    """Number of the trajectory in its step, or -1 if unknown. Several sequences may belong to one trajectory, whose
    weight they share: losses over whole sequences use all of them as one sequence."""
    scores: np.ndarray | None = None
    """float32 [completion tokens, 1 to 3 columns]: log-prob, entropy and value of each token, computed by the trainer
    before the step (``training.gdpo.TokenScores``). Not sent to the ranks. None if unknown."""
    indices: np.ndarray | slice = slice(None)
    """int64 [completion tokens]: index of each token in the completion of the trajectory. A slice of all tokens if the
    trajectory has one sequence."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @cached_property
    def state_keys(self) -> np.ndarray:
        """Keys of the states of all tokens (``state_keys.state_keys``). Shape: uint64 [tokens]."""
        return state_keys(np.concatenate((self.prompt_ids, self.completion_ids)), self.routing, self.images)

    @property
    def num_policy_tokens(self) -> int:
        """Number of completion tokens that the policy wrote."""
        return len(self.completion_ids) if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))

    @property
    def has_advantage(self) -> bool:
        """True if the advantage of any token is not 0. NaN is treated as nonzero."""
        # A NaN must reach the loss, which stops the run. A skipped sequence would hide it.
        return bool(self.advantage.any() if isinstance(self.advantage, np.ndarray) else self.advantage)

    def token_advantages(self) -> np.ndarray:
        """Return the advantage of each token: float32 [completion tokens]."""
        return np.broadcast_to(np.asarray(self.advantage, np.float32), self.completion_ids.shape)

    def where_written(self, values: np.ndarray) -> np.ndarray:
        """Return only the values of the tokens that the policy wrote, given values [completion tokens]."""
        return values if self.loss_mask is None else values[self.loss_mask]


def with_gradient(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Return the sequences with a nonzero advantage and weight, and the other sequences of their trajectories. An
    update needs at least one sequence, so return the shortest sequence if all would be skipped."""
    trained = [bool(s.has_advantage and s.weight) for s in sequences]
    # Losses over whole sequences read all sequences of a trajectory, also those without a gradient of their own.
    trajectories = {s.trajectory for s, keep in zip(sequences, trained) if keep} - {-1}
    chosen = [s for s, keep in zip(sequences, trained) if keep or s.trajectory in trajectories]
    return chosen or [min(sequences, key=len)]


def has_split_trajectory(sequences: Sequence[TrainSequence]) -> bool:
    """Return True if several of the sequences belong to one trajectory."""
    known = [s.trajectory for s in sequences if s.trajectory >= 0]
    return len(set(known)) < len(known)


Assignment = list[list[list[int]]]
"""Indices of sequences in the batch, by data-parallel rank and micro-batch."""


@dataclass(frozen=True)
class Budget:
    """Limits of the micro-batches of an update, and the costs by which sequences are distributed over them."""

    ranks: int
    """Number of data-parallel ranks."""
    tokens: int
    """Maximum number of computed tokens in a micro-batch, including the padding of each sequence."""
    stages: int = 1
    """Every rank gets a multiple of this number of micro-batches: the stages of an interleaved pipeline, otherwise 1.
    """
    multiple: int = 1
    """The number of computed tokens of a sequence is padded to a multiple of this number."""
    quadratic: float = 0.0
    """Coefficient of the quadratic cost: a sequence of n tokens costs n + quadratic * n^2 (see ``attention_cost``)."""
    attention: float = 1.0
    """Cost of attention in a layout that shares prompts, relative to other layouts
    (``prefixes.shared_attention_cost``)."""

    @property
    def shared_quadratic(self) -> float:
        """``quadratic`` in a layout that shares prompts."""
        return self.attention * self.quadratic


def assign(lengths: Sequence[int], budget: Budget, costs: Sequence[float] | None = None) -> Assignment:
    """Distribute sequences over the ranks, in few micro-batches of at most ``budget.tokens`` tokens.

    Every rank gets the same number of micro-batches, a multiple of ``budget.stages``. The number is the lowest for
    which a greedy fit succeeds. Above 64 micro-batches per rank, the number may be larger than the lowest by 1/64. A
    micro-batch may be empty if there are fewer sequences than micro-batches.

    The greedy fit places the longest sequences first, each into the cheapest micro-batch with enough space. The
    micro-batches are then assigned to the ranks in alternating order, from expensive to cheap, to balance the ranks.
    The result is deterministic.

    Args:
        lengths: tokens of each sequence, including padding.
        costs: cost of each sequence. None computes the cost from the length.

    Raises:
        ValueError: if a sequence is longer than ``budget.tokens``.
    """
    if lengths and max(lengths) > budget.tokens:
        raise ValueError(f"a sequence of {max(lengths)} tokens exceeds the micro-batch budget of {budget.tokens}")
    costs = [cost_of(length, budget.quadratic) for length in lengths] if costs is None else costs
    count = math.ceil(_least_micro_batches(lengths, budget.tokens) / budget.ranks)
    while True:
        # All ranks need the same number, because expert parallelism exchanges tokens between data-parallel ranks.
        count = _whole_rounds(count, budget.stages)
        bins = _fit(lengths, count * budget.ranks, budget.tokens, costs)
        if bins is not None:
            return _distribute(bins, budget.ranks)
        count += max(1, count // 64)  # increments of 1 would take seconds with thousands of micro-batches


def assign_singly(count: int, ranks: int, stages: int = 1) -> Assignment:
    """Put every sequence into a separate micro-batch. Ranks with fewer sequences get empty micro-batches."""
    each = _whole_rounds(max(1, math.ceil(count / ranks)), stages)
    bins = [[i] for i in range(count)] + [[] for _ in range(each * ranks - count)]
    return [bins[rank::ranks] for rank in range(ranks)]


def _whole_rounds(count: int, stages: int) -> int:
    """Round up to a multiple of ``stages``; for an interleaved pipeline, to at least two rounds of ``stages``.

    With a single round, all micro-batches are warm-up for Megatron's first stages, which send activations forward and
    receive nothing. The last stages already begin their backward passes. If the stages exchange shapes first, this
    causes a deadlock.
    """
    rounds = math.ceil(count / stages)
    return stages * (max(2, rounds) if stages > 1 else rounds)


def _least_micro_batches(lengths: Sequence[int], limit: int) -> int:
    """Return a lower bound for the number of micro-batches, to skip fits that must fail.

    For every n, consider the n longest sequences. A micro-batch can hold at most ``limit // length`` of these
    sequences, where ``length`` is the shortest of their lengths.
    """
    if not lengths:
        return 1
    longest = np.sort(np.asarray(lengths))[::-1]
    by_number = -(-np.arange(1, len(longest) + 1) // (limit // longest))
    return max(1, math.ceil(sum(lengths) / limit), int(by_number.max()))


def _fit(lengths: Sequence[int], count: int, limit: int, costs: Sequence[float]) -> list[list[int]] | None:
    """Return ``count`` micro-batches, sorted from expensive to cheap, or None if the sequences do not fit."""
    heap = [(0.0, 0, index) for index in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    # Longer sequences cost more. This order also puts sequences of similar length next to each other.
    for sequence in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        full = []
        while heap and heap[0][1] + lengths[sequence] > limit:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, tokens, index = heapq.heappop(heap)
        bins[index].append(sequence)
        heapq.heappush(heap, (cost + costs[sequence], tokens + lengths[sequence], index))
        for entry in full:  # a shorter sequence may still fit
            heapq.heappush(heap, entry)
    return sorted(bins, key=lambda members: -sum(costs[i] for i in members))


def _distribute(bins: list[list[int]], ranks: int) -> Assignment:
    assignment: Assignment = [[] for _ in range(ranks)]
    for start in range(0, len(bins), ranks):
        # The rank with the most expensive micro-batch of a round gets the cheapest of the next.
        order = range(ranks) if start // ranks % 2 == 0 else reversed(range(ranks))
        for rank, members in zip(order, bins[start : start + ranks]):
            assignment[rank].append(members)
    return assignment


def cost_of(tokens: int, quadratic: float, shared: int = 0) -> float:
    """Return the cost of a sequence, in units of one token's matrix products.

    Args:
        quadratic: coefficient of the quadratic cost (see ``attention_cost``).
        shared: leading tokens that another sequence computes.
    """
    return tokens - shared + quadratic * (tokens * tokens - shared * shared)


@lru_cache(maxsize=16)
def attention_cost(model: ModelDescription) -> float:
    """Return the cost of attention relative to matrix products (``quadratic``).

    The cost is a ratio of numbers of multiplications. Every token uses each active weight and the output layer once.
    Causal attention multiplies queries with keys and scores with values, each with heads * head size * n^2 / 2
    multiplications. The ratio is 1e-5 to 1e-4 for models with billions of parameters.
    """
    weights = model.hidden * model.vocabulary
    for row in weight_table(model):
        is_small = row.megatron in ("mlp.router.weight", "mlp.shared_experts.gate_weight")
        if row.layer is not None and row.trained and len(row.shape) == 2 and not is_small:
            weights += row.size * (model.active_experts if row.experts else 1)
    width = model.query
    if model.latent:
        width = model.heads * (model.head_size + model.latent.value) / 2
    return model.count("*") * width / weights


METRICS = {
    "packing/padding_share": ("share", "Fraction of processed tokens that are padding required by the parallel layout"),
    "packing/micro_batches": ("", "Micro-batches per rank and update, averaged over the updates of the step"),
    "packing/imbalance": (
        "",
        "Estimated cost of the most expensive rank divided by the mean over all ranks, minus 1; 0 if balanced",
    ),
    "packing/shared_tokens": (
        "tokens",
        "Tokens of an update that are not processed again, because another sequence has the same prefix",
    ),
    "packing/saved_share": (
        "share",
        "Fraction of the update's tokens that are not processed again, because another sequence has the same prefix",
    ),
}


def measure(
    assignment: Assignment,
    lengths: Sequence[int],
    multiple: int,
    total_multiple: int,
    quadratic: float,
    shared: Sequence[int] | None = None,
) -> dict[str, float]:
    """Return packing metrics of an update by name, without their prefix (see ``METRICS``).

    Args:
        multiple: the length of each sequence is padded to a multiple of this number.
        total_multiple: the length of a micro-batch is padded to a multiple of this number.
        quadratic: coefficient of the quadratic cost (see ``attention_cost``).
        shared: leading tokens of each sequence that another sequence computes (None if all are 0).
    """
    shared = [0] * len(lengths) if shared is None else shared
    real = padded = 0
    for members in chain.from_iterable(assignment):
        computed = [lengths[i] - shared[i] for i in members]
        real += sum(computed)
        # An empty micro-batch is processed as one token of padding, as in ``pack_rows``.
        padded += sum(pad_lengths(computed or [1], multiple, total_multiple))
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
    """Return the estimated cost of each data-parallel rank (see ``cost_of``)."""
    costs = []
    for share in assignment:
        members = chain.from_iterable(share)
        costs.append(sum(cost_of(lengths[i], quadratic, shared[i]) for i in members))
    return costs


@dataclass
class PackedRows:
    """One micro-batch, packed for one rank of a context-parallel group.

    A row is a local token that predicts a completion token of the policy. All arrays of shape [rows] have the same
    order. A token shared by several sequences is stored once but has a row for each of them. For example, the last
    token of a prompt predicts the first token of every completion.
    """

    tokens: np.ndarray
    """int64 [local tokens]"""
    padded_lengths: list[int]
    """Tokens of each sequence over all context-parallel ranks, including padding, without its shared tokens."""
    shared: list[int]
    """Leading tokens of each sequence that belong to the previous sequence (see ``TrainSequence.shared``)."""
    rows: np.ndarray
    """int64 [rows]: index in ``tokens``"""
    targets: np.ndarray
    """int64 [rows]: id of the completion token that the row predicts"""
    sequence: np.ndarray
    """int64 [rows]: index of the sequence in the batch"""
    offset: np.ndarray
    """int64 [rows]: index of the target in its completion"""
    routing: np.ndarray | None = None
    """int16 [local tokens, MoE layers * experts per token]: ``TrainSequence.routing``, with -1 for padding. None if no
    sequence of the micro-batch has it."""
    rope_positions: np.ndarray | None = None
    """int64 [local tokens, 3]: positions on axes of images (``image_rows.rope_positions``). None for text models."""
    images: ImageRows | None = None
    """Images of the local tokens, or None if there are none."""


def pad_lengths(lengths: Sequence[int], multiple: int, total_multiple: int) -> list[int]:
    """Round each length up to a multiple of ``multiple``. Increase the last length until ``total_multiple`` divides the
    sum."""
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
    grid: Grid | None = None,
) -> PackedRows:
    """Pack sequences of a batch into a micro-batch. An empty micro-batch contains only padding and has no rows.

    Args:
        members: indices of the sequences in the batch, in the order of the pack.
        total_multiple: the length of the pack is padded to a multiple of this number. Under sequence parallelism, this
            number is the number of tensor-parallel times context-parallel ranks.
        positions: function (length, rank, size) that returns the positions of a sequence's tokens on a context-parallel
            rank, as a list, array or tensor of integers. None for one rank.
        grid: rows and columns of an image's placeholders. None for text models.

    Raises:
        ValueError: if the number of an image's placeholders does not match ``grid``.
    """
    # Megatron gives every context-parallel rank two chunks of a sequence, one from each end.
    multiple = 2 * context_size if context_size > 1 else 1
    # All ranks run the same number of micro-batches, so one without sequences consists of a token of padding.
    shared = [sequences[i].shared for i in members] or [0]
    lengths = [len(sequences[i]) - sequences[i].shared for i in members] or [1]
    padded = pad_lengths(lengths, multiple, total_multiple)
    tokens = []
    choices = [sequences[i].routing for i in members]
    width = next((rows.shape[1] for rows in choices if rows is not None), 0)
    routing: list[np.ndarray] = []
    packer = grid and ImagePacker(grid)
    columns: list[tuple[np.ndarray, ...]] = []
    rows_of = np.zeros(0, np.int64)
    start = 0
    for i, length in zip(members, padded):
        s = sequences[i]
        padded_tokens = np.zeros(length, np.int64)
        padded_tokens[: len(s) - s.shared] = _tokens_from(s, s.shared)
        token_indices = np.arange(length)
        if positions is not None and context_size > 1:
            token_indices = np.asarray(positions(length, context_rank, context_size))
        tokens.append(padded_tokens[token_indices])
        cut = Cut(s.shared, length, token_indices)
        if width:  # for padding, the router chooses
            choice = np.full((len(s), width), -1, np.int16) if s.routing is None else s.routing
            routing.append(cut.rows(choice.astype(np.int16, copy=False), -1))
        if packer:
            packer.add(len(s), s.images, cut)
        local_rows = np.full(length, -1, np.int64)
        local_rows[token_indices] = start + np.arange(len(token_indices))
        # The previous sequence has computed the shared tokens, so their rows are its rows.
        rows_of = np.concatenate((rows_of[: s.shared], local_rows))
        columns.append(_predicting_rows(i, s, rows_of))
        start += len(token_indices)
    if not members:
        tokens = [np.zeros(padded[0] // context_size, np.int64)]
        columns = [(np.zeros(0, np.int64),) * 4]
        if packer:
            packer.add(0, (), Cut(0, padded[0], np.arange(len(tokens[0]))))
    rows, targets, sequence, offset = (np.concatenate(column).astype(np.int64) for column in zip(*columns))
    found = PackedRows(np.concatenate(tokens), padded, shared, rows, targets, sequence, offset)
    if routing:
        found.routing = np.concatenate(routing)
    if packer:
        found.rope_positions, found.images = packer.positions(), packer.images()
    return found


def _tokens_from(sequence: TrainSequence, start: int) -> np.ndarray:
    """Return the tokens of a sequence from index ``start``."""
    prompt = len(sequence.prompt_ids)
    if start >= prompt:
        return sequence.completion_ids[start - prompt :]
    return np.concatenate((sequence.prompt_ids[start:], sequence.completion_ids))


def _predicting_rows(index: int, sequence: TrainSequence, rows_of: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return (rows, targets, sequence, offset) of one sequence, as in ``PackedRows``.

    Args:
        index: index of the sequence in the batch.
        rows_of: index of each of the sequence's tokens in the local pack (-1 for tokens of other context-parallel
            ranks).
    """
    before = len(sequence.prompt_ids) - 1  # the prompt's last token predicts the first target
    rows = rows_of[before : before + len(sequence.completion_ids)]
    selected = rows >= 0
    if sequence.loss_mask is not None:
        selected = selected & sequence.loss_mask
    offset = np.flatnonzero(selected)
    return rows[offset], sequence.completion_ids[offset], np.full(len(offset), index, np.int64), offset
