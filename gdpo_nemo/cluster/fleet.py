"""Driver side of the vLLM engines: distribute requests, update weights, replace dead engines.

The thread "rollouts" runs an event loop with the tasks of the rollouts and one ``EngineClient.serve`` per engine. All
coroutines run on this loop. All other threads use the blocking methods.

* ``ready`` waits until every client is READY, UPDATING or ASLEEP.
* ``submit`` does not wait. The requests of one loop iteration are sent together.
* ``sample`` and ``generate`` submit requests and wait until ``EngineClient.serve`` has polled the completions.
* ``rooms`` waits until a READY client with weights of the required version has a free slot.
* ``update`` waits until every live engine has the weights (``_hold`` and ``_send``, repeated by ``_deliver``).
* ``score``, ``sleep`` and ``wake`` wait until every called engine has answered or died.
* After a death, ``EngineClient.serve`` calls ``reassign`` (unless the run is exact), waits until ``awake`` is set, and
  calls ``deliver``, which waits for the lock ``_delivering``.

The lock ``_delivering`` prevents a delivery to a replacement during an update: ``WeightSync`` holds it from
``Transport.prepare`` to the end of ``update``. If ``EngineClient.serve`` raises an error other than the death of an
engine, ``fail`` raises it in every pending and later request.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from gdpo_nemo.cluster.engine_actor import start_engine
from gdpo_nemo.cluster.engine_client import REPLACEMENTS, START_S, EngineClient, EngineState, PendingRequest, died
from gdpo_nemo.cluster.host_link import HostLinks
from gdpo_nemo.cluster.reservation import Placement, place_on_this_machine
from gdpo_nemo.cluster.session import WorkerDied, answer, answered, gather, ray
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.images import Images
from gdpo_nemo.generation.requests import Completion, CompletionBatch, EngineRequest, SampleRequest, Sampling
from gdpo_nemo.utils.errors import START_AGAIN, GdpoError, InfrastructureFailed, RunError
from gdpo_nemo.utils.progress import phase
from gdpo_nemo.utils.waits import waiting
from gdpo_nemo.weights.copies import BaseMissing
from gdpo_nemo.weights.manifest import PeerLost
from gdpo_nemo.weights.transports.base import Transport, errors_named

METRICS = {
    "engines/idle": ("share", "Share of the step during which an engine did not decode, mean over the engines"),
    "engines/idle_max": ("share", "engines/idle of the engine that was idle the longest"),
    "engines/requests": ("samples", "Running and waiting requests when the batch was complete, mean over the engines"),
    "engines/kv_used": ("share", "Share of the KV cache in use when the batch was complete, mean over the engines"),
    "engines/replaced": ("engines", "Engines that died and were replaced since the run started"),
}
_THREADS = 256
"""Maximum number of concurrent reward computations, environment steps and rollout functions."""
_UNAVAILABLE = (EngineState.LOST, EngineState.DEAD)
Result = TypeVar("Result")


class EngineFleet:
    """vLLM engines in Ray actors. The constructor starts the engines, and ``ready`` waits for them.

    A dead engine is replaced and gets the newest weights. Only its unfinished samples are repeated, with their seeds.
    The replacement repeats these samples if ``rollout.max_staleness`` is 0, so that they are identical. Otherwise the
    other engines repeat them. After more than ``REPLACEMENTS`` deaths without a completion, an engine is abandoned. If
    no engine is left, the run ends.

    Args:
        folder: Hugging Face folder of the model.
        devices: GPU of each policy rank, as in CUDA_VISIBLE_DEVICES, if engines share them (``Places.shared``).
        start_host: function that starts the rollout host of a node. None: the driver samples and verifies groups.
    """

    def __init__(
        self,
        config: Config,
        folder: str,
        placement: Placement | None = None,
        devices: Sequence[str] | None = None,
        start_host: Callable[[int], Any] | None = None,
    ):
        self._placement = placement or place_on_this_machine(config)
        self._timeout_s = config.rollout.generation_timeout_s
        self.exact = config.rollout.max_staleness == 0
        self._measured = time.monotonic()
        self.failure: GdpoError | None = None
        """Error that ended sampling permanently, or None."""
        self._events: list[str] = []
        self._spans: list[tuple[str, str, float, float]] = []
        self._weights: Transport | None = None
        """Transport of the newest weights, which is also used for replaced engines."""
        self._version = -1
        """Version of the newest weights."""
        self._delivering = threading.Lock()
        """Lock that is held during a delivery, because transports support only one delivery at a time."""
        self.loop = asyncio.new_event_loop()
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="rollouts")
        self.loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="rollouts")
        self._thread.start()
        self.awake = asyncio.Event()
        self._change = asyncio.Event()
        self._start_actor = partial(start_engine, config, folder, self._placement, devices or ())
        generation = config.policy.generation
        self.hosts = HostLinks(self._placement.places.engines, start_host, self.exact)
        self.clients: list[EngineClient] = []
        for index in range(generation.engines):
            client = EngineClient(
                index,
                self._start,
                generation.vllm_cfg.max_num_seqs,
                self._timeout_s,
                self,
                engines=generation.engines,
                host=self.hosts.of(index),
            )
            self.clients.append(client)
        self._serving = self.spawn(self._serve())

    def _start(self, index: int) -> Any:
        return self._start_actor(index)  # a method, so that tests can start other engines

    @property
    def _sampling(self) -> list[EngineClient]:
        """Clients that can sample."""
        return [client for client in self.clients if client.can_sample]

    @property
    def _available(self) -> list[EngineClient]:
        """Clients whose engines are neither lost nor abandoned."""
        return [client for client in self.clients if client.state not in _UNAVAILABLE]

    # -- for all threads except the loop thread ----------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def process_locations(self) -> dict[int, tuple[str, int]]:
        """Return (host name, process id) of every engine that has started, by engine number."""
        return answered({client.index: client.location for client in self.clients})

    def ready(self) -> None:
        """Wait until every engine can sample, is asleep or is abandoned. An engine that dies is replaced.

        Raises:
            RunError: if no engine is left, if an engine starts too slowly, or for an error other than a death.
        """
        states = (EngineState.READY, EngineState.UPDATING, EngineState.ASLEEP, *_UNAVAILABLE)

        def all_started() -> bool:
            for client in self.clients:
                client.request_weights()  # a replacement may wait for its first request
            return self.failure is None and all(client.state in states for client in self.clients)

        with phase("engines"), waiting("starting the vLLM engines", "engine", START_S):
            self.spawn(self.until(all_started)).result()

    def generate(
        self, requests: Sequence[SampleRequest], sampling: Sampling, engine: int | None = None
    ) -> CompletionBatch:
        """Sample the requests and wait for all completions. Raises RunError if this fails permanently.

        Args:
            engine: number of the engine for all requests. None distributes the requests evenly, with consecutive
                requests on the same engine so that they share its prefix cache.
        """
        return self.spawn(self.sample_all(requests, sampling, engine)).result()

    def update(self, weights: Transport, version: int, kv: str = "drain") -> None:
        """Send the weights that a transport has prepared as ``version`` to every engine. Call it inside ``delivering``.

        Args:
            kv: treatment of requests in flight (``rollout.kv``).
        """
        self._weights = weights
        self._version = version
        self.spawn(self._update(kv)).result()

    @contextlib.contextmanager
    def delivering(self) -> Iterator[None]:
        """Prevent deliveries to replaced engines while the block prepares and sends new weights."""
        with self._delivering:
            yield

    def score(self, sequences: Sequence[np.ndarray], images: Sequence[Images] = ()) -> dict[int, list[np.ndarray]]:
        """Return, by engine number, the log-probs [tokens - 1] of each sequence from all engines that can sample.

        Args:
            images: images of each sequence, or empty if no sequence has images.
        """
        return self.spawn(self._score(sequences, images)).result()

    def sleep(self) -> None:
        """Make the engines release their memory."""
        self.spawn(self._sleep()).result()

    def wake(self, what: str) -> None:
        """Make the sleeping engines reallocate their memory for ``what``: ``weights`` or ``kv_cache``."""
        self.spawn(self._wake(what)).result()

    def take_spans(self) -> list[tuple[str, str, float, float]]:
        """Return the weight updates since the last call as (client, name, start, end), in seconds since the epoch."""
        taken, self._spans = self._spans, []
        return taken

    def take_events(self) -> list[str]:
        """Return the engine events since the last call, one sentence per event."""
        taken, self._events = self._events, []
        return taken

    def all_ready(self) -> bool:
        """Return whether all engines can sample and no engine is being updated."""
        return self.failure is None and all(client.state is EngineState.READY for client in self.clients)

    def forget_weights(self) -> None:
        """Prepare for another run, whose weights come from another policy and may have a lower version."""
        self._weights = None
        self._version = -1
        for client in self.clients:
            client.version = -1

    def close(self) -> None:
        """Stop the engine processes and the event loop."""
        self.spawn(self._end()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self._executor.shutdown(wait=False, cancel_futures=True)  # a thread may still wait for a lost process
        for client in self.clients:
            ray.kill(client.actor)
        self.hosts.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- on the event loop ---------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self.awake.set()
        await asyncio.gather(*(self._serve_client(client) for client in self.clients))

    async def _serve_client(self, client: EngineClient) -> None:
        try:
            await client.serve()
        except Exception as error:  # an unreported exception would leave requests waiting forever
            self.fail(error if isinstance(error, GdpoError) else RunError(f"engine {client.index}: {error!r}"))

    def fail(self, error: GdpoError) -> None:
        """End sampling permanently, and raise ``error`` in all pending and later requests."""
        self.failure = self.failure or error
        for client in self.clients:
            client.fail(self.failure)
        self.changed()

    def changed(self) -> None:
        """Wake the tasks that wait in ``until``."""
        self._change.set()
        self._change = asyncio.Event()

    async def until(self, holds: Callable[[], Result | None]) -> Result:
        """Wait for a true result of ``holds``, which checks the clients. Raises RunError if sampling has failed."""
        while not (result := holds()):
            if self.failure is not None:
                raise self.failure
            await self._change.wait()
        return result

    def least_loaded(self) -> int:
        """Return the engine with the fewest requests, of those that can sample if there are any."""
        if self.failure is not None:
            raise self.failure
        return min(self._sampling or self._available, key=lambda client: (client.load, client.index)).index

    async def rooms(self, version: int, samples: int, groups: int = 1) -> list[int]:
        """Wait for an engine with a free slot and weights of ``version`` or newer, and reserve ``samples`` slots for
        each of at most ``groups`` groups. Return the engine number of each group for which there was room.

        Call ``EngineClient.keep_promise`` for each sample that is submitted or cancelled.
        """

        def reserve() -> list[int]:
            heap = [(client.load, client.index) for client in self.clients]
            heapq.heapify(heap)
            found: list[int] = []
            while heap and len(found) < groups:
                client = self.clients[heap[0][1]]
                if client.has_room(version):
                    client.promised += samples
                    found.append(client.index)
                    heapq.heapreplace(heap, (client.load, client.index))
                else:
                    heapq.heappop(heap)
            return found

        return await self.until(reserve)

    @property
    def version(self) -> int:
        """Version of the newest weights sent to the engines."""
        return self._version

    def measure(self) -> dict[str, float]:
        """Return the ``engines/...`` metrics for the time since the last call."""
        now = time.monotonic()
        wall = max(now - self._measured, 1e-9)
        self._measured = now
        busy = [client.busy_since() / wall for client in self.clients]
        reports = [client.report for client in self.clients]
        return {
            "engines/idle": 1 - min(1.0, float(np.mean(busy))),
            "engines/idle_max": 1 - min(1.0, min(busy)),
            "engines/requests": float(np.mean([r.running + r.waiting for r in reports])),
            "engines/kv_used": float(np.mean([r.kv_used for r in reports])),
            "engines/replaced": float(sum(client.replaced for client in self.clients)),
        }

    def submit(self, request: EngineRequest, sampling: Sampling, engine: int | None = None) -> PendingRequest:
        """Send a request to an engine. Requests of one event-loop iteration are sent together, in order.

        Raises RunError if sampling has failed permanently, or if the engines sleep.

        Args:
            engine: preferred engine; None chooses the engine with the fewest requests.
        """
        return self._client(engine).submit(request, sampling)

    async def answer_of(self, pending: PendingRequest) -> tuple[Any, int]:
        """Return a request's completion and the number of its engine. Cancelling this coroutine drops the request."""
        try:
            return await pending.answer, pending.client.index
        except asyncio.CancelledError:
            pending.client.abort(pending)
            raise

    async def sample(
        self, request: SampleRequest, sampling: Sampling, engine: int | None = None
    ) -> tuple[Completion, int]:
        """Sample a request, and return the completion and the number of its engine. See ``submit``."""
        return await self.answer_of(self.submit(request, sampling, engine))

    async def sample_all(
        self, requests: Sequence[SampleRequest], sampling: Sampling, engine: int | None = None
    ) -> CompletionBatch:
        """Sample the requests and return all completions. See ``generate``."""
        start = time.monotonic()
        even = [index * len(self.clients) // len(requests) for index in range(len(requests))]
        engines = even if engine is None else [engine] * len(requests)
        results = await asyncio.gather(*(self.sample(r, sampling, n) for r, n in zip(requests, engines)))
        completions = [completion for completion, _ in results]
        return CompletionBatch(completions, min(c.version for c in completions), time.monotonic() - start)

    def _check_awake(self) -> None:
        if not self.awake.is_set():
            raise RunError("the engines cannot sample: they are asleep")

    def _client(self, engine: int | None) -> EngineClient:
        if self.failure is not None:
            raise self.failure
        self._check_awake()
        if engine is not None:
            client = self.clients[engine]
            if client.can_sample or (self.exact and client.state not in _UNAVAILABLE):
                return client
        return self.clients[self.least_loaded()]

    def note(self, line: str) -> None:
        """Record an event for ``take_events``."""
        self._events.append(line)

    def reassign(self, client: EngineClient, reason: str) -> None:
        """Move a client's requests to other clients, or leave them for its replacement. Fail if no engine is left."""
        others = [other for other in self._sampling if other is not client]
        if not self._available:
            self.fail(InfrastructureFailed(f"no engine is left: engine {client.index}: {reason}{START_AGAIN}"))
            return
        if not others and client.state in _UNAVAILABLE:
            others = self._available
        if not others:
            return
        # Move all requests of a prompt to the same engine, for its prefix cache.
        target: dict[int, EngineClient] = {}
        for pending in client.take_pending():
            key = id(pending.request.prompt_ids)
            if key not in target:
                target[key] = min(others, key=lambda other: (other.load, other.index))
            target[key].adopt(pending)

    def lost_node(self, client: EngineClient) -> str | None:
        """Return the address of the engine's node if the node has left the cluster, else None. This call blocks."""
        node = self._placement.places.engines[client.index]
        return self._placement.addresses[node] if self._placement.is_lost(node) else None

    async def deliver(self, client: EngineClient) -> None:
        """Send the newest weights to a replaced engine, unless it already has them or no weights were sent yet."""
        if self._weights is None or client.version == self._version:
            return
        await asyncio.to_thread(self._delivering.acquire)
        try:
            if client.version != self._version:
                await self._deliver([client], "drain")
                if client.version != self._version:
                    raise WorkerDied(f"updating the weights of engine {client.index}: it died")
        finally:
            self._delivering.release()

    async def _update(self, kv: str) -> None:
        clients = [client for client in self._available if client.state is not EngineState.STARTING]
        for client in clients:
            if client.can_sample:
                client.enter(EngineState.UPDATING)
        start = time.time()
        await self._deliver(clients, kv)
        name = f"weights {self._version}"
        self._spans += [(f"engine {client.index}", name, start, time.time()) for client in clients]
        for client in clients:
            if client.state is EngineState.UPDATING:
                client.enter(EngineState.READY)
            client.request_weights()

    async def _deliver(self, clients: Sequence[EngineClient], kv: str) -> None:
        """Send the newest weights to engines, and repeat this for live engines that did not receive the weights."""
        missing = list(clients)
        failures = 0
        while stopped := await self._hold(missing, kv):
            missing = await self._send(stopped)
            # ``EngineClient`` counts deaths. Count only rounds that failed although all engines are alive.
            failures += bool(missing) and len(missing) == len(stopped)
            if failures > REPLACEMENTS:
                raise InfrastructureFailed(f"new weights did not reach the engines in {failures} attempts")

    async def _hold(self, clients: Sequence[EngineClient], kv: str) -> list[EngineClient]:
        """Stop the engines between two steps and let them check the names in the manifest. Return the live engines.

        The sender starts after this method, because draining an engine may take longer than the sender's time limit.
        """
        assert self._weights is not None
        actors = _actors(clients)
        refs = self.hosts.call(actors, "prepare_update", self._weights.manifest, kv)
        answers = await self._answers(clients, refs, "updating the engines' weights")
        # An engine may have died after its answer, while another engine was draining. Replacements have no model yet.
        return [c for c, result in zip(clients, answers) if not died(result) and c.actor is actors[c.index]]

    async def _send(self, clients: Sequence[EngineClient]) -> list[EngineClient]:
        """Send the weights once, and return the clients of live engines that did not receive the weights."""
        weights = self._weights
        assert weights is not None
        actors = _actors(clients)
        handles = self.hosts.handles(actors)

        def send() -> tuple[list[Any], list[Any]]:
            with errors_named(type(weights), "send"):
                return weights.send(handles)

        refs, sent = await asyncio.to_thread(send)
        refs = self.hosts.make_deferred(refs)
        missing = []
        if sent:
            try:
                await asyncio.to_thread(gather, sent, "sending weights", self._timeout_s, "policy")
            except PeerLost:  # the answers below show which engine was lost
                missing = list(clients)
        answers = await self._answers(clients, refs, "updating the engines' weights")
        for client, result in zip(clients, answers):
            # An engine may have died after its answer, while this method waited for slower engines. Skip dead engines:
            # their replacements request the weights themselves.
            if died(result) or client.actor is not actors[client.index]:
                missing = [other for other in missing if other is not client]
            elif isinstance(result, int):
                client.version = result
            elif client not in missing:
                missing.append(client)
            if isinstance(result, BaseMissing):
                self.note(f"engine {client.index} gets all weights: {result}")
        return missing

    async def _score(
        self, sequences: Sequence[np.ndarray], images: Sequence[Images] = ()
    ) -> dict[int, list[np.ndarray]]:
        self._check_awake()
        arguments = (list(sequences), list(images)) if any(images) else (list(sequences),)
        dead: list[Any] = []

        def working() -> list[EngineClient]:
            # Request the weights after every state change, because a client clears the request when its engine dies.
            for client in self.clients:
                client.request_weights()
            return [client for client in self._sampling if client.actor not in dead]

        while True:  # repeat with the replacements if all called engines died
            await self.until(lambda: bool(working()))
            clients = working()
            actors = _actors(clients)
            refs = self.hosts.call(actors, "score", *arguments)
            answers = await self._answers(clients, refs, "scoring sequences in the engines")
            scored = {}
            for client, scores in zip(clients, answers):
                if not died(scores):
                    scored[client.index] = scores
            if scored:
                return scored
            dead += actors.values()

    async def _sleep(self) -> None:
        self.awake.clear()
        await self._all("sleep", EngineState.ASLEEP, self._sampling)

    async def _wake(self, what: str) -> None:
        asleep = [client for client in self.clients if client.state is EngineState.ASLEEP]
        await self._all("wake", EngineState.READY if what == "kv_cache" else EngineState.ASLEEP, asleep, what)
        if what == "kv_cache":
            self.awake.set()

    async def _answers(self, clients: Sequence[EngineClient], refs: Sequence[Any], what: str) -> list[Any]:
        """Return the result or exception of one call per engine. Each wait is registered under the engine's name."""

        async def wait_for(client: EngineClient, ref: Any) -> Any:
            with waiting(what, f"engine {client.index}", self._timeout_s):
                return await answer(ref, what, self._timeout_s)

        return await asyncio.gather(*map(wait_for, clients, refs), return_exceptions=True)

    async def _all(self, method: str, state: EngineState, clients: Sequence[EngineClient], *arguments: Any) -> None:
        refs = [getattr(client.actor, method).remote(*arguments) for client in clients]
        what = {"sleep": "putting the engines to sleep", "wake": "waking the engines"}[method]
        answers = await self._answers(clients, refs, what)
        for client, result in zip(clients, answers):
            # Dead engines occupy no memory. Clients replace dead engines after the other engines have woken up.
            if not died(result) and client.state not in (EngineState.STARTING, *_UNAVAILABLE):
                client.enter(state)


def _actors(clients: Sequence[EngineClient]) -> dict[int, Any]:
    """Return the present actors of engines by engine number. A dead engine gets another actor."""
    return {client.index: client.actor for client in clients}
