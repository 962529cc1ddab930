"""LoRA (arXiv 2106.09685) on Megatron's linear layers, one pair of matrices per Hugging Face module.

Megatron fuses q, k, v and gate, up; the pairs stay apart, so that what is trained is exactly a PEFT adapter of the
Hugging Face model, at every layout. With ``share_a`` the pairs of a fused layer have one A, which NeMo's adapters of
such a layer come to. Where the Hugging Face module is fused itself, its one pair is kept as an A and a B for each of
its parts. For a matrix split by rows (q, k, v, gate, up, lm_head) A is whole on every tensor-parallel rank and B is
split; for one split by columns (o, down) A is split and B is whole.
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

from gdpo_nemo.config.architectures import check_adapted_layers
from gdpo_nemo.config.families import Modules, last_name
from gdpo_nemo.config.schema import LoraConfig
from gdpo_nemo.megatron.hf_mapping import family_of, head_size
from gdpo_nemo.weights.adapters import Pairs, peft_name

_SITE = re.compile(
    r"decoder\.layers\.(\d+)\.(self_attention\.linear_qkv|self_attention\.linear_proj|mlp\.linear_fc1|mlp\.linear_fc2)"
)
_HEAD = "output_layer"
_QKV = "self_attention.linear_qkv"
_GATE_UP = "mlp.linear_fc1"
_SPLIT_BY_COLUMNS = ("self_attention.linear_proj", "mlp.linear_fc2")


def _modules_of(site: str, modules: Modules) -> tuple[str, ...]:
    """The Hugging Face modules in a linear layer of Megatron's."""
    attention_output, down = _SPLIT_BY_COLUMNS
    return {
        _QKV: modules.qkv,
        attention_output: (modules.attention_output,),
        _GATE_UP: modules.gate_up,
        down: (modules.down,),
    }[site]


def initial_a(module: str, rank: int, width: int, seed: int, init: str = "uniform") -> torch.Tensor:
    """Draw the starting A of a Hugging Face module, float32 [rank, width]; the same at every layout.

    uniform is that of PEFT; xavier (Glorot and Bengio 2010, normal) is the default of NeMo's adapters.
    """
    generator = torch.Generator().manual_seed((zlib.crc32(module.encode()) + seed) % 2**32)
    if init == "xavier":
        return torch.empty(rank, width).normal_(0.0, math.sqrt(2 / (rank + width)), generator=generator)
    bound = 1 / math.sqrt(width)
    return torch.empty(rank, width).uniform_(-bound, bound, generator=generator)


class Part(NamedTuple):
    """Rows of a linear layer of Megatron's that are of one kind: queries, keys, values; gate, up; or all of them."""

    module: str
    """The Hugging Face module that has these rows, perhaps among others."""
    height: int
    """Rows over all tensor-parallel ranks."""
    suffix: str
    """Of the key of B in a checkpoint; empty where the module has no other rows."""


class Pair(torch.nn.Module):
    """A and B of one part of a layer, this rank's shards; B starts at 0. ``shared``: the A of another pair, to be used
    here too."""

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
    """What is added to one Megatron linear layer: scale * B A x of each of its parts, in its layout."""

    def __init__(
        self,
        site: str,
        modules: tuple[str, ...],
        linear: Any,
        hf: PretrainedConfig,
        settings: LoraConfig,
        seed: int,
    ):
        super().__init__()
        self.by_columns = site in _SPLIT_BY_COLUMNS
        self.sequence_parallel = linear.config.sequence_parallel and site != _HEAD
        self.scale = settings.alpha / settings.rank
        self.dropout = settings.dropout
        self.enabled = True
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.query_groups = hf.num_key_value_heads // self.group.size() if site == _QKV else None
        self.parts = _parts(site, modules, linear, hf, self.group.size())
        # The parts of one module are rows of one B, so they have one A.
        self.one_a = settings.share_a or len(modules) == 1
        width = linear.weight.size(1) * (self.group.size() if self.by_columns else 1)
        like = linear.weight.detach()
        pairs: list[Pair] = []
        for part in self.parts:
            if last_name(part.module) in settings.target_modules:
                shared = pairs[0].a if self.one_a and pairs else None
                pairs.append(Pair(part, width, self.by_columns, settings, seed, like, shared))
        # Each tensor-parallel rank sees a share of the tokens: gradients of whole matrices add up.
        if self.sequence_parallel:
            for pair in pairs:
                matrix: Any = pair.b if self.by_columns else pair.a
                matrix.sequence_parallel = True
        # Any: a ModuleList does not keep the type of its modules.
        self.pairs: Any = torch.nn.ModuleList(pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what to add to the layer's output for its input ``x`` (sharded as the layer takes it)."""
        x = self._drop(x)
        if self.by_columns:
            (pair,) = self.pairs
            inner = F.linear(x, pair.a)
            if self.sequence_parallel:
                inner = tensor_parallel.reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
            else:
                inner = tensor_parallel.reduce_from_tensor_model_parallel_region(inner, group=self.group)
            return F.linear(inner, pair.b) * self.scale
        inner = F.linear(x, self.pairs[0].a if self.one_a else torch.cat([pair.a for pair in self.pairs]))
        if self.sequence_parallel:
            inner = tensor_parallel.gather_from_sequence_parallel_region(inner, group=self.group)
        else:
            inner = tensor_parallel.copy_to_tensor_model_parallel_region(inner, group=self.group)
        shares = [inner] * len(self.pairs) if self.one_a else inner.chunk(len(self.pairs), -1)
        outputs = {pair.part: F.linear(share, pair.b) for pair, share in zip(self.pairs, shares)}
        return self._fuse(outputs, inner) * self.scale

    @property
    def drops(self) -> bool:
        """Whether ``forward`` draws random numbers."""
        return bool(self.dropout and self.training)

    def _drop(self, x):
        if not self.drops:
            return x
        sharded = self.by_columns or self.sequence_parallel
        with get_cuda_rng_tracker().fork() if sharded else contextlib.nullcontext():
            return F.dropout(x, self.dropout)

    def _fuse(self, outputs: dict[Part, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Outputs by part -> the layer's rows: gate over up, or per query group its queries, key and value."""
        parts = []
        for part in self.parts:
            rows = outputs.get(part)
            parts.append(like.new_zeros(*like.shape[:-1], part.height // self.group.size()) if rows is None else rows)
        if self.query_groups:
            parts = [part.unflatten(-1, (self.query_groups, -1)) for part in parts]
            return torch.cat(parts, -1).flatten(-2)
        return torch.cat(parts, -1)


class HeadAdapter(Adapters):
    """The pair of the output layer, whose input is whole on every tensor-parallel rank, with or without sequence
    parallelism."""

    def __init__(self, module: str, linear: Any, hf: PretrainedConfig, settings: LoraConfig, seed: int):
        super().__init__(_HEAD, (module,), linear, hf, settings, seed)
        self.vocab_size = hf.vocab_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what to add to this rank's columns of the logits."""
        (pair,) = self.pairs
        # A rank's share of the vocabulary gives a share of A's gradient; the backward of copy_to adds the shares up.
        # Around the product, as in the other layers, it would also add up the input's gradient, which the model does
        # itself.
        a = tensor_parallel.copy_to_tensor_model_parallel_region(pair.a, group=self.group)
        return F.linear(F.linear(self._drop(x), a), pair.b) * self.scale


def _parts(site: str, modules: tuple[str, ...], linear: Any, hf: PretrainedConfig, ranks: int) -> list[Part]:
    rows = linear.weight.size(0) * (1 if site in _SPLIT_BY_COLUMNS else ranks)
    heights = [rows]
    if site == _QKV:
        size = head_size(hf)
        heights = [hf.num_attention_heads * size, *[hf.num_key_value_heads * size] * 2]
    elif site == _GATE_UP:
        heights = [rows // 2] * 2
    if len(modules) == len(heights):
        return [Part(module, height, "") for module, height in zip(modules, heights)]
    return [Part(modules[0], height, f".{place}") for place, height in enumerate(heights)]


def _add(adapters: Adapters):
    def hook(module, arguments, output):
        if not adapters.enabled:
            return output
        return output[0] + adapters(arguments[0]), *output[1:]

    return hook


def attach(chunks: list[torch.nn.Module], hf: PretrainedConfig, settings: LoraConfig, seed: int) -> None:
    """Freeze the chunks and add trainable adapters to their linear layers.

    Raises:
        ConfigError: the model has no such layers, or they are experts, or an output layer that is the embedding.
    """
    family = family_of(hf)
    modules = family.modules
    check_adapted_layers(settings.target_modules, family, hf.tie_word_embeddings)
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.post_process and last_name(modules.head) in settings.target_modules:
            # The model evaluates its logits chunk by chunk without calling this layer, so it adds this adapter itself.
            output_layer: Any = chunk.output_layer
            output_layer.adapters = HeadAdapter(modules.head, output_layer, hf, settings, seed)
        decoder: Any = chunk.decoder
        for name, linear in list(chunk.named_modules()):
            match = _SITE.fullmatch(name)
            if match is None:
                continue
            layer = modules.layer.format((decoder.layers[int(match[1])].layer_number - 1) // 2)
            inside = tuple(layer + module for module in _modules_of(match[2], modules))
            adapters = Adapters(match[2], inside, linear, hf, settings, seed)
            if len(adapters.pairs):
                linear.adapters = adapters
                linear.register_forward_hook(_add(adapters))


def adapters_of(chunks: list[torch.nn.Module]) -> Iterator[Adapters]:
    """Yield the adapters of this rank."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapters))


@contextlib.contextmanager
def adapters_disabled(chunks: list[torch.nn.Module]) -> Iterator[None]:
    """Run the model without its adapters: that is the reference model."""
    found = list(adapters_of(chunks))
    for adapters in found:
        adapters.enabled = False
    try:
        yield
    finally:
        for adapters in found:
            adapters.enabled = True


@torch.no_grad()
def gather_adapters(chunks: list[torch.nn.Module]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Gather the adapters of the whole model: Hugging Face module -> (A [rank, in], B [out, rank]), on every rank, in
    host memory. Collective."""
    group = parallel_state.get_tensor_model_parallel_group()

    def gathered(tensor, dim):
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim).cpu()

    mine = {}
    for adapters in adapters_of(chunks):
        whole: dict[str, list[torch.Tensor]] = {}
        for pair in adapters.pairs:
            a = pair.a.detach()
            b = pair.b.detach()
            if pair.by_columns:
                a, b = gathered(a, 1), b.cpu().clone()
            else:
                a, b = a.cpu().clone(), gathered(b, 0)
            whole.setdefault(pair.part.module, [a]).append(b)
        for module, (a, *rows) in whole.items():
            b = torch.cat(rows)
            if isinstance(adapters, HeadAdapter):  # the rows that pad the vocabulary are Megatron's own
                b = b[: adapters.vocab_size].clone()
            mine[module] = a, b
    stages = parallel_state.get_pipeline_model_parallel_group()
    shares: list = [None] * stages.size()
    dist.all_gather_object(shares, mine, group=stages)
    return {module: pair for share in shares for module, pair in share.items()}


def sharded_adapters(chunk: torch.nn.Module) -> dict:
    """Describe a chunk's adapters as Megatron saves them: keys are PEFT's names, so they mean the same at every
    layout."""
    state = {}
    for adapters, key, parameter, axis in _matrices(chunk):
        if axis is None:
            state[key] = make_sharded_tensor_for_checkpoint(parameter, key)
        else:  # the vocabulary's padding depends on the number of ranks
            padded = isinstance(adapters, HeadAdapter)
            state[key] = make_tp_sharded_tensor_for_checkpoint(
                parameter, key, tp_axis=axis, allow_shape_mismatch=padded
            )
    return state


def _matrices(chunk: torch.nn.Module) -> Iterator[tuple[Adapters, str, torch.nn.Parameter, int | None]]:
    """(adapters, PEFT's name, shard, the dimension that is split) of a chunk's matrices; an A that is shared once, by
    its first pair."""
    for adapters in adapters_of([chunk]):
        for place, pair in enumerate(adapters.pairs):
            module = pair.part.module
            if place == 0 or not adapters.one_a:
                yield adapters, peft_name(module, "A"), pair.a, 1 if pair.by_columns else None
            yield adapters, peft_name(module, "B") + pair.part.suffix, pair.b, None if pair.by_columns else 0


@torch.no_grad()
def load_adapters(chunk: torch.nn.Module, state: dict) -> None:
    """Copy what Megatron has read for ``sharded_adapters`` into the chunk."""
    for _, key, parameter, _ in _matrices(chunk):
        parameter.copy_(state[key])


@torch.no_grad()
def start_adapters(chunks: list[torch.nn.Module], pairs: Pairs) -> None:
    """Copy this rank's shards of whole matrices, of every adapted module. They must fit the model.

    Raises:
        KeyError: a module is missing.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    for adapters in adapters_of(chunks):
        rows: dict[str, int] = {}
        for pair in adapters.pairs:
            a, b = pairs[pair.part.module]
            first = rows.get(pair.part.module, 0)
            last = rows[pair.part.module] = first + pair.part.height
            b = b[first:last]
            if isinstance(adapters, HeadAdapter):  # whose vocabulary is padded
                b = F.pad(b, (0, 0, 0, pair.part.height - len(b)))
            pair.a.copy_(a.chunk(group.size(), 1)[group.rank()] if pair.by_columns else a)
            pair.b.copy_(b if pair.by_columns else b.chunk(group.size())[group.rank()])
