"""The inspector's page over HTTP on this machine alone, and written anew while its run goes on."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
import time
from pathlib import Path
from typing import Any, Iterator

from gdpo_nemo.errors import ConfigError, GdpoError
from gdpo_nemo.observe.inspector import site_builder

HOST = "127.0.0.1"


@contextlib.contextmanager
def serving(folder: Path, port: int | None) -> Iterator[str | None]:
    """Serve a folder on the loopback address while the block runs, and give the page's address.

    Args:
        port: 0: a free one; None: do not serve.

    Raises:
        ConfigError: the port is taken.
    """
    if port is None:
        yield None
        return
    try:
        found = http.server.ThreadingHTTPServer((HOST, port), functools.partial(_Handler, directory=str(folder)))
    except OSError as error:
        raise ConfigError(f"--port: {port} cannot be listened at ({error.strerror})") from None
    thread = threading.Thread(target=found.serve_forever, name="inspector", daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{found.server_port}/"
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Files of the site, for nobody who came by another name: a foreign page whose name was pointed here."""

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
        """Say nothing: the page asks every few seconds."""


def follow(run_dir: str | Path, out: Path, every: float | None) -> None:
    """Never return: wait, and with ``every`` seconds write the site anew whenever the run has other samples.

    Raises:
        ConfigError, RunError: as ``site_builder.build``, where the same files fail twice.
    """
    seen = site_builder.stamp_of(run_dir)
    failed = ""
    while True:
        time.sleep(every or 3600)
        stamp = site_builder.stamp_of(run_dir)
        if every is None or stamp == seen:
            continue
        try:
            site_builder.build(run_dir, out, live=True)
            seen = stamp
        except GdpoError:  # files that went away meanwhile, as where a run resumes
            if stamp == failed:
                raise
            failed = stamp
