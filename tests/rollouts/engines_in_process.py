"""Engines of a script, in threads of the test: what the real fleet, its clients and the scheduler talk to here.

They have the interface of ``generation.engine.Engine``. Ray and vLLM are what is left out; tests/cluster has them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray.exceptions import ActorDiedError

from gdpo_nemo.cluster import engine_client as clients, fleet as fleets, host_link
from gdpo_nemo.config.schema import Config
from gdpo_nemo.generation.requests import Completion, EngineReport, FinishedRequest


class ScriptedEngine:
    """Answers a request after ``script.delay(engine, request)`` seconds; counts what it was given.

    A completion's tokens follow from seed and version alone. In-flight updates split it where they come.
    """

    def __init__(self, index: int, script: Script):
        self.index = index
        self.script = script
        self.version = -1
        self.dead = False
        self.held = False
        self.full = False
        """Whether it says that its KV cache is full and requests wait for it."""
        self.batches: list[list[int]] = []
        """Seeds of each ``submit``, in order."""
        self.samplings: list[Any] = []
        """Sampling of each request, in order."""
        self.aborted: list[str] = []
        self._running: dict[str, tuple[Any, float, list[tuple[int, int]]]] = {}
        self._lock = threading.Condition()

    def ready(self):
        while self.index in self.script.unplaced:
            time.sleep(0.005)
        self._live()

    def process_location(self):
        return "here", 1000 + self.index

    def submit(self, requests):
        with self._lock:
            self.batches.append([request.seed for request, _ in requests.values()])
            self.samplings += [sampling for _, sampling in requests.values()]
            for name, (request, _) in requests.items():
                due = time.monotonic() + self.script.delay(self.index, request)
                self._running[name] = (request, due, [])
            self._lock.notify_all()

    def poll(self, wait_s):
        deadline = time.monotonic() + wait_s
        while True:
            self._live()
            now = time.monotonic()
            with self._lock:
                done = [] if self.held else [name for name, (_, due, _) in self._running.items() if due <= now]
                finished = [FinishedRequest(name, self._completion(name)) for name in done]
                if finished or now >= deadline:
                    waiting, kv_used = (1, 1.0) if self.full else (0, 0.0)
                    return EngineReport(finished, self.version, len(self._running), waiting, kv_used, now, 0, 0)
            time.sleep(0.001)

    def _completion(self, name):
        request, _, spans = self._running.pop(name)
        spans = [*spans, (self.version, 3 - sum(tokens for _, tokens in spans))]
        ids = np.array([request.seed % 997, self.version + 2, len(spans)], np.int32)
        return Completion(ids, np.zeros(3, np.float32), "stop", tuple(spans))

    def drawn(self, name):
        self._live()
        with self._lock:
            return [self._running[name][0].seed % 997] if name in self._running else []

    def abort(self, names):
        with self._lock:
            self.aborted += [name for name in names if self._running.pop(name, None)]

    def prepare_update(self, manifest, kv):
        self._live()
        if kv == "drain":
            while self._running:
                self._live()
                time.sleep(0.001)
        self.held = True

    def update_weights(self, version):
        self._live()
        with self._lock:
            for _, _, spans in self._running.values():
                if not spans:  # a token of the old weights, the rest of the new
                    spans.append((self.version, 1))
            self.version = version
            self.held = False
        return version

    def score(self, sequences):
        self._live()
        return [np.zeros(len(ids) - 1, np.float32) for ids in sequences]

    def sleep(self):
        self._live()

    def wake(self, what):
        self._live()

    def _live(self):
        if self.dead:
            raise ActorDiedError()


class Script:
    """What the engines of a fleet do, and those that there were."""

    def __init__(self, delay: Callable[[int, Any], float] = lambda engine, request: 0.0):
        self.delay = delay
        self.engines: list[ScriptedEngine] = []
        """Every one that was started, replacements included."""
        self.unplaced: set[int] = set()
        """Engines that wait for a node to start on."""
        self.stillborn: set[int] = set()
        """Engines that die as soon as they are started."""

    def now(self, index: int) -> ScriptedEngine:
        """The newest engine of a number."""
        return next(engine for engine in reversed(self.engines) if engine.index == index)

    def start(self, index: int) -> Actor:
        engine = ScriptedEngine(index, self)
        engine.dead = index in self.stillborn
        self.engines.append(engine)
        return Actor(engine)


class _Reference:
    def __init__(self, future: Future):
        self._future = future

    def future(self) -> Future:
        return self._future


_threads = ThreadPoolExecutor(64)


class Actor:
    """``actor.method.remote(...)`` in a thread."""

    def __init__(self, engine: ScriptedEngine):
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        engine = self.engine
        method = engine.ready if name == "__ray_ready__" else getattr(engine, name)
        return SimpleNamespace(remote=lambda *arguments: _Reference(_threads.submit(method, *arguments)))


class Weights:
    """A transport whose weights are a number."""

    manifest = None

    def __init__(self, version: int):
        self.version = version

    def send(self, engines):
        return [engine.update_weights.remote(self.version) for engine in engines.values()], []


class InProcessFleet(fleets.EngineFleet):
    """The real fleet over scripted engines."""

    def __init__(self, config: Config, script: Script, *placement_and_hosts: Any):
        self.script = script
        super().__init__(config, "nowhere", *placement_and_hosts)
        self.spawn(self.until(lambda: all(client.can_sample for client in self.clients))).result(120)

    def _start(self, index: int) -> Any:
        return self.script.start(index)

    def publish(self, version: int, kv: str = "drain") -> None:
        with self.delivering():
            self.update(Weights(version), version, kv)


def without_ray(monkeypatch) -> None:
    """Let clients and fleets end scripted engines instead of Ray's actors."""
    end = SimpleNamespace(
        kill=lambda actor: setattr(actor.engine, "dead", True), exceptions=SimpleNamespace(RayError=ActorDiedError)
    )
    monkeypatch.setattr(clients, "ray", end)
    monkeypatch.setattr(fleets, "ray", end)
    # Ray may run for other tests of this process, and would be asked for the places of scripted engines.
    for module in (fleets, host_link):
        monkeypatch.setattr(module, "answered", lambda refs: {})
