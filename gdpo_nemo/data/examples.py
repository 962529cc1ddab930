"""Tokenized rows of supervised and preference training: prompts with the answers to train.

A conversation is rendered with the tokenizer's chat template, and each turn is tokenized separately. The tokens before
an answer are therefore the same as in a prompt that an engine receives, if the template renders the prompt of a turn
and the conversation in the same way (``assistant_turns``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.config.algorithm_choice import AlgorithmSpec
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.anchors import check_texts, prompts_of
from gdpo_nemo.data.assistant_turns import Piece, UnknownTurn, find_turns
from gdpo_nemo.data.end_tokens import turn_end
from gdpo_nemo.data.example_rows import ExampleReader
from gdpo_nemo.data.images import Image, Images
from gdpo_nemo.data.messages import lost_message, lost_text, rendered, without_images
from gdpo_nemo.data.prompts import PromptSource, RefusedPrompt, check_prompts
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.rows import Row, load_rows
from gdpo_nemo.data.tokenizer import Tokenizer, continued, special_tokens
from gdpo_nemo.utils.errors import ConfigError, first_line

if TYPE_CHECKING:
    from gdpo_nemo.data.image_reader import ImageReader

_OPTIONS = {
    "preserve_thinking": True,
    "truncate_history_thinking": False,
    "clear_thinking": False,
    "enable_thinking": False,
}
"""Arguments of chat templates that keep earlier turns unchanged or begin replies without reasoning."""


@dataclass(frozen=True)
class Answer:
    """One answer to a prompt."""

    token_ids: np.ndarray
    """int32 [tokens], including the end token"""
    mask: np.ndarray | None
    """bool [tokens]: True for trained tokens. None: all tokens are trained."""
    sign: int
    """-1 for a rejected or undesirable answer, otherwise 1"""
    images: Images = ()
    """Images of the answer's user and tool messages. Positions count from the first token of the answer."""


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
        images: ImageReader | None = None,
    ):
        rows = load_rows(dataset, environments, split, seed) if rows is None else rows
        if images is not None:
            from gdpo_nemo.data.row_images import rows_with_images  # text-only runs do not need it

            rows = rows_with_images(rows, dataset, split, images.limits, placeholder=images.placeholder, kind=kind)
        read = ExampleReader(split, kind, dataset.type, dataset.prompt_key)
        literal = isinstance(dataset.type, Mapping) or str(dataset.type).startswith(("chatml.", "llama3."))
        chat = False if literal else dataset.chat
        use_template = bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat
        examples: list[Row] = []
        for index, row in enumerate(rows):
            examples += [_as_messages(found, use_template) for found in read(index, row)]
        plain = replace(dataset, prompt_key="prompt", columns={}, type=None, chat=chat)
        super().__init__(
            plain,
            environments,
            tokenizer,
            split=split,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            rows=examples,
            images=images,
        )
        self._encode = _Encoder(tokenizer, split, dataset, kind, keep_suffix=keep_suffix, images=images)
        limit = max_prompt_tokens + 1
        lengths = []
        fitting = []
        for prompt in map(self._encode, self._prompts):
            longest = max(len(answer.token_ids) for answer in prompt.fields["answers"])
            lengths.append(len(prompt.token_ids) + longest)
            if lengths[-1] > limit:
                self.refused.append(RefusedPrompt(prompt.id, lengths[-1]))
            else:
                fitting.append(prompt)
        if not fitting:
            raise ConfigError(
                f"data.{split}: all {len(examples)} rows are longer than {limit} tokens with their answers "
                f"(the shortest has {min(lengths)}); raise policy.max_total_sequence_length"
            )
        self._prompts = fitting

    def left_out(self) -> str:
        """Return a message about skipped rows and shortened prompts. See ``PromptSource.left_out``."""
        return "\n".join(filter(None, (super().left_out(), self._encode.note())))


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
    answers: list[tuple[Any, int]] = []
    for answer, sign in row["answers"]:
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        answers.append((answer, sign))
    return {**row, "prompt": prompt, "answers": tuple(answers)}


class _Encoder:
    """Tokenizes the answers of a prompt. For ``keep_suffix`` and ``images``, see ``ExampleSource``."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        split: str,
        dataset: DatasetConfig,
        kind: str,
        *,
        keep_suffix: bool,
        images: ImageReader | None,
    ):
        self._tokenizer = tokenizer
        self._kind = kind
        self._keep_suffix = keep_suffix
        self._images = images
        self._split = split
        self._train_on = dataset.train_on
        self._template_kwargs = dict(dataset.chat_template_kwargs)
        self._ends = {tokenizer.eos_token_id, turn_end(tokenizer, dataset.chat_template_kwargs)}
        self._shortened: list[tuple[Prompt, str]] = []
        """Prompts that end before the beginning of a reply in the chat template, and the text that is left out."""

    def __call__(self, prompt: Prompt) -> Prompt:
        found = []
        later = []
        for answer, _ in prompt.fields["answers"]:
            images_of_answer: list[Image] = []
            if not isinstance(answer, str):
                answer, images_of_answer = without_images(_up_to_last_turn(answer))
            found.append(self._pieces(prompt, answer))
            later.append(images_of_answer)
        contexts = [self._context(prompt, before) for before, _ in found]
        common = len(os.path.commonprefix([context.tolist() for context in contexts]))
        if not common:
            raise self._error(prompt, "the chat template renders a different prompt for each answer")
        # With ``all``, the prompt is part of each answer. Its first token cannot be trained, because it has no context.
        untrained = 1 if self._train_on == "all" else common
        answers = []
        for context, (before, pieces), (_, sign) in zip(contexts, found, prompt.fields["answers"]):
            answer = self._answer(context[common:], before, pieces, sign)
            if not len(answer.token_ids) or (answer.mask is not None and not answer.mask.any()):
                raise self._error(prompt, "an answer has no tokens to train")
            if self._train_on == "all":
                answer = Answer(np.concatenate((contexts[0][1:common], answer.token_ids)), None, sign)
            answers.append(answer)
        text = min((before for before, _ in found), key=len)
        if len(text) < len(prompt.text) and prompt.text.startswith(text):
            self._shortened.append((prompt, prompt.text[len(text) :]))
        token_ids = contexts[0][:untrained]
        images: Images = ()
        if self._images is not None:
            token_ids, images, answers = self._placed(prompt, token_ids, answers, later)
        fields = {**prompt.fields, "answers": tuple(answers)}
        return replace(prompt, text=text, token_ids=token_ids, images=images, fields=fields)

    def _placed(
        self, prompt: Prompt, token_ids: np.ndarray, answers: Sequence[Answer], later: Sequence[Sequence[Image]]
    ) -> tuple[np.ndarray, Images, list[Answer]]:
        """Return the tokens of the prompt and of the answers with all placeholders, and the images of the prompt.

        Args:
            token_ids: tokens of the prompt, with one placeholder per image.
            later: images of the messages of each answer.
        """
        assert self._images is not None
        images = [placed.image for placed in prompt.images]
        count = self._images.count(token_ids)
        found = []
        try:
            placed_ids, in_prompt = self._images.place(token_ids, images[:count])
            for answer, more in zip(answers, later):
                ids, in_answer = self._images.place(answer.token_ids, [*images[count:], *more])
                mask = _without_placeholders(answer, in_answer, self._images.is_placeholder(answer.token_ids))
                found.append(Answer(ids, mask, answer.sign, in_answer))
        except ValueError as error:
            raise self._error(prompt, f"the rendered row has {error}") from None
        return placed_ids, in_prompt, found

    def _context(self, prompt: Prompt, text: str) -> np.ndarray:
        """Return the tokens of the text before an answer, with one placeholder per image."""
        known = text == prompt.text and not prompt.images
        return prompt.token_ids if known else np.array(self._tokens("", text), np.int32)

    def _answer(self, context: np.ndarray, before: str, pieces: str | Sequence[Piece], sign: int) -> Answer:
        """Tokenize an answer that follows the text ``before``.

        Args:
            context: last tokens of this text, which other answers to the prompt do not have.
        """
        if isinstance(pieces, str):
            return Answer(self._with_end_token(self._tokens(before, pieces)), None, sign)
        ids: list[int] = context.tolist()
        mask = [False] * len(ids)
        for index, (text, is_trained) in enumerate(pieces):
            tokens = self._tokens(before, text)
            before += text
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

    def _pieces(self, prompt: Prompt, answer: Any) -> tuple[str, str | list[Piece]]:
        """Return the text before an answer, and the answer as text or in pieces."""
        if isinstance(answer, str):
            return prompt.text, answer
        if prompt.messages is None:
            raise self._error(prompt, "the prompt is text and the answer is messages, which require a chat template")
        try:
            before, pieces = self._found(prompt, answer, self._train_on)
        except UnknownTurn as unknown:
            raise self._error(prompt, f"{unknown}; {self._remedy(prompt, answer, unknown)}") from None
        # The prompt's messages are checked when it is read, and trained turns when they are identified.
        others = [message for message in answer if message["role"] != "assistant"]
        lost = lost_message(others, before + "".join(text for text, _ in pieces))
        if lost is not None:
            raise self._error(prompt, lost_text(answer, list(answer).index(others[lost])))
        return before, pieces

    def _found(self, prompt: Prompt, answer: Sequence[Any], train_on: str, **options: Any) -> tuple[str, list[Piece]]:
        before = list(prompt.messages or ())
        render = partial(self._rendered, prompt, **options)
        return find_turns(render, partial(self._tokens, ""), [*before, *answer], len(before), train_on != "assistant")

    def _remedy(self, prompt: Prompt, answer: Sequence[Any], unknown: UnknownTurn) -> str:
        """Return what makes the row valid, which is tried before."""
        for key, value in _OPTIONS.items():
            if self._context_of(prompt, answer, self._train_on, **{key: value}):
                return f"set data.{self._split}.chat_template_kwargs: {{{key}: {str(value).lower()}}}"
        if not unknown.is_rewritten or not self._context_of(prompt, answer, "last"):
            return "change the row, or use another chat template"
        if self._kind == "sft":
            return f"set data.{self._split}.train_on: last, or use a chat template that keeps earlier turns"
        return "keep only the last turn in the answer, and move the turns before it into the prompt"

    def note(self) -> str:
        """Return a message about shortened prompts, or an empty text."""
        if not self._shortened:
            return ""
        prompt, text = self._shortened[0]
        note = (
            f"data.{self._split}: the prompts of {len(self._shortened)} rows end before {text!r}, which the chat "
            f"template writes before a reply but not before these answers; the first is {prompt.id}"
        )
        for value in (False, True):
            whole = self._rendered(prompt, prompt.messages or (), True, enable_thinking=value)
            answers = [answer for answer, _ in prompt.fields["answers"]]
            contexts = [self._context_of(prompt, answer, self._train_on, enable_thinking=value) for answer in answers]
            if contexts == [whole] * len(contexts):
                option = f"{{enable_thinking: {str(value).lower()}}}"
                return f"{note}; set data.{self._split}.chat_template_kwargs: {option} to keep the whole prompt"
        return note

    def _context_of(self, prompt: Prompt, answer: Sequence[Any], train_on: str, **options: Any) -> str:
        """Return the text before an answer with other settings, or an empty text if a turn cannot be identified."""
        try:
            return self._found(prompt, answer, train_on, **options)[0]
        except (UnknownTurn, ConfigError):
            return ""

    def _rendered(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]], generation: bool, **options: Any) -> str:
        tools = prompt.fields.get("tools")
        template_kwargs = {**self._template_kwargs, **(prompt.fields.get("chat_template_kwargs") or {}), **options}
        if isinstance(tools, list) and tools:
            template_kwargs["tools"] = tools
        try:
            return rendered(self._tokenizer, messages, generation, **template_kwargs)
        except Exception as error:  # templates may raise any exception
            raise self._error(prompt, f"the chat template rejected the row: {first_line(error)}") from error

    def _tokens(self, before: str, text: str) -> list[int]:
        return continued(self._tokenizer, before, text)

    def _num_written(self, tokens: list[int]) -> int:
        """Return the number of tokens up to and including the first end token, or 0 without an end token.

        A template may add a line break after the end token, which a policy never writes.
        """
        return next((index + 1 for index, token in enumerate(tokens) if token in self._ends), 0)

    def _end_last_turn(self, tokens: list[int], text: str) -> list[int]:
        """Append the end token to the last turn, unless its text ends with a special token."""
        closing = tuple(special_tokens(self._tokenizer).values())
        return tokens if text.rstrip().endswith(closing) else self._with_end_token(tokens).tolist()

    def _with_end_token(self, tokens: list[int]) -> np.ndarray:
        end = self._tokenizer.eos_token_id
        return np.array(tokens if end is None or tokens[-1:] == [end] else [*tokens, end], np.int32)

    def _error(self, prompt: Prompt, what: str) -> ConfigError:
        return ConfigError(f"data.{self._split}: row {prompt.id}: {what}")


def _up_to_last_turn(answer: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the messages of an answer without those after the last assistant turn, which are not used."""
    last = max(index for index, message in enumerate(answer) if message["role"] == "assistant")
    return answer[: last + 1]


def _without_placeholders(answer: Answer, images: Images, is_placeholder: np.ndarray) -> np.ndarray | None:
    """Return the mask of an answer's tokens with all placeholders, which are not trained.

    Args:
        images: images of the answer with positions.
        is_placeholder: bool [tokens of ``answer``], which have one placeholder per image.
    """
    if not images:
        return answer.mask
    repeats = np.ones(len(is_placeholder), np.int64)
    repeats[is_placeholder] = [placed.tokens for placed in images]
    return np.repeat(~is_placeholder if answer.mask is None else answer.mask, repeats)
