"""An OpenAI-compatible endpoint that does what the answer it is to grade says; for the tests of the judge."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeServer(ThreadingHTTPServer):
    """Listens on a loopback port of its own; ``url`` is its base URL, ``requests`` what was asked (headers, body)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests = []
        self.seen = {}
        self.stopped = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
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
        self.server.requests.append((self.path, dict(self.headers), body))
        [line] = [line for line in body["messages"][1]["content"].split("\n") if line.startswith("answer: ")]
        answer = json.loads(line.removeprefix("answer: "))
        times = self.server.seen[answer] = self.server.seen.get(answer, 0) + 1
        kind, _, rest = answer.partition(" ")
        getattr(self, f"_{kind}", self._say)(rest, times)

    def _send(self, status, payload, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(payload), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(payload)

    def _say(self, text, times):
        self._send(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode())

    def _status(self, code, times):
        self._send(int(code), b"the key was " + self.headers.get("Authorization", "").encode())

    def _flaky(self, code, times):
        self._send(int(code), b"") if times < 3 else self._say("SCORE: 10", times)

    def _reset(self, rest, times):
        self.close_connection = True if times < 2 else self.close_connection
        if times >= 2:
            self._say("SCORE: 5", times)

    def _hang(self, rest, times):
        self.server.stopped.wait(20)

    def _drip(self, rest, times):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        while not self.server.stopped.is_set():
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.1)

    def _raw(self, text, times):
        self._send(200, text.encode())

    def _huge(self, rest, times):
        self._send(200, b" " * 10_000_000)

    def _deep(self, rest, times):
        self._send(200, b"[" * 100_000)

    def _redirect(self, rest, times):
        self._send(307, b"", Location=self.server.url + "/elsewhere")

    def _null(self, rest, times):
        self._send(200, json.dumps({"choices": [{"message": {"content": None}}]}).encode())
