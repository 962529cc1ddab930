"""The tokenizer of a run."""

from __future__ import annotations

import importlib
import os
import re
import sys
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.reading import parse_json, read_text
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.chat_templates import TemplateTooLarge, bound_templates, limited
from gdpo_nemo.errors import ConfigError

_QWEN = ("transformers.models.qwen2.tokenization_qwen2", "Qwen2Tokenizer")
_CLASSES = {
    ("qwen2", "Qwen2Tokenizer"): _QWEN,
    ("qwen3", "Qwen2Tokenizer"): _QWEN,
    ("qwen3_moe", "Qwen2Tokenizer"): _QWEN,
    ("llama", "GPT2Tokenizer"): ("transformers.models.gpt2.tokenization_gpt2", "GPT2Tokenizer"),
}
"""(model_type, tokenizer_class) -> module and class that AutoTokenizer of transformers 5.19 chooses."""


_MOST_LINES = 100_000
"""Lines of Python that jinja makes of a template and runs for a conversation of one message; real ones run some 100."""
_LARGEST_VALUE = 1_000_000
"""Characters of a text, or elements of a list, that a template makes for a conversation of one message."""


_TOOL_CALL = re.compile(r"tool.?calls?\b|tool.?call.?(begin|end)|python_tag|function.?call|<\|call\|>", re.IGNORECASE)
"""Names of tokens around a tool call: [TOOL_CALLS] of Mistral, <|python_tag|> of Llama 3, <|tool_call|> of Granite."""


def special_tool_calls(folder: Path) -> list[str]:
    """Return the special tokens of a tokenizer that mark tool calls, sorted; empty without a ``tokenizer.json``.

    Qwen's <tool_call> is an added token and not a special one, so it stays in a decoded text.

    Raises:
        ConfigError: if ``tokenizer.json`` cannot be read.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return []
    try:
        content = parse_json(read_text(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.tokenizer_name: {file} cannot be read ({first_line(error)})") from None
    added = content.get("added_tokens") if isinstance(content, dict) else None
    special = [
        str(token.get("content"))
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict) and token.get("special")
    ]
    return sorted(name for name in special if _TOOL_CALL.search(name))


def load_tokenizer(config: Config, folder: str | Path) -> Any:
    """The tokenizer that ``policy.tokenizer_name`` names, else that of the model in ``folder``. Raises ConfigError."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    name = config.policy.tokenizer_name or folder
    try:
        tokenizer = _class_for(Path(name)).from_pretrained(name)
    except Exception as error:  # noqa: BLE001 - damaged files raise many kinds, the Rust library's among them
        raise ConfigError(f"policy.tokenizer_name: no tokenizer in {name} ({first_line(error)})") from None
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes where the vocabulary is missing
        raise ConfigError(f"policy.tokenizer_name: the tokenizer in {name} has no vocabulary")
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, (int, float)):
        raise ConfigError(f"policy.tokenizer_name: model_max_length in {name} must be a number (got {longest!r})")
    _check_template(tokenizer, name)
    return tokenizer


_GREETING = [{"role": "user", "content": "a"}]


class _Endless(Exception):
    """A chat template ran more lines than any template needs."""


def _check_template(tokenizer: Any, name: str | Path) -> None:
    """Refuse a chat template whose loops do not end in any useful time, or whose values take all memory.

    jinja's sandbox bounds a loop and not loops in loops, and a rendering cannot be stopped from outside. The template
    is tried on one short conversation, and its lines are counted. A template that refuses this one is reported later,
    with the row that it refuses.

    Raises:
        ConfigError: if it runs more than ``_MOST_LINES`` lines, or makes a value of more than ``_LARGEST_VALUE``.
    """
    bound_templates()
    if not getattr(tokenizer, "chat_template", None):
        return
    lines = count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != "<template>":
            return None
        if event == "line" and next(lines) > _MOST_LINES:
            raise _Endless
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with limited(_LARGEST_VALUE):
            tokenizer.apply_chat_template(_GREETING, tokenize=False, add_generation_prompt=True)
    except TemplateTooLarge as error:
        raise ConfigError(f"policy.tokenizer_name: the chat template in {name} {error} for one message") from None
    except _Endless:
        raise ConfigError(
            f"policy.tokenizer_name: the chat template in {name} runs more than {_MOST_LINES:,} lines for one message"
        ) from None
    except Exception:  # noqa: BLE001 - a template may raise anything, for instance on roles it does not know
        return
    finally:
        sys.settrace(before)


def check_same_tokens(tokenizer: Any, folder: str | Path, key: str) -> None:
    """The tokenizer in ``folder``, which the config names as ``key``, has the same tokens. Raises ConfigError."""
    try:
        other = _class_for(Path(folder)).from_pretrained(folder)
    except Exception as error:  # noqa: BLE001 - as above
        raise ConfigError(f"{key}: no tokenizer in {folder} ({first_line(error)})") from None
    mine, theirs = tokenizer.get_vocab(), other.get_vocab()
    unlike = [token for token in {*mine, *theirs} if mine.get(token) != theirs.get(token)]
    if unlike:
        raise ConfigError(
            f"{key}: {folder} has another tokenizer than the policy: {len(unlike)} tokens are not the same, "
            f"{min(unlike)!r} among them"
        )
    if tokenizer.eos_token_id != other.eos_token_id:
        raise ConfigError(
            f"{key}: {folder} ends a text with {other.eos_token!r}, the policy with {tokenizer.eos_token!r}"
        )


def _class_for(folder: Path) -> Any:
    """What to load the tokenizer of ``folder`` with: the class that AutoTokenizer would choose, where that is known.

    AutoTokenizer's module imports torch, and of it what generation and sharding need: 4 of the 5 seconds of its import.
    """
    if known := _known_class(folder):
        module, name = known
        return getattr(importlib.import_module(module), name)
    from transformers import AutoTokenizer

    return AutoTokenizer


def _known_class(folder: Path) -> tuple[str, str] | None:
    files = [folder / name for name in ("config.json", "tokenizer_config.json", "tokenizer.json")]
    if not all(file.is_file() for file in files):
        return None
    model, settings = (parse_json(read_text(file)) for file in files[:2])
    if "auto_map" in settings:  # code of the folder's own
        return None
    return _CLASSES.get((model.get("model_type"), str(settings.get("tokenizer_class")).removesuffix("Fast")))
