"""What was sampled, so that the next turn goes on from exactly those tokens.

A turn is found again by the token ids that its message carries (NeMo Gym hands them back), or, for clients that drop
unknown fields, by what was said. What was said also tells whether the client has edited its history: tokens that stand
for other words than the client means are not put before the model.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.turn_limits import TURNS_KEPT
from gdpo_nemo.data.completions import split_thought
from gdpo_nemo.generation.requests import Completion

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Turn:
    """One turn of the policy."""

    prompt_ids: np.ndarray
    """int32 [tokens]: everything before it"""
    completion: Completion
    version: int
    engine: int
    turns: int
    """Turns of this conversation up to and with this one."""
    written: int
    """Tokens that the policy wrote in them."""
    said: str
    """Fingerprint of the messages up to and with the assistant's."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32: prompt and completion, the beginning of the next prompt."""
        return np.concatenate([self.prompt_ids, self.completion.token_ids])


class EditedHistory(Exception):
    """The client's messages are not those that its token ids stand for."""


class UnknownTurn(Exception):
    """Token ids that were not sampled in this batch of rollouts: of an episode that was given up, or made up."""


class History:
    """The turns of one batch of rollouts; the oldest give way. Safe to use from several threads."""

    def __init__(self, limit: int = TURNS_KEPT):
        self._limit = limit
        self._lock = threading.Lock()
        self.forgotten = False
        """Whether turns of this batch had to give way."""
        self._by_ids: OrderedDict[bytes, Turn] = OrderedDict()
        self._by_words: OrderedDict[tuple[str, str], Turn | None] = OrderedDict()

    def keep(self, session: str, turn: Turn) -> None:
        """Remember a turn. Two turns of other tokens but the same words in one session cannot be told apart by
        words."""
        with self._lock:
            self._by_ids[_digest(turn.token_ids)] = turn
            key = (session, turn.said)
            other = self._by_words.get(key)
            same = key not in self._by_words or (other and np.array_equal(other.token_ids, turn.token_ids))
            self._by_words[key] = turn if same else None
            for table in (self._by_ids, self._by_words):
                while len(table) > self._limit:
                    table.popitem(last=False)
                    self.forgotten = True

    def turn(self, token_ids: np.ndarray) -> Turn | None:
        """The turn whose prompt and completion are ``token_ids``, if it was sampled here."""
        with self._lock:
            return self._by_ids.get(_digest(token_ids))

    def last_turn(self, messages: Messages, session: str) -> tuple[Turn, int] | None:
        """The newest turn of ``messages`` that was sampled here, and the place of its message; None where there is
        none.

        Raises:
            EditedHistory: the message carries the token ids of a turn in which other words were said.
            UnknownTurn: it carries token ids that were not sampled here.
        """
        for place in range(len(messages) - 1, -1, -1):
            message = messages[place]
            if message.get("role") != "assistant":
                continue
            said = fingerprint(messages[: place + 1])
            if message.get("prompt_token_ids") is not None:
                ids = [*message["prompt_token_ids"], *(message.get("generation_token_ids") or ())]
                turn = self.turn(np.array(ids, np.int32))
                if turn is None:
                    raise UnknownTurn
                if turn.said != said:
                    raise EditedHistory
                return turn, place
            with self._lock:
                turn = self._by_words.get((session, said))
            return None if turn is None else (turn, place)
        return None

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._by_ids.clear()
            self._by_words.clear()
            self.forgotten = False


def fingerprint(messages: Messages) -> str:
    """SHA-256 of what messages say: roles, text without white space at its ends, calls by name and arguments.

    A thought at the beginning counts as such, however it is set apart: clients may hold it as an item of its own.
    """
    digest = hashlib.sha256()
    for message in messages:
        calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        thought, text = split_thought(text_of(message))
        spoken = [message.get("role"), thought, text.strip(), [[c.get("name"), arguments_of(c)] for c in calls]]
        digest.update(json.dumps(spoken, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, whose content may be null, text, or parts of text."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def arguments_of(function: Mapping[str, Any]) -> Any:
    """A call's arguments as an object, which is what chat templates want; text that is no JSON stays text."""
    arguments = function.get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _digest(token_ids: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(token_ids, np.int32).tobytes()).digest()
