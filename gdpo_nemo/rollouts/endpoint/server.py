"""HTTP server of the endpoint: uvicorn in a thread of the driver."""

from __future__ import annotations

import socket
import threading
import time

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from gdpo_nemo.rollouts.endpoint.requests import MAX_BODY_BYTES, Refused
from gdpo_nemo.rollouts.endpoint.service import Service
from gdpo_nemo.utils.errors import RunError

SESSION_HEADER = "x-session-id"
_START_S = 300.0
_STOP_S = 10.0


class Endpoint:
    """HTTP server for ``service`` at ``url``. The server runs until ``close``.

    Args:
        host: address to listen on. Requests are not authenticated, so use a loopback address unless the network is
            trusted.
        port: port to listen on. 0 selects a free port.

    Raises:
        RunError: if the server cannot listen or does not start.
    """

    def __init__(self, service: Service, host: str, port: int):
        self.service = service
        try:
            self._socket = socket.create_server((host, port), backlog=2048)
        except OSError as error:
            raise RunError(f"rollout.endpoint: cannot listen on {host}:{port} ({error.strerror})") from None
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        settings = uvicorn.Config(_app(service), log_level="error", timeout_keep_alive=30, lifespan="off")
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


def _app(service: Service) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(Refused)
    async def refuse(request: Request, refused: Refused) -> JSONResponse:
        service.counts["refused"] += 1
        error = {"message": refused.message, "type": "invalid_request_error", "code": refused.status}
        return JSONResponse({"object": "error", "message": refused.message, "error": error}, refused.status)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> JSONResponse:
        return JSONResponse(await service.chat(await _body(request), _session(request)))

    @app.post("/v1/responses")
    async def responses(request: Request) -> JSONResponse:
        return JSONResponse(await service.responses(await _body(request), _session(request)))

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


def _session(request: Request) -> str:
    return request.headers.get(SESSION_HEADER, "")[:200]


async def _body(request: Request) -> bytes:
    """Read the request body.

    Raises:
        Refused: with status 413 if the body is too large.
    """
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise Refused(413, f"the request is larger than the limit of {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)
