"""Layer specifications: TransformerEngine's layers, or local Megatron layers with torch SDPA.

Both kinds of layers build a ``HybridModel``. In most families, a Hugging Face layer consists of two Hybrid layers:
attention (``*``), and MLP (``-``) or experts (``E``). See ``ModelDescription.symbols``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from transformers import PretrainedConfig

from gdpo_nemo.config.schema import MegatronConfig
from gdpo_nemo.megatron.attention import LayerAttention, LayerSelfAttention, PackedAttention
from gdpo_nemo.megatron.expert_layers import ParallelMoELayer, local_moe
from gdpo_nemo.megatron.flex_attention import FlexAttention
from gdpo_nemo.megatron.latent_attention import LatentAttention, device, replicated_parameter
from gdpo_nemo.megatron.model_config import rotary
from gdpo_nemo.megatron.recurrent_layers import (
    DELTA_KERNELS,
    MAMBA_KERNELS,
    HeadNorm,
    PackedDeltaNet,
    PackedMambaMixer,
    kernels_are_usable,
)
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.families import Family
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


def select_attention(
    backend: str, use_te: bool, sharing: bool, special: str | None = None, latent: bool = False
) -> Attention:
    """Return the attention of the layers.

    Args:
        backend: ``policy.megatron_cfg.attention_backend``.
        sharing: True if packs may contain shared prompts.
        special: property of the model that TransformerEngine's attention does not support (``special_attention``).
        latent: True for latent attention, whose rotary embedding ``FlexAttention`` applies.
    """
    if backend == "flex" or (use_te and special):
        return Attention.FLEX
    if not use_te:
        return Attention.PACKED
    return Attention.ENGINE_AND_FLEX if sharing or latent else Attention.ENGINE


def _changed(spec: ModuleSpec, changes: Mapping[str, Any]) -> ModuleSpec:
    """Return a copy of a specification with other modules. The original may be Megatron's own, so it never changes.

    Args:
        changes: new values by path. A path consists of names of nested submodules and ends with the name to change,
            which may also be ``module`` or ``params`` of a specification.
    """
    for path, value in changes.items():
        name, _, inner = path.partition(".")
        if name in ("module", "params"):
            spec = replace(spec, **{name: value})
            continue
        submodules: Any = spec.submodules
        if inner:
            value = _changed(getattr(submodules, name), {inner: value})
        spec = replace(spec, submodules=replace(submodules, **{name: value}))
    return spec


def layer_spec(
    model: ModelDescription,
    config: TransformerConfig,
    layers: Sequence[LayerAttention],
    use_te: bool,
    attention: Attention,
    *,
    adapted: bool = False,
    sharing: bool = False,
) -> ModuleSpec:
    """Return the layer stack: Megatron's TransformerEngine stack, or local layers that need only torch.

    Args:
        layers: properties of the attention by Hybrid layer of the model. Not used by ``Attention.ENGINE``.
        adapted: True if the linear layers get adapters. Norms are then separate modules, because adapters need the
            inputs of the linear layers.
        sharing: True if packs may contain shared prompts, which the CUDA kernels of recurrent layers do not support.
    """
    if use_te:
        spec = _recurrent_layers(_engine_stack(config, layers, attention, adapted), sharing)
    else:
        core = FlexAttention if attention is Attention.FLEX else PackedAttention
        spec = _local_stack(config, partial(core, layers=layers))
    family = model.family
    stack: Any = spec.submodules
    self_attention = "attention_layer.self_attention"
    changes: dict[str, Any] = {}
    if family.qk_norm_of_layer:
        changes[f"{self_attention}.q_layernorm"] = partial(NormOfHeads, count="num_attention_heads")
        changes[f"{self_attention}.k_layernorm"] = partial(NormOfHeads, count="num_query_groups")
    if family.global_heads:
        params = stack.attention_layer.submodules.self_attention.params
        changes[f"{self_attention}.module"] = LayerSelfAttention
        changes[f"{self_attention}.params"] = {**params, "layers": layers}
    norm = _norm(use_te)
    if model.experts and family.experts and family.experts.beside:
        arguments = stack.moe_layer.submodules.mlp.keywords
        changes["moe_layer.mlp"] = partial(ParallelMoELayer, norm=norm, **arguments)
        changes["moe_layer.pre_mlp_layernorm"] = IdentityOp  # ParallelMoELayer has norms for each of its two inputs
    changes |= _post_norms(stack, config, norm, family)
    return _changed(spec, changes)


def _norm(use_te: bool) -> Any:
    """Return the builder of norms that are not fused with linear layers."""
    if not use_te:
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _latent(linear: Any, output: Any, core: partial[Any]) -> ModuleSpec:
    """Return latent attention whose projections to and from heads are ``linear`` and ``output``."""
    modules = MLASelfAttentionSubmodules(
        linear_q_up_proj=linear,
        linear_proj=output,
        core_attention=ModuleSpec(module=core.func, params=core.keywords),
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
    )
    return ModuleSpec(module=LatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=modules)


def engine_options(
    hf: PretrainedConfig, model: ModelDescription, layout: MegatronConfig, attention: Attention
) -> dict[str, Any]:
    """Return the options of TransformerConfig for TransformerEngine's layers."""
    backend = "auto" if attention is Attention.FLEX else layout.attention_backend
    uses_rope = attention is Attention.ENGINE
    options: dict[str, Any] = dict(attention_backend=AttnBackend[backend], apply_rope_fusion=uses_rope)
    embedding = rotary(hf, model) if uses_rope else None
    if embedding and (scaling := embedding[1]) != 1.0:
        # TransformerEngine's rotary kernel does not support scaling factors of queries and keys (YaRN). Apply both
        # factors to the attention scores instead.
        options |= dict(softmax_scale=scaling**2 / math.sqrt(model.head_size))
    if model.experts:
        options |= dict(moe_permute_fusion=True)
    return options


# All stacks use the checkpoint keys of TransformerEngine's layers with a fused norm, so that their checkpoints are
# interchangeable.
_QKV_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_MLP_NORM_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_DELTA_NORM_KEYS = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
_MAMBA_NORM_KEYS = {"norm.": "mixer.in_proj.layer_norm_"}


def _engine_stack(
    config: TransformerConfig, layers: Sequence[LayerAttention], attention: Attention, adapted: bool
) -> ModuleSpec:
    """Return TransformerEngine's stack. Models with latent attention have norms that are separate, as for adapters."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TEDotProductAttention,
        TERowParallelLinear,
    )
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    is_latent = config.multi_latent_attention
    spec = _for_adapters(hybrid_stack_spec) if adapted or is_latent else hybrid_stack_spec
    if attention is Attention.ENGINE:
        return spec
    unshared = TEDotProductAttention if attention is Attention.ENGINE_AND_FLEX else None
    core = partial(FlexAttention, layers=layers, unshared=unshared)
    if is_latent:
        latent = _latent(TEColumnParallelLinear, TERowParallelLinear, core)
        return _changed(spec, {"attention_layer.self_attention": latent})
    return _changed(spec, {"attention_layer.self_attention.core_attention": core})


def _recurrent_layers(spec: ModuleSpec, sharing: bool) -> ModuleSpec:
    """Return a stack whose recurrent layers compute in torch, unless their CUDA kernels can be used."""
    # Megatron's norm would multiply by 1 + weight in models whose other norms do.
    changes: dict[str, Any] = {"gdn_layer.self_attention.out_norm": HeadNorm}
    if sharing or not kernels_are_usable(MAMBA_KERNELS):
        changes["mamba_layer.mixer.module"] = PackedMambaMixer
    if sharing or not kernels_are_usable(DELTA_KERNELS):
        changes["gdn_layer.self_attention.module"] = PackedDeltaNet
    return _changed(spec, changes)


def _for_adapters(spec: ModuleSpec) -> ModuleSpec:
    """Return TransformerEngine's stack with norms that are separate from the linear layers."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

    mlp = MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)
    changes = {
        "gdn_layer.input_layernorm": TENorm,
        "gdn_layer.self_attention.in_proj": TEColumnParallelLinear,
        "gdn_layer.sharded_state_dict_keys_map": _DELTA_NORM_KEYS,
        "mamba_layer.norm": TENorm,
        "mamba_layer.mixer.in_proj": TEColumnParallelLinear,
        "mamba_layer.sharded_state_dict_keys_map": _MAMBA_NORM_KEYS,
        "attention_layer.input_layernorm": TENorm,
        "attention_layer.self_attention.linear_qkv": TEColumnParallelLinear,
        "attention_layer.sharded_state_dict_keys_map": _QKV_NORM_KEYS,
        "mlp_layer.pre_mlp_layernorm": TENorm,
        "mlp_layer.mlp": partial(MLP.as_mlp_submodule, submodules=mlp),
        "mlp_layer.sharded_state_dict_keys_map": _MLP_NORM_KEYS,
    }
    return _changed(spec, changes)


class RMSNorm(torch.nn.Module):
    """RMS norm, whose weight gradient is summed over the tensor-parallel group under sequence parallelism.

    With ``layernorm_zero_centered_gamma``, the factor of the normalised values is 1 + weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.eps = eps
        self.offset = config.layernorm_zero_centered_gamma
        self.weight = replicated_parameter(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of x [..., hidden]."""
        if not self.offset:
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # As in transformers, compute in float32: bfloat16 would round 1 + weight.
        normed = torch.nn.functional.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps)
        return normed.to(x.dtype)


class NormOfHeads(torch.nn.Module):
    """RMS norm of all heads of q, or of k, at once. Tensor parallelism splits the heads.

    Args:
        count: field of ``config`` with the number of heads.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, count: str):
        super().__init__()
        self.eps = eps
        self.size = getattr(config, count) * hidden_size
        self.group = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"]).tp
        local = self.size // self.group.size()
        self.weight = torch.nn.Parameter(torch.ones(local, dtype=config.params_dtype, device=device()))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return the weight as a sharded tensor of Megatron's checkpoint format."""
        name = f"{prefix}weight"
        return {name: make_tp_sharded_tensor_for_checkpoint(self.weight, name, prepend_offsets=sharded_offsets)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [tokens, 1, local heads, size]."""
        squares = x.float().square().sum((-2, -1), keepdim=True)
        # The outputs on all ranks depend on the sum, so the backward pass sums its gradient over the ranks.
        squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
        squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        normed = x.float() * torch.rsqrt(squares / self.size + self.eps)
        return normed.to(x.dtype) * self.weight.view(x.shape[-2:])


class NormAndAdd(torch.nn.Module):
    """Norm of a layer's output, followed by the addition to the residual. Replaces Megatron's bias, dropout and add.

    Args:
        norm: builder of the norm.
        scaled: True if a buffer contains a factor of the sum (``Family.layer_scale``).
    """

    scale: torch.Tensor | None

    def __init__(self, config: TransformerConfig, norm: Callable[..., torch.nn.Module], scaled: bool = False):
        super().__init__()
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.register_buffer("scale", torch.ones(1, dtype=config.params_dtype, device=device()) if scaled else None)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Return the function that Megatron's layer calls, as ``get_bias_dropout_add`` does. Dropout is not used."""

        def add(output_and_bias, residual, dropout):
            output, bias = output_and_bias
            # Megatron enables gradients here even in passes without gradients. The norm must not store its input then.
            with torch.set_grad_enabled(output.requires_grad):
                output = self.norm(output if bias is None else output + bias)
            return residual + output if self.scale is None else (residual + output) * self.scale

        return add


def _post_norms(stack: Any, config: TransformerConfig, norm: Any, family: Family) -> dict[str, Any]:
    """Return the changes that add norms after the attention and the MLP, before the addition to the residual."""
    modules = family.modules
    params = dict(config=config, norm=norm)
    changes = {}
    if modules.post_attention_norm:
        changes["attention_layer.self_attn_bda"] = ModuleSpec(NormAndAdd, params=params)
    if modules.post_mlp_norm:
        add = ModuleSpec(NormAndAdd, params={**params, "scaled": family.layer_scale is not None})
        changes["mlp_layer.mlp_bda"] = add
        if isinstance(stack.moe_layer, ModuleSpec):  # dense models have no such layer
            changes["moe_layer.mlp_bda"] = add
    return changes


class LocalHybridStack(HybridStack):
    """Megatron's stack with a local final norm, because Megatron's final norm requires TransformerEngine."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "post_layer_norm": False})
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = RMSNorm(self.config, self.config.hidden_size, eps=self.config.layernorm_epsilon)


def _local_stack(config: TransformerConfig, core) -> ModuleSpec:
    head_norm = RMSNorm if config.qk_layernorm else None
    inner = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=core,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    if config.multi_latent_attention:
        inner = _latent(ColumnParallelLinear, RowParallelLinear, core)
    attention = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=inner,
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
    moe = local_moe(config, RMSNorm)
    layers = HybridStackSubmodules(attention_layer=attention, mlp_layer=mlp, moe_layer=moe, **_local_recurrent_layers())
    return ModuleSpec(module=LocalHybridStack, submodules=layers)


def _local_recurrent_layers() -> dict[str, ModuleSpec]:
    mixer = ModuleSpec(
        module=PackedMambaMixer,
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    mamba = MambaLayerSubmodules(
        norm=RMSNorm, mixer=mixer, mamba_bda=get_bias_dropout_add, sharded_state_dict_keys_map=_MAMBA_NORM_KEYS
    )
    net = ModuleSpec(
        module=PackedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=HeadNorm, out_proj=RowParallelLinear),
    )
    delta = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=net,
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=_DELTA_NORM_KEYS,
    )
    return {
        "mamba_layer": ModuleSpec(module=MambaLayer, submodules=mamba),
        "gdn_layer": ModuleSpec(module=TransformerLayer, submodules=delta),
    }
