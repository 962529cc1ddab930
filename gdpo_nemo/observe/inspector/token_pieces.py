"""The text of single tokens, as the tokenizer of a run has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.tokenizer import load_tokenizer
from gdpo_nemo.errors import ConfigError

_REPLACEMENT = "\ufffd"


def tokenizer_of(run_dir: Path, config: Config) -> tuple[Any, str]:
    """The tokenizer of a run and "", or None and why there is none: that of the exported model, else of the one that
    the run started from. Nothing is downloaded."""
    start = config.policy.tokenizer_name or config.policy.model_name
    places = [run_dir / "model", *([Path(start)] if start else [])]
    alone = replace(config, policy=replace(config.policy, tokenizer_name=None))
    for place in places:
        if (place / "tokenizer_config.json").is_file() or (place / "tokenizer.json").is_file():
            try:
                return load_tokenizer(alone, place), ""
            except ConfigError as error:
                return None, str(error)
    return None, f"no tokenizer in {' or '.join(map(str, places))}"


def pieces_of(ids: np.ndarray, tokenizer: Any) -> list[Any]:
    """What each token stands for: its text; its bytes as a list where these are a part of a character only; None where
    the tokenizer does not know it."""
    size = len(tokenizer)
    known = [int(token) for token in ids if 0 <= token < size]
    names = dict(zip(known, tokenizer.convert_ids_to_tokens(known)))
    return [_piece(int(token), names.get(int(token)), tokenizer) for token in ids]


def _piece(token: int, name: str | None, tokenizer: Any) -> Any:
    if name is None:
        return None
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if _REPLACEMENT in text:
        return _bytes_of(name) or text
    # SentencePiece drops the space before the first word of what it decodes.
    return " " + text if name.startswith("\u2581") and not text.startswith(" ") else text


def _bytes_of(name: str) -> list[int] | None:
    """The bytes of a token that is no whole character: byte-level BPE writes a character for each, SentencePiece
    ``<0xE2>``."""
    if name.startswith("<0x") and name.endswith(">"):
        return [int(name[3:-1], 16)]
    alphabet = _byte_alphabet()
    return [alphabet[letter] for letter in name] if all(letter in alphabet for letter in name) else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: those that can be seen stand for themselves, the others for 256, 257, ... in turn."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
