"""Groups whose prompts are computed once are trained as if every sample computed its own."""

from __future__ import annotations

from itertools import cycle

import grouped
import numpy as np
import pytest
import rank_cases
import tiny_models
from hf_reference import relative_error
from layouts import fitting, in_turn

from gdpo_nemo.algorithms import LossSettings, OffPolicySettings
from gdpo_nemo.config.schema import LoraConfig
from gdpo_nemo.data.packing import TrainSequence, has_split_trajectory
from gdpo_nemo.data.prefixes import shared_prefixes

pytestmark = pytest.mark.slow

LAYOUTS = ["TP2", "TP2+SP", "DP2", "DP2+DIST", "PP2", "PP2xVPP2", "CP2", "TP1+FULL", "TP1+SELECTIVE", "CP2+SELECTIVE"]
MIXTURE_LAYOUTS = ["TP2+SP", "TP2xEP2xETP1+SP", "DP2xEP2", "DP2xEP2+DIST", "PP2", "CP2xEP2+DIST"]


def both_ways(on_ranks, layout, folder, batch, **options):
    """The same updates without and with sharing, by rank."""
    return [on_ranks(layout, in_groups, folder, batch, sharing, options) for sharing in (False, True)]


def in_groups(place, folder, batch, sharing, options):
    return rank_cases.in_groups(place, folder, batch, sharing, **options)


def values_of(ranks, batch, which) -> list[np.ndarray]:
    """float32 [completion tokens] of every sequence, from the ranks that report them."""
    out = [np.full(len(s.completion_ids), np.nan, np.float32) for s in batch]
    for rank in ranks:
        if rank.logprobs:
            places, found = rank.logprobs[which]
            for sequence, offset, value in zip(found.sequence, found.offset, found.values):
                assert np.isnan(out[places[sequence]][offset]), "two ranks report the same token"
                out[places[sequence]][offset] = value
    return out


def check_equal(plain, shared, batch, passes=2):
    assert not plain[0].saved and shared[0].saved >= 0.25 * sum(map(len, batch))
    for rank in shared:
        assert relative_error(rank.steps, plain[0].steps) < 1e-6
    for which in range(passes):
        ours, theirs = (values_of(ranks, batch, which) for ranks in (shared, plain))
        for s, mine, other in zip(batch, ours, theirs):
            written = np.ones(len(s.completion_ids), bool) if s.loss_mask is None else s.loss_mask
            assert np.array_equal(~np.isnan(mine), written)
            np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model", tiny_models.MODELS)
def test_every_family_trains_shared_prompts_like_separate_ones(on_ranks, model_folder, model):
    batch = grouped.make_groups()
    check_equal(*both_ways(on_ranks, "TP1", model_folder(model), batch), batch)


def pytest_generate_tests(metafunc):
    whole = metafunc.config.getoption("layout_table")
    for function, layouts, models in (
        (test_layouts_train_shared_prompts_like_separate_ones, LAYOUTS, tiny_models.DENSE),
        (test_layouts_of_mixtures_also_share_prompts, MIXTURE_LAYOUTS, tiny_models.MIXTURES),
    ):
        if metafunc.function is function:
            cases = (
                [(fitting(layout, model), model) for layout in layouts for model in models]
                if whole
                else in_turn(layouts, models, 1)
            )
            metafunc.parametrize("layout, model", cases)
    if metafunc.function is test_flex_attention_trains_shared_prompts_like_packed_attention:
        cases = [("CP2", "qwen3"), ("CP2", "gpt-oss"), ("TP1", "gemma2")]
        if whole:
            cases = [(n, "qwen3") for n in LAYOUTS] + [(n, "qwen3-moe") for n in MIXTURE_LAYOUTS]
        metafunc.parametrize("layout, model", cases)


def test_layouts_train_shared_prompts_like_separate_ones(on_ranks, model_folder, layout, model):
    batch = grouped.make_groups()
    check_equal(*both_ways(on_ranks, layout, model_folder(model), batch), batch)


def test_layouts_of_mixtures_also_share_prompts(on_ranks, model_folder, layout, model):
    batch = grouped.make_groups()
    check_equal(*both_ways(on_ranks, layout, model_folder(model), batch), batch)


def test_flex_attention_trains_shared_prompts_like_packed_attention(on_ranks, model_folder, layout, model):
    batch = grouped.make_groups()
    packed, flex = (
        on_ranks(name, in_groups, model_folder(model), batch, True, {}) for name in (layout, f"{layout}+FLEX")
    )
    assert flex[0].saved == packed[0].saved >= 0.25 * sum(map(len, batch))
    for ours, theirs in zip(flex, packed):
        assert relative_error(ours.steps, theirs.steps) < 1e-6
    for which in range(2):
        for ours, theirs in zip(*(values_of(ranks, batch, which) for ranks in (flex, packed))):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_every_layout_equals_one_rank(on_ranks, model_folder):
    """Against one rank without sharing, as both ways in one layout could be wrong alike."""
    batch = grouped.make_groups()
    folder = model_folder("qwen3")
    plain = on_ranks("TP1", in_groups, folder, batch, False, {})
    for layout in ("TP2+SP", "CP2"):
        for rank in on_ranks(layout, in_groups, folder, batch, True, {}):
            assert relative_error(rank.steps, plain[0].steps) < 2e-6


def test_adapters_and_the_reference_score_shared_prompts_like_separate_ones(on_ranks, model_folder):
    batch = grouped.make_groups()
    folder = model_folder("qwen2")
    options = dict(keep_reference=True, lora=LoraConfig(rank=4))
    check_equal(*both_ways(on_ranks, "TP1", folder, batch, **options), batch, passes=3)
    check_equal(*both_ways(on_ranks, "TP1", folder, batch, keep_reference=True), batch, passes=3)


LOSSES = {
    "gspo": LossSettings(type="gspo"),
    "target_po": LossSettings(type="target_po"),
    "kl and entropy": LossSettings(reference_policy_kl_penalty=0.1, entropy_bonus=0.01),
    "sequence importance": LossSettings(off_policy=OffPolicySettings(mode="truncate", level="sequence")),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_over_whole_sequences_find_their_tokens_in_shared_rows(on_ranks, model_folder, name):
    batch = grouped.make_groups()
    for s in batch:
        s.reference_logprobs = s.sampler_logprobs
    check_equal(*both_ways(on_ranks, "TP1", model_folder("llama"), batch, settings=LOSSES[name]), batch)


def test_random_groups_have_the_gradient_of_separate_sequences(on_ranks, model_folder):
    """Prefixes of any length and depth, shared down to single tokens, in one micro-batch."""
    folder = model_folder("qwen2-tied")
    for seed in range(8):
        batch, shared = random_tree(np.random.default_rng(seed))
        alone = [0] * len(batch)
        plain, ours = (on_ranks("TP1", in_groups, folder, batch, way, {}) for way in (alone, shared))
        assert relative_error(ours[0].steps, plain[0].steps) < 1e-6, seed
        for mine, other in zip(values_of(ours, batch, 1), values_of(plain, batch, 1)):
            np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)


def random_tree(draw) -> tuple[list[TrainSequence], list[int]]:
    """Sequences of two different tokens, so that they begin alike by chance, and what they share at most."""
    rows = sorted(draw.integers(0, 2, draw.integers(2, 14)).tolist() for _ in range(draw.integers(2, 12)))
    prompts = [int(draw.integers(1, len(row) + 1)) for row in rows]
    if all(prompt == len(row) for prompt, row in zip(prompts, rows)):
        prompts[-1] = 1
    batch = grouped.weighted([grouped.sample(draw, row[:p], row[p:]) for p, row in zip(prompts, rows)])
    return batch, shared_prefixes(batch, least=0)


CONTEXT_LAYOUTS = [*LAYOUTS, "TP2xCP2", "TP2xEP2xETP1+SP", "TP2xPP2+SP", "DP2xEP2+DIST", "CP2xEP2+DIST"]


def contexts_and_turns(seed: int = 1) -> tuple[list[TrainSequence], list[TrainSequence]]:
    """Trajectories whose turns form trees, and each turn as a separate sequence after the tokens of its path."""
    draw = np.random.default_rng(seed)
    contexts, turns = [], []

    def tokens(count):
        return draw.integers(0, tiny_models.VOCABULARY, count)

    def sequence(number, prompt, parts, trained):
        ids = np.concatenate(parts)
        masked = [k for k in range(len(ids)) if not trained[np.searchsorted(np.cumsum([*map(len, parts)]), k, "right")]]
        made = grouped.sample(draw, prompt, ids, masked)
        made.trajectory, made.advantage = number, 0.5 + number
        contexts.append(made)
        ends = np.cumsum([0, *map(len, parts)])
        for start, end, is_trained in zip(ends, ends[1:], trained):
            if is_trained:
                turn = grouped.sample(draw, np.concatenate([prompt, ids[:start]]), ids[start:end])
                turn.sampler_logprobs, turn.old_logprobs = (
                    made.sampler_logprobs[start:end],
                    made.old_logprobs[start:end],
                )
                turn.trajectory, turn.advantage = number, made.advantage
                turns.append(turn)

    for number in range(3):
        prompt, first, heard, second, third = tokens(9), tokens(6), tokens(3), tokens(5), tokens(4)
        sequence(number, prompt, [first, heard, second], [True, False, True])
        sequence(number, prompt, [first, heard, third], [False, False, True])  # returns to the first turn
        sequence(number, tokens(7), [tokens(5 + number)], [True])  # a context of its own
    return grouped.weighted(contexts), grouped.weighted(turns)


CONTEXT_LOSSES = {"clipped": LossSettings(), **{name: LOSSES[name] for name in ("gspo", "sequence importance")}}


@pytest.mark.parametrize(
    "layout, model, loss",
    [
        (layout, "qwen3-moe" if "EP2" in layout else model, loss)
        for (layout, model), loss in zip(in_turn(CONTEXT_LAYOUTS, ["qwen3", "llama"], 1), cycle(CONTEXT_LOSSES))
    ],
)
def test_layouts_train_contexts_of_trajectories_like_separate_turns(on_ranks, model_folder, layout, model, loss):
    """Also losses over whole trajectories, and with the common prefix of two contexts computed once. A layout has one
    of the losses. Each loss has layouts with tensor, data, pipeline and context ranks."""
    contexts, turns = contexts_and_turns()
    assert len(contexts) == 9 and len(turns) == 12 and has_split_trajectory(contexts)
    run = rank_cases.in_contexts
    *both, (steps, weights) = on_ranks(layout, run, model_folder(model), contexts, turns, CONTEXT_LOSSES[loss])[0]
    for ours, of_contexts in both:
        assert relative_error(ours, steps) < 1e-6
        for key, expected in weights.items():
            np.testing.assert_allclose(of_contexts[key], expected, rtol=0, atol=1e-6, err_msg=key)
