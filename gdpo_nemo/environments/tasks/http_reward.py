"""A reward by URL: a server that is sent a call's prompts, completions and columns and answers with its rewards.

The request is a POST of ``{"prompts": [...], "completions": [...], "columns": {name: [...]}, "trainer_state": {...}}``,
the reply a JSON list with one number or null (does not apply) for each completion, alone or as ``{"rewards": [...]}``.
Whatever keeps the rewards from being had is a ``Failure``, which masks the samples; it is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any, Mapping, Sequence

from gdpo_nemo.config.messages import nearest
from gdpo_nemo.data import failures
from gdpo_nemo.data.records import TrainerState
from gdpo_nemo.environments.base import Failure
from gdpo_nemo.environments.http_client import HttpClient, api_key, base_url, with_retries
from gdpo_nemo.environments.tasks.function_calls import plain
from gdpo_nemo.environments.verdicts import reward_value
from gdpo_nemo.errors import ConfigError, RunError

_MAX_JSON_DEPTH = 8
_NOT_COLUMNS = ("prompts", "completions", "completion_ids")


class HttpReward:
    """The rewards that a server gives.

    Arguments:
        url: where to post to.
        columns: names of the columns to send along; None: all of them.
        completion_ids: whether to send the tokens, too.
        api_key_env: environment variable with a key that is sent as a bearer token.
        time_limit_s: seconds for one call with all its completions and retries; keep it below rollout.env_timeout_s.
        max_retries: further attempts after a transport error, a 5xx or a 429 reply. Other replies are final.
        batch_size: completions in one request; None: all of the call.
        concurrency: requests at a time.
        max_reply_bytes: longer replies are refused.

    Raises:
        ConfigError: an argument that cannot be used, or a key that is not there.
    """

    def __init__(
        self,
        url: str,
        columns: Sequence[str] | None = None,
        completion_ids: bool = False,
        api_key_env: str | None = None,
        time_limit_s: float = 20.0,
        max_retries: int = 3,
        batch_size: int | None = None,
        concurrency: int = 8,
        max_reply_bytes: int = 1_048_576,
    ):
        self._url = base_url("url", url)
        self._columns = columns
        self._with_ids = completion_ids
        self._api_key = api_key(api_key_env)
        self._time_limit_s = _number("time_limit_s", time_limit_s, 0.001)
        self._max_retries = int(_number("max_retries", max_retries, 0))
        self._batch_size = None if batch_size is None else int(_number("batch_size", batch_size, 1))
        self._concurrency = int(_number("concurrency", concurrency, 1))
        self._max_reply_bytes = int(_number("max_reply_bytes", max_reply_bytes, 1))

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], trainer_state: TrainerState, **columns: Any
    ) -> list[float | Failure | None]:
        """One reward, None or failure per completion, within ``time_limit_s`` altogether."""
        sent = self._chosen(columns)
        sent |= {"prompts": list(prompts), "completions": list(completions)}
        size = self._batch_size or max(1, len(completions))
        starts = range(0, len(completions), size)
        bodies = [
            self._body({name: values[start : start + size] for name, values in sent.items()}, trainer_state)
            for start in starts
        ]
        counts = [len(completions[start : start + size]) for start in starts]
        deadline = asyncio.get_running_loop().time() + self._time_limit_s
        slots = asyncio.Semaphore(self._concurrency)
        client = HttpClient(self._concurrency, self._max_reply_bytes, _MAX_JSON_DEPTH, self._api_key)
        try:
            asked = [self._rewards(client, slots, deadline, body, count) for body, count in zip(bodies, counts)]
            return [reward for part in await asyncio.gather(*asked) for reward in part]
        finally:
            await client.close()

    def _chosen(self, columns: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The columns to send, with the tokens where they are wanted."""
        own = {name: values for name, values in columns.items() if isinstance(values, list)}
        ids = own.pop("completion_ids", [])
        names = list(own) if self._columns is None else list(self._columns)
        for name in names:
            if name not in own:
                raise ValueError(f"columns: the rows have no column {name!r}{nearest(name, own)}")
        return {name: own[name] for name in names} | ({"completion_ids": ids} if self._with_ids else {})

    def _body(self, part: Mapping[str, list[Any]], state: TrainerState) -> bytes:
        columns = {name: values for name, values in part.items() if name not in _NOT_COLUMNS}
        body = {name: part[name] for name in _NOT_COLUMNS if name in part}
        return json.dumps(plain({**body, "columns": columns, "trainer_state": asdict(state)})).encode()

    async def _rewards(
        self, client: HttpClient, slots: asyncio.Semaphore, deadline: float, body: bytes, count: int
    ) -> list[float | Failure | None]:
        def time_left() -> float:
            return deadline - asyncio.get_running_loop().time()

        limit = f"time_limit_s is {self._time_limit_s:g}"
        try:
            async with slots:
                reply = await with_retries(
                    lambda: client.ask(self._url, body, time_left()), self._max_retries, time_left, limit
                )
            return _read(reply, count)
        except failures.Failure as failure:
            return [Failure(f"{failure.kind}: {failure.detail}")] * count


def _read(reply: Any, count: int) -> list[float | Failure | None]:
    """The rewards in a reply. Raises failures.Failure(BAD_REPLY) for anything but one number or null for each."""
    values = reply.get("rewards") if isinstance(reply, dict) else reply
    if not isinstance(values, list):
        raise _bad("the reply is neither a list of rewards nor an object with rewards")
    if len(values) != count:
        raise _bad(f"the reply has {len(values)} rewards for {count} completions")
    for value in values:
        if isinstance(value, bool) or not (value is None or isinstance(value, (int, float))):
            raise _bad(f"the reply holds {failures.printable(repr(value), 40)} where a number or null should be")
    try:
        return [reward_value(value, "a reward in the reply") for value in values]
    except RunError as error:  # infinite, which is the server's mistake and not that of the user's code
        raise _bad(str(error)) from None


def _bad(detail: str) -> failures.Failure:
    return failures.Failure(failures.FailureKind.BAD_REPLY, detail)


def _number(name: str, value: Any, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
        raise ConfigError(f"{name}: must be a number of at least {least:g}, not {value!r}")
    return value
