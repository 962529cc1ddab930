"""The policy computes with the experts that the sampler chose, in every layout, packed and with shared prompts."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import grouped
import hf_reference
import numpy as np
import pytest
import rank_cases
import tiny_models
import torch
from hf_reference import relative_error
from layouts import optimizer

from gdpo_nemo.data.packing import TrainSequence

MODEL = "qwen3-moe-mixed"
"""Two of its four layers have experts."""
LAYERS, EXPERTS, CHOSEN = 2, 4, 2


def chosen_for(sequence: TrainSequence) -> np.ndarray:
    """int8 [tokens, layers * chosen]: experts that depend on a token and all before it, as a sampler's do. The first
    token's are unknown."""
    tokens = np.concatenate([sequence.prompt_ids, sequence.completion_ids]).tolist()
    rows = []
    for end in range(1, len(tokens) + 1):
        draw = np.random.default_rng(tokens[:end])
        rows.append(np.concatenate([draw.permutation(EXPERTS)[:CHOSEN] for _ in range(LAYERS)]))
    routing = np.array(rows, np.int8)
    routing[0] = -1
    return routing


def replayed(batch: list[TrainSequence]) -> list[TrainSequence]:
    """The batch with experts for all sequences but one."""
    return [replace(s, routing=None if i == 4 else chosen_for(s)) for i, s in enumerate(batch)]


def in_groups(place, folder, batch, sharing, mode):
    return rank_cases.in_groups(place, folder, batch, sharing, router_replay=mode)


def by_transformers(folder, batch: list[TrainSequence]) -> hf_reference.Run:
    """An update of transformers whose routers are told the experts, layer after layer."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    longest = max(map(len, batch))
    told = np.full((len(batch), longest, LAYERS, CHOSEN), -1)
    for row, s in zip(told, batch):
        if s.routing is not None:
            row[: len(s)] = s.routing.reshape(-1, LAYERS, CHOSEN)
    layer = iter(range(LAYERS))
    own = Qwen3MoeTopKRouter.forward

    def forward(router, hidden):
        logits, _, indices = own(router, hidden)
        experts = torch.from_numpy(told[:, :, next(layer)].reshape(-1, CHOSEN))
        experts = torch.where(experts < 0, indices, experts)
        return logits, logits.float().softmax(-1).gather(1, experts), experts

    with patch.object(Qwen3MoeTopKRouter, "forward", forward):
        return hf_reference.run(folder, batch, 1, optimizer())


def test_an_update_equals_transformers_with_the_same_experts(on_ranks, model_folder):
    folder = model_folder(MODEL)
    batch = replayed(tiny_models.make_batch())
    expected = by_transformers(folder, batch)
    (rank,) = on_ranks("TP1", in_groups, folder, batch, False, "sampler")
    (own,) = on_ranks("TP1", in_groups, folder, batch, False, "off")
    assert relative_error(rank.steps, expected.steps) < 1e-5
    assert relative_error(own.steps, expected.steps) > 1e-3
    places, found = rank.logprobs[0]
    for sequence, offset, value in zip(found.sequence, found.offset, found.values):
        assert abs(value - expected.logprobs[places[sequence]][offset]) < 2e-6


@pytest.mark.parametrize("layout", ["TP2xEP2xETP1+SP+FULL", "PP2xVPP2+FULL", "CP2xEP2+DIST"])
def test_layouts_recomputation_and_shared_prompts_use_the_same_experts(on_ranks, model_folder, layout):
    folder = model_folder(MODEL)
    batch = replayed(grouped.make_groups())
    (expected,) = on_ranks("TP1", in_groups, folder, batch, False, "sampler")
    for rank in on_ranks(layout, in_groups, folder, batch, True, "sampler"):
        assert relative_error(rank.steps, expected.steps) < 2e-6
        assert rank.saved > 0
