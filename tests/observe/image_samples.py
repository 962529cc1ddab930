"""Groups whose prompts and turns contain images."""

from __future__ import annotations

import hashlib
import io

import numpy as np
from PIL import Image as Pillow

from gdpo_nemo.data.images import Image, PlacedImage
from gdpo_nemo.data.records import Group, Prompt, Trajectory

PLACEHOLDER = 5
"""Token id of a placeholder."""


def image(width: int, height: int, seed: int, kind: str = "PNG") -> Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Pillow.fromarray(pixels).save(out, kind)
    return Image(hashlib.sha256(out.getvalue()).hexdigest(), width, height, out.getvalue())


FIRST, SECOND, RESULT = image(64, 48, 0), image(32, 200, 1, "JPEG"), image(400, 100, 2)


def image_group(position: int = 0, version: int = 0, images: tuple[Image, Image] = (FIRST, SECOND)) -> Group:
    """Return two samples of a prompt with two images. A tool returned ``RESULT`` in the second sample."""
    ids = np.array([1, *[PLACEHOLDER] * 3, 2, *[PLACEHOLDER] * 2, 3], np.int32)
    text = "A <|vision_start|><|image_pad|><|vision_end|> and <|vision_start|><|image_pad|><|vision_end|>?"
    placed = (PlacedImage(images[0], 1, 3), PlacedImage(images[1], 5, 2))
    prompt = Prompt(f"train/{position}", ids, text, "digit_sort", images=placed)
    # The policy samples a placeholder, which is text.
    first = Trajectory(
        prompt, 0, np.array([7, PLACEHOLDER, 8], np.int32), np.full(3, -0.5, np.float32), version, "b", "stop",
        {"a": 1.0},
    )  # fmt: skip
    completion = np.array([7, 6, *[PLACEHOLDER] * 4, 6, 8], np.int32)
    mask = np.array([True, *[False] * 6, True])
    logprobs = np.where(mask, -0.25, np.nan).astype(np.float32)
    second = Trajectory(
        prompt, 1, completion, logprobs, version, "cd", "stop", {"a": 0.0}, loss_mask=mask, turns=2,
        turn_tokens=(1, 1), images=(PlacedImage(RESULT, len(ids) + 2, 4),),
    )  # fmt: skip
    return Group(prompt, [first, second], position)
