"""Read and write checkpoints of Megatron-core's GPTModel.

Tensors are read layer by layer, under their Hugging Face names. The reading process may not have imported Megatron yet,
so each function imports it after ``runtime.prepare``.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gdpo_nemo.models.hf_folder import copy_companions
from gdpo_nemo.models.sources import COMPANION, Source
from gdpo_nemo.models.torch_dist import Held, check_gpt_format, model_tensors, read_dist_metadata
from gdpo_nemo.models.weights import EMBEDDING, FINAL_NORM, OUTPUT
from gdpo_nemo.utils.errors import ConfigError, first_line

_FINAL_NORMS = ("decoder.final_layernorm.weight", FINAL_NORM)


class _Slice(NamedTuple):
    """Slice of a stored tensor."""

    name: str
    stored: Held
    """Shape and data type of the stored tensor."""
    indices: tuple[int, ...] = ()
    """Index of each leading dimension (layer, expert), or empty for the complete tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return self.stored.shape[len(self.indices) :]


def megatron_weights(source: Source, config: Any, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor) for every tensor of a checkpoint, in the checkpoint's data type.

    Args:
        config: transformers' configuration of the model.
        key: config key or option that specifies the source, for messages.

    Raises:
        ConfigError: if the checkpoint is damaged or belongs to another model.
    """
    from gdpo_nemo.megatron import runtime

    metadata = read_dist_metadata(source.path, key)  # read before Megatron opens the same file
    runtime.prepare()
    from gdpo_nemo.megatron.conversion import separate
    from gdpo_nemo.megatron.model_config import description_of
    from gdpo_nemo.megatron.weight_map import weights_of

    model = description_of(config)
    check_gpt_format(model.family, key)
    tensors = model_tensors(metadata, model.fields, source.path, key)
    embedding = next(name for name in metadata if name.endswith(EMBEDDING) and not name.startswith("optimizer"))
    read = _reader(source, embedding.removesuffix(EMBEDDING), key)
    unread = set(tensors)
    weights = weights_of(model)
    top: dict[tuple[str, ...], str] = {
        (EMBEDDING,): EMBEDDING,
        _FINAL_NORMS: FINAL_NORM,
        **({} if model.tied else {(OUTPUT,): OUTPUT}),
    }
    with _single_process_group():
        for options, parameter in top.items():
            weight = weights[None, parameter]
            name = _first_stored(options, tensors, source, key)
            unread.discard(name)
            (tensor,) = read([_Slice(name, tensors[name])])
            yield weight.sources[0], tensor[: model.vocabulary] if weight.vocabulary else tensor
        for layer in range(model.layers):
            slices = list(_layer_slices(layer, weights, tensors, source, key))
            parts = [part for part, _ in slices]
            unread.difference_update(part.name for part in parts)
            for (_, weight), tensor in zip(slices, read(parts), strict=True):
                for name, part in zip(weight.sources, separate(tensor, weight, model), strict=True):
                    yield name, part.contiguous()
    if unread:
        raise ConfigError(
            f"{key}: {source.path} has {len(unread)} tensors that do not belong to {model.family.model_type}, for "
            f"example {min(unread)}"
        )


def _first_stored(names: tuple[str, ...] | list[str], tensors: Mapping[str, Held], source: Source, key: str) -> str:
    """Return the first of ``names`` that the checkpoint contains. Raises ConfigError if it contains none of them."""
    stored = next((name for name in names if name in tensors), None)
    if stored is None:
        raise ConfigError(f"{key}: {source.path} lacks {names[0]}")
    return stored


def _layer_slices(
    layer: int, weights: Mapping[tuple[int | None, str], Any], tensors: Mapping[str, Held], source: Source, key: str
) -> Iterator[tuple[_Slice, Any]]:
    """Yield (slice, weight) for each tensor of one layer.

    Args:
        weights: weights of the model (``weight_map.Weights``).
    """
    from gdpo_nemo.megatron.weight_map import FUSED_NORMS

    # The checkpoint stores either one tensor per layer, or one tensor for all layers with a leading layer dimension.
    separate_layers = any(name.startswith(f"decoder.layers.{layer}.") for name in tensors)
    prefix = f"decoder.layers.{layer}." if separate_layers else "decoder.layers."
    layer_index = () if separate_layers else (layer,)
    for (number, parameter), weight in weights.items():
        if number != layer:
            continue
        stored = parameter.replace("mlp.experts.", "mlp.experts.experts.")
        fused = [name for name, norm in FUSED_NORMS.items() if norm == parameter]
        name = _first_stored([prefix + name for name in (stored, *fused)], tensors, source, key)
        for expert in range(weight.experts):
            sources = tuple(source.format(expert) for source in weight.sources)
            yield _Slice(name, tensors[name], (*layer_index, expert)), replace(weight, sources=sources)
        if not weight.experts:
            yield _Slice(name, tensors[name], layer_index), weight


def _reader(source: Source, prefix: str, key: str) -> Callable[[list[_Slice]], list[torch.Tensor]]:
    """Return a function that reads slices of tensors with Megatron-core's loader. The function raises ConfigError.

    Args:
        prefix: prefix of the names of all tensors in the checkpoint.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
        CachedMetadataFileSystemReader,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from torch.distributed.checkpoint.api import CheckpointException

    CachedMetadataFileSystemReader.clear_metadata_cache()
    strategy = TorchDistLoadShardedStrategy(cache_metadata=True)

    def read(slices: list[_Slice]) -> list[torch.Tensor]:
        requested = {}
        for number, part in enumerate(slices):
            leading = (1,) * len(part.indices)
            data = torch.empty((*leading, *part.shape), dtype=getattr(torch, part.stored.dtype))
            offsets = [(axis, index, part.stored.shape[axis]) for axis, index in enumerate(part.indices)]
            requested[str(number)] = ShardedTensor.from_rank_offsets(prefix + part.name, data, *offsets)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about Megatron-core's use of a deprecated API.
                loaded = strategy.load(requested, source.path)
        except (Exception, CheckpointException) as error:  # torch's exception derives directly from BaseException
            raise ConfigError(f"{key}: {source.path} cannot be read ({_reason(error)})") from error
        return [loaded[str(number)].reshape(part.shape) for number, part in enumerate(slices)]

    return read


def _reason(error: BaseException) -> str:
    first = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
    # Hide torch's message, which advises loading the file with an unpickler that can execute code.
    return "a checkpoint entry is not a tensor" if isinstance(first, pickle.UnpicklingError) else first_line(first)


@contextlib.contextmanager
def _single_process_group() -> Iterator[None]:
    """Provide a process group with a single process, because Megatron-core's loader queries the rank."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


_RELEASE = "release"
"""Megatron-LM's name for a weights-only checkpoint without an iteration number, which is loaded with --finetune."""


def save_megatron(policy: Any, folder: str | Path) -> None:
    """Write the policy's weights as a checkpoint of Megatron-core's GPTModel. This call is collective.

    The weights are written to ``folder``/release. A file next to this folder names the release, and the folder ``hf``
    contains config.json and the tokenizer. Each layer of the policy consists of two Hybrid layers, attention and MLP.
    Megatron-core merges each pair into one layer.

    Raises:
        ConfigError: if the model has both dense and MoE layers, or modules that GPTModel's format does not support.
        OSError: if the folder cannot be written.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
        gpt_compatible_layer_maps,
        retarget_sharded_state_dict_to_gpt_checkpoint,
    )

    from gdpo_nemo.megatron.checkpoint import sharded_weights
    from gdpo_nemo.megatron.model_config import description_of

    folder = Path(folder)
    model = description_of(policy.built.hf_config)
    check_gpt_format(model.family, "--to megatron")
    try:
        maps = gpt_compatible_layer_maps("".join(model.symbols))
    except ValueError as error:
        raise ConfigError(
            f"--to megatron: the model cannot be converted to Megatron-core's GPTModel ({error})"
        ) from None
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0}
    for number, (_, chunk) in enumerate(sharded_weights(policy)):
        retarget_sharded_state_dict_to_gpt_checkpoint(chunk, maps)
        state[f"chunk{number}"] = chunk
    release = folder / _RELEASE
    if dist.get_rank() == 0:
        release.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(release), async_strategy="mcore")
    if dist.get_rank() == 0:
        companion = folder / COMPANION
        companion.mkdir()
        policy.built.hf_config.save_pretrained(companion)
        copy_companions(policy.folder, companion)
        (folder / "latest_checkpointed_iteration.txt").write_text(_RELEASE)
    dist.barrier()
