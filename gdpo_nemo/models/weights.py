"""Table of a model's weights: one row for each tensor of a Hugging Face folder, in one function for each part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from gdpo_nemo.models.description import KERNEL, ModelDescription, TowerSizes
from gdpo_nemo.models.families import Experts, Tower

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

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_norm.weight"
EXPERT_BIAS = "mlp.router.expert_bias"
"""Name of the buffer that a router adds to its scores to choose experts."""
LAYER_SCALE = "mlp_bda.scale"
"""Name of the buffer with a factor of a layer's output."""
TOWER = "tower."
"""Prefix of the parameters of a vision tower, whose other names are those of transformers' module."""
INDEX = "self_attention.indexer."
"""Prefix of a sparse index's buffers."""


class WeightSpec(NamedTuple):
    """A tensor of a Hugging Face folder, or the tensors of a layer's experts.

    Megatron's parameter of the name ``megatron`` contains the tensors of all consecutive rows with this name.
    """

    name: str
    """Hugging Face name. For experts, ``{}`` is the index of the expert."""
    shape: tuple[int, ...]
    """Shape of the tensor, or of one expert's tensor."""
    split: str
    """Split over tensor-parallel ranks: ``REPLICATED``, ``ROWS``, ``COLUMNS`` or one of the others above."""
    megatron: str
    """Name in Megatron's model, relative to the Hybrid layer. All norms are separate from linear layers."""
    layer: int | None = None
    """Index of the layer (None outside of the layers)."""
    experts: int = 0
    """Number of experts with such a tensor (0 if the tensor does not belong to a routed expert)."""
    trained: bool = True
    """False if training does not change the tensor."""
    buffer: bool = False
    """True if the tensor is a buffer of transformers' model, which counts of parameters do not include."""
    adapted: bool = False
    """True if the tensor is the weight of a linear layer that may have adapters."""
    stacked: str | None = None
    """Name of the tensor that replaces ``name`` in folders that store all experts of a layer together.

    The shape of this tensor is [experts, ...] for experts. Other rows of the same parameter have the same name.
    """
    interleaved: bool = False
    """True if the stored tensor is transposed, and its rows of gate and up alternate (``Experts.interleaved``)."""

    @property
    def size(self) -> int:
        """Number of elements of the tensor, or of one expert's tensor."""
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """Hugging Face module of the weight."""
        return self.name.removesuffix(".weight")


def weight_table(model: ModelDescription) -> Iterator[WeightSpec]:
    """Yield the rows of all weights of a model, in the order of its layers.

    The rows of a vision tower come first. Tied models have no row for the output layer. Tensors that are not loaded
    (``Family.untrained``) have no rows.
    """
    modules, hidden = model.family.modules, model.hidden
    if model.family.tower and model.tower:
        for name, shape in _tower(model.family.tower, model.tower):
            yield WeightSpec(model.family.tower.prefix + name, shape, REPLICATED, TOWER + name)
    yield WeightSpec(f"{modules.embedding}.weight", (model.vocabulary, hidden), ROWS, EMBEDDING)
    for layer, symbols in enumerate(model.symbols):
        prefix = modules.layer.format(layer)
        for symbol in symbols:
            for row in _PARTS[symbol](model, layer):
                stacked = row.stacked and prefix + row.stacked
                yield row._replace(name=prefix + row.name, layer=layer, stacked=stacked)
    yield WeightSpec(f"{modules.final_norm}.weight", (hidden,), REPLICATED, FINAL_NORM)
    if not model.tied:
        yield WeightSpec(f"{modules.head}.weight", (model.vocabulary, hidden), ROWS, OUTPUT, adapted=True)


# Each function yields the rows of a Hybrid layer or of a part of it. Names are relative to the layer.


def _linear(
    modules: Sequence[str], heights: Sequence[int], width: int, split: str, megatron: str, **options: Any
) -> Iterator[WeightSpec]:
    """Yield the rows of a linear layer with adapters, whose rows the modules contain. A single module contains all."""
    heights = heights if len(modules) > 1 else (sum(heights),)
    for module, height in zip(modules, heights, strict=True):
        yield WeightSpec(f"{module}.weight", (height, width), split, f"{megatron}.weight", adapted=True, **options)


def _norm(module: str, size: int, megatron: str) -> WeightSpec:
    return WeightSpec(f"{module}.weight", (size,), REPLICATED, f"{megatron}.weight")


def _attention(model: ModelDescription, layer: int) -> Iterator[WeightSpec]:
    family, hidden, heads = model.family, model.hidden, model.layer_heads[layer]
    modules = family.modules
    yield _norm(modules.attention_norm, hidden, "input_layernorm")
    yield from _latent_projections(model, layer) if family.latent else _projections(model, layer)
    width = model.heads * (model.latent.value if model.latent else heads.size)
    yield from _linear([modules.attention_output], [hidden], width, COLUMNS, "self_attention.linear_proj")
    if family.biases:
        bias = f"{modules.attention_output}.bias"
        yield WeightSpec(bias, (hidden,), REPLICATED, "self_attention.linear_proj.bias")
    if family.sinks:
        yield WeightSpec(family.sinks, (model.heads,), ROWS, "self_attention.core_attention.sinks")
    if modules.post_attention_norm:
        yield _norm(modules.post_attention_norm, hidden, "self_attn_bda.norm")


def _projections(model: ModelDescription, layer: int) -> Iterator[WeightSpec]:
    family, heads = model.family, model.layer_heads[layer]
    names, query, key = family.modules.qkv, model.heads * heads.size, heads.groups * heads.size
    heights = [query * (1 + family.output_gate), key, key]
    if heads.keys_as_values:
        names, heights = names[:2], heights[:2]
    yield from _linear(names, heights, model.hidden, QKV_ROWS, "self_attention.linear_qkv")
    if model.qkv_bias:
        for module, height in zip(names, heights):
            yield WeightSpec(f"{module}.bias", (height,), QKV_ROWS, "self_attention.linear_qkv.bias")
    if model.qk_norm:
        split, sizes = (ROWS, (query, key)) if family.qk_norm_of_layer else (REPLICATED, (heads.size, heads.size))
        for name, size, module in zip("qk", sizes, (family.modules.q_norm, family.modules.k_norm)):
            yield _norm(module, size, f"self_attention.{name}_layernorm")._replace(split=split)


def _latent_projections(model: ModelDescription, layer: int) -> Iterator[WeightSpec]:
    names, sizes, hidden, heads = model.family.latent, model.latent, model.hidden, model.heads
    assert names is not None and sizes is not None
    attention, size = "self_attention.", model.layer_heads[layer].size

    def down(module: str, height: int, megatron: str) -> WeightSpec:
        return WeightSpec(f"{module}.weight", (height, hidden), REPLICATED, f"{attention}{megatron}.weight")

    if sizes.query:
        yield down(names.query_down, sizes.query, "linear_q_down_proj")
        yield _norm(names.query_norm, sizes.query, f"{attention}q_layernorm")
        yield from _linear([names.query_up], [heads * size], sizes.query, ROWS, f"{attention}linear_q_up_proj")
    else:
        yield from _linear([names.query], [heads * size], hidden, ROWS, f"{attention}linear_q_proj")
    yield down(names.key_value_down, sizes.key_value + sizes.rotated, "linear_kv_down_proj")
    yield _norm(names.key_value_norm, sizes.key_value, f"{attention}kv_layernorm")
    rows = heads * (size - sizes.rotated + sizes.value)
    yield from _linear([names.key_value_up], [rows], sizes.key_value, ROWS, f"{attention}linear_kv_up_proj")
    if model.index and model.indexed_layers[layer]:
        count, width = model.index
        for tensor, shape, name in (
            ("wq_b.weight", (count * width, sizes.query), "query"),
            ("wk.weight", (width, hidden), "key"),
            ("k_norm.weight", (width,), "norm"),
            ("k_norm.bias", (width,), "norm_bias"),
            ("weights_proj.weight", (count, hidden), "heads"),
        ):
            yield WeightSpec(f"{names.index}.{tensor}", shape, REPLICATED, INDEX + name, trained=False)


def _mlp(model: ModelDescription, layer: int) -> Iterator[WeightSpec]:
    modules, ffn = model.family.modules, model.ffn
    yield _norm(modules.mlp_norm, model.hidden, "pre_mlp_layernorm")
    yield from _gate_up(modules.gate_up, ffn, model.hidden, model, "mlp.linear_fc1")
    yield from _linear([modules.down], [model.hidden], ffn, COLUMNS, "mlp.linear_fc2")
    yield from _output_of_layer(model)


def _gate_up(
    modules: Sequence[str], ffn: int, width: int, model: ModelDescription, megatron: str, **options: Any
) -> Iterator[WeightSpec]:
    gated = model.family.gated_mlp
    heights = [ffn] * (1 + gated)
    yield from _linear(modules, heights, width, GATED_ROWS if gated else ROWS, megatron, **options)


def _output_of_layer(model: ModelDescription) -> Iterator[WeightSpec]:
    if norm := model.family.modules.post_mlp_norm:
        yield _norm(norm, model.hidden, "mlp_bda.norm")
    if scale := model.family.layer_scale:
        yield WeightSpec(scale, (1,), REPLICATED, LAYER_SCALE, trained=False, buffer=True)


def _mixture(model: ModelDescription, layer: int) -> Iterator[WeightSpec]:
    family, hidden, count = model.family, model.hidden, model.experts
    experts = family.experts
    assert experts is not None
    if not experts.beside:
        yield _norm(family.modules.mlp_norm, hidden, "pre_mlp_layernorm")
    for megatron, tensor in experts.beside.items():
        size = count if megatron == "router.expert_scale" else hidden
        yield WeightSpec(tensor, (size,), REPLICATED, f"mlp.{megatron}")
    router = WeightSpec(f"{experts.router}.weight", (count, hidden), REPLICATED, "mlp.router.weight")
    yield router._replace(stacked=experts.stacked_router)
    if family.biases:
        yield WeightSpec(f"{experts.router}.bias", (count,), REPLICATED, "mlp.router.bias")
    if experts.bias:
        yield WeightSpec(experts.bias, (count,), REPLICATED, EXPERT_BIAS, trained=False, buffer=True)
    if shared := model.shared_ffn:
        gate_up = [experts.shared_gate, experts.shared_up] if family.gated_mlp else [experts.shared_up]
        yield from _gate_up(gate_up, shared, hidden, model, "mlp.shared_experts.linear_fc1")
        yield from _linear([experts.shared_down], [hidden], shared, COLUMNS, "mlp.shared_experts.linear_fc2")
    if experts.shared_scale:
        scale = f"{experts.shared_scale}.weight"
        yield WeightSpec(scale, (1, hidden), REPLICATED, "mlp.shared_experts.gate_weight")
    if latent := model.expert_latent:
        for module, shape, name in (
            (experts.latent_down, (latent, hidden), "fc1"),
            (experts.latent_up, (hidden, latent), "fc2"),
        ):
            yield WeightSpec(f"{module}.weight", shape, REPLICATED, f"mlp.{name}_latent_proj.weight")
    yield from _stacked_experts(model, experts) if experts.only_stacked else _experts(model, experts)
    yield from _output_of_layer(model)


def _experts(model: ModelDescription, experts: Experts) -> Iterator[WeightSpec]:
    ffn, hidden, count = model.expert_ffn, model.expert_hidden, model.experts
    gate_up = [experts.gate, experts.up] if experts.gate else [experts.up]
    stacked = dict(experts=count, stacked=experts.stacked_gate_up)
    yield from _gate_up(gate_up, ffn, hidden, model, "mlp.experts.linear_fc1", **stacked)
    stacked = dict(experts=count, stacked=experts.stacked_down)
    yield from _linear([experts.down], [hidden], ffn, COLUMNS, "mlp.experts.linear_fc2", **stacked)


def _stacked_experts(model: ModelDescription, experts: Experts) -> Iterator[WeightSpec]:
    """Yield the rows of experts that no folder stores separately. Their names are those of slices."""
    ffn, hidden = model.expert_ffn, model.expert_hidden
    for tensor, shape, name, splits in (
        (experts.stacked_gate_up, (2 * ffn, hidden), "linear_fc1", (GATED_ROWS, GATED_ROWS)),
        (experts.stacked_down, (hidden, ffn), "linear_fc2", (COLUMNS, REPLICATED)),
    ):
        options: dict[str, Any] = dict(experts=model.experts, interleaved=experts.interleaved)
        stored = shape[::-1] if experts.interleaved else shape
        megatron = f"mlp.experts.{name}"
        yield WeightSpec(tensor + ".{}", stored, splits[0], f"{megatron}.weight", stacked=tensor, **options)
        if model.family.biases:
            bias = f"{tensor}_bias"
            yield WeightSpec(bias + ".{}", shape[:1], splits[1], f"{megatron}.bias", stacked=bias, **options)


def _mamba(model: ModelDescription, layer: int) -> Iterator[WeightSpec]:
    names, sections, channels = model.family.mamba, model.mamba, model.mamba_channels
    assert names is not None
    inner, heads = sections[0], sections[-1]
    project, output = names.linear
    yield _norm(names.norm, model.hidden, "norm")
    yield from _linear([project], [sum(sections)], model.hidden, MAMBA_ROWS, "mixer.in_proj")
    for tensor, shape, split, name in (
        ("conv1d.weight", (channels, 1, KERNEL), CONVOLUTION_ROWS, "conv1d_weight"),
        ("conv1d.bias", (channels,), CONVOLUTION_ROWS, "conv1d_bias"),
        ("A_log", (heads,), ROWS, "A_log"),
        ("D", (heads,), ROWS, "D"),
        ("dt_bias", (heads,), ROWS, "dt_bias"),
        ("norm.weight", (inner,), ROWS, "norm.weight"),
    ):
        yield WeightSpec(f"{names.mixer}.{tensor}", shape, split, f"mixer.{name}")
    yield from _linear([output], [model.hidden], inner, COLUMNS, "mixer.out_proj")


def _delta_net(model: ModelDescription, layer: int) -> Iterator[WeightSpec]:
    """Yield the rows of a gated delta net layer, whose parameters have the prefix of attention layers."""
    names, sizes, hidden, channels = model.family.delta, model.delta, model.hidden, model.delta_channels
    assert names is not None
    *projections, output = names.linear
    rows = sizes.sections
    heights = [sum(rows[:4]), sum(rows[4:])] if names.by_key_head else [sum(rows[:3]), *rows[3:]]
    yield _norm(model.family.modules.attention_norm, hidden, "input_layernorm")
    yield from _linear(projections, heights, hidden, DELTA_ROWS, "self_attention.in_proj")
    for tensor, shape, split, name in (
        ("conv1d.weight", (channels, 1, KERNEL), DELTA_CONVOLUTION_ROWS, "conv1d.weight"),
        ("A_log", (sizes.value_heads,), ROWS, "A_log"),
        ("dt_bias", (sizes.value_heads,), ROWS, "dt_bias"),
        ("norm.weight", (sizes.value,), REPLICATED, "out_norm.weight"),
    ):
        yield WeightSpec(f"{names.mixer}.{tensor}", shape, split, f"self_attention.{name}")
    yield from _linear([output], [hidden], rows[2], COLUMNS, "self_attention.out_proj")


def _tower(names: Tower, sizes: TowerSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of each tensor of a vision tower. Names are relative to the tower."""
    hidden = sizes.hidden_size
    patch = sizes.in_channels, sizes.temporal_patch_size, sizes.patch_size, sizes.patch_size

    def tensors(module: str, *shape: int, bias: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{module}.weight", shape
        if bias:
            yield f"{module}.bias", shape[:1]

    def merger(module: str, normalised: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        norm, first, second = names.merger
        yield from tensors(f"{module}.{norm}", normalised, bias=names.biases)
        yield from tensors(f"{module}.{first}", sizes.merged, sizes.merged)
        yield from tensors(f"{module}.{second}", sizes.out_hidden_size, sizes.merged)

    yield from tensors("patch_embed.proj", hidden, *patch, bias=names.biases)
    if sizes.positions:
        yield "pos_embed.weight", (sizes.positions, hidden)
    for layer in range(sizes.depth):
        block = f"blocks.{layer}."
        for norm in ("norm1", "norm2"):
            yield from tensors(block + norm, hidden, bias=names.biases)
        yield from tensors(block + "attn.qkv", 3 * hidden, hidden)
        yield from tensors(block + "attn.proj", hidden, hidden)
        *inputs, output = names.mlp
        for module in inputs:
            yield from tensors(block + module, sizes.intermediate_size, hidden)
        yield from tensors(block + output, hidden, sizes.intermediate_size)
    yield from merger("merger", hidden)
    for index in range(len(sizes.deepstack)):
        yield from merger(f"deepstack_merger_list.{index}", sizes.merged)


_PARTS = {"*": _attention, "-": _mlp, "E": _mixture, "M": _mamba, "G": _delta_net}
"""Functions by the symbols of Hybrid layers."""


@lru_cache(maxsize=16)
def parameters(model: ModelDescription) -> int:
    """Return the number of all parameters, as transformers counts them.

    A checkpoint also contains buffers, which are not counted: biases of routers (DeepSeek-V3, GLM, MiniMax-M2,
    Nemotron 3) and factors of layers (Gemma 4).
    """
    return sum(row.size * max(1, row.experts) for row in weight_table(model) if not row.buffer)


@lru_cache(maxsize=16)
def active_parameters(model: ModelDescription) -> int:
    """Return the number of parameters of the layers and the output layer that are used per token."""
    rows = [row for row in weight_table(model) if row.layer is not None and not row.buffer]
    layers = sum(row.size * (model.active_experts if row.experts else 1) for row in rows)
    return layers + model.vocabulary * model.hidden
