"""Which processes a run has on this host, by what they do."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Iterator

import psutil

from gdpo_nemo.observe.run_files import status_if_whole

DRIVER, RANK, ENGINE = "driver", "policy rank", "engine"
ENGINE_CORE = "vLLM process"
WORKER, RAYLET, GCS, REAPER = "environment worker", "raylet", "GCS", "reaper"
SUPERVISOR = "supervisor"
ROLES = (SUPERVISOR, DRIVER, RANK, ENGINE, ENGINE_CORE, WORKER, RAYLET, GCS, REAPER)


class RunProcesses:
    """Those of the run of ``run_dir`` that the process ``root`` started.

    Ray's servers count where the run started them, and not where it joined a cluster.
    """

    def __init__(self, root: int, run_dir: Path):
        self.root = root
        self._run_dir = run_dir

    def of(self, role: str) -> list[int]:
        """Ids of the processes of ``role`` that live now."""
        if role == SUPERVISOR:
            return [self.root] if psutil.pid_exists(self.root) else []
        driver = self._driver()
        if driver is None:
            return []
        if role == DRIVER:
            return [driver]
        if role in (RANK, ENGINE):
            return self._reported(role)
        if role == ENGINE_CORE:
            return [
                pid for engine in self._reported(ENGINE) for pid, words in _children(engine) if "EngineCore" in words
            ]
        return [pid for pid, words in _children(driver) if _does(words, role)]

    def all(self) -> dict[int, float]:
        """Every process of the run, and when it was started, in seconds since the epoch."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.root)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[process.pid] = process.create_time()
        return found

    def _driver(self) -> int | None:
        """The process that trains: the one that the status names, once this start of the run has written it."""
        driver = status_if_whole(self._run_dir).get("driver")
        own = {self.root, *(pid for pid, _ in _children(self.root, recursive=False))}
        return driver if driver in own else None

    def _reported(self, role: str) -> list[int]:
        here = socket.gethostname()
        roles = status_if_whole(self._run_dir).get("roles", {})
        return [
            pid for name, (host, pid) in roles.items() if name.startswith(f"{role} ") and host == here and _lives(pid)
        ]


def _does(words: str, role: str) -> bool:
    if role == WORKER:
        return "multiprocessing.spawn" in words
    if role == REAPER:
        return "reaper.py run" in words
    return words.split(" ", 1)[0].endswith({RAYLET: "/raylet", GCS: "/gcs_server"}[role])


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _children(pid: int, recursive: bool = True) -> Iterator[tuple[int, str]]:
    """(id, command line) of the living descendants of a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    yield child.pid, " ".join(child.cmdline())
