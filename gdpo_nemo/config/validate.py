"""Checks of the whole config before a run starts. Invalid settings are refused. Valid settings that may be unintended
cause a note.

The checks run at the start of every run and with ``--dry-run``. The checks read local files, but use neither the
network nor a GPU.
"""

from __future__ import annotations

import difflib
import os
import re
from datetime import datetime

from gdpo_nemo.algorithms.ranges import check_numbers
from gdpo_nemo.config.algorithm_choice import AlgorithmSpec, spec_of
from gdpo_nemo.config.allowed_values import ALIASED, LORA_TARGETS, OPTIMIZER_DTYPES, RECOMPUTED_MODULES
from gdpo_nemo.config.effects import SWITCHED_OFF, keys_without_effect, value_of
from gdpo_nemo.config.health import read_checks
from gdpo_nemo.config.layout import (
    Layout,
    Resolved,
    check_prompt_sharing,
    check_stages,
    resolve_layout,
    updates_per_step,
)
from gdpo_nemo.config.model_checks import check_files
from gdpo_nemo.config.objective_checks import (
    check_algorithm,
    check_learning,
    check_strided,
    objective_notes,
)
from gdpo_nemo.config.placement import Places, address_source, joined, place, place_workers
from gdpo_nemo.config.rollout_checks import check_parsers, check_reuse, check_rollout_bounds, check_turns_kept
from gdpo_nemo.config.schema import ClusterConfig, Config, DatasetConfig, GdpoConfig, LoggerConfig
from gdpo_nemo.config.sections import MegatronConfig, PolicyConfig
from gdpo_nemo.config.transports import check_transport
from gdpo_nemo.utils.errors import ConfigError

_LONGEST_NAME = 255
_LONGEST_PATH = 3000
"""Maximum length of the run folder's path in bytes. Linux allows 4096 bytes, including the names of files in the
folder."""
_RUN_NAME = re.compile(r"(?!/)(?!.*(^|/)\.\.(/|$))[^\x00-\x1f\x7f]*")


def validate(config: Config, weights: bool = True) -> Resolved:
    """Check a config, and return it with the algorithm, layout and model that it determines.

    Args:
        weights: True if the model's folder must contain weights and a tokenizer. An estimate requires only its
            ``config.json``.

    Raises:
        ConfigError: if the config cannot run. The message contains the key and the remedy.
    """
    algorithm = spec_of(config)
    _check_names(config)
    check_ranges(config)
    _check_rewards(config.gdpo, algorithm)
    _check_lengths(config.policy, algorithm)
    _check_environments(config, algorithm)
    check_parallelism(config)
    _check_schedule(config.policy)
    _check_lora(config.policy)
    _check_placement(config)
    read_checks(config.health.checks, config.health.window, "health.checks")
    _check_aliases(config.logger)
    layout = resolve_layout(config, algorithm)
    places = place(config.cluster, layout)
    place_workers(config)
    updates = config.gdpo.max_num_steps * updates_per_step(config, algorithm)
    idle = keys_without_effect(config, algorithm)
    if idle:
        raise ConfigError(f"{idle[0]}; remove it")
    check_reuse(config)
    check_rollout_bounds(config)
    check_learning(config, algorithm)
    check_algorithm(config, algorithm, layout)
    check_strided(config, algorithm)
    check_turns_kept(config)
    check_parsers(config.policy.generation)
    model = check_files(config, layout, weights)
    notes = (
        *_notes(config, layout, updates),
        *objective_notes(config, algorithm),
        *_reward_notes(config.gdpo),
        *_cluster_notes(config.cluster, places),
        *keys_without_effect(config, algorithm, SWITCHED_OFF),
    )
    return Resolved(config, algorithm, layout, model, notes)


def check_ranges(config: Config) -> None:
    """Check that all numbers are in the ranges declared in the schema. Raises ConfigError."""
    try:
        check_numbers(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_names(config: Config) -> None:
    for key in ("run.name", "run.dir", "policy.model_name"):
        if not value_of(config, key).strip():
            raise ConfigError(f"{key}: must not be empty")
    if not _RUN_NAME.fullmatch(config.run.name):
        raise ConfigError(
            f"run.name: {config.run.name!r} must not lead outside the folder of runs; use run.dir for any other folder"
        )
    _check_run_dir(config.run.dir)
    _check_date(config.run.date)
    for name in config.gdpo.rewards:
        if not name or "/" in name or name == "total":
            raise ConfigError(
                f"gdpo.rewards: {name!r} is not a valid component name, because metrics are named reward/NAME/mean "
                "and reward/total/mean"
            )


_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run/systemd", "/sbin", "/sys", "/usr/bin",
           "/usr/lib", "/usr/sbin")  # fmt: skip


def _check_date(date: str | None) -> None:
    try:
        datetime.fromisoformat(date or "2026-01-01")
    except ValueError:
        raise ConfigError(f"run.date: must be a date such as 2026-11-28, got {date!r}") from None


def _check_run_dir(folder: str) -> None:
    """Check that ``run.dir`` is a suitable folder and not, for example, a system folder. Raises ConfigError."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in folder):
        raise ConfigError(f"run.dir: {folder!r} contains control characters")
    if len(os.fsencode(folder)) > _LONGEST_PATH:
        raise ConfigError(f"run.dir: is longer than {_LONGEST_PATH} bytes")
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in folder.split("/")):
        raise ConfigError(f"run.dir: contains a name longer than {_LONGEST_NAME} bytes")
    path = os.path.realpath(folder)
    below = [system for system in _SYSTEM if path == system or path.startswith(system + "/")]
    if path == "/" or (below and not path.startswith("/dev/shm/")):
        raise ConfigError(f"run.dir: {folder} is a system folder; use another folder")


def _check_aliases(logger: LoggerConfig) -> None:
    for program in logger.aliases:
        if program not in ALIASED:
            raise ConfigError(f"logger.aliases: {program!r} is not one of {', '.join(ALIASED)}")


def _check_rewards(gdpo: GdpoConfig, algorithm: AlgorithmSpec) -> None:
    rewards = gdpo.rewards
    group = gdpo.num_generations_per_prompt
    if not algorithm.samples:
        return
    if group < (1 if algorithm.head == "value" else 2):
        raise ConfigError(
            f"gdpo.num_generations_per_prompt: must be at least 2, got {group}; samples are compared within their group"
        )
    for k in gdpo.val_pass_at_k:
        if k > gdpo.val_generations_per_prompt:
            raise ConfigError(
                f"gdpo.val_pass_at_k: {k} exceeds gdpo.val_generations_per_prompt ({gdpo.val_generations_per_prompt})"
            )
    if not rewards:
        raise ConfigError("gdpo.rewards: must not be empty; write {component: weight}")
    if not any(rewards.values()):
        raise ConfigError("gdpo.rewards: every weight is 0, so nothing would be trained")


def _check_lengths(policy: PolicyConfig, algorithm: AlgorithmSpec) -> None:
    longest = policy.max_total_sequence_length
    if algorithm.samples and policy.generation.max_new_tokens >= longest:
        raise ConfigError(
            f"policy.generation.max_new_tokens: {policy.generation.max_new_tokens} leaves no room for a prompt in "
            f"policy.max_total_sequence_length {longest}"
        )
    for key in ("micro_batch_tokens", "logprob_micro_batch_tokens"):
        if (budget := getattr(policy, key)) is not None and budget < longest:
            raise ConfigError(
                f"policy.{key}: {budget} is below policy.max_total_sequence_length {longest}; one sequence must fit"
            )


def _check_environments(config: Config, algorithm: AlgorithmSpec) -> None:
    if not config.env and algorithm.samples:
        raise ConfigError("env: must not be empty; write {name: {}}")
    for name, options in config.env.items():
        if options is not None and not isinstance(options, dict):
            raise ConfigError(f"env.{name}: expected options as keys and values, got {options!r}")
        min_valid = (options or {}).get("min_valid")
        group = config.gdpo.num_generations_per_prompt
        if isinstance(min_valid, int) and min_valid > group:
            raise ConfigError(
                f"env.{name}.min_valid: {min_valid} exceeds the {group} samples of a group "
                "(gdpo.num_generations_per_prompt)"
            )
    _check_environment("data.train", config.data.train, config)
    if config.data.validation:
        _check_environment("data.validation", config.data.validation, config)
    elif config.gdpo.val_period or config.gdpo.val_at_start:
        key = "val_period" if config.gdpo.val_period else "val_at_start"
        raise ConfigError(f"gdpo.{key}: requires data.validation, which is null")


def _check_environment(key: str, data: DatasetConfig, config: Config) -> None:
    if data.prompt_template is not None and "{prompt}" not in data.prompt_template:
        raise ConfigError(f"{key}.prompt_template: must contain {{prompt}}, which the prompt replaces")
    names = list(config.env)
    if data.environment is None and data.environment_key is None and len(names) > 1:
        raise ConfigError(f"{key}.environment: must be set because env has several environments: {', '.join(names)}")
    if data.environment is not None and data.environment not in names:
        near = difflib.get_close_matches(data.environment, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"env has {', '.join(names)}"
        raise ConfigError(f"{key}.environment: {data.environment!r} is not defined in env, {hint}")


def _check_schedule(policy: PolicyConfig) -> None:
    schedule = policy.megatron_cfg.scheduler
    prefix = "policy.megatron_cfg.scheduler"
    if schedule.lr_decay_steps is not None and schedule.lr_decay_steps <= schedule.lr_warmup_steps:
        raise ConfigError(
            f"{prefix}.lr_decay_steps: {schedule.lr_decay_steps} must be more than lr_warmup_steps "
            f"{schedule.lr_warmup_steps}"
        )
    lr = policy.megatron_cfg.optimizer.lr
    if schedule.lr_warmup_init is not None and schedule.lr_warmup_init > lr:
        raise ConfigError(
            f"{prefix}.lr_warmup_init: {schedule.lr_warmup_init} is above optimizer.lr ({lr}), "
            "the rate at the end of the warm-up"
        )


def _check_lora(policy: PolicyConfig) -> None:
    lora = policy.lora
    if not lora.rank:
        return
    if policy.sync_ref_model:
        raise ConfigError(
            "policy.sync_ref_model: not supported with policy.lora, whose reference is the unchanged model without "
            "adapters"
        )
    for name in lora.target_modules:
        if name not in LORA_TARGETS:
            near = difflib.get_close_matches(name, LORA_TARGETS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(LORA_TARGETS)}"
            raise ConfigError(
                f"policy.lora.target_modules: {name!r} is not a linear layer of the supported models, {hint}"
            )
    if not lora.target_modules:
        raise ConfigError("policy.lora.target_modules: must not be empty, because nothing would be trained")
    if policy.megatron_cfg.fp8:
        raise ConfigError("policy.megatron_cfg.fp8: conflicts with policy.lora, whose matrices are not in 8 bits")
    if policy.megatron_cfg.fused_logprobs and "lm_head" in lora.target_modules:
        raise ConfigError(
            "policy.megatron_cfg.fused_logprobs: not supported with an adapter on lm_head "
            "(policy.lora.target_modules); use null or false"
        )


def _check_placement(config: Config) -> None:
    if config.cluster.placement == "colocated" and config.rollout.max_staleness:
        raise ConfigError(
            f"cluster.placement: colocated requires rollout.max_staleness 0 (got {config.rollout.max_staleness}), "
            "because engines sleep while the policy trains; use separate, or max_staleness 0"
        )
    check_transport(config)


def check_parallelism(config: Config) -> None:
    """Check that the settings of the parallel layout do not conflict. Raises ConfigError."""
    check_prompt_sharing(config)
    megatron = config.policy.megatron_cfg
    prefix = "policy.megatron_cfg"
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        raise ConfigError(f"{prefix}.sequence_parallel: requires tensor_model_parallel_size above 1")
    if megatron.virtual_pipeline_model_parallel_size and megatron.pipeline_model_parallel_size == 1:
        raise ConfigError(
            f"{prefix}.virtual_pipeline_model_parallel_size: requires pipeline_model_parallel_size above 1"
        )
    check_stages(None, megatron)
    if megatron.overlap_param_gather and megatron.use_distributed_optimizer and not megatron.overlap_grad_reduce:
        raise ConfigError(f"{prefix}.overlap_param_gather: requires overlap_grad_reduce")
    if megatron.recompute_layers is not None and megatron.recompute != "full":
        raise ConfigError(f"{prefix}.recompute_layers: requires recompute: full")
    _check_recomputed_modules(config)
    if megatron.optimizer.offload and config.policy.precision == "float32":
        raise ConfigError(
            f"{prefix}.optimizer.offload: requires policy.precision bfloat16; float32 models have no separate main "
            "weights"
        )
    _check_precision_of_optimizer(config)
    _check_kernels(config)


def _check_precision_of_optimizer(config: Config) -> None:
    """Check the data types of the optimizer's state. Raises ConfigError."""
    megatron = config.policy.megatron_cfg
    prefix = "policy.megatron_cfg.optimizer"
    key = f"{prefix}.use_precision_aware_optimizer"
    if not megatron.optimizer.use_precision_aware_optimizer:
        for name in OPTIMIZER_DTYPES:
            if getattr(megatron.optimizer, name) != "float32":
                raise ConfigError(f"{prefix}.{name}: requires use_precision_aware_optimizer: true")
        return
    if not megatron.use_distributed_optimizer:
        raise ConfigError(f"{key}: requires policy.megatron_cfg.use_distributed_optimizer: true")
    if config.policy.precision != "bfloat16":
        raise ConfigError(f"{key}: requires policy.precision: bfloat16")
    if not config.cluster.gpus_per_node or megatron.transformer_engine is False:
        raise ConfigError(f"{key}: requires TransformerEngine's Adam, on GPUs with transformer_engine not false")
    if megatron.optimizer.offload:
        raise ConfigError(f"{key}: conflicts with {prefix}.offload; use only one of them")


def _check_recomputed_modules(config: Config) -> None:
    """Check ``recompute_modules``. Raises ConfigError."""
    megatron = config.policy.megatron_cfg
    key = "policy.megatron_cfg.recompute_modules"
    for name in megatron.recompute_modules:
        if name not in RECOMPUTED_MODULES:
            raise ConfigError(f"{key}: must be among {', '.join(RECOMPUTED_MODULES)} (got {name!r})")
    if not megatron.recompute_modules:
        raise ConfigError(f"{key}: must not be empty; use recompute: none to recompute nothing")
    if megatron.recompute_modules != MegatronConfig().recompute_modules and megatron.recompute != "selective":
        raise ConfigError(f"{key}: requires recompute: selective")


def _check_kernels(config: Config) -> None:
    """Check that the selected kernels are available and do not conflict. Raises ConfigError."""
    megatron = config.policy.megatron_cfg
    prefix = "policy.megatron_cfg"
    gpus = config.cluster.gpus_per_node > 0
    if megatron.transformer_engine and not gpus:
        raise ConfigError(f"{prefix}.transformer_engine: requires GPUs (cluster.gpus_per_node is 0)")
    if megatron.fused_logprobs and not gpus:
        raise ConfigError(f"{prefix}.fused_logprobs: requires GPUs (cluster.gpus_per_node is 0)")
    if megatron.attention_backend == "sdpa" and megatron.transformer_engine:
        raise ConfigError(f"{prefix}.attention_backend: sdpa (torch) conflicts with transformer_engine: true")
    if megatron.attention_backend == "flex" and not gpus:
        raise ConfigError(
            f"{prefix}.attention_backend: flex requires GPUs, because torch cannot compute its gradient on CPUs; use "
            "auto or sdpa"
        )
    has_engine = gpus and megatron.transformer_engine is not False
    if megatron.fp8 and (not has_engine or megatron.attention_backend == "sdpa"):
        raise ConfigError(f"{prefix}.fp8: requires GPUs and the layers of TransformerEngine")
    if megatron.fp8 and config.policy.precision != "bfloat16":
        raise ConfigError(f"{prefix}.fp8: requires policy.precision bfloat16 for everything except the matrix products")
    if megatron.attention_backend in ("flash", "fused", "unfused") and not has_engine:
        raise ConfigError(
            f"{prefix}.attention_backend: {megatron.attention_backend} requires GPUs and transformer_engine; use auto "
            "or sdpa"
        )


def _notes(config: Config, layout: Layout, updates: int) -> list[str]:
    generation = config.policy.generation
    notes = []
    if generation.top_p < 1 or generation.top_k != -1:
        notes.append(
            "policy.generation: with top_p or top_k, only the sampler's log-probs belong to a truncated "
            "distribution; parity/* metrics grow and loss_fn.old_logprobs: sampler would bias the ratio"
        )
    if layout.idle_gpus:
        notes.append(f"cluster: {layout.idle_gpus} of {layout.gpus} GPUs stay idle")
    warmup = config.policy.megatron_cfg.scheduler.lr_warmup_steps
    if warmup >= updates:
        notes.append(
            f"policy.megatron_cfg.scheduler.lr_warmup_steps: the warm-up of {warmup} updates exceeds the {updates} "
            "updates of the run"
        )
    notes += _learning_rate_notes(config.policy, updates)
    metric = config.checkpointing.metric_name or ""
    if metric.startswith("validation/") and not config.gdpo.val_period:
        notes.append(
            f"checkpointing.metric_name: {metric} requires gdpo.val_period; no checkpoint will be ranked as best"
        )
    if config.gdpo.val_temperature == 0 and config.gdpo.val_generations_per_prompt > 1:
        notes.append("gdpo.val_generations_per_prompt: greedy samples (val_temperature 0) are all identical")
    loss = config.loss_fn
    if loss.reference_policy_kl_penalty and (loss.reference_policy_kl_type, loss.reference_policy_kl_gradient) == (
        "k1",
        "estimator",
    ):
        notes.append(
            "loss_fn.reference_policy_kl_type: k1 in the loss has an expected gradient of 0 and does not constrain "
            "the policy; use k2, k3 or gdpo.kl_in_reward"
        )
    return notes


def _reward_notes(gdpo: GdpoConfig) -> list[str]:
    changed = {*gdpo.constraints, *gdpo.schedules}
    unset = [name for name, weight in gdpo.rewards.items() if weight == 0 and name not in changed]
    return [f"gdpo.rewards: components with weight 0 are only measured: {', '.join(unset)}"] if unset else []


def _learning_rate_notes(policy: PolicyConfig, updates: int) -> list[str]:
    """Return a note if the learning rate is 0 in the last updates of the run."""
    optimizer = policy.megatron_cfg.optimizer
    scheduler = policy.megatron_cfg.scheduler
    prefix = "policy.megatron_cfg.scheduler"
    if scheduler.lr_decay_style == "constant" or optimizer.min_lr:
        return []
    is_ahead = scheduler.lr_warmup_steps > 0 and scheduler.lr_warmup_init is None
    decay = scheduler.lr_decay_steps or max(updates, scheduler.lr_warmup_steps + 1)
    first = decay if is_ahead else decay + 1
    first += (1 - first) % scheduler.lr_hold_updates  # updates that share a rate use that of their first update
    if first > updates:
        return []
    if first == updates == decay:
        return [f"{prefix}.lr_warmup_init: null, so the last update has a learning rate of 0 (min_lr); use 0.0"]
    return [
        f"{prefix}.lr_decay_steps: the learning rate is 0 (min_lr) starting with update {first} of {updates}; use null "
        "to decay over the whole run"
    ]


def _cluster_notes(cluster: ClusterConfig, places: Places) -> list[str]:
    nodes = cluster.num_nodes
    notes = []
    empty = sum(not places.policy_on(node) and not places.engines_on(node) for node in range(nodes))
    if empty:
        notes.append(f"cluster.num_nodes: {empty} of {nodes} nodes have no processes")
    total = nodes + cluster.env_nodes
    if total > 1 and not joined(cluster):
        notes.append(
            f"cluster.address: a run on {total} nodes joins a Ray cluster; set this key, or RAY_ADDRESS on the host "
            "that starts the run"
        )
    if not cluster.address and (address := joined(cluster)):
        notes.append(f"the run joins the Ray cluster at {address} ({address_source(cluster)})")
    return notes
