"""Experts that an engine chose for the tokens that it processed (rollout routing replay, arXiv 2510.11370).

vLLM returns these choices only with its newer model runner, which does not exist for CPUs. In an engine on a CPU,
``RoutingRecorder`` records the choices next to the KV cache: a token's choices have the number of the token's slot in
the cache. A prefix that comes from the cache thus also has its choices.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.models.family_checks import describe

GPU_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Environment variables with which vLLM on GPUs returns its routing."""


class RoutingShape:
    """Sizes of a model's routing, read from its ``config.json``.

    Args:
        folder: Hugging Face folder.
    """

    def __init__(self, folder: str | Path):
        model = describe(json.loads((Path(folder) / "config.json").read_text()))
        self.layers = np.array(model.moe_layers)
        """Indices of the model's layers with experts."""
        self.dtype = np.int8 if model.experts <= 128 else np.int16
        self.chosen = model.active_experts
        """Number of experts per token."""

    def by_token(self, choices: np.ndarray, tokens: int) -> np.ndarray:
        """Convert choices to the form of ``Completion.routing``.

        Args:
            choices: [processed tokens, layers with experts, experts per token].
            tokens: number of tokens of prompt and completion. The engine has not processed the last ones.
        """
        routing = np.full((tokens, len(self.layers) * self.chosen), -1, self.dtype)
        routing[: len(choices)] = choices.reshape(len(choices), -1)
        return routing


class RoutingRecorder:
    """Recorder of the choices of an engine whose vLLM runs in this process.

    Args:
        core: vLLM's engine core.
        shape: sizes of the model's routing.
    """

    def __init__(self, core: Any, shape: RoutingShape):
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self._runner = core.model_executor.driver_worker.worker.model_runner
        cache = core.vllm_config.cache_config
        self._block_size = int(cache.block_size)
        slots = int(cache.num_gpu_blocks) * self._block_size
        modules = [module for module in self._runner.model.modules() if isinstance(module, MoERunner)]
        self._choices = np.full((slots, len(shape.layers), shape.chosen), -1, shape.dtype)
        for number, module in enumerate(sorted(modules, key=lambda module: module.layer_id)):
            module.router.set_capture_fn(partial(self._record, number))

    def _record(self, number: int, chosen: Any) -> None:
        """Store the experts [tokens, experts per token] of the current forward pass in layer ``number``."""
        from vllm.forward_context import get_forward_context

        slots = next(iter(get_forward_context().slot_mapping.values()), None)
        if slots is None:  # a trial pass without a KV cache
            return
        written = slots[: len(chosen)].numpy()
        used = written >= 0
        self._choices[written[used], number] = chosen[: len(written)].numpy()[used]

    def choices(self, name: str, processed: int) -> np.ndarray:
        """Return the choices of a request that finished in the last step.

        Args:
            name: vLLM's internal name of the request.
            processed: number of tokens that vLLM has processed.

        Returns:
            [processed tokens, layers with experts, experts per token].
        """
        blocks = np.array(self._runner.requests[name].block_ids[0])
        tokens = np.arange(processed)
        slots = blocks[tokens // self._block_size] * self._block_size + tokens % self._block_size
        found: np.ndarray = self._choices[slots]
        return found
