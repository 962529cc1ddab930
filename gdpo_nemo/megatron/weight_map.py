"""Names and tensor-parallel splits of Megatron parameters and of the corresponding Hugging Face tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from gdpo_nemo.models.architectures import Heads
from gdpo_nemo.models.families import FAMILIES, DeltaNet, Experts, Family, Latent, Mamba

# Ways to split a weight over tensor-parallel ranks. The last six also define the order of the rows in Megatron.
REPLICATED = "replicated"
ROWS = "rows"
COLUMNS = "columns"
QKV_ROWS = "rows by query group: queries, key, value"
GATED_ROWS = "rows of the gate, then rows of the other half, on each rank"
MAMBA_ROWS = "rows of each section of Mamba-2's input projection, on each rank"
CONVOLUTION_ROWS = "rows of the sections of Mamba-2's convolution, on each rank"
DELTA_ROWS = "rows of each section of a gated delta net's input projections, on each rank"
DELTA_CONVOLUTION_ROWS = "rows of the sections of a gated delta net's convolution, on each rank"

SCORE = "score.weight"
"""Name of a reward model's head, both in Megatron's model and in transformers' sequence classifiers."""


EXPERT_BIAS = "mlp.router.expert_bias"
"""Name of the buffer that a router adds to its scores to choose experts."""
LAYER_SCALE = "mlp_bda.scale"
"""Name of the buffer with a factor of a layer's output."""

_INDEX = "self_attention.indexer."
_INDEX_WEIGHTS = {
    "query": "wq_b.weight",
    "key": "wk.weight",
    "norm": "k_norm.weight",
    "norm_bias": "k_norm.bias",
    "heads": "weights_proj.weight",
}
"""Names of a sparse index's buffers, and of its tensors."""


def is_constant(name: str) -> bool:
    """Return whether a buffer of Megatron's model is a weight, which training does not change."""
    return name.endswith((EXPERT_BIAS, LAYER_SCALE)) or _INDEX in name


@dataclass(frozen=True)
class Weight:
    """A Megatron parameter and the corresponding Hugging Face tensors."""

    split: str
    """Split over tensor-parallel ranks: ``REPLICATED``, ``ROWS``, ``COLUMNS`` or one of the others above."""
    sources: tuple[str, ...]
    """Names of the Hugging Face tensors. The names for an expert contain ``{}`` in place of its index."""
    expert: int | None = None
    """Local index of the expert on its rank, or None if the parameter does not belong to an expert."""
    stacked: str | None = None
    """Name of the tensor that replaces the sources in folders that store all experts of a layer together.

    The shape of this tensor is [experts, ...] if ``expert`` is set.
    """
    interleaved: bool = False
    """True if the stored tensor is transposed, and its rows of gate and up alternate (``Experts.interleaved``)."""
    vocabulary: bool = False
    """True if each row belongs to a token of the vocabulary. Megatron pads these rows."""
    heads: Heads | None = None
    """Heads of the layer of ``QKV_ROWS``."""


def _weights(split: str, *modules: str, **options: Any) -> Weight:
    return Weight(split, tuple(f"{module}.weight" for module in modules), **options)


@cache
def top_weights(model_type: str) -> dict[str, Weight]:
    """Return the weights outside the layers, by their Megatron names."""
    modules = FAMILIES[model_type].modules
    return {
        "embedding.word_embeddings.weight": _weights(ROWS, modules.embedding, vocabulary=True),
        "output_layer.weight": _weights(ROWS, modules.head, vocabulary=True),
        "decoder.final_norm.weight": _weights(REPLICATED, modules.final_norm),
        SCORE: Weight(REPLICATED, (SCORE,)),
    }


def _attention_weights(family: Family) -> dict[str, Weight]:
    modules = family.modules
    norm = ROWS if family.qk_norm_of_layer else REPLICATED
    return {
        "self_attention.linear_qkv.weight": _weights(QKV_ROWS, *modules.qkv),
        "self_attention.linear_qkv.bias": Weight(QKV_ROWS, tuple(f"{module}.bias" for module in modules.qkv)),
        "self_attention.q_layernorm.weight": _weights(norm, modules.q_norm),
        "self_attention.k_layernorm.weight": _weights(norm, modules.k_norm),
    }


def _latent_weights(latent: Latent) -> dict[str, Weight]:
    index = _INDEX_WEIGHTS if latent.index else {}
    return {
        **{_INDEX + name: Weight(REPLICATED, (f"{latent.index}.{tensor}",)) for name, tensor in index.items()},
        "self_attention.linear_q_proj.weight": _weights(ROWS, latent.query),
        "self_attention.linear_q_down_proj.weight": _weights(REPLICATED, latent.query_down),
        "self_attention.q_layernorm.weight": _weights(REPLICATED, latent.query_norm),
        "self_attention.linear_q_up_proj.weight": _weights(ROWS, latent.query_up),
        "self_attention.linear_kv_down_proj.weight": _weights(REPLICATED, latent.key_value_down),
        "self_attention.kv_layernorm.weight": _weights(REPLICATED, latent.key_value_norm),
        "self_attention.linear_kv_up_proj.weight": _weights(ROWS, latent.key_value_up),
    }


@cache
def dense_weights(model_type: str) -> dict[str, Weight]:
    """Return the weights of layers with attention and a dense MLP, by their Megatron names in a Hybrid layer.

    The sources are relative to the Hugging Face layer.
    """
    family = FAMILIES[model_type]
    modules = family.modules
    attention_norm = _weights(REPLICATED, modules.attention_norm)
    mlp_norm = _weights(REPLICATED, modules.mlp_norm)
    post_norms = {"self_attn_bda": modules.post_attention_norm, "mlp_bda": modules.post_mlp_norm}
    scale = {LAYER_SCALE: Weight(REPLICATED, (family.layer_scale,))} if family.layer_scale else {}
    sinks = {"self_attention.core_attention.sinks": Weight(ROWS, (family.sinks,))} if family.sinks else {}
    attention = _latent_weights(family.latent) if family.latent else _attention_weights(family)
    return {
        **scale,
        **sinks,
        **{f"{name}.norm.weight": _weights(REPLICATED, norm) for name, norm in post_norms.items() if norm},
        # Each norm has a second name, because TransformerEngine fuses the norm with the linear layer that follows.
        "input_layernorm.weight": attention_norm,
        "self_attention.linear_qkv.layer_norm_weight": attention_norm,
        **attention,
        "self_attention.linear_proj.weight": _weights(COLUMNS, modules.attention_output),
        "self_attention.linear_proj.bias": Weight(REPLICATED, (f"{modules.attention_output}.bias",)),
        "pre_mlp_layernorm.weight": mlp_norm,
        "mlp.linear_fc1.layer_norm_weight": mlp_norm,
        "mlp.linear_fc1.weight": _weights(GATED_ROWS if family.gated_mlp else ROWS, *modules.gate_up),
        "mlp.linear_fc2.weight": _weights(COLUMNS, modules.down),
    }


@cache
def _mamba_weights(mamba: Mamba) -> dict[str, Weight]:
    """Return the weights of a Mamba-2 layer, like ``dense_weights``."""
    norm = _weights(REPLICATED, mamba.norm)
    mixer = f"{mamba.mixer}."
    return {
        "norm.weight": norm,
        "mixer.in_proj.layer_norm_weight": norm,
        "mixer.in_proj.weight": _weights(MAMBA_ROWS, f"{mixer}in_proj"),
        "mixer.conv1d_weight": _weights(CONVOLUTION_ROWS, f"{mixer}conv1d"),
        "mixer.conv1d_bias": Weight(CONVOLUTION_ROWS, (f"{mixer}conv1d.bias",)),
        "mixer.A_log": Weight(ROWS, (f"{mixer}A_log",)),
        "mixer.D": Weight(ROWS, (f"{mixer}D",)),
        "mixer.dt_bias": Weight(ROWS, (f"{mixer}dt_bias",)),
        "mixer.norm.weight": _weights(ROWS, f"{mixer}norm"),
        "mixer.out_proj.weight": _weights(COLUMNS, f"{mixer}out_proj"),
    }


@cache
def _delta_weights(delta: DeltaNet, norm: str) -> dict[str, Weight]:
    """Return the weights of a gated delta net layer, like ``dense_weights``. The layer and attention layers have
    parameters of equal names."""
    mixer = f"{delta.mixer}."
    return {
        "self_attention.in_proj.layer_norm_weight": _weights(REPLICATED, norm),
        "self_attention.in_proj.weight": _weights(DELTA_ROWS, *(mixer + module for module in delta.projections)),
        "self_attention.conv1d.weight": _weights(DELTA_CONVOLUTION_ROWS, f"{mixer}conv1d"),
        "self_attention.A_log": Weight(ROWS, (f"{mixer}A_log",)),
        "self_attention.dt_bias": Weight(ROWS, (f"{mixer}dt_bias",)),
        "self_attention.out_norm.weight": _weights(REPLICATED, f"{mixer}norm"),
        "self_attention.out_proj.weight": _weights(COLUMNS, f"{mixer}out_proj"),
    }


def _gate_up(gate: str | None, up: str) -> tuple[str, ...]:
    """Return the split and the modules of the first linear layer of an expert."""
    return (ROWS, up) if gate is None else (GATED_ROWS, gate, up)


# local_experts.3.linear_fc1.weight, or linear_fc1.weight3 in TransformerEngine's grouped linear layers
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?linear_fc([12])\.(weight|bias)(\d*)")


_LATENT_PROJECTIONS = ("mlp.fc1_latent_proj.weight", "mlp.fc2_latent_proj.weight")
"""Projections of the hidden states to the latent vectors of experts, and back."""


STACKED_EXPERT = re.compile(r"(.+\.experts\.\w+)\.(\d+)")
"""Name of an expert's slice of a stacked tensor: the name of the tensor, and the index of the expert."""


def _stacked_weight(experts: Experts, is_first: bool, is_bias: bool, number: int) -> Weight:
    """Return the weight or bias of a linear layer of expert ``number``, which no folder stores separately."""
    tensor = experts.stacked_gate_up if is_first else experts.stacked_down
    split = GATED_ROWS if is_first else REPLICATED if is_bias else COLUMNS
    tensor += "_bias" * is_bias
    return Weight(split, (tensor + ".{}",), expert=number, stacked=tensor, interleaved=experts.interleaved)


def layer_weight(family: Family, name: str) -> Weight:  # noqa: C901
    """Return the weight of the Megatron parameter ``name`` in a Hybrid layer.

    The sources are relative to the Hugging Face layer.
    """
    experts = family.experts
    if experts is not None and name == "mlp.router.weight":
        return _weights(REPLICATED, experts.router, stacked=experts.stacked_router)
    if experts is not None and (source := experts.beside.get(name.removeprefix("mlp."))):
        return Weight(REPLICATED, (source,))
    if experts is not None and name == "mlp.router.bias":
        return Weight(REPLICATED, (f"{experts.router}.bias",))
    if experts is not None and experts.bias and name == EXPERT_BIAS:
        return Weight(REPLICATED, (experts.bias,))
    if experts is not None and name == "mlp.shared_experts.linear_fc1.weight":
        return _weights(*_gate_up(experts.shared_gate if family.gated_mlp else None, experts.shared_up))
    if experts is not None and name == "mlp.shared_experts.linear_fc2.weight":
        return _weights(COLUMNS, experts.shared_down)
    if experts is not None and experts.latent_size and name in _LATENT_PROJECTIONS:
        return _weights(REPLICATED, (experts.latent_down, experts.latent_up)[_LATENT_PROJECTIONS.index(name)])
    if experts is not None and experts.shared_scale and name == "mlp.shared_experts.gate_weight":
        return _weights(REPLICATED, experts.shared_scale)
    if family.delta is not None and (weight := _delta_weights(family.delta, family.modules.attention_norm).get(name)):
        return weight
    if family.mamba is not None and name.startswith(("norm.", "mixer.")):
        return _mamba_weights(family.mamba)[name]
    match = _EXPERT.fullmatch(name)
    if match is None or experts is None:
        return dense_weights(family.model_type)[name]
    number = int(match[1] or match[4])
    if experts.only_stacked:
        return _stacked_weight(experts, match[2] == "1", match[3] == "bias", number)
    if match[2] == "1":
        gate_up = _gate_up(experts.gate, experts.up)
        return _weights(*gate_up, expert=number, stacked=experts.stacked_gate_up)
    return _weights(COLUMNS, experts.down, expert=number, stacked=experts.stacked_down)
