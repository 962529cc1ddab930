"""Images of many sequences in a fixed number of arrays, each distinct image once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gdpo_nemo.data.images import Image, Images, PlacedImage


@dataclass(frozen=True)
class ImageTable:
    """Distinct images of sequences, and their positions."""

    hashes: tuple[str, ...]
    """Hash of each image."""
    sizes: np.ndarray
    """int64 [images, 3]: width, height and number of bytes of each image."""
    data: np.ndarray | None
    """uint8 [bytes of all images]: encoded images. None on ranks that need only the sizes."""
    placed: np.ndarray
    """int64 [placed images, 4]: sequence, image, first placeholder and number of placeholders, in the order of the
    sequences."""

    @classmethod
    def of(cls, images: Sequence[Images]) -> ImageTable | None:
        """Collect the images of sequences. Return None if no sequence has images.

        Args:
            images: images of each sequence.
        """
        indices: dict[str, int] = {}
        distinct: list[Image] = []
        placed = []
        for sequence, of_sequence in enumerate(images):
            for image, start, tokens in of_sequence:
                index = indices.setdefault(image.sha256, len(distinct))
                if index == len(distinct):
                    distinct.append(image)
                placed.append((sequence, index, start, tokens))
        if not placed:
            return None
        sizes = np.array([(image.width, image.height, len(image.data)) for image in distinct], np.int64)
        data = np.frombuffer(b"".join(image.data for image in distinct), np.uint8)
        return cls(tuple(indices), sizes, data, np.array(placed, np.int64))

    def images(self, count: int) -> list[Images]:
        """Return the images of each of ``count`` sequences. Equal images are the same object.

        Images have no data if the table has none.
        """
        ends = np.cumsum(self.sizes[:, 2]).tolist()
        distinct = []
        for sha256, (width, height, nbytes), end in zip(self.hashes, self.sizes.tolist(), ends):
            data = b"" if self.data is None else self.data[end - nbytes : end].tobytes()
            distinct.append(Image(sha256, width, height, data))
        found: list[list[PlacedImage]] = [[] for _ in range(count)]
        for sequence, index, start, tokens in self.placed.tolist():
            found[sequence].append(PlacedImage(distinct[index], start, tokens))
        return list(map(tuple, found))
