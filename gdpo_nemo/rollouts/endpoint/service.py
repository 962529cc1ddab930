"""Endpoint service, independent of HTTP: finds a conversation's earlier turns, samples the next turn and stores it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.image_reader import ImageReader
from gdpo_nemo.data.images import Image, Images, moved
from gdpo_nemo.data.replies import parsed_arguments
from gdpo_nemo.environments.server_replies import printable
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.rollouts.endpoint.anthropic import message_reply, read_messages
from gdpo_nemo.rollouts.endpoint.conversations import (
    EditedHistory,
    History,
    Turn,
    UnknownTurn,
    client_ids,
    digest,
    fingerprint,
    part_of,
    text_of,
)
from gdpo_nemo.rollouts.endpoint.images import RequestImages, images_in
from gdpo_nemo.rollouts.endpoint.requests import (
    ChatRequest,
    NoRoom,
    Refused,
    read_chat,
    read_object,
    read_responses,
    response_of,
    response_without_room,
)
from gdpo_nemo.utils.errors import GdpoError, RunError
from gdpo_nemo.utils.waits import waiting

MODEL = "policy"
_NO_ROLLOUT = "no rollout is in flight"
"""Error message for requests outside a phase. The status is 400, because agents would retry a 503."""


class Engines(Protocol):
    """Sampling interface of the engines, implemented by ``EngineFleet``."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop on which ``sample`` must run. The loop runs in a separate thread."""
        ...

    def sample(
        self, request: SampleRequest, sampling: Sampling, engine: int | None = None
    ) -> Coroutine[Any, Any, tuple[Completion, int]]:
        """Sample a completion, on ``engine`` if it is alive. Return the completion and the index of its engine."""
        ...


@dataclass(frozen=True)
class Budgets:
    """Limits on the length of one conversation."""

    max_turns: int
    max_tokens: int
    """Maximum number of tokens that the policy may write in all turns."""
    max_sequence: int
    """Maximum number of tokens of prompt and completion together."""


@dataclass(frozen=True)
class _Next:
    """Prompt of the next turn, and the previous turn. The previous turn, ``before``, is None if no earlier turn is
    stored."""

    token_ids: np.ndarray
    images: Images
    before: Turn | None
    is_edited: bool = False
    """True if the client has changed the history or the tools of the previous turn."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """Phases that are open together."""

    sampling: Sampling


@dataclass(eq=False)
class _Phase:
    """An open phase."""

    entropy: int
    first: int
    """Number of the first turn that may belong to this phase."""


class Service:
    """Service that answers agents' requests while at least one ``phase`` is open.

    Args:
        shared: True allows several open phases with equal sampling settings, for example one phase per group. A request
            does not identify its phase, because few agents would forward an identifier. Seeds therefore depend on the
            order of requests. With False, each phase waits until the previous phase ends.
        images: reader of images, which ``conversation`` also has, or None if the policy reads only text.
    """

    def __init__(
        self,
        engines: Engines,
        conversation: Conversation,
        budgets: Budgets,
        shared: bool = False,
        images: ImageReader | None = None,
    ):
        self.conversation = conversation
        self.budgets = budgets
        self.history = History()
        self.counts: Counter[str] = Counter()
        """Number of events by name. The counts restart if a phase is opened while no other phase is open.

        ``turns``: turns sampled. ``spliced``: turns that continued from sampled tokens. ``edited``: turns whose history
        or tools the client had changed, so that the prompt was rendered again. ``refused``: requests answered with an
        error.
        """
        self.last_refusal = ""
        """Message of the last request that was answered with an error."""
        self.failure: GdpoError | None = None
        """Error that made sampling fail permanently, or None if sampling works."""
        self._engines = engines
        self._shared = shared
        self._images = None if images is None else RequestImages(images)
        self._batch: _Batch | None = None
        """Current batch, or None if no phase is open."""
        self._request_counts: Counter[bytes] = Counter()
        """Number of requests by prompt digest. The counts restart whenever another phase becomes the oldest open
        phase."""
        self._phases: list[_Phase] = []
        self._queue: deque[object] = deque()
        """Queue of phases that wait to be opened. The queue prevents a phase with different settings from waiting
        forever."""
        self._condition = threading.Condition()

    @contextlib.contextmanager
    def phase(self, sampling: Sampling, entropy: int) -> Iterator[None]:
        """Open a phase: answer requests while the block runs.

        Wait until all open phases with which this phase cannot be shared have ended.

        Args:
            sampling: sampling settings for all requests.
            entropy: number from which seeds are derived while this phase is the oldest open phase.
        """
        opened = self._enter(sampling, entropy)
        try:
            yield
        finally:
            self._leave(opened)

    def _enter(self, sampling: Sampling, entropy: int) -> _Phase:
        ticket = object()

        def admitted() -> bool:
            can_share = self._shared and self._batch is not None and self._batch.sampling == sampling
            return self._queue[0] is ticket and (can_share or not self._phases)

        with self._condition:
            self._queue.append(ticket)
            try:
                if not admitted():
                    with waiting("the endpoint, which other agents use", "rollouts"):
                        self._condition.wait_for(admitted)
            finally:
                self._queue.remove(ticket)
                self._condition.notify_all()
            if not self._phases:
                self.history.clear()
                self.counts.clear()
                self._request_counts.clear()
                self._batch = _Batch(sampling)
            opened = _Phase(entropy, self.history.count)
            self._phases.append(opened)
        return opened

    def _leave(self, opened: _Phase) -> None:
        with self._condition:
            oldest = self._phases[0] is opened
            self._phases.remove(opened)
            if not self._phases:
                self._batch = None
                self.history.clear()
            elif oldest:
                # The next phase has another entropy, so the counts can restart without repeating a seed.
                self._request_counts.clear()
                self.history.forget(self._phases[0].first)
            self._condition.notify_all()

    async def chat(self, body: bytes, session: str = "") -> dict[str, Any]:
        """Return the reply to /v1/chat/completions.

        Raises:
            Refused: if the request is invalid or cannot be served.
        """
        batch = self._current_batch()
        request = await asyncio.to_thread(read_chat, body, batch.sampling, session, self._images)
        return await asyncio.to_thread(_answer, await self._turns(request, batch), request)

    async def messages(self, body: bytes, session: str = "") -> dict[str, Any]:
        """Return the reply to /v1/messages.

        Raises:
            Refused: if the request is invalid or cannot be served.
        """
        batch = self._current_batch()
        request, original = await asyncio.to_thread(read_messages, body, batch.sampling, session)
        [(turn, message)] = await self._turns(request, batch)
        return message_reply(turn, message, original, f"msg_{_number(turn):x}_{turn.turns}")

    async def responses(self, body: bytes, session: str = "") -> dict[str, Any]:
        """Return the reply to /v1/responses.

        Raises:
            Refused: if the request is invalid or cannot be served.
        """
        batch = self._current_batch()
        try:
            request, original = await asyncio.to_thread(read_responses, body, batch.sampling, session, self._images)
            [(turn, message)] = await self._turns(request, batch)
        except NoRoom as refused:
            self.count_refusal(str(refused))
            return response_without_room(await asyncio.to_thread(read_object, body))
        return response_of(turn, message, original, f"{_number(turn):x}_{turn.turns}")

    def count_refusal(self, message: str) -> None:
        """Count a request that is answered with an error."""
        self.counts["refused"] += 1
        self.last_refusal = message

    def refusals(self) -> str:
        """Return the number of refused requests and the last message, as the end of a sentence (empty if none)."""
        count = self.counts["refused"]
        last = printable(self.last_refusal)
        return f"; the endpoint refused {count} requests of this batch, the last one because {last}" if count else ""

    async def _turns(self, request: ChatRequest, batch: _Batch) -> list[tuple[Turn, dict[str, Any]]]:
        """Sample ``request.choices`` next turns of a conversation and store them, so that each can be continued.

        Templates, tokenizers and parsers run in threads, because a large request would delay all other clients.

        Returns:
            Each turn with the assistant's message.

        Raises:
            Refused: if the request cannot be served.
        """
        following = await asyncio.to_thread(self._next, request)
        return list(await asyncio.gather(*(self._turn(request, following, batch) for _ in range(request.choices))))

    async def _turn(self, request: ChatRequest, following: _Next, batch: _Batch) -> tuple[Turn, dict[str, Any]]:
        before = following.before
        self.counts["spliced"] += before is not None
        self.counts["edited"] += following.is_edited
        allowed = self._allowed(request, following, batch.sampling)
        seed = self._seed(client_ids(following.token_ids, following.images))
        sample = SampleRequest(following.token_ids, seed, allowed, following.images)
        stopping = replace(batch.sampling, stop_strings=(*batch.sampling.stop_strings, *request.stop))
        completion, engine = await self._sample(sample, stopping, before.engine if before else None)
        message, text_digest = await asyncio.to_thread(self._message, completion, request)
        turns, policy_tokens = (before.turns, before.num_policy_tokens) if before else (0, 0)
        policy_tokens += len(completion.token_ids)
        turn = Turn(following.token_ids, completion, engine, turns + 1, policy_tokens, text_digest, following.images)
        for index, call in enumerate(message.get("tool_calls") or ()):
            call["id"] = f"call_{_number(turn)}_{turn.turns}_{index}"
        self._store(batch, request.session, turn)
        return turn, message

    def _store(self, batch: _Batch, session: str, turn: Turn) -> None:
        """Store a turn.

        Raises:
            Refused: if all phases that were open at the time of the request have ended. Without this check, the next
                batch could use this turn's log-probs and version for a turn with equal tokens.
        """
        with self._condition:
            if self._batch is not batch:
                raise Refused(400, _NO_ROLLOUT)
            self.history.keep(session, turn)
            self.counts["turns"] += 1

    async def _sample(self, request: SampleRequest, sampling: Sampling, engine: int | None) -> tuple[Completion, int]:
        """Return a completion and the engine that sampled it.

        Raises:
            Refused: if sampling failed permanently.
        """
        pending: Future[tuple[Completion, int]] = asyncio.run_coroutine_threadsafe(
            self._engines.sample(request, sampling, engine), self._engines.loop
        )
        try:
            return await asyncio.wrap_future(pending)
        except Exception as error:  # Any exception is stored, because the callers that wait for the agents need it.
            self.failure = error if isinstance(error, GdpoError) else RunError(f"sampling: {error}")
            raise Refused(500, str(self.failure)) from None

    async def tokenize(self, body: bytes, session: str = "") -> dict[str, Any]:
        """Return the reply to /tokenize: the prompt tokens that a chat request with these messages would have.

        Raises:
            Refused: if the request is invalid.
        """
        request = await asyncio.to_thread(read_chat, body, self._current_batch().sampling, session, self._images)
        following = await asyncio.to_thread(self._next, request)
        ids = client_ids(following.token_ids, following.images).tolist()
        return {"tokens": ids, "count": len(ids), "max_model_len": self.budgets.max_sequence}

    def models(self) -> dict[str, Any]:
        """Return the reply to /v1/models."""
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "gdpo_nemo"}
        return {"object": "list", "data": [{**model, "max_model_len": self.budgets.max_sequence}]}

    def _current_batch(self) -> _Batch:
        batch = self._batch
        if batch is None:
            raise Refused(400, _NO_ROLLOUT)
        return batch

    def _next(self, request: ChatRequest) -> _Next:
        """Return the next prompt: the exact tokens of the earlier turns, followed by the new messages.

        If no earlier turn is stored, all messages are rendered with the chat template.
        """
        is_edited = False
        try:
            found = self.history.last_turn(request.messages, request.session, request.tools)
        except EditedHistory:
            found = None
            is_edited = True
        except UnknownTurn:
            raise Refused(400, "a message contains token ids that were not sampled in this batch") from None
        messages = [_for_template(message) for message in request.messages]
        try:
            if found is None:
                _, ids, images = self.conversation.prompt_with_images(messages, request.tools)
                return _Next(ids, images, None, is_edited)
            turn, index = found
            if index + 1 == len(messages):
                raise Refused(400, "the last message is from the assistant, so there is nothing to answer")
            last = int(turn.completion.token_ids[-1])
            calls = messages[index].get("tool_calls", ())
            new, images = self.conversation.continuation_with_images(
                messages[:index], messages[index + 1 :], last, request.tools, calls
            )
        except RunError as error:
            raise Refused(400, str(error)) from None
        ids = np.concatenate([turn.token_ids, new]).astype(np.int32)
        return _Next(ids, turn.images + moved(images, len(turn.token_ids)), turn)

    def _allowed(self, request: ChatRequest, following: _Next, sampling: Sampling) -> int:
        """Return the maximum number of tokens of the next turn.

        Raises:
            NoRoom: if a limit is reached. Agents recognize a full context by the words of this message.
        """
        budgets = self.budgets
        before = following.before
        length = len(following.token_ids)
        room = budgets.max_sequence - length
        left = budgets.max_tokens - (before.num_policy_tokens if before else 0)
        if before and before.turns >= budgets.max_turns:
            raise NoRoom(f"max_tokens: the policy has already used all of its {budgets.max_turns} turns")
        if room < 1:
            raise NoRoom(f"the prompt of {length} tokens exceeds the context length of {budgets.max_sequence} tokens")
        if left < 1:
            raise NoRoom(f"max_tokens: the policy has already used all of its {budgets.max_tokens} tokens")
        return min(room, left, sampling.max_new_tokens, request.max_tokens or room)

    def _seed(self, ids: np.ndarray) -> int:
        """Return a seed that depends on the phase, the prompt and the number of earlier requests with this prompt.

        Requests with the same prompt get different seeds. The set of the seeds does not depend on the order of the
        agents.

        Args:
            ids: result of ``client_ids`` for the prompt.
        """
        prompt = digest(ids)
        with self._condition:
            if not self._phases:
                raise Refused(400, _NO_ROLLOUT)
            phase = self._phases[0].entropy
            self._request_counts[prompt] += 1
            times = self._request_counts[prompt]
        entropy = [phase, int.from_bytes(prompt[:8], "little"), times]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)

    def _message(self, completion: Completion, request: ChatRequest) -> tuple[dict[str, Any], str]:
        """Convert a completion to the assistant's message, and return it with the fingerprint of the conversation.

        If the request has tools, tool calls are parsed from the text.

        Raises:
            Refused: if the tool definitions are invalid.
        """
        text = self.conversation.text(completion.token_ids)
        end = len(text)
        for stop in request.stop:
            if (found := text.find(stop)) >= 0:
                end = min(end, found)
        text = text[:end]
        try:
            reply = self.conversation.replies.parse(text, request.tools if request.parses_calls else None)
        except RunError as error:
            raise Refused(400, str(error)) from None
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["content"] = reply.content or None
            message["tool_calls"] = []
            for name, arguments in reply.calls:
                function = {"name": name, "arguments": arguments}
                message["tool_calls"].append({"id": "", "type": "function", "function": function})
        return message, fingerprint([*request.messages, message], request.tools)


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message to the format that chat templates expect.

    The content becomes a string, unless it contains images, and the arguments of tool calls become objects. The role
    developer becomes system. Fields of this endpoint, such as token ids, are removed.
    """
    plain = part_of(message, ("role", "name", "tool_call_id", "reasoning_content"))
    if plain["role"] == "developer":
        plain["role"] = "system"
    plain["content"] = text_of(message)
    if images_in(message):
        parts = message["content"]
        plain["content"] = [
            p if isinstance(p.get("image"), Image) else {"type": "text", "text": p["text"]} for p in parts
        ]
    if message.get("tool_calls"):
        plain["tool_calls"] = []
        for call in message["tool_calls"]:
            function = {**call["function"], "arguments": parsed_arguments(call["function"].get("arguments"))}
            plain["tool_calls"].append({**call, "function": function})
    return plain


def _number(turn: Turn) -> int:
    """Return a number for the ids in a turn's reply. The number depends only on the tools and the messages, so a
    resumed run repeats the number."""
    return int(turn.fingerprint[:12], 16)


def _answer(turns: Sequence[tuple[Turn, dict[str, Any]]], request: ChatRequest) -> dict[str, Any]:
    """Return the reply to a chat request."""
    first = turns[0][0]
    usage = {
        "prompt_tokens": len(first.prompt_ids),
        "completion_tokens": sum(len(turn.completion.token_ids) for turn, _ in turns),
    }
    return {
        "id": f"chatcmpl-{_number(first):x}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [_choice(index, turn, message, request) for index, (turn, message) in enumerate(turns)],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }


def _choice(index: int, turn: Turn, message: dict[str, Any], request: ChatRequest) -> dict[str, Any]:
    """Return a choice of a reply.

    Training reads the three token fields of the message, which NeMo Gym passes on unchanged.
    """
    completion = turn.completion
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    if completion.finish_reason == "length":
        finish = "length"
    choice: dict[str, Any] = {
        "index": index,
        "finish_reason": finish,
        "message": {**message, **turn.token_fields},
    }
    if request.wants_logprobs:
        content = []
        for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist()):
            content.append({"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []})
        choice["logprobs"] = {"content": content}
    return choice
