"""Translation rules for NeMo-RL keys or patterns of keys. The first matching rule applies."""

from __future__ import annotations

from itertools import chain
from typing import Any

from gdpo_nemo.config.allowed_values import MUON_KEYS, OPTIMIZER_DTYPES
from gdpo_nemo.models.architectures import last_name
from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.tools.interop.nemo_rl import algorithms
from gdpo_nemo.tools.interop.nemo_rl.algorithms import of_validation
from gdpo_nemo.tools.interop.nemo_rl.datasets import has_images
from gdpo_nemo.tools.interop.nemo_rl.gym import uses_gym
from gdpo_nemo.tools.interop.nemo_rl.more_keys import DATA, GENERATION, REST, variable_rules
from gdpo_nemo.tools.interop.nemo_rl.penalties import PENALTIES
from gdpo_nemo.tools.interop.nemo_rl.recipe import Recipe
from gdpo_nemo.tools.interop.translation import (
    Act,
    RuleResult,
    expanded,
    first_match,
    fixed,
    gated,
    idle,
    missing,
    required,
    to,
    where,
)

_MEGATRON = "policy.megatron_cfg"
_VLLM = "policy.generation.vllm_cfg"
_RECOMPUTE = f"{_MEGATRON}.recompute"


def _of_dtensor(act: Act) -> Act:
    return where(
        lambda recipe: not recipe.megatron, act, idle("applies only to DTensor, which this recipe does not use")
    )


def _of_megatron(act: Act) -> Act:
    return where(lambda recipe: recipe.megatron, act, idle("applies only to Megatron, which this recipe does not use"))


def _has_router_bias(recipe: Recipe) -> bool:
    family = FAMILIES.get(recipe.model.model_type)
    return bool(family and family.experts and family.experts.bias)


def _of_mixture(act: Act) -> Act:
    return where(lambda recipe: recipe.model.mixture, act, idle("applies only to MoE models, and this model is dense"))


def _shaped(act: Act) -> Act:
    return gated("grpo.reward_shaping.enabled", act)


def _kl(act: Act) -> Act:
    return where(lambda recipe: recipe.kl_in_loss, act, idle("the loss has no KL penalty"))


def _of_estimator(name: str) -> Act:
    """Return the rule for an estimator setting in ``grpo``. If ``grpo.adv_estimator`` contains the same setting, it
    takes precedence."""
    inner = f"grpo.adv_estimator.{name}"
    return where(
        lambda recipe: _reads_groups(recipe) and recipe.get(inner) is None,
        required("gdpo.estimator"),
        idle(f"no effect: {inner} takes precedence, or the estimator does not use it"),
    )


def _reads_groups(recipe: Recipe) -> bool:
    """Return whether the estimator uses ``normalize_rewards`` and ``use_leave_one_out_baseline``."""
    return bool(recipe.get("grpo.adv_estimator.name", "grpo") != "reinforce_plus_plus")


def _sharded(section: str, size: str) -> Act:
    """Return the rule for ``sequence_parallel``, which has an effect only with tensor parallelism.

    Args:
        section: section of the training backend.
        size: name of the section's key for the tensor-parallel size.
    """
    return where(
        lambda recipe: recipe.get(f"{section}.{size}", 1) > 1 and not recipe.model.mixture,
        required(f"{_MEGATRON}.sequence_parallel"),
        idle("no effect without tensor parallelism; MoE models with tensor parallelism always use sequence_parallel"),
    )


def _truncated(act: Act) -> Act:
    """Return a rule that applies ``act`` only if the importance weights are truncated."""
    ratio = "loss_fn.truncated_importance_sampling_ratio"
    set_there = where(lambda recipe: recipe.get(ratio) is not None, act, idle(f"no effect without {ratio}"))
    return gated("loss_fn.use_importance_sampling_correction", set_there)


def _including_null(key: str) -> Act:
    """Return the rule for a key with the same meaning as gdpo_nemo's ``key``. The value null is also written."""
    return lambda value, recipe: RuleResult({key: value})


def _clip(act: Act) -> Act:
    """Return a rule for a clip bound, which applies ``act`` unless the ratio is forced to 1 or disabled."""
    unclipped = lambda r: r.get("loss_fn.force_on_policy_ratio") or r.get("loss_fn.disable_ppo_ratio")  # noqa: E731
    return where(unclipped, idle("no effect: the ratio is not clipped, because it is forced to 1 or disabled"), act)


GRPO = expanded([
    ("num_prompts_per_step", to("gdpo.num_prompts_per_step")),
    ("num_generations_per_prompt", to("gdpo.num_generations_per_prompt")),
    ("max_num_steps", required("gdpo.max_num_steps")),
    ("max_num_epochs", required("gdpo.max_num_epochs", "gdpo.max_num_steps")),
    ("max_rollout_turns", where(uses_gym, idle("NeMo Gym's agents limit their turns"), to("rollout.turns.max_turns"))),
    ("normalize_rewards", _of_estimator("normalize_rewards")),
    ("use_leave_one_out_baseline", where(
        lambda r: r.get("grpo.use_dynamic_sampling"), required("gdpo.dynamic_sampling.leave_one_out"),
        _of_estimator("use_leave_one_out_baseline"))),
    ("adv_estimator.reward_weights", where(
        lambda r: r.get("grpo.adv_estimator.name") == "gdpo", required("gdpo.rewards"), idle(
            "applies only to the estimator gdpo"))),
    ("adv_estimator.name", required("gdpo.estimator")),
    ("adv_estimator.minus_baseline", where(
        _reads_groups, idle("applies only to the estimator reinforce_plus_plus"), required("gdpo.estimator"))),
    ("adv_estimator.normalize_rewards adv_estimator.use_leave_one_out_baseline",
     where(_reads_groups, required("gdpo.estimator"), idle("does not apply to the estimator reinforce_plus_plus"))),
    ("adv_estimator", required("gdpo.estimator")),
    ("val_period", of_validation(to("gdpo.val_period", lambda steps: max(0, steps)))),
    ("val_at_start", of_validation(to("gdpo.val_at_start"))),
    ("val_at_end", idle("the last step is always validated if gdpo.val_period is set")),
    ("val_start_at", of_validation(missing("validation cannot be delayed to a later step", 0, -1))),
    ("max_val_samples", of_validation(required("gdpo.val_prompts"))),
    ("val_batch_size", of_validation(where(
        lambda r: r.get("grpo.max_val_samples"), required("gdpo.val_prompts"), idle("all held-out rows are used")))),
    ("val_num_generations_per_prompt", of_validation(required("gdpo.val_generations_per_prompt"))),
    ("num_val_generations_per_prompt", idle("not a NeMo-RL key; use val_num_generations_per_prompt")),
    ("stop_at_validation_*", missing(
        "early stopping is not supported; checkpointing.keep_best retains the best checkpoint")),
    ("overlong_filtering", to("loss_fn.mask_truncated")),
    ("advantage_clip_*", missing("advantage clipping is not supported")),
    ("seed", to("run.seed")),
    ("use_dynamic_sampling", to("gdpo.dynamic_sampling.enabled")),
    ("dynamic_sampling_max_gen_batches", gated(
        "grpo.use_dynamic_sampling", to(
            "gdpo.dynamic_sampling.max_rounds", note="NeMo-RL then ends the run; this project continues the step"))),
    ("batch_multiplier", where(
        lambda r: r.get("grpo.use_dynamic_sampling"), required("gdpo.dynamic_sampling.batch_multiplier"),
        missing("no effect without use_dynamic_sampling; NeMo-RL refuses this combination", 1, 1.0))),
    ("dynamic_sampling_oversample_ratio", gated(
        "grpo.use_dynamic_sampling", missing("a round has num_prompts_per_step x batch_multiplier prompts", 1, 1.0))),
    ("zero_variance_prompt_filtering", missing("filtering prompts across epochs is not supported")),
    ("reward_shaping.enabled", required("gdpo.shaping")),
    ("reward_shaping.stop_properly_penalty_coef", _shaped(required("gdpo.shaping"))),
    ("reward_shaping.overlong_buffer_length reward_shaping.overlong_buffer_penalty "
     "reward_shaping.max_response_length",
     _shaped(where(lambda r: r.get("grpo.reward_shaping.stop_properly_penalty_coef") is None, required(
         "gdpo.shaping"), idle("NeMo-RL ignores this key if stop_properly_penalty_coef is set")))),
    ("reward_shaping.*", _shaped(missing("not supported; define the penalty in gdpo.shaping"))),
    ("reward_shaping", required("gdpo.shaping")),
    ("reward_scaling.enabled reward_scaling.source_min reward_scaling.source_max reward_scaling.target_min "
     "reward_scaling.target_max",
     gated("grpo.reward_scaling.enabled", required("gdpo.shaping"))),
    ("reward_scaling", required("gdpo.shaping")),
    ("seq_logprob_error_threshold", missing(
        "masking by log-prob error is not supported; loss_fn.off_policy can mask by ratio")),
    ("length_penalty_*", missing("length penalties are not supported; define one in gdpo.shaping")),
    ("*_tool_call* *malformed_thinking*", missing("not translated; define an equivalent reward component")),
    ("*best_at_k*", missing("best-of-k objectives are not supported", 0, 1, 1.0)),
    ("*combined_training*", gated("grpo.use_combined_training", missing("combined objectives are not supported"))),
    ("skip_reference_policy_logprobs_calculation", idle("the reference model is loaded only if it is used")),
    ("calculate_advantages_on_gpu", idle("advantages are computed in float64 on the driver")),
    ("deduplicate_multimodal_data", idle("affects only the memory for images")),
    ("debug_payload_metrics", idle("used only for diagnostics")),
    ("async_grpo.enabled", required("rollout.max_staleness")),
    ("async_grpo.max_trajectory_age_steps", gated("grpo.async_grpo.enabled", required("rollout.max_staleness"))),
    ("async_grpo.max_generation_failures", idle(
        "rollout.max_env_failure_share limits failed samples; a dead engine is replaced")),
    ("async_grpo.in_flight_weight_updates async_grpo.recompute_kv_cache_after_weight_updates",
     gated("grpo.async_grpo.enabled", required("rollout.kv"))),
    ("async_grpo", required("rollout.max_staleness")),
], "grpo.")  # fmt: skip

LOSS = expanded([
    ("reference_policy_kl_penalty", _kl(to("loss_fn.reference_policy_kl_penalty"))),
    ("reference_policy_kl_type", _kl(to("loss_fn.reference_policy_kl_type"))),
    ("kl_input_clamp_value", _kl(_including_null("loss_fn.kl_input_clamp_value"))),
    ("kl_output_clamp_value", _kl(_including_null("loss_fn.kl_output_clamp_value"))),
    ("use_on_policy_kl_approximation", _kl(required("loss_fn.reference_policy_kl_gradient"))),
    ("use_kl_in_reward", required("loss_fn.reference_policy_kl_penalty")),
    ("ratio_clip_min", _clip(to("loss_fn.ratio_clip_min"))),
    ("ratio_clip_max", _clip(to("loss_fn.ratio_clip_max"))),
    ("ratio_clip_c", _clip(to("loss_fn.ratio_clip_c"))),
    ("use_cispo sequence_level_importance_ratios", required("loss_fn.type")),
    ("token_level_loss", to("loss_fn.aggregation", lambda on: "token_mean" if on else "sequence_mean")),
    ("disable_ppo_ratio", where(
        lambda r: r.updates == 1, idle("with one update per step the ratio is 1, which gives the REINFORCE gradient"),
        missing("with several updates per step the loss always uses the ratio"))),
    ("force_on_policy_ratio", where(
        lambda r: r.updates == 1, idle("with one update per step the ratio is always 1"),
        missing("with several updates per step the old log-probs are computed before the first update"))),
    ("use_importance_sampling_correction", required("loss_fn.off_policy.mode")),
    ("truncated_importance_sampling_ratio", _truncated(required("loss_fn.off_policy.ratio_max"))),
    ("truncated_importance_sampling_ratio_min", _truncated(required("loss_fn.off_policy.ratio_min"))),
    ("truncated_importance_sampling_type", _truncated(required("loss_fn.off_policy.mode"))),
    ("positive_example_nll_weight", missing("a likelihood term in the loss is not supported", 0, 0.0)),
], "loss_fn.")  # fmt: skip


def adapted(names: list[str], model_type: str) -> list[str]:
    """Convert the names of adapted layers from Megatron's or Hugging Face's names to the names of
    ``policy.lora.target_modules``. For an unknown model, assume Llama's layers."""
    modules = FAMILIES.get(model_type, FAMILIES["llama"]).modules
    megatron = {
        "linear_qkv": modules.qkv,
        "linear_proj": (modules.attention_output,),
        "linear_fc1": modules.gate_up,
        "linear_fc2": (modules.down,),
    }
    # Names without an entry, such as in_proj of Mamba layers, are the same in both.
    return [last_name(module) for name in names for module in megatron.get(last_name(name), (name,))]


def _fp8(act: Act) -> Act:
    return gated(f"{_MEGATRON}.fp8_cfg.enabled", act)


def _lora_rules(section: str) -> list[tuple[str, Act]]:
    def on(act: Act) -> Act:
        return where(lambda recipe: recipe.lora == section, act, idle("adapters are disabled"))

    return expanded([
        ("enabled", where(lambda r: r.lora in (section, ""), required("policy.lora.rank"),
        idle("applies only to the other training backend"))),
        ("dim", on(required("policy.lora.rank"))),
        ("alpha", on(to("policy.lora.alpha", float))),
        ("dropout", on(to("policy.lora.dropout", float))),
        ("dropout_position", on(where(
            lambda r: r.get(f"{section}.dropout"), fixed("pre", "dropout is applied before the adapter"),
            idle("dropout is disabled")))),
        ("target_modules", on(where(
            lambda r: not r.megatron and r.get(f"{section}.match_all_linear"),
            idle("no effect: match_all_linear takes precedence"),
            required("policy.lora.target_modules")))),
        ("match_all_linear", on(required("policy.lora.target_modules"))),
        ("exclude_modules", on(missing("all layers in policy.lora.target_modules get adapters"))),
        ("lora_A_init*", on(required("policy.lora.init"))),
        ("lora_B_init*", on(fixed("zero", "the adapter matrix B is initialized to 0"))),
        ("*", on(idle("affects only the implementation of adapters"))),
    ], f"{section}.") + [(section, idle("adapters are disabled"))]  # fmt: skip


_OTHER_TOKENIZER = where(
    lambda r: r.get("policy.tokenizer.name") == r.get("policy.model_name"),
    idle("the model's tokenizer is used"),
    to("policy.tokenizer_name"),
)

_NO_IMAGES = idle("affects only prompts with images, video or audio")
_TRAINS_TOWER = where(
    lambda r: r.lora,
    idle("training of adapters freezes the tower"),
    to("policy.vision.train", lambda frozen: not frozen),
)
_TOWER = where(has_images, _TRAINS_TOWER, _NO_IMAGES)

_DTENSOR = "policy.dtensor_cfg"
POLICY = _lora_rules(f"{_DTENSOR}.lora_cfg") + expanded(variable_rules(_DTENSOR), wrap=_of_dtensor) + expanded([
    ("model_name", to("policy.model_name")),
    ("tokenizer.name", _OTHER_TOKENIZER),
    ("tokenizer.chat_template", lambda value, recipe: RuleResult(
        text="the tokenizer's chat template is used", same=value == "default", matters=value != "default")),
    ("tokenizer.chat_template_kwargs*", missing("not translated; set data.<split>.chat_template_kwargs")),
    ("tokenizer.use_fastokens", idle("does not affect the tokens of a text")),
    ("tokenizer.video*", idle("video is not supported")),
    ("hf_config_overrides.router_aux_loss_coef", fixed(0, "a load-balancing loss is not supported")),
    ("hf_config_overrides*", missing("the model's config.json defines the architecture")),
    ("train_global_batch_size", to("policy.train_global_batch_size")),
    ("train_micro_batch_size", where(
        lambda r: r.packed_tokens, idle("no effect: train_mb_tokens takes precedence"),
        required("policy.micro_batch_tokens"))),
    ("sequence_packing.enabled", idle("packing is always enabled and does not change the gradient")),
    ("*.train_mb_tokens", idle(
        "policy.micro_batch_tokens bounds a micro-batch, whose size does not change the gradient")),
    ("sequence_packing.*", idle("affects only how sequences are assigned to packs")),
    ("dynamic_batching.*", idle("sequences are always packed, which does not change the gradient")),
    ("logprob_batch_size", idle("log-probs are computed in the same micro-batches as training")),
    ("generation_batch_size", idle("vLLM schedules batches (policy.generation.vllm_cfg.max_num_seqs)")),
    ("logprob_chunk_size", idle("log-probs are always computed in chunks")),
    ("make_sequence_length_divisible_by", idle("the parallel layout determines the padding")),
    ("offload_optimizer_for_logprob", idle("affects only memory")),
    ("max_total_sequence_length", to("policy.max_total_sequence_length")),
    ("precision", to("policy.precision", lambda text: {"bf16": "bfloat16", "fp32": "float32"}.get(text, text))),
    ("max_grad_norm", where(
        lambda r: r.megatron, idle("Megatron clips at megatron_cfg.optimizer.clip_grad"),
        required(f"{_MEGATRON}.optimizer.clip_grad"))),
    ("refit_buffer_size_gb", idle("weights are sent in buckets of weights.bucket_mib")),
    ("optimizer.name", _of_dtensor(fixed("torch.optim.AdamW", "AdamW"))),
    ("optimizer.kwargs.lr", _of_dtensor(to(f"{_MEGATRON}.optimizer.lr"))),
    ("optimizer.kwargs.weight_decay", _of_dtensor(to(
        f"{_MEGATRON}.optimizer.weight_decay", note="only matrices decay; NeMo-RL also decays norms and biases"))),
    ("optimizer.kwargs.eps", _of_dtensor(to(f"{_MEGATRON}.optimizer.adam_eps"))),
    ("optimizer.kwargs.betas", _of_dtensor(
        lambda value, r: RuleResult({f"{_MEGATRON}.optimizer.adam_beta1": value[0],
        f"{_MEGATRON}.optimizer.adam_beta2": value[1]}))),
    ("optimizer.kwargs.foreach optimizer.kwargs.fused", idle("affects only the implementation of AdamW")),
    ("optimizer.kwargs.*", _of_dtensor(missing("main weights and moments are in float32"))),
    ("optimizer", _of_dtensor(fixed(None, "only AdamW is supported"))),
    ("scheduler*", _of_dtensor(required(f"{_MEGATRON}.scheduler"))),
    ("dtensor_cfg.enabled", idle("training always uses Megatron")),
    ("dtensor_cfg.tensor_parallel_size", _of_dtensor(to(f"{_MEGATRON}.tensor_model_parallel_size"))),
    ("dtensor_cfg.context_parallel_size", _of_dtensor(to(f"{_MEGATRON}.context_parallel_size"))),
    ("dtensor_cfg.sequence_parallel", _of_dtensor(_sharded(_DTENSOR, "tensor_parallel_size"))),
    ("dtensor_cfg.activation_checkpointing", _of_dtensor(to(_RECOMPUTE, lambda on: "full" if on else "none"))),
    ("dtensor_cfg.expert_parallel_size", _of_dtensor(_of_mixture(to(f"{_MEGATRON}.expert_model_parallel_size")))),
    ("dtensor_cfg.automodel_kwargs.force_hf", idle("selects the model implementation")),
    ("dtensor_cfg.automodel_kwargs.freeze_config.freeze_language_model",
     _of_dtensor(missing("all layers are trained"))),
    ("dtensor_cfg.automodel_kwargs.freeze_config.freeze_vision_tower", _of_dtensor(_TOWER)),
    ("dtensor_cfg.*", idle("configures DTensor sharding and computation")),
    ("router_replay.enabled", _of_mixture(to("policy.router_replay", lambda on: "sampler" if on else False))),
    ("router_replay.*", _of_mixture(missing("only router_replay.enabled is supported"))),
    ("draft*", idle("a draft model only speeds up sampling; it does not change what the policy samples and learns")),
    ("quant_cfg", missing("quantization-aware training is not supported")),
    ("quant_*", idle("affects only quantizer calibration")),
    ("disable_modelopt_layer_spec", idle("affects only how a quantizer is attached")),
    ("is_vlm", idle("the model's config.json determines whether the model has a vision tower")),
    ("activation_checkpointing_enabled", idle("not a NeMo-RL key")),
], "policy.")  # fmt: skip

_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
_OPTIMIZER = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
_PRECISION_AWARE = f"{_MEGATRON}.optimizer.use_precision_aware_optimizer"
_FLOAT32 = fixed("float32", "main weights, gradients and moments are in float32")


def _dtype(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _sets_dtypes(recipe: Recipe) -> bool:
    """Return whether the optimizer's data types have an effect, here also that they are supported."""
    offloaded = recipe.get(f"{_MEGATRON}.optimizer.optimizer_cpu_offload")
    return bool(recipe.get(_PRECISION_AWARE)) and not offloaded and not recipe.uses_muon


def _of_muon(act: Act) -> Act:
    return where(lambda recipe: recipe.uses_muon, act, idle("no effect: the optimizer is not muon"))


MEGATRON = _lora_rules(f"{_MEGATRON}.peft") + expanded(variable_rules(_MEGATRON), wrap=_of_megatron) + expanded([
    ("enabled", idle("training always uses Megatron")),
    *((name, _of_megatron(to(f"{_MEGATRON}.{name}"))) for name in _SIZES),
    ("sequence_parallel", _of_megatron(_sharded(_MEGATRON, "tensor_model_parallel_size"))),
    ("num_layers_in_first_pipeline_stage", _of_megatron(to(f"{_MEGATRON}.num_layers_in_first_pipeline_stage"))),
    ("num_layers_in_last_pipeline_stage", _of_megatron(to(f"{_MEGATRON}.num_layers_in_last_pipeline_stage"))),
    ("pipeline_dtype", _of_megatron(fixed(lambda r: r.get("policy.precision"),
        "pipeline stages exchange activations in policy.precision"))),
    ("activation_checkpointing", _of_megatron(required(_RECOMPUTE))),
    ("recompute_granularity", gated(f"{_MEGATRON}.activation_checkpointing", required(_RECOMPUTE))),
    ("recompute_*", idle("affects only memory; the mode selective recomputes attention, the mode full whole layers")),
    ("empty_unused_memory_level", idle("the allocator's cache is never emptied")),
    ("freeze_moe_router", _of_megatron(_of_mixture(where(
        lambda r: r.lora, idle("adapter training always freezes the routers"), to(f"{_MEGATRON}.freeze_moe_router"))))),
    ("moe_router_dtype", _of_megatron(_of_mixture(to(f"{_MEGATRON}.moe_router_dtype")))),
    ("moe_router_load_balancing_type", _of_megatron(_of_mixture(fixed("none",
        "a load-balancing loss is not supported")))),
    ("moe_router_bias_update_rate", _of_megatron(_of_mixture(fixed(0.0, "training does not change a router's bias")))),
    ("moe_router_enable_expert_bias", _of_megatron(_of_mixture(where(
        _has_router_bias, fixed(True, "the model's router has a bias"),
        missing("only models whose family has a router bias have one, and training does not change it"))))),
    ("moe_aux_loss_coeff", _of_megatron(_of_mixture(missing("a load-balancing loss is not supported", 0, 0.0)))),
    ("moe_*", idle("affects only how MoE layers are computed")),
    ("track_moe_metrics", idle("affects only a metric")),
    ("mtp_loss_scaling_factor",
     _of_megatron(gated(f"{_MEGATRON}.mtp_num_layers", missing("multi-token prediction is not supported", 0, 0.0)))),
    ("mtp_num_layers", _of_megatron(missing("multi-token prediction is not supported", 0))),
    ("mtp_*", gated(f"{_MEGATRON}.mtp_num_layers", missing("multi-token prediction is not supported"))),
    ("freeze_config.freeze_vision_model", _of_megatron(_TOWER)),
    ("freeze_config.freeze_vision_projection", _of_megatron(where(
        has_images, fixed(lambda r: r.freezes_tower, "the projection is a part of the tower"), _NO_IMAGES))),
    ("freeze_config.freeze_language_model", _of_megatron(missing("all layers are trained"))),
    ("freeze_*", _of_megatron(_NO_IMAGES)),
    ("*_fusion *linear_ce_fusion* use_fused_* fused_*", idle("selects a fused kernel with the same result")),
    ("defer_fp32_logits", idle("log-probs are always computed in float32, from chunks of logits")),
    ("optimizer.optimizer", _of_megatron(where(
        lambda r: r.uses_muon, to(f"{_MEGATRON}.optimizer.type", lambda value: "muon"), fixed("adam", "AdamW")))),
    *((f"optimizer.{name}", _of_megatron(to(f"{_MEGATRON}.optimizer.{name}"))) for name in _OPTIMIZER),
    ("optimizer.use_distributed_optimizer optimizer.use_layer_wise_distributed_optimizer", _of_megatron(where(
        lambda r: r.uses_muon, idle("the state of Muon is not sharded, which affects only memory"),
        to(f"{_MEGATRON}.use_distributed_optimizer")))),
    ("optimizer.bf16", _of_megatron(fixed(lambda r: r.get("policy.precision") == "bfloat16",
    "determined by policy.precision"))),
    ("optimizer.fp16", _of_megatron(fixed(False, "float16 is not supported"))),
    ("optimizer.params_dtype", _of_megatron(fixed("float32", "main weights are in float32"))),
    ("optimizer.sgd_momentum", idle("AdamW does not use momentum")),
    ("optimizer.use_precision_aware_optimizer",
     _of_megatron(where(_sets_dtypes, to(_PRECISION_AWARE), idle("moments are in float32")))),
    *((f"optimizer.{name}", _of_megatron(where(
        _sets_dtypes, to(f"{_MEGATRON}.optimizer.{name}", _dtype), _FLOAT32)))
      for name in OPTIMIZER_DTYPES),
    ("optimizer.*_dtype", _of_megatron(_FLOAT32)),
    ("optimizer.optimizer_cpu_offload", _of_megatron(to(f"{_MEGATRON}.optimizer.offload"))),
    ("optimizer.*offload*", idle("the optimizer is offloaded to the host completely or not at all")),
    ("optimizer.overlap_cpu_optimizer_d2h_h2d", idle("affects only speed")),
    *((f"optimizer.{name}", _of_megatron(_of_muon(to(f"{_MEGATRON}.optimizer.{name}")))) for name in MUON_KEYS),
    ("optimizer.muon_scalar_optimizer", _of_megatron(_of_muon(fixed("adam", "AdamW updates other parameters")))),
    ("optimizer.muon_*", _of_megatron(_of_muon(missing("this setting of Muon is not supported")))),
    ("scheduler.*weight_decay", _of_megatron(fixed(
        lambda r: r.get(f"{_MEGATRON}.optimizer.weight_decay"),
            "weight decay is constant; the optimizer settings define it"))),
    ("scheduler.weight_decay_incr_style", _of_megatron(fixed("constant", "weight decay is constant"))),
    ("scheduler.override_opt_param_scheduler", idle("a resumed run uses the schedule in the config")),
    ("scheduler.lr_decay_style scheduler.lr_decay_iters scheduler.lr_warmup_iters scheduler.lr_warmup_init",
     _of_megatron(required(f"{_MEGATRON}.scheduler"))),
    ("distributed_data_parallel_config.overlap_grad_reduce",
     _of_megatron(required(f"{_MEGATRON}.overlap_grad_reduce"))),
    ("distributed_data_parallel_config.overlap_param_gather", _of_megatron(where(
        lambda r: r.gathers_ahead, required(f"{_MEGATRON}.overlap_param_gather"),
        idle("no effect without overlap_grad_reduce and the distributed optimizer")))),
    ("distributed_data_parallel_config.grad_reduce_in_fp32",
     idle("gradients are always reduced in float32, which has less rounding error")),
    ("distributed_data_parallel_config.*",
     idle("affects only how gradients are reduced; the loss is normalized over the whole batch")),
    ("fp8_cfg.enabled", _of_megatron(required(f"{_MEGATRON}.fp8"))),
    ("fp8_cfg.fp8", _fp8(_of_megatron(to(f"{_MEGATRON}.fp8")))),
    ("fp8_cfg.fp8_recipe", _fp8(_of_megatron(to(f"{_MEGATRON}.fp8_recipe")))),
    ("fp8_cfg.fp8_param", _fp8(_of_megatron(missing(
        "parameters remain in policy.precision; matrix products use FP8")))),
    ("fp8_cfg*", idle("affects only FP8 kernels")),
    ("num_layers_at_*_in_bf16", gated(f"{_MEGATRON}.first_last_layers_bf16", _fp8(missing("all layers use FP8")))),
    ("first_last_layers_bf16", _fp8(missing("all layers use FP8"))),
    ("force_reconvert_from_hf", idle("weights are always read from the Hugging Face folder")),
    ("model_overrides*", _of_megatron(missing("the model's config.json defines the architecture"))),
    ("converter_type", idle("the model's config.json determines the model family")),
    ("train_iters", idle("NeMo-RL overwrites this key")),
    ("attention_backend", idle("selects the attention kernel")),
    ("checkpoint* cuda_graph_* fine_grained_activation_offloading offload_modules use_gloo_process_groups "
     "clear_memory_caches_before_refit radio_force_cpe_eval_mode gradient_accumulation_fusion inference_* cp_normalize "
     "calculate_per_token_loss do_not_average_loss scale_loss_by_dp_cp_size",
     idle("affects only speed, storage or logs")),
], f"{_MEGATRON}.")  # fmt: skip

RULES: list[tuple[str, Act]] = [*PENALTIES, *GRPO, *LOSS, *MEGATRON, *GENERATION, *POLICY, *DATA, *REST]
"""(key or pattern, rule)"""


def result_of(key: str, value: Any, recipe: Recipe) -> RuleResult | None:
    """Return the result of the first matching rule, or None if none matches."""
    act = first_match(chain(algorithms.RULES[recipe.section], RULES), key)
    return act and act(value, recipe)
