"""A config as a scenario of the simulation: rates from the plan's roofline, from a run, or given one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from gdpo_nemo.config.layout import resolve_layout, samples_per_step
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.planning.fit import changed
from gdpo_nemo.planning.footprint import engine_memory
from gdpo_nemo.planning.hardware import Device, Rates
from gdpo_nemo.planning.shape import Shape
from gdpo_nemo.planning.simulated_engine import EngineRates
from gdpo_nemo.planning.simulation_records import Draw, LogNormal, Scenario
from gdpo_nemo.planning.speed import Lengths, expected_lengths, sync_work, training_work

LARGEST = 1024
DRIVER_CALLS = 2
"""Calls of a turn: the request and its answer."""
CALL_S = 0.00032
"""CPU seconds of the driver for one call of Ray, measured on one core."""
_SIGMA = 1.0
"""Spread of completions' lengths where nothing says otherwise."""


@dataclass(frozen=True)
class Given:
    """What the command line says in place of what config, roofline and run would; None: nothing."""

    decode_ms: float | None = None
    """Milliseconds of a decoding step, whatever the number of sequences."""
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
        """Whether every rate is given, so that neither the model's shape nor a device is asked."""
        return None not in (self.decode_ms, self.train_s, self.publish_s)


def scenario_of(
    config: Config, shape: Shape | None, device: Device, rates: Rates, given: Given, lengths: Draw | None = None
) -> Scenario:
    """The scenario of one config.

    Args:
        shape: of the model; None only where ``given.complete``.
        lengths: of completions, where a run has shown them.

    Raises:
        ConfigError: figures that contradict each other, by the key or option that has them.
    """
    rollout = config.rollout
    drawn = lengths or _lengths(config, rates, given)
    expected = expected_lengths(config, rates)
    prompt = expected.prompt if given.prompt is None else given.prompt
    sizes = Lengths(prompt, drawn.mean, drawn.longest)
    slots, kv_tokens = config.policy.generation.vllm_cfg.max_num_seqs, float("inf")
    if shape is not None:
        memory = engine_memory(config, shape, int(device.memory))
        kv_tokens = max(1, memory.kv_cache // max(1, memory.bytes_per_token))
        slots = max(1, min(slots, int(kv_tokens / sizes.whole)))
    turns = given.turns or (rollout.turns.max_turns if rollout.turns else 1)
    calls = DRIVER_CALLS * turns * CALL_S
    return Scenario(
        engines=config.policy.generation.engines,
        rates=_engine_rates(config, shape, device, rates, given),
        slots=slots,
        groups=config.gdpo.num_prompts_per_step,
        samples=config.gdpo.num_generations_per_prompt,
        lengths=drawn,
        train_s=_train(config, shape, device, rates, sizes) if given.train_s is None else given.train_s,
        publish_s=_publish(config, shape, device, rates) if given.publish_s is None else given.publish_s,
        prompt_tokens=prompt,
        driver_s=calls,
        turns=turns,
        turn_s=given.turn_s,
        kv_tokens=kv_tokens,
        **_verifiers(rates, given),
        **schedule_of(config, given),
    )


def schedule_of(config: Config, given: Given) -> dict[str, Any]:
    """Staleness, window, depth, cache and deadline: what the command line says, else the config, else the defaults."""
    rollout = config.rollout

    def choice(name: str) -> Any:
        value = getattr(given, name)
        return getattr(rollout, name) if value is None else value

    staleness = rollout.max_staleness
    depth = choice("depth")
    window = choice("window")
    if window is None:  # as rollout.window says of null
        window = max(1, round(0.3 * config.gdpo.num_prompts_per_step)) if staleness else 1
    return {
        "max_staleness": staleness,
        "window": window,
        "depth": int(depth) if str(depth).isdecimal() else depth,
        "kv": choice("kv"),
        "group_timeout_s": choice("group_timeout_s"),
    }


def _lengths(config: Config, rates: Rates, given: Given) -> LogNormal:
    expected = expected_lengths(config, rates)
    cap = expected.longest if given.cap is None else given.cap
    sigma = _SIGMA if given.sigma is None else given.sigma
    if given.median is not None:
        return LogNormal(given.median, sigma, cap)
    mean = expected.completion if given.mean is None else given.mean
    try:
        return LogNormal.of_mean(mean, sigma, cap)
    except ValueError as error:
        raise ConfigError(f"--mean: {error}") from None


def _engine_rates(config: Config, shape: Shape | None, device: Device, rates: Rates, given: Given) -> EngineRates:
    each = (given.per_sequence_ms or 0.0) / 1e3
    if shape is None:
        return EngineRates((given.decode_ms or 0.0) / 1e3, each)
    memory = engine_memory(config, shape, int(device.memory))
    tensor = config.policy.generation.vllm_cfg.tensor_parallel_size
    factor = rates.generation.factor
    arithmetic = factor * 2 * shape.active_parameters / (tensor * device.compute)
    if given.decode_ms is not None:
        return EngineRates(given.decode_ms / 1e3, each, prefill=arithmetic)
    return EngineRates(
        fixed=rates.generation.fixed,
        per_sequence=each,
        weights=factor * memory.weights / device.bandwidth,
        per_token=factor * memory.bytes_per_token / device.bandwidth,
        arithmetic=arithmetic,
        prefill=arithmetic,
    )


def _train(config: Config, shape: Shape | None, device: Device, rates: Rates, lengths: Lengths) -> float:
    if shape is None:
        raise ConfigError("--train-s: missing")
    work = training_work(config, shape, device, lengths)
    return rates.training.seconds(work.units, work.ideal)


def _publish(config: Config, shape: Shape | None, device: Device, rates: Rates) -> float:
    if shape is None:
        raise ConfigError("--publish-s: missing")
    work = sync_work(config, shape, device)
    return rates.sync.seconds(work.units, work.ideal)


def _verifiers(rates: Rates, given: Given) -> dict[str, Any]:
    """The command line's; else the seconds per sample that a calibrated run waited for, one after the other."""
    if given.verify_s is None:
        return {"verifier": LogNormal(rates.verify), "verify_workers": 1 if rates.verify else 0}
    drawn = LogNormal.of_mean(given.verify_s, given.verify_sigma)
    return {"verifier": drawn, "verify_workers": given.verify_workers or 0}


# -- more or fewer GPUs ------------------------------------------------------------------------------------------------


def scaled(config: Config, gpus: int | None, split: float | None) -> Config:
    """The config on ``gpus`` GPUs, of which the share ``split`` samples; None: as many as it has, its own share.

    The policy takes what whole replicas it can get, and no more than a step has sequences for; what is left idles.

    Raises:
        ConfigError: too few GPUs for one engine and one replica; more than the layout takes.
    """
    layout = resolve_layout(config)
    if not layout.gpus:
        raise ConfigError("--gpus, --split: the config has no GPUs (cluster.gpus_per_node is 0)")
    if layout.colocated:
        raise ConfigError("--gpus, --split: of a colocated config every GPU samples and trains; give cluster.num_nodes")
    gpus = gpus or layout.gpus
    if not 2 <= gpus <= LARGEST:
        raise ConfigError(f"--gpus: must be between 2 and {LARGEST}, got {gpus}")
    if split is not None and not 0 < split < 1:
        raise ConfigError(f"--split: must be between 0 and 1, got {split:g}")
    each = config.cluster.gpus_per_node
    if gpus > each and gpus % each:
        raise ConfigError(f"--gpus: {gpus} are no whole nodes of {each} (cluster.gpus_per_node)")
    share = layout.engine_ranks / (layout.engine_ranks + layout.policy_ranks) if split is None else split
    most = min(gpus - layout.model_ranks, gpus - 1) // layout.engine_tensor
    engines = min(most, max(1, round(gpus * share / layout.engine_tensor)))
    if engines < 1:
        raise ConfigError(
            f"--gpus: {gpus} are too few for an engine of {layout.engine_tensor} and a policy of {layout.model_ranks}"
        )
    replicas = (gpus - engines * layout.engine_tensor) // layout.model_ranks
    cluster = replace(config.cluster, num_nodes=ceil(gpus / each), gpus_per_node=min(gpus, each))
    other = changed(
        replace(config, cluster=cluster),
        generation__engines=engines,
        megatron_cfg__data_parallel_size=min(replicas, samples_per_step(config)),
    )
    resolve_layout(other)
    return other
