"""Weights between Hugging Face and Megatron, bit exact, at any layout, one tensor at a time."""

from __future__ import annotations

import re
from typing import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import PretrainedConfig

from gdpo_nemo.megatron.families import (
    COLUMNS,
    EMBEDDING,
    GATED_ROWS,
    HEAD,
    REPLICATED,
    TOP_WEIGHTS,
    Weight,
    family_of,
    head_size,
    layer_weight,
    num_experts,
)

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def local_weights(
    chunks: list[torch.nn.Module], config: PretrainedConfig
) -> Iterator[tuple[torch.nn.Parameter, Weight]]:
    """This rank's parameters with their global Hugging Face names, in a fixed order."""
    family = family_of(config)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".adapters." in name:
                continue
            match = _LAYER.fullmatch(name)
            if match is None:
                yield parameter, TOP_WEIGHTS[name]
                continue
            weight = layer_weight(family, match[2])
            # layer_number counts Hybrid layers from 1 over all pipeline stages.
            layer = (chunk.decoder.layers[int(match[1])].layer_number - 1) // 2
            sources = tuple(f"model.layers.{layer}.{source}" for source in weight.sources)
            yield parameter, Weight(weight.split, sources, weight.expert)


def _split_group(weight: Weight) -> dist.ProcessGroup:
    """The ranks a parameter is split over: experts have a tensor group of their own."""
    if weight.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _experts(weight: Weight, config: PretrainedConfig) -> range:
    """Global numbers of the experts that stand at this place of each expert-parallel rank, in the order of the
    ranks."""
    count = num_experts(config)
    ranks = parallel_state.get_expert_model_parallel_group().size()
    return range(weight.expert, count, count // ranks)


def _of_expert(sources: tuple[str, ...], expert: int) -> tuple[str, ...]:
    return tuple(source.format(expert) for source in sources)


_FUSED = re.compile(r"(model\.layers\.\d+\.)\w+\.(?:gate\.weight|experts\.(\d+)\.(\w+)\.weight)")
_PART_OF_FUSED = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


def _read_fused(read: Callable[[str], torch.Tensor], name: str) -> torch.Tensor:
    """An expert's tensor out of the fused tensors that transformers keeps in memory (and some folders hold)."""
    layer, expert, matrix = _FUSED.fullmatch(name).groups()
    if expert is None:
        return read(f"{layer}mlp.gate.weight")
    if matrix in _PART_OF_FUSED:
        return read(f"{layer}mlp.experts.gate_up_proj")[int(expert)].chunk(2)[_PART_OF_FUSED[matrix]]
    return read(f"{layer}mlp.experts.down_proj")[int(expert)]


def _read(read: Callable[[str], torch.Tensor], name: str) -> torch.Tensor:
    try:
        return read(name)
    except KeyError as missing:
        if _FUSED.fullmatch(name) is None:
            raise
        try:
            return _read_fused(read, name)
        except KeyError:
            raise missing from None


def _merge(tensors: list[torch.Tensor], config: PretrainedConfig) -> torch.Tensor:
    """Hugging Face tensors -> one Megatron tensor (unsplit)."""
    if len(tensors) != 3:
        return torch.cat(tensors)
    groups = config.num_key_value_heads
    parts = [t.reshape(groups, -1, *t.shape[1:]) for t in tensors]  # per query group: its queries, its key, its value
    return torch.cat(parts, 1).reshape(-1, *tensors[0].shape[1:])


def _separate(tensor: torch.Tensor, count: int, config: PretrainedConfig) -> list[torch.Tensor]:
    """The inverse of ``_merge``."""
    if count == 1:
        return [tensor]
    if count == 2:
        return list(tensor.chunk(2))
    groups = config.num_key_value_heads
    size = head_size(config)
    queries = config.num_attention_heads // groups
    parts = tensor.reshape(groups, (queries + 2) * size, *tensor.shape[1:]).split([queries * size, size, size], 1)
    return [part.reshape(-1, *tensor.shape[1:]) for part in parts]


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
    for parameter, weight in local_weights(chunks, config):
        group = _split_group(weight)
        sources = weight.sources
        if weight.expert is not None:
            sources = _of_expert(sources, _experts(weight, config)[expert_rank])
        if sources == (HEAD,) and config.tie_word_embeddings:
            sources = (EMBEDDING,)
        tensor = _merge([_read(read, name) for name in sources], config)
        if sources[0] in (EMBEDDING, HEAD):
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, parameter.size(0) * group.size() - tensor.size(0)))
        tensor = _shard(tensor, weight.split, group.rank(), group.size())
        if tensor.shape != parameter.shape:
            raise ValueError(f"{' + '.join(sources)}: shape {tuple(tensor.shape)}, expected {tuple(parameter.shape)}")
        parameter.copy_(tensor)


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


def _export_stage(chunks, config) -> Iterator[tuple[str, torch.Tensor]]:
    for parameter, weight in local_weights(chunks, config):
        if weight.sources == (HEAD,) and config.tie_word_embeddings:
            continue
        tensor = parameter.detach()
        if weight.split != REPLICATED:
            tensor = _assemble(_gather(tensor, _split_group(weight)), weight.split)
        if weight.expert is None:
            named = [(weight.sources, tensor)]
        else:
            whole = _gather(tensor, parallel_state.get_expert_model_parallel_group())
            named = [(_of_expert(weight.sources, e), t) for e, t in zip(_experts(weight, config), whole)]
        for sources, tensor in named:
            for name, part in zip(sources, _separate(tensor, len(sources), config)):
                yield name, part[: config.vocab_size] if name in (EMBEDDING, HEAD) else part


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
