"""A run folder has one writer: a second one is refused with who the first is, a dead one's place is taken."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from power_loss import SyncedDisk

from gdpo_nemo import train
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.observe import ownership
from gdpo_nemo.observe.ownership import FILE, Claim, owned
from gdpo_nemo.training.setup import run_context
from gdpo_nemo.utils.errors import ConfigError, RunError

HOLD = """
import sys
from pathlib import Path
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.observe.ownership import owned
try:
    with owned(Path(sys.argv[1])):
        print("mine", flush=True)
        sys.stdin.read()
except ConfigError:
    print("refused", flush=True)
"""
DEADLINE_S = 300


def holder(folder: Path) -> subprocess.Popen:
    """A process that wants the folder; the first line that it prints says whether it has it."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def other(tmp_path):
    """Another process, which owns ``tmp_path/run``."""
    process = holder(tmp_path / "run")
    assert process.stdout.readline() == "mine\n"
    yield process
    process.kill()
    process.communicate()


def far(folder: Path, **fields) -> Claim:
    """The claim of a process that cannot be seen from here, in the folder."""
    claim = replace(Claim.of_this_process(), host="elsewhere", machine="another boot", process=77, **fields)
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps(asdict(claim)))
    return claim


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_second_writer_is_refused_with_the_owner_and_writes_nothing(other, tmp_path):
    before = contents(tmp_path / "run")
    said = (
        f"run.dir: {tmp_path / 'run'} belongs to an active run .process {other.pid} on .*, since 20.*another run.name"
    )
    with pytest.raises(ConfigError, match=said), owned(tmp_path / "run"):
        pass
    demo = load_config(None, [f"run.dir={tmp_path / 'run'}", f"policy.model_name={tmp_path / 'model'}"])
    with pytest.raises(ConfigError, match=said), run_context(resolve(demo)):
        pass
    with pytest.raises(ConfigError, match=said):
        train(data=[{"prompt": "a"}], rewards={"a": len}, overrides={"run.dir": str(tmp_path / "run")})
    assert contents(tmp_path / "run") == before and not (tmp_path / "model").exists()


@pytest.mark.slow
def test_folder_of_a_killed_run_is_taken_over_at_once_with_a_message(other, tmp_path, monkeypatch):
    other.send_signal(signal.SIGKILL)
    other.wait()
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with owned(tmp_path / "run") as owner:
        assert f"its owner (process {other.pid} on " in owner.predecessor and "no longer runs" in owner.predecessor
        assert json.loads((tmp_path / "run" / FILE).read_text())["process"] == os.getpid()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_process_id_that_was_used_again_is_not_the_owner(tmp_path):
    with owned(tmp_path):
        claim = Claim(**json.loads((tmp_path / FILE).read_text()))
    (tmp_path / FILE).write_text(json.dumps(asdict(replace(claim, ticks=claim.ticks - 3600))))
    with owned(tmp_path) as owner:
        assert owner.predecessor


@pytest.fixture
def stepped_clock(tmp_path, monkeypatch):
    """The clock was set by an hour since the other process started: the kernel tells another time of its boot."""
    proc = tmp_path / "proc"
    proc.mkdir()
    for entry in Path("/proc").iterdir():
        (proc / entry.name).symlink_to(entry)
    (proc / "stat").unlink()
    boot = int(re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)[1])
    (proc / "stat").write_text(f"btime {boot + 3600}\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))


@pytest.mark.slow
@pytest.mark.parametrize("locks", [True, False])
def test_live_owner_keeps_its_folder_after_the_clock_is_set(other, tmp_path, monkeypatch, stepped_clock, locks):
    if not locks:
        monkeypatch.setattr("fcntl.flock", no_locks)
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"process {other.pid} on "), owned(tmp_path / "run"):
        pass
    with pytest.raises(ConfigError, match=f"process {other.pid} on "):
        ownership.check_free(tmp_path / "run")
    assert contents(tmp_path / "run") == before


def no_locks(*_):
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


@pytest.mark.slow
def test_live_owner_in_another_container_keeps_its_folder_though_its_claim_looks_old(other, tmp_path):
    """Its processes are not visible from there, and the clock was set: only the lock tells that it lives."""
    file = tmp_path / "run" / FILE
    claim = replace(Claim(**json.loads(file.read_text())), machine="this boot, other processes")
    file.write_text(json.dumps(asdict(claim)))
    os.utime(file, (0, 0))
    with pytest.raises(ConfigError, match=f"process {other.pid} on "), owned(tmp_path / "run", stale_s=0.3):
        pass
    with pytest.raises(ConfigError, match=f"process {other.pid} on "):
        ownership.check_free(tmp_path / "run")


@pytest.mark.slow
def test_owner_that_is_a_zombie_is_dead(other, tmp_path):
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    with owned(tmp_path / "run") as owner:
        assert f"its owner (process {other.pid} on " in owner.predecessor


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_renewals_of_a_remote_owner_count_after_the_clock_of_the_file_system_is_set(tmp_path, monkeypatch, ahead_s):
    monkeypatch.setattr(ownership, "_LOOK_S", 0.05)
    claim = far(tmp_path)
    stop = threading.Event()
    os.utime(tmp_path / FILE, (time.time() + ahead_s,) * 2)

    def renew() -> None:
        while not stop.wait(0.01):
            ownership._write(tmp_path / FILE, claim)
            os.utime(tmp_path / FILE, (time.time() + ahead_s,) * 2)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="process 77 on elsewhere"), owned(tmp_path, stale_s=DEADLINE_S):
            pass
    finally:
        stop.set()
        thread.join()
    os.utime(tmp_path / FILE, (time.time() + ahead_s,) * 2)
    with owned(tmp_path, stale_s=0.3) as owner:  # it renews no more, and is not waited for an hour
        assert owner.predecessor


@pytest.mark.parametrize("age_s, waited_s", [(1000, 30), (0, 120)])
def test_owner_elsewhere_that_is_long_gone_is_watched_for_a_quarter_of_the_time(tmp_path, monkeypatch, age_s, waited_s):
    far(tmp_path)
    os.utime(tmp_path / FILE, (time.time() - age_s,) * 2)
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    with owned(tmp_path, stale_s=120.0):
        assert waited_s <= now[0] <= waited_s + ownership._LOOK_S


NOT_FILES = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "broken link": lambda file: file.symlink_to("nowhere"),
    "link to itself": lambda file: file.symlink_to(FILE),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOT_FILES)
def test_owner_that_is_not_a_regular_file_is_refused_at_once(tmp_path, kind):
    run = tmp_path / "run"
    run.mkdir()
    NOT_FILES[kind](run / FILE)
    said = f"run.dir: {run / FILE} is not a regular file; remove this file"
    for wanted in (f"with owned(Path({str(run)!r})): pass", f"check_free(Path({str(run)!r}))"):
        script = f"from pathlib import Path; from gdpo_nemo.observe.ownership import check_free, owned\n{wanted}"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S)
        assert f"ConfigError: {said}" in done.stderr
    assert [path.name for path in run.iterdir()] == [FILE]


VALUES = {
    "process": (-1, 0, 2**40, 2**80, 1.5, True, None, "7"),
    "since": (float("nan"), float("inf"), -1e300, 1e300, 10**400, None, "now"),
    "ticks": (-1, 2**80, 0.5, None),
    "host": (None, 3, "x" * 10_000),
    "machine": (None, ["a"]),
}


@pytest.mark.parametrize("key, value", [(key, value) for key, values in VALUES.items() for value in values])
def test_claim_with_an_impossible_value_is_unreadable(tmp_path, key, value):
    (tmp_path / FILE).write_text(json.dumps({**asdict(Claim.of_this_process()), key: value}))
    ownership.check_free(tmp_path)
    with owned(tmp_path, stale_s=0.01) as owner:
        assert owner.predecessor == f"taking over {tmp_path}: its {FILE} cannot be read and is no longer renewed"


def test_claim_at_the_largest_values_is_printed_in_one_line(tmp_path):
    claim = replace(Claim.of_this_process(), host="a\x1b[31m\nb", since=float(ownership._LATEST - 1))
    (tmp_path / FILE).write_text(json.dumps(asdict(claim)))
    with pytest.raises(ConfigError) as refused:
        ownership.check_free(tmp_path)
    assert str(refused.value).isprintable() and "36812" in str(claim) and str(claim).isprintable()


@pytest.mark.slow
def test_claim_of_an_older_version_is_that_of_its_process(other, tmp_path):
    file = tmp_path / "run" / FILE
    old = {key: value for key, value in json.loads(file.read_text()).items() if key != "ticks"}
    file.write_text(json.dumps({**old, "started": 1.5e9}))
    with pytest.raises(ConfigError, match=f"process {other.pid} on "):
        ownership.check_free(tmp_path / "run")
    other.kill()
    other.wait()
    with owned(tmp_path / "run") as owner:
        assert f"process {other.pid} on " in owner.predecessor


@pytest.mark.parametrize("content", [None, "", "{", "[1]", '{"host": 3}', "[" * 100_000])
def test_an_owner_elsewhere_without_a_sign_of_life_is_dead(tmp_path, content):
    far(tmp_path)
    if content is not None:
        (tmp_path / FILE).write_text(content)
    with owned(tmp_path, stale_s=0.3) as owner:
        assert owner.predecessor


def test_an_owner_elsewhere_that_renews_its_claim_is_alive(tmp_path):
    claim = far(tmp_path)
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.05):
            ownership._write(tmp_path / FILE, claim)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="process 77 on elsewhere"), owned(tmp_path, stale_s=DEADLINE_S):
            pass
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_of_many_that_take_over_at_once_one_gets_the_folder(other, tmp_path):
    other.kill()
    other.wait()
    contenders = [holder(tmp_path / "run") for _ in range(6)]
    try:
        said = [process.stdout.readline().strip() for process in contenders]
        assert sorted(said) == ["mine"] + ["refused"] * 5
    finally:
        for process in contenders:
            process.kill()
            process.communicate()


def test_a_run_whose_folder_was_taken_learns_of_it(tmp_path):
    with owned(tmp_path, beat_s=0.05) as owner:
        owner.check()
        taken = far(tmp_path)
        deadline = time.monotonic() + DEADLINE_S
        while owner._lost is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(RunError, match="was taken over by process 77 on elsewhere"):
            owner.check()
    assert Claim(**json.loads((tmp_path / FILE).read_text())) == taken


def test_the_claim_is_renewed_while_the_owner_lives(tmp_path):
    with owned(tmp_path, beat_s=0.05):
        first = ownership._stamp(tmp_path / FILE)
        deadline = time.monotonic() + DEADLINE_S
        while ownership._stamp(tmp_path / FILE) == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_file_systems_without_hard_links_also_have_owners(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with owned(tmp_path), pytest.raises(ConfigError, match="belongs to an active run"), owned(tmp_path):
        pass


def test_a_folder_in_which_nothing_came_to_be_is_removed(tmp_path):
    with owned(tmp_path / "a" / "b"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_folder_that_was_made_is_left_when_power_is_lost(tmp_path, monkeypatch):
    disk = SyncedDisk(tmp_path / "runs")
    disk.root.mkdir()
    disk.watch(monkeypatch, lambda: None)
    with owned(tmp_path / "runs" / "a" / "b"):
        assert (disk.survivor(tmp_path / "left", eager=False) / "a" / "b").is_dir()
    disk.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file/run cannot be written: Not a directory"), owned(tmp_path / "file" / "run"):
        pass
