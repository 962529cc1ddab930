"""Fields and defaults of older releases of TRL and transformers.

The tables describe TRL 0.12 to 1.16. They were read from the source of each release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Release = tuple[int, int]
"""Major and minor version of TRL."""

_TRANSFORMERS = (
    "adafactor", "dispatch_batches", "evaluation_strategy", "fp16_backend", "fp16_opt_level", "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap", "group_by_length", "half_precision_backend", "include_inputs_for_metrics",
    "include_tokens_per_second", "jit_mode_eval", "logging_dir", "mp_parameters", "no_cuda", "overwrite_output_dir",
    "past_index", "per_gpu_eval_batch_size", "per_gpu_train_batch_size", "push_to_hub_model_id",
    "push_to_hub_organization", "push_to_hub_token", "ray_scope", "save_safetensors", "split_batches", "torchdynamo",
    "tpu_metrics_debug", "tpu_num_cores", "use_ipex", "use_mps_device", "warmup_ratio",
)  # fmt: skip
"""Fields of transformers 4 that transformers 5 does not have."""

_REFERENCE: dict[str, Release] = {
    "max_prompt_length": (0, 28), "max_completion_length": (0, 28), "label_pad_token_id": (0, 28),
    "padding_value": (0, 27), "is_encoder_decoder": (0, 26), "generate_during_eval": (1, 1),
    "ref_model_init_kwargs": (0, 28), "use_liger_loss": (0, 27), "base_model_attribute_name": (0, 28),
    "model_adapter_name": (0, 28), "ref_adapter_name": (0, 28),
}  # fmt: skip
_SUPERVISED: dict[str, Release] = {
    "max_seq_length": (0, 19), "dataset_batch_size": (0, 17), "num_of_sequences": (0, 17), "chars_per_token": (0, 17),
    "use_liger": (0, 17),
}  # fmt: skip
OF_MODEL: dict[str, Any] = {"torch_dtype": None, "trust_remote_code": False}
"""Removed fields of ``ModelConfig`` -> default."""
OF_SCRIPT: dict[str, Any] = {"gradient_checkpointing_use_reentrant": False}
"""Removed fields of ``ScriptArguments`` -> default."""
_REMOVED_ARGUMENTS: dict[str, Release] = {"torch_dtype": (0, 26), "gradient_checkpointing_use_reentrant": (0, 26)}
_REMOVED: dict[str, dict[str, Release]] = {
    "GRPOConfig": {
        "max_prompt_length": (0, 27), "use_liger_loss": (0, 27), "vllm_device": (0, 17), "vllm_dtype": (0, 17),
        "vllm_enable_prefix_caching": (0, 17), "vllm_guided_decoding_regex": (0, 27), "vllm_max_model_len": (0, 17),
        "wandb_log_unique_prompts": (0, 26),
    },
    "RLOOConfig": {
        "max_prompt_length": (0, 28), "vllm_guided_decoding_regex": (0, 27), "wandb_log_unique_prompts": (0, 26),
        "reward_model_path": (0, 21), "sft_model_path": (0, 21), "whiten_rewards": (0, 21),
        "normalize_advantage": (0, 21),
        **dict.fromkeys(
            (
                "exp_name", "num_ppo_epochs", "kl_coef", "cliprange", "rloo_k", "normalize_reward", "token_level_kl",
                "num_mini_batches", "total_episodes", "response_length", "dataset_num_proc", "stop_token",
                "local_rollout_forward_batch_size", "num_sample_generations", "stop_token_id", "missing_eos_penalty",
            ),
            (0, 24),
        ),
    },
    "SFTConfig": _SUPERVISED,
    "GKDConfig": _SUPERVISED,
    "DPOConfig": {
        **_REFERENCE, "max_target_length": (0, 13), "reference_free": (0, 28), "force_use_ref_model": (0, 28),
        "rpo_alpha": (0, 28), "use_num_logits_to_keep": (0, 16), "use_logits_to_keep": (0, 28), "tools": (0, 28),
    },
    "KTOConfig": {**_REFERENCE, "truncation_mode": (0, 26)},
    "ORPOConfig": {"max_prompt_length": (0, 27), "label_pad_token_id": (0, 27), "truncation_mode": (0, 29)},
    "CPOConfig": {
        "max_prompt_length": (0, 27), "label_pad_token_id": (0, 27), "padding_value": (0, 27),
        "truncation_mode": (0, 29),
    },
    "PPOConfig": {"exp_name": (0, 27)},
    "DistillationConfig": {
        "lmbda": (1, 8), "reverse_kl_top_1_mode": (1, 8), "use_teacher_server": (1, 8),
        "teacher_model_server_url": (1, 8), "loss_top_k": (1, 8), "loss_add_tail": (1, 8),
        **dict.fromkeys(
            ("max_length", "max_prompt_length", "num_generations", "generation_batch_size", "vllm_sync_frequency",
             "log_completions_steps", "wandb_entity", "wandb_project", "wandb_run_group"), (1, 9)
        ),
    },
}  # fmt: skip
"""Config class -> removed field -> last release with this field."""

_SUPERVISED_NAMES = {"max_seq_length": "max_length", "use_liger": "use_liger_kernel"}
_RENAMED: dict[str, dict[str, str]] = {
    "": {"per_gpu_train_batch_size": "per_device_train_batch_size"},
    "GRPOConfig": {"vllm_max_model_len": "vllm_max_model_length"},
    "SFTConfig": _SUPERVISED_NAMES,
    "GKDConfig": _SUPERVISED_NAMES,
    "PPOConfig": {"exp_name": "run_name"},
    "RLOOConfig": {
        "rloo_k": "num_generations", "cliprange": "epsilon", "kl_coef": "beta", "exp_name": "run_name",
        "normalize_advantage": "normalize_advantages", "normalize_reward": "normalize_advantages",
        "num_ppo_epochs": "num_iterations", "response_length": "max_completion_length",
    },
}  # fmt: skip
"""Config class (empty for all classes) -> old name of a field -> its present name.

TRL 0.22 converts the fields of ``RLOOConfig`` in this way.
"""

_SAMPLED: dict[str, tuple[Release, Any]] = {
    "max_completion_length": ((1, 9), 256),
    "max_prompt_length": ((0, 25), 512),
    "vllm_mode": ((0, 29), "server"),
}
_REFERENCE_COPY: dict[str, tuple[Release, Any]] = {
    "ref_model_mixup_alpha": ((0, 15), 0.9),
    "ref_model_sync_steps": ((0, 15), 64),
}
_DEFAULTS: dict[str, dict[str, tuple[Release, Any]]] = {
    "GRPOConfig": {
        **_SAMPLED, **_REFERENCE_COPY, "temperature": ((0, 17), 0.9), "top_k": ((0, 17), 50), "beta": ((0, 18), 0.04),
        "loss_type": ((0, 21), "bnpo"), "use_bias_correction_kl": ((1, 9), False),
        "vllm_importance_sampling_correction": ((0, 22), False), "vllm_importance_sampling_clip_max": ((0, 25), 2.0),
    },
    "RLOOConfig": {**_SAMPLED, "reward_clip_range": ((0, 21), 10.0)},
    "DPOConfig": _REFERENCE_COPY,
    "RewardConfig": {"learning_rate": ((0, 23), 5e-5)},
}  # fmt: skip
"""Config class -> field -> (last release with the earlier default, this default)."""
_BF16: tuple[Release, Any] = ((0, 18), False)
"""The same for ``bf16`` in every config class."""


def older_fields(config: str) -> tuple[str, ...]:
    """Return the fields that older releases of a config class had. Scripts and saved arguments may contain them."""
    return (*_TRANSFORMERS, *_REMOVED.get(config, {}))


def older_arguments(config: str) -> tuple[str, ...]:
    """Return the command-line arguments that TRL's commands and scripts had in older releases."""
    return (*older_fields(config), *OF_MODEL, *OF_SCRIPT)


def with_present_names(config: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields under their present names. A field with its present name takes precedence."""
    names = _RENAMED[""] | _RENAMED.get(config, {})
    renamed = {names[key]: value for key, value in given.items() if key in names}
    return renamed | {key: value for key, value in given.items() if key not in names}


def release_of(config: str, names: Iterable[str]) -> Release | None:
    """Return the last release that has all given fields and arguments, or None if no field was removed."""
    last = {**_REMOVED_ARGUMENTS, **_REMOVED.get(config, {})}
    return min((last[name] for name in names if name in last), default=None)


def defaults_of(config: str, release: Release | None) -> dict[str, Any]:
    """Return the defaults in a release that differ from the present defaults."""
    if release is None:
        return {}
    return {field: value for field, (last, value) in _earlier(config).items() if release <= last}


def changed_before(config: str, release: Release | None) -> dict[str, tuple[Release, Any]]:
    """Return the fields whose defaults changed before a release, as in ``_DEFAULTS``."""
    if release is None:
        return {}
    return {field: earlier for field, earlier in _earlier(config).items() if earlier[0] < release}


def _earlier(config: str) -> dict[str, tuple[Release, Any]]:
    return {"bf16": _BF16, **_DEFAULTS.get(config, {})}
