"""The driver sends ranks groups that share their prompts where ``policy.share_prompts`` says so."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from gdpo_nemo.algorithms import LossSettings
from gdpo_nemo.cluster import policy_group
from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.cluster.policy_rank import RankCaller
from gdpo_nemo.cluster.session import WorkerDied
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.images import Image, PlacedImage
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.prefixes import Layout
from gdpo_nemo.data.records import UpdateResult
from gdpo_nemo.utils.waits import Patience

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"


class Group(PolicyGroup):
    """A policy without ranks that keeps the layouts which it would send them."""

    def __init__(self, *overrides: str, quadratic: float = 1e-4):
        config = load_config(DEMO, overrides)
        self.layout = config.policy.megatron_cfg
        self._quadratic = quadratic
        self._choose_sharing(config)
        self._data_ranks = [0]
        self.sent = []

    def _call_with_shares(self, method, sequences, layout, fields, what, **arguments):
        self.sent.append(layout)
        self.routing = [s.routing for s in sequences]
        return [UpdateResult(0.0, 0.0, 0.0, False, {}, {}) if method == "train" else None]


def batch() -> list[TrainSequence]:
    """Two groups of four: a prompt of 30 and completions of 10."""
    return [
        TrainSequence(np.full(30, n // 4, np.int32), np.arange(n, n + 10, dtype=np.int32), np.zeros(10, np.float32))
        for n in range(8)
    ]


@pytest.mark.parametrize("way, saved", [("true", 180), ("auto", 180), ("false", 0)])
def test_updates_and_log_probs_share_prompts_according_to_the_config(way, saved):
    group = Group(f"policy.share_prompts={way}")
    packing = group.train(batch(), LossSettings()).packing
    group.logprobs(batch())
    assert [sum(layout.shared) for layout in group.sent] == [saved, saved]
    assert (packing["shared_tokens"], packing["saved_share"]) == (saved, saved / 320)


def test_reference_and_teacher_choose_their_experts_and_share_prompts_under_router_replay():
    group = Group("policy.share_prompts=true")
    routed = [replace(s, routing=np.full((40, 2), n, np.int8)) for n, s in enumerate(batch())]
    for options, saved in ({}, 0), ({"reference": True}, 180), ({"teacher": True}, 180):
        group.logprobs(routed, **options)
        assert sum(group.sent[-1].shared) == saved
        assert all((routing is None) == bool(options) for routing in group.routing)


def test_log_prob_passes_have_a_separate_micro_batch_size():
    group = Group("policy.share_prompts=false", "policy.micro_batch_tokens=80", "policy.logprob_micro_batch_tokens=160")
    group.train(batch(), LossSettings())
    group.logprobs(batch())
    assert [len(layout.assignment[0]) for layout in group.sent] == [4, 2]


def test_sequences_that_are_scored_separately_share_nothing():
    group = Group("policy.share_prompts=true")
    group.logprobs(batch(), packed=False)
    assert not any(group.sent[0].shared)
    assert all(len(members) == 1 for members in chain.from_iterable(group.sent[0].assignment))


@pytest.mark.parametrize(
    "overrides, quadratic, sharing",
    [
        (["policy.max_total_sequence_length=400"], 1e-5, None),
        (["policy.max_total_sequence_length=110"], 1e-5, False),  # prompts are too short
        (["policy.max_total_sequence_length=400"], 1.0, False),  # attention dominates, and FlexAttention is slower
        (["policy.max_total_sequence_length=400", "policy.megatron_cfg.attention_backend=flex"], 1.0, None),
        (["policy.max_total_sequence_length=400", "policy.megatron_cfg.attention_backend=sdpa"], 1e-5, False),
        (["policy.max_total_sequence_length=400", "policy.megatron_cfg.transformer_engine=false"], 1e-5, False),
        (["policy.max_total_sequence_length=110", "policy.share_prompts=true"], 1e-5, True),
    ],
)
def test_auto_on_gpus_shares_prompts_if_arithmetic_exceeds_the_cost_of_flex_attention(overrides, quadratic, sharing):
    gpus = ["cluster.gpus_per_node=2", "policy.generation.max_new_tokens=100", "policy.micro_batch_tokens=4000"]
    group = Group(*gpus, *overrides, quadratic=quadratic)
    assert group._sharing is sharing
    assert group.config.share_prompts is (sharing is not False), "the ranks build their layers from this value"


def test_batches_on_gpus_are_shared_if_that_pays_with_the_slower_attention():
    gpus = ["cluster.gpus_per_node=2", "policy.generation.max_new_tokens=100", "policy.max_total_sequence_length=400"]
    for quadratic, saved in ((1e-5, 180), (0.1, 0)):
        group = Group(*gpus, "policy.micro_batch_tokens=4000", quadratic=1e-5)
        group._quadratic = quadratic
        group.train(batch(), LossSettings())
        assert sum(group.sent[0].shared) == saved


class Rank:
    """Actor of a rank, whose calls return their arguments, fail or never end."""

    def __init__(self, rank: int, failure: Exception | None = None, ends: bool = True):
        self.rank = rank
        self.failure = failure
        self.ends = ends
        self.call_with_share = SimpleNamespace(remote=self._call)

    def _call(self, method, shares, number, options, image_data):
        result: Future = Future()
        if self.failure:
            result.set_exception(self.failure)
        elif self.ends:
            share = shares[number].with_image_data(image_data)
            self.images = [[p.image.data for p in s.images] for s in share.sequences()]
            result.set_result((self.rank, method, share.completion_ids.tolist(), options))
        return SimpleNamespace(future=lambda: result)


@pytest.fixture
def stored(monkeypatch) -> list:
    """Objects that the driver puts into Ray's object store. ``gather`` waits for nothing."""
    stored = []
    monkeypatch.setattr(policy_group, "ray", SimpleNamespace(put=lambda shares: stored.append(shares) or shares))
    monkeypatch.setattr(policy_group, "gather", lambda refs, *_: [getattr(r, "future", lambda r=r: r)() for r in refs])
    return stored


def five_ranks() -> PolicyGroup:
    """Three data-parallel ranks. Ranks 1 and 2 are on a later pipeline stage."""
    group = object.__new__(PolicyGroup)
    group._data_ranks = [1, 0, 1, 0, 2]
    group._decodes = [True, False, False, True, True]
    group.ranks = [Rank(rank) for rank in range(5)]
    group._patience = {"train": Patience(60.0, 60.0)}
    return group


def nodes_of(group: PolicyGroup) -> list:
    def node(*ranks):
        caller = RankCaller([group.ranks[rank] for rank in ranks])
        return SimpleNamespace(
            call_with_shares=SimpleNamespace(remote=lambda *a: asyncio.run(caller.call_with_shares(*a)))
        ), ranks

    return [node(3, 0, 2), node(1, 4)]


def test_the_driver_calls_the_ranks_of_a_node_together_and_each_gets_its_share(stored):
    group = five_ranks()
    group.callers = nodes_of(group)
    layout = Layout([[[2]], [[0]], [[1]]], [0] * 8)
    results = group._call_with_shares("train", batch(), layout, ["loss_mask"], "training", settings=7)
    tokens = {0: [2, 11], 1: [0, 9], 2: [1, 10]}  # first and last token of the sequence of a data-parallel rank
    assert [(rank, method, [ids[0], ids[-1]], options) for rank, method, ids, options in results] == [
        (rank, "train", tokens[data_rank], {"settings": 7}) for rank, data_rank in enumerate(group._data_ranks)
    ]
    assert [len(shares) for shares in stored] == [2, 2], "a node stores each share once"


@pytest.mark.parametrize("together", [True, False])
def test_data_of_a_distinct_image_is_stored_once_per_data_parallel_rank_and_read_by_first_stages_only(stored, together):
    images = [Image(str(n) * 64, 8, 8, bytes([n]) * 100_000) for n in range(3)]
    sequences = batch()
    for n, sequence in enumerate(sequences):
        sequence.images = (PlacedImage(images[n // 4], 2, 4), PlacedImage(images[2], 7, 4))
    group = five_ranks()
    group.callers = nodes_of(group) if together else ()
    layout = Layout([[[0, 1], [2]], [[3, 4]], [[5, 6, 7]]], [0] * 8)
    group._call_with_shares("train", sequences, layout, ["loss_mask"], "training")
    distinct = [{0, 2}, {0, 1, 2}, {1, 2}]
    assert sum(len(pickle.dumps(found)) for found in stored) < 100_000 * sum(map(len, distinct)) + 20_000
    for rank, data_rank, decodes in zip(group.ranks, group._data_ranks, group._decodes):
        data = {images[n].data for n in distinct[data_rank]} if decodes else {b""}
        assert set(chain.from_iterable(rank.images)) == data


def test_the_first_failure_of_a_rank_ends_the_call_to_its_node():
    caller = RankCaller([Rank(0, ends=False), Rank(1, failure=ActorDiedError())])
    with pytest.raises(WorkerDied, match="training: a worker process died"):
        asyncio.run(caller.call_with_shares("train", [[None, None]], [0, 1], "training", {}, [None, None]))
