"""The weights of a GGUF file under their Hugging Face names, one tensor at a time."""

from __future__ import annotations

from typing import Iterator

import numpy as np
import torch

from gdpo_nemo.config.gguf_header import TensorPlace
from gdpo_nemo.config.gguf_model import GgufModel

_PLAIN = {"F32": (np.float32, torch.float32), "F16": (np.float16, torch.float16), "BF16": (np.int16, torch.bfloat16)}


def gguf_weights(model: GgufModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor): quantised ones as the float32 values that they stand for, others in the type
    that the file has them in."""
    data = np.memmap(model.file, mode="r")
    for name, origin in model.weights.items():
        place = model.header.tensors[origin.tensor]
        tensor = _tensor(data, place, origin.expert)
        yield name, tensor if origin.heads is None else _in_halves(tensor, origin.heads)


def _tensor(data: np.memmap, place: TensorPlace, expert: int | None) -> torch.Tensor:
    raw = data[place.start : place.start + place.size]
    shape = place.shape
    if expert is not None:
        raw = raw.reshape(shape[0], -1)[expert]
        shape = shape[1:]
    if place.kind in _PLAIN:
        number, dtype = _PLAIN[place.kind]
        return torch.from_numpy(raw.view(number).copy()).view(dtype).reshape(shape)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = raw.reshape(*shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[place.kind])).reshape(shape)


def _in_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (or a bias) of each head from turns of the two halves, for which llama.cpp rotates neighbours, to one half
    after the other."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
