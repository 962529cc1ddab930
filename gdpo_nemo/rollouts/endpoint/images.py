"""Images in requests to the endpoint. The endpoint opens no connection and no file, so they must be data URLs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from gdpo_nemo.data.image_reader import ImageReader
from gdpo_nemo.data.images import Image

_PARTS = ("image_url", "input_image")
"""Types of image parts: of the Chat Completions API and of the Responses API."""


class RequestImages:
    """Reads images of requests. Thread-safe.

    Clients send all images of a conversation with each turn. Images of stored turns are neither checked nor decoded
    again, and equal images are one object.
    """

    def __init__(self, reader: ImageReader):
        self._reader = reader
        self._known: WeakValueDictionary[bytes, Image] = WeakValueDictionary()
        """Images that a turn or a request in flight uses, by the SHA-256 digest of their URL."""

    @property
    def limit(self) -> int:
        """Maximum number of images of a conversation."""
        return self._reader.limits.max_per_prompt

    def read(self, part: Mapping[str, Any]) -> Image:
        """Return the image of a part. Raises ValueError if it is not a data URL, is damaged, or exceeds a limit."""
        value = part.get("image_url")
        url = value.get("url") if isinstance(value, Mapping) else value
        if not isinstance(url, str) or not url.startswith("data:"):
            raise ValueError(f"must be a data URL, got {str(url)[:40]!r}; the endpoint downloads no images")
        key = hashlib.sha256(url.encode(errors="surrogatepass")).digest()
        image = self._known.get(key)
        if image is None:
            image = self._known[key] = self._reader.read(url)
        return image


def is_image(part: Any) -> bool:
    """Return whether a part of a message in a request is an image."""
    return isinstance(part, Mapping) and part.get("type") in _PARTS


def images_in(message: Mapping[str, Any]) -> list[tuple[int, Image]]:
    """Return the images of a message of a ``ChatRequest``, each with the number of characters of text before it."""
    found = []
    before = 0
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        image = part.get("image")
        if isinstance(image, Image):
            found.append((before, image))
        before += len(part.get("text", ""))
    return found
