"""Starts a Ray session on this machine so that a busy machine delays it and does not end it."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
from typing import Any, Callable, Iterator, Sequence

import psutil
import ray
from ray._private import ray_constants, services
from ray._private.node import Node
from ray._raylet import persist_port

from gdpo_nemo.cluster import idle_agent
from gdpo_nemo.config.messages import message_line
from gdpo_nemo.errors import InfrastructureFailed

_STARTS = 3
"""Attempts before the run gives up."""
_START_LIMIT_S = 900.0
"""Limit of one attempt: several times what Ray itself waits for its processes."""
_LOOK_S = 0.2
"""How often the servers of a session are looked after; Ray may abort this process soon after it lost one."""
_UNUSED = -1
"""What Ray's agent for the dashboard writes for a service that it does not offer."""
LOOPBACK = "127.0.0.1"
"""Address of a session that is for this machine alone: whatever Ray starts with it listens there and nowhere else."""
_AGENT = "--dashboard_agent_command="
"""The raylet's argument with what to start for the dashboard; it refuses an empty one."""


def start(initialize: Callable[[], None]) -> None:
    """Call ``initialize``, which starts a session, until it succeeds; what a failed attempt leaves is killed.

    Raises:
        InfrastructureFailed: no attempt succeeded.
    """
    failure: str | None = None
    for _ in range(_STARTS):
        before = set(psutil.Process().children())
        failure = _attempt(initialize, before)
        if failure is None:
            return
        # What the attempt's frames held is garbage now. A client of Ray that lives on would end this process, a minute
        # after it lost the server that is killed here.
        gc.collect()
        ray.shutdown()
        left = set(psutil.Process().children()) - before
        for child in left:
            child.kill()
        psutil.wait_procs(left)
    raise InfrastructureFailed(
        f"Ray did not start on this machine in {_STARTS} attempts ({failure}); its logs are in "
        f"{os.environ['RAY_TMPDIR']}/ray"
    )


def _attempt(initialize: Callable[[], None], before: set[psutil.Process]) -> str | None:
    """Why ``initialize`` failed, in a line; None: it did not."""
    try:
        with _end_after(_START_LIMIT_S, before), _on_loopback(), _agents_awaited_by_nobody(), _without_unused_servers():
            initialize()
    except Exception as error:  # of many kinds; Ray raises a bare Exception when its node is late
        return message_line(error)
    return None


@contextlib.contextmanager
def watched(lost: Callable[[str], None]) -> Iterator[None]:
    """Call ``lost``, from a thread, with a sentence when a server of the session, which this process started, ends
    while the block runs.

    Ray would be silent for a minute and then end this process with a dump of its state.
    """
    done = threading.Event()
    node: Node = ray._private.worker._global_node
    servers = {name: each.process for name, each in _servers(node)}

    def watch() -> None:
        while not done.wait(_LOOK_S):
            for name, process in servers.items():
                if process.poll() is not None and not done.is_set():
                    how = f"status {process.returncode}" if process.returncode >= 0 else f"signal {-process.returncode}"
                    lost(f"Ray's {name} (process {process.pid}) on this machine ended with {how}")
                    return

    thread = threading.Thread(target=watch, name="watch of Ray", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _servers(node: Node) -> Iterator[tuple[str, Any]]:
    for name in (ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET):
        yield from ((name, each) for each in node.all_processes.get(name, ()))


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a session that starts in this block have ``LOOPBACK`` for its address.

    Ray puts an address that other machines reach in place of one that they do not, and its servers then listen on every
    interface.
    """
    with _replaced(services, "resolve_ip_for_localhost", lambda host: host):
        yield


@contextlib.contextmanager
def _agents_awaited_by_nobody() -> Iterator[None]:
    """Tell the raylets that start in this block the ports of their agents beforehand.

    A raylet gives its agents, Python processes with many imports, 15 s to write their ports into files, and aborts
    then; no setting changes that (https://github.com/ray-project/ray/issues/65983). On two cores with a load of 12 they
    need longer.
    """
    original = Node.start_raylet

    def start_raylet(node: Node, *arguments: Any, **options: Any) -> None:
        # Actors with an environment of their own need this agent, and wait for it as long as the session says.
        node._ray_params.runtime_env_agent_port = _free_port()
        # Nobody asks for metrics or jobs of a session that ends with the run.
        for service in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
            persist_port(node._session_dir, node._node_id, service, _UNUSED)
        original(node, *arguments, **options)

    with _replaced(Node, "start_raylet", start_raylet):
        yield


@contextlib.contextmanager
def _without_unused_servers() -> Iterator[None]:
    """Let sessions that start in this block do without the dashboard and its agent, the autoscaler, and the copying of
    worker logs to the driver.

    Nobody asks them for anything in a session that ends with the run, and with ``include_dashboard=False`` Ray starts
    all four: Python processes that take 4 s of a core before the first actor is there. ``ray.init`` has no arguments
    for them.
    """
    start_head = Node.start_head_processes
    start_process = services.start_ray_process

    def start_head_processes(node: Node) -> None:
        node._ray_params.no_monitor = True
        node._ray_params.include_log_monitor = False
        start_head(node)

    def start_ray_process(command: Sequence[str], *arguments: Any, **options: Any) -> Any:
        agent = _AGENT + subprocess.list2cmdline([sys.executable, "-S", "-E", idle_agent.__file__])
        command = [agent if argument.startswith(_AGENT) else argument for argument in command]
        return start_process(command, *arguments, **options)

    with (
        _replaced(Node, "start_head_processes", start_head_processes),
        _replaced(Node, "start_api_server", lambda node, **options: None),
        _replaced(services, "start_ray_process", start_ray_process),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _end_after(limit_s: float, before: set[psutil.Process]) -> Iterator[None]:
    """Kill the GCS of a start that takes longer than ``limit_s``, so that the start fails.

    Ray retries a GCS that is alive but silent once for every second of gcs_server_port_wait_time_s, and waits half a
    minute each time: for hours.
    """

    def end() -> None:
        for child in set(psutil.Process().children()) - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                if "gcs_server" in child.name():
                    child.kill()

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
