"""vLLM side of a weight update: a weight-transfer backend that loads tensors from a transport's receiver.

Importing this module registers the backend with vLLM. vLLM imports the module in every worker process, because
``worker_extension_cls`` names its class ``Worker``.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from gdpo_nemo.models.hf_folder import open_weights, tower_names, weight_names
from gdpo_nemo.utils.errors import GdpoError
from gdpo_nemo.weights.adapters import merged_into
from gdpo_nemo.weights.manifest import Manifest
from gdpo_nemo.weights.transports.base import Receiver

BACKEND = "gdpo_nemo"
_ERRORS: list[GdpoError] = []
"""Errors of the update in progress in this process."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # mypy does not read vLLM
    """Empty class, because the backend needs no initialisation."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # mypy does not read vLLM
    """Manifest and receiver of an update, and True if the engine has no weights, pickled if the worker is a separate
    process.

    Pickling is necessary because vLLM converts dataclasses to plain dictionaries when it sends them to another process.
    """

    update: tuple[Manifest, Receiver, bool] | bytes

    def unpickled(self) -> tuple[Manifest, Receiver, bool]:
        """Return the manifest, the receiver, and whether the engine has no weights."""
        return pickle.loads(self.update) if isinstance(self.update, bytes) else self.update


class ReceiverTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]  # mypy does not read vLLM
    """Backend that loads weights with vLLM's layer-wise reload, which repacks the weights like the initial load."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Prepare the model's routers on CPUs. The backend has no connection."""
        self._tower = frozenset(tower_names(self.model_config.model))
        if self.device.type == "cpu":
            _group_experts(self.model)

    def start_weight_update(self) -> None:
        """Name the loaders of the model, whose names vLLM's reload reads."""
        name_loaders(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the tensors of an update, or the model in the engine's folder with the update's adapters merged.

        A vision tower that the update leaves out keeps its weights. If the engine has none, those of its folder are
        loaded.

        vLLM's loader raises an error for a tensor that no module accepts. A ``GdpoError`` is stored for
        ``Worker.update_error``. If this method raised the error, vLLM would not call ``finish_weight_update``. An
        error from another process would also arrive only as text.
        """
        manifest, receiver, is_empty = update_info.unpickled()
        names = {entry.name for entry in manifest.entries}
        kept = self._tower if not is_empty and names.isdisjoint(self._tower) else frozenset()
        # vLLM's reload expects new tensors for every module of the model that it gets.
        initialize_layerwise_reload(self.model.get_language_model() if kept else self.model)
        if self.device.type == "cpu":
            _repack_experts(self.model)
        try:
            # Close the iterator even if vLLM's loader fails: other members of the transport's groups wait for this one.
            closing = contextlib.closing(self._tensors(manifest, receiver, kept))
            with closing as tensors, experts_loaded_together(self.model):
                self.model.load_weights(tensors)
        except GdpoError as error:
            _ERRORS.append(error)

    def _tensors(
        self, manifest: Manifest, receiver: Receiver, kept: frozenset[str]
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of all weights except those that the engine keeps."""
        adapters = manifest.adapters
        received = receiver.receive(manifest, self.device, self.parallel_config.rank)
        base = self.model_config.model
        if adapters is None:
            yield from received
            names = sorted(self._tower - kept - {entry.name for entry in manifest.entries})
            yield from zip(names, map(open_weights(base), names) if names else ())
            return
        # Receive and verify all matrices first: a wrong checksum must not leave the model partly loaded.
        matrices = dict(received)
        names = [name for name in weight_names(base) if name not in kept]
        yield from merged_into(names, open_weights(base), matrices, adapters.scale, self.device)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive an update. vLLM calls this method with the update information as a dictionary."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """Finish the reload, and repack the weights that vLLM's reload omits."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Do nothing, because the backend has no resources."""


@contextlib.contextmanager
def experts_loaded_together(model: torch.nn.Module) -> Iterator[None]:
    """In the block, load a matrix of all experts of a layer with one call of vLLM's weight loader.

    vLLM calls the loader for each matrix of each expert, and its layer-wise reload calls the loader twice. The loader
    also accepts the stacked matrices of all experts. Layers with quantisation or redundant experts, and layers whose
    experts are distributed over processes, are loaded as usual.
    """
    # vLLM imports this module only for models with experts.
    imported = sys.modules.get("vllm.model_executor.layers.fused_moe.routed_experts")
    experts = [m for m in model.modules() if imported is not None and isinstance(m, imported.RoutedExperts)]
    layers = [layer for layer in experts if _loads_together(layer)]
    for layer in layers:
        layer.load_weights = functools.partial(_load_experts, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.load_weights


def _loads_together(layer: Any) -> bool:
    sizes = layer.moe_config
    complete = sizes.num_experts == sizes.num_local_experts == sizes.num_logical_experts
    return complete and layer.quant_config is None and not layer.expert_map_manager.num_fused_shared_experts


def _load_experts(layer: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """Load the weights of a layer's experts. Yield the names of the loaded parameters, as ``load_weights`` of vLLM.

    Args:
        weights: (name relative to the layer, for example ``7.up_proj.weight``; matrix).
    """
    projections = {
        f"{layer.ckpt_gate_proj_name}.weight": ("w13_weight", "w1"),
        f"{layer.ckpt_up_proj_name}.weight": ("w13_weight", "w3"),
        f"{layer.ckpt_down_proj_name}.weight": ("w2_weight", "w2"),
    }
    count = layer.moe_config.num_experts
    received: dict[str, dict[int, torch.Tensor]] = {projection: {} for projection in projections}
    for name, tensor in weights:
        index, _, projection = name.partition(".")
        if projection not in projections or not index.isdecimal():
            yield from type(layer).load_weights(layer, [(name, tensor)])
            continue
        matrices = received[projection]
        matrices[int(index)] = tensor
        if len(matrices) == count:
            parameter, shard = projections[projection]
            loader = getattr(layer, parameter).weight_loader
            stacked = torch.stack([matrices.pop(expert) for expert in range(count)])
            loader(getattr(layer, parameter), stacked, f"{layer.layer_name}.{parameter}", shard, 0, return_success=True)
            yield parameter
    rest = []
    for projection, matrices in received.items():
        rest += [(f"{index}.{projection}", tensor) for index, tensor in matrices.items()]
    yield from type(layer).load_weights(layer, rest)


def _repack_experts(model: torch.nn.Module) -> None:
    """Make the reload pack new expert weights for vLLM's CPU kernels, as at the first load.

    vLLM packs expert weights only while a layer has no kernel. A reload with a kernel would copy the unpacked weights
    into the packed ones, or fail if packing has padded them.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "unquantized_backend"):
            method.moe_kernel = None


def _group_experts(model: torch.nn.Module) -> None:
    """Let routers with sigmoid scores use a single group of experts.

    vLLM's CPU router computes such scores only for groups of experts.
    """
    for module in model.modules():
        router: Any = getattr(module, "router", None)
        if getattr(router, "scoring_func", None) == "sigmoid" and not router.use_grouped_topk:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1


def name_loaders(model: torch.nn.Module) -> None:
    """Give names to weight loaders that are partial functions, as in MiniMax-M2. vLLM's reload reads their names."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial):
            setattr(loader, "__name__", loader.func.__name__)  # noqa: B010


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Update vLLM's packed copy of a tied output head on CPU. A reload updates only the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod) and hasattr(module, "cpu_linear"):
            method.process_weights_after_loading(module)


class Worker:
    """Extension of vLLM's worker, which makes vLLM import this module."""

    parallel_config: Any
    """Parallel config of the worker, set by vLLM."""

    def update_error(self) -> bytes | None:
        """Return and clear the pickled error of the last update in this process, or return None if it succeeded."""
        return pickle.dumps(_ERRORS.pop()) if _ERRORS else None

    def close_receiver(self, receiver: Receiver | bytes) -> None:
        """Release the receiver's resources in this process. The argument may be pickled as in ``UpdateInfo``."""
        unpickled = pickle.loads(receiver) if isinstance(receiver, bytes) else receiver
        unpickled.close(self.parallel_config.rank)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ReceiverTransfer)
