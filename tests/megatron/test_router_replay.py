"""The policy computes with the experts that the sampler chose, in every layout, packed and with shared prompts."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import grouped
import hf_reference
import numpy as np
import pytest
import rank_cases
import torch
from hf_reference import relative_error
from layouts import optimizer

from gdpo_nemo.data.packing import TrainSequence

pytestmark = pytest.mark.slow

MODEL = "qwen3-moe-mixed"
"""Two of its four layers have experts."""
LAYERS, EXPERTS, CHOSEN = 2, 4, 2


def chosen_for(sequence: TrainSequence, number: int) -> np.ndarray:
    """Return the experts of a sequence: int8 [tokens, layers * chosen].

    The experts of a token depend on the tokens up to it, and in two of three sequences also on the sequence: in the
    last layer, from the middle of the prompt or from its last token. Rounding has this effect in an engine. The experts
    of the first token are unknown.
    """
    tokens = np.concatenate([sequence.prompt_ids, sequence.completion_ids]).tolist()
    prompt = len(sequence.prompt_ids)
    routing = np.full((len(tokens), LAYERS, CHOSEN), -1, np.int8)
    for end in range(2, len(tokens) + 1):
        draw = np.random.default_rng(tokens[:end])
        routing[end - 1] = [draw.permutation(EXPERTS)[:CHOSEN] for _ in range(LAYERS)]
        if number % 3 and end > (prompt // 2 if number % 3 == 1 else prompt - 1):
            routing[end - 1, -1] = np.random.default_rng([number, end]).permutation(EXPERTS)[:CHOSEN]
    return routing.reshape(len(tokens), -1)


def replayed(batch: list[TrainSequence]) -> list[TrainSequence]:
    """Return the batch with experts for all sequences except one."""
    return [replace(s, routing=None if i == 4 else chosen_for(s, i)) for i, s in enumerate(batch)]


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


def test_an_update_with_replayed_experts_equals_transformers_with_and_without_shared_prompts(on_ranks, model_folder):
    folder = model_folder(MODEL)
    whole = [replace(s, old_logprobs=None) for s in grouped.make_groups() if s.loss_mask is None and s.weight]
    batch = replayed(grouped.weighted(whole))
    expected = by_transformers(folder, batch)
    for sharing in (False, True):
        (rank,) = on_ranks("TP1", in_groups, folder, batch, sharing, "sampler")
        assert relative_error(rank.steps, expected.steps) < 1e-6
        assert bool(rank.saved) == sharing
        places, found = rank.logprobs[0]
        for sequence, offset, value in zip(found.sequence, found.offset, found.values):
            assert abs(value - expected.logprobs[places[sequence]][offset]) < 2e-6
    (own,) = on_ranks("TP1", in_groups, folder, batch, False, "off")
    assert relative_error(own.steps, expected.steps) > 1e-3


@pytest.mark.parametrize("layout", ["TP2xEP2xETP1+SP+FULL", "PP2xVPP2+FULL", "CP2xEP2+DIST"])
def test_layouts_recomputation_and_shared_prompts_use_the_same_experts(on_ranks, model_folder, layout):
    folder = model_folder(MODEL)
    batch = replayed(grouped.make_groups())
    (expected,) = on_ranks("TP1", in_groups, folder, batch, False, "sampler")
    for rank in on_ranks(layout, in_groups, folder, batch, True, "sampler"):
        assert relative_error(rank.steps, expected.steps) < 2e-6
        assert rank.saved > 0
