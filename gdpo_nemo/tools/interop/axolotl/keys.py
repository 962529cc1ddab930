"""Translation rules for axolotl keys or patterns of keys. The first matching rule applies."""

from __future__ import annotations

from typing import Any

from gdpo_nemo.tools.interop.axolotl.config import AxolotlConfig
from gdpo_nemo.tools.interop.shared_rules import BATCH, FILES, GRPO, OPTIMIZER, TRAINING
from gdpo_nemo.tools.interop.translation import (
    Act,
    RuleResult,
    combined,
    expanded,
    first_match,
    fixed,
    idle,
    is_off,
    missing,
    to,
    where,
)

_SCHEDULER = "policy.megatron_cfg.scheduler"
_SAME_ADAM = (
    "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_npu_fused", "paged_adamw_32bit",
    "optimi_adamw", "adamw", "flash_adamw",
)  # fmt: skip
_KERNELS = idle("selects kernels; the result is the same up to rounding")
_MEMORY = idle("affects only memory and device usage; policy.megatron_cfg defines the layout")
_ENGINES = idle("configures axolotl's vLLM server; this project starts its engines itself")
_LOADING = idle("affects only how rows are loaded and cached")
_PACKED = "rows are always packed and never attend to each other, and an update counts rows, not packs"


def _of_rl(act: Act) -> Act:
    """Return a rule that applies ``act`` only if the policy samples. Otherwise axolotl does not use the key."""
    return where(lambda config: config.samples, act, idle("no effect: rl is not grpo, gdpo or ebft"))


def _of_kind(kinds: tuple[str, ...], act: Act) -> Act:
    return where(lambda config: config.kind in kinds, act, idle(f"no effect: rl is not {', '.join(kinds)}"))


def _of_strided(act: Act) -> Act:
    return where(lambda config: config.get("ebft.mode") == "strided", act, idle("no effect: ebft.mode is not strided"))


def _optimizer(value: Any, config: AxolotlConfig) -> RuleResult:
    same = str(value).lower() in _SAME_ADAM
    why = "AdamW with float32 states" if same else f"AdamW with float32 states is used; axolotl uses {value}"
    return RuleResult(text=why, same=same, matters=not same)


def _quantised(value: Any, config: AxolotlConfig) -> RuleResult:
    if is_off(value):
        return RuleResult(text="the base model is not quantized", same=True)
    return RuleResult(text="the frozen base model keeps its precision; axolotl quantizes it", matters=True)


def _special_tokens(value: Any, config: AxolotlConfig) -> RuleResult:
    """Translate special tokens. Padding tokens do not matter, but another end token changes what the model learns."""
    given = value if isinstance(value, dict) else {}
    others = sorted(name for name, token in given.items() if name != "pad_token" and token)
    if not others:
        return RuleResult(text="sequences are packed without padding tokens", same=True)
    return RuleResult(
        text=f"{', '.join(others)} cannot be changed; the tokenizer's special tokens are used", matters=True
    )


def _chat_template(value: Any, config: AxolotlConfig) -> RuleResult:
    if value in (None, "tokenizer_default"):
        return RuleResult(text="the tokenizer's chat template is used", same=True)
    why = "the tokenizer's chat template is used; save this template with the tokenizer if they differ"
    return RuleResult(text=why, matters=True)


def _packing(value: Any, config: AxolotlConfig) -> RuleResult:
    if is_off(value) or config.samples:
        return RuleResult(text="an update counts rows, not packs", same=True)
    return RuleResult(text=f"{_PACKED}; set gdpo.num_prompts_per_step to the number of rows in a pack", matters=True)


def _held_out(value: Any, config: AxolotlConfig) -> RuleResult:
    if is_off(value, 0, 0.0) or config.get("test_datasets"):
        return RuleResult(text="no rows are held out", same=True)
    return RuleResult(text="no rows are held out for validation; set a file in data.validation", matters=True)


def _plugins(value: Any, config: AxolotlConfig) -> RuleResult:
    harmless = ("liger", "cut_cross_entropy", "kernels", "nemo_gym", "swanlab", "lm_eval", "otel", "spectrum_report")
    names = value if isinstance(value, list) else []
    others = []
    for name in map(str, names):
        if not any(part in name.lower() for part in harmless):
            others.append(name)
    if others:
        return RuleResult(text=f"{', '.join(others)}: axolotl plugins are not executed", matters=True)
    return RuleResult(text="affects only kernels and logs, or is translated by other keys")


RULES: list[tuple[str, Act]] = expanded([
    *TRAINING,
    ("base_model", combined("policy.model_name")),
    ("tokenizer_config", to("policy.tokenizer_name")),
    ("rl", combined("algorithm.type", "gdpo.estimator")),
    ("reward_model", combined("algorithm.type")),
    ("process_reward_model", missing("process reward models are not supported")),
    ("datasets", combined("data.train")),
    ("test_datasets", combined("data.validation")),
    ("pretraining_dataset", combined("data.train")),
    ("val_set_size", _held_out),
    ("sequence_len", combined("policy.max_total_sequence_length")),
    ("micro_batch_size batch_size", combined(*BATCH)),
    ("num_epochs", combined("gdpo.max_num_epochs", "gdpo.max_num_steps")),
    ("optimizer", _optimizer),
    ("optim_*", missing("all weights use the same optimizer; additional arguments are not supported")),
    ("lr_scheduler", combined(f"{_SCHEDULER}.lr_decay_style")),
    ("lr_scheduler_kwargs", combined(_SCHEDULER)),
    ("cosine_min_lr_ratio", combined(f"{OPTIMIZER}.min_lr")),
    ("dion_* qgalore_* adam_beta3 adam_epsilon2", idle("applies only to other optimizers")),
    ("lr_div_factor", missing("only lr_scheduler defines the learning-rate schedule")),
    ("*_lr embedding_lr_scale lr_groups loraplus_*", missing("all weights use the same learning rate")),
    ("cosine_constant_lr_ratio", missing("the cosine schedule always spans the whole run", 0)),
    ("lr_quadratic_warmup", missing("the warmup is linear")),
    ("jagged_*", missing("learning-rate restarts are not supported")),
    ("relora*", missing("adapters are not merged during training")),
    ("lisa_*", missing("all layers are trained")),
    ("bfloat16 float32", combined("policy.precision")),
    ("fp16 float16", missing("only bfloat16 and float32 are supported")),
    ("fp8*", missing("not translated; policy.megatron_cfg.fp8 uses TransformerEngine")),
    ("qat", missing("quantization-aware training is not supported")),
    ("gptq* load_in_*bit quantize_moe_experts model_quantization_config* bnb_config_kwargs", _quantised),
    ("adapter", combined("policy.lora")),
    ("lora_model_dir", combined("policy.model_name")),
    ("lora_r", combined("policy.lora.rank")),
    ("lora_alpha", combined("policy.lora.alpha")),
    ("lora_dropout", combined("policy.lora.dropout")),
    ("lora_target_linear lora_target_modules", combined("policy.lora.target_modules")),
    ("lora_target_parameters", missing("only linear layers can have adapters")),
    ("lora_modules_to_save", missing("only the adapters are trained")),
    ("lora_*_pattern", missing("all adapters have the same rank and alpha")),
    ("lora_*_kernel", _KERNELS),
    ("lora_fan_in_fan_out lora_on_cpu", _MEMORY),
    ("peft_use_rslora", combined("policy.lora.alpha")),
    ("peft_use_dora", missing("DoRA is not supported")),
    ("peft_init_lora_weights", missing("adapter initializations other than PEFT's default are not supported", True)),
    ("peft_autocast_adapter_dtype", _MEMORY),
    ("peft*", missing("only rank, alpha, dropout and target_modules can be set for adapters")),
    ("unfrozen_parameters", missing("either all weights or only adapters are trained")),
    ("freeze_mm_modules", idle("policy.vision.train is false unless all parameters are trained on images")),
    ("sample_packing", _packing),
    ("train_on_inputs", combined("data.train.train_on")),
    ("chat_template", _chat_template),
    ("chat_template_jinja", missing("the tokenizer's chat template is used")),
    ("chat_template_kwargs", combined("data.train.chat_template_kwargs")),
    ("default_system_message", missing("not translated; data.train.system_prompt sets a system message")),
    ("special_tokens", _special_tokens),
    ("tokens added_tokens_overrides", missing("the tokenizer defines the vocabulary")),
    ("eot_tokens", idle("the chat template defines the end of a turn")),
    ("noisy_embedding_alpha", missing("embedding noise is not supported")),
    ("curriculum_sampling", missing("rows are shuffled with the seed", False)),
    ("excess_length_strategy", fixed("drop", "rows that are too long are skipped")),
    ("dataset_exact_deduplication", missing("duplicate rows are not removed")),
    ("model_config model_kwargs overrides_of_model_* rope_scaling scaling_softmax*",
     missing("the model's config.json cannot be overridden")),
    ("model_revision revision_of_model", missing("the main revision is loaded", "main")),
    ("trainer_cls", missing("axolotl's trainer classes are not executed; algorithm.type accepts a custom class")),
    ("use_pose", missing("position IDs cannot be changed")),
    ("pose_*", idle("applies only with use_pose")),
    ("eaft_*", idle("applies only with use_eaft")),
    ("max_prompt_len", missing("sequence_len limits prompt and answer together")),
    ("image_*", missing("images are not resized; data.images.max_pixels limits their sizes")),
    ("role_boundaries", missing("the chat template determines the turns")),
    ("quantization", idle("quantizes the model after training; this project exports it without quantization")),
    ("reinit_weights", missing("weights are always loaded from the model folder")),
    ("use_eaft", missing("all tokens have the same weight")),
    ("diffusion", missing("only autoregressive models are supported")),
    ("early_stopping_patience", missing("not supported; gdpo.stop_when ends a run that meets its goals")),
    ("loss_watchdog_*", idle("updates with a non-finite loss are skipped; health.stop_on can end a run on a metric")),
    ("plugins", _plugins),
    ("nemo_gym_*", combined("env")),
    ("wandb_project", combined("logger.wandb.project")),
    ("use_wandb", combined("logger.wandb.enabled")),
    ("wandb_name", combined("run.name")),
    ("wandb_entity", to("logger.wandb.entity")),
    ("use_mlflow", to("logger.mlflow.enabled", bool)),
    ("save_steps", combined("checkpointing.save_period")),
    ("save_strategy", combined("checkpointing.enabled")),
    ("rl_beta", combined("preference.beta", "loss_fn.reference_policy_kl_penalty")),
    ("dpo_beta", combined("preference.beta")),
    ("orpo_alpha", _of_kind(("orpo",), combined("preference.beta"))),
    ("dpo_label_smoothing", _of_kind(("dpo",), to("preference.label_smoothing", float))),
    ("dpo_loss_type", combined("preference.loss_type")),
    ("dpo_loss_weights", missing("only one preference loss at a time is supported")),
    ("dpo_use_weighting", missing("all pairs have the same weight")),
    ("dpo_norm_loss", missing("preference.length_normalize normalizes both answers by their lengths")),
    ("rpo_alpha", _of_kind(("dpo", "ipo"), to("preference.rpo_alpha", float))),
    ("simpo_gamma", _of_kind(("simpo",), to("preference.simpo_gamma", float))),
    ("cpo_alpha", _of_kind(("simpo",), combined("preference.rpo_alpha"))),
    ("kto_desirable_weight", _of_kind(("kto",), to("preference.desirable_weight", float))),
    ("kto_undesirable_weight", _of_kind(("kto",), to("preference.undesirable_weight", float))),
    ("center_rewards_coefficient", _of_kind(("reward_model",), to("preference.center_rewards_coefficient", float))),
    ("trl.beta", combined("loss_fn.reference_policy_kl_penalty", "preference.beta")),
    *expanded([
        *GRPO,
        ("num_generations", combined("gdpo.num_generations_per_prompt")),
        ("max_completion_length", combined("policy.generation.max_new_tokens")),
        ("temperature", combined("policy.generation.temperature")),
        ("top_p", combined("policy.generation.top_p")),
        ("top_k", combined("policy.generation.top_k")),
        ("min_p", missing("only temperature, top_p and top_k can be set for sampling", 0, 0.0)),
        ("generation_kwargs", missing("not translated; policy.generation.stop_strings sets stop strings")),
        ("chat_template_kwargs", combined("data.train.chat_template_kwargs")),
        ("reward_funcs", combined("env", "gdpo.rewards")),
        ("reward_processing_classes", missing("each reward model uses the tokenizer in its folder")),
        ("rollout_func", combined("rollout.function")),
        ("loss_type", combined("loss_fn.aggregation", "loss_fn.type")),
        ("mask_truncated_completions", to("loss_fn.mask_truncated", bool)),
        ("sync_ref_model ref_model_*", combined("policy.sync_ref_model")),
        ("vllm_mode", combined("cluster.placement")),
        ("async_prefetch prefetch_depth", combined("rollout.max_staleness")),
        ("vllm_sync_interval", combined("rollout.sync_every")),
        ("replay_buffer_size", missing("rollout.replay_buffer reuses groups by age, not by reward", 0)),
        ("reroll_start_fraction", missing("not translated; see gdpo.dynamic_sampling.reroll_after", 1, 1.0)),
        ("vllm_*", _ENGINES),
    ], "trl.", _of_rl),
    ("trl.*", idle("affects only logs, speed, or how engines and workers are started")),
    *expanded([
        ("gpu_memory_utilization", to("policy.generation.vllm_cfg.gpu_memory_utilization", float)),
        ("tensor_parallel_size", to("policy.generation.vllm_cfg.tensor_parallel_size")),
        ("max_model_len", combined("policy.max_total_sequence_length")),
        ("data_parallel_size", combined("policy.generation.engines")),
    ], "vllm.", _of_rl),
    ("vllm.*", _ENGINES),
    *expanded([
        ("stride context_length generate_max_len", combined("data.train.strided")),
        ("n_samples_per_prompt", combined("gdpo.num_generations_per_prompt")),
        ("temperature", combined("policy.generation.temperature")),
        ("top_p", combined("policy.generation.top_p")),
        ("advantage_estimator", combined("gdpo.estimator")),
    ], "ebft.", _of_strided),
    *expanded([
        ("mode", combined("data.train.strided", "env")),
        ("alignment_coef diversity_coef", combined("gdpo.rewards")),
        ("feature_layers embed_method use_whitening", combined("env")),
        ("ce_coef", missing("a cross-entropy term for reference answers is not supported", 0, 0.0)),
        ("rl_coef", fixed(1.0, "the loss cannot be scaled; adjust the learning rate instead")),
        ("adaptive_max_tokens", fixed(False, "max_new_tokens is the same for all prompts")),
        ("gt_length_multiplier", idle("applies only with adaptive_max_tokens")),
        ("min_completion_prefix", missing("strided mode uses raw text, which has no separate prompt", 0)),
        ("*", missing("the environment ebft does not support this option")),
    ], "ebft."),
    ("wandb_* mlflow_* hf_mlflow_* use_*board comet_* use_comet trackio_* use_trackio swanlab_* use_swanlab *otel* "
     "logging_steps save* evals_per_epoch eval_* do_*_eval evaluation_strategy hub_* push_* load_best_model_at_end "
     "metric_for_best_model include_t* greater_is_better resume_from_checkpoint auto_resume* profiler_* "
     "generate_samples debug num_generation_samples generation_* dynamic_checkpoint strict gradio_* merge_* bench_*",
     FILES),
    ("dataset_* datasets_* skip_prepare_dataset shuffle_* dataloader_* hf_use_auth_token streaming* "
     "num_dataset_shards* remove_unused_columns pretrain* total_num_tokens min_sample_len group_by_length "
     "sample_packing_* eval_sample_packing pad_to_* max_packed_sequence_len preprocess_* is_preprocess "
     "total_supervised_tokens axolotl_config_path multipack_* batch_flattening",
     _LOADING),
    ("attn_implementation flash_* sdp_* sdpa_* xformers_* flex_* eager_attention sage_* liger_* cut_cross_entropy "
     "chunked_cross_entropy* use_kernels use_scattermoe use_sonicmoe experts_implementation torch_compile* tf32 "
     "fused_* tiled_mlp* use_*_kernels s2_attention gemma4_* llama4_* large_head_attention dsv4_* dpo_use_liger_kernel "
     "dpo_padding_free precompute_ref_log_probs dpo_*logits* dpo_generate_during_eval fp32_norm*",
     _KERNELS),
    ("gradient_checkpointing* activation_offloading layer_offloading selective_checkpointing fsdp* deepspeed "
     "deepcompile ddp* dp_* context_parallel_size sequence_parallel_degree tensor_parallel_size heads_k_stride "
     "ring_attn_func expert_parallel* local_rank world_size device* gc_* torch_empty_cache_steps max_memory "
     "gpu_memory_limit low_cpu_mem_usage accelerator_config auto_find_batch_size use_ray ray_* resources_per_worker "
     "torchdistx_path qlora_sharded_* experimental_* torch_dtype eval_batch_size",
     _MEMORY),
    ("model_type tokenizer_type base_model_* cls_model_config tokenizer_* processor_* type_of_model is_*_derived_model "
     "resize_token_embeddings_to_32x use_onebitllms mean_resizing_embeddings shrink_embeddings embeddings_skip_upcast "
     "fix_untrained_tokens num_labels",
     idle("selects model and tokenizer classes, which this project derives from config.json and the tokenizer files")),
])  # fmt: skip
"""(key or pattern, rule)"""


def result_of(key: str, value: Any, config: AxolotlConfig) -> RuleResult | None:
    """Return the result of the first matching rule, or None if none matches."""
    act = first_match(RULES, key)
    if act is None:
        return RuleResult(text="not set", same=True) if value is None else None
    return act(value, config)
