"""A broadcast without Ray and vLLM: engines are processes that receive and answer, the policy's ranks are threads.

Transport, sender and receivers are the real ones.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import zlib
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights import broadcast_group
from gdpo_nemo.weights.pieces import Piece, Region

CPU = torch.device("cpu")
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["gdpo_nemo.weights.transports.collective"])  # torch takes seconds to import


def counts() -> tuple[int, int]:
    """(open descriptors, threads) of this process, without Python's own threads: those of earlier tests may end now."""
    gc.collect()
    theirs = {str(thread.native_id) for thread in threading.enumerate()}
    return len(os.listdir("/proc/self/fd")), len(set(os.listdir("/proc/self/task")) - theirs)


def checksums(tensors) -> dict[str, int]:
    """The checksum of each tensor's bytes."""
    return {name: zlib.crc32(tensor.contiguous().view(torch.uint8).numpy()) for name, tensor in tensors}


def _loaded(tensors, accident: str, at: int):
    """Yield tensors until an accident happens before the tensor with the number ``at``."""
    for number, pair in enumerate(tensors):
        if accident and number == at:
            if accident == "die":
                os._exit(1)
            raise RunError("a layer refuses a tensor")
        yield pair


def _serve(connection, workers: int) -> None:
    """An engine: does what it is told, in a thread for each of its worker processes."""
    torch.set_num_threads(1)
    accidents = {}

    def receive(manifest, receiver, worker):
        # As the end of an engine's process would, even while the exception's traceback refers to the iterator.
        with contextlib.closing(receiver.receive(manifest, CPU, worker)) as tensors:
            return checksums(_loaded(tensors, *accidents.pop(worker, ("", 0))))

    with ThreadPoolExecutor(workers) as pool:
        pool.submit(int).result()  # its thread is there before threads are counted
        while True:
            what, *arguments = connection.recv()
            try:
                if what == "update":
                    calls = [pool.submit(receive, *arguments, worker) for worker in range(workers)]
                    futures.wait(calls)
                    answer = [call.result() for call in calls]
                elif what == "close":
                    answer = [arguments[0].close(worker) for worker in range(workers)]
                elif what == "accident":
                    worker, accident, at = arguments
                    answer = accidents.update({worker: (accident, at)})
                else:
                    answer = (*counts(), sorted(broadcast_group._groups))
            except RunError as error:
                answer = error
            connection.send(answer)


class Actor:
    """The handle of such an engine, with the methods that a transport calls."""

    def __init__(self, workers: int = 1):
        (self.connection, theirs) = _processes.Pipe()
        self.process = _processes.Process(target=_serve, args=(theirs, workers), daemon=True)
        self.process.start()
        theirs.close()
        self.told = []
        self.bases = []
        """Version to which each update was a difference, or None."""
        self.update_weights = SimpleNamespace(remote=self._update)
        self.close_receiver = SimpleNamespace(remote=lambda receiver: self._ask("close", receiver))

    def _update(self, manifest, receiver):
        self.told.append(receiver)
        self.bases.append(manifest.base and manifest.base.version)
        return self._ask("update", manifest, receiver)

    def _ask(self, *what):
        self.connection.send(what)
        return self

    def answer(self):
        """To the oldest call not answered. Raises EOFError or ConnectionError where the process has died."""
        assert self.connection.poll(300), "an engine does not answer"
        return self.connection.recv()

    def fail_at(self, worker: int, accident: str, at: int) -> None:
        """Make a process of the next update ``die`` or ``raise`` before it gets the tensor with the number ``at``."""
        self._ask("accident", worker, accident, at).answer()

    def counts(self) -> tuple[int, int, list[str]]:
        """Its open descriptors and threads, and by which names it stands in a group."""
        return self._ask("counts").answer()

    def end(self) -> None:
        if not self.connection.closed:
            self.process.kill()
            self.process.join()
            self.process.close()
            self.connection.close()


class RankPolicy:
    """One rank: two tensors of its own, and its rows of two that the ranks share."""

    adapters = None
    runtime = SimpleNamespace(device=CPU)

    def __init__(self, rank: int, ranks: int):
        self.rank = rank
        self.ranks = ranks
        self.value = 0.0
        self.share = 1 / 16
        """Share of the words that differ from the version before."""
        self.fails_at: int | None = None
        """Number of the piece whose reading fails, once."""

    def whole(self) -> dict[str, torch.Tensor]:
        """All tensors of the current version."""
        tensors = {}
        for number in range(4 * self.ranks + 2):
            tensor = torch.arange(800 * self.ranks, dtype=torch.int16).view(torch.bfloat16) + number
            tensor[: int(self.share * len(tensor))] = self.value
            tensors[f"w{number}"] = tensor.view(-1, 100)
        return tensors

    def pieces(self):
        """Yield the pieces of this rank, with the rows of shared tensors first."""
        tensors = self.whole()
        for number, (name, tensor) in enumerate(reversed(tensors.items())):
            if number == self.fails_at:
                self.fails_at = None
                raise RuntimeError("this rank fails")
            if number < 2:
                rows = slice(8 * self.rank, 8 * self.rank + 8)
                yield Piece(name, tensor[rows], Region((8 * self.rank, 0), tuple(tensor.shape)))
            elif number % self.ranks == self.rank:
                yield Piece(name, tensor)


class Policy:
    """Ranks in threads of this process, each with an address space of its own as far as a sender can see."""

    timeout_s = 300.0

    def __init__(self, processes: int, ranks: int = 1):
        self.engine_processes = processes
        self.ranks = [RankPolicy(rank, ranks) for rank in range(ranks)]
        self._pools = [ThreadPoolExecutor(1) for _ in self.ranks]
        self._senders = {}

    def train(self, value: float, share: float = 1 / 16) -> None:
        """Change the weights of all ranks."""
        for rank in self.ranks:
            rank.value = value
            rank.share = share

    def whole(self) -> dict[str, int]:
        """The checksum of each tensor."""
        return checksums(self.ranks[0].whole().items())

    def sender(self, sender, rank: int):
        """The sender of a rank, made when it is first needed."""
        if (sender, rank) not in self._senders:
            self._senders[sender, rank] = sender(self.ranks[rank], rank, "127.0.0.1")
        return self._senders[sender, rank]

    def start_sender(self, sender, method, *arguments, ranks=None):
        def call(rank):
            return getattr(self.sender(sender, rank), method)(*arguments)

        ranks = range(len(self.ranks)) if ranks is None else ranks
        return [self._pools[rank].submit(call, rank) for rank in ranks]

    def wait(self, refs, what):
        """Wait for all, then raise the first exception."""
        futures.wait(refs, 120)
        return [ref.result(0) for ref in refs]

    def settle(self) -> None:
        """Wait until the ranks have done what they were told."""
        for pool in self._pools:
            pool.submit(int).result(120)
