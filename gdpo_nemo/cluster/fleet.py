"""The engines as the driver sees them: spread requests, deliver weights, do without an engine that died.

One event loop, in a thread of its own, has a ``Lane`` for every engine and runs the tasks of the rollouts. Coroutines
are for that loop; the methods that say so block, and are for all other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Coroutine, Iterator, Sequence, TypeVar

import numpy as np

from gdpo_nemo.cluster.engine_actor import EngineActor
from gdpo_nemo.cluster.lane import REPLACEMENTS, START_S, Lane, LaneState, PendingRequest
from gdpo_nemo.cluster.reservation import Placement, here
from gdpo_nemo.cluster.session import WorkerDied, answer, answered, cores, gather, ray, thread_environment
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import START_AGAIN, GdpoError, InfrastructureFailed, RunError
from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT
from gdpo_nemo.generation.requests import Completion, CompletionBatch, SampleRequest, Sampling
from gdpo_nemo.phases import phase
from gdpo_nemo.waits import waiting
from gdpo_nemo.weights.buckets import PeerLost
from gdpo_nemo.weights.transports.transport import Transport, errors_named

METRICS = {
    "engines/idle": ("share", "Time of the step in which an engine ran no decode step, mean over the engines"),
    "engines/idle_max": ("share", "The same of the engine that was idle the longest"),
    "engines/requests": ("samples", "Requests in an engine when the batch was complete, mean over the engines"),
    "engines/kv_used": ("share", "KV cache in use when the batch was complete, mean over the engines"),
    "engines/replaced": ("engines", "Engines that died and were replaced since the run started"),
}
_THREADS = 256
"""Most verdicts, steps of environments and rollout functions that are waited for at once."""
_CALLS = 8
"""Calls that an engine's actor takes at once: a poll, an update, new requests, questions."""
_GONE = (LaneState.LOST, LaneState.DEAD)
Result = TypeVar("Result")


class EngineFleet:
    """vLLM engines in Ray actors. Constructing it starts them; ``ready`` waits.

    An engine that dies is replaced, with the newest weights. Its samples, and no others, are drawn again with their
    seeds: by its replacement where staleness is 0, so that they stay the same, else by the other engines. One that
    died ``REPLACEMENTS`` times without a completion in between is given up; without any engine the run ends.

    Args:
        devices: the GPUs of the policy's ranks on their nodes, where engines share them (``Places.shared``).
    """

    def __init__(
        self, config: Config, folder: str, placement: Placement | None = None, devices: Sequence[str] | None = None
    ):
        self._config = config
        self._folder = folder
        self._placement = placement or here(config)
        self._devices = devices or ()
        self._timeout_s = config.rollout.generation_timeout_s
        self.exact = config.rollout.max_staleness == 0
        self._measured = time.monotonic()
        self.failure: GdpoError | None = None
        """Why sampling failed for good, once it did."""
        self._events: list[str] = []
        self._spans: list[tuple[str, str, float, float]] = []
        self._weights: Transport | None = None
        """Holds the newest weights, for engines that are replaced."""
        self._version = -1
        """Of these weights."""
        self._delivering = threading.Lock()
        """A transport serves one delivery at a time."""
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="rollouts"))
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="rollouts")
        self._thread.start()
        self.awake = asyncio.Event()
        self._change = asyncio.Event()
        slots = config.policy.generation.vllm_cfg.max_num_seqs
        self.lanes = [
            Lane(index, self._start, slots, self._timeout_s, self) for index in range(config.policy.generation.engines)
        ]
        self._serving = self.spawn(self._serve())

    def _start(self, index: int) -> Any:
        config = self._config
        vllm = self._config.policy.generation.vllm_cfg
        on_cpu = config.cluster.gpus_per_node == 0
        node = self._placement.places.engines[index]
        threads = max(1, cores(config.cluster) // self._placement.places.engines_on(node))
        environment = {**thread_environment(threads), **ENVIRONMENT, **(CPU_ENVIRONMENT if on_cpu else {})}
        environment |= self._placement.environment(node)
        shared = self._placement.places.shared
        if shared and not on_cpu:
            # Ray has assigned these GPUs to the policy and tracks one owner; fractions exist for one GPU only, not for
            # the several of a tensor-parallel engine. So ask Ray for none and name them.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices[rank] for rank in shared[index])
        actor = ray.remote(EngineActor).options(
            num_cpus=0,  # threads are ours to divide; Ray would queue actors where cores are fewer than processes
            num_gpus=0 if on_cpu or shared else vllm.tensor_parallel_size,
            max_concurrency=_CALLS,
            runtime_env={"env_vars": environment},
            **self._placement.on(node),
        )
        policy = config.policy
        return actor.remote(
            self._folder,
            vllm,
            policy.precision,
            policy.max_total_sequence_length,
            config.run.seed + index,
            on_cpu,
            sleeps=bool(shared),
            targets=policy.lora.target_modules,
        )

    # -- from any thread but the loop's --------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def process_locations(self) -> dict[int, tuple[str, int]]:
        """(host, process) of every engine that has started, by its number."""
        return answered({lane.index: lane.location for lane in self.lanes})

    def ready(self) -> None:
        """Wait until every engine can sample, or sleeps. Raises RunError where one dies or is late before that."""
        refs = [lane.actor.__ray_ready__.remote() for lane in self.lanes]
        there = (LaneState.READY, LaneState.UPDATING, LaneState.ASLEEP)

        def all_there() -> bool:
            for lane in self.lanes:
                lane.want_weights()  # one that was replaced while nobody sampled waits until it is needed
            return all(lane.state in there for lane in self.lanes)

        with phase("engines"):
            gather(refs, "starting the vLLM engines", START_S, "engine")
            self.spawn(self.until(all_there)).result()

    def generate(
        self, requests: Sequence[SampleRequest], sampling: Sampling, engine: int | None = None
    ) -> CompletionBatch:
        """Sample, and wait for it; consecutive requests stay together, for the engine's prefix cache.

        Args:
            engine: the number of the engine that samples all of them; None spreads them evenly.

        Raises:
            RunError: the deadline passed, or no engine is left.
        """
        return self.spawn(self.sample_all(requests, sampling, engine)).result()

    def update(self, weights: Transport, version: int, kv: str = "drain") -> None:
        """Give every engine what ``weights`` has prepared as ``version``. Call it inside ``delivering``.

        Args:
            kv: what becomes of samples under way (``rollout.kv``).
        """
        self._weights = weights
        self._version = version
        self.spawn(self._update(kv)).result()

    @contextlib.contextmanager
    def delivering(self) -> Iterator[None]:
        """Keep replaced engines from asking the transport for weights while the block prepares new ones."""
        with self._delivering:
            yield

    def score(self, sequences: Sequence[np.ndarray]) -> dict[int, list[np.ndarray]]:
        """By the number of each engine at work: its log-probs [tokens - 1] of each sequence."""
        return self.spawn(self._score(sequences)).result()

    def sleep(self) -> None:
        """Let the engines release their memory."""
        self.spawn(self._sleep()).result()

    def wake(self, what: str) -> None:
        """Let the engines allocate ``weights`` or ``kv_cache`` again; a dead one is replaced by one that has both."""
        self.spawn(self._wake(what)).result()

    def take_spans(self) -> list[tuple[str, str, float, float]]:
        """(lane, name, start, end), in seconds since the epoch, of the updates of weights since the last call."""
        taken = self._spans
        self._spans = []
        return taken

    def take_events(self) -> list[str]:
        """What happened to engines since the last call, a sentence each."""
        taken = self._events
        self._events = []
        return taken

    def all_ready(self) -> bool:
        """Whether every engine is there, and none in the middle of an update."""
        return self.failure is None and all(lane.state is LaneState.READY for lane in self.lanes)

    def forget_weights(self) -> None:
        """Take the engines for those of a run that has published nothing: their next weights come from another policy,
        and may be of an earlier version."""
        self._weights = None
        self._version = -1
        for lane in self.lanes:
            lane.version = -1

    def close(self) -> None:
        """End the engine processes and the event loop."""
        self.spawn(self._end()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        for lane in self.lanes:
            ray.kill(lane.actor)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- on the event loop ---------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self.awake.set()
        await asyncio.gather(*(self._serve_lane(lane) for lane in self.lanes))

    async def _serve_lane(self, lane: Lane) -> None:
        try:
            await lane.serve()
        except Exception as error:  # of any kind: nobody else would hear of it, and requests would wait for ever
            self.fail(error if isinstance(error, GdpoError) else RunError(f"engine {lane.index}: {error!r}"))

    def fail(self, error: GdpoError) -> None:
        """End sampling for good."""
        self.failure = self.failure or error
        for lane in self.lanes:
            lane.fail(self.failure)
        self.changed()

    def changed(self) -> None:
        """Wake up who waits for a state (``until``)."""
        self._change.set()
        self._change = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a state of the lanes. Raises RunError once sampling failed for good."""
        while not holds():
            if self.failure is not None:
                raise self.failure
            await self._change.wait()

    def least_loaded(self) -> int:
        """Number of the engine with the fewest requests, of those at work or else of those that will be.

        Raises:
            RunError: there is none.
        """
        if self.failure is not None:
            raise self.failure
        lanes = [lane for lane in self.lanes if lane.samples]
        lanes = lanes or [lane for lane in self.lanes if lane.state not in _GONE]
        return min(lanes, key=lambda lane: (lane.load, lane.index)).index

    async def room(self, version: int, samples: int) -> int:
        """Wait for an engine with room for a group of ``samples``, holding weights of ``version`` or newer, and keep it
        there: each of them calls ``Lane.keep_promise`` when it is submitted, or ended before. Returns its number."""
        await self.until(lambda: any(lane.has_room(version) for lane in self.lanes))
        free = [lane for lane in self.lanes if lane.has_room(version)]
        lane = min(free, key=lambda lane: (lane.load, lane.index))
        lane.promised += samples
        return lane.index

    @property
    def version(self) -> int:
        """Of the newest published weights."""
        return self._version

    def measure(self) -> dict[str, float]:
        """The keys ``engines/...``, of the time since the last call."""
        now = time.monotonic()
        wall = max(now - self._measured, 1e-9)
        self._measured = now
        busy = [lane.busy_since() / wall for lane in self.lanes]
        reports = [lane.report for lane in self.lanes]
        return {
            "engines/idle": 1 - min(1.0, float(np.mean(busy))),
            "engines/idle_max": 1 - min(1.0, min(busy)),
            "engines/requests": float(np.mean([r.running + r.waiting for r in reports])),
            "engines/kv_used": float(np.mean([r.kv_used for r in reports])),
            "engines/replaced": float(sum(lane.replaced for lane in self.lanes)),
        }

    def submit(self, request: SampleRequest, sampling: Sampling, engine: int | None = None) -> PendingRequest:
        """Give a request to an engine: see ``sample``. Those of one turn of the event loop travel together, in order.

        Raises:
            RunError: sampling failed for good.
        """
        return self._lane(engine).submit(request, sampling)

    async def answer_of(self, pending: PendingRequest) -> tuple[Completion, int]:
        """The completion of a submitted request, and the number of the engine that drew it. Cancelling drops it."""
        try:
            return await pending.answer, pending.lane.index
        except asyncio.CancelledError:
            pending.lane.abort(pending)
            raise

    async def sample(
        self, request: SampleRequest, sampling: Sampling, engine: int | None = None
    ) -> tuple[Completion, int]:
        """A completion, and the number of the engine that drew it.

        Args:
            engine: the one that should; None: the least loaded.
        """
        return await self.answer_of(self.submit(request, sampling, engine))

    async def sample_all(
        self, requests: Sequence[SampleRequest], sampling: Sampling, engine: int | None = None
    ) -> CompletionBatch:
        """See ``generate``."""
        start = time.monotonic()
        count = len(self.lanes)
        drawn = await asyncio.gather(
            *(
                self.sample(request, sampling, place * count // len(requests) if engine is None else engine)
                for place, request in enumerate(requests)
            )
        )
        completions = [completion for completion, _ in drawn]
        return CompletionBatch(completions, min(c.version for c in completions), time.monotonic() - start)

    def _check_awake(self) -> None:
        if not self.awake.is_set():
            raise RunError("the engines cannot sample: they sleep")

    def _lane(self, engine: int | None) -> Lane:
        if self.failure is not None:
            raise self.failure
        self._check_awake()
        if engine is not None:
            lane = self.lanes[engine]
            if lane.samples or (self.exact and lane.state not in _GONE):
                return lane
        return self.lanes[self.least_loaded()]

    def note(self, line: str) -> None:
        """Keep a sentence for ``take_events``."""
        self._events.append(line)

    def reassign(self, lane: Lane, reason: str) -> None:
        """Move a lane's requests to the others; without any, keep them for its replacement, or fail."""
        others = [other for other in self.lanes if other is not lane and other.samples]
        gone = lane.state in _GONE
        if all(other.state in _GONE for other in self.lanes):
            self.fail(InfrastructureFailed(f"no engine is left: engine {lane.index}: {reason}{START_AGAIN}"))
            return
        others = others or [other for other in self.lanes if gone and other.state not in _GONE]
        if not others:
            return
        moved = lane.surrender()
        # Whole groups: requests of one prompt share the cache of their engine.
        target: dict[int, Lane] = {}
        for pending in moved:
            key = id(pending.request.prompt_ids)
            if key not in target:
                target[key] = min(others, key=lambda other: (other.load, other.index))
            target[key].adopt(pending)

    def lost_node(self, lane: Lane) -> str | None:
        """The address of the engine's node, if that has left the cluster; blocks."""
        node = self._placement.places.engines[lane.index]
        return self._placement.addresses[node] if self._placement.is_lost(node) else None

    async def deliver(self, lane: Lane) -> None:
        """Give a replaced engine the newest weights, if there are any."""
        if self._weights is None or lane.version == self._version:
            return
        await asyncio.to_thread(self._delivering.acquire)
        try:
            if lane.version != self._version:
                await self._deliver([lane], "drain")
                if lane.version != self._version:
                    raise WorkerDied(f"updating the weights of engine {lane.index}: it died")
        finally:
            self._delivering.release()

    async def _update(self, kv: str) -> None:
        lanes = [lane for lane in self.lanes if lane.state not in (LaneState.STARTING, *_GONE)]
        for lane in lanes:
            if lane.samples:
                lane.enter(LaneState.UPDATING)
        start = time.time()
        await self._deliver(lanes, kv)
        name = f"weights {self._version}"
        self._spans += [(f"engine {lane.index}", name, start, time.time()) for lane in lanes]
        for lane in lanes:
            if lane.state is LaneState.UPDATING:
                lane.enter(LaneState.READY)
            lane.want_weights()

    async def _deliver(self, lanes: Sequence[Lane], kv: str) -> None:
        """Give the newest weights to lanes, again to those that missed them; one that dies gets them when it is
        replaced."""
        left = list(lanes)
        failures = 0
        while held := await self._hold(left, kv):
            left = await self._send(held)
            # A round in which an engine died is counted in its lane. Here only those that failed with all alive.
            failures += bool(left) and len(left) == len(held)
            if failures > REPLACEMENTS:
                raise InfrastructureFailed(f"new weights did not reach the engines in {failures} attempts")

    async def _hold(self, lanes: Sequence[Lane], kv: str) -> list[Lane]:
        """Let engines stop between two steps, with the update's names checked; returns those that live.

        Before the sender starts: its own deadline is short, and an engine that drains may take long.
        """
        assert self._weights is not None
        asked = [lane.actor for lane in lanes]
        refs = [actor.prepare_update.remote(self._weights.manifest, kv) for actor in asked]
        found = await self._answers(lanes, refs, "updating the engines' weights")
        # One that answered and died while another drained is not its replacement, which has yet to load the model.
        return [lane for lane, actor, error in zip(lanes, asked, found) if not _died(error) and lane.actor is actor]

    async def _send(self, lanes: Sequence[Lane]) -> list[Lane]:
        """One delivery; returns the lanes that live and did not get it."""
        weights = self._weights
        assert weights is not None
        asked = {lane.index: lane.actor for lane in lanes}

        def send() -> tuple[list[Any], list[Any]]:
            with errors_named(type(weights), "send"):
                return weights.send(asked)

        refs, sent = await asyncio.to_thread(send)
        again = []
        if sent:
            try:
                await asyncio.to_thread(gather, sent, "sending weights", self._timeout_s, "policy")
            except PeerLost:  # it does not say which engine is gone; their own answers below do
                again = list(lanes)
        found = await self._answers(lanes, refs, "updating the engines' weights")
        for lane, result in zip(lanes, found):
            # The slowest engine's answer ends the wait. One that answered and died since has no weights any more, and
            # its replacement, which asks for them itself, must not pass for it.
            if _died(result) or lane.actor is not asked[lane.index]:
                again = [other for other in again if other is not lane]
            elif isinstance(result, int):
                lane.version = result
            elif lane not in again:
                again.append(lane)
        return again

    async def _score(self, sequences: Sequence[np.ndarray]) -> dict[int, list[np.ndarray]]:
        self._check_awake()
        died: list[Any] = []

        def at_work() -> list[Lane]:
            # Asked again at every change: a lane that learns of its engine's death only now forgets who wanted it.
            for lane in self.lanes:
                lane.want_weights()
            return [lane for lane in self.lanes if lane.samples and lane.actor not in died]

        while True:  # where all that were asked died, their replacements are
            await self.until(lambda: bool(at_work()))
            lanes = at_work()
            asked = [lane.actor for lane in lanes]
            refs = [actor.score.remote(list(sequences)) for actor in asked]
            found = await self._answers(lanes, refs, "probing the engines")
            scored: dict[int, Any] = {lane.index: scores for lane, scores in zip(lanes, found) if not _died(scores)}
            if scored:
                return scored
            died += asked

    async def _sleep(self) -> None:
        self.awake.clear()
        await self._all("sleep", LaneState.ASLEEP, [lane for lane in self.lanes if lane.samples])

    async def _wake(self, what: str) -> None:
        asleep = [lane for lane in self.lanes if lane.state is LaneState.ASLEEP]
        await self._all("wake", LaneState.READY if what == "kv_cache" else LaneState.ASLEEP, asleep, what)
        if what == "kv_cache":
            self.awake.set()

    async def _answers(self, lanes: Sequence[Lane], refs: Sequence[Any], what: str) -> list[Any]:
        """Results of a call to each lane, or what it raised; each wait is known by the name of its engine."""

        async def one(lane: Lane, ref: Any) -> Any:
            with waiting(what, f"engine {lane.index}", self._timeout_s):
                return await answer(ref, what, self._timeout_s)

        return await asyncio.gather(*map(one, lanes, refs), return_exceptions=True)

    async def _all(self, method: str, state: LaneState, lanes: Sequence[Lane], *arguments: Any) -> None:
        refs = [getattr(lane.actor, method).remote(*arguments) for lane in lanes]
        doing = {"sleep": "putting the engines to sleep", "wake": "waking the engines"}[method]
        found = await self._answers(lanes, refs, doing)
        for lane, result in zip(lanes, found):
            # A dead engine holds no memory; its lane replaces it once the others are awake.
            if not _died(result) and lane.state not in (LaneState.STARTING, *_GONE):
                lane.enter(state)


def _died(result: Any) -> bool:
    """Whether an answer is the death of its engine; False for a result. Raises what is neither."""
    if isinstance(result, BaseException) and not isinstance(result, (WorkerDied, PeerLost)):
        raise result
    return isinstance(result, WorkerDied)
