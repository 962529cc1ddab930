"""Checks across fields, before anything is started: what cannot work is refused, what may surprise is noted.

Run by ``--dry-run`` and at the start of every run. Looks at files on this machine, at no network and no GPU.
"""

from __future__ import annotations

import difflib
import os
import re

from gdpo_nemo.algorithms.ranges import check_numbers
from gdpo_nemo.config.algorithm_choice import has_value_head, samples
from gdpo_nemo.config.choices import ALIASED, LORA_TARGETS
from gdpo_nemo.config.effects import SWITCHED_OFF, keys_without_effect, value_of
from gdpo_nemo.config.env_workers import place_workers
from gdpo_nemo.config.files import check_files
from gdpo_nemo.config.health_checks import read_checks
from gdpo_nemo.config.layout import Layout, resolve_layout, updates_per_step
from gdpo_nemo.config.objective_checks import check_learning, objective_notes
from gdpo_nemo.config.placement import Places, joined, place
from gdpo_nemo.config.ppo_checks import check_ppo
from gdpo_nemo.config.prompt_sharing import check_prompt_sharing
from gdpo_nemo.config.reuse_checks import check_reuse
from gdpo_nemo.config.rollout_bounds import check_rollout_bounds
from gdpo_nemo.config.schema import Config, DatasetConfig
from gdpo_nemo.config.stages import check_stages
from gdpo_nemo.config.strided_checks import check_strided
from gdpo_nemo.config.supervised_checks import check_supervised
from gdpo_nemo.config.teacher_checks import check_teacher
from gdpo_nemo.config.transports import check_transport
from gdpo_nemo.config.turn_limits import check_turns_kept
from gdpo_nemo.errors import ConfigError

_LONGEST_NAME = 255
_LONGEST_PATH = 3000
"""Bytes; Linux takes 4096, names of a run's files included."""
_RUN_NAME = re.compile(r"(?!/)(?!.*(^|/)\.\.(/|$))[^\x00-\x1f\x7f]*")


def validate(config: Config) -> list[str]:
    """Refuses what cannot run as written; returns notes on what runs but may surprise.

    Raises:
        ConfigError: names the key and the remedy.
    """
    _check_names(config)
    check_ranges(config)
    _check_rewards(config)
    _check_lengths(config)
    _check_environments(config)
    check_parallelism(config)
    _check_schedule(config)
    _check_lora(config)
    _check_placement(config)
    read_checks(config.health.checks, config.health.window, "health.checks")
    _check_aliases(config)
    layout = resolve_layout(config)
    places = place(config)
    place_workers(config)
    updates_per_step(config)
    idle = keys_without_effect(config)
    if idle:
        raise ConfigError(f"{idle[0]}; remove it")
    check_reuse(config)
    check_rollout_bounds(config)
    check_learning(config)
    check_ppo(config)
    check_supervised(config)
    check_strided(config)
    check_turns_kept(config)
    check_files(config, layout)
    check_teacher(config, layout)
    return [*_notes(config, layout), *_cluster_notes(config, places), *keys_without_effect(config, SWITCHED_OFF)]


def check_ranges(config: Config) -> None:
    """Refuse numbers outside the range that their field declares. Raises ConfigError."""
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
            f"run.name: {config.run.name!r} must not lead out of the folder of the runs; run.dir takes any folder"
        )
    _check_run_dir(config.run.dir)
    for name in config.gdpo.rewards:
        if not name or "/" in name or name == "total":
            raise ConfigError(
                f"gdpo.rewards: {name!r} cannot name a component; metrics are called reward/NAME/mean and "
                "reward/total/mean"
            )


_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run/systemd", "/sbin", "/sys", "/usr/bin",
           "/usr/lib", "/usr/sbin")  # fmt: skip


def _check_run_dir(folder: str) -> None:
    """Refuse a folder that no run can be meant to write. Raises ConfigError."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in folder):
        raise ConfigError(f"run.dir: {folder!r} has characters that no path should have")
    if len(os.fsencode(folder)) > _LONGEST_PATH:
        raise ConfigError(f"run.dir: is longer than {_LONGEST_PATH} bytes")
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in folder.split("/")):
        raise ConfigError(f"run.dir: has a name of more than {_LONGEST_NAME} bytes in it")
    path = os.path.realpath(folder)
    below = [place for place in _SYSTEM if path == place or path.startswith(place + "/")]
    if path == "/" or (below and not path.startswith("/dev/shm/")):
        raise ConfigError(f"run.dir: {folder} is of the system, and no folder of a run")


def _check_aliases(config: Config) -> None:
    for program in config.logger.aliases:
        if program not in ALIASED:
            raise ConfigError(f"logger.aliases: {program!r} is none of {', '.join(ALIASED)}")


def _check_rewards(config: Config) -> None:
    rewards = config.gdpo.rewards
    group = config.gdpo.num_generations_per_prompt
    if not samples(config):
        return
    if group < (1 if has_value_head(config) else 2):
        raise ConfigError(
            f"gdpo.num_generations_per_prompt: must be at least 2, got {group}; samples are compared within their group"
        )
    for k in config.gdpo.val_pass_at_k:
        if k > config.gdpo.val_generations_per_prompt:
            raise ConfigError(
                f"gdpo.val_pass_at_k: {k} is more than gdpo.val_generations_per_prompt "
                f"({config.gdpo.val_generations_per_prompt})"
            )
    if not rewards:
        raise ConfigError("gdpo.rewards: names no component; write {component: weight}")
    if not any(rewards.values()):
        raise ConfigError("gdpo.rewards: every weight is 0, so nothing would be learnt")


def _check_lengths(config: Config) -> None:
    policy = config.policy
    longest = config.policy.max_total_sequence_length
    if samples(config) and policy.generation.max_new_tokens >= longest:
        raise ConfigError(
            f"policy.generation.max_new_tokens: {policy.generation.max_new_tokens} leaves no room for a prompt in "
            f"policy.max_total_sequence_length {longest}"
        )
    if policy.micro_batch_tokens < longest:
        raise ConfigError(
            f"policy.micro_batch_tokens: {policy.micro_batch_tokens} is below policy.max_total_sequence_length "
            f"{longest}; one sequence must fit"
        )


def _check_environments(config: Config) -> None:
    if not config.env and samples(config):
        raise ConfigError("env: names no environment; write {name: {}}")
    for name, options in config.env.items():
        if options is not None and not isinstance(options, dict):
            raise ConfigError(f"env.{name}: expected options as keys and values, got {options!r}")
        enough = (options or {}).get("min_valid")
        group = config.gdpo.num_generations_per_prompt
        if isinstance(enough, int) and enough > group:
            raise ConfigError(
                f"env.{name}.min_valid: {enough} verdicts never come, a group has {group} samples "
                "(gdpo.num_generations_per_prompt)"
            )
    _check_environment("data.train", config.data.train, config)
    if config.data.validation:
        _check_environment("data.validation", config.data.validation, config)
    elif config.gdpo.val_period or config.gdpo.val_at_start:
        key = "val_period" if config.gdpo.val_period else "val_at_start"
        raise ConfigError(f"gdpo.{key}: asks for validation, but data.validation is null")


def _check_environment(key: str, data: DatasetConfig, config: Config) -> None:
    if data.prompt_template is not None and "{prompt}" not in data.prompt_template:
        raise ConfigError(f"{key}.prompt_template: must contain {{prompt}}, where the prompt stands")
    names = list(config.env)
    if data.environment is None and data.environment_key is None and len(names) > 1:
        raise ConfigError(f"{key}.environment: must be set, env has several: {', '.join(names)}")
    if data.environment is not None and data.environment not in names:
        near = difflib.get_close_matches(data.environment, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"env has {', '.join(names)}"
        raise ConfigError(f"{key}.environment: {data.environment!r} is not under env, {hint}")


def _check_schedule(config: Config) -> None:
    schedule = config.policy.megatron_cfg.scheduler
    prefix = "policy.megatron_cfg.scheduler"
    if schedule.lr_decay_steps is not None and schedule.lr_decay_steps <= schedule.lr_warmup_steps:
        raise ConfigError(
            f"{prefix}.lr_decay_steps: {schedule.lr_decay_steps} must be more than lr_warmup_steps "
            f"{schedule.lr_warmup_steps}"
        )
    lr = config.policy.megatron_cfg.optimizer.lr
    if schedule.lr_warmup_init is not None and schedule.lr_warmup_init > lr:
        raise ConfigError(
            f"{prefix}.lr_warmup_init: {schedule.lr_warmup_init} is above the {lr} of optimizer.lr that it rises to"
        )


def _check_lora(config: Config) -> None:
    lora = config.policy.lora
    if not lora.rank:
        return
    if config.policy.sync_ref_model:
        raise ConfigError(
            "policy.sync_ref_model: under policy.lora the reference is the model without its adapters, which stays"
        )
    for name in lora.target_modules:
        if name not in LORA_TARGETS:
            near = difflib.get_close_matches(name, LORA_TARGETS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(LORA_TARGETS)}"
            raise ConfigError(f"policy.lora.target_modules: {name!r} is not a linear layer of these models, {hint}")
    if not lora.target_modules:
        raise ConfigError("policy.lora.target_modules: names no layer, so nothing would be learnt")
    if config.policy.megatron_cfg.fp8:
        raise ConfigError("policy.megatron_cfg.fp8: cannot go with policy.lora, whose matrices are not in 8 bits")
    if config.policy.megatron_cfg.fused_logprobs and "lm_head" in lora.target_modules:
        raise ConfigError(
            "policy.megatron_cfg.fused_logprobs: its kernels know no adapter on lm_head (policy.lora.target_modules); "
            "use null or false"
        )


def _check_placement(config: Config) -> None:
    if config.cluster.placement == "colocated" and config.rollout.max_staleness:
        raise ConfigError(
            f"cluster.placement: colocated engines sleep while the policy trains, so nothing can run ahead "
            f"(rollout.max_staleness {config.rollout.max_staleness}); use separate, or max_staleness 0"
        )
    check_transport(config)


def check_parallelism(config: Config) -> None:
    """Refuses switches of the layout that contradict each other. Raises ConfigError."""
    check_prompt_sharing(config)
    megatron = config.policy.megatron_cfg
    gpus = config.cluster.gpus_per_node
    prefix = "policy.megatron_cfg"
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        raise ConfigError(f"{prefix}.sequence_parallel: needs tensor_model_parallel_size above 1")
    if megatron.virtual_pipeline_model_parallel_size and megatron.pipeline_model_parallel_size == 1:
        raise ConfigError(f"{prefix}.virtual_pipeline_model_parallel_size: needs pipeline_model_parallel_size above 1")
    check_stages(None, megatron)
    if megatron.overlap_param_gather and megatron.use_distributed_optimizer and not megatron.overlap_grad_reduce:
        raise ConfigError(f"{prefix}.overlap_param_gather: needs overlap_grad_reduce")
    if megatron.recompute_layers is not None and megatron.recompute != "full":
        raise ConfigError(f"{prefix}.recompute_layers: needs recompute: full")
    if megatron.optimizer.offload and config.policy.precision == "float32":
        raise ConfigError(
            f"{prefix}.optimizer.offload: needs policy.precision bfloat16; in float32 the model is the main weights"
        )
    if megatron.transformer_engine and not gpus:
        raise ConfigError(f"{prefix}.transformer_engine: needs GPUs (cluster.gpus_per_node is 0)")
    if megatron.fused_logprobs and not gpus:
        raise ConfigError(f"{prefix}.fused_logprobs: its kernels need GPUs (cluster.gpus_per_node is 0)")
    if megatron.attention_backend == "sdpa" and megatron.transformer_engine:
        raise ConfigError(f"{prefix}.attention_backend: sdpa is torch's; it cannot go with transformer_engine: true")
    if megatron.fp8 and (not gpus or megatron.transformer_engine is False or megatron.attention_backend == "sdpa"):
        raise ConfigError(f"{prefix}.fp8: needs GPUs and the layers of TransformerEngine")
    if megatron.fp8 and config.policy.precision != "bfloat16":
        raise ConfigError(
            f"{prefix}.fp8: needs policy.precision bfloat16, which everything but the matrix products stays in"
        )
    if megatron.attention_backend in ("flash", "fused", "unfused") and (
        not gpus or megatron.transformer_engine is False
    ):
        raise ConfigError(
            f"{prefix}.attention_backend: {megatron.attention_backend} needs GPUs and transformer_engine; use auto or "
            "sdpa"
        )


def _notes(config: Config, layout: Layout) -> list[str]:
    generation = config.policy.generation
    notes = []
    if generation.top_p < 1 or generation.top_k != -1:
        notes.append(
            "policy.generation: with top_p or top_k the sampler's log-probs are of a truncated distribution; the "
            "trainer's are not, so parity/* grows and loss_fn.old_logprobs: sampler would bias the ratio"
        )
    if layout.idle_gpus:
        notes.append(f"cluster: {layout.idle_gpus} of {layout.gpus} GPUs stay idle")
    warmup = config.policy.megatron_cfg.scheduler.lr_warmup_steps
    updates = config.gdpo.max_num_steps * updates_per_step(config)
    if warmup >= updates:
        notes.append(
            f"policy.megatron_cfg.scheduler.lr_warmup_steps: {warmup} outlast the {updates} updates of the run"
        )
    notes += _learning_rate_notes(config, updates)
    metric = config.checkpointing.metric_name or ""
    if metric.startswith("validation/") and not config.gdpo.val_period:
        notes.append(f"checkpointing.metric_name: {metric} needs gdpo.val_period; no checkpoint will count as best")
    if config.gdpo.val_temperature == 0 and config.gdpo.val_generations_per_prompt > 1:
        notes.append("gdpo.val_generations_per_prompt: greedy samples (val_temperature 0) are all alike")
    loss = config.loss_fn
    if loss.reference_policy_kl_penalty and (loss.reference_policy_kl_type, loss.reference_policy_kl_gradient) == (
        "k1",
        "estimator",
    ):
        notes.append(
            "loss_fn.reference_policy_kl_type: k1 in the loss has an expected gradient of 0 and does not hold the "
            "policy; k2 and k3 do, and so does gdpo.kl_in_reward"
        )
    notes += objective_notes(config)
    unset = [name for name, weight in config.gdpo.rewards.items() if weight == 0]
    if unset:
        notes.append(f"gdpo.rewards: weight 0, measured but not trained: {', '.join(unset)}")
    return notes


def _learning_rate_notes(config: Config, updates: int) -> list[str]:
    optimizer = config.policy.megatron_cfg.optimizer
    scheduler = config.policy.megatron_cfg.scheduler
    decay = scheduler.lr_decay_steps
    if scheduler.lr_decay_style == "constant" or decay is None or decay >= updates or optimizer.min_lr:
        return []
    return [
        f"policy.megatron_cfg.scheduler.lr_decay_steps: the learning rate is 0 (min_lr) from update {decay + 1} of "
        f"{updates} on; null decays over the whole run"
    ]


def _cluster_notes(config: Config, places: Places) -> list[str]:
    nodes = config.cluster.num_nodes
    notes = []
    empty = sum(not places.policy_on(node) and not places.engines_on(node) for node in range(nodes))
    if empty:
        notes.append(f"cluster.num_nodes: {empty} of {nodes} nodes get no process")
    total = nodes + config.cluster.env_nodes
    if total > 1 and not joined(config.cluster):
        notes.append(
            f"cluster.address: a run on {total} nodes joins a Ray cluster; set it or RAY_ADDRESS where the run starts"
        )
    return notes
