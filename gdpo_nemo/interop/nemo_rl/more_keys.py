"""The rules of generation, data, environments, machines and logs (see ``keys.py``)."""

from __future__ import annotations

from gdpo_nemo.interop.rules import fixed, gated, idle, missing, taken_over, to, where

_VLLM = "policy.generation.vllm_cfg"
_END_TOKENS = {
    "llama": {128001, 128008, 128009},
    "qwen2": {151643, 151645},
    "qwen3": {151643, 151645},
    "qwen3_moe": {151643, 151645},
}
"""End-of-text and end-of-turn tokens, which end a completion here without being named."""


def _ends(value, recipe):
    known = _END_TOKENS.get(recipe.model.model_type, set())
    if isinstance(value, list) and set(value) <= known:
        return idle("the model's own end tokens, which end a completion here too")(value, recipe)
    return missing("the model's end tokens, and stop_strings")(value, recipe)


_SAMPLERS = {
    "in_order": taken_over("rollout.window"),
    "weight_fifo": missing("groups are trained in the order of their prompts; there those of one version as they come"),
    "ready_first": missing("no group is older than rollout.max_staleness; there one that comes late may be"),
    "windowed": missing("no group is begun that could become too old; there they are begun and thrown away"),
}


def _sampler(value, recipe):
    """What chooses the groups of a step of the single controller (``staleness_sampler.py``)."""
    if not recipe.stale:
        return fixed("in_order", "a step is generated and trained with one version")(value, recipe)
    return _SAMPLERS.get(recipe.sampler, missing("one way to choose a step's groups"))(value, recipe)


def _verifies(recipe):
    """Whether the environment ``math`` is the one in use."""
    return recipe.get("data.default.env_name", "math") in ("math", "math_default")


def _decides(recipe):
    """Return whether the processor decides which rewards there are: of the environment ``math``, or one of images."""
    processor = str(recipe.get("data.train.processor") or recipe.get("data.default.processor") or "")
    return _verifies(recipe) or processor.startswith("vlm")


def _versions(value, recipe):
    """Steps that generation may run ahead; 0 is on-policy."""
    if value and not recipe.stale:
        return idle("of another sampler")(value, recipe)
    return (taken_over("rollout.max_staleness") if recipe.stale else fixed(0, "exactly on-policy"))(value, recipe)


_HARMLESS_VARIABLES = (
    "PYTORCH_*", "CUDA_*", "TORCH_CUDA_ARCH_LIST", "NCCL_*", "NRL_REFIT_*", "RAY_*", "VLLM_USE_RAY_*", "VLLM_LOGGING_*",
    "VLLM_CACHE_ROOT", "HF_*", "OMP_NUM_THREADS",
)  # fmt: skip
"""Environment variables of memory, transport, caches and logs."""


def variable_rules(section):
    """Return the rules of the environment variables that a section sets for its workers.

    Kernels that a variable chooses (VLLM_USE_FLASHINFER_MOE_FP16, NVTE_FP8_BLOCK_SCALING_FP32_SCALES) round in their
    own way, so that a variable which is not known to be harmless counts.
    """
    chosen = missing("chooses how it is computed; set the variable where the run starts")
    of_experts = where(
        lambda recipe: recipe.model.mixture, chosen, idle("concerns experts, which this model does not have")
    )
    return [
        *((f"{section}.env_vars.{name}", idle("a matter of speed, memory or logs")) for name in _HARMLESS_VARIABLES),
        (f"{section}.env_vars.*_MOE_*", of_experts),
        (f"{section}.env_vars.*", chosen),
        (f"{section}.env_vars", idle("no variables")),
    ]


GENERATION = [
    *variable_rules(_VLLM),
    ("policy.generation.backend", to("policy.generation.backend")),
    ("policy.generation.max_new_tokens", taken_over("policy.generation.max_new_tokens")),
    ("policy.generation.temperature", to("policy.generation.temperature")),
    ("policy.generation.top_p", to("policy.generation.top_p")),
    ("policy.generation.top_k", to("policy.generation.top_k")),
    ("policy.generation.stop_strings", to("policy.generation.stop_strings")),
    ("policy.generation.stop_token_ids", _ends),
    ("policy.generation.val_temperature", where(
        lambda r: r.validates, taken_over("gdpo.val_temperature"), idle("the recipe has no held-out data"))),
    ("policy.generation.val_top_p", missing("validation samples from the whole distribution", 1.0)),
    ("policy.generation.val_top_k", missing("validation samples from the whole distribution", -1)),
    (f"{_VLLM}.tensor_parallel_size", to(f"{_VLLM}.tensor_parallel_size")),
    (f"{_VLLM}.pipeline_parallel_size", missing("an engine has no pipeline, so it needs more memory on each GPU", 1)),
    (f"{_VLLM}.expert_parallel_size", idle("an engine shards its experts as it shards other matrices")),
    (f"{_VLLM}.gpu_memory_utilization", to(f"{_VLLM}.gpu_memory_utilization")),
    (f"{_VLLM}.max_model_len", fixed(
        lambda r: r.get("policy.max_total_sequence_length"), "policy.max_total_sequence_length is the engine's, too")),
    (f"{_VLLM}.enforce_eager", to(f"{_VLLM}.enforce_eager")),
    (f"{_VLLM}.precision", fixed(lambda r: r.get("policy.precision"), "engines compute in policy.precision")),
    (f"{_VLLM}.kv_cache_dtype", missing("the cache is in policy.precision", "auto", "bfloat16")),
    (f"{_VLLM}.logprobs_mode", fixed("processed_logprobs", "log-probs are those of the distribution that is sampled")),
    (f"{_VLLM}.load_format", idle("engines get their weights from the policy")),
    (f"{_VLLM}.*", idle("how the engine computes, loads or shows")),
    ("policy.generation.vllm_kwargs.max_num_seqs", to(f"{_VLLM}.max_num_seqs")),
    ("policy.generation.vllm_kwargs.speculative_config*", idle("speculation changes the speed, not the distribution")),
    ("policy.generation.vllm_kwargs.hf_overrides*", missing("the architecture is that of the model's config.json")),
    ("policy.generation.vllm_kwargs.quantization", missing("engines compute in policy.precision")),
    ("policy.generation.vllm_kwargs*", idle("how the engine computes")),
    ("policy.generation.colocated.enabled", idle("which GPUs sample: cluster.placement and policy.generation.engines")),
    ("policy.generation.colocated.*", idle("which GPUs sample: policy.generation.engines")),
    ("policy.generation.quant_cfg", missing("engines compute in policy.precision")),
    ("policy.generation.real_quant", missing("engines compute in policy.precision")),
    ("policy.generation.*", idle("a setting of another sampling engine, of ports or of weight transport")),
]  # fmt: skip

DATA = [
    ("data.max_input_seq_length", fixed(
        lambda r: r.get("policy.max_total_sequence_length"), "prompts may fill the context here; there longer ones "
                                                             "than this are masked")),
    ("data.shuffle", to("data.train.shuffle")),
    ("data.*system_prompt_file", taken_over("data.train.system_prompt")),
    ("data.*prompt_file", taken_over("data.train.prompt_template")),
    ("data.*processor", where(
        _decides, taken_over("env"), idle("how rows become messages; the environment and the columns say it here"))),
    ("data.*env_name", taken_over("env")),
    ("data.validation.dataset_name", taken_over("data.validation.path")),
    ("data.validation.data_path", taken_over("data.validation.path")),
    ("data.validation.split", taken_over("data.validation.split")),
    ("data.default.dataset_name", where(
        lambda r: r.get("data.train.data_path"), idle("the rows of data.train.data_path"),
        taken_over("data.train.path"))),
    ("data.*dataset_name", taken_over("data.train.path")),
    ("data.*data_path", taken_over("data.train.path")),
    ("data.train.split_validation_size", where(
        lambda r: r.held_out, taken_over("data.validation.split"), idle("ignored by the class of this data set"))),
    ("data.train.seed", idle("of the random cut into training and held-out rows; here the last rows are held out")),
    ("data.*.split_validation_size", idle("the section has no rows of its own to cut")),
    ("data.*.repeat", taken_over("gdpo.val_generations_per_prompt")),
    ("data.*split", taken_over("data.train.split")),
    ("data.*subset", taken_over("data.train.path")),
    ("data.*input_key", taken_over("data.train.prompt_key")),
    ("data.*output_key", taken_over("data.train.columns")),
    ("data.*extract_answer", fixed(True, "the part behind ####")),
    ("data.*allowed_problem_types", missing("rows are not filtered")),
    ("data.custom_dataloader", missing("no data loader of one's own; rollout.function makes trajectories")),
    ("data.num_prompts_per_dataloader", missing("one loader")),
    ("data.use_multiple_dataloader", missing("one loader")),
    ("data.train", taken_over("data.train.path")),
    ("data.validation", taken_over("data.validation.path")),
    ("data.*", idle("how NeMo-RL loads data")),
]  # fmt: skip

REST = [
    ("env.*.num_workers", idle("rollout.env_workers verify")),
    ("env.*.math_verify_impl", where(
        _verifies, fixed("hf_math_verify", "math-verify compares with the gold answer"),
        idle("of an environment that compares texts, or that the recipe does not use"))),
    ("env.*.stop_strings", missing("policy.generation.stop_strings are those of every prompt")),
    ("env.should_mask_flagged_samples", idle("a failed sample is masked")),
    ("env.should_log_nemo_gym_responses", idle("rollouts/ of the run folder has every sample")),
    ("env.should_use_nemo_gym", taken_over("env")),
    ("env.nemo_gym*", idle("NeMo Gym's servers have their own configuration, and are started beside the run")),
    ("env.math.*", where(_verifies, missing("an option of NeMo-RL's environment"), idle("of an environment that the "
                                                                                        "recipe does not use"))),
    ("env.*", idle("of an environment that the recipe does not use, or that is named as missing")),
    ("env", taken_over("env")),
    ("logger.tensorboard_enabled", to("logger.tensorboard.enabled")),
    ("logger.wandb_enabled", to("logger.wandb.enabled")),
    ("logger.wandb.project", gated("logger.wandb_enabled", to("logger.wandb.project"))),
    ("logger.mlflow_enabled", to("logger.mlflow.enabled")),
    ("logger.mlflow.experiment_name", gated("logger.mlflow_enabled", to("logger.mlflow.experiment"))),
    ("logger.mlflow.tracking_uri", gated("logger.mlflow_enabled", to("logger.mlflow.tracking_uri"))),
    ("logger.*", idle("a matter of logs; everything a run writes is in run.dir")),
    ("cluster.*", idle("which machines and ports; cluster.num_nodes and gpus_per_node are under added")),
    ("checkpointing.enabled", to("checkpointing.enabled")),
    ("checkpointing.metric_name", idle("checkpointing.metric_name names the component instead of the sum")),
    ("checkpointing.higher_is_better", fixed(True, "larger is better")),
    ("checkpointing.keep_top_k", gated("checkpointing.metric_name", to("checkpointing.keep_best"))),
    ("checkpointing.save_period", to("checkpointing.save_period")),
    ("checkpointing.ft_keep_latest_k", to("checkpointing.keep_last")),
    ("checkpointing.save_optimizer", idle("a checkpoint always holds the optimizer")),
    ("checkpointing.pretrained_checkpoint", missing("the start is policy.model_name")),
    ("checkpointing.*", idle("when and how NeMo-RL saves; SIGTERM before a time limit saves and stops here")),
    ("reward_penalties.token_ids*", idle("of the penalties")),
    ("reward_penalties.*", missing("make each penalty a reward component")),
    ("on_policy_distillation.*", gated("on_policy_distillation.enabled", missing("no distillation"))),
    ("on_policy_distillation", missing("no distillation")),
    ("async_rl.sampler.max_*_versions", _versions),
    ("async_rl.sampler.name", _sampler),
    ("async_rl.sampler.sample_freshest_first", missing("groups are trained oldest first")),
    ("async_rl.sampler*", missing("an option of a sampler of the recipe's own")),
    ("async_rl.recompute_kv_cache_after_weight_updates", where(
        lambda r: r.stale, taken_over("rollout.kv"), idle("no sample is under way when weights change"))),
    ("async_rl.min_groups_for_streaming_train", idle("a step's gradient is gathered when all of its groups are there, "
                                                     "not as they arrive")),
    ("async_rl*", idle("limits and watchdogs of another scheduler")),
    ("data_plane*", idle("how trajectories travel between processes")),
    ("_teachers*", missing("no distillation")),
    ("sif_dir", idle("a path that other keys use")),
]  # fmt: skip
