"""A pool of long-lived rank processes, laid out anew for every case.

Importing megatron.core takes seconds, so one process does it, from which ranks are forked, and ranks are started once;
they keep their process groups as long as the layout stays the same. A rank that fails or dies fails the case with its
traceback, a rank that hangs fails it at the deadline; the pool is then replaced, because its other ranks may wait in a
collective for ever.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Ranks that were only waiting for a failed one get this long to report what they saw.
_GRACE_S = 5.0
DIED = "the process died"
_GROUP_TIMEOUT_S = 300.0
# Importing Megatron takes 10 s, several times that on a busy machine.
_START_S = 1200.0
_MOST_RANKS = 4


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time."""


@dataclass
class Place:
    """What a function on a rank is told about where it runs."""

    runtime: Any
    layout: Any
    rank: int
    ranks: int
    torch_before: dict
    """``torch_names()`` from before Megatron was made importable."""


def torch_names() -> dict[str, Any]:
    """Everything that torch, torch.cuda, torch.distributed and Tensor offer, by qualified name."""
    import torch
    import torch._dynamo  # replaces torch.manual_seed when it is imported, whoever imports it

    owners = {"torch": torch, "torch.cuda": torch.cuda, "torch.distributed": torch.distributed, "Tensor": torch.Tensor}
    return {f"{prefix}.{name}": value for prefix, owner in owners.items() for name, value in vars(owner).items()}


class RankPool:
    """Rank processes, started when first needed: forked from one that has imported Megatron.

    Args:
        prepare: called before anything of Megatron is imported, in a process of this pool from which its ranks are
            forked.
        fork: False if the pool has to import for itself, as where libraries read a variable that is set now.
    """

    def __init__(self, folder: Path, prepare: Callable[[], None] | None = None, fork: bool = True):
        self.prepare = prepare
        self._fork = fork and prepare is None
        # Its own, because a file that ranks have met in holds their addresses for ever.
        self.folder = tempfile.mkdtemp(dir=folder)
        self.groups = 0
        self.processes: list[tuple[Any, Any]] = []
        self.laid_out = None

    def run(self, function: Callable, ranks: int, layout, *arguments, deadline_s: float = 300.0, seed: int = 1) -> list:
        """``function(place, *arguments)`` on every rank of ``layout``; the results by rank.

        ``function`` is a top-level function of an importable module.
        """
        self._start(ranks)
        if self.laid_out != (ranks, layout):
            self.groups = self.groups + 1
            self.laid_out = (ranks, layout)
        group = (ranks, f"file://{self.folder}/group_{self.groups}")
        for _, pipe in self.processes[:ranks]:
            pipe.send((group, layout, seed, function, arguments))
        return self._collect(range(ranks), deadline_s)

    def close(self) -> None:
        """End all ranks."""
        for process, pipe in self.processes:
            pipe.close()
            process.kill()
            process.join()
        self.processes = []
        self.laid_out = None

    def _start(self, ranks: int) -> None:
        """Have at least ``ranks`` processes that have imported Megatron."""
        new = range(len(self.processes), ranks)
        if self._fork:
            context = _fork_server()
            for rank in new:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
                process.start()
                theirs.close()
                self.processes.append((process, ours))
        elif new:
            self.close()
            self.processes = _family(self.prepare)
            new = range(_MOST_RANKS)
        self._collect(new, _START_S)

    def _collect(self, ranks: range, within_s: float) -> list:
        deadline = time.monotonic() + within_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {self.processes[rank][1]: rank for rank in ranks}
        while waiting and time.monotonic() < deadline:
            for pipe in multiprocessing.connection.wait(list(waiting), timeout=deadline - time.monotonic()):
                rank = waiting.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok = False
                    value = DIED
                (results if ok else failures)[rank] = value
                if not ok:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures or waiting:
            failures.update(dict.fromkeys(waiting.values(), "no answer"))
            # Where every rank raised none is left waiting in a collective, and a new process group is new enough.
            self.laid_out = None
            if waiting or DIED in failures.values():
                self.close()
            raise RankFailure("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in ranks]


def _fork_server():
    """Processes forked from one that has imported what ``rank_imports`` imports. It has one thread and no group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_imports"])
    with pytest.MonkeyPatch.context() as patch:
        # The server of Python 3.12 does not take over sys.path.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        multiprocessing.forkserver.ensure_running()
    return context


def _family(prepare: Callable[[], None] | None) -> list[tuple[Any, Any]]:
    """``_MOST_RANKS`` ranks, forked from a process that imports once; ``kill`` of one ends all."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = zip(*(context.Pipe() for _ in range(_MOST_RANKS)))
    parent = context.Process(target=_fork_ranks, args=(theirs, prepare), daemon=True)
    parent.start()
    for pipe in theirs:
        pipe.close()
    return [(_Rank(parent), pipe) for pipe in ours]


@dataclass
class _Rank:
    """A rank of a family."""

    parent: Any

    def kill(self) -> None:
        """End the family."""
        self.parent.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.parent.pid, signal.SIGKILL)

    def join(self) -> None:
        """Wait for its parent."""
        self.parent.join()


def _fork_ranks(pipes, prepare) -> None:
    os.setpgid(0, 0)
    gc.disable()  # until `rank_imports` has been imported
    if prepare:
        prepare()
    import rank_imports  # noqa: F401 - for the ranks

    for rank, pipe in enumerate(pipes):
        if not os.fork():
            for other in pipes:
                if other is not pipe:
                    other.close()
            _serve(rank, pipe)
            os._exit(0)
    for pipe in pipes:  # or nobody would see that a rank has died
        pipe.close()
    for _ in pipes:
        os.wait()


def _serve(rank: int, pipe) -> None:
    """The main loop of a rank process; ends when the pool closes its end of the pipe."""
    import rank_imports
    import torch

    from gdpo_nemo.megatron import runtime

    torch.set_num_threads(1)
    here = rank_imports.RUNTIME
    joined = None
    pipe.send((True, "ready"))
    while True:
        try:
            group, layout, seed, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if group != joined:
                joined = None
                _let_go()
                runtime.tear_down()
                runtime.initialize(here, rank, group[0], group[1], timeout_s=_GROUP_TIMEOUT_S)
                runtime.lay_out(layout, seed)
                joined = group
            runtime.seed_everything(seed)
            pipe.send((True, function(Place(here, layout, rank, group[0], rank_imports.TORCH_BEFORE), *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _let_go() -> None:
    """Free the models of earlier cases with their groups, each of which keeps two threads.

    A mixture's dispatcher keeps tensors whose autograd nodes hold the wrapper's hooks, and the wrapper holds the
    dispatcher: a circle that Python's collector cannot see through.
    """
    from megatron.core.distributed import DistributedDataParallel

    for thing in gc.get_objects():
        if type(thing) is DistributedDataParallel:
            vars(thing).clear()
    gc.collect()
