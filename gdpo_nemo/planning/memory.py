"""Estimates of the peak memory of policy and engine ranks during a step, in bytes.

Activation memory is the sum of all tensors that the layers of ``gdpo_nemo.megatron`` save for the backward pass. For
GPUs, the estimates assume Megatron's fused activation, and also TransformerEngine's norms and attention unless the
config disables them. These two assumptions were not verified by measurements. ``tests/benchmarks/memory.py`` compares
the estimates with real ranks. The activations of vision towers are not estimated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil

from gdpo_nemo.config.layout import Layout, Resolved, has_flex_attention
from gdpo_nemo.config.model_checks import read_model
from gdpo_nemo.config.objective_checks import has_teacher, reference_passes
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.sections import PolicyConfig
from gdpo_nemo.config.transports import chosen_mode, chosen_transport
from gdpo_nemo.data.prefixes import Saving
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.weights import parameters
from gdpo_nemo.planning.shape import (
    adapters,
    expected_saving,
    matrices,
    on_rank,
    on_stage,
    shape_of,
    tables_on_rank,
    tower_parameters,
)

BYTES = {"float32": 4, "bfloat16": 2}
_LOGIT_BYTES = 256 << 20
"""Maximum bytes of float32 logits per chunk of tokens. Logits of more tokens are recomputed chunk by chunk."""
_SLICE_BYTES = 256 << 20
"""Maximum bytes of the gradient of one vocabulary slice. Fused kernels keep only this part of the logits in memory."""
_SLICE_TILE = 256
"""Vocabulary columns per tile of the fused kernels. A slice consists of whole tiles."""
_LOGPROB_CHUNK = 1024
"""Number of tokens whose logits are in float32 at the same time."""
_SCAN_CHUNK = 64
"""Tokens of a chunk of ``megatron.recurrence``."""
_RECTANGLE_PADDING = 1.15
"""Average ratio of padded to real tokens.

Unfused attention pads sequences of similar length, by a factor of at most 1.3.
"""
GPU_RESERVE = 3 << 30
"""Assumed bytes for the CUDA context, NCCL buffers and allocator fragmentation on a GPU."""


_ASLEEP = 2 << 30
"""Assumed bytes of buffers and CUDA graphs that a sleeping engine rank copies to pinned host memory, at any level."""


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of one policy rank, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logprobs: int
    """Logits of one chunk, their gradient and their float32 copies.

    With fused kernels, only the gradients of a slice of the logits and of the evaluated hidden states.
    """
    buffers: int
    """Temporary gradients: the gradient of the largest weight, until the gradient is accumulated, and the gradients of
    one layer's activations."""
    reserve: int = 0
    reference: int = 0
    """Weights of the KL penalty's reference model, if they stay on the GPU."""
    teacher: int = 0
    """Weights of the distillation teacher."""
    stage: int = 0
    """Index of the rank's pipeline stage, unlike the other fields, which are numbers of bytes."""

    @property
    def total(self) -> int:
        """Sum of all fields except ``stage``."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "stage")

    def resting(self, offload: bool) -> int:
        """Return the bytes that remain on the GPU while colocated engines sample.

        Gradients are freed. If ``offload`` is true, the optimizer state is in host memory.
        """
        return self.weights + self.reference + self.teacher + (0 if offload else self.optimizer) + self.reserve


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one engine rank, in bytes."""

    weights: int
    kv_cache: int
    bytes_per_token: int
    """Bytes of one token's keys and values on this rank."""
    states: int
    """Bytes of the states of recurrent layers, which vLLM counts as part of the KV cache."""

    def sequences(self, tokens: int) -> int:
        """Return the number of sequences of ``tokens`` tokens that fit into the KV cache."""
        return self.kv_cache // max(1, self.bytes_per_token * tokens)


def micro_batch_load(resolved: Resolved, layout: Layout, logprobs: bool = False) -> int:
    """Return the number of computed tokens in the largest micro-batch.

    This is the smaller of the token budget and the tokens of a data-parallel rank per update.

    Args:
        logprobs: True for micro-batches of log-prob passes.
    """
    config = resolved.config
    sequences = -(-(resolved.samples_per_update) // layout.data)
    computed = sequences * config.policy.max_total_sequence_length * _longest_saving(resolved).tokens
    return min(token_budget(config.policy, logprobs), ceil(computed))


def token_budget(policy: PolicyConfig, logprobs: bool = False) -> int:
    """Return the maximum number of tokens in a micro-batch of an update or, with ``logprobs``, of a log-prob pass."""
    return (policy.logprob_micro_batch_tokens if logprobs else None) or policy.micro_batch_tokens


def logprob_memory(resolved: Resolved, shape: ModelDescription) -> RankMemory:
    """Return the memory of the fullest policy rank in a log-prob pass, which keeps the activations of one layer."""
    layout = resolved.layout
    policy = resolved.config.policy
    tokens = micro_batch_load(resolved, layout, logprobs=True)
    floats = sum(_layer_floats(policy, shape, layout)) + 2 * shape.hidden
    activations = int(floats * (tokens // layout.context) * BYTES[policy.precision])
    return replace(policy_memory(resolved, shape, tokens), activations=activations, buffers=0)


def _longest_saving(resolved: Resolved) -> Saving:
    """Return the prompt-sharing savings for samples of maximum length."""
    config = resolved.config
    new = config.policy.generation.max_new_tokens
    return expected_saving(resolved, config.policy.max_total_sequence_length - new, new)


def policy_memory(
    resolved: Resolved, shape: ModelDescription, tokens: int | None = None, rows: int | None = None
) -> RankMemory:
    """Return the memory of the fullest policy rank.

    Args:
        tokens: number of tokens in the largest micro-batch. None means the result of ``micro_batch_load``.
        rows: number of these tokens whose next token requires a log-prob. None means all tokens.
    """
    layout = resolved.layout
    tokens = micro_batch_load(resolved, layout) if tokens is None else tokens
    rows = tokens if rows is None else rows
    return max(
        (_stage_memory(resolved, shape, layout, stage, tokens, rows) for stage in range(layout.pipeline)),
        key=lambda memory: memory.total,
    )


def _stage_memory(
    resolved: Resolved, shape: ModelDescription, layout: Layout, stage: int, tokens: int, rows: int
) -> RankMemory:
    config = resolved.config
    size = BYTES[config.policy.precision]
    megatron = config.policy.megatron_cfg
    lora = config.policy.lora
    dense, experts = on_rank(shape, layout, stage)
    trainable = _trainable(config.policy, shape, layout, stage)
    if lora.rank:
        dense += trainable[0]
    state = state_bytes(config.policy)
    last = stage == layout.pipeline - 1
    logits = _logits(config.policy, shape, layout, rows // layout.context, size) if last else 0
    table = -(-shape.vocabulary // layout.tensor) * shape.hidden * size
    largest = table if last or stage == 0 else shape.mlp_matrices * shape.hidden * shape.ffn // layout.tensor * size
    held = _optimizer_state(config.policy, shape, layout, stage, state)
    activations = _activations(config.policy, shape, layout, stage, tokens=tokens, rows=rows, size=size)
    # The backward pass starts after the logits are freed, so only its memory in excess of the logits is added.
    buffers = (0 if lora.rank else largest) + max(0, _backward(resolved, shape, layout, tokens, size) - logits)
    if megatron.optimizer.type == "muon":  # after activations are freed
        held += max(0, _orthogonalization(config.policy, shape) - activations - logits - buffers)
    if megatron.optimizer.offload and layout.gpus:  # copied to the GPU after activations are freed
        held = max(0, held - activations - logits - buffers)
    return RankMemory(
        weights=(dense + experts) * size,
        gradients=sum(trainable) * BYTES[megatron.optimizer.main_grads_dtype],
        optimizer=held,
        activations=activations,
        logprobs=logits,
        buffers=buffers,
        reserve=GPU_RESERVE if layout.gpus else 0,
        reference=0 if reference_is_offloaded(config) else _reference(config, shape, layout, stage),
        teacher=_teacher(resolved, layout, stage),
        stage=stage,
    )


def _trainable(policy: PolicyConfig, shape: ModelDescription, layout: Layout, stage: int) -> tuple[int, int]:
    """Return the numbers of trainable (dense, expert) parameters on a rank."""
    lora = policy.lora
    if lora.rank:
        return adapters(shape, layout, stage, lora)
    dense, experts = on_rank(shape, layout, stage)
    return dense - (_frozen_tower(policy, shape) if stage == 0 else 0), experts


def _frozen_tower(policy: PolicyConfig, shape: ModelDescription) -> int:
    return 0 if policy.vision.train else tower_parameters(shape)


def _optimizer_state(policy: PolicyConfig, shape: ModelDescription, layout: Layout, stage: int, size: int) -> int:
    """Return the bytes of optimizer state on a rank, with ``size`` bytes per trainable parameter.

    A distributed optimizer shards the state over the replicas.
    """
    replicas = [
        layout.data * layout.context,
        layout.tensor * layout.context * layout.data // (layout.expert * layout.expert_tensor),
    ]
    shards = replicas if policy.megatron_cfg.use_distributed_optimizer else [1, 1]
    state = sum(size * count // shard for count, shard in zip(_trainable(policy, shape, layout, stage), shards))
    if policy.megatron_cfg.optimizer.type == "muon" and not policy.lora.rank:  # AdamW updates these with two moments
        state += BYTES["float32"] * tables_on_rank(shape, layout, stage)
    return state


def _orthogonalization(policy: PolicyConfig, shape: ModelDescription) -> int:
    """Return the bytes of Muon's temporary tensors for the largest matrix, which tensor parallelism does not shard.

    They are about four float32 copies of the matrix, and two squares of its smaller size. With LoRA they are small.
    """
    if policy.lora.rank:
        return 0
    sizes = [4 * rows * columns + 2 * min(rows, columns) ** 2 for rows, columns, _ in matrices(shape)]
    return BYTES["float32"] * max(sizes, default=0)


def _backward(resolved: Resolved, shape: ModelDescription, layout: Layout, tokens: int, size: int) -> int:
    """Return the bytes of one MLP's activation gradients and of one layer's recomputed activations."""
    config = resolved.config
    width = (
        shape.active_experts * shape.expert_ffn / layout.expert_tensor + shape.shared_ffn / layout.tensor
        if shape.moe_layers
        else shape.ffn / layout.tensor
    )
    floats = 5 * width + 2 * shape.hidden
    norms, attention, rest = _layer_floats(config.policy, shape, layout)
    dropped = recomputed_floats(config.policy, shape, layout)
    recomputed = {"none": 0.0, "selective": max(dropped.values()), "full": norms / 2 + max(attention, rest)}[
        config.policy.megatron_cfg.recompute
    ]
    computed = _longest_saving(resolved).tokens
    if computed < 1 and not has_flex_attention(config):  # copies of the keys and values of all sequences
        recomputed = max(recomputed, attention / computed)
    return int((floats + recomputed) * (tokens // layout.context) * size)


def _logits(policy: PolicyConfig, shape: ModelDescription, layout: Layout, rows: int, size: int) -> int:
    """Return the bytes that the log-probs of one chunk of tokens require.

    The bytes are those of the logits and their gradient in the model's precision, and of three float32 copies of the
    logits of up to ``_LOGPROB_CHUNK`` tokens. Fused kernels are described in ``gdpo_nemo.megatron.logprobs``.
    """
    width = -(-shape.vocabulary // layout.tensor)
    if fused_logprobs(policy, layout):
        columns_in_slice = _SLICE_BYTES // max(1, rows * size) // _SLICE_TILE * _SLICE_TILE
        columns = min(width, max(_SLICE_TILE, columns_in_slice))
        # The gradient of the hidden states is summed in float32 and then rounded. Each row also keeps four float32
        # values.
        return rows * (columns * size + shape.hidden * (4 + size) + 16)
    chunk = min(rows, max(1, _LOGIT_BYTES // (4 * width)))
    return 2 * chunk * width * size + 3 * min(chunk, _LOGPROB_CHUNK) * width * 4


def fused_logprobs(policy: PolicyConfig, layout: Layout) -> bool:
    """Return whether log-probs are computed by fused kernels, which do not store the logits.

    GPUs use fused kernels unless the config disables these kernels or the head has a LoRA adapter.
    """
    lora = policy.lora
    adapted = bool(lora.rank) and "lm_head" in lora.target_modules
    return layout.gpus > 0 and policy.megatron_cfg.fused_logprobs is not False and not adapted


def _activations(
    policy: PolicyConfig, shape: ModelDescription, layout: Layout, stage: int, *, tokens: int, rows: int, size: int
) -> int:
    """Return the bytes that all micro-batches in flight on ``stage`` save for the backward pass."""
    megatron = policy.megatron_cfg
    local = tokens // layout.context
    count = len(on_stage(shape, layout, stage))
    inputs, attention, rest = _layer_floats(policy, shape, layout)
    complete = inputs + attention + rest
    recomputed = count
    if megatron.recompute == "full" and megatron.recompute_layers:
        chunks = megatron.virtual_pipeline_model_parallel_size or 1
        recomputed = min(count, megatron.recompute_layers * chunks)
    saved_by_mode = {
        "none": complete,
        "selective": complete - sum(recomputed_floats(policy, shape, layout).values()),
        "full": _recomputed_floats(policy, shape, layout),
    }
    saved = saved_by_mode[megatron.recompute]
    floats = recomputed * saved + (count - recomputed) * complete
    ends = 0
    if stage == layout.pipeline - 1:  # the gathered input of the final norm and the evaluated rows
        ends = _norm_floats(policy) * shape.hidden * local + shape.hidden * rows // layout.context
    in_flight = _in_flight(layout, stage, megatron.virtual_pipeline_model_parallel_size)
    return int((floats * local * in_flight + ends) * size)


def _in_flight(layout: Layout, stage: int, virtual: int | None) -> float:
    """Return the number of micro-batches whose activations a stage holds at once (1F1B schedule)."""
    in_flight = layout.pipeline - stage
    if virtual and layout.pipeline > 1:
        return layout.pipeline * (1 + (layout.pipeline - 1) / (layout.pipeline * virtual))
    return in_flight


def recomputed_floats(policy: PolicyConfig, shape: ModelDescription, layout: Layout) -> dict[str, float]:
    """Return the floats per token and layer that selective recomputation does not save, by module.

    The norm in front of an MLP saves the MLP's input.
    """
    floats = {
        "core_attn": _layer_floats(policy, shape, layout)[1],
        "mlp": _dense_floats(shape, layout) * shape.share("-"),
    }
    return {name: floats[name] for name in policy.megatron_cfg.recompute_modules}


def _recomputed_floats(policy: PolicyConfig, shape: ModelDescription, layout: Layout) -> float:
    """Return the floats per token that a fully recomputed layer saves: the inputs of its Hybrid layers."""
    return _blocks(shape) * shape.hidden / (layout.tensor if policy.megatron_cfg.sequence_parallel else 1)


def _layer_floats(policy: PolicyConfig, shape: ModelDescription, layout: Layout) -> tuple[float, float, float]:
    """Return the floats that a layer saves per local token as (norms with their inputs, core attention, others)."""
    gpu = transformer_engine(policy, layout)
    sharded = layout.tensor if policy.megatron_cfg.sequence_parallel else 1
    norms = _blocks(shape) * (2 if gpu else _norm_floats(policy)) * shape.hidden / sharded
    norms += shape.post_norms * _norm_floats(policy) * shape.hidden / sharded  # never fused with a linear layer
    query = shape.query / layout.tensor * shape.share("*")
    keys_values = shape.key_value / layout.tensor * shape.share("*")
    ffn = _ffn_floats(policy, shape, layout) + _recurrent_floats(shape, layout) + 2 * query * shape.output_gate
    if gpu:  # the fused kernel saves rotated queries, keys and values, and its output
        return norms, query + keys_values, query + ffn
    # Queries and the output are padded to rectangles. Keys and values are repeated for every head, and context
    # parallelism does not shard them.
    attention = _RECTANGLE_PADDING * (2 * query + 2 * query * layout.context)
    norm_inputs = (query + keys_values) * shape.qk_norm
    return norms, attention, query + norm_inputs + ffn


def _norm_floats(policy: PolicyConfig) -> int:
    """Return the floats per hidden unit that an unfused norm saves: the input, the normalized input and the output.

    The norm computes in float32, so in bfloat16 some of these values count as two floats.
    """
    return 3 if policy.precision == "float32" else 5


def transformer_engine(policy: PolicyConfig, layout: Layout) -> bool:
    """Return whether the config allows TransformerEngine for norms and attention, which requires GPUs."""
    megatron = policy.megatron_cfg
    return layout.gpus > 0 and megatron.transformer_engine is not False and megatron.attention_backend != "sdpa"


def _blocks(shape: ModelDescription) -> float:
    """Return the number of Hybrid layers of a layer."""
    return sum(map(len, shape.symbols)) / shape.layers


def _recurrent_floats(shape: ModelDescription, layout: Layout) -> float:
    """Return the floats per token that recurrent layers save, per layer. On CPUs, this estimate was not measured.

    Megatron's kernels save the projection and the normalised output. The scans in torch also save padded copies of the
    convolution's input and output, of the scan's inputs in float32, and weights per head and token of a chunk.
    """
    mamba, delta = shape.share("M"), shape.share("G")
    inner, keys, values = shape.mamba[1], *shape.delta.sections[1:3]
    floats: float = mamba * (sum(shape.mamba) + 2 * inner) + delta * (sum(shape.delta.sections) + 2 * values)
    if not layout.gpus:
        scan = mamba * (5 * shape.mamba_channels + 4 * inner + 3 * shape.mamba[-1] * _SCAN_CHUNK)
        weights = (4 * shape.delta.value_heads + 2 * shape.delta.key_heads) * _SCAN_CHUNK
        scan += delta * (5 * shape.delta_channels + 6 * values + 2 * keys + weights)
        floats += 2 * (mamba * inner + delta * values) + _RECTANGLE_PADDING * scan * layout.context
    return floats / layout.tensor


def _ffn_floats(policy: PolicyConfig, shape: ModelDescription, layout: Layout) -> float:
    """Return the floats per token that an MLP saves."""
    dense = _dense_floats(shape, layout) * shape.share("-")
    if not shape.moe_layers:
        return dense
    # Each token is copied to active_experts experts. On average, the copies are balanced over the ranks.
    parts = _mlp_parts(shape, layout)
    routed = shape.active_experts * (parts * shape.expert_ffn / layout.expert_tensor + 2 * shape.expert_hidden)
    routed += 2 * shape.expert_latent  # inputs of the experts' dispatcher and of the projection to the hidden size
    routed += parts * shape.shared_ffn / layout.tensor
    # The router saves logits, scores and probabilities of all experts in float32.
    routed += 12 / BYTES[policy.precision] * shape.experts
    return shape.share("E") * routed + dense


def _dense_floats(shape: ModelDescription, layout: Layout) -> float:
    return _mlp_parts(shape, layout) * shape.ffn / layout.tensor


def _mlp_parts(shape: ModelDescription, layout: Layout) -> int:
    """Return the tensors of an MLP's inner width that are saved.

    An MLP without a gate saves the projection and its activation.

    The fused activation on GPUs saves gate, up and their product. The MLP on CPUs also saves the gate's activation and
    a copy of up.
    """
    if not shape.family.gated_mlp:
        return 2
    return 3 if layout.gpus else 5


def state_bytes(policy: PolicyConfig) -> int:
    """Return the bytes of optimizer state per parameter: moments and, for bfloat16 models, float32 main weights.

    AdamW has two moments. Muon has one for each parameter of a matrix.
    """
    return (0 if policy.precision == "float32" else 4) + moment_bytes(policy)


def moment_bytes(policy: PolicyConfig) -> int:
    """Return the bytes of the moments of a parameter."""
    optimizer = policy.megatron_cfg.optimizer
    if optimizer.type == "muon":
        return BYTES["float32"]
    return BYTES[optimizer.exp_avg_dtype] + BYTES[optimizer.exp_avg_sq_dtype]


def optimizer_bytes(policy: PolicyConfig, shape: ModelDescription, layout: Layout) -> int:
    """Return the bytes of optimizer state on the fullest rank, in GPU or host memory.

    See ``state_bytes``.
    """
    state = state_bytes(policy)
    return max(_optimizer_state(policy, shape, layout, stage, state) for stage in range(layout.pipeline))


def host_memory(resolved: Resolved, shape: ModelDescription) -> int:
    """Return the bytes of pinned host memory that the fullest policy rank uses.

    The host holds the offloaded optimizer state and the KL penalty's offloaded reference weights. Colocated engines
    sleep without a copy of their weights, but copy their buffers and CUDA graphs to the host.
    """
    config = resolved.config
    layout = resolved.layout
    if not layout.gpus:
        return 0
    held = optimizer_bytes(config.policy, shape, layout) if config.policy.megatron_cfg.optimizer.offload else 0
    if layout.colocated:
        held += _ASLEEP
    if reference_is_offloaded(config):
        held += max(_reference(config, shape, layout, stage) for stage in range(layout.pipeline))
    return held


def refit_bytes(resolved: Resolved, shape: ModelDescription) -> int:
    """Return the bytes that one weight update sends to each engine: the adapters, or all weights but a frozen tower."""
    config = resolved.config
    lora = config.policy.lora
    undivided = replace(resolved.layout, tensor=1, pipeline=1, expert=1, expert_tensor=1)
    sent = parameters(shape) - _frozen_tower(config.policy, shape)
    if lora.rank:
        sent = sum(adapters(shape, undivided, 0, lora))
    return sent * BYTES[config.policy.precision]


DIFFERENCE_SHARE = 0.03
"""Assumed size of a difference relative to all weights in bfloat16. With SmolLM2-135M, 0.005 was measured at a learning
rate of 1e-6, and 0.022 at 1e-5 (docs/weight_sync.md)."""


def difference_bytes(resolved: Resolved, shape: ModelDescription) -> int:
    """Return the expected bytes of a difference to each engine process, or 0 if all updates are full."""
    if chosen_mode(resolved.config) == "full":
        return 0
    return int(DIFFERENCE_SHARE * refit_bytes(resolved, shape))


def engine_copy_bytes(resolved: Resolved, shape: ModelDescription) -> int:
    """Return the bytes of host memory in which an engine process keeps the weights for the next difference."""
    return 0 if chosen_mode(resolved.config) == "full" else refit_bytes(resolved, shape)


def checkpoint_bytes(resolved: Resolved, shape: ModelDescription) -> int:
    """Return the bytes of a checkpoint: weights, moments in float32 and, in bfloat16, float32 main weights.

    With LoRA, a checkpoint contains only the adapters. A reference that follows the policy is stored as well.
    """
    policy = resolved.config.policy
    weights = refit_bytes(resolved, shape)
    moments = 4 if policy.megatron_cfg.optimizer.type == "muon" else 8
    optimizer = (moments + (0 if policy.precision == "float32" else 4)) * weights // BYTES[policy.precision]
    reference = parameters(shape) * BYTES[policy.precision] if policy.sync_ref_model else 0
    tower = 0 if policy.lora.rank else _frozen_tower(policy, shape) * BYTES[policy.precision]
    return weights + tower + optimizer + reference


def transport_memory(resolved: Resolved, shape: ModelDescription) -> int:
    """Return the bytes of host memory that a weight update occupies until the next update, for all policy ranks.

    The transport ``memory`` holds two copies: those of the ranks and the objects in Ray's object store. The transport
    ``folder`` holds one copy. The transports ``nccl`` and ``gloo`` hold a copy for differences, or for engines that
    restart while the policy trains. Other transports do not hold copies.
    """
    config = resolved.config
    if not resolved.layout.engines:
        return 0
    restarts = config.rollout.max_staleness > 0 or config.rollout.endpoint.enabled
    kept = int(restarts or chosen_mode(config) != "full")
    copies = {"memory": 2, "folder": 1, "nccl": kept, "gloo": kept}.get(chosen_transport(config), 0)
    return copies * refit_bytes(resolved, shape)


def reference_is_offloaded(config: Config) -> bool:
    """Return whether host memory holds the weights of the reference model, if the run uses a reference model."""
    return config.cluster.gpus_per_node > 0 and config.policy.offload_reference


def _reference(config: Config, shape: ModelDescription, layout: Layout, stage: int) -> int:
    """Return the bytes of the KL penalty's reference weights on a rank.

    The result is 0 with LoRA, because the reference is the model without its adapters. The result is also 0 on CPUs,
    where these bytes are not counted.
    """
    if not layout.gpus or not reference_passes(config) or config.policy.lora.rank:
        return 0
    return sum(on_rank(shape, layout, stage)) * BYTES[config.policy.precision]


def _teacher(resolved: Resolved, layout: Layout, stage: int) -> int:
    """Return the bytes of the distillation teacher's weights on a policy rank, or 0 without a known teacher."""
    shape = teacher_shape(resolved)
    return sum(on_rank(shape, layout, stage)) * BYTES[resolved.config.policy.precision] if shape else 0


def teacher_shape(resolved: Resolved) -> ModelDescription | None:
    """Return the shape of the distillation teacher, or None without a teacher or if its shape is unknown."""
    config = resolved.config
    name = config.teacher.model_name
    if not has_teacher(config) or not name:
        return None
    return shape_of(read_model(replace(config.policy, model_name=name, model_factory=None)), name)


def resting_memory(resolved: Resolved, shape: ModelDescription) -> int:
    """Return the bytes that the policy keeps on its fullest rank while colocated engines sample."""
    layout = resolved.layout
    offload = resolved.config.policy.megatron_cfg.optimizer.offload
    stages = (_stage_memory(resolved, shape, layout, stage, 0, 0) for stage in range(layout.pipeline))
    return max(memory.resting(offload) for memory in stages)


# -- engines ----------------------------------------------------------------------------------------------------


def engine_memory(config: Config, shape: ModelDescription, device_bytes: int) -> EngineMemory:
    """Return the memory of one engine rank.

    On a GPU, the KV cache gets ``gpu_kv_cache_memory_bytes``, or ``gpu_memory_utilization`` x ``device_bytes`` minus
    the weights and ``GPU_RESERVE``. On a CPU, it has ``kv_cache_memory_bytes``. The states of recurrent layers are part
    of the KV cache.
    """
    vllm = config.policy.generation.vllm_cfg
    size = BYTES[config.policy.precision]
    tensor = vllm.tensor_parallel_size
    weights = parameters(shape) * size // tensor
    per_token = shape.cached(tensor) * size
    if shape.latent and config.cluster.gpus_per_node:  # each rank of the engine holds the complete latent vectors
        per_token = shape.count("*") * (shape.latent[1] + shape.latent[2]) * size
    states = vllm.max_num_seqs * shape.recurrent_state * size // tensor
    if not config.cluster.gpus_per_node:
        return EngineMemory(weights, max(0, vllm.kv_cache_memory_bytes - states), per_token, states)
    room = int(device_bytes * vllm.gpu_memory_utilization) - weights - GPU_RESERVE
    cache = vllm.gpu_kv_cache_memory_bytes or room
    return EngineMemory(weights, max(0, cache - states), per_token, states)


def sampling_bytes(config: Config, engine: EngineMemory, device_bytes: float) -> float:
    """Return the bytes that one engine rank uses on a GPU while it samples."""
    vllm = config.policy.generation.vllm_cfg
    if vllm.gpu_kv_cache_memory_bytes is None:
        return vllm.gpu_memory_utilization * device_bytes
    return engine.weights + vllm.gpu_kv_cache_memory_bytes + GPU_RESERVE
