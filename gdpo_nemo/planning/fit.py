"""Whether a config fits its devices, the smallest change that makes it fit, and the best split of the GPUs."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, Iterator

from gdpo_nemo.config.env_workers import worker_pools
from gdpo_nemo.config.layout import Layout, resolve_layout, samples_per_update
from gdpo_nemo.config.placement import joined
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.planning.footprint import (
    GPU_RESERVE,
    EngineMemory,
    engine_memory,
    policy_memory,
    resting_memory,
    transport_memory,
)
from gdpo_nemo.planning.hardware import Device, Rates, host
from gdpo_nemo.planning.shape import Shape
from gdpo_nemo.planning.speed import step_time

_ENGINE_PROCESS = 0.5e9
"""Bytes that the process of an engine rank takes on a CPU before weights and cache; 0.6e9 was measured."""
_POLICY_PROCESS = 0.25e9
"""Bytes of a policy rank's process before the model; 0.27e9 was measured."""
_WORKER_PROCESS = 0.03e9
"""Bytes of an environment worker, an interpreter with numpy."""


def fits(config: Config, shape: Shape, device: Device) -> str:
    """Why the config does not fit ``device``; empty where it does. On a CPU all ranks share the machine's memory."""
    layout = resolve_layout(config)
    policy = policy_memory(config, shape)
    engine = engine_memory(config, shape, int(device.memory))
    if not layout.gpus:
        needed = policy.total * layout.policy_ranks + (engine.weights + engine.kv_cache) * layout.engine_ranks
        needed += transport_memory(config, shape)
        return (
            ""
            if needed <= device.memory
            else f"all ranks need {needed / 1e9:.3g} GB, the machine has {device.memory / 1e9:.3g} GB"
        )
    if layout.colocated:
        return _shared_verdict(config, shape, device, policy.total, engine)
    if policy.total > device.memory:
        return f"a policy rank needs {policy.total / 1e9:.3g} GB, {device.name} has {device.memory / 1e9:.3g} GB"
    if not engine.sequences(config.policy.max_total_sequence_length):
        return f"an engine rank has no room for one sequence beside {engine.weights / 1e9:.3g} GB of weights"
    return ""


def machine_limits(config: Config, shape: Shape | None) -> list[str]:
    """Return a sentence for each limit of this machine that a run with its own Ray exceeds.

    Empty for a run on a cluster, whose machines are not known here. Without ``shape`` weights count nothing, and each
    process counts the least that such a process takes, so memory is a lower bound.
    """
    cluster = config.cluster
    if cluster.num_nodes + cluster.env_nodes > 1 or joined(cluster):
        return []
    layout = resolve_layout(config)
    if layout.gpus:
        found = _gpus_here()
        short = found is not None and found < layout.gpus
        return [f"cluster.gpus_per_node: the run needs {layout.gpus} GPUs, this machine has {found}"] * short
    limits = []
    ranks = {"policy.generation.engines": layout.engine_ranks, "policy.megatron_cfg": layout.policy_ranks}
    cores = cluster.cpus_per_node or len(os.sched_getaffinity(0))
    if layout.devices > cores:
        limits.append(
            f"{_largest(ranks)}: {layout.devices} ranks (policy {layout.policy_ranks}, engines {layout.engine_ranks}) "
            f"take turns on {cores} core{'s' * (cores > 1)} of this machine"
        )
    workers = sum(worker_pools(config).values()) if layout.engines else 0
    needed = _least_memory(config, layout, shape) + _WORKER_PROCESS * workers
    memory = host().memory
    if needed > memory:
        limits.append(
            f"{_largest({**ranks, 'rollout.env_workers': workers})}: the run's processes need at least "
            f"{needed / 1e9:.3g} GB of memory, this machine has {memory / 1e9:.3g} GB"
        )
    return limits


def _gpus_here() -> int | None:
    """NVIDIA GPUs of this machine; None if they have no device files (WSL)."""
    return None if Path("/dev/dxg").exists() else sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))


def _largest(processes: dict[str, int]) -> str:
    """The key that asks for most processes."""
    return max(processes, key=lambda key: processes[key])


def _least_memory(config: Config, layout: Layout, shape: Shape | None) -> float:
    cache = config.policy.generation.vllm_cfg.kv_cache_memory_bytes
    engine = _ENGINE_PROCESS + cache + (engine_memory(config, shape, 0).weights if shape else 0)
    policy = _POLICY_PROCESS + (policy_memory(config, shape).weights if shape else 0)
    return engine * layout.engine_ranks + policy * layout.policy_ranks


def _shared_verdict(config: Config, shape: Shape, device: Device, training: int, engine: EngineMemory) -> str:
    """Why policy and engine cannot take turns on one device; empty where they can."""
    has = f"{device.name} has {device.memory / 1e9:.3g} GB"
    share = config.policy.generation.vllm_cfg.gpu_memory_utilization
    if training + GPU_RESERVE > device.memory:
        return (
            f"a policy rank needs {training / 1e9:.3g} GB while it trains, beside {GPU_RESERVE / 1e9:.3g} GB that a "
            f"sleeping engine keeps, {has}"
        )
    stays = resting_memory(config, shape)
    if stays + share * device.memory > device.memory:
        return (
            f"while engines sample, a policy rank keeps {stays / 1e9:.3g} GB beside the "
            f"{share * device.memory / 1e9:.3g} GB of the engine (gpu_memory_utilization {share:g}), {has}"
        )
    if not engine.sequences(config.policy.max_total_sequence_length):
        return f"an engine rank has no room for one sequence beside {engine.weights / 1e9:.3g} GB of weights"
    return ""


def changed(config: Config, **changes: Any) -> Config:
    """A copy of ``config`` with other values at the keys below ``policy`` (``megatron_cfg__name=value``)."""
    policy = config.policy
    for path, value in changes.items():
        *sections, name = path.split("__")
        policy = _with(policy, sections, name, value)
    return replace(config, policy=policy)


def _with(section: Any, sections: list[str], name: str, value: Any) -> Any:
    if not sections:
        return replace(section, **{name: value})
    inner = getattr(section, sections[0])
    return replace(section, **{sections[0]: _with(inner, sections[1:], name, value)})


def smallest_change(config: Config, shape: Shape, device: Device) -> str | None:
    """The first change, or pair of changes, that makes the config fit, in the order of what it costs; None: there is
    none."""
    candidates = list(_candidates(config, shape))
    for count in (1, 2):
        for chosen in combinations(candidates, count):
            merged = {key: value for change in chosen for key, value in change.items()}
            other = changed(config, **merged)
            try:
                if not fits(other, shape, device):
                    memory = policy_memory(other, shape).total
                    keys = " ".join(f"policy.{key.replace('__', '.')}={_yaml(value)}" for key, value in merged.items())
                    return f"{keys} (a policy rank then needs {memory / 1e9:.3g} GB)"
            except ConfigError:
                continue  # this layout does not divide the GPUs
    return None


def _candidates(config: Config, shape: Shape) -> Iterator[dict[str, Any]]:
    megatron = config.policy.megatron_cfg
    policy = config.policy
    if not megatron.use_distributed_optimizer and resolve_layout(config).data > 1:
        yield {"megatron_cfg__use_distributed_optimizer": True}
    if policy.micro_batch_tokens > policy.max_total_sequence_length:
        yield {"micro_batch_tokens": max(policy.max_total_sequence_length, policy.micro_batch_tokens // 2)}
        yield {"micro_batch_tokens": policy.max_total_sequence_length}
    if megatron.recompute == "none":
        yield {"megatron_cfg__recompute": "selective"}
    if megatron.recompute != "full":
        yield {"megatron_cfg__recompute": "full"}
    if config.cluster.placement == "colocated" and config.cluster.gpus_per_node:
        if not megatron.optimizer.offload and policy.precision == "bfloat16":
            yield {"megatron_cfg__optimizer__offload": True}
        for share in (0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
            if share < policy.generation.vllm_cfg.gpu_memory_utilization:
                yield {"generation__vllm_cfg__gpu_memory_utilization": share}
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield {"megatron_cfg__sequence_parallel": True}
    uneven = megatron.num_layers_in_first_pipeline_stage or megatron.num_layers_in_last_pipeline_stage
    for name, limit in (("tensor", shape.groups), ("pipeline", shape.layers))[: 1 if uneven else 2]:
        key = f"{name}_model_parallel_size"
        for factor in (2, 4, 8):
            wider = getattr(megatron, key) * factor
            if limit % wider == 0 and (
                name != "tensor" or not config.cluster.gpus_per_node or wider <= config.cluster.gpus_per_node
            ):
                yield {f"megatron_cfg__{key}": wider}
    for factor in (2, 4, 8):
        wider = policy.generation.vllm_cfg.tensor_parallel_size * factor
        if shape.heads % wider == 0 and policy.generation.engines >= factor:
            yield {
                "generation__vllm_cfg__tensor_parallel_size": wider,
                "generation__engines": policy.generation.engines // factor,
            }


def best_split(config: Config, shape: Shape, device: Device, rates: Rates) -> tuple[int, float] | None:
    """(engines, seconds per step) of the fastest split of the same GPUs that fits; None where none does."""
    gpus = config.cluster.num_nodes * config.cluster.gpus_per_node
    each = config.policy.generation.vllm_cfg.tensor_parallel_size
    found = None
    for engines in range(1, gpus // each + 1):
        other = changed(config, generation__engines=engines, megatron_cfg__data_parallel_size=None)
        try:
            layout = resolve_layout(other)
            if layout.data > samples_per_update(config) or fits(other, shape, device):
                continue
        except ConfigError:
            continue  # what is left is no whole number of replicas
        seconds = step_time(other, shape, device, rates).step
        if found is None or seconds < found[1]:
            found = engines, seconds
    return found


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
