"""Tokenized rows of supervised and preference training: prompts with the answers to train.

A conversation is rendered turn by turn with the tokenizer's chat template, and each turn is tokenized separately. The
tokens before an answer are therefore the same as in a prompt that an engine receives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.algorithm_choice import AlgorithmSpec
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.anchors import check_texts, prompts_of
from gdpo_nemo.data.example_rows import ExampleReader
from gdpo_nemo.data.messages import lost_message, lost_text, rendered
from gdpo_nemo.data.prompts import PromptSource, RefusedPrompt, check_prompts
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.rows import Row, load_rows
from gdpo_nemo.utils.errors import ConfigError, first_line

if TYPE_CHECKING:
    from gdpo_nemo.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answer:
    """One answer to a prompt."""

    token_ids: np.ndarray
    """int32 [tokens], including the end token"""
    mask: np.ndarray | None
    """bool [tokens]: True for trained tokens. None: all tokens are trained."""
    sign: int
    """-1 for a rejected or undesirable answer, otherwise 1"""


class ExampleSource(PromptSource):
    """Prompts of one split with answers. ``Prompt.fields["answers"]`` contains a tuple of ``Answer`` objects.

    Args:
        kind: kind of rows: ``sft``, ``pairs`` or ``single`` (KTO).
        keep_suffix: True to keep the text that the chat template writes after the end token of the last turn. A reward
            model needs this text, because the score is read at the last token.
        max_prompt_tokens: maximum number of tokens in a prompt with its longest answer, minus one.

    For the other arguments, see ``PromptSource``.

    Raises:
        ConfigError: if a row is invalid, or the assistant's tokens cannot be identified with this chat template.
    """

    items = "rows including their answers"

    def __init__(
        self,
        dataset: DatasetConfig,
        environments: Mapping[str, Any],
        tokenizer: Tokenizer,
        *,
        split: str,
        seed: int,
        max_prompt_tokens: int,
        kind: str,
        keep_suffix: bool = False,
        rows: list[Row] | None = None,
    ):
        rows = load_rows(dataset, environments, split, seed) if rows is None else rows
        read = ExampleReader(split, kind, dataset.type, dataset.prompt_key)
        literal = isinstance(dataset.type, Mapping) or str(dataset.type).startswith(("chatml.", "llama3."))
        chat = False if literal else dataset.chat
        use_template = bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat
        examples = [_as_messages(found, use_template) for index, row in enumerate(rows) for found in read(index, row)]
        plain = replace(dataset, prompt_key="prompt", columns={}, type=None, chat=chat)
        super().__init__(
            plain,
            environments,
            tokenizer,
            split=split,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            rows=examples,
        )
        encode = _Encoder(tokenizer, split, dataset, keep_suffix=keep_suffix)
        limit = max_prompt_tokens + 1
        encoded = [encode(prompt) for prompt in self._prompts]
        lengths = [
            len(prompt.token_ids) + max(len(answer.token_ids) for answer in prompt.fields["answers"])
            for prompt in encoded
        ]
        self.refused += [RefusedPrompt(p.id, length) for p, length in zip(encoded, lengths) if length > limit]
        self._prompts = [prompt for prompt, length in zip(encoded, lengths) if length <= limit]
        if not self._prompts:
            raise ConfigError(
                f"data.{split}: all {len(examples)} rows are longer than {limit} tokens with their answers "
                f"(the shortest has {min(lengths)}); raise policy.max_total_sequence_length"
            )


def source_of(algorithm: AlgorithmSpec) -> Callable[..., PromptSource]:
    """Return the class or function that creates a split's ``PromptSource`` for an algorithm."""
    if algorithm.rows is None:
        return prompts_of
    return partial(ExampleSource, kind=algorithm.rows, keep_suffix=algorithm.head == "score")


def check_rows(algorithm: AlgorithmSpec, rows: Sequence[Row], dataset: DatasetConfig, split: str) -> None:
    """Raise ConfigError if a row is invalid for the algorithm. This function skips checks that need a tokenizer."""
    kind = algorithm.rows
    if kind is None:
        check = check_prompts if dataset.strided is None else check_texts
        check(rows, dataset, split)
        return
    read = ExampleReader(split, kind, dataset.type, dataset.prompt_key)
    for index, row in enumerate(rows):
        read(index, row)


def _as_messages(row: Row, use_template: bool) -> Row:
    """Convert a text prompt to a user message, and text answers to assistant messages, if the template is used."""
    if not use_template:
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
    """Tokenizes the answers of a prompt. For ``keep_suffix``, see ``ExampleSource``."""

    def __init__(self, tokenizer: Tokenizer, split: str, dataset: DatasetConfig, *, keep_suffix: bool):
        self._tokenizer = tokenizer
        self._keep_suffix = keep_suffix
        self._split = split
        self._train_on = dataset.train_on
        self._template_kwargs = dict(dataset.chat_template_kwargs)

    def __call__(self, prompt: Prompt) -> Prompt:
        fields = dict(prompt.fields)
        answers = [self._answer(prompt, answer, sign) for answer, sign in fields["answers"]]
        for answer in answers:
            if not len(answer.token_ids) or (answer.mask is not None and not answer.mask.any()):
                raise self._error(prompt, "an answer has no tokens to train")
        if self._train_on != "all":
            return replace(prompt, fields={**fields, "answers": tuple(answers)})
        # The first token cannot be trained, because it has no context.
        first = prompt.token_ids[:1]
        rest = prompt.token_ids[1:]
        whole = [Answer(np.concatenate((rest, answer.token_ids)), None, answer.sign) for answer in answers]
        return replace(prompt, token_ids=first, fields={**fields, "answers": tuple(whole)})

    def _answer(self, prompt: Prompt, answer: Any, sign: int) -> Answer:
        if isinstance(answer, str):
            return Answer(self._with_end_token(self._tokens(answer)), None, sign)
        if prompt.messages is None:
            raise self._error(prompt, "the prompt is text and the answer is messages, which require a chat template")
        pieces, trained = self._turns(prompt, answer)
        if self._train_on == "last":
            trained = [False] * (len(trained) - 1) + [True]
        ids: list[int] = []
        mask: list[bool] = []
        for index, (text, is_trained) in enumerate(zip(pieces, trained)):
            tokens = self._tokens(text)
            written = self._num_written(tokens)
            if index == len(pieces) - 1:
                if not written:
                    tokens = self._end_last_turn(tokens, text)
                elif not self._keep_suffix:
                    tokens = tokens[:written]
                written = len(tokens)
            ids += tokens
            mask += [is_trained and n < (written or len(tokens)) for n in range(len(tokens))]
        return Answer(np.array(ids, np.int32), None if all(mask) else np.array(mask), sign)

    def _turns(self, prompt: Prompt, answer: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[bool]]:
        """Split the rendered text that follows the prompt. Return (pieces, True for each piece written by the
        assistant)."""
        before = list(prompt.messages or ())
        pieces: list[str] = []
        trained: list[bool] = []
        done = prompt.text
        for index, message in enumerate(answer):
            if message["role"] != "assistant":
                continue
            if index:
                start = self._rendered(prompt, [*before, *answer[:index]], generation=True)
                pieces.append(self._text_after(prompt, start, done))
                trained.append(False)
                done = start
            end = self._rendered(prompt, [*before, *answer[: index + 1]], generation=False)
            pieces.append(self._text_after(prompt, end, done))
            trained.append(True)
            done = end
        return pieces, trained

    def _text_after(self, prompt: Prompt, text: str, begin: str) -> str:
        if not text.startswith(begin):
            raise self._error(
                prompt,
                "the chat template renders a turn differently if another turn follows, so the assistant's tokens "
                "cannot be identified; keep only the assistant's last turn",
            )
        return text[len(begin) :]

    def _rendered(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]], *, generation: bool) -> str:
        tools = prompt.fields.get("tools")
        template_kwargs = {**self._template_kwargs, **(prompt.fields.get("chat_template_kwargs") or {})}
        if isinstance(tools, list) and tools:
            template_kwargs["tools"] = tools
        try:
            text = rendered(self._tokenizer, messages, generation, **template_kwargs)
        except Exception as error:  # templates may raise any exception
            raise self._error(prompt, f"the chat template rejected the row: {first_line(error)}") from error
        if (lost := lost_message(messages, text)) is not None:
            raise self._error(prompt, lost_text(messages, lost))
        return text

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _num_written(self, tokens: list[int]) -> int:
        """Return the number of tokens up to and including the first end token, or 0 without an end token.

        A template may add a line break after the end token, which a policy never writes.
        """
        end = self._tokenizer.eos_token_id
        return tokens.index(end) + 1 if end in tokens else 0

    def _end_last_turn(self, tokens: list[int], text: str) -> list[int]:
        """Append the end token to the last turn, unless its text ends with a special token."""
        closing = tuple(self._tokenizer.all_special_tokens)
        return tokens if text.rstrip().endswith(closing) else self._with_end_token(tokens).tolist()

    def _with_end_token(self, tokens: list[int]) -> np.ndarray:
        end = self._tokenizer.eos_token_id
        return np.array(tokens if end is None or tokens[-1:] == [end] else [*tokens, end], np.int32)

    def _error(self, prompt: Prompt, what: str) -> ConfigError:
        return ConfigError(f"data.{self._split}: row {prompt.id}: {what}")
