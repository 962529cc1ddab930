"""Layer specifications: TransformerEngine's layers, or local Megatron layers with torch SDPA.

Both kinds of layers build a ``HybridModel``. In most families, a Hugging Face layer consists of two Hybrid layers:
attention (``*``), and MLP (``-``) or experts (``E``). See ``architectures.layer_symbols``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from transformers import PretrainedConfig

from gdpo_nemo.config.schema import MegatronConfig
from gdpo_nemo.megatron.attention import PackedAttention
from gdpo_nemo.megatron.flex_attention import FlexAttention
from gdpo_nemo.megatron.model_config import head_size, num_experts, rotary
from gdpo_nemo.megatron.recurrent_layers import PackedMambaMixer, kernels_are_usable
from gdpo_nemo.utils.errors import RunError


def transformer_engine_is_usable() -> bool:
    """Return whether TransformerEngine is installed and a GPU is available.

    Raises:
        RunError: if TransformerEngine is installed but its import fails. Without this error, the run would silently be
            slower.
    """
    if not torch.cuda.is_available() or find_spec("transformer_engine") is None:
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # the libraries may raise any exception type
        raise RunError(
            f"TransformerEngine is installed, but its import failed ({type(error).__name__}: {error}); fix the "
            "installation, or set policy.megatron_cfg.transformer_engine: false"
        ) from error
    return True


class Attention(Enum):
    """Attention between queries and keys in all layers."""

    ENGINE = "engine"
    """TransformerEngine's attention, which cannot share prompts."""
    PACKED = "packed"
    """``PackedAttention``."""
    FLEX = "flex"
    """``FlexAttention``."""
    ENGINE_AND_FLEX = "engine and flex"
    """``FlexAttention`` for packs with shared prompts, and TransformerEngine's attention for other packs."""


def select_attention(backend: str, use_te: bool, sharing: bool) -> Attention:
    """Return the attention of the layers.

    Args:
        backend: ``policy.megatron_cfg.attention_backend``.
        sharing: True if packs may contain shared prompts.
    """
    if backend == "flex":
        return Attention.FLEX
    if not use_te:
        return Attention.PACKED
    return Attention.ENGINE_AND_FLEX if sharing else Attention.ENGINE


def layer_spec(
    config: TransformerConfig,
    rotary: tuple[torch.Tensor, float] | None,
    use_te: bool,
    attention: Attention,
    adapted: bool = False,
    sharing: bool = False,
) -> ModuleSpec:
    """Return the layer stack: Megatron's TransformerEngine stack, or local layers that need only torch.

    Args:
        rotary: inverse rotary frequencies and the scaling factor of cos and sin, or None without rotary embedding. Not
            used by ``Attention.ENGINE``.
        adapted: True if the linear layers get adapters. Norms are then separate modules, because adapters need the
            inputs of the linear layers.
        sharing: True if packs may contain shared prompts, which the CUDA kernels of recurrent layers do not support.
    """
    if use_te:
        spec = _engine_stack(adapted, rotary, attention)
        return spec if kernels_are_usable() and not sharing else _without_kernels(spec)
    core = FlexAttention if attention is Attention.FLEX else PackedAttention
    return _local_stack(config, partial(core, rotary=rotary))


def engine_options(hf: PretrainedConfig, layout: MegatronConfig, attention: Attention) -> dict[str, Any]:
    """Return the options of TransformerConfig for TransformerEngine's layers."""
    backend = "auto" if attention is Attention.FLEX else layout.attention_backend
    uses_rope = attention is Attention.ENGINE
    options: dict[str, Any] = dict(attention_backend=AttnBackend[backend], apply_rope_fusion=uses_rope)
    scaling = (rotary(hf) or (None, 1.0))[1]
    if uses_rope and scaling != 1.0:
        # TransformerEngine's rotary kernel does not support scaling factors of queries and keys (YaRN). Apply both
        # factors to the attention scores instead.
        options |= dict(softmax_scale=scaling**2 / math.sqrt(head_size(hf)))
    if num_experts(hf):
        options |= dict(moe_permute_fusion=True)
    return options


# All stacks use the checkpoint keys of TransformerEngine's layers with a fused norm, so that their checkpoints are
# interchangeable.
_QKV_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_MLP_NORM_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_MAMBA_NORM_KEYS = {"norm.": "mixer.in_proj.layer_norm_"}


def _engine_stack(adapted: bool, rotary, attention: Attention) -> ModuleSpec:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    spec = _for_adapters(hybrid_stack_spec) if adapted else hybrid_stack_spec
    if attention is Attention.ENGINE:
        return spec
    unshared = TEDotProductAttention if attention is Attention.ENGINE_AND_FLEX else None
    core = partial(FlexAttention, rotary=rotary, unshared=unshared)
    layer = spec.submodules.attention_layer
    inner = layer.submodules.self_attention
    inner = replace(inner, submodules=replace(inner.submodules, core_attention=core))
    layer = replace(layer, submodules=replace(layer.submodules, self_attention=inner))
    return replace(spec, submodules=replace(spec.submodules, attention_layer=layer))


def _without_kernels(spec: ModuleSpec) -> ModuleSpec:
    """Return a stack whose recurrent layers compute in torch."""
    layer = spec.submodules.mamba_layer
    mixer = replace(layer.submodules.mixer, module=PackedMambaMixer)
    layer = replace(layer, submodules=replace(layer.submodules, mixer=mixer))
    return replace(spec, submodules=replace(spec.submodules, mamba_layer=layer))


def _for_adapters(spec: ModuleSpec) -> ModuleSpec:
    """Return TransformerEngine's stack with norms that are separate from the linear layers."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

    stock = spec.submodules
    attention = stock.attention_layer.submodules
    inner = attention.self_attention
    mamba = stock.mamba_layer.submodules
    return replace(
        spec,
        submodules=replace(
            stock,
            mamba_layer=replace(
                stock.mamba_layer,
                submodules=replace(
                    mamba,
                    norm=TENorm,
                    mixer=replace(
                        mamba.mixer, submodules=replace(mamba.mixer.submodules, in_proj=TEColumnParallelLinear)
                    ),
                    sharded_state_dict_keys_map=_MAMBA_NORM_KEYS,
                ),
            ),
            attention_layer=replace(
                stock.attention_layer,
                submodules=replace(
                    attention,
                    input_layernorm=TENorm,
                    self_attention=replace(
                        inner, submodules=replace(inner.submodules, linear_qkv=TEColumnParallelLinear)
                    ),
                    sharded_state_dict_keys_map=_QKV_NORM_KEYS,
                ),
            ),
            mlp_layer=replace(
                stock.mlp_layer,
                submodules=replace(
                    stock.mlp_layer.submodules,
                    pre_mlp_layernorm=TENorm,
                    mlp=partial(
                        MLP.as_mlp_submodule,
                        submodules=MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear),
                    ),
                    sharded_state_dict_keys_map=_MLP_NORM_KEYS,
                ),
            ),
        ),
    )


class RMSNorm(torch.nn.Module):
    """RMS norm, whose weight gradient is summed over the tensor-parallel group under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=_device()))
        # Megatron sums the gradients of parameters with this attribute over the tensor-parallel group.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of x [..., hidden]."""
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class LocalHybridStack(HybridStack):
    """Megatron's stack with a local final norm, because Megatron's final norm requires TransformerEngine."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "post_layer_norm": False})
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = RMSNorm(self.config, self.config.hidden_size, eps=self.config.layernorm_epsilon)


def _local_stack(config: TransformerConfig, core) -> ModuleSpec:
    head_norm = RMSNorm if config.qk_layernorm else None
    attention = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=core,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_QKV_NORM_KEYS,
        ),
    )
    mlp = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=RMSNorm,
            mlp=partial(
                MLP.as_mlp_submodule,
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_MLP_NORM_KEYS,
        ),
    )
    mamba = ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=RMSNorm,
            mixer=ModuleSpec(
                module=PackedMambaMixer,
                submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
            ),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_MAMBA_NORM_KEYS,
        ),
    )
    return ModuleSpec(
        module=LocalHybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=mamba, attention_layer=attention, mlp_layer=mlp, moe_layer=_local_moe(config)
        ),
    )


def _local_moe(config: TransformerConfig):
    """Return the MoE layer, which computes its experts sequentially."""
    if not config.num_moe_experts:
        return IdentityOp
    return ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=RMSNorm,
            mlp=get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts),
            mlp_bda=get_bias_dropout_add,
        ),
    )
