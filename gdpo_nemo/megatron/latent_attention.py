"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries, keys and values from small latent vectors.

Megatron's module for latent attention splits the projections to the latent vectors over the tensor-parallel ranks if
TransformerEngine is not available. The gradient of the shared head of k would then miss the other ranks' heads. In
this module, these projections are replicated, and the core attention applies the rotary embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules, MultiLatentAttention

_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors, which transformers does not read from config.json."""


def device() -> torch.device:
    """Return the device of a rank's parameters."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def replicated_parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return a parameter of ones that all tensor-parallel ranks have."""
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=config.params_dtype, device=device()))
    # Megatron sums the gradients of parameters with this attribute over the tensor-parallel group.
    setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return parameter


class ReplicatedLinear(torch.nn.Module):
    """Linear layer without bias whose weight is replicated on the tensor-parallel ranks."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig):
        super().__init__()
        self.weight = replicated_parameter(config, outputs, inputs)
        torch.nn.init.normal_(self.weight, std=config.init_method_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the projection of x [..., inputs]."""
        return torch.nn.functional.linear(x, self.weight)


class SparseIndex(torch.nn.Module):
    """Weights of a layer's sparse index (``Latent.index``), which are loaded and exported but not used.

    Args:
        index: number and size of the heads.
    """

    def __init__(self, index: tuple[int, int], config: Any):
        super().__init__()
        heads, size = index
        hidden = config.hidden_size
        shapes = dict(query=(heads * size, config.q_lora_rank), key=(size, hidden), norm=(size,), norm_bias=(size,))
        for name, shape in dict(**shapes, heads=(heads, hidden)).items():
            self.register_buffer(name, torch.zeros(shape, dtype=config.params_dtype, device=device()))


class LatentAttention(MultiLatentAttention):
    """Self-attention with latent vectors over a pack.

    Args:
        submodules: Megatron's specification. The classes of the projections to latent vectors are not used.
    """

    def __init__(self, config: Any, submodules: MLASelfAttentionSubmodules, layer_number: int, **options: Any):
        super().__init__(config, submodules, layer_number, attention_type="self", **options)
        heads = config.num_attention_heads

        def up(inputs: int, head: int) -> Any:
            return submodules.linear_q_up_proj(
                inputs,
                heads * head,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_group=self.pg_collection.tp,
            )

        if config.q_lora_rank is None:
            self.linear_q_proj = up(config.hidden_size, self.q_head_dim)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
            self.q_layernorm: Any = submodules.q_layernorm(config, config.q_lora_rank, eps=_EPSILON)
            self.linear_q_up_proj = up(config.q_lora_rank, self.q_head_dim)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, width, config)
        self.kv_layernorm: Any = submodules.kv_layernorm(config, config.kv_lora_rank, eps=_EPSILON)
        self.linear_kv_up_proj = up(config.kv_lora_rank, config.qk_head_dim + config.v_head_dim)
        core: Any = self.core_attention
        if core.layer.index is not None:
            self.indexer = SparseIndex(core.layer.index, config)

    def get_query_key_value_tensors(self, hidden_states, *unused, **options):
        """Return queries and keys before the rotary embedding, values, and the latent vectors.

        Args:
            hidden_states: [local tokens, 1, hidden size], sharded over the tensor-parallel ranks with sequence
                parallelism.

        Returns:
            Queries and keys [tokens, local heads, head size] whose last elements the rotary embedding rotates, values
            [tokens, local heads, value size], and the latent vectors of q and of k and v.
        """
        config = self.config
        tokens = hidden_states.squeeze(1)
        q_latent = tokens
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(tokens)
        else:
            q_latent = self.q_layernorm(self.linear_q_down_proj(tokens))
            query, _ = self.linear_q_up_proj(q_latent)
        kv_latent, shared = self.linear_kv_down_proj(tokens).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], -1
        )
        kv_latent = self.kv_layernorm(kv_latent)
        key_value, _ = self.linear_kv_up_proj(kv_latent)
        # Each rank computes the gradient of the shared head from its own heads. Both functions sum it over the ranks.
        if config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.pg_collection.tp)
        else:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.pg_collection.tp)
        heads = self.num_attention_heads_per_partition
        key, value = key_value.unflatten(-1, (heads, -1)).split([config.qk_head_dim, config.v_head_dim], -1)
        key = torch.cat((key, shared[:, None].expand(-1, heads, -1)), -1)
        return query.unflatten(-1, (heads, -1)), key, value, q_latent, kv_latent
