"""An advantage of each token: equal ones have the gradient of a sequence's, unlike ones the same in every layout."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache

import grouped
import hf_reference
import layouts
import numpy as np
import pytest
import rank_cases
import tiny_models
import torch
from hf_reference import relative_error

from gdpo_nemo.algorithms.loss_settings import TermLoss
from gdpo_nemo.algorithms.losses import TOKEN_INPUTS
from gdpo_nemo.algorithms.policy_loss import LossSettings
from gdpo_nemo.data.packing import TrainSequence, pack_rows
from gdpo_nemo.data.shares import Share
from gdpo_nemo.megatron.micro_batch import MicroBatch, make_micro_batch

LAYOUTS = ["DP2", "TP2+SP", "PP2", "CP2", "TP2xCP2"]


def by_token(batch: list[TrainSequence], seed: int = 4) -> list[TrainSequence]:
    """The batch with three stretches of unlike advantages in every sequence but each third, which keeps its own."""
    draw = np.random.default_rng(seed)
    return [
        s if place % 3 == 2 else replace(s, advantage=np.sort(draw.normal(0.3, 1, len(s.completion_ids))).astype("f4"))
        for place, s in enumerate(batch)
    ]


def packed(batch: list[TrainSequence], context: tuple[int, int]) -> tuple[MicroBatch, np.ndarray]:
    """A micro-batch of all sequences, and (sequence, offset) of its trained rows."""
    places = (lambda length, rank, size: np.arange(length)[rank::size]) if context[1] > 1 else None
    rows = pack_rows(batch, range(len(batch)), context_rank=context[0], context_size=context[1], positions=places)
    made = make_micro_batch(rows, batch, context, torch.device("cpu"), attention=None, with_fields=True)
    kept = slice(None) if made.trained is None else made.trained.numpy()
    return made, np.stack([rows.sequence, rows.offset], 1)[kept]


def advantages_of_rows(batch: list[TrainSequence], context: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The advantage of every trained row of a micro-batch, and (sequence, offset) of these rows."""
    made, places = packed(batch, context)
    return made.fields.advantages.numpy(), places


@pytest.mark.parametrize("context", [(0, 1), (0, 2), (1, 2)])
def test_every_row_of_a_micro_batch_has_the_advantage_of_its_token(context):
    batch = by_token(tiny_models.make_batch())
    batch[1].loss_mask = np.arange(len(batch[1].completion_ids)) % 2 == 0
    batch[3].weight = 0.0
    found, places = advantages_of_rows(batch, context)
    assert found.dtype == np.float32 and len(found) == len(places) > 0
    expected = [np.float32(np.broadcast_to(batch[i].advantage, len(batch[i].completion_ids))[k]) for i, k in places]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", TOKEN_INPUTS)
@pytest.mark.parametrize("context", [(0, 1), (0, 2), (1, 2)])
def test_every_declared_token_input_reaches_the_rows_of_its_tokens(name, context):
    batch = tiny_models.make_batch()
    draw = np.random.default_rng(5)
    for s in batch:
        setattr(s, name, draw.integers(0, 2, len(s.completion_ids)).astype(TOKEN_INPUTS[name].dtype))
    received = pickle.loads(pickle.dumps(Share.of(batch, [list(range(len(batch)))]))).sequences()
    made, places = packed(received, context)
    found = getattr(made.fields, name).numpy()
    assert found.dtype == TOKEN_INPUTS[name].dtype and len(found) == len(places) > 0
    np.testing.assert_array_equal(found, [getattr(batch[i], name)[k] for i, k in places])
    if TOKEN_INPUTS[name].missing is not None:
        setattr(batch[0], name, None)
        filled = getattr(Share.of(batch, [[0, 1]]).sequences()[0], name)
        assert (filled == TOKEN_INPUTS[name].missing).all() and filled.dtype == TOKEN_INPUTS[name].dtype


def test_equal_advantages_of_all_tokens_are_that_of_the_sequence_bit_for_bit():
    batch = tiny_models.make_batch()
    spread = [replace(s, advantage=np.full(len(s.completion_ids), s.advantage, np.float32)) for s in batch]
    np.testing.assert_array_equal(advantages_of_rows(spread, (0, 1))[0], advantages_of_rows(batch, (0, 1))[0])


@pytest.mark.slow
def test_updates_with_advantages_by_token_are_those_of_transformers(on_ranks, model_folder):
    batch = by_token(tiny_models.make_batch())
    theirs = hf_reference.run(model_folder("qwen3"), batch, 2, layouts.optimizer())
    ours = on_ranks("TP1", rank_cases.updates, model_folder("qwen3"), batch)[0]
    assert relative_error(ours.steps[:, :2], theirs.steps[:, :2]) < 1e-4
    flat = on_ranks("TP1", rank_cases.updates, model_folder("qwen3"), tiny_models.make_batch())[0]
    assert relative_error(ours.steps[:, 1], flat.steps[:, 1]) > 1e-2, "the advantages of tokens must matter"


@pytest.fixture(scope="module")
def steps(on_ranks, model_folder):
    """``steps(layout)``: by loss, what an update measures."""
    batch = by_token(tiny_models.make_batch())
    draw = np.random.default_rng(3)
    for s in batch:
        s.old_logprobs = (s.sampler_logprobs + draw.normal(0, 0.1, len(s.completion_ids))).astype(np.float32)
    settings = {loss: LossSettings(type=loss) for loss in ("clipped_pg", "gspo")}
    return cache(lambda layout: on_ranks(layout, rank_cases.first_updates, model_folder("qwen3"), batch, settings)[0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_advantages_by_token_have_the_same_gradient_in_every_layout(steps, layout):
    for loss, expected in steps("TP1").items():
        assert relative_error(steps(layout)[loss], expected) < 1e-5, loss


def of_terms(loss: LossSettings) -> tuple[list[TrainSequence], list[TermLoss]]:
    """Groups whose advantages are the sums of three terms, with two expected rewards: the terms of their loss."""
    draw = np.random.default_rng(6)
    batch = by_token(grouped.make_groups())
    for s in batch:
        parts = draw.normal(0, 1, (len(s.completion_ids), 5)).astype(np.float32)
        parts[:, 2] = s.token_advantages() - parts[:, 0] - parts[:, 1]
        s.terms = parts
        s.reference_logprobs = s.sampler_logprobs
    requested = [("advantage", 0), ("advantage", 1), ("regularisation", 2), ("expected", 3), ("expected", 4)]
    return batch, [TermLoss(loss, part, index) for part, index in requested]


CLIPPED = LossSettings(ratio_clip_min=0.1, ratio_clip_max=0.2, reference_policy_kl_penalty=0.1, entropy_bonus=0.01)
TERMS = {"TP1": (CLIPPED, False), "TP2+SP": (CLIPPED, True), "PP2": (CLIPPED, False), "CP2": (CLIPPED, True)}
TERMS |= {"DP2+DIST": (LossSettings(type="gspo"), True), "PP2xVPP2": (LossSettings(type="cispo"), False)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", TERMS)
def test_gradients_of_terms_sum_to_the_gradient_and_change_no_weight(on_ranks, model_folder, layout):
    """Packed and with shared prompts, with clipped tokens; the effects are those of the update that follows."""
    loss, sharing = TERMS[layout]
    batch, terms = of_terms(loss)
    found, distance, weights, plain = on_ranks(
        layout, rank_cases.gradients_of_terms, model_folder("qwen3"), batch, terms, sharing
    )[0]
    assert distance < 1e-6
    assert all(np.array_equal(weights[name], plain[name]) for name in plain)
    # Without momentum and weight decay, Adam's second update with nearly the same gradient, clipped to norm 1.
    clip = min(1, 1 / np.sqrt(found.products[:3, :3].sum()))
    assert found.earlier == 1
    np.testing.assert_allclose(found.scaled[:, :3].sum(1) * clip, -found.moved, rtol=5e-3, atol=2e-6)
