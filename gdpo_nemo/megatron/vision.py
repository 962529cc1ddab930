"""Images in the policy: transformers' vision tower in front of the decoder, and its features in the first layers.

The tower is a module of the model chunk with the embedding, and every tensor-parallel rank has all of it. Its features
replace the embeddings of placeholders before these are split for sequence parallelism: the backward pass of the split
gathers, so each of these ranks computes the whole gradient of the tower. Under context parallelism, a rank processes
the images of the tokens that it has.

The features of a frozen tower are cached in host memory. A trained tower processes the distinct images of a micro-batch
in every pass. In a micro-batch without images it processes an empty image, whose features are not used: with
overlapped communication, all data-parallel ranks must run the same modules and compute gradients of all parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from gdpo_nemo.data.image_processor import ImageProcessor
from gdpo_nemo.data.image_rows import ImageRows
from gdpo_nemo.data.images import Image
from gdpo_nemo.models.description import ModelDescription

CACHE_BYTES = 4 << 30
"""Maximum size of the cached features of a frozen tower in a rank's host memory.

The features of an image of 448 x 448 pixels take 2 to 8 MB in models of 3 to 8 billion parameters. The limit holds the
images of a step with room to spare, and is a small part of the host memory of a GPU node.
"""


class Tie(torch.autograd.Function):
    """Identity of the decoder's input, whose backward pass hands on the gradients of features in later layers.

    This pass runs after that of all layers. The layers add detached leaves of the features, because a recomputed layer
    may not run the backward pass of the tower.
    """

    @staticmethod
    def forward(ctx, embedded, leaves, *added):
        ctx.leaves = leaves
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx, grad):
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in ctx.leaves]
        return grad, None, *gradients


@dataclass
class ImageInputs:
    """Images of a micro-batch for the tower, on the device."""

    images: list[Image]
    """Distinct images of the micro-batch."""
    rows: torch.Tensor
    """int64 [placeholders]: see ``ImageRows``."""
    cells: torch.Tensor
    """int64 [placeholders]: see ``ImageRows``."""
    known: Mapping[str, torch.Tensor]
    """Cached features by hash: [tokens, levels, hidden size] in host memory."""
    pixel_values: torch.Tensor | None
    """float32 [patches, values per patch] of the images without cached features, or None if there are none."""
    grids: torch.Tensor | None
    """int64 [images without cached features, 3]: frames, rows and columns of patches."""

    @property
    def new(self) -> list[Image]:
        """Images without cached features."""
        return [image for image in self.images if image.sha256 not in self.known]


class FeatureCache:
    """Features of images by hash, in host memory. The least recently used features are dropped first.

    Args:
        limit: maximum number of bytes.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._bytes = 0
        self._features: OrderedDict[str, torch.Tensor] = OrderedDict()

    def find(self, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """Return the cached features of those images that have some."""
        found = {}
        for image in images:
            if image.sha256 in self._features:
                self._features.move_to_end(image.sha256)
                found[image.sha256] = self._features[image.sha256]
        return found

    def add(self, sha256: str, features: torch.Tensor) -> None:
        """Store the features of an image without cached features."""
        self._features[sha256] = features
        self._bytes += features.nbytes
        while self._bytes > self._limit:
            _, dropped = self._features.popitem(last=False)
            self._bytes -= dropped.nbytes


class Vision:
    """Images of one model on one rank.

    Args:
        folder: Hugging Face folder of the model, with its image processor.
        model: description of the model.
        trained: True if the tower is trained.
    """

    def __init__(self, folder: str | Path, model: ModelDescription, trained: bool):
        self._processor = ImageProcessor(folder)
        assert model.tower is not None
        self._sizes = model.tower
        self._hf_layers = model.hf_layers
        self._trained = trained
        self._cache = FeatureCache(CACHE_BYTES)
        self._processed = 0

    def grid(self, image: Image) -> tuple[int, int]:
        """Return the rows and columns of an image's placeholders."""
        _, rows, columns = self._processor.grid(image)
        return rows // self._sizes.spatial_merge_size, columns // self._sizes.spatial_merge_size

    def attach(self, chunk: Any) -> None:
        """Make the chunk with the tower process images, and freeze the tower unless it is trained.

        Call this method before ``wrap``, which allocates gradient buffers.

        Raises:
            KeyError: if the chunk does not have all layers that add features (checked before a run starts).
        """
        chunk.vision = self
        if not self._trained:
            chunk.tower.requires_grad_(False)
        elif chunk.config.recompute_granularity == "full":
            _recompute_blocks(chunk.tower)
        # A Hugging Face layer consists of several Hybrid layers. Features are added after the last of them.
        last = {layer: number for number, layer in enumerate(self._hf_layers, 1)}
        by_number = {layer.layer_number: layer for layer in chunk.decoder.layers}
        for level in range(len(self._sizes.deepstack)):
            by_number[last[level]].register_forward_hook(partial(_add_features, level), with_kwargs=True)

    # -- inputs -------------------------------------------------------------------------------------------------

    def arrays(self, rows: ImageRows | None) -> dict[str, np.ndarray]:
        """Return the arrays of a micro-batch that ``inputs`` needs on the device."""
        if rows is None:
            return {}
        arrays = {"image_rows": rows.rows, "image_cells": rows.cells}
        known = self._cache.find(rows.images)
        if new := [image for image in rows.images if image.sha256 not in known]:
            pixel_values, grids = self._processor.pixel_values(new)
            arrays |= {"pixel_values": pixel_values.numpy(), "image_grids": grids.numpy()}
        return arrays

    def inputs(self, rows: ImageRows | None, tensors: Mapping[str, torch.Tensor]) -> ImageInputs | None:
        """Return the inputs of the tower for a micro-batch, or None if it has no images.

        Args:
            tensors: result of ``arrays`` on the device.
        """
        if rows is None:
            return None
        return ImageInputs(
            rows.images,
            tensors["image_rows"],
            tensors["image_cells"],
            self._cache.find(rows.images),
            tensors.get("pixel_values"),
            tensors.get("image_grids"),
        )

    # -- forward pass -------------------------------------------------------------------------------------------

    def embed(self, chunk: Any, embedded: torch.Tensor, packing: Any) -> torch.Tensor:
        """Return the decoder's input with the features of images, and set ``packing.added``.

        Args:
            embedded: [local tokens, 1, hidden size] embeddings of the tokens.

        Returns:
            [tokens of this rank, 1, hidden size]: under sequence parallelism, only the part of this rank.
        """
        inputs: ImageInputs | None = packing.images

        def split(values: torch.Tensor) -> torch.Tensor:
            if not chunk.config.sequence_parallel:
                return values
            return scatter_to_sequence_parallel_region(values, group=chunk.pg_collection.tp)

        if inputs is None:
            return split(embedded + 0.0 * self._empty(chunk.tower).sum() if self._trained else embedded)
        features = self._features(chunk.tower, inputs).to(embedded.dtype)
        first, *others = features.index_select(0, inputs.cells)[:, :, None].unbind(1)
        added = [split(torch.zeros_like(embedded).index_copy(0, inputs.rows, level)) for level in others]
        embedded = split(embedded.index_copy(0, inputs.rows, first))
        packing.added = [level.detach().requires_grad_(level.requires_grad) for level in added]
        if any(level.requires_grad for level in added):
            embedded = Tie.apply(embedded, packing.added, *added)
        return embedded

    def _features(self, tower: Any, inputs: ImageInputs) -> torch.Tensor:
        """Return the features of all images of a micro-batch: [tokens, levels, hidden size]."""
        device = inputs.rows.device
        new = inputs.new
        self._processed += len(new)
        if self._trained:
            return self._run(tower, inputs.pixel_values, inputs.grids)
        features = {key: value.to(device, non_blocking=True) for key, value in inputs.known.items()}
        if new:
            with torch.no_grad():
                computed = self._run(tower, inputs.pixel_values, inputs.grids)
            counts = [rows * columns for rows, columns in map(self.grid, new)]
            for image, on_device, on_host in zip(new, computed.split(counts), computed.cpu().split(counts)):
                features[image.sha256] = on_device
                self._cache.add(image.sha256, on_host.clone())
        return torch.cat([features[image.sha256] for image in inputs.images])

    def _empty(self, tower: Any) -> torch.Tensor:
        """Return the features of an image of the smallest size without content."""
        side = self._sizes.spatial_merge_size
        device = next(tower.parameters()).device
        pixel_values = torch.zeros(side * side, self._sizes.patch, device=device)
        return self._run(tower, pixel_values, torch.tensor([[1, side, side]], device=device))

    @staticmethod
    def _run(tower: Any, pixel_values: torch.Tensor | None, grids: torch.Tensor | None) -> torch.Tensor:
        assert pixel_values is not None
        found = tower(pixel_values.to(tower.dtype), grid_thw=grids, return_dict=True)
        return torch.stack([found.pooler_output, *getattr(found, "deepstack_features", ())], 1)

    # -- metrics ------------------------------------------------------------------------------------------------

    def counted(self, chunks: Sequence[Any], device: torch.device) -> float:
        """Return the number of images that towers have processed since the last call, on all ranks.

        Tensor-parallel ranks process the same images and count as one. This call is collective.
        """
        counts = any(hasattr(chunk, "tower") for chunk in chunks)
        counts = counts and parallel_state.get_tensor_model_parallel_rank() == 0
        total = torch.tensor(float(self._processed if counts else 0), dtype=torch.float64, device=device)
        dist.all_reduce(total)
        self._processed = 0
        return float(total)


def _add_features(level: int, layer: Any, arguments: Any, options: Mapping[str, Any], output: Any) -> Any:
    """Add the features of a level to the output of a layer, [tokens of this rank, 1, hidden size]."""
    added = options["packed_seq_params"].added
    if not added:
        return output
    if isinstance(output, tuple):
        return output[0] + added[level], *output[1:]
    return output + added[level]


def _recompute_blocks(tower: torch.nn.Module) -> None:
    """Make the backward pass recompute each block of a tower."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in tower.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def build_tower(hf: PretrainedConfig, dtype: torch.dtype) -> torch.nn.Module:
    """Return transformers' vision tower of a model, with uninitialised parameters."""
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    # Initial weights would be replaced, and would advance the random streams of only the first pipeline stage.
    with no_init_weights():
        tower: torch.nn.Module = AutoModel.from_config(
            hf.vision_config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    return tower
