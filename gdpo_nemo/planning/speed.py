"""Estimated seconds per step from a roofline model, and the model FLOPs utilisation (MFU) of each phase."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from gdpo_nemo.algorithms.loss_selection import loss_entry
from gdpo_nemo.config.algorithm_choice import old_logprobs_source
from gdpo_nemo.config.layout import Layout, Resolved
from gdpo_nemo.config.objective_checks import reference_passes
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.sections import MegatronConfig, PolicyConfig
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.weights import active_parameters
from gdpo_nemo.planning.hardware import Device, Rates
from gdpo_nemo.planning.memory import (
    BYTES,
    difference_bytes,
    engine_copy_bytes,
    engine_memory,
    fused_logprobs,
    micro_batch_load,
    moment_bytes,
    optimizer_bytes,
    reference_is_offloaded,
    refit_bytes,
    teacher_shape,
    token_budget,
    transformer_engine,
)
from gdpo_nemo.planning.shape import expected_saving, matrices, on_rank


@dataclass(frozen=True)
class Lengths:
    """Lengths of a step's samples, in tokens."""

    prompt: float
    """Mean prompt length."""
    completion: float
    """Mean completion length."""
    longest: float
    """Length of the longest completion."""

    @property
    def total(self) -> float:
        """Mean length of prompt plus completion."""
        return self.prompt + self.completion

    @property
    def parts(self) -> tuple[float, float]:
        """Mean prompt length and mean completion length."""
        return self.prompt, self.completion


def expected_lengths(policy: PolicyConfig, rates: Rates) -> Lengths:
    """Return the expected sample lengths: the config's limits times the fractions in ``rates``."""
    new = policy.generation.max_new_tokens
    room = policy.max_total_sequence_length - new
    return Lengths(
        max(1.0, rates.prompt_share * room), max(1.0, rates.completion_share * new), max(1.0, rates.longest_share * new)
    )


@dataclass(frozen=True)
class Work:
    """Amount of work of one phase, from which ``Phase.seconds`` computes its time."""

    units: float
    """Number of units with a fixed cost, for example decoding steps."""
    ideal: float
    """Seconds that the work takes at the device's peak rates."""


def generation_work(resolved: Resolved, shape: ModelDescription, device: Device, lengths: Lengths) -> Work:
    """Return the work of one engine in a step, with decoding steps as units.

    While samples are queued, the engine decodes as many samples at once as fit. After the queue is empty, the longest
    sample determines the end of the phase.
    """
    config = resolved.config
    layout = resolved.layout
    memory = engine_memory(config, shape, int(device.memory))
    samples = ceil(resolved.samples_per_step / layout.engines)
    fit = memory.sequences(int(lengths.prompt + lengths.completion))
    batch_size = max(1, min(samples, config.policy.generation.vllm_cfg.max_num_seqs, fit))
    steps = max(lengths.longest, samples * lengths.completion / batch_size + lengths.longest - lengths.completion)
    tokens = samples * lengths.completion
    context = lengths.prompt + lengths.completion / 2
    moved = steps * memory.weights + tokens * context * memory.bytes_per_token
    arithmetic = 2 * active_parameters(shape) * tokens / layout.engine_tensor
    prompts = ceil(samples / config.gdpo.num_generations_per_prompt)  # samples of a prompt share its KV cache
    prefill = 2 * active_parameters(shape) * prompts * lengths.prompt / layout.engine_tensor
    return Work(steps, max(moved / device.bandwidth, arithmetic / device.compute) + prefill / device.compute)


def recomputed_share(megatron: MegatronConfig, shape: ModelDescription) -> float:
    """Return the share of a forward pass that the backward pass repeats. Only matrix products of weights count."""
    if megatron.recompute == "selective" and "mlp" in megatron.recompute_modules:
        return shape.mlp_matrices * shape.hidden * shape.ffn * shape.count("-") / active_parameters(shape)
    return float(megatron.recompute == "full")


def training_work(resolved: Resolved, shape: ModelDescription, device: Device, lengths: Lengths) -> Work:
    """Return the work of a step's updates and preceding log-prob passes, with micro-batches of a rank as units.

    The ideal time is the time of all micro-batches by ``micro_batch``, of the optimizer steps, and of the communication
    between ranks.
    """
    config = resolved.config
    layout = resolved.layout
    saving = expected_saving(resolved, *lengths.parts)
    tokens = resolved.samples_per_step * lengths.total * saving.tokens
    # Attention cost is proportional to token pairs, so skipped prompt tokens change the mean length per computed token.
    # A slower attention has the effect of a larger length.
    attention_length = lengths.total * saving.attention / saving.tokens
    batches, passes = (micro_batches(resolved, layout, lengths, logprobs) for logprobs in (False, True))
    each, scored = (max(1, round(tokens / layout.data / count)) for count in (batches, passes))
    update = micro_batch(resolved, shape, device, each, attention_length)
    forward = micro_batch(resolved, shape, device, scored, attention_length, backward=False)
    compute = batches * config.gdpo.num_iterations * update.seconds + passes * evaluations(resolved) * forward.seconds
    if teacher := teacher_shape(resolved):
        compute += passes * micro_batch(resolved, teacher, device, scored, attention_length, backward=False).seconds
    per_update = max(1, batches // resolved.updates_per_step)
    bubble = (layout.pipeline - 1) / (
        per_update * (config.policy.megatron_cfg.virtual_pipeline_model_parallel_size or 1)
    )
    return Work(
        batches,
        compute * (1 + bubble)
        + resolved.updates_per_step * optimizer_seconds(resolved, shape, device)
        + _tensor_traffic(config, shape, device, layout, tokens)
        + _gradients(resolved, shape, device, layout)
        + _reference_traffic(resolved, shape, device, layout),
    )


def evaluations(resolved: Resolved) -> int:
    """Return the number of forward passes on a step's tokens in addition to the forward passes of the updates."""
    config = resolved.config
    loss = config.loss_fn
    several = resolved.updates_per_step > 1
    return (
        # one pass computes values and log-probs
        ((several and old_logprobs_source(config) == "trainer") or resolved.algorithm.head == "value")
        + reference_passes(config)
        + loss_entry(loss.type).by_group * config.gdpo.num_iterations
        + loss_entry(loss.type).by_covariance * config.gdpo.num_iterations
    )


def micro_batches(resolved: Resolved, layout: Layout, lengths: Lengths, logprobs: bool = False) -> int:
    """Return the number of micro-batches that each data-parallel rank runs in a step, for samples of mean length.

    With ``logprobs``, return the number of micro-batches of a log-prob pass on these samples.
    """
    each = resolved.samples_per_update / layout.data
    computed = each * lengths.total * expected_saving(resolved, *lengths.parts).tokens
    return resolved.updates_per_step * max(1, ceil(computed / token_budget(resolved.config.policy, logprobs)))


def _tensor_traffic(config: Config, shape: ModelDescription, device: Device, layout: Layout, tokens: float) -> float:
    """Return the seconds of tensor-parallel all-reduces: per layer, two in forward and two in backward pass."""
    if layout.tensor == 1:
        return 0.0
    inside = not config.cluster.gpus_per_node or layout.tensor <= config.cluster.gpus_per_node
    volume = 4 * shape.layers / layout.pipeline * shape.hidden * BYTES[config.policy.precision]
    share = 2 * (layout.tensor - 1) / layout.tensor
    return volume * share * tokens / (layout.data * layout.context) / (device.nvlink if inside else device.network)


def _gradients(resolved: Resolved, shape: ModelDescription, device: Device, layout: Layout) -> float:
    """Return the seconds of a step's gradient reductions.

    ``overlap_grad_reduce`` is assumed to hide half of this time.
    """
    config = resolved.config
    replicas = layout.data * layout.context
    if replicas == 1:
        return 0.0
    inside = not config.cluster.gpus_per_node or layout.policy_ranks <= config.cluster.gpus_per_node
    size = BYTES[config.policy.megatron_cfg.optimizer.main_grads_dtype]
    bytes_ = size * sum(on_rank(shape, layout, 0)) * 2 * (replicas - 1) / replicas
    seconds = resolved.updates_per_step * bytes_ / (device.nvlink if inside else device.network)
    return seconds / 2 if config.policy.megatron_cfg.overlap_grad_reduce else seconds


def _reference_traffic(resolved: Resolved, shape: ModelDescription, device: Device, layout: Layout) -> float:
    """Return the seconds of copying an offloaded reference's weights to the GPU, before each of its log-prob passes."""
    config = resolved.config
    if not layout.gpus or config.policy.lora.rank or not reference_is_offloaded(config):
        return 0.0
    return reference_passes(config) * sum(on_rank(shape, layout, 0)) * BYTES[config.policy.precision] / device.host_link


def sync_work(resolved: Resolved, shape: ModelDescription, device: Device) -> Work:
    """Return the work of one weight update, which is sent to all engines at once.

    The weights are sent over NVLink or, if there are several nodes, over the network. For a difference, each engine
    process also loads its copy from host memory, and writes it back in the other direction at the same time. With
    colocated engines on one rank per model, the weights are read and written twice in the device's memory instead.
    """
    layout = resolved.layout
    if layout.colocated and layout.model_ranks == 1:
        return Work(1, 4 * refit_bytes(resolved, shape) / device.bandwidth)
    link = device.nvlink if resolved.config.cluster.num_nodes == 1 else device.network
    if difference := difference_bytes(resolved, shape):
        return Work(1, difference / link + engine_copy_bytes(resolved, shape) / device.host_link)
    return Work(1, refit_bytes(resolved, shape) / link)


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of one step and its phases."""

    generation: float
    verify: float
    training: float
    sync: float
    step: float
    policy_idle: float
    """Fraction of the step in which the policy ranks wait."""
    engines_idle: float
    """Fraction of the step in which the engines wait."""

    def idle(self, layout: Layout) -> float:
        """Return the fraction of all ranks' time that is spent waiting.

        For colocated layouts, return the fraction of all devices' time.
        """
        if layout.colocated:
            busy = (1 - self.policy_idle) * layout.policy_ranks + self.generation / self.step * layout.engine_ranks
            return 1 - busy / (layout.devices + layout.idle_gpus)
        ranks = layout.policy_ranks + layout.engine_ranks
        return (self.policy_idle * layout.policy_ranks + self.engines_idle * layout.engine_ranks + layout.idle_gpus) / (
            ranks + layout.idle_gpus
        )


def step_time(
    resolved: Resolved, shape: ModelDescription, device: Device, rates: Rates, lengths: Lengths | None = None
) -> StepTime:
    """Return the expected time of a step.

    In on-policy runs, the phases run one after the other. If samples may be stale, generation overlaps with training.
    """
    config = resolved.config
    lengths = lengths or expected_lengths(config.policy, rates)
    generation, training, sync = (
        phase.seconds(work.units, work.ideal)
        for phase, work in (
            (rates.generation, generation_work(resolved, shape, device, lengths)),
            (rates.training, training_work(resolved, shape, device, lengths)),
            (rates.sync, sync_work(resolved, shape, device)),
        )
    )
    verify = rates.verify * resolved.samples_per_step
    if config.rollout.max_staleness:
        step = max(generation + verify, training) + sync
    else:
        step = generation + verify + training + sync
    return StepTime(
        generation=generation,
        verify=verify,
        training=training,
        sync=sync,
        step=step,
        policy_idle=1 - (training + sync) / step,
        engines_idle=1 - (generation + sync) / step,
    )


PRODUCT_SHARE = 0.5
"""Fraction of the published peak FLOP/s that bf16 matrix products reach in an update, fitted to the 1.5B model in
docs/performance.md, "On one H200"."""
FORWARD_SHARE = 0.6
"""The same fraction in a log-prob pass, from the same table."""
HOST_LAYER_S = (3.6e-3, 3.9e-3)
"""Host seconds per layer and micro-batch (forward, backward) on a GPU, for Python code and launches.

The values are fitted to the micro-batches of 8,192 tokens in the same table, which contains one machine. The host and
the GPU work concurrently, so the slower one determines the time.
"""
BANDWIDTH_SHARE = 0.9
"""Assumed fraction of the published bandwidth that memory-bound kernels reach."""
LAUNCH_S = 4.5e-6
"""Assumed host seconds to launch a kernel from Python through autograd, if ``HOST_LAYER_S`` does not include it."""
_LAYER_LAUNCHES = (14, 28)
"""Kernels per layer (forward, backward) with TransformerEngine's fused norms, activation and rotary embedding."""
_ROUTER_LAUNCHES = (24, 28)
"""Additional kernels per MoE layer (forward, backward): router, top-k, permutation, all-to-all and combination."""
_EXPERT_LAUNCHES = (2, 4)
"""Matrix products of an expert (forward, backward). A grouped product launches a kernel for each local expert."""
_TILE = 128
"""Rows of a tile of a matrix product. On average, half of the last tile of each expert's tokens is empty."""
_WAIT_S = 3.0e-5
"""Assumed seconds that a GPU is idle after the host has waited for the numbers of tokens of the experts."""
_ROTARY_LAUNCHES = 24
"""Kernels of Megatron's rotary embedding per sequence, in forward and backward pass, for queries or for keys."""
_LOGIT_BYTES = (54, 102)
"""Bytes moved per logit by chunked log-probs (forward, backward).

Forward: a float32 copy, maximum, difference, exponential, clamp, product and two sums. Backward: the same operations,
and 48 bytes to compute the bfloat16 gradient.
"""
_FUSED_LOGIT_BYTES = (0, 6)
"""Bytes moved per logit by fused kernels, which keep logits on the chip (forward, backward). A slice of the gradient is
written once and read twice."""
_GRADIENT_BYTES = 8
"""Bytes per parameter and micro-batch: the matrix product reads and writes the float32 gradient sum."""
_OPTIMIZER_BYTES = 30
"""Bytes per parameter and update.

The optimizer reads the gradient, the main weight and two moments, and writes the main weight, the moments and the bf16
weight.
"""


@dataclass(frozen=True)
class MicroBatch:
    """Estimated seconds of one micro-batch on one rank, by kind of work."""

    products: float
    """Matrix products."""
    moves: float
    """Memory-bound kernels: norms, rotary embedding, activation, residuals."""
    logprobs: float
    gradients: float
    host: float
    """Python code and launches, which overlap with the other kinds of work."""
    routing: float = 0.0
    """All-to-all exchanges between expert-parallel ranks, and waits of the host for the experts' token counts."""

    @property
    def device(self) -> float:
        """Seconds of work on the device."""
        return self.products + self.moves + self.logprobs + self.gradients + self.routing

    @property
    def seconds(self) -> float:
        """Seconds of the micro-batch: the larger of device time and host time."""
        return max(self.device, self.host)


def model_flops(shape: ModelDescription, tokens: float, length: float, *, backward: bool) -> float:
    """Return the model FLOPs, with causal attention over sequences of ``length`` tokens and without recomputation.

    A Mamba-2 layer decays, extends and reads a state for each channel. A gated delta net layer also reads the state at
    the key.
    """
    attention = 2 * shape.count("*") * shape.query * length
    scans = 6 * shape.count("M") * shape.mamba[1] * shape.mamba_state
    scans += 8 * shape.count("G") * shape.delta.sections[2] * shape.delta.key
    forward = (2 * active_parameters(shape) + attention + scans) * tokens
    return forward * (3 if backward else 1)


def micro_batch(
    resolved: Resolved, shape: ModelDescription, device: Device, tokens: int, length: float, backward: bool = True
) -> MicroBatch:
    """Return the time of one micro-batch of ``tokens`` tokens in sequences of ``length`` tokens.

    If ``backward`` is false, return the time of a log-prob pass.
    """
    config = resolved.config
    layout = resolved.layout
    share = layout.model_ranks
    vocabulary = shape.vocabulary * tokens / share
    bandwidth = BANDWIDTH_SHARE * device.bandwidth
    again = recomputed_share(config.policy.megatron_cfg, shape) * backward
    flops = model_flops(shape, tokens, length, backward=backward)
    flops += again * model_flops(shape, tokens, length, backward=False)
    flops *= 1 + _empty_tiles(shape, layout, tokens)
    flops += 2 * shape.hidden * shape.vocabulary * tokens * backward  # the backward pass recomputes chunks of logits
    size = BYTES[config.policy.precision]
    moved = _layer_floats(shape) * ((0.5 + again / 2 if backward else 0) + 0.5) * shape.layers * tokens * size / share
    weights = sum(on_rank(shape, layout, 0)) if shape.moe_layers else active_parameters(shape) / share
    forward_bytes, backward_bytes = _FUSED_LOGIT_BYTES if fused_logprobs(config.policy, layout) else _LOGIT_BYTES
    return MicroBatch(
        products=flops / share / ((PRODUCT_SHARE if backward else FORWARD_SHARE) * device.compute),
        moves=moved / bandwidth,
        logprobs=(forward_bytes + backward_bytes * backward) * vocabulary / bandwidth,
        gradients=_GRADIENT_BYTES * weights / bandwidth * backward,
        host=_host_seconds(config.policy, shape, layout, tokens / length, 1 + again, backward),
        routing=_routing(config, shape, device, layout, tokens) * (1 + backward + again),
    )


def _empty_tiles(shape: ModelDescription, layout: Layout, tokens: int) -> float:
    """Return the work on empty rows of the experts' matrix products, as a fraction of all products."""
    if not shape.moe_layers:
        return 0.0
    ranks = layout.expert * layout.expert_tensor  # their tokens are in the products of each of their experts
    routed = tokens / (layout.context * layout.tensor) * ranks * shape.active_experts / shape.experts
    experts = len(shape.moe_layers) * shape.active_experts * shape.mlp_matrices * shape.expert_hidden * shape.expert_ffn
    return experts / active_parameters(shape) * _TILE / 2 / max(1.0, routed)


def _routing(config: Config, shape: ModelDescription, device: Device, layout: Layout, tokens: int) -> float:
    """Return the seconds of the MoE layers' two all-to-all exchanges and of the host's wait, for one forward pass."""
    layers = len(shape.moe_layers) / layout.pipeline
    size = BYTES[config.policy.precision]
    sent = shape.active_experts * shape.expert_hidden * size * tokens / (layout.context * layout.tensor)
    inside = layout.expert * layout.expert_tensor <= (config.cluster.gpus_per_node or layout.policy_ranks)
    exchange = 2 * sent * (layout.expert - 1) / layout.expert / (device.nvlink if inside else device.network)
    return layers * (exchange + _WAIT_S)


def _layer_floats(shape: ModelDescription) -> float:
    """Return how many values a layer's memory-bound kernels read and write per token.

    The result includes the forward and the backward pass.
    """
    mlps = shape.share("-") + shape.share("E")
    width = mlps * (shape.active_experts * shape.expert_ffn + shape.shared_ffn if shape.moe_layers else shape.ffn)
    rotated = shape.share("*") * (shape.query + shape.key_value / 2)
    blocks = mlps + shape.share("*") + shape.share("M") + shape.share("G")
    # Terms: norms (2 forward, 3 backward), residuals (3 and 3), rotary embedding (read and written twice), gate, up and
    # their product, and a recurrent layer's convolution, gate and norm.
    norms = 5 * (blocks + shape.post_norms) * shape.hidden
    recurrent = shape.share("M") * sum(shape.mamba) + shape.share("G") * sum(shape.delta.sections)
    return norms + 6 * blocks * shape.hidden + 4 * rotated + 8 * width + 8 * recurrent


def _host_seconds(
    policy: PolicyConfig, shape: ModelDescription, layout: Layout, sequences: float, forwards: float, backward: bool
) -> float:
    """Return the host seconds of a micro-batch. CPUs execute the kernels themselves, so only launches count there.

    Args:
        forwards: number of forward passes, including recomputation.
    """
    layers = shape.layers // layout.pipeline
    of_layer = HOST_LAYER_S if layout.gpus else tuple(LAUNCH_S * count for count in _LAYER_LAUNCHES)
    seconds = layers * (of_layer[0] * forwards + of_layer[1] * backward)
    moe_layers = len(shape.moe_layers) // layout.pipeline
    experts = shape.experts // layout.expert
    count = moe_layers * (_ROUTER_LAUNCHES[0] + experts * _EXPERT_LAUNCHES[0])
    count += moe_layers * (_ROUTER_LAUNCHES[1] + experts * _EXPERT_LAUNCHES[1]) * backward
    if not transformer_engine(policy, layout):
        count += layers * ceil(sequences) * _ROTARY_LAUNCHES * 2 // (1 if backward else 2)
    return seconds + count * LAUNCH_S


def _iteration_flops(shape: ModelDescription, layout: Layout) -> float:
    """Return the FLOPs of a Newton-Schulz iteration of the matrices of a stage, which each tensor rank computes.

    For a matrix [m, n] with m at most n these are two products with m * m * n and one with m * m * m terms.
    """
    flops = 0.0
    for rows, columns, count in matrices(shape):
        small, large = sorted((rows, columns))
        flops += 2 * (2 * large + small) * small**2 * (count // layout.expert if count > 1 else 1)
    return flops / layout.pipeline


def optimizer_seconds(resolved: Resolved, shape: ModelDescription, device: Device) -> float:
    """Return the seconds of one optimizer step on a rank, including copies of its state with ``optimizer.offload``."""
    config = resolved.config
    layout = resolved.layout
    held = sum(on_rank(shape, layout, 0))
    shards = layout.data * layout.context if config.policy.megatron_cfg.use_distributed_optimizer else 1
    optimizer = config.policy.megatron_cfg.optimizer
    moved = _OPTIMIZER_BYTES - 2 * (8 - moment_bytes(config.policy)) - (4 - BYTES[optimizer.main_grads_dtype])
    step = moved * held / shards / (BANDWIDTH_SHARE * device.bandwidth)
    if optimizer.type == "muon" and not config.policy.lora.rank:
        step += optimizer.muon_num_ns_steps * _iteration_flops(shape, layout) / device.compute
    if not config.policy.megatron_cfg.optimizer.offload:
        return step
    return step + 2 * optimizer_bytes(config.policy, shape, layout) / (BANDWIDTH_SHARE * device.host_link)


@dataclass(frozen=True)
class Utilisation:
    """MFU of each phase of a step."""

    training: float
    evaluation: float
    generation: float
    batch: MicroBatch
    forward: MicroBatch
    """Micro-batch of a log-prob pass."""
    optimizer: float
    """Seconds of one optimizer step."""


def utilisation(resolved: Resolved, shape: ModelDescription, device: Device, rates: Rates) -> Utilisation:
    """Return the MFU of training (with optimizer steps), of log-prob passes, and of sampling on the engines."""
    layout = resolved.layout
    lengths = expected_lengths(resolved.config.policy, rates)
    tokens = micro_batch_load(resolved, layout)
    peak = device.compute * layout.model_ranks
    length = min(lengths.total, tokens)
    batch = micro_batch(resolved, shape, device, tokens, length)
    scored = micro_batch_load(resolved, layout, logprobs=True)
    forward = micro_batch(resolved, shape, device, scored, min(lengths.total, scored), backward=False)
    each = resolved.samples_per_update / layout.data * lengths.total
    per_update = max(1.0, each / tokens)
    optimizer = optimizer_seconds(resolved, shape, device)
    seconds = rates.training.seconds(1, batch.seconds + optimizer / per_update)
    return Utilisation(
        training=model_flops(shape, tokens, length, backward=True) / seconds / peak,
        evaluation=model_flops(shape, scored, min(lengths.total, scored), backward=False)
        / rates.training.seconds(1, forward.seconds)
        / peak,
        generation=_generation(resolved, shape, device, rates, layout, lengths),
        batch=batch,
        forward=forward,
        optimizer=optimizer,
    )


def _generation(
    resolved: Resolved, shape: ModelDescription, device: Device, rates: Rates, layout: Layout, lengths: Lengths
) -> float:
    """Return the MFU of the engines' GPUs while they sample, which is limited by memory bandwidth."""
    if not layout.engine_ranks:
        return 0.0
    seconds = step_time(resolved, shape, device, rates, lengths).generation
    decoded = resolved.samples_per_step * lengths.completion
    prefilled = resolved.samples_per_step / resolved.config.gdpo.num_generations_per_prompt * lengths.prompt
    return 2 * active_parameters(shape) * (decoded + prefilled) / (seconds * device.compute * layout.engine_ranks)
