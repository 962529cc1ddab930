"""Ray actor for an engine, and the function that starts it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gdpo_nemo.cluster.cleanup_process import guard_children
from gdpo_nemo.cluster.fork_server import ENGINE, thread_environment
from gdpo_nemo.cluster.local_ray import stay_on
from gdpo_nemo.cluster.reservation import Placement
from gdpo_nemo.cluster.session import cores, ray
from gdpo_nemo.cluster.worker_launcher import PRELOADED
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.sections import replays_router
from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT, Engine
from gdpo_nemo.generation.routing import GPU_ENVIRONMENT
from gdpo_nemo.generation.vllm_core import EngineOptions, in_process

_CALLS = 8
"""Maximum number of concurrent calls to an engine's actor: polls, updates, new requests and queries."""


class EngineActor(Engine):
    """Engine whose vLLM processes always end with its actor. The arguments are those of ``Engine``."""

    def __init__(self, options: EngineOptions, replies: tuple[Any, ...] | None = None):
        stay_on(ray.util.get_node_ip_address())
        if not in_process(options.config):
            guard_children()
        super().__init__(options, replies)


def start_engine(config: Config, folder: str, placement: Placement, devices: Sequence[str], index: int) -> Any:
    """Start the actor of an engine on the engine's node.

    Args:
        folder: Hugging Face folder of the model.
        devices: GPU of each policy rank, as in CUDA_VISIBLE_DEVICES. The argument is used only if engines share GPUs
            with the policy (``Places.shared``).
        index: number of the engine.
    """
    policy = config.policy
    generation = policy.generation
    vllm = generation.vllm_cfg
    on_cpu = config.cluster.gpus_per_node == 0
    node = placement.places.engines[index]
    threads = max(1, cores(config.cluster) // placement.places.engines_on(node))
    environment = {**thread_environment(threads), **ENVIRONMENT, **(CPU_ENVIRONMENT if on_cpu else {})}
    one_process = vllm.tensor_parallel_size == 1 and environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    if on_cpu and one_process:
        environment[PRELOADED] = ENGINE
    environment |= placement.environment(node)
    if replays_router(policy) and not on_cpu:
        environment |= GPU_ENVIRONMENT
    shared = placement.places.shared
    if shared and not on_cpu:
        # Ray has assigned these GPUs to the policy's ranks and supports only one owner per GPU. Fractional GPUs do not
        # work for a tensor-parallel engine, because a fraction cannot span several GPUs. Therefore request no GPU from
        # Ray, and select the GPUs with this variable.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[rank] for rank in shared[index])
    actor = ray.remote(EngineActor).options(
        num_cpus=0,  # with CPU requests, Ray would queue actors if there are more processes than cores
        num_gpus=0 if on_cpu or shared else vllm.tensor_parallel_size,
        max_concurrency=_CALLS,
        runtime_env={"env_vars": environment},
        **placement.on(node),
    )
    name = policy.tokenizer_name
    parsers = (generation.tool_call_parser, generation.reasoning_parser, config.data.train.chat_template_kwargs)
    options = EngineOptions(
        folder,
        vllm,
        policy.precision,
        policy.max_total_sequence_length,
        config.run.seed + index,
        on_cpu,
        sleeps=bool(shared),
        targets=policy.lora.target_modules,
        records_routing=replays_router(policy),
        tokenizer=str(Path(name).absolute()) if name and Path(name).is_dir() else name,
        images_per_prompt=config.data.images.max_per_prompt,
    )
    return actor.remote(options, parsers)
