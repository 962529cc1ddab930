"""One HTTP exchange with a server that may do anything.

Every request has a time limit, every reply a size limit; redirects are not followed, cookies belong to one trajectory,
and what ends up in a message was cleaned of secrets and control characters. Retries are the caller's (``episode.py``).

aiohttp, because it costs a third of httpx's CPU time per call at hundreds of connections.
"""

from __future__ import annotations

import asyncio
import json
import resource
from http.cookies import CookieError, SimpleCookie
from typing import Any, Mapping
from urllib.parse import urlsplit

import aiohttp

from gdpo_nemo.data.failures import Failure, FailureKind, printable
from gdpo_nemo.data.replies import parse_json, retry_after_s, validation_errors

CONNECT_S = 10.0
_KEEP_ALIVE_S = 4.0
"""Idle connections are dropped before uvicorn, which waits 5 s, drops them."""
_ERROR_BYTES = 16 * 1024
_COOKIES = 16
_COOKIE_BYTES = 4096
_SPARE_FILES = 256


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

    async def post(
        self, url: str, body: Mapping[str, Any] | bytes, cookies: Cookies, timeout_s: float
    ) -> dict[str, Any]:
        """The JSON object that the server answers with status 200. Raises Failure for everything else."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = await self._exchange("POST", url, data, cookies, timeout_s)
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
        except (OSError, aiohttp.ClientError, ValueError) as error:
            raise self._failure(error, timeout_s) from None
        return parse_json(body, self._max_depth)

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
        _raise_file_limit(self._concurrency + _SPARE_FILES)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=self._concurrency, keepalive_timeout=_KEEP_ALIVE_S),
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


def _raise_file_limit(wanted: int) -> None:
    """Let this process open ``wanted`` more files than it is sure to need, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
