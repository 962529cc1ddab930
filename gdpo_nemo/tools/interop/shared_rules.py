"""Translation rules for keys that have the same name and meaning in TRL's and axolotl's configs.

Both programs train with transformers' trainer, and axolotl passes its section ``trl`` to TRL.
"""

from __future__ import annotations

from gdpo_nemo.tools.interop.translation import Act, combined, fixed, idle, missing, to

OPTIMIZER = "policy.megatron_cfg.optimizer"
BATCH = ("gdpo.num_prompts_per_step", "policy.train_global_batch_size")
FILES = idle("affects only files and logs; all output of a run is in run.dir")

TRAINING: list[tuple[str, Act]] = [
    ("output_dir", combined("run.dir")),
    ("seed", to("run.seed")),
    ("gradient_accumulation_steps", combined(*BATCH)),
    ("max_steps", combined("gdpo.max_num_steps")),
    ("learning_rate", to(f"{OPTIMIZER}.lr", float)),
    ("weight_decay", to(f"{OPTIMIZER}.weight_decay", float)),
    ("adam_beta1", to(f"{OPTIMIZER}.adam_beta1", float)),
    ("adam_beta2", to(f"{OPTIMIZER}.adam_beta2", float)),
    ("adam_epsilon", to(f"{OPTIMIZER}.adam_eps", float)),
    ("max_grad_norm", to(f"{OPTIMIZER}.clip_grad", float)),
    ("warmup_*", combined("policy.megatron_cfg.scheduler.lr_warmup_steps")),
    ("bf16", combined("policy.precision")),
    ("neftune_noise_alpha", missing("embedding noise is not supported")),
    ("trust_remote_code", missing("models are implemented in Megatron; remote model code is not executed")),
]
"""Rules for fields of transformers' ``TrainingArguments``."""

GRPO: list[tuple[str, Act]] = [
    ("generation_batch_size", combined(*BATCH)),
    ("repetition_penalty", fixed(1.0, "a repetition penalty is not supported")),
    ("reward_weights", combined("gdpo.rewards")),
    ("multi_objective_aggregation scale_rewards", combined("gdpo.estimator")),
    ("importance_sampling_level", combined("loss_fn.type")),
    ("epsilon", combined("loss_fn.ratio_clip_min")),
    ("epsilon_high", combined("loss_fn.ratio_clip_max")),
    ("off_policy_mask_threshold", to("loss_fn.off_policy.sequence_mask_threshold")),
    ("vllm_importance_sampling_*", combined("loss_fn.off_policy")),
    ("use_bias_correction_kl", combined("loss_fn.reference_policy_kl_gradient")),
    (
        "num_iterations",
        fixed(1, "set gdpo.num_iterations instead, which multiplies the updates per step, not the number of steps"),
    ),
    ("use_vllm", combined("cluster.placement")),
    ("vllm_guided_decoding_regex", missing("structured output is not supported")),
]
"""Rules for fields of TRL's ``GRPOConfig``."""
