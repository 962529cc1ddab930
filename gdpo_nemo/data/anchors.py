"""Prompts cut out of raw text at the level of tokens: EBFT's strided mode (arXiv 2603.12248, axolotl's keys).

The first anchor of a text is at token ``context_length``, the others follow every ``stride`` tokens: axolotl's places.
The ``context_length`` tokens before an anchor are a prompt and the ``generate_max_len`` tokens behind it are the data's
answer. Axolotl samples such blocks inside one sequence, under a mask by which a block sees the whole text before its
anchor (``_strided_mask_mod``); here each is a separate prompt of exactly ``context_length`` tokens.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Mapping, Sequence, overload

import numpy as np

from gdpo_nemo.config.messages import nearest
from gdpo_nemo.config.schema import DatasetConfig, StridedConfig
from gdpo_nemo.data.prompts import PromptSource, RefusedPrompt, tokenise
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.rows import Row
from gdpo_nemo.errors import ConfigError

TEXT_KEY = "text"
"""Column that is taken for the text when the config names none."""


def anchors_of(tokens: int, strided: StridedConfig) -> range:
    """Return the anchors of a text, ascending: the first has ``context_length`` tokens before it, and each has
    ``generate_max_len`` tokens behind it.

    Args:
        tokens: tokens of the text.
    """
    return range(strided.context_length, tokens - strided.generate_max_len + 1, strided.stride)


def prompts_of(dataset: DatasetConfig, *arguments: Any, **options: Any) -> PromptSource:
    """The prompts of a split, whose rows are prompts or texts with anchors; called as ``PromptSource`` is."""
    return (PromptSource if dataset.strided is None else AnchorSource)(dataset, *arguments, **options)


def check_texts(rows: Sequence[Row], dataset: DatasetConfig, split: str) -> None:
    """Every row has a text, as far as that can be told without a tokenizer. Raises ConfigError."""
    key = _text_key(dataset)
    for index, row in enumerate(rows):
        if key not in row:
            raise ConfigError(f"data.{split}.prompt_key: row {index}: no column {key!r}{nearest(key, row)}")
        if not row[key]:
            raise ConfigError(f"data.{split}: row {index}: the column {key!r} is empty")
        if not isinstance(row[key], str):
            kind = type(row[key]).__name__
            raise ConfigError(f"data.{split}: row {index}: {key!r} must be text, of which anchors are cut, not {kind}")


class AnchorSource(PromptSource):
    """The anchors of one split, each a prompt with ``answer_ids``; dealt in one order over all texts.

    The id is ``<row id>@<anchor>``. A column ``answer`` holds the answer as text, for environments that read one; the
    text itself is left out of the columns. Texts without an anchor are in ``refused``. A text is tokenised as a prompt
    without chat template is, special tokens included. Arguments and errors are those of ``PromptSource``.
    """

    def one_of_each_row(self) -> list[Prompt]:
        """The first anchor of every text."""
        return [self._anchors[place] for place in self._anchors.first]

    def summary(self, first: int | None = None) -> str:
        """How many anchors there are, and how many texts have none; arguments as of ``PromptSource.summary``."""
        strided = self._strided
        which = "" if first is None else f" in the first {first} texts"
        refused = f"; {len(self.refused)} {self._limit()} and are left out" if self.refused else ""
        return (
            f"{len(self)} anchors{which}, each with {strided.context_length} tokens before it and "
            f"{strided.generate_max_len} behind it{refused}"
        )

    def _limit(self) -> str:
        return f"texts are shorter than the {_needed(self._strided)} tokens that an anchor takes"

    def _read(self, rows: list[Row], verifiers: Sequence[str], dataset: DatasetConfig) -> list[str]:
        assert dataset.strided is not None
        self._strided: StridedConfig = dataset.strided
        check_texts(rows, dataset, self._split)
        self._check_verifiers(set(verifiers))
        key = _text_key(dataset)
        texts = [row[key] for row in rows]
        token_ids = tokenise(self._tokenizer, texts, [False] * len(texts))
        documents = []
        for row, ids, verifier in zip(rows, token_ids, verifiers):
            if anchors_of(len(ids), self._strided):
                fields = {name: value for name, value in row.items() if name not in (key, "id")}
                documents.append(_Document(row["id"], np.asarray(ids, dtype=np.int32), verifier, fields))
            else:
                self.refused.append(RefusedPrompt(row["id"], len(ids)))
        if not documents:
            longest = max(refused.tokens for refused in self.refused)
            raise ConfigError(
                f"data.{self._split}.strided: all {len(rows)} {self._limit()} (the longest has {longest}); lower "
                "context_length or generate_max_len"
            )
        self._prompts = self._anchors = _Anchors(documents, self._strided, self._tokenizer)
        return [f"{self._strided} {text}" for text in texts]

    def _check_verifiers(self, names: set[str]) -> None:
        for name in sorted(names & set(self._environments)):
            environment = self._environments[name]
            if environment.has_turns or environment.plays_with_endpoint:
                raise ConfigError(
                    f"data.{self._split}.strided: environment {name!r} plays episodes, and an anchor of a text is gone "
                    "on from once"
                )


@dataclass(frozen=True)
class _Document:
    """A text in tokens."""

    id: str
    token_ids: np.ndarray
    """int32 [tokens]"""
    environment: str
    fields: Mapping[str, Any]


class _Anchors(abc.Sequence[Prompt]):
    """The anchors of documents, in order, made when they are asked for: there are as many as tokens by stride."""

    def __init__(self, documents: Sequence[_Document], strided: StridedConfig, tokenizer: Any):
        self._documents = documents
        self._strided = strided
        counts = [len(anchors_of(len(document.token_ids), strided)) for document in documents]
        ends = list(accumulate(counts))
        self.first: list[int] = [0, *ends[:-1]]
        """By document, the place of its first anchor."""
        self._ends = np.array(ends)
        self._text = partial(tokenizer.decode, clean_up_tokenization_spaces=False)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(place)
        number = int(np.searchsorted(self._ends, place, side="right"))
        document = self._documents[number]
        anchor = anchors_of(len(document.token_ids), self._strided)[place - self.first[number]]
        context = document.token_ids[anchor - self._strided.context_length : anchor]
        answer = document.token_ids[anchor : anchor + self._strided.generate_max_len]
        fields = {**document.fields, "answer": self._text(answer.tolist(), skip_special_tokens=True)}
        text = self._text(context.tolist())
        return Prompt(f"{document.id}@{anchor}", context, text, document.environment, fields, answer_ids=answer)


def _text_key(dataset: DatasetConfig) -> str:
    return dataset.prompt_key or TEXT_KEY


def _needed(strided: StridedConfig) -> int:
    """Tokens of the shortest text that has an anchor."""
    return strided.context_length + strided.generate_max_len
