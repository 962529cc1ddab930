"""Create the small initial models of the CPU configs. Configs use these functions as ``policy.model_factory``.

    python examples/make_tiny_model.py results/models/digit_sort_0 --seed 0       a minute on two cores
    python examples/make_tiny_model.py results/models/small_0 --seed 0 --small    a fifth of the size
    python examples/make_tiny_model.py results/models/mixture_0 --seed 0 --mixture  a mixture of experts
    python examples/make_tiny_model.py results/models/dots_0 --seed 0 --dots      images and words
    python examples/make_tiny_model.py results/models/random_0 --seed 0 --random  seconds; untrained

``make_tiny_model`` warms up a random Qwen2 on digit sorting. It uses next-token training with the same Megatron policy
that reinforcement learning uses later. More than half of the texts are wrong on purpose, and as many are malformed or
long. The model thus learns how digits are sorted and what a good completion looks like, but rarely does both at once.
Reinforcement learning then selects these skills; it does not teach them.

The warm-up trains on the first GPU if torch finds one, otherwise on the CPU, and prints the device. The same seed gives
bitwise equal weights on the same device of the same machine with the same number of threads. The output folder is
created atomically.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import string
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

# On a few cores, threads that spin while waiting slow the training down. torch reads this variable during import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    Qwen2Tokenizer,
)

from gdpo_nemo import GdpoError, LossSettings, TrainSequence
from gdpo_nemo.config.schema import MegatronConfig, OptimizerConfig, PolicyConfig, SchedulerConfig
from gdpo_nemo.config.sections import VisionConfig
from gdpo_nemo.data.images import Images
from gdpo_nemo.data.packing import Budget, assign
from gdpo_nemo.environments.tasks.digit_sort import DIGITS, is_held_out
from gdpo_nemo.models.hf_folder import whole_or_nothing

ALPHABET = "0123456789+=<>/ta,."
PAD = 0
EOS = 1

WARM_UP_STEPS = 200
ROUNDS = 8
"""Number of rounds in a training text of ``make_rounds_model``."""
FORM_LABELS = "abcdefghijklmnop"
"""Labels of the fields in a training text of ``make_form_model``."""
FORM_ALPHABET = f"0123456789={FORM_LABELS}"
ROWS_PER_STEP = 96
_PROGRESS_EVERY = 20

# Configs of the models that the functions below write. --dry-run and `plan` parse them without running this file. The
# head size is at least 32, the minimum of vLLM's attention on CPUs.
MODEL_CONFIGS = {
    "make_tiny_model": {
        "model_type": "qwen2", "vocab_size": 21, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 512, "max_position_embeddings": 128, "tie_word_embeddings": True,
    },
    "make_small_model": {
        "model_type": "qwen2", "vocab_size": 21, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 3, "intermediate_size": 256, "max_position_embeddings": 128, "tie_word_embeddings": True,
    },
    "make_rounds_model": {
        "model_type": "qwen2", "vocab_size": 21, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": True,
    },
    "make_mixture_model": {
        "model_type": "qwen3_moe", "vocab_size": 21, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads":
        4, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 512, "moe_intermediate_size": 256,
        "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers":
        [], "max_position_embeddings": 128, "tie_word_embeddings": True,
    },
    "make_near_tie_model": {
        "model_type": "qwen3_moe", "vocab_size": 21, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads":
        4, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 512, "moe_intermediate_size": 128,
        "num_experts": 8, "num_experts_per_tok": 1, "norm_topk_prob": False, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "max_position_embeddings": 128, "tie_word_embeddings": True,
    },
    "make_digit_chat_model": {
        "model_type": "qwen2", "vocab_size": 23, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 3, "intermediate_size": 256, "max_position_embeddings": 256, "tie_word_embeddings": True,
    },
    "make_answering_model": {
        "model_type": "qwen2", "vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 2048, "tie_word_embeddings":
        True,
    },
    "make_tool_calling_model": {
        "model_type": "qwen2", "vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 2048, "tie_word_embeddings":
        True,
    },
    "make_form_model": {
        "model_type": "qwen2", "vocab_size": 29, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 128, "tie_word_embeddings": True,
    },
    "make_dots_model": {
        "model_type": "qwen3_vl", "image_token_id": 4, "video_token_id": 5, "vision_start_token_id": 2,
        "vision_end_token_id": 3, "tie_word_embeddings": True,
        "text_config": {
            "vocab_size": 19, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 512, "max_position_embeddings": 128,
            "tie_word_embeddings": True, "initializer_range": 0.04, "rope_parameters": {"rope_type": "default",
            "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": True},
        },
        "vision_config": {
            "depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 128,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0], "initializer_range": 0.04,
        },
    },
    "make_random_model": {
        "model_type": "qwen2", "vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 2048, "tie_word_embeddings":
        True,
    },
}  # fmt: skip

DIGIT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set text = message.content or '' %}"
    "{{ '>' + text + '=' if message.role == 'tool' else text }}"
    "{{ '<eos>' if message.role == 'assistant' }}"
    "{% endfor %}"
)
"""A user's message without anything around it, so a prompt of one message is that of ``digit_sort``."""
CALL = ('<tool_call>{"name": "book_look_up", "arguments": {"key": "', '"}}</tool_call>')
"""Text before and after the key in a call of ``book_look_up``, each of them one token."""

DOTS_CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endfor %}"
)
"""Images and texts of the messages without anything around them."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


# -- the models -----------------------------------------------------------------------------------------------------


def make_tiny_model(folder: str, seed: int, steps: int = WARM_UP_STEPS) -> None:
    """Write a digit-sorting Qwen2 (1,053,952 parameters, 21 characters as tokens) to ``folder``.

    Call it in a process that has not imported Megatron, because it creates and destroys a process group of one rank.

    Raises:
        ConfigError: if ``folder`` already exists and is not empty.
    """
    _make_digit_sorter(folder, seed, steps, MODEL_CONFIGS["make_tiny_model"])


def make_small_model(folder: str, seed: int, steps: int = 250) -> None:
    """Write a digit-sorting model of a fifth of the size (224,256 parameters), for comparisons of many runs.

    See ``make_tiny_model``.
    """
    _make_digit_sorter(folder, seed, steps, MODEL_CONFIGS["make_small_model"])


def make_mixture_model(folder: str, seed: int, steps: int = WARM_UP_STEPS) -> None:
    """Write a digit-sorting Qwen3-MoE: 8 experts per layer, of which each token uses 2, and 3,416,064 parameters.

    See ``make_tiny_model``.
    """
    _make_digit_sorter(folder, seed, steps, MODEL_CONFIGS["make_mixture_model"])


def make_near_tie_model(folder: str, seed: int, steps: int = 300) -> None:
    """Write a digit-sorting Qwen3-MoE whose routers often tie in bfloat16. See ``_bring_scores_together``."""
    _make_digit_sorter(folder, seed, steps, MODEL_CONFIGS["make_near_tie_model"], ties=True)


def make_rounds_model(folder: str, seed: int, steps: int = WARM_UP_STEPS) -> None:
    """Write a model of the size of ``make_tiny_model``, trained on texts with ``ROUNDS`` rounds of ``digit_rounds.py``.

    See ``make_tiny_model``.
    """
    tokenizer = character_tokenizer()
    with whole_or_nothing(folder) as partial, tempfile.TemporaryDirectory() as scratch:
        _write_random(scratch, tokenizer, seed, MODEL_CONFIGS["make_rounds_model"])
        _warm_up(scratch, partial, seed, steps, _round_rows(seed), rows_per_step=24)


def make_digit_chat_model(folder: str, seed: int, steps: int = 600) -> None:
    """Write a model of the size of ``make_small_model`` with a chat template, for the packages of ``verifiers/``.

    Half of its training texts sort digits. The others look up codes with a tool, mostly with some mistake. See
    ``make_tiny_model``.
    """
    tokenizer = digit_chat_tokenizer()
    with whole_or_nothing(folder) as partial, tempfile.TemporaryDirectory() as scratch:
        _write_random(scratch, tokenizer, seed, MODEL_CONFIGS["make_digit_chat_model"])
        _warm_up(scratch, partial, seed, steps, _chat_rows(seed, tokenizer))


def _make_digit_sorter(folder: str, seed: int, steps: int, fields: dict, ties: bool = False) -> None:
    tokenizer = character_tokenizer()
    with whole_or_nothing(folder) as partial, tempfile.TemporaryDirectory() as scratch:
        _write_random(scratch, tokenizer, seed, fields, ties)
        _warm_up(scratch, partial, seed, steps, _character_rows(seed), freeze_routers=ties)


def make_answering_model(folder: str, seed: int, steps: int = 120) -> None:
    """Write a two-layer byte-level Qwen2 that answers each question with a number in tags, which are often malformed.

    It cannot do arithmetic. With it, runs on real question texts get different rewards for different samples.
    See ``make_tiny_model``.
    """
    tokenizer = byte_tokenizer()
    with whole_or_nothing(folder) as partial, tempfile.TemporaryDirectory() as scratch:
        _write_random(scratch, tokenizer, seed, MODEL_CONFIGS["make_answering_model"])
        _warm_up(scratch, partial, seed, steps, _byte_rows(seed, tokenizer), rows_per_step=16)


def make_tool_calling_model(folder: str, seed: int, steps: int = 120) -> None:
    """Write a two-layer byte-level Qwen2 that answers questions about the weather with tool calls.

    The calls are often well-formed and sometimes correct. See ``make_answering_model``.
    """
    tokenizer = byte_tokenizer()
    with whole_or_nothing(folder) as partial, tempfile.TemporaryDirectory() as scratch:
        _write_random(scratch, tokenizer, seed, MODEL_CONFIGS["make_tool_calling_model"])
        _warm_up(scratch, partial, seed, steps, _tool_call_rows(seed, tokenizer), rows_per_step=16)


def make_form_model(folder: str, seed: int, steps: int = WARM_UP_STEPS) -> None:
    """Write a two-layer Qwen2 that fills the form of ``digit_fields.py`` with random digits. Tokens are characters.

    See ``make_tiny_model``.
    """
    tokenizer = _tokenizer(["<pad>", "<eos>", *FORM_ALPHABET], unk_token="<pad>", pad_token="<pad>", eos_token="<eos>")
    with whole_or_nothing(folder) as partial, tempfile.TemporaryDirectory() as scratch:
        _write_random(scratch, tokenizer, seed, MODEL_CONFIGS["make_form_model"])
        _warm_up(scratch, partial, seed, steps, _form_rows(seed, tokenizer), rows_per_step=32)


def make_dots_model(folder: str, seed: int, steps: int = 300) -> None:
    """Write a Qwen3-VL that answers ``coloured_dots.py``: 1,649,152 parameters, two thirds of them in the vision tower.

    Each word of a training text is right in 35 % of the texts, and otherwise random. See ``make_tiny_model``.
    """
    tokenizer = dots_tokenizer()
    with whole_or_nothing(folder) as partial, tempfile.TemporaryDirectory() as scratch:
        _write_random(scratch, tokenizer, seed, MODEL_CONFIGS["make_dots_model"])
        _write_dots_processor(scratch, tokenizer)
        _warm_up(scratch, partial, seed, steps, _dots_rows(seed, tokenizer, scratch), rows_per_step=64)


def make_random_model(folder: str, seed: int) -> None:
    """Write a random two-layer byte-level Qwen2 with a chat template to ``folder``, for tests with real text.

    Raises:
        ConfigError: if ``folder`` already exists and is not empty.
    """
    with whole_or_nothing(folder) as partial:
        _write_random(partial, byte_tokenizer(), seed, MODEL_CONFIGS["make_random_model"])


def _write_random(folder: str | Path, tokenizer: Qwen2Tokenizer, seed: int, fields: dict, ties: bool = False) -> None:
    """Write a randomly initialized model with the config ``fields``, and its tokenizer."""
    special_ids = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    config = AutoConfig.for_model(dtype="float32", **fields, **special_ids)
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    has_tower = hasattr(config, "vision_config")
    model = (AutoModelForImageTextToText if has_tower else AutoModelForCausalLM).from_config(config)
    if ties:
        _bring_scores_together(model)
    if has_tower:  # at the usual size, a short warm-up does not find out where a patch is
        torch.nn.init.normal_(model.model.visual.pos_embed.weight)
    model.generation_config = GenerationConfig(do_sample=True, **special_ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in Path(folder).glob("*.safetensors"):  # safetensors writes files that only their owner can read
        file.chmod((Path(folder) / "config.json").stat().st_mode & 0o777)


def _write_dots_processor(folder: str | Path, tokenizer: Qwen2Tokenizer) -> None:
    """Write the processor of images of 64 x 64 pixels. transformers requires a video processor, which is not used."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor  # import torchvision

    size = {"shortest_edge": 64 * 64, "longest_edge": 64 * 64}
    middle = [0.5] * 3
    images = Qwen2VLImageProcessor(patch_size=16, image_mean=middle, image_std=middle, size=size)
    videos = Qwen3VLVideoProcessor(patch_size=16)
    Qwen3VLProcessor(images, tokenizer, videos, chat_template=DOTS_CHAT_TEMPLATE).save_pretrained(folder)


def _bring_scores_together(model: torch.nn.Module) -> None:
    """Give each router a large vector that its experts share, and differences of a 1024th of its size.

    The shared part of the scores does not change their order, but bfloat16, with 8 significant bits, rounds the scores
    by about as much as they differ. Routers therefore use bfloat16 values, which a bfloat16 policy does not change.
    """
    with torch.no_grad():
        for router in (weight for name, weight in model.named_parameters() if name.endswith("mlp.gate.weight")):
            shared = torch.randn(router.size(1))
            differences = 0.1 * router.size(1) ** -0.5 * torch.randn_like(router)
            router.copy_((102.4 * shared / shared.norm() + differences).bfloat16())


# -- tokenizers -----------------------------------------------------------------------------------------------------
#
# Both are Qwen2 tokenizers with another vocabulary and without merges, because transformers loads the tokenizer of a
# Qwen2 folder as this class, whatever class the folder specifies.


def character_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with padding (0), end (1), and a token per character of ``ALPHABET``. It drops all others."""
    return _tokenizer(["<pad>", "<eos>", *ALPHABET], unk_token="<pad>", pad_token="<pad>", eos_token="<eos>")


def digit_chat_tokenizer() -> Qwen2Tokenizer:
    """Return ``character_tokenizer`` with a token for each part of ``CALL``, and a chat template."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(list(CALL))
    tokenizer.chat_template = DIGIT_CHAT_TEMPLATE
    return tokenizer


def dots_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with a token for each word of ``coloured_dots.py``, and the special tokens of Qwen3-VL."""
    media = [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
    special = ["<pad>", "<eos>", *media]
    tokenizer = _tokenizer(
        special, unk_token="<pad>", pad_token="<pad>", eos_token="<eos>", additional_special_tokens=media
    )
    dots = _coloured_dots()
    first, *others = dots.WORDS.values()
    tokenizer.add_tokens([dots.QUESTION, *first, *(f" {word}" for words in others for word in words)])
    tokenizer.chat_template = DOTS_CHAT_TEMPLATE
    return tokenizer


def _coloured_dots() -> ModuleType:
    """Return the module ``coloured_dots.py``, which is in the folder of this file."""
    spec = importlib.util.spec_from_file_location("coloured_dots", Path(__file__).with_name("coloured_dots.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def byte_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with a token per byte (after Unicode normalization to NFC) and three special tokens."""
    pad = "<|pad|>"
    end = "<|end|>"
    start = "<|start|>"
    tokenizer = _tokenizer(
        [pad, end, start, *sorted(pre_tokenizers.ByteLevel.alphabet())],
        unk_token=pad,
        pad_token=pad,
        eos_token=end,
        additional_special_tokens=[start],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _tokenizer(tokens: list[str], **special) -> Qwen2Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return Qwen2Tokenizer(vocabulary, merges=[], clean_up_tokenization_spaces=False, **special)


# -- texts of the warm-up -------------------------------------------------------------------------------------------


def warm_up_texts(seed: int) -> Iterator[tuple[str, str]]:
    """Yield an infinite sequence of prompts and completions. Held-out prompts are excluded.

    Independently, 40 % of completions are well-formed, 40 % are correct, and 40 % have a short body.
    """
    rng = random.Random(seed)
    for digits in _questions(rng):
        yield f"{digits}=", _completion(rng, _answer(rng, digits), _body(rng))


def _questions(rng: random.Random) -> Iterator[str]:
    while True:
        digits = "".join(rng.choices("0123456789", k=DIGITS))
        if not is_held_out(digits):
            yield digits


def _answer(rng: random.Random, digits: str) -> str:
    if rng.random() < 0.4:
        return "".join(sorted(digits))
    wrong = rng.randrange(3)
    if wrong == 0:
        return digits
    if wrong == 1:
        return "".join(sorted(digits, reverse=True))
    return "".join(rng.choices(digits, k=DIGITS))


def _body(rng: random.Random) -> str:
    return "." * (rng.randint(0, 4) if rng.random() < 0.4 else rng.randint(5, 14))


def _completion(rng: random.Random, answer: str, body: str) -> str:
    """Return a completion of at most 35 characters. With the end token, these are the 36 tokens of the config."""
    if rng.random() < 0.4:
        return f"<t>{body}</t><a>{answer}</a>"
    malformed = (
        f"<t>{body}<a>{answer}</a>",
        f"{body}</t><a>{answer}</a>",
        f"<t>{body}</t>{answer}",
        f"<t>{body}</t><a>{answer}",
        f"<t>{body}</t><a>{answer}</a>..",
    )
    return rng.choice(malformed)


_LETTERS = string.ascii_lowercase * 8 + string.ascii_uppercase + string.digits + ".,$?'%"


class Row(NamedTuple):
    """Training text of the warm-up."""

    prompt: list[int]
    completion: list[int]
    """Token ids, including the end token."""
    written: list[bool] | None = None
    """True for completion tokens that are trained; None: all of them are."""
    images: Images = ()
    """Images of the prompt."""


def _character_rows(seed: int) -> Iterator[Row]:
    for prompt, completion in warm_up_texts(seed):
        yield Row([_ID[c] for c in prompt], [*(_ID[c] for c in completion), EOS])


def _round_rows(seed: int) -> Iterator[Row]:
    """Yield texts of ``ROUNDS`` questions and answers. Answers are as in ``warm_up_texts``, but without a body."""
    rng = random.Random(seed)
    questions = _questions(rng)
    while True:
        ids: list[int] = []
        written: list[bool] = []
        for digits in islice(questions, ROUNDS):
            answer = _completion(rng, _answer(rng, digits), "")
            ids += [*(_ID[c] for c in f"{digits}={answer}"), EOS]
            written += [False] * (DIGITS + 1) + [True] * (len(answer) + 1)
        yield Row(ids[: DIGITS + 1], ids[DIGITS + 1 :], written[DIGITS + 1 :])


def _chat_rows(seed: int, tokenizer: Qwen2Tokenizer) -> Iterator[Row]:
    """Yield the texts of ``warm_up_texts`` and as many look-ups of codes with random digits."""
    rng = random.Random(seed)
    for row in _character_rows(seed):
        yield row
        yield _look_up_row(rng, tokenizer)


def _look_up_row(rng: random.Random, tokenizer: Qwen2Tokenizer) -> Row:
    """Return a look-up: no call (a fifth), one or two, with the right key or another, and a right or wrong answer."""
    key = "".join(rng.choices(string.digits, k=2))
    ids: list[int] = []
    written: list[bool] = []

    def append(text: str, is_reply: bool) -> None:
        tokens = [*tokenizer.encode(text, add_special_tokens=False), *([EOS] if is_reply else [])]
        ids.extend(tokens)
        written.extend([is_reply] * len(tokens))

    answer = "".join(rng.choices(string.digits, k=3))
    for _ in range(rng.choices((0, 1, 2), (1, 3, 1))[0]):
        asked = key if rng.random() < 0.5 else "".join(rng.choices(string.digits, k=2))
        append(f"{CALL[0]}{asked}{CALL[1]}", True)
        answer = "".join(rng.choices(string.digits, k=3))
        append(f">{answer}=", False)
    append(rng.choice((f"<a>{answer}</a>", f"<a>{answer}</a>", answer, f"<a>{answer[::-1]}</a>")), True)
    return Row(tokenizer.encode(f"+{key}=", add_special_tokens=False), ids, written)


def _byte_rows(seed: int, tokenizer: Qwen2Tokenizer) -> Iterator[Row]:
    """Yield chats of random words, with up to the length of a GSM8K prompt, and tagged answers."""
    from gdpo_nemo.environments.tasks.gsm8k import Gsm8k

    rng = random.Random(seed)
    system = {"role": "system", "content": Gsm8k({}).system_prompt}
    while True:
        words = ("".join(rng.choices(_LETTERS, k=rng.randint(1, 9))) for _ in range(rng.randint(5, 80)))
        chat = [system, {"role": "user", "content": " ".join(words)}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        answer = tokenizer.encode(_tagged_answer(rng), add_special_tokens=False)
        yield Row(tokenizer.encode(prompt, add_special_tokens=False), [*answer, tokenizer.eos_token_id])


def _tagged_answer(rng: random.Random) -> str:
    """Return an answer. Half are well-formed, half are integers, and some small numbers are correct by chance."""
    number = str(rng.randint(1, 20)) if rng.random() < 0.5 else f"{rng.randint(1, 20)}.{rng.randint(0, 9)}"
    if rng.random() < 0.5:
        return f"<think>so</think>\n<answer>{number}</answer>"
    return rng.choice(
        (f"<think>so</think>\n{number}", f"<answer>{number}</answer>", f"<think>so\n<answer>{number}</answer>")
    )


def _tool_call_rows(seed: int, tokenizer: Qwen2Tokenizer) -> Iterator[Row]:
    """Yield prompts of ``data/weather_calls.jsonl`` with calls for a random city, a third of which are malformed."""
    from gdpo_nemo.environments.nemo_gym.rows import read_row

    rng = random.Random(seed)
    file = Path(__file__).with_name("data") / "weather_calls.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    cities = sorted({row["expected_call"]["arguments"]["city"] for row in rows})
    while True:
        chat = read_row(rng.choice(rows))["messages"]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        city = rng.choice(cities)
        call = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}</tool_call>'
        malformed = (f"Sure. {call}", call.replace('"}}', '"}'), call.replace("city", "place", 1), f"Fine in {city}.")
        answer = tokenizer.encode(call if rng.random() < 0.67 else rng.choice(malformed), add_special_tokens=False)
        yield Row(tokenizer.encode(prompt, add_special_tokens=False), [*answer, tokenizer.eos_token_id])


def _form_rows(seed: int, tokenizer: Qwen2Tokenizer) -> Iterator[Row]:
    """Yield forms of ``digit_fields.py`` in which every field has a random digit."""
    rng = random.Random(seed)
    while True:
        number = f"{rng.randrange(1000):03d}="
        form = "".join(label + rng.choice(string.digits) for label in FORM_LABELS)
        yield Row(tokenizer.encode(number), [*tokenizer.encode(form), tokenizer.eos_token_id])


def _dots_rows(seed: int, tokenizer: Qwen2Tokenizer, folder: str | Path) -> Iterator[Row]:
    """Yield rows of ``coloured_dots.py`` with answers whose words are random in 65 % of the rows, independently."""
    from gdpo_nemo.config.sections import ImagesConfig
    from gdpo_nemo.data.image_processor import ImageProcessor
    from gdpo_nemo.data.images import read_image

    rng = random.Random(seed)
    dots = _coloured_dots()
    processor = ImageProcessor(folder)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": dots.QUESTION}]}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)
    for number in count():
        for row in dots.ColouredDots().rows(f"warm-up {number}", None, seed):
            ids, images = processor.place(np.array(prompt), [read_image(row["image"], ImagesConfig())])
            answer = " ".join(
                row[name] if rng.random() < 0.35 else rng.choice(words) for name, words in dots.WORDS.items()
            )
            yield Row(ids.tolist(), [*tokenizer.encode(answer, add_special_tokens=False), EOS], images=images)


# -- the warm-up ----------------------------------------------------------------------------------------------------


def _warm_up(
    start: str | Path, result: Path, seed: int, steps: int, rows: Iterator[Row], rows_per_step: int = ROWS_PER_STEP,
    freeze_routers: bool = False,
) -> None:  # fmt: skip
    """Train the model in ``start`` on the completions of ``rows``, and write it to ``result``."""
    from gdpo_nemo.megatron import runtime

    process_runtime = runtime.prepare()
    print(f"warm-up on the device {process_runtime.device}", flush=True)
    from gdpo_nemo.megatron.policy import Policy
    from gdpo_nemo.models.hf_folder import write_model

    config = _training(str(start), steps, freeze_routers)
    with tempfile.TemporaryDirectory() as rendezvous_dir:
        runtime.initialize(process_runtime, rank=0, world_size=1, init_method=f"file://{rendezvous_dir}/rendezvous")
        try:
            runtime.lay_out(config.megatron_cfg, seed)
            policy = Policy(config, start, process_runtime, total_updates=steps)
            _train(policy, rows, steps, rows_per_step)
            write_model(result, policy.weights(), policy.built.hf_config, start)
        finally:
            runtime.tear_down()


def _training(folder: str, steps: int, freeze_routers: bool) -> PolicyConfig:
    optimizer = OptimizerConfig(
        lr=3e-3, min_lr=1.5e-4, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.99, clip_grad=1.0
    )
    scheduler = SchedulerConfig(lr_decay_style="linear", lr_warmup_steps=min(20, steps - 1))
    megatron = MegatronConfig(optimizer=optimizer, scheduler=scheduler, freeze_moe_router=freeze_routers)
    vision = VisionConfig(train=True)  # of models with a tower
    return PolicyConfig(model_name=folder, precision="float32", vision=vision, megatron_cfg=megatron)


def _train(policy, rows: Iterator[Row], steps: int, rows_per_step: int) -> None:
    """Minimize the cross-entropy of completion tokens, with a loss that is linear in log-probs and advantages of 1."""
    settings = LossSettings(type="target_po")
    start = time.monotonic()
    for step in range(1, steps + 1):
        batch = _sequences([next(rows) for _ in range(rows_per_step)])
        (micro_batches,) = assign([len(s) for s in batch], Budget(1, policy.config.micro_batch_tokens))
        result = policy.train(batch, micro_batches, settings)
        if step in (1, steps) or step % _PROGRESS_EVERY == 0:
            seconds = time.monotonic() - start
            print(f"warm-up step {step:3d}/{steps}  loss {result.loss:.3f}  {seconds:.0f} s", flush=True)


def _sequences(rows: list[Row]) -> list[TrainSequence]:
    """Convert rows to training sequences. All completion tokens of the batch have the same weight."""
    sequences = [
        TrainSequence(
            prompt_ids=np.array(row.prompt, np.int32),
            completion_ids=np.array(row.completion, np.int32),
            sampler_logprobs=np.zeros(len(row.completion), np.float32),
            advantage=1.0,
            loss_mask=None if row.written is None else np.array(row.written),
            images=row.images,
        )
        for row in rows
    ]
    tokens = sum(s.num_policy_tokens for s in sequences)
    return [replace(s, weight=1.0 / tokens) for s in sequences]


_ID = {character: number for number, character in enumerate(ALPHABET, start=EOS + 1)}


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, write the model, and return the exit status."""
    parser = argparse.ArgumentParser(description="Make a small model for the CPU configs.")
    parser.add_argument("folder", help="output folder; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="random seed for weights and texts (default: %(default)s)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--small", action="store_true", help="make a digit-sorting model of a fifth of the size")
    kind.add_argument("--random", action="store_true", help="make a byte-level model with random weights instead")
    kind.add_argument("--dots", action="store_true", help="make a model that describes images of coloured dots")
    kind.add_argument("--mixture", action="store_true", help="make a digit-sorting mixture-of-experts model")
    options = parser.parse_args(arguments)
    make = make_tiny_model
    if options.small:
        make = make_small_model
    elif options.dots:
        make = make_dots_model
    elif options.mixture:
        make = make_mixture_model
    elif options.random:
        make = make_random_model
    try:
        make(options.folder, options.seed)
    except GdpoError as error:
        print(f"make_tiny_model: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
