"""vLLM's side of a weight update: a transfer backend that reads a flat buffer from this machine's memory.

Registered with vLLM by importing this module, which vLLM does in every worker process because it names the module's
``Worker`` as ``worker_extension_cls``. In-process engines take the buffer from ``INBOX``; engines with worker processes
map a file in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from gdpo_nemo.weights.adapters import merged_into
from gdpo_nemo.weights.manifest import Manifest, unpack
from gdpo_nemo.weights.model_folder import open_weights, weight_names

BACKEND = "gdpo_nemo_memory"
INBOX: dict[int, np.ndarray] = {}
"""Buffers handed over inside one process, by version."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which buffer to read: ``path`` of a shared-memory file, or None for ``INBOX[manifest.version]``."""

    manifest: Manifest
    path: str | None = None


class MemoryTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads an update through vLLM's layer-wise reload, which repacks weights the way loading them did."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Open the model for loading."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load every tensor of the update, or the engine's own folder with the update's adapters merged into it.

        A tensor that no module takes is an error of vLLM's loader.
        """
        manifest = update_info.manifest
        if update_info.path is None:
            buffer = INBOX[manifest.version]
        else:
            buffer = np.memmap(update_info.path, np.uint8, "r")
        tensors = unpack(manifest, buffer)
        if manifest.adapters is not None:
            # All checksums first: a matrix that is not what was sent must not leave the model half loaded.
            base, matrices = self.model_config.model, dict(tensors)
            tensors = merged_into(weight_names(base), open_weights(base), matrices, manifest.adapters.scale, self.device)
        self.model.load_weights(tensors)

    def update_weights(self, update_info: dict) -> None:
        """Receive one update (vLLM calls this with the dictionary the engine was given)."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """Close the model again, and repack what the reload forgets."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


def _repack_tied_head(model: torch.nn.Module) -> None:
    """On CPU vLLM keeps a packed copy of the output head; a reload renews the embedding but not this copy of it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod) and hasattr(module, "cpu_linear"):
            method.process_weights_after_loading(module)


class Worker:
    """The worker extension; it exists so that vLLM imports this module."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, MemoryTransfer)
