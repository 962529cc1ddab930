"""Dataclasses that declare a model family. The default values describe Llama."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping


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
    """Two modules, or a fused module whose rows are the rows of the gate, then the rows of the up projection.

    Only the up projection if ``Family.gated_mlp`` is False.
    """
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
    gate: str | None
    """None if the experts have no gate (``Family.gated_mlp``)."""
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
    score_function: str = "softmax"
    """Function of the router's logits, ``softmax`` or ``sigmoid``, as in Megatron's TransformerConfig."""
    bias: str | None = None
    """Tensor that is added to the router's scores to select experts. It is not trained."""
    scale: str | None = None
    """Field with a factor on the weights of the selected experts."""
    groups: tuple[str, str] | None = None
    """Fields with the number of groups of experts, and with the number of groups from which a token's experts come."""
    shared: tuple[str, ...] = ()
    """Gate and up projections of the expert that every token uses (only up without gates), then its down projection."""
    shared_width: str | None = None
    """Field with the intermediate size of the shared expert."""
    # transformers stacks the experts of a layer in one tensor per projection, and some folders use these names.
    stacked_router: str = "mlp.gate.weight"
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"


@dataclass(frozen=True)
class Mamba:
    """Mamba-2 layers of a family (arXiv 2405.21060): module names relative to the layer, and fields in config.json."""

    norm: str
    """Norm in front of the mixer."""
    mixer: str
    """Module with in_proj, conv1d, A_log, D, dt_bias, norm and out_proj."""
    heads: str = "mamba_num_heads"
    head_size: str = "mamba_head_dim"
    groups: str = "n_groups"
    """Field with the number of groups of heads that share their input and output matrices (B, C)."""
    state: str = "ssm_state_size"
    """Field with the size of the state of each channel."""
    kernel: str = "conv_kernel"
    """Field with the length of the causal convolution."""


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
    """Activation function of the MLP."""
    activation_field: str = "hidden_act"
    """Field with the activation function."""
    gated_mlp: bool = True
    """False if MLPs and experts have no gate: down(activation(up(x)))."""
    norm_epsilon: str = "rms_norm_eps"
    """Field with the epsilon of the norms."""
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Types of ``ROPE_PARAMETERS`` that both transformers and vLLM support for this family.

    Empty if the attention has no rotary embedding.
    """
    layers: Mapping[str, str] = field(default_factory=lambda: {"full_attention": "*?"})
    """Megatron's Hybrid layers of each type in the field ``layer_types``, all of the same number.

    The symbols are ``*`` (attention), ``M`` (Mamba-2), ``-`` (MLP), ``E`` (experts) and ``?`` (MLP or experts).
    """
    layer_types: str = "layer_types"
    """Field with the type of each layer. If it is missing, every layer has the first type of ``layers``."""
    pattern: tuple[str, Mapping[str, str]] | None = None
    """Older field with one letter for the type of each layer, and the letters' types."""
    experts: Experts | None = None
    """Description of the MoE layers (None for dense models)."""
    mamba: Mamba | None = None
    """Description of the Mamba-2 layers (None if the family has none)."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers uses for fields missing in config.json.

    Only fields that gdpo_nemo reads, and whose default value is not None, are listed.
    """
