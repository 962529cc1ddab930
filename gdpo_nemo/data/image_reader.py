"""Images of prompts and of observations for a vision-language model: their reading, and their places in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.config.model_checks import read_model_config
from gdpo_nemo.data.images import Image, Images, read_image

if TYPE_CHECKING:
    from gdpo_nemo.config.sections import ImagesConfig
    from gdpo_nemo.data.image_processor import ImageProcessor


class ImageReader:
    """Reads images, and replaces their placeholders in tokens.

    The image processor is loaded when the first image is placed.

    Args:
        limits: the section ``data.images``.
        model: Hugging Face folder of a model with a vision tower.
        tokenizer: transformers tokenizer of the model.
    """

    def __init__(self, limits: ImagesConfig, model: str | Path, tokenizer: Any):
        self.limits = limits
        self._model = Path(model)
        token_id = read_model_config(self._model / "config.json")["image_token_id"]
        self._token_id: int = token_id
        self.placeholder = str(tokenizer.convert_ids_to_tokens([token_id])[0])
        """Text of a placeholder."""

    @cached_property
    def processor(self) -> ImageProcessor:
        """Image processor of the model. Raises ConfigError if the folder has none."""
        from gdpo_nemo.data.image_processor import ImageProcessor

        return ImageProcessor(self._model)

    def read(self, value: Any, folder: Path | None = None) -> Image:
        """Return an image as ``read_image`` does, and also check the size of an ``Image``. Raises ValueError."""
        image = read_image(value, self.limits, folder)
        if image.width * image.height > self.limits.max_pixels:
            raise ValueError(
                f"has {image.width} x {image.height} pixels; the maximum is {self.limits.max_pixels} "
                "(data.images.max_pixels)"
            )
        return image

    def is_placeholder(self, token_ids: np.ndarray) -> np.ndarray:
        """Return which tokens are placeholders of images: bool [tokens]."""
        return np.asarray(token_ids == self._token_id)

    def count(self, token_ids: np.ndarray) -> int:
        """Return the number of placeholders."""
        return int(self.is_placeholder(token_ids).sum())

    def place(self, token_ids: np.ndarray, images: Sequence[Image]) -> tuple[np.ndarray, Images]:
        """Replace the placeholder of each image by all its placeholders.

        Args:
            token_ids: int32 [tokens], with one placeholder per image.

        Returns:
            The expanded token ids, and the images with positions that count from the first token.

        Raises:
            ValueError: if the numbers of placeholders and images differ.
        """
        if not images and not self.count(token_ids):
            return token_ids, ()
        return self.processor.place(token_ids, images)

    def as_text(self, text: str) -> str:
        """Return a text in which placeholders are written with a space, so that they are not taken for images."""
        return text.replace(self.placeholder, f"{self.placeholder[:1]} {self.placeholder[1:]}")
