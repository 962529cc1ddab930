"""Packing loses nothing, doubles nothing, keeps the budget, and agrees over context-parallel ranks."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gdpo_nemo.data import packing
from gdpo_nemo.data.packing import (
    Budget,
    TrainSequence,
    assign,
    assign_singly,
    attention_cost,
    cost_of,
    measure,
    pack_rows,
    pad_lengths,
)
from gdpo_nemo.models.family_checks import describe

BUDGET = 50
lengths_of_a_batch = st.lists(st.integers(1, BUDGET), min_size=0, max_size=40)
shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=0, max_size=6)


def zigzag(length, rank, size):
    """Places that context rank ``rank`` of ``size`` holds: chunk r and chunk 2n-1-r."""
    chunks = np.arange(length).reshape(2 * size, -1)
    return np.concatenate((chunks[rank], chunks[2 * size - 1 - rank]))


def make_sequences(shapes):
    """Sequences whose tokens are all different, so that a token tells where it came from."""
    fresh = iter(range(1, 10_000))
    take = lambda n: np.array([next(fresh) for _ in range(n)], np.int32)  # noqa: E731
    return [TrainSequence(take(p), take(c), np.zeros(c, np.float32)) for p, c in shapes]


@given(lengths=lengths_of_a_batch, ranks=st.integers(1, 4), multiple=st.integers(1, 4))
def test_every_sequence_is_assigned_once_within_the_budget(lengths, ranks, multiple):
    assignment = assign(lengths, Budget(ranks, BUDGET, multiple))
    assert len(assignment) == ranks
    assert sorted(chain.from_iterable(chain.from_iterable(assignment))) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= BUDGET for share in assignment for members in share)


@given(lengths=lengths_of_a_batch, ranks=st.integers(1, 4), multiple=st.integers(1, 4))
def test_ranks_get_equally_many_micro_batches(lengths, ranks, multiple):
    counts = {len(share) for share in assign(lengths, Budget(ranks, BUDGET, multiple))}
    assert len(counts) == 1
    count = counts.pop()
    assert count % multiple == 0
    # One round through an interleaved pipeline is one too few: see ``packing._whole_rounds``.
    assert multiple == 1 or count >= 2 * multiple


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), ranks=st.integers(1, 4), quadratic=st.floats(0, 0.2)
)
def test_no_rank_is_dearer_than_another_by_more_than_two_sequences(lengths, ranks, quadratic):
    shares = assign(lengths, Budget(ranks, 10**6, quadratic=quadratic))
    costs = [sum(cost_of(lengths[i], quadratic) for members in share for i in members) for share in shares]
    assert max(costs) - min(costs) <= 2 * cost_of(max(lengths), quadratic) + 1e-6


def test_long_sequences_are_balanced_by_the_cost_of_attention():
    """By tokens the long sequence is worth ten short ones; with attention it is dearer than all thirty, and stays
    alone."""
    lengths = [1000, *[100] * 30]
    quadratic = 1e-2
    shares = assign(lengths, Budget(2, 4000, quadratic=quadratic))
    by_cost = measure(shares, lengths, 1, 1, quadratic)["imbalance"]
    by_tokens = measure(assign(lengths, Budget(2, 4000)), lengths, 1, 1, quadratic)["imbalance"]
    assert by_cost == pytest.approx(11_000 / 8_500 - 1) and by_tokens == pytest.approx(13_000 / 8_500 - 1)
    with_long = next(share for share in shares if any(0 in members for members in share))
    assert sum(len(members) for members in with_long) == 1


def test_padding_share_counts_the_padding_of_the_layout():
    shares = assign([5, 3], Budget(1, 100))
    assert measure(shares, [5, 3], 1, 1, 0.0) == {
        "padding_share": 0.0,
        "micro_batches": 1.0,
        "imbalance": 0.0,
        "shared_tokens": 0.0,
        "saved_share": 0.0,
    }
    assert measure(shares, [5, 3], 4, 1, 0.0)["padding_share"] == pytest.approx(1 - 8 / 12)
    assert measure(shares, [5, 3], 1, 12, 0.0)["padding_share"] == pytest.approx(1 - 8 / 12)


def test_attention_equals_the_weights_of_qwen2_5_7b_at_some_seventy_thousand_tokens():
    model = dict(model_type="qwen2", hidden_size=3584, num_attention_heads=28, num_key_value_heads=4,
                 intermediate_size=18944, num_hidden_layers=28, vocab_size=152064)  # fmt: skip
    weights = 28 * (3584 * 128 * 2 * 32 + 3 * 3584 * 18944) + 3584 * 152064
    assert 6.9e9 < weights < 7.2e9
    assert 1 / attention_cost(describe(model)) == pytest.approx(weights / (28 * 28 * 128))
    assert 65_000 < 1 / attention_cost(describe(model)) < 75_000


@given(lengths=lengths_of_a_batch, ranks=st.integers(1, 4))
def test_assignment_is_deterministic(lengths, ranks):
    assert assign(lengths, Budget(ranks, BUDGET)) == assign(list(lengths), Budget(ranks, BUDGET))


def test_a_sequence_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="51 tokens exceeds .* 50"):
        assign([3, 51], Budget(1, 50))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), multiple=st.integers(1, 8), factor=st.integers(1, 6)
)
def test_padding_reaches_both_multiples_and_no_further(lengths, multiple, factor):
    padded = pad_lengths(lengths, multiple, factor)
    assert all(p >= n and p % multiple == 0 for p, n in zip(padded, lengths))
    assert sum(padded) % factor == 0
    assert all(p - n < multiple for p, n in zip(padded[:-1], lengths))
    assert padded[-1] - lengths[-1] < multiple * (factor + 1)


@given(shapes=shapes, size=st.sampled_from([1, 2, 3]), tensor=st.sampled_from([1, 2]))
def test_context_ranks_together_hold_every_completion_token_once(shapes, size, tensor):
    sequences = make_sequences(shapes)
    members = list(range(len(sequences)))[::-1]
    seen = []
    for rank in range(size):
        pack = pack_rows(
            sequences, members, context_rank=rank, context_size=size, total_multiple=size * tensor, positions=zigzag
        )
        assert len(pack.tokens) * size == sum(pack.padded_lengths)
        assert len(pack.tokens) % tensor == 0
        for row, target, sequence, offset in zip(pack.rows, pack.targets, pack.sequence, pack.offset):
            s = sequences[sequence]
            whole = np.concatenate((s.prompt_ids, s.completion_ids))
            assert target == s.completion_ids[offset]
            assert pack.tokens[row] == whole[len(s.prompt_ids) + offset - 1]
            seen.append((int(sequence), int(offset)))
    assert sorted(seen) == [(i, t) for i, (_, c) in enumerate(shapes) for t in range(c)]


@given(shapes=shapes.filter(bool), size=st.sampled_from([2, 3]))
def test_context_shards_put_together_are_the_whole_pack(shapes, size):
    sequences = make_sequences(shapes)
    members = list(range(len(sequences)))
    packs = [pack_rows(sequences, members, context_rank=r, context_size=size, positions=zigzag) for r in range(size)]
    start = 0
    for s, length in zip(sequences, packs[0].padded_lengths):
        whole = np.full(length, -1)
        for rank, pack in enumerate(packs):
            whole[zigzag(length, rank, size)] = pack.tokens[start // size : (start + length) // size]
        tokens = np.concatenate((s.prompt_ids, s.completion_ids))
        np.testing.assert_array_equal(whole, np.pad(tokens, (0, length - len(tokens))))
        start += length


@given(size=st.sampled_from([1, 2, 3]), tensor=st.sampled_from([1, 2, 4]))
def test_an_empty_micro_batch_is_padding_without_rows(size, tensor):
    pack = pack_rows([], [], context_size=size, total_multiple=size * tensor, positions=zigzag)
    assert len(pack.rows) == len(pack.targets) == len(pack.sequence) == len(pack.offset) == 0
    assert len(pack.tokens) == sum(pack.padded_lengths) // size > 0
    assert len(pack.tokens) % tensor == 0


@pytest.mark.parametrize("count, ranks, multiple", [(0, 1, 1), (1, 2, 1), (5, 2, 1), (5, 2, 4), (8, 2, 4), (9, 3, 2)])
def test_single_sequences_are_spread_evenly_in_the_multiple_of_the_pipeline(count, ranks, multiple):
    shares = assign_singly(count, ranks, multiple)
    assert len(shares) == ranks and len({len(share) for share in shares}) == 1
    each = len(shares[0])
    least = 2 * multiple if multiple > 1 else 1
    assert each % multiple == 0 and max(count, 1) <= each * ranks and each >= least
    assert each == least or (each - multiple) * ranks < count
    assert all(len(members) <= 1 for share in shares for members in share)
    assert sorted(i for share in shares for members in share for i in members) == list(range(count))


def test_policy_tokens_are_given_by_the_mask_and_are_all_tokens_without_one():
    whole = TrainSequence(np.arange(2), np.arange(3), np.zeros(3, np.float32))
    masked = TrainSequence(np.arange(2), np.arange(3), np.zeros(3, np.float32), loss_mask=np.array([True, False, True]))
    assert (len(whole), whole.num_policy_tokens, len(masked), masked.num_policy_tokens) == (5, 3, 5, 2)
    values = np.array([1.0, np.nan, 3.0])
    assert masked.where_written(values).tolist() == [1, 3] and whole.where_written(values) is values


def test_only_sequences_with_advantage_and_weight_are_computed_and_at_least_one():
    a, b, c, d = make_sequences([(3, 9), (3, 2), (3, 5), (1, 3)])
    a.advantage, a.weight = 1.0, 0.1
    b.advantage, b.weight = 0.0, 0.1
    c.advantage, c.weight = -1.0, 0.0
    d.advantage, d.weight = float("nan"), 0.1
    kept = packing.with_gradient([a, b, c, d])
    assert [id(s) for s in kept] == [id(a), id(d)], "a broken advantage is to stop the run, not to be left out"
    assert [id(s) for s in packing.with_gradient([c, b])] == [id(b)]


def test_a_sequence_is_computed_if_any_of_its_tokens_has_an_advantage():
    a, b, c = make_sequences([(3, 4), (3, 4), (3, 2)])
    for sequence in (a, b, c):
        sequence.weight = 0.1
    a.advantage = np.array([0, 0, -1, 0], np.float32)
    b.advantage = np.zeros(4, np.float32)
    c.advantage = np.array([0, np.nan], np.float32)
    assert [id(s) for s in packing.with_gradient([a, b, c])] == [id(a), id(c)]


@given(lengths=lengths_of_a_batch)
def test_no_fit_is_tried_with_fewer_micro_batches_than_any_could_have(lengths):
    """Proved by the greedy fit itself: it never finds room below the bound, and the result starts at the first that
    it finds."""
    least = packing._least_micro_batches(lengths, BUDGET)
    assert all(packing._fit(lengths, count, BUDGET, lengths) is None for count in range(1, least if lengths else 1))
    assert len(assign(lengths, Budget(1, BUDGET))[0]) == next(
        n for n in range(1, 100) if packing._fit(lengths, n, BUDGET, lengths)
    )


def test_sequences_of_more_than_half_a_budget_are_placed_at_the_first_attempt(monkeypatch):
    counts = []
    fit = packing._fit
    monkeypatch.setattr(
        packing, "_fit", lambda lengths, count, *more: counts.append(count) or fit(lengths, count, *more)
    )
    assign([BUDGET // 2 + 1] * 40, Budget(4, BUDGET))
    assert counts == [40]
