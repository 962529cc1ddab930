"""Dequantisation of FP8 weights, the format in which DeepSeek-V3, MiniMax-M2 and Mistral Medium 3.5 are published.

A matrix has the data type float8_e4m3fn. A second tensor has a factor for each block of the matrix, or for the whole
matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from gdpo_nemo.utils.errors import ConfigError

_SCALES = "_scale_inv"
"""Suffix of the tensor of factors."""
_ACTIVATION_SCALE = "activation_scale"
"""Last part of the name of a factor that quantises the inputs of a linear layer while it computes."""


def block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of a block from the fields of a config.json, or None for one factor per matrix."""
    block = (config.get("quantization_config") or {}).get("weight_block_size")
    return (block[0], block[1]) if block else None


def dequantised(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """Return the values of a matrix, bfloat16 [rows, columns].

    Args:
        weight: float8_e4m3fn [rows, columns].
        scales: [blocks of rows, blocks of columns], or one factor.
        block: rows and columns of a block, or None for one factor. The last blocks may be smaller.

    Raises:
        ValueError: if the shapes do not match.
    """
    rows, columns = weight.shape
    if block is None:
        return (weight.float() * scales.float().reshape(())).bfloat16()
    if not scales.is_floating_point() or scales.shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise ValueError(f"shapes {list(weight.shape)} and {list(scales.shape)}")
    factors = scales.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * factors).bfloat16()


def unquantised(
    read: Callable[[str], torch.Tensor], names: Iterable[str], block: tuple[int, int] | None, key: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each weight of a folder, with FP8 weights in bfloat16.

    Args:
        read: function that returns a tensor by name. Raises KeyError for unknown names.
        names: names of the tensors, including factors, which are not yielded.
        block: see ``dequantised``.
        key: config key or option that specifies the folder, for messages.

    Raises:
        ConfigError: if the factors of a weight are missing or do not match.
    """
    for name in names:
        if name.endswith((_SCALES, _ACTIVATION_SCALE)):
            continue
        tensor = read(name)
        if tensor.dtype is torch.float8_e4m3fn:
            try:
                tensor = dequantised(tensor, read(name + _SCALES), block)
            except KeyError:
                raise ConfigError(f"{key}: the model lacks {name}{_SCALES}") from None
            except (ValueError, RuntimeError) as error:
                raise ConfigError(f"{key}: {name} is not a valid FP8 weight ({error})") from None
        yield name, tensor
