"""An OpenAI-compatible endpoint that does what the answer it is to grade says; for the tests of the judge."""

import json
import time

from local_server import JsonHandler, LocalServer


class JudgeServer(LocalServer):
    """An endpoint of chat completions; ``requests`` holds (path, headers, body)."""

    def __init__(self):
        super().__init__(_Handler, "/v1")


class _Handler(JsonHandler):
    def do_POST(self):
        body = self._body()
        self.server.requests.append((self.path, dict(self.headers), body))
        content = body["messages"][1]["content"]
        text = content if isinstance(content, str) else content[0]["text"]
        lines = [line.partition(": ") for line in text.split("\n")]
        material = {name: json.loads(value) for name, _, value in lines}
        if "first" in material:
            return self._better(material)
        if "answers" in material:
            return self._rank(material)
        answer = material["answer"]
        times = self.server.seen[answer] = self.server.seen.get(answer, 0) + 1
        kind, _, rest = answer.partition(" ")
        if "criteria" in material and not hasattr(self, f"_{kind}"):
            return self._grade(material)
        getattr(self, f"_{kind}", self._say)(rest, times)
        return None

    def _say(self, text, times):
        message = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": {"total_tokens": 50}}
        self._send(200, json.dumps(message).encode())

    def _vote(self, replies, times):
        """Say another of the given replies each time."""
        self._say(replies.split("|")[times - 1], times)

    def _better(self, material):
        """Prefer the answer that contains "good", then the shown first, or the text after "say"."""
        first, second = ("good" in material[name] for name in ("first", "second"))
        better = "first" if first > second or "biased" in material["prompt"] else "second" if second > first else "tie"
        self._say(f"BETTER clear: {better}\nBETTER right: tie", 1)

    def _grade(self, material):
        """Meet a criterion if its last word is in the answer, which is quoted; count the word if there is a scale. The
        judge cannot tell if this word is "unknown". The criteria are answered in the opposite order."""
        verdicts = []
        for criterion in reversed(material["criteria"]):
            word = criterion["criterion"].split()[-1]
            count = material["answer"].count(word)
            verdict = (
                None if word == "unknown" else criterion["scale"][0] + count if "scale" in criterion else count > 0
            )
            quotes = [word, "not in the answer"] if count else []
            verdicts.append({"id": criterion["id"], "reason": "?", "verdict": verdict, "quotes": quotes})
        self._say(json.dumps({"verdicts": verdicts}), 1)

    def _rank(self, material):
        """Rank by the count of a criterion's last word, or say the text after "say" in the prompt. A biased judge
        prefers the answer that is shown first."""
        _, is_script, script = material["prompt"].partition("say ")
        rankings = []
        for criterion in material["criteria"]:
            word = criterion["criterion"].split()[-1]
            by_count = {}
            for place, answer in enumerate(material["answers"]):
                by_count.setdefault(-place if word == "biased" else answer["answer"].count(word), []).append(
                    answer["id"]
                )
            ranking = None if word == "unknown" else [by_count[count] for count in sorted(by_count, reverse=True)]
            rankings.append({"id": criterion["id"], "ranking": ranking})
        self._say(script if is_script else json.dumps({"rankings": rankings}), 1)

    def _status(self, code, times):
        self._send(int(code), b"the key was " + self.headers.get("Authorization", "").encode())

    def _refuse(self, code, times):
        key = self.headers.get("Authorization", "")
        error = {"message": f"The model `judge-1`\n does not exist ({key}).", "type": "NotFoundError", "code": 404}
        self.send_response(int(code))
        payload = json.dumps({"error": error}).encode()
        for name, value in {"Content-Type": "application/json", "Content-Length": len(payload)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(payload)

    def _flaky(self, code, times):
        self._send(int(code), b"") if times < 3 else self._say("SCORE: 10", times)

    def _reset(self, rest, times):
        self.close_connection = True if times < 2 else self.close_connection
        if times >= 2:
            self._say("SCORE: 5", times)

    def _hang(self, rest, times):
        self.server.stopped.wait(600)

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
