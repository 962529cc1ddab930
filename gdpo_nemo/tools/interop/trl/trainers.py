"""TRL trainers that can be translated, with the fields and defaults of their configs.

The tables contain all fields in TRL 1.16. ``tests/tools/test_from_trl_trainers.py`` compares them with the installed
classes. ``PPOConfig`` was in ``trl.experimental`` until TRL 1.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gdpo_nemo.tools.interop.trl import defaults
from gdpo_nemo.tools.interop.trl.defaults import GRPO_CONFIG, GRPO_OWN, MODEL_CONFIG, SCRIPT_ARGUMENTS, TRAINING
from gdpo_nemo.tools.interop.trl.releases import OF_MODEL, OF_SCRIPT

_MODEL = {"model_init_kwargs": None, "trust_remote_code": False}
_FROM_ROWS = TRAINING | _MODEL | {"remove_unused_columns": True, "dataset_num_proc": None, "max_length": 1024}
"""Fields of trainers that read answers from the data -> default."""

SFT_CONFIG: dict[str, Any] = _FROM_ROWS | {
    "learning_rate": 2e-05, "router_aux_loss_coef": None, "chat_template_path": None, "dataset_text_field": "text",
    "dataset_kwargs": None, "eos_token": None, "pad_token": None, "truncation_mode": "keep_start",
    "shuffle_dataset": False, "packing": False, "packing_strategy": "bfd", "padding_free": False,
    "pad_to_multiple_of": "auto", "eval_packing": None, "completion_only_loss": None, "assistant_only_loss": False,
    "loss_type": "nll", "activation_offloading": False,
}  # fmt: skip
"""Every field of ``trl.SFTConfig``."""

_REFERENCE = {
    "router_aux_loss_coef": None, "disable_dropout": True, "pad_to_multiple_of": "auto",
    "precompute_ref_log_probs": False, "precompute_ref_batch_size": None, "beta": 0.1, "activation_offloading": False,
    "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
}  # fmt: skip

DPO_CONFIG: dict[str, Any] = (
    _FROM_ROWS
    | _REFERENCE
    | {
        "truncation_mode": "keep_start",
        "padding_free": False,
        "loss_type": ["sigmoid"],
        "loss_weights": None,
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "label_smoothing": 0.0,
        "use_weighting": False,
        "discopop_tau": 0.05,
        "pad_token": None,
    }
)
"""Every field of ``trl.DPOConfig``."""

KTO_CONFIG: dict[str, Any] = (
    _FROM_ROWS
    | _REFERENCE
    | {
        "train_sampling_strategy": "sequential",
        "loss_type": "kto",
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
    }
)
"""Every field of ``trl.KTOConfig``."""

REWARD_CONFIG: dict[str, Any] = _FROM_ROWS | {
    "learning_rate": 0.0001, "chat_template_path": None, "disable_dropout": True, "eos_token": None, "pad_token": None,
    "pad_to_multiple_of": "auto", "center_rewards_coefficient": None, "activation_offloading": False,
}  # fmt: skip
"""Every field of ``trl.RewardConfig``."""

_WITHOUT_REFERENCE = {
    "max_completion_length": None, "beta": 0.1, "disable_dropout": True, "generate_during_eval": False,
    "is_encoder_decoder": None,
}  # fmt: skip

ORPO_CONFIG: dict[str, Any] = _FROM_ROWS | _WITHOUT_REFERENCE | {"padding_value": None}
"""Every field of ``trl.experimental.orpo.ORPOConfig``."""

CPO_CONFIG: dict[str, Any] = (
    _FROM_ROWS
    | _WITHOUT_REFERENCE
    | {"label_smoothing": 0.0, "loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 0.5, "alpha": 0.0}
)
"""Every field of ``trl.experimental.cpo.CPOConfig``."""

_NOT_OF_RLOO = (
    "cast_lm_head_to_fp32", "delta", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos",
    "vespo_k_neg", "vespo_lambda_neg", "importance_sampling_level", "multi_objective_aggregation", "scale_rewards",
    "loss_type", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max",
    "entropy_coef_delta", "entropy_target", "max_tool_calling_iterations", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "off_policy_mask_threshold", "use_bias_correction_kl", "log_completions_hub_repo", "vllm_importance_sampling_cap",
)  # fmt: skip

RLOO_CONFIG: dict[str, Any] = {key: value for key, value in GRPO_CONFIG.items() if key not in _NOT_OF_RLOO} | {
    "num_generations": 2,
    "beta": 0.05,
    "normalize_advantages": False,
    "reward_clip_range": None,
}
"""Every field of ``trl.RLOOConfig``."""

_TEACHER = {"teacher_model_name_or_path": None, "teacher_model_init_kwargs": None}
_OF_DISTILLATION = (
    *_MODEL, "disable_dropout", "max_completion_length", "ds3_gather_for_generation", "shuffle_dataset",
    "pad_to_multiple_of", "temperature", "top_p", "top_k", "min_p", "generation_kwargs", "chat_template_kwargs",
    "repetition_penalty", "cache_implementation", "use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode",
    "vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host", "vllm_server_port",
    "vllm_server_timeout", "vllm_group_port", "vllm_gpu_memory_utilization", "vllm_max_model_length",
    "vllm_tensor_parallel_size", "max_tool_calling_iterations", "log_completions", "num_completions_to_print",
    "log_unique_prompts",
)  # fmt: skip

DISTILLATION_CONFIG: dict[str, Any] = (
    TRAINING
    | {key: GRPO_OWN[key] for key in _OF_DISTILLATION}
    | _TEACHER
    | {"teacher_model_revision": None, "beta": 1.0}
)
"""Every field of ``trl.DistillationConfig``."""

GKD_CONFIG: dict[str, Any] = (
    SFT_CONFIG
    | _TEACHER
    | {"temperature": 0.9, "lmbda": 0.5, "beta": 0.5, "max_new_tokens": 128, "disable_dropout": True, "seq_kd": False}
)
"""Every field of ``trl.experimental.gkd.GKDConfig``."""

PPO_CONFIG: dict[str, Any] = TRAINING | {
    "learning_rate": 3e-06, "remove_unused_columns": True, "dataset_num_proc": None, "num_mini_batches": 1,
    "total_episodes": None, "local_rollout_forward_batch_size": 64, "num_sample_generations": 10,
    "response_length": 53, "stop_token": None, "stop_token_id": None, "temperature": 0.7, "missing_eos_penalty": None,
    "sft_model_path": "EleutherAI/pythia-160m", "world_size": None, "num_total_batches": None,
    "micro_batch_size": None, "local_batch_size": None, "batch_size": None, "local_mini_batch_size": None,
    "mini_batch_size": None, "reward_model_path": "EleutherAI/pythia-160m", "model_adapter_name": None,
    "ref_adapter_name": None, "num_ppo_epochs": 4, "whiten_rewards": False, "kl_coef": 0.05, "kl_estimator": "k1",
    "cliprange": 0.2, "vf_coef": 0.1, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95,
    "ds3_gather_for_generation": True,
}  # fmt: skip
"""Every field of ``trl.experimental.ppo.PPOConfig``, including those of transformers."""


@dataclass(frozen=True)
class Trainer:
    """A TRL trainer and its translation."""

    config: str
    """Name of the trainer's config class, which is the type of the argument ``args``."""
    defaults: Mapping[str, Any]
    """All fields of the config class -> default."""
    algorithm: str
    """Value of ``algorithm.type``. The rules replace this value for losses that are separate algorithms in this
    project."""
    positional: tuple[str, ...]
    """Names of the positional arguments, in order."""
    also: Mapping[str, Any] | None = None
    """Fixed settings of the trainer, as fields of ``GRPOConfig`` that the trainer's config class lacks."""


_ROWS = ("data_collator", "train_dataset", "eval_dataset", "processing_class")
_OF_GRPO = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
_ALONE = ("model", "args", *_ROWS)
_BESIDE = ("model", "ref_model", "args", *_ROWS)
_BY_TEACHER = {"use_vllm": False, "num_generations": 2}

TRAINERS: dict[str, Trainer] = {
    "GRPOTrainer": Trainer("GRPOConfig", GRPO_CONFIG, "gdpo", _OF_GRPO),
    defaults.TRAINER: Trainer(
        defaults.CONFIG,
        GRPO_CONFIG | defaults.ASYNC_GRPO_CONFIG,
        "gdpo",
        tuple(name for name in _OF_GRPO if name != "eval_dataset"),
        defaults.WITHOUT_A_FIELD,
    ),
    "RLOOTrainer": Trainer("RLOOConfig", RLOO_CONFIG, "gdpo", _OF_GRPO),
    "SFTTrainer": Trainer("SFTConfig", SFT_CONFIG, "sft", _ALONE),
    "DPOTrainer": Trainer("DPOConfig", DPO_CONFIG, "dpo", _BESIDE),
    "KTOTrainer": Trainer("KTOConfig", KTO_CONFIG, "kto", _BESIDE),
    "ORPOTrainer": Trainer("ORPOConfig", ORPO_CONFIG, "orpo", _ALONE),
    "CPOTrainer": Trainer("CPOConfig", CPO_CONFIG, "cpo", _ALONE),
    "RewardTrainer": Trainer("RewardConfig", REWARD_CONFIG, "reward_model", _ALONE),
    "DistillationTrainer": Trainer(
        "DistillationConfig",
        DISTILLATION_CONFIG,
        "distillation",
        ("model", "teacher_model", "args", "train_dataset", "eval_dataset", "processing_class"),
        _BY_TEACHER,
    ),
    "GKDTrainer": Trainer(
        "GKDConfig", GKD_CONFIG, "distillation", ("model", "teacher_model", "args", *_ROWS), _BY_TEACHER
    ),
    "PPOTrainer": Trainer(
        "PPOConfig",
        PPO_CONFIG,
        "ppo",
        ("args", "processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model"),
        {"use_vllm": False, "num_generations": 1},
    ),
}
"""Class name of a trainer -> its description."""

PARSED: dict[str, Mapping[str, Any]] = {
    **{trainer.config: trainer.defaults for trainer in TRAINERS.values()},
    **dict.fromkeys(("ScriptArguments", "GRPOScriptArguments", "RLOOScriptArguments"), OF_SCRIPT | SCRIPT_ARGUMENTS),
    "ModelConfig": OF_MODEL | MODEL_CONFIG,
    "DatasetMixtureConfig": {"datasets": []},
}
"""Class that ``TrlParser`` or ``HfArgumentParser`` fills from a command line or a YAML file -> its defaults."""
