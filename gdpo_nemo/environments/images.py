"""Images in the arguments of reward functions, judges and tools.

Trajectories contain encoded images (``data.images.Image``), which are sent to a worker once per call. User-defined code
gets PIL images, which decode their pixels when the pixels are read.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from gdpo_nemo.data.images import Image, Images


def with_pictures(value: Any, opened: dict[str, Any]) -> Any:
    """Return a value with PIL images in place of its encoded images.

    Args:
        value: a value of nested lists, tuples and mappings. Containers are copied.
        opened: PIL images by hash, which this call uses and extends. Equal images become the same object.
    """
    if isinstance(value, Image):
        if value.sha256 not in opened:
            from PIL import Image as Pillow

            opened[value.sha256] = Pillow.open(io.BytesIO(value.data))
        return opened[value.sha256]
    if isinstance(value, Mapping):
        return {key: with_pictures(inner, opened) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_pictures(inner, opened) for inner in value]
    return value


def filled(messages: Iterable[Mapping[str, Any]], images: Images) -> list[dict[str, Any]]:
    """Return messages in TRL's form: each content is a list of parts, and image parts contain their image.

    Args:
        messages: messages whose image parts are ``{"type": "image"}``.
        images: images of the messages, in order.

    Raises:
        ValueError: if the numbers of image parts and images differ.
    """
    left = [placed.image for placed in images][::-1]
    found = []
    for message in messages:
        content = message.get("content")
        parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        for index, part in enumerate(parts):
            if is_image_part(part) and left:
                parts[index] = {**part, "image": left.pop()}
        found.append({**message, "content": parts if parts else content})
    if left or any("image" not in part for part in _image_parts(found)):
        raise ValueError("the numbers of image parts and images differ")
    return found


def is_image_part(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def images_in(messages: Any) -> list[Image]:
    """Return the images in messages from ``filled``, in order. Text has no images."""
    return [] if isinstance(messages, str) else [part["image"] for part in _image_parts(messages)]


def _image_parts(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        yield from filter(is_image_part, content if isinstance(content, Sequence) else ())


@lru_cache(maxsize=64)
def data_url(image: Image) -> str:
    """Return an image as a data URL. The results for the last 64 images are stored."""
    kind = "jpeg" if image.data.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(image.data).decode()}"
