"""HTTP server of the inspector, for this machine only, and updates of the page while the run continues."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gdpo_nemo.tools.inspect import builder
from gdpo_nemo.utils.errors import ConfigError, GdpoError

HOST = "127.0.0.1"


@contextlib.contextmanager
def serving(folder: Path, port: int | None) -> Iterator[str | None]:
    """Serve a folder on the loopback address during the block, and yield the page's URL, or None without a server.

    Args:
        port: port number. 0 means any free port, and None means no server.

    Raises:
        ConfigError: if the port is in use.
    """
    if port is None:
        yield None
        return
    try:
        found = http.server.ThreadingHTTPServer((HOST, port), functools.partial(_Handler, directory=str(folder)))
    except OSError as error:
        raise ConfigError(f"--port: cannot listen on {port} ({error.strerror})") from None
    thread = threading.Thread(target=found.serve_forever, name="inspector", daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{found.server_port}/"
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Request handler for the page's files.

    The handler rejects requests for other host names, to prevent DNS rebinding.
    """

    def send_head(self) -> Any:
        name = (self.headers.get("Host") or "").rpartition(":")[0]
        if name not in (HOST, "localhost"):
            self.send_error(403)
            return None
        if Path(self.translate_path(self.path)).is_dir() and self.path.split("?")[0] != "/":
            self.send_error(404)
            return None
        return super().send_head()

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the page sends requests every few seconds."""


def follow(run_dir: str | Path, out: Path, every: float | None) -> None:
    """Wait forever. Every ``every`` seconds, rewrite the page if the run's samples have changed. None means never.

    Raises:
        ConfigError, RunError: if ``builder.build`` fails twice for the same files.
    """
    seen = builder.stamp_of(run_dir)
    failed = ""
    while True:
        time.sleep(every or 3600)
        stamp = builder.stamp_of(run_dir)
        if every is None or stamp == seen:
            continue
        try:
            builder.build(run_dir, out, live=True)
            seen = stamp
        except GdpoError:  # files may be removed during the build, for example by a run that resumes
            if stamp == failed:
                raise
            failed = stamp
