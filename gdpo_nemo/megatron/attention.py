"""Core attention without TransformerEngine: rotary embedding and torch SDPA over packed sequences (``packing``).

Under context parallelism, keys and values are gathered from all context-parallel ranks, and an explicit mask compares
positions. A token can be a key in several sequences, and its gradient is the sum over these sequences.

The rotary embedding is applied here instead of in Megatron's model code, so that cos and sin of a pack are computed
only once for all layers. The frequencies come from transformers, which implements every published scaling rule.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch.utils.checkpoint import checkpoint

from gdpo_nemo.megatron.packing import Packing, Rectangle, packing_arrays
from gdpo_nemo.models.description import Heads


class _PadInput(torch.autograd.Function):
    """Copy rows of a pack [tokens, ...] to a rectangle [sequences, width, ...].

    ``shares`` must be true if a row may be copied several times. The gradient of the row is then the sum over its
    copies.
    """

    @staticmethod
    def forward(ctx, pack, table, cells, rows, shares):
        ctx.save_for_backward(cells, rows)
        ctx.tokens = pack.size(0)
        ctx.shares = shares
        return pack.index_select(0, table.flatten()).view(*table.shape, *pack.shape[1:])

    @staticmethod
    def backward(ctx, grad):
        cells, rows = ctx.saved_tensors
        out = grad.new_zeros(ctx.tokens, *grad.shape[2:])
        # Select only `cells`, without the padding: padding repeats row 0, but must not contribute to its gradient.
        moved = grad.flatten(0, 1).index_select(0, cells)
        out = out.index_add_(0, rows, moved) if ctx.shares else out.index_copy_(0, rows, moved)
        return out, None, None, None, None


class _UnpadOutput(torch.autograd.Function):
    """Copy rectangles [sequences, width, ...] back to a pack [tokens, ...], without their padding."""

    @staticmethod
    def forward(ctx, tokens, moves, *rectangles):
        ctx.moves = moves
        ctx.shapes = [r.shape for r in rectangles]
        pack = rectangles[0].new_empty(tokens, *rectangles[0].shape[2:])
        for (cells, rows), rectangle in zip(moves, rectangles):
            pack.index_copy_(0, rows, rectangle.flatten(0, 1).index_select(0, cells))
        return pack

    @staticmethod
    def backward(ctx, grad):
        out = []
        for (cells, rows), shape in zip(ctx.moves, ctx.shapes):
            rectangle = grad.new_zeros(shape[0] * shape[1], *shape[2:])
            out.append(rectangle.index_copy_(0, cells, grad.index_select(0, rows)).view(shape))
        return None, None, *out


class GatherContext(torch.autograd.Function):
    """Gather [local tokens, ...] from all context-parallel ranks into [all tokens, ...], in the order of the pack.

    The backward pass sums the gradients of this rank's tokens over the ranks (reduce-scatter).
    """

    @staticmethod
    def forward(ctx, x, order, group):
        ctx.save_for_backward(order)
        ctx.group = group
        by_rank = x.new_empty(group.size() * x.size(0), *x.shape[1:])
        dist.all_gather_into_tensor(by_rank, x.contiguous(), group=group)
        return by_rank.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        by_rank = torch.empty_like(grad, memory_format=torch.contiguous_format).index_copy_(0, order, grad)
        local = grad.new_empty(grad.size(0) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(local, by_rank, group=ctx.group)
        return local, None, None


@dataclass(frozen=True)
class LayerAttention:
    """Properties of the attention in one Hugging Face layer."""

    rotary: tuple[torch.Tensor, float] | None
    """Inverse frequencies [rotated elements / 2] of the rotary embedding, and the scaling factor of cos and sin.
    None if the family has no rotary embedding.

    If a head has more elements, its first elements are rotated, or its last with latent attention.
    """
    rope: str = ""
    """Name of the rotary embedding. Layers with equal names have equal rotary embeddings."""
    window: int | None = None
    """Number of keys that a query attends to, including its own token, or None for all keys."""
    score_cap: float | None = None
    """Soft cap c of the scores, which replaces a score s by c * tanh(s / c), or None."""
    sinks: bool = False
    """True if each head has a trainable sink: a score of a key without a value in every softmax."""
    pairs: bool = False
    """True if the rotary embedding rotates pairs of neighbouring elements instead of elements of the two halves."""
    axes: tuple[int, ...] | None = None
    """Axis of ``Packing.rope_positions`` by which each frequency rotates (``ModelDescription.rotary_axes``).

    None for text models, whose positions are the indices of tokens.
    """
    query_scale: tuple[float, int] | None = None
    """beta and n: the query at position p is multiplied by 1 + beta ln(1 + floor(p / n)). None: no such factor."""
    index: tuple[int, int] | None = None
    """Number and size of the heads of the layer's sparse index, or None if it has none. Attention does not use it."""
    heads: Heads | None = None
    """Heads of the layer, which ``LayerSelfAttention`` needs."""


class LayerSelfAttention(SelfAttention):
    """Self-attention whose heads depend on the layer, and with a norm without a weight on each head of the values.

    Args:
        layers: properties of the attention by Hybrid layer of the model (``model_config.layer_attentions``).
    """

    def __init__(
        self,
        config: Any,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *arguments: Any,
        layers: Sequence[LayerAttention],
        **options: Any,
    ):
        heads = layers[layer_number - 1].heads
        if heads is None:
            raise ValueError(f"the heads of layer {layer_number} are unknown")
        config = copy.copy(config)
        config.kv_channels, config.num_query_groups = heads.size, heads.groups
        if heads.keys_as_values:
            linear = submodules.linear_qkv

            def without_values(inputs: int, outputs: int, **others: Any) -> Any:
                return linear(inputs, outputs - heads.groups * heads.size, **others)

            submodules = replace(submodules, linear_qkv=without_values)
        super().__init__(config, submodules, layer_number, *arguments, **options)
        self.keys_as_values = heads.keys_as_values

    def get_query_key_value_tensors(self, hidden_states, key_value_states=None, **options):
        """Return queries, keys and values, [tokens, 1, local heads, head size].

        Args:
            hidden_states: [local tokens, 1, hidden size].
        """
        size = self.hidden_size_per_attention_head
        if self.keys_as_values:
            mixed, _ = self.linear_qkv(hidden_states)
            mixed = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
            query, key = mixed.split([mixed.size(-1) - size, size], -1)
            query, value = query.unflatten(-1, (-1, size)).flatten(-3, -2), key
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        else:
            query, key, value = super().get_query_key_value_tensors(hidden_states, key_value_states, **options)
        return query, key, F.rms_norm(value, (size,), eps=self.config.layernorm_epsilon)


def rotated_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Like ``rotated``, but rotate pairs of neighbouring elements instead of elements of the two halves."""
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return x * cos + turned * sin


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to x [tokens, heads, size], given the cosines and sines of ``Packing.rotations``."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), -1) * sin


def softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    score_cap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Compute attention with a soft cap and sinks, which SDPA lacks. Return [sequences, heads, queries, size].

    Args:
        query, key, value: [sequences, heads, queries or keys, size].
        mask: bool, true if the query attends to the key, broadcast to the scores. None selects a causal mask.
        scale: factor of the scores, before the soft cap.
        score_cap: see ``LayerAttention``.
        sinks: [heads], or None. For their formula, see arXiv 2309.17453 and the model card of gpt-oss.
    """
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if score_cap is not None:
        scores = score_cap * torch.tanh(scores / score_cap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : key.size(-2)]
    return F.dropout(weights, dropout).to(value.dtype) @ value


class PackedAttention(MegatronModule):
    """Causal self-attention over a pack, with rotary embedding and context parallelism.

    Args:
        layers: properties of the attention by Hybrid layer of the model (``model_config.layer_attentions``). All
            windows have the same size.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        *,
        layers: Sequence[LayerAttention],
        attention_dropout=None,
        softmax_scale=None,
        pg_collection=None,
        **unused,
    ):
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"packed attention must be causal, not {attn_mask_type}")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.context_group = groups.cp
        self.tensor_group = groups.tp
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.layer = layers[layer_number - 1]
        self.rotary = self.layer.rotary
        self.axes = None if self.layer.axes is None else torch.tensor(self.layer.axes)
        self.window = next((layer.window for layer in layers if layer.window is not None), None)
        self._rotated = rotated_pairs if self.layer.pairs else rotated
        if self.layer.sinks:
            heads = config.num_attention_heads // self.tensor_group.size()
            self.sinks = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return the parameters as sharded tensors of Megatron's checkpoint format. Sinks are split by head."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.layer.sinks:
            name = f"{prefix}sinks"
            state[name] = make_tp_sharded_tensor_for_checkpoint(self.sinks, name, prepend_offsets=sharded_offsets)
        return state

    def arrays(self, lengths: list[int], rank: int, size: int, shared: list[int]) -> dict[str, np.ndarray]:
        """Return the arrays of a pack that this attention needs. For the arguments, see ``packing_arrays``."""
        return packing_arrays(lengths, rank, size, rectangles=True, shared=shared, window=self.window)

    def forward(self, query, key, value, attention_mask, *, packed_seq_params: Packing, **unused):
        """Return the attention output, [local tokens, heads * size].

        Args:
            query: [local tokens, heads, size].
            key: [local tokens, query groups, size].
            value: same shape as ``key``.
        """
        packing: Any = packed_seq_params
        query = self._scale(self._rotate(query, packing), packing)
        key = self._rotate(key, packing)
        repeats = query.size(1) // key.size(1)
        if repeats > 1:
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        if self.context_group.size() > 1:
            # Gather keys and values in one collective, after the rotation, which needs the positions of local tokens.
            both = GatherContext.apply(torch.stack((key, value), 1), packing.order, self.context_group)
            key, value = both.unbind(1)
        drop = self.dropout if self.training else 0.0
        outputs, moves = [], []
        for rectangle in packing.rectangles:
            outputs.append(self._attend(query, key, value, rectangle, drop))
            moves.append((rectangle.query_cells, rectangle.query_rows))
        return _UnpadOutput.apply(query.size(0), moves, *outputs).flatten(1)

    def _rotate(self, x, packing):
        if self.rotary is None:
            return x
        rope = self.layer.rope
        if rope not in packing.rotations:  # the first layer computes cos and sin for all layers
            frequencies, scaling = self.rotary
            if frequencies.device != x.device:  # copy only once, because each copy waits for the device
                frequencies = frequencies.to(x.device)
                self.rotary = frequencies, scaling
                self.axes = None if self.axes is None else self.axes.to(x.device)
            # The causal mask always compares indices of tokens, and only the rotation has positions on several axes.
            positions = packing.positions[:, None]
            if self.axes is not None:
                positions = packing.rope_positions.index_select(1, self.axes)
            angles = positions.float() * frequencies[None, :]
            angles = angles.repeat_interleave(2, -1) if self.layer.pairs else torch.cat((angles, angles), -1)
            angles = angles[:, None, :]
            # Compute angles in float32: bfloat16 cannot distinguish positions above 256.
            packing.rotations[rope] = (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)
        cos, sin = packing.rotations[rope]
        size = cos.size(-1)
        if size == x.size(-1):
            return self._rotated(x, cos, sin)
        if self.config.multi_latent_attention:
            return torch.cat((x[..., :-size], self._rotated(x[..., -size:], cos, sin)), -1)
        return torch.cat((self._rotated(x[..., :size], cos, sin), x[..., size:]), -1)

    def _scale(self, query, packing):
        if self.layer.query_scale is None:
            return query
        beta, length = self.layer.query_scale
        factors = 1 + beta * torch.log1p(packing.positions.div(length, rounding_mode="floor").float())
        return query * factors.to(query.dtype)[:, None, None]

    def _attend(self, query, key, value, rectangle: Rectangle, drop: float):
        stores_scores = self.layer.sinks or self.layer.score_cap is not None
        if not (rectangle.shares or stores_scores) or not torch.is_grad_enabled():
            return self._attend_rectangle(query, key, value, rectangle, drop)
        # Recompute in the backward pass: the copies of shared keys and values would take as much memory as sharing
        # saves, and the scores take memory quadratic in the length.
        return checkpoint(
            self._attend_rectangle, query, key, value, rectangle, drop, use_reentrant=False, preserve_rng_state=drop > 0
        )

    def _attend_rectangle(self, query, key, value, rectangle: Rectangle, drop: float):
        q = _PadInput.apply(query, rectangle.queries, rectangle.query_cells, rectangle.query_rows, False)
        keys = rectangle.keys, rectangle.key_cells, rectangle.key_rows, rectangle.shares
        k, v = _PadInput.apply(key, *keys), _PadInput.apply(value, *keys)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = rectangle.mask
        if self.layer.window is not None and rectangle.window_mask is not None:
            mask = rectangle.window_mask
        cap, sinks = self.layer.score_cap, self.sinks if self.layer.sinks else None
        if cap is not None or sinks is not None:
            out = softmax_attention(q, k, v, mask, scale=self.scale, score_cap=cap, sinks=sinks, dropout=drop)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=drop, scale=self.scale
            )
        return out.transpose(1, 2)
