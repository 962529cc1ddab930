"""``data.<split>.type``: which forms of supervised and preference rows there are, by axolotl's names."""

from __future__ import annotations

from typing import Any

from gdpo_nemo.config.messages import nearest
from gdpo_nemo.errors import ConfigError

FIELDS = {"sft": ("completion",), "pairs": ("chosen", "rejected"), "single": ("completion", "label")}
"""What a row of each kind holds beside its prompt."""
PREFIXES = ("chatml", "llama3", "chat_template")
"""The first word of a name: the template that is written out, or the tokenizer's own."""
PROMPT_COLUMNS: dict[str, str | None] = {
    "argilla": "instruction",
    "argilla_chat": None,
    "icr": "input",
    "intel": "question",
    "prompt_pairs": "prompt",
    "ultra": "prompt",
}
"""The second word of a name: the column of the prompt; None: the answers are conversations that begin with it."""
FORMATS = {"argilla": {"chosen": "chosen_response", "rejected": "rejected_response"}}
"""Other names of the answers' columns."""
_USER_DEFINED = ("field_prompt", "field_system", "prompt_format")
TRAINED = ("assistant", "last", "all")
"""Values of ``data.<split>.train_on``."""


def is_transform(how: Any) -> bool:
    """Return whether a type is the import path of a function that is called with each row.

    ``file.py:function``, ``package.module:function``, or ``module.function`` as axolotl writes it. A name with a dot
    of which either part is one of a form is a form, perhaps misspelt.
    """
    if not isinstance(how, str) or ":" in how:
        return isinstance(how, str)
    first, dot, rest = how.partition(".")
    return bool(first and rest) and first not in PREFIXES and rest not in (*PROMPT_COLUMNS, "default")


def check_example_type(split: str, how: Any, kind: str) -> None:
    """The type of a split is one that rows of this kind can have. Raises ConfigError."""
    key = f"data.{split}.type"
    if how is None or is_transform(how):
        return
    if isinstance(how, dict):
        known = [*_USER_DEFINED, *(f"field_{name}" for name in FIELDS[kind]), *_formats(kind)]
        for name, value in how.items():
            if name not in known:
                raise ConfigError(f"{key}.{name}: unknown{nearest(name, known)}")
            if not isinstance(value, str):
                raise ConfigError(f"{key}.{name}: must be text, got {value!r}")
        return
    if kind == "sft":
        raise ConfigError(f"{key}: names a form of preferences; rows of sft are told by their columns, leave it out")
    known = [f"{prefix}.{form}" for prefix in PREFIXES for form in PROMPT_COLUMNS] + ["chat_template.default"]
    if how not in known and not (how == "chat_template"):
        raise ConfigError(f"{key}: unknown {how!r}{nearest(str(how), known)}")


def _formats(kind: str) -> list[str]:
    return [f"{name}_format" for name in FIELDS[kind] if name != "label"]
