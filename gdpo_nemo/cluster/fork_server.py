"""Processes that import large libraries once and fork the workers of a run on this machine's CPUs.

A rank imports torch, transformers and Megatron, and an engine torch, transformers and vLLM, which takes seconds of CPU
time. The fork server imports what both need, and then forks a server for ranks and one for engines. These import the
rest and fork each worker. All this happens while the driver reads its data and starts Ray.

Only runs on CPUs use fork servers, because CUDA does not work in a fork of a process that has used it. The servers run
no threads. ``worker_launcher`` requests the workers. If a server has ended, the launcher starts the worker without it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gdpo_nemo.cluster.worker_launcher import FOLDER
from gdpo_nemo.utils.progress import hidden, import_transformers, importing, quiet_torch

_BACKLOG = 128
_REQUEST_LIMIT_S = 60.0
"""Time limit for a launcher to send its request, which it does at once."""
_READ_AT_IMPORT = re.compile(r"OMP_WAIT_POLICY$|PYTHONPATH$|TORCHDYNAMO_|TRANSFORMERS_|HF_")
"""Environment variables that libraries read when they are imported. A worker with other values cannot be forked.
OMP_NUM_THREADS is not one of them, because ranks and engines set their number of threads themselves."""


def _import_for_both() -> None:
    quiet_torch()
    import_transformers()
    # Ray cannot connect in a fork of a process that has imported it, so import only what it imports.
    for name in ("torch", "google.protobuf.message", "jsonschema", "pyarrow", "pydantic", "requests"):
        importlib.import_module(name)


def _import_for_ranks() -> None:
    from gdpo_nemo.megatron import runtime

    runtime.prepare()
    for name in ("gdpo_nemo.megatron.policy", "gdpo_nemo.megatron.checkpoint", "torch._dynamo"):
        importlib.import_module(name)


def _import_for_engines() -> None:
    from gdpo_nemo.generation import vllm_core

    with hidden("ray"):  # which vLLM would import
        vllm_core.import_vllm()
        for name in ("gdpo_nemo.weights.vllm_receiver", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"):
            importlib.import_module(name)


RANK = "rank"
ENGINE = "engine"
_IMPORTS: dict[str, Callable[[], None]] = {RANK: _import_for_ranks, ENGINE: _import_for_engines}
"""Imports of each kind of worker, by the name of its server."""


@contextlib.contextmanager
def fork_server(folder: Path, ahead: Collection[str] | None) -> Iterator[None]:
    """Run a fork server for the workers that local Ray sessions start in this block.

    Args:
        folder: folder for the sockets.
        ahead: kinds of workers whose libraries are imported at once, without waiting for a request. The libraries that
            all kinds need are also imported at once, unless this argument is None.
    """
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in _IMPORTS]
        for name, listener in zip(_IMPORTS, listeners):
            listener.bind(str(folder / name))
            listener.listen(_BACKLOG)
        numbers = [listener.fileno() for listener in listeners]
        process = subprocess.Popen(
            # -P: a file of the working directory must not hide a library.
            [sys.executable, "-P", "-m", __name__, "-" if ahead is None else ",".join(ahead), *map(str, numbers)],
            stdin=subprocess.PIPE,  # without their driver, the servers end
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # an import that fails here fails again in the worker, which reports it
            env={**os.environ, **thread_environment(1), "CUDA_VISIBLE_DEVICES": ""},
            pass_fds=numbers,
            start_new_session=True,  # Ctrl-C in the terminal must not end the workers
        )
    os.environ[FOLDER] = str(folder)
    try:
        yield
    finally:
        del os.environ[FOLDER]
        os.killpg(process.pid, signal.SIGTERM)  # all servers, but no worker, which has its own group
        process.communicate()


def thread_environment(threads: int) -> dict[str, str]:
    """Return environment variables that limit a process to ``threads`` compute threads, which sleep while they wait.

    By default, OpenMP threads spin while they wait. With several ranks on a node, these threads would take cores from
    the rank that computes.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONWARNINGS": "ignore",
    }


@dataclass(frozen=True)
class _Request:
    """Program to run, and its surroundings, as a launcher requests them."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: Sequence[int]
    """Standard input, output and error."""

    @classmethod
    def read(cls, connection: socket.socket) -> _Request:
        """Read a request, which is a line of JSON.

        Raises:
            OSError, ValueError: if the launcher has ended.
        """
        connection.settimeout(_REQUEST_LIMIT_S)
        message, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        while not message.endswith(b"\n"):
            more = connection.recv(1 << 16)
            if not more:
                break
            message += more
        return cls(**json.loads(message), files=files)

    def become(self, changes: Mapping[str, str]) -> None:
        """Give this process the files, environment and working directory of the launcher.

        Args:
            changes: environment variables that imports have set. The launcher's variables take precedence over these.
        """
        for number, file in enumerate(self.files):
            os.dup2(file, number)
            os.close(file)
        os.setpgid(0, 0)  # Ray kills a worker's process group with the worker
        os.environ.clear()
        os.environ.update({**changes, **self.environment})
        os.chdir(self.folder)

    def run(self) -> None:
        """Run the program of the arguments in this process."""
        sys.argv = self.arguments
        sys.path.insert(0, os.path.dirname(self.arguments[0]))
        runpy.run_path(self.arguments[0], run_name="__main__")


class _Server:
    """Forks a worker for each request, until standard input has ended and no worker is left."""

    def __init__(self, listener: socket.socket, before: Mapping[str, str]):
        self._listener = listener
        self._environment = _read_at_import(before)
        self._changes = {name: value for name, value in os.environ.items() if before.get(name) != value}
        self._connections: dict[int, socket.socket] = {}
        """Connection to the launcher of each worker, by the worker's process id."""
        self._open = True
        os.close(os.pidfd_open(os.getpid()))  # if the kernel has no pidfds, fail before a worker exists
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._close)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> _Request | None:
        """Return the request in a new worker, and None in the server when it ends."""
        while self._open or self._connections:
            for key, _ in self._selector.select():
                request: _Request | None = key.data()
                if request is not None:
                    return request
        return None

    def _close(self) -> None:
        self._open = False
        self._selector.unregister(sys.stdin)

    def _accept(self) -> _Request | None:
        connection = self._listener.accept()[0]
        try:
            request = _Request.read(connection)
        except (OSError, ValueError):  # the launcher has been killed
            connection.close()
            return None
        if _read_at_import(request.environment) != self._environment:
            connection.close()
        else:
            worker = os.fork()
            if worker == 0:
                # The worker reports itself, so that no second worker is started if the server dies at this moment.
                connection.sendall(b"%d\n" % os.getpid())
                self._selector.close()
                for other in (self._listener, connection, *self._connections.values()):
                    other.close()
                request.become(self._changes)
                return request
            self._watch(worker, connection)
        for file in request.files:
            os.close(file)
        return None

    def _watch(self, worker: int, connection: socket.socket) -> None:
        """Wait for the worker and for its launcher."""
        self._connections[worker] = connection
        ended = os.pidfd_open(worker)
        self._selector.register(ended, selectors.EVENT_READ, partial(self._ended, worker, ended))
        self._selector.register(connection, selectors.EVENT_READ, partial(self._abandoned, worker))

    def _ended(self, worker: int, pidfd: int) -> None:
        """Pass the worker's exit status on to its launcher."""
        status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        connection = self._connections.pop(worker)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % status)
        connection.close()

    def _abandoned(self, worker: int) -> None:
        """Kill the worker, because its launcher has been killed."""
        self._selector.unregister(self._connections[worker])
        os.kill(worker, signal.SIGKILL)


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _READ_AT_IMPORT.match(name)}


def _requested(listeners: Sequence[socket.socket]) -> bool:
    """Wait for the first request, and return False if standard input ends before it."""
    return sys.stdin not in select.select([sys.stdin, *listeners], [], [])[0]


def _main(ahead: str, *numbers: str) -> None:
    listeners = [socket.socket(fileno=int(number)) for number in numbers]
    if ahead == "-" and not _requested(listeners):
        return
    before = dict(os.environ)
    with importing():
        _import_for_both()
    servers = []
    for listener, name in zip(listeners, _IMPORTS):
        server = os.fork()
        if server == 0:
            for other in listeners:
                if other is not listener:
                    other.close()
            if name in ahead.split(",") or _requested([listener]):
                _serve(listener, name, before)
            return
        servers.append(server)
    for listener in listeners:
        listener.close()
    for server in servers:
        os.waitpid(server, 0)


def _serve(listener: socket.socket, name: str, before: Mapping[str, str]) -> None:
    """Serve requests until standard input ends. In a worker, run its program."""
    if name == ENGINE:
        from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT

        os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT)
        before = {**before, **ENVIRONMENT, **CPU_ENVIRONMENT}
    with importing():
        _IMPORTS[name]()
    request = _Server(listener, before).serve()
    if request is not None:
        sys.modules["numpy"].random.seed()  # otherwise, all workers would draw the same numbers
        request.run()


if __name__ == "__main__":
    _main(*sys.argv[1:])
