"""Checks of the whole config before a run starts. Invalid settings are refused. Valid settings that may be unintended
cause a note.

The checks run at the start of every run and with ``--dry-run``. The checks read local files, but use neither the
network nor a GPU.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from gdpo_nemo.algorithms.ranges import check_numbers
from gdpo_nemo.algorithms.rubrics import ALL
from gdpo_nemo.config.algorithm_choice import AlgorithmSpec, spec_of
from gdpo_nemo.config.allowed_values import ALIASED, LORA_TARGETS, RECOMPUTED_MODULES
from gdpo_nemo.config.effects import SWITCHED_OFF, keys_without_effect, value_of
from gdpo_nemo.config.environment_algorithms import check_whole_run, own_algorithm, own_configs
from gdpo_nemo.config.health import read_checks
from gdpo_nemo.config.layout import Layout, Resolved, check_prompt_sharing, resolve_layout, updates_per_step
from gdpo_nemo.config.model_checks import check_files
from gdpo_nemo.config.objective_checks import check_algorithm, check_learning, check_strided, objective_notes
from gdpo_nemo.config.placement import Places, address_source, joined, place, place_workers
from gdpo_nemo.config.requirements import check_requirements
from gdpo_nemo.config.rollout_checks import check_parsers, check_replay, check_rollout_bounds, check_turns_kept
from gdpo_nemo.config.schema import ClusterConfig, Config, DatasetConfig, GdpoConfig, LoggerConfig
from gdpo_nemo.config.sections import PolicyConfig
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
    check_prompt_sharing(config)
    _check_recomputed_modules(config)
    _check_lora(config.policy)
    check_transport(config)
    read_checks(config.health.checks, config.health.window, "health.checks")
    _check_aliases(config.logger)
    layout = resolve_layout(config, algorithm)
    places = place(config.cluster, layout)
    place_workers(config)
    updates = config.gdpo.max_num_steps * updates_per_step(config, algorithm)
    idle = keys_without_effect(config)
    if idle:
        raise ConfigError(f"{idle[0]}; remove it")
    check_replay(config)
    check_requirements(config)
    check_rollout_bounds(config)
    check_learning(config, algorithm)
    check_algorithm(config, algorithm, layout)
    check_whole_run(config)
    _check_own_algorithms(config, layout)
    check_strided(config, algorithm)
    check_turns_kept(config)
    check_parsers(config.policy.generation)
    model = check_files(config, layout, weights)
    notes = (
        *_notes(config, layout, updates),
        *objective_notes(config, algorithm),
        *_reward_notes(config.gdpo),
        *_cluster_notes(config.cluster, places),
        *keys_without_effect(config, SWITCHED_OFF),
    )
    return Resolved(config, algorithm, layout, model, notes)


def _check_own_algorithms(config: Config, layout: Layout) -> None:
    """Check the config of each environment that has its own algorithm like that of the run. Raises ConfigError."""
    for name, own in own_configs(config).items():
        algorithm = spec_of(own)
        try:
            check_ranges(own)
            _check_component_names(own.gdpo)
            _check_rewards(own.gdpo, algorithm)
            idle = [line for line in keys_without_effect(own) if _sets(config.env[name], line.partition(": ")[0])]
            if idle:
                raise ConfigError(f"{idle[0]}; remove it")
            check_requirements(own)
            check_learning(own, algorithm)
            check_algorithm(own, algorithm, layout)
        except ConfigError as error:
            raise error.within(f"env.{name}.algorithm") from None


def _sets(options: Mapping[str, Any], key: str) -> bool:
    """Return whether the algorithm of an environment sets a dotted key."""
    node: Any = own_algorithm(options)
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


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
    _check_component_names(config.gdpo)


def _check_component_names(gdpo: GdpoConfig) -> None:
    for name in gdpo.rewards:
        stem = name.removesuffix(ALL)
        if not stem or "/" in stem or stem == "total":
            raise ConfigError(
                f"gdpo.rewards: {name!r} is not a valid component name, because metrics are named reward/NAME/mean "
                "and reward/total/mean; only the name of a family, such as rubric/*, contains a slash"
            )
        if name != stem and stem in gdpo.rewards:
            raise ConfigError(f"gdpo.rewards: {name!r} conflicts with {stem!r}; rename one")


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


def _check_environment(key: str, data: DatasetConfig, config: Config) -> None:
    if data.prompt_template is not None and "{prompt}" not in data.prompt_template:
        raise ConfigError(f"{key}.prompt_template: must contain {{prompt}}, which the prompt replaces")
    names = list(config.env)
    all_generate = data.path is None and config.data.mix
    if data.environment is None and data.environment_key is None and len(names) > 1 and not all_generate:
        remedy = "" if data.path else "; or list their fractions in data.mix, so that all of them generate prompts"
        raise ConfigError(
            f"{key}.environment: must be set because env has several environments: {', '.join(names)}{remedy}"
        )
    if data.environment is not None and data.environment not in names:
        near = difflib.get_close_matches(data.environment, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"env has {', '.join(names)}"
        raise ConfigError(f"{key}.environment: {data.environment!r} is not defined in env, {hint}")


def _check_lora(policy: PolicyConfig) -> None:
    lora = policy.lora
    if not lora.rank:
        return
    for name in lora.target_modules:
        if name not in LORA_TARGETS:
            near = difflib.get_close_matches(name, LORA_TARGETS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(LORA_TARGETS)}"
            raise ConfigError(
                f"policy.lora.target_modules: {name!r} is not a linear layer of the supported models, {hint}"
            )
    if not lora.target_modules:
        raise ConfigError("policy.lora.target_modules: must not be empty, because nothing would be trained")


def _check_recomputed_modules(config: Config) -> None:
    """Check ``recompute_modules``. Raises ConfigError."""
    megatron = config.policy.megatron_cfg
    key = "policy.megatron_cfg.recompute_modules"
    for name in megatron.recompute_modules:
        if name not in RECOMPUTED_MODULES:
            raise ConfigError(f"{key}: must be among {', '.join(RECOMPUTED_MODULES)} (got {name!r})")
    if not megatron.recompute_modules:
        raise ConfigError(f"{key}: must not be empty; use recompute: none to recompute nothing")


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
