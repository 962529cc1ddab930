"""Prefix sharing: sequences with the same leading tokens are put into one micro-batch, which computes them once.

Under a causal mask, a token's states depend only on the tokens before it. A sequence can therefore reuse the leading
tokens that it has in common with the previous sequence of its micro-batch. The sequence computes only the remaining
tokens, which attend to the shared tokens. Sequences are sorted lexicographically by their tokens, so that each has its
longest common prefix with its predecessor. This order also shares prefixes that are common to several prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Sequence

import numpy as np

from gdpo_nemo.config.layout import Resolved, prompt_sharing, shares_with_flex_attention
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import Assignment, TrainSequence, assign, cost_of, rank_costs
from gdpo_nemo.models.architectures import is_recurrent

LEAST_SHARE = 1 / 8
"""Minimum prefix length for sharing, as a fraction of the sequence. For shorter prefixes, the more complex attention
costs about as much as sharing saves."""
LEAST_GAIN = 0.1
"""Minimum relative reduction of the most expensive rank's cost for which ``auto`` shares prefixes."""
FLEX_COST = 2.0
"""Assumed time of FlexAttention per pair of tokens, relative to TransformerEngine's attention. Not measured on a GPU.
``tests/gpu/first_hour.sh`` measures it."""
TYPICAL_SHARE = 0.5
"""Assumed mean length of prompts and completions, as a fraction of the config's limits."""
_EVEN = 0.02
"""Imbalance above which groups are split further: cost of the most expensive rank divided by the mean, minus 1."""


@dataclass(frozen=True)
class Layout:
    """Assignment of an update's sequences to micro-batches, with the length of their shared prefixes."""

    assignment: Assignment
    shared: list[int]
    """For each sequence of the batch, the number of leading tokens that the previous sequence in its micro-batch
    computes. All are 0 without sharing."""

    def cost(self, lengths: Sequence[int], quadratic: float) -> float:
        """Return the cost of the most expensive rank (see ``packing.cost_of``)."""
        return max(rank_costs(self.assignment, lengths, self.shared, quadratic))


def shared_attention_cost(config: Config) -> float:
    """Return the time per pair of tokens of the attention with shared prompts, relative to the time without."""
    return FLEX_COST if shares_with_flex_attention(config) else 1.0


@dataclass(frozen=True)
class Saving:
    """Training cost with shared prompts relative to the cost without sharing."""

    tokens: float = 1.0
    """Ratio of computed tokens. The costs of matrix products and activations are proportional to this ratio."""
    attention: float = 1.0
    """Ratio of the time of attention, from its pairs of tokens and ``shared_attention_cost``."""


NO_SAVING = Saving()


def typical_saving(resolved: Resolved, quadratic: float) -> Saving:
    """Return ``expected_saving`` for samples of the assumed mean length."""
    policy = resolved.config.policy
    new = policy.generation.max_new_tokens
    prompt = TYPICAL_SHARE * (policy.max_total_sequence_length - new)
    return expected_saving(resolved, max(1.0, prompt), max(1.0, TYPICAL_SHARE * new), quadratic)


def expected_saving(resolved: Resolved, prompt: float, completion: float, quadratic: float) -> Saving:
    """Return the savings of a step whose prompts and completions have these lengths, in tokens.

    The driver splits each group into pieces. A piece contains one prompt and as many of its completions as fit into
    ``micro_batch_tokens``.

    Args:
        quadratic: coefficient of the quadratic cost (see ``packing.attention_cost``).
    """
    config = resolved.config
    sharing = prompt_sharing(config)
    total = prompt + completion
    samples = resolved.sequences_per_prompt
    if sharing is False or samples == 1 or prompt < LEAST_SHARE * total:
        return NO_SAVING
    if sharing is None and config.cluster.gpus_per_node and is_recurrent(resolved.model.fields or {}):
        return NO_SAVING  # the kernels of recurrent layers do not support shared prompts
    room = config.policy.micro_batch_tokens - prompt
    # Completions can have length 0 after a user-specified median is rounded. All such completions fit.
    completions_per_piece = samples if room >= samples * completion else max(1, int(room // completion))
    groups = max(1.0, resolved.samples_per_update / samples)
    # A rank without a complete group gets a piece of a group.
    pieces = min(samples, max(math.ceil(samples / completions_per_piece), math.ceil(resolved.layout.data / groups)))
    skipped = 1 - pieces / samples
    slowdown = shared_attention_cost(config)
    found = Saving(1 - skipped * prompt / total, slowdown * (1 - skipped * (prompt / total) ** 2))
    attention = quadratic * total
    cost = (found.tokens + attention * found.attention) / (1 + attention)
    return NO_SAVING if sharing is None and cost > 1 - LEAST_GAIN else found


def shared_prefixes(sequences: Sequence[TrainSequence], least: float = LEAST_SHARE) -> list[int]:
    """Return the number of leading tokens that each sequence of a micro-batch shares with the previous sequence.

    The last token of a sequence is never shared. Prefixes shorter than the fraction ``least`` of the sequence are not
    shared.
    """
    tokens = [np.concatenate((s.prompt_ids, s.completion_ids)) for s in sequences]
    shared = [0] * len(tokens)
    for index in range(1, len(tokens)):
        common = min(_common(tokens[index - 1], tokens[index]), len(tokens[index]) - 1)
        shared[index] = common if common >= least * len(tokens[index]) else 0
    return shared


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two arrays."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def unshared(
    sequences: Sequence[TrainSequence],
    ranks: int,
    token_budget: int,
    multiple_of: int = 1,
    quadratic: float = 0.0,
    multiple: int = 1,
) -> Layout:
    """Return the layout in which every sequence computes all its tokens. For the arguments, see ``shared_layout``."""
    lengths = [_padded(len(s), multiple) for s in sequences]
    return Layout(assign(lengths, ranks, token_budget, multiple_of, quadratic), [0] * len(sequences))


def shared_layout(
    sequences: Sequence[TrainSequence],
    ranks: int,
    token_budget: int,
    multiple_of: int = 1,
    quadratic: float = 0.0,
    multiple: int = 1,
) -> Layout:
    """Return a layout in which sequences with the same prompt share its computation.

    The sequences of a prompt form one piece, or as few pieces as ``token_budget`` allows. A piece is computed in one
    micro-batch, and every piece computes the prompt once. If the ranks are not balanced, smaller pieces are tried, and
    the layout with the lowest cost of the most expensive rank is returned.

    Args:
        ranks, token_budget, multiple_of, quadratic: see ``packing.assign``. The budget and the cost include only
            computed tokens.
        multiple: the number of computed tokens of a sequence is padded to a multiple of this number.

    Raises:
        ValueError: if a sequence is longer than ``token_budget``.
    """
    groups = _by_prompt(sequences)
    lengths = [len(s) for s in sequences]
    # Includes padding. Pieces cannot be smaller than this, so the loop ends at this limit.
    longest = max((_padded(length, multiple) for length in lengths), default=1)
    limit = token_budget
    best: Layout | None = None
    while True:
        pieces = list(chain.from_iterable(_pieces(group, sequences, limit, multiple) for group in groups))
        found = _assign_pieces(pieces, sequences, ranks, token_budget, multiple_of, quadratic, multiple)
        if best is None or found.cost(lengths, quadratic) < best.cost(lengths, quadratic):
            best = found
        costs = rank_costs(found.assignment, lengths, found.shared, quadratic)
        largest = max((_piece_tokens(piece, sequences, multiple) for piece in pieces), default=1)
        limit = largest // 2
        if max(costs) <= (1 + _EVEN) * sum(costs) / ranks or limit < longest:
            return best


def choose_layout(
    sharing: bool | None,
    sequences: Sequence[TrainSequence],
    ranks: int,
    token_budget: int,
    multiple_of: int = 1,
    quadratic: float = 0.0,
    multiple: int = 1,
    attention: float = 1.0,
) -> Layout:
    """Return the layout selected by ``policy.share_prompts``.

    Args:
        sharing: True for the shared layout, False for the unshared one. None shares prompts only if this reduces the
            cost by at least ``LEAST_GAIN``.
        attention: cost of attention in the shared layout, relative to the unshared one (``shared_attention_cost``).

    For the other arguments, see ``shared_layout``.
    """
    arguments = sequences, ranks, token_budget, multiple_of
    if sharing:
        return shared_layout(*arguments, attention * quadratic, multiple)
    plain = unshared(*arguments, quadratic, multiple)
    if sharing is False or all(len(group) == 1 for group in _by_prompt(sequences)):
        return plain
    shared = shared_layout(*arguments, attention * quadratic, multiple)
    return shared if _pays(shared, plain, sequences, quadratic, attention) else plain


def _pays(
    shared: Layout, plain: Layout, sequences: Sequence[TrainSequence], quadratic: float, attention: float
) -> bool:
    """Return whether the shared layout reduces the cost by at least ``LEAST_GAIN``."""
    lengths = [len(s) for s in sequences]
    return shared.cost(lengths, attention * quadratic) <= (1 - LEAST_GAIN) * plain.cost(lengths, quadratic)


def whole_layout(
    sharing: bool | None,
    sequences: Sequence[TrainSequence],
    ranks: int,
    token_budget: int,
    multiple_of: int = 1,
    quadratic: float = 0.0,
    multiple: int = 1,
    attention: float = 1.0,
) -> Layout:
    """Return a layout in which pairs and trajectories are whole: both completions of a pair (``TrainSequence.pair``),
    and all sequences of a trajectory, are in the same micro-batch.

    For the arguments, see ``choose_layout``. If a pair or trajectory has more than ``token_budget`` tokens, its length
    becomes the budget.
    """
    units: dict[tuple[int, int], list[int]] = {}
    for index, s in enumerate(sequences):
        alone = not s.pair and s.trajectory < 0
        units.setdefault((-1, index) if alone else (abs(s.pair), s.trajectory), []).append(index)
    pieces = list(units.values())
    arguments = pieces, sequences, ranks, token_budget, multiple_of
    # As in groups, all sequences must have a prompt that is long enough to share (``LEAST_SHARE``).
    shares = [sharing is not False and len(_by_prompt([sequences[i] for i in piece])) == 1 for piece in pieces]
    slowdown = attention if any(shares) else 1.0
    shared = _assign_units(shares, *arguments, slowdown * quadratic, multiple)
    if sharing is not None or not any(shares):
        return shared
    plain = _assign_units([False] * len(pieces), *arguments, quadratic, multiple)
    return shared if _pays(shared, plain, sequences, quadratic, attention) else plain


def _assign_units(
    shares: Sequence[bool],
    pieces: list[list[int]],
    sequences: Sequence[TrainSequence],
    ranks: int,
    token_budget: int,
    multiple_of: int,
    quadratic: float,
    multiple: int,
) -> Layout:
    """Distribute the pieces over ranks and micro-batches. A piece is never split.

    Args:
        shares: for each piece, True if it computes its prompt once.
    """
    tokens: list[int] = []
    costs: list[float] = []
    shared = [0] * len(sequences)
    for piece, shares_prompt in zip(pieces, shares):
        members = [sequences[i] for i in piece]
        if shares_prompt:
            tokens.append(_piece_tokens(piece, sequences, multiple))
            for i, count in zip(piece, shared_prefixes(members)):
                shared[i] = count
        else:
            tokens.append(sum(_padded(len(s), multiple) for s in members))
        costs.append(sum(cost_of(len(sequences[i]), quadratic, shared[i]) for i in piece))
    assigned = assign(tokens, ranks, max(token_budget, max(tokens)), multiple_of, costs=costs)
    assignment: Assignment = []
    for micro_batches in assigned:
        assignment.append([[i for number in numbers for i in pieces[number]] for numbers in micro_batches])
    return Layout(assignment, shared)


def _padded(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


def _by_prompt(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Group the indices of sequences by prompt, in order of first occurrence. A sequence whose prompt is too short to
    share (``LEAST_SHARE``) forms a separate group."""
    groups: dict[bytes | int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        saved = len(sequence) - _unshared_tokens(sequence)
        shares = saved and saved >= LEAST_SHARE * len(sequence)
        groups.setdefault(sequence.prompt_ids.tobytes() if shares else index, []).append(index)
    return list(groups.values())


def _unshared_tokens(sequence: TrainSequence) -> int:
    """Return the number of tokens that a sequence computes if its prompt is shared."""
    return max(1, len(sequence.completion_ids))


def _piece_tokens(members: Sequence[int], sequences: Sequence[TrainSequence], multiple: int) -> int:
    """Return an upper bound for the number of tokens computed for a piece, including padding."""
    first = sequences[members[0]]
    if len(members) == 1:
        return _padded(len(first), multiple)
    completions = sum(_padded(_unshared_tokens(sequences[i]), multiple) for i in members)
    return _padded(len(first.prompt_ids), multiple) + completions


def _pieces(group: list[int], sequences: Sequence[TrainSequence], limit: int, multiple: int) -> list[list[int]]:
    """Split a group into pieces of at most ``limit`` tokens. A sequence that exceeds the limit is a separate piece.

    The longest completions are placed first, each into the first piece with enough space. This gives few pieces.
    """
    prompt = _padded(len(sequences[group[0]].prompt_ids), multiple)
    pieces: list[list[int]] = []
    filled: list[int] = []
    for index in sorted(group, key=lambda i: (-_unshared_tokens(sequences[i]), i)):
        cost = _padded(_unshared_tokens(sequences[index]), multiple)
        number = next((number for number, tokens in enumerate(filled) if tokens + cost <= limit), len(pieces))
        if number == len(pieces):
            pieces.append([])
            filled.append(prompt)
        pieces[number].append(index)
        filled[number] += cost
    return pieces


def _assign_pieces(
    pieces: list[list[int]],
    sequences: Sequence[TrainSequence],
    ranks: int,
    token_budget: int,
    multiple_of: int,
    quadratic: float,
    multiple: int,
) -> Layout:
    """Distribute the pieces over ranks and micro-batches. Sort the sequences of each micro-batch by their tokens."""
    tokens = [_piece_tokens(piece, sequences, multiple) for piece in pieces]
    costs = [_piece_cost(piece, sequences, quadratic) for piece in pieces]
    assigned = assign(tokens, ranks, token_budget, multiple_of, costs=costs)
    shared = [0] * len(sequences)
    assignment: Assignment = []
    for micro_batches in assigned:
        assignment.append([])
        for numbers in micro_batches:
            members = [i for number in numbers for i in pieces[number]]
            members.sort(key=lambda i: _order(sequences[i]))
            for i, count in zip(members, shared_prefixes([sequences[i] for i in members])):
                shared[i] = count
            assignment[-1].append(members)
    return Layout(assignment, shared)


def _piece_cost(piece: list[int], sequences: Sequence[TrainSequence], quadratic: float) -> float:
    first, *others = (sequences[i] for i in piece)
    rest = sum(cost_of(len(s), quadratic, len(s) - _unshared_tokens(s)) for s in others)
    return cost_of(len(first), quadratic) + rest


def _order(sequence: TrainSequence) -> bytes:
    """Return a sort key that orders sequences lexicographically by their tokens."""
    key: bytes = np.concatenate((sequence.prompt_ids, sequence.completion_ids)).astype(">i4").tobytes()
    return key
