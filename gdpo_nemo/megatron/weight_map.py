"""Weights by the names of Megatron's parameters, from the table of a model's weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from gdpo_nemo.models.description import Heads, ModelDescription
from gdpo_nemo.models.weights import EMBEDDING, OUTPUT, QKV_ROWS, REPLICATED, TOWER, weight_table

SCORE = "score.weight"
"""Name of a reward model's head, both in Megatron's model and in transformers' sequence classifiers."""

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mixer.in_proj.layer_norm_weight": "norm.weight",
}
"""Names of norms that TransformerEngine fuses with the linear layer that follows, and their names as separate norms."""

STACKED_EXPERT = re.compile(r"(.+\.experts\.\w+)\.(\d+)")
"""Name of an expert's slice of a stacked tensor: the name of the tensor, and the index of the expert."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# local_experts.3.linear_fc1.weight, or linear_fc1.weight3 in TransformerEngine's grouped linear layers
_EXPERT = re.compile(r"(mlp\.experts\.)(?:local_experts\.(\d+)\.)?(linear_fc[12]\.(?:weight|bias))(\d*)")


@dataclass(frozen=True)
class Weight:
    """A Megatron parameter and the corresponding Hugging Face tensors."""

    split: str
    """Split over tensor-parallel ranks (see ``WeightSpec.split``)."""
    sources: tuple[str, ...]
    """Names of the Hugging Face tensors. The names for an expert contain ``{}`` in place of its index."""
    experts: int = 0
    """Number of experts with such a parameter (see ``WeightSpec.experts``)."""
    expert: int | None = None
    """Local index of the expert on its rank, or None if the parameter does not belong to an expert."""
    adapted: bool = False
    """True if the tensors are weights of linear layers that may have adapters."""
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
    tied: bool = False
    """True for an output layer that is a copy of the embedding."""

    tower: bool = False
    """True if the parameter belongs to the vision tower."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Hugging Face modules of the tensors."""
        return tuple(source.removesuffix(".weight") for source in self.sources)


Weights = Mapping[tuple[int | None, str], Weight]
"""Weights by the index of the Hugging Face layer (None outside of the layers) and ``WeightSpec.megatron``."""


def weights_of(model: ModelDescription) -> Weights:
    """Return all weights of a model, and the head of reward models."""
    found: dict[tuple[int | None, str], Weight] = {}
    for (layer, name), group in groupby(weight_table(model), key=lambda row: (row.layer, row.megatron)):
        first, *others = group
        heads = model.layer_heads[layer] if layer is not None and first.split == QKV_ROWS else None
        found[layer, name] = Weight(
            first.split,
            (first.name, *(row.name for row in others)),
            experts=first.experts,
            adapted=first.adapted,
            stacked=first.stacked,
            interleaved=first.interleaved,
            vocabulary=name in (EMBEDDING, OUTPUT),
            heads=heads,
            tower=name.startswith(TOWER),
        )
    if model.tied:
        found[None, OUTPUT] = replace(found[None, EMBEDDING], tied=True)
    found[None, SCORE] = Weight(REPLICATED, (SCORE,))
    return found


def find_weight(weights: Weights, layers: Sequence[int], chunk: Any, name: str) -> Weight | None:
    """Return the weight of a parameter or buffer of Megatron's model, or None if the model's folder has none.

    Args:
        layers: ``ModelDescription.hf_layers``.
        chunk: model chunk of this rank.
        name: name in the chunk.
    """
    layer = None
    if (match := _LAYER.fullmatch(name)) is not None:
        # Megatron's layer_number counts Hybrid layers from 1 over all pipeline stages.
        layer, name = layers[chunk.decoder.layers[int(match[1])].layer_number - 1], match[2]
    if (match := _EXPERT.fullmatch(name)) is None:
        return weights.get((layer, FUSED_NORMS.get(name, name)))
    weight = weights.get((layer, match[1] + match[3]))
    return weight and replace(weight, expert=int(match[2] or match[4] or 0))
