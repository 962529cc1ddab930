"""Tokenization of conversations, chat history that fits the context, and completions as Responses API items."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

import numpy as np

from gdpo_nemo.data.records import Prompt
from gdpo_nemo.utils.errors import ConfigError, RunError, first_line

if TYPE_CHECKING:
    from gdpo_nemo.data.tokenizer import Tokenizer


Message = Mapping[str, Any]

PLACEHOLDER = "GDPO0TURN0ENDS0HERE"
_ANYTHING = ({"role": "user", "content": "."},)


class Conversation:
    """Renders and tokenizes prompts and later turns of conversations.

    Args:
        tokenizer: a transformers tokenizer.
        chat: True to render with the tokenizer's chat template. Otherwise observations are appended as plain text.
        template_kwargs: additional arguments of the chat template (``data.train.chat_template_kwargs``).
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool, template_kwargs: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.chat = chat

    def prompt(
        self, messages: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, np.ndarray]:
        """Return the first prompt as (text, int32 [tokens]). Raises RunError if the template refuses the messages."""
        if isinstance(messages, str) and not self.chat:
            return messages, self._tokens(messages, special=True)
        text = self._rendered(self.messages(messages), tools)
        return text, self._tokens(text)

    def continuation(
        self,
        history: Sequence[Message] | None,
        observation: str | Sequence[Message],
        last_token: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> np.ndarray:
        """Return the tokens to insert between the policy's previous turn and its next turn: int32 [tokens].

        The result begins with the end of the assistant's message, unless the policy has already generated it. All
        returned tokens are attributed to the environment, even if the policy's turn was truncated.

        Args:
            history: messages before the policy's previous turn. None uses a placeholder.
            observation: messages after the policy's previous turn, or the text of a user message.
            last_token: last token of the policy's previous turn.

        Raises:
            RunError: if the template refuses the messages, or does not render the assistant's message exactly once.
        """
        if not self.chat:
            if not isinstance(observation, str):
                raise RunError("an observation of chat messages requires a tokenizer with a chat template; use text")
            return self._tokens(observation)
        spoken = [*(history or _ANYTHING), {"role": "assistant", "content": PLACEHOLDER}, *self.messages(observation)]
        text = self._rendered(spoken, tools)
        if text.count(PLACEHOLDER) != 1:
            raise RunError(
                "the chat template must render an assistant's message once, but rendered "
                f"it {text.count(PLACEHOLDER)} times"
            )
        ids = self._tokens(text.partition(PLACEHOLDER)[2])
        return ids[1:] if len(ids) and ids[0] == last_token else ids

    def text(self, token_ids: Iterable[int]) -> str:
        """Decode tokens, without special tokens."""
        text: str = self.tokenizer.decode([int(t) for t in token_ids], skip_special_tokens=True)
        return text

    @staticmethod
    def messages(observation: str | Sequence[Message]) -> list[Message]:
        """Return an observation as a list of messages. Text becomes a user message."""
        return [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        extra = {**self.template_kwargs, **({"tools": list(tools)} if tools else {})}
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **extra
            )
            return text
        except Exception as error:  # templates may raise any exception
            raise RunError(f"the chat template rejected a conversation: {first_line(error)}") from error

    def _tokens(self, text: str, special: bool = False) -> np.ndarray:
        return np.array(self.tokenizer(text, add_special_tokens=special)["input_ids"], np.int32)


@dataclass(frozen=True)
class Exchange:
    """A prompt and its reply."""

    message: str | Prompt
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

    def prompt(self, message: str | Prompt) -> tuple[np.ndarray, int]:
        """Return the prompt for a reply to ``message``, int32 [tokens], and the number of dropped exchanges.

        A ``Prompt`` of the dataset begins a new conversation. The prompt's tokens are used unchanged.

        Raises:
            ConfigError: if the prompt leaves no room for a reply.
            RunError: if the chat template refuses the conversation.
        """
        if isinstance(message, Prompt):
            self.reset()
        dropped = 0
        while True:
            ids = self._tokens(message)
            if len(ids) + self._reply <= self._context or not self._exchanges:
                break
            self._exchanges.pop(0)
            dropped += 1
        if len(ids) >= self._context:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, but the model's context is limited to {self._context} "
                "(policy.max_total_sequence_length)"
            )
        return ids, dropped

    def add(self, message: str | Prompt, reply: Sequence[int] | np.ndarray) -> None:
        """Append an exchange to the history. This has no effect without a chat template, because only a template
        separates turns."""
        if self._conversation.chat:
            self._exchanges.append(Exchange(message, np.asarray(reply, np.int32)))

    def _tokens(self, message: str | Prompt) -> np.ndarray:
        texts = [*(exchange.message for exchange in self._exchanges), message]
        parts = [self._first(texts[0])]
        for exchange, text in zip(self._exchanges, texts[1:]):
            last = int(exchange.reply[-1]) if len(exchange.reply) else -1
            parts += [exchange.reply, self._conversation.continuation(None, str(text), last)]
        return np.concatenate(parts)

    def _first(self, message: str | Prompt) -> np.ndarray:
        if isinstance(message, Prompt):
            return message.token_ids
        if not self._conversation.chat:
            return self._conversation.prompt(f"{self._system}\n\n{message}" if self._system else message)[1]
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return self._conversation.prompt([*system, {"role": "user", "content": message}])[1]


_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]{1,200})"\s*,\s*"arguments"\s*:')
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def output_items(text: str, tool_parser: str = "none", split_reasoning: bool = False) -> list[dict[str, Any]]:
    """Convert a completion to Responses API items, in the order reasoning, message, calls. Return at least one item.

    Args:
        tool_parser: ``hermes`` converts ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Qwen, Hermes) to
            calls. The text around the calls becomes a message. A block with invalid JSON as arguments also becomes a
            call, and the verifier scores it. ``none`` does not parse calls.
        split_reasoning: True to convert ``<think>...</think>`` at the beginning to a reasoning item.
    """
    items = []
    if split_reasoning and _THINK.match(text):
        thought, text = split_thought(text)
        items.append({"id": "rs_0", "type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]})
    calls: list[tuple[str, str]] = []
    if tool_parser == "hermes":
        text, calls = split_calls(text)
    if text or not (items or calls):
        part = {"type": "output_text", "text": text, "annotations": []}
        items.append({"id": "msg_0", "type": "message", "role": "assistant", "status": "completed", "content": [part]})
    for number, (name, arguments) in enumerate(calls):
        ids = {"id": f"fc_{number}", "call_id": f"call_{number}"}
        items.append({**ids, "type": "function_call", "status": "completed", "name": name, "arguments": arguments})
    return items


def split_thought(text: str) -> tuple[str, str]:
    """Return the content of a leading ``<think>...</think>`` block, or an empty text, and the remaining text."""
    thought = _THINK.match(text)
    return (thought[1].strip(), text[thought.end() :]) if thought else ("", text)


def split_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text without its tool calls, and the calls as (name, arguments in JSON).

    Text without calls is returned unchanged. A block that cannot be parsed as a call stays in the text.
    """
    calls = []
    rest = []
    end = 0
    # A regular expression would scan the remaining text again for every opening tag without a closing tag.
    start = text.find(_OPEN)
    while start >= 0 and (close := text.find(_CLOSE, start)) >= 0:
        call = _read_call(text[start + len(_OPEN) : close])
        if call is not None:
            calls.append(call)
            rest.append(text[end:start])
            end = close + len(_CLOSE)
        start = text.find(_OPEN, close)
    if not calls:
        return text, []
    return "".join([*rest, text[end:]]).strip(), calls


def has_call_block(text: str) -> bool:
    """Return whether the text contains a complete ``<tool_call>`` block, even if it cannot be parsed as a call."""
    start = text.find(_OPEN)
    return start >= 0 and text.find(_CLOSE, start) >= 0


def _read_call(block: str) -> tuple[str, str] | None:
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):
        head = _CALL_HEAD.match(block)
        return (head[1], block[head.end() :].strip().removesuffix("}").rstrip()) if head else None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)
