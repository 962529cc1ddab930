"""Prompts that are cut out of raw text at regular token positions, for EBFT's strided mode (arXiv 2603.12248).

The first anchor of a text is at token ``context_length``, and further anchors follow every ``stride`` tokens, as in
axolotl. The ``context_length`` tokens before an anchor are the prompt. The ``generate_max_len`` tokens after an anchor
are the reference answer. Axolotl samples all blocks of a text inside one sequence. Axolotl's attention mask lets a
block attend to the whole text before the block's anchor (``_strided_mask_mod``). In this project, each block is a
separate prompt of exactly ``context_length`` tokens.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from gdpo_nemo.config.schema import DatasetConfig, StridedConfig
from gdpo_nemo.data.prompts import PromptSource, RefusedPrompt, tokenise
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.rows import Row
from gdpo_nemo.utils.errors import ConfigError, nearest

if TYPE_CHECKING:
    from gdpo_nemo.data.tokenizer import Tokenizer

TEXT_KEY = "text"
"""Default name of the text column."""


def anchors_of(tokens: int, strided: StridedConfig) -> range:
    """Return the token positions of a text's anchors, in ascending order.

    The first anchor is after ``context_length`` tokens. Every anchor is followed by at least ``generate_max_len``
    tokens.

    Args:
        tokens: number of tokens in the text.
    """
    return range(strided.context_length, tokens - strided.generate_max_len + 1, strided.stride)


def prompts_of(dataset: DatasetConfig, *arguments: Any, **options: Any) -> PromptSource:
    """Create an ``AnchorSource`` for a split with raw texts, otherwise a ``PromptSource``, with these arguments."""
    return (PromptSource if dataset.strided is None else AnchorSource)(dataset, *arguments, **options)


def check_texts(rows: Sequence[Row], dataset: DatasetConfig, split: str) -> None:
    """Raise ConfigError if the text of a row is missing, empty or not a string. This check does not need a
    tokenizer."""
    key = _text_key(dataset)
    for index, row in enumerate(rows):
        if key not in row:
            raise ConfigError(f"data.{split}.prompt_key: row {index}: no column {key!r}{nearest(key, row)}")
        if not row[key]:
            raise ConfigError(f"data.{split}: row {index}: the column {key!r} is empty")
        if not isinstance(row[key], str):
            kind = type(row[key]).__name__
            raise ConfigError(f"data.{split}: row {index}: {key!r} must be text for anchors, got {kind}")


class AnchorSource(PromptSource):
    """Prompts of one split, one per anchor, with ``answer_ids``. One permutation orders the anchors of all texts.

    The id of a prompt is ``<row id>@<anchor>``. The prompt's column ``answer`` contains the answer as text, for
    environments that read this column. The column with the source text is removed. Texts that are too short for an
    anchor are listed in ``refused``. Texts are tokenized with special tokens and without a chat template. For arguments
    and exceptions, see ``PromptSource``.
    """

    def one_of_each_row(self) -> list[Prompt]:
        """Return the first anchor of every text."""
        return [self._anchors[index] for index in self._anchors.first]

    def summary(self, first: int | None = None) -> str:
        """Describe the number of anchors and of skipped texts. For the arguments, see ``PromptSource.summary``."""
        strided = self._strided
        which = "" if first is None else f" in the first {first} texts"
        refused = f"; {len(self.refused)} {self._limit()} and are skipped" if self.refused else ""
        return (
            f"{len(self)} anchors{which}, each with {strided.context_length} prompt tokens "
            f"and {strided.generate_max_len} answer tokens{refused}"
        )

    def _limit(self) -> str:
        return f"texts are shorter than the minimum of {_needed(self._strided)} tokens for one anchor"

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
                    f"data.{self._split}.strided: not supported with environment {name!r}, which has episodes of "
                    "several turns"
                )


@dataclass(frozen=True)
class _Document:
    """A tokenized text."""

    id: str
    token_ids: np.ndarray
    """int32 [tokens]"""
    environment: str
    fields: Mapping[str, Any]


class _Anchors(abc.Sequence[Prompt]):
    """Sequence of the prompts for all anchors. Prompts are created on access, because long texts have many anchors."""

    def __init__(self, documents: Sequence[_Document], strided: StridedConfig, tokenizer: Tokenizer):
        self._documents = documents
        self._strided = strided
        counts = [len(anchors_of(len(document.token_ids), strided)) for document in documents]
        ends = list(accumulate(counts))
        self.first: list[int] = [0, *ends[:-1]]
        """Index of the first anchor of each document."""
        self._ends = np.array(ends)
        self._text = partial(tokenizer.decode, clean_up_tokenization_spaces=False)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._ends, index, side="right"))
        document = self._documents[number]
        anchor = anchors_of(len(document.token_ids), self._strided)[index - self.first[number]]
        context = document.token_ids[anchor - self._strided.context_length : anchor]
        answer = document.token_ids[anchor : anchor + self._strided.generate_max_len]
        fields = {**document.fields, "answer": self._text(answer.tolist(), skip_special_tokens=True)}
        text = self._text(context.tolist())
        return Prompt(f"{document.id}@{anchor}", context, text, document.environment, fields, answer_ids=answer)


def _text_key(dataset: DatasetConfig) -> str:
    return dataset.prompt_key or TEXT_KEY


def _needed(strided: StridedConfig) -> int:
    """Return the minimum number of tokens that a text needs for one anchor."""
    return strided.context_length + strided.generate_max_len
