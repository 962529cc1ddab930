"""Layouts by the names people give them: ``TP2xPP2+SP``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from gdpo_nemo.config.schema import MegatronConfig, OptimizerConfig, SchedulerConfig

_SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VPP": "virtual_pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "DP": "data_parallel_size",
}
_FLAGS = {
    "SP": dict(sequence_parallel=True),
    "DIST": dict(use_distributed_optimizer=True),
    "OVERLAP": dict(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
    "SELECTIVE": dict(recompute="selective"),
    "MODULES": dict(recompute="selective", recompute_modules=["core_attn", "mlp"]),
    "FULL": dict(recompute="full"),
    "FIRST": dict(recompute="full", recompute_layers=1),
    "SHORTHEAD": dict(num_layers_in_first_pipeline_stage=1),
    "SHORTTAIL": dict(num_layers_in_last_pipeline_stage=1),
    "FROZENROUTER": dict(freeze_moe_router=True),
    "FLOAT64ROUTER": dict(moe_router_dtype="float64"),
    "TE": dict(transformer_engine=True),
    "FLEX": dict(attention_backend="flex"),
    "MUON": {},  # see `parse`
    "WARMUP": dict(scheduler=SchedulerConfig(lr_warmup_steps=4, lr_warmup_init=1e-3)),
}


@dataclass(frozen=True)
class Layout:
    """A parallel layout and the number of ranks it takes."""

    config: MegatronConfig
    ranks: int


def parse(name: str) -> Layout:
    """``TP2xPP2+SP``: sizes joined by ``x``, then flags. Ranks are tensor x pipeline x context x data."""
    sizes, *flags = name.split("+")
    fields = {}
    for part in sizes.split("x"):
        kind, size = re.fullmatch(r"([A-Z]+)(\d+)", part).groups()
        fields[_SIZES[kind]] = int(size)
    for flag in flags:
        fields.update(_FLAGS[flag])
    kind = "muon" if "MUON" in flags else "adamw"
    ranks = math.prod(fields.get(_SIZES[kind], 1) for kind in ("TP", "PP", "CP", "DP"))
    return Layout(MegatronConfig(**fields, optimizer=replace(optimizer(), type=kind)), ranks)


def fitting(layout: str, model: str) -> str:
    """The layout, with undivided experts for a model whose experts have biases."""
    divided = re.search(r"TP(?!1)\d", layout) and "ETP" not in layout
    return re.sub(r"^([^+]*)", r"\1xETP1", layout) if divided and model == "gpt-oss" else layout


def optimizer() -> OptimizerConfig:
    """The optimizer of all cases.

    Adam's first steps are lr * g / (|g| + eps): where a gradient is as small as its rounding error, a small eps turns
    that error into steps of the full learning rate. An eps of the size of the gradients keeps the comparison about the
    gradients.
    """
    return OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_beta2=0.999, adam_eps=1e-3, clip_grad=1.0)


def in_turn(layouts: list[str], models: list[str], each: int) -> list[tuple[str, str]]:
    """Every layout with ``each`` of the models, all of which get their turn."""
    return [
        (fitting(layout, model := models[(each * i + j) % len(models)]), model)
        for i, layout in enumerate(layouts)
        for j in range(each)
    ]
