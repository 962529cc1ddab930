"""Small copies of a run's images, which the page embeds once per image."""

from __future__ import annotations

import base64
import functools
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gdpo_nemo.observe.sample_images import ImageRow, read_stored
from gdpo_nemo.tools.inspect.shards import Scripts
from gdpo_nemo.utils.errors import RunError

SIDE = 160
"""Maximum width and height of a thumbnail in pixels."""
CHARACTERS = 1 << 20
"""Approximate number of characters in a shard of thumbnails."""
_MOST_PIXELS = 1 << 26
"""Larger images have no thumbnail, because a run folder from elsewhere may contain any image."""


class ThumbnailShards:
    """Writer of shards with the thumbnails of distinct images, in order of first appearance.

    An entry is [SHA-256, width, height, PNG in base64], with an empty text in place of a missing or damaged image.
    """

    def __init__(self, scripts: Scripts, run_dir: Path):
        self._scripts = scripts
        self._run_dir = run_dir
        self._numbers: dict[str, int] = {}
        self._entries: list[list[Any]] = []
        self._characters = 0
        self.starts: list[int] = []
        """Number of the first image of each shard."""
        self.missing = 0
        """Number of images without a thumbnail."""

    def places(self, rows: Sequence[ImageRow] | None, prompt_tokens: int) -> list[int] | None:
        """Return [image, start, tokens, image, start, tokens, ...] of a sample, or None without images.

        A start counts from the first token of the completion, so images of the prompt have negative starts.
        """
        found: list[int] = []
        for row in rows or ():
            found += [self._number(row), row["start"] - prompt_tokens, row["tokens"]]
        return found or None

    def _number(self, row: ImageRow) -> int:
        name = row["sha256"]
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            png = thumbnail(self._run_dir, name, (row["width"], row["height"]))
            self.missing += not png
            self._entries.append([name, row["width"], row["height"], png])
            self._characters += len(png) + len(name)
            if self._characters >= CHARACTERS:
                self.close()
        return self._numbers[name]

    def close(self) -> None:
        """Write the current shard, if it has images."""
        if not self._entries:
            return
        self._scripts.write(f"images-{len(self.starts):04d}", self._entries)
        self.starts.append(len(self._numbers) - len(self._entries))
        self._entries, self._characters = [], 0


@functools.lru_cache(maxsize=4096)  # ``--follow`` writes the page again and again
def thumbnail(run_dir: Path, sha256: str, size: tuple[int, int]) -> str:
    """Return a PNG of at most ``SIDE`` pixels per side in base64, or an empty text if the image cannot be read.

    Args:
        size: recorded width and height. An image of another size is not decoded.
    """
    from PIL import Image as Pillow

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, which are checked here
            image = Pillow.open(io.BytesIO(read_stored(run_dir, sha256)), formats=("PNG", "JPEG"))
        if image.size != size or size[0] * size[1] > _MOST_PIXELS:
            return ""
        image.thumbnail((SIDE, SIDE))
        out = io.BytesIO()
        image.convert("RGB").save(out, "PNG", optimize=True)
    except (RunError, OSError, ValueError, SyntaxError, Pillow.DecompressionBombError):
        return ""
    return base64.b64encode(out.getvalue()).decode()
