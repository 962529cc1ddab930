"""A run folder has one writer: a second one is refused with who the first is, a dead one's place is taken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gdpo_nemo import train
from gdpo_nemo.config.load import load_config
from gdpo_nemo.errors import ConfigError, RunError
from gdpo_nemo.observe import ownership
from gdpo_nemo.observe.ownership import FILE, Claim, owned
from gdpo_nemo.setup import run_context

HOLD = """
import sys
from pathlib import Path
from gdpo_nemo.errors import ConfigError
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
    claim = replace(Claim.own(), host="elsewhere", machine="another boot", process=77, **fields)
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps(asdict(claim)))
    return claim


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_second_writer_is_refused_with_who_holds_the_folder_and_writes_nothing(other, tmp_path):
    before = contents(tmp_path / "run")
    said = (
        f"run.dir: {tmp_path / 'run'} belongs to a run under way .process {other.pid} on .*, since 20.*another run.name"
    )
    with pytest.raises(ConfigError, match=said), owned(tmp_path / "run"):
        pass
    demo = load_config(None, [f"run.dir={tmp_path / 'run'}", f"policy.model_name={tmp_path / 'model'}"])
    with pytest.raises(ConfigError, match=said), run_context(demo):
        pass
    with pytest.raises(ConfigError, match=said):
        train(data=[{"prompt": "a"}], rewards={"a": len}, overrides={"run.dir": str(tmp_path / "run")})
    assert contents(tmp_path / "run") == before and not (tmp_path / "model").exists()


def test_the_folder_of_a_killed_run_is_taken_over_at_once_and_said_so(other, tmp_path, monkeypatch):
    other.send_signal(signal.SIGKILL)
    other.wait()
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with owned(tmp_path / "run") as owner:
        assert f"its owner, process {other.pid} on " in owner.predecessor and "is gone" in owner.predecessor
        assert json.loads((tmp_path / "run" / FILE).read_text())["process"] == os.getpid()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_process_id_that_was_used_again_is_not_the_owner(tmp_path):
    with owned(tmp_path):
        claim = Claim(**json.loads((tmp_path / FILE).read_text()))
    (tmp_path / FILE).write_text(json.dumps(asdict(replace(claim, started=claim.started - 3600))))
    with owned(tmp_path) as owner:
        assert owner.predecessor


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


def test_file_systems_without_hard_links_have_owners_too(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with owned(tmp_path):
        with pytest.raises(ConfigError, match="belongs to a run under way"), owned(tmp_path):
            pass


def test_a_folder_in_which_nothing_came_to_be_is_removed(tmp_path):
    with owned(tmp_path / "a" / "b"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file/run cannot be written: Not a directory"), owned(tmp_path / "file" / "run"):
        pass
