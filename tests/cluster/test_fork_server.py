"""Workers forked from a process that has imported their libraries, and workers that cannot be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gdpo_nemo.cluster import worker_launcher
from gdpo_nemo.cluster.fork_server import ENGINE, RANK, fork_server, thread_environment
from gdpo_nemo.cluster.worker_launcher import FOLDER, PRELOADED
from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT

pytestmark = pytest.mark.slow

REPORT = """
import json, os, sys
import numpy
print(json.dumps({
    "arguments": sys.argv[1:],
    "folder": os.getcwd(),
    "path": sys.path[0],
    "name": __name__,
    "imported": sorted({"torch", "vllm", "megatron.core", "ray"} & set(sys.modules)),
    "threads": len(os.listdir("/proc/self/task")),
    "parent's threads": len(os.listdir(f"/proc/{os.getppid()}/task")),
    "leader": os.getpgid(0) == os.getpid(),
    "variable": os.environ.get("FORK_TEST"),
    "draw": float(numpy.random.random()),
}))
"""
NOT_FORKED = "print('Ray starts it')"


class Launcher:
    """Starts ``worker_launcher`` as a raylet does, with a worker's program of the test's own."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "setup_worker.py").write_text(NOT_FORKED)

    def start(self, program: str, kind: str, servers: str | None = None, **variables: str) -> subprocess.Popen[str]:
        """Start a worker, which waits for a line of input if it reads standard input."""
        (self.folder / "default_worker.py").write_text(program)
        engine = {**ENVIRONMENT, **CPU_ENVIRONMENT} if kind == ENGINE else {}
        context = json.dumps({"env_vars": {**engine, PRELOADED: kind, **variables}})
        return subprocess.Popen(
            [sys.executable, worker_launcher.__file__, str(self.folder / "default_worker.py")]
            + ["--node=1", "--language=PYTHON", f"--serialized-runtime-env-context={context}"],
            cwd=self.folder,
            env={**os.environ, **thread_environment(2), FOLDER: servers or os.environ[FOLDER]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def output(self, *arguments: str, **variables: str) -> str:
        """Return the output of a worker that succeeds."""
        worker = self.start(*arguments, **variables)
        out, _ = worker.communicate(timeout=300)
        assert worker.returncode == 0
        return out


@pytest.fixture
def launcher(tmp_path) -> Launcher:
    return Launcher(tmp_path)


@pytest.mark.parametrize(("kind", "libraries"), [(RANK, ["megatron.core", "torch"]), (ENGINE, ["torch", "vllm"])])
def test_a_worker_is_forked_from_one_thread_with_its_libraries_and_the_launchers_surroundings(
    launcher, kind, libraries, tmp_path
):
    one, other = (json.loads(launcher.output(REPORT, kind, FORK_TEST="its own")) for _ in range(2))
    assert one.pop("draw") != other.pop("draw")
    assert one == other == {
        "arguments": ["--node=1"],
        "folder": str(tmp_path),
        "path": str(tmp_path),
        "name": "__main__",
        "imported": libraries,
        "threads": 1,
        "parent's threads": 1,
        "leader": True,
        "variable": "its own",
    }  # fmt: skip


def test_variables_set_by_imports_reach_the_worker_unless_it_sets_them(launcher, monkeypatch):
    """vLLM and torch's compiler set such variables when they are imported."""
    names = ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    program = f"import os; print([os.environ[name] for name in {names}])"
    assert launcher.output(program, ENGINE, TORCHINDUCTOR_CACHE_DIR="/own") == "['1', '/own']\n"


@pytest.mark.parametrize(("end", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_launcher_ends_as_its_worker(launcher, end, status):
    assert launcher.start(end, RANK).wait(timeout=300) == status


def test_a_killed_launcher_takes_its_worker_with_it(launcher):
    started = launcher.start("import os; print(os.getpid(), flush=True); input()", RANK)
    worker = psutil.Process(int(started.stdout.readline()))
    started.kill()
    assert psutil.wait_procs([worker], timeout=240)[1] == []


@pytest.mark.parametrize(
    "variables",
    [{"HF_HOME": "/elsewhere"}, {PRELOADED: "other"}, {"FORK_TEST": "${HOME}"}],
    ids=["read when libraries are imported", "no server of this name", "Ray expands it"],
)
def test_a_worker_that_no_server_can_fork_is_started_by_ray(launcher, variables):
    assert launcher.output(REPORT, RANK, **variables) == "Ray starts it\n"


def test_a_server_that_dies_while_it_is_asked_leaves_the_worker_to_ray(launcher, tmp_path):
    servers = tmp_path / "servers"
    servers.mkdir()
    before = set(psutil.Process().children())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, "")  # ``fork_server`` removes it at its end
        with fork_server(servers, ahead=None):
            (server,) = set(psutil.Process().children()) - before
            server.suspend()  # so that it cannot answer before it dies
            started = launcher.start(REPORT, RANK, str(servers))
            while not _connected(servers / RANK):
                assert started.poll() is None
            server.send_signal(signal.SIGKILL)
            assert started.communicate(timeout=240)[0] == "Ray starts it\n"
            assert launcher.output(REPORT, RANK, str(servers)) == "Ray starts it\n"  # without a server


def test_servers_end_with_their_block_even_while_they_import(monkeypatch, tmp_path):
    """Otherwise, a run with invalid data would report the error only after the imports."""
    (tmp_path / "torch.py").write_text("import pathlib, time; time.sleep(60); pathlib.Path('imported').touch()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.chdir(tmp_path)
    before = set(psutil.Process().children())
    with fork_server(tmp_path, ahead=()):
        (server,) = set(psutil.Process().children()) - before
    assert not server.is_running() and FOLDER not in os.environ and not Path("imported").exists()


def _connected(socket: Path) -> bool:
    """Return whether a launcher has connected to the socket.

    In the kernel's list of sockets, a listening socket has the flag 10000, and a connection does not.
    """
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(str(socket))]
    return any(flags != "00010000" for _, _, _, flags, *_ in lines)
