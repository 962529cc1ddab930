"""The few endpoints of the Hugging Face hub that an upload takes, on this machine, for the hub's own client."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """Repositories by name: whether they are private, and their files."""

    def __init__(self, url: str, token: str):
        self.url = url
        self.token = token
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.calls: list[str] = []


@contextlib.contextmanager
def hub(token: str = "hf_right") -> Iterator[Hub]:
    """A hub while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}", token)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        self._body()
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in self.hub.private:
            repo = "/".join(parts[2:4])
            self._answer({"id": repo, "modelId": repo, "private": self.hub.private[repo], "sha": "0" * 40})
        else:
            self._answer({"error": "not found"}, 404)

    def do_PUT(self) -> None:
        self.hub.blobs[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        path = self.path.split("?")[0]
        self.hub.calls.append(path)
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}" and "verify" not in path:
            self._answer({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer({"warnings": [], "errors": []})
        elif "/preupload/" in path:
            self._modes(json.loads(body)["files"])
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif "/commit/" in path:
            self._commit("/".join(path.split("/")[3:5]), body)
        else:
            self._answer({"error": f"no such endpoint here: {path}"}, 404)

    def _create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked['organization'] or 'me'}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{repo}", "name": repo}
        if repo in self.hub.private:
            self._answer({**url, "error": "You already created this model repo"}, 409)
            return
        self.hub.private[repo] = asked.get("visibility") == "private" or bool(asked.get("private"))
        self._answer(url)

    def _modes(self, files: list[dict[str, Any]]) -> None:
        modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in (f["path"] for f in files)}
        self._answer({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})

    def _batch(self, asked: dict[str, Any]) -> None:
        actions = {
            thing["oid"]: {"upload": {"href": f"{self.hub.url}/blobs/{thing['oid']}"}} for thing in asked["objects"]
        }
        objects = [{"oid": o["oid"], "size": o["size"], "actions": actions[o["oid"]]} for o in asked["objects"]]
        self._answer({"transfer": "basic", "objects": objects})

    def _commit(self, repo: str, body: bytes) -> None:
        files = self.hub.files.setdefault(repo, {})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
        self._answer({"commitUrl": f"{self.hub.url}/{repo}/commit/1", "commitOid": "1" * 40, "success": True})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
