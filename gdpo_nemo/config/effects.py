"""Keys that were changed but could not matter in the chosen mode.

Such a key is a misunderstanding, so it is refused: whoever sets ``kv_cache_memory_bytes`` on a GPU believes it does
something. A key counts as changed when it differs from the default of the schema, whoever set it; so the saved, fully
resolved config of a run is itself a valid config. Settings of a feature that is on by default and was switched off for
this run (validation, checkpoints) are only noted: turning a feature off should not take five overrides.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any, Callable, Iterator, Mapping, NamedTuple

from gdpo_nemo.algorithms.estimators import ESTIMATORS
from gdpo_nemo.algorithms.loss_settings import LossSettings
from gdpo_nemo.algorithms.losses import LOSSES
from gdpo_nemo.algorithms.offpolicy import CORRECTIONS
from gdpo_nemo.algorithms.own_functions import correction_entry, loss_entry
from gdpo_nemo.algorithms.ppo_settings import PPOSettings
from gdpo_nemo.algorithms.preference_settings import PreferenceSettings
from gdpo_nemo.config.algorithm_choice import (
    ALGORITHMS,
    DISTILLATION,
    PPO,
    PREFERENCES,
    resolved_loss,
    rows_of,
    samples,
)
from gdpo_nemo.config.example_types import is_transform
from gdpo_nemo.config.rollout_bounds import steps_ahead
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.transports import chosen_transport, declared


class Effect(NamedTuple):
    """``keys`` matter only where ``when`` holds; otherwise ``why`` completes the sentence 'has no effect ...'."""

    keys: tuple[str, ...]
    when: Callable[[Config], bool]
    why: str


def _gpu(config: Config) -> bool:
    return config.cluster.gpus_per_node > 0


def _validates(config: Config) -> bool:
    return config.gdpo.val_period > 0 or config.gdpo.val_at_start


def _has_reference(config: Config) -> bool:
    kind = config.algorithm.type
    if kind in PREFERENCES:
        return config.preference.needs_reference(kind)
    own = kind not in ALGORITHMS  # which may ask for it or not
    return own or config.loss_fn.reference_policy_kl_penalty > 0 or config.gdpo.kl_in_reward is not None


def _rate_changes(config: Config) -> bool:
    """Return whether the learning rate differs between updates."""
    schedule = config.policy.megatron_cfg.scheduler
    return schedule.lr_decay_style != "constant" or schedule.lr_warmup_steps > 0


def _standardises(config: Config) -> bool:
    batch_norm = config.gdpo.batch_norm
    return ESTIMATORS[config.gdpo.estimator].batch_norm if batch_norm is None else batch_norm


def _reads_file(split: str, config: Config) -> bool:
    """Whether the split's rows come from a file; true, too, where there is no such split."""
    dataset = getattr(config.data, split)
    return dataset is None or dataset.path is not None


def _asks_rows(split: str, config: Config) -> bool:
    """Whether the split's rows are prompts, and not texts with anchors; true, too, where there is no such split."""
    return value_of(config, f"data.{split}.strided") is None


def _reads_type(split: str, config: Config) -> bool:
    """Whether the split's type says something: the form of answers, or a transform of rows that are read."""
    how = value_of(config, f"data.{split}.type")
    return _reads_file(split, config) if is_transform(how) else rows_of(config) is not None


_VLLM = "policy.generation.vllm_cfg"
_MEGATRON = "policy.megatron_cfg"
_OFF_POLICY = "loss_fn.off_policy"
_SECTIONS = ("off_policy", "aggregation")
"""Of `loss_fn`: what supervised training reads, or what holds further keys."""


def _loss_reads(config: Config) -> tuple[str, ...]:
    """Keys of `loss_fn` that the loss reads. The KL penalty and the entropy bonus are weighed by the aggregation."""
    loss = config.loss_fn
    weighed = loss.reference_policy_kl_penalty or loss.entropy_bonus or loss.use_adaptive_entropy
    beside = ("aggregation",) if weighed else ()
    return (*loss_entry(loss.type).reads, *beside)


def _read_by_some(
    section: str, registry: Mapping[str, Any], reads: Callable[[Config], tuple[str, ...]]
) -> Iterator[Effect]:
    """The keys of a section that some entries of a registry read and others do not."""
    choice = {"loss_fn": "type"}.get(section, "mode")
    for key in dict.fromkeys(key for entry in registry.values() for key in entry.reads):
        readers = " or ".join(name for name, entry in registry.items() if key in entry.reads)
        why = f"unless {section}.{choice} is {readers}, or a function of your own that reads it"
        yield Effect((f"{section}.{key}",), partial(_is_read, key, reads), why)


def _is_read(key: str, reads: Callable[[Config], tuple[str, ...]], config: Config) -> bool:
    return key in reads(config)


EFFECTS = (
    Effect(
        (f"{_VLLM}.gpu_memory_utilization", f"{_VLLM}.enforce_eager", f"{_VLLM}.head_dtype"),
        _gpu,
        "on CPU (cluster.gpus_per_node is 0)",
    ),
    Effect(
        (f"{_VLLM}.head_dtype",),
        lambda config: config.policy.precision == "bfloat16",
        "with policy.precision float32, in which everything is",
    ),
    Effect(("policy.offload_reference",), _gpu, "on CPU (cluster.gpus_per_node is 0)"),
    Effect(
        ("policy.offload_reference",),
        lambda c: not c.policy.lora.rank,
        "with policy.lora, under which the model without its adapters is the reference",
    ),
    Effect((f"{_VLLM}.kv_cache_memory_bytes",), lambda c: not _gpu(c), "on GPUs, where gpu_memory_utilization decides"),
    Effect(
        (
            "gdpo.estimator",
            "gdpo.preset",
            "gdpo.shaping",
            "gdpo.batch_norm",
            "gdpo.kl_in_reward",
            "gdpo.credit",
            "gdpo.num_iterations",
            "gdpo.dynamic_sampling.enabled",
            "rollout.max_staleness",
            "rollout.group_timeout_s",
            "rollout.replay_buffer.groups",
            "rollout.function",
            "rollout.save_trainer_logprobs",
            "rollout.save_entropies",
            "rollout.save_groups",
            "rollout.endpoint.enabled",
        ),
        samples,
        "with an algorithm that does not sample",
    ),
    Effect(
        (
            "gdpo.estimator",
            "gdpo.preset",
            "gdpo.batch_norm",
            "gdpo.epsilon",
            "gdpo.options",
            "gdpo.kl_in_reward",
            "gdpo.credit",
            "gdpo.dynamic_sampling.enabled",
        ),
        lambda c: c.algorithm.type != DISTILLATION,
        "with algorithm distillation, whose advantages are the teacher's",
    ),
    Effect(
        (
            "gdpo.estimator",
            "gdpo.preset",
            "gdpo.batch_norm",
            "gdpo.epsilon",
            "gdpo.options",
            "gdpo.discount",
            "gdpo.turn_baseline",
        ),
        lambda c: c.algorithm.type != PPO,
        "with algorithm ppo, whose advantages are the value head's, as the section ppo says",
    ),
    Effect(
        tuple(f"ppo.{field.name}" for field in fields(PPOSettings)),
        lambda c: c.algorithm.type == PPO,
        "unless algorithm.type is ppo",
    ),
    Effect(
        ("teacher.model_name",),
        lambda c: c.algorithm.type == DISTILLATION,
        "unless algorithm.type is distillation",
    ),
    Effect(
        (*(f"loss_fn.{f.name}" for f in fields(LossSettings) if f.name not in _SECTIONS), f"{_OFF_POLICY}.mode"),
        lambda c: rows_of(c) is None,
        "with an algorithm that brings its own loss (sft, and those of the section preference)",
    ),
    Effect(
        ("loss_fn.aggregation",),
        lambda c: c.algorithm.type not in PREFERENCES,
        "with the algorithms of the section preference, whose mean is over pairs or answers",
    ),
    Effect(
        ("gdpo.num_generations_per_prompt",),
        lambda c: rows_of(c) is None,
        "with an algorithm whose rows say how many answers they have",
    ),
    Effect(
        tuple(f"preference.{field.name}" for field in fields(PreferenceSettings)),
        lambda c: c.algorithm.type in PREFERENCES,
        f"unless algorithm.type is one of {', '.join(PREFERENCES)}",
    ),
    *(
        Effect(
            (f"data.{split}.train_on",),
            lambda c: rows_of(c) is not None,
            "with an algorithm that reads no answers from the data",
        )
        for split in ("train", "validation")
    ),
    *(
        Effect(
            (f"data.{split}.type",),
            partial(_reads_type, split),
            "with an algorithm that reads no answers from the data; file.py:function transforms rows of a path",
        )
        for split in ("train", "validation")
    ),
    *_read_by_some("loss_fn", LOSSES, _loss_reads),
    Effect(
        ("gdpo.epsilon",),
        lambda c: c.gdpo.estimator not in ("dr_grpo", "rloo", "gpg", "reinforce_plus_plus") or _standardises(c),
        "with an estimator that divides by no standard deviation",
    ),
    Effect(("gdpo.discount", "gdpo.turn_baseline"), lambda c: c.gdpo.credit == "turn", "unless gdpo.credit is turn"),
    Effect(
        ("gdpo.credit",),
        lambda c: c.rollout.turns.max_turns > 1 or c.rollout.function is not None,
        "while rollout.turns.max_turns is 1",
    ),
    Effect(
        ("loss_fn.constant_length",),
        lambda c: c.loss_fn.aggregation == "constant",
        "unless loss_fn.aggregation is constant",
    ),
    Effect(
        tuple(
            f"loss_fn.{key}"
            for key in (
                "reference_policy_kl_type",
                "reference_policy_kl_gradient",
                "kl_input_clamp_value",
                "kl_output_clamp_value",
            )
        ),
        lambda c: c.loss_fn.reference_policy_kl_penalty != 0,
        "while loss_fn.reference_policy_kl_penalty is 0",
    ),
    Effect(
        tuple(
            f"loss_fn.{key}" for key in ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")
        ),
        lambda c: c.loss_fn.use_adaptive_entropy,
        "without loss_fn.use_adaptive_entropy",
    ),
    Effect(
        ("policy.sync_ref_model",),
        _has_reference,
        "where nothing refers to a reference: no KL penalty in loss or reward, and neither dpo nor kto",
    ),
    Effect(
        ("policy.ref_model_sync_steps", "policy.ref_model_mixup_alpha"),
        lambda c: c.policy.sync_ref_model,
        "without policy.sync_ref_model",
    ),
    *_read_by_some(_OFF_POLICY, CORRECTIONS, lambda c: correction_entry(resolved_loss(c).off_policy.correction).reads),
    Effect(
        (f"{_MEGATRON}.scheduler.lr_decay_steps", f"{_MEGATRON}.optimizer.min_lr"),
        lambda c: c.policy.megatron_cfg.scheduler.lr_decay_style != "constant",
        f"while {_MEGATRON}.scheduler.lr_decay_style is constant",
    ),
    Effect(
        (f"{_MEGATRON}.scheduler.lr_warmup_init",),
        lambda c: c.policy.megatron_cfg.scheduler.lr_warmup_steps > 0,
        f"while {_MEGATRON}.scheduler.lr_warmup_steps is 0",
    ),
    Effect(
        (f"{_MEGATRON}.scheduler.lr_hold_updates",),
        _rate_changes,
        "with a constant learning rate",
    ),
    Effect(
        (f"{_MEGATRON}.freeze_moe_router",),
        lambda c: not c.policy.lora.rank,
        "with policy.lora, which trains the adapters alone",
    ),
    Effect(
        (f"{_MEGATRON}.num_layers_in_first_pipeline_stage", f"{_MEGATRON}.num_layers_in_last_pipeline_stage"),
        lambda c: c.policy.megatron_cfg.pipeline_model_parallel_size > 1,
        f"while {_MEGATRON}.pipeline_model_parallel_size is 1",
    ),
    Effect(
        (f"{_MEGATRON}.overlap_param_gather",),
        lambda c: c.policy.megatron_cfg.use_distributed_optimizer,
        f"without {_MEGATRON}.use_distributed_optimizer",
    ),
    Effect(
        (
            "gdpo.dynamic_sampling.batch_multiplier",
            "gdpo.dynamic_sampling.max_rounds",
            "gdpo.dynamic_sampling.before_shaping",
            "gdpo.dynamic_sampling.leave_one_out",
            "gdpo.dynamic_sampling.reroll_after",
        ),
        lambda c: c.gdpo.dynamic_sampling.enabled,
        "while gdpo.dynamic_sampling.enabled is false",
    ),
    Effect(
        ("gdpo.dynamic_sampling.max_rerolls",),
        lambda c: c.gdpo.dynamic_sampling.reroll_after > 0,
        "while gdpo.dynamic_sampling.reroll_after is 0",
    ),
    Effect(
        ("rollout.replay_buffer.reuse", "rollout.replay_buffer.max_age"),
        lambda c: c.rollout.replay_buffer.groups > 0,
        "while rollout.replay_buffer.groups is 0",
    ),
    Effect(
        ("rollout.kv",),
        lambda c: steps_ahead(c) > 0,
        "while no sample is under way when weights change (rollout.max_staleness is not above sync_every - 1)",
    ),
    Effect(
        ("rollout.save_trainer_logprobs", "rollout.save_entropies", "rollout.save_groups"),
        lambda c: c.rollout.save_samples,
        "while rollout.save_samples is false",
    ),
    Effect(
        ("rollout.min_valid",),
        lambda c: c.rollout.group_timeout_s is not None,
        "while rollout.group_timeout_s is null",
    ),
    Effect(
        ("rollout.endpoint.host", "rollout.endpoint.port"),
        lambda c: c.rollout.endpoint.enabled,
        "while rollout.endpoint.enabled is false",
    ),
    Effect(
        ("policy.generation.parity_limit",),
        lambda c: c.policy.generation.verify_weights,
        "while policy.generation.verify_weights is false",
    ),
    Effect(
        ("weights.bucket_mib",),
        lambda c: declared(chosen_transport(c)).uses_buckets,
        "with weights.transport memory, nor with any other that sends a model as a whole (uses_buckets)",
    ),
    Effect(
        ("checkpointing.keep_best",),
        lambda c: c.checkpointing.metric_name is not None,
        "without checkpointing.metric_name",
    ),
    *(
        Effect(
            tuple(f"data.{split}.{key}" for key in ("prompt_key", "columns", "environment_key", "remove_columns")),
            partial(_reads_file, split),
            f"without data.{split}.path: the environment makes the prompts",
        )
        for split in ("train", "validation")
    ),
    *(
        Effect(
            tuple(f"data.{split}.{key}" for key in ("system_prompt", "prompt_template", "chat_template_kwargs")),
            partial(_asks_rows, split),
            f"with data.{split}.strided, whose prompts are pieces of a text as they are",
        )
        for split in ("train", "validation")
    ),
)

SWITCHED_OFF = (
    Effect(
        (
            "data.validation",
            "gdpo.val_prompts",
            "gdpo.val_generations_per_prompt",
            "gdpo.val_pass_at_k",
            "gdpo.val_temperature",
        ),
        _validates,
        "while gdpo.val_period is 0 and gdpo.val_at_start is false",
    ),
    Effect(
        ("checkpointing.save_period", "checkpointing.keep_last", "checkpointing.metric_name"),
        lambda c: c.checkpointing.enabled,
        "while checkpointing.enabled is false",
    ),
    Effect(
        ("logger.prometheus.host",),
        lambda c: c.logger.prometheus.port is not None,
        "while logger.prometheus.port is null",
    ),
)


def keys_without_effect(config: Config, effects: tuple[Effect, ...] = EFFECTS) -> list[str]:
    """One sentence per changed key that cannot matter, in the order of the table."""
    idle = [effect for effect in effects if not effect.when(config)]
    return [f"{key}: has no effect {effect.why}" for effect in idle for key in effect.keys if _changed(config, key)]


def _changed(config: Config, key: str) -> bool:
    section = value_of(config, key.rpartition(".")[0])
    if section is None:
        return False
    return bool(value_of(config, key) != getattr(type(section)(), key.rpartition(".")[2]))


def value_of(config: Config, key: str) -> Any:
    """The value at a dotted key of the schema; None below a section that is null."""
    node: Any = config
    for name in key.split(".") if key else []:
        node = getattr(node, name, None)
    return node
