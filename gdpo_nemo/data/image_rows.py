"""Images in packed micro-batches: positions for the rotary embedding, and the rows of a pack that images fill.

Both follow only from the placed images of a sequence. A placeholder token outside of them is text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gdpo_nemo.data.images import Image, Images

Grid = Callable[[Image], tuple[int, int]]
"""Function that returns the rows and columns of an image's placeholders."""


@dataclass
class ImageRows:
    """Images of one rank's part of a micro-batch, and the rows of the pack to which their features belong."""

    images: list[Image]
    """Distinct images with at least one placeholder among the local tokens."""
    rows: np.ndarray
    """int64 [placeholders]: index of each placeholder in the local tokens."""
    cells: np.ndarray
    """int64 [placeholders]: index of its feature in the concatenated features of ``images``."""


def rope_positions(tokens: int, images: Images, grid: Grid) -> np.ndarray:
    """Return the positions of a sequence's tokens on the three axes of M-RoPE: int64 [tokens, time, row and column].

    A token of text advances all axes by 1. The placeholders of an image have their row and column in the image, and the
    text after it continues one position behind the largest of them (arXiv 2409.12191, section 2.1).

    Raises:
        ValueError: if the number of an image's placeholders does not match its grid.
    """
    positions = np.empty((tokens, 3), np.int64)
    done = position = 0
    for placed in images:
        text = placed.start - done
        positions[done : placed.start] = position + np.arange(text)[:, None]
        position += text
        rows, columns = grid(placed.image)
        if rows * columns != placed.tokens:
            raise ValueError(f"an image of {rows} x {columns} tokens has {placed.tokens} placeholders")
        axes = np.zeros(placed.tokens, np.int64), *np.divmod(np.arange(placed.tokens), columns)
        positions[placed.start : placed.stop] = position + np.stack(axes, 1)
        position += max(rows, columns)
        done = placed.stop
    positions[done:] = position + np.arange(tokens - done)[:, None]
    return positions


class Cut(NamedTuple):
    """Part of a sequence that a rank of a context-parallel group processes."""

    shared: int
    """Number of leading tokens that belong to the previous sequence."""
    length: int
    """Number of the other tokens, including padding."""
    local: np.ndarray
    """int64 [local tokens]: indices of the rank's tokens among these tokens."""

    def rows(self, values: np.ndarray, fill: int) -> np.ndarray:
        """Return the rank's rows [local tokens, ...], given values [tokens, ...] of the sequence.

        Args:
            fill: value of the padding.
        """
        padded = np.full((self.length, *values.shape[1:]), fill, values.dtype)
        padded[: len(values) - self.shared] = values[self.shared :]
        rows: np.ndarray = padded[self.local]
        return rows


class ImagePacker:
    """Collects positions and images of the sequences of a micro-batch, in the order of the pack."""

    def __init__(self, grid: Grid):
        self._grid = grid
        self._first: dict[Image, int] = {}
        """Index of the first feature of each distinct image in the features of all images."""
        self._tokens: list[int] = []
        """Number of placeholders of each distinct image."""
        self._positions: list[np.ndarray] = []
        self._cells: list[np.ndarray] = []

    def add(self, tokens: int, images: Images, cut: Cut) -> None:
        """Add a sequence of ``tokens`` tokens.

        Raises:
            ValueError: see ``rope_positions``.
        """
        cells = np.full(tokens, -1, np.int64)
        for placed in images:
            if placed.image not in self._first:
                self._first[placed.image] = sum(self._tokens)
                self._tokens.append(placed.tokens)
            cells[placed.start : placed.stop] = self._first[placed.image] + np.arange(placed.tokens)
        self._positions.append(cut.rows(rope_positions(tokens, images, self._grid), 0))
        self._cells.append(cut.rows(cells, -1))

    def positions(self) -> np.ndarray:
        """Return the positions of all local tokens: int64 [local tokens, 3]."""
        return np.concatenate(self._positions)

    def images(self) -> ImageRows | None:
        """Return the images of the local tokens, or None if there are none."""
        cells = np.concatenate(self._cells)
        rows = np.flatnonzero(cells >= 0)
        if not len(rows):
            return None
        cells = cells[rows]
        numbers = np.repeat(np.arange(len(self._tokens)), self._tokens)[cells]
        # Under context parallelism, a rank may have no token of some images.
        used, index = np.unique(numbers, return_inverse=True)
        lengths = np.array(self._tokens)[used]
        first = np.array(list(self._first.values()))
        cells += (np.cumsum(lengths) - lengths)[index] - first[numbers]
        images = list(self._first)
        return ImageRows([images[number] for number in used], rows, cells)
