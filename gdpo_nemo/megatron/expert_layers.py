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
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayerSubmodules

from gdpo_nemo.megatron.latent_attention import ReplicatedLinear, replicated_parameter


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


class ScaledRouter(TopKRouter):
    """Router that normalises and scales its input, and scales the weights of the chosen experts (Gemma 4)."""

    def __init__(self, config: Any, *arguments: Any, **options: Any):
        super().__init__(config, *arguments, **options)
        self.scale = replicated_parameter(config, config.hidden_size)
        self.expert_scale = replicated_parameter(config, config.num_moe_experts)

    def gating(self, input):
        """Return the scores of the experts, [tokens, 1, experts]."""
        size = input.size(-1)
        normed = torch.nn.functional.rms_norm(input, (size,), eps=self.config.layernorm_epsilon)
        return super().gating(normed * self.scale * size**-0.5)

    def routing(self, logits, *arguments, **options):
        """Return the weights of the experts [tokens, experts], and a mask of the chosen experts."""
        weights, chosen = super().routing(logits, *arguments, **options)
        return weights * self.expert_scale, chosen


class ParallelMoELayer(MoELayer):
    """Sum of a dense MLP and routed experts, each with norms of its input and its output (Gemma 4).

    The dense MLP has the parameters of Megatron's shared experts. The layer's input is not normalised.

    Args:
        norm: builder of a norm.
    """

    def __init__(self, config: Any, submodules: MoESubmodules, *arguments: Any, norm: Any, **options: Any):
        super().__init__(config, replace(submodules, router=ScaledRouter), *arguments, **options)
        for name in ("dense_norm", "dense_output_norm", "expert_norm", "expert_output_norm"):
            setattr(self, name, norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon))

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normalised output of the dense MLP."""
        return self.dense_output_norm(super().shared_experts_compute(self.dense_norm(hidden_states)))

    def preprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        """Prepare the normalised inputs of the experts for their dispatch."""
        return super().preprocess(self.expert_norm(hidden_states), probs, routing_map)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of the normalised outputs of the experts and of the dense MLP."""
        return self.expert_output_norm(super().postprocess(output, None)) + shared_expert_output


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
        submodules=TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=get_bias_dropout_add),
    )
