"""A machine that is busy, or a raylet that dies, delays the start of a session; it does not end the run."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from gdpo_nemo.cluster import idle_agent
from gdpo_nemo.cluster.cleanup_process import remove_run
from gdpo_nemo.cluster.local_ray import _free_port
from gdpo_nemo.cluster.worker_processes import _scratch
from gdpo_nemo.utils.errors import RunError

LATE_AGENTS = """
import os, time
command = open("/proc/self/cmdline").read()
while "runtime_env/agent/main.py" in command and not os.path.exists("{started}"):
    time.sleep(0.1)
"""
CALL_AGENTS = """
from gdpo_nemo.cluster import local_ray

# A raylet that waits for its agents aborts after 15 s, and the session does not start.
start = local_ray.start
local_ray.start = lambda initialize: (start(initialize), open("{started}", "w").close())
"""
KILL_THE_FIRST_RAYLET = """
from ray._private import services

# Killed before Ray waits for it. A raylet that dies later, while the driver connects, makes Ray end the driver.
start_raylet = services.start_raylet

def start_and_kill(*arguments, **options):
    started = start_raylet(*arguments, **options)
    started.process.kill()
    services.start_raylet = start_raylet
    return started

services.start_raylet = start_and_kill
"""
SESSION = """
import os
from gdpo_nemo.cluster import local_ray
from gdpo_nemo.cluster.session import ray, session
from gdpo_nemo.config.schema import ClusterConfig

class Actor:
    def variable(self):
        return os.environ["VARIABLE"]

attempts = []
attempt = local_ray._attempt
local_ray._attempt = lambda *arguments: attempts.append(attempt(*arguments)) or attempts[-1]
if __name__ == "__main__":
    with session(ClusterConfig()):
        actor = ray.remote(Actor).options(runtime_env={"env_vars": {"VARIABLE": "set"}}).remote()
        print(ray.get(actor.variable.remote()), len(attempts), attempts[-1])
"""

WATCHED = """
        print(sorted(local_ray._servers(ray._private.worker._global_node)))
"""
LATE_CALLS = """
calls = (lambda: ray.put(1), lambda: ray.remote(Actor).remote(), lambda: actor.variable.remote())
for call in calls:
    try:
        call()
    except Exception:  # of several kinds
        print('refused', ray.is_initialized())
"""

NO_HOME = "/proc/home"
"""Not there, and nobody can make it."""

OWN_PROCESSES = """
        import psutil
        wanted = ("gcs_server", "raylet/raylet", "RuntimeEnvAgent", "idle_agent", "cleanup_process.py", "ray::Actor")
        commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
        print([command for command in commands if not any(name in command for name in wanted)])
"""

SOCKETS = """
        import ipaddress, psutil
        listening = [
            (process.name(), connection.laddr.ip.removeprefix("::ffff:"))  # Ray's sockets are those of IPv6
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]
            for connection in process.net_connections("inet")
            if not connection.raddr
        ]
        print(len(listening), [found for found in listening if not ipaddress.ip_address(found[1]).is_loopback])
"""


def _session(tmp_path: Path, before: str = "", after: str = "", **environment: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(before + SESSION + after)
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **environment}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_agents_that_are_late_do_not_end_the_raylet(tmp_path):
    started = tmp_path / "started"
    (tmp_path / "sitecustomize.py").write_text(LATE_AGENTS.format(started=started))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[2])])
    assert _session(tmp_path, CALL_AGENTS.format(started=started), PYTHONPATH=path) == ["set 1 None"]


@pytest.mark.slow
def test_a_session_starts_again_after_its_raylet_died(tmp_path):
    """Ray alone would wait for it until its time limit."""
    (shown, reason) = _session(tmp_path, KILL_THE_FIRST_RAYLET, "        print(attempts[0])")
    assert shown == "set 2 None"
    assert re.fullmatch(r"Ray's raylet \(process \d+\) on this machine ended with signal 9", reason)


def test_the_port_of_an_agent_is_never_given_to_a_connection():
    """A connection of another run that had it when the agent started ended the raylet, and with it the run."""
    clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {_free_port() for _ in range(20)}
    assert len(ports) > 10 and max(ports) < clients and min(ports) > 19_999  # Ray's workers use up to 19,999


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> list[str]:
    """Output of a session of a user without a home: its processes, its sockets, the servers whose loss is reported, and
    calls after its end."""
    after = OWN_PROCESSES + SOCKETS + WATCHED + LATE_CALLS
    return _session(tmp_path_factory.mktemp("session"), after=after, HOME=NO_HOME)


@pytest.mark.slow
def test_session_of_a_user_without_a_home_has_no_dashboard_autoscaler_or_copier_of_logs(lines):
    assert lines[:2] == ["set 1 None", "[]"]


@pytest.mark.slow
def test_local_session_listens_on_loopback_only(lines):
    """Driver, GCS, raylet with its object manager, the agent of runtime environments, an actor."""
    count, exposed = lines[2].split(" ", 1)
    assert int(count) >= 6 and exposed == "[]", lines


@pytest.mark.slow
def test_a_session_reports_the_loss_of_either_of_its_servers(lines):
    """`end_to_end/test_run.py` kills one in a run."""
    assert lines[3] == "['gcs_server', 'raylet']"


@pytest.mark.slow
def test_a_call_after_the_session_starts_no_cluster(lines):
    """By default Ray starts one, for example for a thread that did not notice the end of the session."""
    assert lines[4:] == ["refused False"] * 3


@pytest.mark.parametrize("home", [None, NO_HOME])
def test_session_gives_a_home_that_is_missing_to_its_processes_for_as_long_as_it_lasts(monkeypatch, home):
    """Libraries keep caches there: vLLM, Triton, Hugging Face."""
    monkeypatch.setenv("HOME", NO_HOME)
    if home is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", unknown)
    with _scratch() as folder:
        assert os.environ["HOME"] == folder and Path.home().is_dir()
        remove_run(folder)  # in a session, the cleanup process does so
    assert os.environ.get("HOME") == home


@pytest.mark.parametrize("writable", [True, False])
def test_session_replaces_a_home_only_if_it_cannot_be_written_and_leaves_its_models(monkeypatch, tmp_path, writable):
    """As of ``docker run --user``, whose home is ``/``."""
    models = tmp_path / ".cache" / "huggingface"
    models.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and (writable or path != str(tmp_path)))
    with _scratch() as folder:
        assert os.environ["HOME"] == (str(tmp_path) if writable else folder)
        assert os.environ.get("HF_HOME") == (None if writable else str(models))
        remove_run(folder)
    assert os.environ["HOME"] == str(tmp_path) and "HF_HOME" not in os.environ


def test_temporary_folder_of_a_long_tmpdir_has_a_short_path(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    long = tmp_path / ("job" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with _scratch() as folder:
        assert len(folder) < 40 and Path(folder).resolve().parent == long
        assert os.environ["RAY_TMPDIR"] == "/tmp"
        remove_run(folder)
        assert list(long.iterdir()) == [] and not list(Path(folder).parent.glob(f"{Path(folder).name}*"))
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with pytest.raises(RunError, match=f"RAY_TMPDIR: paths of sockets would be too long.* .{long}"), _scratch():
        pass


def unknown(uid):
    raise KeyError(uid)


@pytest.mark.slow
def test_stub_of_the_dashboard_agent_ends_with_its_raylet():
    start = (
        "import os, subprocess, sys; os.environ['RAY_RAYLET_PID'] = str(os.getpid()); "
        "print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", start, sys.executable, "-S", "-E", idle_agent.__file__]
    raylet = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    agent = psutil.Process(int(raylet.stdout.readline()))
    raylet.kill()
    raylet.wait()
    assert psutil.wait_procs([agent], timeout=120)[1] == []


@pytest.mark.slow
def test_workers_keep_the_working_directory_under_uv_run_if_ray_was_imported_first():
    code = (
        "import ray; from ray._private import ray_constants; before = ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV; "
        "import gdpo_nemo.cluster.session; print(before, ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ENABLE_UV_RUN_RUNTIME_ENV"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "True False\n", done.stderr
