"""Seconds per step from a roofline: every phase is bounded by arithmetic, by memory, or by a link.

The ideal seconds here are those at a device's published peak; ``hardware.Rates`` turns them into expected ones. Left
out: network contention, stragglers, the environments' own work unless it was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from gdpo_nemo.algorithms.own_functions import loss_entry
from gdpo_nemo.config.algorithm_choice import has_value_head, old_logprobs_source
from gdpo_nemo.config.layout import Layout, resolve_layout, samples_per_step, samples_per_update, updates_per_step
from gdpo_nemo.config.objective_checks import kl_in_reward
from gdpo_nemo.config.schema import Config
from gdpo_nemo.planning.footprint import (
    BYTES,
    engine_memory,
    optimizer_bytes,
    reference_is_off_loaded,
    refit_bytes,
    teacher_shape,
)
from gdpo_nemo.planning.hardware import Device, Rates
from gdpo_nemo.planning.shape import Shape
from gdpo_nemo.planning.sharing import expected_saving


@dataclass(frozen=True)
class Lengths:
    """Tokens of a step's samples."""

    prompt: float
    completion: float
    longest: float
    """The longest completion."""

    @property
    def whole(self) -> float:
        """Prompt and completion of a mean sample."""
        return self.prompt + self.completion

    @property
    def parts(self) -> tuple[float, float]:
        """Tokens of a mean prompt and of a mean completion."""
        return self.prompt, self.completion


def expected_lengths(config: Config, rates: Rates) -> Lengths:
    """What samples will be like, by the shares in ``rates``."""
    new = config.policy.generation.max_new_tokens
    room = config.policy.max_total_sequence_length - new
    return Lengths(
        max(1.0, rates.prompt_share * room), max(1.0, rates.completion_share * new), max(1.0, rates.longest_share * new)
    )


@dataclass(frozen=True)
class Work:
    """Ideal seconds and the units that have a cost of their own."""

    units: float
    ideal: float


def generation_work(config: Config, shape: Shape, device: Device, lengths: Lengths) -> Work:
    """One engine's share of a step. Units are decoding steps.

    While samples wait, as many decode together as fit; when the queue is empty the longest one sets the end.
    """
    layout = resolve_layout(config)
    memory = engine_memory(config, shape, int(device.memory))
    samples = ceil(samples_per_step(config) / layout.engines)
    fit = memory.sequences(int(lengths.prompt + lengths.completion))
    together = max(1, min(samples, config.policy.generation.vllm_cfg.max_num_seqs, fit))
    steps = max(lengths.longest, samples * lengths.completion / together + lengths.longest - lengths.completion)
    tokens = samples * lengths.completion
    context = lengths.prompt + lengths.completion / 2
    moved = steps * memory.weights + tokens * context * memory.bytes_per_token
    arithmetic = 2 * shape.active_parameters * tokens / layout.engine_tensor
    prompts = ceil(samples / config.gdpo.num_generations_per_prompt)  # samples of one prompt share its cache
    prefill = 2 * shape.active_parameters * prompts * lengths.prompt / layout.engine_tensor
    return Work(steps, max(moved / device.bandwidth, arithmetic / device.compute) + prefill / device.compute)


def training_work(config: Config, shape: Shape, device: Device, lengths: Lengths) -> Work:
    """The updates of a step and the passes that evaluate log-probs before them. Units are micro-batches of a rank."""
    layout = resolve_layout(config)
    saving = expected_saving(config, *lengths.parts)
    tokens = samples_per_step(config) * lengths.whole * saving.tokens
    # Attention is counted by pairs: a token that is not computed would have met those before it.
    met = lengths.whole * saving.pairs / saving.tokens
    update = 3 + (config.policy.megatron_cfg.recompute == "full")
    passes = update * config.gdpo.num_iterations + evaluations(config)
    each = passes * _forward(shape, met)
    if teacher := teacher_shape(config):
        each += _forward(teacher, met)
    compute = each * tokens / (layout.policy_ranks * device.compute)
    batches = micro_batches(config, layout, lengths)
    per_update = max(1, batches // updates_per_step(config))
    bubble = (layout.pipeline - 1) / (
        per_update * (config.policy.megatron_cfg.virtual_pipeline_model_parallel_size or 1)
    )
    return Work(
        batches,
        compute * (1 + bubble)
        + _tensor_traffic(config, shape, device, layout, tokens)
        + _gradients(config, shape, device, layout)
        + _host_traffic(config, shape, device, layout),
    )


def _forward(shape: Shape, met: float) -> float:
    """Operations of a forward pass for one token of sequences of ``met`` tokens, half of which it attends to."""
    return 2 * shape.active_parameters + 2 * shape.layers * shape.query * met


def evaluations(config: Config) -> int:
    """Forward passes of the policy's model over a step's tokens besides those of the updates."""
    loss = config.loss_fn
    several = updates_per_step(config) > 1
    return (
        # values and log-probs are of one pass
        ((several and old_logprobs_source(config) == "trainer") or has_value_head(config))
        + bool(loss.reference_policy_kl_penalty)
        + loss_entry(loss.type).by_group * config.gdpo.num_iterations
        + loss_entry(loss.type).by_covariance * config.gdpo.num_iterations
        + kl_in_reward(config)
    )


def micro_batches(config: Config, layout: Layout, lengths: Lengths) -> int:
    """Micro-batches that each data-parallel rank runs in a step, for samples of mean length."""
    each = samples_per_update(config) / layout.data
    computed = each * lengths.whole * expected_saving(config, *lengths.parts).tokens
    return updates_per_step(config) * max(1, ceil(computed / config.policy.micro_batch_tokens))


def _tensor_traffic(config: Config, shape: Shape, device: Device, layout: Layout, tokens: float) -> float:
    """Seconds of the all-reduces of tensor parallelism: two a layer forward, two backward."""
    if layout.tensor == 1:
        return 0.0
    inside = not config.cluster.gpus_per_node or layout.tensor <= config.cluster.gpus_per_node
    volume = 4 * shape.layers / layout.pipeline * shape.hidden * BYTES[config.policy.precision]
    share = 2 * (layout.tensor - 1) / layout.tensor
    return volume * share * tokens / (layout.data * layout.context) / (device.nvlink if inside else device.network)


def _gradients(config: Config, shape: Shape, device: Device, layout: Layout) -> float:
    """Seconds of the gradient reductions of a step; half of them hidden where they overlap."""
    replicas = layout.data * layout.context
    if replicas == 1:
        return 0.0
    inside = not config.cluster.gpus_per_node or layout.policy_ranks <= config.cluster.gpus_per_node
    bytes_ = 4 * sum(shape.on_rank(layout, 0)) * 2 * (replicas - 1) / replicas
    seconds = updates_per_step(config) * bytes_ / (device.nvlink if inside else device.network)
    return seconds / 2 if config.policy.megatron_cfg.overlap_grad_reduce else seconds


def _host_traffic(config: Config, shape: Shape, device: Device, layout: Layout) -> float:
    """Seconds of copies between GPU and host memory: an off-loaded optimizer to each update and back, and the weights
    of a reference in and the policy's own back for each pass under it."""
    if not layout.gpus:
        return 0.0
    moved = 0.0
    if config.policy.megatron_cfg.optimizer.offload:
        moved += 2 * updates_per_step(config) * optimizer_bytes(config, shape, layout)
    passes = bool(config.loss_fn.reference_policy_kl_penalty) + kl_in_reward(config)
    if not config.policy.lora.rank and reference_is_off_loaded(config):
        moved += passes * sum(shape.on_rank(layout, 0)) * BYTES[config.policy.precision]
    return moved / device.host_link


def sync_work(config: Config, shape: Shape, device: Device) -> Work:
    """One publication, to all engines at once; colocated, over the links that gather the shards, or read and written
    twice."""
    layout = resolve_layout(config)
    if layout.colocated and layout.model_ranks == 1:
        return Work(1, 4 * refit_bytes(config, shape) / device.bandwidth)
    link = device.nvlink if config.cluster.num_nodes == 1 else device.network
    return Work(1, refit_bytes(config, shape) / link)


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of one step."""

    generation: float
    verify: float
    training: float
    sync: float
    step: float
    policy_idle: float
    """Share of the step in which the policy's ranks wait."""
    engines_idle: float

    def idle(self, layout: Layout) -> float:
        """Share of all ranks' time that is waiting; where policy and engine share a device, of the devices' time."""
        if layout.colocated:
            busy = (1 - self.policy_idle) * layout.policy_ranks + self.generation / self.step * layout.engine_ranks
            return 1 - busy / (layout.devices + layout.idle_gpus)
        ranks = layout.policy_ranks + layout.engine_ranks
        return (self.policy_idle * layout.policy_ranks + self.engines_idle * layout.engine_ranks + layout.idle_gpus) / (
            ranks + layout.idle_gpus
        )


def step_time(config: Config, shape: Shape, device: Device, rates: Rates, lengths: Lengths | None = None) -> StepTime:
    """The step of a config: phases in turn when on-policy; generation during training where samples may be stale."""
    lengths = lengths or expected_lengths(config, rates)
    generation, training, sync = (
        phase.seconds(work.units, work.ideal)
        for phase, work in (
            (rates.generation, generation_work(config, shape, device, lengths)),
            (rates.training, training_work(config, shape, device, lengths)),
            (rates.sync, sync_work(config, shape, device)),
        )
    )
    verify = rates.verify * samples_per_step(config)
    if config.rollout.max_staleness:
        step = max(generation + verify, training) + sync
    else:
        step = generation + verify + training + sync
    return StepTime(
        generation, verify, training, sync, step, 1 - (training + sync) / step, 1 - (generation + sync) / step
    )
