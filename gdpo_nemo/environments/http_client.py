"""HTTP with servers that may do anything: NeMo Gym's, a judge, a reward by URL.

Every request has a time limit, every reply a size limit; redirects are not followed, cookies belong to one trajectory,
and what ends up in a message was cleaned of secrets and control characters. ``with_retries`` asks again where that may
help.

aiohttp, because it costs a third of httpx's CPU time per call at hundreds of connections.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
from http.cookies import CookieError, SimpleCookie
from typing import Any, Awaitable, Callable, Mapping, TypeVar
from urllib.parse import urlsplit

import aiohttp
import tenacity

from gdpo_nemo.data.failures import Failure, FailureKind, printable
from gdpo_nemo.data.replies import parse_json, parse_reply, retry_after_s, validation_errors
from gdpo_nemo.errors import ConfigError

Reply = TypeVar("Reply")

CONNECT_S = 10.0
_ERROR_BYTES = 16 * 1024
_COOKIES = 16
_COOKIE_BYTES = 4096
SPARE_FILES = 256
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0


class Cookies:
    """The cookies of one trajectory at one server, returned as they came and to nobody else."""

    def __init__(self):
        self._values: dict[str, str] = {}

    def header(self) -> str | None:
        """The value of the ``Cookie`` header."""
        return "; ".join(f"{name}={value}" for name, value in self._values.items()) or None

    def update(self, headers: list[str]) -> None:
        """Take over ``Set-Cookie`` headers. Raises Failure(BAD_REPLY) for more or larger ones than a session needs."""
        for text in headers:
            if len(text) > 2 * _COOKIE_BYTES:
                raise Failure(FailureKind.BAD_REPLY, "the server sets a cookie that is too large")
            jar = SimpleCookie()
            try:
                jar.load(text)
            except CookieError:
                continue  # what cannot be read is not returned either
            for name, morsel in jar.items():
                if morsel["max-age"] == "0" or not morsel.coded_value:
                    self._values.pop(name, None)
                else:
                    self._values[name] = morsel.coded_value
        if len(self._values) > _COOKIES or sum(map(len, self._values.values())) > _COOKIES * _COOKIE_BYTES:
            raise Failure(FailureKind.BAD_REPLY, f"the server sets more than {_COOKIES} cookies")


class HttpClient:
    """A connection pool. Used inside one event loop; ``close`` it there.

    Args:
        concurrency: largest number of connections to one host.
        max_reply_bytes, max_json_depth: limits of a reply.
        api_key: sent as a bearer token, and kept out of every message.
    """

    def __init__(self, concurrency: int, max_reply_bytes: int, max_json_depth: int, api_key: str | None = None):
        self._max_bytes = max_reply_bytes
        self._max_depth = max_json_depth
        self._api_key = api_key
        self._concurrency = concurrency
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self, url: str, body: Mapping[str, Any] | bytes, timeout_s: float, cookies: Cookies | None = None
    ) -> Any:
        """The JSON value that the server answers a POST with, with status 200. Raises Failure for everything else."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._exchange("POST", url, data, cookies or Cookies(), timeout_s)

    async def post(
        self, url: str, body: Mapping[str, Any] | bytes, cookies: Cookies, timeout_s: float
    ) -> dict[str, Any]:
        """As ``ask``, where the answer has to be an object."""
        reply = await self.ask(url, body, timeout_s, cookies)
        if not isinstance(reply, dict):
            raise Failure(FailureKind.BAD_REPLY, f"the reply is a {type(reply).__name__}, not an object")
        return reply

    async def get(self, url: str, timeout_s: float) -> Any:
        """The JSON value behind a URL. Raises Failure."""
        return await self._exchange("GET", url, None, Cookies(), timeout_s)

    async def reach(self, url: str, timeout_s: float) -> None:
        """Raise Failure unless something there speaks HTTP and is well: any status below 500 will do."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self._open("GET", url, None, Cookies()) as response:
                    if response.status >= 500:
                        raise Failure(FailureKind.SERVER_ERROR, f"HTTP {response.status}", status=response.status)
        except (OSError, aiohttp.ClientError, ValueError) as error:
            raise self._failure(error, timeout_s) from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _exchange(self, method: str, url: str, data: bytes | None, cookies: Cookies, timeout_s: float) -> Any:
        if timeout_s <= 0:
            raise Failure(FailureKind.TIMEOUT, "no time was left for the request")
        try:
            async with asyncio.timeout(timeout_s):
                async with self._open(method, url, data, cookies) as response:
                    if response.status != 200:
                        raise await self._refusal(response)
                    body = await self._body(response)
                    cookies.update(response.headers.getall("Set-Cookie", []))
                return await parse_reply(body, self._max_depth)
        except (OSError, aiohttp.ClientError, ValueError) as error:
            raise self._failure(error, timeout_s) from None

    def _open(self, method: str, url: str, data: bytes | None, cookies: Cookies):
        if self._session is None:
            self._session = self._new_session()
        headers = {"Accept-Encoding": "identity"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        if cookie := cookies.header():
            headers["Cookie"] = cookie
        return self._session.request(method, url, data=data, headers=headers, allow_redirects=False)

    def _new_session(self) -> aiohttp.ClientSession:
        raise_file_limit(self._concurrency + SPARE_FILES)
        return aiohttp.ClientSession(
            # A connection a request: what a server sends late, or twice, on one that is kept would be the reply to the
            # next trajectory. Nothing in HTTP says to which request a reply belongs.
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=self._concurrency, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,  # a compressed reply could unfold to any size
        )

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise Failure(
                FailureKind.BAD_REPLY, f"the reply is compressed ({printable(encoding, 20)}), which was not asked for"
            )
        length = response.content_length or 0
        if length > self._max_bytes:
            raise Failure(FailureKind.TOO_LARGE, f"the reply has {length} bytes (max_reply_bytes is {self._max_bytes})")
        parts = []
        size = 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > self._max_bytes:
                raise Failure(FailureKind.TOO_LARGE, f"the reply has more than max_reply_bytes ({self._max_bytes})")
            parts.append(part)
        return b"".join(parts)

    async def _refusal(self, response: aiohttp.ClientResponse) -> Failure:
        """The failure that a status other than 200 stands for."""
        status = response.status
        if 300 <= status < 400:
            target = urlsplit(response.headers.get("Location", "")).netloc.rpartition("@")[2]
            return Failure(
                FailureKind.REDIRECT,
                f"HTTP {status} to {self._clean(target, 80)!r}; redirects are not followed",
                status=status,
            )
        said = await self._excerpt(response)
        text = f"HTTP {status}{': ' + said if said else ''}"
        if status == 429:
            kind = FailureKind.RATE_LIMITED
        elif status >= 500:
            kind = FailureKind.SERVER_ERROR
        else:
            kind = FailureKind.REJECTED if status >= 400 else FailureKind.BAD_REPLY
        return Failure(kind, text, retry_after_s=retry_after_s(response.headers.get("Retry-After")), status=status)

    async def _excerpt(self, response: aiohttp.ClientResponse) -> str:
        """What an error's body says, in a line."""
        body = await response.content.read(_ERROR_BYTES)
        if "json" not in response.content_type:
            return self._clean(body.decode("utf-8", "replace"), 120)
        try:
            return self._clean(validation_errors(parse_json(body, self._max_depth)), 400)
        except Failure:
            return ""

    def _failure(self, error: Exception, timeout_s: float) -> Failure:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return Failure(FailureKind.CONNECTION, f"no connection within {CONNECT_S:g} s")
        if isinstance(error, TimeoutError):
            return Failure(FailureKind.TIMEOUT, f"no reply within {timeout_s:.3g} s")
        if isinstance(error, (OSError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)):
            return Failure(FailureKind.CONNECTION, self._clean(str(error) or type(error).__name__, 160))
        return Failure(FailureKind.BAD_REPLY, f"not HTTP as it should be ({type(error).__name__})")

    def _clean(self, text: str, limit: int) -> str:
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return printable(text, limit)


async def with_retries(
    attempt: Callable[[], Awaitable[Reply]], retries: int, time_left: Callable[[], float], limit: str
) -> Reply:
    """What ``attempt`` gives, tried again after failures of the infrastructure (``Failure.retried``).

    Pauses double, half of each by chance, so that retries do not come all at once; a server's ``Retry-After`` counts
    instead.

    Args:
        retries: further attempts after the first.
        time_left: seconds until no attempt may start any more.
        limit: that limit in words, for the message.

    Raises:
        Failure: the last one, with the number of attempts.
    """

    async def one() -> Reply:  # tenacity awaits coroutine functions only, not what happens to return a coroutine
        return await attempt()

    def give_up(state: tenacity.RetryCallState) -> Reply:
        failure = _failure_of(state)
        said = f"{state.attempt_number} attempts"
        if state.attempt_number <= retries:
            wants = f"; asks for a pause of {failure.retry_after_s:.4g} s" if failure.retry_after_s is not None else ""
            said += f"{wants}; {limit}"
        raise Failure(failure.kind, f"{failure.detail} ({said})", status=failure.status) from None

    asking = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, Failure) and error.retried),
        stop=tenacity.stop_any(tenacity.stop_after_attempt(retries + 1), _NoTimeLeft(time_left)),
        wait=_pause,
        retry_error_callback=give_up,
    )
    return await asking(one)


_doubling = tenacity.wait_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S)


class _NoTimeLeft(tenacity.stop.stop_base):
    """Stop where the pause before the next attempt would outlast ``time_left()`` seconds."""

    def __init__(self, time_left: Callable[[], float]):
        self._time_left = time_left

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        return retry_state.upcoming_sleep >= self._time_left()


def _failure_of(state: tenacity.RetryCallState) -> Failure:
    """The failure that an attempt ended with; tenacity asks only after one."""
    error = None if state.outcome is None else state.outcome.exception()
    if not isinstance(error, Failure):
        raise TypeError(f"an attempt ended with {error!r}, which is not retried")
    return error


def _pause(state: tenacity.RetryCallState) -> float:
    """Seconds before the next attempt."""
    wanted = _failure_of(state).retry_after_s
    return _doubling(state) * random.uniform(0.5, 1.0) if wanted is None else wanted


def base_url(key: str, url: Any) -> str:
    """The URL without a slash at its end. Raises ConfigError for anything but http(s) with a host and without
    secrets."""
    if not isinstance(url, str):
        raise ConfigError(f"{key}: must be a URL such as http://127.0.0.1:12503, not {url!r}")
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for what is no port
    except ValueError as error:
        raise ConfigError(f"{key}: not a URL ({error})") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"{key}: must hold no user, password or query; put a key into a variable and name it in api_key_env"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}: must be a URL such as http://127.0.0.1:12503, not {url!r}")
    return url.rstrip("/")


def api_key(variable: str | None) -> str | None:
    """The key in an environment variable; None where no variable is named. Raises ConfigError."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"api_key_env: the environment variable {variable} is not set, or is no key")
    return key


def raise_file_limit(wanted: int) -> None:
    """Let this process open ``wanted`` more files than it is sure to need, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
