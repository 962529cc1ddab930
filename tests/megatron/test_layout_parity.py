"""Every layout computes what one process of transformers and torch computes, in float32.

Every family on two ranks whose tensors are cut and whose sequences are shared, every other layout with one of the
families in turn; with ``--layout-table`` all with all.
"""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
import rank_cases
import tiny_models
import torch
import value_cases
from hf_reference import relative_error
from layouts import fitting, in_turn, parse

from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.schema import Config, PolicyConfig
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.planning.shape import on_stage

CUT = "TP2+SP"
"""The layout that splits most kinds of tensors. An error on one rank would also show here."""
LAYOUTS = ["TP1", "TP2", "TP2+SP", "DP2", "DP2+DIST", "PP2", "CP2"]
MODELS = tiny_models.DENSE
MIXTURE_LAYOUTS = ["TP1", "TP2+SP", "TP2xEP2xETP1+SP", "DP2xEP2", "DP2xEP2+DIST", "PP2", "CP2xEP2+DIST"]
MIXTURES = tiny_models.MIXTURES


def slow_unless_short(layout: str, model: str):
    """Only one case, which starts two ranks, is in the short suite."""
    return pytest.param(layout, model, marks=() if (layout, model) == (CUT, "qwen2") else pytest.mark.slow)


def pytest_generate_tests(metafunc):
    whole = metafunc.config.getoption("layout_table")
    if metafunc.function is test_updates_equal_transformers_and_torch:
        some = [(CUT, model) for model in MODELS] + in_turn([layout for layout in LAYOUTS if layout != CUT], MODELS, 1)
        cases = product(LAYOUTS, MODELS) if whole else some
        metafunc.parametrize("layout, model", [slow_unless_short(layout, model) for layout, model in cases])
    if metafunc.function is test_mixtures_equal_transformers_and_torch:
        some = [(fitting(CUT, model), model) for model in MIXTURES]
        some += in_turn([layout for layout in MIXTURE_LAYOUTS if layout != CUT], MIXTURES, 1)
        metafunc.parametrize(
            "layout, model",
            [(fitting(layout, model), model) for layout, model in product(MIXTURE_LAYOUTS, MIXTURES)]
            if whole
            else some,
        )


def test_updates_equal_transformers_and_torch(packed_and_alone, reference, layout, model):
    assert weight_error(packed_and_alone(layout, model), reference(model).weights) < 2e-6


@pytest.mark.slow
def test_mixtures_equal_transformers_and_torch(packed_and_alone, layout, model):
    packed_and_alone(layout, model)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["DP2+OVERLAP", "CP2+DIST", "TP2+SP+FULL", "TP2+SELECTIVE", "PP2xVPP2+FIRST"])
def test_overlap_and_recompute_change_nothing(on_ranks, model_folder, reference, layout):
    expected = reference("qwen3")
    results = on_ranks(layout, rank_cases.updates, model_folder("qwen3"), tiny_models.make_batch())
    assert max(relative_error(result.steps, expected.steps) for result in results) < 1e-5
    assert weight_error(results[0].weights, expected.weights) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe-mixed"])
def test_recomputed_modules_change_no_bit_of_two_updates(on_ranks, model_folder, model):
    """That Megatron recomputes them at all is seen in the memory that ``test_memory_plan.py`` measures."""
    batch = tiny_models.make_batch()
    stored, recomputed = (
        on_ranks(layout, rank_cases.updates, model_folder(model), batch)[0] for layout in ("TP1", "TP1+MODULES")
    )
    assert np.array_equal(stored.steps, recomputed.steps)
    assert all(np.array_equal(stored.weights[name], recomputed.weights[name]) for name in stored.weights)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["PP2+SHORTHEAD", "PP2+SHORTTAIL", "PP3+SHORTHEAD+SHORTTAIL"])
def test_uneven_pipeline_computes_exports_and_plans_like_an_even_one(on_ranks, model_folder, reference, layout):
    expected = reference("qwen3")
    folder = model_folder("qwen3")
    results = on_ranks(layout, rank_cases.updates, folder, tiny_models.make_batch())
    assert max(relative_error(result.steps, expected.steps) for result in results) < 1e-5
    assert set(results[0].weights) == set(expected.weights)
    assert weight_error(results[0].weights, expected.weights) < 1e-6
    planned = planned_layers(parse(layout).config, folder)
    held = on_ranks(layout, rank_cases.layers_held, folder)
    assert [sorted(set(layers)) for layers in held] == planned and len({len(layers) for layers in planned}) > 1


def planned_layers(megatron, folder) -> list[list[int]]:
    """The layers of every stage as the plan counts them."""
    config = Config(policy=PolicyConfig(model_name=str(folder), megatron_cfg=megatron))
    shape = describe(json.loads((folder / "config.json").read_text()))
    layout = resolve_layout(config)
    return [list(on_stage(shape, layout, stage)) for stage in range(layout.pipeline)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP1", "DP2xEP2+DIST"])
def test_frozen_routers_stay_bit_for_bit_while_everything_else_is_trained(on_ranks, model_folder, layout):
    from safetensors.numpy import load_file

    folder = model_folder("qwen3-moe")
    start = load_file(folder / "model.safetensors")
    frozen, trained = (
        on_ranks(layout + flag, rank_cases.updates, folder, tiny_models.make_batch())[0].weights
        for flag in ("+FROZENROUTER", "")
    )
    routers = [name for name in frozen if name.endswith(".mlp.gate.weight")]
    assert len(routers) == 4
    for name in frozen:
        assert np.array_equal(frozen[name], start[name]) == (name in routers), name
    assert not any(np.array_equal(trained[name], start[name]) for name in routers)


@pytest.mark.slow
def test_the_routers_bias_keeps_every_bit_in_bfloat16(on_ranks, model_folder):
    from safetensors.numpy import load_file

    start = load_file(model_folder("glm4-moe") / "model.safetensors")
    arguments = (model_folder("glm4-moe"), tiny_models.make_batch(), 1, 80, None, None, "bfloat16")
    weights = on_ranks("TP1", rank_cases.updates, *arguments)[0].weights
    biases = [name for name in weights if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3 and all(np.array_equal(weights[name], start[name]) for name in biases)
    assert not np.array_equal(weights["model.norm.weight"], start["model.norm.weight"])


@pytest.mark.slow
def test_the_routers_precision_is_that_of_the_config(on_ranks, model_folder):
    """In bfloat16 the scores of a float64 router differ from those of a bfloat16 one, and so do the log-probs."""
    folder = model_folder("qwen3-moe")
    batch = tiny_models.make_batch()
    plain, exact = (
        on_ranks(layout, rank_cases.updates, folder, batch, 0, 80, None, None, "bfloat16")[0].before.values
        for layout in ("TP1", "TP1+FLOAT64ROUTER")
    )
    assert 0 < np.abs(plain - exact).max() < 0.2


@pytest.mark.slow
def test_warm_up_has_the_rates_of_torchs_linear_schedule_and_their_multiple_for_the_head(on_ranks, model_folder):
    rates = on_ranks("TP1+WARMUP", value_cases.learning_rates, model_folder("qwen3"), tiny_models.make_batch(), 6)[0]
    weight = torch.nn.Parameter(torch.zeros(1))
    theirs = torch.optim.AdamW([weight], lr=1e-2)
    schedules = torch.optim.lr_scheduler
    parts = [schedules.LinearLR(theirs, 0.1, 1.0, 4), schedules.ConstantLR(theirs, 1.0, 10**10)]
    schedule = schedules.SequentialLR(theirs, parts, [4])
    expected = []
    for _ in range(6):
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        schedule.step()
    np.testing.assert_allclose([reported for reported, _ in rates], expected, rtol=1e-9)
    for (_, of_head), rate in zip(rates, expected):
        assert list(of_head) == pytest.approx([value_cases.HEAD_LR * rate], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP2+SP", "CP2", "DP2"])
def test_logprobs_equal_log_softmax_of_transformers(on_ranks, model_folder, reference, layout):
    batch = tiny_models.make_batch()
    results = on_ranks(layout, rank_cases.updates, model_folder("qwen2"), batch)
    ours = rank_cases.by_sequence([result.before for result in results], batch)
    for got, expected in zip(ours, reference("qwen2").logprobs):
        np.testing.assert_allclose(got, expected, atol=2e-6, rtol=0)


def weight_error(ours, theirs) -> float:
    """Largest difference; the learning rate of 1e-2 is the size of what an update moves."""
    assert set(ours) <= set(theirs)
    return max(float(np.abs(ours[name] - theirs[name].numpy()).max()) for name in ours)
