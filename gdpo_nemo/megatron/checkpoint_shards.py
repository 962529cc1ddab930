"""Division of a checkpoint among the ranks: every element is written once and read once from the files.

Two kinds of tensors need it:

* A distributed optimizer gives each data-parallel rank a contiguous range of every flattened parameter. Megatron's
  fully reshardable format first gathers these ranges on all ranks (12 bytes of host memory per parameter).
* Model weights and plain optimizers have the same tensors on all data-parallel ranks. By default the first one writes
  all of them, and every rank reads all of them.

Here a rank writes and reads its range as a few rectangular blocks of the unsharded tensor. Blocks are what torch's
distributed format stores, so any other layout can read them. The keys and shapes are those of Megatron's format, so
checkpoints without this division are read as well.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)

from gdpo_nemo.weights.host_memory import host_memory_like

_SHARED = "shared"
"""Key of the blocks of replicated tensors in the state that ``load_divided`` requests."""


Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangular block of a tensor."""


def blocks(shape: Sequence[int], start: int, stop: int) -> Iterator[Block]:
    """Yield the blocks that make up a range of a flattened tensor, in order.

    Args:
        shape: shape of the tensor.
        start: first element of the range in row-major order.
        stop: end of the range (exclusive).
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    rest = tuple(shape[1:])
    row = math.prod(rest)
    first, last = -(-start // row), stop // row
    if first > last:  # the range lies within one row
        yield from _in_row(last, blocks(rest, start - last * row, stop - last * row))
        return
    # Only whole rows form one block. The ends of the range are divided along the next dimension.
    yield from _in_row(first - 1, blocks(rest, start - (first - 1) * row, row if start < first * row else 0))
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    yield from _in_row(last, blocks(rest, 0, stop - last * row))


def _in_row(row: int, inner: Iterator[Block]) -> Iterator[Block]:
    for offsets, sizes in inner:
        yield (row, *offsets), (1, *sizes)


def range_of(
    tensor: ShardedTensor, start: int, stop: int, values: torch.Tensor, replica_id: tuple[int, ...] = (0, 0, 0)
) -> list[ShardedTensor]:
    """Return a range of a rank's flattened tensor as blocks of the unsharded tensor.

    Args:
        tensor: the rank's tensor in Megatron's regular grid.
        start: first element of the range in the rank's tensor.
        stop: end of the range (exclusive).
        values: elements of the range. Shape: [stop - start]. The blocks are views of it.
        replica_id: identity of this copy of the range. Only the copy (0, 0, 0) is written.
    """
    leading = tensor.prepend_axis_num
    parts = []
    position = 0
    for offsets, sizes in blocks(tensor.local_shape, start, stop):
        size = math.prod(sizes)
        shape = (1,) * leading + sizes
        inner = (base + offset for base, offset in zip(tensor.global_offset[leading:], offsets, strict=True))
        part = ShardedTensor(
            tensor.key,
            values[position : position + size].view(shape),
            values.dtype,
            shape,
            tensor.global_shape,
            (*tensor.global_offset[:leading], *inner),
            None,  # an irregular grid
            replica_id,
            allow_shape_mismatch=tensor.allow_shape_mismatch,
        )
        parts.append(part)
        position += size
    return parts


def as_blocks(tensor: ShardedTensor) -> list[ShardedTensor]:
    """Return a rank's tensor as blocks of the unsharded tensor. Blocks are returned unchanged."""
    if not tensor.has_regular_grid:
        return [tensor]
    values = tensor.data.detach().contiguous().view(-1)
    return range_of(tensor, 0, len(values), values, tensor.replica_id)


def optimizer_ranges(optimizer: Any, model_state: dict[str, Any]) -> dict[int, dict[str, ShardedTensorFactory]]:
    """Return the state of a distributed optimizer on this rank as ranges of the unsharded tensors.

    The entries are numbered as in Megatron's format ``fully_sharded_model_space``, whose loader can restore them.

    Args:
        model_state: sharded state of the optimizer's model. Its entries contain the parameters themselves.
    """
    models = {part.data: part for part in nested_values(model_state) if _has_tensor(part)}
    state: dict[int, dict[str, ShardedTensorFactory]] = {}
    for number, (parameter, start, stop) in enumerate(_owned_ranges(optimizer)):
        model = models[parameter]
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        tensors.pop("step", None)  # the parameter groups contain it
        # The ranges of the data-parallel ranks differ. The first two numbers distinguish copies on other ranks.
        replica_id = (*model.replica_id[:2], 0)
        build = partial(_build_range, model=model, start=start, stop=stop)
        state[number] = {}
        for name, values in tensors.items():
            key = f"optimizer.state.{name}.{model.key}"
            merge = partial(_loaded_range, values=values)
            state[number][name] = _RangeFactory(key, values, build, merge, replica_id)
    return state


class _RangeFactory(ShardedTensorFactory):
    """Range of a flattened tensor, which Megatron converts to blocks when it saves or loads."""


def _has_tensor(part: Any) -> bool:
    return isinstance(part, (ShardedTensor, ShardedTensorFactory))


def _owned_ranges(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Yield (parameter, start, stop) of the ranges that a distributed optimizer updates on this rank."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _build_range(
    key: str,
    values: torch.Tensor,
    replica_id: tuple[int, ...],
    flattened_range: None,
    *,
    model: ShardedTensor | ShardedTensorFactory,
    start: int,
    stop: int,
) -> dict[str, ShardedTensor]:
    """Return the blocks of a range by number."""
    parts = []
    for tensor, first in _stored_parts(model, key):
        begin, end = max(start - first, 0), min(stop - first, math.prod(tensor.local_shape))
        if begin < end:
            own = values[first + begin - start : first + end - start]
            parts += range_of(tensor, begin, end, own, replica_id)
    return _numbered(parts)


def _numbered(parts: Sequence[ShardedTensor]) -> dict[str, ShardedTensor]:
    """Return the blocks by number, because Megatron reads and writes dictionaries of tensors."""
    return {str(number): part for number, part in enumerate(parts)}


def _stored_parts(model: ShardedTensor | ShardedTensorFactory, key: str) -> list[tuple[ShardedTensor, int]]:
    """Return (tensor in the checkpoint, its first element in the flattened parameter) of a parameter.

    Megatron stores the gate and the up-projection of a SwiGLU layer as two tensors.
    """
    if isinstance(model, ShardedTensor):
        return [(replace(model, key=key, data=None), 0)]
    outline = torch.empty(model.data.shape, dtype=model.data.dtype, device="meta")
    parts = list(nested_values(model.build_fn(key, outline, model.replica_id, None)))
    for part in parts:
        if not part.data.is_contiguous() or part.data._base is not outline:
            raise NotImplementedError(f"{key} is not stored as ranges of the parameter")
    return [(part, part.data.storage_offset()) for part in parts]


def _loaded_range(_: dict[str, torch.Tensor], *, values: torch.Tensor) -> torch.Tensor:
    """Return the range after loading. Its blocks are views, so the load has filled it."""
    return values


@dataclass(frozen=True)
class _Cut:
    """Part of a replicated tensor that one data-parallel rank reads or writes.

    Args:
        owner: rank in the data-parallel group.
        start: first element in the flattened tensor.
        stop: end (exclusive).
    """

    tensor: ShardedTensor
    owner: int
    start: int
    stop: int

    def values(self) -> torch.Tensor:
        """Return the elements. Shape: [stop - start]. They are a view of the tensor."""
        return self.tensor.data.detach().view(-1)[self.start : self.stop]

    def parts(self) -> list[ShardedTensor]:
        """Return the blocks of the unsharded tensor."""
        return range_of(self.tensor, self.start, self.stop, self.values())


def _cuts(tensors: Sequence[ShardedTensor], ranks: int) -> Iterator[_Cut]:
    """Divide replicated tensors into the same number of bytes for each of ``ranks``.

    The tensors form a sequence of bytes, which is cut ``ranks - 1`` times. So most tensors remain whole.
    """
    sizes = [tensor.data.nbytes for tensor in tensors]
    total = sum(sizes)
    position = 0
    for tensor, size in zip(tensors, sizes):
        item = tensor.data.element_size()
        start = 0
        # The maximum prevents a division by 0 if all tensors are empty.
        for owner in range(position * ranks // max(total, 1), ranks):
            end = total * (owner + 1) // ranks - position
            stop = min(-(-end // item), size // item)  # an element that a cut divides belongs to the rank before it
            if start < stop:
                yield _Cut(tensor, owner, start, stop)
            if end >= size:
                break
            start = stop
        position += size


@dataclass(frozen=True)
class _Division:
    """Replicated tensors of the ranks of a process group, divided among these ranks."""

    group: Any
    tensors: list[ShardedTensor]
    cuts: list[_Cut]

    def own_cuts(self) -> list[_Cut]:
        """Return the cuts of this rank."""
        rank = dist.get_rank(self.group)
        return [cut for cut in self.cuts if cut.owner == rank]


def _divisions(tensors: Sequence[ShardedTensor]) -> list[_Division]:
    """Divide the tensors that are replicated over groups of several ranks.

    The last number of a replica id is the rank in the group. Experts have a group of their own.
    """
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    expert = parallel_state.get_expert_data_parallel_group()
    found = []
    for group, is_expert in ((dense, False), (expert, True)):
        members = [tensor for tensor in tensors if (".experts." in tensor.key) == is_expert]
        ranks = dist.get_world_size(group)
        if not members or ranks == 1:
            continue
        for tensor in members:
            if tensor.replica_id[2] != dist.get_rank(group):
                raise NotImplementedError(f"{tensor.key} is not replicated over the data-parallel group")
        # Every rank computes the cuts of all ranks, so the order must not depend on the rank.
        members.sort(key=lambda tensor: (tensor.key, tensor.global_offset))
        found.append(_Division(group, members, list(_cuts(members, ranks))))
    return found


def divide(state: dict[str, Any]) -> None:
    """Divide the replicated tensors of a state among the data-parallel ranks, in place.

    Each tensor is replaced by the blocks that this rank writes, by number.
    """
    apply_factories(state)
    tensors = [part for part in nested_values(state) if isinstance(part, ShardedTensor) and part.has_regular_grid]
    # Tensors are found by identity, because ShardedTensor is not hashable.
    own: dict[int, list[ShardedTensor]] = {}
    for division in _divisions(tensors):
        for tensor in division.tensors:
            own[id(tensor)] = []
        for cut in division.own_cuts():
            # Copies on tensor-parallel ranks and pipeline stages are not written: the first two numbers identify them.
            if cut.tensor.replica_id[:2] == (0, 0):
                own[id(cut.tensor)] += cut.parts()

    def own_parts(part: Any) -> Any:
        if id(part) not in own:
            return part
        # Megatron would save an empty dictionary with the values that all ranks have in common.
        return _numbered(own[id(part)]) or LocalNonpersistentObject(None)

    dict_list_map_inplace(own_parts, state)


def load_divided(state: dict[str, Any], folder: str) -> dict[str, Any]:
    """Load a state, of which each data-parallel rank reads only its part of the replicated tensors; collective.

    The ranks then send each other their parts.

    Args:
        state: sharded state. Its tensors receive the values.

    Returns:
        The state with its tensors in place of the sharded ones.
    """
    views: dict[int, list[ShardedTensor]] = {}
    for part in nested_values(state):
        if _has_tensor(part) and not isinstance(part, _RangeFactory):
            views[id(part)] = _views(part)
    divisions = _divisions(list(chain.from_iterable(views.values())))
    divided: set[int] = set()
    for division in divisions:
        divided.update(map(id, division.tensors))
    requested = dict(state)

    def without_divided(part: Any) -> Any:
        # Megatron returns this object unchanged. Blocks of it are requested below, and `_exchange` adds the others.
        leaves = views.get(id(part))
        return LocalNonpersistentObject(part.data.detach()) if leaves and id(leaves[0]) in divided else part

    dict_list_map_inplace(without_divided, requested)
    own: list[ShardedTensor] = []
    for division in divisions:
        for cut in division.own_cuts():
            own += cut.parts()
    if own:
        requested[_SHARED] = _numbered(own)
    loaded = dist_checkpointing.load(requested, folder)
    loaded.pop(_SHARED, None)
    for division in divisions:
        _exchange(division)
    return loaded


def _views(part: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return the tensors in the checkpoint that a part consists of, or [] if they are not contiguous views of it."""
    leaves = [part] if isinstance(part, ShardedTensor) else list(nested_values(part.build()))
    storage = part.data.untyped_storage().data_ptr()
    fits = all(leaf.data.is_contiguous() and leaf.data.untyped_storage().data_ptr() == storage for leaf in leaves)
    return leaves if fits else []


def _exchange(division: _Division) -> None:
    """Send the parts that each rank of a group has read to the other ranks."""
    group = division.group
    # NCCL sends only GPU memory, and an offloaded reference is in host memory.
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    for owner in range(dist.get_world_size(group)):
        # One broadcast per data type: a model has thousands of tensors, and each broadcast takes time to start.
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for cut in division.cuts:
            if cut.owner == owner:
                by_dtype.setdefault(cut.tensor.data.dtype, []).append(cut.values())
        for views in by_dtype.values():
            buffer = torch.cat([view.to(device) for view in views])
            dist.broadcast(buffer, dist.get_global_rank(group, owner), group)
            for view, values in zip(views, buffer.split(list(map(len, views)))):
                view.copy_(values)


Place = tuple[str, tuple[int, ...]]
"""Key of a tensor in a checkpoint, and offset of a block in it."""


def place(part: ShardedTensor) -> Place:
    """Return the place of a block in a checkpoint."""
    return part.key, tuple(part.global_offset)


def own_weights(state: dict[str, Any], chunks: list[str]) -> list[ShardedTensor]:
    """Return the blocks of the model's weights that this rank writes, without data.

    Args:
        state: divided state (see ``divide``).
        chunks: keys of the model's chunks in the state.
    """
    found = []
    for name in chunks:
        for part in nested_values(state[name]):
            if isinstance(part, ShardedTensor) and is_main_replica(part.replica_id):
                found += [block.without_data() for block in as_blocks(part)]
    return found


def checksums(buckets: list[Any], places: set[Place]) -> dict[Place, int]:
    """Return the CRC-32 of the blocks at ``places`` in Megatron's write buckets."""
    sums = {}
    for _, _, (_, tensors) in buckets:
        for item, tensor in tensors:
            key = item.index.fqn, tuple(item.index.offset)
            if key in places:
                sums[key] = zlib.crc32(raw_bytes(tensor).numpy())
    return sums


def in_host_memory(buckets: list[Any], live: set[int]) -> list[Any]:
    """Return Megatron's write buckets with all tensors in host memory.

    Args:
        live: addresses of storages on the CPU that training changes, whose tensors must be copied. Megatron has copied
            the tensors that are parts of such storages.
    """
    tensors = []
    for _, _, (_, of_file) in buckets:
        tensors += [tensor for _, tensor in of_file]
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    copies = {id(tensor): tensor.clone() for tensor in tensors if tensor.untyped_storage().data_ptr() in live}
    for tensor, host in zip(on_gpu, host_memory_like(on_gpu, pinned=bool(on_gpu))):
        copies[id(tensor)] = with_own_storage(host.copy_(tensor, non_blocking=True))
    if on_gpu:
        torch.cuda.synchronize()
    copied = []
    for path, key, (blobs, of_file) in buckets:
        pairs = [(item, copies.get(id(tensor), tensor)) for item, tensor in of_file]
        copied.append((path, key, (blobs, pairs)))
    return copied


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same host memory whose storage contains nothing else. ``torch.save`` writes storages."""
    return torch.frombuffer(raw_bytes(tensor).numpy(), dtype=tensor.dtype).view(tensor.shape)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a CPU tensor. Shape: [bytes]. They are a view if the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def read_back(weights: list[ShardedTensor], folder: Path) -> dict[Place, int]:
    """Return the CRC-32 of this rank's blocks of the weights in the files; collective."""
    read = {}
    for number, weight in enumerate(weights):
        values = torch.empty(weight.local_shape, dtype=weight.dtype)
        raw_bytes(values).fill_(0xFF)  # NaN, which remains if a block is not read
        read[str(number)] = replace(weight, data=values)
    loaded = dist_checkpointing.load(dict(read), str(folder), validate_access_integrity=False)
    return {place(weight): zlib.crc32(raw_bytes(loaded[key]).numpy()) for key, weight in read.items()}
