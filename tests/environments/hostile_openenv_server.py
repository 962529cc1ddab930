"""A server that speaks OpenEnv's protocol until it is asked for a misdeed: the message of a step names it."""

import asyncio
import json
import threading

from aiohttp import WSMsgType, web

FINE = {"type": "observation", "data": {"observation": {"echoed_message": "heard"}, "reward": 1.0, "done": False}}


def changed(**data) -> str:
    return json.dumps({**FINE, "data": {**FINE["data"], **data}})


TEXTS = {
    "nan": changed(reward=float("nan")),
    "infinite": changed(reward=float("inf")),
    "overflow": '{"type": "observation", "data": {"observation": {}, "reward": 1' + "0" * 400 + "}}",
    "reward_text": changed(reward="1.0"),
    "no_json": "<html>",
    "a_list": "[1, 2]",
    "deep": "[" * 5000 + "]" * 5000,
    "long_number": '{"type": ' + "9" * 10_000 + "}",
    "no_type": "{}",
    "observation_list": changed(observation=[1]),
    "done_text": changed(done="yes"),
    "missing": changed(observation={"other": 1}),
    "long_observation": changed(observation={"echoed_message": "x" * (2**20 + 1)}),
    "half_characters": '{"type": "observation", "data": {"observation": {"echoed_message": "a\\ud800b"}, "reward": 1}}',
    "error_without_data": '{"type": "error", "data": [1]}',
    "error_code_object": '{"type": "error", "data": {"code": {"a": 1}, "message": ["x"]}}',
    "big": changed(observation={"echoed_message": "x" * 3 * 2**20}),
}


class HostileServer:
    """``url`` is its address; ``sockets`` are the connections that are open."""

    def __init__(self):
        self.sockets = set()
        self.resets = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        self._ready.wait(60)

    def stop(self):
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self):
        app = web.Application()
        app.router.add_get("/ws", self._serve)
        app.router.add_get("/moved/ws", lambda request: web.HTTPFound("/ws"))
        app.router.add_get("/locked/ws", self._locked)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _locked(self, request):
        if request.headers.get("Authorization") != "Bearer let-me-in":
            raise web.HTTPForbidden()
        return await self._serve(request)

    async def _serve(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sockets.add(socket)
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    await self._answer(socket, json.loads(message.data))
        finally:
            self.sockets.discard(socket)
        return socket

    async def _answer(self, socket, asked):
        if asked["type"] == "reset":
            self.resets += 1
            await socket.send_str(json.dumps(FINE))
            return
        misdeed = asked["data"]["message"]
        if misdeed in TEXTS:
            await socket.send_str(TEXTS[misdeed])
        elif misdeed in ("fine", "hang"):
            await (asyncio.sleep(3600) if misdeed == "hang" else socket.send_str(json.dumps(FINE)))
        else:
            await getattr(self, misdeed)(socket)

    async def flood(self, socket):
        while not socket.closed:
            await socket.send_str(json.dumps(FINE))

    async def drip(self, socket):
        """A frame of a thousand bytes that never ends."""
        socket._req.transport.write(b"\x81\x7e\x03\xe8")
        while True:
            socket._req.transport.write(b"x")
            await asyncio.sleep(0.1)

    async def twice(self, socket):
        for _ in range(2):
            await socket.send_str(json.dumps(FINE))

    async def bytes(self, socket):
        await socket.send_bytes(json.dumps(FINE).encode())

    async def no_frame(self, socket):
        socket._req.transport.write(b"\xff\xff\xff\xff")

    async def closes(self, socket):
        await socket.close()

    async def cuts(self, socket):
        socket._req.transport.abort()

    async def cuts_in_the_middle(self, socket):
        socket._req.transport.write(b"\x81\x7e\x03\xe8xxx")
        socket._req.transport.close()
