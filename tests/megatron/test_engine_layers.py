"""TransformerEngine's layers compute, save and load what torch's do: its real Python over a stub of its C extension."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import partial

import adapter_cases
import checkpoint_cases
import engine_layer_cases
import grouped
import layouts
import numpy as np
import pytest
import rank_cases
import tiny_models
from filelock import FileLock
from hf_reference import relative_error
from rank_pool import RankPool
from te_stub import bootstrap

from gdpo_nemo.config.schema import LoraConfig
from gdpo_nemo.megatron.layers import transformer_engine_is_usable
from gdpo_nemo.utils.errors import RunError

pytestmark = pytest.mark.slow

WHEEL = "transformer-engine==2.20.2"
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=4.0)
LORA = LoraConfig(rank=4, alpha=8.0)
HEAD = LoraConfig(rank=4, alpha=8.0, target_modules=["v_proj", "down_proj", "lm_head"])
ATTENTION = LoraConfig(rank=4, alpha=8.0, target_modules=["q_proj", "o_proj"])


@pytest.fixture(scope="session")
def wheel(pytestconfig, tmp_path_factory):
    """A folder with TransformerEngine's Python, which its wheel has without any library; outside of ``sys.path``, since
    others would find it there. From the package index once, then from pytest's cache."""
    kept = pytestconfig.cache.mkdir(WHEEL)
    folder = kept / "packages"
    with FileLock(kept / "lock"):
        if not folder.is_dir():
            venv = tmp_path_factory.mktemp("pip")
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
            pip = [str(venv / "bin" / "pip"), "install", "--quiet", "--no-deps", "--only-binary=:all:", "--upgrade"]
            subprocess.run([*pip, "--target", str(kept / "incoming"), WHEEL], check=True)
            (kept / "incoming").rename(folder)
    return folder


@pytest.fixture(scope="module")
def on_engine_ranks(wheel, tmp_path_factory):
    """As ``on_ranks``, in processes that have TransformerEngine; its layers are those of layouts with +TE."""
    pool = RankPool(tmp_path_factory.mktemp("engine_ranks"), partial(bootstrap.install, wheel))

    def run(name: str, function, *arguments, **options):
        layout = layouts.parse(name)
        return pool.run(function, layout.ranks, layout.config, *arguments, **options)

    yield run
    pool.close()


@pytest.mark.parametrize(
    "layout, model",
    [("TP1+TE", "qwen2"), ("TP1+TE", "llama"), ("TP2+SP+TE", "qwen3"), ("DP2+OVERLAP+TE", "qwen2-tied"),
     ("TP1+FULL+TE", "phi3"), ("TP2+SP+TE", "glm4"), ("TP2+SP+TE", "glm4-moe"), ("TP1+TE", "mixtral"),
     ("DP2+DIST+TE", "qwen3-moe"), ("PP2+TE", "qwen3-moe-mixed"), ("TP2+SP+TE", "gemma4-moe"),
     ("TP2+SP+TE", "qwen3-next"), ("TP2+SP+TE", "nemotron-3-super")],
)  # fmt: skip
def test_updates_equal_transformers_and_torch(on_engine_ranks, model_folder, reference, layout, model):
    batch = tiny_models.make_batch()
    results = on_engine_ranks(layout, rank_cases.packed_and_alone, model_folder(model), batch)
    for packed, alone in results:
        assert relative_error(packed.steps, reference(model).steps) < 1e-5
        assert relative_error(alone, reference(model).steps[:1]) < 1e-5


@pytest.mark.parametrize(
    "layout, rope",
    [("TP1+TE", YARN), ("TP2+TE", {**YARN, "attention_factor": 1.3}), ("TP1+TE", LINEAR)],
    ids=["yarn", "factor", "linear"],
)
def test_scaled_rotary_embeddings_are_those_of_torchs_layers(on_ranks, on_engine_ranks, tmp_path, layout, rope):
    folder = tiny_models.write_model("qwen2", tmp_path, rope_parameters=rope)
    batch = tiny_models.make_batch()
    expected = on_ranks("TP1", rank_cases.updates, folder, batch)[0]
    found = on_engine_ranks(layout, rank_cases.updates, folder, batch)[0]
    assert relative_error(found.steps, expected.steps) < 1e-5
    np.testing.assert_allclose(found.before.values, expected.before.values, atol=1e-5)


def test_shared_prompts_are_trained_with_flex_attention_beside_its_layers(on_engine_ranks, tmp_path):
    """With a scaled rotary embedding, which its attention gets from a kernel and ours from torch."""
    folder = tiny_models.write_model("qwen2", tmp_path, rope_parameters=YARN)
    batch = grouped.make_groups()
    stock, shared, apart = (
        on_engine_ranks("TP2+SP+TE", rank_cases.in_groups, folder, batch, sharing)[0]
        for sharing in (False, True, [0] * len(batch))  # the last in layers that could share
    )
    assert shared.saved >= 0.25 * sum(map(len, batch)) and not apart.saved
    for ours in (shared, apart):
        assert relative_error(ours.steps, stock.steps) < 1e-6


@pytest.mark.parametrize("layout, model", [("TP1+TE", "qwen3"), ("TP2+SP+TE", "qwen3-moe")])
def test_bfloat16_stays_near_float32(on_ranks, on_engine_ranks, model_folder, reference, tmp_path, layout, model):
    """As near as torch's layers and transformers (test_layout_products); main weights in float32 are saved and read."""
    arguments = (model_folder(model), tiny_models.make_batch())
    expected = reference(model).steps
    found = on_engine_ranks(layout, rank_cases.updates, *arguments, 2, 80, None, None, "bfloat16")[0].steps
    assert (np.abs(found - expected) <= np.array([2e-2, 5e-2, 2e-2]) * np.abs(expected).max(0)).all()
    arguments = (*arguments, tmp_path / "checkpoint", 2, "bfloat16")
    straight = on_engine_ranks(layout, checkpoint_cases.save_and_go_on, *arguments)[0]
    resumed = on_ranks("DP2+DIST", checkpoint_cases.load_and_go_on, *arguments)[0]
    assert relative_error(resumed, straight) < 5e-2


@pytest.mark.parametrize("layout", ["TP1+TE", "TP2+SP+TE", "DP2xEP2+TE"])
def test_round_trip_of_every_family_is_bit_exact(on_ranks, on_engine_ranks, model_folder, layout):
    names = tiny_models.MIXTURES if "EP" in layout else tiny_models.MODELS
    folders = {name: model_folder(name) for name in names if name != "gpt-oss"}  # its experts have biases
    expected = on_ranks("TP1", rank_cases.round_trips, folders)[0]
    found = on_engine_ranks(layout, rank_cases.round_trips, folders)[0]
    for name in folders:
        theirs = dict(expected[name])
        ours = dict(found[name])
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[key], theirs[key]) for key in ours), name


@pytest.mark.parametrize("model", ["qwen2", "llama", "qwen3", "qwen3-moe-mixed"])
def test_a_checkpoint_holds_every_parameter_of_the_state_dictionary(on_engine_ranks, model_folder, model):
    parameters, state, saved = on_engine_ranks("TP1+TE", engine_layer_cases.names, model_folder(model))[0]
    assert parameters <= state & saved
    only_one = state ^ saved
    assert only_one and all(name.rpartition(".")[2].startswith("_extra_state") for name in only_one)
    mixtures = model in tiny_models.MIXTURES
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in parameters
    assert ("decoder.layers.3.mlp.experts.linear_fc1.weight3" in parameters) == mixtures
    assert ("decoder.layers.0.self_attention.q_layernorm.weight" in parameters) == model.startswith("qwen3")


@pytest.mark.parametrize(
    "before, after, model",
    [("TP1", "TP1+TE", "qwen2-tied"), ("TP1+TE", "TP1", "qwen3-moe-mixed"), ("TP1+TE", "TP1+TE", "qwen2-tied"),
     ("DP2+DIST", "TP2+SP+DIST+TE", "qwen3-moe-mixed"), ("TP2+SP+DIST+TE", "DP2+DIST", "qwen2-tied"),
     ("DP2+DIST+TE", "TP2+SP+TE", "qwen3-moe-mixed")],
)  # fmt: skip
def test_checkpoints_resume_with_and_without_transformer_engine(
    on_ranks, on_engine_ranks, model_folder, tmp_path, before, after, model
):
    batch = tiny_models.make_batch()
    folder = model_folder(model)
    writes, reads = (on_engine_ranks if name.endswith("TE") else on_ranks for name in (before, after))
    straight = writes(before, checkpoint_cases.save_and_go_on, folder, batch, tmp_path / "checkpoint")[0]
    resumed = reads(after, checkpoint_cases.load_and_go_on, folder, batch, tmp_path / "checkpoint")[0]
    assert relative_error(resumed, straight) < (1e-5 if before != after else 1e-12)


@pytest.mark.parametrize(
    "layout, model, lora",
    [("TP1+TE", "qwen2-tied", LORA), ("TP2+SP+TE", "qwen2-tied", LORA), ("TP2+TE", "qwen2", HEAD),
     ("DP2xEP2+DIST+TE", "qwen3-moe", LORA), ("TP1+FULL+TE", "qwen3", LORA)],
)  # fmt: skip
def test_adapters_learn_the_same_beside_its_layers(on_ranks, on_engine_ranks, model_folder, layout, model, lora):
    arguments = (model_folder(model), tiny_models.make_batch(), lora)
    expected = on_ranks("TP1", adapter_cases.lora_updates, *arguments)[0]
    steps, weights = on_engine_ranks(layout, adapter_cases.lora_updates, *arguments)[0]
    assert relative_error(steps, expected[0]) < 1e-5
    for name, value in expected[1].items():
        np.testing.assert_allclose(weights[name], value, atol=2e-6)


@pytest.mark.parametrize("before, after", [("TP1", "TP2+SP+TE"), ("TP2+TE", "TP1")])
def test_adapter_checkpoints_resume_with_and_without_transformer_engine(
    on_ranks, on_engine_ranks, model_folder, tmp_path, before, after
):
    arguments = (model_folder("qwen2-tied"), tiny_models.make_batch(), LORA, str(tmp_path / "checkpoint"))
    writes, reads = (on_engine_ranks if name.endswith("TE") else on_ranks for name in (before, after))
    straight = writes(before, adapter_cases.lora_checkpoint, *arguments, True)[0]
    assert relative_error(reads(after, adapter_cases.lora_checkpoint, *arguments, False)[0], straight) < 1e-5


def test_the_fused_kernels_are_those_that_model_and_layers_allow(on_ranks, on_engine_ranks, model_folder, tmp_path):
    def built(model, lora=None):
        folder = model_folder(model) if isinstance(model, str) else model
        return on_engine_ranks("TP1+TE", engine_layer_cases.fusions, folder, lora)[0]

    on = dict(apply_rope_fusion=True, bias_activation_fusion=True, bias_dropout_fusion=True)
    # Megatron's own linear layers would need apex for this one.
    off = dict(gradient_accumulation_fusion=False)
    norms = "TELayerNormColumnParallelLinear"
    dense = built("qwen2")
    assert dense.items() >= {**on, **off, "moe_permute_fusion": False, "softmax_scale": None}.items()
    assert (dense["kinds"][norms], dense["kinds"]["TERowParallelLinear"], dense["summing"]) == (8, 8, 16)
    mixture = built("qwen3-moe")
    assert mixture.items() >= {**on, **off, "moe_permute_fusion": True}.items()
    assert mixture["summing"] == 8 + 2 * 4
    yarn = built(tiny_models.write_model("qwen2", tmp_path, rope_parameters={**YARN, "attention_factor": 1.5}))
    assert yarn["apply_rope_fusion"] and yarn["softmax_scale"] == pytest.approx(1.5**2 / 8**0.5)
    adapted = built("qwen2", lora=LORA)
    assert norms not in adapted["kinds"] and adapted["kinds"]["RMSNorm"] == 9
    assert adapted["kinds"]["TEDotProductAttention"] == 4
    local = on_engine_ranks("TP1", engine_layer_cases.on_cuda, model_folder("qwen2"))[0]
    assert local.items() >= {**on, **off, "apply_rope_fusion": False}.items()
    cpu = on_ranks("TP1", engine_layer_cases.fusions, model_folder("qwen2"))[0]
    assert not any(cpu.values())


def test_rotation_is_one_kernel_a_tensor_and_weights_sum_their_gradients(on_engine_ranks, model_folder):
    arguments = (model_folder("qwen3-moe"), tiny_models.make_batch())
    calls, layers, micro_batches, copied = on_engine_ranks("TP1+TE", engine_layer_cases.kernel_calls, *arguments)[0]
    assert set(calls.values()) == {2 * layers * micro_batches} and len(calls) == 2
    # Of embedding, head and routers autograd makes the gradient.
    assert all("embedding" in name or "output_layer" in name or "router" in name for name in copied)


def test_calls_into_megatron_and_transformer_engine_fit_their_signatures(on_engine_ranks):
    wrong, bound = on_engine_ranks("TP1", engine_layer_cases.bind_calls)[0]
    assert wrong == [] and bound > 60


@pytest.mark.parametrize("layout", ["TP1+TE", "TP1+DIST+TE"])
def test_methods_that_offload_optimizers_on_gpus_need_no_arguments(on_engine_ranks, model_folder, layout):
    methods = on_engine_ranks(layout, engine_layer_cases.optimizer_methods, model_folder("qwen2"))[0]
    assert methods and not any(methods.values())


def test_moments_and_gradients_of_half_the_size_train_alike_and_share_checkpoints(
    on_engine_ranks, model_folder, tmp_path
):
    arguments = (model_folder("qwen2"), tiny_models.make_batch(), tmp_path)
    found = on_engine_ranks("TP1+DIST+TE", engine_layer_cases.precision_aware, *arguments)[0]
    assert (found["exp_avg"], found["exp_avg_sq"], found["gradients"]) == ("torch.bfloat16",) * 3
    assert found["master_param"] == "torch.float32"
    assert 0 < relative_error(found["half"], found["plain"]) < 0.02
    for name, other in (("plain", "half"), ("half", "plain")):
        assert relative_error(found[f"{name} from {other}"], found[other][2:]) < 0.02


def test_context_ranks_put_a_pack_in_order_without_reading_it_back(on_ranks, model_folder):
    for size in (2, 4):
        lengths = [2 * size, 8 * size, 6 * size]
        order = on_ranks("TP1", engine_layer_cases.gathered_order, lengths, size)[0]
        assert order == list(range(sum(lengths)))
    reads = on_ranks("CP2", engine_layer_cases.reads_of_bounds, model_folder("qwen2"), tiny_models.make_batch())
    assert reads == [0, 0]


def test_its_attention_is_sent_the_bounds_of_a_packing_and_nothing_else(on_engine_ranks, model_folder):
    arguments = (engine_layer_cases.packed_arrays, model_folder("qwen2"), tiny_models.make_batch())
    with_it, without = (on_engine_ranks(layout, *arguments)[0] for layout in ("TP1+TE", "TP1"))
    packing = without - with_it
    assert "bounds" in with_it and with_it < without
    assert "positions" in packing and all(name == "positions" or name.startswith("rectangle.") for name in packing)
    assert not any("rectangle" in name or name in ("positions", "order") for name in with_it)


def test_one_that_is_installed_and_broken_is_named_and_not_done_without(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.syspath_prepend(tmp_path)
    assert not transformer_engine_is_usable()
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcudnn.so.9: cannot open shared object file')")
    importlib.invalidate_caches()
    said = r"its import failed \(OSError: libcudnn.so.9: cannot .*transformer_engine: false$"
    with pytest.raises(RunError, match=said):
        transformer_engine_is_usable()
