"""HTTP client for untrusted servers, and an event loop thread in which environments run the client."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import tenacity

from gdpo_nemo.environments.server_replies import (
    Failure,
    FailureKind,
    error_text,
    parse_json,
    parse_reply,
    printable,
    retry_after_s,
)
from gdpo_nemo.utils.errors import ConfigError, RunError, remember_secret

CONNECT_S = 10.0
"""Time limit in seconds for opening a connection."""
_ERROR_BYTES = 2**20
"""Maximum number of bytes to read of an error reply."""
_COOKIES = 16
"""Maximum number of cookies of one trajectory."""
_COOKIE_BYTES = 4096
"""Size limit per cookie in bytes. The total size limit of all cookies is ``_COOKIES`` times this value."""
SPARE_FILES = 256
"""Number of file descriptors to reserve for other uses when the open-file limit is raised."""
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0


class Cookies:
    """Cookies that a server has set for one trajectory. The cookies are sent back unchanged, and only to this
    server."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def header(self) -> str | None:
        """Return the value of the ``Cookie`` header, or None if no cookies are set."""
        return "; ".join(f"{name}={value}" for name, value in self._values.items()) or None

    def update(self, headers: list[str]) -> None:
        """Store the cookies of ``Set-Cookie`` headers. Raises Failure(BAD_REPLY) if there are too many cookies or their
        size exceeds the limit."""
        for text in headers:
            if len(text) > 2 * _COOKIE_BYTES:
                raise Failure(FailureKind.BAD_REPLY, "the server set a cookie that is too large")
            jar = SimpleCookie()
            try:
                jar.load(text)
            except CookieError:
                continue  # cookies that cannot be parsed are not sent back
            for name, morsel in jar.items():
                if morsel["max-age"] == "0" or not morsel.coded_value:
                    self._values.pop(name, None)
                else:
                    self._values[name] = morsel.coded_value
        if len(self._values) > _COOKIES or sum(map(len, self._values.values())) > _COOKIES * _COOKIE_BYTES:
            raise Failure(FailureKind.BAD_REPLY, f"the server set more than {_COOKIES} cookies")


class HttpClient:
    """JSON client with limits on connections, reply size and nesting depth. Use and close the client in the same event
    loop.

    Args:
        concurrency: maximum number of connections to one host.
        max_reply_bytes: maximum size of a reply in bytes.
        max_json_depth: maximum nesting depth of a reply.
        api_key: key to send as a bearer token.
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
        """Send a POST request and return the JSON value of the reply.

        Raises:
            Failure: if the request fails, the status is not 200, or the reply is not valid JSON within the limits.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._exchange("POST", url, data, cookies or Cookies(), timeout_s)

    async def post(
        self, url: str, body: Mapping[str, Any] | bytes, cookies: Cookies, timeout_s: float
    ) -> dict[str, Any]:
        """Send a POST request like ``ask``. Also raises Failure if the reply is not a JSON object."""
        reply = await self.ask(url, body, timeout_s, cookies)
        if not isinstance(reply, dict):
            raise Failure(FailureKind.BAD_REPLY, f"expected a JSON object as the reply, got {type(reply).__name__}")
        return reply

    async def get(self, url: str, timeout_s: float) -> Any:
        """Send a GET request and return the JSON value of the reply. Raises Failure like ``ask``."""
        return await self._exchange("GET", url, None, Cookies(), timeout_s)

    async def reach(self, url: str, timeout_s: float) -> None:
        """Check that an HTTP server responds at the URL. Raises Failure if the server does not respond, or if the
        status is at least 500."""
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
            raise Failure(FailureKind.TIMEOUT, "the time limit was reached before the request was sent")
        try:
            async with asyncio.timeout(timeout_s):
                async with self._open(method, url, data, cookies) as response:
                    if response.status != 200:
                        raise await self._status_failure(response)
                    body = await self._body(response)
                    cookies.update(response.headers.getall("Set-Cookie", []))
                return await parse_reply(body, self._max_depth)
        except (OSError, aiohttp.ClientError, ValueError) as error:
            raise self._failure(error, timeout_s) from None

    def _open(
        self, method: str, url: str, data: bytes | None, cookies: Cookies
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
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
            # Open a connection for each request. On a reused connection, a late or duplicate reply would count as the
            # reply to the next request, because HTTP replies do not identify their request.
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=self._concurrency, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,  # a compressed reply could decompress to any size
        )

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise Failure(
                FailureKind.BAD_REPLY,
                f"the reply is compressed ({printable(encoding, 20)}), although compression was not requested",
            )
        length = response.content_length or 0
        if length > self._max_bytes:
            raise Failure(
                FailureKind.TOO_LARGE, f"the reply has {length} bytes, more than max_reply_bytes ({self._max_bytes})"
            )
        parts = []
        size = 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > self._max_bytes:
                raise Failure(FailureKind.TOO_LARGE, f"the reply is larger than max_reply_bytes ({self._max_bytes})")
            parts.append(part)
        return b"".join(parts)

    async def _status_failure(self, response: aiohttp.ClientResponse) -> Failure:
        """Return the failure for a reply with a status other than 200."""
        status = response.status
        if 300 <= status < 400:
            target = urlsplit(response.headers.get("Location", "")).netloc.rpartition("@")[2]
            return Failure(
                FailureKind.REDIRECT,
                f"HTTP {status} to {printable(target, 80)!r}; redirects are not followed",
                status=status,
            )
        excerpt = await self._excerpt(response)
        text = f"HTTP {status}: {excerpt}" if excerpt else f"HTTP {status}"
        if status == 429:
            kind = FailureKind.RATE_LIMITED
        elif status >= 500:
            kind = FailureKind.SERVER_ERROR
        else:
            kind = FailureKind.REJECTED if status >= 400 else FailureKind.BAD_REPLY
        return Failure(kind, text, retry_after_s=retry_after_s(response.headers.get("Retry-After")), status=status)

    async def _excerpt(self, response: aiohttp.ClientResponse) -> str:
        """Return the beginning of an error reply's body as one line, for an error message."""
        parts: list[bytes] = []
        while part := await response.content.read(_ERROR_BYTES - sum(map(len, parts))):
            parts.append(part)
        body = b"".join(parts)
        if "json" not in response.content_type:
            return printable(body.decode("utf-8", "replace"), 120)
        try:
            return error_text(parse_json(body, self._max_depth))
        except Failure:
            return ""

    def _failure(self, error: Exception, timeout_s: float) -> Failure:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return Failure(FailureKind.CONNECTION, f"no connection within {CONNECT_S:g} s")
        if isinstance(error, TimeoutError):
            return Failure(FailureKind.TIMEOUT, f"no reply within {timeout_s:.3g} s")
        if isinstance(error, (OSError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)):
            return Failure(FailureKind.CONNECTION, printable(str(error) or type(error).__name__, 160))
        return Failure(FailureKind.BAD_REPLY, f"not a valid HTTP reply ({type(error).__name__})")


async def with_retries[Reply](
    attempt: Callable[[], Awaitable[Reply]], retries: int, time_left: Callable[[], float], limit: str
) -> Reply:
    """Call ``attempt`` until it succeeds, and return its result. Only failures with ``Failure.retried`` are retried.

    The pause between attempts doubles each time, and is multiplied by a random factor from 0.5 to 1. If the server sent
    ``Retry-After``, its value is used as the pause.

    Args:
        retries: maximum number of attempts after the first.
        time_left: returns the seconds until the time limit. No attempt starts after this limit.
        limit: description of the time limit, for the message.

    Raises:
        Failure: the last failure, with the number of attempts in its message.
    """

    async def call_attempt() -> Reply:  # tenacity awaits only coroutine functions, not other callables
        return await attempt()

    def give_up(state: tenacity.RetryCallState) -> Reply:
        failure = _failure_of(state)
        reason = f"{state.attempt_number} attempts"
        if state.attempt_number <= retries:
            if failure.retry_after_s is not None:
                reason += f"; the server requested a pause of {failure.retry_after_s:.4g} s"
            reason += f"; {limit}"
        raise Failure(failure.kind, f"{failure.detail} ({reason})", status=failure.status) from None

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, Failure) and error.retried),
        stop=tenacity.stop_any(tenacity.stop_after_attempt(retries + 1), _NoTimeLeft(time_left)),
        wait=_pause,
        retry_error_callback=give_up,
    )
    return await retrying(call_attempt)


_doubling = tenacity.wait_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S)


class _NoTimeLeft(tenacity.stop.stop_base):
    """tenacity stop condition: the next pause would last ``time_left()`` seconds or longer."""

    def __init__(self, time_left: Callable[[], float]):
        self._time_left = time_left

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        return retry_state.upcoming_sleep >= self._time_left()


def _failure_of(state: tenacity.RetryCallState) -> Failure:
    """Return the failure of the last attempt. Raises TypeError for other exceptions, which are not retried."""
    error = None if state.outcome is None else state.outcome.exception()
    if not isinstance(error, Failure):
        raise TypeError(f"an attempt ended with {error!r}, which is not retried")
    return error


def _pause(state: tenacity.RetryCallState) -> float:
    """Return the pause before the next attempt, in seconds."""
    requested = _failure_of(state).retry_after_s
    return _doubling(state) * random.uniform(0.5, 1.0) if requested is None else requested


def base_url(key: str, url: Any) -> str:
    """Check a base URL and return it without a trailing slash.

    Raises:
        ConfigError: if the URL is not http(s) with a host, or contains a user, password, query or fragment. The message
            begins with ``key``.
    """
    if not isinstance(url, str):
        raise ConfigError(f"{key}: must be a URL such as http://127.0.0.1:12503, not {url!r}")
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if the port is invalid
    except ValueError as error:
        raise ConfigError(f"{key}: must be a valid URL ({error})") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"{key}: must not contain a user, password or query; put an API key into a variable and set api_key_env "
            "to its name"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}: must be a URL such as http://127.0.0.1:12503, not {url!r}")
    return url.rstrip("/")


def api_key(variable: str | None) -> str | None:
    """Return the API key in an environment variable, or None if ``variable`` is None. Messages of this process show
    ``***`` in its place.

    Raises ConfigError if the variable is not set or its value is not a valid key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"api_key_env: the environment variable {variable} is not set or not a valid key")
    remember_secret(key, "***")
    return key


def raise_file_limit(minimum: int) -> None:
    """Raise the process's open-file limit to ``minimum``, or to the hard limit if the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < minimum:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (minimum if hard == resource.RLIM_INFINITY else min(minimum, hard), hard)
        )


_CLOSE_S = 10.0
"""Maximum duration in seconds of the cleanup when a loop is closed."""


class LoopThread:
    """Event loop in a daemon thread. The thread starts at the first call of ``start``.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def start[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop and return its future. Any thread may call this method. Raises RunError after
        ``close``."""
        with self._lock:
            if self._closed:
                coroutine.close()
                raise RunError("the environment is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name=self._name, daemon=True).start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, cleanup: Coroutine[Any, Any, None]) -> None:
        """Cancel all coroutines, run ``cleanup``, and stop the loop."""
        with self._lock:
            self._closed = True
            loop = self._loop
            self._loop = None
        if loop is None:
            cleanup.close()
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(cleanup), loop).result(_CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)


async def _cancel_all(cleanup: Coroutine[Any, Any, None]) -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await cleanup


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
