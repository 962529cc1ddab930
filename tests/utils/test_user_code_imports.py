"""What an import in a process of its own costs, and what it leaves."""

from __future__ import annotations

import time

import psutil
import pytest

from gdpo_nemo.utils import import_trial
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.utils.import_trial import imports_tried


@pytest.fixture
def mine(tmp_path):
    def write(content: str) -> str:
        (tmp_path / "mine.py").write_text(content + "\ndef f(): return 3\n")
        return f"{tmp_path}/mine.py:f"

    return write


def test_valid_code_is_imported_once_in_this_process(mine, tmp_path):
    count = f"open({str(tmp_path / 'imports')!r}, 'a').write('x')"
    with imports_tried():
        assert ImportPath(mine(count)).load()() == 3
        assert ImportPath(mine(count)).load()() == 3
    assert (tmp_path / "imports").read_text() == "xx"  # once on trial, once here


def test_no_import_is_tried_without_a_request(mine, tmp_path):
    ImportPath(mine(f"open({str(tmp_path / 'imports')!r}, 'a').write('x')")).load()
    assert (tmp_path / "imports").read_text() == "x"


@pytest.mark.slow
def test_code_that_computes_for_longer_than_a_hang_is_waited_for(mine, monkeypatch):
    monkeypatch.setattr(import_trial, "IDLE_S", 2.0)
    with imports_tried():
        assert ImportPath(mine("import time\nwhile time.process_time() < 2.5: pass")).load()() == 3


def test_endless_import_is_given_up(mine, monkeypatch):
    monkeypatch.setattr(import_trial, "LONGEST_S", 1.0)
    with imports_tried(), pytest.raises(ConfigError, match="mine.py: its import has not finished after 1 s"):
        ImportPath(mine("while True: pass")).load()


def test_processes_of_an_import_end_with_the_trial(mine, tmp_path):
    started = tmp_path / "started"
    code = (
        "import subprocess, os\np = subprocess.Popen(['sleep', '600'], close_fds=False)\n"
        f"open({str(started)!r}, 'w').write(str(p.pid))\nos.kill(os.getpid(), 11)"
    )
    with imports_tried(), pytest.raises(ConfigError, match="mine.py: a process that imports it is killed by SIGSEGV"):
        ImportPath(mine(code)).load()
    deadline = time.monotonic() + 240
    while _lives(int(started.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(int(started.read_text()))


def test_output_of_a_fork_is_not_the_result_of_the_import(mine):
    forks = "import os\nif os.fork() == 0: os._exit(0)\nos.wait()\nos.kill(os.getpid(), 9)"
    with imports_tried(), pytest.raises(ConfigError, match="is killed by SIGKILL"):
        ImportPath(mine(forks)).load()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
