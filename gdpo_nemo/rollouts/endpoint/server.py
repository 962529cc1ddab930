"""HTTP server of the endpoint: uvicorn in a thread of the driver."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
import threading
import time
from typing import Any, Awaitable, Callable, Coroutine, Iterator, Sequence
from urllib.parse import urlsplit

import h11
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from gdpo_nemo.rollouts.endpoint.requests import MAX_BODY_BYTES, Refused, read_object
from gdpo_nemo.rollouts.endpoint.service import Service
from gdpo_nemo.rollouts.endpoint.streams import Reply, chat_events, message_events, response_events
from gdpo_nemo.utils.errors import RunError

Answer = Callable[[bytes, str], Coroutine[Any, Any, dict[str, Any]]]
Events = Callable[[Reply, Reply], Iterator[str]]
SESSION_HEADER = "x-session-id"
REQUEST_S = 60.0
"""Seconds after which a connection without a complete header, or without a further part of the body, is closed."""
LINGER_S = 5.0
"""Seconds for which the rest of an invalid request is read and discarded."""
_START_S = 300.0
_STOP_S = 10.0


class Endpoint:
    """HTTP server for ``service`` at ``url``. The server runs until ``close``.

    Args:
        host: address to listen on.
        port: port to listen on. 0 selects a free port.
        token: access token that each request must contain. None accepts every request, so use a loopback address
            unless the network is trusted.
        names: host names by which clients reach the server, in addition to IP addresses, localhost and the name of this
            machine. Web pages of these hosts, of localhost and of loopback addresses may send requests.

    Raises:
        RunError: if the server cannot listen or does not start.
    """

    def __init__(self, service: Service, host: str, port: int, token: str | None = None, names: Sequence[str] = ()):
        self.service = service
        try:
            self._socket = socket.create_server((host, port), backlog=2048)
        except OSError as error:
            raise RunError(f"rollout.endpoint: cannot listen on {host}:{port} ({error.strerror})") from None
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        pages = {name.lower() for name in ("localhost", *names)}
        hosts = pages | {host.lower(), socket.gethostname().lower()}

        async def check_client(request: Request) -> None:
            _check_client(request, hosts, pages, token)

        app = _app(service, check_client)
        settings = uvicorn.Config(app, http=_Protocol, log_level="critical", timeout_keep_alive=30, lifespan="off")
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True, name="endpoint")
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RunError(f"rollout.endpoint: the server at {self.url} did not start")
            time.sleep(0.01)

    def close(self) -> None:
        """Stop the server and drop the requests in flight."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(_STOP_S)
        self._socket.close()


class _Protocol(H11Protocol):
    """HTTP/1.1 connection that is closed if the header of a request does not arrive in time.

    uvicorn limits only the time between two requests. h11 limits the size of a header to 64 KiB.
    """

    _timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the timer."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Start the timer if a header is incomplete. Stop the timer if the header is complete."""
        if self._refused:
            return
        super().data_received(data)
        if not self._refused:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._timer is None:
            self._timer = self.loop.call_later(REQUEST_S, self._close_late)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_late(self) -> None:
        self._timer = None
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self._refuse("408 Request Timeout", f"the header of a request did not arrive within {REQUEST_S:g} s")

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not valid HTTP, and close the connection."""
        self._refuse("400 Bad Request", msg)

    def _refuse(self, status: str, text: str) -> None:
        """Answer, then close the connection when the client has closed its side or after ``LINGER_S``.

        If a socket is closed while the client is still sending, the kernel resets the connection, and the client may
        lose the answer.
        """
        self._stop_watching()
        self._refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun
            self.transport.close()
            return
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(text)}\r\n\r\n"
        self.transport.write((head + text).encode())
        self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)


def _check_client(request: Request, hosts: set[str], pages: set[str], token: str | None) -> None:
    """Check the headers of a request. A web page in a browser on this machine must not reach the endpoint.

    With DNS rebinding, a page's own name leads to this machine. Such requests have that name as their host. Clients on
    other machines have any address of this machine as their host. Only web pages have an origin.

    Raises:
        Refused: with status 403 if Host or Origin belongs to another site, or with status 401 if the access token is
            missing or wrong.
    """
    host, origin = f"//{request.headers.get('host', '')}", request.headers.get("origin")
    for name, value, known in (("Host", host, hosts), ("Origin", origin, pages)):
        if value is not None and not _is_known(value, known, any_address=name == "Host"):
            value = value.removeprefix("//")[:80]
            raise Refused(
                403, f"{name} {value!r} is not a name of this endpoint; add it to rollout.endpoint.allowed_hosts"
            )
    if token is None:
        return
    given = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise Refused(401, "the access token is missing or wrong; send it as Authorization: Bearer or x-api-key")


def _is_known(url: str, known: set[str], any_address: bool) -> bool:
    """Return whether the host of a URL is known, a loopback address, or an IP address if ``any_address`` is True."""
    try:
        name = urlsplit(url).hostname or ""
        if name in known:
            return True
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return any_address or address.is_loopback


def _app(service: Service, check_client: Callable[[Request], Awaitable[None]]) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(check_client)])

    @app.exception_handler(Refused)
    async def refuse(request: Request, refused: Refused) -> JSONResponse:
        return _refusal(service, refused)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _reply(request, service.chat, chat_events)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await _reply(request, service.responses, response_events)

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        return await _reply(request, service.messages, message_events)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        return JSONResponse(await service.tokenize(await _body(request), _session(request)))

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse(service.models())

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    return app


def _refusal(service: Service, refused: Refused) -> JSONResponse:
    service.count_refusal(refused.message)
    error = {"message": refused.message, "type": "invalid_request_error", "code": refused.status}
    content = {"type": "error", "object": "error", "message": refused.message, "error": error}
    return JSONResponse(content, refused.status)


async def _reply(request: Request, answer: Answer, events: Events) -> Response:
    """Return the answer to a request. Nothing more is sampled if the client closes the connection.

    Raises:
        Refused: if the request cannot be served, or the client closes the connection.
    """
    body = await _body(request)
    work = asyncio.ensure_future(answer(body, _session(request)))
    # After the end of the body, the only message is that the client closed the connection.
    closed = asyncio.ensure_future(request.receive())
    closed.add_done_callback(lambda _: work.cancel())
    try:
        return await asyncio.to_thread(_formatted, body, await work, events)
    except asyncio.CancelledError:
        if not closed.done():
            raise
        raise Refused(400, "the client closed the connection before its reply") from None
    finally:
        closed.cancel()


def _formatted(body: bytes, reply: Reply, events: Events) -> Response:
    """Return a reply as JSON, or as a stream of events if the request asks for one."""
    if b"stream" in body and (request := read_object(body)).get("stream"):
        return StreamingResponse(events(reply, request), media_type="text/event-stream")
    return JSONResponse(reply)


def _session(request: Request) -> str:
    return request.headers.get(SESSION_HEADER, "")[:200]


async def _body(request: Request) -> bytes:
    """Read the request body.

    Raises:
        Refused: with status 413 if the body is too large, with status 408 if it stops arriving, or with status 400 if
            the client closes the connection.
    """
    parts: list[bytes] = []
    size = 0
    stream = request.stream()
    try:
        while (part := await asyncio.wait_for(anext(stream, None), REQUEST_S)) is not None:
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise Refused(413, f"the request is larger than the limit of {MAX_BODY_BYTES} bytes")
            parts.append(part)
    except TimeoutError:
        raise Refused(408, f"no further part of the request arrived within {REQUEST_S:g} s") from None
    except ClientDisconnect:
        raise Refused(400, "the client closed the connection before the end of its request") from None
    return b"".join(parts)
