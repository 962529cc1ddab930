"""One run over two hosts: network namespaces with addresses of their own, Ray between them, weights broadcast over the wire.

Where namespaces may not be made (no root), the hosts are two Ray nodes of this machine with loopback addresses.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RAY = Path(sys.executable).with_name("ray")
START_S, STEPS, PORT = 240, 4, 6399
# A lost host is to be known within 20 s, and no run of anybody else may join this cluster.
ENVIRONMENT = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "PYTHONPATH": str(REPOSITORY),
}


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0


class Host:
    """A host of the cluster: its Ray node and everything that runs on it."""

    def __init__(self, network: Network, number: int, head: Host | None = None):
        self.name, self.address = f"{network.name}-{number}", f"{network.subnet}.{number}"
        self.prefix = network.attach(self.name, self.address)
        self.ray: subprocess.Popen | None = None
        role = ["--head", f"--port={PORT}", f"--temp-dir={network.folder}", "--include-dashboard=false"]
        if head is not None:
            role = [f"--address={head.address}:{PORT}"]
        command = [str(RAY), "start", "--block", f"--node-ip-address={self.address}", "--num-cpus=2", *role]
        self.log = open(network.folder / f"{self.name}.log", "w")
        self.ray = self.popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def popen(self, command: list[str], **options) -> subprocess.Popen:
        """Start a command on this host."""
        return subprocess.Popen([*self.prefix, *command], env={**os.environ, **ENVIRONMENT}, cwd=REPOSITORY, **options)

    def processes(self) -> list[psutil.Process]:
        """Everything that Ray started here."""
        return psutil.Process(self.ray.pid).children(recursive=True)

    def up(self) -> Host:
        """Wait until Ray has started here."""
        deadline = time.monotonic() + 90
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
        self.folder, self.name = folder, f"gd{os.getpid() % 100000}"
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
def network(tmp_path_factory):
    network = Network(tmp_path_factory.mktemp("ray"))
    try:
        network.add(1)
        network.add(2)
        yield network
    finally:
        network.close()


def command(run_dir: Path, model: Path, *overrides: str) -> list[str]:
    return [
        sys.executable,
        str(REPOSITORY / "examples" / "run_gdpo.py"),
        f"run.dir={run_dir}",
        f"policy.model_name={model}",
        f"gdpo.max_num_steps={STEPS}",
        "gdpo.num_prompts_per_step=4",
        "gdpo.val_period=0",
        "gdpo.val_at_start=false",
        "data.train.size=512",
        "checkpointing={save_period: 1, metric_name: null}",
        "logger={console: plain, plot: false}",
        *overrides,
    ]


def rows(run_dir: Path) -> list[dict]:
    """The metric rows without what the clock says."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))} for row in found]


@pytest.fixture(scope="module")
def one_host(tmp_path_factory, digit_model) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    subprocess.run(command(run_dir, digit_model), check=True, capture_output=True, timeout=START_S, cwd=REPOSITORY)
    return run_dir


def test_a_run_over_two_hosts_loses_one_and_resumes_to_the_one_host_run_bit_for_bit(
    network, one_host, digit_model, tmp_path
):
    head, second = network.hosts
    joining = command(tmp_path / "run", digit_model, "cluster.num_nodes=2", f"cluster.address={head.address}:{PORT}")
    run = head.popen(joining, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + START_S
    while len(rows(tmp_path / "run")) < 2:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.02)
    roles = [{p.name().split(".")[0] for p in host.processes() if p.name().startswith("ray::")} for host in (head, second)]
    second.lose()
    lost = time.monotonic()
    out, err = run.communicate(timeout=60)
    assert time.monotonic() - lost < 30
    assert ("ray::PolicyRank" in roles[0], "ray::Engine" in roles[1]) == (True, True), roles
    assert "ray::Engine" not in roles[0] and "ray::PolicyRank" not in roles[1], roles
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert run.returncode == 1 and len(errors) == 1 and "Traceback" not in err, (out, err)
    assert f"node {second.address} is no longer in the cluster" in errors[0]
    assert len(rows(tmp_path / "run")) < STEPS

    network.add(3)
    run = head.popen(joining, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=START_S)
    assert run.returncode == 0 and "resuming from" in out, (out, err)
    assert rows(tmp_path / "run") == rows(one_host)
    assert len(rows(one_host)) == STEPS
    weights = [folder / "model" / "model.safetensors" for folder in (one_host, tmp_path / "run")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_more_nodes_than_the_cluster_has_are_named(network, digit_model, tmp_path):
    """The wait is shortened: its length is not what is shown."""
    head = network.hosts[0]
    code = (
        "import sys; import gdpo_nemo.cluster.placement as placement; placement._JOIN_S = 3.0; "
        "from gdpo_nemo.cli import main; sys.exit(main(['train', *sys.argv[1:]]))"
    )
    words = command(tmp_path / "run", digit_model, "cluster.num_nodes=3", f"cluster.address={head.address}:{PORT}")[2:]
    run = head.popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=START_S)
    assert run.returncode == 1, (out, err)
    assert "3 nodes with 1 CPU each were not free within 3 s; the Ray cluster has 2 nodes" in err
