"""The endpoint without HTTP: find a conversation's earlier turns, sample the next, store it, answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Coroutine, Iterator, Mapping, Protocol

import numpy as np

from gdpo_nemo.data.completions import output_items
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.endpoint.conversations import (
    EditedHistory,
    History,
    Turn,
    UnknownTurn,
    arguments_of,
    fingerprint,
    text_of,
)
from gdpo_nemo.endpoint.parameters import ChatRequest, NoRoom, Refused, read_chat
from gdpo_nemo.endpoint.responses import read_responses, response_of, response_without_room
from gdpo_nemo.errors import GdpoError, RunError
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.waits import waiting

MODEL = "policy"
_NO_ROLLOUT = "no rollout is under way"
"""With status 400 and not 503: agents retry a 503."""


class Engines(Protocol):
    """What the endpoint samples with: ``EngineFleet``."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where ``sample`` runs, in a thread of its own."""
        ...

    def sample(
        self, request: SampleRequest, sampling: Sampling, engine: int | None = None
    ) -> Coroutine[Any, Any, tuple[Completion, int]]:
        """Draw a completion, on ``engine`` if it lives; returns it with the engine's number."""
        ...


@dataclass(frozen=True)
class Budgets:
    """Limits of one conversation."""

    max_turns: int
    max_tokens: int
    """Tokens that the policy may sample in all turns together."""
    max_sequence: int
    """Tokens of prompt and completion together."""


@dataclass(frozen=True)
class _Next:
    """The prompt of the next turn, and the turn before it."""

    token_ids: np.ndarray
    before: Turn | None


@dataclass(eq=False)
class _User:
    """Whoever has opened a phase."""

    entropy: int
    first: int
    """Number of the first turn that may be its own."""


class Service:
    """Serves the requests of those who have opened a ``phase``.

    Args:
        shared: let several phases be open at once if they sample alike: calls of agents, one for each group. Which of
            them a request belongs to is unknown, as few agents pass on what would say so; their seeds depend on the
            order in which requests come. Without it a phase waits for the end of the one before.
    """

    def __init__(self, engines: Engines, conversation: Conversation, budgets: Budgets, shared: bool = False):
        self.conversation = conversation
        self.budgets = budgets
        self.history = History()
        self.counts: Counter[str] = Counter()
        """Events since nobody used the endpoint: turns, spliced (turns that continued from sampled tokens), edited
        (turns whose history the client had changed, so that the prompt was rendered again), refused."""
        self.failure: GdpoError | None = None
        """Why sampling failed for good, once it did."""
        self._engines = engines
        self._shared = shared
        self._sampling: Sampling | None = None
        self._batch = object()
        """Another one whenever somebody opens a phase while nobody has one open."""
        self._drawn: Counter[bytes] = Counter()
        """Requests by the digest of their prompt, since the oldest of ``_users`` became that."""
        self._users: list[_User] = []
        self._queue: deque[object] = deque()
        """Those who wait to become one; in order, so that a phase with other settings is not passed by for ever."""
        self._door = threading.Condition()

    @contextlib.contextmanager
    def phase(self, sampling: Sampling, entropy: int) -> Iterator[None]:
        """While the block runs, requests are served with ``sampling``, and with seeds drawn from the ``entropy`` of the
        oldest phase that is open. Waits for open ones that cannot be shared."""
        user = self._enter(sampling, entropy)
        try:
            yield
        finally:
            self._leave(user)

    def _enter(self, sampling: Sampling, entropy: int) -> _User:
        place = object()

        def admitted() -> bool:
            alike = self._shared and self._sampling == sampling
            return self._queue[0] is place and (alike or not self._users)

        with self._door:
            self._queue.append(place)
            try:
                if not admitted():
                    with waiting("the endpoint, which other agents use", "rollouts"):
                        self._door.wait_for(admitted)
            finally:
                self._queue.remove(place)
                self._door.notify_all()
            if not self._users:
                self.history.clear()
                self.counts.clear()
                self._drawn.clear()
                self._sampling = sampling
                self._batch = object()
            user = _User(entropy, self.history.count)
            self._users.append(user)
        return user

    def _leave(self, user: _User) -> None:
        with self._door:
            oldest = self._users[0] is user
            self._users.remove(user)
            if not self._users:
                self._sampling = None
                self.history.clear()
            elif oldest:
                # Seeds come from another entropy now, so the counts begin anew without repeating one.
                self._drawn.clear()
                self.history.forget(self._users[0].first)
            self._door.notify_all()

    async def chat(self, body: bytes, session: str = "") -> dict[str, Any]:
        """The answer to /v1/chat/completions. Raises Refused."""
        sampling = self._current_sampling()
        request = read_chat(body, sampling, session)
        return _answer(*await self._turn(request, sampling), request)

    async def responses(self, body: bytes, session: str = "") -> dict[str, Any]:
        """The answer to /v1/responses. Raises Refused."""
        sampling = self._current_sampling()
        request, given = read_responses(body, sampling, session)
        try:
            turn, message = await self._turn(request, sampling)
        except NoRoom:
            self.counts["refused"] += 1
            return response_without_room(given)
        return response_of(turn, message, given, f"{_number(turn):x}_{turn.turns}")

    async def _turn(self, request: ChatRequest, sampling: Sampling) -> tuple[Turn, dict[str, Any]]:
        """Sample the next turn of a conversation, store it, return it and the assistant's message. Raises Refused."""
        batch = self._batch
        following = self._next(request)
        allowed = self._allowed(request, following, sampling)
        before = following.before
        sample = SampleRequest(following.token_ids, self._seed(following.token_ids), allowed)
        completion, engine = await self._draw(sample, sampling, before.engine if before else None)
        message = self._message(completion, request)
        said = fingerprint([*request.messages, message])
        turns, written = (before.turns, before.num_policy_tokens) if before else (0, 0)
        written += len(completion.token_ids)
        turn = Turn(following.token_ids, completion, engine, turns + 1, written, said)
        for place, call in enumerate(message.get("tool_calls") or ()):
            call["id"] = f"call_{_number(turn)}_{turn.turns}_{place}"
        self._keep(batch, request.session, turn)
        return turn, message

    def _keep(self, batch: object, session: str, turn: Turn) -> None:
        """Store a turn. Raises Refused where the phases that were open when it was asked for are over: of the same
        tokens, those of the next batch would be given its log-probs and version."""
        with self._door:
            if self._batch is not batch or not self._users:
                raise Refused(400, _NO_ROLLOUT)
            self.history.keep(session, turn)
            self.counts["turns"] += 1

    async def _draw(self, request: SampleRequest, sampling: Sampling, engine: int | None) -> tuple[Completion, int]:
        """A completion and the engine that drew it. Raises Refused where sampling failed for good."""
        drawing: Future[tuple[Completion, int]] = asyncio.run_coroutine_threadsafe(
            self._engines.sample(request, sampling, engine), self._engines.loop
        )
        try:
            return await asyncio.wrap_future(drawing)
        except Exception as error:  # of any kind: whoever waits for the agents has to learn of it
            self.failure = error if isinstance(error, GdpoError) else RunError(f"sampling: {error}")
            raise Refused(500, str(self.failure)) from None

    async def tokenize(self, body: bytes, session: str = "") -> dict[str, Any]:
        """The answer to /tokenize: the prompt that the same messages would get. Raises Refused."""
        ids = self._next(read_chat(body, self._current_sampling(), session), count=False).token_ids.tolist()
        return {"tokens": ids, "count": len(ids), "max_model_len": self.budgets.max_sequence}

    def models(self) -> dict[str, Any]:
        """The answer to /v1/models."""
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "gdpo_nemo"}
        return {"object": "list", "data": [{**model, "max_model_len": self.budgets.max_sequence}]}

    def _current_sampling(self) -> Sampling:
        sampling = self._sampling
        if sampling is None:
            raise Refused(400, _NO_ROLLOUT)
        return sampling

    def _next(self, request: ChatRequest, count: bool = True) -> _Next:
        """The tokens of the next prompt: those of the earlier turns, exactly, and the new messages; or all messages
        rendered, if there is no earlier turn."""
        try:
            found = self.history.last_turn(request.messages, request.session)
        except EditedHistory:
            found = None
            self.counts["edited"] += count
        except UnknownTurn:
            raise Refused(400, "a message carries token ids that were not sampled in this batch of rollouts") from None
        messages = [_for_template(message) for message in request.messages]
        try:
            if found is None:
                return _Next(self.conversation.prompt(messages, request.tools)[1], None)
            turn, place = found
            if place + 1 == len(messages):
                raise Refused(400, "messages end with the assistant's turn, so there is nothing to answer")
            last = int(turn.completion.token_ids[-1])
            new = self.conversation.continuation(messages[:place], messages[place + 1 :], last, request.tools)
        except RunError as error:
            raise Refused(400, str(error)) from None
        self.counts["spliced"] += count
        return _Next(np.concatenate([turn.token_ids, new]).astype(np.int32), turn)

    def _allowed(self, request: ChatRequest, following: _Next, sampling: Sampling) -> int:
        """Token limit of the next turn. Raises NoRoom, in the words by which agents recognise a full context."""
        budgets = self.budgets
        before = following.before
        length = len(following.token_ids)
        room = budgets.max_sequence - length
        left = budgets.max_tokens - (before.num_policy_tokens if before else 0)
        if before and before.turns >= budgets.max_turns:
            raise NoRoom(f"max_tokens: the policy has taken its {budgets.max_turns} turns")
        if room < 1:
            raise NoRoom(f"the prompt of {length} tokens exceeds the context length of {budgets.max_sequence} tokens")
        if left < 1:
            raise NoRoom(f"max_tokens: the policy has written its {budgets.max_tokens} tokens")
        return min(room, left, sampling.max_new_tokens, request.max_tokens or room)

    def _seed(self, token_ids: np.ndarray) -> int:
        """Seed from the phase, the prompt and its count so far: samples of one prompt differ, and depend on the number
        of agents that ask, not on their order."""
        digest = hashlib.sha256(token_ids.tobytes()).digest()
        with self._door:
            if not self._users:
                raise Refused(400, _NO_ROLLOUT)
            phase = self._users[0].entropy
            self._drawn[digest] += 1
            times = self._drawn[digest]
        entropy = [phase, int.from_bytes(digest[:8], "little"), times]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)

    def _message(self, completion: Completion, request: ChatRequest) -> dict[str, Any]:
        """The assistant's message; tool calls are parsed out of the text if the request offers tools."""
        text = self.conversation.text(completion.token_ids)
        items = output_items(text, "hermes") if request.tools else []
        calls = [item for item in items if item["type"] == "function_call"]
        if not calls:
            return {"role": "assistant", "content": text}
        said = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
        return {
            "role": "assistant",
            "content": said or None,
            "tool_calls": [
                {"id": c["call_id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in calls
            ],
        }


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it: content as text, arguments as objects, known roles, no fields of ours."""
    plain = {key: message[key] for key in ("role", "name", "tool_call_id", "reasoning_content") if key in message}
    if plain["role"] == "developer":
        plain["role"] = "system"
    plain["content"] = text_of(message)
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_of(call["function"])}}
            for call in message["tool_calls"]
        ]
    return plain


def _number(turn: Turn) -> int:
    """A number for the ids in a turn's answer: from its content, so that a resumed run answers with the same ids."""
    return int(turn.fingerprint[:12], 16)


def _answer(turn: Turn, message: dict[str, Any], request: ChatRequest) -> dict[str, Any]:
    """The reply. Training reads the three token fields of the message, which NeMo Gym passes on unchanged."""
    completion = turn.completion
    ids = completion.token_ids.tolist()
    logprobs = completion.logprobs.tolist()
    finish = "length" if completion.finish_reason == "length" else "tool_calls" if message.get("tool_calls") else "stop"
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": finish,
        "message": {
            **message,
            "prompt_token_ids": turn.prompt_ids.tolist(),
            "generation_token_ids": ids,
            "generation_log_probs": logprobs,
        },
    }
    if request.wants_logprobs:
        entry: dict[str, Any] = {"bytes": None, "top_logprobs": []}
        content = [{"token": f"token_id:{i}", "logprob": value, **entry} for i, value in zip(ids, logprobs)]
        choice["logprobs"] = {"content": content}
    usage = {"prompt_tokens": len(turn.prompt_ids), "completion_tokens": len(ids)}
    return {
        "id": f"chatcmpl-{_number(turn):x}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [choice],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }
