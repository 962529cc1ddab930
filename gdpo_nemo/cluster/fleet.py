"""The engines as the driver sees them: spread requests, replace a dead engine, sample its requests again."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Iterable, Mapping, Sequence

import numpy as np

from gdpo_nemo.cluster.reservation import Placement, here
from gdpo_nemo.cluster.session import WorkerDied, answered, cores, gather, ray, thread_environment
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import RunError
from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT, Engine
from gdpo_nemo.generation.requests import CompletionBatch, FinishedRequest, SampleRequest, Sampling
from gdpo_nemo.weights.buckets import PeerLost
from gdpo_nemo.weights.transports.transport import Transport, errors_named

_START_S = 900.0
"""vLLM loads the model, profiles memory and captures graphs before it answers."""
_REPLACEMENTS = 3
"""Times that an engine may be replaced without a completion in between, and that a weight update may fail, before the
run gives up."""


@dataclass
class Share:
    """The part of a call that one engine samples."""

    engine: int
    requests: list[SampleRequest]
    actor: "ray.ActorHandle"
    """The actor that received them. If it died, another thread may have replaced it in the fleet already."""
    answer: "ray.ObjectRef"


@dataclass
class Ticket:
    """A submitted call."""

    shares: list[Share]
    sampling: Sampling


@dataclass
class InflightRequests:
    """Requests that one engine samples concurrently; others may join at any time."""

    engine: int
    requests: dict[str, tuple[SampleRequest, Sampling]] = field(default_factory=dict)
    """By name; a name is never reused, so a late answer cannot belong to a newer request."""
    actor: "ray.ActorHandle | None" = None
    """The actor that samples them."""


class EngineFleet:
    """vLLM engines in Ray actors. Constructing it starts them; ``ready`` waits.

    A call may be submitted in one thread and collected in another. Actors execute calls in the order of submission, so
    weights published after a submission cannot reach its samples.

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
        # Reentrant: ``_collect_share`` holds it around ``_replace_dead``, which takes it, too.
        self._lock = threading.RLock()
        self._deaths: Counter[int] = Counter()
        """By engine, since its last completion."""
        self._asleep = False
        self._weights: Transport | None = None
        """Holds the newest weights, for engines that are replaced."""
        self._locations: dict[int, "ray.ObjectRef"] = {}
        self._actors = [self._start(i) for i in range(config.policy.generation.engines)]

    def _start(self, index: int):
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
        actor = ray.remote(Engine).options(
            num_cpus=0,  # threads are ours to divide; Ray would queue actors where cores are fewer than processes
            num_gpus=0 if on_cpu or shared else vllm.tensor_parallel_size,
            runtime_env={"env_vars": environment},
            **self._placement.on(node),
        )
        policy = config.policy
        engine = actor.remote(
            self._folder,
            vllm,
            policy.precision,
            policy.max_total_sequence_length,
            config.run.seed + index,
            on_cpu,
            sleeps=bool(shared),
            targets=policy.lora.target_modules,
        )
        self._locations[index] = engine.process_location.remote()
        return engine

    def process_locations(self) -> dict[int, tuple[str, int]]:
        """(host, process) of every engine that has started, by its number."""
        return answered(self._locations)

    def ready(self) -> None:
        """Wait until every engine can sample."""
        gather([a.__ray_ready__.remote() for a in self._actors], "starting the vLLM engines", _START_S, "engine")

    def sleep(self) -> None:
        """Let the engines release their memory once the calls submitted before are done."""
        with self._lock:
            self._asleep = True
            waiting = [actor.sleep.remote() for actor in self._actors]
            for index, ref in enumerate(waiting):
                try:
                    gather([ref], "putting the engines to sleep", self._timeout_s, f"engine {index}")
                except WorkerDied:
                    continue  # a dead engine holds no memory; ``wake`` replaces it

    def wake(self, what: str) -> None:
        """Let the engines allocate ``weights`` or ``kv_cache`` again; a dead one is replaced by one that has both."""
        with self._lock:
            waiting = [actor.wake.remote(what) for actor in self._actors]
            for index, ref in enumerate(waiting):
                try:
                    gather([ref], "waking the engines", self._timeout_s, f"engine {index}")
                except WorkerDied as error:
                    self._replace(index, error)
                    if what == "kv_cache":  # the others have their weights already
                        self._deliver_all([index])
            self._asleep = what != "kv_cache"

    def submit(self, requests: Sequence[SampleRequest], sampling: Sampling, engine: int | None = None) -> Ticket:
        """Start sampling; consecutive requests of one prompt stay together, for the engine's prefix cache.

        Args:
            engine: the number of the engine that samples all of them; None spreads them evenly.
        """
        with self._lock:
            bounds = np.linspace(0, len(requests), len(self._actors) + 1).astype(int)
            if engine is not None:
                bounds = np.array([0] * (engine + 1) + [len(requests)] * (len(self._actors) - engine))
            shares = [
                self._ask(i, list(requests[a:b]), sampling) for i, (a, b) in enumerate(zip(bounds, bounds[1:])) if b > a
            ]
        return Ticket(shares, sampling)

    def _ask(self, engine: int, requests: list[SampleRequest], sampling: Sampling) -> Share:
        actor = self._actors[engine]
        return Share(engine, requests, actor, actor.generate.remote(requests, sampling))

    def advance(
        self, drawing: InflightRequests, new: Mapping[str, tuple[SampleRequest, Sampling]]
    ) -> list[FinishedRequest]:
        """Add requests to an engine and let it run a few steps; finished ones are removed from ``drawing``.

        A replaced engine receives all of them again, with their seeds.

        Raises:
            RunError: the deadline passed, or engines kept dying.
        """
        drawing.requests.update(new)
        while True:
            with self._lock:
                actor = self._actors[drawing.engine]
                asked = new if actor is drawing.actor else drawing.requests
                drawing.actor = actor
                ref = actor.advance.remote(dict(asked))
            try:
                (drawn,) = gather([ref], "sampling", self._timeout_s, f"engine {drawing.engine}")
            except WorkerDied as error:
                self._replace_dead(drawing.engine, actor, error)
                continue
            if drawn:  # steps without a completion do not show that the engine is sound
                self._deaths[drawing.engine] = 0
            for done in drawn:
                drawing.requests.pop(done.name, None)
            return drawn

    def collect(self, ticket: Ticket) -> CompletionBatch:
        """Wait for a submitted call.

        Raises:
            RunError: the deadline passed, or engines kept dying.
        """
        completions = []
        versions = []
        seconds = 0.0
        for share in ticket.shares:
            batch = self._collect_share(share, ticket.sampling)
            completions += batch.completions
            versions.append(batch.version)
            seconds = max(seconds, batch.seconds)
        return CompletionBatch(completions, min(versions), seconds)

    def _collect_share(self, share: Share, sampling: Sampling) -> CompletionBatch:
        while True:
            try:
                (batch,) = gather([share.answer], "sampling", self._timeout_s, f"engine {share.engine}")
                self._deaths[share.engine] = 0
                return batch
            except WorkerDied as error:
                with self._lock:
                    self._replace_dead(share.engine, share.actor, error)
                    share = self._ask(share.engine, share.requests, sampling)

    def _replace_dead(self, index: int, dead, error: WorkerDied) -> None:
        """Replace ``dead`` by an engine with the newest weights. Raises RunError while the engines sleep."""
        with self._lock:
            if self._asleep:  # the policy uses that memory now; an engine that starts would run out of it
                raise RunError(f"engine {index} died while it slept; it cannot sample: {error}") from error
            if self._actors[index] is dead:  # otherwise a weight update found it first and replaced it
                self._replace(index, error)
                self._deliver_all([index])

    def _replace(self, index: int, error: WorkerDied) -> None:
        self._deaths[index] += 1
        if self._deaths[index] > _REPLACEMENTS:
            raise RunError(f"engine {index} died {self._deaths[index]} times in a row: {error}") from error
        self._actors[index] = self._start(index)

    def update(self, weights: Transport) -> None:
        """Give every engine what ``weights`` has prepared, after the calls it was given before."""
        with self._lock:
            self._weights = weights
            self._deliver_all(range(len(self._actors)))

    def _deliver_all(self, engines: Iterable[int]) -> None:
        """Deliver the newest weights to engines, again to those that died meanwhile."""
        left = list(engines)
        failures = 0
        while left and self._weights is not None:
            before = list(self._actors)
            left = self._deliver(self._weights, left)
            # A round in which an engine was replaced is counted there (``_replace``), per engine: several may die one
            # after the other. Here count only rounds that failed with every engine alive.
            failures += bool(left) and all(map(operator.is_, before, self._actors))
            if failures > _REPLACEMENTS:
                raise RunError(f"new weights did not reach the engines in {failures} attempts")

    def _deliver(self, weights: Transport, engines: list[int]) -> list[int]:
        """One delivery; returns the engines that need another."""
        # Every engine must have finished its earlier calls before the sender starts: its own deadline is short.
        waiting = [(index, self._actors[index].expect.remote(weights.manifest)) for index in engines]
        for index, ref in waiting:
            try:
                gather([ref], "updating the engines' weights", self._timeout_s, f"engine {index}")
            except WorkerDied as error:
                self._replace(index, error)
                return engines
        with errors_named(type(weights), "send"):
            refs, sent = weights.send({index: self._actors[index] for index in engines})
        again = []
        if sent:
            try:
                gather(sent, "sending weights", self._timeout_s, "policy")
            except PeerLost:  # it does not say which engine is gone; their own answers below do
                again = list(engines)
        for index, ref in zip(engines, refs):
            try:
                gather([ref], "updating the engines' weights", self._timeout_s, f"engine {index}")
            except WorkerDied as error:
                self._replace(index, error)
                again.append(index)
            except PeerLost:
                again.append(index)
        return sorted(set(again))

    def score(self, sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """The log-probs [tokens - 1] that each engine gives to each sequence."""
        with self._lock:
            refs = [actor.score.remote(list(sequences)) for actor in self._actors]
        return gather(refs, "probing the engines", self._timeout_s, "engine")

    def close(self) -> None:
        """End the engine processes."""
        for actor in self._actors:
            ray.kill(actor)
