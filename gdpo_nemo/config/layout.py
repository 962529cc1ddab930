"""Parallel layout of a run: ranks, GPUs, pipeline stages, and updates per step. ``Resolved`` combines a config with its
layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from gdpo_nemo.config.algorithm_choice import AlgorithmSpec, spec_of
from gdpo_nemo.config.schema import Config, GdpoConfig, MegatronConfig
from gdpo_nemo.config.sections import PolicyConfig, replays_router
from gdpo_nemo.models.sources import ModelFacts
from gdpo_nemo.utils.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Parallel sizes and number of processes of a run. On CPU, a rank is a process without a device."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    data: int
    engines: int
    engine_tensor: int
    gpus: int
    """Total number of GPUs of the run; 0 on CPU."""
    colocated: bool = False
    """True if engine ranks share the devices of policy ranks and run only while the policy does not train."""

    first_layers: int | None = None
    """Number of layers of the first pipeline stage if it is configured. ``stage_layers`` divides the remaining layers
    among the other stages."""
    last_layers: int | None = None
    """Number of layers of the last pipeline stage if it is configured."""

    @property
    def model_ranks(self) -> int:
        """Number of ranks of one replica of the policy."""
        return self.tensor * self.pipeline * self.context

    @property
    def policy_ranks(self) -> int:
        """Number of ranks of all replicas of the policy."""
        return self.model_ranks * self.data

    @property
    def engine_ranks(self) -> int:
        """Number of ranks of all engines."""
        return self.engines * self.engine_tensor

    @property
    def idle_gpus(self) -> int:
        """Number of GPUs that the run does not use."""
        return self.gpus - self.devices if self.gpus else 0

    @property
    def devices(self) -> int:
        """Number of GPUs in use; on CPU, the number of GPUs that the same layout would use. A device that policy and
        engine share is counted once."""
        return self.policy_ranks if self.colocated else self.policy_ranks + self.engine_ranks


def resolve_layout(config: Config, algorithm: AlgorithmSpec | None = None) -> Layout:
    """Derive the layout from a config, including ``data_parallel_size`` if it is null.

    Args:
        algorithm: specification of the config's algorithm, if it is already known.

    Raises:
        ConfigError: if the layout does not fit on the GPUs or is inconsistent.
    """
    megatron = config.policy.megatron_cfg
    generation = config.policy.generation
    cluster = config.cluster
    tensor = megatron.tensor_model_parallel_size
    pipeline = megatron.pipeline_model_parallel_size
    model = tensor * pipeline * megatron.context_parallel_size
    gpus = cluster.num_nodes * cluster.gpus_per_node
    engines = generation.engines if (algorithm or spec_of(config)).samples else 0
    data = megatron.data_parallel_size
    if gpus:
        data = _data_parallel_on_gpus(config, gpus, model, engines)
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        context=megatron.context_parallel_size,
        expert=megatron.expert_model_parallel_size,
        expert_tensor=megatron.expert_tensor_parallel_size or tensor,
        data=data or 1,
        engines=engines,
        engine_tensor=generation.vllm_cfg.tensor_parallel_size,
        gpus=gpus,
        colocated=cluster.placement == "colocated",
        first_layers=megatron.num_layers_in_first_pipeline_stage if pipeline > 1 else None,
        last_layers=megatron.num_layers_in_last_pipeline_stage if pipeline > 1 else None,
    )
    _check_experts(layout)
    _check_shared(layout)
    return layout


def _data_parallel_on_gpus(config: Config, gpus: int, model: int, engines: int) -> int:
    generation = config.policy.generation
    data = config.policy.megatron_cfg.data_parallel_size
    per_engine = generation.vllm_cfg.tensor_parallel_size
    left = gpus
    share = f"{gpus} GPUs are available"
    fewer = ""
    other = "choose a layout that divides the number of GPUs"
    if config.cluster.placement == "separate" and engines:
        left = gpus - engines * per_engine
        share = f"{gpus} GPUs minus {engines} x {per_engine} for the engines leave {max(left, 0)}"
        fewer = "fewer engines, "
        other = "change policy.generation.engines"
    if per_engine > config.cluster.gpus_per_node:
        raise ConfigError(
            f"policy.generation.vllm_cfg.tensor_parallel_size: an engine of {per_engine} ranks does not fit on a node "
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
            f"replica; {other}, or set data_parallel_size={left // model} to leave some GPUs idle"
        )
    return data or left // model


def _check_shared(layout: Layout) -> None:
    if layout.colocated and layout.engine_ranks > layout.policy_ranks:
        raise ConfigError(
            f"policy.generation.engines: {layout.engines} x {layout.engine_tensor} = {layout.engine_ranks} engine "
            f"ranks cannot share the devices of {layout.policy_ranks} policy ranks (cluster.placement colocated); use "
            f"at most {layout.policy_ranks // layout.engine_tensor} engines"
        )


def _check_experts(layout: Layout) -> None:
    ranks = layout.tensor * layout.context * layout.data
    experts = layout.expert * layout.expert_tensor
    if ranks % experts:
        works = [n for n in range(1, ranks + 1) if ranks % (n * layout.expert_tensor) == 0]
        raise ConfigError(
            f"policy.megatron_cfg.expert_model_parallel_size: {layout.expert} x expert tensor {layout.expert_tensor} "
            f"= {experts} does not divide the {ranks} ranks of a pipeline stage (tensor x context x data); possible "
            f"values with this expert tensor size: {', '.join(map(str, works)) or 'none'}"
        )


def samples_per_step(gdpo: GdpoConfig, algorithm: AlgorithmSpec) -> int:
    """Return the number of sequences in one step, before dynamic sampling drops any."""
    return gdpo.num_prompts_per_step * algorithm.sequences_per_prompt(gdpo)


def prompts_per_round(gdpo: GdpoConfig) -> int:
    """Return the number of prompts in one generation round.

    The number equals ``gdpo.num_prompts_per_step``, unless ``gdpo.dynamic_sampling.batch_multiplier`` enlarges the
    rounds.
    """
    count = gdpo.num_prompts_per_step
    dynamic = gdpo.dynamic_sampling
    return int(count * dynamic.batch_multiplier) if dynamic.enabled and dynamic.batch_multiplier else count


def prompt_limit(gdpo: GdpoConfig, prompts: int) -> int | None:
    """Return the number of prompts in ``gdpo.max_num_epochs`` epochs; None without a limit.

    Only complete rounds of each epoch are counted. The result is at least the number of prompts in one round.

    Args:
        prompts: number of training prompts in an epoch.
    """
    epochs = gdpo.max_num_epochs
    per_round = prompts_per_round(gdpo)
    return None if epochs is None else max(1, epochs * (prompts // per_round)) * per_round


def last_step(gdpo: GdpoConfig, limit: int | None) -> int:
    """Return the last step of a run in which every step uses one generation round.

    With dynamic sampling, steps may use more rounds, so that the limit is reached earlier.

    Args:
        limit: maximum number of prompts (``prompt_limit``); None: no limit.
    """
    steps = gdpo.max_num_steps
    return steps if limit is None else min(steps, limit // prompts_per_round(gdpo))


def validations(gdpo: GdpoConfig) -> int:
    """Return the number of validations in a run of ``gdpo.max_num_steps`` steps."""
    return gdpo.val_at_start + (ceil(gdpo.max_num_steps / gdpo.val_period) if gdpo.val_period else 0)


def updates_per_step(config: Config, algorithm: AlgorithmSpec) -> int:
    """Return the number of optimizer updates in one step.

    Raises:
        ConfigError: if the samples of a step do not divide into updates of equal size.
    """
    samples = samples_per_step(config.gdpo, algorithm)
    size = config.policy.train_global_batch_size or samples
    if size < 1 or samples % size:
        raise ConfigError(
            f"policy.train_global_batch_size: {size} does not divide the {samples} samples of a step "
            f"(num_prompts_per_step {config.gdpo.num_prompts_per_step} x "
            f"num_generations_per_prompt {algorithm.sequences_per_prompt(config.gdpo)}); use null for a single update"
        )
    return samples // size * config.gdpo.num_iterations


@dataclass(frozen=True)
class Resolved:
    """A config with the algorithm, layout and model that it determines. ``validate`` creates this object once, and
    later code reads it."""

    config: Config
    algorithm: AlgorithmSpec
    layout: Layout
    model: ModelFacts
    notes: tuple[str, ...] = ()
    """Notes on settings that are valid but may be unintended, one sentence each."""

    @property
    def sequences_per_prompt(self) -> int:
        """Number of sequences that a step creates for each of its prompts."""
        return self.algorithm.sequences_per_prompt(self.config.gdpo)

    @property
    def samples_per_step(self) -> int:
        """Number of sequences in one step, before dynamic sampling drops any."""
        return samples_per_step(self.config.gdpo, self.algorithm)

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates in one step."""
        return updates_per_step(self.config, self.algorithm)

    @property
    def samples_per_update(self) -> int:
        """Number of sequences in one optimizer update."""
        return self.samples_per_step * self.config.gdpo.num_iterations // self.updates_per_step

    def changed(self, config: Config) -> Resolved:
        """Return a copy for another config that has the same algorithm and model. The layout is derived again.

        Raises:
            ConfigError: if the layout does not fit on the GPUs or is inconsistent.
        """
        return replace(self, config=config, layout=resolve_layout(config, self.algorithm))

    def with_ranks(self) -> Resolved:
        """Return a copy whose config contains the derived ``data_parallel_size``.

        The config of the run itself is not changed, because a resumed run is compared with the values that the user
        set.
        """
        megatron = replace(self.config.policy.megatron_cfg, data_parallel_size=self.layout.data)
        return replace(self, config=replace(self.config, policy=replace(self.config.policy, megatron_cfg=megatron)))


_PREFIX = "policy.megatron_cfg"


def stage_layers(layers: int, stages: int, first: int | None = None, last: int | None = None) -> list[range]:
    """Divide the layers among the pipeline stages as evenly as possible, and return a range of layers per stage.

    Args:
        layers: number of layers of the Hugging Face model.
        stages: number of pipeline stages. Virtual stages are counted as stages.
        first, last: ``num_layers_in_first_pipeline_stage`` and ``num_layers_in_last_pipeline_stage``; None: not
            configured.
    """
    between = stages - (first is not None) - (last is not None)
    start = first or 0
    rest = layers - (first or 0) - (last or 0)
    cuts = [start + round(i * rest / between) for i in range(between + 1)] if between else [start]
    ends = ([0] if first is not None else []) + cuts + ([layers] if last is not None else [])
    return [range(start, stop) for start, stop in zip(ends, ends[1:])]


def check_stages(layers: int, layout: MegatronConfig) -> None:
    """Check that the model's layers can be divided among the pipeline stages.

    Args:
        layers: number of layers of the model.

    Raises:
        ConfigError: if the layers cannot be divided among the stages. The message contains the key and the possible
            values.
    """
    pipeline = layout.pipeline_model_parallel_size
    uneven = {
        f"{_PREFIX}.num_layers_in_{end}_pipeline_stage": count
        for end, count in (
            ("first", layout.num_layers_in_first_pipeline_stage), ("last", layout.num_layers_in_last_pipeline_stage),
        )
        if count is not None and pipeline > 1
    }  # fmt: skip
    if not uneven:
        _check_even(layers, pipeline, layout.virtual_pipeline_model_parallel_size)
        return
    between = pipeline - len(uneven)
    rest = layers - sum(uneven.values())
    key = next(iter(uneven))
    counts = " and ".join(str(count) for count in uneven.values())
    if not between and rest:
        raise ConfigError(f"{key}: the two stages have {counts} layers, but the model has {layers}")
    if between and (rest < between or rest % between):
        raise ConfigError(
            f"{key}: {counts} of the model's {layers} layers leave {rest} for the {between} other stages "
            f"of {_PREFIX}.pipeline_model_parallel_size {pipeline}, which must share them evenly"
        )


def _check_even(layers: int, pipeline: int, virtual: int | None) -> None:
    if layers % pipeline:
        works = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        raise ConfigError(
            f"{_PREFIX}.pipeline_model_parallel_size: {pipeline} does not divide the model's {layers} layers; "
            f"possible: {works}, or set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        )
    if virtual and layers // pipeline % virtual:
        works = ", ".join(str(n) for n in range(1, layers // pipeline + 1) if layers // pipeline % n == 0)
        raise ConfigError(
            f"{_PREFIX}.virtual_pipeline_model_parallel_size: {virtual} does not divide the model's "
            f"{layers // pipeline} layers in each of {pipeline} stages; possible: {works}"
        )


def prompt_sharing(config: Config) -> bool | None:
    """Return whether prompts are shared: True (always), False (never), or None (only if it saves work).

    On GPUs without FlexAttention, ``auto`` never shares prompts, because masks make torch's SDPA slow there.
    """
    chosen = config.policy.share_prompts
    if chosen == "auto":
        return False if config.cluster.gpus_per_node and not has_flex_attention(config) else None
    return bool(chosen)


def shares_with_flex_attention(config: Config) -> bool:
    """Return whether packs with shared prompts use FlexAttention, and other packs TransformerEngine's attention."""
    return has_flex_attention(config) and config.policy.megatron_cfg.attention_backend != "flex"


def has_flex_attention(config: Config) -> bool:
    """Return whether the policy can use FlexAttention: on GPUs, unless only torch's SDPA is allowed."""
    megatron = config.policy.megatron_cfg
    engine = megatron.attention_backend != "sdpa" and megatron.transformer_engine is not False
    return config.cluster.gpus_per_node > 0 and (engine or megatron.attention_backend == "flex")


def check_prompt_sharing(config: Config) -> None:
    """Check that ``policy.share_prompts`` is valid. Raises ConfigError."""
    chosen = config.policy.share_prompts
    if not isinstance(chosen, bool) and chosen != "auto":
        raise ConfigError(f"policy.share_prompts: {chosen!r} is not a valid value (accepted: auto, true, false)")


def check_router_replay(policy: PolicyConfig, layout: Layout, *, has_experts: bool) -> None:
    """Check that ``policy.router_replay`` is valid for the model and the engines. Raises ConfigError."""
    key = "policy.router_replay"
    if policy.router_replay not in ("off", False, "sampler"):
        raise ConfigError(f"{key}: {policy.router_replay!r} is not a valid value (accepted: off, sampler)")
    if not replays_router(policy):
        return
    if not has_experts:
        raise ConfigError(f"{key}: has no effect because the model in {policy.model_name} has no experts; remove it")
    if not layout.gpus and (size := layout.engine_tensor) > 1:
        raise ConfigError(
            f"{key}: sampler requires policy.generation.vllm_cfg.tensor_parallel_size=1 on CPUs, got {size}"
        )
