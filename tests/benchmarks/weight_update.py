"""CPU seconds, wall seconds and memory of whole weight updates to one engine process, without Ray and vLLM.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/weight_update.py --parameters 100e6 --ranks 1 4

Ranks and engine are processes with a bfloat16 model, of which every version changes a share by one unit in the last
place. Ranks are data parallel, so each one holds the whole model. The engine copies what it receives to its model. With
``memory``, files in shared memory replace Ray's object store. Seconds are medians after two updates. The peak is the
growth of a process during updates, including files that it maps. PYTHONPATH may be an older commit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from gdpo_nemo.weights.transports.base import TransportOptions, load_transport

SHAPE = (4096, 512)
STORED = "/dev/shm/gdpo_nemo_benchmark_{}"
"""File with the stored messages of a rank."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch"])  # its import takes seconds


class Model:
    """The model of a rank, as a sender sees it, or of an engine."""

    adapters = None
    runtime = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, parameters: float, rank: int, ranks: int):
        torch.set_num_threads(1)
        self.rank, self.ranks = rank, ranks
        count = round(parameters / (SHAPE[0] * SHAPE[1]))
        generator = torch.Generator().manual_seed(0)
        self.tensors = {f"w{n}": torch.randn(SHAPE, generator=generator).to(torch.bfloat16) for n in range(count)}
        self.senders: dict = {}

    def train(self, share: float, seed: int) -> None:
        """Change about a share of all words."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors.values():
            words = tensor.view(torch.int16).flatten()
            chosen = torch.randint(len(words), (int(share * len(words)),), generator=generator)
            words[chosen] += 2 * (chosen % 2).to(torch.int16) - 1

    def update(self):
        """Yield all tensors, for older commits, in which rank 0 sends them."""
        yield from self.tensors.items()

    def pieces(self):
        """Yield the pieces of this rank."""
        from gdpo_nemo.weights.pieces import Piece

        yield from (Piece(*pair) for pair in list(self.tensors.items())[self.rank :: self.ranks])

    def send(self, sender: type, method: str, *arguments: object, stored: str = ""):
        """Call a method of a sender. Arrays in a second result are written to the file ``stored``."""
        self.senders[sender] = self.senders.get(sender) or sender(self, self.rank, "127.0.0.1")
        result = getattr(self.senders[sender], method)(*arguments)
        if not stored or result[1] is None:
            return result
        arrays = result[1] if isinstance(result[1], list) else [result[1]]
        with open(stored, "wb") as file:
            file.writelines(map(memoryview, arrays))
        return result[0], (stored, [array.nbytes for array in arrays], isinstance(result[1], list))

    def receive(self, manifest, receiver, *data) -> None:
        """Copy an update to the model."""
        mapped = []
        for path, sizes, is_list in data:
            arrays = np.split(np.memmap(path, np.uint8, "r"), np.cumsum(sizes)[:-1])
            mapped.append(arrays if is_list else arrays[0])
        with receiver.opened(manifest, True, *mapped) as opened:
            for name, tensor in opened.receive(manifest, self.runtime.device, 0):
                self.tensors[name].copy_(tensor)

    def cost(self) -> tuple[float, int, int]:
        """Return (CPU seconds, peak of the memory in MiB since the last call, memory in MiB)."""
        with open("/proc/self/status") as file:
            mib = {line.split(":")[0]: int(line.split()[1]) >> 10 for line in file if line.endswith("kB\n")}
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the peak
        return time.process_time(), mib["VmHWM"], mib["VmRSS"]


def serve(connection, *arguments) -> None:
    """Answer calls of a model's methods."""
    model = Model(*arguments)
    while True:
        method, positional, options = connection.recv()
        connection.send(getattr(model, method)(*positional, **options))


class Actor:
    """Handle of a process with a model."""

    def __init__(self, *arguments):
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()  # calls raise EOFError after the process has failed
        self.pool = ThreadPoolExecutor(1)
        self.update_weights = SimpleNamespace(remote=lambda *given: self.call("receive", *map(value_of, given)))

    def call(self, method: str, *arguments, **options) -> Future:
        self.connection.send((method, arguments, options))
        return self.pool.submit(self.connection.recv)


def value_of(argument):
    return argument.result() if isinstance(argument, Future) else argument


class Policy:
    """The ranks' processes, as a transport sees them."""

    timeout_s = 600.0
    engine_processes = 1

    def __init__(self, parameters: float, ranks: int):
        self.ranks = [Actor(parameters, rank, ranks) for rank in range(ranks)]
        self.pool = ThreadPoolExecutor(2 * ranks)

    def start_sender(self, *arguments, ranks=None, num_returns=1):
        """Call a method of the sender. Two results of a call get separate futures."""
        chosen = range(len(self.ranks)) if ranks is None else ranks
        files = [STORED.format(rank) if num_returns == 2 else "" for rank in chosen]
        calls = [self.ranks[rank].call("send", *arguments, stored=file) for rank, file in zip(chosen, files)]
        if num_returns == 1:
            return calls
        return [[self.pool.submit(lambda c=call, i=i: c.result()[i]) for i in (0, 1)] for call in calls]

    def wait(self, refs, what):
        """Return the results."""
        return [ref.result() for ref in refs]


def measured(policy: Policy, engine: Actor, transport, options) -> str:
    """Return the costs of an update, as columns of the table."""
    actors = [*policy.ranks, engine]
    rows, peaks = [], [0] * len(actors)
    empty = [actor.call("cost").result()[2] for actor in actors]
    for version in range(2 + options.updates):
        policy.wait([rank.call("train", options.share, version) for rank in policy.ranks], "")
        before = [actor.call("cost").result()[0] for actor in actors]
        start = time.perf_counter()
        transport.prepare(version)
        received, sent = transport.send({0: engine})
        policy.wait([*received, *sent], "")
        wall = time.perf_counter() - start
        after = [actor.call("cost").result() for actor in actors]
        peaks = [max(peak, now[1] - base) for peak, now, base in zip(peaks, after, empty)]
        spent = [now[0] - then for now, then in zip(after, before)]
        rows.append((spent[0], max(spent[:-1]), sum(spent[:-1]), spent[-1], wall))
    seconds = " ".join(f"{statistics.median(column):7.2f}" for column in zip(*rows[2:]))
    mib = getattr(transport, "statistics", {}).get("weights/sent_mib", float("nan"))
    return f"{seconds}  {mib:8.1f} {peaks[0]:6d} {max(peaks[:-1]):6d} {peaks[-1]:6d}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--updates", type=int, default=3)
    options = parser.parse_args()
    modes = ({"mode": "full"}, {"mode": "difference"}) if hasattr(TransportOptions, "mode") else ({},)
    print("                         CPU s: rank 0, max, sum  engine  wall s       MiB  peak MiB: rank 0, max, engine")
    for ranks in options.ranks:
        for name, mode in [(name, mode) for name in ("memory", "gloo") for mode in modes]:
            policy, engine = Policy(options.parameters, ranks), Actor(options.parameters, 0, 1)
            transport = load_transport(name)(policy, TransportOptions(bucket_bytes=256 << 20, **mode))
            columns = measured(policy, engine, transport, options)
            print(f"{ranks} {name:6s} {mode.get('mode', 'before'):10s}     {columns}", flush=True)
            for actor in [*policy.ranks, engine]:
                actor.process.kill()
        for rank in range(ranks):
            Path(STORED.format(rank)).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
