"""The weights of a Megatron-core GPT checkpoint under their Hugging Face names, a layer at a time.

Megatron-core's own loader reads the tensors, at any layout they were written in; nothing but tensors is asked for. What
``dist_checkpointing.load`` reads besides, the common state, is unpickled without restriction by torch.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from typing import Any, Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from gdpo_nemo.config.architectures import check_model_content, mixture_layers, num_experts
from gdpo_nemo.config.dist_metadata import Held, read_dist_metadata
from gdpo_nemo.config.families import Family
from gdpo_nemo.config.megatron_keys import EMBEDDING, model_tensors
from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.model_formats import Source
from gdpo_nemo.errors import ConfigError

_FINAL_NORMS = ("decoder.final_layernorm.weight", "decoder.final_norm.weight")


class _Slice:
    """A part of a tensor: what is left behind the dimensions (layer, expert) that are fixed."""

    def __init__(self, name: str, held: Held, fixed: tuple[int, ...] = ()):
        self.name = name
        self.held = held
        self.fixed = fixed


def megatron_weights(source: Source, config: Any, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor) of the checkpoint ``source``, in the type that it has them in.

    Args:
        config: of the model, as transformers has it.
        key: what the user named the source by, for messages.

    Raises:
        ConfigError: the checkpoint is damaged or not of this model.
    """
    from gdpo_nemo.megatron import runtime

    held = read_dist_metadata(source.path, key)  # before Megatron opens the same file
    runtime.prepare()
    from gdpo_nemo.megatron.conversion import separate
    from gdpo_nemo.megatron.hf_mapping import family_of, fields_of, top_weights

    fields = fields_of(config)
    family = check_model_content(fields)
    tensors = model_tensors(held, fields, source.path, key)
    prefix = next(name for name in held if name.endswith(EMBEDDING) and not name.startswith("optimizer"))
    read = _reader(source, prefix.removesuffix(EMBEDDING), key)
    left = set(tensors)
    top = top_weights(family_of(config).model_type)
    names = [(EMBEDDING,), _FINAL_NORMS, *([] if config.tie_word_embeddings else [("output_layer.weight",)])]
    weights = [top[EMBEDDING], top["decoder.final_norm.weight"], top["output_layer.weight"]]
    with _alone():
        for options, weight in zip(names, weights):
            name = _first(options, tensors, source, key)
            left.discard(name)
            (tensor,) = read([_Slice(name, tensors[name])])
            yield weight.sources[0], tensor[: config.vocab_size] if weight.vocabulary else tensor
        for layer, mixture in enumerate(mixture_layers(fields)):
            wanted = list(_layer(layer, mixture, family, fields, tensors, source, key))
            left -= {part.name for part, _ in wanted}
            found = read([part for part, _ in wanted])
            for (_, weight), tensor in zip(wanted, found, strict=True):
                for place, part in zip(weight.sources, separate(tensor, weight, config), strict=True):
                    yield family.modules.layer.format(layer) + place, part.contiguous()
    if left:
        raise ConfigError(
            f"{key}: {source.path} has {len(left)} tensors that a {family.model_type} has not, for instance {min(left)}"
        )


def _first(names: tuple[str, ...] | list[str], tensors: Mapping[str, Held], source: Source, key: str) -> str:
    found = next((name for name in names if name in tensors), None)
    if found is None:
        raise ConfigError(f"{key}: {source.path} lacks {names[0]}")
    return found


def _layer(
    layer: int,
    mixture: bool,
    family: Family,
    fields: dict[str, Any],
    tensors: Mapping[str, Held],
    source: Source,
    key: str,
) -> Iterator[tuple[_Slice, Any]]:
    """The slices of one layer, each with the weight that it is."""
    from gdpo_nemo.megatron.hf_mapping import dense_weights, layer_weight

    alone = any(name.startswith(f"decoder.layers.{layer}.") for name in tensors)
    start = f"decoder.layers.{layer}." if alone else "decoder.layers."
    fixed = () if alone else (layer,)

    def part(names: list[str], weight: Any, *more: int) -> tuple[_Slice, Any]:
        name = _first([start + name for name in names], tensors, source, key)
        return _Slice(name, tensors[name], (*fixed, *more)), weight

    options: dict[tuple[str, ...], list[str]] = {}
    dense = dense_weights(family.model_type)
    for name, weight in dense.items():
        if _is_there(name, mixture, family, fields):
            options.setdefault(weight.sources, []).append(name)
    for names in options.values():
        yield part(names, dense[names[0]])
    if not mixture:
        return
    yield part(["mlp.router.weight"], layer_weight(family, "mlp.router.weight"))
    for expert in range(num_experts(fields)):
        for half in ("linear_fc1", "linear_fc2"):
            weight = layer_weight(family, f"mlp.experts.local_experts.{expert}.{half}.weight")
            named = type(weight)(weight.split, tuple(place.format(expert) for place in weight.sources))
            yield part([f"mlp.experts.experts.{half}.weight"], named, expert)


def _is_there(name: str, mixture: bool, family: Family, fields: dict[str, Any]) -> bool:
    """Whether such a layer has this tensor of a dense one."""
    from gdpo_nemo.config.architectures import has_qkv_bias

    if name.endswith("linear_qkv.bias"):
        return has_qkv_bias(fields)
    if "_layernorm.weight" in name and name.startswith("self_attention."):
        return family.qk_norm
    return not mixture or not name.startswith("mlp.") or name.endswith("layer_norm_weight")


def _reader(source: Source, prefix: str, key: str) -> Callable[[list[_Slice]], list[torch.Tensor]]:
    """``read(slices) -> tensors``, by Megatron-core's loader of tensors. It raises ConfigError."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
        CachedMetadataFileSystemReader,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from torch.distributed.checkpoint.api import CheckpointException

    CachedMetadataFileSystemReader.clear_metadata_cache()
    strategy = TorchDistLoadShardedStrategy(cache_metadata=True)

    def read(slices: list[_Slice]) -> list[torch.Tensor]:
        wanted = {}
        for number, part in enumerate(slices):
            shape = part.held.shape
            axes = len(part.fixed)
            data = torch.empty((1,) * axes + shape[axes:], dtype=getattr(torch, part.held.dtype))
            offsets = [(axis, place, shape[axis]) for axis, place in enumerate(part.fixed)]
            wanted[str(number)] = ShardedTensor.from_rank_offsets(prefix + part.name, data, *offsets)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of how Megatron-core calls it
                found = strategy.load(wanted, source.path)
        except (Exception, CheckpointException) as error:  # torch's derives from BaseException alone
            raise ConfigError(f"{key}: {source.path} cannot be read ({_reason(error)})") from error
        return [found[str(number)].reshape(part.held.shape[len(part.fixed) :]) for number, part in enumerate(slices)]

    return read


def _reason(error: BaseException) -> str:
    first = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
    # torch's own text goes on with how to run the pickle all the same.
    return "it is no tensor that is there" if isinstance(first, pickle.UnpicklingError) else first_line(first)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process, which Megatron-core's loader asks for its rank."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
