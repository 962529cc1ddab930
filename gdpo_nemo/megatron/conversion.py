"""Bit-exact conversion of weights and score heads between Hugging Face and Megatron, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import PretrainedConfig

from gdpo_nemo.megatron.model_config import description_of
from gdpo_nemo.megatron.weight_map import SCORE, STACKED_EXPERT, Weight, find_weight, weights_of
from gdpo_nemo.models.description import Heads, ModelDescription
from gdpo_nemo.models.weights import (
    COLUMNS,
    CONVOLUTION_ROWS,
    DELTA_CONVOLUTION_ROWS,
    DELTA_ROWS,
    GATED_ROWS,
    MAMBA_ROWS,
    REPLICATED,
)
from gdpo_nemo.weights.manifest import Entry, Manifest, divide, weight_metadata


def local_weights(chunks: list[torch.nn.Module], model: ModelDescription) -> Iterator[tuple[torch.Tensor, Weight]]:
    """Yield (tensor, weight) for every weight of this rank, in a fixed order.

    The weights are the parameters, and the buffers that the Hugging Face model contains. Adapters and the value head
    are excluded, because it does not contain them.
    """
    weights, layers = weights_of(model), model.hf_layers
    for chunk in chunks:
        for name, tensor in chain(chunk.named_parameters(), chunk.named_buffers()):
            if ".adapters." in name or name.startswith("value_head."):
                continue
            weight = find_weight(weights, layers, chunk, name)
            if weight is not None:
                yield tensor, weight
            elif isinstance(tensor, torch.nn.Parameter):
                raise KeyError(name)


def split_group(weight: Weight) -> dist.ProcessGroup:
    """Return the tensor-parallel group that splits a parameter. Experts use a separate group."""
    if weight.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _experts(weight: Weight) -> range:
    """Return the global indices of the experts with the local index of ``weight``, by expert-parallel rank.

    Args:
        weight: parameter of an expert.
    """
    if weight.expert is None:
        raise ValueError(f"{weight.sources} do not belong to an expert")
    ranks = parallel_state.get_expert_model_parallel_group().size()
    return range(weight.expert, weight.experts, weight.experts // ranks)


def own_expert(weight: Weight) -> int | None:
    """Return the global index of the expert of this rank's parameter, or None if it does not belong to an expert."""
    if weight.expert is None:
        return None
    return _experts(weight)[parallel_state.get_expert_model_parallel_rank()]


def expert_sources(sources: tuple[str, ...], expert: int | None) -> tuple[str, ...]:
    """Return the names of the Hugging Face tensors of an expert (global index). Other names are returned unchanged."""
    return tuple(source.format(expert) for source in sources)


def _read(
    read: Callable[[str], torch.Tensor], sources: tuple[str, ...], stacked: str | None, expert: int | None
) -> torch.Tensor:
    """Return the concatenated ``sources``.

    If the folder stores the tensor ``stacked`` instead, return it, or only its slice for ``expert`` (global index).
    """
    try:
        return torch.cat([read(name) for name in sources])
    except KeyError as missing:
        if stacked is None:
            raise
        try:
            tensor = read(stacked)
        except KeyError:
            raise missing from None
        return tensor if expert is None else tensor[expert]


def _qkv_rows(model: ModelDescription, heads: Heads) -> list[int]:
    """Return the number of rows of q, k and v that belong to one query group. Output gates are rows of q."""
    queries = model.heads // heads.groups * heads.size
    return [queries * (1 + model.output_gate), *[heads.size] * (1 if heads.keys_as_values else 2)]


def _by_group(parts: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    """Concatenate the rows of ``parts`` group by group: the first rows of each part, then the next rows of each."""
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def _by_part(tensor: torch.Tensor, groups: int, rows: Sequence[int]) -> list[torch.Tensor]:
    """Split the rows of ``tensor`` into parts, of which each group has ``rows``. The inverse of ``_by_group``."""
    return [part.flatten(0, 1) for part in tensor.unflatten(0, (groups, -1)).split(list(rows), 1)]


def _by_matrix(tensor: torch.Tensor, model: ModelDescription, heads: Heads) -> list[torch.Tensor]:
    """Split the rows of Megatron's QKV tensor, which contains [q, k, v] for each query group, into q, k and v.

    With output gates, the folder stores each head's query followed by its gate, and Megatron all queries of a group
    followed by all of its gates.
    """
    rows, *others = _qkv_rows(model, heads)
    if not model.output_gate:
        return _by_part(tensor, heads.groups, (rows, *others))
    q, gate, k, v = _by_part(tensor, heads.groups, (rows // 2, rows // 2, *others))
    return [_by_group([q, gate], model.heads), k, v]


def _delta_projections(tensor: torch.Tensor, model: ModelDescription) -> list[torch.Tensor]:
    """Split the rows of a gated delta net's input projection (``DeltaSizes.sections``) into the tensors of a folder."""
    sizes = model.delta
    parts = tensor.split(list(sizes.sections))
    if model.delta_by_key_head:
        return [_by_group(parts[:4], sizes.key_heads), _by_group(parts[4:], sizes.key_heads)]
    return [torch.cat(parts[:3]), *parts[3:]]


def separate(tensor: torch.Tensor, weight: Weight, model: ModelDescription) -> list[torch.Tensor]:
    """Split an unsharded Megatron tensor into Hugging Face tensors, one for each name in ``weight.sources``."""
    parts = [tensor]
    if weight.interleaved:
        parts = [_interleaved(tensor, weight.split)]
    elif weight.heads is not None:
        parts = _by_matrix(tensor, model, weight.heads)
    elif weight.split == DELTA_ROWS:
        parts = _delta_projections(tensor, model)
    elif weight.split == GATED_ROWS:
        parts = list(tensor.chunk(2))
    return parts if len(parts) == len(weight.sources) else [torch.cat(parts)]


def _interleaved(tensor: torch.Tensor, split: str) -> torch.Tensor:
    """Return the tensor that folders store for an expert with ``Weight.interleaved``."""
    if split == GATED_ROWS:
        tensor = torch.stack(tensor.chunk(2), 1).flatten(0, 1)
    return tensor.t() if tensor.dim() == 2 else tensor


def _stack_experts(tensors: Iterator[tuple[str, torch.Tensor]], count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors. Stack the slices of experts (``STACKED_EXPERT``) as soon as they are complete."""
    slices: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors:
        match = STACKED_EXPERT.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        experts = slices.setdefault(match[1], {})
        experts[int(match[2])] = tensor
        if len(experts) == count:
            yield match[1], torch.stack([experts[index] for index in range(count)])
            del slices[match[1]]


def _sections(rows: int, split: str, model: ModelDescription) -> list[int] | None:
    """Return the rows of the sections of an unsharded tensor that are split separately, or None for other splits."""
    if split == GATED_ROWS:
        return [rows // 2] * 2
    if split == MAMBA_ROWS:
        return list(model.mamba)
    if split == CONVOLUTION_ROWS:
        return list(model.mamba[1:4])
    if split in (DELTA_ROWS, DELTA_CONVOLUTION_ROWS):
        sections = model.delta.sections
        return list(sections if split == DELTA_ROWS else sections[:3])
    return None


def local_rows(parameter: torch.Tensor, weight: Weight, model: ModelDescription) -> list[torch.Tensor]:
    """Return for each Hugging Face tensor of a parameter the local index of each of its rows, or -1.

    The rows are columns of a stored tensor that is transposed.

    Returns:
        int64 [rows of the Hugging Face tensor], one for each name in ``weight.sources``, on the CPU.
    """
    group = split_group(weight)
    ranks = 1 if weight.split in (REPLICATED, COLUMNS) else group.size()
    unsharded = torch.arange(len(parameter) * ranks)
    sections = unsharded.split(_sections(len(unsharded), weight.split, model) or len(unsharded))
    rank = group.rank() if ranks > 1 else 0
    local = torch.full_like(unsharded, -1)
    local[torch.cat([section.chunk(ranks)[rank] for section in sections])] = torch.arange(len(parameter))
    parts = separate(local, weight, model)
    return [part[: model.vocabulary] for part in parts] if weight.vocabulary else parts


def as_slice(rows: torch.Tensor) -> slice | torch.Tensor:
    """Return an index as a slice if its rows are consecutive, so that the indexed tensor is a view."""
    consecutive = bool((rows.diff() == 1).all())
    return slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else rows


def _assemble(parts: list[torch.Tensor], split: str, model: ModelDescription) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    if sections := _sections(sum(map(len, parts)), split, model):
        local = [rows // len(parts) for rows in sections]
        by_rank = [part.split(local) for part in parts]
        return torch.cat(list(chain.from_iterable(zip(*by_rank))))
    return torch.cat(parts, dim=1 if split == COLUMNS else 0)


@torch.no_grad()
def load_hf(chunks: list[torch.nn.Module], read: Callable[[str], torch.Tensor], config: PretrainedConfig) -> None:
    """Load this rank's parameters from Hugging Face tensors.

    Args:
        read: function that returns a Hugging Face tensor by name. The function is called only for tensors that this
            rank needs.

    Raises:
        KeyError: if a tensor is missing.
        ValueError: if the shape of a tensor does not match ``config``.
    """
    model = description_of(config)
    for parameter, weight in local_weights(chunks, model):
        group = split_group(weight)
        expert = own_expert(weight)
        sources = expert_sources(weight.sources, expert)
        tensor = _read(read, sources, weight.stacked, expert)
        if weight.interleaved and tensor.dim() == 2:
            tensor = tensor.t()
        local = torch.cat(local_rows(parameter, weight, model))
        if len(tensor) != len(local):
            raise _shape_error(sources, tensor, (len(local), *tensor.shape[1:]))
        if weight.split == COLUMNS:
            tensor = tensor.chunk(group.size(), dim=1)[group.rank()]
        stored = torch.full((len(parameter),), len(tensor))  # padding, unless the tensor has the row
        own = (local >= 0).nonzero()[:, 0]
        stored[local[own]] = own
        if len(own) < len(parameter):
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, 1))
        tensor = tensor[as_slice(stored)]
        if tensor.shape != parameter.shape:
            raise _shape_error(sources, tensor, tuple(parameter.shape))
        parameter.copy_(tensor)


def _shape_error(sources: tuple[str, ...], tensor: torch.Tensor, expected: tuple[int, ...]) -> ValueError:
    return ValueError(f"{' + '.join(sources)}: shape {tuple(tensor.shape)}, expected {expected}")


@torch.no_grad()
def export_hf(
    chunks: list[torch.nn.Module], config: PretrainedConfig, tower: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) of every Hugging Face weight on every rank. This call is collective.

    All ranks get the tensors in the same order and must exhaust the iterator. A tensor may alias a live parameter, so
    copy the tensor if you need it later.

    Args:
        tower: False to leave out the weights of a vision tower.
    """
    model = description_of(config)
    stages = parallel_state.get_pipeline_model_parallel_group()
    if stages.size() == 1:
        yield from _export_stage(chunks, model, tower)
        return
    entries = weight_metadata(_export_stage(chunks, model, tower, shapes_only=True), 0).entries
    by_stage: list[tuple[Entry, ...]] = [()] * stages.size()
    dist.all_gather_object(by_stage, entries, group=stages)
    device = next(chunks[0].parameters()).device
    seen: set[str] = set()
    for stage, entries in enumerate(by_stage):
        exported = _export_stage(chunks, model, tower) if stages.rank() == stage else None
        for bucket in divide(Manifest(0, entries), _BATCH_BYTES):
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
            if exported is not None:
                bucket.copy_from(exported, buffer)
            dist.broadcast(buffer, dist.get_global_rank(stages, stage), group=stages)
            for name, tensor in bucket.views(buffer):
                if name not in seen:  # a tied embedding is on the first and the last stage
                    seen.add(name)
                    yield name, tensor


_BATCH_BYTES = 256 << 20
"""Maximum bytes that one collective transfers for several tensors. A larger tensor is transferred separately."""


def _export_stage(
    chunks: list[torch.nn.Module], model: ModelDescription, tower: bool, shapes_only: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) of the Hugging Face weights of this pipeline stage.

    Args:
        tower: see ``export_hf``.
        shapes_only: True to yield tensors without memory, on the device ``meta``, without communication.
    """
    return _stack_experts(_export_parts(chunks, model, tower, shapes_only), model.experts)


def _export_parts(
    chunks: list[torch.nn.Module], model: ModelDescription, tower: bool, shapes_only: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield like ``_export_stage``, but yield stacked experts as one slice per expert."""

    def weights() -> Iterator[tuple[torch.Tensor, Weight]]:
        for parameter, weight in local_weights(chunks, model):
            if not weight.tied and (tower or not weight.tower):
                yield parameter.detach().to("meta") if shapes_only else parameter.detach(), weight

    for batch in _batches(weights()):
        for sources, tensor, weight in _gather_batch(batch, model):
            for name, part in zip(sources, separate(tensor, weight, model)):
                yield name, part[: model.vocabulary] if weight.vocabulary else part


def _batches(weights: Iterable[tuple[torch.Tensor, Weight]]) -> Iterator[list[tuple[torch.Tensor, Weight]]]:
    """Group consecutive expert matrices of one data type that are gathered together. Other weights are not grouped."""
    ranks = parallel_state.get_expert_model_parallel_group().size()
    ranks *= parallel_state.get_expert_tensor_parallel_group().size()
    for expert, several in groupby(weights, key=lambda pair: pair[1].expert is not None and pair[0].dtype):
        size = 0
        batch: list[tuple[torch.Tensor, Weight]] = []
        for tensor, weight in several:
            nbytes = tensor.nbytes * ranks
            if batch and (not expert or size + nbytes > _BATCH_BYTES):
                yield batch
                batch = []
                size = 0
            batch.append((tensor, weight))
            size += nbytes
        yield batch


def _gather_batch(
    batch: list[tuple[torch.Tensor, Weight]], model: ModelDescription
) -> Iterator[tuple[tuple[str, ...], torch.Tensor, Weight]]:
    """Yield (Hugging Face names, unsharded Megatron tensor, weight) of a batch, with the experts of all ranks."""
    tensors = [tensor for tensor, _ in batch]
    first = batch[0][1]
    if first.expert is None:
        parts = [tensors] if first.split == REPLICATED else _gather(tensors, split_group(first))
        yield first.sources, _assemble([part for (part,) in parts], first.split, model), first
        return
    # Gather over the tensor-parallel ranks first, then over the expert-parallel ranks. In a list of the result, the
    # parts of one tensor are therefore `len(batch)` places apart.
    sharded = _gather(tensors, split_group(first))
    by_rank = _gather(list(chain.from_iterable(sharded)), parallel_state.get_expert_model_parallel_group())
    for index, (_, weight) in enumerate(batch):
        for expert, gathered in zip(_experts(weight), by_rank):
            tensor = _assemble(gathered[index :: len(batch)], weight.split, model)
            yield expert_sources(weight.sources, expert), tensor, weight


def _gather(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
    """Return the tensors of each rank of ``group``, gathered in one call. All ranks have tensors of the same shapes."""
    if group.size() == 1 or tensors[0].is_meta:
        return [tensors] * group.size()
    own = torch.cat([tensor.flatten() for tensor in tensors])
    gathered = own.new_empty(group.size() * own.numel())
    dist.all_gather_into_tensor(gathered, own, group=group)
    sizes = [tensor.numel() for tensor in tensors]
    by_rank = []
    for rank in gathered.split(own.numel()):
        by_rank.append([part.view(tensor.shape) for part, tensor in zip(rank.split(sizes), tensors)])
    return by_rank


def with_score_head(
    read: Callable[[str], torch.Tensor], config: PretrainedConfig, seed: int
) -> Callable[[str], torch.Tensor]:
    """Wrap ``read`` so that a missing score head is sampled from N(0, initializer_range), as transformers does.

    The head is the same on every rank, because it depends only on ``seed``.
    """

    def read_or_sample(name: str) -> torch.Tensor:
        try:
            return read(name)
        except KeyError:
            if name != SCORE:
                raise
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(1, config.hidden_size, generator=generator) * config.initializer_range

    return read_or_sample
