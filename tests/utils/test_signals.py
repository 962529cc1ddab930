"""A terminal that goes away, for real: the kernel's SIGHUP, and output that leads nowhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = """
import signal, sys, time
from gdpo_nemo.utils.signals import answered_by
from gdpo_nemo.training.components import Stop

stop = Stop(patient=True)
with answered_by(stop, signal.SIGINT):
    print("training", flush=True)
    deadline = time.monotonic() + float(sys.argv[1])
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.01)
    signal.raise_signal(signal.SIGHUP)  # the shell's, after the kernel's
    print("the last step", flush=True)
    print("its checkpoint", file=sys.stderr, flush=True)
sys.exit(stop.status)
"""


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
# A test suite may itself run under nohup, and a hang-up that is ignored stays so in what it starts.
ON_A_TERMINAL = ["env", "--default-signal=HUP", "setsid", "--ctty"]


def test_run_whose_terminal_closes_ends_its_step_with_the_status_of_sighup():
    master, terminal = os.openpty()
    command = [*ON_A_TERMINAL, sys.executable, "-c", RUN, "200"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while b"training" not in shown:
        shown += os.read(master, 1000)
    os.close(master)
    assert process.wait(timeout=300) == 128 + signal.SIGHUP


def test_a_hangup_that_nohup_has_ignored_stays_ignored():
    done = subprocess.run(
        ["nohup", sys.executable, "-c", RUN, "0"], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "training\nthe last step\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_by_a_person_ends_the_run_at_once(number):
    from gdpo_nemo.training.components import Stop

    stop = Stop(patient=True)
    stop(number, None)
    assert stop.requested and stop.status == 128 + number
    with pytest.raises(SystemExit) as ended:
        stop(signal.SIGINT, None)
    assert ended.value.code == 128 + signal.SIGINT


RAW = """
import os, subprocess, sys
from pathlib import Path
from gdpo_nemo.utils.signals import raw_lines_in
with raw_lines_in(Path(sys.argv[1])):
    os.write(2, b"of a library\\n")
    subprocess.run(["sh", "-c", "echo of a child >&2"])
    print("of ours", file=sys.stderr)
print("after", file=sys.stderr)
os.write(2, b"after, raw\\n")
with raw_lines_in(Path(sys.argv[2])):
    pass
"""


def test_output_of_libraries_on_standard_error_goes_to_a_file_and_not_to_the_terminal(tmp_path):
    files = [tmp_path / "raw", tmp_path / "none"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", RAW, *map(str, files)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == "of ours\nafter\nafter, raw\n"
    assert files[0].read_text() == "of a library\nof a child\n" and not files[1].exists()
