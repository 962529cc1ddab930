"""Loading of tokenizers and of readers of images, and checks of chat templates."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from gdpo_nemo.config.model_checks import TOKENIZER_FILES, read_model_config
from gdpo_nemo.config.sections import ImagesConfig, PolicyConfig
from gdpo_nemo.data.chat_templates import TemplateTooLarge, bound_templates, limited
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.utils.errors import ConfigError, first_line
from gdpo_nemo.utils.files import parse_json, read_text
from gdpo_nemo.utils.progress import import_transformers

if TYPE_CHECKING:
    from gdpo_nemo.data.image_reader import ImageReader

_QWEN = ("transformers.models.qwen2.tokenization_qwen2", "Qwen2Tokenizer")
_CLASSES = {
    ("qwen2", "Qwen2Tokenizer"): _QWEN,
    ("qwen3", "Qwen2Tokenizer"): _QWEN,
    ("qwen3_moe", "Qwen2Tokenizer"): _QWEN,
    ("llama", "GPT2Tokenizer"): ("transformers.models.gpt2.tokenization_gpt2", "GPT2Tokenizer"),
}
"""(model_type, tokenizer_class) -> (module, class) that AutoTokenizer of transformers 5.19 selects."""


CURRENT_TIME = "strftime_now"
"""Function of chat templates that formats the current time."""
_LARGEST_VALUE = 1_000_000
"""Maximum number of characters in a text, or of elements in a list, that a template may create for one short
message."""


class Tokenizer(Protocol):
    """Methods and attributes of a transformers tokenizer that this package uses."""

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens."""

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of the special tokens."""

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token (None without such a token)."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token (None without such a token)."""

    @property
    def model_max_length(self) -> int | float:
        """Maximum number of tokens for the model. A very large number if the tokenizer's files do not specify a
        maximum."""

    def __len__(self) -> int: ...

    @overload
    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, list[int]]: ...

    @overload
    def __call__(
        self, text: list[str], *, add_special_tokens: bool = True, return_attention_mask: bool | None = None
    ) -> Mapping[str, list[list[int]]]: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render a conversation as text. A template may raise any exception."""

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Decode each sequence."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        """Return the token of each id, or None if an id is not in the vocabulary."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Decode a sequence."""

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary: token -> id."""


def load_tokenizer(policy: PolicyConfig | None, folder: str | Path, date: str | None = None) -> Tokenizer:
    """Load the tokenizer in ``policy.tokenizer_name``, or the tokenizer in the model's ``folder`` if that key is not
    set or ``policy`` is None.

    Args:
        date: date that the chat template writes (``run.date``). None means the time of each rendering.

    Raises:
        ConfigError: if a valid tokenizer is not found, or its chat template exceeds the limits.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import_transformers()
    name = (policy.tokenizer_name if policy else None) or folder
    try:
        tokenizer: Tokenizer = _class_for(Path(name)).from_pretrained(name)
    except Exception as error:  # noqa: BLE001 - damaged files raise many exception types, also from the Rust library
        raise ConfigError(f"policy.tokenizer_name: no tokenizer in {name} ({first_line(error)})") from None
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers accepts a missing vocabulary
        raise ConfigError(f"policy.tokenizer_name: the tokenizer in {name} has no vocabulary")
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, (int, float)):
        raise ConfigError(f"policy.tokenizer_name: model_max_length in {name} must be a number, got {longest!r}")
    _check_template(tokenizer, name)
    if date is not None:  # an argument of the template replaces the function with this name in its environment
        dated: Any = tokenizer
        arguments = {CURRENT_TIME: datetime.fromisoformat(date).strftime}
        dated.apply_chat_template = partial(dated.apply_chat_template, **arguments)
    return tokenizer


def load_image_reader(limits: ImagesConfig, model: str | Path, tokenizer: Tokenizer) -> ImageReader | None:
    """Return the reader of images for the model in a Hugging Face folder, or None if it has no vision tower.

    Args:
        limits: the section ``data.images``.

    Raises:
        ConfigError: if config.json is invalid, or the model is not supported.
    """
    if describe(read_model_config(Path(model) / "config.json")).tower is None:
        return None
    from gdpo_nemo.data.image_reader import ImageReader  # text-only runs do not need it

    return ImageReader(limits, model, tokenizer)


_CONTEXT = 64
"""Number of characters before a text that may influence how the text is tokenized."""
_BORDERS = "\n.a0ex"
"""Characters to tokenize a text after. At least one of them should not share a token with the text."""


def continued(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Tokenize a text that continues ``before``, so that both token sequences together are one text.

    Many tokenizers treat the beginning of a text differently from its continuation: with Metaspace, ``12345`` alone
    begins with a space. The result therefore contains the tokens that follow ``before`` if both texts are tokenized
    together. If one of these tokens contains the border, the text is tokenized after another text, which is selected so
    that the decoded tokens are the same.
    """
    before = before[-_CONTEXT:]
    first, whole = _plain_tokens(tokenizer, before), _plain_tokens(tokenizer, before + text)
    if whole[: len(first)] == first:
        return whole[len(first) :]
    expected = tokenizer.decode(whole, clean_up_tokenization_spaces=False)
    for border in _BORDERS:
        start, both = _plain_tokens(tokenizer, border), _plain_tokens(tokenizer, border + text)
        rest = both[len(start) :]
        is_split = both[: len(start)] == start
        if is_split and tokenizer.decode([*first, *rest], clean_up_tokenization_spaces=False) == expected:
            return rest
    return _plain_tokens(tokenizer, text)


def _plain_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def writes_date(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template writes the current date."""
    return CURRENT_TIME in str(getattr(tokenizer, "chat_template", None))


_GREETING = [{"role": "user", "content": "a"}]


def _check_template(tokenizer: Tokenizer, name: str | Path) -> None:
    """Refuse a chat template that would run too long or use too much memory.

    The template is rendered for one short message, with lower limits than for conversations. A template that raises an
    error for this message is accepted here. The error is reported later, with the row that causes it.

    Raises:
        ConfigError: if the template creates a value larger than ``_LARGEST_VALUE``, or runs too many steps.
    """
    bound_templates()
    if not getattr(tokenizer, "chat_template", None):
        return
    try:
        with limited(_LARGEST_VALUE):
            tokenizer.apply_chat_template(_GREETING, tokenize=False, add_generation_prompt=True)
    except TemplateTooLarge as error:
        raise ConfigError(f"policy.tokenizer_name: the chat template in {name} {error} for one message") from None
    except Exception:  # noqa: BLE001 - templates may raise any exception, for instance for unknown roles
        return


def check_same_tokens(tokenizer: Tokenizer, folder: str | Path, key: str) -> None:
    """Check that the tokenizer in ``folder`` has the same vocabulary and end token as ``tokenizer``.

    Args:
        key: config key of ``folder``, for messages.

    Raises:
        ConfigError: if the tokenizers differ, or ``folder`` has no tokenizer.
    """
    other = _tokenizer_in(folder, key)
    vocabulary, other_vocabulary = tokenizer.get_vocab(), other.get_vocab()
    unlike = dict(vocabulary.items() ^ other_vocabulary.items())  # tokens with different ids, or only in one
    if unlike:
        raise ConfigError(
            f"{key}: {folder} has a different tokenizer than the policy: {len(unlike)} tokens differ, "
            f"for example {min(unlike)!r}"
        )
    if tokenizer.eos_token_id != other.eos_token_id:
        raise ConfigError(
            f"{key}: {folder} has end token {other.eos_token!r}, but the policy has {tokenizer.eos_token!r}"
        )


def check_vocabulary(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Check that ``policy.tokenizer_name`` has the vocabulary of the model's own tokenizer, if the model has one.

    Added and special tokens may differ: they are often renamed or extended for a chat template.

    Raises:
        ConfigError: if other tokens differ, or the tokenizer of the model is damaged.
    """
    if not any((Path(folder) / file).is_file() for file in TOKENIZER_FILES):
        return
    other = _tokenizer_in(folder, "policy.model_name")
    added = added_tokens(tokenizer) | added_tokens(other)
    changed = other.get_vocab().items() - tokenizer.get_vocab().items()
    unlike = [token for token, index in changed if index not in added]
    if unlike:
        raise ConfigError(
            f"policy.tokenizer_name: {len(unlike)} tokens differ from the tokenizer in the model's folder {folder}, "
            f"for example {min(unlike)!r}; use a tokenizer of this model, or delete the folder's tokenizer files if "
            "they are wrong"
        )


def added_tokens(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of special and added tokens. Some tokenizers do not declare the end of a turn as special."""
    return {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the special tokens by id. ``all_special_ids`` contains only those with a role, such as the end token."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {index: str(token) for index, token in added.items() if token.special}
    return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens)) | special


def _tokenizer_in(folder: str | Path, key: str) -> Tokenizer:
    try:
        tokenizer: Tokenizer = _class_for(Path(folder)).from_pretrained(folder)
        return tokenizer
    except Exception as error:  # noqa: BLE001 - damaged files raise many exception types
        raise ConfigError(f"{key}: no tokenizer in {folder} ({first_line(error)})") from None


def _class_for(folder: Path) -> Any:
    """Return the tokenizer class for ``folder``: the class that AutoTokenizer would select if it is known, otherwise
    AutoTokenizer.

    A known class loads faster. Of the 5 seconds for importing AutoTokenizer's module, 4 are spent on torch and its
    modules for generation and sharding.
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
    if "auto_map" in settings:  # code in the folder
        return None
    return _CLASSES.get((model.get("model_type"), str(settings.get("tokenizer_class")).removesuffix("Fast")))
