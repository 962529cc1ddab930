"""A broadcast without Ray and vLLM: engines are processes that receive and answer, the policy is one rank in a thread.

Transport, sender and receivers are the real ones.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights import broadcast_group

CPU = torch.device("cpu")
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["gdpo_nemo.weights.transports.collective"])  # torch takes seconds to import


def counts() -> tuple[int, int]:
    """(open descriptors, threads) of this process, without Python's own threads: those of earlier tests may end now."""
    gc.collect()
    theirs = {str(thread.native_id) for thread in threading.enumerate()}
    return len(os.listdir("/proc/self/fd")), len(set(os.listdir("/proc/self/task")) - theirs)


def _serve(connection, workers: int) -> None:
    """An engine: does what it is told, in a thread for each of its worker processes."""
    torch.set_num_threads(1)

    def receive(manifest, receiver, worker):
        return {name: float(tensor.sum()) for name, tensor in receiver.receive(manifest, CPU, worker)}

    with ThreadPoolExecutor(workers) as pool:
        pool.submit(int).result()  # its thread is there before threads are counted
        while True:
            what, *arguments = connection.recv()
            try:
                if what == "update":
                    answer = list(pool.map(receive, *zip(*[(*arguments, worker) for worker in range(workers)])))
                elif what == "close":
                    answer = [arguments[0].close(worker) for worker in range(workers)]
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
        self.update_weights = SimpleNamespace(remote=self._update)
        self.close_receiver = SimpleNamespace(remote=lambda receiver: self._ask("close", receiver))

    def _update(self, manifest, receiver):
        self.told.append(receiver)
        return self._ask("update", manifest, receiver)

    def _ask(self, *what):
        self.connection.send(what)
        return self

    def answer(self):
        """To the oldest call not answered. Raises EOFError or ConnectionError where the process has died."""
        assert self.connection.poll(300), "an engine does not answer"
        return self.connection.recv()

    def counts(self) -> tuple[int, int, list[str]]:
        """Its open descriptors and threads, and by which names it stands in a group."""
        return self._ask("counts").answer()

    def end(self) -> None:
        if not self.connection.closed:
            self.process.kill()
            self.process.join()
            self.process.close()
            self.connection.close()


class Policy:
    """One rank, in threads of this process."""

    timeout_s = 300.0

    def __init__(self, processes: int):
        self.engine_processes = processes
        self.value = 0.0
        self.adapters = None
        self.runtime = SimpleNamespace(device=CPU)
        self._pool = ThreadPoolExecutor(1)
        self._senders = {}

    def update(self):
        for number in range(8):
            yield f"w{number}", torch.full((1000,), self.value + number)

    def start_sender(self, sender, method, *arguments, ranks=None):
        def call():
            made = self._senders.get(sender) or self._senders.setdefault(sender, sender(self, 0, "127.0.0.1"))
            return getattr(made, method)(*arguments)

        return [self._pool.submit(call)]

    def wait(self, refs, what):
        return [ref.result(120) for ref in refs]

    def settle(self) -> None:
        """Wait until the rank has done what it was told."""
        self._pool.submit(int).result(120)
