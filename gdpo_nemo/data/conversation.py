"""Tokenization of conversations, chat history that fits the context, and completions as Responses API items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.data.images import Images, moved
from gdpo_nemo.data.messages import Message, plain_message, rendered, with_texts, without_images
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.replies import Reply, ReplyParser, split_thought
from gdpo_nemo.data.tokenizer import continued
from gdpo_nemo.utils.errors import ConfigError, RunError, first_line

if TYPE_CHECKING:
    from gdpo_nemo.data.image_reader import ImageReader
    from gdpo_nemo.data.tokenizer import Tokenizer

PLACEHOLDER = "GDPO0TURN0ENDS0HERE"
_ANYTHING = ({"role": "user", "content": "."},)


class Conversation:
    """Renders and tokenizes prompts and later turns of conversations.

    Args:
        tokenizer: a transformers tokenizer.
        chat: True to render with the tokenizer's chat template. Otherwise observations are appended as plain text.
        template_kwargs: additional arguments of the chat template (``data.train.chat_template_kwargs``).
        replies: parser of the policy's turns. None chooses it by the chat template.
        images: reader of images in messages. None refuses images.

    With a reader, the text of an image's placeholder in a message is written with a space, because only parts of
    messages are images.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: bool,
        template_kwargs: Mapping[str, Any] | None = None,
        replies: ReplyParser | None = None,
        images: ImageReader | None = None,
    ):
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.chat = chat
        self.replies = replies or ReplyParser(tokenizer, template_kwargs=template_kwargs)
        self._images = images

    def prompt(
        self, messages: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, np.ndarray]:
        """Return the first prompt as (text, int32 [tokens]).

        Raises:
            RunError: if the template refuses the messages, or they contain images (``prompt_with_images``).
        """
        text, ids, images = self.prompt_with_images(messages, tools)
        return text, _without_images(ids, images)

    def prompt_with_images(
        self, messages: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, np.ndarray, Images]:
        """Return the first prompt as (text, int32 [tokens], images). Parts of messages may be images.

        The text has one placeholder per image, and the tokens have all placeholders.

        Raises:
            RunError: if the template refuses the messages, or an image is invalid.
        """
        if isinstance(messages, str) and not self.chat:
            text = self._as_text(messages)
            return text, self._tokens(text, special=True), ()
        plain, images = self._plain(messages)
        text = self._rendered(plain, tools)
        return text, *self._placed(self._tokens(text), images)

    def continuation(
        self,
        history: Sequence[Message] | None,
        observation: str | Sequence[Message],
        last_token: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> np.ndarray:
        """Return the tokens to insert between the policy's previous turn and its next turn: int32 [tokens].

        For the arguments, see ``continuation_with_images``.

        Raises:
            RunError: in the same cases, or if the observation contains images.
        """
        return _without_images(*self.continuation_with_images(history, observation, last_token, tools, calls))

    def continuation_with_images(
        self,
        history: Sequence[Message] | None,
        observation: str | Sequence[Message],
        last_token: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[np.ndarray, Images]:
        """Return the tokens to insert between the policy's previous turn and its next turn, int32 [tokens], and images.

        Positions of images count from the first of these tokens. Images in ``history`` are not returned.

        The result begins with the end of the assistant's message, unless the policy has already generated it. All
        returned tokens are attributed to the environment, even if the policy's turn was truncated.

        Args:
            history: messages before the policy's previous turn. None uses a placeholder.
            observation: messages after the policy's previous turn, or the text of a user message.
            last_token: last token of the policy's previous turn, or -1 if the turn is not part of the context.
            calls: tool calls of the policy's previous turn, in chat format. Some templates end a turn with calls in
                another way, or require the call before its result.

        Raises:
            RunError: if the template refuses the messages, or does not render the assistant's message exactly once, or
                if an image is invalid.
        """
        if not self.chat:
            if not isinstance(observation, str):
                raise RunError("an observation of chat messages requires a tokenizer with a chat template; use text")
            before = "" if last_token < 0 else self.tokenizer.decode([last_token])
            return self._continued(before, self._as_text(observation)), ()
        after, images = self._plain(observation)
        return self._placed(self._after_turn(list(history or _ANYTHING), after, last_token, tools, calls), images)

    def _after_turn(
        self,
        earlier: list[Message],
        after: list[Message],
        last_token: int,
        tools: Sequence[Mapping[str, Any]] | None,
        calls: Sequence[Mapping[str, Any]],
    ) -> np.ndarray:
        """Return the tokens after the policy's previous turn, with one placeholder per image."""
        if calls and (ids := self._after_calls(earlier, after, last_token, tools, calls)) is not None:
            return ids
        text = self._rendered([*earlier, {"role": "assistant", "content": PLACEHOLDER}, *after], tools)
        if text.count(PLACEHOLDER) != 1:
            raise RunError(
                "the chat template must render an assistant's message once, but rendered "
                f"it {text.count(PLACEHOLDER)} times"
            )
        ids = self._continued(PLACEHOLDER, text.partition(PLACEHOLDER)[2])
        return ids[1:] if len(ids) and ids[0] == last_token else ids

    def _after_calls(
        self,
        before: list[Message],
        after: list[Message],
        last_token: int,
        tools: Sequence[Mapping[str, Any]] | None,
        calls: Sequence[Mapping[str, Any]],
    ) -> np.ndarray | None:
        """Return the tokens after a turn with tool calls. Return None if the template does not render the calls."""
        last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {"x": PLACEHOLDER}}}
        spoken = [*before, {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], last]}]
        try:
            turn = self._rendered(spoken, tools, prompts=False)
            text = self._rendered([*spoken, *after], tools)
        except RunError:  # the message without calls may be accepted
            return None
        end, rest = (part.partition(PLACEHOLDER)[2] for part in (turn, text))
        if turn.count(PLACEHOLDER) != 1 or text.count(PLACEHOLDER) != 1 or not rest.startswith(end):
            return None
        closing = self._continued(PLACEHOLDER, end).tolist()
        special = [index for index, token in enumerate(closing) if token in self.replies.special]
        if last_token in self.replies.special and last_token in closing:
            first = len(closing) - closing[::-1].index(last_token)
        else:  # a truncated turn
            first = special[-1] if special else len(closing)
        ids = np.array([*closing[first:], *self._continued(PLACEHOLDER + end, rest.removeprefix(end))], np.int32)
        return ids[1:] if len(ids) and ids[0] == last_token else ids

    def for_row(self, fields: Mapping[str, Any]) -> Conversation:
        """Return the conversation with the template arguments of a row (column ``chat_template_kwargs``)."""
        own = fields.get("chat_template_kwargs")
        if not own:
            return self
        return Conversation(self.tokenizer, self.chat, {**self.template_kwargs, **own}, self.replies, self._images)

    def text(self, token_ids: Iterable[int]) -> str:
        """Decode tokens. Special tokens are dropped, except those that mark tool calls and reasoning."""
        return self.replies.text(token_ids)

    def messages(self, observation: str | Sequence[Message]) -> list[Message]:
        """Return an observation as a list of messages. Text becomes a user message, and images ``{"type": "image"}``.

        Raises:
            RunError: if a message contains content other than text, and images if the model reads images.
        """
        return self._plain(observation)[0]

    def _plain(self, observation: str | Sequence[Message]) -> tuple[list[Message], list[Any]]:
        """Return an observation as a list of messages, and the images in their parts as they were given."""
        given = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        try:
            plain, images = without_images([plain_message(message, self._images is not None) for message in given])
        except ValueError as error:
            raise RunError(f"a message of an observation {error}") from None
        if self._images is None:
            return plain, images
        return [with_texts(message, self._images.as_text) for message in plain], images

    def _as_text(self, text: str) -> str:
        return text if self._images is None else self._images.as_text(text)

    def _placed(self, token_ids: np.ndarray, images: Sequence[Any]) -> tuple[np.ndarray, Images]:
        """Return the tokens with all placeholders, and the images. Raises RunError if an image is invalid."""
        if self._images is None:
            return token_ids, ()
        read = []
        for number, image in enumerate(images):
            try:
                read.append(self._images.read(image))
            except ValueError as error:
                raise RunError(f"image {number} of an observation {error}") from None
        try:
            return self._images.place(token_ids, read)
        except ValueError as error:
            raise RunError(f"the chat template renders {error}") from None

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, prompts: bool = True
    ) -> str:
        extra = {**self.template_kwargs, **({"tools": list(tools)} if tools else {})}
        try:
            return rendered(self.tokenizer, messages, prompts, **extra)
        except Exception as error:  # templates may raise any exception
            raise RunError(f"the chat template rejected a conversation: {first_line(error)}") from error

    def _continued(self, before: str, text: str) -> np.ndarray:
        return np.array(continued(self.tokenizer, before, text), np.int32)

    def _tokens(self, text: str, special: bool = False) -> np.ndarray:
        return np.array(self.tokenizer(text, add_special_tokens=special)["input_ids"], np.int32)


def _without_images(token_ids: np.ndarray, images: Images) -> np.ndarray:
    if images:
        raise RunError("the messages contain images, which this method of a conversation does not support")
    return token_ids


Asked = str | Message | Prompt
"""Text or message of a user, or a prompt of the dataset."""


@dataclass(frozen=True)
class Exchange:
    """A prompt and its reply."""

    message: Asked
    reply: np.ndarray
    """int32 [tokens]. A truncated reply has no end-of-message token."""


class Dialogue:
    """History of a chat. The oldest exchanges are dropped to fit the model's context.

    Without a chat template, history is not used, and every message is continued independently.

    Args:
        system: text of the system message (None for no system message).
        context: maximum number of tokens in prompt and reply together.
        reply: number of tokens to reserve for the reply. Older exchanges are dropped to free this space.
    """

    def __init__(self, conversation: Conversation, system: str | None, context: int, reply: int):
        self._conversation = conversation
        self._system = system
        self._context = context
        self._reply = reply
        self._exchanges: list[Exchange] = []

    def __len__(self) -> int:
        """Return the number of exchanges in the history."""
        return len(self._exchanges)

    def reset(self) -> None:
        """Drop all exchanges."""
        self._exchanges = []

    def prompt(self, message: Asked) -> tuple[np.ndarray, Images, int]:
        """Return the prompt for a reply to ``message``, int32 [tokens], its images, and the number of lost exchanges.

        A ``Prompt`` of the dataset begins a new conversation. The prompt's tokens are used unchanged.

        Raises:
            ConfigError: if the prompt leaves no room for a reply.
            RunError: if the chat template refuses the conversation, or an image needs a template.
        """
        if isinstance(message, Prompt):
            self.reset()
        dropped = 0
        while True:
            ids, images = self._tokens(message)
            if len(ids) + self._reply <= self._context or not self._exchanges:
                break
            self._exchanges.pop(0)
            dropped += 1
        if len(ids) >= self._context:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, but the model's context is limited to {self._context} "
                "(policy.max_total_sequence_length)"
            )
        return ids, images, dropped

    def add(self, message: Asked, reply: Sequence[int] | np.ndarray) -> None:
        """Append an exchange to the history. This has no effect without a chat template, because only a template
        separates turns."""
        if self._conversation.chat:
            self._exchanges.append(Exchange(message, np.asarray(reply, np.int32)))

    def _tokens(self, message: Asked) -> tuple[np.ndarray, Images]:
        messages = [*(exchange.message for exchange in self._exchanges), message]
        ids, images = self._first(messages[0])
        parts, length = [ids], len(ids)
        for exchange, later in zip(self._exchanges, messages[1:]):
            last = int(exchange.reply[-1]) if len(exchange.reply) else -1
            assert not isinstance(later, Prompt)  # a prompt begins a conversation
            observation = later if isinstance(later, str) else [later]
            ids, more = self._conversation.continuation_with_images(None, observation, last)
            images += moved(more, length + len(exchange.reply))
            parts += [exchange.reply, ids]
            length += len(exchange.reply) + len(ids)
        return np.concatenate(parts), images

    def _first(self, message: Asked) -> tuple[np.ndarray, Images]:
        if isinstance(message, Prompt):
            return message.token_ids, message.images
        if not self._conversation.chat:
            if not isinstance(message, str):
                raise RunError("an image requires a tokenizer with a chat template")
            return self._conversation.prompt(f"{self._system}\n\n{message}" if self._system else message)[1], ()
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        asked: Message = {"role": "user", "content": message} if isinstance(message, str) else message
        return self._conversation.prompt_with_images([*system, asked])[1:]


def output_items(reply: Reply, split_reasoning: bool = False) -> list[dict[str, Any]]:
    """Convert a turn to Responses API items, in the order reasoning, message, calls. Return at least one item.

    Args:
        split_reasoning: True to convert ``<think>...</think>`` at the beginning of the content to a reasoning item.
    """
    items = []
    thought, text = reply.reasoning, reply.content
    has_thought = bool(thought)
    if split_reasoning and not thought:
        thought, text = split_thought(reply.content)
        has_thought = text != reply.content
    if has_thought:
        items.append({"id": "rs_0", "type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]})
    if text or not (items or reply.calls):
        part = {"type": "output_text", "text": text, "annotations": []}
        items.append({"id": "msg_0", "type": "message", "role": "assistant", "status": "completed", "content": [part]})
    for number, (name, arguments) in enumerate(reply.calls):
        ids = {"id": f"fc_{number}", "call_id": f"call_{number}"}
        items.append({**ids, "type": "function_call", "status": "completed", "name": name, "arguments": arguments})
    return items
