"""Parts of tensors, which the policy's ranks send separately, and their assembly in an engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from gdpo_nemo.utils.errors import RunError


class Region(NamedTuple):
    """Position of a rectangular part in a tensor."""

    start: tuple[int, ...]
    """First index of the part in every dimension."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""


class Piece(NamedTuple):
    """A tensor under its Hugging Face name, or a rectangular part of it."""

    name: str
    values: torch.Tensor
    region: Region | None = None
    """Position of the part, or None for a whole tensor."""


def assembled(pieces: Iterable[Piece]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of every tensor as soon as all of its parts have arrived.

    Whole tensors are yielded unchanged. Parts are copied to a new tensor on their device.

    Raises:
        RunError: if parts of a tensor are missing at the end.
    """
    incomplete: dict[str, tuple[torch.Tensor, int]] = {}
    for name, values, region in pieces:
        if region is None:
            yield name, values
            continue
        tensor, missing = incomplete.pop(name, (None, math.prod(region.whole)))
        if tensor is None:
            tensor = values.new_empty(region.whole)
        tensor[_slices(region, values)] = values
        if missing > values.numel():
            incomplete[name] = tensor, missing - values.numel()
        else:
            yield name, tensor
    if incomplete:
        raise RunError(f"parts of {len(incomplete)} tensors are missing, for instance of {min(incomplete)}")


def _slices(region: Region, values: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(region.start, values.shape, strict=True))
