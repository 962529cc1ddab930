"""Weights between Hugging Face and Megatron, bit exact, at any layout, one tensor at a time."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import PretrainedConfig

from gdpo_nemo.megatron.hf_mapping import (
    COLUMNS,
    GATED_ROWS,
    QKV_ROWS,
    REPLICATED,
    Weight,
    family_of,
    head_size,
    layer_weight,
    num_experts,
    top_weights,
)

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def local_weights(
    chunks: list[torch.nn.Module], config: PretrainedConfig
) -> Iterator[tuple[torch.nn.Parameter, Weight]]:
    """This rank's parameters with their global Hugging Face names, in a fixed order; without adapters and value head,
    which have none."""
    family = family_of(config)
    top = top_weights(family.model_type)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".adapters." in name or name.startswith("value_head."):
                continue
            match = _LAYER.fullmatch(name)
            if match is None:
                yield parameter, top[name]
                continue
            weight = layer_weight(family, match[2])
            # layer_number counts Hybrid layers from 1 over all pipeline stages.
            decoder: Any = chunk.decoder
            layer = family.modules.layer.format((decoder.layers[int(match[1])].layer_number - 1) // 2)
            sources = tuple(layer + source for source in weight.sources)
            yield parameter, replace(weight, sources=sources, stacked=weight.stacked and layer + weight.stacked)


def _split_group(weight: Weight) -> dist.ProcessGroup:
    """The ranks a parameter is split over: experts have a tensor group of their own."""
    if weight.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _experts(weight: Weight, count: int) -> range:
    """Global numbers of the experts, ``count`` in all, that stand at this place of each expert-parallel rank, in the
    order of the ranks."""
    if weight.expert is None:
        raise ValueError(f"{weight.sources} belong to no expert")
    ranks = parallel_state.get_expert_model_parallel_group().size()
    return range(weight.expert, count, count // ranks)


def _of_expert(sources: tuple[str, ...], expert: int) -> tuple[str, ...]:
    return tuple(source.format(expert) for source in sources)


def _read(
    read: Callable[[str], torch.Tensor], sources: tuple[str, ...], stacked: str | None, expert: int | None
) -> torch.Tensor:
    """The sources one over the other, out of the ``stacked`` tensor where the folder has that in their place."""
    try:
        return torch.cat([read(name) for name in sources])
    except KeyError as missing:
        if stacked is None:
            raise
        try:
            whole = read(stacked)
        except KeyError:
            raise missing from None
        return whole if expert is None else whole[expert]


def _qkv_rows(config: PretrainedConfig) -> tuple[int, int, int]:
    """Rows of q, k and v that belong to one query group."""
    size = head_size(config)
    return config.num_attention_heads // config.num_key_value_heads * size, size, size


def _by_query_group(tensor: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """All queries, all keys, all values -> group by group its queries, its key, its value."""
    groups = config.num_key_value_heads
    parts = tensor.split([groups * rows for rows in _qkv_rows(config)])
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def _by_matrix(tensor: torch.Tensor, config: PretrainedConfig) -> list[torch.Tensor]:
    """The inverse of ``_by_query_group``: q, k and v."""
    parts = tensor.unflatten(0, (config.num_key_value_heads, -1)).split(_qkv_rows(config), 1)
    return [part.flatten(0, 1) for part in parts]


def separate(tensor: torch.Tensor, weight: Weight, config: PretrainedConfig) -> list[torch.Tensor]:
    """A whole Megatron tensor -> the Hugging Face tensors of its sources."""
    parts = [tensor]
    if weight.split == QKV_ROWS:
        parts = _by_matrix(tensor, config)
    elif weight.split == GATED_ROWS:
        parts = list(tensor.chunk(2))
    return parts if len(parts) == len(weight.sources) else [torch.cat(parts)]


def _shard(tensor: torch.Tensor, split: str, rank: int, size: int) -> torch.Tensor:
    if split == REPLICATED or size == 1:
        return tensor
    if split == GATED_ROWS:
        return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(size, dim=1 if split == COLUMNS else 0)[rank]


def _assemble(parts: list[torch.Tensor], split: str) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    if split == GATED_ROWS:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(parts, dim=1 if split == COLUMNS else 0)


@torch.no_grad()
def load_hf(chunks: list[torch.nn.Module], read: Callable[[str], torch.Tensor], config: PretrainedConfig) -> None:
    """Fill this rank's parameters; ``read(name)`` returns one Hugging Face tensor, and is asked for what is needed
    only.

    Raises:
        KeyError: a tensor is missing. ValueError: a tensor has another shape than the configuration says.
    """
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    experts = num_experts(config)
    top = top_weights(family_of(config).model_type)
    for parameter, weight in local_weights(chunks, config):
        group = _split_group(weight)
        sources = weight.sources
        expert = None
        if weight.expert is not None:
            expert = _experts(weight, experts)[expert_rank]
            sources = _of_expert(sources, expert)
        if weight.vocabulary and config.tie_word_embeddings:
            sources = top["embedding.word_embeddings.weight"].sources
        tensor = _read(read, sources, weight.stacked, expert)
        if weight.split == QKV_ROWS:
            _check_rows(tensor, config.num_key_value_heads * sum(_qkv_rows(config)), sources)
            tensor = _by_query_group(tensor, config)
        if weight.vocabulary:
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, parameter.size(0) * group.size() - tensor.size(0)))
        tensor = _shard(tensor, weight.split, group.rank(), group.size())
        if tensor.shape != parameter.shape:
            raise _misshapen(sources, tensor, tuple(parameter.shape))
        parameter.copy_(tensor)


def _check_rows(tensor: torch.Tensor, rows: int, sources: tuple[str, ...]) -> None:
    if len(tensor) != rows:
        raise _misshapen(sources, tensor, (rows, *tensor.shape[1:]))


def _misshapen(sources: tuple[str, ...], tensor: torch.Tensor, expected: tuple[int, ...]) -> ValueError:
    return ValueError(f"{' + '.join(sources)}: shape {tuple(tensor.shape)}, expected {expected}")


@torch.no_grad()
def export_hf(chunks: list[torch.nn.Module], config: PretrainedConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every Hugging Face tensor, whole, on every rank, one at a time; all ranks must iterate together.

    Tensors come in the same order on all ranks and may alias live parameters: copy what is kept.
    """
    stages = parallel_state.get_pipeline_model_parallel_group()
    if stages.size() == 1:
        yield from _export_stage(chunks, config)
        return
    seen: set[str] = set()
    for stage in range(stages.size()):
        source = dist.get_global_rank(stages, stage)
        owned = _export_stage(chunks, config) if stages.rank() == stage else None
        while True:
            item = next(owned, None) if owned is not None else None
            meta = [None if item is None else (item[0], tuple(item[1].shape), item[1].dtype, item[1].device.type)]
            dist.broadcast_object_list(meta, source, group=stages)
            if meta[0] is None:
                break
            name, shape, dtype, device = meta[0]
            tensor = item[1].contiguous() if item else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, source, group=stages)
            if name not in seen:  # a tied embedding lives on the first and the last stage
                seen.add(name)
                yield name, tensor


def _export_stage(chunks: list[torch.nn.Module], config: PretrainedConfig) -> Iterator[tuple[str, torch.Tensor]]:
    experts = num_experts(config)
    head = top_weights(family_of(config).model_type)["output_layer.weight"]
    for parameter, weight in local_weights(chunks, config):
        if weight == head and config.tie_word_embeddings:
            continue
        tensor = parameter.detach()
        if weight.split != REPLICATED:
            tensor = _assemble(_gather(tensor, _split_group(weight)), weight.split)
        if weight.expert is None:
            named = [(weight.sources, tensor)]
        else:
            whole = _gather(tensor, parallel_state.get_expert_model_parallel_group())
            named = [(_of_expert(weight.sources, e), t) for e, t in zip(_experts(weight, experts), whole)]
        for sources, tensor in named:
            for name, part in zip(sources, separate(tensor, weight, config)):
                yield name, part[: config.vocab_size] if weight.vocabulary else part


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
