"""An engine as a Ray actor."""

from __future__ import annotations

from typing import Any

from gdpo_nemo.cluster.network import stay_on
from gdpo_nemo.cluster.reaper import guard_children
from gdpo_nemo.cluster.session import ray
from gdpo_nemo.config.schema import VllmConfig
from gdpo_nemo.generation.engine import Engine
from gdpo_nemo.generation.vllm_core import in_process


class EngineActor(Engine):
    """An engine whose vLLM leaves no process behind, however the actor ends. Arguments as of ``Engine``."""

    def __init__(self, model: str, config: VllmConfig, *arguments: Any, **options: Any):
        stay_on(ray.util.get_node_ip_address())
        if not in_process(config):
            guard_children()
        super().__init__(model, config, *arguments, **options)
