"""One run over two hosts, and a third for environments: network namespaces with addresses of their own, Ray between
them.

Where namespaces may not be made (no root), the hosts are two Ray nodes of this machine with loopback addresses.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from launch import REPOSITORY, UNDISTURBED, Launch, rows, timeless

from gdpo_nemo.observe.run_files import read_alerts

pytestmark = pytest.mark.slow

RAY = Path(sys.executable).with_name("ray")
PORT = 20_000 + os.getpid() % 10_000  # of these tests: without namespaces, the hosts share the machine
# A lost host is to be known within 16 s, and no run of anybody else may join this cluster.
ENVIRONMENT = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_prestart_worker_first_driver": "0",  # idle workers that import Ray, on each of the four hosts
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "PYTHONPATH": str(REPOSITORY),
}


def _ip(*words: str) -> bool:
    return shutil.which("ip") is not None and subprocess.run(["ip", *words], capture_output=True).returncode == 0


class Host:
    """A host of the cluster: its Ray node and everything that runs on it."""

    def __init__(self, network: Network, number: int, head: Host | None = None):
        self.name = f"{network.name}-{number}"
        self.address = f"{network.subnet}.{number}"
        self.prefix = network.attach(self.name, self.address)
        role = ["--head", f"--port={PORT}", f"--temp-dir={network.folder}", "--include-dashboard=false", "--no-monitor"]
        if head is not None:
            role = [f"--address={head.address}:{PORT}"]
        command = [
            str(RAY),
            "start",
            "--block",
            f"--node-ip-address={self.address}",
            "--num-cpus=2",
            "--include-log-monitor=false",
            *role,
        ]
        self.log = open(network.folder / f"{self.name}.log", "w")
        # Whoever ends the tests ends the hosts.
        command = ["setpriv", "--pdeathsig", "TERM", *self.prefix, *command]
        self.ray = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}, cwd=REPOSITORY
        )

    def processes(self) -> list[psutil.Process]:
        """Everything that Ray started here."""
        return psutil.Process(self.ray.pid).children(recursive=True)

    def up(self) -> Host:
        """Wait until Ray has started here."""
        deadline = time.monotonic() + 600
        while "Ray runtime started" not in Path(self.log.name).read_text():
            assert self.ray.poll() is None and time.monotonic() < deadline, Path(self.log.name).read_text()
            time.sleep(0.2)
        return self

    def lose(self) -> None:
        """The host is gone: its cable first, then its processes."""
        _ip("link", "set", self.name, "down")
        for process in [*self.processes(), psutil.Process(self.ray.pid)]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.ray.wait()


class Network:
    """A bridge that hosts are attached to; without the right to make one, loopback addresses."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = f"gd{os.getpid() % 100000}"
        self.namespaces = _ip("link", "add", self.name, "type", "bridge") and _ip("link", "set", self.name, "up")
        self.subnet = f"10.{77 + os.getpid() % 100}.0" if self.namespaces else "127.0.77"
        self.hosts: list[Host] = []

    def attach(self, name: str, address: str) -> list[str]:
        """Words before a command that make it run on the new host."""
        if not self.namespaces:
            return []
        inside = ["-n", name]
        steps = (
            ["netns", "add", name],
            ["link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name],
            ["link", "set", name, "master", self.name, "up"],
            [*inside, "addr", "add", f"{address}/24", "dev", "eth0"],
            [*inside, "link", "set", "eth0", "up"],
            [*inside, "link", "set", "lo", "up"],
        )
        for step in steps:
            assert _ip(*step), step
        return ["ip", "netns", "exec", name]

    def add(self, number: int) -> Host:
        """A new host; the first one is the head of the cluster."""
        self.hosts.append(Host(self, number, self.hosts[0] if self.hosts else None))
        return self.hosts[-1].up()

    def close(self) -> None:
        """Hosts and bridge are gone afterwards."""
        for host in reversed(self.hosts):
            if host.ray.poll() is None:
                host.lose()
            if self.namespaces:
                _ip("netns", "delete", host.name)
        if self.namespaces:
            _ip("link", "delete", self.name)


@pytest.fixture(scope="module")
def network():
    # Paths of Ray's sockets may have 107 characters, which pytest's own folders use up.
    folder = Path(tempfile.mkdtemp(prefix="gdpo"))
    network = Network(folder)
    try:
        network.add(1)
        network.add(2)
        yield network
    finally:
        network.close()
        shutil.rmtree(folder, ignore_errors=True)


def launch(head: Host, run_dir: Path, model: Path, *nodes: str) -> Launch:
    """The undisturbed run's config, started on the head for these nodes."""
    words = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    wanted = [*UNDISTURBED, f"cluster.address={head.address}:{PORT}", *nodes]
    return Launch(run_dir, model, *wanted, before=["env", *words, *head.prefix])


def actors(host: Host) -> set[str]:
    """Classes of the Ray actors on a host."""
    names = set()
    for process in host.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # one may end between the list and the look
            if process.status() != psutil.STATUS_ZOMBIE:
                names.add(process.name().split(".")[0].removeprefix("ray::"))
    return names & {"PolicyRank", "EngineActor", "EnvironmentHost"}


def kill_rank(host: Host) -> None:
    """A policy rank, which its driver then starts again on the same host."""
    next(process for process in host.processes() if process.name().startswith("ray::PolicyRank")).kill()


def kill_in_the_middle_of_verdicts(host: Host, run: Launch) -> None:
    """First the actor that holds the workers, as soon as the first one is at work, then a worker of the actor's
    successor."""

    def workers() -> set[tuple[int, int]]:
        """(actor, worker) by process number; workers are started by the first verdicts that are asked for."""
        found = set()
        for process in host.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if "spawn_main" in " ".join(process.cmdline()) and process.parent().name().startswith(
                    "ray::EnvironmentHo"
                ):
                    found.add((process.ppid(), process.pid))
        return found

    run.wait_until(lambda _: bool(workers()), "no verdict was asked for", pause_s=0.3)
    killed = {actor for actor, _ in workers()}
    for actor in killed:
        os.kill(actor, signal.SIGKILL)
    run.wait_until(
        lambda _: any(actor not in killed for actor, _ in workers()), "the actor was not replaced", pause_s=0.3
    )
    for actor, worker in workers():
        if actor not in killed:
            os.kill(worker, signal.SIGKILL)


def test_a_run_over_two_hosts_that_loses_one_equals_the_one_host_run_bit_for_bit(
    network, undisturbed, digit_model, tmp_path
):
    """It loses the verifiers' actor, a verifier and a rank before."""
    head, second = network.hosts
    verifier = network.add(3)
    run = launch(head, tmp_path / "run", digit_model, "cluster.num_nodes=2", "cluster.env_nodes=1")
    kill_in_the_middle_of_verdicts(verifier, run)
    run.wait_for_step(3)  # the checkpoint of the second step is complete
    assert [actors(host) for host in network.hosts] == [{"PolicyRank"}, {"EngineActor"}, {"EnvironmentHost"}]
    kill_rank(head)
    run.wait_until(lambda _: any("driver/rebuilds" in row for row in rows(run.run_dir)), "the policy did not come back")
    lost = time.time()
    second.lose()
    another = network.add(4)  # the supervisor's next attempt waits for it
    status, out, err = run.finish()
    assert status == 0 and "resuming from" in out and "Traceback" not in err, (out, err)
    told = [line for line in err.splitlines() if line.startswith("supervisor:")]
    assert len(told) == 1 and f"node {second.address} is no longer in the cluster" in told[0], err
    (noticed,) = [alert["time"] for alert in read_alerts(run.run_dir) if "run.max_restarts" in alert["text"]]
    assert noticed - lost < 200  # far below any time limit of the run
    straight = undisturbed.run_dir
    assert [timeless(row) for row in rows(tmp_path / "run")] == [timeless(row) for row in rows(straight)]
    weights = [folder / "model" / "model.safetensors" for folder in (straight, tmp_path / "run")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not any(actors(host) for host in (head, another, verifier))
