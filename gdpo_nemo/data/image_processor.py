"""The image processor of a model: numbers of placeholder tokens from sizes, and pixel values from encoded images."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.data.images import Image, Images, PlacedImage
from gdpo_nemo.utils.errors import ConfigError, first_line
from gdpo_nemo.utils.progress import import_transformers


class ImageProcessor:
    """transformers' image processor of a model's folder. vLLM uses the same class, so that pixel values are equal.

    Args:
        folder: Hugging Face folder with processor_config.json or preprocessor_config.json.
        key: config key of the folder, for messages.

    Raises:
        ConfigError: if the folder has no image processor.
    """

    def __init__(self, folder: str | Path, key: str = "policy.model_name"):
        import_transformers()
        from transformers import AutoImageProcessor

        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(folder)
        except Exception as error:  # noqa: BLE001 - damaged files raise many exception types
            raise ConfigError(f"{key}: no image processor in {folder} ({first_line(error)})") from None
        content = json.loads((Path(folder) / "config.json").read_text())
        self.placeholder: int = content["image_token_id"]
        """Token id of a placeholder."""

    def grid(self, image: Image) -> tuple[int, int, int]:
        """Return the numbers of frames, rows and columns of patches of an image, from its size only."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        p = self._processor
        factor = p.patch_size * p.merge_size
        height, width = smart_resize(image.height, image.width, factor, p.size["shortest_edge"], p.size["longest_edge"])
        return 1, height // p.patch_size, width // p.patch_size

    def tokens(self, image: Image) -> int:
        """Return the number of placeholder tokens of an image, from its size only."""
        frames, rows, columns = self.grid(image)
        return int(frames * rows * columns // self._processor.merge_size**2)

    def place(self, token_ids: np.ndarray, images: Sequence[Image], first: int = 0) -> tuple[np.ndarray, Images]:
        """Replace each placeholder by as many placeholders as its image has tokens.

        Args:
            token_ids: int32 [tokens], with one placeholder per image.
            first: index of the first token in the sequence, to which the positions refer.

        Returns:
            The expanded token ids, and the positions of the images.

        Raises:
            ValueError: if the numbers of placeholders and images differ.
        """
        found = np.flatnonzero(token_ids == self.placeholder)
        if len(found) != len(images):
            raise ValueError(f"{len(found)} placeholders of images, but {len(images)} images")
        repeats = np.ones(len(token_ids), np.int64)
        repeats[found] = [self.tokens(image) for image in images]
        starts = np.cumsum(repeats) - repeats
        placed = []
        for image, index in zip(images, found):
            placed.append(PlacedImage(image, first + int(starts[index]), int(repeats[index])))
        return np.repeat(token_ids, repeats), tuple(placed)

    def pixel_values(self, images: Sequence[Image]) -> tuple[Any, Any]:
        """Return the inputs of the vision tower.

        Returns:
            float32 [patches of all images, values per patch], and int64 [images, 3]: the grid of each image.
        """
        found = self._processor(images=[decoded(image) for image in images], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]


def decoded(image: Image) -> Any:
    """Return an image as a PIL image in RGB."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(image.data)) as opened:
        return opened.convert("RGB")
