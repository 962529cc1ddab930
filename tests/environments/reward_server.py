"""A server that rewards completions by URL and does what the first of them says; for the tests of ``HttpReward``."""

import json

from local_server import JsonHandler, LocalServer


class RewardServer(LocalServer):
    """Rewards by URL; ``requests`` holds (headers, body)."""

    def __init__(self):
        super().__init__(_Handler, "/score")


class _Handler(JsonHandler):
    def do_POST(self):
        body = self._body()
        self.server.requests.append((dict(self.headers), body))
        texts = [c if isinstance(c, str) else c[0]["content"] for c in body["completions"]]
        kind, _, rest = texts[0].partition(" ")
        times = self.server.seen[kind, rest] = self.server.seen.get((kind, rest), 0) + 1
        getattr(self, f"_{kind}", self._score)(rest, times, texts)

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
        self.server.stopped.wait(600)

    def _huge(self, rest, times, completions):
        self._send(200, b" " * 10_000_000)

    def _redirect(self, rest, times, completions):
        self._send(307, b"", Location=self.server.url + "/elsewhere")
