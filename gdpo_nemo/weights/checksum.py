"""A checksum of a tensor's bytes that the device which holds them computes, the same on CPU and GPU.

Elements count as integers of their own size (8 bytes as two of 4). Element i of a block of 2^20 is multiplied by a
weight w_i, a block is the sum of its products, and blocks are chained by multiplication, all modulo 2^64. Every w_i is
odd, so a change of one element always shows; the low 33 bits of the w_i differ, so two unequal elements of a block that
change places always show. The high bits are mixed (splitmix64): other changes go unseen with a chance of about 2^-31.
"""

from __future__ import annotations

import functools
from typing import Iterator

import numpy as np
import torch

_BLOCK = 1 << 20
_ROWS = 16
"""Blocks at once on a GPU; their products take 128 MiB."""
_CHAIN = 0x5851F42D4C957F2D
_ODD = 0x9E3779B97F4A7C15
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [] on the tensor's device; nothing waits for the device."""
    flat = tensor.detach().contiguous().flatten()
    words = flat.view(_INTEGERS[flat.element_size()])
    total = torch.full((), words.numel(), dtype=torch.int64, device=words.device)
    if _on_cpu(words):
        weights = _weights(words.device)
        for block in words.split(_BLOCK) if words.numel() else ():
            total = total * _CHAIN + (block.to(torch.int64) * weights[: block.numel()]).sum()
        return total
    for sums in _of_rows(words):
        total = total * _power(len(sums)) + (sums * _powers(words.device)[-len(sums) :]).sum()
    return total


def _on_cpu(words: torch.Tensor) -> bool:
    """Whether to take one block at a time: its products stay in the cache."""
    return words.device.type == "cpu"


def _of_rows(words: torch.Tensor) -> Iterator[torch.Tensor]:
    """int64 [blocks] of some neighbouring blocks at once: on a GPU of 4 TB/s the kernels of one block would take longer
    to launch than to run."""
    weights = _weights(words.device)
    whole = words.numel() // _BLOCK * _BLOCK
    for rows in words[:whole].view(-1, _BLOCK).split(_ROWS) if whole else ():
        yield (rows * weights).sum(1)
    if whole < words.numel():
        yield (words[whole:] * weights[: words.numel() - whole]).sum().view(1)


def _power(exponent: int) -> int:
    """Of the chain's factor, modulo 2^64, as torch has it: with a sign."""
    power = pow(_CHAIN, exponent, 1 << 64)
    return power - (power >> 63 << 64)


@functools.cache
def _powers(device: torch.device) -> torch.Tensor:
    """int64 [_ROWS]: how often the chain multiplies each of neighbouring blocks after its sum was added."""
    return torch.tensor([_power(left) for left in reversed(range(_ROWS))], dtype=torch.int64, device=device)


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
