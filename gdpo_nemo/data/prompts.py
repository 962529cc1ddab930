"""Prompts of one split, rendered and tokenised once, then dealt by position.

The order is a pure function of the seed and a position, so a resumed run needs nothing but the position it had
reached. Every epoch is a permutation of all rows.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.messages import first_line, nearest
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.rows import PROMPT_KEYS, Row, environment_of, environment_of_row, load_rows
from gdpo_nemo.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
_NOT_TEXT = ("image", "images", "image_url", "video", "videos", "audio")
"""Columns, and types of a message's parts, that hold what is not text."""


@dataclass(frozen=True)
class RefusedPrompt:
    """A prompt that leaves no room for a completion, or a text without room for a prompt."""

    id: str
    tokens: int


class PromptSource:
    """The prompts of one split.

    Args:
        dataset: the section ``data.<split>``.
        environments: the built environments by their names in the section ``env`` (``load_environments``). One of
            them makes the rows when the split has no path, and may bring a ``system_prompt``.
        tokenizer: a transformers tokenizer.
        split: train or validation; names the section in error messages and the ids of rows without one.
        seed: of the order, and of the rows where an environment draws them.
        max_prompt_tokens: longest prompt; longer ones are skipped and listed in ``refused``.
        rows: those of the split where ``load_rows`` has loaded them already.

    Raises:
        ConfigError: whatever is wrong with the rows (``load_rows``), their prompts, or the chat template; also when
            every prompt is too long.
    """

    what = "prompts"
    """What is counted where some are too long."""

    def __init__(
        self,
        dataset: DatasetConfig,
        environments: Mapping[str, Any],
        tokenizer: Any,
        *,
        split: str,
        seed: int,
        max_prompt_tokens: int,
        rows: list[Row] | None = None,
    ):
        self.environment = environment_of(dataset, environments, split)
        self._split = split
        self._seed = seed
        self._shuffle = dataset.shuffle
        self._room = max_prompt_tokens
        self._environments = environments
        self._tokenizer = tokenizer
        self.refused: list[RefusedPrompt] = []
        """Rows that were skipped because of their length."""
        self._prompts: Sequence[Prompt] = []
        rows = load_rows(dataset, environments, split, seed) if rows is None else rows
        verifiers = [environment_of_row(row, dataset, environments, split, index) for index, row in enumerate(rows)]
        asked = self._read(rows, verifiers, dataset)
        self.fingerprint = _fingerprint(rows, asked, self.environment)
        """SHA-256 over every row, refused ones too, in order: equal exactly when the data is."""
        self._order = lru_cache(maxsize=2)(self._draw_order)

    def _read(self, rows: list[Row], verifiers: Sequence[str], dataset: DatasetConfig) -> list[str]:
        """Fill in ``_prompts`` and ``refused``, and return what is asked of each row, refused ones too."""
        split = self._split
        render = _Renderer(dataset, self._environments, self._tokenizer, split)
        prompts = [render(index, row, verifier) for index, (row, verifier) in enumerate(zip(rows, verifiers))]
        texts = [text for text, _ in prompts]
        token_ids = tokenise(self._tokenizer, texts, [render.chat or messages is not None for _, messages in prompts])
        if [] in token_ids:
            raise ConfigError(f"data.{split}: row {token_ids.index([])}: the prompt has no tokens")
        self.refused = [
            RefusedPrompt(row["id"], len(ids)) for row, ids in zip(rows, token_ids) if len(ids) > self._room
        ]
        self._prompts = [
            self._prompt(row, text, ids, messages, render.key, verifier)
            for row, (text, messages), ids, verifier in zip(rows, prompts, token_ids, verifiers)
            if len(ids) <= self._room
        ]
        if not self._prompts:
            shortest = min(refused.tokens for refused in self.refused)
            raise ConfigError(
                f"data.{split}: all {len(rows)} prompts are longer than {self._room} tokens "
                f"(the shortest has {shortest}); raise policy.max_total_sequence_length"
            )
        return texts

    def __len__(self) -> int:
        """Prompts in one epoch, without the refused ones."""
        return len(self._prompts)

    def batch(self, position: int, n: int) -> list[Prompt]:
        """The ``n`` prompts from ``position``, the number of prompts dealt before since the start of training.

        A pure function of its arguments, the seed and the data. Where a batch meets a prompt twice (it spans two
        epochs), the repetitions have ``#2``, ``#3``, ... behind their ids, because samples are grouped by id.
        """
        prompts: list[Prompt] = []
        for place in range(position, position + n):
            epoch, offset = divmod(place, len(self))
            prompts.append(self._prompts[self._order(epoch)[offset]])
        return told_apart(prompts)

    def head(self, n: int | None = None) -> list[Prompt]:
        """The first ``n`` prompts (all of them when None) in the order of the data, for validation."""
        return list(self._prompts[:n])

    def one_of_each_row(self) -> list[Prompt]:
        """A prompt of every row that has some, for checks of what rows hold."""
        return self.head()

    def summary(self, first: int | None = None) -> str:
        """What the prompts are and how many rows have none, in a few words.

        Args:
            first: how many rows were given; None: all of the split.
        """
        which = "prompts" if first is None else f"the first {first} prompts"
        longest = max(len(prompt.token_ids) for prompt in self.head())
        refused = f"; {len(self.refused)} longer than {self._room} are left out" if self.refused else ""
        return f"{which} of at most {longest} tokens{refused}"

    def left_out(self) -> str:
        """A sentence on the rows that are left out; empty: none are."""
        if not self.refused:
            return ""
        return (
            f"data.{self._split}: {len(self.refused)} {self._limit()} and are left out, the first of them "
            f"{self.refused[0].id} with {self.refused[0].tokens}"
        )

    def _limit(self) -> str:
        """What the refused rows are."""
        return f"{self.what} are longer than {self._room} tokens"

    def _prompt(
        self, row: Row, text: str, token_ids: Sequence[int], messages: Messages | None, key: str, environment: str
    ) -> Prompt:
        fields = {name: value for name, value in row.items() if name not in (key, "id")}
        return Prompt(row["id"], np.asarray(token_ids, dtype=np.int32), text, environment, fields, messages)

    def _draw_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self))
        return np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(len(self))


def check_prompts(rows: Sequence[Row], dataset: DatasetConfig, split: str) -> None:
    """Every row has a prompt, as far as that can be told without a tokenizer. Raises ConfigError."""
    prompt = _PromptColumn(dataset, split)
    for index, row in enumerate(rows):
        prompt(index, row)


class _PromptColumn:
    """The prompt of a row: text, or chat messages that leave the assistant something to say."""

    def __init__(self, dataset: DatasetConfig, split: str):
        self.key = dataset.prompt_key or ""
        self._split = split

    def __call__(self, index: int, row: Row) -> str | Messages:
        value = self._value(index, row)
        self._check_text_alone(index, row, value)
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
            raise self.error(index, f"{self.key!r} must be text or a list of messages, not {type(value).__name__}")
        for message in value:
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise self.error(index, f"a message in {self.key!r} lacks its role or its content")
        if value[-1]["role"] == "assistant":
            raise self.error(index, f"{self.key!r} ends with the assistant's turn, so there is nothing to answer")
        return value

    def _value(self, index: int, row: Row) -> Any:
        if not self.key:
            self.key = next((key for key in PROMPT_KEYS if key in row), "")
        if not self.key:
            known = ", ".join(row)
            raise ConfigError(f"data.{self._split}.prompt_key: none of {', '.join(PROMPT_KEYS)} in the columns {known}")
        if self.key not in row:
            raise ConfigError(
                f"data.{self._split}.prompt_key: row {index}: no column {self.key!r}{nearest(self.key, row)}"
            )
        if not row[self.key]:
            raise self.error(index, f"the column {self.key!r} is empty")
        return row[self.key]

    def _check_text_alone(self, index: int, row: Row, value: Any) -> None:
        """Refuse images and sound, in columns as TRL has them or as parts of messages."""
        messages = value if isinstance(value, list) else []
        contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        kinds = {str(part.get("type")) for part in parts if isinstance(part, Mapping)} & set(_NOT_TEXT)
        kinds |= {name for name in _NOT_TEXT if name != self.key and row.get(name)}
        if kinds:
            raise self.error(index, f"has {' and '.join(sorted(kinds))} in it, and models here read text alone")

    def error(self, index: int, what: str) -> ConfigError:
        return ConfigError(f"data.{self._split}: row {index}: {what}")


class _Renderer:
    """Turns a row into the text the model reads, and into its chat messages where the row holds such."""

    def __init__(self, dataset: DatasetConfig, environments: Mapping[str, Any], tokenizer: Any, split: str):
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if dataset.chat and not has_template:
            raise ConfigError(f"data.{split}.chat: the tokenizer has no chat template")
        self.chat = has_template if dataset.chat is None else dataset.chat
        self._has_template = has_template
        self._template_kwargs = dict(dataset.chat_template_kwargs)
        self._prompt = _PromptColumn(dataset, split)
        self._tokenizer = tokenizer
        self._split = split
        self._demanded = dataset.system_prompt
        self._template = dataset.prompt_template
        self._own = {name: environment.system_prompt for name, environment in environments.items()}
        offering = {name for name, environment in environments.items() if environment.offers_tools}
        self._offering = frozenset(offering)
        self._unproven = offering
        """Environments of which no row has shown that the template renders their tools."""
        self._system: str | None = None

    @property
    def key(self) -> str:
        """The prompt's column, once a row was rendered."""
        return self._prompt.key

    def __call__(self, index: int, row: Row, environment: str) -> tuple[str, Messages | None]:
        self._system = self._own.get(environment) if self._demanded is None else self._demanded
        value = self._prompt(index, row)
        if environment in self._offering and isinstance(value, str) and self.chat:
            value = [{"role": "user", "content": value}]
        if isinstance(value, str):
            value = self._around(value)
            messages: Messages = [*self._system_message(), {"role": "user", "content": value}]
            plain = f"{self._system}\n\n{value}" if self._system else value
            if environment in self._offering:
                raise ConfigError(f"env.{environment}: tools require a chat template and data.{self._split}.chat")
            return (self._rendered(index, messages, row) if self.chat else plain), None
        conversation = self._messages(index, value)
        tools = row.get("tools")
        how = {"tools": tools} if isinstance(tools, list) and tools else {}
        text = self._rendered(index, conversation, row, **how)
        if environment in self._unproven:
            self._unproven.remove(environment)  # one row shows it for all
            if text == self._rendered(index, conversation, row):
                raise ConfigError(f"env.{environment}: the tokenizer's chat template does not show tools to the model")
        return text, conversation

    def _messages(self, index: int, value: Messages) -> Messages:
        """The row's messages. Its own system message stays unless the config demands another."""
        if not self._has_template:
            raise self._prompt.error(
                index, f"{self.key!r} holds messages, which need a chat template; the tokenizer has none"
            )
        if self._template is not None:
            if not isinstance(value[-1]["content"], str):
                raise self._prompt.error(index, f"prompt_template needs text in the last message of {self.key!r}")
            value = [*value[:-1], {**value[-1], "content": self._around(value[-1]["content"])}]
        if value[0]["role"] != "system":
            return [*self._system_message(), *value]
        return value if self._demanded is None else [*self._system_message(), *value[1:]]

    def _around(self, text: str) -> str:
        return text if self._template is None else self._template.replace("{prompt}", text)

    def _system_message(self) -> Messages:
        return [{"role": "system", "content": self._system}] if self._system else []

    def _rendered(self, index: int, messages: Messages, row: Row, **how: Any) -> str:
        """The chat as text; ``chat_template_kwargs`` of the config and of the row go to the template, too."""
        own = row.get("chat_template_kwargs")
        if own is not None and not isinstance(own, Mapping):
            raise self._prompt.error(index, f"chat_template_kwargs must be a mapping, not {own!r}")
        how = {**self._template_kwargs, **(own or {}), **how}
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **how
            )
            return text
        except Exception as error:  # a template may raise anything, for instance on roles it does not know
            raise self._prompt.error(index, f"the chat template refuses it: {first_line(error)}") from error


def tokenise(tokenizer: Any, texts: list[str], rendered: list[bool]) -> list[list[int]]:
    """Token ids per text. A chat template writes the special tokens itself; plain text gets the tokenizer's own."""
    ids: list[list[int]] = [[]] * len(texts)
    for of_template in set(rendered):
        places = [place for place, kind in enumerate(rendered) if kind is of_template]
        made = tokenizer(
            [texts[place] for place in places], add_special_tokens=not of_template, return_attention_mask=False
        )
        for place, tokens in zip(places, made["input_ids"]):
            ids[place] = tokens
    return ids


def told_apart(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, where one comes again with ``#2``, ``#3``, ... behind its id: samples are grouped by id."""
    found: list[Prompt] = []
    times: dict[str, int] = {}
    for prompt in prompts:
        times[prompt.id] = times.get(prompt.id, 0) + 1
        found.append(prompt if times[prompt.id] == 1 else _again(prompt, times[prompt.id]))
    return found


def _again(prompt: Prompt, times: int) -> Prompt:
    return replace(prompt, id=f"{prompt.id}#{times}")


def _fingerprint(rows: list[Row], texts: list[str], environment: str) -> str:
    digest = hashlib.sha256(environment.encode())
    for row, text in zip(rows, texts):
        digest.update(_canonical([text, row]).encode())
    return digest.hexdigest()


def _canonical(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except TypeError:  # keys that JSON cannot have, in rows that an environment made
        return repr(value)
