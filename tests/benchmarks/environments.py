"""What verification by servers costs the client: CPU time a call, throughput at a given concurrency, memory.

    uv run tests/benchmarks/environments.py            a minute on two cores
    uv run tests/benchmarks/environments.py --quick    a few seconds

The server is a process of its own that answers every request after 100 ms with 4 kB, at the smallest cost Python
allows, so that what is measured is the client. Prints one line a case and ends with status 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import time
from dataclasses import dataclass

import numpy as np
import psutil

from gdpo_nemo.data.records import Outcome, Prompt, Trajectory
from gdpo_nemo.environments.nemo_gym.environment import NemoGym
from gdpo_nemo.environments.nemo_gym.rows import read_row

LATENCY_S = 0.1
IN_FLIGHT = 2000
CPU_MS = 1.0
SHARE = 0.9
GROWTH_MB = 16.0
"""Bounds: CPU milliseconds a call, share of concurrency / latency, growth of memory after the first batch."""


@dataclass
class Case:
    """One measurement."""

    what: str
    calls: int
    seconds: float
    cpu_ms: float
    most_in_flight: int

    @property
    def rate(self) -> float:
        """Calls a second."""
        return self.calls / self.seconds


class _Answering(asyncio.Protocol):
    """Answers each request of a connection after the latency; counts how many wait at once."""

    reply = b""
    waiting = most = 0

    def connection_made(self, transport):
        self._transport = transport
        self._data = b""
        self._missing = None

    def data_received(self, data):
        self._data += data
        while self._complete():
            kind = type(self)
            kind.waiting += 1
            kind.most = max(kind.most, kind.waiting)
            asyncio.get_running_loop().call_later(LATENCY_S, self._answer)

    def _complete(self) -> bool:
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end:
            return False
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if len(body) < length:
            return False
        self._data = body[length:]
        return True

    def _answer(self):
        kind = type(self)
        kind.waiting -= 1
        if not self._transport.is_closing():
            self._transport.write(kind.reply)


def _serve(port, most, padding: int) -> None:
    body = json.dumps({"reward": 2.0, "reward_components": {"a": 1.0, "b": 1.0}, "echo": "x" * padding}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    _Answering.reply = head.encode() + body

    async def serve():
        server = await asyncio.get_running_loop().create_server(_Answering, "127.0.0.1", 0, backlog=4096)
        port.value = server.sockets[0].getsockname()[1]
        while True:
            await asyncio.sleep(0.05)
            most.value = max(most.value, _Answering.most)
            _Answering.most = 0

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(serve())


class Bench:
    """The server, and measurements against it."""

    def __init__(self, padding: int = 4000):
        context = multiprocessing.get_context("spawn")
        self._port = context.Value("i", 0)
        self._most = context.Value("i", 0)
        self._process = context.Process(target=_serve, args=(self._port, self._most, padding), daemon=True)
        self._process.start()
        while not self._port.value:
            time.sleep(0.02)

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.join()

    def gym(self, concurrency: int, seed_session: bool = False) -> NemoGym:
        """A client of the server."""
        url = f"http://127.0.0.1:{self._port.value}"
        options = {"concurrency": concurrency, "seed_session": seed_session, "rewards": [{"name": "a"}, {"name": "b"}]}
        return NemoGym({"servers": {"bench": url}, **options})

    def measure(self, what: str, gym: NemoGym, trajectories: list[Trajectory], calls_each: int = 1) -> Case:
        """Verify once to open the connections, then once with clocks."""
        gym.verify(trajectories[: gym.settings.limits.concurrency])
        time.sleep(0.1)
        self._most.value = 0
        wall = time.perf_counter()
        cpu = time.process_time()
        verdicts = gym.verify(trajectories)
        seconds = time.perf_counter() - wall
        cpu = time.process_time() - cpu
        time.sleep(0.1)
        wrong = [v for v in verdicts if v.outcome is not Outcome.OK or v.rewards != {"a": 1.0, "b": 1.0}]
        if wrong:
            raise SystemExit(f"{len(wrong)} of {len(verdicts)} verdicts failed: {wrong[0]}")
        calls = calls_each * len(trajectories)
        return Case(what, calls, seconds, 1000 * cpu / calls, self._most.value)


def trajectories_of(count: int) -> list[Trajectory]:
    """Trajectories in groups of 8, with rows of about 2 kB."""
    row = {"responses_create_params": {"input": [{"role": "user", "content": "word " * 300}]}, "expected_answer": "4"}
    empty = np.zeros(0, np.int32)
    fields = read_row(row)
    prompts = [Prompt(f"p{i}", empty, "", "gym", fields) for i in range(-(-count // 8))]
    return [
        Trajectory(prompts[i // 8], i % 8, empty, empty.astype(np.float32), 0, "four " * 50, "stop")
        for i in range(count)
    ]


def throughput(bench: Bench, concurrency: int, seconds: float) -> Case:
    """A steady flow at ``concurrency / latency`` calls a second; the best of three, since others may share the
    cores."""
    gym = bench.gym(concurrency)
    batch = trajectories_of(int(seconds * concurrency / LATENCY_S))
    cases = [bench.measure(f"{concurrency} in flight", gym, batch) for _ in range(3)]
    gym.close()
    return max(cases, key=lambda case: case.rate)


def all_at_once(bench: Bench, seed_session: bool = False) -> Case:
    """2,000 trajectories in flight together."""
    gym = bench.gym(IN_FLIGHT, seed_session)
    what = f"{IN_FLIGHT:,} in flight{', seeded' if seed_session else ''}"
    case = bench.measure(what, gym, trajectories_of(IN_FLIGHT), 2 if seed_session else 1)
    gym.close()
    return case


def memory_growth_mb(bench: Bench, batches: int) -> float:
    """Megabytes by which this process is larger after ``batches`` batches of 2,000 than after the first two."""
    gym = bench.gym(IN_FLIGHT)
    trajectories = trajectories_of(IN_FLIGHT)
    process = psutil.Process()
    sizes = []
    for _ in range(batches):
        gym.verify(trajectories)
        sizes.append(process.memory_info().rss)
    gym.close()
    return (sizes[-1] - sizes[1]) / 1e6


def main() -> int:
    """Command line; see the top of the file."""
    parser = argparse.ArgumentParser(description="Benchmark of verification by servers.")
    parser.add_argument("--quick", action="store_true", help="shorter flows, fewer batches")
    quick = parser.parse_args().quick
    bench = Bench()
    missed = []
    for concurrency in (50,) if quick else (10, 25, 50):
        case = throughput(bench, concurrency, 2.0 if quick else 4.0)
        share = case.rate * LATENCY_S / concurrency
        print(
            f"{case.what:28s} {case.rate:6.0f} calls/s = {share:4.0%} of concurrency/latency, CPU {case.cpu_ms:.2f} ms "
            "a call"
        )
        missed += [case.what] if share < SHARE or case.cpu_ms > CPU_MS else []
    for seeded in (False, True):
        case = all_at_once(bench, seeded)
        print(
            f"{case.what:28s} {case.rate:6.0f} calls/s, {case.most_in_flight} at once, CPU {case.cpu_ms:.2f} ms a call"
        )
        missed += [case.what] if case.cpu_ms > CPU_MS else []
    growth = memory_growth_mb(bench, 4 if quick else 12)
    print(f"{'memory':28s} {growth:+.1f} MB from the second batch of {IN_FLIGHT:,} to the {4 if quick else 12}th")
    missed += ["memory"] if growth > GROWTH_MB else []
    bench.close()
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
