"""Worker process of the ``verifiers`` environment, which loads a package and plays its episodes.

The worker runs with the interpreter of the package's virtual environment, so this file and the adapters that it loads
import only the standard library and verifiers. The driver starts it as ``python -P worker.py READ WRITE`` with the
descriptors of two pipes. Each line on them is a JSON object. The standard streams belong to the package.

==========================================  =======================================================
request                                     reply
==========================================  =======================================================
``{"package", "args", ...}`` (first line)   ``{"result": description}``
``{"id", "method", "arguments"}``           ``{"id", "result"}``, in any order
==========================================  =======================================================

Any reply may have ``error`` in place of ``result``: the package or the request is faulty. The worker ends, together
with the processes that it started, when the driver closes its pipe or dies, or when the package blocks the event loop
for longer than the time limit of an episode. In the last case, the line ``{"blocked": place}`` precedes the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType, ModuleType
from typing import Any, TextIO
from urllib.parse import urlsplit

API_KEY = "GDPO_NEMO_POLICY_KEY"
"""Environment variable with the access token of the endpoint, from which clients of verifiers read it."""
NO_BUDGET = "max_tokens: the policy has already used"
"""Part of the endpoint's message if a conversation has used all of its turns or tokens."""
NO_ROOM = "exceeds the context length"
"""Part of the endpoint's message if a prompt is too long."""
_CLOSE_S = 5.0
"""Seconds that the package has to release its resources after the driver has closed its pipe."""
_TICK_S = 0.2

type Request = dict[str, Any]
type Requests = SimpleQueue[Request | None]
"""Requests of the driver, then None."""


@dataclass
class Policy:
    """The policy that plays the episodes, and the limits of the episodes."""

    url: str
    """Base URL of the OpenAI-compatible endpoint, which ends with /v1."""
    api_key: str
    temperature: float
    top_p: float
    slots: asyncio.Semaphore
    deadline_s: float
    model: str = "policy"

    @contextlib.asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Wait for a free slot and limit the time of the block, which plays and scores one episode.

        Raises TimeoutError if the block exceeds ``deadline_s`` seconds.
        """
        async with self.slots:
            try:
                async with asyncio.timeout(self.deadline_s) as limit:
                    yield
            except TimeoutError as error:
                if limit.expired():
                    raise TimeoutError(f"the episode exceeded {self.deadline_s:g} s") from error
                raise


def score(value: Any) -> float | None:
    """Convert the value of a reward function. None and NaN ("not applicable") become None.

    Raises:
        ValueError: if the value is infinite or not a number. The message completes "reward function NAME returned".
    """
    if value is None:
        return None
    try:
        number = math.inf if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.inf
    if math.isinf(number):
        raise ValueError(f"{str(value)[:40]!r} of type {type(value).__name__}, which is not a finite number")
    return None if math.isnan(number) else number


def one_line(error: BaseException) -> str:
    """Return the type and the message of an error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def children(process: int) -> Iterator[int]:
    """Return the ids of all descendants of a process, children after their own descendants."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            # The name of the program, in parentheses, may contain spaces.
            fields = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(entry))

    def below(parent: int) -> Iterator[int]:
        for child in parents.get(parent, ()):
            yield from below(child)
            yield child

    return below(process)


def end_children(process: int) -> None:
    """Kill all descendants of a process. Tool servers and programs have sessions of their own."""
    for child in list(children(process)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def load_adapter(package: str, args: dict[str, Any]) -> Any:
    """Import a package and build its adapter, for the API that the package uses.

    Raises:
        Exception: the error of the package, or ImportError if verifiers is not installed.
    """
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"verifiers is not installed in {sys.prefix}; install verifiers==0.4.0 there") from None
    sys.path.append(os.getcwd())  # -P removes it, but packages in development may be in the folder of the run
    name = package.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()  # OWNER/NAME@VERSION of the hub
    built_in = f"verifiers.v1.tasksets.{name}"
    module = next(filter(_exists, (built_in, name)), None)
    if module is None:
        raise ImportError(f"no module {name!r} in {sys.prefix} with verifiers {version}; install the package there")
    try:
        is_legacy = hasattr(importlib.import_module(module), "load_environment")
    except (ImportError, AttributeError) as error:  # AttributeError: the other API
        raise ImportError(f"{error} (verifiers {version})") from error
    if not is_legacy and not version.startswith("0.4."):
        raise ImportError(f"a package without load_environment requires verifiers 0.4, found {version}")
    return own_module("adapter_legacy" if is_legacy else "adapter_v1").Adapter(package, args)


def _exists(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):  # verifiers before 0.2 has no v1
        return importlib.util.find_spec(module) is not None
    return False


def own_module(name: str) -> ModuleType:
    """Import a file of this folder. The folder is not on ``sys.path``, where its files could hide other modules."""
    spec = importlib.util.spec_from_file_location(f"gdpo_nemo_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Server:
    """Answers the driver's requests with an adapter."""

    def __init__(self, adapter: Any, requests: Requests, reply: Callable[[dict[str, Any]], None], limits: Request):
        self._adapter = adapter
        self._requests = requests
        self._reply = reply
        self._deadline_s = float(limits["deadline_s"])
        self._slots = asyncio.Semaphore(int(limits["concurrency"]))
        self._last_tick = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer requests until the driver closes its pipe."""
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()
        ticks = asyncio.create_task(self._tick())
        threading.Thread(target=self._read, args=(loop, closed), daemon=True).start()
        threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True).start()
        await closed.wait()
        ticks.cancel()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            await self._adapter.close()

    async def _tick(self) -> None:
        while True:
            self._last_tick = time.monotonic()
            await asyncio.sleep(_TICK_S)

    def _read(self, loop: asyncio.AbstractEventLoop, closed: asyncio.Event) -> None:
        for request in iter(self._requests.get, None):
            loop.call_soon_threadsafe(self._start, request)
        loop.call_soon_threadsafe(closed.set)

    def _watch(self, main: int) -> None:
        """Thread that ends the process if the package blocks the event loop, because no episode can then end."""
        while time.monotonic() - self._last_tick < self._deadline_s:
            time.sleep(_TICK_S)
        self._reply({"blocked": place_of(sys._current_frames().get(main))})
        end()

    def _start(self, request: dict[str, Any]) -> None:
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: dict[str, Any]) -> None:
        try:
            methods: dict[str, Callable[..., Awaitable[Any]]] = {"rows": self._rows, "play": self._play}
            method = methods[request["method"]]
            answer = {"result": await method(**request["arguments"])}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": one_line(error)}
        self._reply({"id": request["id"], **answer})

    async def _rows(self, **arguments: Any) -> list[dict[str, Any]]:
        # Loading a dataset may take long, and some libraries run an event loop for it.
        rows: list[dict[str, Any]] = await asyncio.to_thread(self._adapter.rows, **arguments)
        return rows

    async def _play(self, tasks: list[dict[str, Any]], **policy: Any) -> list[dict[str, Any]]:
        os.environ[API_KEY] = policy["api_key"]
        for name in ("no_proxy", "NO_PROXY"):  # a proxy cannot reach the endpoint and the servers of the library
            hosts = {urlsplit(policy["url"]).hostname or "", "127.0.0.1", *os.environ.get(name, "").split(",")}
            os.environ[name] = ",".join(sorted(hosts))
        limited = Policy(**policy, slots=self._slots, deadline_s=self._deadline_s)
        episodes: list[dict[str, Any]] = await self._adapter.play(tasks, limited)
        return episodes


def run_module(module: str, environment: dict[str, str], folder: str, log: str, started: Any) -> None:
    """Run a module as a program in a new session. The forked process of a tool server calls this function."""
    os.setsid()  # before ``started``, because the library signals the process group
    started.send(True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with open(log, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def place_of(frame: FrameType | None) -> str:
    """Return the innermost function of a stack that is not part of an installed library or the standard library."""
    places = []
    for found, line in traceback.walk_stack(frame):
        code = found.f_code
        places.append((code.co_filename, f"{code.co_name} ({Path(code.co_filename).name}:{line})"))
    library = os.path.dirname(os.__file__)
    own = [place for file, place in places if not file.startswith((library, sys.prefix, "<frozen", __file__))]
    return [*own, *(place for _, place in places), "a C function"][0]


def end() -> None:
    """End this process and its descendants at once."""
    end_children(os.getpid())
    os._exit(0)


def read(pipe: TextIO, requests: Requests) -> None:
    """Read all requests, then end the process. A thread does this, because the package may block the main thread."""
    for line in pipe:
        requests.put(json.loads(line))
    requests.put(None)
    time.sleep(_CLOSE_S)
    end()


def main() -> None:
    """Build the adapter, then answer requests until the driver closes its pipe."""
    sys.modules["gdpo_nemo_worker"] = sys.modules["__main__"]  # for the adapters
    pipe, replies = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w", buffering=1)
    requests: Requests = SimpleQueue()
    threading.Thread(target=read, args=(pipe, requests), daemon=True).start()
    lock = threading.Lock()

    def reply(answer: dict[str, Any]) -> None:
        with lock:
            replies.write(json.dumps(answer) + "\n")

    first = requests.get()
    if first is None:
        return
    try:
        # No event loop runs yet, so a package may run one while it is imported.
        adapter = load_adapter(first["package"], first["args"])
        description = adapter.describe()
    except BaseException as error:  # also SystemExit
        traceback.print_exc()
        reply({"error": one_line(error)})
        return
    reply({"result": description})
    asyncio.run(Server(adapter, requests, reply, first).serve())
    end()


if __name__ == "__main__":
    main()
