"""Tiny random vision-language models with tokenizer, chat template and processor, made without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Special tokens, whose ids follow the 256 bytes."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template with the placeholders of Qwen's models."""
KINDS = ("qwen2_5_vl", "qwen3_vl")
VOCABULARY = 272
"""Number of rows of the embedding, divisible by 16 so that ranks can split it."""


def token_id(text: str) -> int:
    """Return the id of a special token."""
    return 256 + SPECIAL.index(text)


def write_tiny_vision(folder: Path, kind: str, seed: int = 0, **text: Any) -> Path:
    """Write a random model in float32.

    Args:
        kind: element of ``KINDS``.
        text: fields of the text model's config that replace the defaults.
    """
    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
        **text,
    }
    ids = {
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "tie_word_embeddings": fields["tie_word_embeddings"],
    }
    common = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": fields["hidden_size"],
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if kind == "qwen2_5_vl":
        vision = {**common, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=fields, vision_config=vision, **ids))
        processor = Qwen2_5_VLProcessor(
            Qwen2VLImageProcessor(patch_size=14, size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}),
            tokenizer,
            Qwen2VLVideoProcessor(patch_size=14),
            chat_template=TEMPLATE,
        )
    else:
        fields["rope_parameters"]["mrope_interleaved"] = True
        fields["head_dim"] = 32
        vision = {**common, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=fields, vision_config=vision, **ids))
        halves = [0.5] * 3
        size = {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 64}
        processor = Qwen3VLProcessor(
            Qwen2VLImageProcessor(patch_size=16, image_mean=halves, image_std=halves, size=size),
            tokenizer,
            Qwen3VLVideoProcessor(patch_size=16),
            chat_template=TEMPLATE,
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough for a wrong image to change log-probs by more than 0.1, and small enough for vLLM's float32
            # rounding to stay below 1e-5.
            if parameter.ndim > 1:
                parameter.normal_(0, 0.06)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.05)
    model.generation_config.eos_token_id = token_id("<|im_end|>")
    model.generation_config.pad_token_id = token_id("<|endoftext|>")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))  # in this order, so that ``token_id`` holds
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    )


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Return an image of random pixels, which compresses badly and differs from any other seed's everywhere."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
