"""The share of the peak that each phase reaches on a GPU (MFU), from what its kernels multiply, move and launch.

A micro-batch is matrix products at a share of the peak, and beside them kernels that are bounded by the bytes they
move: norms, rotary embedding, activation, residuals; log-probs over the vocabulary; gradients added in float32. If the
host launches kernels more slowly than all that takes, it is the host that is waited for. Nothing of this was measured
on a GPU; the figures that are assumed are the constants below.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from gdpo_nemo.config.layout import Layout, resolve_layout, samples_per_step, samples_per_update
from gdpo_nemo.config.schema import Config
from gdpo_nemo.planning.footprint import BYTES, fused_logprobs, micro_batch_load, optimizer_bytes, transformer_engine
from gdpo_nemo.planning.hardware import Device, Rates
from gdpo_nemo.planning.shape import Shape
from gdpo_nemo.planning.speed import Lengths, expected_lengths, step_time

PRODUCT_SHARE = 0.7
"""Of the published peak, in large bf16 matrix products: an assumption."""
BANDWIDTH_SHARE = 0.9
"""Of the published bandwidth, in kernels that only move: an assumption."""
LAUNCH_S = 4.5e-6
"""Host seconds of a kernel launch from Python through autograd: an assumption."""
_LAYER_LAUNCHES = (14, 28)
"""Kernels of a layer, forward and backward, with TransformerEngine's fused norms, activation and rotary embedding."""
_ROTARY_LAUNCHES = 24
"""Kernels of Megatron's own rotary embedding for the queries, or the keys, of one sequence, forward and backward."""
_LOGIT_BYTES = (54, 102)
"""Bytes moved for each logit by log-probs in chunks: forward a float32 copy, largest, difference, exponential, clamp,
product and two sums; in the backward pass these again, and 48 bytes from the copy to the gradient in bfloat16."""
_FUSED_LOGIT_BYTES = (0, 6)
"""The same of kernels that keep logits on the chip: a slice of their gradient is written once and read twice."""
_GRADIENT_BYTES = 8
"""Per parameter and micro-batch: the float32 sum is read and written inside the matrix product."""
_OPTIMIZER_BYTES = 30
"""Per parameter and update: gradient, main weight and two moments read, three of them and the bf16 weight written."""


@dataclass(frozen=True)
class MicroBatch:
    """Seconds of one micro-batch on one rank, by what bounds them."""

    products: float
    moves: float
    """Norms, rotary embedding, activation, residuals."""
    logprobs: float
    gradients: float
    launches: int

    @property
    def host(self) -> float:
        """Seconds in which the host launches it all."""
        return self.launches * LAUNCH_S

    @property
    def seconds(self) -> float:
        """What the slower of device and host takes."""
        return max(self.products + self.moves + self.logprobs + self.gradients, self.host)


def model_flops(shape: Shape, tokens: float, length: float, backward: bool) -> float:
    """Operations of the model itself, with causal attention over sequences of ``length``: recomputation is not one."""
    forward = (2 * shape.active_parameters + 2 * shape.layers * shape.query * length) * tokens
    return forward * (3 if backward else 1)


def micro_batch(
    config: Config, shape: Shape, device: Device, tokens: int, length: float, backward: bool = True
) -> MicroBatch:
    """One micro-batch of ``tokens`` tokens in sequences of ``length``: an update's, or a pass that evaluates."""
    layout = resolve_layout(config)
    share = layout.model_ranks
    vocabulary = shape.vocabulary * tokens / share
    bandwidth = BANDWIDTH_SHARE * device.bandwidth
    again = {"none": 0.0, "selective": 0.0, "full": 1.0}[config.policy.megatron_cfg.recompute] * backward
    flops = model_flops(shape, tokens, length, backward) + again * model_flops(shape, tokens, length, False)
    flops += 2 * shape.hidden * shape.vocabulary * tokens * backward  # chunks of logits are recomputed
    size = BYTES[config.policy.precision]
    moved = _layer_floats(shape) * ((0.5 + again / 2 if backward else 0) + 0.5) * shape.layers * tokens * size / share
    there, back = _FUSED_LOGIT_BYTES if fused_logprobs(config, layout) else _LOGIT_BYTES
    return MicroBatch(
        products=flops / share / (PRODUCT_SHARE * device.compute),
        moves=moved / bandwidth,
        logprobs=(there + back * backward) * vocabulary / bandwidth,
        gradients=_GRADIENT_BYTES * shape.active_parameters / share / bandwidth * backward,
        launches=_launches(config, shape, layout, tokens / length, backward),
    )


def _layer_floats(shape: Shape) -> float:
    """Numbers read and written per token and layer, forward and backward, besides the products' own."""
    width = shape.active_experts * shape.expert_ffn if shape.mixture_layers else shape.ffn
    rotated = shape.query + shape.key_value / 2
    # Two norms (2 forward, 3 backward), two residuals (3 and 3); rotary read and written twice; gate, up and product.
    return 2 * 5 * shape.hidden + 2 * 6 * shape.hidden + 4 * rotated + 8 * width


def _launches(config: Config, shape: Shape, layout: Layout, sequences: float, backward: bool) -> int:
    layers = shape.layers // layout.pipeline
    count = layers * (_LAYER_LAUNCHES[0] + _LAYER_LAUNCHES[1] * backward)
    if not transformer_engine(config, layout):
        count += layers * ceil(sequences) * _ROTARY_LAUNCHES * 2 // (1 if backward else 2)
    return count


def optimizer_seconds(config: Config, shape: Shape, device: Device) -> float:
    """One optimizer step on a rank; with ``optimizer.offload`` its state's way to the device and back."""
    layout = resolve_layout(config)
    held = sum(shape.on_rank(layout, 0))
    shards = layout.data * layout.context if config.policy.megatron_cfg.use_distributed_optimizer else 1
    step = _OPTIMIZER_BYTES * held / shards / (BANDWIDTH_SHARE * device.bandwidth)
    if not config.policy.megatron_cfg.optimizer.offload:
        return step
    return step + 2 * optimizer_bytes(config, shape, layout) / (BANDWIDTH_SHARE * device.host_link)


@dataclass(frozen=True)
class Utilisation:
    """MFU of the phases of a step."""

    training: float
    evaluation: float
    generation: float
    batch: MicroBatch
    optimizer: float
    """Seconds of an optimizer step."""


def utilisation(config: Config, shape: Shape, device: Device, rates: Rates) -> Utilisation:
    """MFU by phase: training with its optimizer steps, log-prob passes, and the engines while they sample."""
    layout = resolve_layout(config)
    lengths = expected_lengths(config, rates)
    tokens = micro_batch_load(config, layout)
    peak = device.compute * layout.model_ranks
    length = min(lengths.whole, tokens)
    batch = micro_batch(config, shape, device, tokens, length)
    forward = micro_batch(config, shape, device, tokens, length, backward=False)
    each = samples_per_update(config) / layout.data * lengths.whole
    per_update = max(1.0, each / tokens)
    optimizer = optimizer_seconds(config, shape, device)
    return Utilisation(
        training=model_flops(shape, tokens, length, True) / (batch.seconds + optimizer / per_update) / peak,
        evaluation=model_flops(shape, tokens, length, False) / forward.seconds / peak,
        generation=_generation(config, shape, device, rates, layout, lengths),
        batch=batch,
        optimizer=optimizer,
    )


def _generation(config: Config, shape: Shape, device: Device, rates: Rates, layout: Layout, lengths: Lengths) -> float:
    """Of the engines' GPUs in the expected seconds of sampling: decoding is bounded by memory, not by arithmetic."""
    if not layout.engine_ranks:
        return 0.0
    seconds = step_time(config, shape, device, rates, lengths).generation
    drawn = samples_per_step(config) * lengths.completion
    read = samples_per_step(config) / config.gdpo.num_generations_per_prompt * lengths.prompt
    return 2 * shape.active_parameters * (drawn + read) / (seconds * device.compute * layout.engine_ranks)
