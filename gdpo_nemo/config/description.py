"""What a run will do, worked out from its config: processes, batch arithmetic, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from gdpo_nemo.config.algorithm_choice import PPO, has_value_head, samples, sequences_per_prompt
from gdpo_nemo.config.files import known_model_config, model_source
from gdpo_nemo.config.layout import Layout, resolve_layout, samples_per_step, samples_per_update, updates_per_step
from gdpo_nemo.config.placement import describe_places
from gdpo_nemo.config.rollout_bounds import (
    arithmetic,
    resolved_bound,
    resolved_depth,
    resolved_window,
    steps_ahead,
    valid_needed,
)
from gdpo_nemo.config.schema import Config


def describe(config: Config, notes: Sequence[str] = ()) -> str:
    """The plan as aligned lines, one subject a line, notes last."""
    layout = resolve_layout(config)
    lines = [
        ("run", _folder(config)),
        ("model", _model(config)),
        ("policy", _policy(config, layout)),
        ("engines", _engines(config, layout)),
        *([("nodes", describe_places(config))] if config.cluster.num_nodes + config.cluster.env_nodes > 1 else []),
        ("batch", _batch(config)),
        ("memory", _micro_batch(config)),
        ("length", _length(config)),
        ("rewards", _rewards(config)),
        ("staleness", _staleness(config)),
        *(("note", note) for note in notes),
    ]
    return "\n".join(f"{subject:<10} {text}" for subject, text in lines)


def _folder(config: Config) -> str:
    folder = Path(config.run.dir)
    started = (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()
    return f"{config.run.name} in {folder} ({'exists: resumes' if started else 'new'}), seed {config.run.seed}"


def _hub(config: Config) -> str:
    unchecked = known_model_config(config) is None
    return "from the Hugging Face hub" + ", its family unchecked before it is here" * unchecked


def _model(config: Config) -> str:
    policy = config.policy
    foreign = model_source(config)
    if foreign is not None:
        source = foreign.format.value
    elif Path(policy.model_name).is_dir():
        source = "a folder here"
    else:
        source = f"made by {policy.model_factory}" if policy.model_factory else _hub(config)
    return (
        f"{policy.model_name} ({source}), {policy.precision}, sequences of at most "
        f"{policy.max_total_sequence_length} tokens"
    )


def _policy(config: Config, layout: Layout) -> str:
    device = f"{layout.policy_ranks} of {layout.gpus} GPUs" if layout.gpus else "CPU"
    mesh = f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} x data {layout.data}"
    experts = f", expert {layout.expert}" if layout.expert > 1 else ""
    return f"{_count(layout.policy_ranks, 'Megatron rank')} on {device} = {mesh}{experts}"


def _engines(config: Config, layout: Layout) -> str:
    generation = config.policy.generation
    if not samples(config):
        return f"none, {config.algorithm.type} does not sample"
    device = f"{layout.engine_ranks} of {layout.gpus} GPUs" if layout.gpus else "CPU"
    if layout.colocated:
        device += " beside policy ranks, asleep while these train"
    each = f" of {layout.engine_tensor} ranks" if layout.engine_tensor > 1 else ""
    return (
        f"{_count(layout.engines, 'vLLM engine')}{each} on {device}, at most {generation.max_new_tokens} new tokens "
        f"at temperature {generation.temperature:g}"
    )


def _batch(config: Config) -> str:
    samples = samples_per_step(config)
    updates = updates_per_step(config)
    return (
        f"{config.gdpo.num_prompts_per_step} prompts x {sequences_per_prompt(config)} samples = {samples} "
        f"samples = {_count(updates, 'optimizer update')} of {samples_per_update(config)}"
    )


def _micro_batch(config: Config) -> str:
    tokens = config.policy.micro_batch_tokens
    longest = config.policy.max_total_sequence_length
    return f"micro-batches of at most {tokens} tokens, room for {tokens // longest} sequences of full length"


def _length(config: Config) -> str:
    gdpo = config.gdpo
    saving = config.checkpointing
    steps = gdpo.max_num_steps
    parts = [
        f"{_count(steps, 'step')} = {steps * samples_per_step(config)} samples, {steps * updates_per_step(config)} "
        "updates"
    ]
    if gdpo.max_num_epochs is not None:
        parts[0] = f"at most {parts[0]}, and {_count(gdpo.max_num_epochs, 'epoch')} of the training prompts"
    prompts = "all" if gdpo.val_prompts is None else gdpo.val_prompts
    when = [f"every {gdpo.val_period} steps"] * bool(gdpo.val_period) + ["at the start"] * gdpo.val_at_start
    parts.append(f"validation {' and '.join(when)} on {prompts} held-out prompts" if when else "no validation")
    parts.append(f"checkpoint every {saving.save_period} steps" if saving.enabled else "no checkpoints")
    return "; ".join(parts)


def _rewards(config: Config) -> str:
    if not samples(config):
        return f"none, {config.algorithm.type} does not sample"
    weights = " + ".join(f"{weight:g} {name}" for name, weight in config.gdpo.rewards.items())
    preset = f", preset {config.gdpo.preset}" if config.gdpo.preset else ""
    estimator = PPO if has_value_head(config) else config.gdpo.estimator
    return f"{weights} by {estimator}{preset}, loss {config.loss_fn.type} ({config.loss_fn.aggregation})"


def _staleness(config: Config) -> str:
    rollout = config.rollout
    parts = ["0, exactly on-policy" if rollout.max_staleness == 0 else _ahead(config)]
    if rollout.group_timeout_s is not None:
        least = f"{valid_needed(config)} of {config.gdpo.num_generations_per_prompt}"
        parts.append(f"after {rollout.group_timeout_s:g} s a group is trained from {least} verdicts on, else dropped")
    buffer = rollout.replay_buffer
    if buffer.groups:
        parts.append(
            f"{buffer.groups} of the {config.gdpo.num_prompts_per_step} groups of a step are of earlier ones, each "
            f"{_count(buffer.reuse, 'time')} at most, and at most {_count(buffer.max_age, 'step')} old"
        )
    return "; ".join(parts)


def _ahead(config: Config) -> str:
    rollout = config.rollout
    depth = resolved_depth(config)
    fewest = config.gdpo.num_prompts_per_step
    parts = [
        f"at most {_count(rollout.max_staleness, 'step')}",
        f"bound {arithmetic(config)} groups",
        f"window {resolved_window(config)}",
        f"depth auto ({fewest} to {resolved_bound(config)})" if depth is None else f"depth {depth}",
        "new weights every " + ("step" if rollout.sync_every == 1 else f"{rollout.sync_every} steps"),
    ]
    if steps_ahead(config) > 0:
        parts.append(f"kv {rollout.kv}")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
