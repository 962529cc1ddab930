"""LoRA (arXiv 2106.09685) on Megatron's linear layers, with one pair of matrices A, B per Hugging Face module.

Megatron fuses q, k, v into one layer, and gate, up into another. Each of these modules has a separate pair, so that the
trained matrices form a PEFT adapter of the Hugging Face model in every layout. With ``share_a``, the pairs of a fused
layer share one A, which is equivalent to NeMo's adapters of fused layers. If the Hugging Face module itself is fused,
its pair is stored as one A and a B for each part of the layer. If a weight is split by rows (q, k, v, gate, up,
lm_head), A is replicated on the tensor-parallel ranks and B is split. If a weight is split by columns (o, down), A is
split and B is replicated.
"""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from typing import Any, Iterator, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from transformers import PretrainedConfig

from gdpo_nemo.config.schema import LoraConfig
from gdpo_nemo.megatron.model_config import family_of, fields_of, head_size, hf_layers
from gdpo_nemo.models.architectures import delta_linear, delta_sizes, last_name, mamba_linear, mamba_sections
from gdpo_nemo.models.families import Family
from gdpo_nemo.models.family_checks import check_adapted_layers
from gdpo_nemo.weights.adapters import Pairs, peft_name

_LINEAR_NAME = re.compile(
    r"decoder\.layers\.(\d+)\."
    r"(self_attention\.linear_(?:qkv|proj|q_proj|q_up_proj|kv_up_proj)|mlp\.linear_fc[12]"
    r"|(?:mixer|self_attention)\.(?:in|out)_proj)"
)
_HEAD = "output_layer"
_QKV = "self_attention.linear_qkv"
_GATE_UP = "mlp.linear_fc1"
_LATENT = ("self_attention.linear_q_proj", "self_attention.linear_q_up_proj", "self_attention.linear_kv_up_proj")
_MAMBA_IN = "mixer.in_proj"
_DELTA_IN = "self_attention.in_proj"
_DELTA_OUT = "self_attention.out_proj"
_SPLIT_BY_COLUMNS = ("self_attention.linear_proj", "mlp.linear_fc2", "mixer.out_proj", _DELTA_OUT)


def _hf_modules(linear_name: str, family: Family) -> tuple[str, ...]:
    """Return the Hugging Face modules that a linear layer of Megatron contains."""
    modules = family.modules
    attention_output, down, mamba_out, _ = _SPLIT_BY_COLUMNS
    if linear_name in _LATENT:  # in this order in the modules of latent attention
        return (modules.qkv[_LATENT.index(linear_name)],)
    if linear_name in (_MAMBA_IN, mamba_out):
        return (mamba_linear(family)[linear_name == mamba_out],)
    if linear_name in (_DELTA_IN, _DELTA_OUT):
        *projections, output = delta_linear(family)
        return (output,) if linear_name == _DELTA_OUT else tuple(projections)
    return {
        _QKV: modules.qkv,
        attention_output: (modules.attention_output,),
        _GATE_UP: modules.gate_up,
        down: (modules.down,),
    }[linear_name]


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
        shared: matrix A of another pair to reuse, or None to create a new A.
    """

    def __init__(
        self,
        part: Part,
        width: int,
        by_columns: bool,
        settings: LoraConfig,
        seed: int,
        like: torch.Tensor,
        shared: torch.nn.Parameter | None = None,
    ):
        super().__init__()
        self.part = part
        self.by_columns = by_columns
        self.owns_a = shared is None
        group = parallel_state.get_tensor_model_parallel_group()
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
        linear_name: name of the layer within a Megatron layer, or ``output_layer``.
        modules: Hugging Face modules that the layer contains.
        linear: the Megatron layer.
    """

    def __init__(
        self,
        linear_name: str,
        modules: tuple[str, ...],
        linear: Any,
        hf: PretrainedConfig,
        settings: LoraConfig,
        seed: int,
    ):
        super().__init__()
        self.by_columns = linear_name in _SPLIT_BY_COLUMNS
        self.sequence_parallel = linear.config.sequence_parallel and linear_name != _HEAD
        self.scale = settings.alpha / settings.rank
        self.dropout = settings.dropout
        self.enabled = True
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.query_groups = hf.num_key_value_heads // self.group.size() if linear_name == _QKV else None
        self.gate_size = head_size(hf) if linear_name == _QKV and family_of(hf).output_gate else None
        self.key_heads = _rows_by_key_head(linear_name, hf)
        self.parts = _parts(linear_name, modules, linear, hf, self.group.size())
        width = linear.weight.size(1) * (self.group.size() if self.by_columns else 1)
        like = linear.weight.detach()
        pairs: list[Pair] = []
        for part in self.parts:
            if last_name(part.module) in settings.target_modules:
                # The parts of a module are rows of the same B, so they share A.
                like_last = pairs and (settings.share_a or pairs[-1].part.module == part.module)
                shared = pairs[-1].a if like_last else None
                pairs.append(Pair(part, width, self.by_columns, settings, seed, like, shared))
        # Under sequence parallelism, each tensor-parallel rank processes only some of the tokens, so Megatron must sum
        # the gradients of replicated matrices.
        if self.sequence_parallel:
            for pair in pairs:
                matrix: Any = pair.b if self.by_columns else pair.a
                matrix.sequence_parallel = True
        # The type is Any, because ModuleList does not preserve the type of its modules.
        self.pairs: Any = torch.nn.ModuleList(pairs)

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

    def _drop(self, x):
        if not self.drops:
            return x
        sharded = self.by_columns or self.sequence_parallel
        with get_cuda_rng_tracker().fork() if sharded else contextlib.nullcontext():
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
            parts = [
                piece.flatten(-2)
                for part, rows in zip(parts, self.key_heads)
                for piece in part.unflatten(-1, (-1, sum(rows))).split(rows, -1)
            ]
        return torch.cat(parts, -1)


class HeadAdapter(Adapters):
    """Adapters of the output layer. The input of these adapters is replicated on the tensor-parallel ranks.

    Under sequence parallelism, their input is also replicated.
    """

    def __init__(self, module: str, linear: Any, hf: PretrainedConfig, settings: LoraConfig, seed: int):
        super().__init__(_HEAD, (module,), linear, hf, settings, seed)
        self.vocab_size = hf.vocab_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the term to add to this rank's columns of the logits."""
        (pair,) = self.pairs
        # Each rank computes A's gradient from its part of the vocabulary. The backward pass of this function sums the
        # gradient over the ranks. The other layers apply the function to A x, but for this layer that would also sum
        # the input's gradient, which the model already sums.
        a = tensor_parallel.copy_to_tensor_model_parallel_region(pair.a, group=self.group)
        return F.linear(F.linear(self._drop(x), a), pair.b) * self.scale


def _parts(linear_name: str, modules: tuple[str, ...], linear: Any, hf: PretrainedConfig, ranks: int) -> list[Part]:
    rows = linear.weight.size(0) * (1 if linear_name in _SPLIT_BY_COLUMNS else ranks)
    heights = [rows]
    if linear_name == _QKV:
        size = head_size(hf)
        queries = hf.num_attention_heads * size * (1 + family_of(hf).output_gate)
        heights = [queries, *[hf.num_key_value_heads * size] * 2]
    elif linear_name == _GATE_UP and family_of(hf).gated_mlp:
        heights = [rows // 2] * 2
    elif linear_name == _MAMBA_IN:
        heights = list(mamba_sections(fields_of(hf)))
    elif linear_name == _DELTA_IN and (sizes := delta_sizes(fields_of(hf))):
        sections = sizes.sections
        if _rows_by_key_head(linear_name, hf):
            heights = [sum(sections[:4]), sum(sections[4:])]
        else:
            names = [modules[0]] * 3 + list(modules[1:])
            suffixes = [".0", ".1", ".2", "", "", ""]
            return [Part(*of_part) for of_part in zip(names, sections, suffixes)]
    if len(modules) == len(heights):
        return [Part(module, height, "") for module, height in zip(modules, heights)]
    return [Part(modules[0], height, f".{index}") for index, height in enumerate(heights)]


def _rows_by_key_head(linear_name: str, hf: PretrainedConfig) -> tuple[list[int], list[int]] | None:
    """Return the rows of each section of a key head in the two modules of a gated delta net's input projection, or
    None if the rows of the modules are not ordered by key head."""
    delta = family_of(hf).delta
    sizes = delta_sizes(fields_of(hf))
    if linear_name != _DELTA_IN or delta is None or sizes is None or not delta.by_key_head:
        return None
    rows = [section // sizes.key_heads for section in sizes.sections]
    return rows[:4], rows[4:]


def _forward_hook(adapters: Adapters):
    def hook(module, arguments, output):
        if not adapters.enabled:
            return output
        return output[0] + adapters(arguments[0]), *output[1:]

    return hook


def attach(chunks: list[torch.nn.Module], hf: PretrainedConfig, settings: LoraConfig, seed: int) -> None:
    """Freeze the chunks and add trainable adapters to their linear layers.

    Raises:
        ConfigError: if the model does not have the layers in ``target_modules``, or if they cannot be adapted. Experts
            and an output layer that is tied to the embedding cannot be adapted.
    """
    family = family_of(hf)
    modules = family.modules
    layers = hf_layers(hf)
    check_adapted_layers(settings.target_modules, fields_of(hf))
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.post_process and last_name(modules.head) in settings.target_modules:
            # PolicyModel computes its logits in chunks without calling this layer, so it must apply the adapter itself.
            output_layer: Any = chunk.output_layer
            output_layer.adapters = HeadAdapter(modules.head, output_layer, hf, settings, seed)
        decoder: Any = chunk.decoder
        for name, linear in list(chunk.named_modules()):
            match = _LINEAR_NAME.fullmatch(name)
            if match is None:
                continue
            layer = modules.layer.format(layers[decoder.layers[int(match[1])].layer_number - 1])
            hf_modules = tuple(layer + module for module in _hf_modules(match[2], family))
            adapters = Adapters(match[2], hf_modules, linear, hf, settings, seed)
            if len(adapters.pairs):
                linear.adapters = adapters
                linear.register_forward_hook(_forward_hook(adapters))


def adapters_of(chunks: list[torch.nn.Module]) -> Iterator[Adapters]:
    """Yield the adapters of every adapted linear layer of this rank."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapters))


@contextlib.contextmanager
def adapters_disabled(chunks: list[torch.nn.Module]) -> Iterator[None]:
    """Disable the adapters in the block. The model is then the reference model."""
    all_adapters = list(adapters_of(chunks))
    for adapters in all_adapters:
        adapters.enabled = False
    try:
        yield
    finally:
        for adapters in all_adapters:
            adapters.enabled = True


@torch.no_grad()
def gather_adapters(chunks: list[torch.nn.Module]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the unsharded adapters of the complete model on every rank, in host memory. This call is collective.

    Returns:
        (A [rank, in], B [out, rank]) by Hugging Face module.
    """
    group = parallel_state.get_tensor_model_parallel_group()

    def gathered(tensor, dim):
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim).cpu()

    stage_matrices = {}
    for adapters in adapters_of(chunks):
        matrices: dict[str, list[torch.Tensor]] = {}
        for pair in adapters.pairs:
            a = pair.a.detach()
            b = pair.b.detach()
            if pair.by_columns:
                a, b = gathered(a, 1), b.cpu().clone()
            else:
                a, b = a.cpu().clone(), gathered(b, 0)
            matrices.setdefault(pair.part.module, [a]).append(b)
        for module, (a, *rows) in matrices.items():
            b = torch.cat(rows)
            if isinstance(adapters, HeadAdapter):  # remove the rows with which Megatron pads the vocabulary
                b = b[: adapters.vocab_size].clone()
            stage_matrices[module] = a, b
    stages = parallel_state.get_pipeline_model_parallel_group()
    by_stage: list[Any] = [None] * stages.size()
    dist.all_gather_object(by_stage, stage_matrices, group=stages)
    return {module: pair for modules in by_stage for module, pair in modules.items()}


def sharded_adapters(chunk: torch.nn.Module) -> dict[str, Any]:
    """Return a chunk's adapters as sharded tensors of Megatron's checkpoint format.

    The keys are PEFT's names, which do not depend on the layout.
    """
    state = {}
    for adapters, key, parameter, axis in _matrices(chunk):
        if axis is None:
            state[key] = make_sharded_tensor_for_checkpoint(parameter, key)
        else:
            # The padding of the vocabulary depends on the number of ranks, and so does the shape of the head's B.
            is_padded = isinstance(adapters, HeadAdapter)
            state[key] = make_tp_sharded_tensor_for_checkpoint(
                parameter, key, tp_axis=axis, allow_shape_mismatch=is_padded
            )
    return state


def _matrices(chunk: torch.nn.Module) -> Iterator[tuple[Adapters, str, torch.nn.Parameter, int | None]]:
    """Yield (adapters, PEFT's name, shard, split dimension) for every matrix of a chunk.

    The split dimension is None for a replicated matrix. A matrix A that several pairs share is yielded only once.
    """
    for adapters in adapters_of([chunk]):
        for pair in adapters.pairs:
            module = pair.part.module
            if pair.owns_a:
                yield adapters, peft_name(module, "A"), pair.a, 1 if pair.by_columns else None
            yield adapters, peft_name(module, "B") + pair.part.suffix, pair.b, None if pair.by_columns else 0


@torch.no_grad()
def load_adapters(chunk: torch.nn.Module, state: dict[str, Any]) -> None:
    """Copy loaded tensors into a chunk's adapters.

    Args:
        state: result of ``sharded_adapters`` after Megatron has loaded it from a checkpoint.
    """
    for _, key, parameter, _ in _matrices(chunk):
        parameter.copy_(state[key])


@torch.no_grad()
def start_adapters(chunks: list[torch.nn.Module], pairs: Pairs) -> None:
    """Initialise this rank's adapters from unsharded matrices.

    Args:
        pairs: matrices of every adapted module, with the shapes that the model requires.

    Raises:
        KeyError: if an adapted module is missing.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    for adapters in adapters_of(chunks):
        rows: dict[str, int] = {}
        for pair in adapters.pairs:
            a, b = pairs[pair.part.module]
            first = rows.get(pair.part.module, 0)
            last = rows[pair.part.module] = first + pair.part.height
            b = b[first:last]
            if isinstance(adapters, HeadAdapter):  # Megatron pads the vocabulary
                b = F.pad(b, (0, 0, 0, pair.part.height - len(b)))
            pair.a.copy_(a.chunk(group.size(), 1)[group.rank()] if pair.by_columns else a)
            pair.b.copy_(b if pair.by_columns else b.chunk(group.size())[group.rank()])
