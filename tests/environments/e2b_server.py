"""A server that speaks the part of E2B's protocol that its client uses here, and runs the commands on this machine."""

import base64
import email
import email.policy
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY = "e2b_0123"


class Handler(BaseHTTPRequestHandler):
    """The service's own requests, and those to a machine (envd)."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def content(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while count := int(self.rfile.readline(), 16):
            content += self.rfile.read(count)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(self, status, content, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self):
        content = self.content()
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        if path in self.server.failures and self.server.failures[path] is None:
            self.close_connection = True
        elif path in self.server.failures:
            self.answer(self.server.failures[path], json.dumps({"code": 0, "message": "refused"}).encode())
        elif path == "/v2/sandboxes":
            assert self.headers["X-API-KEY"] == KEY
            assert json.loads(content)["allow_internet_access"] is False
            # A home folder is not below /tmp, which programs may read and write.
            self.server.folder = tempfile.TemporaryDirectory(dir="/var/tmp")
            machine = {"sandboxID": "m1", "templateID": "base", "clientID": "c", "envdVersion": "0.6.2"}
            self.answer(201, json.dumps({**machine, "envdAccessToken": "token", "domain": None}).encode())
        elif path == "/files":
            self.answer(200, json.dumps(self.write_files(content)).encode())
        else:
            assert path == "/process.Process/Start"
            self.answer(200, self.run(json.loads(content[5:])), "application/connect+json")

    def do_DELETE(self):
        self.server.requests.append(self.path)
        self.server.folder.cleanup()
        self.answer(204, b"")

    def write_files(self, content):
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        message = email.message_from_bytes(head + content, policy=email.policy.HTTP)
        written = []
        for part in message.iter_parts():
            name = part.get_filename()
            path = Path(self.server.folder.name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(part.get_payload(decode=True))
            written.append({"name": path.name, "path": name, "type": "file"})
        return written

    def run(self, request):
        """Run a command, and return the messages of a Connect stream: a byte of flags, the length, JSON."""
        assert request["process"]["args"][:2] == ["-l", "-c"]
        # A login shell would replace this PATH. Its Python has no packages: only the copied files are found.
        path = f"{os.path.dirname(os.path.realpath(sys._base_executable))}:{os.environ['PATH']}"
        command = ["/bin/bash", "-c", request["process"]["args"][2]]
        done = subprocess.run(command, cwd=self.server.folder.name, capture_output=True, env={"PATH": path})
        events = [{"start": {"pid": 7}}]
        for name, content in (("stdout", done.stdout), ("stderr", done.stderr)):
            events.append({"data": {name: base64.b64encode(content).decode()}})
        status = f"exit status {done.returncode}"
        events.append({"end": {"exitCode": done.returncode, "exited": True, "status": status}})
        frames = [(0, {"event": event}) for event in events] + [(2, {})]
        encoded = [(flags, json.dumps(message).encode()) for flags, message in frames]
        return b"".join(bytes([flags]) + len(text).to_bytes(4, "big") + text for flags, text in encoded)


@contextmanager
def e2b_server():
    """The running server: ``requests`` has the paths that were asked for, ``failures`` a status for a path, or None to
    close the connection."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests, server.failures = [], {}
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
