"""Which sequences of an update begin with the same tokens, and how they come to stand in one micro-batch, so that these
tokens are computed once.

Under a causal mask a token's states depend on the tokens before it alone. So a sequence can leave the tokens it begins
with to the sequence before it in the micro-batch, as far as both have the same; each then computes its own tokens, and
attends to the shared ones. In the lexicographic order of their tokens no sequence has more in common with an earlier
one than with its predecessor: where groups begin alike, too, that is shared as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Sequence

import numpy as np

from gdpo_nemo.data.packing import Assignment, TrainSequence, assign, cost_of, rank_costs

LEAST_SHARE = 1 / 8
"""Of a sequence's tokens, below which it computes the shared ones again: attention with a mask, and keys that are read
from two places, cost about as much as that saves."""
LEAST_GAIN = 0.1
"""Of the dearest rank's cost, below which ``auto`` packs sequences as if they shared nothing."""
_EVEN = 0.02
"""How much dearer than the mean the dearest rank may be before groups are split for balance."""


@dataclass(frozen=True)
class Layout:
    """Where the sequences of an update are computed, and which of their tokens are not computed again."""

    assignment: Assignment
    shared: list[int]
    """Leading tokens of every sequence of the batch that the one before it in its micro-batch computes; all 0: each
    sequence computes its own."""

    def cost(self, lengths: Sequence[int], quadratic: float) -> float:
        """What the dearest rank's share costs (see ``packing.cost_of``)."""
        return max(rank_costs(self.assignment, lengths, self.shared, quadratic))


def shared_prefixes(sequences: Sequence[TrainSequence], least: float = LEAST_SHARE) -> list[int]:
    """For each sequence of a micro-batch, in its order, the leading tokens that it leaves to the one before it: all
    that they have in common, but its last token, and none if they are a smaller part of it than ``least``."""
    tokens = [np.concatenate((s.prompt_ids, s.completion_ids)) for s in sequences]
    shared = [0] * len(tokens)
    for place in range(1, len(tokens)):
        common = min(_common(tokens[place - 1], tokens[place]), len(tokens[place]) - 1)
        shared[place] = common if common >= least * len(tokens[place]) else 0
    return shared


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Leading elements that are the same in both."""
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
    """The layout in which every sequence computes its own tokens; arguments as in ``shared_layout``."""
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
    """The layout in which sequences of one prompt are computed together where they fit, and share it.

    The samples of a prompt are one piece, or as few as ``token_budget`` allows, of which each repeats the prompt. With
    several data-parallel ranks they are split further as long as that makes the dearest rank cheaper.

    Args:
        ranks, token_budget, multiple_of, quadratic: as in ``packing.assign``; what counts are the tokens that are
            computed.
        multiple: what the tokens that a sequence computes are padded to.

    Raises:
        ValueError: a sequence is longer than ``token_budget``.
    """
    groups = _by_prompt(sequences)
    lengths = [len(s) for s in sequences]
    # With its padding: no piece is smaller, so that halving the limit any further would go on for ever.
    longest = max((_padded(length, multiple) for length in lengths), default=1)
    limit = token_budget
    best: Layout | None = None
    while True:
        pieces = list(chain.from_iterable(_pieces(group, sequences, limit, multiple) for group in groups))
        found = _laid_out(pieces, sequences, ranks, token_budget, multiple_of, quadratic, multiple)
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
) -> Layout:
    """The layout that ``policy.share_prompts`` asks for; ``sharing`` None: the cheaper one. Other arguments as in
    ``shared_layout``."""
    how = sequences, ranks, token_budget, multiple_of, quadratic, multiple
    if sharing:
        return shared_layout(*how)
    plain = unshared(*how)
    if sharing is False or all(len(group) == 1 for group in _by_prompt(sequences)):
        return plain
    found = shared_layout(*how)
    lengths = [len(s) for s in sequences]
    pays = found.cost(lengths, quadratic) <= (1 - LEAST_GAIN) * plain.cost(lengths, quadratic)
    return found if pays else plain


def pair_layout(
    sharing: bool | None,
    sequences: Sequence[TrainSequence],
    ranks: int,
    token_budget: int,
    multiple_of: int = 1,
    quadratic: float = 0.0,
    multiple: int = 1,
) -> Layout:
    """The layout that keeps the completions of a pair (``TrainSequence.pair``) in one micro-batch; arguments as in
    ``choose_layout``. A pair of more than ``token_budget`` tokens raises it.
    """
    pairs: dict[int, list[int]] = {}
    for place, sequence in enumerate(sequences):
        pairs.setdefault(abs(sequence.pair), []).append(place)
    pieces = list(pairs.values())
    how = pieces, sequences, ranks, token_budget, multiple_of, quadratic, multiple
    # Of a pair the rule of a group: what it shares has to be worth it for both.
    shares = [sharing is not False and len(_by_prompt([sequences[i] for i in piece])) == 1 for piece in pieces]
    found = _pairs_laid_out(shares, *how)
    if sharing is not None or not any(shares):
        return found
    plain = _pairs_laid_out([False] * len(pieces), *how)
    lengths = [len(s) for s in sequences]
    pays = found.cost(lengths, quadratic) <= (1 - LEAST_GAIN) * plain.cost(lengths, quadratic)
    return found if pays else plain


def _pairs_laid_out(
    shares: Sequence[bool],
    pieces: list[list[int]],
    sequences: Sequence[TrainSequence],
    ranks: int,
    token_budget: int,
    multiple_of: int,
    quadratic: float,
    multiple: int,
) -> Layout:
    """The pieces, none of which is cut, spread over ranks and micro-batches; those that share compute their prompt
    once."""
    tokens: list[int] = []
    costs: list[float] = []
    found = [0] * len(sequences)
    for piece, shared in zip(pieces, shares):
        members = [sequences[i] for i in piece]
        if shared:
            tokens.append(_piece_tokens(piece, sequences, multiple))
            for i, count in zip(piece, shared_prefixes(members)):
                found[i] = count
        else:
            tokens.append(sum(_padded(len(s), multiple) for s in members))
        costs.append(sum(cost_of(len(sequences[i]), quadratic, found[i]) for i in piece))
    # The longest pair has to fit, as elsewhere the longest sequence.
    spread = assign(tokens, ranks, max(token_budget, max(tokens)), multiple_of, costs=costs)
    return Layout([[[i for n in numbers for i in pieces[n]] for numbers in share] for share in spread], found)


def _padded(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


def _by_prompt(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Places of the sequences of each prompt, in the order of their first ones; alone where the prompt is too small a
    part of a sequence (see ``LEAST_SHARE``)."""
    groups: dict[bytes | int, list[int]] = {}
    for place, sequence in enumerate(sequences):
        saved = len(sequence) - _own(sequence)
        shares = saved and saved >= LEAST_SHARE * len(sequence)
        groups.setdefault(sequence.prompt_ids.tobytes() if shares else place, []).append(place)
    return list(groups.values())


def _own(sequence: TrainSequence) -> int:
    """Tokens that a sequence computes whose prompt is there."""
    return max(1, len(sequence.completion_ids))


def _piece_tokens(members: Sequence[int], sequences: Sequence[TrainSequence], multiple: int) -> int:
    """Tokens that are computed for sequences of one prompt together, at most; padding included."""
    first = sequences[members[0]]
    if len(members) == 1:
        return _padded(len(first), multiple)
    return _padded(len(first.prompt_ids), multiple) + sum(_padded(_own(sequences[i]), multiple) for i in members)


def _pieces(group: list[int], sequences: Sequence[TrainSequence], limit: int, multiple: int) -> list[list[int]]:
    """The group cut into pieces of at most ``limit`` tokens; a sequence that alone has more is a piece.

    The longest completions first, each into the first piece with room: few pieces repeat the prompt.
    """
    prompt = _padded(len(sequences[group[0]].prompt_ids), multiple)
    pieces: list[list[int]] = []
    filled: list[int] = []
    for place in sorted(group, key=lambda i: (-_own(sequences[i]), i)):
        own = _padded(_own(sequences[place]), multiple)
        number = next((number for number, tokens in enumerate(filled) if tokens + own <= limit), len(pieces))
        if number == len(pieces):
            pieces.append([])
            filled.append(prompt)
        pieces[number].append(place)
        filled[number] += own
    return pieces


def _laid_out(
    pieces: list[list[int]],
    sequences: Sequence[TrainSequence],
    ranks: int,
    token_budget: int,
    multiple_of: int,
    quadratic: float,
    multiple: int,
) -> Layout:
    """The pieces spread over ranks and micro-batches, in each of which the sequences stand in lexicographic order."""
    tokens = [_piece_tokens(piece, sequences, multiple) for piece in pieces]
    costs = [_piece_cost(piece, sequences, quadratic) for piece in pieces]
    spread = assign(tokens, ranks, token_budget, multiple_of, costs=costs)
    shared = [0] * len(sequences)
    assignment: Assignment = []
    for share in spread:
        assignment.append([])
        for numbers in share:
            members = [i for number in numbers for i in pieces[number]]
            members.sort(key=lambda i: _order(sequences[i]))
            for i, count in zip(members, shared_prefixes([sequences[i] for i in members])):
                shared[i] = count
            assignment[-1].append(members)
    return Layout(assignment, shared)


def _piece_cost(piece: list[int], sequences: Sequence[TrainSequence], quadratic: float) -> float:
    first, *others = (sequences[i] for i in piece)
    rest = sum(cost_of(len(s), quadratic, len(s) - _own(s)) for s in others)
    return cost_of(len(first), quadratic) + rest


def _order(sequence: TrainSequence) -> bytes:
    """A key that sorts sequences by their tokens."""
    key: bytes = np.concatenate((sequence.prompt_ids, sequence.completion_ids)).astype(">i4").tobytes()
    return key
