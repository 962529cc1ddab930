"""Pieces of Hugging Face tensors that each policy rank sends in a weight update, without gathering them first.

A rank holds rows, or a range of columns, of Hugging Face tensors. Ranks that hold the same pieces are replicas: data-
and context-parallel ranks, and for tensors that are not split, tensor-parallel ranks as well. They divide these pieces
without communication, because each of them computes the same division. The plan is made once and contains positions
only, so each update reads the current values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import PretrainedConfig

from gdpo_nemo.megatron.conversion import as_slice, expert_sources, local_rows, local_weights, own_expert, split_group
from gdpo_nemo.megatron.model_config import description_of
from gdpo_nemo.megatron.weight_map import STACKED_EXPERT, Weight
from gdpo_nemo.models.weights import COLUMNS, REPLICATED
from gdpo_nemo.weights.pieces import Piece, Region

_MOST_SENDERS = 16
"""Number of ranks that replicas do not exceed when they share the sending. An engine needs a communicator for each rank
that sends, and its link is the limit. More ranks send only if the layout divides a single copy of the model further."""
_CUT_BYTES = 16 << 20
"""Size of a piece in bytes above which its replicas send equal parts of it. One of them sends a smaller piece."""


@dataclass(frozen=True)
class _Part:
    """Position of a piece in a parameter of this rank."""

    name: str
    region: Region | None
    rows: slice | torch.Tensor
    """Rows of the parameter, as an index on its device if they are not consecutive."""
    transposed: bool
    is_slice: bool
    """True if the piece belongs to one expert of a stacked tensor."""

    def piece(self, tensor: torch.Tensor) -> Piece:
        """Return the piece with the current values. It is a view of the parameter if the rows are consecutive."""
        values = tensor[self.rows]
        values = values.t() if self.transposed else values
        return Piece(self.name, values[None] if self.is_slice else values, self.region)


class _Replicas:
    """Division of pieces among the ranks that hold them.

    Args:
        rank: index of this rank among the replicas.
        size: number of replicas.
    """

    def __init__(self, rank: int, size: int):
        self._rank = rank
        parts = dist.get_world_size() // size
        self._loads = [0] * min(size, max(1, _MOST_SENDERS // parts))
        """Bytes of each sending replica."""

    def share(self, nbytes: int) -> float:
        """Return the average bytes of a sending replica for a tensor of ``nbytes``."""
        return nbytes / len(self._loads)

    def take(self, rows: int, row_bytes: int) -> range:
        """Return the rows of a piece that this rank sends. All replicas call this method for the same pieces."""
        count = len(self._loads)
        if rows * row_bytes > _CUT_BYTES:
            bounds = [rows * index // count for index in range(count + 1)]
        else:
            least = self._loads.index(min(self._loads))
            bounds = [0] * (least + 1) + [rows] * (count - least)
        for index in range(count):
            self._loads[index] += (bounds[index + 1] - bounds[index]) * row_bytes
        return range(*bounds[self._rank : self._rank + 2]) if self._rank < count else range(0)


def _replicas(is_expert: bool, is_whole: bool) -> _Replicas:
    """Return the replicas of a kind of weight.

    Args:
        is_expert: True for weights of experts.
        is_whole: True for weights that are not split over tensor-parallel ranks.
    """
    if is_expert:
        group = parallel_state.get_expert_data_parallel_group()
        split = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        split = parallel_state.get_tensor_model_parallel_group()
    if not is_whole:
        return _Replicas(group.rank(), group.size())
    # Tensor-parallel ranks come first, so that the ranks that send parts of split tensors send these as well.
    return _Replicas(group.rank() * split.size() + split.rank(), group.size() * split.size())


class RankPieces:
    """Pieces that this rank sends. The constructor is collective.

    Args:
        tower: False to leave out the weights of a vision tower.
    """

    def __init__(self, chunks: list[torch.nn.Module], config: PretrainedConfig, tower: bool):
        self._chunks = chunks
        self._model = description_of(config)
        self._tower = tower
        kinds = [(is_expert, is_whole) for is_expert in (False, True) for is_whole in (False, True)]
        self._replicas = {kind: _replicas(*kind) for kind in kinds}
        first = self._share_of_first_stage()
        self._plan = [list(self._parts(tensor, weight, first)) for tensor, weight in self._weights()]

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces with the current values, in the order of the model's layers."""
        for (tensor, _), parts in zip(self._weights(), self._plan, strict=True):
            for part in parts:
                yield part.piece(tensor.detach())

    def _weights(self) -> list[tuple[torch.Tensor, Weight]]:
        """Return the weights of this rank. A tied output layer comes first: an engine gets the embedding early."""
        weights = [pair for pair in local_weights(self._chunks, self._model) if self._tower or not pair[1].tower]
        return sorted(weights, key=lambda pair: not pair[1].tied)

    def _replicas_of(self, weight: Weight) -> _Replicas:
        return self._replicas[weight.expert is not None, weight.split == REPLICATED]

    def _share_of_first_stage(self) -> float:
        """Return the share of a tied embedding that the first pipeline stage sends.

        The last stage has a copy, and sends the other rows, so that both stages send the same number of bytes.
        """
        stages = parallel_state.get_pipeline_model_parallel_group()
        if stages.size() == 1 or not self._model.tied:
            return 1.0
        shares = {True: 0.0, False: 0.0}
        for tensor, weight in self._weights():
            shares[weight.vocabulary] += self._replicas_of(weight).share(tensor.nbytes)
        by_stage = [shares] * stages.size()
        dist.all_gather_object(by_stage, shares, group=stages)
        first, last = by_stage[0], by_stage[-1]
        if not last[True]:  # a reward model has a score head instead
            return 1.0
        return min(max((last[False] - first[False] + first[True]) / (2 * first[True]), 0.0), 1.0)

    def _parts(self, tensor: torch.Tensor, weight: Weight, first: float) -> Iterator[_Part]:
        """Yield the parts of a parameter that this rank sends.

        Args:
            first: result of ``_share_of_first_stage``.
        """
        names = expert_sources(weight.sources, own_expert(weight))
        for name, local in zip(names, local_rows(tensor, weight, self._model)):
            held = np.flatnonzero(local >= 0)
            for run in np.split(held, np.flatnonzero(np.diff(held) > 1) + 1):
                cut = round(first * len(run)) if weight.vocabulary and self._model.tied else len(run)
                run = run[cut:] if weight.tied else run[:cut]
                own = self._replicas_of(weight).take(len(run), tensor[:1].nbytes)
                if own:
                    start = int(run[own.start])
                    yield _part(name, tensor, weight, local[start : start + len(own)], (start, len(local)))


def _part(name: str, tensor: torch.Tensor, weight: Weight, local: torch.Tensor, position: tuple[int, int]) -> _Part:
    """Return the part with consecutive rows of a Hugging Face tensor.

    Args:
        local: rows in the parameter.
        position: first row in the Hugging Face tensor, and number of its rows.
    """
    start, whole = [0] * tensor.dim(), list(tensor.shape)
    start[0], whole[0] = position
    if weight.split == COLUMNS:
        group = split_group(weight)
        start[1], whole[1] = group.rank() * tensor.size(1), group.size() * tensor.size(1)
    shape = [len(local), *tensor.shape[1:]]
    transposed = weight.interleaved and tensor.dim() == 2
    if transposed:
        start, whole, shape = start[::-1], whole[::-1], shape[::-1]
    stacked = STACKED_EXPERT.fullmatch(name)
    if stacked:
        name = stacked[1]
        start, whole, shape = [int(stacked[2]), *start], [weight.experts, *whole], [1, *shape]
    region = None if shape == whole else Region(tuple(start), tuple(whole))
    rows = as_slice(local)
    rows = rows if isinstance(rows, slice) else rows.to(tensor.device)
    return _Part(name, region, rows, transposed, stacked is not None)
