"""Megatron's recurrent layers with torch instead of CUDA kernels, under the same parameter names and splits."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from gdpo_nemo.megatron.attention import PackedAttention
from gdpo_nemo.megatron.latent_attention import device
from gdpo_nemo.megatron.packing import Packing
from gdpo_nemo.megatron.recurrence import causal_convolution, gated_delta_scan, over_sequences, state_space_scan

MAMBA_KERNELS = ("mamba_ssm", "causal_conv1d")
"""Packages with the CUDA kernels of Megatron's Mamba-2 layers."""
DELTA_KERNELS = ("fla",)
"""Packages with the CUDA kernels of Megatron's gated delta net layers."""


def kernels_are_usable(packages: tuple[str, ...]) -> bool:
    """Return whether the packages of CUDA kernels are installed and a GPU is available."""
    return torch.cuda.is_available() and all(find_spec(name) for name in packages)


def _input_projection(submodules: Any, config: Any, inputs: int, outputs: int, tp_group: Any) -> Any:
    """Return the first projection of a recurrent layer, with the arguments that Megatron's layers pass to it."""
    return build_module(
        submodules.in_proj,
        inputs,
        outputs,
        config=config,
        init_method=config.init_method,
        gather_output=False,
        bias=False,
        skip_bias_add=False,
        is_expert=False,
        tp_comm_buffer_name="fc1",
        tp_group=tp_group,
    )


def _output_projection(submodules: Any, config: Any, inputs: int, outputs: int, tp_group: Any) -> Any:
    """Return the last projection of a recurrent layer, with the arguments that Megatron's layers pass to it."""
    return build_module(
        submodules.out_proj,
        inputs,
        outputs,
        config=config,
        init_method=config.output_layer_init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=False,
        tp_comm_buffer_name="fc2",
        tp_group=tp_group,
    )


def _parameter(split: bool, *shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device()))
    if split:
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def needs_of_layers(chunks: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """Return the arguments of ``make_micro_batch`` that depend on the modules of a rank's chunks."""
    modules: list[tuple[str, torch.nn.Module]] = []
    for chunk in chunks:
        modules += chunk.named_modules()
    scans = any(isinstance(module, (PackedMambaMixer, PackedDeltaNet)) for _, module in modules)
    # A pipeline stage of a hybrid model may have no attention, of any kind.
    attends = any(name.endswith("core_attention") for name, _ in modules)
    return dict(
        attention=next((module for _, module in modules if isinstance(module, PackedAttention)), None),
        rectangles=scans or not attends,
        sequence_ids=any(type(module) is MambaMixer for _, module in modules),
    )


class GatedGroupNorm(torch.nn.Module):
    """RMS norm of each group of channels after a gate, ``x * silu(gate)``. The weight is split by rows."""

    def __init__(self, channels: int, groups: int, eps: float, dtype: torch.dtype, tp_group: Any):
        super().__init__()
        self.weight = _parameter(True, channels, dtype=dtype)
        self.groups = groups
        self.eps = eps
        self.tp_group = tp_group

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return float32 [tokens, channels] for x and gate of this shape."""
        gated = (x.float() * F.silu(gate.float())).unflatten(-1, (self.groups, -1))
        return F.rms_norm(gated, gated.shape[-1:], None, self.eps).flatten(-2) * self.weight.float()

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return the weight as a sharded tensor of Megatron's checkpoint format."""
        state = self.state_dict(prefix="", keep_vars=True)
        options = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **options)


class PackedMambaMixer(MambaMixer):
    """Megatron's Mamba-2 mixer over packs, in torch (``recurrence``).

    The parameters, their splits and their checkpoint keys are those of Megatron's mixer. Like the kernels that Megatron
    calls, it does not limit the step sizes; transformers raises them to ``time_step_min``.
    """

    def __init__(self, config, submodules, d_model, pg_collection, layer_number=None, name=None, **unused):
        MegatronModule.__init__(self, config)  # Megatron's mixer requires mamba_ssm
        ranks = pg_collection.tp.size()
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        self.layer_number = layer_number
        self.d_state = config.mamba_state_dim
        self.headdim = config.mamba_head_dim
        inner = config.mamba_num_heads * config.mamba_head_dim
        states = config.mamba_num_groups * self.d_state
        self.d_inner_local_tp = inner // ranks
        self.nheads_local_tp = config.mamba_num_heads // ranks
        self.ngroups_local_tp = config.mamba_num_groups // ranks
        projected = 2 * inner + 2 * states + config.mamba_num_heads
        self.in_proj = _input_projection(submodules, config, d_model, projected, self.tp_group)
        channels = (inner + 2 * states) // ranks
        self.conv1d_weight = _parameter(True, channels, 1, 4, dtype=config.params_dtype)
        self.conv1d_bias = _parameter(True, channels, dtype=config.params_dtype)
        self.dt_bias = _parameter(True, self.nheads_local_tp, dtype=config.params_dtype)
        self.A_log = _parameter(True, self.nheads_local_tp, dtype=torch.float32)
        self.D = _parameter(True, self.nheads_local_tp, dtype=torch.float32)
        self.norm = GatedGroupNorm(
            self.d_inner_local_tp, self.ngroups_local_tp, config.layernorm_epsilon, config.params_dtype, self.tp_group
        )
        self.out_proj = _output_projection(submodules, config, inner, d_model, self.tp_group)

    def forward(self, hidden_states, inference_context=None, *, packed_seq_params: Packing, **unused):
        """Return (output, bias) for the hidden states of a pack, [local tokens, 1, hidden]."""
        projected, _ = self.in_proj(hidden_states)
        inner = self.d_inner_local_tp
        gate, inputs = projected.squeeze(1).split((inner, projected.size(-1) - inner), -1)
        y = over_sequences(self._scan, inputs, packed_seq_params, self.pg_collection.cp)
        return self.out_proj(self.norm(y, gate).to(projected.dtype)[:, None])

    def _scan(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return float32 [sequences, length, channels] for the projected inputs [sequences, length, x, B, C, step]."""
        states = self.ngroups_local_tp * self.d_state
        channels = self.d_inner_local_tp + 2 * states
        mixed, step = inputs.split((channels, self.nheads_local_tp), -1)
        mixed = causal_convolution(mixed, self.conv1d_weight, self.conv1d_bias)
        x, b, c = mixed.split((self.d_inner_local_tp, states, states), -1)
        heads = (self.ngroups_local_tp, self.nheads_local_tp // self.ngroups_local_tp)
        y = state_space_scan(
            x.unflatten(-1, (*heads, self.headdim)),
            F.softplus(step.float() + self.dt_bias.float()).unflatten(-1, heads),
            -self.A_log.float().exp().view(heads),
            b.unflatten(-1, (heads[0], -1)),
            c.unflatten(-1, (heads[0], -1)),
            self.D.view(heads),
        )
        return y.flatten(2)


class HeadNorm(torch.nn.Module):
    """RMS norm of each head with one weight for all heads, never ``1 + weight``.

    A tensor-parallel rank has only some of the heads, so the gradient of the weight is summed over the ranks.
    """

    def __init__(self, config, hidden_size: int, eps: float, **unused):
        super().__init__()
        self.weight = _parameter(False, hidden_size, dtype=config.params_dtype)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of x [..., size of a head] in float32."""
        weight = copy_to_tensor_model_parallel_region(self.weight)
        return F.rms_norm(x.float(), self.weight.shape, weight.float(), self.eps)


_EPSILON = 1e-6
"""Added to the squared norm of queries and keys, as in transformers and the CUDA kernels."""


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """Return float32 x / |x|, for the last dimension of x."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


class PackedDeltaNet(GatedDeltaNet):
    """Megatron's gated delta net over packs, in torch (``recurrence``).

    The parameters, their splits and their checkpoint keys are those of Megatron's layer.
    """

    def __init__(self, config, submodules, layer_number=None, pg_collection=None, **unused):
        MegatronModule.__init__(self, config)  # Megatron's layer requires fla
        self.pg_collection = pg_collection
        self.layer_number = layer_number
        self.conv_bias = False
        self.tp_size = pg_collection.tp.size()
        self.cp_size = pg_collection.cp.size()
        self.num_key_heads = config.linear_num_key_heads
        self.num_value_heads = config.linear_num_value_heads
        self.key_head_dim = config.linear_key_head_dim
        self.value_head_dim = config.linear_value_head_dim
        values = self.value_head_dim * self.num_value_heads
        self.qk_dim_local_tp = self.key_head_dim * self.num_key_heads // self.tp_size
        self.v_dim_local_tp = values // self.tp_size
        self.num_v_heads_local_tp = self.num_value_heads // self.tp_size
        self._setup_variant_attrs()
        self.in_proj_dim = sum(self.in_proj_split_sections) * self.tp_size
        self.in_proj = _input_projection(submodules, config, config.hidden_size, self.in_proj_dim, pg_collection.tp)
        channels = self.conv_dim_local_tp = sum(self.in_proj_split_sections[:3])
        self.conv1d: Any = torch.nn.Module()  # Megatron's torch.nn.Conv1d, of which only the weight is used
        self.conv1d.weight = _parameter(True, channels, 1, config.linear_conv_kernel_dim, dtype=config.params_dtype)
        self.dt_bias = _parameter(True, self.num_v_heads_local_tp, dtype=config.params_dtype)
        self.A_log = _parameter(True, self.num_v_heads_local_tp, dtype=config.params_dtype)
        self.out_norm = build_module(
            submodules.out_norm, config=config, hidden_size=self.value_head_dim, eps=config.layernorm_epsilon
        )
        self.out_proj = _output_projection(submodules, config, values, config.hidden_size, pg_collection.tp)

    def forward(self, hidden_states, attention_mask, *, packed_seq_params: Packing, **unused):
        """Return (output, bias) for the hidden states of a pack, [local tokens, 1, hidden]."""
        projected, _ = self.in_proj(hidden_states)
        q, k, v, gate, beta, alpha = projected.squeeze(1).split(self.in_proj_split_sections, -1)
        inputs = torch.cat((q, k, v, beta, alpha), -1)
        y = over_sequences(self._scan, inputs, packed_seq_params, self.pg_collection.cp)
        y = self.out_norm(y) * F.silu(gate.float().unflatten(-1, y.shape[1:]))
        return self.out_proj(y.flatten(1).to(projected.dtype)[:, None])

    def _scan(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return float32 [sequences, length, heads, size] for the projected inputs [sequences, length, q, k, v, beta,
        alpha]."""
        heads = self.num_v_heads_local_tp
        mixed, beta, alpha = inputs.split((self.conv_dim_local_tp, heads, heads), -1)
        mixed = causal_convolution(mixed, self.conv1d.weight, None)
        q, k, v = mixed.split(self.in_proj_split_sections[:3], -1)
        groups = self.num_key_heads // self.tp_size
        decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias.float())
        y = gated_delta_scan(
            _normalised(q.unflatten(-1, (groups, -1))) * self.key_head_dim**-0.5,
            _normalised(k.unflatten(-1, (groups, -1))),
            v.unflatten(-1, (groups, heads // groups, -1)),
            beta.sigmoid().unflatten(-1, (groups, -1)),
            decay.unflatten(-1, (groups, -1)),
        )
        return y.flatten(2, 3)
