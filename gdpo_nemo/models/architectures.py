"""Supported model families, and checks that a model's config.json is supported by its family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from gdpo_nemo.utils.errors import ConfigError


@dataclass(frozen=True)
class Modules:
    """Hugging Face names of a model's modules. The names inside a layer are relative to the layer."""

    layer: str = "model.layers.{}."
    """Prefix of a layer's modules; ``{}`` is the index of the layer."""
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three modules, or a fused module whose rows are all queries, then all keys, then all values."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attention_output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two modules, or a fused module whose rows are the rows of the gate, then the rows of the up projection."""
    down: str = "mlp.down_proj"

    @property
    def mlp(self) -> tuple[str, ...]:
        """Linear layers of a dense MLP."""
        return (*self.gate_up, self.down)

    @property
    def linear(self) -> tuple[str, ...]:
        """Linear layers of a dense layer."""
        return (*self.qkv, self.attention_output, *self.mlp)


@dataclass(frozen=True)
class Experts:
    """MoE layers of a family: module names relative to the layer, and names of fields in config.json.

    ``{}`` in a module name is the index of the expert.
    """

    router: str
    gate: str
    up: str
    down: str
    count: str
    """Field with the number of experts."""
    width: str
    """Field with the intermediate size of an expert."""
    normalized: str | None = None
    """Boolean field that normalizes the weights of the selected experts to sum to 1 (None if they always sum to 1)."""
    dense_layers: str | None = None
    """Field with the indices of layers whose MLP is dense (None if the family has no such field)."""
    period: str | None = None
    """Field with a number N: only every N-th layer is an MoE layer. None if the family lacks the field."""
    # transformers stacks the experts of a layer in one tensor per projection, and some folders use these names.
    stacked_router: str = "mlp.gate.weight"
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"


@dataclass(frozen=True)
class Family:
    """Description of a supported Hugging Face architecture. The defaults describe Llama."""

    model_type: str
    architecture: str
    hub_names: str
    """Regular expression for model names on the hub. The name identifies the family if config.json is not available."""
    modules: Modules = Modules()
    qkv_bias: bool | str = False
    """True if q, k and v have biases, or the name of the boolean field in config.json that enables them."""
    qk_norm: bool = False
    """True if each head of q and k has a norm before the rotary embedding."""
    activation: str = "silu"
    """Activation function of the MLP, as in the field ``hidden_act``."""
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Types of ``ROPE_PARAMETERS`` that both transformers and vLLM support for this family."""
    experts: Experts | None = None
    """Description of the MoE layers (None for dense models)."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers uses for fields missing in config.json.

    Only fields that gdpo_nemo reads, and whose default value is not None, are listed.
    """


_QWEN_WINDOW = {"use_sliding_window": False}

_DECLARATIONS = (
    Family(
        "llama",
        "LlamaForCausalLM",
        r"(meta-llama/(Meta-)?Llama-[23]|TinyLlama/|nvidia/OpenMath2-Llama|deepseek-ai/DeepSeek-R1-Distill-Llama-).*",
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        r"mistralai/Mistral-(7B-(Instruct-)?v0\.[23]|Nemo-).*",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        r"mistralai/Mixtral-.*",
        rope_types=("default", "linear", "llama3"),  # yarn fails in transformers, because Mixtral's head_dim is null
        experts=Experts(
            router="block_sparse_moe.gate",
            gate="block_sparse_moe.experts.{}.w1",
            up="block_sparse_moe.experts.{}.w3",
            down="block_sparse_moe.experts.{}.w2",
            count="num_local_experts",
            width="intermediate_size",
        ),
        defaults={"num_key_value_heads": 8},
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        r"microsoft/[Pp]hi-4(-reasoning.*)?",
        modules=Modules(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        rope_types=("default",),
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        r"(Qwen/(Qwen2(\.5)?-(?!57B-A14B)|QwQ-)|deepseek-ai/DeepSeek-R1-Distill-Qwen-"
        r"|(agentica-org/DeepScaleR|nvidia/OpenMath-Nemotron|nvidia/AceReason-Nemotron)-).*",
        qkv_bias=True,
        defaults={"num_key_value_heads": 32, **_QWEN_WINDOW},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        r"Qwen/Qwen3-[\d.]+B(?!-A\d).*",
        qk_norm=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOW},
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        r"Qwen/Qwen3-(Coder-)?\d+B-A\d+B.*",
        qk_norm=True,
        experts=Experts(
            router="mlp.gate",
            gate="mlp.experts.{}.gate_proj",
            up="mlp.experts.{}.up_proj",
            down="mlp.experts.{}.down_proj",
            count="num_experts",
            width="moe_intermediate_size",
            normalized="norm_topk_prob",
            dense_layers="mlp_only_layers",
            period="decoder_sparse_step",
        ),
        defaults={"num_key_value_heads": 4, "norm_topk_prob": False, **_QWEN_WINDOW},
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        r"ByteDance-Seed/Seed-OSS-.*",
        qkv_bias="attention_bias",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _DECLARATIONS}
"""Families by ``model_type``."""


def last_name(module: str) -> str:
    """Return the last part of a module name, which selects modules for LoRA: ``q_proj`` for ``self_attn.q_proj``."""
    return module.rpartition(".")[2]


def linear_layers(family: Family) -> tuple[str, ...]:
    """Return the last parts of the names of a dense model's linear modules. The output layer comes last."""
    modules = family.modules
    return tuple(map(last_name, (*modules.linear, modules.head)))


ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Supported types of rotary embeddings, and the numeric parameters that each requires.

The types dynamic and longrope are not supported, because their frequencies depend on the sequence length.
"""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes supported by vLLM's CPU kernels."""

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
"""Fields that config.json must contain. For a missing field, transformers would use a default size."""

BIASES = ("attention_bias", "attention_out_bias", "mlp_bias")
"""Fields that enable projection biases. Only the field named by ``Family.qkv_bias`` may be true."""

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Fields with the number of experts. The field's name depends on the family."""


def check_family(content: Mapping[str, Any]) -> Family:
    """Check that a model configuration is supported, and return its family.

    Args:
        content: fields of config.json.

    Raises:
        ConfigError: if the family or a feature of the model is not supported. The message lists the supported values.
    """
    family = _family(content)
    names = content.get("architectures")
    if names and not isinstance(names, list):
        raise _model_error(f"architectures in the model's config.json must be a list, got {names!r}")
    if names and family.architecture not in names:
        raise _model_error(
            f"architecture {', '.join(map(str, names))} is not supported; supported: {family.architecture}"
        )
    fields = with_defaults(content)
    _check_window(fields)
    activation = fields.get("hidden_act", family.activation)
    if activation != family.activation:
        raise _model_error(f"activation {activation!r} is not supported; supported: {family.activation}")
    for key in BIASES:
        if fields.get(key) and key != family.qkv_bias:
            raise _model_error(f"{key} (projection biases) is not supported for {family.model_type}")
    _check_not_quantised(fields)
    _check_rope(fields, family)
    return family


def _check_not_quantised(fields: Mapping[str, Any]) -> None:
    quantization = fields.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    key = "quantization_config" if quantization else "quantization"  # MLX writes the key quantization
    if quantization or fields.get("quantization"):
        by = method or ("MLX" if fields.get("quantization") else None)
        origin = f", these are by {by}" if by else ""
        raise _model_error(
            f"quantised weights ({key}) are not supported{origin}; specify the folder of the unquantised model"
        )


def _check_window(fields: Mapping[str, Any]) -> None:
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    if window is not None:
        raise _model_error(f"sliding-window attention ({window} tokens) is not supported")
    layers = fields.get("layer_types") or []
    if not isinstance(layers, list):
        raise _model_error(f"layer_types must be a list of texts, got {str(layers)[:40]}")
    kinds = sorted({str(kind) for kind in layers} - {"full_attention"})
    if kinds:
        raise _model_error(
            f"layers of type {', '.join(kinds)} (layer_types) are not supported; supported: full_attention"
        )


def _check_rope(fields: Mapping[str, Any], family: Family) -> None:
    rope = rope_of(fields)
    kind = rope["rope_type"]
    if kind not in family.rope_types:
        supported = ", ".join(family.rope_types)
        raise _model_error(f"rope scaling {kind!r} is not supported for {family.model_type}; supported: {supported}")
    for key in ROPE_PARAMETERS[kind]:
        if not isinstance(rope.get(key), (int, float)):
            raise _model_error(f"rope scaling {kind!r} requires the number {key}")
    if rope.get("partial_rotary_factor", fields.get("partial_rotary_factor")) not in (None, 1):
        raise _model_error("a partial rotary embedding (partial_rotary_factor) is not supported")


def with_defaults(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add transformers' defaults for the family to the fields of a config.json. Return the result."""
    return {**FAMILIES[content["model_type"]].defaults, **content}


def _family(content: Mapping[str, Any]) -> Family:
    kind = content.get("model_type")
    known = ", ".join(sorted(FAMILIES))
    if not isinstance(kind, str):
        raise _model_error(f"the model's config.json has no model_type; supported: {known}")
    if kind not in FAMILIES:
        nested = " (a text model inside another model, text_config)" if "text_config" in content else ""
        raise _model_error(f"model type {kind!r}{nested} is not supported; supported: {known}")
    return FAMILIES[kind]


def check_model_content(content: Mapping[str, Any]) -> Family:
    """Check like ``check_family``, and also check that all sizes are positive integers. Return the family.

    Raises ConfigError.
    """
    family = check_family(content)
    for key in SIZES:
        _check_size(key, content.get(key))
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        if content.get(key) is not None:
            _check_size(key, content[key])
    experts = family.experts
    if experts:
        _check_size(experts.count, num_experts(content))
        for key in (experts.width, "num_experts_per_tok"):
            _check_size(key, content.get(key))
        if experts.period and content.get(experts.period) is not None:
            _check_size(experts.period, content[experts.period])
    return family


_LARGEST_SIZE = 2**31
"""Maximum value of a size in config.json. This maximum limits loops over layers and experts."""


def _check_size(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
        raise _model_error(f"{key} in the model's config.json must be a positive integer, got {repr(value)[:40]}")


def num_experts(content: Mapping[str, Any]) -> int:
    """Return the number of experts in an MoE layer, or 0 for a dense model."""
    if not FAMILIES[content["model_type"]].experts:
        return 0
    return next((content[key] for key in EXPERT_COUNTS if content.get(key)), 0)


def mixture_layers(content: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it is an MoE layer."""
    layers = range(content["num_hidden_layers"])
    experts = FAMILIES[content["model_type"]].experts
    if experts is None:
        return [False for _ in layers]
    dense = (content.get(experts.dense_layers) if experts.dense_layers else None) or ()
    period = (content.get(experts.period) if experts.period else None) or 1
    return [layer not in dense and (layer + 1) % period == 0 for layer in layers]


def head_size(content: Mapping[str, Any]) -> int:
    """Return the size of one attention head."""
    return int(with_defaults(content).get("head_dim") or content["hidden_size"] // content["num_attention_heads"])


def key_value_heads(content: Mapping[str, Any]) -> int:
    """Return the number of key and value heads."""
    return int(with_defaults(content).get("num_key_value_heads") or content["num_attention_heads"])


def has_qkv_bias(content: Mapping[str, Any]) -> bool:
    """Return whether the projections of queries, keys and values have biases."""
    bias = FAMILIES[content["model_type"]].qkv_bias
    return bool(with_defaults(content).get(bias)) if isinstance(bias, str) else bias


def rope_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the rotary embedding, including ``rope_type``.

    They are read from ``rope_parameters``, or from the older field ``rope_scaling``.
    """
    parameters = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise _model_error(f"the rotary parameters in the model's config.json must be an object, got {parameters!r}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return {**parameters, "rope_type": "default" if kind is None else kind}


def check_adapted_layers(targets: Sequence[str], family: Family, tied: bool) -> None:
    """Check that LoRA adapters can be added to the target modules.

    Args:
        targets: last parts of module names, as in ``policy.lora.target_modules``.
        tied: True if the output layer shares its weight with the embedding.

    Raises:
        ConfigError: if the model has no such module, or adapters are not supported for it.
    """
    key = "policy.lora.target_modules"
    known = linear_layers(family)
    missing = [name for name in targets if name not in known]
    if missing:
        raise ConfigError(
            f"{key}: a model of type {family.model_type} has no {', '.join(missing)}; its linear layers: "
            f"{', '.join(known)}"
        )
    dense = [last_name(module) for module in family.modules.mlp]
    if family.experts and set(dense) & set(targets):
        raise ConfigError(f"{key}: adapters on the model's experts are not supported; leave out {', '.join(dense)}")
    head = last_name(family.modules.head)
    if tied and head in targets:
        raise ConfigError(
            f"{key}: the model's {head} is tied to the embedding (tie_word_embeddings) and gets no adapter; omit it"
        )


def _model_error(problem: str) -> ConfigError:
    return ConfigError(f"policy.model_name: {problem}")
