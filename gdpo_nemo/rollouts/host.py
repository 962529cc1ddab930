"""Rollout host: Ray actor that samples and verifies complete groups with the engines of one node.

With many engines, the driver sends one request per group to the node of the engine, and the host returns the verified
group. The host runs the same ``GroupMaker`` and ``EngineClient`` as a driver without hosts, and environment workers.
Admission, weight updates and the replacement of engines remain on the driver.

An engine's death is reported to the driver, which replaces the engine and submits its groups again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

from gdpo_nemo.cluster.cleanup_process import guard_children
from gdpo_nemo.cluster.engine_client import EngineClient
from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.fork_server import thread_environment
from gdpo_nemo.cluster.host_link import HostReport
from gdpo_nemo.cluster.reservation import Placement
from gdpo_nemo.cluster.session import WorkerDied, answer, ray, sendable
from gdpo_nemo.config.rollout_checks import allows_hosts
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.tokenizer import load_image_reader, load_tokenizer
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.environments.registry import dedicated_workers, is_remote
from gdpo_nemo.generation.requests import Completion, EngineReport, FinishedRequest, SampleRequest, Sampling
from gdpo_nemo.rollouts.functions import RolloutKind, rollout_methods
from gdpo_nemo.rollouts.group_maker import GroupJob, GroupMaker, cancel_all
from gdpo_nemo.utils.errors import GdpoError, RunError

_THREADS = 256
"""Maximum number of concurrent reward computations and environment steps."""
_CALLS = 1000
"""Maximum number of concurrent calls. Calls are short, except one ``poll``."""


def uses_hosts(config: Config) -> bool:
    """Return True if groups are sampled and verified by an actor on each node with engines.

    Environments on servers, with dedicated workers or on separate nodes need the driver. So do rollout functions,
    agents, and the turns of synchronous runs, whose requests are submitted together.
    """
    if not allows_hosts(config):
        return False
    if any(is_remote(name, o or {}) or dedicated_workers(name, o) for name, o in config.env.items()):
        return False
    kinds = {method.kind for method in rollout_methods(config).values()}
    return kinds <= {RolloutKind.SAMPLE, *([RolloutKind.EPISODE] if config.rollout.max_staleness else [])}


class _Client(EngineClient):
    """Client of an engine in its rollout host. If the engine dies, the driver replaces it."""

    async def _replace(self, error: WorkerDied) -> bool:
        raise error


class _Engine:
    """One engine of a host, with the groups that it samples."""

    def __init__(self, generation: int, client: _Client, actor: Any):
        self.generation = generation
        self.client = client
        self.actor = actor
        self.requests: dict[str, tuple[GroupJob | SampleRequest, asyncio.Task[None]]] = {}
        self.finished: list[FinishedRequest] = []
        self.failure: GdpoError | None = None
        self.changed = False
        self.serving: asyncio.Task[None] | None = None

    def report(self) -> EngineReport | GdpoError:
        """Return the report for the driver, in which completed groups are finished requests."""
        self.changed = False
        if self.failure is not None:
            return self.failure
        finished, self.finished = self.finished, []
        unfinished = sum(request.samples for request, _ in self.requests.values())
        return replace(self.client.report, finished=finished, kept=max(0, unfinished - self.client.load))


class RolloutHost:
    """Ray actor that makes groups with the engines of one node.

    Args:
        folder: working directory of the driver, to which paths in the config are relative.
        model: Hugging Face folder of the model.
        workers: number of shared environment workers.
    """

    exact = False
    """False: the driver decides which requests a replacement of an engine repeats."""
    hosts = ()

    def __init__(self, folder: str, config: Config, model: str, workers: int):
        os.chdir(folder)
        guard_children()
        rollout = config.rollout
        self._timeout_s = rollout.generation_timeout_s
        self._slots = config.policy.generation.vllm_cfg.max_num_seqs
        self.version = -1
        """Version of the newest weights when the newest group was requested."""
        self.awake = asyncio.Event()
        self.clients: dict[int, _Client] = {}
        self._engines: dict[int, _Engine] = {}
        self._change = asyncio.Event()
        self._pool = EnvironmentPools(config.env, workers, rollout.env_timeout_s, config.run.seed)
        tokenizer = load_tokenizer(config.policy, model, config.run.date)
        images = load_image_reader(config.data.images, model, tokenizer)
        self._maker = GroupMaker(config, cast(EngineFleet, self), self._pool, tokenizer, images)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rollouts")

    # -- calls of the driver's link ------------------------------------------------------------------------------------

    async def process_location(self) -> tuple[str, int]:
        """Return (host name, process id) of this actor."""
        return socket.gethostname(), os.getpid()

    async def attach(self, index: int, generation: int, actor: Any) -> None:
        """Sample with a new actor of an engine, whose weights are loaded. Forget the groups of the earlier actor."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(self._threads)
        self.awake.set()
        earlier = self._engines.get(index)
        self.clients[index] = _Client(index, lambda _: actor, self._slots, self._timeout_s, self)
        engine = self._engines[index] = _Engine(generation, self.clients[index], actor)
        engine.serving = loop.create_task(self._serve(engine))
        if earlier is not None:  # last, because requests for the new actor may arrive during this wait
            await cancel_all([earlier.serving, *(task for _, task in earlier.requests.values())])

    async def submit(self, requests: Mapping[int, Mapping[str, tuple[GroupJob | SampleRequest, Sampling]]]) -> None:
        """Start making groups, or sampling single requests of the sync check, by engine and name."""
        loop = asyncio.get_running_loop()
        for index, named in requests.items():
            engine = self._engines[index]
            for name, (request, sampling) in named.items():
                engine.requests[name] = request, loop.create_task(self._answer(engine, name, request, sampling))

    async def abort(self, index: int, names: Collection[str]) -> None:
        """Drop groups."""
        engine = self._engines[index]
        for name in names:
            request = engine.requests.pop(name, None)
            if request is not None:
                request[1].cancel()

    async def call_engines(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> dict[int, Any]:
        """Call a method of several engines. Return each engine's result, or the GdpoError that the driver raises."""

        async def call(index: int, values: Sequence[Any]) -> Any:
            try:
                ref = getattr(self._engines[index].actor, method).remote(*values)
                return await answer(ref, f"engine {index}", math.inf)
            except GdpoError as error:
                return sendable(error, "rollouts")

        results = await asyncio.gather(*(call(index, values) for index, values in arguments.items()))
        return dict(zip(arguments, results))

    async def poll(self, wait_s: float, report_s: float) -> HostReport:
        """Return the report of each engine with completed groups or a failure, or of all engines after ``wait_s``.

        Args:
            report_s: time during which finished groups are collected before they are reported together.
        """
        if not any(engine.changed for engine in self._engines.values()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._change.wait(), wait_s)
        await asyncio.sleep(report_s)
        self._change.clear()
        changed = {index: engine for index, engine in self._engines.items() if engine.changed} or self._engines
        reports = [(index, engine.generation, engine.report()) for index, engine in changed.items()]
        return reports, self._pool.take_recoveries()

    async def close(self) -> None:
        """End the environment workers. This must be the last call. See ``EnvironmentHost.close``."""
        await asyncio.to_thread(self._pool.close)
        del self._pool, self._maker
        gc.collect()

    # -- groups --------------------------------------------------------------------------------------------------------

    async def _serve(self, engine: _Engine) -> None:
        try:
            await engine.client.serve()
        except Exception as error:  # an unreported exception would leave groups waiting forever
            engine.failure = error if isinstance(error, GdpoError) else RunError(f"engine: {error!r}")
            self._report(engine)

    async def _answer(self, engine: _Engine, name: str, request: GroupJob | SampleRequest, sampling: Sampling) -> None:
        result: tuple[bytes, float, float, float] | Completion | GdpoError
        try:
            if isinstance(request, SampleRequest):
                result, _ = await self.sample(request, sampling, engine.client.index)
            else:
                request.engine = engine.client.index
                self.version = max(self.version, request.version)
                result = (await self._maker.make(request)).packed()
        except Exception as error:  # the driver raises it
            result = sendable(error, "rollouts")
        engine.requests.pop(name, None)
        engine.finished.append(FinishedRequest(name, result))
        self._report(engine)

    def _report(self, engine: _Engine) -> None:
        engine.changed = True
        self._change.set()

    # -- the part of the fleet that group makers and engine clients use ------------------------------------------------

    async def sample(
        self, request: SampleRequest, sampling: Sampling, engine: int | None = None
    ) -> tuple[Completion, int]:
        """Sample a request with an engine, like ``EngineFleet.sample``."""
        assert engine is not None
        return await EngineFleet.answer_of(cast(EngineFleet, self), self.clients[engine].submit(request, sampling))

    async def deliver(self, client: EngineClient) -> None:
        """Do nothing, because the driver attaches engines after it has delivered the weights."""

    def note(self, line: str) -> None:
        """Do nothing, because the driver records the events of its engines."""

    def reassign(self, client: EngineClient, reason: str) -> None:
        """Do nothing, because the driver assigns groups to engines."""

    def changed(self) -> None:
        """Do nothing, because no task of the host waits for a client."""

    def lost_node(self, client: EngineClient) -> None:
        """Return None, because the driver watches the nodes."""


def start_host(config: Config, model: str, placement: Placement, node: int) -> Any:
    """Start the rollout host of a node. The nodes share ``rollout.env_workers``, with at least one worker each."""
    nodes = len(set(placement.places.engines))
    workers = math.ceil(config.rollout.env_workers / nodes)
    environment = {**thread_environment(1), "CUDA_VISIBLE_DEVICES": ""}
    actor = ray.remote(RolloutHost).options(
        num_cpus=0, max_concurrency=_CALLS, runtime_env={"env_vars": environment}, **placement.on(node)
    )
    return actor.remote(os.getcwd(), config, model, workers)
