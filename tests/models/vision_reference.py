"""Prompts with images for tiny vision-language models, and transformers' log-probs of their tokens."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from tiny_vision import VOCABULARY, picture, token_id
from transformers import AutoModelForImageTextToText

from gdpo_nemo.data.image_processor import ImageProcessor
from gdpo_nemo.data.images import Image, Images
from gdpo_nemo.models.hf_folder import open_weights, weight_names
from gdpo_nemo.weights.manifest import pack

PLACEHOLDER = token_id("<|image_pad|>")


def image(width: int, height: int, seed: int) -> Image:
    """Return an encoded image of random pixels."""
    file = io.BytesIO()
    picture(width, height, seed).save(file, "PNG")
    return Image(hashlib.sha256(file.getvalue()).hexdigest(), width, height, file.getvalue())


class Reference:
    """transformers' model of a folder."""

    def __init__(self, folder: Path, changed: Path | None = None):
        """Read a model. With ``changed``, write another model there, whose tower differs, and use it instead."""
        self.processor = ImageProcessor(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        if changed is not None:
            with torch.no_grad():
                for parameter in self.model.model.visual.parameters():
                    parameter.mul_(1.2)
            self.model.save_pretrained(changed)
        self._folder = str(changed or folder)

    def prompt(self, seed: int, *images: Image) -> tuple[np.ndarray, Images]:
        """Return a random prompt with images, as (token ids, placed images)."""
        rng = np.random.default_rng(seed)
        ids = [*rng.integers(2, 250, 9)]
        for _ in images:
            ids += [token_id("<|vision_start|>"), PLACEHOLDER, token_id("<|vision_end|>"), *rng.integers(2, 250, 5)]
        return self.processor.place(np.array(ids, np.int32), images)

    def logprobs(self, token_ids: np.ndarray, images: Images) -> np.ndarray:
        """Return the log-probs of all tokens except the first.

        transformers takes every placeholder for a part of an image. A placeholder outside images is therefore replaced
        by an absent token, which gets the placeholder's embedding.
        """
        types = np.zeros((1, len(token_ids)), np.int64)
        for placed in images:
            types[0, placed.start : placed.stop] = 1
        absent = next(token for token in range(VOCABULARY) if token not in token_ids)
        ids = np.where((token_ids == PLACEHOLDER) & (types == 0), absent, token_ids).astype(np.int64)
        inputs = {"input_ids": torch.tensor(ids), "mm_token_type_ids": torch.tensor(types)}
        if images:
            values, grids = self.processor.pixel_values([placed.image for placed in images])
            inputs |= {"pixel_values": values, "image_grid_thw": grids}
        with torch.no_grad():
            embedding = self.model.get_input_embeddings().weight
            kept = embedding[absent].clone()
            embedding[absent] = embedding[PLACEHOLDER]
            logits = self.model(attention_mask=torch.ones_like(inputs["input_ids"]), **inputs).logits[0, :-1]
            embedding[absent] = kept
        targets = torch.tensor(token_ids[1:].astype(np.int64))[:, None]
        return torch.log_softmax(logits.double(), -1).gather(1, targets)[:, 0].numpy()

    def packed(self, version: int):
        """Return (manifest, buffer) of an update with the model's weights."""
        read = open_weights(self._folder)
        return pack(((name, read(name)) for name in weight_names(self._folder)), version)
