"""LoRA (arXiv 2106.09685) on Megatron's linear layers, with one pair of matrices A, B per Hugging Face module.

Megatron fuses q, k, v into one layer, and gate, up into another. Each of these modules has a separate pair, so that the
trained matrices form a PEFT adapter of the Hugging Face model in every layout. With ``share_a``, the pairs of a fused
layer share one A, which is equivalent to NeMo's adapters of fused layers. If the Hugging Face module itself is fused,
its pair is stored as one A and a B for each part of the layer. If a weight is split by rows (q, k, v, gate, up,
lm_head), A is replicated on the tensor-parallel ranks and B is split. If a weight is split by columns (o, down), A is
split and B is replicated. Each expert has separate pairs, which the expert-parallel and expert-tensor-parallel ranks
distribute like the expert's weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from transformers import PretrainedConfig

from gdpo_nemo.config.schema import LoraConfig
from gdpo_nemo.megatron.adapter_layers import Adapters, ExpertAdapters, GroupedAdapters, HeadAdapter
from gdpo_nemo.megatron.model_config import description_of
from gdpo_nemo.megatron.weight_map import Weight, find_weight, weights_of
from gdpo_nemo.models.architectures import last_name
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.family_checks import check_adapted_layers
from gdpo_nemo.models.weights import OUTPUT
from gdpo_nemo.weights.adapters import Pairs, peft_name


def _forward_hook(adapters: Adapters | GroupedAdapters):
    def hook(module, arguments, output):
        if not adapters.enabled:
            return output
        return output[0] + adapters(*arguments), *output[1:]

    return hook


def attach(chunks: list[torch.nn.Module], hf: PretrainedConfig, settings: LoraConfig, seed: int) -> None:
    """Freeze the chunks and add trainable adapters to their linear layers.

    Raises:
        ConfigError: if the model does not have the layers in ``target_modules``, or if they cannot be adapted. An
            output layer that is tied to the embedding cannot be adapted.
    """
    model = description_of(hf)
    weights, layers, head = weights_of(model), model.hf_layers, model.family.modules.head
    check_adapted_layers(settings.target_modules, model)
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.post_process and last_name(head) in settings.target_modules:
            # PolicyModel computes its logits in chunks without calling this layer, so it must apply the adapter itself.
            output_layer: Any = chunk.output_layer
            output = weights[None, OUTPUT]
            output_layer.adapters = HeadAdapter(output, output_layer.weight, model, settings, seed)
        for name, linear in list(chunk.named_modules()):
            weight = find_weight(weights, layers, chunk, f"{name}.weight")
            if weight is None or not weight.adapted or weight.vocabulary:
                continue
            adapters: Adapters | GroupedAdapters
            if weight.experts:
                is_grouped = ".local_experts." not in name
                adapters = _expert_adapters(weight, is_grouped, linear, model, settings, seed)
            else:
                adapters = Adapters(weight, linear.weight, model, settings, seed, linear.config.sequence_parallel)
            if list(adapters.parameters()):
                linear.adapters = adapters
                linear.register_forward_hook(_forward_hook(adapters))


def _expert_adapters(
    weight: Weight, is_grouped: bool, linear: Any, model: ModelDescription, settings: LoraConfig, seed: int
) -> ExpertAdapters | GroupedAdapters:
    """Return the adapters of a linear layer of an expert, or of TransformerEngine's layer of all local experts.

    Args:
        is_grouped: True for a layer of all local experts.
    """
    ranks = parallel_state.get_expert_model_parallel_group()
    local = weight.experts // ranks.size()
    first = ranks.rank() * local

    def adapters(index: int, matrix: torch.Tensor) -> ExpertAdapters:
        sources = tuple(source.format(first + index) for source in weight.sources)
        return ExpertAdapters(replace(weight, sources=sources), matrix, model, settings, seed)

    if is_grouped:
        return GroupedAdapters([adapters(index, getattr(linear, f"weight{index}")) for index in range(local)])
    return adapters(weight.expert or 0, linear.weight)


def adapters_of(chunks: list[torch.nn.Module]) -> Iterator[Adapters]:
    """Yield the adapters of every adapted linear layer of this rank."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Adapters):
                yield module


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

    def gathered(tensor, dim, group):
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
                a, b = gathered(a, 1, adapters.group), b.cpu().clone()
            else:
                a, b = a.cpu().clone(), gathered(b, 0, adapters.group)
            matrices.setdefault(pair.part.module, [a]).append(b)
        for module, (a, *rows) in matrices.items():
            b = torch.cat(rows)
            if isinstance(adapters, HeadAdapter):  # remove the rows with which Megatron pads the vocabulary
                b = b[: adapters.vocab_size].clone()
            stage_matrices[module] = a, b
    groups = [parallel_state.get_pipeline_model_parallel_group()]
    if any(isinstance(adapters, ExpertAdapters) for adapters in adapters_of(chunks)):
        groups.insert(0, parallel_state.get_expert_model_parallel_group())
    for group in groups:
        by_rank: list[Any] = [None] * group.size()
        dist.all_gather_object(by_rank, stage_matrices, group=group)
        stage_matrices = {}
        for modules in by_rank:
            stage_matrices |= modules
    return stage_matrices


def sharded_adapters(chunk: torch.nn.Module) -> dict[str, Any]:
    """Return a chunk's adapters as sharded tensors of Megatron's checkpoint format.

    The keys are PEFT's names, which do not depend on the layout.
    """
    state = {}
    for adapters, key, parameter, axis in _matrices(chunk):
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if isinstance(adapters, ExpertAdapters):
            replicas = parallel_state.get_expert_data_parallel_group()
        groups = dict(tp_group=adapters.group, dp_cp_group=replicas)
        if axis is None:
            state[key] = make_sharded_tensor_for_checkpoint(parameter, key, **groups)
        else:
            # The padding of the vocabulary depends on the number of ranks, and so does the shape of the head's B.
            is_padded = isinstance(adapters, HeadAdapter)
            state[key] = make_tp_sharded_tensor_for_checkpoint(
                parameter, key, tp_axis=axis, allow_shape_mismatch=is_padded, **groups
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
    for adapters in adapters_of(chunks):
        group = adapters.group
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
