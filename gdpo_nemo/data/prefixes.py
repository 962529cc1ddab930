"""Prefix sharing: sequences with the same leading tokens are put into one micro-batch, which computes them once.

A sequence can reuse the states of the leading tokens that it has in common with the previous sequence of its
micro-batch. The sequence computes only the remaining tokens, which attend to the shared tokens. Leading tokens are
common if their keys are equal (``state_keys``). With replayed routing, two samples of a prompt may therefore share only
its first tokens. Sequences are sorted lexicographically by their keys, so that each has its longest common prefix with
its predecessor. This order also shares prefixes that are common to several prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from gdpo_nemo.config.layout import Resolved, prompt_sharing, shares_with_flex_attention
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import Assignment, Budget, TrainSequence, assign, cost_of, rank_costs
from gdpo_nemo.data.state_keys import common_tokens, sort_key

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
    model = resolved.model.description
    if sharing is None and config.cluster.gpus_per_node and model is not None and model.is_recurrent:
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
    shared = [0] * len(sequences)
    for index in range(1, len(sequences)):
        sequence = sequences[index]
        common = min(common_tokens(sequences[index - 1].state_keys, sequence.state_keys), len(sequence) - 1)
        shared[index] = common if common >= least * len(sequence) else 0
    return shared


def unshared(sequences: Sequence[TrainSequence], budget: Budget) -> Layout:
    """Return the layout in which every sequence computes all its tokens."""
    lengths = [_padded(len(s), budget.multiple) for s in sequences]
    return Layout(assign(lengths, budget), [0] * len(sequences))


def shared_layout(sequences: Sequence[TrainSequence], budget: Budget) -> Layout:
    """Return a layout in which sequences with the same prompt share its computation.

    The sequences of a prompt form one piece, or as few pieces as ``budget.tokens`` allows. A piece is computed in one
    micro-batch, and every piece computes the common tokens of the prompt once. If the ranks are not balanced, smaller
    pieces are tried, and the layout with the lowest cost of the most expensive rank is returned.

    Raises:
        ValueError: if a sequence is longer than ``budget.tokens``.
    """
    groups = _by_prompt(sequences, range(len(sequences)))
    lengths = [len(s) for s in sequences]
    # Includes padding. Pieces cannot be smaller than this, so the loop ends at this limit.
    longest = max((_padded(length, budget.multiple) for length in lengths), default=1)
    limit = budget.tokens
    best: Layout | None = None
    while True:
        pieces: list[_Piece] = []
        for group in groups:
            pieces += _split(group, sequences, limit, budget.multiple)
        found = _assign_pieces(pieces, sequences, budget)
        costs = rank_costs(found.assignment, lengths, found.shared, budget.shared_quadratic)
        if best is None or max(costs) < best.cost(lengths, budget.shared_quadratic):
            best = found
        largest = max((_piece_tokens(piece, sequences, budget.multiple) for piece in pieces), default=1)
        limit = largest // 2  # relative to the largest piece, because a limit above it would give the same pieces
        if max(costs) <= (1 + _EVEN) * sum(costs) / budget.ranks or limit < longest:
            return best


def choose_layout(sharing: bool | None, sequences: Sequence[TrainSequence], budget: Budget) -> Layout:
    """Return the layout selected by ``policy.share_prompts``.

    Args:
        sharing: True for the shared layout, False for the unshared one. None shares prompts only if this reduces the
            cost by at least ``LEAST_GAIN``.
    """
    if sharing:
        return shared_layout(sequences, budget)
    plain = unshared(sequences, budget)
    if sharing is False or all(len(piece.members) == 1 for piece in _by_prompt(sequences, range(len(sequences)))):
        return plain
    return _cheaper(shared_layout(sequences, budget), plain, sequences, budget)


def _cheaper(shared: Layout, plain: Layout, sequences: Sequence[TrainSequence], budget: Budget) -> Layout:
    """Return the shared layout if it reduces the cost by at least ``LEAST_GAIN``, otherwise the plain one."""
    lengths = [len(s) for s in sequences]
    limit = (1 - LEAST_GAIN) * plain.cost(lengths, budget.quadratic)
    return shared if shared.cost(lengths, budget.shared_quadratic) <= limit else plain


def whole_layout(sharing: bool | None, sequences: Sequence[TrainSequence], budget: Budget) -> Layout:
    """Return a layout in which pairs and trajectories are whole: both completions of a pair (``TrainSequence.pair``),
    and all sequences of a trajectory, are in the same micro-batch.

    For ``sharing``, see ``choose_layout``. If a pair or trajectory has more than ``budget.tokens`` tokens, its length
    becomes the limit.
    """
    units: dict[tuple[int, int], list[int]] = {}
    for index, s in enumerate(sequences):
        alone = not s.pair and s.trajectory < 0
        # Both completions of a pair have its number, one of them negated.
        units.setdefault((-1, index) if alone else (abs(s.pair), s.trajectory), []).append(index)
    plain_pieces = [_Piece(members, 0) for members in units.values()]
    pieces = plain_pieces if sharing is False else [_whole_piece(piece.members, sequences) for piece in plain_pieces]
    shared = _assign_units(pieces, sequences, budget)
    if sharing is not None or not any(piece.common for piece in pieces):
        return shared
    return _cheaper(shared, _assign_units(plain_pieces, sequences, budget), sequences, budget)


def _whole_piece(members: list[int], sequences: Sequence[TrainSequence]) -> _Piece:
    """Return a piece that shares its prompt only if all sequences have a prompt that is long enough to share."""
    found = _by_prompt(sequences, members)
    return found[0] if len(found) == 1 else _Piece(members, 0)


def _assign_units(pieces: Sequence[_Piece], sequences: Sequence[TrainSequence], budget: Budget) -> Layout:
    """Distribute the pieces over ranks and micro-batches. A piece is never split."""
    quadratic = budget.shared_quadratic if any(piece.common for piece in pieces) else budget.quadratic
    tokens: list[int] = []
    costs: list[float] = []
    shared = [0] * len(sequences)
    for piece in pieces:
        tokens.append(_piece_tokens(piece, sequences, budget.multiple))
        # The shared tokens are known before the assignment, because a piece is neither split nor reordered.
        if piece.common:
            _set_shared(shared, piece.members, sequences)
        costs.append(sum(cost_of(len(sequences[i]), quadratic, shared[i]) for i in piece.members))
    assigned = assign(tokens, replace(budget, tokens=max(budget.tokens, max(tokens))), costs)
    return Layout(_members_of(assigned, pieces), shared)


def _members_of(assigned: Assignment, pieces: Sequence[_Piece]) -> Assignment:
    """Convert an assignment of pieces to an assignment of their sequences."""
    assignment: Assignment = []
    for micro_batches in assigned:
        assignment.append([])
        for numbers in micro_batches:
            assignment[-1].append(list(chain.from_iterable(pieces[number].members for number in numbers)))
    return assignment


def _set_shared(shared: list[int], members: Sequence[int], sequences: Sequence[TrainSequence]) -> None:
    """Set the number of shared tokens of the sequences that are processed in this order."""
    for i, count in zip(members, shared_prefixes([sequences[i] for i in members])):
        shared[i] = count


def _padded(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


class _Piece(NamedTuple):
    """Sequences that are computed in the same micro-batch."""

    members: list[int]
    """Indices of the sequences in the batch."""
    common: int
    """Number of leading tokens that all members have in common, and that are computed once. 0 if the members do not
    share any tokens."""


def _by_prompt(sequences: Sequence[TrainSequence], indices: Sequence[int]) -> list[_Piece]:
    """Group sequences with the same prompt, in order of first occurrence.

    The states of a prompt may differ between its sequences. The sequences of a group have a common prefix that is long
    enough to share (``LEAST_SHARE``). Other sequences form separate groups.
    """
    prompts: dict[bytes | int, list[int]] = {}
    for index in indices:
        sequence = sequences[index]
        shares = _shareable(sequence) >= max(1, LEAST_SHARE * len(sequence))
        # The prompt's tokens only select candidates. The keys decide which tokens are common.
        prompts.setdefault(sequence.prompt_ids.tobytes() if shares else index, []).append(index)
    groups = chain.from_iterable(_by_states(members, sequences) for members in prompts.values())
    return sorted(groups, key=lambda group: group.members[0])


def _by_states(members: list[int], sequences: Sequence[TrainSequence]) -> list[_Piece]:
    """Group sequences of one prompt by the states of the prompt."""
    # Of the longest sequence, a common prefix is the smallest fraction.
    least = LEAST_SHARE * max(len(sequences[i]) for i in members)
    # Neighbours in this order have the longest common prefixes, so only neighbours are compared.
    in_order = sorted(members, key=lambda i: sort_key(sequences[i].state_keys[: len(sequences[i].prompt_ids)]))
    groups = [_Piece(in_order[:1], _shareable(sequences[in_order[0]]))]
    for before, index in zip(in_order, in_order[1:]):
        sequence = sequences[index]
        common = min(_shareable(sequence), common_tokens(sequences[before].state_keys, sequence.state_keys))
        group, smallest = groups[-1]
        if min(common, smallest) >= least:
            groups[-1] = _Piece([*group, index], min(common, smallest))
        else:
            groups.append(_Piece([index], _shareable(sequence)))
    pieces = []
    for group, common in groups:
        pieces.append(_Piece(sorted(group), common if len(group) > 1 else 0))
    return pieces


def _shareable(sequence: TrainSequence) -> int:
    """Return the number of prompt tokens that another sequence may compute. The last token is never shared."""
    # Every sequence computes a token, also if it equals another one, so no sequence of a micro-batch is empty.
    return min(len(sequence.prompt_ids), len(sequence) - 1)


def _piece_tokens(piece: _Piece, sequences: Sequence[TrainSequence], multiple: int) -> int:
    """Return an upper bound for the number of tokens computed for a piece, including padding."""
    # An upper bound, because the first sequence is padded once, with its common and its other tokens together.
    common = piece.common if len(piece.members) > 1 else 0
    return _padded(common, multiple) + sum(_padded(len(sequences[i]) - common, multiple) for i in piece.members)


def _split(group: _Piece, sequences: Sequence[TrainSequence], limit: int, multiple: int) -> list[_Piece]:
    """Split a group into pieces of at most ``limit`` tokens. A sequence that exceeds the limit is a separate piece.

    The longest sequences are placed first, each into the first piece with enough space. This gives few pieces.
    """
    pieces: list[_Piece] = []
    filled: list[int] = []
    for index in sorted(group.members, key=lambda i: (-len(sequences[i]), i)):
        cost = _padded(len(sequences[index]) - group.common, multiple)
        number = next((number for number, tokens in enumerate(filled) if tokens + cost <= limit), len(pieces))
        if number == len(pieces):
            pieces.append(_Piece([], group.common))
            filled.append(_padded(group.common, multiple))
        pieces[number].members.append(index)
        filled[number] += cost
    return pieces


def _assign_pieces(pieces: Sequence[_Piece], sequences: Sequence[TrainSequence], budget: Budget) -> Layout:
    """Distribute the pieces over ranks and micro-batches. Sort the sequences of each micro-batch by their keys."""
    tokens = [_piece_tokens(piece, sequences, budget.multiple) for piece in pieces]
    costs = [_piece_cost(piece, sequences, budget.shared_quadratic) for piece in pieces]
    assignment = _members_of(assign(tokens, budget, costs), pieces)
    shared = [0] * len(sequences)
    for members in chain.from_iterable(assignment):
        # Neighbours in this order have the longest common prefixes, also if they belong to different prompts.
        members.sort(key=lambda i: sort_key(sequences[i].state_keys))
        _set_shared(shared, members, sequences)
    return Layout(assignment, shared)


def _piece_cost(piece: _Piece, sequences: Sequence[TrainSequence], quadratic: float) -> float:
    # The first sequence computes the common tokens for all.
    first, *others = (len(sequences[i]) for i in piece.members)
    return cost_of(first, quadratic) + sum(cost_of(length, quadratic, piece.common) for length in others)
