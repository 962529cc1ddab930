"""What each key of a NeMo-RL recipe is here: one rule a key, or a pattern for a family of keys. The first that fits
counts."""

from __future__ import annotations

from gdpo_nemo.config.families import FAMILIES, last_name
from gdpo_nemo.interop.nemo_rl.more_keys import DATA, GENERATION, REST, variable_rules
from gdpo_nemo.interop.nemo_rl.recipe import Recipe
from gdpo_nemo.interop.rules import Act, RuleResult, fixed, gated, idle, missing, taken_over, to, where

_MEGATRON = "policy.megatron_cfg"
_VLLM = "policy.generation.vllm_cfg"
_RECOMPUTE = f"{_MEGATRON}.recompute"


def _of_dtensor(act: Act) -> Act:
    return where(
        lambda recipe: not recipe.megatron, act, idle("belongs to DTensor, which this recipe does not train with")
    )


def _of_megatron(act: Act) -> Act:
    return where(
        lambda recipe: recipe.megatron, act, idle("belongs to Megatron, which this recipe does not train with")
    )


def _of_mixture(act: Act) -> Act:
    return where(lambda recipe: recipe.model.mixture, act, idle("concerns experts, which this model does not have"))


def _validation(act: Act) -> Act:
    return where(lambda recipe: recipe.validates, act, idle("the recipe has no held-out data"))


def _shaped(act: Act) -> Act:
    return gated("grpo.reward_shaping.enabled", act)


def _kl(act: Act) -> Act:
    return where(lambda recipe: recipe.kl_in_loss, act, idle("the loss has no KL penalty"))


def _of_estimator(name: str) -> Act:
    """A setting of the estimator that stands under ``grpo`` and under ``grpo.adv_estimator``, where it counts."""
    inner = f"grpo.adv_estimator.{name}"
    return where(
        lambda recipe: _reads_groups(recipe) and recipe.get(inner) is None,
        taken_over("gdpo.estimator"),
        idle(f"{inner} counts, or the estimator does not have it"),
    )


def _reads_groups(recipe: Recipe) -> bool:
    """Return whether the estimator has ``normalize_rewards`` and ``use_leave_one_out_baseline``."""
    return recipe.get("grpo.adv_estimator.name", "grpo") != "reinforce_plus_plus"


def _sharded(section: str, size: str) -> Act:
    """``sequence_parallel``: it does not change the result, and acts with tensor parallelism only."""
    return where(
        lambda recipe: recipe.get(f"{section}.{size}", 1) > 1 and not recipe.model.mixture,
        taken_over(f"{_MEGATRON}.sequence_parallel"),
        idle("does nothing without tensor parallelism, under which a mixture always has it"),
    )


def _truncated(act: Act) -> Act:
    """``act`` where the importance weights are truncated."""
    ratio = "loss_fn.truncated_importance_sampling_ratio"
    set_there = where(lambda recipe: recipe.get(ratio) is not None, act, idle(f"does nothing there without {ratio}"))
    return gated("loss_fn.use_importance_sampling_correction", set_there)


def _as_it_is(key: str) -> Act:
    """Ours means the same, null included."""
    return lambda value, recipe: RuleResult({key: value})


def _clip(act: Act) -> Act:
    """A forced ratio has no clip, one update a step has none that acts; neither writes a bound that means nothing."""
    free = lambda r: r.get("loss_fn.force_on_policy_ratio") or r.get("loss_fn.disable_ppo_ratio")  # noqa: E731
    return where(free, idle("the ratio is forced to 1 or left out there, so nothing is clipped"), act)


GRPO = [
    ("grpo.num_prompts_per_step", to("gdpo.num_prompts_per_step")),
    ("grpo.num_generations_per_prompt", to("gdpo.num_generations_per_prompt")),
    ("grpo.max_num_steps", taken_over("gdpo.max_num_steps")),
    ("grpo.max_num_epochs", taken_over("gdpo.max_num_epochs", "gdpo.max_num_steps")),
    ("grpo.max_rollout_turns", to("rollout.turns.max_turns")),
    ("grpo.normalize_rewards", _of_estimator("normalize_rewards")),
    ("grpo.use_leave_one_out_baseline", where(
        lambda r: r.get("grpo.use_dynamic_sampling"), taken_over("gdpo.dynamic_sampling.leave_one_out"),
        _of_estimator("use_leave_one_out_baseline"))),
    ("grpo.adv_estimator.reward_weights", where(
        lambda r: r.get("grpo.adv_estimator.name") == "gdpo", taken_over("gdpo.rewards"), idle("of gdpo"))),
    ("grpo.adv_estimator.name", taken_over("gdpo.estimator")),
    ("grpo.adv_estimator.minus_baseline", where(
        _reads_groups, idle("of reinforce_plus_plus"), taken_over("gdpo.estimator"))),
    ("grpo.adv_estimator.*", where(_reads_groups, taken_over("gdpo.estimator"), idle("of other estimators"))),
    ("grpo.adv_estimator", taken_over("gdpo.estimator")),
    ("grpo.val_period", _validation(to("gdpo.val_period"))),
    ("grpo.val_at_start", _validation(to("gdpo.val_at_start"))),
    ("grpo.val_at_end", idle("the last step is always validated where gdpo.val_period is set")),
    ("grpo.val_start_at", _validation(missing("validation starts with the run", 0, -1))),
    ("grpo.max_val_samples", _validation(taken_over("gdpo.val_prompts"))),
    ("grpo.val_batch_size", _validation(where(
        lambda r: r.get("grpo.max_val_samples"), taken_over("gdpo.val_prompts"), idle("every held-out row is asked")))),
    ("grpo.val_num_generations_per_prompt", _validation(taken_over("gdpo.val_generations_per_prompt"))),
    ("grpo.num_val_generations_per_prompt", idle("no key of NeMo-RL (val_num_generations_per_prompt is)")),
    ("grpo.stop_at_validation_*", missing("no early stop on a metric; checkpointing.keep_best keeps the best")),
    ("grpo.overlong_filtering", to("loss_fn.mask_truncated")),
    ("grpo.advantage_clip_*", missing("advantages are not clipped")),
    ("grpo.seed", to("run.seed")),
    ("grpo.use_dynamic_sampling", to("gdpo.dynamic_sampling.enabled")),
    ("grpo.dynamic_sampling_max_gen_batches", gated(
        "grpo.use_dynamic_sampling", to("gdpo.dynamic_sampling.max_rounds", note="there the run ends after them, here "
                                                                                 "the step goes on"))),
    ("grpo.batch_multiplier", where(
        lambda r: r.get("grpo.use_dynamic_sampling"), taken_over("gdpo.dynamic_sampling.batch_multiplier"),
        missing("without use_dynamic_sampling NeMo-RL refuses it; here it does nothing", 1, 1.0))),
    ("grpo.dynamic_sampling_oversample_ratio", gated(
        "grpo.use_dynamic_sampling", missing("rounds are of num_prompts_per_step x batch_multiplier", 1, 1.0))),
    ("grpo.zero_variance_prompt_filtering", missing("prompts are not filtered over epochs")),
    ("grpo.reward_shaping.enabled", taken_over("gdpo.shaping")),
    ("grpo.reward_shaping.stop_properly_penalty_coef", _shaped(taken_over("gdpo.shaping"))),
    ("grpo.reward_shaping.*", _shaped(where(
        lambda r: r.get("grpo.reward_shaping.stop_properly_penalty_coef") is None, taken_over("gdpo.shaping"),
        idle("ignored there beside stop_properly_penalty_coef")))),
    ("grpo.reward_shaping", taken_over("gdpo.shaping")),
    ("grpo.reward_scaling.*", gated("grpo.reward_scaling.enabled", taken_over("gdpo.shaping"))),
    ("grpo.reward_scaling", taken_over("gdpo.shaping")),
    ("grpo.seq_logprob_error_threshold", missing("sequences are not masked by their log-prob error; loss_fn.off_policy "
                                                 "masks by ratio")),
    ("grpo.*_tool_call*", missing("make it a reward component")),
    ("grpo.*malformed_thinking*", missing("make it a reward component")),
    ("grpo.*best_at_k*", missing("no best-of-k objective", 0, 1, 1.0)),
    ("grpo.*combined_training*", gated("grpo.use_combined_training", missing("no combined objective"))),
    ("grpo.skip_reference_policy_logprobs_calculation", idle("the reference model exists only where it is used")),
    ("grpo.calculate_advantages_on_gpu", idle("advantages are float64 on the driver")),
    ("grpo.deduplicate_multimodal_data", idle("a matter of memory with images")),
    ("grpo.debug_payload_metrics", idle("a diagnosis")),
    ("grpo.async_grpo.enabled", taken_over("rollout.max_staleness")),
    ("grpo.async_grpo.max_trajectory_age_steps", gated("grpo.async_grpo.enabled", taken_over("rollout.max_staleness"))),
    ("grpo.async_grpo.max_generation_failures", idle("rollout.max_env_failure_share counts failed samples; a dead "
                                                     "engine is replaced")),
    ("grpo.async_grpo.in_flight_weight_updates", gated("grpo.async_grpo.enabled", taken_over("rollout.kv"))),
    ("grpo.async_grpo.recompute_kv_cache_after_weight_updates", gated(
        "grpo.async_grpo.enabled", taken_over("rollout.kv"))),
    ("grpo.async_grpo", taken_over("rollout.max_staleness")),
]  # fmt: skip

LOSS = [
    ("loss_fn.reference_policy_kl_penalty", _kl(to("loss_fn.reference_policy_kl_penalty"))),
    ("loss_fn.reference_policy_kl_type", _kl(to("loss_fn.reference_policy_kl_type"))),
    ("loss_fn.kl_input_clamp_value", _kl(_as_it_is("loss_fn.kl_input_clamp_value"))),
    ("loss_fn.kl_output_clamp_value", _kl(_as_it_is("loss_fn.kl_output_clamp_value"))),
    ("loss_fn.use_on_policy_kl_approximation", _kl(taken_over("loss_fn.reference_policy_kl_gradient"))),
    ("loss_fn.use_kl_in_reward", taken_over("loss_fn.reference_policy_kl_penalty")),
    ("loss_fn.ratio_clip_min", _clip(to("loss_fn.ratio_clip_min"))),
    ("loss_fn.ratio_clip_max", _clip(to("loss_fn.ratio_clip_max"))),
    ("loss_fn.ratio_clip_c", _clip(to("loss_fn.ratio_clip_c"))),
    ("loss_fn.use_cispo", taken_over("loss_fn.type")),
    ("loss_fn.sequence_level_importance_ratios", taken_over("loss_fn.type")),
    ("loss_fn.token_level_loss", to("loss_fn.aggregation", lambda on: "token_mean" if on else "sequence_mean")),
    ("loss_fn.disable_ppo_ratio", where(
        lambda r: r.updates == 1, idle("with one update a step the ratio is 1, which has REINFORCE's gradient"),
        missing("several updates a step keep the ratio"))),
    ("loss_fn.force_on_policy_ratio", where(
        lambda r: r.updates == 1, idle("with one update a step the ratio is 1 here too"),
        missing("several updates a step take the ratio to the log-probs before them"))),
    ("loss_fn.use_importance_sampling_correction", taken_over("loss_fn.off_policy.mode")),
    ("loss_fn.truncated_importance_sampling_ratio", _truncated(taken_over("loss_fn.off_policy.ratio_max"))),
    ("loss_fn.truncated_importance_sampling_ratio_min", _truncated(taken_over("loss_fn.off_policy.ratio_min"))),
    ("loss_fn.truncated_importance_sampling_type", _truncated(taken_over("loss_fn.off_policy.mode"))),
    ("loss_fn.positive_example_nll_weight", missing("no likelihood term", 0, 0.0)),
]  # fmt: skip


def adapted(names: list[str], model_type: str) -> list[str]:
    """Our names of the linear layers that get adapters, from Megatron's or Hugging Face's; an unknown model has
    Llama's layers."""
    modules = FAMILIES.get(model_type, FAMILIES["llama"]).modules
    megatron = {
        "linear_qkv": modules.qkv,
        "linear_proj": (modules.attention_output,),
        "linear_fc1": modules.gate_up,
        "linear_fc2": (modules.down,),
    }
    return [last_name(module) for name in names for module in megatron.get(last_name(name), (name,))]


def _fp8(act: Act) -> Act:
    return gated(f"{_MEGATRON}.fp8_cfg.enabled", act)


def _lora_rules(section: str) -> list[tuple[str, Act]]:
    def on(act: Act) -> Act:
        return where(lambda recipe: recipe.lora == section, act, idle("adapters are off"))

    return [
        (f"{section}.enabled", where(lambda r: r.lora in (section, ""), taken_over("policy.lora.rank"),
        idle("of the trainer that is not used"))),
        (f"{section}.dim", on(taken_over("policy.lora.rank"))),
        (f"{section}.alpha", on(to("policy.lora.alpha", float))),
        (f"{section}.dropout", on(to("policy.lora.dropout", float))),
        (f"{section}.dropout_position", on(where(
            lambda r: r.get(f"{section}.dropout"), fixed("pre", "dropout comes before the adapter"), idle("there is no "
                                                                                                          "dropout")))),
        (f"{section}.target_modules", on(where(
            lambda r: not r.megatron and r.get(f"{section}.match_all_linear"), idle("match_all_linear counts"),
            taken_over("policy.lora.target_modules")))),
        (f"{section}.match_all_linear", on(taken_over("policy.lora.target_modules"))),
        (f"{section}.exclude_modules", on(missing("every layer of policy.lora.target_modules is adapted"))),
        (f"{section}.lora_A_init*", on(taken_over("policy.lora.init"))),
        (f"{section}.lora_B_init*", on(fixed("zero", "B starts at 0"))),
        (f"{section}.*", on(idle("how adapters are computed"))),
        (section, idle("no adapters")),
    ]  # fmt: skip


_OTHER_TOKENIZER = where(
    lambda r: r.get("policy.tokenizer.name") == r.get("policy.model_name"),
    idle("the model's own"),
    to("policy.tokenizer_name"),
)

POLICY = [
    ("policy.model_name", to("policy.model_name")),
    ("policy.tokenizer.name", _OTHER_TOKENIZER),
    ("policy.tokenizer.chat_template", missing("the tokenizer's own chat template is used", "default")),
    ("policy.tokenizer.chat_template_kwargs*", missing("the chat template gets no further arguments")),
    ("policy.tokenizer.*", idle("how texts are tokenised, not into what")),
    ("policy.hf_config_overrides*", missing("the architecture is that of the model's config.json")),
    ("policy.train_global_batch_size", to("policy.train_global_batch_size")),
    ("policy.train_micro_batch_size", where(
        lambda r: r.packed_tokens, idle("packs of train_mb_tokens count"), taken_over("policy.micro_batch_tokens"))),
    ("policy.sequence_packing.enabled", idle("packing is always on, and does not change the gradient")),
    ("policy.*.train_mb_tokens", idle("policy.micro_batch_tokens bounds a micro-batch, whose size does not change the "
                                      "gradient")),
    ("policy.sequence_packing.*", idle("how packs are filled")),
    ("policy.dynamic_batching.*", idle("packing is always on, and does not change the gradient")),
    ("policy.logprob_batch_size", idle("log-probs use the micro-batches of training")),
    ("policy.generation_batch_size", idle("vLLM batches by itself (policy.generation.vllm_cfg.max_num_seqs)")),
    ("policy.logprob_chunk_size", idle("log-probs are always taken in chunks of bounded memory")),
    ("policy.make_sequence_length_divisible_by", idle("derived from the layout")),
    ("policy.offload_optimizer_for_logprob", idle("a matter of memory")),
    ("policy.max_total_sequence_length", to("policy.max_total_sequence_length")),
    ("policy.precision", to("policy.precision", lambda text: {"bf16": "bfloat16", "fp32": "float32"}.get(text, text))),
    ("policy.max_grad_norm", where(
        lambda r: r.megatron, idle("Megatron clips at megatron_cfg.optimizer.clip_grad"),
        taken_over(f"{_MEGATRON}.optimizer.clip_grad"))),
    ("policy.refit_buffer_size_gb", idle("weights travel in buckets of weights.bucket_mib")),
    ("policy.optimizer.name", _of_dtensor(fixed("torch.optim.AdamW", "AdamW"))),
    ("policy.optimizer.kwargs.lr", _of_dtensor(to(f"{_MEGATRON}.optimizer.lr"))),
    ("policy.optimizer.kwargs.weight_decay", _of_dtensor(to(
        f"{_MEGATRON}.optimizer.weight_decay", note="here of matrices, there of norms and biases too"))),
    ("policy.optimizer.kwargs.eps", _of_dtensor(to(f"{_MEGATRON}.optimizer.adam_eps"))),
    ("policy.optimizer.kwargs.betas", _of_dtensor(
        lambda value, r: RuleResult({f"{_MEGATRON}.optimizer.adam_beta1": value[0],
        f"{_MEGATRON}.optimizer.adam_beta2": value[1]}))),
    ("policy.optimizer.kwargs.foreach", idle("how torch runs AdamW")),
    ("policy.optimizer.kwargs.fused", idle("how torch runs AdamW")),
    ("policy.optimizer.kwargs.*", _of_dtensor(missing("main weights and moments are float32"))),
    ("policy.optimizer", _of_dtensor(fixed(None, "the optimizer is AdamW"))),
    ("policy.scheduler*", _of_dtensor(taken_over(f"{_MEGATRON}.scheduler"))),
    ("policy.dtensor_cfg.enabled", idle("Megatron trains here, whatever trained there")),
    *_lora_rules("policy.dtensor_cfg.lora_cfg"),
    ("policy.dtensor_cfg.tensor_parallel_size", _of_dtensor(to(f"{_MEGATRON}.tensor_model_parallel_size"))),
    ("policy.dtensor_cfg.context_parallel_size", _of_dtensor(to(f"{_MEGATRON}.context_parallel_size"))),
    ("policy.dtensor_cfg.sequence_parallel", _of_dtensor(_sharded("policy.dtensor_cfg", "tensor_parallel_size"))),
    ("policy.dtensor_cfg.activation_checkpointing", _of_dtensor(to(_RECOMPUTE, lambda on: "full" if on else "none"))),
    ("policy.dtensor_cfg.expert_parallel_size",
    _of_dtensor(_of_mixture(to(f"{_MEGATRON}.expert_model_parallel_size")))),
    ("policy.dtensor_cfg.automodel_kwargs.force_hf", idle("which implementation computes the model")),
    *((pattern, _of_dtensor(act)) for pattern, act in variable_rules("policy.dtensor_cfg")),
    ("policy.dtensor_cfg.*", idle("how DTensor splits and computes the model")),
    ("policy.router_replay.*", _of_mixture(missing("the sampler's routing is not replayed in training"))),
    ("policy.draft*", idle("a draft model makes sampling faster; what the policy samples and learns is the same, its "
                           "states are detached")),
    ("policy.quant_cfg", missing("no training through a quantiser")),
    ("policy.quant_*", idle("how a quantiser is calibrated")),
    ("policy.disable_modelopt_layer_spec", idle("how a quantiser is attached")),
    ("policy.is_vlm", missing("models of text alone")),
    ("policy.activation_checkpointing_enabled", idle("no key of NeMo-RL")),
]  # fmt: skip

_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
_OPTIMIZER = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
_DDP = f"{_MEGATRON}.distributed_data_parallel_config"

MEGATRON = [
    (f"{_MEGATRON}.enabled", idle("Megatron trains here, whatever trained there")),
    *((f"{_MEGATRON}.{name}", _of_megatron(to(f"{_MEGATRON}.{name}"))) for name in _SIZES),
    (f"{_MEGATRON}.sequence_parallel", _of_megatron(_sharded(_MEGATRON, "tensor_model_parallel_size"))),
    (f"{_MEGATRON}.num_layers_in_first_pipeline_stage",
    _of_megatron(to(f"{_MEGATRON}.num_layers_in_first_pipeline_stage"))),
    (f"{_MEGATRON}.num_layers_in_last_pipeline_stage",
    _of_megatron(to(f"{_MEGATRON}.num_layers_in_last_pipeline_stage"))),
    (f"{_MEGATRON}.pipeline_dtype", _of_megatron(fixed(lambda r: r.get("policy.precision"), "the pipeline carries "
                                                                                            "policy.precision"))),
    (f"{_MEGATRON}.activation_checkpointing", _of_megatron(taken_over(_RECOMPUTE))),
    (f"{_MEGATRON}.recompute_granularity", gated(f"{_MEGATRON}.activation_checkpointing", taken_over(_RECOMPUTE))),
    (f"{_MEGATRON}.recompute_*", idle("a matter of memory; recompute: selective means attention, full means whole "
                                      "layers")),
    (f"{_MEGATRON}.empty_unused_memory_level", idle("memory stays with the allocator")),
    (f"{_MEGATRON}.freeze_moe_router", _of_megatron(_of_mixture(where(
        lambda r: r.lora, idle("adapters leave the routers as they are"), to(f"{_MEGATRON}.freeze_moe_router"))))),
    (f"{_MEGATRON}.moe_router_dtype", _of_megatron(_of_mixture(to(f"{_MEGATRON}.moe_router_dtype")))),
    (f"{_MEGATRON}.moe_router_load_balancing_type", _of_megatron(_of_mixture(fixed("none", "no balancing loss")))),
    (f"{_MEGATRON}.moe_router_bias_update_rate", _of_megatron(_of_mixture(fixed(0.0, "no bias on the router")))),
    (f"{_MEGATRON}.moe_router_enable_expert_bias", _of_megatron(_of_mixture(missing("no bias on the router")))),
    (f"{_MEGATRON}.moe_aux_loss_coeff", _of_megatron(_of_mixture(missing("no balancing loss", 0, 0.0)))),
    (f"{_MEGATRON}.moe_*", idle("how a mixture is computed")),
    (f"{_MEGATRON}.track_moe_metrics", idle("a metric")),
    (f"{_MEGATRON}.mtp_loss_scaling_factor",
     _of_megatron(gated(f"{_MEGATRON}.mtp_num_layers", missing("no multi-token prediction", 0, 0.0)))),
    (f"{_MEGATRON}.mtp_num_layers", _of_megatron(missing("no multi-token prediction", 0))),
    (f"{_MEGATRON}.mtp_*", gated(f"{_MEGATRON}.mtp_num_layers", missing("no multi-token prediction"))),
    (f"{_MEGATRON}.freeze_*", _of_megatron(missing("parts for images and sound are not here"))),
    (f"{_MEGATRON}.*_fusion", idle("fused or not, the same arithmetic")),
    (f"{_MEGATRON}.use_fused_*", idle("fused or not, the same arithmetic")),
    (f"{_MEGATRON}.fused_*", idle("fused or not, the same arithmetic")),
    (f"{_MEGATRON}.defer_fp32_logits", idle("float32 log-probs come from one chunk of logits at a time")),
    (f"{_MEGATRON}.optimizer.optimizer", _of_megatron(fixed("adam", "AdamW"))),
    *((f"{_MEGATRON}.optimizer.{name}", _of_megatron(to(f"{_MEGATRON}.optimizer.{name}"))) for name in _OPTIMIZER),
    (f"{_MEGATRON}.optimizer.use_distributed_optimizer", _of_megatron(to(f"{_MEGATRON}.use_distributed_optimizer"))),
    (f"{_MEGATRON}.optimizer.bf16", _of_megatron(fixed(lambda r: r.get("policy.precision") == "bfloat16",
    "follows policy.precision"))),
    (f"{_MEGATRON}.optimizer.fp16", _of_megatron(fixed(False, "no float16"))),
    (f"{_MEGATRON}.optimizer.params_dtype", _of_megatron(fixed("float32", "main weights are float32"))),
    (f"{_MEGATRON}.optimizer.sgd_momentum", idle("AdamW has none")),
    (f"{_MEGATRON}.optimizer.use_precision_aware_optimizer", idle("moments are float32 either way, unless their dtype "
                                                                  "is set")),
    (f"{_MEGATRON}.optimizer.*_dtype", _of_megatron(fixed("float32", "main weights and moments are float32"))),
    (f"{_MEGATRON}.optimizer.optimizer_cpu_offload", _of_megatron(to(f"{_MEGATRON}.optimizer.offload"))),
    (f"{_MEGATRON}.optimizer.*offload*", idle("all of the optimizer moves to the host, or nothing")),
    (f"{_MEGATRON}.optimizer.overlap_cpu_optimizer_d2h_h2d", idle("a matter of speed")),
    (f"{_MEGATRON}.optimizer.muon_*", gated(f"{_MEGATRON}.optimizer.use_muon", missing("the optimizer is AdamW"))),
    (f"{_MEGATRON}.scheduler.*weight_decay", _of_megatron(fixed(
        lambda r: r.get(f"{_MEGATRON}.optimizer.weight_decay"), "weight decay is constant: that of the optimizer"))),
    (f"{_MEGATRON}.scheduler.weight_decay_incr_style", _of_megatron(fixed("constant", "weight decay is constant"))),
    (f"{_MEGATRON}.scheduler.override_opt_param_scheduler", idle("the config's schedule counts on resuming, too")),
    (f"{_MEGATRON}.scheduler.lr_*", _of_megatron(taken_over(f"{_MEGATRON}.scheduler"))),
    (f"{_DDP}.overlap_grad_reduce", _of_megatron(taken_over(f"{_MEGATRON}.overlap_grad_reduce"))),
    (f"{_DDP}.overlap_param_gather", _of_megatron(where(
        lambda r: r.gathers_ahead, taken_over(f"{_MEGATRON}.overlap_param_gather"),
        idle("does nothing without overlap_grad_reduce and the distributed optimizer")))),
    (f"{_DDP}.grad_reduce_in_fp32", idle("gradients are reduced in float32, which rounds less")),
    (f"{_DDP}.*", idle("how gradients are reduced; the loss carries the weights of the whole batch")),
    *_lora_rules(f"{_MEGATRON}.peft"),
    (f"{_MEGATRON}.fp8_cfg.enabled", _of_megatron(taken_over(f"{_MEGATRON}.fp8"))),
    (f"{_MEGATRON}.fp8_cfg.fp8", _fp8(_of_megatron(to(f"{_MEGATRON}.fp8")))),
    (f"{_MEGATRON}.fp8_cfg.fp8_recipe", _fp8(_of_megatron(to(f"{_MEGATRON}.fp8_recipe")))),
    (f"{_MEGATRON}.fp8_cfg.fp8_param", _fp8(_of_megatron(missing("parameters stay in policy.precision; matrix products "
                                                                 "are in 8 bits")))),
    (f"{_MEGATRON}.fp8_cfg*", idle("a detail of FP8's kernels")),
    (f"{_MEGATRON}.num_layers_at_*_in_bf16", gated(f"{_MEGATRON}.first_last_layers_bf16", _fp8(missing("all layers are "
                                                                                                       "in 8 bits")))),
    (f"{_MEGATRON}.first_last_layers_bf16", _fp8(missing("all layers are in 8 bits"))),
    *((pattern, _of_megatron(act)) for pattern, act in variable_rules(_MEGATRON)),
    (f"{_MEGATRON}.force_reconvert_from_hf", idle("weights are read from the Hugging Face folder at every start")),
    (f"{_MEGATRON}.model_overrides*", _of_megatron(missing("the architecture is that of the model's config.json"))),
    (f"{_MEGATRON}.converter_type", idle("the model's config.json names its family")),
    (f"{_MEGATRON}.train_iters", idle("NeMo-RL sets it itself")),
    (f"{_MEGATRON}.attention_backend", idle("which kernel computes attention")),
    *((f"{_MEGATRON}.{name}", idle("how it is computed, stored or shown")) for name in (
        "checkpoint*", "cuda_graph_*", "fine_grained_activation_offloading", "offload_modules",
        "use_gloo_process_groups",
        "clear_memory_caches_before_refit", "radio_force_cpe_eval_mode", "gradient_accumulation_fusion",
        "inference_*", "cp_normalize", "calculate_per_token_loss", "do_not_average_loss", "scale_loss_by_dp_cp_size")),
]  # fmt: skip

RULES: list[tuple[str, Act]] = [*GRPO, *LOSS, *MEGATRON, *GENERATION, *POLICY, *DATA, *REST]
"""(pattern of their key, rule), the first that fits."""


def result_of(key: str, value, recipe: Recipe) -> RuleResult | None:
    """The answer of the first rule that fits; None where none does."""
    from fnmatch import fnmatchcase

    return next((act(value, recipe) for pattern, act in RULES if fnmatchcase(key, pattern)), None)
