"""Rules between config keys: settings that require or exclude another setting.

A new rule is an entry of ``REQUIREMENTS``. Rules whose message needs arithmetic are functions in the ``*_checks``
modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

from gdpo_nemo.algorithms.loss_selection import loss_entry
from gdpo_nemo.algorithms.rubrics import is_family
from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.effects import changed, on_gpus, prompts_are_rows, trains_answers, uses_muon, value_of
from gdpo_nemo.config.layout import updates_per_step
from gdpo_nemo.config.rollout_checks import saves_all_groups
from gdpo_nemo.config.schema import Config
from gdpo_nemo.utils.errors import ConfigError


class Requires(NamedTuple):
    """Keys, separated by blanks, that may only be set if ``when`` is true. A key is set if its value is neither the
    default nor empty, null, false or 0.

    If the condition is false, ``why`` completes the message "KEY: ...". ``why`` is a format string: ``{value}`` is the
    value of the key, ``{default}`` its default, and ``{c.SECTION.KEY}`` the value of another key.
    """

    keys: str
    when: Callable[[Config], bool]
    why: str

    def check(self, config: Config) -> None:
        """Raise ConfigError if a key is set although the condition is false."""
        for key in self.keys.split():
            value = value_of(config, key)
            if value and changed(config, key) and not self.when(config):
                default = value_of(Config(), key)
                raise ConfigError(f"{key}: {self.why.format(value=value, default=default, c=config)}")


def check_requirements(config: Config) -> None:
    """Check all rules between keys, in the order of ``REQUIREMENTS``. Raises ConfigError."""
    for requirement in REQUIREMENTS:
        requirement.check(config)


def _has_engine_layers(config: Config) -> bool:
    """Return whether the policy may have the layers of TransformerEngine."""
    return on_gpus(config) and config.policy.megatron_cfg.transformer_engine is not False


def _attention_is_not(config: Config, *names: str) -> bool:
    return config.policy.megatron_cfg.attention_backend not in names


def _decays_after_warmup(config: Config) -> bool:
    schedule = config.policy.megatron_cfg.scheduler
    return (schedule.lr_decay_steps or 0) > schedule.lr_warmup_steps


def _warms_up_to_lr(config: Config) -> bool:
    megatron = config.policy.megatron_cfg
    return (megatron.scheduler.lr_warmup_init or 0) <= megatron.optimizer.lr


def _loss_is_not_by_group(config: Config) -> bool:
    return not loss_entry(config.loss_fn.type).by_group


def _has_sequence_advantages(config: Config) -> bool:
    """Return False if the algorithm gives each token an advantage, from a value head or a teacher."""
    algorithm = spec_of(config)
    return algorithm.head != "value" and algorithm.section != "teacher"


def _updates_have_whole_groups(config: Config) -> bool:
    size = config.policy.train_global_batch_size or 0
    divides = size % config.gdpo.num_generations_per_prompt == 0
    return divides or _loss_is_not_by_group(config) or updates_per_step(config, spec_of(config)) == 1


_MEGATRON = "policy.megatron_cfg"
_OPTIMIZER = f"{_MEGATRON}.optimizer"
_SCHEDULER = f"{_MEGATRON}.scheduler"
_PRECISION_AWARE = f"{_OPTIMIZER}.use_precision_aware_optimizer"
_DYNAMIC = "gdpo.dynamic_sampling"
_SELECTION = "rollout.selection"
_REPLAYED = "rollout.replay_buffer.groups"

REQUIREMENTS = (
    # Layout and kernels
    Requires(
        f"{_MEGATRON}.sequence_parallel",
        lambda c: c.policy.megatron_cfg.tensor_model_parallel_size > 1,
        "requires tensor_model_parallel_size above 1",
    ),
    Requires(
        f"{_MEGATRON}.virtual_pipeline_model_parallel_size",
        lambda c: c.policy.megatron_cfg.pipeline_model_parallel_size > 1,
        "requires pipeline_model_parallel_size above 1",
    ),
    Requires(
        f"{_MEGATRON}.num_layers_in_first_pipeline_stage {_MEGATRON}.num_layers_in_last_pipeline_stage",
        lambda c: not c.policy.megatron_cfg.virtual_pipeline_model_parallel_size,
        "conflicts with virtual_pipeline_model_parallel_size",
    ),
    Requires(
        f"{_MEGATRON}.overlap_param_gather",
        lambda c: c.policy.megatron_cfg.overlap_grad_reduce,
        "requires overlap_grad_reduce",
    ),
    Requires(
        f"{_MEGATRON}.recompute_layers", lambda c: c.policy.megatron_cfg.recompute == "full", "requires recompute: full"
    ),
    Requires(
        f"{_MEGATRON}.recompute_modules",
        lambda c: c.policy.megatron_cfg.recompute == "selective",
        "requires recompute: selective",
    ),
    Requires(
        f"{_MEGATRON}.use_distributed_optimizer",
        lambda c: not uses_muon(c),
        f"conflicts with {_OPTIMIZER}.type muon, which needs whole matrices on each rank",
    ),
    Requires(
        "gdpo.component_gradient_period",
        lambda c: not uses_muon(c),
        f"conflicts with {_OPTIMIZER}.type muon; the effects of components are those of updates of AdamW",
    ),
    Requires(
        f"{_OPTIMIZER}.type",
        lambda c: not uses_muon(c) or find_spec("emerging_optimizers") is not None,
        "{value} requires the package emerging-optimizers; install gdpo-nemo's dependencies",
    ),
    Requires(
        f"{_OPTIMIZER}.offload",
        lambda c: c.policy.precision == "bfloat16",
        "requires policy.precision bfloat16; float32 models have no separate main weights",
    ),
    Requires(
        f"{_OPTIMIZER}.exp_avg_dtype {_OPTIMIZER}.exp_avg_sq_dtype {_OPTIMIZER}.main_grads_dtype",
        lambda c: c.policy.megatron_cfg.optimizer.use_precision_aware_optimizer,
        "requires use_precision_aware_optimizer: true",
    ),
    Requires(
        _PRECISION_AWARE,
        lambda c: c.policy.megatron_cfg.use_distributed_optimizer,
        "requires policy.megatron_cfg.use_distributed_optimizer: true",
    ),
    Requires(_PRECISION_AWARE, lambda c: c.policy.precision == "bfloat16", "requires policy.precision: bfloat16"),
    Requires(
        _PRECISION_AWARE,
        _has_engine_layers,
        "requires TransformerEngine's Adam, on GPUs with transformer_engine not false",
    ),
    Requires(
        _PRECISION_AWARE,
        lambda c: not c.policy.megatron_cfg.optimizer.offload,
        f"conflicts with {_OPTIMIZER}.offload; use only one of them",
    ),
    Requires(
        f"{_MEGATRON}.transformer_engine {_MEGATRON}.fused_logprobs",
        on_gpus,
        "requires GPUs (cluster.gpus_per_node is 0)",
    ),
    Requires(
        f"{_MEGATRON}.attention_backend",
        lambda c: _attention_is_not(c, "sdpa") or not c.policy.megatron_cfg.transformer_engine,
        "{value} (torch) conflicts with transformer_engine: true",
    ),
    Requires(
        f"{_MEGATRON}.attention_backend",
        lambda c: _attention_is_not(c, "flex") or on_gpus(c),
        "{value} requires GPUs, because torch cannot compute its gradient on CPUs; use auto or sdpa",
    ),
    Requires(
        f"{_MEGATRON}.attention_backend",
        lambda c: _attention_is_not(c, "flash", "fused", "unfused") or _has_engine_layers(c),
        "{value} requires GPUs and transformer_engine; use auto or sdpa",
    ),
    Requires(
        f"{_MEGATRON}.fp8",
        lambda c: _has_engine_layers(c) and _attention_is_not(c, "sdpa"),
        "requires GPUs and the layers of TransformerEngine",
    ),
    Requires(
        f"{_MEGATRON}.fp8",
        lambda c: c.policy.precision == "bfloat16",
        "requires policy.precision bfloat16 for everything except the matrix products",
    ),
    Requires(
        "cluster.placement",
        lambda c: not c.rollout.max_staleness,
        "{value} requires rollout.max_staleness 0 (got {c.rollout.max_staleness}), because engines sleep while the "
        "policy trains; use separate, or max_staleness 0",
    ),
    # LoRA
    Requires(
        "policy.sync_ref_model",
        lambda c: not c.policy.lora.rank,
        "not supported with policy.lora, whose reference is the unchanged model without adapters",
    ),
    Requires(
        f"{_MEGATRON}.fp8",
        lambda c: not c.policy.lora.rank,
        "conflicts with policy.lora, whose matrices are not in 8 bits",
    ),
    Requires(
        f"{_MEGATRON}.fused_logprobs",
        lambda c: not c.policy.lora.rank or "lm_head" not in c.policy.lora.target_modules,
        "not supported with an adapter on lm_head (policy.lora.target_modules); use null or false",
    ),
    Requires(
        "policy.lora.rank",
        lambda c: spec_of(c).head != "value",
        "{c.algorithm.type} trains the whole model, because its value head cannot be part of an adapter; use 0",
    ),
    Requires(
        "policy.lora.rank",
        lambda c: spec_of(c).head != "score",
        "{c.algorithm.type} trains the whole model, because its head cannot be part of an adapter; use 0",
    ),
    # Images
    Requires(
        "policy.vision.train",
        lambda c: not c.policy.lora.rank,
        "conflicts with policy.lora, which trains only adapters of the language model; use false",
    ),
    Requires(
        "policy.vision.train",
        lambda c: not uses_muon(c),
        f"conflicts with {_OPTIMIZER}.type muon, which does not support convolutions; use adamw",
    ),
    # Learning rate and validation
    Requires(
        f"{_SCHEDULER}.lr_decay_steps",
        _decays_after_warmup,
        f"{{value}} must be more than lr_warmup_steps {{c.{_SCHEDULER}.lr_warmup_steps}}",
    ),
    Requires(
        f"{_SCHEDULER}.lr_warmup_init",
        _warms_up_to_lr,
        f"{{value}} is above optimizer.lr ({{c.{_OPTIMIZER}.lr}}), the rate at the end of the warm-up",
    ),
    Requires(
        "gdpo.val_period gdpo.val_at_start",
        lambda c: c.data.validation is not None,
        "requires data.validation, which is null",
    ),
    Requires(
        "gdpo.stop_when",
        lambda c: c.gdpo.val_period > 0,
        "requires validations; set gdpo.val_period above 0",
    ),
    Requires(
        "gdpo.stop_when",
        lambda c: c.gdpo.stop_when.keys() <= c.gdpo.rewards.keys(),
        "must only have components of gdpo.rewards, got {value}",
    ),
    # Replay and dynamic sampling
    Requires(
        "rollout.save_groups",
        lambda c: (c.rollout.save_groups or 0) <= c.gdpo.num_prompts_per_step,
        "{value} exceeds the {c.gdpo.num_prompts_per_step} groups of a step (gdpo.num_prompts_per_step); use null to "
        "save all",
    ),
    Requires(
        _REPLAYED,
        lambda c: c.rollout.max_staleness > 0,
        "{value} groups of earlier weights conflict with rollout.max_staleness 0, which is exactly on-policy; set it "
        "to 1 or more",
    ),
    Requires(
        _REPLAYED,
        lambda c: c.loss_fn.old_logprobs == "trainer",
        "requires loss_fn.old_logprobs: trainer, which recomputes the denominator of their ratio",
    ),
    Requires(
        _REPLAYED,
        lambda c: c.rollout.save_samples,
        "requires rollout.save_samples, because a resumed run reads its groups from the samples",
    ),
    Requires(
        _REPLAYED,
        saves_all_groups,
        "requires rollout.save_groups null, because a resumed run reads its groups from the samples",
    ),
    Requires(
        _REPLAYED,
        lambda c: c.gdpo.group_by != "prompt",
        "requires gdpo.group_by row; with group_by prompt, old samples would be compared with new samples",
    ),
    Requires(
        f"{_DYNAMIC}.reroll_after",
        lambda c: not c.gdpo.dynamic_sampling.leave_one_out,
        "conflicts with leave_one_out, which drops samples instead of groups",
    ),
    Requires(
        f"{_DYNAMIC}.leave_one_out",
        _loss_is_not_by_group,
        "leaves incomplete groups, which loss_fn.type {c.loss_fn.type} does not support",
    ),
    Requires(
        f"{_DYNAMIC}.leave_one_out",
        lambda c: c.gdpo.preset == "nemo_rl" or c.gdpo.options.get("equal_peers") == "raw",
        "replaces the only sample that differs from its group, and trains the others with advantage 0; remove it, or "
        "reproduce NeMo-RL with gdpo.preset: nemo_rl or equal_peers: raw in gdpo.options",
    ),
    # With staleness, groups are replaced one at a time, so surplus rounds and partial groups are not supported.
    Requires(
        f"{_DYNAMIC}.batch_multiplier {_DYNAMIC}.leave_one_out",
        lambda c: not c.rollout.max_staleness,
        "requires rollout.max_staleness 0, got {c.rollout.max_staleness}; groups sampled ahead are replaced only as a "
        "whole, one at a time",
    ),
    Requires(
        f"{_SELECTION}.variance_top_p",
        lambda c: not c.rollout.max_staleness,
        "requires rollout.max_staleness 0, got {c.rollout.max_staleness}; groups sampled ahead are not compared with "
        "the other groups of their step",
    ),
    Requires(
        f"{_SELECTION}.variance_top_p",
        lambda c: not c.gdpo.dynamic_sampling.leave_one_out,
        "conflicts with gdpo.dynamic_sampling.leave_one_out, which drops samples instead of groups",
    ),
    Requires(
        f"{_SELECTION}.variance_top_p",
        lambda c: c.gdpo.group_by == "row",
        "requires gdpo.group_by row, because it compares the samples of one row",
    ),
    Requires(
        f"{_SELECTION}.enabled",
        lambda c: c.gdpo.num_generations_per_prompt > 1,
        "requires groups of at least two samples (gdpo.num_generations_per_prompt), because one sample never varies",
    ),
    Requires(
        f"{_SELECTION}.enabled",
        lambda c: not c.gdpo.dynamic_sampling.reroll_after,
        "conflicts with gdpo.dynamic_sampling.reroll_after, because both decide when a prompt is sampled again",
    ),
    Requires(
        f"{_DYNAMIC}.enabled",
        lambda c: c.gdpo.num_generations_per_prompt > 1,
        "would drop every group, because groups have only one sample (gdpo.num_generations_per_prompt)",
    ),
    Requires(
        f"{_DYNAMIC}.enabled {_SELECTION}.enabled {_REPLAYED}",
        lambda c: not c.gdpo.constraints,
        "conflicts with gdpo.constraints, because the mean of the trained samples would not be the mean of all samples",
    ),
    Requires(
        f"{_DYNAMIC}.enabled {_REPLAYED}",
        lambda c: not c.gdpo.weighting,
        "conflicts with gdpo.weighting, whose factors come from all new samples of the step",
    ),
    Requires(
        "gdpo.credit",
        lambda c: c.gdpo.credit != "turn" or spec_of(c).head != "value" or not any(map(is_family, c.gdpo.rewards)),
        "turn is not supported with algorithm ppo and a family of criteria in gdpo.rewards; use sequence",
    ),
    # Data
    Requires(
        "data.train.strided data.validation.strided",
        lambda c: not trains_answers(c),
        "algorithm {c.algorithm.type} trains the answers in the data; anchors require an algorithm that samples",
    ),
    *(
        Requires(
            f"data.{split}.chat",
            partial(prompts_are_rows, split),
            f"conflicts with data.{split}.strided, whose text is passed to the model unchanged",
        )
        for split in ("train", "validation")
    ),
    # Loss and algorithm
    Requires(
        "gdpo.noise",
        lambda c: c.gdpo.credit != "turn",
        "conflicts with gdpo.credit turn, whose returns sum the errors of several turns",
    ),
    Requires(
        "gdpo.credit",
        lambda c: c.gdpo.credit != "span" or spec_of(c).head != "value",
        "span conflicts with algorithm {c.algorithm.type}; use sequence or turn",
    ),
    Requires(
        "policy.train_global_batch_size",
        _updates_have_whole_groups,
        "{value} splits groups of {c.gdpo.num_generations_per_prompt} samples between updates, which loss_fn.type "
        "{c.loss_fn.type} does not support; use a multiple of gdpo.num_generations_per_prompt",
    ),
    Requires(
        "loss_fn.type",
        lambda c: _loss_is_not_by_group(c) or _has_sequence_advantages(c),
        "{value} does not support the token-level advantages of {c.algorithm.type}",
    ),
    Requires(
        "loss_fn.off_policy.sequence_mask_threshold",
        _has_sequence_advantages,
        "conflicts with algorithm {c.algorithm.type}, which has token-level advantages, because it masks whole samples",
    ),
    Requires(
        "loss_fn.aggregation",
        lambda c: c.loss_fn.aggregation != "constant" or not trains_answers(c),
        "constant requires sampled completions, which {c.algorithm.type} does not have",
    ),
    Requires(
        "policy.skip_zero_advantage",
        lambda c: spec_of(c).head != "value",
        "would change the gradient: the value head of {c.algorithm.type} learns from all samples",
    ),
    Requires(
        "policy.skip_zero_advantage",
        lambda c: not trains_answers(c),
        "has no effect with algorithm {c.algorithm.type}, which does not use advantages",
    ),
    Requires(
        "policy.generation.temperature",
        lambda c: not trains_answers(c),
        "must be 1 with algorithm {c.algorithm.type}, whose loss uses the model's unscaled probabilities",
    ),
    Requires(
        "policy.generation.temperature policy.generation.top_p policy.generation.top_k",
        lambda c: spec_of(c).section != "teacher",
        "must be {default:g} with algorithm {c.algorithm.type}, which compares the model's unscaled probabilities with "
        "the teacher's",
    ),
)
