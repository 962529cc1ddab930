"""A checkpoint continues as if nothing had happened, at its own layout and at any other."""

from __future__ import annotations

from functools import cache

import checkpoint_cases
import numpy as np
import pytest
import tiny_models
import vision_cases
from hf_reference import relative_error

pytestmark = pytest.mark.slow

LAYOUTS = ["TP1+DIST", "TP2+SP+DIST", "DP2+DIST", "PP2+DIST", "CP2+DIST"]


@pytest.fixture(scope="module")
def saved(on_ranks, model_folder, tmp_path_factory):
    """``saved(layout)``: a checkpoint written at ``layout``, and the two updates that followed it there."""

    @cache
    def save(layout, precision="float32"):
        folder = tmp_path_factory.mktemp("checkpoint")
        arguments = (model_folder("qwen3"), tiny_models.make_batch(), folder, 2, precision)
        return folder, on_ranks(layout, checkpoint_cases.save_and_go_on, *arguments)[0]

    return save


def go_on(on_ranks, model_folder, layout, checkpoint, precision="float32"):
    arguments = (model_folder("qwen3"), tiny_models.make_batch(), checkpoint, 2, precision)
    return on_ranks(layout, checkpoint_cases.load_and_go_on, *arguments)[0]


@pytest.mark.parametrize("layout", [*LAYOUTS, "TP1", "TP2", "DP2", "TP2+SP+MUON"])
def test_continuation_at_the_same_layout_is_exact(on_ranks, model_folder, saved, layout):
    checkpoint, undisturbed = saved(layout)
    np.testing.assert_array_equal(go_on(on_ranks, model_folder, layout, checkpoint), undisturbed)


PRODUCT = "TP2xPP2+SP+DIST"
RING = [PRODUCT, *LAYOUTS, "PP2xVPP2+DIST"]
PAIRS = [*zip(RING, [*RING[1:], RING[0]]), ("TP2+SP+MUON", "PP2+MUON")]
"""Every layout writes a checkpoint that another reads, and reads one that another wrote."""


@pytest.mark.parametrize("before, after", PAIRS)
def test_continuation_at_another_layout_is_the_same_run(on_ranks, model_folder, saved, before, after):
    checkpoint, undisturbed = saved(before)
    assert relative_error(go_on(on_ranks, model_folder, after, checkpoint), undisturbed) < 1e-5


@pytest.mark.parametrize("layout, other", [("DP2+DIST", PRODUCT), ("TP2+SP+DIST", "DP4+DIST"), ("TP2", "DP2+DIST")])
def test_a_checkpoint_rewritten_at_another_layout_continues_bit_for_bit(
    on_ranks, model_folder, saved, tmp_path, layout, other
):
    checkpoint, undisturbed = saved(layout)
    on_ranks(other, checkpoint_cases.rewrite, model_folder("qwen3"), checkpoint, tmp_path / "rewritten")
    np.testing.assert_array_equal(go_on(on_ranks, model_folder, layout, tmp_path / "rewritten"), undisturbed)


@pytest.mark.parametrize(
    "before, after", [("TP2", "DP2+DIST"), ("TP1", "TP2xPP2"), ("DP2+DIST", "PP2"), ("TP2xPP2", "CP2")]
)
def test_plain_and_distributed_optimizers_read_each_other(on_ranks, model_folder, saved, before, after):
    checkpoint, undisturbed = saved(before)
    assert relative_error(go_on(on_ranks, model_folder, after, checkpoint), undisturbed) < 1e-5


@pytest.mark.parametrize("before, after", [("PP2+SHORTHEAD", "PP2"), ("DP2+DIST", "PP2+SHORTTAIL+DIST")])
def test_stages_may_be_cut_elsewhere_on_resuming(on_ranks, model_folder, saved, before, after):
    checkpoint, undisturbed = saved(before)
    assert relative_error(go_on(on_ranks, model_folder, after, checkpoint), undisturbed) < 1e-5


def test_run_with_frozen_routers_resumes(on_ranks, model_folder, saved_mixture):
    layout = "DP2xEP2+DIST+FROZENROUTER"
    checkpoint, undisturbed = saved_mixture(layout)
    arguments = (model_folder("qwen3-moe"), tiny_models.make_batch(), checkpoint)
    np.testing.assert_array_equal(on_ranks(layout, checkpoint_cases.load_and_go_on, *arguments)[0], undisturbed)


@pytest.mark.parametrize("before, after", [("TP2", "DP2+DIST"), ("DP2+DIST", "TP2")])
def test_bfloat16_main_weights_survive_a_change_of_optimizer(on_ranks, model_folder, saved, before, after):
    """Main weights are float32: had they been read back from the bfloat16 model, the updates would differ in the third
    digit."""
    checkpoint, undisturbed = saved(before, "bfloat16")
    assert relative_error(go_on(on_ranks, model_folder, after, checkpoint, "bfloat16"), undisturbed) < 2e-2


@pytest.mark.parametrize("layout", ["TP2", "DP2+DIST"])
def test_random_streams_resume_even_before_the_first_update(on_ranks, model_folder, tmp_path, layout):
    for first, second in on_ranks(
        layout, checkpoint_cases.random_streams, model_folder("qwen3"), tmp_path / "checkpoint"
    ):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("layout", ["TP1", "TP2xPP2", "DP2+OVERLAP"])
def test_a_checkpoint_written_beside_training_holds_the_moment_it_began(on_ranks, model_folder, tmp_path, layout):
    arguments = (model_folder("qwen3"), tiny_models.make_batch(), tmp_path / "checkpoint")
    undisturbed = on_ranks(layout, checkpoint_cases.save_beside_training, *arguments)[0]
    np.testing.assert_array_equal(go_on(on_ranks, model_folder, layout, tmp_path / "checkpoint"), undisturbed)


def test_a_byte_that_turns_on_the_way_to_disk_is_found_by_reading_back(on_ranks, model_folder, tmp_path):
    arguments = (model_folder("qwen3"), tiny_models.make_batch(), tmp_path / "checkpoint")
    (said,) = on_ranks("TP1", checkpoint_cases.tampered_save, *arguments)
    assert said == "1 tensors have different values when read back, for example embedding.word_embeddings.weight"


@pytest.mark.parametrize("before, after, trained", [(PRODUCT, "TP1", True), ("PP2+DIST", "PP2+DIST", False)])
def test_a_vision_tower_and_its_optimizer_state_are_resharded(on_ranks, model_folder, tmp_path, before, after, trained):
    folder = model_folder("qwen3_vl")
    arguments = (folder, vision_cases.make_batch(folder), tmp_path, 2, "float32", trained)
    undisturbed = on_ranks(before, checkpoint_cases.save_and_go_on, *arguments)[0]
    continued = on_ranks(after, checkpoint_cases.load_and_go_on, *arguments)[0]
    assert relative_error(continued, undisturbed) < (1e-5 if after != before else 1e-15)


EXPERTS = "DP2xEP2+DIST"
MIXTURE_PAIRS = [
    (PRODUCT, EXPERTS, "minimax-m2"),  # tensor parallelism splits its norms of q and k
    (EXPERTS, PRODUCT, "qwen3-moe"),
    (EXPERTS, "TP2xEP2xETP1+SP+DIST", "qwen3-moe"),
    (EXPERTS, EXPERTS, "qwen3-moe"),
    ("CP2+DIST", EXPERTS, "qwen3-moe"),
    ("TP1", "DP2xEP2", "qwen3-moe"),
    ("DP2xEP2", "TP1", "qwen3-moe"),
    ("TP1+MUON", "DP2xEP2+MUON", "gpt-oss"),
    ("DP2xEP2+MUON", "TP1+MUON", "qwen3-moe"),
]


@pytest.fixture(scope="module")
def saved_mixture(on_ranks, model_folder, tmp_path_factory):
    """As ``saved``, of a mixture of experts."""

    @cache
    def save(layout, model="qwen3-moe"):
        folder = tmp_path_factory.mktemp("mixture")
        arguments = (model_folder(model), tiny_models.make_batch(), folder)
        return folder, on_ranks(layout, checkpoint_cases.save_and_go_on, *arguments)[0]

    return save


@pytest.mark.parametrize("before, after, model", MIXTURE_PAIRS)
def test_experts_are_resharded(on_ranks, model_folder, saved_mixture, before, after, model):
    checkpoint, undisturbed = saved_mixture(before, model)
    arguments = (model_folder(model), tiny_models.make_batch(), checkpoint)
    continued = on_ranks(after, checkpoint_cases.load_and_go_on, *arguments)[0]
    assert relative_error(continued, undisturbed) < 1e-5


@pytest.mark.parametrize("layout", ["TP2", "DP2+DIST"])
@pytest.mark.parametrize("before, after", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_checkpoint_continues_in_the_other_precision(on_ranks, model_folder, saved, layout, before, after):
    checkpoint, undisturbed = saved(layout, before)
    assert relative_error(go_on(on_ranks, model_folder, layout, checkpoint, after), undisturbed) < 5e-2
