"""End tokens: the token with which a chat template ends a turn, and the tokens at which an engine stops.

Three files name end tokens. The chat template writes one after each message, ``tokenizer_config.json`` names one of the
vocabulary, and ``generation_config.json`` lists those at which sampling ends. They differ in many published models: a
turn of Gemma ends with ``<end_of_turn>`` and not with the tokenizer's ``<eos>``. Such a model is valid if its
``generation_config.json`` lists the token of the template.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gdpo_nemo.config.model_checks import read_model_config
from gdpo_nemo.data.conversation import PLACEHOLDER
from gdpo_nemo.data.tokenizer import Tokenizer, added_tokens


def turn_suffix(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None) -> str:
    """Return the text that the chat template writes after an assistant's last message.

    Return an empty text without a template, or if the template does not write a short message exactly once.
    """
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": PLACEHOLDER}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **(template_kwargs or {}))
    except Exception:  # noqa: BLE001 - templates may raise any exception, and transformers raises one without a template
        return ""
    return text.partition(PLACEHOLDER)[2] if text.count(PLACEHOLDER) == 1 else ""


def turn_end(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None) -> int | None:
    """Return the token with which the chat template ends an assistant's turn: the first special or added token after
    the message. Return None without such a token."""
    suffix = turn_suffix(tokenizer, template_kwargs)
    known = added_tokens(tokenizer)
    return next((token for token in tokenizer(suffix, add_special_tokens=False)["input_ids"] if token in known), None)


def engine_ends(tokenizer: Tokenizer, folder: Path) -> list[int]:
    """Return the tokens at which an engine stops, as vLLM selects them: the end token of the tokenizer, then those of
    the model folder's ``generation_config.json``, or of ``config.json`` if this file does not exist."""
    file = next(f for f in (folder / "generation_config.json", folder / "config.json") if os.path.lexists(f))
    listed = read_model_config(file).get("eos_token_id")
    ids = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    return list(dict.fromkeys(token for token in ids if isinstance(token, int)))


def end_token_notes(
    tokenizer: Tokenizer, folder: Path, stop_strings: Sequence[str], template_kwargs: Mapping[str, Any] | None
) -> list[str]:
    """Describe end tokens that disagree, one sentence per disagreement.

    Args:
        folder: Hugging Face folder of the model.
        stop_strings: ``policy.generation.stop_strings``.
        template_kwargs: arguments of the chat template. None if no chat template is used.
    """
    ends = engine_ends(tokenizer, folder)
    notes = []
    for token in sorted(set(ends) - added_tokens(tokenizer)):
        text = _text(tokenizer, token)
        what = f"the ordinary token {text!r} of the tokenizer" if text else "not in the tokenizer's vocabulary"
        notes.append(
            f"{folder}: eos_token_id {token} is {what}; correct generation_config.json, at whose tokens engines stop"
        )
    suffix = "" if template_kwargs is None else turn_suffix(tokenizer, template_kwargs)
    end = turn_end(tokenizer, template_kwargs) if suffix else None
    written = suffix.strip() if end is None else _text(tokenizer, end)
    if end in ends or not written or any(stop in suffix for stop in stop_strings if stop):
        return notes
    stops = ", ".join(repr(text) for token in ends if (text := _text(tokenizer, token))) or "no token"
    return [
        *notes,
        f"{folder}: the chat template ends a turn with {written!r}, but engines stop only at {stops}; add the token to "
        "eos_token_id in generation_config.json, or its text to policy.generation.stop_strings",
    ]


def _text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token, or an empty text if it is not in the vocabulary."""
    return tokenizer.decode([token]) if 0 <= token < len(tokenizer) else ""
