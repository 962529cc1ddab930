"""How many ranks a config asks for, who gets which GPUs, and how a step divides into updates. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from gdpo_nemo.config.algorithm_choice import engines, sequences_per_prompt
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """The processes of a run. On CPU the ranks are processes without a device."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    data: int
    engines: int
    engine_tensor: int
    gpus: int
    """GPUs of the whole job; 0 on CPU."""
    colocated: bool = False
    """Whether engine ranks sit on the devices of policy ranks, and the two take turns."""

    first_layers: int | None = None
    """Layers of the first pipeline stage where that is uneven; ``config.stages`` places them."""
    last_layers: int | None = None
    """Layers of the last pipeline stage where that is uneven."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one replica of the policy."""
        return self.tensor * self.pipeline * self.context

    @property
    def policy_ranks(self) -> int:
        """Ranks of the whole policy."""
        return self.model_ranks * self.data

    @property
    def engine_ranks(self) -> int:
        """Ranks of all engines together."""
        return self.engines * self.engine_tensor

    @property
    def idle_gpus(self) -> int:
        """GPUs that nothing uses."""
        return self.gpus - self.devices if self.gpus else 0

    @property
    def devices(self) -> int:
        """GPUs in use (on CPU: what they would be); those that policy and engine share count once."""
        return self.policy_ranks if self.colocated else self.policy_ranks + self.engine_ranks


def resolve_layout(config: Config) -> Layout:
    """Derive the layout, with ``data_parallel_size`` filled in where it is null.

    Raises:
        ConfigError: the layout does not fit the GPUs or is inconsistent in itself.
    """
    megatron = config.policy.megatron_cfg
    generation = config.policy.generation
    cluster = config.cluster
    tensor = megatron.tensor_model_parallel_size
    pipeline = megatron.pipeline_model_parallel_size
    model = tensor * pipeline * megatron.context_parallel_size
    gpus = cluster.num_nodes * cluster.gpus_per_node
    data = megatron.data_parallel_size
    if gpus:
        data = _data_parallel_on_gpus(config, gpus, model)
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        context=megatron.context_parallel_size,
        expert=megatron.expert_model_parallel_size,
        expert_tensor=megatron.expert_tensor_parallel_size or tensor,
        data=data or 1,
        engines=engines(config),
        engine_tensor=generation.vllm_cfg.tensor_parallel_size,
        gpus=gpus,
        colocated=cluster.placement == "colocated",
        first_layers=megatron.num_layers_in_first_pipeline_stage if pipeline > 1 else None,
        last_layers=megatron.num_layers_in_last_pipeline_stage if pipeline > 1 else None,
    )
    _check_experts(layout)
    _check_shared(layout)
    return layout


def _data_parallel_on_gpus(config: Config, gpus: int, model: int) -> int:
    generation = config.policy.generation
    data = config.policy.megatron_cfg.data_parallel_size
    per_engine = generation.vllm_cfg.tensor_parallel_size
    left = gpus
    share = f"there are {gpus}"
    fewer = ""
    other = "choose a layout that divides them"
    if config.cluster.placement == "separate" and engines(config):
        left = gpus - engines(config) * per_engine
        share = f"{gpus} GPUs less {engines(config)} x {per_engine} for the engines leave {max(left, 0)}"
        fewer = "fewer engines, "
        other = "set policy.generation.engines so that it is"
    if per_engine > config.cluster.gpus_per_node:
        raise ConfigError(
            f"policy.generation.vllm_cfg.tensor_parallel_size: an engine of {per_engine} ranks does not fit a node "
            f"of {config.cluster.gpus_per_node} GPUs"
        )
    if left < model * (data or 1):
        raise ConfigError(
            f"policy.megatron_cfg: the policy needs {model * (data or 1)} GPUs (tensor x pipeline x context x data), "
            f"but {share}; use {fewer}a smaller layout or more GPUs"
        )
    if data is None and left % model:
        raise ConfigError(
            f"policy.megatron_cfg.data_parallel_size: {share}, which is not a multiple of the {model} ranks of one "
            f"replica; {other}, or data_parallel_size={left // model} to leave some idle"
        )
    return data or left // model


def _check_shared(layout: Layout) -> None:
    if layout.colocated and layout.engine_ranks > layout.policy_ranks:
        raise ConfigError(
            f"policy.generation.engines: {layout.engines} x {layout.engine_tensor} = {layout.engine_ranks} engine "
            f"ranks cannot share the devices of {layout.policy_ranks} policy ranks (cluster.placement colocated); at "
            f"most {layout.policy_ranks // layout.engine_tensor} engines"
        )


def _check_experts(layout: Layout) -> None:
    ranks = layout.tensor * layout.context * layout.data
    experts = layout.expert * layout.expert_tensor
    if ranks % experts:
        works = [n for n in range(1, ranks + 1) if ranks % (n * layout.expert_tensor) == 0]
        raise ConfigError(
            f"policy.megatron_cfg.expert_model_parallel_size: {layout.expert} x expert tensor {layout.expert_tensor} "
            f"= {experts} does not divide the {ranks} ranks of a pipeline stage (tensor x context x data); "
            f"possible with this expert tensor size: {', '.join(map(str, works)) or 'none'}"
        )


def samples_per_step(config: Config) -> int:
    """Sequences in one step, before any is dropped."""
    return config.gdpo.num_prompts_per_step * sequences_per_prompt(config)


def prompts_per_round(config: Config) -> int:
    """Prompts that a step samples at once: those it trains, unless ``gdpo.dynamic_sampling`` draws larger batches."""
    count = config.gdpo.num_prompts_per_step
    dynamic = config.gdpo.dynamic_sampling
    return int(count * dynamic.batch_multiplier) if dynamic.enabled and dynamic.batch_multiplier else count


def prompt_limit(config: Config, prompts: int) -> int | None:
    """Prompts that ``gdpo.max_num_epochs`` passes over ``prompts`` training prompts take; None where it sets no limit.

    A pass counts its whole rounds alone: what is left over is fewer prompts than a round takes. Never below one round.
    """
    epochs = config.gdpo.max_num_epochs
    per_round = prompts_per_round(config)
    return None if epochs is None else max(1, epochs * (prompts // per_round)) * per_round


def last_step(config: Config, limit: int | None) -> int:
    """Number of the run's last step if every step takes one round of ``limit`` prompts; with dynamic sampling some take
    more."""
    steps = config.gdpo.max_num_steps
    return steps if limit is None else min(steps, limit // prompts_per_round(config))


def samples_per_update(config: Config) -> int:
    """Sequences in one optimizer update. Raises ConfigError as ``updates_per_step`` does."""
    return samples_per_step(config) * config.gdpo.num_iterations // updates_per_step(config)


def updates_per_step(config: Config) -> int:
    """Optimizer updates in one step.

    Raises:
        ConfigError: the step does not divide into whole updates.
    """
    samples = samples_per_step(config)
    size = config.policy.train_global_batch_size or samples
    if size < 1 or samples % size:
        raise ConfigError(
            f"policy.train_global_batch_size: {size} does not divide the {samples} samples of a step "
            f"(num_prompts_per_step {config.gdpo.num_prompts_per_step} x num_generations_per_prompt "
            f"{sequences_per_prompt(config)}); null makes one update"
        )
    return samples // size * config.gdpo.num_iterations
