"""A server that rewards completions by URL and does what the first of them says; for the tests of ``HttpReward``."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RewardServer(ThreadingHTTPServer):
    """Listens on a loopback port of its own; ``url`` is its address, ``requests`` what was asked (headers, body)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests = []
        self.seen = {}
        self.stopped = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/score"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def handle_error(self, request, client_address):
        """Clients that give up on a slow reply are part of the tests."""

    def stop(self):
        self.stopped.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((dict(self.headers), body))
        texts = [c if isinstance(c, str) else c[0]["content"] for c in body["completions"]]
        kind, _, rest = texts[0].partition(" ")
        times = self.server.seen[kind, rest] = self.server.seen.get((kind, rest), 0) + 1
        getattr(self, f"_{kind}", self._score)(rest, times, texts)

    def _send(self, status, payload, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(payload), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(payload)

    def _score(self, rest, times, completions):
        self._send(200, json.dumps([None if text == "none" else len(text) / 10 for text in completions]).encode())

    def _object(self, rest, times, completions):
        self._send(200, json.dumps({"rewards": [0.5] * len(completions), "took_s": 1}).encode())

    def _raw(self, text, times, completions):
        self._send(200, text.encode())

    def _status(self, code, times, completions):
        said = {
            "detail": [{"loc": ["body", "completions"], "msg": "unwanted " + self.headers.get("Authorization", "")}]
        }
        self._send(int(code), json.dumps(said).encode(), Content_Type="application/json")

    def _flaky(self, code, times, completions):
        self._send(int(code), b"") if times < 3 else self._score(code, times, completions)

    def _busy(self, pause, times, completions):
        self._send(429, b"", Retry_After=pause) if times < 2 else self._score(pause, times, completions)

    def _reset(self, rest, times, completions):
        if times < 2:
            self.close_connection = True
        else:
            self._score(rest, times, completions)

    def _hang(self, rest, times, completions):
        self.server.stopped.wait(20)

    def _huge(self, rest, times, completions):
        self._send(200, b" " * 10_000_000)

    def _redirect(self, rest, times, completions):
        self._send(307, b"", Location=self.server.url + "/elsewhere")
