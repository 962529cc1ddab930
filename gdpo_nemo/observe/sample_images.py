"""Images of a run's samples: one file per distinct image in ``images/``, and labels in place of placeholders in texts.

A file is named by the SHA-256 of its content, and is written before the sample file that refers to it. The folder is as
bounded as the samples: it contains each image of the written samples once, and ``rollout.save_groups`` limits the
samples. A resume with ``rollout.replay_buffer`` and ``gdpo-nemo replay`` need all of these images.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gdpo_nemo.data.images import Image, Images, PlacedImage
from gdpo_nemo.data.records import Group
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.files import read_bytes, write_whole

FOLDER = "images"
_PNG = b"\x89PNG"
_SUFFIXES = (".png", ".jpg")
_HASH = re.compile("[0-9a-f]{64}")
_PLACEHOLDERS = re.compile(r"(?:<\|vision_start\|>)?(?:<\|image_pad\|>)+(?:<\|vision_end\|>)?")
"""Placeholders of one image, as the chat templates of all families with a vision tower render them."""

ImageRow = Mapping[str, Any]
"""Entry of the column ``images`` of a sample file: sha256, width, height, start, tokens."""


def images_of(groups: Iterable[Group]) -> dict[str, Image]:
    """Return the distinct images of all prompts and trajectories, by hash."""
    found = {}
    for group in groups:
        for trajectory in group.trajectories:
            for placed in (*trajectory.prompt.images, *trajectory.images):
                found[placed.image.sha256] = placed.image
    return found


def store_images(folder: Path, images: Iterable[Image]) -> None:
    """Write the images that the folder lacks. Each file is written atomically and synced to disk.

    Raises:
        OSError: if a file cannot be written.
    """
    for image in images:
        path = folder / (image.sha256 + _SUFFIXES[not image.data.startswith(_PNG)])
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, image.data, sync=True)


def image_path(run_dir: str | Path, sha256: str) -> Path | None:
    """Return the path of a stored image, or None if the run folder does not contain it."""
    paths = [Path(run_dir) / FOLDER / (sha256 + suffix) for suffix in _SUFFIXES]
    return next((path for path in paths if _HASH.fullmatch(sha256) and path.is_file()), None)


def read_stored(run_dir: str | Path, sha256: str) -> bytes:
    """Return the content of a stored image.

    Raises:
        RunError: if the image is missing, cannot be read, or differs from its hash.
    """
    path = image_path(run_dir, sha256)
    if path is None:
        raise RunError(f"{Path(run_dir) / FOLDER}: image {sha256} not found")
    try:
        content = read_bytes(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise RunError(f"{path}: damaged; its content does not have this SHA-256")
    return content


class RecordedImages:
    """Images of recorded samples. A file is read when its image is first used.

    Args:
        run_dir: run folder. None leaves ``Image.data`` empty, for readers that do not need the content.
    """

    def __init__(self, run_dir: Path | None = None):
        self._run_dir = run_dir
        self._known: dict[str, Image] = {}

    def placed(self, rows: Sequence[ImageRow] | None) -> Images:
        """Return the images of a sample from its column ``images``.

        Raises:
            RunError: if a file is missing or damaged.
            KeyError, TypeError: if ``rows`` is not such a column.
        """
        return tuple(PlacedImage(self._image(row), row["start"], row["tokens"]) for row in rows or ())

    def _image(self, row: ImageRow) -> Image:
        name = row["sha256"]
        if name not in self._known:
            content = b"" if self._run_dir is None else read_stored(self._run_dir, name)
            self._known[name] = Image(name, row["width"], row["height"], content)
        return self._known[name]


def split_images(images: Images, prompt_tokens: int) -> tuple[Images, Images]:
    """Return the images of the prompt and those of the completion."""
    count = sum(placed.start < prompt_tokens for placed in images)
    return images[:count], images[count:]


def image_rows(images: Images) -> list[dict[str, Any]] | None:
    """Return the column ``images`` of a sample, or None without images."""
    rows = []
    for image, start, tokens in images:
        size = {"width": image.width, "height": image.height}
        rows.append({"sha256": image.sha256, **size, "start": start, "tokens": tokens})
    return rows or None


def label(image: Image) -> str:
    """Return a short text in place of an image, such as ``[image 64×64 3f2a…]``."""
    return f"[image {image.width}×{image.height} {image.sha256[:4]}…]"


def with_labels(text: str, images: Images) -> str:
    """Replace the placeholders of each image in a prompt's text by the image's label, for display.

    A text without images is returned unchanged, because placeholders in it are ordinary text.
    """
    labels = iter([label(placed.image) for placed in images])
    return _PLACEHOLDERS.sub(lambda match: next(labels, match[0]), text) if images else text
