"""Bytes per rank: what the policy and the engines hold at the fullest moment of a step.

Activations are counted tensor by tensor as the layers of ``gdpo_nemo.megatron`` keep them for the backward pass: on
GPUs with Megatron's fused activation, and with TransformerEngine's norms and attention unless they are switched off
(neither was measured here). ``tests/benchmarks/memory.py`` holds this against
real ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil

from gdpo_nemo.config.algorithm_choice import DISTILLATION
from gdpo_nemo.config.layout import Layout, resolve_layout, samples_per_update
from gdpo_nemo.config.objective_checks import kl_in_reward
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.transports import chosen_transport
from gdpo_nemo.planning.shape import Shape, model_shape
from gdpo_nemo.planning.sharing import Saving, expected_saving

BYTES = {"float32": 4, "bfloat16": 2}
_LOGIT_BYTES = 256 << 20
"""Logits of one chunk of tokens (float32) in the policy; more tokens are recomputed chunk by chunk."""
_SLICE_BYTES = 256 << 20
_SLICE_TILE = 256
"""With the fused kernels only the gradient of a slice of the vocabulary is in memory, in whole tiles of columns."""
_LOGPROB_CHUNK = 1024
"""Tokens whose logits are held in float32 at once."""
_RECTANGLE_PADDING = 1.15
"""Sequences of similar length are attended to in padded rectangles, at most 1.3 times their tokens."""
GPU_RESERVE = 3 << 30
"""Bytes that the CUDA context, NCCL's buffers and the allocator's fragments take on a GPU: an assumption."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one policy rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logprobs: int
    """Logits of one chunk, their gradient, and their float32 copies; with fused kernels the gradients of a slice of the
    logits and of the evaluated hidden states."""
    buffers: int
    """The largest weight's gradient before it is added to the others; gradients of one layer's activations."""
    reserve: int = 0
    reference: int = 0
    """Weights of a KL penalty's reference, where these stay on the GPU."""
    teacher: int = 0
    """Weights of the model that distillation learns from."""
    stage: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "stage")

    def resting(self, offload: bool) -> int:
        """Bytes that stay while colocated engines sample: gradients are given back, and with ``offload`` main weights
        and moments are in host memory."""
        return self.weights + self.reference + self.teacher + (0 if offload else self.optimizer) + self.reserve


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one rank of an engine, and how many sequences its cache holds."""

    weights: int
    kv_cache: int
    bytes_per_token: int
    """Keys and values of one token on this rank."""

    def sequences(self, tokens: int) -> int:
        """Sequences of ``tokens`` tokens that fit."""
        return self.kv_cache // max(1, self.bytes_per_token * tokens)


def micro_batch_load(config: Config, layout: Layout) -> int:
    """Tokens that are computed of the fullest micro-batch: the budget, or all of a rank's share where that is less."""
    sequences = -(-(samples_per_update(config)) // layout.data)
    computed = sequences * config.policy.max_total_sequence_length * _longest_saving(config).tokens
    return min(config.policy.micro_batch_tokens, ceil(computed))


def _longest_saving(config: Config) -> Saving:
    """What samples of full length save that share a prompt."""
    new = config.policy.generation.max_new_tokens
    return expected_saving(config, config.policy.max_total_sequence_length - new, new)


def policy_memory(config: Config, shape: Shape, tokens: int | None = None, rows: int | None = None) -> RankMemory:
    """The fullest rank of the policy.

    Args:
        tokens: tokens of the fullest micro-batch; None takes the config's budget.
        rows: tokens of it whose successor is evaluated; None: all of them.
    """
    layout = resolve_layout(config)
    tokens = micro_batch_load(config, layout) if tokens is None else tokens
    rows = tokens if rows is None else rows
    return max(
        (_stage_memory(config, shape, layout, stage, tokens, rows) for stage in range(layout.pipeline)),
        key=lambda memory: memory.total,
    )


def _stage_memory(config: Config, shape: Shape, layout: Layout, stage: int, tokens: int, rows: int) -> RankMemory:
    size = BYTES[config.policy.precision]
    megatron = config.policy.megatron_cfg
    lora = config.policy.lora
    dense, experts = shape.on_rank(layout, stage)
    trained = _trained(config, shape, layout, stage)
    if lora.rank:
        dense += trained[0]
    state = 8 if config.policy.precision == "float32" else 12  # two moments; in bfloat16 main weights besides
    last = stage == layout.pipeline - 1
    logits = _logits(config, shape, layout, rows // layout.context, size) if last else 0
    table = -(-shape.vocabulary // layout.tensor) * shape.hidden * size
    largest = table if last or stage == 0 else 3 * shape.hidden * shape.ffn // layout.tensor * size
    state_bytes = _optimizer_state(config, shape, layout, stage, state)
    activations = _activations(config, shape, layout, stage, tokens, rows, size)
    # The backward pass starts when the logits are gone, so that only what exceeds them counts.
    buffers = (0 if lora.rank else largest) + max(0, _backward(config, shape, layout, tokens, size) - logits)
    if megatron.optimizer.offload and layout.gpus:  # it comes to the device when the activations are gone
        state_bytes = max(0, state_bytes - activations - logits - buffers)
    return RankMemory(
        weights=(dense + experts) * size,
        gradients=sum(trained) * 4,
        optimizer=state_bytes,
        activations=activations,
        logprobs=logits,
        buffers=buffers,
        reserve=GPU_RESERVE if layout.gpus else 0,
        reference=0 if reference_is_off_loaded(config) else _reference(config, shape, layout, stage),
        teacher=_teacher(config, layout, stage),
        stage=stage,
    )


def _trained(config: Config, shape: Shape, layout: Layout, stage: int) -> tuple[int, int]:
    """(dense, expert) parameters of a rank that an update changes."""
    lora = config.policy.lora
    return (shape.adapters(layout, stage, lora), 0) if lora.rank else shape.on_rank(layout, stage)


def _optimizer_state(config: Config, shape: Shape, layout: Layout, stage: int, size: int) -> int:
    """``size`` bytes for each trained parameter, divided over the replicas where these share the optimizer."""
    replicas = [
        layout.data * layout.context,
        layout.tensor * layout.context * layout.data // (layout.expert * layout.expert_tensor),
    ]
    shards = replicas if config.policy.megatron_cfg.use_distributed_optimizer else [1, 1]
    return sum(size * count // shard for count, shard in zip(_trained(config, shape, layout, stage), shards))


def _backward(config: Config, shape: Shape, layout: Layout, tokens: int, size: int) -> int:
    """Gradients of one MLP's activations, and what is recomputed of one layer for its backward pass."""
    width = (
        shape.active_experts * shape.expert_ffn / layout.expert_tensor
        if shape.mixture_layers
        else shape.ffn / layout.tensor
    )
    floats = 5 * width + 2 * shape.hidden
    norms, attention, rest = _layer_floats(config, shape, layout)
    again = {"none": 0, "selective": attention, "full": norms / 2 + max(attention, rest)}[
        config.policy.megatron_cfg.recompute
    ]
    if (computed := _longest_saving(config).tokens) < 1:  # keys and values of every sequence, shared ones included
        again = max(again, attention / computed)
    return int((floats + again) * (tokens // layout.context) * size)


def _logits(config: Config, shape: Shape, layout: Layout, rows: int, size: int) -> int:
    """Logits of a chunk and their gradient in the model's precision, three float32 copies of part of it; fused, see
    ``gdpo_nemo.megatron.fused_logprobs``."""
    width = -(-shape.vocabulary // layout.tensor)
    if fused_logprobs(config, layout):
        fits = _SLICE_BYTES // max(1, rows * size) // _SLICE_TILE * _SLICE_TILE
        columns = min(width, max(_SLICE_TILE, fits))
        # The gradient of the hidden states adds up in float32 and is then rounded; four float32 values are kept.
        return rows * (columns * size + shape.hidden * (4 + size) + 16)
    chunk = min(rows, max(1, _LOGIT_BYTES // (4 * width)))
    return 2 * chunk * width * size + 3 * min(chunk, _LOGPROB_CHUNK) * width * 4


def fused_logprobs(config: Config, layout: Layout) -> bool:
    """Whether log-probs come from kernels that write no logits: on GPUs, unless the config or an adapted head says
    no."""
    lora = config.policy.lora
    adapted = bool(lora.rank) and "lm_head" in lora.target_modules
    return layout.gpus > 0 and config.policy.megatron_cfg.fused_logprobs is not False and not adapted


def _activations(config: Config, shape: Shape, layout: Layout, stage: int, tokens: int, rows: int, size: int) -> int:
    """Tensors kept for the backward pass by all micro-batches that are under way on ``stage``."""
    megatron = config.policy.megatron_cfg
    local = tokens // layout.context
    count = len(shape.on_stage(layout, stage))
    inputs, attention, rest = _layer_floats(config, shape, layout)
    whole = inputs + attention + rest
    again = count
    if megatron.recompute == "full" and megatron.recompute_layers:
        chunks = megatron.virtual_pipeline_model_parallel_size or 1
        again = min(count, megatron.recompute_layers * chunks)
    kept = {"none": whole, "selective": inputs + rest, "full": _residual(config, shape, layout)}[megatron.recompute]
    floats = again * kept + (count - again) * whole
    ends = 0
    if stage == layout.pipeline - 1:  # the final norm, gathered; the rows that are evaluated
        ends = _norm_floats(config) * shape.hidden * local + shape.hidden * rows // layout.context
    under_way = _in_flight(layout, stage, megatron.virtual_pipeline_model_parallel_size)
    return int((floats * local * under_way + ends) * size)


def _in_flight(layout: Layout, stage: int, virtual: int | None) -> float:
    """Micro-batches whose activations a stage holds at once (one forward, one backward in turn)."""
    under_way = layout.pipeline - stage
    if virtual and layout.pipeline > 1:
        return layout.pipeline * (1 + (layout.pipeline - 1) / (layout.pipeline * virtual))
    return under_way


def _residual(config: Config, shape: Shape, layout: Layout) -> float:
    """Floats per token that a wholly recomputed layer keeps: the inputs of its attention and of its MLP."""
    return 2 * shape.hidden / (layout.tensor if config.policy.megatron_cfg.sequence_parallel else 1)


def _layer_floats(config: Config, shape: Shape, layout: Layout) -> tuple[float, float, float]:
    """(norms and their inputs, core attention, the rest) of one layer, floats per local token."""
    gpu = transformer_engine(config, layout)
    sharded = layout.tensor if config.policy.megatron_cfg.sequence_parallel else 1
    norms = 2 * (2 if gpu else _norm_floats(config)) * shape.hidden / sharded
    query = shape.query / layout.tensor
    both = shape.key_value / layout.tensor
    ffn = _ffn_floats(shape, layout)
    if gpu:  # rotated queries, keys and values for the fused kernel, and its output
        return norms, query + both, query + ffn
    # Queries and output in rectangles; keys and values repeated for every head, whole under context parallelism.
    attention = _RECTANGLE_PADDING * (2 * query + 2 * query * layout.context)
    norm_inputs = (query + both) * shape.qk_norm
    return norms, attention, query + norm_inputs + ffn


def _norm_floats(config: Config) -> int:
    """Input, normalised input and output of a norm without a fused kernel, which computes in float32."""
    return 3 if config.policy.precision == "float32" else 5


def transformer_engine(config: Config, layout: Layout) -> bool:
    """Whether norms and attention are TransformerEngine's, as far as the config decides it."""
    megatron = config.policy.megatron_cfg
    return layout.gpus > 0 and megatron.transformer_engine is not False and megatron.attention_backend != "sdpa"


def _ffn_floats(shape: Shape, layout: Layout) -> float:
    """Gate, up and their product, which the fused activation of GPUs keeps; on CPUs the gate's activation and a copy of
    up besides."""
    parts = 3 if layout.gpus else 5
    dense = parts * shape.ffn / layout.tensor
    if not shape.mixture_layers:
        return dense
    # Each token visits active_experts experts, whose inputs are copies; over ranks the copies balance out on average.
    routed = shape.active_experts * (parts * shape.expert_ffn / layout.expert_tensor + 2 * shape.hidden)
    share = len(shape.mixture_layers) / shape.layers
    return share * routed + (1 - share) * dense


def optimizer_bytes(config: Config, shape: Shape, layout: Layout) -> int:
    """Moments, and in bfloat16 main weights, of the fullest rank, wherever they are."""
    state = 8 if config.policy.precision == "float32" else 12
    return max(_optimizer_state(config, shape, layout, stage, state) for stage in range(layout.pipeline))


def host_memory(config: Config, shape: Shape) -> int:
    """Bytes of (pinned) host memory that the fullest policy rank takes: off-loaded optimizer state, and the weights of
    a KL penalty's reference. Colocated engines take none: they sleep without a copy of their weights."""
    layout = resolve_layout(config)
    if not layout.gpus:
        return 0
    held = optimizer_bytes(config, shape, layout) if config.policy.megatron_cfg.optimizer.offload else 0
    if reference_is_off_loaded(config):
        held += max(_reference(config, shape, layout, stage) for stage in range(layout.pipeline))
    return held


def refit_bytes(config: Config, shape: Shape) -> int:
    """Bytes that one publication of the weights sends to each engine: under LoRA the adapters alone."""
    lora = config.policy.lora
    undivided = replace(resolve_layout(config), tensor=1, pipeline=1)
    sent = shape.adapters(undivided, 0, lora) if lora.rank else shape.parameters
    return sent * BYTES[config.policy.precision]


def transport_memory(config: Config, shape: Shape) -> int:
    """Bytes of host memory in which an update waits from one publication to the next: as rank 0 packs it, and in Ray's
    object store."""
    if not resolve_layout(config).engines:
        return 0
    return {"memory": 2, "folder": 1}.get(chosen_transport(config), 0) * refit_bytes(config, shape)


def reference_is_off_loaded(config: Config) -> bool:
    """Whether a reference's weights, if there are any, wait in host memory."""
    return config.cluster.gpus_per_node > 0 and config.policy.offload_reference


def _reference(config: Config, shape: Shape, layout: Layout, stage: int) -> int:
    """Bytes of the weights of a KL penalty's reference on a rank; under LoRA it is the model without its adapters. On
    CPUs the plan leaves it out."""
    penalty = config.loss_fn.reference_policy_kl_penalty or kl_in_reward(config)
    if not layout.gpus or not penalty or config.policy.lora.rank:
        return 0
    return sum(shape.on_rank(layout, stage)) * BYTES[config.policy.precision]


def _teacher(config: Config, layout: Layout, stage: int) -> int:
    """Bytes of the weights of distillation's teacher on a rank, which it shares with the policy."""
    shape = teacher_shape(config)
    return sum(shape.on_rank(layout, stage)) * BYTES[config.policy.precision] if shape else 0


def teacher_shape(config: Config) -> Shape | None:
    """The shape of distillation's teacher; None: there is none, or nobody here knows it."""
    name = config.teacher.model_name
    if config.algorithm.type != DISTILLATION or not name:
        return None
    return model_shape(replace(config, policy=replace(config.policy, model_name=name, model_factory=None)))


def resting_memory(config: Config, shape: Shape) -> int:
    """Bytes that the policy keeps on its fullest rank while colocated engines sample."""
    layout = resolve_layout(config)
    offload = config.policy.megatron_cfg.optimizer.offload
    stages = (_stage_memory(config, shape, layout, stage, 0, 0) for stage in range(layout.pipeline))
    return max(memory.resting(offload) for memory in stages)


# -- engines ----------------------------------------------------------------------------------------------------


def engine_memory(config: Config, shape: Shape, device_bytes: int) -> EngineMemory:
    """One rank of an engine. On a GPU of ``device_bytes`` the cache takes what utilisation leaves beside the
    weights."""
    vllm = config.policy.generation.vllm_cfg
    size = BYTES[config.policy.precision]
    tensor = vllm.tensor_parallel_size
    weights = shape.parameters * size // tensor
    per_token = 2 * shape.layers * max(1, shape.groups // tensor) * shape.head_size * size
    if not config.cluster.gpus_per_node:
        return EngineMemory(weights, vllm.kv_cache_memory_bytes, per_token)
    room = int(device_bytes * vllm.gpu_memory_utilization) - weights - GPU_RESERVE
    return EngineMemory(weights, max(0, room), per_token)
