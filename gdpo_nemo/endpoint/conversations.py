"""The sampled turns, so that the next turn continues from exactly those tokens.

A turn is found by the token ids in its message (NeMo Gym returns them), or, for clients that drop unknown fields, by a
fingerprint of the messages. The fingerprint also shows whether the client has edited its history: tokens whose text is
not the client's are not given to the model.
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
    engine: int
    turns: int
    """Turns of this conversation, this one included."""
    num_policy_tokens: int
    """Tokens that the policy sampled in those turns."""
    fingerprint: str
    """Of the messages, the assistant's own last one included."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32: prompt and completion, the beginning of the next prompt."""
        return np.concatenate([self.prompt_ids, self.completion.token_ids])


class EditedHistory(Exception):
    """The client's messages differ from the text of its token ids."""


class UnknownTurn(Exception):
    """Token ids that were not sampled for the episodes under way: of an abandoned one, or invented."""


class History:
    """The turns of the episodes under way; beyond ``limit`` the oldest are dropped. Thread-safe.

    Turns are numbered as they come, so that those of episodes that are over can be forgotten.
    """

    def __init__(self, limit: int = TURNS_KEPT):
        self._limit = limit
        self._lock = threading.Lock()
        self._count = 0
        self._by_ids: OrderedDict[bytes, tuple[int, Turn]] = OrderedDict()
        self._by_text: OrderedDict[tuple[str, str], tuple[int, Turn | None]] = OrderedDict()
        self._first = 0
        """Turns before this one belong to no episode under way."""
        self._lost = -1
        """Number of the newest turn that the limit has dropped."""

    def keep(self, session: str, turn: Turn) -> None:
        """Store a turn. Turns of one session with different tokens but equal text can be found by token ids only."""
        with self._lock:
            ids = _digest(turn.token_ids)
            key = (session, turn.fingerprint)
            known = self._by_text.get(key)
            other = known[1] if known else None
            same = known is None or (other is not None and np.array_equal(other.token_ids, turn.token_ids))
            # Moved to the end: an entry's place is that of its number.
            self._by_ids.pop(ids, None)
            self._by_text.pop(key, None)
            self._by_ids[ids] = (self._count, turn)
            self._by_text[key] = (self._count, turn if same else None)
            self._count += 1
            for table in (self._by_ids, self._by_text):
                while len(table) > self._limit:
                    self._lost = max(self._lost, table.popitem(last=False)[1][0])

    @property
    def count(self) -> int:
        """The number that the next turn will have."""
        with self._lock:
            return self._count

    @property
    def forgotten(self) -> bool:
        """Whether the limit has dropped turns of episodes under way."""
        with self._lock:
            return self._lost >= self._first

    def forget(self, before: int) -> None:
        """Forget the turns whose number is less than ``before``: their episodes are over."""
        with self._lock:
            self._first = before
            for table in (self._by_ids, self._by_text):
                while table and next(iter(table.values()))[0] < before:
                    table.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self.forget(self.count)

    def turn(self, token_ids: np.ndarray) -> Turn | None:
        """Return the turn whose prompt and completion are ``token_ids``, or None."""
        with self._lock:
            found = self._by_ids.get(_digest(token_ids))
        return found[1] if found else None

    def last_turn(self, messages: Messages, session: str) -> tuple[Turn, int] | None:
        """Return the newest sampled turn in ``messages`` and the index of its message, or None.

        Raises:
            EditedHistory: the message has the token ids of a turn with another text.
            UnknownTurn: it has token ids that were not sampled here.
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
                if turn.fingerprint != said:
                    raise EditedHistory
                return turn, place
            # Only the newest assistant message counts: from an older one, the turns between would be rendered again.
            with self._lock:
                _, turn = self._by_text.get((session, said), (0, None))
            return None if turn is None else (turn, place)
        return None


def fingerprint(messages: Messages) -> str:
    """SHA-256 of the messages' content: roles, stripped text, calls by name and arguments.

    Reasoning at the beginning counts as reasoning in any form: some clients keep it as a separate item.
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
    """A call's arguments as an object, as chat templates expect; text that is not JSON stays text."""
    arguments = function.get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _digest(token_ids: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(token_ids, np.int32).tobytes()).digest()
