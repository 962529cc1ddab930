"""History of sampled turns. A conversation continues from exactly the tokens in the history.

A turn is found by the token ids in its message, if the client returns these ids like NeMo Gym does. In place of the ids
of placeholders, clients get numbers that identify the images (``client_ids``). If the client drops unknown fields, a
turn is found by a fingerprint of the tools and the messages. The fingerprint also detects that a client has edited its
messages or changed its tools. In this case, the stored tokens are not used, because their text differs from the
request.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from gdpo_nemo.config.rollout_checks import TURNS_KEPT
from gdpo_nemo.data.images import Images
from gdpo_nemo.data.replies import parsed_arguments, split_thought
from gdpo_nemo.data.state_keys import state_keys
from gdpo_nemo.generation.requests import Completion
from gdpo_nemo.rollouts.endpoint.images import images_in

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


@dataclass
class Uses:
    """Use of the same sampled tokens."""

    sampled: int = 0
    """Number of requests that sampled these tokens."""
    claimed: int = 0
    """Number of episodes that contain these tokens."""


@dataclass(frozen=True)
class Turn:
    """One turn of the policy."""

    prompt_ids: np.ndarray
    """All tokens before this turn. Shape: int32 [tokens]."""
    completion: Completion
    engine: int
    turns: int
    """Number of turns in the conversation so far, including this turn."""
    num_policy_tokens: int
    """Number of tokens that the policy sampled in all turns so far."""
    fingerprint: str
    """Fingerprint of the conversation's tools and messages, including the message of this turn."""
    images: Images = ()
    """Images of ``prompt_ids``."""
    uses: Uses = field(default_factory=Uses)
    """Counts shared by all turns of the history with the same tokens."""

    @property
    def token_ids(self) -> np.ndarray:
        """Tokens of prompt and completion. The next prompt begins with these tokens. Shape: int32 [tokens]."""
        return np.concatenate([self.prompt_ids, self.completion.token_ids])

    @cached_property
    def client_ids(self) -> np.ndarray:
        """Result of ``client_ids`` for ``token_ids``."""
        return client_ids(self.token_ids, self.images)

    @property
    def token_fields(self) -> dict[str, Any]:
        """Fields of NeMo Gym's model server, from which training reads the turn."""
        completion = self.completion
        prompt_ids = self.client_ids[: len(self.prompt_ids)].tolist()
        values = (prompt_ids, completion.token_ids.tolist(), completion.logprobs.tolist())
        return dict(zip(TOKEN_FIELDS, values))


def part_of(mapping: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the entries of ``mapping`` with one of ``keys``, in the order of ``keys``."""
    return {key: mapping[key] for key in keys if key in mapping}


class EditedHistory(Exception):
    """Raised if a message has the token ids of a turn, but the text of the messages or the tools differ."""


class UnknownTurn(Exception):
    """Raised if the token ids of a message are not in the history, for example because the episode was abandoned."""


class History:
    """Turns of the episodes in flight. Thread-safe.

    Turns are numbered in the order of arrival, so that the turns of finished episodes can be removed.

    Args:
        limit: maximum number of turns. The oldest turns are removed first.
    """

    def __init__(self, limit: int = TURNS_KEPT):
        self._limit = limit
        self._lock = threading.Lock()
        self._count = 0
        self._by_ids: OrderedDict[bytes, tuple[int, Turn]] = OrderedDict()
        self._by_text: OrderedDict[tuple[str, str], tuple[int, Turn | None]] = OrderedDict()
        self._first_active = 0
        """Number of the first turn that may belong to an episode in flight."""
        self._newest_removed = -1
        """Number of the newest turn that was removed because of the limit, or -1 if none was removed."""

    def keep(self, session: str, turn: Turn) -> None:
        """Store a turn.

        If turns of one session have equal text but different tokens, they can be found only by their token ids.
        """
        with self._lock:
            ids = digest(turn.client_ids)
            key = (session, turn.fingerprint)
            stored = self._by_text.get(key)
            stored_turn = stored[1] if stored else None
            is_unique = stored is None or (
                stored_turn is not None and np.array_equal(stored_turn.client_ids, turn.client_ids)
            )
            # Entries are moved to the end, so that all entries are in the order of their numbers.
            if same := self._by_ids.pop(ids, None):
                turn = replace(turn, uses=same[1].uses)
            turn.uses.sampled += 1
            self._by_text.pop(key, None)
            self._by_ids[ids] = (self._count, turn)
            self._by_text[key] = (self._count, turn if is_unique else None)
            self._count += 1
            for table in (self._by_ids, self._by_text):
                while len(table) > self._limit:
                    self._newest_removed = max(self._newest_removed, table.popitem(last=False)[1][0])

    @property
    def count(self) -> int:
        """Number to assign to the next turn."""
        with self._lock:
            return self._count

    @property
    def forgotten(self) -> bool:
        """True if turns of episodes in flight were removed because of the limit."""
        with self._lock:
            return self._newest_removed >= self._first_active

    def forget(self, before: int) -> None:
        """Remove the turns with numbers less than ``before``, whose episodes are finished."""
        with self._lock:
            self._first_active = before
            for table in (self._by_ids, self._by_text):
                while table and next(iter(table.values()))[0] < before:
                    table.popitem(last=False)

    def clear(self) -> None:
        """Remove all turns."""
        self.forget(self.count)

    def turn(self, ids: np.ndarray) -> Turn | None:
        """Return the turn whose ``client_ids`` are ``ids``. Return None if the turn is not stored."""
        with self._lock:
            found = self._by_ids.get(digest(ids))
        return found[1] if found else None

    def claim(self, turns: Sequence[Turn]) -> None:
        """Count an episode that contains these turns."""
        with self._lock:
            for turn in turns:
                turn.uses.claimed += 1

    def last_turn(self, messages: Messages, session: str, tools: Tools = None) -> tuple[Turn, int] | None:
        """Find the stored turn of the last assistant message.

        Args:
            tools: tools of the request. Only a turn with equal tools is found.

        Returns:
            The turn and the index of its message. None if the turn is not stored or the conversation has no assistant
            messages.

        Raises:
            EditedHistory: if the message has the token ids of a turn, but the text or the tools differ.
            UnknownTurn: if the message has token ids that are not stored.
        """
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
            if message.get("role") != "assistant":
                continue
            text_digest = fingerprint(messages[: index + 1], tools)
            if message.get("prompt_token_ids") is not None:
                ids = [*message["prompt_token_ids"], *(message.get("generation_token_ids") or ())]
                turn = self.turn(np.array(ids, np.int64))
                if turn is None:
                    raise UnknownTurn
                if turn.fingerprint != text_digest:
                    raise EditedHistory
                return turn, index
            # Older assistant messages are not tried, because the turns after them would have to be rendered again.
            with self._lock:
                _, turn = self._by_text.get((session, text_digest), (0, None))
            return None if turn is None else (turn, index)
        return None


def fingerprint(messages: Messages, tools: Tools = None) -> str:
    """Return the SHA-256 digest of the tools and the messages: roles, stripped text, images, reasoning and tool calls.

    Reasoning at the beginning of the text and in a separate item give equal digests, because clients store reasoning in
    either format.
    """
    state = hashlib.sha256(json.dumps(tools or None, sort_keys=True).encode())
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            # Clients format the JSON of arguments differently, so the parsed arguments are compared.
            calls.append([function.get("name"), parsed_arguments(function.get("arguments"))])
        thought, text = str(message.get("reasoning_content") or ""), text_of(message)
        if not thought:
            thought, text = split_thought(text)
        parts = [message.get("role"), thought.strip(), text.strip(), calls]
        if images := images_in(message):
            parts.append([(place, image.sha256) for place, image in images])
        state.update(json.dumps(parts, sort_keys=True, default=str).encode() + b"\n")
    return state.hexdigest()


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose content may be null, a string or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def client_ids(token_ids: np.ndarray, images: Images) -> np.ndarray:
    """Return the numbers for the tokens in requests and replies: int64 [tokens].

    The number of a placeholder of an image is a part of its state key, so that conversations with equal tokens and
    different images differ. It has 53 bits, which every JSON parser reads exactly. Other tokens have their ids.
    """
    return (state_keys(token_ids, None, images) & np.uint64((1 << 53) - 1)).astype(np.int64)


def digest(ids: np.ndarray) -> bytes:
    """Return the SHA-256 digest of token ids, or of the result of ``client_ids``."""
    return hashlib.sha256(np.ascontiguousarray(ids, np.int64).tobytes()).digest()
