"""A policy with a vision tower computes what transformers' whole model computes, in every layout.

With ``--layout-table`` all layouts with both families, with and without shared prompts, and with a trained and a frozen
tower.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
import rank_cases
import tiny_vision
import torch
import vision_cases

from gdpo_nemo.config.schema import LoraConfig

CUT = "TP2+SP"
LAYOUTS = ["TP1", CUT, "PP2", "CP2", "TP2xCP2+SP", "TP2xPP2+FULL", "DP2+OVERLAP", "PP2xVPP2"]


def pytest_generate_tests(metafunc):
    if metafunc.function is test_logprobs_and_gradients_equal_transformers:
        ways = list(product((False, True), (False, True)))
        cases = []
        for number, (layout, kind) in enumerate(product(LAYOUTS, tiny_vision.KINDS)):
            if "VPP" in layout and kind == "qwen3_vl":
                continue  # features of images go to two layers, and the first virtual stage has one
            whole = metafunc.config.getoption("layout_table")
            # With a trained tower and shared prompts, and in turn one of the other ways.
            chosen = ways if whole else [ways[3], ways[number // 2 % 3]] if number // 2 % 2 == number % 2 else []
            for sharing, trained in chosen:
                is_short = (layout, kind, sharing, trained) == (CUT, "qwen3_vl", True, True)
                cases.append(pytest.param(layout, kind, sharing, trained, marks=() if is_short else pytest.mark.slow))
        metafunc.parametrize("layout, kind, sharing, trained", cases)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``folder(kind)``: the folder of a tiny model, written once."""
    return cache(lambda kind: tiny_vision.write_tiny_vision(tmp_path_factory.mktemp(kind), kind))


@pytest.fixture(scope="module")
def reference(folder):
    """``reference(kind, make)``: a batch, with log-probs and gradients by transformers."""

    @cache
    def run(kind, make):
        batch = make(folder(kind))
        return batch, vision_cases.of_transformers(folder(kind), batch)

    return run


def check_equal(results, batch, expected, trained):
    ours = rank_cases.by_sequence([result.before for result in results], batch)
    for got, logprobs in zip(ours, expected.logprobs):
        np.testing.assert_allclose(got, logprobs, atol=1e-5, rtol=0)
    for result in results:
        assert result.norm == pytest.approx(expected.norm(None if trained else "visual."), rel=1e-6)


def largest(gradients, tower: bool) -> float:
    return max(float(np.abs(g).max()) for name, g in gradients.items() if ("visual." in name) == tower)


def test_logprobs_and_gradients_equal_transformers(on_ranks, folder, reference, layout, kind, sharing, trained):
    """Compare prompts with no, one and two images, and a completion that contains the placeholder token."""
    batch, expected = reference(kind, vision_cases.make_batch)
    results = on_ranks(layout, vision_cases.measured, folder(kind), batch, sharing, trained)
    check_equal(results, batch, expected, trained)
    assert (results[0].saved > 60) == sharing
    if "OVERLAP" in layout:
        return  # a rank has only its part of the gradients
    assert results[0].gradients.keys() == expected.gradients.keys()
    differences = {name: results[0].gradients[name] - g for name, g in expected.gradients.items()}
    for tower in (False, True) if trained else (False,):
        assert largest(differences, tower) < 1e-5 * largest(expected.gradients, tower)


@pytest.mark.slow
def test_prompts_with_equal_tokens_and_different_images_share_no_image(on_ranks, folder, reference):
    batch, expected = reference("qwen3_vl", vision_cases.twins)
    assert np.array_equal(batch[0].prompt_ids, batch[2].prompt_ids)
    results = on_ranks("TP1", vision_cases.measured, folder("qwen3_vl"), batch, True)
    check_equal(results, batch, expected, True)
    # All samples of a prompt begin with the same token, and both prompts with the same text in front of the image.
    assert results[0].saved == 2 * (len(batch[0].prompt_ids) + 1) + batch[0].images[0].start


@pytest.fixture(scope="module")
def two_updates(on_ranks, folder, reference):
    """``two_updates(layout, trained)``: the batch, and ``Steps`` by rank."""

    @cache
    def run(layout, trained, lora=None):
        batch, _ = reference("qwen3_vl", vision_cases.make_batch)
        return batch, on_ranks(
            layout, vision_cases.steps, folder("qwen3_vl"), batch, trained, lora and LoraConfig(lora)
        )

    return run


def values(results, batch, read) -> np.ndarray:
    return np.concatenate(rank_cases.by_sequence([read(result) for result in results], batch))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP1", "DP2+OVERLAP"])
def test_trained_tower_processes_the_distinct_images_of_a_micro_batch_in_each_pass(two_updates, layout):
    """The reference has the weights of the start, also after updates. The second data-parallel rank has no images."""
    batch, results = two_updates(layout, True)
    distinct = sum(result.distinct for result in results)
    assert distinct < sum(len(s.images) for s in batch) and results[0].images == [3 * distinct] * 2
    assert any("visual." in name for name in results[0].changed)
    before, after = (values(results, batch, lambda r, i=i: r.policy[i]) for i in (0, 2))
    assert np.abs(before - after).max() > 1e-2
    for read in (lambda r: r.reference[0], lambda r: r.reference[2], lambda r: r.teacher):
        np.testing.assert_allclose(values(results, batch, read), before, atol=1e-6, rtol=0)
    on_one = values(two_updates("TP1", True)[1], batch, lambda r: r.policy[2])
    np.testing.assert_allclose(after, on_one, atol=2e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP1", "CP2"])
def test_frozen_tower_processes_an_image_once(two_updates, layout):
    """On each rank, in all passes of policy, reference and teacher. The teacher has its own tower."""
    batch, results = two_updates(layout, False)
    images = {placed.image for s in batch for placed in s.images}
    assert 0 < results[0].images[0] <= len(images) * len(results) and results[0].images[1] == 0
    assert results[0].changed and not any("visual." in name for name in results[0].changed)
    before = values(results, batch, lambda r: r.policy[0])
    for read in (lambda r: r.reference[2], lambda r: r.teacher):
        np.testing.assert_allclose(values(results, batch, read), before, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_adapters_train_only_the_language_model(two_updates, reference):
    batch, results = two_updates("TP1", False, 4)
    changed = results[0].changed
    assert len(changed) == 4 * 7 and all(".language_model.layers." in name for name in changed)
    for got, expected in zip(
        (values(results, batch, lambda r: r.policy[0]), values(results, batch, lambda r: r.reference[2])),
        [np.concatenate(reference("qwen3_vl", vision_cases.make_batch)[1].logprobs)] * 2,
    ):
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_bfloat16_is_as_accurate_as_transformers(on_ranks, folder, reference, kind):
    batch, exact = reference(kind, vision_cases.make_batch)
    theirs = vision_cases.of_transformers(folder(kind), batch, torch.bfloat16).logprobs
    results = on_ranks("TP1", vision_cases.measured, folder(kind), batch, True, True, "bfloat16")
    ours = rank_cases.by_sequence([result.before for result in results], batch)
    mine, other = (np.abs(np.concatenate(found) - np.concatenate(exact.logprobs)).mean() for found in (ours, theirs))
    assert 0 < mine < 1.25 * other
    assert results[0].norm == pytest.approx(exact.norm(), rel=0.05)
    assert results[0].buffers == {"torch.float32"}  # rounded frequencies differ by 0.4 % from the engine's


@pytest.mark.slow
def test_least_recently_used_features_are_dropped(on_ranks):
    assert on_ranks("TP1", vision_cases.cached)[0] == [0, 2, 3]
