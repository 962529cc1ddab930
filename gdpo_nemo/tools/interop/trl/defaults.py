"""Default values in TRL 1.16 and transformers 5.19 for GRPO scripts, and the translation of asynchronous GRPO."""

from __future__ import annotations

from typing import Any

from gdpo_nemo.tools.interop.translation import Act, Findings, combined, expanded, fixed, idle, where

TRAINING: dict[str, Any] = {
    "output_dir": None, "per_device_train_batch_size": 8, "num_train_epochs": 3.0, "max_steps": -1,
    "learning_rate": 1e-06, "lr_scheduler_type": "linear", "lr_scheduler_kwargs": None, "warmup_steps": 0,
    "optim": "adamw_torch_fused", "optim_args": None, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_epsilon": 1e-08, "optim_target_modules": None, "gradient_accumulation_steps": 1,
    "average_tokens_across_devices": True, "max_grad_norm": 1.0, "label_smoothing_factor": 0.0, "bf16": None,
    "fp16": False, "bf16_full_eval": False, "fp16_full_eval": False, "tf32": None, "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": None, "torch_compile": False, "torch_compile_backend": None,
    "torch_compile_mode": None, "use_liger_kernel": False, "liger_kernel_config": None, "use_cache": False,
    "neftune_noise_alpha": None, "torch_empty_cache_steps": None, "auto_find_batch_size": False,
    "logging_strategy": "steps", "logging_steps": 10, "logging_first_step": False, "log_on_each_node": True,
    "logging_nan_inf_filter": True, "include_num_input_tokens_seen": "no", "log_level": "passive",
    "log_level_replica": "warning", "disable_tqdm": None, "report_to": "none", "run_name": None,
    "project": "huggingface", "trackio_space_id": None, "trackio_bucket_id": None, "trackio_static_space_id": None,
    "eval_strategy": "no", "eval_steps": None, "eval_delay": 0, "per_device_eval_batch_size": 8,
    "prediction_loss_only": False, "eval_on_start": False, "eval_do_concat_batches": True,
    "eval_use_gather_object": False, "eval_accumulation_steps": None, "include_for_metrics": [],
    "batch_eval_metrics": False, "save_only_model": False, "save_strategy": "steps", "save_steps": 500,
    "save_on_each_node": False, "save_total_limit": None, "enable_jit_checkpoint": False, "push_to_hub": False,
    "hub_token": None, "hub_private_repo": None, "hub_model_id": None, "hub_strategy": "every_save",
    "hub_always_push": False, "hub_revision": None, "load_best_model_at_end": False, "metric_for_best_model": None,
    "greater_is_better": None, "ignore_data_skip": False, "restore_callback_states_from_checkpoint": False,
    "full_determinism": False, "seed": 42, "data_seed": None, "use_cpu": False, "accelerator_config": None,
    "parallelism_config": None, "dataloader_drop_last": False, "dataloader_num_workers": 0,
    "dataloader_pin_memory": True, "dataloader_persistent_workers": False, "dataloader_prefetch_factor": None,
    "dataloader_multiprocessing_context": None, "dataloader_in_order": True, "remove_unused_columns": False,
    "label_names": None, "train_sampling_strategy": "random", "length_column_name": "length",
    "ddp_find_unused_parameters": None, "ddp_bucket_cap_mb": None, "ddp_broadcast_buffers": None,
    "ddp_static_graph": None, "ddp_backend": None, "ddp_timeout": 1800, "fsdp": None, "fsdp_config": None,
    "deepspeed": None, "debug": "", "skip_memory_metrics": True, "do_train": False, "do_eval": False,
    "do_predict": False, "resume_from_checkpoint": None, "local_rank": -1,
}  # fmt: skip
"""Fields of transformers' ``TrainingArguments`` -> default in ``trl.GRPOConfig``."""

GRPO_OWN: dict[str, Any] = {
    "model_init_kwargs": None, "trust_remote_code": False, "router_aux_loss_coef": None, "disable_dropout": False,
    "cast_lm_head_to_fp32": False, "num_generations": 8, "num_generations_eval": None, "max_completion_length": 512,
    "ds3_gather_for_generation": True, "shuffle_dataset": True, "pad_to_multiple_of": "auto",
    "generation_batch_size": None, "steps_per_generation": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "min_p": None, "generation_kwargs": None, "chat_template_kwargs": None, "repetition_penalty": 1.0,
    "cache_implementation": None, "use_vllm": False, "vllm_mode": "colocate", "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False, "vllm_structured_outputs_regex": None, "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_timeout": 240.0, "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": None, "vllm_tensor_parallel_size": 1, "beta": 0.0,
    "num_iterations": 1, "epsilon": 0.2, "delta": None, "epsilon_high": None, "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "importance_sampling_level": "token", "reward_weights": None,
    "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", "loss_type": "dapo",
    "mask_truncated_completions": False, "sync_ref_model": False, "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512, "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2,
    "max_tool_calling_iterations": None, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None, "off_policy_mask_threshold": None, "use_bias_correction_kl": True,
    "log_completions": False, "log_multimodal": True, "num_completions_to_print": None, "log_unique_prompts": False,
    "log_completions_hub_repo": None, "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None, "use_transformers_paged": False,
    "vllm_importance_sampling_cap": None,
}  # fmt: skip
"""Fields that ``trl.GRPOConfig`` adds -> default."""

GRPO_CONFIG: dict[str, Any] = TRAINING | GRPO_OWN
"""All fields of ``trl.GRPOConfig`` -> default."""

SCRIPT_ARGUMENTS: dict[str, Any] = {
    "dataset_name": None, "dataset_config": None, "dataset_train_split": "train", "dataset_test_split": "test",
    "dataset_streaming": False, "ignore_bias_buffers": False, "reward_model_name_or_path": None, "reward_funcs": None,
}  # fmt: skip
"""Fields of ``trl.ScriptArguments``, and arguments that `trl grpo` adds -> default."""

MODEL_CONFIG: dict[str, Any] = {
    "model_name_or_path": None, "model_revision": "main", "dtype": "float32", "attn_implementation": None,
    "use_peft": False, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None,
    "lora_target_parameters": None, "lora_modules_to_save": None, "lora_task_type": "CAUSAL_LM", "use_rslora": False,
    "use_dora": False, "load_in_8bit": False, "load_in_4bit": False, "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": False, "bnb_4bit_quant_storage": None,
}  # fmt: skip
"""Fields of ``trl.ModelConfig`` -> default."""

LORA_CONFIG: dict[str, Any] = {
    "r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": None, "use_rslora": False, "use_dora": False,
    "modules_to_save": None, "bias": "none", "init_lora_weights": True,
}  # fmt: skip
"""Fields of ``peft.LoraConfig`` that affect training -> default."""


TRAINER = "AsyncGRPOTrainer"
CONFIG = "AsyncGRPOConfig"

ASYNC_GRPO_CONFIG: dict[str, Any] = {
    "lr_scheduler_type": "constant", "logging_steps": 1, "ignore_data_skip": True, "remove_unused_columns": True,
    "max_completion_length": 2048, "vllm_server_base_url": "http://localhost:8000", "dtype": "float32",
    "fork_threshold_tokens": 1024, "request_timeout": 600, "weight_sync_timeout": 1800, "token_budget": None,
    "max_inflight_tasks": -1, "max_staleness": 4, "queue_maxsize": 1024, "weight_sync_steps": 1,
    "heartbeat_stale_after_s": 300.0,
}  # fmt: skip
"""Fields of ``AsyncGRPOConfig`` that are missing in ``GRPOConfig`` or have another default there -> default."""
WITHOUT_A_FIELD: dict[str, Any] = {
    "use_vllm": True, "vllm_mode": "server", "vllm_gpu_memory_utilization": None,
    "vllm_importance_sampling_correction": False, "loss_type": "dapo", "scale_rewards": "group", "beta": 0.0,
}  # fmt: skip
"""Fixed behavior of ``AsyncGRPOTrainer``, as fields of ``GRPOConfig`` that ``AsyncGRPOConfig`` does not have."""


def _of_async(act: Act) -> Act:
    return where(lambda run: run.asynchronous, act, idle(f"applies only to {CONFIG}"))


RULES: list[tuple[str, Act]] = expanded([
    ("max_staleness", _of_async(combined("rollout.max_staleness"))),
    ("weight_sync_steps", _of_async(combined("rollout.sync_every", "rollout.max_staleness"))),
    ("dtype", _of_async(fixed("float32", "main weights are in float32"))),
    ("max_inflight_tasks", idle("rollout.depth limits the groups in flight, whose number is adapted automatically"),),
    ("queue_maxsize", idle("rollout.max_staleness limits the number of waiting samples")),
    ("fork_threshold_tokens", idle("applies only to tools and multi-turn environments")),
    ("token_budget", idle("policy.micro_batch_tokens sets the micro-batch size")),
    ("request_timeout", idle("rollout.generation_timeout_s sets the timeout")),
    (
        "weight_sync_timeout heartbeat_stale_after_s",
        idle("affects only failures; all waits in this project have timeouts"),
    ),
])  # fmt: skip
"""(field, rule)"""


def asynchronous(run: Any, findings: Findings) -> None:
    """Add the settings of asynchronous training to the findings. ``run`` is a ``TrlRun`` with ``AsyncGRPOTrainer``.

    TRL counts the age of a sample in weight syncs, which are ``weight_sync_steps`` steps apart. A sample may be
    ``max_staleness`` syncs old. Until the next sync, its age may grow by another ``weight_sync_steps`` - 1 steps.
    """
    every = run.get("weight_sync_steps")
    versions = run.get("max_staleness")
    why = (
        "max_staleness"
        if every == 1
        else f"max_staleness of {versions} weight syncs, which are {every} steps apart (weight_sync_steps)"
    )
    findings.set("rollout.max_staleness", (versions + 1) * every - 1, why)
    if versions > 0 and run.lora is None:
        findings.set("rollout.kv", "keep", "TRL pauses vLLM with mode=keep")
    elif versions > 0:
        findings.set("rollout.kv", "drain", "in TRL an in-flight sample keeps the adapter with which it started")
    if every > 1:
        findings.set("rollout.sync_every", every, "weight_sync_steps")
    findings.set("loss_fn.old_logprobs", "sampler", "TRL takes the old log-probs from vLLM")
    findings.set("gdpo.epsilon", 1e-8, "epsilon added to the standard deviation")
    findings.set("gdpo.options", {"ddof": 0}, "TRL uses the population standard deviation of the group")
    findings.differs(
        "max_staleness", "groups that could become too old are not sampled; TRL trains samples in completion order"
    )
    if run.get("gradient_accumulation_steps") > 1:
        findings.differs(
            "gradient_accumulation_steps",
            "the loss is the mean over all tokens of an update; TRL averages per micro-batch",
        )
