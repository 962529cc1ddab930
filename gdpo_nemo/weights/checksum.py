"""A checksum of a tensor's bytes that the device which holds them computes, the same on CPU and GPU.

Elements count as integers of their own size (8 bytes as two of 4). Element i of a block of 2^20 is multiplied by a
weight w_i, a block is the sum of its products, and blocks are chained by multiplication, all modulo 2^64. Every w_i is
odd, so a change of one element always shows; the low 33 bits of the w_i differ, so two unequal elements of a block that
change places always show. The high bits are mixed (splitmix64): other changes go unseen with a chance of about 2^-31.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

_BLOCK = 1 << 20
_CHAIN = 0x5851F42D4C957F2D
_ODD = 0x9E3779B97F4A7C15
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [] on the tensor's device; nothing waits for the device."""
    flat = tensor.detach().contiguous().flatten()
    words = flat.view(_INTEGERS[flat.element_size()])
    total = torch.full((), words.numel(), dtype=torch.int64, device=words.device)
    weights = _weights(words.device)
    for block in words.split(_BLOCK) if words.numel() else ():
        total = total * _CHAIN + (block.to(torch.int64) * weights[: block.numel()]).sum()
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """int64 [_BLOCK]: odd, different from each other in their low 33 bits, mixed in the others."""
    place = np.arange(_BLOCK, dtype=np.uint64)
    low = (2 * place + 1) * np.uint64(_ODD)
    mixed = (place + np.uint64(1)) * np.uint64(_ODD)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mask = np.uint64((1 << 33) - 1)
    return torch.from_numpy(((mixed & ~mask) | (low & mask)).view(np.int64)).to(device)
