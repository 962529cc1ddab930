"""Translation rules for fields, or patterns of fields, of TRL's trainer configs. The first matching rule applies.

The rules in ``rows`` and ``sampled`` are for fields that only other trainers have, or that mean something else there.
"""

from __future__ import annotations

from typing import Any

from gdpo_nemo.tools.interop.shared_rules import BATCH, FILES, GRPO, TRAINING
from gdpo_nemo.tools.interop.translation import (
    Act,
    RuleResult,
    combined,
    expanded,
    first_match,
    fixed,
    idle,
    missing,
    to,
    where,
)
from gdpo_nemo.tools.interop.trl import defaults, rows, sampled
from gdpo_nemo.tools.interop.trl.run import TrlRun

_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")


def _of_vllm(act: Act) -> Act:
    return where(lambda run: run.get("use_vllm"), act, idle("no effect: use_vllm is off"))


def _of_synced_reference(act: Act) -> Act:
    return where(lambda run: run.get("sync_ref_model"), act, idle("applies only with sync_ref_model"))


def _optimizer(value: Any, run: TrlRun) -> RuleResult:
    same = str(value).rpartition(".")[2].lower() in _ADAMW
    return RuleResult(text="AdamW has float32 states for any model precision", same=same, matters=not same)


def _generation_kwargs(value: Any, run: TrlRun) -> RuleResult:
    """Translate vLLM's ``stop`` and transformers' ``stop_strings``. Other arguments are not supported."""
    if not value:
        return RuleResult(text="not set", same=True)
    stop = value.get("stop", value.get("stop_strings")) if isinstance(value, dict) else None
    if stop is None or len(value) > 1:
        return RuleResult(text="only stop and stop_strings are supported", matters=True)
    return RuleResult({"policy.generation.stop_strings": [stop] if isinstance(stop, str) else list(stop)})


def _template_kwargs(value: Any, run: TrlRun) -> RuleResult:
    if not value:
        return RuleResult(text="not set", same=True)
    splits = ["train", *(["validation"] if run.evaluation else [])]
    return RuleResult({f"data.{split}.chat_template_kwargs": value for split in splits})


def _model_init(value: Any, run: TrlRun) -> RuleResult:
    if value is not None and not isinstance(value, dict):
        return RuleResult(text="this mapping is only known when the script runs", matters=True)
    known = {"dtype", "torch_dtype", "attn_implementation", "device_map", "use_cache", "use_kernels"}
    others = []
    for key, item in sorted((value or {}).items()):
        if item is not None and (key, item) != ("revision", "main") and key not in {*known, "trust_remote_code"}:
            others.append(key)
    why = f"{', '.join(others)} cannot be passed to the model" if others else "dtype determines policy.precision"
    return RuleResult(text=why, same=not others, matters=bool(others))


RULES: list[tuple[str, Act]] = expanded([
    *TRAINING,
    *GRPO,
    ("run_name", combined("run.name")),
    ("overwrite_output_dir", idle("a run in the same folder always resumes")),
    ("data_seed", missing("run.seed is also the data seed")),
    ("per_device_train_batch_size steps_per_generation", combined(*BATCH)),
    ("num_generations", to("gdpo.num_generations_per_prompt")),
    ("num_train_epochs", combined("gdpo.max_num_steps", "gdpo.max_num_epochs")),
    ("optim", _optimizer),
    ("optim_args", missing("additional optimizer arguments are not supported")),
    ("optim_target_modules", missing("all weights use the same optimizer")),
    ("lr_scheduler_type", combined("policy.megatron_cfg.scheduler.lr_decay_style")),
    ("lr_scheduler_kwargs", combined("policy.megatron_cfg.scheduler")),
    ("max_completion_length", to("policy.generation.max_new_tokens")),
    ("max_prompt_length vllm_max_model_length", combined("policy.max_total_sequence_length")),
    ("temperature", to("policy.generation.temperature", float)),
    ("top_p", to("policy.generation.top_p", float)),
    ("top_k", to("policy.generation.top_k", lambda value: value or -1)),
    ("min_p", missing("only temperature, top_p and top_k can be set for sampling", 0.0)),
    ("generation_kwargs", _generation_kwargs),
    ("chat_template_kwargs", _template_kwargs),
    ("cache_implementation", idle("vLLM is always used for sampling")),
    ("vllm_mode", _of_vllm(combined("cluster.placement"))),
    ("vllm_gpu_memory_utilization", _of_vllm(to("policy.generation.vllm_cfg.gpu_memory_utilization"))),
    ("vllm_tensor_parallel_size", _of_vllm(to("policy.generation.vllm_cfg.tensor_parallel_size"))),
    ("vllm_structured_outputs_regex", missing("structured output is not supported")),
    ("vllm_*", idle("configures TRL's vLLM server; this project starts its engines itself")),
    ("use_transformers_*", idle("vLLM is always used for sampling")),
    ("adafactor", missing("AdamW is always used")),
    ("split_batches", missing("the batch size always counts the samples of all processes")),
    ("transformers_continuous_batching_config", idle("vLLM is always used for sampling")),
    ("beta", to("loss_fn.reference_policy_kl_penalty", float)),
    ("delta", combined("loss_fn.ratio_clip_c")),
    ("loss_type", combined("loss_fn.type", "loss_fn.aggregation")),
    ("sapo_*",
     where(lambda run: run.get("loss_type") == "sapo", combined("loss_fn.options"),
           idle("applies only to loss_type sapo"))),
    ("vespo_*", idle("applies only to loss_type vespo")),
    ("mask_truncated_completions", to("loss_fn.mask_truncated")),
    ("entropy_coef",
     to("loss_fn.entropy_bonus", float, "weighted like the tokens of the loss; TRL uses the mean over tokens")),
    ("use_adaptive_entropy", to("loss_fn.use_adaptive_entropy")),
    *((name, where(lambda run: run.get("use_adaptive_entropy"), to(f"loss_fn.{name}", float),
                   idle("applies only with use_adaptive_entropy")))
      for name in ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")),
    ("top_entropy_quantile", fixed(1.0, "all tokens are trained")),
    ("sync_ref_model", to("policy.sync_ref_model")),
    ("ref_model_sync_steps", _of_synced_reference(
        to("policy.ref_model_sync_steps", note="counted in steps of the run, each with one or more updates"))),
    ("ref_model_mixup_alpha", _of_synced_reference(to("policy.ref_model_mixup_alpha", float))),
    ("router_aux_loss_coef", missing("a load-balancing loss is not supported", 0.0)),
    ("cast_lm_head_to_fp32", missing("the output layer uses policy.precision")),
    ("disable_dropout", idle("models are always trained without dropout")),
    ("label_smoothing_factor", idle("GRPO does not use labels")),
    ("max_tool_calling_iterations",
     where(lambda run: run.tools or run.factory, combined("env", "rollout.turns.max_turns"),
           idle("applies only to tools"))),
    ("fp16", missing("policy.precision supports bfloat16 and float32")),
    ("tf32", idle("selects matrix multiplication kernels")),
    ("use_cpu no_cuda", combined("cluster.gpus_per_node")),
    ("model_init_kwargs", _model_init),
    ("gradient_checkpointing", to("policy.megatron_cfg.recompute", lambda on: "full" if on else "none")),
    ("shuffle_dataset", to("data.train.shuffle", bool)),
    ("remove_unused_columns", idle("reward functions receive all columns that they declare")),
    ("save_strategy", combined("checkpointing")),
    ("save_steps", combined("checkpointing.save_period")),
    ("save_total_limit", to("checkpointing.keep_last")),
    ("eval_strategy evaluation_strategy eval_steps", combined("gdpo.val_period")),
    ("eval_on_start", where(lambda run: run.evaluation, to("gdpo.val_at_start"), idle("validation is off"))),
    ("num_generations_eval", combined("gdpo.val_generations_per_prompt")),
    ("report_to", combined("logger")),
    ("project", combined("logger.wandb.project")),
    ("deepspeed fsdp*", idle("policy.megatron_cfg defines the layout")),
    ("parallelism_config", missing("policy.megatron_cfg defines the layout")),
    ("*liger*", idle("selects kernels; the result is the same up to rounding")),
    ("torch_compile*", idle("affects only the compilation of the model")),
    ("gradient_checkpointing_kwargs", idle("affects only recomputation")),
    ("auto_find_batch_size", missing("policy.micro_batch_tokens sets the micro-batch size")),
    ("resume_from_checkpoint", idle("a run in the same folder always resumes")),
    ("load_best_model_at_end", idle("checkpointing.keep_best retains the best; the last checkpoint is exported")),
    ("metric_for_best_model", idle("checkpointing.metric_name selects the metric")),
    ("greater_is_better", idle("larger values of checkpointing.metric_name are always better")),
    ("accelerator_config", idle("Ray and Megatron start the processes")),
    ("pad_to_multiple_of", idle("sequences are packed, not padded")),
    ("ds3_gather_for_generation", idle("applies only to DeepSpeed")),
    ("average_tokens_across_devices", idle("means are always taken over the whole update, in any parallel layout")),
    ("full_determinism", idle("runs with the same seed and parallel layout always give equal results")),
])  # fmt: skip
"""(field or pattern, rule)"""

_IDLE: list[tuple[str, Act]] = expanded([
    ("log* eval_* include_* disable_tqdm trackio* hub_* push_to_hub* dataloader_* ddp_* do_* save_* debug "
     "skip_memory_metrics local_rank length_column_name label_names use_cache jit_* train_sampling_strategy "
     "group_by_length torch_empty_cache_steps per_device_eval_batch_size prediction_loss_only batch_eval_metrics "
     "*_full_eval ignore_data_skip restore_callback_* enable_jit_checkpoint num_completions_to_print wandb_* use_ipex "
     "use_mps_device dispatch_batches fp16_* half_precision_backend mp_parameters past_index per_gpu_eval_batch_size "
     "ray_scope torchdynamo tpu_*",
     FILES),
])  # fmt: skip
"""Rules for fields that affect only logs, files, uploads and data loading."""


def result_of(key: str, value: Any, run: TrlRun) -> RuleResult | None:
    """Return the result of the first matching rule, or None if none matches."""
    own = sampled.RULES.get(run.trainer, []) if run.samples else rows.RULES
    act = first_match([*own, *RULES, *defaults.RULES, *_IDLE], key)
    return act and act(value, run)
