"""Images of an engine's requests: received once, decoded and processed once, then added to prompts by position.

vLLM searches prompts for placeholder tokens, so it would take a placeholder that the policy sampled for an image. The
requests therefore name the positions of their images, and vLLM processes each image by itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from gdpo_nemo.data.image_processor import decoded
from gdpo_nemo.data.images import Image, Images
from gdpo_nemo.utils.errors import RunError

_ENCODED_BYTES = 256 << 20
"""Maximum size of the encoded images that an engine keeps."""
_PROCESSED_BYTES = 512 << 20
"""Maximum size of the pixel values that an engine keeps, in addition to those of unfinished requests."""


class _Processed(NamedTuple):
    """An image as input of vLLM's model."""

    item: Any
    """vLLM's ``MultiModalKwargsItem``."""
    tokens: int
    """Number of placeholders that vLLM's model needs."""
    nbytes: int
    """Size of the pixel values."""


class ImagePrompt(NamedTuple):
    """Images of a prompt as arguments of vLLM's ``mm_input``."""

    mm_kwargs: Any
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Any]]


class _Recent[T]:
    """Most recently used values, up to a total size in bytes."""

    def __init__(self, limit: int):
        self._limit = limit
        self._nbytes = 0
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def get(self, key: str) -> T | None:
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: str, value: T, nbytes: int) -> None:
        if self.get(key) is not None:
            return
        self._values[key] = value, nbytes
        self._nbytes += nbytes
        while self._nbytes > self._limit and len(self._values) > 1:
            self._nbytes -= self._values.popitem(last=False)[1][1]


class EngineImages:
    """Images of an engine, by their hash. Thread-safe.

    Args:
        renderer: vLLM's renderer, which has the model's image processor.
        placeholder: token id of a placeholder.
    """

    def __init__(self, renderer: Any, placeholder: int):
        self._renderer = renderer
        self._placeholder = placeholder
        self._lock = threading.Lock()
        self._encoded: _Recent[Image] = _Recent(_ENCODED_BYTES)
        self._processed: _Recent[_Processed] = _Recent(_PROCESSED_BYTES)

    def prompts(self, requests: Iterable[Images]) -> tuple[list[ImagePrompt | None], list[str]]:
        """Return vLLM's arguments for the images of each prompt, or the hashes of the images that the engine lacks.

        An image without data was received earlier. All requests of a call share the data.

        Returns:
            (arguments of each request, None if it has no images; []), or ([], missing hashes).

        Raises:
            RunError: if vLLM's model needs another number of tokens for an image than the request has.
        """
        requests = list(requests)
        with self._lock:
            sent = {}
            wanted = {}
            for images in requests:
                for image, _, _ in images:
                    wanted[image.sha256] = image
                    if image.data:
                        sent[image.sha256] = image
            for image in sent.values():
                self._encoded.put(image.sha256, image, len(image.data))
            missing = [sha256 for sha256 in wanted if sha256 not in sent and self._encoded.get(sha256) is None]
            if missing:
                return [], missing
            known = {sha256: self._one(sent.get(sha256) or self._encoded.get(sha256)) for sha256 in wanted}
        return [_prompt(images, known) if images else None for images in requests], []

    def _one(self, image: Image | None) -> _Processed:
        assert image is not None
        found = self._processed.get(image.sha256)
        if found is None:
            found = self._process(image)
            self._processed.put(image.sha256, found, found.nbytes)
        return found

    def _process(self, image: Image) -> _Processed:
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(
            prompt_token_ids=[self._placeholder],
            multi_modal_data={"image": [decoded(image)]},
            multi_modal_uuids={"image": [image.sha256]},
        )
        rendered = self._renderer.render_cmpl([prompt])[0]
        token_ids = rendered["prompt_token_ids"]
        if set(token_ids) != {self._placeholder}:
            raise RunError("images of this model are not supported: vLLM adds tokens other than placeholders")
        item = rendered["mm_kwargs"]["image"][0]
        return _Processed(item, len(token_ids), sum(tensor.nbytes for tensor in item.get_data().values()))


def _prompt(images: Images, known: dict[str, _Processed]) -> ImagePrompt:
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    for image, start, tokens in images:
        if known[image.sha256].tokens != tokens:
            raise RunError(
                f"vLLM needs {known[image.sha256].tokens} tokens for an image of {image.width}x{image.height} pixels, "
                f"but the prompt has {tokens} at position {start}"
            )
    return ImagePrompt(
        MultiModalKwargsItems({"image": [known[image.sha256].item for image, _, _ in images]}),
        {"image": [image.sha256 for image, _, _ in images]},
        {"image": [PlaceholderRange(offset=start, length=tokens) for _, start, tokens in images]},
    )
