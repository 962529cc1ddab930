"""Dequantisation of MXFP4 weights, the format in which OpenAI publishes gpt-oss.

Blocks of 32 values share an exponent. Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from gdpo_nemo.models.hf_folder import open_weights, weight_names
from gdpo_nemo.utils.errors import ConfigError

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)))
"""Values of the 4-bit codes (E2M1). The highest bit is the sign."""
_BIAS = 127
"""Bias of the shared exponents (E8M0)."""
_BLOCKS, _SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors of a quantised weight."""


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of a weight, bfloat16 [experts, 32 * blocks, rows], transposed as in an unquantised folder.

    Args:
        blocks: uint8 [experts, rows, blocks, 16], two codes per byte. The low half of a byte is the first value.
        scales: uint8 [experts, rows, blocks], exponents.
    """
    out = torch.empty(*blocks.shape[:3], 32, dtype=torch.bfloat16)
    for expert, codes in enumerate(blocks):  # indices need 8 times the memory of the codes
        exponents = scales[expert].int()[..., None] - _BIAS
        out[expert, ..., 0::2] = torch.ldexp(_VALUES[(codes & 15).long()], exponents)
        out[expert, ..., 1::2] = torch.ldexp(_VALUES[(codes >> 4).long()], exponents)
    return out.flatten(2).transpose(1, 2).contiguous()


def mxfp4_weights(folder: Path, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each weight in a Hugging Face folder, with quantised weights in bfloat16.

    Args:
        key: config key or option that specifies the folder, for messages.

    Raises:
        ConfigError: if the tensors of a quantised weight are missing or do not match.
    """
    read = open_weights(folder, finite=True)
    for name in weight_names(folder):
        if name.endswith(_SCALES):
            continue
        tensor = read(name)
        if name.endswith(_BLOCKS):
            name = name.removesuffix(_BLOCKS)
            try:
                scales = read(name + _SCALES)
            except KeyError:
                raise ConfigError(f"{key}: {folder} lacks {name}{_SCALES}") from None
            if tensor.dim() != 4 or tensor.shape[:3] != scales.shape or tensor.size(3) != 16:
                shapes = f"{list(tensor.shape)} and {list(scales.shape)}"
                raise ConfigError(f"{key}: {folder}: {name} is not a valid MXFP4 weight (shapes {shapes})")
            tensor = dequantised(tensor, scales)
        yield name, tensor
