"""Reward function that requests the rewards from an HTTP server.

The request is a POST of ``{"prompts": [...], "completions": [...], "columns": {name: [...]}, "trainer_state": {...}}``.
The reply is a JSON list with one number per completion, or null if the reward does not apply. The reply may also be an
object with this list, ``{"rewards": [...]}``. A list ``spans`` in this object names the characters that each reward is
about: null for the whole completion, or a list of [start, end]. For a family such as ``rubric/*``, an element is an
object with a reward by id of the criterion, and its spans are an object with lists by id. If a request fails, its
samples get a ``Failure`` and are masked. Samples of a failed request never get a reward of 0.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from gdpo_nemo.data.records import TrainerState
from gdpo_nemo.environments import server_replies
from gdpo_nemo.environments.base import Failure, SpanReward, character_spans, number_option, reward_value
from gdpo_nemo.environments.http_client import HttpClient, api_key, base_url, with_retries
from gdpo_nemo.environments.tasks.reward_functions import Value, plain
from gdpo_nemo.utils.errors import RunError, nearest

_MAX_JSON_DEPTH = 8
_NOT_COLUMNS = ("prompts", "completions", "completion_ids")
type _Reward = Value | dict[str, float | SpanReward | None]
"""Reward of a completion, or rewards of a family's criteria by id."""


class HttpReward:
    """Reward function that requests its rewards from a server. Images are sent as data URLs.

    Args:
        url: URL for the POST requests.
        columns: names of the dataset columns to send, or None for all columns.
        completion_ids: True to also send the token ids of the completions.
        api_key_env: name of the environment variable with a key to send as a bearer token.
        time_limit_s: time limit in seconds of one call, with all its completions and retries. The limit should be below
            rollout.env_timeout_s.
        max_retries: maximum number of retries after a transport error, a 5xx or a 429 reply. Other errors are not
            retried.
        batch_size: maximum number of completions per request, or None for all completions of a call.
        concurrency: maximum number of requests in flight.
        max_reply_bytes: maximum size of a reply in bytes. Larger replies are rejected.
        criteria: True for a family of components, which sets this argument.

    Raises:
        ConfigError: if an argument is invalid, or the environment variable is not set.
    """

    encoded_images = True

    def __init__(
        self,
        url: str,
        *,
        columns: Sequence[str] | None = None,
        completion_ids: bool = False,
        api_key_env: str | None = None,
        time_limit_s: float = 20.0,
        max_retries: int = 3,
        batch_size: int | None = None,
        concurrency: int = 8,
        max_reply_bytes: int = 1_048_576,
        criteria: bool = False,
    ):
        self._url = base_url("url", url)
        self._columns = columns
        self._with_ids = completion_ids
        self._api_key = api_key(api_key_env)
        self._time_limit_s = number_option("time_limit_s", time_limit_s, 0.001)
        self._max_retries = int(number_option("max_retries", max_retries, 0))
        self._batch_size = None if batch_size is None else int(number_option("batch_size", batch_size, 1))
        self._concurrency = int(number_option("concurrency", concurrency, 1))
        self._criteria = criteria
        self._max_reply_bytes = int(number_option("max_reply_bytes", max_reply_bytes, 1))

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], trainer_state: TrainerState, **columns: Any
    ) -> list[_Reward]:
        """Return the rewards of each completion, or a ``Failure``, within ``time_limit_s``."""
        sent = self._columns_to_send(columns)
        sent |= {"prompts": list(prompts), "completions": list(completions)}
        size = self._batch_size or max(1, len(completions))
        parts = []
        for start in range(0, len(completions), size):
            part = {name: values[start : start + size] for name, values in sent.items()}
            parts.append((self._body(part, trainer_state), part["completions"]))
        deadline = asyncio.get_running_loop().time() + self._time_limit_s
        slots = asyncio.Semaphore(self._concurrency)
        client = HttpClient(self._concurrency, self._max_reply_bytes, _MAX_JSON_DEPTH, self._api_key)
        try:
            requests = [self._rewards(client, slots, deadline, *part) for part in parts]
            return list(chain.from_iterable(await asyncio.gather(*requests)))
        finally:
            await client.close()

    def _columns_to_send(self, columns: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the columns to send, including the token ids if requested."""
        available = {name: values for name, values in columns.items() if isinstance(values, list)}
        ids = available.pop("completion_ids", [])
        names = list(available) if self._columns is None else list(self._columns)
        for name in names:
            if name not in available:
                raise ValueError(f"columns: the rows have no column {name!r}{nearest(name, available)}")
        sent = {name: available[name] for name in names}
        if self._with_ids:
            sent["completion_ids"] = ids
        return sent

    def _body(self, part: Mapping[str, list[Any]], state: TrainerState) -> bytes:
        columns = {name: values for name, values in part.items() if name not in _NOT_COLUMNS}
        body = {name: part[name] for name in _NOT_COLUMNS if name in part}
        return json.dumps(plain({**body, "columns": columns, "trainer_state": asdict(state)})).encode()

    async def _rewards(
        self, client: HttpClient, slots: asyncio.Semaphore, deadline: float, body: bytes, part: Sequence[Any]
    ) -> list[_Reward]:
        def time_left() -> float:
            return deadline - asyncio.get_running_loop().time()

        limit = f"time_limit_s is {self._time_limit_s:g}"
        try:
            async with slots:
                reply = await with_retries(
                    lambda: client.ask(self._url, body, time_left()), self._max_retries, time_left, limit
                )
            return _read(reply, part, self._criteria)
        except server_replies.Failure as failure:
            return [Failure(f"{failure.kind}: {failure.detail}")] * len(part)


def _read(reply: Any, completions: Sequence[Any], criteria: bool) -> list[_Reward]:
    """Return the rewards in a reply.

    Raises server_replies.Failure(BAD_REPLY) if the reply does not have one valid element per completion, or its spans
    are invalid.
    """
    count = len(completions)
    values = reply.get("rewards") if isinstance(reply, dict) else reply
    if not isinstance(values, list):
        raise _bad("the reply must be a list of rewards or an object with the key rewards")
    if len(values) != count:
        raise _bad(f"the reply has {len(values)} rewards for {count} completions")
    every = reply.get("spans") if isinstance(reply, dict) else None
    if every is not None and (not isinstance(every, list) or len(every) != count):
        raise _bad(f"spans must be a list with one entry for each of {count} completions")
    try:
        rewards: list[_Reward] = []
        for value, spans, text in zip(values, every or [None] * count, completions):
            rewards.append((_rewards_by_id if criteria and value is not None else _reward)(value, spans, text))
        return rewards
    except RunError as error:  # the server, not the user's code, caused the infinite reward
        raise _bad(str(error)) from None


def _reward(value: Any, spans: Any, completion: Any) -> float | SpanReward | None:
    """Return a reward with its spans. Raises RunError if the reward is infinite or the spans are invalid."""
    if isinstance(value, bool) or not (value is None or isinstance(value, (int, float))):
        raise _bad(f"a reward in the reply must be a number or null, not {server_replies.printable(repr(value), 40)}")
    reward = reward_value(value, "a reward in the reply")
    if spans is None:
        return reward
    return SpanReward(reward, character_spans(spans, _characters(completion), "spans"))


def _rewards_by_id(value: Any, spans: Any, completion: Any) -> dict[str, float | SpanReward | None]:
    by_id = {} if spans is None else spans
    if not isinstance(value, dict) or not isinstance(by_id, dict):
        raise _bad("rewards and spans of criteria must be objects by id")
    return {name: _reward(score, by_id.get(name), completion) for name, score in value.items()}


def _characters(completion: Any) -> int:
    """Return the length of a completion. Raises RunError if it is a conversation, whose text has no fixed form."""
    if not isinstance(completion, str) and len(completion) > 1:
        raise RunError("spans are not supported for completions of several messages")
    return len(completion if isinstance(completion, str) else completion[0]["content"])


def _bad(detail: str) -> server_replies.Failure:
    return server_replies.Failure(server_replies.FailureKind.BAD_REPLY, detail)
