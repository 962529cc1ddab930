"""Names and tensor-parallel splits of Megatron parameters and of the corresponding Hugging Face tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from gdpo_nemo.models.families import FAMILIES, Experts, Family, Mamba

# Ways to split a weight over tensor-parallel ranks. The last four also define the order of the rows in Megatron.
REPLICATED = "replicated"
ROWS = "rows"
COLUMNS = "columns"
QKV_ROWS = "rows by query group: queries, key, value"
GATED_ROWS = "rows of the gate, then rows of the other half, on each rank"
MAMBA_ROWS = "rows of each section of Mamba-2's input projection, on each rank"
CONVOLUTION_ROWS = "rows of the sections of Mamba-2's convolution, on each rank"

SCORE = "score.weight"
"""Name of a reward model's head, both in Megatron's model and in transformers' sequence classifiers."""


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
    vocabulary: bool = False
    """True if each row belongs to a token of the vocabulary. Megatron pads these rows."""


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


@cache
def dense_weights(model_type: str) -> dict[str, Weight]:
    """Return the weights of layers with attention and a dense MLP, by their Megatron names in a Hybrid layer.

    The sources are relative to the Hugging Face layer.
    """
    family = FAMILIES[model_type]
    modules = family.modules
    attention_norm = _weights(REPLICATED, modules.attention_norm)
    mlp_norm = _weights(REPLICATED, modules.mlp_norm)
    return {
        # Each norm has a second name, because TransformerEngine fuses the norm with the linear layer that follows.
        "input_layernorm.weight": attention_norm,
        "self_attention.linear_qkv.layer_norm_weight": attention_norm,
        "self_attention.linear_qkv.weight": _weights(QKV_ROWS, *modules.qkv),
        "self_attention.linear_qkv.bias": Weight(QKV_ROWS, tuple(f"{module}.bias" for module in modules.qkv)),
        "self_attention.q_layernorm.weight": _weights(REPLICATED, modules.q_norm),
        "self_attention.k_layernorm.weight": _weights(REPLICATED, modules.k_norm),
        "self_attention.linear_proj.weight": _weights(COLUMNS, modules.attention_output),
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


def _shared_expert_weights(family: Family, experts: Experts) -> dict[str, Weight]:
    *gate_up, down = experts.shared
    return {
        "mlp.shared_experts.linear_fc1.weight": _weights(GATED_ROWS if family.gated_mlp else ROWS, *gate_up),
        "mlp.shared_experts.linear_fc2.weight": _weights(COLUMNS, down),
    }


# local_experts.3.linear_fc1.weight, or linear_fc1.weight3 in TransformerEngine's grouped linear layers
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?linear_fc([12])\.weight(\d*)")


def layer_weight(family: Family, name: str) -> Weight:
    """Return the weight of the Megatron parameter ``name`` in a Hybrid layer.

    The sources are relative to the Hugging Face layer.
    """
    experts = family.experts
    if experts is not None and name == "mlp.router.weight":
        return _weights(REPLICATED, experts.router, stacked=experts.stacked_router)
    if experts is not None and experts.bias is not None and name == "mlp.router.expert_bias":
        return Weight(REPLICATED, (experts.bias,))
    if experts is not None and name.startswith("mlp.shared_experts."):
        return _shared_expert_weights(family, experts)[name]
    if family.mamba is not None and name.startswith(("norm.", "mixer.")):
        return _mamba_weights(family.mamba)[name]
    match = _EXPERT.fullmatch(name)
    if match is None or experts is None:
        return dense_weights(family.model_type)[name]
    number = int(match[1] or match[3])
    if match[2] == "1":
        halves = (experts.up,) if experts.gate is None else (experts.gate, experts.up)
        split = ROWS if experts.gate is None else GATED_ROWS
        return _weights(split, *halves, expert=number, stacked=experts.stacked_gate_up)
    return _weights(COLUMNS, experts.down, expert=number, stacked=experts.stacked_down)
