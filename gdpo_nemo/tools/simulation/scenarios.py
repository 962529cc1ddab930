"""Conversion of a config to a scenario, with speeds from the roofline model, a run or the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from gdpo_nemo.config.layout import Resolved
from gdpo_nemo.config.rollout_checks import allows_hosts, engines_report_groups
from gdpo_nemo.config.schema import Config, RolloutConfig
from gdpo_nemo.config.sections import PolicyConfig
from gdpo_nemo.environments.registry import BUILT_IN, dedicated_workers, is_remote, plugin_of, verifies_by_sample
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.weights import active_parameters
from gdpo_nemo.planning.fit import changed
from gdpo_nemo.planning.hardware import Device, Rates
from gdpo_nemo.planning.memory import engine_memory
from gdpo_nemo.planning.speed import Lengths, expected_lengths, sync_work, training_work
from gdpo_nemo.tools.simulation.engine import EngineRates
from gdpo_nemo.tools.simulation.records import Distribution, LogNormal, Scenario
from gdpo_nemo.utils.errors import ConfigError

MAX_GPUS = 1024
SAMPLE_S = 0.0003
"""Driver CPU seconds per sample, without requests to engines and their replies (``tests/benchmarks/rehearsal.py``)."""
HOST_S = 0.00012
"""Driver CPU seconds per sample that rollout hosts sample and verify."""
REPLY_S = 0.0009
"""Driver CPU seconds of a request to an engine and its reply, which contains a sample, a turn or a group."""
_SIGMA = 1.0
"""Default standard deviation of the logarithm of completion lengths."""


@dataclass(frozen=True)
class Overrides:
    """Values from the command line. Values other than None replace the values of config, roofline model and run."""

    decode_ms: float | None = None
    """Milliseconds per decoding step, independent of the number of sequences."""
    per_sequence_ms: float | None = None
    train_s: float | None = None
    publish_s: float | None = None
    median: float | None = None
    mean: float | None = None
    sigma: float | None = None
    cap: float | None = None
    prompt: float | None = None
    verify_s: float | None = None
    verify_sigma: float = 0.0
    verify_workers: int | None = None
    turns: int | None = None
    turn_s: float = 0.0
    window: int | None = None
    depth: int | str | None = None
    kv: str | None = None
    group_timeout_s: float | None = None

    @property
    def complete(self) -> bool:
        """True if all speeds are specified, so that neither the model's shape nor a device is needed."""
        return None not in (self.decode_ms, self.train_s, self.publish_s)


def scenario_from(
    resolved: Resolved,
    shape: ModelDescription | None,
    device: Device,
    rates: Rates,
    overrides: Overrides,
    lengths: Distribution | None = None,
) -> Scenario:
    """Convert a config to a scenario.

    Args:
        shape: shape of the model. None is allowed only if ``overrides.complete`` is true.
        lengths: completion lengths measured in a run. None means assumed lengths.

    Raises:
        ConfigError: if values are inconsistent. The message names the key or option.
    """
    config = resolved.config
    rollout = config.rollout
    completion_lengths = lengths or _lengths(config.policy, rates, overrides)
    expected = expected_lengths(config.policy, rates)
    prompt = expected.prompt if overrides.prompt is None else overrides.prompt
    sizes = Lengths(prompt, completion_lengths.mean, completion_lengths.longest)
    slots, kv_tokens = config.policy.generation.vllm_cfg.max_num_seqs, float("inf")
    if shape is not None:
        memory = engine_memory(config, shape, int(device.memory))
        kv_tokens = max(1, memory.kv_cache // max(1, memory.bytes_per_token))
        slots = max(1, min(slots, int(kv_tokens / sizes.total)))
    turns = overrides.turns or (rollout.turns.max_turns if rollout.turns else 1)
    driver_s, reply_s = driver_seconds(config, turns)
    return Scenario(
        engines=config.policy.generation.engines,
        rates=_engine_rates(config, shape, device, rates, overrides),
        slots=slots,
        groups=config.gdpo.num_prompts_per_step,
        samples=config.gdpo.num_generations_per_prompt,
        lengths=completion_lengths,
        train_s=_train(resolved, shape, device, rates, sizes) if overrides.train_s is None else overrides.train_s,
        publish_s=_publish(resolved, shape, device, rates) if overrides.publish_s is None else overrides.publish_s,
        prompt_tokens=prompt,
        driver_s=driver_s,
        reply_s=reply_s,
        turns=turns,
        turn_s=overrides.turn_s,
        kv_tokens=kv_tokens,
        **_verifiers(rates, overrides),
        **schedule_settings(config.rollout, overrides),
    )


def driver_seconds(config: Config, turns: int) -> tuple[float, float]:
    """Return the CPU seconds of the driver per sample, and the additional seconds if ``rollout.group_timeout_s`` is
    set."""
    # Custom environments are not imported. Most of them verify whole groups in worker processes.
    built_in = {name: options for name, options in config.env.items() if plugin_of(name, options) in BUILT_IN}
    in_workers = not any(is_remote(name, o or {}) or dedicated_workers(name, o) for name, o in built_in.items())
    if allows_hosts(config) and in_workers and (turns == 1 or config.rollout.max_staleness):
        return HOST_S, 0.0
    by_sample = any(verifies_by_sample(name, options) for name, options in built_in.items())
    if turns > 1 or by_sample:
        return SAMPLE_S + turns * REPLY_S, 0.0
    if not engines_report_groups(config.policy.generation):
        # The samples that an engine finishes while the driver is busy are one reply, so few engines cause few replies.
        return SAMPLE_S, 0.0
    together = REPLY_S / config.gdpo.num_generations_per_prompt
    return SAMPLE_S + together, REPLY_S - together


def schedule_settings(rollout: RolloutConfig, overrides: Overrides) -> dict[str, Any]:
    """Return the scenario's staleness, window, depth, KV cache handling and deadline.

    Values from the command line take precedence over values of the config.
    """

    def choice(name: str) -> Any:
        value = getattr(overrides, name)
        return getattr(rollout, name) if value is None else value

    staleness = rollout.max_staleness
    depth = choice("depth")
    window = choice("window")
    if window is None:  # default if rollout.window is null
        window = 1
    return {
        "max_staleness": staleness,
        "window": window,
        "depth": int(depth) if str(depth).isdecimal() else depth,
        "kv": choice("kv"),
        "group_timeout_s": choice("group_timeout_s"),
    }


def _lengths(policy: PolicyConfig, rates: Rates, overrides: Overrides) -> LogNormal:
    expected = expected_lengths(policy, rates)
    cap = expected.longest if overrides.cap is None else overrides.cap
    sigma = _SIGMA if overrides.sigma is None else overrides.sigma
    if overrides.median is not None:
        return LogNormal(overrides.median, sigma, cap)
    mean = expected.completion if overrides.mean is None else overrides.mean
    try:
        return LogNormal.from_mean(mean, sigma, cap)
    except ValueError as error:
        raise ConfigError(f"--mean: {error}") from None


def _engine_rates(
    config: Config, shape: ModelDescription | None, device: Device, rates: Rates, overrides: Overrides
) -> EngineRates:
    each = (overrides.per_sequence_ms or 0.0) / 1e3
    if shape is None:
        return EngineRates((overrides.decode_ms or 0.0) / 1e3, each)
    memory = engine_memory(config, shape, int(device.memory))
    tensor = config.policy.generation.vllm_cfg.tensor_parallel_size
    factor = rates.generation.factor
    arithmetic = factor * 2 * active_parameters(shape) / (tensor * device.compute)
    if overrides.decode_ms is not None:
        return EngineRates(overrides.decode_ms / 1e3, each, prefill=arithmetic)
    return EngineRates(
        fixed=rates.generation.fixed,
        per_sequence=each,
        weights=factor * memory.weights / device.bandwidth,
        per_token=factor * memory.bytes_per_token / device.bandwidth,
        arithmetic=arithmetic,
        prefill=arithmetic,
    )


def _train(resolved: Resolved, shape: ModelDescription | None, device: Device, rates: Rates, lengths: Lengths) -> float:
    if shape is None:
        raise ConfigError("--train-s: required, because the model's shape is unknown")
    work = training_work(resolved, shape, device, lengths)
    return rates.training.seconds(work.units, work.ideal)


def _publish(resolved: Resolved, shape: ModelDescription | None, device: Device, rates: Rates) -> float:
    if shape is None:
        raise ConfigError("--publish-s: required, because the model's shape is unknown")
    work = sync_work(resolved, shape, device)
    return rates.sync.seconds(work.units, work.ideal)


def _verifiers(rates: Rates, overrides: Overrides) -> dict[str, Any]:
    """Return the verifier settings from the command line.

    By default, one verifier takes ``rates.verify`` seconds per sample.
    """
    if overrides.verify_s is None:
        return {"verifier": LogNormal(rates.verify), "verify_workers": 1 if rates.verify else 0}
    verifier = LogNormal.from_mean(overrides.verify_s, overrides.verify_sigma)
    return {"verifier": verifier, "verify_workers": overrides.verify_workers or 0}


# -- more or fewer GPUs ------------------------------------------------------------------------------------------------


def scaled(resolved: Resolved, gpus: int | None, split: float | None) -> Resolved:
    """Return the config on ``gpus`` GPUs, with the fraction ``split`` for sampling. None keeps the current value.

    The policy gets as many complete replicas as fit, but at most one per sample of a step. All remaining GPUs are idle.

    Raises:
        ConfigError: if there are too few GPUs for one engine and one replica, or too many for the layout.
    """
    config = resolved.config
    layout = resolved.layout
    if not layout.gpus:
        raise ConfigError("--gpus, --split: the config has no GPUs (cluster.gpus_per_node is 0)")
    if layout.colocated:
        raise ConfigError("--gpus, --split: not supported for colocated configs; set cluster.num_nodes instead")
    gpus = gpus or layout.gpus
    if not 2 <= gpus <= MAX_GPUS:
        raise ConfigError(f"--gpus: must be between 2 and {MAX_GPUS}, got {gpus}")
    if split is not None and not 0 < split < 1:
        raise ConfigError(f"--split: must be between 0 and 1, got {split:g}")
    each = config.cluster.gpus_per_node
    if gpus > each and gpus % each:
        raise ConfigError(f"--gpus: {gpus} is not a multiple of cluster.gpus_per_node ({each})")
    fraction = layout.engine_ranks / (layout.engine_ranks + layout.policy_ranks) if split is None else split
    max_engines = min(gpus - layout.model_ranks, gpus - 1) // layout.engine_tensor
    engines = min(max_engines, max(1, round(gpus * fraction / layout.engine_tensor)))
    if engines < 1:
        raise ConfigError(
            f"--gpus: {gpus} GPUs are not enough for an engine of {layout.engine_tensor} and a policy replica of "
            f"{layout.model_ranks}"
        )
    replicas = (gpus - engines * layout.engine_tensor) // layout.model_ranks
    cluster = replace(config.cluster, num_nodes=ceil(gpus / each), gpus_per_node=min(gpus, each))
    other = changed(
        replace(config, cluster=cluster),
        generation__engines=engines,
        megatron_cfg__data_parallel_size=min(replicas, resolved.samples_per_step),
    )
    return resolved.changed(other)
