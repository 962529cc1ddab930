"""Client session of an OpenEnv server: a WebSocket with one request in flight at a time.

The protocol is the one of OpenEnv 0.10 (``openenv.core.env_server.http_server``, route /ws). The client sends JSON
texts ``{"type": "reset" | "step", "data": ...}``, and the server replies with ``{"type": "observation" | "error",
"data": ...}``. The server creates an environment for each connection and closes it with the connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from gdpo_nemo.environments.http_client import CONNECT_S
from gdpo_nemo.environments.openenv.messages import MAX_JSON_DEPTH
from gdpo_nemo.environments.server_replies import Failure, FailureKind, parse_reply, printable

_CLOSE_S = 2.0
"""Time limit in seconds for a server to confirm that a connection is closed."""


class Connector:
    """Opens sessions at one server. Use the connector in a single event loop.

    Args:
        url: base URL of the server.
        max_reply_bytes: maximum size of a message from the server in bytes.
        api_key: key to send as a bearer token.
    """

    def __init__(self, url: str, max_reply_bytes: int, api_key: str | None):
        self._url = f"{url}/ws"
        self._max_bytes = max_reply_bytes
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            middlewares=(_refuse_redirects,),
        )

    async def open(self, timeout_s: float) -> EnvSession:
        """Open a new session. Raises Failure if the connection fails."""
        try:
            async with asyncio.timeout(timeout_s):
                socket = await self._http.ws_connect(
                    self._url,
                    headers=self._headers,
                    max_msg_size=self._max_bytes,
                    compress=0,  # a compressed message could decompress to any size
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                )
        except (OSError, aiohttp.ClientError, ValueError) as error:
            raise self._failure(error, timeout_s) from None
        return EnvSession(socket, self._max_bytes)

    async def close(self) -> None:
        """Close the remaining connections."""
        await self._http.close()

    def _failure(self, error: Exception, timeout_s: float) -> Failure:
        if isinstance(error, aiohttp.WSServerHandshakeError):
            status = error.status
            text = f"expected a WebSocket at {self._url}, got HTTP {status}"
            kind = FailureKind.SERVER_ERROR if status >= 500 else FailureKind.REJECTED
            return Failure(FailureKind.RATE_LIMITED if status == 429 else kind, text, status=status)
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return Failure(FailureKind.CONNECTION, f"no connection within {CONNECT_S:g} s")
        if isinstance(error, TimeoutError):
            return Failure(FailureKind.TIMEOUT, f"no connection within {timeout_s:.3g} s")
        if isinstance(error, (OSError, aiohttp.ClientConnectionError)):
            return Failure(FailureKind.CONNECTION, printable(str(error) or type(error).__name__, 160))
        return Failure(FailureKind.BAD_REPLY, f"not a valid HTTP reply ({type(error).__name__})")


class EnvSession:
    """An open session.

    A background task reads messages continuously, even while the policy generates for minutes between two steps.
    Without this task, the server's pings would not be answered and the server would close the connection.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, max_bytes: int):
        self._socket = socket
        self._max_bytes = max_bytes
        self._answer: asyncio.Future[str] | None = None
        self._ended: Failure | None = None
        self._reader = asyncio.create_task(self._read())

    async def ask(self, kind: str, data: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one message and return the server's answer.

        Raises:
            Failure: if the answer is missing or is not a valid JSON object. The session cannot be used afterwards.
        """
        if self._ended is not None:
            raise self._ended
        self._answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(json.dumps({"type": kind, "data": data}))
                text = await self._answer
                reply = await parse_reply(text.encode("utf-8", "replace"), MAX_JSON_DEPTH)
        except TimeoutError:
            raise Failure(FailureKind.TIMEOUT, f"no answer to {kind} within {timeout_s:.3g} s") from None
        finally:
            self._answer = None
        if not isinstance(reply, dict):
            raise Failure(FailureKind.BAD_REPLY, f"expected a JSON object as the answer, got {type(reply).__name__}")
        return reply

    async def close(self) -> None:
        """Close the connection, even if the server does not respond."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._socket.close()
        except TimeoutError:
            return  # aiohttp closed the connection without waiting for the server

    async def _send(self, text: str) -> None:
        try:
            await self._socket.send_str(text)
        except (OSError, aiohttp.ClientError):
            # A server without a free session sends an error and closes immediately. The reader records the error.
            return

    async def _read(self) -> None:
        while self._ended is None:
            message = await self._socket.receive()
            if message.type is aiohttp.WSMsgType.TEXT and self._answer is not None and not self._answer.done():
                self._answer.set_result(message.data)
            else:
                self._ended = self._end(message)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self._ended)

    def _end(self, message: aiohttp.WSMessage) -> Failure:
        """Return the failure for a message that ends the session."""
        if message.type is aiohttp.WSMsgType.TEXT:
            return Failure(FailureKind.BAD_REPLY, "the server sent a message that was not requested")
        if message.type is aiohttp.WSMsgType.BINARY:
            return Failure(FailureKind.BAD_REPLY, "expected a text message from the server, got bytes")
        if isinstance(message.data, aiohttp.WebSocketError):
            if message.data.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                return Failure(FailureKind.TOO_LARGE, f"the answer is larger than max_reply_bytes ({self._max_bytes})")
            return Failure(FailureKind.BAD_REPLY, f"not a valid WebSocket message: {printable(str(message.data), 120)}")
        code = self._socket.close_code
        return Failure(
            FailureKind.CONNECTION, f"the server closed the connection (code {code}); the state of the episode is lost"
        )


async def _refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """aiohttp middleware that refuses redirects. ``ws_connect`` would follow redirects to any address."""
    response = await handler(request)
    if 300 <= response.status < 400:
        response.close()
        status = response.status
        raise Failure(FailureKind.REDIRECT, f"HTTP {status}; redirects are not followed", status=status)
    return response
