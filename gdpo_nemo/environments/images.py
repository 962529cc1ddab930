"""Images in the arguments of reward functions, judges and tools.

Trajectories contain encoded images (``data.images.Image``), which are sent to a worker once per call. User-defined code
gets PIL images, which decode their pixels when the pixels are read.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from gdpo_nemo.data.images import Image, Images, read_image
from gdpo_nemo.data.messages import Message, content_parts, image_in, is_image
from gdpo_nemo.data.records import Prompt


def with_pictures(value: Any, opened: dict[str, Any]) -> Any:
    """Return a value with PIL images in place of its encoded images.

    Args:
        value: a value of nested lists, tuples and mappings, which are copied.
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
        inner = [with_pictures(one, opened) for one in value]
        return inner if isinstance(value, list) else tuple(inner)
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
            if is_image(part) and left:
                parts[index] = {**part, "image": left.pop()}
        found.append({**message, "content": parts if parts else content})
    if left or any("image" not in part for part in _image_parts(found)):
        raise ValueError("the numbers of image parts and images differ")
    return found


def images_in(messages: Any) -> list[Image]:
    """Return the images in messages from ``filled``, in order. Text has no images."""
    return [] if isinstance(messages, str) else [part["image"] for part in _image_parts(messages)]


def _image_parts(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        yield from filter(is_image, content if isinstance(content, Sequence) else ())


def encoded(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages whose image parts are ``{"type": "image", "image": Image}``, to send them to the driver.

    Args:
        messages: messages of an environment. An image has any form that ``read_image`` accepts, except paths and
            addresses.

    Raises:
        ValueError: if an image is invalid.
    """
    from gdpo_nemo.config.sections import ImagesConfig  # the driver checks the limits of the run

    found = []
    for message in messages:
        parts = list(content_parts(message))
        for index, part in enumerate(parts):
            if is_image(part):
                parts[index] = {"type": "image", "image": read_image(image_in(part), ImagesConfig())}
        found.append({**message, "content": parts} if parts else dict(message))
    return found


def is_picture(value: Any) -> bool:
    """Return whether a value is a PIL image, without importing PIL."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def without_bytes(prompt: Prompt) -> Prompt:
    """Return a prompt without its images, also in its columns, for calls that do not read them."""
    if not prompt.images:
        return prompt
    fields = {}
    for name, value in prompt.fields.items():
        values = value if isinstance(value, list) else [value]
        fields[name] = None if any(isinstance(one, Image) for one in values) else value
    return replace(prompt, images=(), fields=fields)


@lru_cache(maxsize=64)
def data_url(image: Image) -> str:
    """Return an image as a data URL. The results for the last 64 images are stored."""
    kind = "jpeg" if image.data.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(image.data).decode()}"
