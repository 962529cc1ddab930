"""vLLM's side of a weight update: a transfer backend that loads what a transport's receiver yields.

Registered with vLLM by importing this module, which vLLM does in every worker process because it names the module's
``Worker`` as ``worker_extension_cls``.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, Iterator

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from gdpo_nemo.errors import GdpoError
from gdpo_nemo.weights.adapters import merged_into
from gdpo_nemo.weights.manifest import Manifest
from gdpo_nemo.weights.model_folder import open_weights, weight_names
from gdpo_nemo.weights.transports.transport import Receiver

BACKEND = "gdpo_nemo"
_ERRORS: list[GdpoError] = []
"""Of the update under way in this process."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What the tensors are, and who brings them: as they are, or from another process pickled by ours.

    On its way to a process of its own vLLM turns dataclasses into plain dictionaries.
    """

    update: tuple[Manifest, Receiver] | bytes

    def unpickled(self) -> tuple[Manifest, Receiver]:
        """Manifest and receiver."""
        return pickle.loads(self.update) if isinstance(self.update, bytes) else self.update


class ReceiverTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads an update through vLLM's layer-wise reload, which repacks weights the way loading them did."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Open the model for loading."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load every tensor of the update, or the engine's own folder with the update's adapters merged into it.

        A tensor that no module takes is an error of vLLM's loader. What we find wrong with an update is kept for
        ``Worker.update_error``: raised here it would keep vLLM from closing the model, and from another process it
        would arrive as a text.
        """
        try:
            self.model.load_weights(self._tensors(*update_info.unpickled()))
        except GdpoError as error:
            _ERRORS.append(error)

    def _tensors(self, manifest: Manifest, receiver: Receiver) -> Iterator[tuple[str, torch.Tensor]]:
        adapters = manifest.adapters
        received = receiver.receive(manifest, self.device, self.parallel_config.rank)
        if adapters is None:
            return received
        # All checksums first: a matrix that is not what was sent must not leave the model half loaded.
        base = self.model_config.model
        matrices = dict(received)
        return merged_into(weight_names(base), open_weights(base), matrices, adapters.scale, self.device)

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
    """The worker extension; naming it also makes vLLM import this module."""

    parallel_config: Any
    """Of the worker that is extended."""

    def update_error(self) -> bytes | None:
        """What was wrong with the last update in this process, pickled (see ``UpdateInfo``); None: nothing."""
        return pickle.dumps(_ERRORS.pop()) if _ERRORS else None

    def close_receiver(self, receiver: Receiver | bytes) -> None:
        """Release what the receiver keeps in this process; pickled as in ``UpdateInfo``."""
        (pickle.loads(receiver) if isinstance(receiver, bytes) else receiver).close(self.parallel_config.rank)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ReceiverTransfer)
