"""The model families that can be trained, one declaration each.

The checks of a config.json, the plan's sizes, Megatron's configuration, the conversion of weights and the adapters all
read a family's declaration; nothing else names one. What the declarations do not mention is the same in every family:
norms are RMSNorm before attention and before the MLP (epsilon: rms_norm_eps), the MLP is gated, the rotary embedding
covers whole heads in halves, projections other than q, k and v have no biases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping


@dataclass(frozen=True)
class Modules:
    """Hugging Face names of a model's modules; those of a layer are relative to it."""

    layer: str = "model.layers.{}."
    """``{}`` is the number of the layer."""
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three modules, or one whose rows are all queries, then all keys, then all values."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attention_output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two modules, or one whose rows are the gate's, then the other's."""
    down: str = "mlp.down_proj"

    @property
    def mlp(self) -> tuple[str, ...]:
        """The linear layers of a dense MLP."""
        return (*self.gate_up, self.down)

    @property
    def linear(self) -> tuple[str, ...]:
        """The linear layers of a dense layer."""
        return (*self.qkv, self.attention_output, *self.mlp)


@dataclass(frozen=True)
class Experts:
    """A mixture layer: its modules, relative to the layer (``{}`` is an expert), and the fields of config.json."""

    router: str
    gate: str
    up: str
    down: str
    count: str
    """Field with the number of experts."""
    width: str
    """Field with an expert's intermediate size."""
    normalized: str | None = None
    """Field that says whether the shares of the chosen experts add up to 1; None: they do."""
    dense_layers: str | None = None
    """Field with the numbers of layers whose MLP is dense; None: there is no such layer."""
    period: str | None = None
    """Field N: only the layers N - 1, 2N - 1, ... are mixtures; None: all."""
    # transformers keeps all experts of a layer in one tensor each, and some folders are written that way.
    stacked_router: str = "mlp.gate.weight"
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"


@dataclass(frozen=True)
class Family:
    """What sets one Hugging Face architecture apart; the defaults are those of Llama."""

    model_type: str
    architecture: str
    hub_names: str
    """Regular expression of names on the hub, for what has to be known of a model without its config.json."""
    modules: Modules = Modules()
    qkv_bias: bool | str = False
    """Whether q, k and v have biases, or the field of config.json that says so."""
    qk_norm: bool = False
    """Whether each head of q and k has a norm before the rotary embedding."""
    activation: str = "silu"
    """Of the gate, as ``hidden_act`` names it."""
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Those of ``architectures.ROPE_PARAMETERS`` that transformers and vLLM compute for this family."""
    experts: Experts | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that transformers gives other values than None where a config.json lacks them, as far as we read them."""


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
        rope_types=("default", "linear", "llama3"),  # YaRN of transformers fails where head_dim is null, as it is here
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
"""By ``model_type``."""


def last_name(module: str) -> str:
    """The name by which adapters are asked for: ``q_proj`` of ``self_attn.q_proj``."""
    return module.rpartition(".")[2]


def linear_layers(family: Family) -> tuple[str, ...]:
    """Last names of a dense model's linear layers, the output layer's at the end."""
    modules = family.modules
    return tuple(map(last_name, (*modules.linear, modules.head)))
