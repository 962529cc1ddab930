"""Functions that start a local Ray session, even on a busy machine, and look up network interfaces."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import ipaddress
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services
from ray._private.node import Node
from ray._raylet import persist_port

from gdpo_nemo.cluster import idle_agent, worker_launcher
from gdpo_nemo.utils.errors import InfrastructureFailed, message_line

_STARTS = 3
"""Number of attempts to start a session before the run fails."""
_START_LIMIT_S = 900.0
"""Time limit of an attempt, which is several times as long as Ray's time limits for its processes."""
_REGISTER_S = 120.0
"""Time limit for a raylet to register with the GCS. Ray's limit of 30 s is too short on two cores with a load of 16."""
_POLL_S = 0.2
"""Interval between checks of a session's servers. Ray may abort this process soon after it has lost a server."""
_UNUSED = -1
"""Port number that Ray's dashboard agent reports for a service that it does not offer."""
LOOPBACK = "127.0.0.1"
"""Address of a local session. All processes that Ray starts listen only on this address."""
_LOWEST_PORT = 20_000
"""Lower bound of server ports. Ray's workers listen on ports from 10,002 to 19,999."""
_PORTS_TRIED = 100
_PORTS = random.SystemRandom()
"""Random generator for ports. It is not seeded, because runs with the same seed on a machine need different ports."""
_AGENT_ARGUMENT = "--dashboard_agent_command="
"""Argument of the raylet that specifies the command of the dashboard agent. The raylet rejects an empty command."""


def start(initialize: Callable[[], None]) -> None:
    """Start a session, in several attempts if necessary. The processes of a failed attempt are killed.

    Args:
        initialize: function that starts a session.

    Raises:
        InfrastructureFailed: if all attempts failed.
    """
    failure: str | None = None
    for _ in range(_STARTS):
        before = set(psutil.Process().children())
        failure = _attempt(initialize, before)
        if failure is None:
            return
        # Free the objects of the failed attempt. Otherwise a Ray client would end this process a minute after its
        # server is killed below.
        gc.collect()
        ray.shutdown()
        remaining = set(psutil.Process().children()) - before
        for child in remaining:
            child.kill()
        psutil.wait_procs(remaining)
    raise InfrastructureFailed(
        f"Ray did not start on this machine in {_STARTS} attempts ({failure}); its logs are in "
        f"{os.environ['RAY_TMPDIR']}/ray"
    )


def _attempt(initialize: Callable[[], None], before: set[psutil.Process]) -> str | None:
    """Call ``initialize``, and return its error message in one line, or None if it succeeded.

    Args:
        before: children of this process before the attempt.
    """
    try:
        with (
            _time_limit(_START_LIMIT_S, before),
            _loopback_only(),
            _predefined_agent_ports(),
            _unused_servers_disabled(),
            _workers_forked(),
            _fail_with_servers(),
        ):
            initialize()
    except Exception as error:  # Ray raises a bare Exception if its node is late
        return message_line(error)
    return None


@contextlib.contextmanager
def watched(lost: Callable[[str], None]) -> Iterator[None]:
    """Report if a Ray server of this process's session ends in the block.

    Without this report, Ray would print nothing for a minute and then end this process with a dump of its state.

    Args:
        lost: function that a thread calls with the reason, at most once.
    """
    done = threading.Event()
    node: Node = ray._private.worker._global_node
    servers = _servers(node)

    def watch() -> None:
        while not done.wait(_POLL_S):
            ended = _ended(servers)
            if ended and not done.is_set():
                lost(ended)
                return

    thread = threading.Thread(target=watch, name="watch of Ray", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _servers(node: Node) -> dict[str, subprocess.Popen[bytes]]:
    """Return the processes of a node's servers by name."""
    names = (ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET)
    found = {}
    for name in names:
        for each in node.all_processes.get(name, ()):
            found[name] = each.process
    return found


def _ended(servers: dict[str, subprocess.Popen[bytes]]) -> str | None:
    """Return a sentence about a server that has ended, or None if all servers are running."""
    for name, process in servers.items():
        status = process.poll()
        if status is not None:
            how = f"status {status}" if status >= 0 else f"signal {-status}"
            return f"Ray's {name} (process {process.pid}) on this machine ended with {how}"
    return None


@contextlib.contextmanager
def _fail_with_servers() -> Iterator[None]:
    """Make the start of a session in this block fail within seconds if a server of the session ends.

    Ray itself would query the GCS for the node of a dead raylet until a time limit. In this block, each query has a
    short time limit and is repeated for at most ``_REGISTER_S`` while the servers are running.
    """
    start_raylet = Node.start_raylet
    get_node = services.get_node
    servers: dict[str, subprocess.Popen[bytes]] = {}

    def start_and_remember(node: Node, *arguments: Any, **options: Any) -> None:
        start_raylet(node, *arguments, **options)
        servers.update(_servers(node))

    def get_living_node(*arguments: Any) -> Any:
        deadline = time.monotonic() + _REGISTER_S
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError as error:  # the raylet has not registered yet
                ended = _ended(servers)
                if ended:
                    raise InfrastructureFailed(ended) from error
                if time.monotonic() > deadline:
                    raise

    with _replaced(Node, "start_raylet", start_and_remember), _replaced(services, "get_node", get_living_node):
        yield


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Make a session that starts in this block use the address ``LOOPBACK``.

    By default, Ray would replace this address, because other machines cannot reach it. Ray's servers would then listen
    on every interface.
    """
    with _replaced(services, "resolve_ip_for_localhost", lambda host: host):
        yield


@contextlib.contextmanager
def _predefined_agent_ports() -> Iterator[None]:
    """Specify the agents' ports for raylets that start in this block, so that raylets do not wait for their agents.

    A raylet aborts if its agents have not written their ports to files within 15 s. No setting changes this limit
    (https://github.com/ray-project/ray/issues/65983). The agents are Python processes with many imports, and take
    longer to start on two cores with a load of 12.
    """
    original = Node.start_raylet

    def start_raylet(node: Node, *arguments: Any, **options: Any) -> None:
        # Actors with a custom runtime environment need this agent. The actors wait for this agent, up to a time limit
        # set in ``session``.
        node._ray_params.runtime_env_agent_port = _free_port()
        # A session that ends with the run does not use Ray's metrics or jobs.
        for service in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
            persist_port(node._session_dir, node._node_id, service, _UNUSED)
        original(node, *arguments, **options)

    with _replaced(Node, "start_raylet", start_raylet):
        yield


@contextlib.contextmanager
def _unused_servers_disabled() -> Iterator[None]:
    """Start sessions in this block without dashboard, dashboard agent, autoscaler and log monitor.

    A session that ends with the run does not use these processes. Ray starts all four even with
    ``include_dashboard=False``. These Python processes take 4 s of CPU time before the first actor is ready.
    ``ray.init`` has no arguments to disable them.
    """
    start_head = Node.start_head_processes
    start_process = services.start_ray_process

    def start_head_processes(node: Node) -> None:
        node._ray_params.no_monitor = True
        node._ray_params.include_log_monitor = False
        start_head(node)

    def start_ray_process(command: Sequence[str], *arguments: Any, **options: Any) -> Any:
        agent = _AGENT_ARGUMENT + subprocess.list2cmdline([sys.executable, "-S", "-E", idle_agent.__file__])
        command = [agent if argument.startswith(_AGENT_ARGUMENT) else argument for argument in command]
        return start_process(command, *arguments, **options)

    with (
        _replaced(Node, "start_head_processes", start_head_processes),
        _replaced(Node, "start_api_server", lambda node, **options: None),
        _replaced(services, "start_ray_process", start_ray_process),
    ):
        yield


@contextlib.contextmanager
def _workers_forked() -> Iterator[None]:
    """Start workers of sessions that start in this block with ``worker_launcher`` if there is a fork server."""
    original = Node.start_raylet

    def start_raylet(node: Node, *arguments: Any, **options: Any) -> None:
        if worker_launcher.FOLDER in os.environ:
            node._ray_params.setup_worker_path = worker_launcher.__file__
        original(node, *arguments, **options)

    with _replaced(Node, "start_raylet", start_raylet):
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
    """Return a free port that will probably still be free a few seconds later.

    A raylet ends if its agent's port is in use when the agent starts. The port is below the kernel's ephemeral range,
    from which outgoing connections get their ports. The port is random, because other runs choose ports in the same
    range.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(_PORTS_TRIED):
        port = _PORTS.randrange(_LOWEST_PORT, max(ephemeral, _LOWEST_PORT + 1))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _time_limit(limit_s: float, before: set[psutil.Process]) -> Iterator[None]:
    """Kill the GCS if a session start in this block takes longer than ``limit_s``, so that the start fails.

    If the GCS is alive but does not answer, Ray makes gcs_server_port_wait_time_s attempts of half a minute each, and
    would thus wait for hours.
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


_SIOCGIFADDR = 0x8915
"""Constant from <linux/sockios.h>, which the standard library does not define."""


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address, or None if it does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no IPv4 address
                continue
            # struct ifreq contains 16 bytes with the name, then a sockaddr_in with the address at byte 4.
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def stay_on(address: str) -> None:
    """Make gloo, NCCL and vLLM use the network interface of ``address``, in this process and its children.

    Environment variables that are already set take precedence. By default, gloo uses the address to which the host name
    resolves, and NCCL uses every interface. NCCL is restricted only for a loopback address, because several interfaces
    are faster between machines.
    """
    os.environ.setdefault("VLLM_HOST_IP", address)
    interface = interface_of(address)
    if interface is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if ipaddress.ip_address(address).is_loopback:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=", the name is a prefix
