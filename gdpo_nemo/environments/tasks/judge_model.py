"""Judge model at an OpenAI-compatible endpoint: requests, a record of replies with the budget, and inquiries.

The judge's reply is untrusted: its size is limited. If a request fails, its samples get a ``Failure`` and are masked. A
sample without a score never gets a reward of 0. The API key appears only in the request header. Failure messages quote
the beginning of the server's text, which gives the reason. Keys in it are masked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gdpo_nemo.algorithms.rubrics import Criterion
from gdpo_nemo.data.images import Image
from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.environments import server_replies
from gdpo_nemo.environments.base import Failure, count_option
from gdpo_nemo.environments.http_client import HttpClient, api_key, base_url as checked_url, with_retries
from gdpo_nemo.environments.images import data_url
from gdpo_nemo.environments.server_replies import error_text, printable
from gdpo_nemo.environments.tasks.answers import completion_text
from gdpo_nemo.utils.errors import ConfigError

RECORD = "judge.jsonl"
"""File in the run folder with all replies of the judges."""
MAX_TOKENS = 512
"""Default maximum number of tokens of a reply."""
_MAX_JSON_DEPTH = 100
_REQUEST_KEYS = ("model", "messages", "max_tokens", "max_completion_tokens", "temperature", "n", "stream")
"""Keys of the request that ``extra_body`` cannot replace."""
_MOST_VOTES = 100

type Conversation = list[dict[str, Any]]


class Reply(NamedTuple):
    """Reply of a judge model."""

    text: str
    tokens: int
    """Tokens of the request and the reply, as the endpoint reports them, or 0 if it does not."""


@dataclass(eq=False)
class JudgeModel:
    """Chat model at an OpenAI-compatible endpoint. ``judge.LlmJudge`` describes the arguments."""

    base_url: str
    model: str
    _: KW_ONLY
    api_key_env: str | None = None
    time_limit_s: float = 20.0
    max_retries: int = 3
    concurrency: int = 16
    max_reply_bytes: int = 262_144
    max_tokens: int | None = MAX_TOKENS
    temperature: float | None = 0.0
    max_completion_tokens: int | None = None
    extra_body: Mapping[str, Any] | None = None
    votes: int = 1

    def __post_init__(self) -> None:
        self._url = checked_url("base_url", self.base_url) + "/chat/completions"
        self._time_limit_s = float(self.time_limit_s)
        self._max_retries = int(self.max_retries)
        self._concurrency = int(self.concurrency)
        self._max_reply_bytes = int(self.max_reply_bytes)
        if self._time_limit_s <= 0 or self._concurrency < 1 or self._max_retries < 0:
            raise ConfigError("time_limit_s and concurrency must be greater than 0, max_retries at least 0")
        votes = self.votes = count_option("votes", self.votes) or 1
        longest = count_option("max_completion_tokens", self.max_completion_tokens)
        sampling = {
            "model": self.model,
            "max_completion_tokens": longest,
            "temperature": _temperature(self.temperature),
            "max_tokens": count_option("max_tokens", self.max_tokens) if longest is None else None,
        }
        if votes > _MOST_VOTES:
            raise ConfigError(f"votes: must be at most {_MOST_VOTES}, got {votes}")
        if votes > 1 and self.temperature == 0:
            raise ConfigError(
                f"votes: {votes} votes at temperature 0 would be equal; set temperature above 0, or to null for the "
                "endpoint's default"
            )
        # Only keys with a value, because the key of a cached reply contains them.
        self._sampling = {key: value for key, value in sampling.items() if value is not None} | _extra(self.extra_body)
        self._api_key = api_key(self.api_key_env)

    def key(self, messages: Conversation, vote: int = 0) -> str:
        """Return a hash of the request and the index of its vote, which identifies the reply in the cache."""
        request = [self._url, self._sampling, messages, *([vote] if vote else [])]
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    async def ask(self, conversations: Sequence[Conversation]) -> list[Reply | Failure]:
        """Return one reply or ``Failure`` per conversation, within ``time_limit_s``."""
        deadline = asyncio.get_running_loop().time() + self._time_limit_s
        slots = asyncio.Semaphore(self._concurrency)
        client = HttpClient(self._concurrency, self._max_reply_bytes, _MAX_JSON_DEPTH, self._api_key)
        try:
            return await asyncio.gather(*(self._ask(client, slots, deadline, chat) for chat in conversations))
        finally:
            await client.close()

    async def _ask(
        self, client: HttpClient, slots: asyncio.Semaphore, deadline: float, messages: Conversation
    ) -> Reply | Failure:
        def time_left() -> float:
            return deadline - asyncio.get_running_loop().time()

        body = {**self._sampling, "messages": messages}
        limit = f"time_limit_s is {self._time_limit_s:g}"
        try:
            async with asyncio.timeout_at(deadline), slots:
                reply = await with_retries(
                    lambda: client.ask(self._url, body, time_left()), self._max_retries, time_left, limit
                )
        except TimeoutError:
            return Failure(f"no score within {self._time_limit_s:g} s")
        except server_replies.Failure as failure:
            return Failure(self._description(failure))
        return _read_reply(reply)

    def _description(self, failure: server_replies.Failure) -> str:
        """Describe a failure for the user."""
        if failure.status is not None:
            return f"the judge answered with {failure.detail}"
        kinds = {
            server_replies.FailureKind.TIMEOUT: f"no score within {self._time_limit_s:g} s",
            server_replies.FailureKind.CONNECTION: f"the judge cannot be reached: {failure.detail}",
            server_replies.FailureKind.TOO_LARGE: f"the judge's reply is longer than {self._max_reply_bytes} bytes",
        }
        return kinds.get(failure.kind, f"the judge's reply is not a chat completion: {failure.detail}")


def _read_reply(reply: Any) -> Reply | Failure:
    try:
        content = reply["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        return Failure(f"the judge's reply is not a chat completion: {error_text(reply)}")
    if not isinstance(content, str):
        return Failure(f"the judge's reply contains no text: {printable(str(reply['choices'][0]))}")
    usage = reply.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return Reply(content, tokens if isinstance(tokens, int) and 0 < tokens < 10**9 else 0)


@dataclass(frozen=True)
class Question[Result]:
    """A request to the judge."""

    chat: Conversation
    read: Callable[[str], Result | Failure]
    """Function that returns the result in the text of a reply, or a ``Failure`` if the reply is invalid."""


@dataclass
class Grade:
    """Result of one vote for one sample."""

    rewards: dict[str, float | None]
    """Reward of each component from 0 to 1, or None if the judge cannot tell."""
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Characters of the sample that a component is about (``Verdict.reward_spans``)."""
    observed: dict[str, list[float]] = field(default_factory=dict)
    """Values whose means over all samples are metrics, by name."""


@dataclass(frozen=True)
class Inquiry[Result]:
    """Questions that together give the grades of one or several samples of a row."""

    samples: Sequence[int]
    """Indices of the samples in the call of ``verify``."""
    questions: Sequence[Question[Result]]
    grade: Callable[[Sequence[Result]], list[Grade]]
    """Function that returns one grade per sample, given the result of each question."""
    criteria: Mapping[str, Criterion] = field(default_factory=dict)
    """Criteria of the row by component, if the row contains them."""


class ReplyRecord:
    """Cache of replies and use of the budget, in memory and in a file.

    Args:
        source: identifies the judge and its rubric. Only its replies count against the budget.
        limits: ``max_calls`` and ``max_total_tokens``, each may be None.
    """

    def __init__(self, source: str, limits: Mapping[str, int | None]):
        self._source = source
        self._limits = limits
        self._lock = threading.Lock()
        self._replies: dict[str, Reply] = {}
        self._calls = self._reserved = self._tokens = 0
        self._path: Path | None = None

    def open(self, path: Path) -> None:
        """Read the replies of a file, and append to it from now on."""
        self._path = path
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
                judge, key, reply = entry["judge"], entry["key"], Reply(str(entry["reply"]), int(entry["tokens"]))
            except (ValueError, LookupError, TypeError):  # a line that was cut off when the run was killed
                continue
            if judge == self._source:
                self._count(key, reply)

    def find(self, key: str) -> Reply | None:
        """Return a reply from the cache."""
        with self._lock:
            return self._replies.get(key)

    def reserve(self, calls: int) -> None:
        """Reserve calls. Raises ConfigError if the budget does not cover them."""
        with self._lock:
            used = {"max_calls": self._calls + self._reserved + calls - 1, "max_total_tokens": self._tokens}
            for key, limit in self._limits.items():
                if calls and limit is not None and used[key] >= limit:
                    raise ConfigError(
                        f"{key}: the judge's budget is used up ({self._calls} calls and {self._tokens} tokens so far, "
                        f"{calls} more calls required, {key} is {limit}). The run ends, because samples without scores "
                        f"cannot be trained. Increase {key} and restart the run, which reuses the scores so far"
                    )
            self._reserved += calls

    def release(self, calls: int) -> None:
        """Release reserved calls after they have ended."""
        with self._lock:
            self._reserved -= calls

    def add(self, key: str | None, reply: Reply) -> None:
        """Count a reply and write it to the file. A reply with the key None is not reused."""
        with self._lock:
            self._count(key, reply)
            if self._path is not None:
                entry = {"judge": self._source, "key": key, "reply": reply.text, "tokens": reply.tokens}
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")

    def _count(self, key: str | None, reply: Reply) -> None:
        self._calls += 1
        self._tokens += reply.tokens
        if key is not None:
            self._replies[key] = reply


def prompt_text(prompt: Prompt) -> str:
    """Return the prompt as the judge reads it."""
    return completion_text(prompt.messages or prompt.text)


def answer_text(trajectory: Trajectory) -> str:
    """Return a sample's answer as the judge reads it."""
    return completion_text(trajectory.messages or trajectory.text)


def images_of(trajectory: Trajectory) -> list[Image]:
    """Return the images of the prompt and of later turns."""
    return [placed.image for placed in trajectory.prompt.images + trajectory.images]


def chat(system: str, images: Sequence[Image] = (), **material: Any) -> Conversation:
    """Return a request whose user message contains the material as JSON, one line per name, and then the images."""
    given = {name: value for name, value in material.items() if value is not None}
    content = "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    user: Any = [{"type": "text", "text": content}, *parts] if parts else content
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def scaled(score: float, scale: tuple[float, float]) -> float | None:
    """Return a score scaled to the range from 0 to 1, or None if it is outside the scale or NaN."""
    low, high = scale
    return (score - low) / (high - low) if low <= score <= high else None


def all_or_failure[Result](results: Sequence[Result | Failure]) -> list[Result] | Failure:
    """Return the results, or the first failure among them."""
    failure = next((result for result in results if isinstance(result, Failure)), None)
    return failure or [result for result in results if not isinstance(result, Failure)]


def _extra(body: Any) -> dict[str, Any]:
    """Return the keys that ``extra_body`` adds to a request. Raises ConfigError."""
    if not isinstance(body, (Mapping, type(None))):
        raise ConfigError(f"extra_body: must be a mapping of keys of the request, not {body!r}")
    for key in body or ():
        if key in _REQUEST_KEYS:
            raise ConfigError(f"extra_body.{key}: must not be set, because the judge sets this key; remove it")
    try:
        json.dumps(body, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"extra_body: must contain only JSON values ({error})") from None
    return dict(body or {})


def _temperature(value: Any) -> float | None:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")):
        return value
    raise ConfigError(f"temperature: must be a number of at least 0, or null ({value!r})")
