"""Memory check of a config, smallest change that makes the config fit, and fastest layouts for numbers of GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from gdpo_nemo.config.layout import Layout, Resolved
from gdpo_nemo.config.placement import joined, worker_pools
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.sections import MegatronConfig
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.planning.hardware import Device, Rates, host
from gdpo_nemo.planning.memory import (
    GPU_RESERVE,
    EngineMemory,
    engine_copy_bytes,
    engine_memory,
    logprob_memory,
    policy_memory,
    resting_memory,
    sampling_bytes,
    transport_memory,
)
from gdpo_nemo.planning.speed import StepTime, step_time
from gdpo_nemo.utils.errors import ConfigError

_ENGINE_PROCESS = 0.5e9
"""Lower bound on the bytes of an engine rank's process on a CPU, without weights and KV cache. 0.6e9 was measured."""
_POLICY_PROCESS = 0.25e9
"""Lower bound on the bytes of a policy rank's process, without the model. 0.27e9 was measured."""
_WORKER_PROCESS = 0.03e9
"""Bytes of an environment worker's process: an interpreter with numpy."""


def memory_shortage(resolved: Resolved, shape: ModelDescription, device: Device) -> str:
    """Return the reason why the config does not fit into the memory of ``device``, or an empty string if it fits.

    On a CPU, all ranks share the machine's memory.
    """
    config = resolved.config
    layout = resolved.layout
    policy = max(policy_memory(resolved, shape), logprob_memory(resolved, shape), key=lambda memory: memory.total)
    engine = engine_memory(config, shape, int(device.memory))
    if not layout.gpus:
        needed = policy.total * layout.policy_ranks + (engine.weights + engine.kv_cache) * layout.engine_ranks
        needed += transport_memory(resolved, shape) + engine_copy_bytes(resolved, shape) * layout.engine_ranks
        if needed <= device.memory:
            return ""
        return f"all ranks need {needed / 1e9:.3g} GB, but the machine has {device.memory / 1e9:.3g} GB"
    if layout.colocated:
        return _colocated_shortage(resolved, shape, device, policy.total, engine)
    if policy.total > device.memory:
        return f"a policy rank needs {policy.total / 1e9:.3g} GB, but {device.name} has {device.memory / 1e9:.3g} GB"
    if not engine.sequences(config.policy.max_total_sequence_length):
        return f"an engine rank has no memory left for one sequence after {engine.weights / 1e9:.3g} GB of weights"
    return ""


def machine_limits(resolved: Resolved, shape: ModelDescription | None) -> list[str]:
    """Return a sentence for each resource of this machine (GPUs, cores, memory) that the run exceeds.

    The list is empty for runs on several nodes or an existing Ray cluster, whose machines are unknown. If ``shape`` is
    None, the memory estimate does not include weights. The memory estimate is a lower bound.
    """
    config = resolved.config
    cluster = config.cluster
    if cluster.num_nodes + cluster.env_nodes > 1 or joined(cluster):
        return []
    layout = resolved.layout
    if layout.gpus:
        available = _local_gpus()
        if available is None or available >= layout.gpus:
            return []
        return [f"cluster.gpus_per_node: the run requires {layout.gpus} GPUs, but this machine has {available}"]
    limits = []
    ranks = {"policy.generation.engines": layout.engine_ranks, "policy.megatron_cfg": layout.policy_ranks}
    cores = cluster.cpus_per_node or len(os.sched_getaffinity(0))
    if layout.devices > cores:
        limits.append(
            f"{_largest(ranks)}: {layout.devices} ranks (policy {layout.policy_ranks}, engines {layout.engine_ranks}) "
            f"share {cores} core{'s' * (cores > 1)} of this machine"
        )
    workers = sum(worker_pools(config).values()) if layout.engines else 0
    needed = _minimum_memory(resolved, layout, shape) + _WORKER_PROCESS * workers
    memory = host().memory
    if needed > memory:
        limits.append(
            f"{_largest({**ranks, 'rollout.env_workers': workers})}: the run's processes need at least "
            f"{needed / 1e9:.3g} GB of memory, but this machine has {memory / 1e9:.3g} GB"
        )
    return limits


def _local_gpus() -> int | None:
    """Return the number of NVIDIA GPUs on this machine, or None on WSL, which does not have device files for GPUs."""
    return None if Path("/dev/dxg").exists() else sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))


def _largest(processes: dict[str, int]) -> str:
    """Return the config key that creates the most processes."""
    return max(processes, key=lambda key: processes[key])


def _minimum_memory(resolved: Resolved, layout: Layout, shape: ModelDescription | None) -> float:
    config = resolved.config
    cache = config.policy.generation.vllm_cfg.kv_cache_memory_bytes
    engine = _ENGINE_PROCESS + cache + (engine_memory(config, shape, 0).weights if shape else 0)
    policy = _POLICY_PROCESS + (policy_memory(resolved, shape).weights if shape else 0)
    return engine * layout.engine_ranks + policy * layout.policy_ranks


def _colocated_shortage(
    resolved: Resolved, shape: ModelDescription, device: Device, training: int, engine: EngineMemory
) -> str:
    """Return the reason why a policy rank and an engine rank cannot take turns on one GPU, or an empty string.

    ``training`` is the policy rank's peak memory in bytes.
    """
    config = resolved.config
    has = f"but {device.name} has {device.memory / 1e9:.3g} GB"
    vllm = config.policy.generation.vllm_cfg
    if training + GPU_RESERVE > device.memory:
        return (
            f"a policy rank needs {training / 1e9:.3g} GB during training and a sleeping engine keeps "
            f"{GPU_RESERVE / 1e9:.3g} GB, "
            f"{has}"
        )
    resting = resting_memory(resolved, shape)
    used = sampling_bytes(config, engine, device.memory)
    if resting + used > device.memory:
        cache = vllm.gpu_kv_cache_memory_bytes
        key = (
            f"gpu_kv_cache_memory_bytes {cache}" if cache else f"gpu_memory_utilization {vllm.gpu_memory_utilization:g}"
        )
        return (
            f"during sampling, a policy rank keeps {resting / 1e9:.3g} GB in addition to the "
            f"{used / 1e9:.3g} GB of the engine ({key}), {has}"
        )
    if not engine.sequences(config.policy.max_total_sequence_length):
        return f"an engine rank has no memory left for one sequence after {engine.weights / 1e9:.3g} GB of weights"
    return ""


def changed(config: Config, **changes: Any) -> Config:
    """Return a copy of ``config`` with other values in ``policy``.

    For example, ``a__b=value`` replaces ``policy.a.b``.
    """
    policy = config.policy
    for path, value in changes.items():
        *sections, name = path.split("__")
        policy = _replace_nested(policy, sections, name, value)
    return replace(config, policy=policy)


def _replace_nested(section: Any, sections: list[str], name: str, value: Any) -> Any:
    if not sections:
        return replace(section, **{name: value})
    inner = getattr(section, sections[0])
    return replace(section, **{sections[0]: _replace_nested(inner, sections[1:], name, value)})


def smallest_change(resolved: Resolved, shape: ModelDescription, device: Device) -> str | None:
    """Return the first change, or pair of changes, that makes the config fit into memory, or None without a solution.

    Changes are tried in order of their cost.
    """
    candidates = list(_memory_savers(resolved, shape))
    for count in (1, 2):
        for chosen in combinations(candidates, count):
            merged: dict[str, Any] = {}
            for change in chosen:
                merged |= change
            try:
                other = resolved.changed(changed(resolved.config, **merged))
                if not memory_shortage(other, shape, device):
                    memory = policy_memory(other, shape).total
                    keys = " ".join(f"policy.{key.replace('__', '.')}={_yaml(value)}" for key, value in merged.items())
                    return f"{keys} (a policy rank then needs {memory / 1e9:.3g} GB)"
            except ConfigError:
                continue  # the GPUs cannot be divided into this layout
    return None


def _memory_savers(resolved: Resolved, shape: ModelDescription) -> Iterator[dict[str, Any]]:  # noqa: C901
    config = resolved.config
    megatron = config.policy.megatron_cfg
    policy = config.policy
    shards = megatron.optimizer.type != "muon"  # state that the data-parallel ranks may share
    if shards and not megatron.use_distributed_optimizer and resolved.layout.data > 1:
        yield {"megatron_cfg__use_distributed_optimizer": True}
    if policy.micro_batch_tokens > policy.max_total_sequence_length:
        yield {"micro_batch_tokens": max(policy.max_total_sequence_length, policy.micro_batch_tokens // 2)}
        yield {"micro_batch_tokens": policy.max_total_sequence_length}
    if megatron.recompute == "none":
        yield {"megatron_cfg__recompute": "selective"}
    default = MegatronConfig().recompute_modules
    if megatron.recompute == "none" and len(shape.moe_layers) < shape.layers:
        yield {"megatron_cfg__recompute": "selective", "megatron_cfg__recompute_modules": ["core_attn", "mlp"]}
    if megatron.recompute != "full":
        modules = {} if megatron.recompute_modules == default else {"megatron_cfg__recompute_modules": default}
        yield {"megatron_cfg__recompute": "full", **modules}
    if config.cluster.placement == "colocated" and config.cluster.gpus_per_node:
        if not megatron.optimizer.offload and policy.precision == "bfloat16":
            yield {"megatron_cfg__optimizer__offload": True}
        for share in (0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
            vllm = policy.generation.vllm_cfg
            if share < vllm.gpu_memory_utilization and vllm.gpu_kv_cache_memory_bytes is None:
                yield {"generation__vllm_cfg__gpu_memory_utilization": share}
    plain = policy.precision == "bfloat16" and not megatron.optimizer.use_precision_aware_optimizer
    if shards and plain and resolved.layout.gpus:
        half = {
            "megatron_cfg__optimizer__use_precision_aware_optimizer": True,
            "megatron_cfg__use_distributed_optimizer": True,
            "megatron_cfg__optimizer__exp_avg_dtype": "bfloat16",
            "megatron_cfg__optimizer__exp_avg_sq_dtype": "bfloat16",
        }
        yield half
        yield {**half, "megatron_cfg__optimizer__main_grads_dtype": "bfloat16"}
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield {"megatron_cfg__sequence_parallel": True}
    uneven = megatron.num_layers_in_first_pipeline_stage or megatron.num_layers_in_last_pipeline_stage
    for name, limit in (("tensor", shape.kv_heads), ("pipeline", shape.layers))[: 1 if uneven else 2]:
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


def best_split(resolved: Resolved, shape: ModelDescription, device: Device, rates: Rates) -> tuple[int, float] | None:
    """Return the fastest split of the GPUs as (engines, seconds per step), or None if no split fits into memory."""
    config = resolved.config
    gpus = config.cluster.num_nodes * config.cluster.gpus_per_node
    each = config.policy.generation.vllm_cfg.tensor_parallel_size
    found = None
    for engines in range(1, gpus // each + 1):
        split = changed(config, generation__engines=engines, megatron_cfg__data_parallel_size=None)
        try:
            other = resolved.changed(split)
            if other.layout.data > resolved.samples_per_update or memory_shortage(other, shape, device):
                continue
        except ConfigError:
            continue  # the remaining GPUs cannot be divided into replicas
        seconds = step_time(other, shape, device, rates).step
        if found is None or seconds < found[1]:
            found = engines, seconds
    return found


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


MAX_GPUS = 1024
_SIZES = (1, 2, 4, 8, 16)
_ENGINE_FRACTIONS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)


@dataclass(frozen=True)
class Candidate:
    """Layout for a given number of GPUs, with its estimated step time."""

    gpus: int
    tensor: int
    pipeline: int
    data: int
    engines: int
    engine_tensor: int
    time: StepTime
    idle: float
    """Fraction of GPU time spent waiting."""

    @property
    def gpu_seconds(self) -> float:
        """Cost of a step in GPU seconds."""
        return self.gpus * self.time.step

    @property
    def name(self) -> str:
        """Description of the layout for tables."""
        return (
            f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}, {self.engines} x "
            f"{self.engine_tensor} engines"
        )


def gpu_counts(largest: int, each: int) -> list[int]:
    """Return the numbers of GPUs to try: powers of two up to ``largest``, and ``largest`` itself.

    Each number is less than ``each``, which is the number of GPUs per node, or a multiple of ``each``.

    Raises:
        ConfigError: if ``largest`` is below 2 or above ``MAX_GPUS``.
    """
    if not 2 <= largest <= MAX_GPUS:
        raise ConfigError(f"--sweep: must be between 2 and {MAX_GPUS} GPUs, got {largest}")
    counts = [2]
    while counts[-1] * 2 <= largest:
        counts.append(counts[-1] * 2)
    counts = [n for n in counts if n < each or n % each == 0]
    if largest not in counts and (largest < each or largest % each == 0):
        counts.append(largest)
    return counts


def sweep(resolved: Resolved, shape: ModelDescription, device: Device, rates: Rates, largest: int) -> list[Candidate]:
    """Return all layouts that fit into memory, sorted by number of GPUs and then by seconds per step."""
    each = resolved.config.cluster.gpus_per_node or 8
    found: list[Candidate] = []
    for gpus in gpu_counts(largest, each):
        found += _sweep_candidates(resolved, shape, device, rates, gpus, each)
    return sorted(found, key=lambda c: (c.gpus, c.time.step))


def _sweep_candidates(
    resolved: Resolved, shape: ModelDescription, device: Device, rates: Rates, gpus: int, each: int
) -> Iterator[Candidate]:
    cluster = replace(resolved.config.cluster, num_nodes=max(1, gpus // each), gpus_per_node=min(gpus, each))
    base = replace(resolved, config=replace(resolved.config, cluster=cluster))
    inside = [size for size in _SIZES if size <= cluster.gpus_per_node]
    for tensor in (size for size in inside if shape.kv_heads % size == 0):
        for pipeline in (size for size in _SIZES if shape.layers % size == 0):
            for engine_tensor in (size for size in inside if shape.heads % size == 0):
                shares = (1,) if cluster.placement == "colocated" else _ENGINE_FRACTIONS
                for engines in sorted({round(gpus * share / engine_tensor) for share in shares} - {0}):
                    sizes = {"tensor": tensor, "pipeline": pipeline, "engines": engines, "engine_tensor": engine_tensor}
                    candidate = _evaluate(base, shape, device, rates, gpus, **sizes)
                    if candidate:
                        yield candidate


def _evaluate(
    base: Resolved,
    shape: ModelDescription,
    device: Device,
    rates: Rates,
    gpus: int,
    *,
    tensor: int,
    pipeline: int,
    engines: int,
    engine_tensor: int,
) -> Candidate | None:
    """Return the layout with its estimated step time.

    Return None if the GPUs cannot be divided into this layout, a rank would not get samples, or memory is too small.
    """
    candidate = changed(
        base.config,
        megatron_cfg__tensor_model_parallel_size=tensor,
        megatron_cfg__sequence_parallel=tensor > 1,
        megatron_cfg__pipeline_model_parallel_size=pipeline,
        megatron_cfg__virtual_pipeline_model_parallel_size=None,
        megatron_cfg__num_layers_in_first_pipeline_stage=None,
        megatron_cfg__num_layers_in_last_pipeline_stage=None,
        megatron_cfg__data_parallel_size=None,
        megatron_cfg__use_distributed_optimizer=base.config.policy.megatron_cfg.optimizer.type != "muon",
        generation__engines=engines,
        generation__vllm_cfg__tensor_parallel_size=engine_tensor,
    )
    try:
        resolved = base.changed(candidate)
    except ConfigError:
        return None
    layout = resolved.layout
    if layout.data > resolved.samples_per_update or engines > resolved.samples_per_step:
        return None
    if memory_shortage(resolved, shape, device):
        return None
    time = step_time(resolved, shape, device, rates)
    return Candidate(
        gpus=gpus,
        tensor=tensor,
        pipeline=pipeline,
        data=layout.data,
        engines=engines,
        engine_tensor=engine_tensor,
        time=time,
        idle=time.idle(layout),
    )


def best_per_count(candidates: list[Candidate]) -> list[Candidate]:
    """Return the fastest layout for each number of GPUs."""
    best: dict[int, Candidate] = {}
    for candidate in candidates:
        best.setdefault(candidate.gpus, candidate)
    return list(best.values())


def table(candidates: list[Candidate], steps: int, shown: int = 8) -> str:
    """Format the fastest layout for each number of GPUs, and the ``shown`` fastest layouts for the largest number."""
    best = best_per_count(candidates)
    lines = [f"{'GPUs':>5} {'s/step':>9} {'GPU hours':>10} {'idle':>5}  fastest layout"]
    lines += [_row(c, steps) for c in best]
    ranked = [c for c in candidates if c.gpus == best[-1].gpus][:shown]
    lines += ["", f"the {len(ranked)} fastest on {best[-1].gpus} GPUs:", *(_row(c, steps) for c in ranked)]
    return "\n".join(lines)


def _row(c: Candidate, steps: int) -> str:
    return f"{c.gpus:>5} {c.time.step:>9.3g} {c.gpu_seconds * steps / 3600:>10.4g} {c.idle:>5.0%}  {c.name}"
