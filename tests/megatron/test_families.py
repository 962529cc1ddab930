"""A family's declaration says what transformers does with its models, and refuses the rest by name."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import layouts
import pytest
import tiny_models
import tiny_vision
import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from transformers import AutoConfig, Gemma2Config, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.schema import Config, LoraConfig, PolicyConfig
from gdpo_nemo.megatron.layers import Attention, NormAndAdd, RMSNorm, _changed, select_attention
from gdpo_nemo.megatron.logprobs import use_fused_logprobs
from gdpo_nemo.megatron.model_config import description_of, layer_attentions, rotary
from gdpo_nemo.models import architectures, family_checks
from gdpo_nemo.models.architectures import last_name
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.models.family_checks import SIZES
from gdpo_nemo.planning.shape import adapters, on_rank
from gdpo_nemo.utils.errors import ConfigError


def test_an_unknown_family_is_refused_with_the_list_of_known_ones():
    with pytest.raises(ConfigError) as refusal:
        description_of(GPT2Config())
    assert "gpt2" in str(refusal.value)
    assert all(name in str(refusal.value) for name in FAMILIES)


@pytest.mark.parametrize(
    "config, message",
    [
        (LlamaConfig(sliding_window=4096), "sliding-window"),
        (LlamaConfig(layer_types=["sliding_attention"] * 32), "sliding_attention"),
        (MistralConfig(sliding_window=0), "sliding_window"),
        (Gemma2Config(layer_types=["chunked_attention"] * 26), "chunked_attention"),
        (Gemma2Config(use_bidirectional_attention=True), "bidirectional"),
    ],
)
def test_windows_that_the_family_lacks_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        description_of(config)


def test_every_declared_family_has_a_tiny_model_that_all_other_tests_take():
    assert {*(fields["model_type"] for fields in tiny_models.MODELS.values()), *tiny_vision.KINDS} == set(FAMILIES)


def test_the_plan_counts_experts_on_the_pipeline_stages_that_have_them():
    content = tiny_models.hf_config("qwen3-moe-mixed").to_dict()
    layout = resolve_layout(Config(policy=PolicyConfig(megatron_cfg=layouts.parse("PP2").config)))
    shape = family_checks.describe({**content, "mlp_only_layers": [0, 2, 3]})
    matrices = 4 * 3 * content["hidden_size"] * content["moe_intermediate_size"]
    assert [on_rank(shape, layout, stage)[1] for stage in (0, 1)] == [matrices, 0]


@pytest.mark.parametrize("share_a", [False, True])
@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_the_plan_counts_the_parameters_of_the_adapters(name, share_a):
    from transformers import AutoModelForCausalLM

    config = tiny_models.hf_config(name)
    family = FAMILIES[config.model_type]
    modules = family.modules
    shape = description_of(config)
    *targets, _ = architectures.linear_layers(family)[0 if family.latent else 1 :]
    model = AutoModelForCausalLM.from_config(config)
    adapted = [module for key, module in model.named_modules() if last_name(key) in targets]
    linear = [module for module in adapted if isinstance(module, torch.nn.Linear)]
    expected = 3 * sum(module.in_features + module.out_features for module in linear)
    symbols, experts = "".join(shape.symbols), family.experts
    separate = experts and not experts.only_stacked and len({experts.gate, experts.up, experts.down} - {None})
    matrices = symbols.count("E") * shape.experts * (separate or 0)
    of_experts = 3 * matrices * (shape.expert_hidden + shape.expert_ffn)
    if share_a:  # k and v, gate and up, the projections of a delta net
        with_values = [heads for heads in shape.layer_heads if not heads.keys_as_values]
        shared = symbols.count("*") * (len(modules.qkv) > 1 and not family.latent) * len(with_values) // shape.layers
        shared += symbols.count("-") * (len(modules.gate_up) - 1)
        shared += symbols.count("G") * (len(family.delta.projections) - 1 if family.delta else 0)
        gated = family.gated_mlp and symbols.count("E")
        expected -= 3 * config.hidden_size * (shared + gated * bool(shape.shared_ffn))
        of_experts -= 3 * config.hidden_size * gated * shape.experts * bool(separate)
    lora = LoraConfig(rank=3, target_modules=targets, share_a=share_a)
    alone = resolve_layout(Config())
    assert adapters(shape, alone, 0, lora) == (expected, of_experts)
    assert adapters(shape, dataclasses.replace(alone, expert=2), 0, lora) == (expected, of_experts // 2)


def caps(family) -> list[str]:
    """Names of the fields that scale or cap scores and logits."""
    return [field for field in (family.score_scale, family.score_cap, family.logit_cap) if field]


@pytest.mark.parametrize("name", FAMILIES)
def test_omitted_config_fields_have_the_defaults_of_transformers(name):
    sizes = dict.fromkeys(SIZES, 96) | dict(num_attention_heads=12)
    family = FAMILIES[name]
    whole = AutoConfig.for_model(name, **({"text_config": sizes} if family.tower else sizes))
    config = whole.get_text_config()
    filled = config.to_dict()
    bare, full = (ModelDescription.of(content) for content in ({"model_type": name, **sizes}, whole.to_dict()))
    assert bare.head_size == full.head_size
    assert bare.key_value_heads == config.num_key_value_heads
    assert bare.moe_layers == full.moe_layers
    ours = bare.fields
    assert bare.windows == full.windows
    for key in (*caps(family), "tie_word_embeddings", *family_checks.BIASES):
        assert bool(ours.get(key)) == bool(filled.get(key)), key
    assert filled[family.activation_field] == family.activation
    shared = family.defaults.keys() & filled.keys() - {"sliding_window"}  # transformers removes a disabled window
    assert {key: filled[key] for key in shared} == {key: ours[key] for key in shared}
    if isinstance(family.qkv_bias, str):
        assert bare.qkv_bias == filled[family.qkv_bias]
    assert not any(bare.indexed_layers) or all(kind == "full" for kind in filled["indexer_types"])


@pytest.mark.parametrize(
    "fields",
    [dict(index_topk_freq=3, index_skip_topk_offset=1), dict(index_topk_freq=2), dict(index_topk_pattern="FSSFSFF"),
     dict(indexer_types=["full", "shared", *["full"] * 5])],
)  # fmt: skip
def test_layers_with_a_sparse_index_are_those_of_transformers(fields):
    bare = dict(model_type="glm_moe_dsa", num_hidden_layers=7, **fields)
    expected = [kind == "full" for kind in AutoConfig.for_model(**bare).indexer_types]
    assert ModelDescription.of(bare).indexed_layers == expected and not all(expected)


def test_an_older_field_with_the_rotated_size_is_that_of_transformers():
    bare = dict(tiny_models.MODELS["minimax-m2"], hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    share = AutoConfig.for_model(**bare).rope_parameters["partial_rotary_factor"]
    assert ModelDescription.of(bare).rotary_size() == 8 == 16 * share
    assert ModelDescription.of({**bare, "partial_rotary_factor": 0.25}).rotary_size() == 4


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_the_modules_that_are_declared_are_those_of_transformers(name):
    from transformers import AutoModelForCausalLM

    config = tiny_models.hf_config(name)
    family = FAMILIES[config.model_type]
    model = AutoModelForCausalLM.from_config(config)
    kinds = {key: type(module) for key, module in model.named_modules()}
    described = description_of(config)
    symbols = described.symbols
    attention = [*family.modules.qkv, family.modules.attention_output]
    prefix = in_memory(family, next(number for number, found in enumerate(symbols) if "*" in found))
    if family.latent:  # a model has one of two modules for q
        attention = [module for module in attention if prefix + module in kinds]
        assert len(attention) == 3
    recurrent = {symbol: part.linear for symbol, part in (("M", family.mamba), ("G", family.delta)) if part}
    parts = {"*": attention, "-": family.modules.mlp, **recurrent}
    for symbol, linear in parts.items():
        layer = next((number for number, found in enumerate(symbols) if symbol in found), None)
        if layer is not None:
            assert all(kinds[in_memory(family, layer) + module] is torch.nn.Linear for module in linear)
    inside = {key.removeprefix(prefix) for key, kind in kinds.items() if key.startswith(prefix)}
    norms = family.modules.post_attention_norm, family.modules.post_mlp_norm
    assert {norm for norm in norms if norm} <= inside
    assert (family.modules.q_norm in inside) == (family.modules.k_norm in inside) == described.qk_norm
    bias = model.get_submodule(prefix + attention[0]).bias
    assert (bias is not None) == described.qkv_bias


def in_memory(family, layer: int) -> str:
    """Prefix of a layer's modules in transformers, which calls the ``backbone`` of files ``model``."""
    return family.modules.layer.format(layer).replace("backbone.", "model.")


def test_which_layers_are_mixtures_follows_from_the_declared_fields():
    content = {**tiny_models.hf_config("qwen3-moe").to_dict(), "num_hidden_layers": 6}
    placed = ModelDescription.of({**content, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert placed.moe_layers == (1, 5)


@pytest.mark.parametrize(
    "fields",
    [
        dict(model_type="qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=2),
        dict(model_type="gemma2", sliding_window=64),
        dict(model_type="gemma3_text", sliding_window=64, sliding_window_pattern=3),
        dict(model_type="gpt_oss"),
        dict(model_type="phi3", sliding_window=2047),
    ],
    ids=lambda fields: fields["model_type"],
)
def test_windows_of_layers_are_those_of_transformers(fields):
    """Also if config.json lacks ``layer_types``, as in older folders."""
    bare = dict(num_hidden_layers=7, **fields)
    config = AutoConfig.for_model(**bare)
    kinds = getattr(config, "layer_types", ["sliding_attention"] * 7)
    expected = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    windows = [list(ModelDescription.of(content).windows) for content in (bare, config.to_dict())]
    assert windows == [expected, expected]


@pytest.mark.parametrize("model", ["gemma2", "gpt-oss", "mistral-window"])
def test_layers_beyond_transformer_engine_select_flex_attention(model):
    special = description_of(tiny_models.hf_config(model)).special_attention
    assert special == "sliding windows"
    for sharing in (False, True):
        assert select_attention("auto", True, sharing, special) is Attention.FLEX
        assert select_attention("auto", False, sharing, special) is Attention.PACKED
    assert description_of(tiny_models.hf_config("qwen2")).special_attention is None


def test_a_specification_is_changed_by_path_and_its_original_stays():
    attention = ModuleSpec(
        SelfAttention, submodules=SelfAttentionSubmodules(linear_qkv=1, core_attention=2, linear_proj=3)
    )
    stock = ModuleSpec(HybridStack, submodules=HybridStackSubmodules(attention_layer=attention, mlp_layer=3))
    found = _changed(
        stock, {"attention_layer.core_attention": 4, "attention_layer.module": 5, "attention_layer.params": {"a": 6}}
    )
    assert found.module is HybridStack and found.submodules.mlp_layer == 3
    assert found.submodules.attention_layer == ModuleSpec(
        5, {"a": 6}, SelfAttentionSubmodules(linear_qkv=1, core_attention=4, linear_proj=3)
    )
    assert stock.submodules.attention_layer is attention
    assert attention == ModuleSpec(
        SelfAttention, {}, SelfAttentionSubmodules(linear_qkv=1, core_attention=2, linear_proj=3)
    )
    with pytest.raises(TypeError, match="core_attentoin"):
        _changed(stock, {"attention_layer.core_attentoin": 4})


def test_layers_without_a_window_have_their_own_heads_with_old_and_new_fields():
    """``per_layer_config`` replaces the older fields in files that transformers writes."""
    old = {**tiny_models._SHAPE, **tiny_models.MODELS["gemma4"]}
    new = tiny_models.hf_config("gemma4").to_dict()
    assert "global_head_dim" in old and "global_head_dim" not in new and "per_layer_config" in new
    for content in (old, new):
        windowed, full = family_checks.describe(content).layer_heads[:2]
        assert windowed == (16, 4, False) and full == (24, 2, True)
    ungated = ModelDescription.of({**old, "attention_k_eq_v": False})
    assert ungated.layer_heads[1] == (24, 4, False)
    last = {**old, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}
    assert ModelDescription.of(last).windows == (None,) * 4  # transformers changes the type of the last layer


@pytest.mark.parametrize(
    "change, message",
    [
        ({"1": {"head_dim": 24}}, "must be equal in all layers of one type"),
        ({"1": {"sliding_window": 4}}, "may contain only head_dim and num_key_value_heads"),
        ({"7": {"head_dim": 24}}, "layer 7, which does not exist"),
        ({"1": {"head_dim": 0}}, "per_layer_config.head_dim in the model's config.json must be a positive integer"),
        ([24], "may contain only head_dim"),
    ],
)
def test_fields_of_layers_that_do_not_fit_are_refused(change, message):
    content = {**tiny_models.hf_config("gemma4").to_dict(), "per_layer_config": change}
    with pytest.raises(ConfigError, match=message):
        family_checks.describe(content)


def test_the_fused_kernels_are_refused_for_capped_logits():
    cap = description_of(tiny_models.hf_config("gemma2")).logit_cap
    assert cap == 2.5 and use_fused_logprobs(None, cap) is False
    with pytest.raises(ConfigError, match="fused_logprobs: true is not supported, because the model has a soft cap"):
        use_fused_logprobs(True, cap)


def test_norms_after_layers_store_nothing_in_passes_without_gradients():
    """Megatron enables gradients around them, so that a pass without gradients would keep the inputs of all layers."""
    config = SimpleNamespace(hidden_size=4, layernorm_epsilon=1e-6, params_dtype=torch.float32,
                             sequence_parallel=False, layernorm_zero_centered_gamma=True)  # fmt: skip
    add = NormAndAdd(config, RMSNorm)(training=True, fused=False)
    output = torch.ones(2, 4)
    assert not add((output, None), output, 0.0).requires_grad
    assert add((output.requires_grad_(), None), output, 0.0).requires_grad


def test_sliding_window_that_is_switched_off_is_accepted():
    assert description_of(Qwen2Config(use_sliding_window=False, sliding_window=64)).family is FAMILIES["qwen2"]


def test_another_activation_is_refused():
    with pytest.raises(ConfigError, match="gelu"):
        description_of(Qwen2Config(hidden_act="gelu"))


ROPE = dict(
    rope_theta=5e5, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)  # fmt: skip


@pytest.mark.parametrize("name, kind", [(name, kind) for name in FAMILIES for kind in FAMILIES[name].rope_types])
def test_rotary_frequencies_are_those_of_transformers(name, kind):
    from transformers import AutoModel

    keys = ("rope_theta", *family_checks.ROPE_PARAMETERS[kind])
    rope = dict(rope_type=kind, **{key: ROPE[key] for key in keys})
    if FAMILIES[name].layer_rope:
        rope = dict(full_attention=rope, sliding_attention=dict(rope_type="default", rope_theta=1e3))
    if tower := FAMILIES[name].tower:
        rope |= dict(mrope_section=[2, 1, 1], mrope_interleaved=tower.interleaved)
        text = dict(tiny_models._SHAPE, rope_parameters=rope, head_dim=8)
        vision = dict(out_hidden_size=32, deepstack_visual_indexes=[0])
        tokens = dict(image_token_id=1, video_token_id=2)
        config = AutoConfig.for_model(name, text_config=text, vision_config=vision, **tokens)
    else:
        tiny = next(tiny for tiny, fields in tiny_models.MODELS.items() if fields["model_type"] == name)
        config = tiny_models.hf_config(tiny, rope_parameters=rope)
    described = description_of(config)
    theirs = AutoModel.from_config(config.get_text_config()).rotary_emb
    for layers in sorted({layer.rope for layer in layer_attentions(config, described)}):
        frequencies, scaling = rotary(config, described, layers)
        prefix = f"{layers}_" if layers else ""
        assert torch.equal(frequencies, getattr(theirs, f"{prefix}inv_freq"))
        assert scaling == getattr(theirs, f"{prefix}attention_scaling")


YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    "trait", [{"attention_bias": True}, {"mlp_bias": True}, {"rope_parameters": {**YARN, "rope_type": "dynamic"}}]
)
def test_models_with_tensors_that_the_conversion_would_drop_are_refused(trait):
    with pytest.raises(ConfigError, match=next(iter(trait)).split("_")[0]):
        description_of(LlamaConfig(**trait))


@pytest.mark.slow
def test_the_sizes_that_are_promised_are_those_of_the_installed_engine():
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from gdpo_nemo.config.model_checks import CPU_EXPERT_MULTIPLE
    from gdpo_nemo.models.architectures import CPU_HEAD_SIZES

    assert CPUUnquantizedExperts.output_alignment == CPU_EXPERT_MULTIPLE

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
