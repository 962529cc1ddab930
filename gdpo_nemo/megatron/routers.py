"""Parameters and buffers of the routers of MoE layers that training does not change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from gdpo_nemo.models.weights import EXPERT_BIAS


def freeze_routers(chunks: Iterable[torch.nn.Module]) -> None:
    """Freeze the routers of MoE layers. Call this function before ``wrap``, which allocates gradient buffers."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".mlp.router." in name:
                parameter.requires_grad_(False)


def freeze_expert_biases(chunk: torch.nn.Module) -> None:
    """Exclude the biases of routers from Megatron's update, which counteracts an unequal load of the experts."""
    routers: list[Any] = [module for module in chunk.modules() if hasattr(module, "frozen_expert_bias")]
    for router in routers:
        router.frozen_expert_bias = True


def in_precision(config: TransformerConfig, chunk: torch.nn.Module) -> Any:
    """Wrap a chunk for bfloat16 if ``config`` requires it.

    The biases of routers, and the rotary frequencies of a vision tower, keep their float32 values. Megatron and
    transformers compute with these values, but Megatron's wrapper rounds them to bfloat16 first.
    """
    if not config.bf16:
        return chunk
    exact = {}
    for name, value in chunk.named_buffers():
        if name.endswith(EXPERT_BIAS) or name.startswith("tower."):
            exact[name] = value.clone()
    wrapped = Float16Module(config, chunk)
    for name, value in exact.items():
        module, _, attribute = name.rpartition(".")
        setattr(chunk.get_submodule(module), attribute, value)
    return wrapped
