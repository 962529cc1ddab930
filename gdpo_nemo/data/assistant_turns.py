"""Positions of the assistant's turns in a conversation that a chat template has rendered as a whole.

Many templates render a turn differently if another turn follows: Qwen3 writes ``<think>`` only in the last turn, and
gpt-oss and Phi-3 end the last turn differently. A turn begins where the prompt for this turn ends. If the conversation
does not begin with this prompt, a mark is written into the message before the turn, and the texts after the mark are
compared. Every turn must contain the text of its message, so that no part of a row is silently dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Renders messages, with or without the beginning of a reply."""

_MARK = "GDPO0MARK0HERE"
_CONTENT = "GDPO0CONTENT0HERE"
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that templates render as reasoning."""
_LOOKAHEAD = 64
"""Number of characters before and after a border that may influence its tokens."""


class UnknownTurn(Exception):
    """Raised if the tokens of a turn cannot be identified.

    Args:
        is_rewritten: True if the template may render the turn correctly if no other turn follows.
    """

    def __init__(self, what: str, is_rewritten: bool):
        super().__init__(what)
        self.is_rewritten = is_rewritten


class Piece(NamedTuple):
    """A part of a rendered conversation."""

    text: str
    is_trained: bool


class TurnFinder:
    """Finds the assistant's turns in one conversation.

    Args:
        render: renders messages with the chat template.
        tokenize: returns the tokens of a text without adding special tokens.
        messages: a conversation that ends with an assistant turn.
        verbatim: True to write the content of the last turn as it is, for templates that drop its reasoning.
    """

    def __init__(
        self, render: Render, tokenize: Callable[[str], list[int]], messages: Sequence[Message], verbatim: bool
    ):
        self._render = render
        self._tokenize = tokenize
        self._messages = list(messages)
        self._verbatim = verbatim
        self._text = self._whole(self._messages)

    def pieces(self, turns: Sequence[int], trained: Sequence[int]) -> tuple[str, list[Piece]]:
        """Return the text before the first of ``turns``, and the following text as trained and other pieces.

        Args:
            turns: indices of the assistant's turns in the answer.
            trained: indices of the turns to train, in the same order.

        Raises:
            UnknownTurn: if a turn cannot be identified.
        """
        done = first = self._start(turns[0])
        pieces = []
        for index in trained:
            start = first if index == turns[0] else self._start(index)
            end = self._end(index)
            self._check(index, done, start, end)
            pieces += [Piece(self._text[done:start], False), Piece(self._text[start:end], True)]
            done = end
        return self._text[:first], [piece for piece in pieces if piece.text]

    def _start(self, index: int) -> int:
        """Return the position of the first character that the policy writes in a turn."""
        prompt = self._render(self._messages[:index], True)
        if self._text.startswith(prompt):
            return len(prompt)
        marked = self._marked(index - 1)
        header = self._after_mark(self._render(marked[:index], True), index)
        rest = self._after_mark(self._whole(marked), index)
        length = _common(header, rest)
        if length < len(header):  # the template begins a reply with text that this turn does not have
            marked[index] = {**marked[index], "content": _CONTENT}
            other = self._after_mark(self._whole(marked), index)
            length = min(self._border(header, rest), self._border(header, other))
            end_of_message = self._after_mark(self._render(marked[:index], False), index)
            if length <= _common(header, end_of_message):
                raise self._unknown(index, "the chat template renders another beginning of a turn than in a prompt")
        return self._position(rest[length:], index)

    def _end(self, index: int) -> int:
        """Return the position after the text that ends a turn, also if the turn is the last one."""
        if index == len(self._messages) - 1:
            return len(self._text)
        turn = self._render(self._messages[: index + 1], False)
        if self._text.startswith(turn):
            return len(turn)
        content = self._messages[index].get("content") or ""
        marked = list(self._messages)
        marked[index] = {**marked[index], "content": f"{content}{_MARK}"}
        ending = self._after_mark(self._render(marked[: index + 1], False), index)
        rest = self._after_mark(self._whole(marked), index)
        return self._position(rest[self._border(ending, rest) :], index)

    def _check(self, index: int, done: int, start: int, end: int) -> None:
        """Raise UnknownTurn if a turn does not contain the text of its message."""
        if not done <= start <= end:
            raise self._unknown(index, "the chat template changes the order of the turns")
        before = _squeezed(self._text[:start][-_LOOKAHEAD:])
        turn = _squeezed(self._text[start:end])
        for key, text in _texts(self._messages[index]):
            # A prompt may end with the beginning of the text, such as <think>.
            longest = min(len(text) - 1, len(before))
            begun = next((n for n in range(longest, 0, -1) if before.endswith(text[:n])), 0)
            if text not in turn and text[begun:] not in turn:
                what = f"the chat template does not write all of {key!r} of an assistant turn"
                raise UnknownTurn(what, key != "tool_calls" and index < len(self._messages) - 1)

    def _marked(self, index: int) -> list[Message]:
        """Return the messages with a mark in the middle of a message, where templates neither strip nor compare."""
        messages = list(self._messages)
        content = messages[index].get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        last = max((number for number, part in enumerate(parts) if part["type"] == "text"), default=None)
        if last is None:
            raise self._unknown(index + 1, "the message before an assistant turn has no text")
        text = parts[last]["text"]
        middle = len(text) // 2
        parts[last] = {"type": "text", "text": f"{text[:middle]}{_MARK}{text[middle:]}"}
        messages[index] = {**messages[index], "content": parts[0]["text"] if isinstance(content, str) else parts}
        return messages

    def _whole(self, messages: Sequence[Message]) -> str:
        if not self._verbatim:
            return self._render(messages, False)
        text = self._render([*messages[:-1], {**messages[-1], "content": _CONTENT}], False)
        return text.replace(_CONTENT, messages[-1]["content"])

    def _after_mark(self, text: str, index: int) -> str:
        if text.count(_MARK) != 1:
            raise self._unknown(index, "the chat template does not write a message exactly once")
        return text.partition(_MARK)[2]

    def _position(self, rest: str, index: int) -> int:
        if not self._text.endswith(rest):
            raise self._unknown(index, "the chat template renders a turn differently if another message changes")
        return len(self._text) - len(rest)

    def _border(self, a: str, b: str) -> int:
        """Return the length of the longest common beginning that ends between two tokens of both texts."""
        length = _common(a, b)
        first = max(length - _LOOKAHEAD, 0)  # the beginning may contain a long message
        tokens = [self._tokenize(text[first : length + _LOOKAHEAD]) for text in (a, b)]
        while length > first:
            begun = self._tokenize(a[first:length])
            if all(found[: len(begun)] == begun for found in tokens):
                break
            length -= 1
        return length

    def _unknown(self, index: int, what: str) -> UnknownTurn:
        return UnknownTurn(what, index < len(self._messages) - 1)


def find_turns(
    render: Render, tokenize: Callable[[str], list[int]], messages: Sequence[Message], first: int, last_only: bool
) -> tuple[str, list[Piece]]:
    """Return the text before the first assistant turn of an answer, and the following text in pieces.

    Args:
        first: index of the answer's first message, which is an assistant turn.
        last_only: True to train only the last turn.

    Raises:
        UnknownTurn: if the tokens of a turn cannot be identified.
    """
    turns = [index for index in range(first, len(messages)) if messages[index]["role"] == "assistant"]
    messages = messages[: turns[-1] + 1]
    trained = turns[-1:] if last_only else turns
    try:
        return TurnFinder(render, tokenize, messages, False).pieces(turns, trained)
    except UnknownTurn as unknown:
        if unknown.is_rewritten or "</think>" not in str(messages[-1].get("content")):
            raise
    return TurnFinder(render, tokenize, messages, True).pieces(turns, trained)


def _texts(message: Message) -> list[tuple[str, str]]:
    """Return the texts that a rendered message must contain, by key and without whitespace."""
    texts = [(key, message.get(key)) for key in ("content", *_REASONING)]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        texts.append(("tool_calls", function.get("name")))
    return [(key, _squeezed(text)) for key, text in texts if isinstance(text, str)]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _common(a: str, b: str) -> int:
    return len(os.path.commonprefix([a, b]))
