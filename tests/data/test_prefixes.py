"""Sequences that begin alike stand together, share what they may, and are found again token by token."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from gdpo_nemo.data import prefixes
from gdpo_nemo.data.packing import Budget, TrainSequence, cost_of, measure, pack_rows, rank_costs
from gdpo_nemo.data.prefixes import choose_layout, shared_layout, shared_prefixes, unshared

BUDGET = 60
tokens = st.lists(st.integers(0, 2), max_size=12)
groups = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.lists(tokens, min_size=1, max_size=6)),
    min_size=1,
    max_size=5,
)
"""(prompt, completions) of each group, of so few different tokens that much is alike by chance."""


def make(prompt, completion, mask=None) -> TrainSequence:
    completion = np.array(completion, np.int32)
    return TrainSequence(np.array(prompt, np.int32), completion, np.zeros(len(completion), np.float32), loss_mask=mask)


@st.composite
def routed_groups(draw):
    """Sequences of one prompt. Each has other experts from some token and column on, or no routing."""
    prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    batch = [make(prompt, completion) for completion in draw(st.lists(tokens, min_size=2, max_size=6))]
    for s in batch:
        routing = np.zeros((len(s), 3), np.int8)
        for token, column in draw(st.lists(st.tuples(st.integers(0, len(s) - 1), st.integers(0, 2)), max_size=2)):
            routing[token, column] = draw(st.integers(-1, 2))
        s.routing = routing if draw(st.booleans()) else None
    return batch


def states(s: TrainSequence) -> list[tuple[int, ...]]:
    """Return all inputs of the model for each token."""
    routing = np.full((len(s), 3), -1) if s.routing is None else s.routing
    return [(int(token), *map(int, experts)) for token, experts in zip(whole(s), routing)]


def flat(groups) -> list[TrainSequence]:
    return [make(prompt, completion) for prompt, completions in groups for completion in completions]


def equal_groups(count, size, prompt, completion) -> list[TrainSequence]:
    """Groups whose samples differ from the first token of the completion on."""
    draw = np.random.default_rng(0)
    starts = [draw.integers(100, 10**6, prompt) for _ in range(count)]
    return [make(start, [i, *draw.integers(0, 99, completion - 1)]) for start in starts for i in range(size)]


def whole(sequence) -> list[int]:
    return [*sequence.prompt_ids, *sequence.completion_ids]


@given(groups=groups, ranks=st.integers(1, 3), sharing=st.sampled_from([None, True, False]))
def test_every_sequence_has_one_place_and_shares_the_prefix_of_its_predecessor(groups, ranks, sharing):
    batch = flat(groups)
    found = choose_layout(sharing, batch, Budget(ranks, BUDGET))
    assert len(found.assignment) == ranks and len({len(share) for share in found.assignment}) == 1
    micro_batches = list(chain.from_iterable(found.assignment))
    assert sorted(chain.from_iterable(micro_batches)) == list(range(len(batch)))
    for members in micro_batches:
        assert sum(len(batch[i]) - found.shared[i] for i in members) <= BUDGET
        assert not members or not found.shared[members[0]]
        for before, i in zip(members, members[1:]):
            count = found.shared[i]
            assert count < len(batch[i]), "of every sequence at least a token is computed"
            assert whole(batch[i])[:count] == whole(batch[before])[:count]


@given(batch=routed_groups(), ranks=st.integers(1, 2), multiple=st.sampled_from([1, 2]), sharing=st.booleans())
def test_sequences_share_only_tokens_with_the_same_experts_in_all_layers(batch, ranks, multiple, sharing):
    pairs = [replace(s, pair=number // 2 + 1) for number, s in enumerate(batch)]
    for choose, members_of in ((choose_layout, batch), (prefixes.whole_layout, pairs)):
        found = choose(sharing, members_of, Budget(ranks, BUDGET, multiple=multiple))
        for members in chain.from_iterable(found.assignment):
            own = [len(batch[i]) - found.shared[i] for i in members]
            assert sum(-(-n // multiple) * multiple for n in own) <= BUDGET
            for before, i in zip(members, members[1:]):
                count = found.shared[i]
                assert states(batch[before])[:count] == states(batch[i])[:count]


def test_samples_whose_experts_differ_late_in_the_prompt_share_the_tokens_before():
    batch = equal_groups(2, 4, 40, 10)
    for number, s in enumerate(batch):
        s.routing = np.zeros((50, 4), np.int8)
        s.routing[39, 3] = number % 4  # the last token of the prompt, in the last layer
    same = replace(batch[0], completion_ids=batch[1].completion_ids)
    for sharing in (True, None):
        found = choose_layout(sharing, [*batch, same], Budget(1, 10**6))
        assert sorted(found.shared) == [0, 0, *[39] * 6, 40]


@example(groups=[([2], [[]])], multiple=2, ranks=2)  # one sequence, most of which is padding: nothing to split
@given(groups=groups, multiple=st.sampled_from([2, 4]), ranks=st.integers(1, 2))
def test_computed_tokens_keep_the_budget_with_the_padding_of_the_layout(groups, multiple, ranks):
    batch = flat(groups)
    found = shared_layout(batch, Budget(ranks, BUDGET, multiple=multiple))
    for members in chain.from_iterable(found.assignment):
        own = [len(batch[i]) - found.shared[i] for i in members]
        assert sum(-(-n // multiple) * multiple for n in own) <= BUDGET


@given(groups=groups, size=st.sampled_from([1, 2, 3]), draw=st.data())
def test_every_completion_token_is_exactly_one_row(groups, size, draw):
    """Its row is the token before it, of its own or of a sequence that begins alike; masked ones are nobody's row."""
    batch = flat(groups)
    for s in batch:
        if draw.draw(st.booleans()):
            s.loss_mask = np.array([draw.draw(st.booleans()) for _ in s.completion_ids], bool)
    batch.sort(key=whole)
    for s, count in zip(batch, shared_prefixes(batch, least=0)):
        s.shared = count
    seen = []
    for rank in range(size):
        pack = pack_rows(batch, range(len(batch)), context_rank=rank, context_size=size, positions=zigzag)
        assert pack.shared == [s.shared for s in batch]
        for row, target, sequence, offset in zip(pack.rows, pack.targets, pack.sequence, pack.offset):
            s = batch[sequence]
            assert target == s.completion_ids[offset]
            assert pack.tokens[row] == whole(s)[len(s.prompt_ids) + offset - 1]
            seen.append((int(sequence), int(offset)))
    expected = [
        (i, t)
        for i, s in enumerate(batch)
        for t in range(len(s.completion_ids))
        if s.loss_mask is None or s.loss_mask[t]
    ]
    assert sorted(seen) == expected


def zigzag(length, rank, size):
    chunks = np.arange(length).reshape(2 * size, -1)
    return np.concatenate((chunks[rank], chunks[2 * size - 1 - rank]))


def test_the_last_token_of_a_prompt_is_the_row_of_every_first_token():
    batch = [make([7, 8, 9], [n]) for n in range(4)]
    for s, count in zip(batch, shared_prefixes(batch)):
        s.shared = count
    pack = pack_rows(batch, range(4))
    assert pack.tokens.tolist() == [7, 8, 9, 0, 1, 2, 3] and pack.padded_lengths == [4, 1, 1, 1]
    assert pack.rows.tolist() == [2, 2, 2, 2] and pack.targets.tolist() == [0, 1, 2, 3]


@example(chains=[[1], [1, 1], [1, 1, 1]])
@given(chains=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=9))
def test_lexicographic_order_maximises_the_prefix_shared_with_the_predecessor(chains):
    batch = [make(chain[:1], chain[1:]) for chain in sorted(chains)]
    for place, count in enumerate(shared_prefixes(batch, least=0)):
        mine = whole(batch[place])
        for earlier in batch[:place]:
            alike = next((n for n, (a, b) in enumerate(zip(mine, whole(earlier))) if a != b), len(earlier))
            assert count >= min(alike, len(mine) - 1)


@pytest.mark.parametrize("budget, pieces", [(200, 1), (160, 2), (120, 2), (110, 3), (90, 4), (60, 8)])
def test_a_group_above_the_budget_repeats_its_prompt_as_often_as_it_must(budget, pieces):
    """16 completions of 10 behind a prompt of 40: in a micro-batch fit as many as are left of it."""
    batch = equal_groups(1, 16, 40, 10)
    found = shared_layout(batch, Budget(1, budget))
    repeated = sum(not found.shared[i] for i in range(16))
    assert repeated == pieces == -(-16 // ((budget - 40) // 10))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_groups_stay_whole_if_they_balance_and_are_split_otherwise(ranks):
    batch = equal_groups(4, 8, 40, 10)
    found = shared_layout(batch, Budget(ranks, 10**6))
    assert found.shared.count(0) == 4, "four groups over one, two or four ranks need no second prompt"
    one = shared_layout(batch[:8], Budget(ranks, 10**6))
    assert one.shared.count(0) == ranks
    assert len({len(share[0]) for share in one.assignment}) == 1


def test_auto_shares_if_a_tenth_is_saved_and_otherwise_packs_without_groups():
    short, long = equal_groups(4, 8, 2, 40), equal_groups(4, 8, 20, 20)
    apart = [make([i] * 30, [i]) for i in range(9)]
    for batch, shares in ((short, False), (long, True), (apart, False)):
        budget = Budget(2, 10**6, quadratic=1e-3)
        found = choose_layout(None, batch, budget)
        plain = unshared(batch, budget)
        assert any(found.shared) == shares and (found == plain) != shares
    assert choose_layout(False, long, budget) == unshared(long, budget)


def test_a_small_common_beginning_is_computed_again():
    """A template's first tokens are in all prompts; to read them from another sequence costs more than they do."""
    batch = [make([1, 2, *[n] * 30], [n] * 9) for n in range(3, 6)]
    assert shared_prefixes(batch) == [0, 0, 0] and shared_prefixes(batch, least=0) == [0, 2, 2]
    apart = prefixes._by_prompt([make([1], [n] * 20) for n in range(3)], range(3))
    assert [piece.members for piece in apart] == [[0], [1], [2]]


def test_groups_of_similar_prompts_also_share_them():
    system = list(range(50))
    batch = [make([*system, group, group], [n]) for group in (60, 70) for n in (1, 2)]
    assert sorted(shared_layout(batch, Budget(1, 10**6)).shared) == [0, 50, 52, 52]


def test_costs_and_metrics_count_computed_tokens():
    batch = equal_groups(1, 4, 30, 10)
    found = shared_layout(batch, Budget(1, 10**6))
    lengths = [40] * 4
    measured = measure(found.assignment, lengths, 1, 1, 0.01, found.shared)
    assert (measured["shared_tokens"], measured["saved_share"]) == (90, 90 / 160)
    assert measured["padding_share"] == 0
    expected = cost_of(40, 0.01) + 3 * (10 + 0.01 * (40**2 - 30**2))
    assert rank_costs(found.assignment, lengths, found.shared, 0.01) == [pytest.approx(expected)]
    assert measure(found.assignment, lengths, 4, 8, 0.0, found.shared)["padding_share"] == pytest.approx(1 - 70 / 80)
