"""Translation rules for generation, data, environments, machines and logs (see ``keys.py``)."""

from __future__ import annotations

from typing import Any

from gdpo_nemo.tools.interop.nemo_rl.datasets import ENVIRONMENTS, env_name, reads
from gdpo_nemo.tools.interop.nemo_rl.gym import uses_gym
from gdpo_nemo.tools.interop.nemo_rl.recipe import Recipe
from gdpo_nemo.tools.interop.translation import (
    Act,
    RuleResult,
    expanded,
    fixed,
    gated,
    idle,
    missing,
    required,
    to,
    where,
)

_VLLM = "policy.generation.vllm_cfg"
_END_TOKENS = {
    "llama": {128001, 128008, 128009},
    "qwen2": {151643, 151645},
    "qwen3": {151643, 151645},
    "qwen3_moe": {151643, 151645},
    "qwen2_5_vl": {151643, 151645},
    "qwen3_vl": {151643, 151645},
}
"""Model type -> end-of-text and end-of-turn tokens, which always end a completion."""


def _ends(value: Any, recipe: Recipe) -> RuleResult:
    known = _END_TOKENS.get(recipe.model.model_type, set())
    if isinstance(value, list) and set(value) <= known:
        return idle("the model's end tokens always end a completion")(value, recipe)
    return missing("only the model's end tokens and stop_strings end a completion")(value, recipe)


_SAMPLERS = {
    "in_order": required("rollout.window"),
    "weight_fifo": missing(
        "groups are trained in prompt order; NeMo-RL trains groups of the same version in completion order"
    ),
    "ready_first": missing(
        "no group is older than rollout.max_staleness; in NeMo-RL a group that is completed late may be older"
    ),
    "windowed": missing("groups that could become too old are not sampled; NeMo-RL samples and later discards them"),
}


def _sampler(value: Any, recipe: Recipe) -> RuleResult:
    """Translate the single controller's sampler, which selects the groups of a step (``staleness_sampler.py``)."""
    if not recipe.stale:
        return fixed("in_order", "each step is generated and trained with one version")(value, recipe)
    return _SAMPLERS.get(recipe.sampler, missing("groups are always trained in prompt order"))(value, recipe)


def _verifies(recipe: Recipe) -> bool:
    """Return whether the environment ``math`` verifies the recipe's samples."""
    return env_name(recipe) in ("math", "math_default")


def _decides(recipe: Recipe) -> bool:
    """Return whether the data processor affects the translation, which requires the environment ``math`` or images."""
    return _verifies(recipe) or str(recipe.get("data.train.processor", "")).startswith("vlm")


def _versions(value: Any, recipe: Recipe) -> RuleResult:
    """Translate the number of steps that generation may run ahead of training. 0 means on-policy."""
    if value and not recipe.stale:
        return idle("does not apply to this sampler")(value, recipe)
    return (required("rollout.max_staleness") if recipe.stale else fixed(0, "on-policy"))(value, recipe)


_HARMLESS_VARIABLES = (
    "PYTORCH_* CUDA_* TORCH_CUDA_ARCH_LIST NCCL_* NRL_REFIT_* RAY_* VLLM_USE_RAY_* VLLM_LOGGING_* VLLM_CACHE_ROOT HF_* "
    "OMP_NUM_THREADS"
)
"""Environment variables that affect only memory, transport, caches and logs."""


def variable_rules(section: str) -> list[tuple[str, Act]]:
    """Return the rules for the environment variables that a section sets for its workers.

    Some variables select kernels that round differently, for example VLLM_USE_FLASHINFER_MOE_FP16. A variable is
    therefore reported as a difference unless it is known to be harmless.
    """
    selects_kernels = missing("may select kernels; set the variable in the environment of the run")
    of_experts = where(
        lambda recipe: recipe.model.mixture,
        selects_kernels,
        idle("applies only to MoE models, and this model is dense"),
    )
    return expanded([
        (_HARMLESS_VARIABLES, idle("affects only speed, memory or logs")),
        ("*_MOE_*", of_experts),
        ("*", selects_kernels),
    ], f"{section}.env_vars.") + [(f"{section}.env_vars", idle("no environment variables are set"))]  # fmt: skip


GENERATION = variable_rules(_VLLM) + expanded([
    ("vllm_cfg.http_server_serving_chat_kwargs.tool_parser", where(
        uses_gym, to("policy.generation.tool_call_parser"), idle("the recipe does not sample over HTTP"))),
    ("vllm_cfg.http_server_serving_chat_kwargs.reasoning_parser", where(
        uses_gym, to("policy.generation.reasoning_parser"), idle("the recipe does not sample over HTTP"))),
    ("backend", to("policy.generation.backend")),
    ("max_new_tokens", required("policy.generation.max_new_tokens")),
    ("temperature", to("policy.generation.temperature")),
    ("top_p", to("policy.generation.top_p")),
    ("top_k", to("policy.generation.top_k")),
    ("stop_strings", to("policy.generation.stop_strings")),
    ("stop_token_ids", _ends),
    *((name, where(lambda r: r.validates, required(f"gdpo.{name}"), idle("the recipe has no held-out data")))
      for name in ("val_temperature", "val_top_p", "val_top_k")),
    ("vllm_cfg.tensor_parallel_size", to(f"{_VLLM}.tensor_parallel_size")),
    ("vllm_cfg.pipeline_parallel_size", missing(
        "engines do not use pipeline parallelism, so each GPU needs more memory", 1)),
    ("vllm_cfg.expert_parallel_size", idle("engines shard experts with tensor parallelism, like other matrices")),
    ("vllm_cfg.gpu_memory_utilization", to(f"{_VLLM}.gpu_memory_utilization")),
    ("vllm_cfg.max_model_len", fixed(
        lambda r: r.get("policy.max_total_sequence_length"),
            "policy.max_total_sequence_length also applies to engines")),
    ("vllm_cfg.enforce_eager", to(f"{_VLLM}.enforce_eager")),
    ("vllm_cfg.precision", fixed(lambda r: r.get("policy.precision"), "engines use policy.precision")),
    ("vllm_cfg.kv_cache_dtype", missing("the KV cache is in policy.precision", "auto", "bfloat16")),
    ("vllm_cfg.logprobs_mode", fixed("processed_logprobs", "log-probs are always those of the sampling distribution")),
    ("vllm_cfg.load_format", idle("engines receive their weights from the policy")),
    ("vllm_cfg.http_server_serving_chat_kwargs.default_chat_template_kwargs*", where(
        uses_gym, required("data.train.chat_template_kwargs"), idle("the recipe does not sample over HTTP"))),
    ("vllm_cfg.async_engine vllm_cfg.cap_max_tokens_to_context vllm_cfg.enable_* vllm_cfg.enforce_monotonicity "
     "vllm_cfg.expose_http_server vllm_cfg.http_* vllm_cfg.limit_mm_per_prompt* vllm_cfg.max_num_seqs "
     "vllm_cfg.*_parser_plugin vllm_cfg.reset_encoder_cache_after_weight_update vllm_cfg.skip_tokenizer_init "
     "vllm_cfg.use_deep_gemm vllm_cfg.use_tqdm vllm_cfg.video* vllm_cfg.vllm_metrics_logger_interval "
     "vllm_cfg.zmq_refit_server_port vllm_cfg.dbo* vllm_cfg.*_pre_init_* vllm_cfg.distributed_executor_backend",
     idle("affects only speed, weight loading or logs of engines")),
    ("vllm_cfg.is_mx vllm_cfg.num_*_layers_in_bf16 vllm_cfg.quantization_ignored_layer_kws",
     where(lambda r: r.get(f"{_VLLM}.precision") == "fp8", idle("applies to FP8, which is reported by precision"),
         idle("applies only to FP8, which the engines do not use"))),
    ("vllm_kwargs.max_num_seqs", to(f"{_VLLM}.max_num_seqs")),
    ("vllm_kwargs.speculative_config*", idle("speculative decoding changes only the speed, not the distribution")),
    ("vllm_kwargs.hf_overrides*", missing("the model's config.json defines the architecture")),
    ("vllm_kwargs.quantization", missing("engines use policy.precision")),
    ("vllm_kwargs*", idle("affects only how engines run the model")),
    ("colocated.enabled", idle("cluster.placement and policy.generation.engines select the GPUs for sampling")),
    ("colocated.*", idle("policy.generation.engines selects the GPUs for sampling")),
    ("quant_cfg real_quant", missing("engines use policy.precision")),
    ("bad_words", missing("all tokens can be sampled")),
    ("mcore_generation_config* dynamo_cfg* sglang_* trtllm_* refit_* port_range_* real_quant_* use_async_rollouts",
     idle("configures another engine, ports or weight transport")),
], "policy.generation.")  # fmt: skip

_NOT_READ = idle("NeMo-RL's release or dataset class does not read this key")


def _flat(act: Act, *names: str) -> list[tuple[str, Act]]:
    """Return the rules for keys of the flat section ``data`` before 0.6."""

    def rule(key: str) -> tuple[str, Act]:
        return key, where(lambda recipe: recipe.reads(key), act, _NOT_READ)

    return [rule(f"data.{name}") for name in names]


def _of_dataset(name: str, act: Act) -> list[tuple[str, Act]]:
    """Return the rules for a key of a dataset's section, which the dataset's class may ignore."""

    def rule(section: str, *splits: str) -> tuple[str, Act]:
        return f"data.{section}.{name}", where(lambda r: any(reads(r, split, name) for split in splits), act, _NOT_READ)

    return [rule("train", "train"), rule("validation", "validation"), rule("default", "train", "validation")]


def _answer_column(value: Any, recipe: Recipe) -> RuleResult:
    if value == "answer":
        return fixed("answer", "the reference answer is in the column answer")(value, recipe)
    return required("data.train.columns")(value, recipe)


def _of_environment(name: str, act: Act) -> Act:
    unused = idle("applies to an environment that the recipe does not use")
    return where(lambda recipe: env_name(recipe) == name, act, unused)


_VERIFIED = fixed("hf_math_verify", "math-verify compares answers with the reference answer")


DATA = expanded([
    *_flat(required("data.train.path"), "dataset_name", "train_data_path", "train_jsonl_fpath"),
    *_flat(required("data.validation.path"), "val_data_path", "validation_jsonl_fpath"),
    *_flat(required("data.train.split"), "split", "train_split"),
    *_flat(required("data.validation.split"), "val_split"),
    *_flat(required("data.train.prompt_key"), "input_key"),
    *_flat(_answer_column, "output_key"),
    *_flat(required("data.train.prompt_template"), "prompt_file"),
    ("data.system_prompt_file", idle("before 0.6, math_hf_data_processor does not use it")),
    ("data.max_input_seq_length", fixed(
        lambda r: r.get("policy.max_total_sequence_length"),
            "prompts may fill the context; NeMo-RL masks longer prompts")),
    ("data.shuffle", to("data.train.shuffle")),
    ("data.*system_prompt_file", required("data.train.system_prompt")),
    ("data.*prompt_file", required("data.train.prompt_template")),
    ("data.*processor", where(
        _decides, required("env"), idle(
            "converts rows to messages; data.<split>.columns and the environment replace this"))),
    ("data.*env_name", required("env")),
    ("data.validation.dataset_name data.validation.data_path", required("data.validation.path")),
    *_of_dataset("split", required("data.train.split")),
    ("data.default.dataset_name", where(
        lambda r: r.get("data.train.data_path"), idle("data.train.data_path provides the rows"),
        required("data.train.path"))),
    ("data.*dataset_name data.*data_path", required("data.train.path")),
    ("data.train.split_validation_size data.default.split_validation_size",
     where(lambda r: r.held_out, required("data.validation.split"), _NOT_READ)),
    ("data.train.seed", idle("applies to NeMo-RL's random split of rows; this project holds out the last rows")),
    ("data.*.split_validation_size", idle("no effect: this section does not define rows to split")),
    *_of_dataset("repeat", required("gdpo.val_generations_per_prompt")),
    *_of_dataset("subset", required("data.train.path")),
    *_of_dataset("input_key", required("data.train.prompt_key")),
    *_of_dataset("output_key", _answer_column),
    ("data.*extract_answer", fixed(True, "the reference answer is always the text after ####")),
    ("data.*allowed_problem_types", missing("rows are not filtered by problem type")),
    ("data.custom_dataloader", missing(
        "custom data loaders are not supported; use rollout.function to create trajectories")),
    ("data.num_prompts_per_dataloader data.use_multiple_dataloader", missing("there is only one data loader")),
    ("data.train", required("data.train.path")),
    ("data.validation", required("data.validation.path")),
    ("data.default", idle("the section is empty")),
    ("data.num_workers data.*download_dir data.agent_name data.add_system_prompt data.*.video_*",
     idle("configures NeMo-RL's data loading")),
])  # fmt: skip

REST = expanded([
    ("env.*.num_workers", idle("rollout.env_workers sets the number of verification workers")),
    *((f"env.{name}.math_verify_impl", _of_environment(name, _VERIFIED)) for name in ("math", "math_default")),
    ("env.*.math_verify_impl", idle("applies only to environments that are not used or that compare text")),
    ("env.*.stop_strings", missing("policy.generation.stop_strings apply to all prompts")),
    ("env.should_mask_flagged_samples", idle("samples that fail in the environment are always masked")),
    ("env.should_log_nemo_gym_responses", idle("all samples are written to rollouts/ in the run folder")),
    ("env.should_use_nemo_gym", required("env")),
    ("env.nemo_gym.port_range_*", idle("the translated config contains the ports")),
    ("env.nemo_gym.is_trajectory_collection", fixed(False, "samples are trained")),
    ("env.nemo_gym.num_gpu_nodes", idle("NeMo Gym's servers are started separately")),
    ("env.nemo_gym.uv_*_dir", idle("gdpo-nemo gym up has the option --venvs")),
    ("env.nemo_gym.skip_venv_if_present", idle("gdpo-nemo gym up reuses environments")),
    ("env.nemo_gym.*chat_template_kwargs*", required("data.train.chat_template_kwargs")),
    ("env.nemo_gym*", where(uses_gym, required("env"), idle("the recipe does not use NeMo Gym"))),
    *((f"env.{name}.reward_functions", _of_environment(name, required("gdpo.rewards"))) for name in ENVIRONMENTS),
    *((f"env.{name}.*", _of_environment(name, missing("options of this environment are not supported")))
      for name in ENVIRONMENTS),
    ("env.*.* env", required("env")),
    ("logger.tensorboard_enabled", to("logger.tensorboard.enabled")),
    ("logger.wandb_enabled", to("logger.wandb.enabled")),
    ("logger.wandb.project", gated("logger.wandb_enabled", to("logger.wandb.project"))),
    ("logger.mlflow_enabled", to("logger.mlflow.enabled")),
    ("logger.mlflow.experiment_name", gated("logger.mlflow_enabled", to("logger.mlflow.experiment"))),
    ("logger.mlflow.tracking_uri", gated("logger.mlflow_enabled", to("logger.mlflow.tracking_uri"))),
    ("logger.*", idle("affects only logs; all output of a run is in run.dir")),
    ("cluster.*", idle("selects machines and ports; the report lists cluster.num_nodes and gpus_per_node under added")),
    ("checkpointing.enabled", to("checkpointing.enabled")),
    ("checkpointing.metric_name", idle("checkpoints are ranked by a reward component instead of the sum of rewards")),
    ("checkpointing.higher_is_better", fixed(True, "larger is better")),
    ("checkpointing.keep_top_k", gated("checkpointing.metric_name", to("checkpointing.keep_best"))),
    ("checkpointing.save_period", to("checkpointing.save_period")),
    ("checkpointing.ft_keep_latest_k", to("checkpointing.keep_last")),
    ("checkpointing.save_optimizer", idle("checkpoints always contain the optimizer")),
    ("checkpointing.pretrained_checkpoint", missing("training starts from policy.model_name")),
    ("checkpointing.checkpoint_dir", required("run.dir")),
    ("checkpointing.checkpoint_must_save_by checkpointing.ft_save_period checkpointing.model_save_format "
     "checkpointing.save_consolidated",
     idle("controls when and how NeMo-RL saves")),
    ("on_policy_distillation.*", gated(
        "on_policy_distillation.enabled", missing("distillation is not supported in a GRPO run"))),
    ("on_policy_distillation", missing("distillation is not supported in a GRPO run")),
    ("async_rl.sampler.max_*_versions", _versions),
    ("async_rl.sampler.name", _sampler),
    ("async_rl.sampler.sample_freshest_first", missing("the oldest groups are trained first")),
    ("async_rl.sampler*", missing("options of a custom sampler are not supported")),
    ("async_rl.recompute_kv_cache_after_weight_updates", where(
        lambda r: r.stale, required("rollout.kv"), idle("no samples are in flight during a weight update"))),
    ("async_rl.min_groups_for_streaming_train", idle(
        "a step's gradient is computed when all groups are complete, not as they arrive")),
    ("async_rl*", idle("configures NeMo-RL's scheduler")),
    ("data_plane*", idle("configures the transport of trajectories")),
    ("_teachers*", missing("distillation is not supported in a GRPO run")),
    ("sif_dir", idle("a path that other keys refer to")),
])  # fmt: skip
