"""Dataclasses that declare a model family. The default values describe Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


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
    """Three modules, or a fused module whose rows are all queries, then all keys, then all values.

    With latent attention: the modules whose outputs have heads, of which a model has only some.
    """
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attention_output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two modules, or a fused module whose rows are the rows of the gate, then the rows of the up projection.

    Only the up projection if ``Family.gated_mlp`` is False.
    """
    down: str = "mlp.down_proj"
    post_attention_norm: str | None = None
    """Norm of the attention's output, before it is added to the residual. None if the family has no such norm."""
    post_mlp_norm: str | None = None
    """Norm of the MLP's output, before it is added to the residual."""

    @property
    def mlp(self) -> tuple[str, ...]:
        """Linear layers of a dense MLP."""
        return (*self.gate_up, self.down)

    @property
    def linear(self) -> tuple[str, ...]:
        """Linear layers of a dense layer."""
        return (*self.qkv, self.attention_output, *self.mlp)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): module names, relative to the layer.

    A projection to a small latent vector, a norm and a second projection replace each of the projections of q, k and v.
    k and v share a latent vector. One head of k with the rotary embedding is shared by all heads.
    """

    query: str = "self_attn.q_proj"
    """Projection of q in models without a latent vector of q (``q_lora_rank`` null)."""
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    key_value_down: str = "self_attn.kv_a_proj_with_mqa"
    """Projection to the latent vector of k and v, and to the shared head of k."""
    key_value_norm: str = "self_attn.kv_a_layernorm"
    key_value_up: str = "self_attn.kv_b_proj"
    index: str | None = None
    """Module with a sparse index (DeepSeek-V3.2, arXiv 2512.02556), which selects ``index_topk`` keys for each query.

    Only sequences of at most this length are supported. For them, the index selects all keys, so its weights do not
    affect the result and have no gradient.
    """

    @property
    def by_heads(self) -> tuple[str, str, str]:
        """Modules whose outputs have heads. Tensor parallelism splits them, and adapters are supported for them."""
        return self.query, self.query_up, self.key_value_up


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
    # transformers stacks the experts of a layer in one tensor per projection, and some folders use these names.
    stacked_router: str = "mlp.gate.weight"
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"
    only_stacked: bool = False
    """True if every folder of the family stacks the experts. Adapters on them are not supported."""
    interleaved: bool = False
    """True if the stacked experts are transposed matrices with alternating rows of gate and up, and with biases."""
    chosen: str = "num_experts_per_tok"
    """Field with the number of experts per token."""
    enabled: str | None = None
    """Boolean field that enables the MoE layers (None if the family always has them)."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Tensors of an MoE layer that adds the output of a dense MLP, by their names in ``ParallelMoELayer``.

    The dense MLP has the modules of the shared experts. Empty for other families.
    """
    sigmoid: bool = False
    """True if the router scores each expert with a sigmoid, and scales the scores of the chosen experts to sum to 1.

    Otherwise, the scores are a softmax over the experts.
    """
    bias: str | None = None
    """Tensor that is added to the scores to choose the experts, but not to their weights. Training does not change it.
    """
    groups: tuple[str, str] | None = None
    """Fields with the number of groups of experts, and with the number of groups from which experts are chosen."""
    scaling: str | None = None
    """Field with a factor of the weights of the chosen experts."""
    shared: str | None = None
    """Field with the number of shared experts, which process all tokens and form one MLP."""
    shared_width: str | None = None
    """Field with the intermediate size of this MLP (None if it is the number of shared experts times ``width``)."""
    shared_gate: str = "mlp.shared_experts.gate_proj"
    shared_up: str = "mlp.shared_experts.up_proj"
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_scale: str | None = None
    """Linear layer with one output, whose sigmoid scales the output of the shared experts for each token."""
    first_dense: str | None = None
    """Field with the number of leading layers whose MLP is dense."""
    kinds: str | None = None
    """Field with a list that contains ``dense`` or ``sparse`` for each layer, and takes precedence over the others."""
    latent_size: str | None = None
    """Field with the size of the latent vectors that the routed experts process (None if the family has no such field).

    The router and the shared experts process the hidden states.
    """
    latent_down: str = "mixer.fc1_latent_proj"
    """Projection of the hidden states to latent vectors."""
    latent_up: str = "mixer.fc2_latent_proj"
    """Projection of the sum of the experts' outputs to the hidden size."""


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

    @property
    def linear(self) -> tuple[str, str]:
        """Linear layers. The output projection is last."""
        return f"{self.mixer}.in_proj", f"{self.mixer}.out_proj"


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net layers of a family (arXiv 2412.06464): module names relative to the layer, and fields in
    config.json.

    The norm in front of the mixer is ``Modules.attention_norm``. Value heads share the queries and keys of a key head.
    """

    projections: tuple[str, ...]
    """Linear layers in the mixer whose rows are the rows of queries, keys, values, gates, write strengths (beta) and
    decays (alpha), in this order."""
    by_key_head: bool = False
    """True if there are two such layers, with the rows of the first four and of the last two, each ordered by key head.
    """
    mixer: str = "linear_attn"
    """Module with the projections, conv1d, A_log, dt_bias, norm and out_proj."""
    key_heads: str = "linear_num_key_heads"
    value_heads: str = "linear_num_value_heads"
    key_size: str = "linear_key_head_dim"
    value_size: str = "linear_value_head_dim"
    kernel: str = "linear_conv_kernel_dim"
    """Field with the length of the causal convolution."""

    @property
    def linear(self) -> tuple[str, ...]:
        """Linear layers. The output projection is last."""
        return tuple(f"{self.mixer}.{module}" for module in (*self.projections, "out_proj"))


@dataclass(frozen=True)
class Tower:
    """Vision tower of a family, which transformers' module computes: names of its tensors, and fields in
    ``vision_config``.

    Names are relative to ``prefix``, and names of a block's modules to the block. The attention of all towers has the
    modules ``attn.qkv`` and ``attn.proj``, and the norms of a block are ``norm1`` and ``norm2``.
    """

    prefix: str
    """Prefix of the tower's tensors in a Hugging Face folder."""
    in_memory: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of modules that transformers changes when it loads a folder. PEFT uses the changed names."""
    interleaved: bool = False
    """True if the rows and columns of images alternate in the frequencies of the text model's rotary embedding.

    Otherwise, each axis has consecutive frequencies. The rotary parameter ``mrope_section`` contains their numbers.
    """
    mlp: tuple[str, ...] = ("mlp.linear_fc1", "mlp.linear_fc2")
    """Linear layers of a block's MLP, the last of which is the output."""
    merger: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2")
    """Norm and linear layers of the merger, which maps a square of patches to one embedding."""
    biases: bool = True
    """True if norms and the embedding of patches have biases."""
    positions: str | None = None
    """Field with the number of learned position embeddings (None if the tower has only a rotary embedding)."""
    deepstack: str | None = None
    """Field with the indices of blocks whose outputs, after a merger each, are added to those of the text model's first
    layers (None if the family has no such mergers)."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers uses for fields missing in ``vision_config``."""


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
    qk_norm: bool | str = False
    """True if each head of q and k has a norm before the rotary embedding, or the name of the boolean field in
    config.json that enables these norms."""
    qk_norm_of_layer: bool = False
    """True if these norms normalise all heads of q, and all heads of k, at once."""
    activation: str = "silu"
    """Activation function of the MLP."""
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

    The symbols are ``*`` (attention), ``M`` (Mamba-2), ``G`` (gated delta net), ``-`` (MLP), ``E`` (experts) and ``?``
    (MLP or experts).
    """
    layer_types: str = "layer_types"
    """Field with the type of each layer. If it is missing, every layer has the first type of ``layers``."""
    layer_period: str | None = None
    """Field with a number N: without ``layer_types``, every N-th layer has the second type of ``layers``."""
    pattern: tuple[str, Mapping[str, str]] | None = None
    """Older field with one letter for the type of each layer, and the letters' types."""
    experts: Experts | None = None
    """Description of the MoE layers (None for dense models)."""
    mamba: Mamba | None = None
    """Description of the Mamba-2 layers (None if the family has none)."""
    delta: DeltaNet | None = None
    """Description of the gated delta net layers (None if the family has none)."""
    untrained: tuple[str, ...] = ()
    """Prefixes of tensors that are not trained. They are copied to exported models and not sent to engines."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers uses for fields missing in config.json.

    Only fields that gdpo_nemo reads, and whose default value is not None, are listed.
    """
    activation_field: str = "hidden_act"
    """Field with the activation function of the MLP."""
    norm_offset: bool = False
    """True if norms multiply by 1 + weight instead of by the weight."""
    embedding_scale: bool = False
    """True if the embeddings are multiplied by the square root of the hidden size."""
    windows: Literal["none", "all", "late", "periodic"] = "none"
    """Layers whose queries attend to at most ``sliding_window`` keys.

    - none: no layer; a model with a window is refused.
    - all: every layer, if the model has a window.
    - late: the layers of ``layer_types``, or the layers from index ``max_window_layers`` on if this field is missing.
    - periodic: the layers of ``layer_types``, or all but every N-th layer, where N is ``sliding_window_pattern``.
    """
    layer_rope: bool = False
    """True if each value of ``layer_types`` has different rotary parameters."""
    query_scale: str | None = None
    """Rotary parameter beta that multiplies the query at position p by 1 + beta ln(1 + floor(p / n)).

    n is the rotary parameter ``original_max_position_embeddings``.
    """
    last_layer_full: bool = False
    """True if the last layer has no window, even if ``layer_types`` says otherwise."""
    global_heads: tuple[str, str] | None = None
    """Fields with the size of a head and the number of key and value heads in layers without a window.

    ``per_layer_config``, which newer versions of transformers write, takes precedence. None if all layers have heads of
    the same size.
    """
    keys_as_values: str | None = None
    """Boolean field: if true, the values of layers without a window are the projections of the keys, before their norm.
    The number of heads in ``global_heads`` applies only then."""
    value_norm: bool = False
    """True if each head of v has a norm without a weight."""
    layer_scale: str | None = None
    """Buffer in a layer with a factor of the layer's output, which training does not change (None without a factor)."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Fields that must be 0, false or null, with the names of the features that they enable."""
    score_scale: str | float | None = None
    """Factor of the attention scores, or the field x whose inverse square root is this factor. None for the inverse
    square root of the head size."""
    score_cap: str | None = None
    """Field with the soft cap c of attention scores s, c * tanh(s / c)."""
    logit_cap: str | None = None
    """Field with the soft cap of the logits."""
    sinks: str | None = None
    """Tensor in a layer with the attention sinks, one score per head. None if the family has no sinks."""
    biases: bool = False
    """True if all linear layers of attention, routers and experts have biases."""
    engine_updates: bool = True
    """False if vLLM loses new weights of the family, so that the family cannot be trained with engines."""
    engine_ties: bool = True
    """False if vLLM ignores ``tie_word_embeddings`` and leaves the output layer of a tied model without weights."""
    engine_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that only vLLM reads, with the values that transformers' model implies."""
    swiglu_limit: str | None = None
    """Field with the limit L of a clamped SwiGLU: g * sigmoid(1.702 g) * (u + 1), with g <= L and -L <= u <= L."""
    partial_rotary: bool = False
    """True if the field ``partial_rotary_factor`` may limit the rotary embedding to the first part of each head."""
    rotary_size: str | None = None
    """Older field with the number of elements of a head that are rotated, instead of ``partial_rotary_factor``."""
    rotary_pairs: bool | str = False
    """True if the rotary embedding rotates pairs of neighbouring elements instead of elements of the two halves, or the
    name of the boolean field in config.json that says so."""
    output_gate: bool = False
    """True if the rows of q contain, for each head, the query and a gate whose sigmoid scales the head's output."""
    latent: Latent | None = None
    """Modules of latent attention (None for separate projections of q, k and v)."""
    tower: Tower | None = None
    """Vision tower of image models (None for text models). The other fields then describe the text model."""
