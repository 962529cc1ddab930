"""Prompts of one split, rendered and tokenized once, then read by index.

The order depends only on the seed and the prompt index, so that a run can resume from its last index. Every epoch is a
permutation of all rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.images import Image, Images
from gdpo_nemo.data.messages import (
    IMAGES,
    OTHER_MEDIA,
    chat_messages,
    clean_columns,
    lost_message,
    lost_text,
    media_of,
    rendered,
    without_images,
)
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.rows import PROMPT_KEYS, Row, environment_of, environment_of_row, load_rows
from gdpo_nemo.utils.errors import ConfigError, first_line, nearest
from gdpo_nemo.utils.progress import uncollected

if TYPE_CHECKING:
    from gdpo_nemo.data.image_reader import ImageReader
    from gdpo_nemo.data.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
_NOT_TEXT = (*IMAGES, *OTHER_MEDIA)
"""Names of columns, and types of message parts, that contain media instead of text."""


@dataclass(frozen=True)
class RefusedPrompt:
    """A row that was skipped: a prompt that is too long, or a raw text that is too short for an anchor."""

    id: str
    tokens: int


class PromptSource:
    """Prompts of one split.

    Args:
        dataset: the section ``data.<split>``.
        environments: environment objects by name in the section ``env`` (``load_environments``). An environment may
            define a ``system_prompt``. If the split has no path, its environment generates the rows.
        tokenizer: transformers tokenizer.
        split: ``train`` or ``validation``. Used in error messages and in the ids of rows without an id.
        seed: random seed for the order, and for rows that an environment generates.
        max_prompt_tokens: maximum number of tokens in a prompt. Longer prompts are skipped and listed in ``refused``.
        rows: rows of the split, already loaded; None to load them with ``load_rows``.
        images: reader of the rows' images (None if the model has no vision tower).

    Raises:
        ConfigError: if the rows, their prompts or the chat template are invalid, or if all prompts are too long.
    """

    items = "prompts"
    """Noun for the skipped items in messages."""

    def __init__(
        self,
        dataset: DatasetConfig,
        environments: Mapping[str, Any],
        tokenizer: Tokenizer,
        *,
        split: str,
        seed: int,
        max_prompt_tokens: int,
        rows: list[Row] | None = None,
        images: ImageReader | None = None,
    ):
        self.environment = environment_of(dataset, environments, split)
        self._split = split
        self._seed = seed
        self._shuffle = dataset.shuffle
        self._max_prompt_tokens = max_prompt_tokens
        self._environments = environments
        self._tokenizer = tokenizer
        self._images = images
        self.refused: list[RefusedPrompt] = []
        """Rows that are skipped because of their length."""
        self._prompts: Sequence[Prompt] = []
        rows = load_rows(dataset, environments, split, seed) if rows is None else rows
        if images is not None and dataset.strided is None:
            from gdpo_nemo.data.row_images import rows_with_images  # text-only runs do not need it

            rows = rows_with_images(rows, dataset, split, images.limits, placeholder=images.placeholder)
        verifiers = [environment_of_row(row, dataset, environments, split, index) for index, row in enumerate(rows)]
        texts = self._read(rows, verifiers, dataset)
        self.fingerprint = _fingerprint(rows, texts, self.environment)
        """SHA-256 of all rows in order, including skipped rows and hashes of images, to detect changed data."""
        self.order = lru_cache(maxsize=8)(self._draw_order)
        """Function that returns the indices of the prompts of an epoch, in order: int64 [prompts]. The sources of
        ``data.mix`` may be in different epochs."""

    def _read(self, rows: list[Row], verifiers: Sequence[str], dataset: DatasetConfig) -> list[str]:
        """Fill ``_prompts`` and ``refused``. Return the prompt text of every row, including skipped rows."""
        split = self._split
        render = _Renderer(dataset, self._environments, self._tokenizer, split)
        rows = [_cleaned(row, split, index) for index, row in enumerate(rows)]
        prompts = [render(index, row, verifier) for index, (row, verifier) in enumerate(zip(rows, verifiers))]
        texts = [prompt.text for prompt in prompts]
        from_template = [render.chat or prompt.messages is not None for prompt in prompts]
        with uncollected():  # tokenization creates a few permanent objects per row
            token_ids = tokenise(self._tokenizer, texts, from_template)
            if [] in token_ids:
                raise ConfigError(f"data.{split}: row {token_ids.index([])}: the prompt has no tokens")
            fitting = []
            for index, (row, prompt, ids, verifier) in enumerate(zip(rows, prompts, token_ids, verifiers)):
                tokens, images = self._placed(index, np.asarray(ids, dtype=np.int32), prompt.images)
                if len(tokens) > self._max_prompt_tokens:
                    self.refused.append(RefusedPrompt(row["id"], len(tokens)))
                    continue
                fields = {name: value for name, value in row.items() if name not in (render.key, "id")}
                fitting.append(Prompt(row["id"], tokens, prompt.text, verifier, fields, prompt.messages, images))
        self._prompts = fitting
        if not fitting:
            shortest = min(refused.tokens for refused in self.refused)
            raise ConfigError(
                f"data.{split}: all {len(rows)} prompts are longer than {self._max_prompt_tokens} tokens "
                f"(the shortest has {shortest}); raise policy.max_total_sequence_length"
            )
        return texts

    def _placed(self, index: int, token_ids: np.ndarray, images: Sequence[Image]) -> tuple[np.ndarray, Images]:
        """Return the tokens of row ``index`` with all placeholders of its images, and the images with positions."""
        if self._images is None:
            return token_ids, ()
        try:
            return self._images.place(token_ids, images)
        except ValueError as error:
            raise ConfigError(f"data.{self._split}: row {index}: the rendered prompt has {error}") from None

    def __len__(self) -> int:
        """Return the number of prompts in one epoch. Skipped prompts are not counted."""
        return len(self._prompts)

    def batch(self, position: int, n: int) -> list[Prompt]:
        """Return ``n`` consecutive prompts.

        The result depends only on the arguments, the seed and the data. If the batch spans two epochs, a prompt may
        occur in it twice. ``#2``, ``#3``, ... is then appended to the id, because samples are grouped by id.

        Args:
            position: prompt index of the first prompt, counted since the start of training.
        """
        prompts: list[Prompt] = []
        for index in range(position, position + n):
            epoch, offset = divmod(index, len(self))
            prompts.append(self._prompts[self.order(epoch)[offset]])
        return with_unique_ids(prompts)

    def head(self, n: int | None = None) -> list[Prompt]:
        """Return the first ``n`` prompts in dataset order, or all prompts if ``n`` is None. Used for validation."""
        return list(self._prompts[:n])

    def one_of_each_row(self) -> list[Prompt]:
        """Return one prompt per row, for checks of the row contents. Skipped rows are not included."""
        return self.head()

    def summary(self, first: int | None = None) -> str:
        """Return a short description with the longest prompt and the number of skipped rows.

        Args:
            first: number of rows that were loaded (None if all rows of the split were loaded).
        """
        which = "prompts" if first is None else f"the first {first} prompts"
        longest = max(len(prompt.token_ids) for prompt in self.head())
        refused = f"; {len(self.refused)} longer than {self._max_prompt_tokens} are skipped" if self.refused else ""
        return f"{which} of at most {longest} tokens{refused}"

    def left_out(self) -> str:
        """Return a message about the skipped rows, or an empty text if no row is skipped."""
        if not self.refused:
            return ""
        return (
            f"data.{self._split}: {len(self.refused)} {self._limit()} and are skipped; the first "
            f"is {self.refused[0].id} with {self.refused[0].tokens} tokens"
        )

    def _limit(self) -> str:
        """Return the reason why rows are skipped, as a clause for messages."""
        return f"{self.items} are longer than {self._max_prompt_tokens} tokens"

    def _draw_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self))
        return np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(len(self))


def check_prompts(rows: Sequence[Row], dataset: DatasetConfig, split: str) -> None:
    """Raise ConfigError if the prompt of a row is missing or malformed. This check does not need a tokenizer."""
    prompt = _PromptColumn(dataset, split)
    for index, row in enumerate(rows):
        prompt(index, _cleaned(row, split, index))


def _cleaned(row: Row, split: str, index: int) -> Row:
    try:
        return clean_columns(row)
    except ValueError as error:
        raise ConfigError(f"data.{split}: row {index}: {error}") from None


class _PromptColumn:
    """Reads and checks the prompt of a row: text, or chat messages that do not end with an assistant turn."""

    def __init__(self, dataset: DatasetConfig, split: str):
        self.key = dataset.prompt_key or ""
        self._split = split

    def __call__(self, index: int, row: Row) -> str | Messages:
        value = self._value(index, row)
        self._check_media(index, row)
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
            raise self.error(index, f"{self.key!r} must be text or a list of messages, got {type(value).__name__}")
        if not all(isinstance(message.get("role"), str) for message in value):
            raise self.error(index, f"a message in {self.key!r} has no role")
        if value[-1]["role"] == "assistant":
            raise self.error(index, f"{self.key!r} must not end with an assistant turn")
        try:
            return chat_messages(value, row.get("tools"), images=True)
        except ValueError as error:
            raise self.error(index, f"{self.key!r}: {error}") from None

    def _value(self, index: int, row: Row) -> Any:
        if not self.key:
            self.key = next((key for key in PROMPT_KEYS if key in row), "")
        if not self.key:
            known = ", ".join(row)
            raise ConfigError(
                f"data.{self._split}.prompt_key: none of {', '.join(PROMPT_KEYS)} is a column; columns: {known}"
            )
        if self.key not in row:
            raise ConfigError(
                f"data.{self._split}.prompt_key: row {index}: no column {self.key!r}{nearest(self.key, row)}"
            )
        if not row[self.key]:
            raise self.error(index, f"the column {self.key!r} is empty")
        return row[self.key]

    def _check_media(self, index: int, row: Row) -> None:
        """Refuse a row with video, audio, or images that were not read, in columns as in TRL or in messages."""
        if kinds := media_of(row, self.key, _NOT_TEXT):
            raise self.error(index, f"contains {' and '.join(sorted(kinds))}, but only text is supported")

    def error(self, index: int, what: str) -> ConfigError:
        return ConfigError(f"data.{self._split}: row {index}: {what}")


class _Rendered(NamedTuple):
    """Prompt of a row."""

    text: str
    """Text with one placeholder per image."""
    messages: Messages | None
    """Chat messages, whose images are ``{"type": "image"}`` (None if the prompt is not a conversation)."""
    images: Sequence[Image]
    """Images in the order of their placeholders."""


class _Renderer:
    """Renders the prompt of a row as text, and as chat messages if it is a conversation."""

    def __init__(self, dataset: DatasetConfig, environments: Mapping[str, Any], tokenizer: Tokenizer, split: str):
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if dataset.chat and not has_template:
            raise ConfigError(f"data.{split}.chat: the tokenizer has no chat template")
        self.chat = has_template if dataset.chat is None else dataset.chat
        self._has_template = has_template
        self._template_kwargs = dict(dataset.chat_template_kwargs)
        self._prompt = _PromptColumn(dataset, split)
        self._tokenizer = tokenizer
        self._split = split
        self._dataset_system = dataset.system_prompt
        self._template = dataset.prompt_template
        self._environment_system = {name: environment.system_prompt for name, environment in environments.items()}
        offering = {name for name, environment in environments.items() if environment.offers_tools}
        self._offering = frozenset(offering)
        self._unchecked = offering
        """Environments with tools whose rendering by the template has not been checked yet."""
        self._system: str | None = None

    @property
    def key(self) -> str:
        """Column of the prompt, which is known after the first row is rendered."""
        return self._prompt.key

    def __call__(self, index: int, row: Row, environment: str) -> _Rendered:
        self._system = (
            self._environment_system.get(environment) if self._dataset_system is None else self._dataset_system
        )
        value = self._prompt(index, row)
        tools = row.get("tools")
        if (tools or environment in self._offering) and isinstance(value, str) and self.chat:
            value = [{"role": "user", "content": value}]
        if isinstance(value, str):
            value = self._apply_template(value)
            messages: Messages = [*self._system_message(), {"role": "user", "content": value}]
            plain = f"{self._system}\n\n{value}" if self._system else value
            if environment in self._offering:
                raise ConfigError(f"env.{environment}: tools require a chat template and data.{self._split}.chat")
            return _Rendered(self._rendered(index, messages, row) if self.chat else plain, None, ())
        conversation, images = without_images(self._messages(index, value))
        text = self._rendered(index, conversation, row, **({"tools": tools} if tools else {}))
        if environment in self._unchecked:
            self._unchecked.remove(environment)  # a check of one row is sufficient
            if text == self._rendered(index, conversation, row):
                raise ConfigError(f"env.{environment}: the tokenizer's chat template does not show tools to the model")
        return _Rendered(text, conversation, images)

    def _messages(self, index: int, value: Messages) -> Messages:
        """Return the row's messages with a system message. If the row has a system message, only a system message in
        the config replaces it."""
        if not self._has_template:
            raise self._prompt.error(
                index, f"{self.key!r} contains messages, which require a chat template; the tokenizer has none"
            )
        if self._template is not None:
            value = [*value[:-1], _with_last_text(value[-1], self._apply_template)]
        if value[0]["role"] != "system":
            return [*self._system_message(), *value]
        return value if self._dataset_system is None else [*self._system_message(), *value[1:]]

    def _apply_template(self, text: str) -> str:
        return text if self._template is None else self._template.replace("{prompt}", text)

    def _system_message(self) -> Messages:
        return [{"role": "system", "content": self._system}] if self._system else []

    def _rendered(self, index: int, messages: Messages, row: Row, **options: Any) -> str:
        """Apply the chat template, with ``chat_template_kwargs`` of the config and the row, and ``options``."""
        options = {**self._template_kwargs, **(row.get("chat_template_kwargs") or {}), **options}
        try:
            text = rendered(self._tokenizer, messages, True, **options)
        except Exception as error:  # templates may raise any exception, for instance for unknown roles
            raise self._prompt.error(index, f"the chat template rejected the row: {first_line(error)}") from error
        lost = lost_message(messages, text)
        if lost is not None:
            value = row[self.key]
            inserted = len(messages) - (1 if isinstance(value, str) else len(value))
            raise self._prompt.error(index, f"{self.key!r}: {lost_text(messages, lost, inserted)}")
        return text


def _with_last_text(message: Mapping[str, Any], change: Callable[[str], str]) -> Mapping[str, Any]:
    """Return a message with its text changed, or the last of its texts if it contains images."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": change(content)}
    last = max((index for index, part in enumerate(content) if part["type"] == "text"), default=None)
    if last is None:
        return {**message, "content": [*content, {"type": "text", "text": change("")}]}
    text = {"type": "text", "text": change(content[last]["text"])}
    return {**message, "content": [*content[:last], text, *content[last + 1 :]]}


def tokenise(tokenizer: Tokenizer, texts: list[str], rendered: list[bool]) -> list[list[int]]:
    """Return the token ids of each text.

    Args:
        rendered: for each text, True if a chat template has written it, including its special tokens. Otherwise the
            tokenizer adds special tokens.
    """
    ids: list[list[int]] = [[]] * len(texts)
    for from_template in set(rendered):
        indices = [index for index, kind in enumerate(rendered) if kind is from_template]
        encoded = tokenizer(
            [texts[index] for index in indices], add_special_tokens=not from_template, return_attention_mask=False
        )
        for index, tokens in zip(indices, encoded["input_ids"]):
            ids[index] = tokens
    return ids


def with_unique_ids(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Append ``#2``, ``#3``, ... to the ids of repeated prompts, because samples are grouped by id."""
    unique: list[Prompt] = []
    counts: dict[str, int] = {}
    for prompt in prompts:
        count = counts[prompt.id] = counts.get(prompt.id, 0) + 1
        unique.append(prompt if count == 1 else replace(prompt, id=f"{prompt.id}#{count}"))
    return unique


def _fingerprint(rows: list[Row], texts: list[str], environment: str) -> str:
    digest = hashlib.sha256(environment.encode())
    for row, text in zip(rows, texts):
        digest.update(_canonical([text, row]).encode())
    return digest.hexdigest()


_canonically = json.JSONEncoder(sort_keys=True, default=str).encode
"""Encoder with sorted keys. The encoder is created once, because ``json.dumps`` would create an encoder for every
row."""


def _canonical(value: Any) -> str:
    try:
        return _canonically(value)
    except TypeError:  # an environment may generate rows with keys that JSON does not allow
        return repr(value)
