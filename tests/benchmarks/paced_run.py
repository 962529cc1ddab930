"""What the benchmarks of asynchronous rollouts run: the real engines, fleet and scheduler, with lengths that are given.

Every engine is vLLM in its Ray actor. A completion has the length that its seed says (``length_of``), so that two runs,
and the simulator, meet the same samples. Where an engine is paced, its thread sleeps after a decode step until the step
has taken ``fixed_s`` + ``per_sequence_s`` x sequences. The trainer sleeps, too, and publishes the weights that it began
with, through a real transport. Verifiers sleep in threads, as clients of servers wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import log
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np

from gdpo_nemo.cluster import fleet as fleets
from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.session import ray, session
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Prompt, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.generation.engine import Engine
from gdpo_nemo.generation.requests import SampleRequest, Sampling
from gdpo_nemo.rollouts.batches import sample_seed
from gdpo_nemo.rollouts.ledger import RunPosition
from gdpo_nemo.rollouts.scheduler import RolloutScheduler
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.weights.manifest import pack
from gdpo_nemo.weights.transports.base import Transport
from gdpo_nemo.weights.transports.memory import MemoryReceiver

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_PACE = "GDPO_NEMO_BENCHMARK_PACE"
_PROMPT_TOKENS = 8


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths in tokens, cut at ``cap``; as ``planning``'s ``Draw`` those of the samples of a group."""

    median: float
    sigma: float
    cap: int
    run_seed: int = 0

    def of_seed(self, seed: int) -> int:
        """Length of the sample that is drawn with ``seed``."""
        return max(1, min(self.cap, round(Random(seed).lognormvariate(log(self.median), self.sigma))))

    def sample_group(self, seed: int, position: int, samples: int) -> list[float]:
        """Lengths of the group at ``position``; the simulator's own seed has no say."""
        return [float(self.of_seed(sample_seed(self.run_seed, position, sample))) for sample in range(samples)]

    @property
    def mean(self) -> float:
        """Of the first 4,000 samples."""
        return fmean(length for position in range(500) for length in self.sample_group(0, position, 8))

    @property
    def longest(self) -> float:
        """The cap."""
        return float(self.cap)


@dataclass(frozen=True)
class Pace:
    """What an engine of a benchmark is told."""

    lengths: Lengths
    fixed_s: float = 0.0
    per_sequence_s: float = 0.0


class LengthEngine(Engine):
    """An engine whose completions have the lengths of their seeds, at the pace of its environment."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        told = json.loads(os.environ[_PACE])
        self._pace = Pace(**{**told, "lengths": Lengths(**told["lengths"])})
        self._paused_since: float | None = None
        self._longest_pause = 0.0
        if self._pace.fixed_s or self._pace.per_sequence_s:
            self._slow_down(self._pace)

    def _slow_down(self, pace: Pace) -> None:
        core = self._core
        step = core.step
        slots = core._engine.vllm_config.scheduler_config.max_num_seqs

        def paced() -> Any:
            start = time.monotonic()
            self._longest_pause = max(self._longest_pause, start - (self._paused_since or start))
            sequences = min(slots, core._engine.get_num_unfinished_requests())
            outputs = step()
            left = start + pace.fixed_s + pace.per_sequence_s * sequences - time.monotonic()
            time.sleep(max(0.0, left))
            self._paused_since = time.monotonic() if core.busy else None
            return outputs

        core.step = paced  # type: ignore[method-assign]  # the thread looks it up at every step

    def longest_pause(self) -> float:
        """Seconds between two steps, with work for the second left by the first: the most since the last call."""
        longest = self._longest_pause
        self._longest_pause = 0.0
        return longest

    def _to_vllm_request(self, name: str, request: SampleRequest, sampling: Sampling) -> Any:
        made = super()._to_vllm_request(name, request, sampling)
        made.parameters.max_tokens = self._pace.lengths.of_seed(request.seed)
        made.parameters.ignore_eos = True
        return made


class Answers(Environment):
    """Stands for servers that take ``latency_s`` for every verdict, however many they are asked for at once."""

    reward_names = ("even",)
    remote = True
    by_sample = True

    def __init__(self, options: Mapping[str, Any] | None = None):
        self._latency_s = float((options or {}).get("latency_s", 0.0))

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """1 where the first token is even."""
        time.sleep(self._latency_s)
        return [Verdict({"even": float(t.completion_ids[0] % 2 == 0)}) for t in trajectories]


class StartingWeights(Transport):
    """The weights of the model's folder under ever new versions, through Ray's object store."""

    uses_buckets = False

    def __init__(self, folder: Path):
        from safetensors.torch import load_file

        self._manifest, buffer = pack(load_file(folder / "model.safetensors").items(), 0)
        self._buffer = ray.put(buffer)

    def prepare(self, version: int) -> None:
        """Name the version."""
        self.manifest = replace(self._manifest, version=version)

    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """Each engine loads from the buffer."""
        receiver = MemoryReceiver()
        return [e.update_weights.remote(self.manifest, receiver, self._buffer) for e in engines.values()], []


class RandomPrompts:
    """Prompts of random bytes without end; a place has the same one always."""

    def __len__(self) -> int:
        return 2**20

    def batch(self, place: int, count: int) -> list[Prompt]:
        """``count`` prompts from ``place`` on."""
        return [self._prompt(p) for p in range(place, place + count)]

    def _prompt(self, place: int) -> Prompt:
        ids = np.random.default_rng(place).integers(10, 250, _PROMPT_TOKENS).astype(np.int32)
        return Prompt(f"p{place}", ids, "", "answers")


@dataclass(frozen=True)
class Work:
    """The run that is measured, whatever its staleness."""

    pace: Pace
    engines: int = 2
    slots: int = 32
    groups: int = 8
    samples: int = 8
    train_s: float = 0.0
    verify_s: float = 0.0

    def config(self, model: Path, max_staleness: int = 0, depth: int | str = "auto", steps: int = 1000) -> Config:
        """It as a config of ours."""
        cap = self.pace.lengths.cap
        environment = {"plugin": f"{Path(__file__).resolve()}:Answers", "latency_s": self.verify_s}
        return load_config({
            "gdpo": {"rewards": {"even": 1.0}, "num_prompts_per_step": self.groups,
                     "num_generations_per_prompt": self.samples, "max_num_steps": steps},
            "policy": {"model_name": str(model), "precision": "float32",
                       "max_total_sequence_length": _PROMPT_TOKENS + cap,
                       "generation": {"engines": self.engines, "max_new_tokens": cap,
                                      "vllm_cfg": {"max_num_seqs": self.slots}}},
            "rollout": {"max_staleness": max_staleness, "depth": depth, "kv": "keep"},
            "data": {"train": {"environment": "answers"}},
            "env": {"answers": environment},
            "run": {"seed": self.pace.lengths.run_seed},
        })  # fmt: skip


@dataclass
class StepTime:
    """One step of the paced trainer, in seconds."""

    waited: float
    published: float
    whole: float
    tokens: int
    staleness: int
    """Of the oldest token."""
    engine_idle: float
    depth: float
    verify_s: float


@dataclass
class Timed:
    """The steps of a run; means are over those after the warm-up."""

    steps: list[StepTime] = field(default_factory=list)
    warm_up: int = 0

    def _mean(self, name: str) -> float:
        return fmean(getattr(step, name) for step in self.steps[self.warm_up :])

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self._mean("whole")

    @property
    def publish_s(self) -> float:
        """Seconds of a publication."""
        return self._mean("published")

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer waits for a batch."""
        return self._mean("waited") / self.step_s

    @property
    def engine_idle(self) -> float:
        """Share of the engines' time without a decode step."""
        return self._mean("engine_idle")

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens trained."""
        return self._mean("tokens") / self.step_s

    @property
    def depth(self) -> float:
        """Groups that may be under way."""
        return self._mean("depth")

    @property
    def staleness(self) -> int:
        """Of the oldest token of all steps."""
        return max(step.staleness for step in self.steps)


class Rig:
    """A Ray session with engines; the runs of one ``Work`` follow each other in it."""

    def __init__(self, work: Work, model: Path, fleet: EngineFleet):
        self.work = work
        self.model = model
        self.fleet = fleet
        self._transport: StartingWeights | None = None

    def changed(self, **changes: Any) -> Rig:
        """The same engines for other work."""
        return Rig(replace(self.work, **changes), self.model, self.fleet)

    @contextlib.contextmanager
    def stream(self, config: Config) -> Iterator[RolloutScheduler]:
        """The scheduler of one run."""
        # All that a fleet takes from the staleness; the engines need not start again for it.
        self.fleet.exact = config.rollout.max_staleness == 0
        pool = EnvironmentPools(config.env, config.rollout.env_workers, config.rollout.env_timeout_s, config.run.seed)
        stream = RolloutScheduler(
            config,
            RunPosition(),
            prompts=RandomPrompts(),
            fleet=self.fleet,
            pool=pool,
            tokenizer=_tokenizer(self.model),
        )
        try:
            yield stream
        finally:
            stream.close()
            pool.close()

    def publish(self, version: int, kv: str = "keep") -> float:
        """Give the engines their weights as ``version``; returns the seconds that it took."""
        start = time.monotonic()
        self._transport = self._transport or StartingWeights(self.model)
        with self.fleet.delivering():
            self._transport.prepare(version)
            self.fleet.update(self._transport, version, kv)
        return time.monotonic() - start

    def run(self, max_staleness: int, steps: int, depth: int | str = "auto", warm_up: int = 0) -> Timed:
        """Draw and "train" ``steps`` batches.

        Raises:
            SystemExit: a token was older than the bound.
        """
        timed = Timed(warm_up=warm_up)
        with self.stream(self.work.config(self.model, max_staleness, depth, steps)) as stream:
            self.publish(0, "drain")
            self.fleet.measure()
            stream.schedule(0)
            for step in range(steps):
                timed.steps.append(self._step(stream, step))
        if timed.staleness > max_staleness:
            raise SystemExit(f"a token of staleness {timed.staleness} was trained with max_staleness {max_staleness}")
        return timed

    def _step(self, stream: RolloutScheduler, step: int) -> StepTime:
        start = time.monotonic()
        rollout = stream.get_batch(step)
        assert rollout is not None
        waited = time.monotonic() - start
        time.sleep(self.work.train_s)
        published = self.publish(step + 1)
        stream.schedule(step + 1)
        made = rollout.trajectories
        return StepTime(
            waited=waited,
            published=published,
            whole=time.monotonic() - start,
            tokens=sum(len(t.completion_ids) for t in made),
            staleness=max(step - t.policy_version for t in made),
            engine_idle=rollout.measured["engines/idle"],
            depth=rollout.measured.get("queue/depth", float(self.work.groups)),
            verify_s=rollout.verify_s,
        )


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@contextlib.contextmanager
def rig(work: Work, folder: Path) -> Iterator[Rig]:
    """Start the engines of ``work`` in a Ray session, on a random model that is written to ``folder``."""
    model = folder / "model"
    ImportPath(f"{EXAMPLES / 'make_tiny_model.py'}:make_random_model").load()(str(model), 0)
    config = work.config(model)
    with engines_of(work.pace), session(config.cluster):
        fleet = EngineFleet(config, str(model))
        try:
            fleet.ready()
            yield Rig(work, model, fleet)
        finally:
            fleet.close()


@contextlib.contextmanager
def engines_of(pace: Pace) -> Iterator[None]:
    """Let fleets start ``LengthEngine`` for their engines."""
    here = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    environment = {_PACE: json.dumps(asdict(pace)), "PYTHONPATH": os.pathsep.join(filter(None, here))}
    with patch.object(fleets, "EngineActor", LengthEngine), patch.dict(fleets.ENVIRONMENT, environment):
        yield
