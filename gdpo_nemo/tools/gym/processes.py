"""Processes that serve NeMo Gym servers: configuration, listening sockets, logs and their end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from gdpo_nemo.environments.nemo_gym.checkout import Instance, instances_of
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.source import find_file

HEAD = ""
"""Name of the head server's socket."""
_SCRIPT = "examples/serve_nemo_gym.py"
_POLL_S = 0.2
_END_S = 20.0
_RESOLVE_S = 600.0
_LAST_LINES = 5
"""Number of lines of a log in an error message."""
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception)\b.*", re.MULTILINE)
"""Matches the last line of a traceback."""


def served_instances(content: Mapping[str, Any]) -> dict[str, Instance]:
    """Return the servers to start in NeMo Gym's global config: those with an entry point."""
    return {name: one for name, one in instances_of([content]).items() if one.settings.get("entrypoint")}


def listen(name: str, host: str, port: int) -> socket.socket:
    """Open the socket of a server. Raises RunError if the address is in use or invalid."""
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise RunError(f"{name}: cannot listen on {host}:{port} ({why})") from None


@dataclass
class Addressed:
    """NeMo Gym's global config with the address of every server, and the servers' open sockets."""

    content: dict[str, Any]
    instances: dict[str, Instance]
    sockets: dict[str, socket.socket] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)

    def close(self) -> None:
        """Close the sockets, which the serving processes have inherited."""
        for one in self.sockets.values():
            one.close()
        self.sockets = {}


def address(content: dict[str, Any], places: Mapping[str, Mapping[str, Any]]) -> Addressed:
    """Open a socket for each server and for the head server, and write the addresses to ``content``.

    Args:
        content: NeMo Gym's global config, resolved.
        places: host and port of some servers by name. The other servers get free ports.

    Raises:
        RunError: if an address is in use.
    """
    found = Addressed(content, served_instances(content))
    try:
        for name, (kind, implementation, _) in found.instances.items():
            settings = content[name][kind][implementation]
            place = places.get(name, {})
            host = place.get("host") or settings.get("host") or "127.0.0.1"
            # The ports that NeMo Gym selects may be in use.
            found.sockets[name] = listen(name, host, place.get("port", 0))
            settings |= {"host": host, "port": found.sockets[name].getsockname()[1]}
            found.urls[name] = f"http://{host}:{settings['port']}"
        found.sockets[HEAD] = listen("head server", "127.0.0.1", 0)
        content["head_server"] = dict(zip(("host", "port"), found.sockets[HEAD].getsockname()))
    except RunError:
        found.close()
        raise
    found.urls[HEAD] = "http://{host}:{port}".format(**content["head_server"])
    return found


def resolve(content: Mapping[str, Any], python: Path, path: list[Path]) -> dict[str, Any]:
    """Return NeMo Gym's global config with ``config_paths`` and interpolations resolved by NeMo Gym's own parser.

    Raises RunError if NeMo Gym refuses the config.
    """
    command = [str(python), str(_script()), "--global-config", "-", "--resolve"]
    ended = subprocess.run(
        command, input=json.dumps(content), env=_variables(path), capture_output=True, text=True, timeout=_RESOLVE_S
    )
    if ended.returncode:
        raise RunError(f"NeMo Gym does not accept the config: {last_lines(ended.stderr)}")
    resolved: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return resolved


def last_lines(text: str, count: int = _LAST_LINES) -> str:
    """Return the end of a log as one line."""
    return " | ".join(map(str.strip, text.strip().splitlines()[-count:]))


def last_exception(text: str) -> str:
    """Return the last exception in a log, except failures of other servers (empty if there is none)."""
    found = [line for line in _EXCEPTION.findall(text) if "Internal Server Error" not in line]
    return found[-1] if found else ""


def _script() -> Path:
    script = find_file(_SCRIPT)
    if script is None:
        raise RunError(f"{_SCRIPT} was not found")
    return script.absolute()


def _variables(path: list[Path]) -> dict[str, str]:
    """Return the environment variables of a process with ``path`` before the user's PYTHONPATH."""
    given = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    joined = os.pathsep.join([*map(str, path), *given])
    return {**os.environ, "PYTHONPATH": joined, "PYTHONUNBUFFERED": "1"}


class Served:
    """Process that serves some servers of a config.

    Args:
        label: name in error messages.
        addressed: the config and its sockets.
        names: servers that the process serves.
        path: folders before the user's PYTHONPATH.
        folder: working directory.
        log: file with the output of the process.
    """

    def __init__(
        self,
        label: str,
        addressed: Addressed,
        names: list[str],
        python: Path,
        *,
        path: list[Path],
        folder: Path,
        log: Path,
    ):
        self.label = label
        self.names = names
        self.log = log
        inherited, listeners = [], []
        for name in names:
            number = addressed.sockets[name].fileno()
            inherited.append(number)
            listeners += ["--listener", f"{name}={number}"]
        with open(log, "w") as output:
            self._process = subprocess.Popen(
                [str(python), str(_script()), "--global-config", "-", *listeners],
                stdin=subprocess.PIPE,  # not a file, because the config may contain keys of judge models
                stdout=output,
                stderr=output,
                env=_variables(path),
                cwd=folder,
                pass_fds=inherited,
                start_new_session=True,  # Ctrl-C ends this command, which ends the servers
                text=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # check() reports that the process has ended
            self._process.stdin.write(json.dumps(addressed.content))
            self._process.stdin.close()

    def wait_until_ready(self, urls: Mapping[str, str], deadline: float) -> None:
        """Wait until every server answers. Raises RunError if the process ends or the deadline passes."""
        for name in self.names:
            while not _answers(urls[name]):
                self.check()
                if time.monotonic() > deadline:
                    raise RunError(f"{self.label}: {name} at {urls[name]} did not answer in time; see {self.log}")
                time.sleep(_POLL_S)

    def check(self) -> None:
        """Raise RunError with the end of the log if the process has ended."""
        status = self._process.poll()
        if status is not None:
            last = last_lines(self.log.read_text(errors="replace"))
            raise RunError(f"{self.label}: the servers ended with status {status}; see {self.log}: {last}")

    def terminate(self) -> None:
        """Ask the process to end, without waiting."""
        self._process.terminate()

    def end(self) -> None:
        """End the process. The cleanup process of this command ends its remaining descendants."""
        self.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def end_all(processes: Sequence[Served]) -> None:
    """End processes at the same time, because each of them first finishes its requests."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.end()


def _answers(url: str) -> bool:
    try:
        build_opener(ProxyHandler({})).open(url + "/", timeout=5.0).close()
    except HTTPError:  # NeMo Gym 0.4 has only some of the routes
        return True
    except OSError:
        return False
    return True
