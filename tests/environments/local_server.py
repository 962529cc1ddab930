"""What the servers of the tests share: a loopback port of their own, JSON in, bytes out, requests that are kept."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LocalServer(ThreadingHTTPServer):
    """``url`` is its address, ``requests`` what was asked, ``seen`` how often, ``stopped`` ends what hangs."""

    daemon_threads = True
    # If the queue is full, Linux drops a connection; its client tries again after 1, 3, 7 and 15 s. With the default
    # length of 5, twenty connections at a time exceed the client's limit of 10 s on a busy machine.
    request_queue_size = 1024

    def __init__(self, handler, path):
        super().__init__(("127.0.0.1", 0), handler)
        self.requests = []
        self.seen = {}
        self.stopped = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}{path}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def handle_error(self, request, client_address):
        """Clients that give up on a slow reply are part of the tests."""

    def stop(self):
        self.stopped.set()
        self.shutdown()
        self.server_close()


class JsonHandler(BaseHTTPRequestHandler):
    """Reads a JSON body and sends bytes, over connections that stay open."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def _body(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _send(self, status, payload, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(payload), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(payload)
