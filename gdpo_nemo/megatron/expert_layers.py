"""MoE layers without TransformerEngine, including experts with biases and experts in a latent space."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayerSubmodules

from gdpo_nemo.megatron.latent_attention import ReplicatedLinear


class ExpertRowLinear(RowParallelLinear):
    """Linear layer of an expert with a bias, which Megatron's MLP adds to the output in place."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Megatron would sum the bias's gradient over the tensor-parallel group, which the expert's data-parallel group
        # contains.
        setattr(self.bias, "sequence_parallel", False)  # noqa: B010

    def forward(self, input_):
        """Return a copy of the output, because autograd does not allow changes of the original, and the bias."""
        output, bias = super().forward(input_)
        return output.clone(), bias


class _LatentProjection(ReplicatedLinear):
    def forward(self, x):
        """Return the projection of x, and None in place of a bias, as Megatron's linear layers do."""
        return super().forward(x), None


class LatentMoELayer(MoELayer):
    """MoE layer whose routed experts process a projection of the hidden states (LatentMoE, arXiv 2601.18089).

    Megatron's layer has the same parameters, but only with TransformerEngine.
    """

    def __init__(self, config: Any, submodules: MoESubmodules, *arguments: Any, **options: Any):
        # With a latent size, the constructor of Megatron's layer requires TransformerEngine. Of the layer's modules,
        # only the experts depend on the latent size.
        without = copy.copy(config)
        without.moe_latent_size = None

        def experts(count: int, _: TransformerConfig, **others: Any) -> Any:
            return submodules.experts(count, config, **others)

        super().__init__(without, replace(submodules, experts=experts), *arguments, **options)
        self.config = config
        self.fc1_latent_proj: Any = _LatentProjection(config.hidden_size, config.moe_latent_size, config)
        self.fc2_latent_proj: Any = _LatentProjection(config.moe_latent_size, config.hidden_size, config)


def local_moe(config: TransformerConfig, norm: type[torch.nn.Module]) -> Any:
    """Return the MoE layer, which computes its experts sequentially."""
    if not config.num_moe_experts:
        return IdentityOp
    mlp: Any = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    if config.add_bias_linear:
        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertRowLinear)
        experts = partial(SequentialMLP, submodules=linear)
        mlp = partial(mlp, submodules=replace(mlp.keywords["submodules"], experts=experts))
    if config.moe_latent_size:
        mlp = partial(LatentMoELayer, **mlp.keywords)
    return ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
