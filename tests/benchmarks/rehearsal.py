"""The driver of a run on many GPUs: its real code and Ray calls, before engines and ranks that only keep the pace.

    uv run tests/benchmarks/rehearsal.py [--check] [--prompts 512] [--slower 2] [--without-hosts]

``Trainer``, ``GDPO``, ``RolloutScheduler``, ``EngineFleet``, ``RolloutHost``, the environment's worker processes and
``RunLog`` are those of a run. An engine answers a request after as long as its length takes at the pace of an H100, and
a rank reads its share and answers. A Ray actor here is many engines and ranks, or the rollout hosts of many nodes,
because hundreds of processes do not fit a small machine. The driver calls each rollout host and the ranks of each node
separately. Lengths are log-normal, with the shape of the recipe for Qwen2.5-1.5B on GSM8K at 512 GPUs: 256 engines and
256 ranks, 512 prompts x 16 samples of 512 tokens in the mean, staleness 1. With other ``--prompts``, engines and ranks
change in proportion.

The table is of the driver's processor seconds a sample, by thread. With ``--check`` the status is 1 where their sum is
not within 20 % of what ``gdpo-nemo simulate`` assumes. ``--slower`` stretches every time that is paced, so that the
other processes of a small machine keep up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from driver import Reader
from paced_run import EXAMPLES

from gdpo_nemo.cluster import fleet as fleets
from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.fork_server import thread_environment
from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.cluster.policy_rank import PolicyRank, RankCaller
from gdpo_nemo.cluster.reservation import Placement
from gdpo_nemo.cluster.session import gather, ray, session
from gdpo_nemo.cluster.weight_sync import WeightSync
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.placement import Places
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.validate import validate
from gdpo_nemo.data.packing import attention_cost
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.tokenizer import load_tokenizer
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.generation.requests import Completion, EngineReport, FinishedRequest
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.rollouts import host as hosts
from gdpo_nemo.rollouts.ledger import RunPosition
from gdpo_nemo.rollouts.scheduler import RolloutScheduler
from gdpo_nemo.tools.simulation.scenarios import driver_seconds
from gdpo_nemo.training.checkpoints import RunState
from gdpo_nemo.training.components import RunComponents, Stop
from gdpo_nemo.training.gdpo import GDPO
from gdpo_nemo.training.trainer import Trainer
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.utils.progress import frozen
from gdpo_nemo.weights.manifest import Manifest
from gdpo_nemo.weights.transports.base import Transport

SHAPE = dict(model_type="qwen2", hidden_size=1536, num_attention_heads=12, num_key_value_heads=2,
             intermediate_size=8960, num_hidden_layers=28, vocab_size=151936)  # fmt: skip
TOKEN_S = 0.00457
"""Seconds of a decoding step of the recipe's engine, according to ``simulate``."""
_HOSTS = 2
_ENGINE_REPORT = dict(running=0, waiting=0, kv_used=0.1, busy_s=0.0, decoded_tokens=0, recomputed_tokens=0)


class Host:
    """Several engines and ranks in one process."""

    def __init__(self, token_s: float, vocabulary: int, mean: float):
        self._token_s = token_s
        self._mean = mean
        self._version = -1
        draw = np.random.default_rng(0)
        self._ids = draw.integers(0, vocabulary, 1 << 16, np.int32)
        self._logprobs = -draw.random(1 << 16, np.float32)
        self._text = "".join(chr(97 + i % 26) for i in range(1 << 18))
        self._due: dict[int, list[tuple[float, str, Completion, Any]]] = defaultdict(list)
        self._groups: dict[int, dict[Any, list[FinishedRequest]]] = defaultdict(lambda: defaultdict(list))
        self._unfinished: dict[int, Counter[Any]] = defaultdict(Counter)
        self._arrived: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._readers: dict[int, Reader] = {}

    def call(self, method: str, index: int, *arguments: Any, **options: Any) -> Any:
        """Call a method of one rank."""
        reader = self._readers.setdefault(index, Reader(index))
        if method == "call_with_share":
            return PolicyRank.call_with_share(reader, *arguments)  # type: ignore[arg-type]
        return getattr(reader, method)(*arguments, **options)

    async def process_location(self, index: int) -> tuple[str, int]:
        """This process."""
        return "host", os.getpid()

    async def submit(self, index: int, requests: Mapping[str, tuple[Any, Any]]) -> None:
        """Each will be due after the time of its length, which its seed decides."""
        for name, (request, sampling) in requests.items():
            length = _length(request.seed, self._mean, sampling.max_new_tokens)
            start = request.seed % (len(self._ids) - length)
            part = slice(start, start + length)
            spans = ((self._version, length),)
            completion = Completion(self._ids[part].copy(), self._logprobs[part].copy(), "stop", spans)
            group = getattr(request, "group", None)
            if getattr(request, "decodes", False):
                completion.text = self._text[4 * part.start : 4 * part.stop]
            self._unfinished[index][group] += 1
            heapq.heappush(self._due[index], (time.monotonic() + length * self._token_s, name, completion, group))
        self._arrived[index].set()

    async def poll(self, index: int, wait_s: float) -> EngineReport:
        """Return the completions that are due. Wait at most ``wait_s`` seconds for the first one."""
        kept = self._groups[index]
        end = time.monotonic() + wait_s
        finished: list[FinishedRequest] = []
        while True:
            now = time.monotonic()
            due = self._due[index]
            while due and due[0][0] <= now:
                _, name, completion, group = heapq.heappop(due)
                self._unfinished[index][group] -= 1
                kept[group].append(FinishedRequest(name, completion))
                if group is None or not self._unfinished[index][group]:
                    finished += kept.pop(group)
            if finished or now >= end:
                break
            self._arrived[index].clear()
            until = min(end, due[0][0]) if due else end
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived[index].wait(), max(0.0, until - now))
        return EngineReport(finished, self._version, **_ENGINE_REPORT, kept=sum(map(len, kept.values())))

    async def abort(self, index: int, names: Sequence[str]) -> None:
        """Forget requests."""
        self._due[index] = [entry for entry in self._due[index] if entry[1] not in names]
        heapq.heapify(self._due[index])

    async def prepare_update(self, index: int, manifest: Manifest, kv: str) -> None:
        """Nothing to hold."""

    async def update_weights(self, index: int, version: int) -> int:
        """The version alone."""
        self._version = version
        return version


def _length(seed: int, mean: float, cap: int) -> int:
    draw = np.random.default_rng(seed).lognormal(0.0, 1.0) * mean / 1.45
    return max(1, min(cap, int(draw)))


class Callers:
    """The callers of the ranks of several nodes in one process."""

    def __init__(self, hosts: Sequence[Any], nodes: Mapping[int, Sequence[int]]):
        ranks = {node: [Member(hosts[rank % len(hosts)], rank, rank=True) for rank in nodes[node]] for node in nodes}
        self._callers = {node: RankCaller(members) for node, members in ranks.items()}

    async def call_with_shares(self, node: int, *arguments: Any) -> Any:
        """Call the method of one caller."""
        return await self._callers[node].call_with_shares(*arguments)


class Member:
    """One engine or rank of a host, with the calls of an actor's handle."""

    def __init__(self, host: Any, index: int, rank: bool = False):
        self._host = host
        self._index = index
        self._rank = rank

    def __getattr__(self, method: str) -> Any:
        if method == "__ray_ready__":
            return self._host.__ray_ready__
        return _Method(self, method)

    def __reduce__(self) -> Any:
        return Member, (self._host, self._index, self._rank)


class RolloutHosts:
    """The rollout hosts of several nodes in one process, with one pool of environment workers."""

    def __init__(self, config: Config, model: str, workers: int, slower: float):
        self._slower = slower
        self._arguments = os.getcwd(), config, model, workers
        self._hosts: dict[int, hosts.RolloutHost] = {}
        self._pool = EnvironmentPools(config.env, workers, config.rollout.env_timeout_s, config.run.seed)

    def _host(self, node: int) -> hosts.RolloutHost:
        if node not in self._hosts:
            with patch.object(hosts, "EnvironmentPools", lambda *_: self._pool):
                self._hosts[node] = hosts.RolloutHost(*self._arguments)
        return self._hosts[node]

    async def process_location(self, node: int) -> tuple[str, int]:
        """Return a location that is not this process, because the process runs several hosts."""
        return "host", 0

    async def attach(self, node: int, *arguments: Any) -> None:
        """Call the method of one host, like those below."""
        await self._host(node).attach(*arguments)

    async def submit(self, node: int, requests: Any) -> None:
        await self._host(node).submit(requests)

    async def abort(self, node: int, index: int, names: Sequence[str]) -> None:
        await self._host(node).abort(index, names)

    async def call_engines(self, node: int, *arguments: Any) -> Any:
        return await self._host(node).call_engines(*arguments)

    async def poll(self, node: int, wait_s: float, report_s: float) -> Any:
        return await self._host(node).poll(wait_s, report_s * self._slower)


class _Method:
    def __init__(self, member: Member, name: str):
        self._member = member
        self._name = name

    def remote(self, *arguments: Any, **options: Any) -> Any:
        member = self._member
        if member._rank:
            return member._host.call.remote(self._name, member._index, *arguments, **options)
        return getattr(member._host, self._name).remote(member._index, *arguments, **options)


class PacedFleet(EngineFleet):
    """The fleet, before engines of ``hosts``."""

    def close(self) -> None:
        """Stop the loop; the session ends the hosts."""
        self.spawn(self._end()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


class PacedPolicy(PolicyGroup):
    """The policy group, before ranks that take ``train_s`` seconds for an update."""

    def __init__(self, config: Config, hosts: Sequence[Any], ranks: int, train_s: float):
        self.config = config.policy
        self.layout = config.policy.megatron_cfg
        self.timeout_s = 3600.0
        self._patience = defaultdict(lambda: _Endless())
        self._quadratic = attention_cost(describe(SHAPE))
        self._sharing = False  # as with TransformerEngine
        self._shared_attention = 1.0
        self._train_s = train_s
        self.ranks = [Member(hosts[rank % len(hosts)], rank, rank=True) for rank in range(ranks)]
        self._data_ranks = list(range(ranks))
        nodes = {first // 8: range(first, min(first + 8, ranks)) for first in range(0, ranks, 8)}
        actor = ray.remote(Callers).options(num_cpus=0, runtime_env={"env_vars": _environment()})
        callers = [actor.remote(hosts, nodes) for _ in range(_HOSTS)]
        self.callers = [(Member(callers[node % _HOSTS], node), members) for node, members in nodes.items()]

    def train(self, *arguments: Any) -> Any:
        """Train, and take at least as long as the simulated ranks."""
        start = time.monotonic()
        result = super().train(*arguments)
        time.sleep(max(0.0, self._train_s - (time.monotonic() - start)))
        return result


class _Endless:
    limit_s = 3600.0

    def took(self, seconds: float) -> None:
        """No adaptive limit: the machine is shared."""


class Versions(Transport):
    """Sends version numbers."""

    uses_buckets = False

    def __init__(self) -> None:
        pass

    def prepare(self, version: int) -> None:
        """Name the version."""
        self.manifest = Manifest(version, ())

    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """To each engine."""
        return [engine.update_weights.remote(self.manifest.version) for engine in engines.values()], []


class Questions:
    """Prompts of 128 tokens without end."""

    def __len__(self) -> int:
        return 2**20

    def batch(self, place: int, count: int) -> list[Prompt]:
        """``count`` prompts from ``place`` on."""
        ids = np.random.default_rng(place).integers(10, 250, 128).astype(np.int32)
        text = f"question {place} " * 30
        return [Prompt(f"p{place}", ids, text, "gsm8k", {"question": text, "answer": f"x\n#### {place}"})]


class Threads:
    """Processor seconds of this process by kind of thread."""

    def read(self) -> dict[str, float]:
        """Seconds since the process started."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        found: dict[str, float] = defaultdict(float)
        for task in Path("/proc/self/task").iterdir():
            try:
                nanoseconds = int((task / "schedstat").read_text().split()[0])
            except OSError:
                continue
            found[_kind(names.get(int(task.name)))] += nanoseconds / 1e9
        found["all"] = time.process_time()
        return found


def _kind(name: str | None) -> str:
    if name is None:
        return "Ray's own threads and libraries'"
    kinds = {"MainThread": "trainer: credit, packing, shares, metrics, journal", "samples": "sample tables",
             "rollouts": "event loop: requests, completions, groups"}  # fmt: skip
    if name in kinds:
        return kinds[name]
    if name.startswith("rollouts"):
        return "decoding, verdicts"
    return "environment pool's threads" if "hread-" in name or "pool" in name.lower() else "other threads"


def run(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, float], float]:
    """Train the steps; returns the driver's seconds a sample by kind of thread, and what the simulator assumes."""
    model = Path(arguments.model or folder / "model")
    if not arguments.model:
        ImportPath(f"{EXAMPLES / 'make_tiny_model.py'}:make_random_model").load()(str(model), 0)
    engines = arguments.prompts * arguments.samples // arguments.samples_per_engine
    config = load_config({
        "run": {"dir": str(folder / "run"), "name": "rehearsal"},
        "gdpo": {"rewards": {"correctness": 1.0, "integer": 1.0, "format": 1.0}, "max_num_steps": arguments.steps,
                 "num_prompts_per_step": arguments.prompts, "num_generations_per_prompt": arguments.samples},
        "policy": {"model_name": str(model), "max_total_sequence_length": 1536, "micro_batch_tokens": 16384,
                   "megatron_cfg": {"data_parallel_size": engines},
                   "generation": {"engines": engines, "max_new_tokens": 1024,
                                  "vllm_cfg": {"max_num_seqs": 256}}},
        "rollout": {"max_staleness": 1, "kv": "keep", "env_workers": arguments.workers,
                    "group_timeout_s": 3600.0 if arguments.one_by_one else None,
                    "generation_timeout_s": 3600.0, "env_timeout_s": 600.0},
        "data": {"train": {"environment": "gsm8k"}},
        "env": {"gsm8k": {"strict": True}},
        "checkpointing": {"enabled": False},
        "logger": {"console": "plain", "tensorboard": {"enabled": False}, "plot": False},
    })  # fmt: skip
    tokenizer = load_tokenizer(config.policy, model)
    with session(config.cluster), contextlib.ExitStack() as stack:
        actor = ray.remote(Host).options(num_cpus=0, max_concurrency=1000, runtime_env={"env_vars": _environment()})
        actors = [actor.remote(TOKEN_S * arguments.slower, len(tokenizer), 512.0) for _ in range(_HOSTS)]
        gather([host.__ray_ready__.remote() for host in actors], "starting hosts", 600.0)
        nodes = tuple(index // arguments.engines_per_node for index in range(engines))
        start_host = (
            None if arguments.without_hosts else _host_starter(config, str(model), nodes[-1] + 1, arguments.slower)
        )
        placement = Placement(Places((0,) * engines, nodes))
        with patch.object(fleets, "start_engine", lambda *a: Member(actors[a[-1] % _HOSTS], a[-1])):
            fleet = PacedFleet(config, str(model), placement, None, start_host)
            stack.callback(fleet.close)
            fleet.ready()
        policy = PacedPolicy(config, actors, engines, arguments.train_s * arguments.slower)
        on_driver = replace(config, cluster=replace(config.cluster, env_nodes=1))
        driver_s, reply_s = driver_seconds(on_driver if arguments.without_hosts else config, 1)
        spent = _train(config, policy, fleet, tokenizer, arguments, stack)
        return spent, driver_s + reply_s * arguments.one_by_one


def _host_starter(config: Config, model: str, nodes: int, slower: float) -> Callable[[int], Member]:
    options = dict(num_cpus=0, max_concurrency=1000, runtime_env={"env_vars": _environment()})
    actor = ray.remote(RolloutHosts).options(**options)
    processes = [actor.remote(config, model, config.rollout.env_workers, slower) for _ in range(min(_HOSTS, nodes))]
    return lambda node: Member(processes[node % len(processes)], node)


def _environment() -> dict[str, str]:
    here = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    return {**thread_environment(1), "PYTHONPATH": os.pathsep.join(filter(None, here))}


def _train(
    config: Config,
    policy: PacedPolicy,
    fleet: EngineFleet,
    tokenizer: Any,
    arguments: argparse.Namespace,
    stack: contextlib.ExitStack,
) -> dict[str, float]:
    rollout = config.rollout
    log = RunLog(config, config.run.dir)
    stack.callback(log.close, "complete")
    pool = EnvironmentPools(config.env, rollout.env_workers, rollout.env_timeout_s, config.run.seed)
    stack.callback(pool.close)
    stream = RolloutScheduler(config, RunPosition(), prompts=Questions(), fleet=fleet, pool=pool, tokenizer=tokenizer)  # type: ignore[arg-type]
    stack.callback(stream.close)
    parts = RunComponents(validate(config), Path(config.run.dir), log, Stop(), None, RunState())  # type: ignore[arg-type]
    parts.policy = policy
    parts.algorithm = GDPO(config, policy, tokenizer, log)
    parts.stream = stream
    parts.sync = WeightSync(policy, fleet, None, Versions(), kv="keep")
    trainer = Trainer(parts)
    threads = Threads()
    stack.enter_context(frozen())
    trainer.publish()
    trainer.schedule()
    spent = [threads.read()]
    for step in range(arguments.steps):
        start = time.monotonic()
        trainer.step()
        if step + 1 < arguments.steps:
            trainer.schedule()
        log.flush(step + 1)
        spent.append(threads.read())
        used = spent[-1]["all"] - spent[-2]["all"]
        print(f"step {step + 1}: {time.monotonic() - start:.1f} s, driver {used:.2f} CPU s", flush=True)
    # The first step has the rollouts of two steps and imports; the last one has none to admit.
    first, last = (1, -2) if arguments.steps > 3 else (0, -1)
    samples = arguments.prompts * arguments.samples * (len(spent) - 1 - first + last + 1)
    return {name: (value - spent[first].get(name, 0.0)) / samples for name, value in spent[last].items()}


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--samples-per-engine", type=int, default=32, help="of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--train-s", type=float, default=1.0, help="an update of the paced ranks")
    parser.add_argument("--slower", type=float, default=8.0, help="factor of all times that are paced")
    parser.add_argument("--workers", type=int, default=1, help="processes that verify")
    parser.add_argument("--without-hosts", action="store_true", help="let the driver sample and verify")
    parser.add_argument("--engines-per-node", type=int, default=8, help="engines of a rollout host")
    parser.add_argument("--one-by-one", action="store_true", help="a deadline for groups: a reply for each sample")
    parser.add_argument("--model", help="folder with a tokenizer (default: the tiny model)")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless simulate's constant is within 20 %%")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spent, assumed = run(arguments, Path(folder))
    whole = spent.pop("all")
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"{name:52s} {seconds * 1e3:8.4f} ms a sample")
    print(f"{'the driver':52s} {whole * 1e3:8.4f} ms a sample; simulate assumes {assumed * 1e3:.4f}")
    return int(arguments.check and abs(whole / assumed - 1) > 0.2)


if __name__ == "__main__":
    sys.exit(main())
