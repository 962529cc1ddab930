"""Detection of changed config keys that have no effect with the other settings.

A changed key without an effect is refused, because the user expects an effect. For example, ``kv_cache_memory_bytes``
has no effect on GPUs. A key is considered changed if its value differs from the schema's default, so the fully resolved
config that a run saves is also valid. Validation and checkpoints are on by default in many configs. If they are
switched off, their remaining settings only cause a note, so that switching them off does not require five overrides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

from gdpo_nemo.algorithms.estimators import ESTIMATORS
from gdpo_nemo.algorithms.loss_selection import correction_entry, loss_entry
from gdpo_nemo.algorithms.losses import LOSSES
from gdpo_nemo.algorithms.offpolicy import CORRECTIONS
from gdpo_nemo.algorithms.preference_objectives import PREFERENCES
from gdpo_nemo.algorithms.rubrics import is_family
from gdpo_nemo.config.algorithm_choice import ALGORITHMS, Unused, is_transform, resolved_loss, spec_of
from gdpo_nemo.config.allowed_values import MUON_KEYS
from gdpo_nemo.config.environment_algorithms import own_configs
from gdpo_nemo.config.layout import validations
from gdpo_nemo.config.rollout_checks import steps_ahead
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.transports import chosen_transport, declared


class Effect(NamedTuple):
    """Keys, separated by blanks, that have an effect only if ``when`` is true. If the condition is false, ``why``
    completes the message "KEY: has no effect ..."."""

    keys: str
    when: Callable[[Config], bool]
    why: str


def on_gpus(config: Config) -> bool:
    """Return whether the run uses GPUs."""
    return config.cluster.gpus_per_node > 0


def _has_reference(config: Config) -> bool:
    kind = config.algorithm.type
    if spec_of(config).section == "preference":
        return config.preference.needs_reference(kind)
    custom = kind not in ALGORITHMS  # a custom class may need the reference
    return custom or config.loss_fn.reference_policy_kl_penalty > 0 or config.gdpo.kl_in_reward is not None


def uses_muon(config: Config) -> bool:
    """Return whether Muon updates the weight matrices."""
    return config.policy.megatron_cfg.optimizer.type == "muon"


def _rate_changes(config: Config) -> bool:
    """Return whether the learning rate changes during training."""
    schedule = config.policy.megatron_cfg.scheduler
    return schedule.lr_decay_style != "constant" or schedule.lr_warmup_steps > 0


def _divides(config: Config) -> bool:
    """Return True if the estimator or the batch norm divides by a standard deviation."""
    entry = ESTIMATORS.get(config.gdpo.estimator)
    if entry is None or entry.scale != "none":  # a custom function may divide
        return True
    batch_norm = config.gdpo.batch_norm
    return entry.batch_norm if batch_norm is None else batch_norm


def _reads_file(split: str, config: Config) -> bool:
    """Return True if the rows of a split come from ``path`` or the split is not configured."""
    dataset = getattr(config.data, split)
    return dataset is None or dataset.path is not None


def prompts_are_rows(split: str, config: Config) -> bool:
    """Return True if each row of a split is one prompt rather than a text with anchors, or if the split is not
    configured."""
    return value_of(config, f"data.{split}.strided") is None


def _reads_type(split: str, config: Config) -> bool:
    """Return whether the ``type`` of a split has an effect, either as an answer format or as a transform of rows."""
    how = value_of(config, f"data.{split}.type")
    return _reads_file(split, config) if is_transform(how) else trains_answers(config)


_VLLM = "policy.generation.vllm_cfg"
_MEGATRON = "policy.megatron_cfg"
_OFF_POLICY = "loss_fn.off_policy"
_REFERENCED = " and ".join(name for name, objective in PREFERENCES.items() if objective.uses_reference)


def trains_answers(config: Config) -> bool:
    """Return whether the algorithm trains on answers in the data, such as sft or dpo."""
    return spec_of(config).rows is not None


def _loss_reads(config: Config) -> tuple[str, ...]:
    """Return the keys of `loss_fn` that the loss reads. `aggregation` is added if there is a KL penalty or an entropy
    bonus, because it also applies to these terms."""
    loss = config.loss_fn
    has_penalties = loss.reference_policy_kl_penalty or loss.entropy_bonus or loss.use_adaptive_entropy
    additional = ("aggregation",) if has_penalties else ()
    return (*loss_entry(loss.type).reads, *additional)


def _correction_reads(config: Config) -> tuple[str, ...]:
    """Return the keys of `loss_fn.off_policy` that the correction reads."""
    return correction_entry(resolved_loss(config, spec_of(config)).off_policy.correction).reads


_Reads = Callable[[Config], tuple[str, ...]]


def _read_by_some(section: str, choice: str, registry: Mapping[str, Any], reads: _Reads) -> Iterator[Effect]:
    """Yield an effect for each key of ``section`` that only some entries of ``registry`` read.

    Args:
        choice: key of the section that names the entry.
    """
    readers: dict[str, list[str]] = {}
    for name, entry in registry.items():
        for key in entry.reads:
            readers.setdefault(key, []).append(name)
    for key, names in readers.items():
        why = f"unless {section}.{choice} is {' or '.join(names)}, or a custom function that reads it"
        yield Effect(f"{section}.{key}", partial(_is_read, key, reads), why)


def _of_algorithms() -> Iterator[Effect]:
    """Yield an effect for the keys that algorithms declare as unused, and for the sections that only some algorithms
    use."""
    for unused in dict.fromkeys(unused for spec in ALGORITHMS.values() for unused in spec.unused):
        yield Effect(unused.keys, partial(_reads, unused), unused.why)
    sections: dict[str, list[str]] = {}
    for name, spec in ALGORITHMS.items():
        if spec.section:
            sections.setdefault(spec.section, []).append(name)
    default = Config()
    for section, readers in sections.items():
        keys = " ".join(f"{section}.{key.name}" for key in fields(getattr(default, section)))
        readers_text = readers[0] if len(readers) == 1 else f"one of {', '.join(readers)}"
        yield Effect(keys, partial(_reads_section, section), f"unless algorithm.type is {readers_text}")


def _reads(unused: Unused, config: Config) -> bool:
    return unused not in spec_of(config).unused


def _reads_section(section: str, config: Config) -> bool:
    return spec_of(config).section == section


def _of_split(split: str) -> Iterator[Effect]:
    """Yield the effects of the keys in ``data.train`` or ``data.validation``."""
    key = f"data.{split}"
    without_answers = "with an algorithm that does not read answers from the data"
    yield Effect(f"{key}.train_on", trains_answers, without_answers)
    yield Effect(
        f"{key}.type", partial(_reads_type, split), f"{without_answers}; a transform (file.py:function) requires a path"
    )
    yield Effect(
        f"{key}.prompt_key {key}.columns {key}.environment_key {key}.remove_columns",
        partial(_reads_file, split),
        f"without {key}.path: the environment generates the prompts",
    )
    yield Effect(
        f"{key}.system_prompt {key}.prompt_template {key}.chat_template_kwargs",
        partial(prompts_are_rows, split),
        f"with {key}.strided, whose prompts are unchanged pieces of text",
    )


def _is_read(key: str, reads: _Reads, config: Config) -> bool:
    return key in reads(config)


EFFECTS: tuple[Effect, ...] = (
    Effect(
        f"{_VLLM}.gpu_memory_utilization {_VLLM}.gpu_kv_cache_memory_bytes {_VLLM}.enforce_eager {_VLLM}.head_dtype",
        on_gpus,
        "on CPU (cluster.gpus_per_node is 0)",
    ),
    Effect(
        f"{_VLLM}.head_dtype",
        lambda config: config.policy.precision == "bfloat16",
        "with policy.precision float32, whose logits are always float32",
    ),
    Effect("policy.offload_reference", on_gpus, "on CPU (cluster.gpus_per_node is 0)"),
    Effect(
        "policy.offload_reference",
        lambda c: not c.policy.lora.rank,
        "with policy.lora, whose reference is the model without its adapters",
    ),
    Effect(
        f"{_VLLM}.kv_cache_memory_bytes",
        lambda c: not on_gpus(c),
        "on GPUs, where gpu_memory_utilization or gpu_kv_cache_memory_bytes sets the size",
    ),
    Effect(
        "gdpo.estimator gdpo.preset gdpo.constraints gdpo.schedules gdpo.weighting gdpo.noise gdpo.shaping "
        "gdpo.batch_norm "
        "gdpo.kl_in_reward gdpo.credit gdpo.num_iterations gdpo.component_gradient_period "
        "gdpo.stop_when gdpo.dynamic_sampling.enabled rollout.max_staleness "
        "rollout.group_timeout_s rollout.replay_buffer.groups "
        "rollout.function rollout.save_trainer_logprobs rollout.save_entropies rollout.save_groups "
        "rollout.endpoint.enabled rollout.selection.enabled policy.router_replay data.mix",
        lambda c: spec_of(c).samples,
        "with an algorithm that does not sample",
    ),
    *_of_algorithms(),
    *_read_by_some("loss_fn", "type", LOSSES, _loss_reads),
    Effect(
        "gdpo.epsilon",
        _divides,
        "with an estimator that does not divide by a standard deviation",
    ),
    Effect(
        "gdpo.family_scale",
        lambda c: any(map(is_family, c.gdpo.rewards)),
        "unless gdpo.rewards has a family such as rubric/*",
    ),
    Effect("gdpo.stop_errors gdpo.stop_patience", lambda c: bool(c.gdpo.stop_when), "unless gdpo.stop_when has goals"),
    Effect("gdpo.discount gdpo.turn_baseline", lambda c: c.gdpo.credit == "turn", "unless gdpo.credit is turn"),
    Effect(
        "gdpo.credit",
        lambda c: c.gdpo.credit == "span" or c.rollout.turns.max_turns > 1 or c.rollout.function is not None,
        "while rollout.turns.max_turns is 1",
    ),
    Effect(
        "loss_fn.constant_length",
        lambda c: c.loss_fn.aggregation == "constant",
        "unless loss_fn.aggregation is constant",
    ),
    Effect(
        "loss_fn.reference_policy_kl_type loss_fn.reference_policy_kl_gradient loss_fn.kl_input_clamp_value "
        "loss_fn.kl_output_clamp_value",
        lambda c: c.loss_fn.reference_policy_kl_penalty != 0,
        "while loss_fn.reference_policy_kl_penalty is 0",
    ),
    Effect(
        "loss_fn.entropy_target loss_fn.entropy_coef_delta loss_fn.entropy_coef_min loss_fn.entropy_coef_max",
        lambda c: c.loss_fn.use_adaptive_entropy,
        "without loss_fn.use_adaptive_entropy",
    ),
    Effect(
        "policy.sync_ref_model",
        _has_reference,
        f"without a reference model, which only KL penalties (in loss or reward), {_REFERENCED} use",
    ),
    Effect(
        "policy.ref_model_sync_steps policy.ref_model_mixup_alpha",
        lambda c: c.policy.sync_ref_model,
        "without policy.sync_ref_model",
    ),
    *_read_by_some(_OFF_POLICY, "mode", CORRECTIONS, _correction_reads),
    Effect(
        f"{_MEGATRON}.scheduler.lr_decay_steps {_MEGATRON}.optimizer.min_lr",
        lambda c: c.policy.megatron_cfg.scheduler.lr_decay_style != "constant",
        f"while {_MEGATRON}.scheduler.lr_decay_style is constant",
    ),
    Effect(
        f"{_MEGATRON}.scheduler.lr_warmup_init",
        lambda c: c.policy.megatron_cfg.scheduler.lr_warmup_steps > 0,
        f"while {_MEGATRON}.scheduler.lr_warmup_steps is 0",
    ),
    Effect(
        " ".join(f"{_MEGATRON}.optimizer.{key}" for key in MUON_KEYS),
        uses_muon,
        f"without {_MEGATRON}.optimizer.type muon",
    ),
    Effect(f"{_MEGATRON}.scheduler.lr_hold_updates", _rate_changes, "with a constant learning rate"),
    Effect(
        f"{_MEGATRON}.freeze_moe_router",
        lambda c: not c.policy.lora.rank,
        "with policy.lora, which trains only the adapters",
    ),
    Effect(
        f"{_MEGATRON}.num_layers_in_first_pipeline_stage {_MEGATRON}.num_layers_in_last_pipeline_stage",
        lambda c: c.policy.megatron_cfg.pipeline_model_parallel_size > 1,
        f"while {_MEGATRON}.pipeline_model_parallel_size is 1",
    ),
    Effect(
        f"{_MEGATRON}.overlap_param_gather",
        lambda c: c.policy.megatron_cfg.use_distributed_optimizer,
        f"without {_MEGATRON}.use_distributed_optimizer",
    ),
    Effect(
        "gdpo.dynamic_sampling.batch_multiplier gdpo.dynamic_sampling.max_rounds "
        "gdpo.dynamic_sampling.before_shaping gdpo.dynamic_sampling.leave_one_out "
        "gdpo.dynamic_sampling.reroll_after",
        lambda c: c.gdpo.dynamic_sampling.enabled,
        "while gdpo.dynamic_sampling.enabled is false",
    ),
    Effect(
        "gdpo.dynamic_sampling.max_rerolls",
        lambda c: c.gdpo.dynamic_sampling.reroll_after > 0,
        "while gdpo.dynamic_sampling.reroll_after is 0",
    ),
    Effect(
        "rollout.selection.variance_top_p",
        lambda c: c.gdpo.dynamic_sampling.enabled,
        "while gdpo.dynamic_sampling.enabled is false",
    ),
    Effect(
        "rollout.selection.min_rate rollout.selection.memory rollout.selection.difficulties",
        lambda c: c.rollout.selection.enabled,
        "while rollout.selection.enabled is false",
    ),
    Effect("data.mix_key", lambda c: bool(c.data.mix), "without data.mix"),
    Effect(
        "rollout.replay_buffer.reuse rollout.replay_buffer.max_age",
        lambda c: c.rollout.replay_buffer.groups > 0,
        "while rollout.replay_buffer.groups is 0",
    ),
    Effect(
        "rollout.kv",
        lambda c: steps_ahead(c) > 0,
        "while no sample is in flight when weights change (rollout.max_staleness is not above sync_every - 1)",
    ),
    Effect(
        "rollout.save_trainer_logprobs rollout.save_entropies rollout.save_groups",
        lambda c: c.rollout.save_samples,
        "while rollout.save_samples is false",
    ),
    Effect(
        "rollout.min_valid", lambda c: c.rollout.group_timeout_s is not None, "while rollout.group_timeout_s is null"
    ),
    Effect(
        "rollout.endpoint.host rollout.endpoint.port rollout.endpoint.api_key_env rollout.endpoint.allowed_hosts",
        lambda c: c.rollout.endpoint.enabled,
        "while rollout.endpoint.enabled is false",
    ),
    Effect(
        "policy.generation.parity_limit",
        lambda c: c.policy.generation.verify_weights,
        "while policy.generation.verify_weights is false",
    ),
    Effect(
        "weights.bucket_mib",
        lambda c: declared(chosen_transport(c)).uses_buckets,
        "with weights.transport memory, or any other transport that sends the model as a whole (uses_buckets is False)",
    ),
    Effect(
        "checkpointing.keep_best",
        lambda c: c.checkpointing.metric_name is not None,
        "without checkpointing.metric_name",
    ),
    *_of_split("train"),
    *_of_split("validation"),
)

SWITCHED_OFF: tuple[Effect, ...] = (
    Effect(
        "data.validation gdpo.val_prompts gdpo.val_generations_per_prompt gdpo.val_pass_at_k gdpo.val_temperature "
        "gdpo.val_top_p gdpo.val_top_k",
        lambda c: validations(c.gdpo) > 0,
        "while gdpo.val_period is 0 and gdpo.val_at_start is false",
    ),
    Effect(
        "checkpointing.save_period checkpointing.keep_last checkpointing.metric_name",
        lambda c: c.checkpointing.enabled,
        "while checkpointing.enabled is false",
    ),
    Effect(
        "logger.prometheus.host", lambda c: c.logger.prometheus.port is not None, "while logger.prometheus.port is null"
    ),
)


def keys_without_effect(config: Config, effects: tuple[Effect, ...] = EFFECTS) -> list[str]:
    """Return a sentence for each changed key that has no effect, in the order of ``effects``.

    A key also has an effect if an environment with its own algorithm uses its value.
    """
    own = list(own_configs(config).values())
    found = []
    for effect in effects:
        if effect.when(config):
            continue
        users = [other for other in own if effect.when(other)]
        for key in effect.keys.split():
            used = any(value_of(other, key) == value_of(config, key) for other in users)
            if changed(config, key) and not used:
                found.append(f"{key}: has no effect {effect.why}")
    return found


def changed(config: Config, key: str) -> bool:
    """Return whether the value at a dotted key differs from the schema's default. False for keys below a null
    section."""
    section = value_of(config, key.rpartition(".")[0])
    if section is None:
        return False
    return bool(value_of(config, key) != getattr(type(section)(), key.rpartition(".")[2]))


def value_of(config: Config, key: str) -> Any:
    """Return the value at a dotted key of the schema. Returns None for keys below a null section."""
    node: Any = config
    for name in key.split(".") if key else []:
        node = getattr(node, name, None)
    return node
