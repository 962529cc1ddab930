"""A resources server that misbehaves on demand: the row's field ``misdeed`` says how, ``value`` is the honest
reward."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from pydantic import BaseModel

SECRET = "s3cret-key-0123456789"


class Hosted:
    """An ASGI application served from a thread of this process, on a port that stays the same over restarts."""

    def __init__(self, app):
        self._app = app
        self.port = 0
        self._server = None
        self.start()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(self._app, log_level="critical", lifespan="off", timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def break_off(self) -> None:
        """End at once, in the middle of what is being answered."""
        for connection in list(self._server.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


class ClosingServer:
    """Accepts connections, reads a little, and closes them without a word."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            connection.recv(100)
            connection.close()

    def stop(self) -> None:
        self._socket.close()


class RepeatingServer:
    """Answers each request with its number, and a moment later once more, unasked, with 999."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.answered = 0
        self.repeated = threading.Event()
        """Set when the last unasked reply is on its way, or the client had hung up."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while b"\r\n\r\n" in connection.recv(65536):
                self.answered += 1
                connection.sendall(self._reply(self.answered))
                time.sleep(0.1)
                connection.sendall(self._reply(999))
                self.repeated.set()
        except OSError:
            pass
        finally:
            self.repeated.set()
            connection.close()

    @staticmethod
    def _reply(number: int) -> bytes:
        body = json.dumps({"reward": number}).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def stop(self) -> None:
        self._socket.close()


def good(value: float, **extra) -> dict:
    components = {"correctness": float(value), "format": 1.0}
    return {"reward": value + 1.0, "reward_components": components, "echo": {"prompt": "x"}, **extra}


class Strict(BaseModel):
    expected_answer: str


def hostile_app(elsewhere: str = "", judge: Callable[[dict], dict[str, Any]] = lambda row: {}) -> FastAPI:
    """The server. ``app.state.seen`` lists the bodies of /verify, ``app.state.cookies`` what came with them.

    ``judge`` returns what of ``misdeed``, ``value`` and ``honest``, the honest reply, is not in the row itself.
    """
    app = FastAPI()
    app.state.seen = []
    app.state.cookies = []
    app.state.seeds = 0
    app.state.active = 0
    app.state.most = 0

    @app.get("/")
    async def alive():
        raise HTTPException(404)

    @app.post("/seed_session")
    async def seed(request: Request):
        row = await request.json()
        app.state.seeds += 1
        reply = JSONResponse({})
        reply.set_cookie("session", f"{row.get('id', 0)}-{app.state.seeds}", max_age=1000)
        if row.get("misdeed") == "cookie_flood":
            for number in range(40):
                reply.set_cookie(f"c{number}", "x" * 50)
        if row.get("misdeed") == "cookie_games":
            reply.set_cookie("evil", "1", domain="example.org", path="/elsewhere")
            reply.headers.append("set-cookie", "=;;;garbage")
        return reply

    @app.post("/verify")
    async def verify(request: Request):
        row = await request.json()
        row.update(judge(row))
        app.state.seen.append(row)
        app.state.cookies.append((row.get("id"), dict(request.cookies)))
        app.state.active += 1
        app.state.most = max(app.state.most, app.state.active)
        try:
            return await _answer(app, row, request, elsewhere)
        finally:
            app.state.active -= 1

    @app.post("/elsewhere/verify")
    async def strict(body: Strict):
        return good(1.0)

    return app


async def _answer(app: FastAPI, row: dict, request: Request, elsewhere: str):
    misdeed = row.get("misdeed", "none")
    value = row["value"]
    times = sum(one.get("id") == row.get("id") and one.get("misdeed") == misdeed for one in app.state.seen)
    honest = row.get("honest") or good(value)
    if misdeed == "slow":
        await asyncio.sleep(row["seconds"])
    if misdeed == "hang":
        await asyncio.sleep(600)
    if misdeed == "drip":
        return StreamingResponse(_drip(json.dumps(honest).encode()), media_type="application/json")
    if misdeed == "errors" or (misdeed == "error_once" and times == 1):
        return JSONResponse({"detail": f"boom {request.headers.get('authorization')}"}, status_code=500)
    if misdeed == "busy_once" and times == 1:
        return Response(status_code=429, headers={"Retry-After": "0.2"})
    if misdeed == "busy_for_an_hour":
        return Response(status_code=429, headers={"Retry-After": "3600"})
    if misdeed == "busy_until_a_date":
        return Response(status_code=429, headers={"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"})
    if misdeed == "cut_short":
        return StreamingResponse(_once(b'{"reward": 1'), headers={"Content-Length": "1000"})
    if misdeed == "big":
        return Response(b'{"reward": 1, "x": "' + b"x" * 10_000_000 + b'"}', media_type="application/json")
    if misdeed == "big_unannounced":
        return StreamingResponse(_flood(), media_type="application/json")
    if misdeed == "bomb":
        return Response(b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    if misdeed == "deep":
        return Response(b'{"reward": 1, "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", media_type="application/json")
    if misdeed == "quotes":  # a depth check that scans each string anew would take minutes
        return Response(b'{"x": ' + b"[" * 90 + b"{" * 90 + b'"' + b'\\"' * 400_000)
    if misdeed == "html":
        return HTMLResponse("<html><body>Welcome to the proxy</body></html>")
    if misdeed == "html_502":
        return HTMLResponse("<html><h1>Bad Gateway</h1></html>", status_code=502)
    if misdeed == "redirect":
        return RedirectResponse(elsewhere + "/verify", status_code=307)
    if misdeed == "empty":
        return Response(b"", media_type="application/json")
    if misdeed == "no_content":
        return Response(status_code=204)
    if misdeed == "unprocessable":
        # FastAPI repeats the whole row, which may be long.
        faults = [{"loc": ["body", "options"], "msg": "Field required", "input": [SECRET] * 9000}]
        return JSONResponse({"detail": faults}, 422)
    texts = {
        "a_list": "[1, 2]",
        "nan": '{"reward": 1, "reward_components": {"correctness": NaN, "format": 1}}',
        "infinite": '{"reward": 1, "reward_components": {"correctness": -Infinity, "format": 1}}',
        "overflow": '{"reward": 1, "reward_components": {"correctness": 1' + "0" * 400 + ', "format": 1}}',
        "text": '{"reward": 1, "reward_components": {"correctness": "1.0", "format": 1}}',
        "object": '{"reward": 1, "reward_components": {"correctness": {"value": 1}, "format": 1}}',
        "components_list": '{"reward": 1, "reward_components": [1, 1]}',
        "null": '{"reward": 1, "reward_components": {"correctness": null, "format": 1}}',
        "missing": '{"reward": 1, "reward_components": {"format": 1}}',
        "no_components": '{"reward": 1}',
        "booleans": '{"reward": 1, "reward_components": {"correctness": true, "format": false}}',
        "nan_beside": json.dumps({**honest, "debug": float("nan")}),
        "extra": json.dumps({**honest, "reward_components": {**honest["reward_components"], "surprise": 5.0}}),
        "spans": json.dumps({**honest, "reward_spans": {"format": [[1, 3]], "surprise": "unread"}}),
        "spans_outside": json.dumps({**honest, "reward_spans": {"format": [[0, 5]]}}),
        "spans_list": json.dumps({**honest, "reward_spans": [[0, 1]]}),
        "mask_sample": json.dumps({**honest, "mask_sample": True}),
        "judge_0_5": json.dumps({**honest, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "no key"}),
        "judge_0_7": json.dumps(
            {**honest, "mask_sample": False, "failure_kind": "session_lost", "failure_reason": "restarted"}
        ),
        "instance_mask": json.dumps({**honest, "instance_config": {"mask_sample": True}}),
        "fine_0_7": json.dumps({**honest, "mask_sample": False, "failure_kind": None, "failure_reason": None}),
    }
    return Response(texts.get(misdeed, json.dumps(honest)), media_type="application/json")


async def _drip(body: bytes):
    for byte in body:
        yield bytes([byte])
        await asyncio.sleep(0.5)  # far longer in all than any test's limit on a reply


async def _once(body: bytes):
    yield body


async def _flood():
    for _ in range(200):
        yield b" " * 50_000
