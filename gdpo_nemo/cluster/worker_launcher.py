"""Program that a local Ray session runs to start a worker, in place of Ray's ``setup_worker.py``.

If the worker's environment names a server of ``fork_server``, the worker is forked from this server, which has already
imported torch and Megatron or vLLM. This process then waits for the worker and exits with its status. If this process
is killed, the server kills the worker. In all other cases, this process becomes Ray's own program.

This file uses only the standard library, so it starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys

FOLDER = "GDPO_NEMO_FORK_SERVER"
"""Environment variable with the folder that contains the sockets of the fork servers."""
PRELOADED = "GDPO_NEMO_PRELOADED"
"""Environment variable of a worker with the name of its fork server."""
_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def _fork(arguments: list[str]) -> int | None:
    """Fork the worker from its server and wait for it. Return its exit status, or None if no server can fork it.

    Args:
        arguments: command line that Ray passes to its own program.
    """
    context: dict[str, dict[str, str]] = next(
        (json.loads(a.removeprefix(_CONTEXT)) for a in arguments if a.startswith(_CONTEXT)), {}
    )
    variables = context.get("env_vars") or {}
    folder = os.environ.get(FOLDER)
    # Ray expands references to other variables. Leave these to Ray.
    if not folder or PRELOADED not in variables or any("$" in value for value in variables.values()):
        return None
    request = {
        "arguments": [a for a in arguments if not a.startswith((_CONTEXT, _LANGUAGE))],
        "environment": {**os.environ, **variables},
        "folder": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.path.join(folder, variables[PRELOADED]))
            message = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(connection, [message], [0, 1, 2])
            connection.sendall(message[sent:])
            answer = connection.makefile("rb")
            if not answer.readline().strip():  # the server has ended, or its environment differs
                return None
        except OSError:
            return None
        return int(answer.readline() or 1)


def main() -> None:
    """Start the worker of this process's command line."""
    arguments = sys.argv[1:]
    status = _fork(arguments)
    if status is not None:
        sys.exit(status if status >= 0 else 128 - status)
    worker = next(a for a in arguments if a.endswith("default_worker.py"))
    original = os.path.join(os.path.dirname(worker), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, original, *arguments])


if __name__ == "__main__":
    main()
