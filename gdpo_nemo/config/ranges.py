"""The range of every number in the config."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Callable, Sequence, get_args, get_type_hints

from gdpo_nemo.config.effects import value_of
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError

_AT_LEAST_ONE = (
    "gdpo.num_prompts_per_step", "gdpo.max_num_steps", "gdpo.max_num_epochs", "gdpo.val_prompts",
    "gdpo.val_generations_per_prompt",
    "gdpo.max_skipped_steps", "gdpo.dynamic_sampling.max_rounds", "gdpo.dynamic_sampling.batch_multiplier",
    "loss_fn.constant_length",
    "policy.max_total_sequence_length", "policy.train_global_batch_size", "policy.micro_batch_tokens",
    "policy.num_threads", "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size", "policy.megatron_cfg.virtual_pipeline_model_parallel_size",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage", "policy.megatron_cfg.num_layers_in_last_pipeline_stage",
    "policy.megatron_cfg.context_parallel_size", "policy.megatron_cfg.expert_model_parallel_size",
    "policy.megatron_cfg.expert_tensor_parallel_size", "policy.megatron_cfg.data_parallel_size",
    "policy.megatron_cfg.scheduler.lr_decay_steps", "policy.megatron_cfg.scheduler.lr_hold_updates",
    "policy.generation.engines", "policy.generation.max_new_tokens",
    "policy.generation.vllm_cfg.tensor_parallel_size", "policy.generation.vllm_cfg.kv_cache_memory_bytes",
    "policy.generation.vllm_cfg.max_num_seqs", "rollout.env_workers", "rollout.turns.max_turns",
    "rollout.turns.max_tokens", "rollout.window", "rollout.sync_every",
    "rollout.save_groups", "rollout.replay_buffer.reuse", "rollout.replay_buffer.max_age",
    "gdpo.dynamic_sampling.max_rerolls",
    "data.train.size", "data.validation.size", "weights.bucket_mib", "cluster.num_nodes", "cluster.cpus_per_node",
    "checkpointing.save_period", "checkpointing.keep_last", "logger.completions_period", "gdpo.num_iterations",
    "policy.ref_model_sync_steps",
    *(
        f"data.{split}.strided.{key}"
        for split in ("train", "validation")
        for key in ("stride", "context_length", "generate_max_len")
    ),
)  # fmt: skip
_NOT_NEGATIVE = (
    "run.seed", "run.max_restarts", "policy.lora.rank", "gdpo.discount", "gdpo.val_period", "gdpo.val_temperature",
    "loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max",
    "loss_fn.reference_policy_kl_penalty", "loss_fn.off_policy.ratio_min", "policy.megatron_cfg.optimizer.lr",
    "policy.megatron_cfg.optimizer.min_lr", "policy.megatron_cfg.optimizer.weight_decay",
    "policy.megatron_cfg.optimizer.clip_grad", "policy.megatron_cfg.scheduler.lr_warmup_init",
    "policy.megatron_cfg.scheduler.lr_warmup_steps",
    "rollout.replay_buffer.groups", "gdpo.dynamic_sampling.reroll_after",
    "rollout.max_staleness", "rollout.max_env_failure_share", "cluster.gpus_per_node", "cluster.env_nodes",
    "checkpointing.keep_best", "logger.num_completions", "logger.report_period",
)  # fmt: skip
_POSITIVE = (
    "gdpo.epsilon", "gdpo.kl_in_reward", "policy.lora.alpha", "loss_fn.kl_input_clamp_value",
    "loss_fn.kl_output_clamp_value",
    "loss_fn.target_temperature", "loss_fn.off_policy.ratio_max", "policy.generation.temperature",
    "policy.generation.parity_limit", "policy.megatron_cfg.optimizer.adam_eps", "rollout.env_timeout_s",
    "rollout.generation_timeout_s", "rollout.train_timeout_s", "rollout.group_timeout_s",
)  # fmt: skip
_LARGEST = 10**15
"""What no number is above that is none of these: a petabyte, a quadrillion tokens or steps."""
_LONGEST_S = 10 * 365 * 24 * 3600
_MOST_PROCESSES = 4096
"""On one machine."""
_AT_MOST = {
    "run.max_restarts": 10**6,
    "run.seed": 2**62,  # torch takes 63 bits, and ranks add to it
    "rollout.env_workers": _MOST_PROCESSES,
    "policy.num_threads": _MOST_PROCESSES,
    "policy.generation.engines": 100_000,
    "cluster.num_nodes": 100_000,
    "cluster.env_nodes": 100_000,
    "cluster.gpus_per_node": 1024,
    "cluster.cpus_per_node": 65_536,
    "gdpo.num_prompts_per_step": 10**8,
    "gdpo.num_generations_per_prompt": 10**6,
    "gdpo.val_generations_per_prompt": 10**6,
    "policy.max_total_sequence_length": 10**9,
    "policy.lora.rank": 2**20,
    "rollout.turns.max_turns": 10**6,
    "rollout.max_staleness": 10**6,
    "weights.bucket_mib": 2**20,
    "logger.prometheus.port": 65_535,
    **dict.fromkeys(
        (
            "rollout.env_timeout_s", "rollout.generation_timeout_s", "rollout.train_timeout_s",
            "rollout.group_timeout_s",
        ),
        _LONGEST_S,
    ),
    **{
        f"policy.megatron_cfg.{name}_parallel_size": 100_000
        for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "data")
    },
    "policy.megatron_cfg.expert_tensor_parallel_size": 100_000,
}  # fmt: skip
_UNBOUNDED = ("loss_fn.off_policy.ratio_max", "gdpo.dynamic_sampling.batch_multiplier")
"""May be infinite: no bound on the ratio; of the other ``objective_checks`` says what it means."""


def number_keys(section: type, prefix: str = "") -> list[str]:
    """The dotted keys below a section whose values are numbers."""
    keys = []
    for name, hint in get_type_hints(section).items():
        kinds = (hint, *get_args(hint))
        inner = next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)
        if inner is not None:
            keys += number_keys(inner, f"{prefix}{name}.")
        elif any(kind in (int, float) for kind in kinds) and getattr(hint, "__origin__", None) not in (dict, list):
            keys.append(prefix + name)
    return keys


@cache
def _highest(section: type) -> list[tuple[str, int]]:
    return [(key, _AT_MOST.get(key, _LARGEST)) for key in number_keys(section) if key not in _UNBOUNDED]


def check_ranges(config: Config) -> None:
    """Refuses numbers outside the range of their key. Raises ConfigError."""
    bounds: tuple[tuple[Sequence[str], Callable[[float], bool], str], ...] = (
        (_AT_LEAST_ONE, lambda v: v >= 1, "at least 1"),
        (_NOT_NEGATIVE, lambda v: v >= 0, "0 or more"),
        (_POSITIVE, lambda v: v > 0, "more than 0"),
    )
    for keys, good, rule in bounds:
        for key in keys:
            value = value_of(config, key)
            if value is not None and not good(value):
                raise ConfigError(f"{key}: must be {rule}, got {value}")
    for key, highest in _highest(Config):
        value = value_of(config, key)
        if value is not None and not -highest <= value <= highest:
            raise ConfigError(f"{key}: must be at most {highest:,}, got {str(value)[:40]}")
    generation = config.policy.generation
    loss = config.loss_fn
    if not 0 <= config.rollout.endpoint.port <= 65535:
        raise ConfigError(f"rollout.endpoint.port: must be 0 (any) to 65535, got {config.rollout.endpoint.port}")
    if not 0 < config.policy.ref_model_mixup_alpha <= 1:
        raise ConfigError(
            f"policy.ref_model_mixup_alpha: must be above 0 and at most 1, got {config.policy.ref_model_mixup_alpha}"
        )
    if not 0 < generation.top_p <= 1:
        raise ConfigError(f"policy.generation.top_p: must be above 0 and at most 1, got {generation.top_p}")
    if generation.top_k != -1 and generation.top_k < 1:
        raise ConfigError(f"policy.generation.top_k: must be -1 (all) or at least 1, got {generation.top_k}")
    if not 0 < generation.vllm_cfg.gpu_memory_utilization <= 1:
        raise ConfigError("policy.generation.vllm_cfg.gpu_memory_utilization: must be above 0 and at most 1")
    if loss.ratio_clip_min > 1:
        raise ConfigError(f"loss_fn.ratio_clip_min: must be at most 1, got {loss.ratio_clip_min}")
