"""What each key of a NeMo-RL recipe is here: one rule a key, or a pattern for a family of keys. The first that fits counts.

The four kinds of rule: ``to`` (our key has its meaning), ``via`` (several keys together make ours, see
``from_nemo_rl_derived``), ``only`` (we do one of its values always) and ``nothing`` (we have no such feature; a value that
switches it off is no loss).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe: its leaves by dotted key, and the file."""

    flat: dict[str, Any]
    path: Path

    def get(self, key: str, default: Any = None) -> Any:
        """The value at ``key``; ``default`` where it is absent or null."""
        value = self.flat.get(key)
        return default if value is None else value

    @property
    def megatron(self) -> bool:
        """Whether Megatron trains in this recipe; the alternative is DTensor."""
        return bool(self.get("policy.megatron_cfg.enabled", False))

    @property
    def stale(self) -> bool:
        """Whether generation may run ahead of training."""
        return bool(self.get("grpo.async_grpo.enabled", False))

    @property
    def validates(self) -> bool:
        """Whether the recipe names held-out data."""
        names = ("data.validation.dataset_name", "data.validation.data_path", "data.val_data_path")
        return any(self.get(name) for name in names)


@dataclass
class Said:
    """A rule's answer: values for our keys, or why there are none."""

    values: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    same: bool = False
    elsewhere: tuple[str, ...] = ()
    unknown: bool = False


Act = Callable[[Any, Recipe], Said]


def to(key: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Act:
    """Our ``key`` means the same. Null means: not set, so ours is not set either."""

    def act(value: Any, recipe: Recipe) -> Said:
        if value is None:
            return Said(text=f"not set there, and the default of {key} here", same=True)
        return Said({key: convert(value)}, note)

    return act


def via(*keys: str) -> Act:
    """Works on ours together with other keys; the lines under "added" have the result."""
    return lambda value, recipe: Said(elsewhere=keys)


def only(wanted: Any, why: str) -> Act:
    """We always do what ``wanted`` says (a value, or a function of the recipe)."""

    def act(value: Any, recipe: Recipe) -> Said:
        expected = wanted(recipe) if callable(wanted) else wanted
        return Said(text=why, same=value is None or value == expected)

    return act


def nothing(why: str, *off: Any) -> Act:
    """No such feature here; ``off`` and the usual empty values mean that the recipe does not use it either."""

    def act(value: Any, recipe: Recipe) -> Said:
        unused = value is None or value is False or value in ({}, [], "") or value in off
        return Said(text=f"{why}{', and not used there' if unused else ''}", same=unused)

    return act


def where(condition: Callable[[Recipe], bool], act: Act, otherwise: Act) -> Act:
    """``act`` where the recipe meets ``condition``."""
    return lambda value, recipe: (act if condition(recipe) else otherwise)(value, recipe)


_MEGATRON, _VLLM = "policy.megatron_cfg", "policy.generation.vllm_cfg"
_DTENSOR_READS = nothing("belongs to DTensor, which this recipe does not train with")


def _of_dtensor(act: Act) -> Act:
    return where(lambda recipe: not recipe.megatron, act, _DTENSOR_READS)


def _of_megatron(act: Act) -> Act:
    return where(
        lambda recipe: recipe.megatron, act, nothing("belongs to Megatron, which this recipe does not train with")
    )


def _validation(act: Act) -> Act:
    return where(
        lambda recipe: recipe.validates, act,
        nothing("validates on data that the recipe does not name; set data.validation and this key", 0),
    )  # fmt: skip


GRPO = [
    ("grpo.num_prompts_per_step", to("gdpo.num_prompts_per_step")),
    ("grpo.num_generations_per_prompt", to("gdpo.num_generations_per_prompt")),
    ("grpo.max_num_steps", to("gdpo.max_num_steps")),
    ("grpo.max_num_epochs", nothing("a run is counted in steps (gdpo.max_num_steps); set it to the epochs you want")),
    ("grpo.max_rollout_turns", to("rollout.turns.max_turns")),
    ("grpo.normalize_rewards", via("gdpo.estimator")),
    ("grpo.use_leave_one_out_baseline", via("gdpo.estimator")),
    ("grpo.adv_estimator.name", via("gdpo.estimator")),
    ("grpo.adv_estimator.normalize_rewards", via("gdpo.estimator")),
    ("grpo.adv_estimator.use_leave_one_out_baseline", via("gdpo.estimator")),
    ("grpo.adv_estimator.minus_baseline", via("gdpo.estimator")),
    ("grpo.adv_estimator.reward_weights", via("gdpo.rewards")),
    ("grpo.val_period", _validation(to("gdpo.val_period"))),
    ("grpo.val_at_start", _validation(to("gdpo.val_at_start"))),
    ("grpo.val_at_end", only(True, "the last step is always validated where gdpo.val_period is set")),
    ("grpo.val_start_at", nothing("validation starts with the run", 0)),
    ("grpo.max_val_samples", _validation(to("gdpo.val_prompts"))),
    ("grpo.val_batch_size", nothing("engines take all held-out prompts at once")),
    ("grpo.val_num_generations_per_prompt", _validation(to("gdpo.val_generations_per_prompt"))),
    ("grpo.stop_at_validation_*", nothing("no early stop on a metric; checkpointing.keep_best keeps the best")),
    ("grpo.overlong_filtering", to("loss_fn.mask_truncated")),
    ("grpo.advantage_clip_*", nothing("advantages are not clipped")),
    ("grpo.seed", to("run.seed")),
    ("grpo.use_dynamic_sampling", to("gdpo.dynamic_sampling.enabled", note="decided per component, not by the sum")),
    ("grpo.dynamic_sampling_max_gen_batches", to("gdpo.dynamic_sampling.max_rounds")),
    ("grpo.batch_multiplier", nothing("rounds of generation are of num_prompts_per_step", 1, 1.0)),
    ("grpo.reward_shaping.max_response_length", via("gdpo.shaping")),
    ("grpo.reward_shaping.stop_properly_penalty_coef", nothing("truncated samples: gdpo.shaping has `truncated: {value: x}`")),
    ("grpo.reward_shaping.*", via("gdpo.shaping")),
    ("grpo.reward_scaling.*", via("gdpo.shaping")),
    ("grpo.seq_logprob_error_threshold", nothing("loss_fn.off_policy masks by ratio; policy.generation.parity_limit stops the run")),
    ("grpo.invalid_tool_call_advantage", nothing("make it a reward component")),
    ("grpo.malformed_thinking_advantage", nothing("make it a reward component")),
    ("grpo.skip_reference_policy_logprobs_calculation", only(
        lambda recipe: not recipe.get("loss_fn.reference_policy_kl_penalty", 0.0),
        "the reference model exists only where loss_fn.reference_policy_kl_penalty is not 0")),
    ("grpo.calculate_advantages_on_gpu", nothing("advantages are float64 on the driver")),
    ("grpo.async_grpo.enabled", via("rollout.max_staleness")),
    ("grpo.async_grpo.max_trajectory_age_steps", via("rollout.max_staleness")),
    ("grpo.async_grpo.max_generation_failures", nothing("rollout.max_env_failure_share counts failed samples; a dead engine ends the run")),
    ("grpo.async_grpo.in_flight_weight_updates", nothing("engines change weights between batches")),
    ("grpo.async_grpo.recompute_kv_cache_after_weight_updates", only(True, "the prefix cache is dropped with every update")),
]  # fmt: skip

LOSS = [
    ("loss_fn.reference_policy_kl_penalty", where(
        lambda recipe: bool(recipe.get("loss_fn.use_kl_in_reward")), via("gdpo.shaping"), to("loss_fn.reference_policy_kl_penalty"))),
    ("loss_fn.reference_policy_kl_type", to("loss_fn.reference_policy_kl_type")),
    ("loss_fn.kl_*_clamp_value", nothing("the KL estimate is not clamped")),
    ("loss_fn.use_on_policy_kl_approximation", nothing("the KL is taken without an importance weight")),
    ("loss_fn.use_kl_in_reward", via("gdpo.shaping")),
    ("loss_fn.ratio_clip_min", to("loss_fn.ratio_clip_min")),
    ("loss_fn.ratio_clip_max", to("loss_fn.ratio_clip_max")),
    ("loss_fn.ratio_clip_c", to("loss_fn.ratio_clip_c")),
    ("loss_fn.use_cispo", via("loss_fn.type")),
    ("loss_fn.sequence_level_importance_ratios", via("loss_fn.type")),
    ("loss_fn.token_level_loss", to("loss_fn.aggregation", lambda on: "token_mean" if on else "sequence_mean")),
    ("loss_fn.disable_ppo_ratio", nothing("with one update a step the ratio is 1 in value; several updates keep it")),
    ("loss_fn.force_on_policy_ratio", only(
        lambda recipe: _updates(recipe) == 1, "with one update a step the ratio starts from the update's own log-probs")),
    ("loss_fn.use_importance_sampling_correction", where(
        lambda recipe: recipe.stale,
        only(True, "with rollout.max_staleness above 0 the ratio starts from the sampler's log-probs"), via("loss_fn.off_policy"))),
    ("loss_fn.truncated_importance_sampling_*", where(
        lambda recipe: recipe.stale, nothing("the ratio starts from the sampler's log-probs, which the clip bounds"), via("loss_fn.off_policy"))),
    ("loss_fn.positive_example_nll_weight", nothing("no likelihood term", 0, 0.0)),
]  # fmt: skip


def _updates(recipe: Recipe) -> float:
    samples = recipe.get("grpo.num_prompts_per_step", 0) * recipe.get("grpo.num_generations_per_prompt", 0)
    return samples / recipe.get("policy.train_global_batch_size", samples or 1)


_RECOMPUTE = f"{_MEGATRON}.recompute"
_LORA_NAMES = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}


def _adapted(names: list[str]) -> list[str]:
    return [ours for name in names for ours in _LORA_NAMES.get(name.rpartition(".")[2], [name])]


def _fp8(act: Act) -> Act:
    return where(lambda r: bool(r.get(f"{_MEGATRON}.fp8_cfg.enabled")), act, nothing("FP8 is off"))


def _lora(act: Act) -> Act:
    return where(lambda r: bool(r.get(f"{_MEGATRON}.peft.enabled")), act, nothing("adapters are off"))


POLICY = [
    ("policy.model_name", to("policy.model_name")),
    ("policy.tokenizer.name", where(
        lambda r: r.get("policy.tokenizer.name") == r.get("policy.model_name"),
        only(lambda r: r.get("policy.model_name"), "the model's tokenizer is the default"), to("policy.tokenizer_name"))),
    ("policy.tokenizer.*", nothing("the tokenizer's own chat template is used as it is")),
    ("policy.train_global_batch_size", to("policy.train_global_batch_size")),
    ("policy.train_micro_batch_size", via("policy.micro_batch_tokens")),
    ("policy.sequence_packing.enabled", via("policy.micro_batch_tokens")),
    ("policy.sequence_packing.train_mb_tokens", via("policy.micro_batch_tokens")),
    ("policy.dynamic_batching.enabled", via("policy.micro_batch_tokens")),
    ("policy.dynamic_batching.train_mb_tokens", via("policy.micro_batch_tokens")),
    ("policy.*.logprob_mb_tokens", nothing("log-probs use the micro-batches of training")),
    ("policy.logprob_batch_size", nothing("log-probs use the micro-batches of training")),
    ("policy.sequence_packing.algorithm", nothing("packs are filled by cost, dearest sequence first")),
    ("policy.*.sequence_length_round", nothing("packs are padded to what the layout needs and no more")),
    ("policy.generation_batch_size", nothing("vLLM batches by itself (policy.generation.vllm_cfg.max_num_seqs)")),
    ("policy.logprob_chunk_size", nothing("log-probs are always taken in chunks of bounded memory")),
    ("policy.make_sequence_length_divisible_by", nothing("derived from the layout")),
    ("policy.max_total_sequence_length", to("policy.max_total_sequence_length")),
    ("policy.precision", to("policy.precision", lambda text: {"bf16": "bfloat16", "fp32": "float32"}.get(text, text))),
    ("policy.max_grad_norm", to(f"{_MEGATRON}.optimizer.clip_grad")),
    ("policy.refit_buffer_size_gb", nothing("weights travel through one buffer of shared memory")),
    ("policy.optimizer.name", _of_dtensor(only("torch.optim.AdamW", "AdamW"))),
    ("policy.optimizer.kwargs.lr", _of_dtensor(to(f"{_MEGATRON}.optimizer.lr"))),
    ("policy.optimizer.kwargs.weight_decay", _of_dtensor(to(f"{_MEGATRON}.optimizer.weight_decay"))),
    ("policy.optimizer.kwargs.eps", _of_dtensor(to(f"{_MEGATRON}.optimizer.adam_eps"))),
    ("policy.optimizer.kwargs.betas", _of_dtensor(
        lambda value, r: Said({f"{_MEGATRON}.optimizer.adam_beta1": value[0], f"{_MEGATRON}.optimizer.adam_beta2": value[1]}))),
    ("policy.optimizer.kwargs.*", nothing("how torch runs AdamW there; Megatron runs its own")),
    ("policy.optimizer", nothing("the optimizer is that of policy.megatron_cfg")),
    ("policy.scheduler*", nothing("the schedule is that of policy.megatron_cfg.scheduler; write it there")),
    ("policy.dtensor_cfg.enabled", nothing("Megatron trains here, whatever trained there")),
    ("policy.dtensor_cfg.tensor_parallel_size", _of_dtensor(to(f"{_MEGATRON}.tensor_model_parallel_size"))),
    ("policy.dtensor_cfg.context_parallel_size", _of_dtensor(to(f"{_MEGATRON}.context_parallel_size"))),
    ("policy.dtensor_cfg.sequence_parallel", _of_dtensor(to(f"{_MEGATRON}.sequence_parallel"))),
    ("policy.dtensor_cfg.activation_checkpointing", _of_dtensor(to(_RECOMPUTE, lambda on: "full" if on else "none"))),
    ("policy.dtensor_cfg.*", nothing("a setting of DTensor; Megatron trains here")),
    ("policy.router_replay.*", nothing("routing is not replayed")),
    ("policy.draft*", nothing("no draft model")),
]  # fmt: skip

_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
_OPTIMIZER = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
_SAME_PRECISION = only(lambda r: r.get("policy.precision"), "the pipeline carries policy.precision")

MEGATRON = [
    (f"{_MEGATRON}.enabled", only(True, "Megatron trains here, whatever trained there")),
    *((f"{_MEGATRON}.{name}", _of_megatron(to(f"{_MEGATRON}.{name}"))) for name in (*_SIZES, "sequence_parallel")),
    (f"{_MEGATRON}.num_layers_in_*_pipeline_stage", nothing("layers are spread evenly over the stages")),
    (f"{_MEGATRON}.pipeline_dtype", _SAME_PRECISION),
    (f"{_MEGATRON}.activation_checkpointing", via(_RECOMPUTE)),
    (f"{_MEGATRON}.recompute_granularity", via(_RECOMPUTE)),
    (f"{_MEGATRON}.recompute_num_layers", where(
        lambda r: r.get(f"{_MEGATRON}.recompute_method") == "block", to(f"{_MEGATRON}.recompute_layers"), nothing("whole layers, all of them"))),
    (f"{_MEGATRON}.recompute_*", nothing("recompute: selective means attention, full means every layer")),
    (f"{_MEGATRON}.empty_unused_memory_level", nothing("memory stays with the allocator", 0)),
    (f"{_MEGATRON}.freeze_moe_router", only(False, "the router is trained with the rest")),
    (f"{_MEGATRON}.moe_router_load_balancing_type", only("none", "no balancing loss")),
    (f"{_MEGATRON}.moe_router_bias_update_rate", only(0.0, "no bias on the router")),
    (f"{_MEGATRON}.moe_token_dispatcher_type", only("alltoall", "tokens travel by all-to-all")),
    (f"{_MEGATRON}.moe_permute_fusion", nothing("not fused")),
    (f"{_MEGATRON}.moe_*", nothing("a setting of Megatron's mixtures that is fixed here")),
    (f"{_MEGATRON}.apply_rope_fusion", nothing("not fused; speed only")),
    (f"{_MEGATRON}.bias_activation_fusion", nothing("not fused; speed only")),
    (f"{_MEGATRON}.defer_fp32_logits", only(True, "float32 logits exist for one chunk of tokens at a time")),
    (f"{_MEGATRON}.optimizer.optimizer", only("adam", "AdamW")),
    *((f"{_MEGATRON}.optimizer.{name}", _of_megatron(to(f"{_MEGATRON}.optimizer.{name}"))) for name in _OPTIMIZER),
    (f"{_MEGATRON}.optimizer.use_distributed_optimizer", _of_megatron(to(f"{_MEGATRON}.use_distributed_optimizer"))),
    (f"{_MEGATRON}.optimizer.bf16", only(lambda r: r.get("policy.precision") == "bfloat16", "follows policy.precision")),
    (f"{_MEGATRON}.optimizer.fp16", only(False, "no float16")),
    (f"{_MEGATRON}.optimizer.params_dtype", only("float32", "main weights are float32")),
    (f"{_MEGATRON}.optimizer.sgd_momentum", nothing("AdamW has none", 0.9)),
    (f"{_MEGATRON}.optimizer.use_precision_aware_optimizer", nothing("moments are float32")),
    (f"{_MEGATRON}.optimizer.optimizer_cpu_offload", _of_megatron(to(f"{_MEGATRON}.optimizer.offload"))),
    (f"{_MEGATRON}.optimizer.optimizer_*offload*", nothing("all of the optimizer moves to the host, or nothing", 0, 0.0, 1, 1.0)),
    (f"{_MEGATRON}.scheduler.lr_decay_style", _of_megatron(to(f"{_MEGATRON}.scheduler.lr_decay_style"))),
    (f"{_MEGATRON}.scheduler.lr_decay_iters", _of_megatron(to(f"{_MEGATRON}.scheduler.lr_decay_steps"))),
    (f"{_MEGATRON}.scheduler.lr_warmup_iters", _of_megatron(to(f"{_MEGATRON}.scheduler.lr_warmup_steps"))),
    (f"{_MEGATRON}.scheduler.lr_warmup_init", only(0.0, "warm-up starts at 0")),
    (f"{_MEGATRON}.scheduler.*_weight_decay", only(
        lambda r: r.get(f"{_MEGATRON}.optimizer.weight_decay"), "weight decay is constant: that of the optimizer")),
    (f"{_MEGATRON}.scheduler.weight_decay_incr_style", only("constant", "weight decay is constant")),
    (f"{_MEGATRON}.distributed_data_parallel_config.overlap_grad_reduce", _of_megatron(to(f"{_MEGATRON}.overlap_grad_reduce"))),
    (f"{_MEGATRON}.distributed_data_parallel_config.overlap_param_gather", _of_megatron(to(f"{_MEGATRON}.overlap_param_gather"))),
    (f"{_MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32", only(True, "gradients are reduced in float32")),
    (f"{_MEGATRON}.distributed_data_parallel_config.average_in_collective", only(
        False, "ranks add and nobody divides: the loss carries the weights of the whole batch")),
    (f"{_MEGATRON}.distributed_data_parallel_config.use_custom_fsdp", only(False, "no FSDP")),
    (f"{_MEGATRON}.distributed_data_parallel_config.data_parallel_sharding_strategy", nothing("a setting of Megatron's FSDP, which is off")),
    (f"{_MEGATRON}.peft.enabled", via("policy.lora.rank")),
    (f"{_MEGATRON}.peft.dim", _lora(via("policy.lora.rank"))),
    (f"{_MEGATRON}.peft.alpha", _lora(to("policy.lora.alpha", float))),
    (f"{_MEGATRON}.peft.dropout", _lora(to("policy.lora.dropout", float))),
    (f"{_MEGATRON}.peft.target_modules", _lora(where(
        lambda r: bool(r.get(f"{_MEGATRON}.peft.target_modules")), to("policy.lora.target_modules", _adapted), nothing("all linear layers")))),
    (f"{_MEGATRON}.peft*", nothing("a setting of NeMo's adapters that is fixed here")),
    (f"{_MEGATRON}.fp8_cfg.enabled", via(f"{_MEGATRON}.fp8")),
    (f"{_MEGATRON}.fp8_cfg.fp8", _fp8(to(f"{_MEGATRON}.fp8"))),
    (f"{_MEGATRON}.fp8_cfg.fp8_recipe", _fp8(to(f"{_MEGATRON}.fp8_recipe"))),
    (f"{_MEGATRON}.fp8_cfg*", nothing("parameters stay in policy.precision; only matrix products are in 8 bits")),
    (f"{_MEGATRON}.env_vars*", nothing("set environment variables where the run is started")),
    (f"{_MEGATRON}.force_reconvert_from_hf", nothing("weights are read from the Hugging Face folder at every start")),
    (f"{_MEGATRON}.model_overrides*", nothing("the architecture is that of the model's config.json")),
    (f"{_MEGATRON}.converter_type", nothing("the model's config.json names its family")),
]  # fmt: skip

GENERATION = [
    ("policy.generation.backend", to("policy.generation.backend")),
    ("policy.generation.max_new_tokens", via("policy.generation.max_new_tokens")),
    ("policy.generation.temperature", to("policy.generation.temperature")),
    ("policy.generation.top_p", to("policy.generation.top_p")),
    ("policy.generation.top_k", to("policy.generation.top_k")),
    ("policy.generation.stop_strings", to("policy.generation.stop_strings")),
    ("policy.generation.stop_token_ids", nothing("the model's end tokens, and stop_strings")),
    ("policy.generation.val_temperature", _validation(to("gdpo.val_temperature"))),
    ("policy.generation.val_*", nothing("validation has its own temperature only (gdpo.val_temperature)")),
    (f"{_VLLM}.tensor_parallel_size", to(f"{_VLLM}.tensor_parallel_size")),
    (f"{_VLLM}.pipeline_parallel_size", only(1, "an engine has no pipeline")),
    (f"{_VLLM}.expert_parallel_size", only(1, "an engine shares no experts")),
    (f"{_VLLM}.gpu_memory_utilization", to(f"{_VLLM}.gpu_memory_utilization")),
    (f"{_VLLM}.max_model_len", only(lambda r: r.get("policy.max_total_sequence_length"), "policy.max_total_sequence_length")),
    (f"{_VLLM}.enforce_eager", to(f"{_VLLM}.enforce_eager")),
    (f"{_VLLM}.precision", only(lambda r: r.get("policy.precision"), "engines compute in policy.precision")),
    (f"{_VLLM}.async_engine", nothing("a batch goes to each engine whole")),
    (f"{_VLLM}.expose_http_server", nothing("NeMo Gym's servers are asked from here; rollout.endpoint serves agents")),
    (f"{_VLLM}.*", nothing("a setting of vLLM that is fixed here", 0, "auto")),
    ("policy.generation.vllm_kwargs.max_num_seqs", to(f"{_VLLM}.max_num_seqs")),
    ("policy.generation.vllm_kwargs*", nothing("vLLM gets no further arguments")),
    ("policy.generation.colocated.enabled", via("cluster.placement", "policy.generation.engines")),
    ("policy.generation.colocated.*", via("policy.generation.engines")),
    ("policy.generation.refit_transport", nothing("the transport follows from where the ranks are")),
    ("policy.generation.port_range_*", nothing("ports are chosen by the operating system")),
    ("policy.generation.*", nothing("a setting of another sampling engine than vLLM")),
    ("policy.*", lambda value, recipe: Said(text="not known to this translator; look it up before relying on the result", unknown=True)),
]  # fmt: skip

DATA = [
    ("data.max_input_seq_length", only(
        lambda r: r.get("policy.max_total_sequence_length"), "a prompt may fill the context but for one token")),
    ("data.shuffle", to("data.train.shuffle")),
    ("data.num_workers", nothing("rows are read once, by the driver")),
    ("data.*system_prompt_file", via("data.train.system_prompt")),
    ("data.*prompt_file", nothing("the environment brings its wording; data.train.system_prompt replaces it")),
    ("data.*processor", via("env")),
    ("data.*env_name", via("env", "data.train.environment")),
    ("data.*dataset_name", via("data.train.path", "data.validation.path")),
    ("data.*data_path", via("data.train.path", "data.validation.path")),
    ("data.*split", via("data.train.split", "data.validation.split")),
    ("data.*input_key", via("data.train.prompt_key")),
    ("data.*output_key", via("data.train.columns")),
    ("data.*", nothing("a setting of NeMo-RL's data loaders")),
]  # fmt: skip

REST = [
    ("env.*.num_workers", via("rollout.env_workers")),
    ("env.*", nothing("an option of NeMo-RL's environment; `gdpo-nemo explain env` and the environments' own options")),
    ("logger.tensorboard_enabled", to("logger.tensorboard.enabled")),
    ("logger.wandb_enabled", to("logger.wandb.enabled")),
    ("logger.wandb.project", to("logger.wandb.project")),
    ("logger.mlflow_enabled", to("logger.mlflow.enabled")),
    ("logger.mlflow.experiment_name", to("logger.mlflow.experiment")),
    ("logger.mlflow.tracking_uri", to("logger.mlflow.tracking_uri")),
    ("logger.log_dir", nothing("everything a run writes is in run.dir")),
    ("logger.num_val_samples_to_print", nothing("samples are in rollouts/ of the run folder", 0)),
    ("logger.*_enabled", nothing("the trackers are TensorBoard, W&B, MLflow and Prometheus")),
    ("logger.monitor_gpus", nothing("GPU use is not recorded")),
    ("logger.*", nothing("a setting of a tracker that is not here")),
    ("cluster.num_nodes", via("cluster.num_nodes")),
    ("cluster.gpus_per_node", via("cluster.gpus_per_node", "policy.generation.engines")),
    ("cluster.segment_size", nothing("placement does not look at NVLink domains")),
    ("cluster.master_port_range_*", nothing("ports are chosen by the operating system")),
    ("cluster.*", nothing("a setting of NeMo-RL's placement")),
    ("checkpointing.enabled", to("checkpointing.enabled")),
    ("checkpointing.checkpoint_dir", via("run.dir", "run.name")),
    ("checkpointing.metric_name", via("checkpointing.metric_name")),
    ("checkpointing.higher_is_better", only(True, "larger is better")),
    ("checkpointing.keep_top_k", to("checkpointing.keep_best")),
    ("checkpointing.save_period", to("checkpointing.save_period")),
    ("checkpointing.ft_keep_latest_k", to("checkpointing.keep_last")),
    ("checkpointing.save_optimizer", only(True, "a checkpoint holds the optimizer")),
    ("checkpointing.checkpoint_must_save_by", nothing("SIGTERM before the limit saves and stops")),
    ("checkpointing.*", nothing("a setting of NeMo-RL's checkpoints")),
    ("reward_penalties.*", nothing("make each penalty a reward component")),
    ("on_policy_distillation*", nothing("no distillation")),
    ("async_rl*", nothing("one loop; rollout.max_staleness bounds the age")),
    ("data_plane*", nothing("trajectories travel through Ray")),
]  # fmt: skip

RULES: list[tuple[str, Act]] = [*GRPO, *LOSS, *MEGATRON, *GENERATION[:-1], *POLICY, GENERATION[-1], *DATA, *REST]
"""(pattern of their key, rule), the first that fits."""
