"""Prompts with the answers that are trained: the rows of supervised and preference training, tokenised.

A conversation is rendered turn by turn with the tokenizer's chat template, and each piece of text is tokenised by
itself. The tokens before an answer are therefore those that an engine would be asked with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.algorithm_choice import has_score_head, rows_of
from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.schema import Config, DatasetConfig
from gdpo_nemo.data.anchors import check_texts, prompts_of
from gdpo_nemo.data.example_rows import ExampleReader
from gdpo_nemo.data.prompts import PromptSource, RefusedPrompt, check_prompts
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.rows import Row, load_rows
from gdpo_nemo.errors import ConfigError


@dataclass(frozen=True)
class Answer:
    """One answer to a prompt."""

    token_ids: np.ndarray
    """int32 [tokens], its end included"""
    mask: np.ndarray | None
    """bool [tokens]: those that are trained; None: all."""
    sign: int
    """1, or -1 where it is the rejected or undesirable one"""


class ExampleSource(PromptSource):
    """The rows of one split; ``Prompt.fields["answers"]`` holds the ``Answer`` of each.

    Args:
        kind: ``sft``, ``pairs`` or ``single`` (KTO).
        whole: keep what a template writes behind the end of the last turn: a reward model's score is read at the very
            last token.
        max_prompt_tokens: one less than what a prompt may have together with its longest answer; the other arguments
            are those of ``PromptSource``.

    Raises:
        ConfigError: whatever is wrong with the rows, or the chat template cannot say which tokens are the assistant's.
    """

    what = "rows, with their answers,"

    def __init__(
        self,
        dataset: DatasetConfig,
        environments: Mapping[str, Any],
        tokenizer: Any,
        *,
        split: str,
        seed: int,
        max_prompt_tokens: int,
        kind: str,
        whole: bool = False,
        rows: list[Row] | None = None,
    ):
        rows = load_rows(dataset, environments, split, seed) if rows is None else rows
        read = ExampleReader(split, kind, dataset.type, dataset.prompt_key)
        literal = isinstance(dataset.type, Mapping) or str(dataset.type).startswith(("chatml.", "llama3."))
        chat = False if literal else dataset.chat
        spoken = bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat
        made = [_as_messages(found, spoken) for index, row in enumerate(rows) for found in read(index, row)]
        plain = replace(dataset, prompt_key="prompt", columns={}, type=None, chat=chat)
        super().__init__(
            plain,
            environments,
            tokenizer,
            split=split,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            rows=made,
        )
        encode = _Encoder(tokenizer, split, dataset, whole)
        room = max_prompt_tokens + 1
        encoded = [encode(prompt) for prompt in self._prompts]
        lengths = [
            len(prompt.token_ids) + max(len(answer.token_ids) for answer in prompt.fields["answers"])
            for prompt in encoded
        ]
        self.refused += [RefusedPrompt(p.id, length) for p, length in zip(encoded, lengths) if length > room]
        self._prompts = [prompt for prompt, length in zip(encoded, lengths) if length <= room]
        if not self._prompts:
            raise ConfigError(
                f"data.{split}: all {len(made)} rows are longer than {room} tokens with their answers (the shortest "
                f"has {min(lengths)}); raise policy.max_total_sequence_length"
            )


def source_of(config: Config) -> Callable[..., PromptSource]:
    """What reads the rows of the run's algorithm; called as ``PromptSource`` is."""
    kind = rows_of(config)
    return prompts_of if kind is None else partial(ExampleSource, kind=kind, whole=has_score_head(config))


def check_rows(config: Config, rows: Sequence[Row], dataset: DatasetConfig, split: str) -> None:
    """Every row has what the run's algorithm reads, as far as that can be told without a tokenizer. Raises
    ConfigError."""
    kind = rows_of(config)
    if kind is None:
        check = check_prompts if dataset.strided is None else check_texts
        check(rows, dataset, split)
        return
    read = ExampleReader(split, kind, dataset.type, dataset.prompt_key)
    for index, row in enumerate(rows):
        read(index, row)


def _as_messages(row: Row, spoken: bool) -> Row:
    """Text as a turn of the user and one of the assistant, where the chat template is used."""
    if not spoken:
        return row
    prompt = row["prompt"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    answers = [
        ([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer, sign)
        for answer, sign in row["answers"]
    ]
    return {**row, "prompt": prompt, "answers": tuple(answers)}


class _Encoder:
    """Tokenises the answers of a prompt."""

    def __init__(self, tokenizer: Any, split: str, dataset: DatasetConfig, whole: bool = False):
        self._tokenizer = tokenizer
        self._whole = whole
        self._split = split
        self._train_on = dataset.train_on
        self._how = dict(dataset.chat_template_kwargs)

    def __call__(self, prompt: Prompt) -> Prompt:
        fields = dict(prompt.fields)
        answers = [self._answer(prompt, answer, sign) for answer, sign in fields["answers"]]
        for answer in answers:
            if not len(answer.token_ids) or (answer.mask is not None and not answer.mask.any()):
                raise self._error(prompt, "an answer has no token that could be trained")
        if self._train_on != "all":
            return replace(prompt, fields={**fields, "answers": tuple(answers)})
        # Nothing comes before the first token that could predict it.
        first = prompt.token_ids[:1]
        rest = prompt.token_ids[1:]
        whole = [Answer(np.concatenate((rest, answer.token_ids)), None, answer.sign) for answer in answers]
        return replace(prompt, token_ids=first, fields={**fields, "answers": tuple(whole)})

    def _answer(self, prompt: Prompt, answer: Any, sign: int) -> Answer:
        if isinstance(answer, str):
            return Answer(self._ended(self._tokens(answer)), None, sign)
        if prompt.messages is None:
            raise self._error(prompt, "the prompt is text and the answer is messages, which need a chat template")
        pieces, trained = self._turns(prompt, answer)
        if self._train_on == "last":
            trained = [False] * (len(trained) - 1) + [True]
        ids: list[int] = []
        mask: list[bool] = []
        for place, (text, ours) in enumerate(zip(pieces, trained)):
            tokens = self._tokens(text)
            spoken = self._spoken(tokens)
            if place == len(pieces) - 1:
                tokens = tokens[: None if self._whole else spoken] if spoken else self._closed(tokens, text)
                spoken = len(tokens)
            ids += tokens
            mask += [ours and n < (spoken or len(tokens)) for n in range(len(tokens))]
        return Answer(np.array(ids, np.int32), None if all(mask) else np.array(mask), sign)

    def _turns(self, prompt: Prompt, answer: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[bool]]:
        """The text behind the prompt in pieces, and whether each is the assistant's."""
        before = list(prompt.messages or ())
        pieces: list[str] = []
        trained: list[bool] = []
        done = prompt.text
        for place, message in enumerate(answer):
            if message["role"] != "assistant":
                continue
            if place:
                start = self._rendered(prompt, [*before, *answer[:place]], True)
                pieces.append(self._behind(prompt, start, done))
                trained.append(False)
                done = start
            end = self._rendered(prompt, [*before, *answer[: place + 1]], False)
            pieces.append(self._behind(prompt, end, done))
            trained.append(True)
            done = end
        return pieces, trained

    def _behind(self, prompt: Prompt, text: str, begin: str) -> str:
        if not text.startswith(begin):
            raise self._error(
                prompt, "the chat template writes earlier turns otherwise when another follows, so that the "
                "assistant's tokens cannot be told; keep its last turn alone"
            )  # fmt: skip
        return text[len(begin) :]

    def _rendered(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]], generation: bool) -> str:
        tools = prompt.fields.get("tools")
        how = {**self._how, **(prompt.fields.get("chat_template_kwargs") or {})}
        if isinstance(tools, list) and tools:
            how["tools"] = tools
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation, **how
            )
            return text
        except Exception as error:  # a template may raise anything
            raise self._error(prompt, f"the chat template refuses it: {first_line(error)}") from error

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _spoken(self, tokens: list[int]) -> int:
        """Tokens up to the first end; behind it a template may have a line break, which no policy writes. 0: none."""
        end = self._tokenizer.eos_token_id
        return tokens.index(end) + 1 if end in tokens else 0

    def _closed(self, tokens: list[int], text: str) -> list[int]:
        """Tokens of a last turn, ended where its template writes no end of any kind."""
        closing = tuple(self._tokenizer.all_special_tokens)
        return tokens if text.rstrip().endswith(closing) else self._ended(tokens).tolist()

    def _ended(self, tokens: list[int]) -> np.ndarray:
        end = self._tokenizer.eos_token_id
        return np.array(tokens if end is None or tokens[-1:] == [end] else [*tokens, end], np.int32)

    def _error(self, prompt: Prompt, what: str) -> ConfigError:
        return ConfigError(f"data.{self._split}: row {prompt.id}: {what}")
