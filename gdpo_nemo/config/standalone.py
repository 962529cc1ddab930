"""Configs for commands that stand a policy up without a run: a model, a layout, nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gdpo_nemo.config.files import check_model, local_model_config
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.schema import Config, MegatronConfig
from gdpo_nemo.config.validate import check_parallelism
from gdpo_nemo.errors import ConfigError

SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "data": "data_parallel_size",
}
FLAGS = {"sequence": "sequence_parallel", "distributed": "use_distributed_optimizer"}


def parse_layout(text: str) -> MegatronConfig:
    """``tensor=2,pipeline=2,sequence`` -> a layout; the empty text is one rank.

    Raises:
        ConfigError: an unknown name or a size that is no positive number.
    """
    fields: dict[str, Any] = {"data_parallel_size": 1}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name in FLAGS and not value:
            fields[FLAGS[name]] = True
        elif name in SIZES and value.isdigit() and int(value) > 0:
            fields[SIZES[name]] = int(value)
        else:
            known = ", ".join([*(f"{size}=N" for size in SIZES), *FLAGS])
            raise ConfigError(f"--layout: {part.strip()!r} is none of {known}")
    return MegatronConfig(**fields)


def standalone_config(
    model: str | Path, layout: str = "", precision: str = "float32", longest: int | None = None
) -> Config:
    """A config whose policy section is ``model`` in ``layout`` on this machine's CPU or, with CUDA, its GPUs.

    It has no engines, so that the policy may take every GPU; ``with_engine`` makes the config of one.

    Raises:
        ConfigError: no model there, or the layout does not divide it, or there are fewer GPUs than ranks.
    """
    import torch

    config = Config()
    config.policy.model_name = str(model)
    config.policy.precision = precision
    config.policy.megatron_cfg = parse_layout(layout)
    config.policy.generation.engines = 0
    config.gdpo.rewards = {"none": 1.0}
    content = local_model_config(config)
    if content is None:
        raise ConfigError(f"{model}: no such model folder")
    positions = content.get("max_position_embeddings") or 4096
    config.policy.max_total_sequence_length = min(longest or positions, positions)
    if torch.cuda.is_available():
        config.cluster.gpus_per_node = torch.cuda.device_count()
    check_parallelism(config)
    resolved = resolve_layout(config)
    check_model(config, resolved)
    config.policy.megatron_cfg = replace(config.policy.megatron_cfg, data_parallel_size=resolved.data)
    return config


def with_engine(config: Config) -> Config:
    """The config of one engine of one rank on the same machine, for the same model and no policy beside it."""
    generation = replace(config.policy.generation, engines=1)
    return replace(config, policy=replace(config.policy, generation=generation))
