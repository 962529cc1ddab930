"""Rules for the fields of TRL's trainer configs: one rule a field, or a pattern for a family. The first that fits
counts. Fields that other trainers than GRPO's have, or mean otherwise, are in ``trl_rows`` and ``trl_sampled``."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from gdpo_nemo.interop.rules import Act, RuleResult, combined, fixed, idle, missing, to, where
from gdpo_nemo.interop.trl import trl_async, trl_rows, trl_sampled
from gdpo_nemo.interop.trl.trl_run import TrlRun

_OPTIMIZER = "policy.megatron_cfg.optimizer"
_BATCH = ("gdpo.num_prompts_per_step", "policy.train_global_batch_size")
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_FILES = idle("a matter of files and logs; everything a run writes is in run.dir")


def _of_vllm(act: Act) -> Act:
    return where(lambda run: run.get("use_vllm"), act, idle("use_vllm is off there"))


def _optimizer(value: Any, run: TrlRun) -> RuleResult:
    same = str(value).rpartition(".")[2].lower() in _ADAMW
    return RuleResult(text="AdamW, in float32 whatever the model's precision", same=same, matters=not same)


def _generation_kwargs(value: Any, run: TrlRun) -> RuleResult:
    """``stop`` of vLLM and ``stop_strings`` of transformers are ours; nothing else is."""
    if not value:
        return RuleResult(text="nothing", same=True)
    stop = value.get("stop", value.get("stop_strings")) if isinstance(value, dict) else None
    if stop is None or len(value) > 1:
        return RuleResult(text="only stop and stop_strings are known here", matters=True)
    return RuleResult({"policy.generation.stop_strings": [stop] if isinstance(stop, str) else list(stop)})


def _template_kwargs(value: Any, run: TrlRun) -> RuleResult:
    if not value:
        return RuleResult(text="nothing", same=True)
    splits = ["train", *(["validation"] if run.evaluation else [])]
    return RuleResult({f"data.{split}.chat_template_kwargs": value for split in splits})


def _model_init(value: Any, run: TrlRun) -> RuleResult:
    if value is not None and not isinstance(value, dict):
        return RuleResult(text="is no mapping that can be read", matters=True)
    known = {
        "dtype",
        "torch_dtype",
        "attn_implementation",
        "device_map",
        "use_cache",
        "use_kernels",
        "trust_remote_code",
    }
    given = {
        key: item for key, item in (value or {}).items() if item is not None and (key, item) != ("revision", "main")
    }
    others = sorted(set(given) - known)
    why = f"{', '.join(others)} cannot be given to the model" if others else "dtype goes into policy.precision"
    return RuleResult(text=why, same=not others, matters=bool(others))


RULES: list[tuple[str, Act]] = [
    ("output_dir", combined("run.dir")),
    ("run_name", combined("run.name")),
    ("overwrite_output_dir", idle("starting again on the same folder resumes")),
    ("seed", to("run.seed")),
    ("data_seed", missing("run.seed is the seed of data, too")),
    ("per_device_train_batch_size", combined(*_BATCH)),
    ("gradient_accumulation_steps", combined(*_BATCH)),
    ("generation_batch_size", combined(*_BATCH)),
    ("steps_per_generation", combined(*_BATCH)),
    ("num_generations", to("gdpo.num_generations_per_prompt")),
    ("num_iterations",
     fixed(1, "a step trains its samples once; gdpo.num_iterations multiplies its updates, not its steps")),
    ("num_train_epochs", combined("gdpo.max_num_steps", "gdpo.max_num_epochs")),
    ("max_steps", combined("gdpo.max_num_steps")),
    ("learning_rate", to(f"{_OPTIMIZER}.lr", float)),
    ("weight_decay", to(f"{_OPTIMIZER}.weight_decay", float)),
    ("adam_beta1", to(f"{_OPTIMIZER}.adam_beta1", float)),
    ("adam_beta2", to(f"{_OPTIMIZER}.adam_beta2", float)),
    ("adam_epsilon", to(f"{_OPTIMIZER}.adam_eps", float)),
    ("max_grad_norm", to(f"{_OPTIMIZER}.clip_grad", float)),
    ("optim", _optimizer),
    ("optim_args", missing("the optimizer has no further arguments")),
    ("optim_target_modules", missing("one optimizer for all weights")),
    ("lr_scheduler_type", combined("policy.megatron_cfg.scheduler.lr_decay_style")),
    ("lr_scheduler_kwargs", combined("policy.megatron_cfg.scheduler")),
    ("warmup_*", combined("policy.megatron_cfg.scheduler.lr_warmup_steps")),
    ("max_completion_length", to("policy.generation.max_new_tokens")),
    ("max_prompt_length", combined("policy.max_total_sequence_length")),
    ("vllm_max_model_length", combined("policy.max_total_sequence_length")),
    ("temperature", to("policy.generation.temperature", float)),
    ("top_p", to("policy.generation.top_p", float)),
    ("top_k", to("policy.generation.top_k", lambda value: value or -1)),
    ("min_p", missing("sampling has temperature, top_p and top_k", 0.0)),
    ("repetition_penalty", fixed(1.0, "no repetition penalty")),
    ("generation_kwargs", _generation_kwargs),
    ("chat_template_kwargs", _template_kwargs),
    ("cache_implementation", idle("vLLM samples")),
    ("use_vllm", combined("cluster.placement")),
    ("vllm_mode", _of_vllm(combined("cluster.placement"))),
    ("vllm_gpu_memory_utilization", _of_vllm(to("policy.generation.vllm_cfg.gpu_memory_utilization"))),
    ("vllm_tensor_parallel_size", _of_vllm(to("policy.generation.vllm_cfg.tensor_parallel_size"))),
    ("vllm_importance_sampling_*", combined("loss_fn.off_policy")),
    ("vllm_structured_outputs_regex", missing("no structured output")),
    ("vllm_guided_decoding_regex", missing("no structured output")),
    ("vllm_*", idle("how TRL's vLLM is run and reached; engines are started by the run")),
    ("use_transformers_*", idle("vLLM samples")),
    ("transformers_continuous_batching_config", idle("vLLM samples")),
    ("beta", to("loss_fn.reference_policy_kl_penalty", float)),
    ("use_bias_correction_kl", combined("loss_fn.reference_policy_kl_gradient")),
    ("epsilon", combined("loss_fn.ratio_clip_min")),
    ("epsilon_high", combined("loss_fn.ratio_clip_max")),
    ("delta", combined("loss_fn.ratio_clip_c")),
    ("loss_type", combined("loss_fn.type", "loss_fn.aggregation")),
    ("importance_sampling_level", combined("loss_fn.type")),
    ("sapo_*",
     where(lambda run: run.get("loss_type") == "sapo", combined("loss_fn.options"), idle("of loss_type sapo"))),
    ("vespo_*", idle("of loss_type vespo")),
    ("scale_rewards", combined("gdpo.estimator")),
    ("multi_objective_aggregation", combined("gdpo.estimator")),
    ("reward_weights", combined("gdpo.rewards")),
    ("mask_truncated_completions", to("loss_fn.mask_truncated")),
    ("off_policy_mask_threshold", to("loss_fn.off_policy.sequence_mask_threshold")),
    ("entropy_coef", to("loss_fn.entropy_bonus", float, "weighed as the loss's tokens are; there a mean over tokens")),
    ("use_adaptive_entropy", to("loss_fn.use_adaptive_entropy")),
    *((name, where(lambda run: run.get("use_adaptive_entropy"), to(f"loss_fn.{name}", float),
                   idle("of use_adaptive_entropy")))
      for name in ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")),
    ("top_entropy_quantile", fixed(1.0, "every token is trained")),
    ("sync_ref_model", to("policy.sync_ref_model")),
    ("ref_model_sync_steps", where(lambda run: run.get("sync_ref_model"),
                                   to("policy.ref_model_sync_steps", note="steps of the run, of one update or more"),
                                   idle("of sync_ref_model"))),
    ("ref_model_mixup_alpha", where(lambda run: run.get("sync_ref_model"),
                                    to("policy.ref_model_mixup_alpha", float), idle("of sync_ref_model"))),
    ("router_aux_loss_coef", missing("no load-balancing loss", 0.0)),
    ("cast_lm_head_to_fp32", missing("the output layer has the model's precision")),
    ("disable_dropout", idle("models have no dropout here")),
    ("neftune_noise_alpha", missing("no noise on embeddings")),
    ("label_smoothing_factor", idle("GRPO has no labels")),
    ("max_tool_calling_iterations",
     where(lambda run: run.tools or run.factory, combined("env", "rollout.turns.max_turns"), idle("of tools"))),
    ("bf16", combined("policy.precision")),
    ("fp16", missing("bfloat16 or float32; policy.precision")),
    ("tf32", idle("how matrices are multiplied")),
    ("use_cpu", combined("cluster.gpus_per_node")),
    ("no_cuda", combined("cluster.gpus_per_node")),
    ("model_init_kwargs", _model_init),
    ("gradient_checkpointing", to("policy.megatron_cfg.recompute", lambda on: "full" if on else "none")),
    ("shuffle_dataset", to("data.train.shuffle", bool)),
    ("remove_unused_columns", idle("reward functions get every column that they name")),
    ("save_strategy", combined("checkpointing")),
    ("save_steps", combined("checkpointing.save_period")),
    ("save_total_limit", to("checkpointing.keep_last")),
    ("eval_strategy", combined("gdpo.val_period")),
    ("evaluation_strategy", combined("gdpo.val_period")),
    ("eval_steps", combined("gdpo.val_period")),
    ("eval_on_start", where(lambda run: run.evaluation, to("gdpo.val_at_start"), idle("nothing is validated"))),
    ("num_generations_eval", combined("gdpo.val_generations_per_prompt")),
    ("report_to", combined("logger")),
    ("project", combined("logger.wandb.project")),
    ("deepspeed", idle("Megatron lays the model out; policy.megatron_cfg")),
    ("fsdp*", idle("Megatron lays the model out; policy.megatron_cfg")),
    ("parallelism_config", missing("policy.megatron_cfg has the layout")),
    ("*liger*", idle("kernels; the result is the same up to rounding")),
    ("torch_compile*", idle("how the model is run")),
    ("gradient_checkpointing_kwargs", idle("how recomputation is done")),
    ("trust_remote_code", missing("models are Megatron's; code of a model on the hub is not run")),
    ("auto_find_batch_size", missing("micro_batch_tokens says how much is computed at once")),
    ("resume_from_checkpoint", idle("starting again on the same folder resumes")),
    ("load_best_model_at_end", idle("checkpointing.keep_best keeps the best; the last is exported")),
    ("metric_for_best_model", idle("checkpointing.metric_name")),
    ("greater_is_better", idle("larger is better")),
    ("accelerator_config", idle("Ray and Megatron start the processes")),
    ("pad_to_multiple_of", idle("sequences are packed, not padded")),
    ("ds3_gather_for_generation", idle("of DeepSpeed")),
    ("average_tokens_across_devices", idle("means are over the whole update, whatever the layout")),
    ("full_determinism", idle("equal seeds and layouts give equal runs")),
]  # fmt: skip
"""Field, or pattern -> its rule."""

_IDLE = (
    "log*", "eval_*", "include_*", "disable_tqdm", "trackio*", "hub_*", "push_to_hub*", "dataloader_*", "ddp_*", "do_*",
    "save_*", "debug", "skip_memory_metrics", "local_rank", "length_column_name", "label_names", "use_cache", "jit_*",
    "train_sampling_strategy", "group_by_length", "torch_empty_cache_steps", "per_device_eval_batch_size",
    "prediction_loss_only", "batch_eval_metrics", "*_full_eval", "ignore_data_skip", "restore_callback_*",
    "enable_jit_checkpoint", "num_completions_to_print", "wandb_log_unique_prompts", "use_ipex", "use_mps_device",
)  # fmt: skip
"""Fields of logs, files, uploads and loaders."""


def said_of(key: str, value: Any, run: TrlRun) -> RuleResult | None:
    """The answer of the first rule that fits; None where none does."""
    own = trl_sampled.RULES.get(run.trainer, []) if run.samples else trl_rows.RULES
    act = next((act for pattern, act in (*own, *RULES, *trl_async.RULES) if fnmatchcase(key, pattern)), None)
    if act is None and any(fnmatchcase(key, pattern) for pattern in _IDLE):
        act = _FILES
    return None if act is None else act(value, run)
