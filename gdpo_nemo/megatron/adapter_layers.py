"""Matrices of LoRA adapters beside Megatron's linear layers, in the layout of each layer. See ``lora``."""

from __future__ import annotations

import contextlib
import math
import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes

from gdpo_nemo.config.schema import LoraConfig
from gdpo_nemo.megatron.optimizer import mark_as_output
from gdpo_nemo.megatron.weight_map import Weight
from gdpo_nemo.models.architectures import last_name
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.weights import COLUMNS, DELTA_ROWS, GATED_ROWS, MAMBA_ROWS


def initial_a(module: str, rank: int, width: int, seed: int, init: str = "uniform") -> torch.Tensor:
    """Sample the initial A of a Hugging Face module, float32 [rank, width]. The result does not depend on the layout.

    Args:
        init: ``uniform`` as in PEFT, or ``xavier`` (Glorot and Bengio 2010, normal), the default of NeMo's adapters.
    """
    generator = torch.Generator().manual_seed((zlib.crc32(module.encode()) + seed) % 2**32)
    if init == "xavier":
        return torch.empty(rank, width).normal_(0.0, math.sqrt(2 / (rank + width)), generator=generator)
    bound = 1 / math.sqrt(width)
    return torch.empty(rank, width).uniform_(-bound, bound, generator=generator)


class Part(NamedTuple):
    """Rows of a Megatron linear layer: queries, keys, values, the gate projection, the up projection, or all rows."""

    module: str
    """Hugging Face module that contains these rows. A fused module also contains other rows."""
    height: int
    """Number of rows, over all tensor-parallel ranks."""
    suffix: str
    """Suffix of B's key in a checkpoint, which is empty unless the module has several parts."""


class Pair(torch.nn.Module):
    """This rank's shards of the matrices A and B for one part of a layer. B is initialised to 0.

    Args:
        width: input size of the layer, over all tensor-parallel ranks.
        by_columns: True if the layer's weight is split by columns.
        like: tensor with the data type and device of the matrices.
        group: tensor-parallel group that splits the layer's weight.
        shared: matrix A of another pair to reuse, or None to create a new A.
    """

    def __init__(
        self,
        part: Part,
        width: int,
        settings: LoraConfig,
        seed: int,
        *,
        by_columns: bool,
        like: torch.Tensor,
        group: dist.ProcessGroup,
        shared: torch.nn.Parameter | None = None,
    ):
        super().__init__()
        self.part = part
        self.by_columns = by_columns
        self.owns_a = shared is None
        a = initial_a(part.module, settings.rank, width, seed, settings.init)
        a = a.chunk(group.size(), 1)[group.rank()].contiguous() if by_columns else a
        rows = part.height if by_columns else part.height // group.size()
        self.a = torch.nn.Parameter(a.to(like)) if shared is None else shared
        self.b = torch.nn.Parameter(torch.zeros(rows, settings.rank).to(like))
        for matrix, split, dim in ((self.a, by_columns, 1), (self.b, not by_columns, 0)):
            if matrix is not shared:
                set_tensor_model_parallel_attributes(matrix, split, dim if split else -1, 1)


class Adapters(torch.nn.Module):
    """Adapters of a Megatron linear layer, which compute scale * B A x for each part, in the layout of the layer.

    Args:
        weight: the layer's weight.
        matrix: this rank's shard of the weight.
        sequence_parallel: True if the tensor-parallel ranks have the inputs or outputs of different tokens.
    """

    def __init__(
        self,
        weight: Weight,
        matrix: torch.Tensor,
        model: ModelDescription,
        settings: LoraConfig,
        seed: int,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        self.by_columns = weight.split == COLUMNS
        self.sequence_parallel = sequence_parallel
        self.scale = settings.alpha / settings.rank
        self.dropout = settings.dropout
        self.enabled = True
        self.group = self._split_group()
        heads = weight.heads
        self.query_groups = heads.groups // self.group.size() if heads else None
        self.gate_size = heads.size if heads and model.output_gate else None
        self.key_heads = _rows_by_key_head(weight, model)
        self.parts = _parts(weight, matrix.size(0) * (1 if self.by_columns else self.group.size()), model)
        width = matrix.size(1) * (self.group.size() if self.by_columns else 1)
        like = matrix.detach()
        pairs: list[Pair] = []
        for part in self.parts:
            if last_name(part.module) in settings.target_modules:
                # The parts of a module are rows of the same B, so they share A.
                like_last = pairs and (settings.share_a or pairs[-1].part.module == part.module)
                shared = pairs[-1].a if like_last else None
                options: dict[str, Any] = dict(by_columns=self.by_columns, like=like, group=self.group, shared=shared)
                pairs.append(Pair(part, width, settings, seed, **options))
        # Under sequence parallelism, each tensor-parallel rank processes only some of the tokens, so Megatron must sum
        # the gradients of replicated matrices.
        if self.sequence_parallel:
            for pair in pairs:
                replicated: Any = pair.b if self.by_columns else pair.a
                replicated.sequence_parallel = True
        # The type is Any, because ModuleList does not preserve the type of its modules.
        self.pairs: Any = torch.nn.ModuleList(pairs)
        for parameter in self.parameters():  # Megatron chooses the data-parallel group by this attribute
            setattr(parameter, "allreduce", getattr(matrix, "allreduce", True))  # noqa: B010

    def _split_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the term to add to the layer's output, for the layer's (sharded) input ``x``."""
        x = self._drop(x)
        if self.by_columns:
            (pair,) = self.pairs
            inner = F.linear(x, pair.a)
            if self.sequence_parallel:
                inner = tensor_parallel.reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
            else:
                inner = tensor_parallel.reduce_from_tensor_model_parallel_region(inner, group=self.group)
            return F.linear(inner, pair.b) * self.scale
        distinct = [pair.a for pair in self.pairs if pair.owns_a]
        inner = F.linear(x, torch.cat(distinct) if len(distinct) > 1 else distinct[0])
        if self.sequence_parallel:
            inner = tensor_parallel.gather_from_sequence_parallel_region(inner, group=self.group)
        else:
            inner = tensor_parallel.copy_to_tensor_model_parallel_region(inner, group=self.group)
        inners = iter(inner.chunk(len(distinct), -1))
        outputs = {}
        for pair in self.pairs:
            if pair.owns_a:
                inner = next(inners)
            outputs[pair.part] = F.linear(inner, pair.b)
        return self._fuse(outputs, inner) * self.scale

    @property
    def drops(self) -> bool:
        """True if ``forward`` applies dropout, which uses random numbers."""
        return bool(self.dropout and self.training)

    @property
    def _is_sharded(self) -> bool:
        """True if the ranks of the group have different inputs."""
        return self.by_columns or self.sequence_parallel

    def _drop(self, x):
        if not self.drops:
            return x
        with get_cuda_rng_tracker().fork() if self._is_sharded else contextlib.nullcontext():
            return F.dropout(x, self.dropout)

    def _fuse(self, outputs: dict[Part, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Combine the outputs of the parts in Megatron's order: [gate, up], or [q, k, v] for each query group.

        Parts without adapters are filled with zeros.
        """
        parts = []
        for part in self.parts:
            rows = outputs.get(part)
            parts.append(like.new_zeros(*like.shape[:-1], part.height // self.group.size()) if rows is None else rows)
        if self.query_groups:
            parts = [part.unflatten(-1, (self.query_groups, -1)) for part in parts]
            if self.gate_size:  # from [query, gate] of each head to all queries, then all gates
                parts[0] = parts[0].unflatten(-1, (-1, 2, self.gate_size)).transpose(-3, -2).flatten(-3)
            return torch.cat(parts, -1).flatten(-2)
        if self.key_heads:
            sections = []
            for module, heights in zip(parts, self.key_heads):
                by_head = module.unflatten(-1, (-1, sum(heights)))
                sections += [section.flatten(-2) for section in by_head.split(heights, -1)]
            parts = sections
        return torch.cat(parts, -1)


class HeadAdapter(Adapters):
    """Adapters of the output layer. The input of these adapters is replicated on the tensor-parallel ranks.

    Under sequence parallelism, their input is also replicated.
    """

    def __init__(self, weight: Weight, matrix: torch.Tensor, model: ModelDescription, settings: LoraConfig, seed: int):
        super().__init__(weight, matrix, model, settings, seed)
        self.vocab_size = model.vocabulary
        mark_as_output(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the term to add to this rank's columns of the logits."""
        (pair,) = self.pairs
        # Each rank computes A's gradient from its part of the vocabulary. The backward pass of this function sums the
        # gradient over the ranks. The other layers apply the function to A x, but for this layer that would also sum
        # the input's gradient, which the model already sums.
        a = tensor_parallel.copy_to_tensor_model_parallel_region(pair.a, group=self.group)
        return F.linear(F.linear(self._drop(x), a), pair.b) * self.scale


class ExpertAdapters(Adapters):
    """Adapters of a linear layer of one expert.

    The token dispatcher communicates the tokens of all ranks before and after the experts. It also sums the outputs and
    the gradients of the inputs over the expert-tensor-parallel group. These adapters therefore compute only this rank's
    terms of both, and sum only the gradients of their replicated matrices.
    """

    def _split_group(self) -> dist.ProcessGroup:
        return parallel_state.get_expert_tensor_parallel_group()

    @property
    def _is_sharded(self) -> bool:
        return self.by_columns or self.group.size() == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the term to add to the layer's output, for the tokens x [tokens, in] of the expert."""
        x = self._drop(x)
        if self.by_columns:
            (pair,) = self.pairs
            return F.linear(F.linear(x, pair.a), self._replicated(pair.b)) * self.scale
        outputs = {pair.part: F.linear(F.linear(x, self._replicated(pair.a)), pair.b) for pair in self.pairs}
        return self._fuse(outputs, x) * self.scale

    def _replicated(self, matrix: torch.Tensor) -> torch.Tensor:
        return tensor_parallel.copy_to_tensor_model_parallel_region(matrix, group=self.group)


class GroupedAdapters(torch.nn.Module):
    """Adapters of the local experts, whose linear layers TransformerEngine computes together."""

    def __init__(self, experts: list[ExpertAdapters]):
        super().__init__()
        self.experts: Any = torch.nn.ModuleList(experts)

    @property
    def enabled(self) -> bool:
        """True unless the adapters are disabled."""
        return bool(self.experts[0].enabled)

    def forward(self, x: torch.Tensor, tokens_per_expert: Any) -> torch.Tensor:
        """Return the term to add to the layer's output, for x [tokens, in], ordered by expert."""
        parts = x.split([int(tokens) for tokens in tokens_per_expert])
        return torch.cat([adapters(part) for adapters, part in zip(self.experts, parts)])


def _parts(weight: Weight, rows: int, model: ModelDescription) -> list[Part]:
    """Return the parts of a linear layer with ``rows`` rows over all tensor-parallel ranks."""
    modules, heights = weight.modules, [rows]
    if heads := weight.heads:
        queries = model.heads * heads.size * (1 + model.output_gate)
        heights = [queries, *[heads.groups * heads.size] * (1 if heads.keys_as_values else 2)]
    elif weight.split == GATED_ROWS:
        heights = [rows // 2] * 2
    elif weight.split == MAMBA_ROWS:
        heights = list(model.mamba)
    elif weight.split == DELTA_ROWS:
        sections = model.delta.sections
        if model.delta_by_key_head:
            heights = [sum(sections[:4]), sum(sections[4:])]
        else:
            names = [modules[0]] * 3 + list(modules[1:])
            suffixes = [".0", ".1", ".2", "", "", ""]
            return [Part(*of_part) for of_part in zip(names, sections, suffixes)]
    if len(modules) == len(heights):
        return [Part(module, height, "") for module, height in zip(modules, heights)]
    return [Part(modules[0], height, f".{index}") for index, height in enumerate(heights)]


def _rows_by_key_head(weight: Weight, model: ModelDescription) -> tuple[list[int], list[int]] | None:
    """Return the rows of each section of a key head in the two modules of a gated delta net's input projection, or
    None if the rows of the modules are not ordered by key head."""
    if weight.split != DELTA_ROWS or not model.delta_by_key_head:
        return None
    rows = [section // model.delta.key_heads for section in model.delta.sections]
    return rows[:4], rows[4:]
