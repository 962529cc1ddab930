"""What travels to a data-parallel rank is its own sequences and nothing else; what comes back finds its place."""

from __future__ import annotations

import pickle
from dataclasses import fields
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gdpo_nemo.algorithms.rubrics import Criterion
from gdpo_nemo.data.images import Image, PlacedImage
from gdpo_nemo.data.packing import Budget, TrainSequence, assign, assign_singly
from gdpo_nemo.data.records import (
    Outcome,
    Prompt,
    TokenValues,
    TrainerState,
    Trajectory,
    pack_trajectories,
    unpack_trajectories,
)
from gdpo_nemo.data.replies import Reply
from gdpo_nemo.data.shares import SCORING, TRAINING, Share, by_sequence
from gdpo_nemo.utils.errors import RunError

shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20), st.booleans()), min_size=1, max_size=12)


def make_batch(shapes, old="own", by_token=lambda place: False) -> list[TrainSequence]:
    """Sequences of random tokens; (prompt tokens, completion tokens, whether there is a mask) of each.

    Those at places for which ``by_token`` says so have an advantage for each token.
    """
    draw = np.random.default_rng(0)
    batch = []
    for prompt, completion, masked in shapes:
        sampled = draw.normal(size=completion).astype(np.float32)
        batch.append(
            TrainSequence(
                draw.integers(0, 99, prompt).astype(np.int32),
                draw.integers(0, 99, completion).astype(np.int32),
                sampled,
                advantage=float(draw.normal()),
                weight=float(draw.random()),
                old_logprobs={"own": draw.normal(size=completion).astype(np.float32), "sampler": sampled}.get(old),
                loss_mask=draw.random(completion) < 0.5 if masked else None,
                routing=draw.integers(0, 128, (prompt + completion, 6)).astype(np.int8) if masked else None,
            )
        )
        if by_token(len(batch) - 1):
            batch[-1].advantage = draw.normal(size=completion).astype(np.float32)
    return batch


def travelled(batch, assignment, names=TRAINING) -> list[Share]:
    return [pickle.loads(pickle.dumps(Share.of(batch, micro_batches, names))) for micro_batches in assignment]


@given(shapes=shapes, ranks=st.integers(1, 4), old=st.sampled_from(["own", "sampler", None]))
def test_every_rank_gets_its_sequences_unchanged_and_in_order(shapes, ranks, old):
    batch = make_batch(shapes, old)
    assignment = assign([len(s) for s in batch], Budget(ranks, 60))
    for share, micro_batches in zip(travelled(batch, assignment), assignment):
        arrived = share.sequences()
        assert list(map(len, share.micro_batches)) == list(map(len, micro_batches))
        assert list(chain.from_iterable(share.micro_batches)) == list(range(len(arrived)))
        for got, sent in zip(arrived, (batch[i] for i in chain.from_iterable(micro_batches)), strict=True):
            for field in fields(TrainSequence):
                mine, theirs = getattr(got, field.name), getattr(sent, field.name)
                if field.name == "loss_mask" and theirs is None and mine is not None:
                    assert mine.all() and len(mine) == len(sent.completion_ids)
                elif field.name == "routing" and theirs is None and mine is not None:
                    assert (mine == -1).all() and mine.shape == (len(sent), 6)
                else:
                    np.testing.assert_array_equal(mine, theirs)


@given(shapes=shapes, ranks=st.integers(1, 4), counts=st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_images_arrive_at_their_places_and_each_distinct_image_once(shapes, ranks, counts):
    batch = make_batch(shapes)
    images = [Image(str(n) * 64, n + 1, 7, bytes([n]) * (n * 1000)) for n in range(5)]
    for place, (sequence, count) in enumerate(zip(batch, counts)):
        sequence.images = tuple(PlacedImage(images[(place + n) % 5], 3 * n, 2) for n in range(count))
    assignment = assign([len(s) for s in batch], Budget(ranks, 60))
    for share, micro_batches in zip(travelled(batch, assignment), assignment):
        sent = [batch[i].images for i in chain.from_iterable(micro_batches)]
        for data, arrived in ((True, share), (False, share.with_image_data(None))):
            got = [s.images for s in arrived.sequences()]
            assert got == sent
            found = {placed.image.sha256: placed.image for placed in chain.from_iterable(got)}
            assert all(image.data == images[int(name[0])].data * data for name, image in found.items())
        size = sum(len(images[n].data) for n in {int(name[0]) for name in found})
        assert size == (0 if share.image_data is None else share.image_data.nbytes)


@given(shapes=shapes, ranks=st.integers(1, 4), every=st.integers(1, 3))
def test_advantages_by_token_arrive_at_their_tokens_beside_those_of_sequences(shapes, ranks, every):
    batch = make_batch(shapes, by_token=lambda place: place % every == 0)
    assignment = assign([len(s) for s in batch], Budget(ranks, 60))
    for share, micro_batches in zip(travelled(batch, assignment), assignment):
        sent = [batch[i] for i in chain.from_iterable(micro_batches)]
        for got, theirs in zip(share.sequences(), sent, strict=True):
            np.testing.assert_array_equal(got.token_advantages(), theirs.token_advantages())
            assert got.token_advantages().dtype == np.float32
            assert got.has_advantage == theirs.has_advantage


@given(shapes=shapes, ranks=st.integers(1, 3), context=st.integers(1, 3), alone=st.booleans(), pairs=st.booleans())
def test_values_of_all_ranks_come_back_to_their_tokens(shapes, ranks, context, alone, pairs):
    batch = make_batch(shapes)
    lengths = [len(s) for s in batch]
    assignment = assign_singly(len(batch), ranks) if alone else assign(lengths, Budget(ranks, 60))
    found = []
    for rank, share in enumerate(travelled(batch, assignment, SCORING)):
        written = [np.flatnonzero(np.ones(len(s.completion_ids)) if s.loss_mask is None else s.loss_mask)
                   for s in share.sequences()]  # fmt: skip
        owner = np.repeat(np.arange(len(written)), [len(w) for w in written])
        offset = np.concatenate([*written, np.zeros(0, np.int64)]).astype(np.int64)
        tokens = np.concatenate([*(s.completion_ids for s in share.sequences()), np.zeros(0)])
        starts = np.cumsum(share.completion_lengths) - share.completion_lengths
        values = tokens[starts[owner] + offset].astype(np.float32)
        if pairs:  # log-prob and entropy
            values = np.stack((values, -values), axis=-1)
        found.append((rank, None))  # a rank that does not report
        for part in range(context):
            mine = np.arange(len(owner)) % context == part
            found.append(
                (rank, share.flat(TokenValues(owner[mine], offset[mine], values[mine]), complete=context == 1))
            )
    for s, got in zip(batch, by_sequence(batch, assignment, found), strict=True):
        expected = s.completion_ids.astype(np.float32)
        if s.loss_mask is not None:
            expected = np.where(s.loss_mask, expected, np.nan)
        np.testing.assert_array_equal(got, np.stack((expected, -expected), axis=-1) if pairs else expected)


def test_sequences_that_are_only_scored_are_sent_without_log_probs():
    batch = make_batch([(3, 1000, False)] * 4)
    scored, trained = (len(pickle.dumps(Share.of(batch, [[0, 1], [2, 3]], names))) for names in (SCORING, TRAINING))
    assert scored < 1.1 * 4 * 4 * 1003 and trained > 2.9 * scored
    share = Share.of(batch, [[0, 1], [2, 3]], SCORING)
    assert all(np.isnan(s.sampler_logprobs).all() and s.old_logprobs is None for s in share.sequences())


def test_equal_arrays_of_sampled_and_old_log_probs_travel_once():
    twice, once = (
        len(pickle.dumps(Share.of(make_batch([(3, 1000, False)], old), [[0]]))) for old in ("own", "sampler")
    )
    assert twice - once == pytest.approx(4 * 1000, abs=200)


def test_a_share_does_not_grow_by_objects_with_its_sequences():
    buffers: list[pickle.PickleBuffer] = []
    shares = [Share.of(make_batch([(3, 5, True)] * count), [list(range(count))]) for count in (2, 200)]
    small, large = (len(pickle.dumps(s, protocol=5, buffer_callback=buffers.append)) for s in shares)
    assert large - small < 20 and len(buffers) == 2 * 10


def test_log_probs_that_some_sequences_lack_end_the_run_in_a_sentence():
    batch = make_batch([(3, 5, False)] * 2)
    batch[1].old_logprobs = None
    with pytest.raises(RunError, match="old_logprobs: only some sequences of an update have this field"):
        Share.of(batch, [[0, 1]])


@given(shapes=shapes, ranks=st.integers(1, 3), draw=st.data())
def test_shared_prefix_lengths_are_sent_with_each_sequence(shapes, ranks, draw):
    batch = make_batch(shapes)
    assignment = assign([len(s) for s in batch], Budget(ranks, 60))
    shared = [draw.draw(st.integers(0, len(s) - 1)) for s in batch]
    for micro_batches in assignment:
        share = pickle.loads(pickle.dumps(Share.of(batch, micro_batches, shared=shared)))
        places = list(chain.from_iterable(micro_batches))
        assert [s.shared for s in share.sequences()] == [shared[i] for i in places]
    assert all(s.shared == 0 for s in batch), "the driver's own sequences may be laid out otherwise next time"


def test_packed_trajectories_are_equal_in_every_field():
    prompt = Prompt("p", np.arange(3, dtype=np.int32), "text", "env", {"answer": 1})
    state = TrainerState(1, 2, 0.5)
    tokens = [np.arange(n, dtype=np.int32) for n in (2, 0, 3)]
    made = [Trajectory(prompt, i, t, t.astype(np.float32), 4, "a" * i, "stop") for i, t in enumerate(tokens)]
    made[2].loss_mask = np.array([True, False, True])
    made[2].routing = np.zeros((6, 2), np.int16)
    filled = dict(
        rewards={"a": 0.5, "b": None}, outcome=Outcome.TRUNCATED, detail="why", turns=2, extra={"x": [1]},
        metrics={"m": 1.0}, turn_tokens=(1, 1), turn_rewards=({"a": 0.5},), turn_parents=(-1, 0),
        reward_tokens={"a": ((0, 1),)}, spans=((3, 1), (4, 1)), messages=({"role": "user"},), thinking_tokens=1,
        reply=Reply("", "content"), criteria={"rubric/1": Criterion("polite", -2.0)},
        images=(PlacedImage(Image("0" * 64, 2, 2, b"png"), 3, 1),),
    )  # fmt: skip
    assert {f.name for f in fields(Trajectory)} == {
        *filled, "prompt", "sample_index", "completion_ids", "logprobs", "policy_version", "text", "finish_reason",
        "loss_mask", "trainer_state", "routing",
    }, "a new field must be packed"  # fmt: skip
    vars(made[0]).update(filled)
    found = unpack_trajectories(pack_trajectories(made), prompt, state)
    for before, after in zip(made, found, strict=True):
        before.trainer_state = state
        assert {n: repr(v) for n, v in vars(after).items()} == {n: repr(v) for n, v in vars(before).items()}
    found[1].rewards["a"] = 1.0
    assert found[2].rewards == {} and Trajectory(prompt, 0, *tokens[:2], 0, "", "").rewards == {}
    first, second = unpack_trajectories(pack_trajectories(made[1:]), prompt)  # all of their dictionaries are empty
    first.rewards["a"] = 1.0
    assert second.rewards == {} and Trajectory(prompt, 0, *tokens[:2], 0, "", "").rewards == {}
