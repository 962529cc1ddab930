"""Images of prompts and of observations: encoded bytes that travel, and the tokens that they occupy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Image:
    """An image as encoded bytes, upright and in RGB. Images with the same ``sha256`` are the same image."""

    sha256: str
    """SHA-256 of ``data`` in hexadecimal."""
    width: int
    height: int
    data: bytes = field(repr=False, compare=False)
    """PNG or JPEG. Empty on ranks that need only the size."""


class PlacedImage(NamedTuple):
    """An image and its placeholder tokens in a sequence.

    These ranges are the only information about where images are: a sampled placeholder token is text.
    """

    image: Image
    start: int
    """Index of the first placeholder in the tokens of prompt and completion."""
    tokens: int
    """Number of placeholders."""

    @property
    def stop(self) -> int:
        """Index after the last placeholder."""
        return self.start + self.tokens


Images = tuple[PlacedImage, ...]
"""Images of a sequence, in the order of their tokens."""


def moved(images: Images, distance: int) -> Images:
    """Return the images with all positions increased by ``distance``."""
    return tuple(placed._replace(start=placed.start + distance) for placed in images)
