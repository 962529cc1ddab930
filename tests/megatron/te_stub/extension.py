"""What TransformerEngine's C extension does, in torch on the CPU: the part that a bfloat16 or float32 policy calls.

Registered as ``transformer_engine_torch``. A function without a stand-in may be imported and passed around; calling it
raises NotImplementedError with its name. Signatures follow the calls in TransformerEngine's Python (2.20.2).
"""

from __future__ import annotations

import enum
from typing import Any

import torch

_BACKENDS = ("NVTE_F16_arbitrary_seqlen", "NVTE_FP8", "NVTE_No_Backend")
_DTYPES = ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1")

DType = enum.IntEnum("DType", _DTYPES, start=0)
NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", _BACKENDS, start=0)
_TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


class _Growing(type):
    """A class whose attributes come to be when they are asked for: an enumeration whose members the caller knows."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        members = cls.__dict__.get("members")
        if members is None:
            members = []
            cls.members = members
        if name not in members:
            members.append(name)
        return members.index(name)


def _enumerations(*names: str) -> dict[str, type]:
    return {name: _Growing(name, (), {}) for name in names}


globals().update(
    _enumerations(
        "CommOverlapType",
        "CommOverlapAlgo",
        "FP8FwdTensors",
        "FP8BwdTensors",
        "Float8BlockScaleTensorFormat",
        "NVTEQBHistogramMode",
        "NVTERoutingMapFormat",
        "NVTEScalingMode",
        "NVTE_Bias_Type",
        "NVTE_Mask_Type",
        "NVTE_QKV_Format",
        "NVTE_QKV_Layout",
        "NVTE_Softmax_Type",
    )
)


class FP8TensorMeta:
    """Scales of fp8 tensors; nothing here computes in fp8."""


class CommOverlap:
    """Communication overlapped with matrix products; named in annotations only."""


class CommOverlapP2P(CommOverlap):
    """The same, point to point."""


class CommOverlapHelper:
    """Its process groups."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"the stub of TransformerEngine's extension has no {name}")

    missing.__name__ = name
    return missing


def get_cudnn_version() -> int:
    """cuDNN 9.20.0, as the group `gpu` of pyproject.toml resolves to."""
    return 92000


def get_cublasLt_version() -> int:
    """cuBLASLt of CUDA 13."""
    return 130000


def get_num_cublas_streams() -> int:
    """Streams of grouped products."""
    return 1


def get_fused_attn_backend(*_: Any, **__: Any) -> tuple[Any, str]:
    """(none, why): attention of cuDNN, so that TransformerEngine takes its own in torch."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "there is no cuDNN here"


def generic_gemm(
    a,
    trans_a,
    b,
    trans_b,
    out,
    quantizer,
    output_dtype,
    bias,
    bias_type,
    gelu,
    gelu_in,
    grad,
    workspace,
    workspace_size,
    accumulate,
    use_split_accumulator,
    **options,
):
    """One product, in cuBLAS's column-major reading: out [n, m] = op(B) [n, k] @ op(A) [k, m].

    Returns:
        (out, bias gradient or None, None, None)
    """
    assert quantizer is None and not gelu and options["comm_overlap"] is None
    left = b.flatten(0, -2)
    right = a.flatten(0, -2)
    product = (left.T if trans_b else left).float() @ (right.T if trans_a else right).float()
    if bias is not None and not grad:
        product += bias.float()
    product = product * options["alpha"]
    if not trans_b:
        product = product.view(*b.shape[:-1], product.size(-1))
    if out is None:
        out = product.to(_TORCH_DTYPES[DType(int(output_dtype))] if output_dtype is not None else b.dtype)
    elif accumulate:
        out.add_(product.view_as(out))
    else:
        out.copy_(product.view_as(out))
    return out, left.sum(0) if grad and bias is not None else None, None, None


def te_general_grouped_gemm(
    a, trans_a, b, trans_b, out, out_dtype, m_splits, bias, bias_dtype, single_output, gelu_input, grad, *rest
):
    """Products of several pairs; with ``single_output`` their rows stand one below the other in ``out[0]``."""
    accumulate = rest[2]
    views = out
    if single_output:
        views = out[0].split(list(m_splits))
    for i, (left, right, view) in enumerate(zip(a, b, views)):
        if view.numel() == 0:
            continue
        has_bias = bool(bias) and bias[i].numel() > 0
        if right.numel() == 0:
            if not accumulate:
                view.zero_()
            if has_bias and grad:
                bias[i].zero_()
            continue
        _, bias_grad, _, _ = generic_gemm(
            left,
            trans_a,
            right,
            trans_b,
            view,
            None,
            None,
            bias[i] if has_bias else None,
            None,
            False,
            None,
            grad,
            None,
            0,
            accumulate,
            False,
            comm_overlap=None,
            alpha=1.0,
        )
        if bias_grad is not None:
            bias[i].copy_(bias_grad)
    return bias


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    """(output, None, 1 / root of the mean square [rows])."""
    assert quantizer is None
    x = input.float()
    scale = (x.square().mean(-1) + eps).rsqrt()
    out = (x * scale.unsqueeze(-1) * (weight.float() + zero_centered_gamma)).to(input.dtype)
    if ln_out is not None:
        out = ln_out.copy_(out)
    return out, None, scale.flatten()


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    """(gradient of the input, gradient of gamma)."""
    scale = rsigma.view(*x.shape[:-1], 1)
    normed = x.float() * scale
    grad = dz.float() * (gamma.float() + zero_centered_gamma)
    dx = (grad - normed * (grad * normed).mean(-1, keepdim=True)) * scale
    dgamma = (dz.float() * normed).flatten(0, -2).sum(0)
    return dx.to(x.dtype), dgamma.to(gamma.dtype)


def _angles(freqs, cu_seqlens, cp_size, cp_rank) -> torch.Tensor:
    """Angles of the local tokens of a pack [tokens, 1, size]; ``cu_seqlens`` counts the tokens of all context ranks."""
    bounds = cu_seqlens.tolist()
    parts = []
    for start, stop in zip(bounds[:-1], bounds[1:]):
        length = stop - start
        if cp_size == 1:
            parts.append(freqs[:length])
            continue
        chunks = freqs[:length].chunk(2 * cp_size)
        parts += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]
    return torch.cat(parts).flatten(1, 2)


def _rotated(t, freqs, interleaved, cu_seqlens, cp_size, cp_rank, sign: int) -> torch.Tensor:
    """``t`` [tokens, heads, size] turned forwards or backwards; elements beyond the angles stay as they are."""
    angles = _angles(freqs, cu_seqlens, cp_size, cp_rank)
    assert len(angles) == len(t)
    x = t[..., : angles.size(-1)].float()
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    else:
        left, right = x.chunk(2, -1)
        turned = torch.cat((-right, left), -1)
    out = x * angles.cos() + sign * turned * angles.sin()
    return torch.cat((out.to(t.dtype), t[..., angles.size(-1) :]), -1)


def fused_rope_forward(t, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank):
    """Rotate a pack [tokens, heads, size]."""
    assert start_positions is None and cu_seqlens is not None and freqs.dtype == torch.float32
    return _rotated(t, freqs, interleaved, cu_seqlens, cp_size, cp_rank, 1)


def fused_rope_backward(grad, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank):
    """Rotate back."""
    return _rotated(grad, freqs, interleaved, cu_seqlens, cp_size, cp_rank, -1)


def convert_thd_to_bshd(tensor, cu_seqlens, batch, longest):
    """[tokens, heads, size] -> [batch, longest, heads, size], padded with zeros."""
    out = tensor.new_zeros(batch, longest, *tensor.shape[1:])
    for i, (start, stop) in enumerate(zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:])):
        out[i, : stop - start] = tensor[start:stop]
    return out


def convert_bshd_to_thd(tensor, cu_seqlens, tokens):
    """The inverse."""
    bounds = cu_seqlens.tolist()
    parts = [tensor[i, : stop - start] for i, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:]))]
    return torch.cat(parts)


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    """(norm of all, norms one by one or None)."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().view(1), norms if per_tensor else None


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    """Scale the first list into the second."""
    for source, target in zip(*tensor_lists):
        target.copy_(source * scale)


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_adam(
    chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
):
    """AdamW (mode 1) on [gradients, weights, first moments, second moments] and perhaps main weights."""
    for gradient, weight, first, second, *main in zip(*tensor_lists):
        g = gradient.float()
        target = main[0] if main else weight
        w = target.float()
        if mode == 0:
            g = g + weight_decay * w
        m = first.float().lerp_(g, 1 - beta1)
        v = second.float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
        first.copy_(m)
        second.copy_(v)
        c1 = 1 - beta1**step if bias_correction else 1.0
        c2 = 1 - beta2**step if bias_correction else 1.0
        update = (m / c1) / ((v / c2).sqrt() + eps)
        if mode == 1:
            update = update + weight_decay * w
        target.copy_(w - lr * update)
        if main:
            weight.copy_(target)


# Those who import all name these two, beside what is above, without calling them.
layernorm_fwd = __getattr__("layernorm_fwd")
layernorm_bwd = __getattr__("layernorm_bwd")
