"""Images that an engine has received, so that the data of an image is sent once to each engine.

The sender only remembers what it sent. An engine that no longer has an image, or has not received it yet, returns the
image's hash from ``Engine.submit``, and the requests are sent again with its data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gdpo_nemo.generation.requests import EngineRequest, SampleRequest

_MAX_HASHES = 100_000
"""Maximum number of remembered hashes. Beyond it, all are forgotten, and images are sent once more."""


class SentImages:
    """Hashes of the images that were sent to an engine."""

    def __init__(self) -> None:
        self._hashes: set[str] = set()

    def clear(self) -> None:
        """Forget all images, because the engine was replaced."""
        self._hashes.clear()

    def forget(self, hashes: Iterable[str]) -> None:
        """Forget images that the engine does not have."""
        self._hashes.difference_update(hashes)

    def without_sent(self, request: EngineRequest) -> EngineRequest:
        """Return a request without the data of images that were sent, and remember its other images as sent."""
        if not isinstance(request, SampleRequest) or not request.images:
            return request
        if len(self._hashes) > _MAX_HASHES:
            self._hashes.clear()
        images = []
        for placed in request.images:
            if placed.image.sha256 in self._hashes:
                placed = placed._replace(image=replace(placed.image, data=b""))
            self._hashes.add(placed.image.sha256)
            images.append(placed)
        return replace(request, images=tuple(images))
