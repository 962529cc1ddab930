"""Accepted values of text keys, from registries and constants.

This module and the registries do not import torch.
"""

from __future__ import annotations

from dataclasses import fields

from gdpo_nemo.algorithms.estimators import ESTIMATORS
from gdpo_nemo.algorithms.loss_settings import KL_GRADIENTS, OLD_LOGPROBS
from gdpo_nemo.algorithms.losses import AGGREGATIONS, KL_KINDS, LOSSES
from gdpo_nemo.algorithms.offpolicy import CORRECTIONS, LEVELS
from gdpo_nemo.algorithms.settings import PRESETS
from gdpo_nemo.config.algorithm_choice import ALGORITHMS
from gdpo_nemo.config.health import PRESETS as PRESETS_OF_HEALTH
from gdpo_nemo.config.sections import OptimizerConfig
from gdpo_nemo.config.transports import TRANSPORTS
from gdpo_nemo.models.architectures import linear_layers
from gdpo_nemo.models.families import FAMILIES

LORA_TARGETS = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in linear_layers(family)))
OPTIMIZER_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype")
"""Keys of the optimizer section that contain a data type."""
MUON_KEYS = tuple(field.name for field in fields(OptimizerConfig) if field.name.startswith("muon_"))
"""Keys of the optimizer section that only Muon uses."""
ALIASED = ("nemo_rl", "trl")
"""Accepted values of `logger.aliases`: programs whose metric names are known."""

SECTIONS_OFF: dict[str, tuple[str, int | str | bool | None]] = {
    "policy.lora": ("rank", 0),
    "teacher": ("model_name", None),
    "gdpo.dynamic_sampling": ("enabled", False),
    "loss_fn.off_policy": ("mode", "none"),
    "rollout.replay_buffer": ("groups", 0),
    "rollout.selection": ("enabled", False),
    "rollout.endpoint": ("enabled", False),
    "checkpointing": ("enabled", False),
    "logger.tensorboard": ("enabled", False),
    "logger.wandb": ("enabled", False),
    "logger.mlflow": ("enabled", False),
    "logger.prometheus": ("port", None),
}
"""Sections that a config may set to null, with the key and value that disable each section."""

CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm.type": tuple(ALGORITHMS),
    "gdpo.estimator": tuple(ESTIMATORS),
    "gdpo.preset": tuple(PRESETS),
    "loss_fn.type": tuple(LOSSES),
    "loss_fn.aggregation": tuple(AGGREGATIONS),
    "loss_fn.old_logprobs": OLD_LOGPROBS,
    "loss_fn.reference_policy_kl_type": tuple(KL_KINDS),
    "loss_fn.reference_policy_kl_gradient": KL_GRADIENTS,
    "loss_fn.off_policy.mode": tuple(CORRECTIONS),
    "loss_fn.off_policy.level": tuple(LEVELS),
    "gdpo.group_by": ("row", "prompt"),
    "gdpo.family_scale": ("sum", "none"),
    "gdpo.credit": ("sequence", "turn", "span"),
    "gdpo.turn_baseline": ("turn", "group"),
    "policy.lora.init": ("uniform", "xavier"),
    "policy.precision": ("float32", "bfloat16"),
    "policy.megatron_cfg.recompute": ("none", "selective", "full"),
    "policy.megatron_cfg.attention_backend": ("auto", "sdpa", "flex", "flash", "fused", "unfused"),
    "policy.megatron_cfg.moe_router_dtype": ("float32", "float64", "fp32", "fp64"),
    "policy.megatron_cfg.fp8": ("e4m3", "hybrid"),
    "policy.megatron_cfg.fp8_recipe": ("delayed", "tensorwise", "blockwise", "mxfp8"),
    "policy.megatron_cfg.scheduler.lr_decay_style": ("constant", "linear", "cosine"),
    "policy.generation.backend": ("vllm",),
    "policy.megatron_cfg.optimizer.type": ("adamw", "muon"),
    "policy.megatron_cfg.optimizer.muon_scale_mode": ("spectral", "shape_scaling", "unit_rms_norm"),
    "policy.megatron_cfg.optimizer.muon_coefficient_type": (
        "simple",
        "quintic",
        "polar_express",
        "cans",
        "aol",
        "deepseekv4",
    ),
    "policy.megatron_cfg.optimizer.muon_fp32_matmul_prec": ("highest", "high", "medium"),
    "policy.megatron_cfg.optimizer.muon_tp_mode": ("duplicated", "distributed", "blockwise"),
    **{f"policy.megatron_cfg.optimizer.{key}": ("float32", "bfloat16") for key in OPTIMIZER_DTYPES},
    "policy.generation.vllm_cfg.head_dtype": ("float32", "model"),
    "cluster.placement": ("separate", "colocated"),
    "rollout.kv": ("recompute", "keep", "drain"),
    "weights.transport": ("auto", *TRANSPORTS),
    "weights.mode": ("auto", "full", "difference"),
    "logger.wandb.mode": ("online", "offline"),
    "health.preset": tuple(PRESETS_OF_HEALTH),
    "logger.console": ("auto", "live", "plain", "quiet"),
}
"""Accepted values by dotted key. A key that is not listed accepts any value of its type."""
RECOMPUTED_MODULES = ("core_attn", "mlp")
"""Values of ``policy.megatron_cfg.recompute_modules``, by the names of Megatron's ``recompute_modules``.

Megatron's ``layernorm`` and ``moe_act`` are missing, because their backward pass compiles a C++ extension at run time.
"""
CUSTOM_FUNCTIONS = ("algorithm.type", "gdpo.estimator", "loss_fn.type", "loss_fn.off_policy.mode", "weights.transport")
"""Keys of ``CHOICES`` that also accept the import path of a user-defined function or class: file.py:name or
package.module:name."""
