"""LoRA (arXiv 2106.09685) on Megatron's linear layers, one pair of matrices per Hugging Face module.

Megatron fuses q, k, v and gate, up; the pairs stay apart, so that what is trained is exactly a PEFT adapter of the Hugging
Face model, at every layout. For a matrix split by rows (q, k, v, gate, up) A is whole on every tensor-parallel rank and B
is split; for one split by columns (o, down) A is split and B is whole.
"""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from typing import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from transformers import PretrainedConfig

from gdpo_nemo.config.schema import LoraConfig
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.megatron.families import head_size, num_experts
from gdpo_nemo.weights.adapters import peft_name

_SITE = re.compile(r"decoder\.layers\.(\d+)\.(self_attention\.linear_qkv|self_attention\.linear_proj|mlp\.linear_fc1|mlp\.linear_fc2)")
_MODULES = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
_SPLIT_BY_COLUMNS = ("self_attention.linear_proj", "mlp.linear_fc2")
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def initial_a(module: str, rank: int, width: int, seed: int, init: str = "uniform") -> torch.Tensor:
    """float32 [rank, width]: the starting A of a Hugging Face module; the same at every layout.

    uniform is that of PEFT; xavier (Glorot and Bengio 2010, normal) is the default of NeMo's adapters.
    """
    generator = torch.Generator().manual_seed((zlib.crc32(module.encode()) + seed) % 2**32)
    if init == "xavier":
        return torch.empty(rank, width).normal_(0.0, math.sqrt(2 / (rank + width)), generator=generator)
    bound = 1 / math.sqrt(width)
    return torch.empty(rank, width).uniform_(-bound, bound, generator=generator)


class Pair(torch.nn.Module):
    """A and B of one Hugging Face module, this rank's shards; B starts at 0."""

    def __init__(self, module: str, width: int, height: int, by_columns: bool, settings: LoraConfig, seed: int, like):
        super().__init__()
        self.module, self.by_columns = module, by_columns
        group = parallel_state.get_tensor_model_parallel_group()
        a = initial_a(module, settings.rank, width, seed, settings.init)
        a = a.chunk(group.size(), 1)[group.rank()].contiguous() if by_columns else a
        rows = height if by_columns else height // group.size()
        self.a = torch.nn.Parameter(a.to(like))
        self.b = torch.nn.Parameter(torch.zeros(rows, settings.rank).to(like))
        split, whole = (self.a, self.b) if by_columns else (self.b, self.a)
        set_tensor_model_parallel_attributes(split, True, 1 if by_columns else 0, 1)
        set_tensor_model_parallel_attributes(whole, False, -1, 1)


class Adapters(torch.nn.Module):
    """What is added to one Megatron linear layer: scale * B A x of each of its Hugging Face modules, in its layout."""

    def __init__(self, site: str, modules: tuple[str, ...], linear, hf: PretrainedConfig, settings: LoraConfig, seed: int):
        super().__init__()
        self.by_columns = site in _SPLIT_BY_COLUMNS
        self.sequence_parallel = linear.config.sequence_parallel
        self.scale, self.dropout, self.enabled = settings.alpha / settings.rank, settings.dropout, True
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.query_groups = hf.num_key_value_heads // self.group.size() if len(modules) == 3 else None
        wanted = set(settings.target_modules)
        self.heights = _heights(modules, linear, hf, self.group.size())
        width = linear.weight.size(1) * (self.group.size() if self.by_columns else 1)
        self.pairs = torch.nn.ModuleList(
            Pair(module, width, height, self.by_columns, settings, seed, linear.weight.detach())
            for module, height in self.heights.items()
            if module.rpartition(".")[2] in wanted
        )
        if self.sequence_parallel:  # each tensor-parallel rank sees a share of the tokens: gradients of whole matrices add up
            for pair in self.pairs:
                (pair.b if self.by_columns else pair.a).sequence_parallel = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What to add to the layer's output for its input ``x`` (sharded as the layer takes it)."""
        x = self._drop(x)
        if self.by_columns:
            (pair,) = self.pairs
            inner = F.linear(x, pair.a)
            if self.sequence_parallel:
                inner = tensor_parallel.reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
            else:
                inner = tensor_parallel.reduce_from_tensor_model_parallel_region(inner, group=self.group)
            return F.linear(inner, pair.b) * self.scale
        inner = F.linear(x, torch.cat([pair.a for pair in self.pairs]))
        if self.sequence_parallel:
            inner = tensor_parallel.gather_from_sequence_parallel_region(inner, group=self.group)
        else:
            inner = tensor_parallel.copy_to_tensor_model_parallel_region(inner, group=self.group)
        shares = inner.chunk(len(self.pairs), -1)
        outputs = {pair.module: F.linear(share, pair.b) for pair, share in zip(self.pairs, shares)}
        return self._fuse(outputs, inner) * self.scale

    def _drop(self, x):
        if not (self.dropout and self.training):
            return x
        sharded = self.by_columns or self.sequence_parallel
        with get_cuda_rng_tracker().fork() if sharded else contextlib.nullcontext():
            return F.dropout(x, self.dropout)

    def _fuse(self, outputs: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Outputs by module -> the layer's rows: gate over up, or per query group its queries, key and value."""
        parts = []
        for module, height in self.heights.items():
            part = outputs.get(module)
            parts.append(like.new_zeros(*like.shape[:-1], height // self.group.size()) if part is None else part)
        if self.query_groups:
            parts = [part.unflatten(-1, (self.query_groups, -1)) for part in parts]
            return torch.cat(parts, -1).flatten(-2)
        return torch.cat(parts, -1)


def _heights(modules, linear, hf: PretrainedConfig, ranks: int) -> dict[str, int]:
    """Output size of each Hugging Face module of a layer, over all ranks."""
    if len(modules) == 3:
        size = head_size(hf)
        return dict(zip(modules, (hf.num_attention_heads * size, *[hf.num_key_value_heads * size] * 2)))
    if len(modules) == 2:
        return dict.fromkeys(modules, linear.weight.size(0) * ranks // 2)
    return {modules[0]: linear.weight.size(0)}


def _add(adapters: Adapters):
    def hook(module, arguments, output):
        if not adapters.enabled:
            return output
        return output[0] + adapters(arguments[0]), *output[1:]

    return hook


def attach(chunks: list[torch.nn.Module], hf: PretrainedConfig, settings: LoraConfig, seed: int) -> None:
    """Freeze the chunks and add trainable adapters to their linear layers.

    Raises:
        ConfigError: the targets are experts, or nothing of this model is a target.
    """
    if num_experts(hf) and set(settings.target_modules) & set(_OF_EXPERTS):
        raise ConfigError(
            f"policy.lora.target_modules: the experts of {hf.architectures[0]} cannot be adapted; "
            f"leave out {', '.join(_OF_EXPERTS)}"
        )
    for chunk in chunks:
        chunk.requires_grad_(False)
        for name, linear in list(chunk.named_modules()):
            match = _SITE.fullmatch(name)
            if match is None:
                continue
            layer = (chunk.decoder.layers[int(match[1])].layer_number - 1) // 2
            modules = tuple(f"model.layers.{layer}.{module}" for module in _MODULES[match[2]])
            adapters = Adapters(match[2], modules, linear, hf, settings, seed)
            if len(adapters.pairs):
                linear.adapters = adapters
                linear.register_forward_hook(_add(adapters))


def adapters_of(chunks: list[torch.nn.Module]) -> Iterator[Adapters]:
    """All adapters of this rank."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapters))


@contextlib.contextmanager
def switched_off(chunks: list[torch.nn.Module]):
    """The model without its adapters, which is the reference model."""
    found = list(adapters_of(chunks))
    for adapters in found:
        adapters.enabled = False
    try:
        yield
    finally:
        for adapters in found:
            adapters.enabled = True


@torch.no_grad()
def whole_pairs(chunks: list[torch.nn.Module]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Hugging Face module -> (A [rank, in], B [out, rank]) of the whole model, on every rank, in host memory; collective."""
    group = parallel_state.get_tensor_model_parallel_group()

    def gathered(tensor, dim):
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim).cpu()

    mine = {}
    for adapters in adapters_of(chunks):
        for pair in adapters.pairs:
            a, b = pair.a.detach(), pair.b.detach()
            mine[pair.module] = (gathered(a, 1), b.cpu().clone()) if pair.by_columns else (a.cpu().clone(), gathered(b, 0))
    stages = parallel_state.get_pipeline_model_parallel_group()
    shares: list = [None] * stages.size()
    dist.all_gather_object(shares, mine, group=stages)
    return {module: pair for share in shares for module, pair in share.items()}


def sharded_adapters(chunk: torch.nn.Module) -> dict:
    """A chunk's pairs as Megatron saves them: keys are PEFT's names, so they mean the same at every layout."""
    state = {}
    for adapters in adapters_of([chunk]):
        for pair in adapters.pairs:
            for letter, parameter, split, axis in (("A", pair.a, pair.by_columns, 1), ("B", pair.b, not pair.by_columns, 0)):
                key = peft_name(pair.module, letter)
                if split:
                    state[key] = make_tp_sharded_tensor_for_checkpoint(parameter, key, tp_axis=axis)
                else:
                    state[key] = make_sharded_tensor_for_checkpoint(parameter, key)
    return state


@torch.no_grad()
def load_adapters(chunk: torch.nn.Module, state: dict) -> None:
    """The inverse of ``sharded_adapters``, from what Megatron has read."""
    for adapters in adapters_of([chunk]):
        for pair in adapters.pairs:
            pair.a.copy_(state[peft_name(pair.module, "A")])
            pair.b.copy_(state[peft_name(pair.module, "B")])
