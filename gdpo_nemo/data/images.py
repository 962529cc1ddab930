"""Images of prompts and of observations: their reading, encoded bytes that travel, and the tokens that they occupy."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gdpo_nemo.utils.errors import first_line
from gdpo_nemo.utils.files import read_bytes, real_path

if TYPE_CHECKING:
    from gdpo_nemo.config.sections import ImagesConfig


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


_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
"""Formats that Pillow decodes itself. Other formats start programs (EPS), or contain no pixels."""
_RETAINED = ("PNG", "JPEG", "MPO")
"""Formats whose files are retained. Pillow opens a JPEG file with several images as MPO."""
_SHORTEST_SIDE = 4
_LARGEST_RATIO = 200
"""Image processors refuse larger aspect ratios."""
_ORIENTATION = 0x0112
"""EXIF tag of the orientation. 1 means upright."""
_SHORTEST_BASE64 = 64
"""Minimum number of characters of an image in base64. Shorter texts are paths."""
_TIMEOUT_S = 30.0
"""Maximum time in seconds that a server may take to send a part of an image."""


def largest_file(limits: ImagesConfig) -> int:
    """Return the maximum number of bytes of an encoded image: 4 per pixel of ``max_pixels``, and 64 KiB of header."""
    return 4 * limits.max_pixels + (1 << 16)


def read_image(value: Any, limits: ImagesConfig, folder: Path | None = None) -> Image:
    """Read an image, rotate it according to its EXIF data, and convert it to RGB.

    The size is checked before pixels are decoded. Animations become their first frame. PNG and JPEG files that are
    upright and in RGB are retained as they are. Other images are encoded as PNG.

    Args:
        value: a PIL image, encoded bytes, a mapping with ``bytes`` or ``path`` (``datasets``) or ``url`` (OpenAI), a
            data URL, base64 text, a path, or an address if ``limits.download`` is set. An ``Image`` is returned as is.
        limits: the section ``data.images``.
        folder: folder of paths. A path or link that leads out of the folder is refused. None refuses all paths.

    Raises:
        ValueError: if the value is not an image, is damaged, or exceeds a limit. The message has no subject.
    """
    if isinstance(value, Image):
        return value
    from PIL import Image as Pillow, UnidentifiedImageError

    if isinstance(value, Pillow.Image):
        _check_size(value, limits)
        return _checked(value, None)
    data = _encoded(value, limits, folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, which are checked here
            opened = Pillow.open(io.BytesIO(data), formats=_FORMATS)
    except Pillow.DecompressionBombError:
        raise ValueError(f"has too many pixels; the maximum is {limits.max_pixels} (data.images.max_pixels)") from None
    except UnidentifiedImageError:
        raise ValueError(f"is not an image; supported formats: {', '.join(_FORMATS)}") from None
    except Exception as error:  # noqa: BLE001 - damaged files raise many exception types
        raise _damaged(error) from None
    with opened:
        _check_size(opened, limits)
        return _checked(opened, data)


def _check_size(image: Any, limits: ImagesConfig) -> None:
    """Raise ValueError if the size of a PIL image, which may not be decoded yet, is not supported."""
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ValueError(f"has {width} x {height} pixels; the maximum is {limits.max_pixels} (data.images.max_pixels)")
    if min(width, height) < _SHORTEST_SIDE:
        raise ValueError(f"has {width} x {height} pixels; each side needs at least {_SHORTEST_SIDE}")
    if max(width, height) >= _LARGEST_RATIO * min(width, height):
        raise ValueError(f"has {width} x {height} pixels; the aspect ratio must be less than {_LARGEST_RATIO}")


def _checked(opened: Any, data: bytes | None) -> Image:
    """Decode a PIL image, to check it, and return it with its file's bytes ``data`` if they can be retained."""
    try:
        upright = opened.getexif().get(_ORIENTATION, 1) == 1
        if data is None or not upright or opened.mode != "RGB" or opened.format not in _RETAINED:
            return _as_png(opened)
        width, height = opened.size
        opened.draft("RGB", (1, 1))  # the whole file is read, but of JPEG only a small image is computed
        opened.load()
        return Image(hashlib.sha256(data).hexdigest(), width, height, data)
    except Exception as error:  # noqa: BLE001 - damaged files raise many exception types
        raise _damaged(error) from None


def _as_png(opened: Any) -> Image:
    from PIL import ImageOps

    pixels = ImageOps.exif_transpose(opened).convert("RGB")
    pixels.info.clear()  # metadata would change the hash
    buffer = io.BytesIO()
    pixels.save(buffer, "PNG", compress_level=1)
    data = buffer.getvalue()
    return Image(hashlib.sha256(data).hexdigest(), *pixels.size, data)


def _damaged(error: Exception) -> ValueError:
    return ValueError(f"is damaged ({first_line(error)})")


def _encoded(value: Any, limits: ImagesConfig, folder: Path | None) -> bytes:
    """Return the encoded bytes of any form of an image but PIL. Raises ValueError."""
    largest = largest_file(limits)
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
    if isinstance(value, (str, Path)):
        value = _from_text(str(value), limits, folder)
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise ValueError(
            "must be an image: bytes, a path, a data URL, base64 text, a PIL image, or a mapping with bytes or path; "
            f"got {type(value).__name__}"
        )
    if len(value) > largest:
        raise _too_large(limits)
    return bytes(value)


def _too_large(limits: ImagesConfig) -> ValueError:
    return ValueError(f"has more than {largest_file(limits) >> 20} MiB, 4 bytes per pixel of data.images.max_pixels")


def _from_text(text: str, limits: ImagesConfig, folder: Path | None) -> bytes:
    if len(text) > largest_file(limits) * 4 // 3 + 1024:  # before base64 is decoded
        raise _too_large(limits)
    if text.startswith("data:"):
        head, _, content = text.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("is a data URL without base64")
        return _from_base64(content, "is a data URL with invalid base64")
    if text.lower().startswith(("http://", "https://")):
        if not limits.download:
            raise ValueError("is an address; download the image, or set data.images.download: true")
        return _downloaded(text, limits)
    if folder is None:
        return _from_base64(text, "is neither base64 nor a data URL; a path requires data.images.folder")
    return _from_path(text, limits, folder)


def _from_path(text: str, limits: ImagesConfig, folder: Path) -> bytes:
    path = folder / text
    if not os.path.lexists(path):
        if len(text) < _SHORTEST_BASE64:
            raise ValueError(f"is not a file in {folder} (data.images.folder): {text!r}")
        return _from_base64(text, f"is neither base64 nor a file in {folder} (data.images.folder)")
    target = real_path(path)
    if not target.is_relative_to(real_path(folder)):
        raise ValueError(f"is outside the folder {folder} (data.images.folder)")
    try:
        return read_bytes(target, largest_file(limits))
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None


def _from_base64(text: str, problem: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        raise ValueError(problem) from None


def _downloaded(address: str, limits: ImagesConfig) -> bytes:
    from http.client import HTTPException
    from urllib.request import urlopen

    try:
        with urlopen(address, timeout=_TIMEOUT_S) as reply:
            data: bytes = reply.read(largest_file(limits) + 1)
    except (OSError, HTTPException, ValueError) as error:
        raise ValueError(f"cannot be downloaded ({first_line(error)})") from None
    return data
