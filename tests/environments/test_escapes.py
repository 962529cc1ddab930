"""Attempts to get out of the sandbox, with each mechanism. See ``escape_tries.py``."""

import os
import shutil
import socket
import subprocess
import tempfile

import pytest
from escape_tries import PREAMBLE, TRIES

from gdpo_nemo.environments.execution import sandbox, sandbox_script

pytestmark = pytest.mark.slow

MECHANISMS = [name for name in sandbox.MECHANISMS if name == "namespaces" or shutil.which("bwrap")]


def escaped(mechanism, folder, port, pid):
    """Return the names of the tries that got out, and those after which the sandbox did not report."""
    names, inputs = [], []
    for category, tries in TRIES.items():
        for name, code in tries.items():
            names.append(f"{category}: {name}")
            for word, value in {"OUTSIDE": folder, "PORT": port, "PID": pid, "CHECKOUT": os.getcwd()}.items():
                code = code.replace(word, str(value))
            inputs.append(code.replace("HOME", os.path.expanduser("~")))
    limits = sandbox.Limits(cpu_s=5.0, wall_s=120.0, total_cpu_s=120.0)
    runs = sandbox.LocalRunner(mechanism).run_inputs(PREAMBLE, inputs, limits)
    out = [name for name, run in zip(names, runs) if b"OUT" in run.output]
    return out, names[len(runs) :]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_no_try_gets_out_or_ends_the_sandbox(mechanism, tmp_path, monkeypatch):
    monkeypatch.setenv("ESCAPE_SECRET", "1")
    tmp_path.chmod(0o777)
    neighbour = subprocess.Popen(["sleep", "600"])
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            assert escaped(mechanism, tmp_path, server.getsockname()[1], neighbour.pid) == ([], [])
            with pytest.raises(BlockingIOError):
                server.accept()
        assert not list(tmp_path.iterdir()) and neighbour.poll() is None
    finally:
        neighbour.kill()
        neighbour.wait()


MEMORY_BYTES = 2**30 + os.getpid() * 2**12
"""Memory limit of programs, which tells the sandboxes of this process from others."""


def sandboxes():
    """Return the command lines of the running sandboxes with this memory limit."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
        except OSError:  # the process has ended
            continue
        if b"sandbox_script.py" in command and f'"memory_bytes": {MEMORY_BYTES}'.encode() in command:
            found.append(command)
    return found


# In each program, success of the attack would pass the test. Programs for MBPP define add(a, b).
ATTEMPT = "import os, sys\ndef add(a, b):\n    {}\n    return a + b\n"
FORGED = """import os
for fd in range(50):
    try: os.write(fd, b'{}' * 99)
    except OSError: pass
"""
HOSTILE = {
    "fork bomb": ATTEMPT.format("while True: os.fork()"),
    "10 GB of memory": ATTEMPT.format("x = b'x' * (10 * 2**30)"),
    "10 GB in files": ATTEMPT.format("[open(f'/tmp/{i}', 'wb').write(b'x' * 2**23) for i in range(1200)]"),
    "endless loop": ATTEMPT.format("while True: pass"),
    "endless loop without a signal": ATTEMPT.format("import signal; signal.signal(24, signal.SIG_IGN)\n    while 1: 0"),
    "close descriptors": ATTEMPT.format("os.closerange(0, 10**5)"),
    "kill the parent": ATTEMPT.format("os.kill(os.getppid(), 9); os.kill(0, 9); os.kill(-1, 9); os.abort()"),
    "exit": "import os\nos._exit(0)",
    "deep source": "(" * 10**5 + ")" * 10**5,
    "forged result": FORGED.format("[true, true]\\n"),
    "forged replies": FORGED.format('["value", true, [["list", []]]]\\n'),
    "always equal": "class Yes:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "def add(a, b): return Yes()\n",
    "patched built-ins": "import builtins\nbuiltins.AssertionError = print\n"
    "len, abs, set = (lambda *_: 2), (lambda *_: 3), list\n"
    "class math:\n    isclose = lambda *_: True\ndef add(a, b): return 1\n",
    "patched server": "import sys\nserver = sys.modules['sandbox']\n"
    "server._passes = server._encode = lambda *_: True\n"
    "server._OPERATIONS['call'] = lambda *_: True\ndef add(a, b): return True\n",
    "tests in memory": "import gc\nfound = [o for o in gc.get_objects() if chr(105) + 'sclose(add' in str(o)]\n"
    "def add(a, b): return a + b if found else 0\n",
}  # fmt: skip
TESTS = [
    "assert add(1, 2) == 3",
    "assert len({add(1, 2), 7}) == 2 and abs(add(1, 2)) == 3",
    "assert math.isclose(add(1, 2), 3)",
]


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_scores_0_and_harms_nothing(name, mechanism):
    limits = sandbox.Limits(1.0, 60.0, MEMORY_BYTES)
    run, passed = sandbox.LocalRunner(mechanism).run_tests(HOSTILE[name], "", TESTS, None, limits)
    assert passed == [False, False, False]
    # A program that ignores SIGXCPU is killed by the kernel's count of ticks, which may differ from the reported time.
    reasons = {"endless loop": {"cpu time"}, "endless loop without a signal": {"cpu time", ""}}
    assert run.stopped in reasons.get(name, {""})
    assert not sandboxes()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_program_that_prints_gigabytes_is_stopped(mechanism):
    [run] = sandbox.LocalRunner(mechanism).run_inputs(
        "while True: print('x' * 2**16)", ["", ""], sandbox.Limits(20.0, 120.0)
    )
    assert run.stopped == "output" and len(run.output) <= 2**20 and not run.succeeded and run.compiled


OUTLIVE = """import ctypes, os, signal, threading
ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
threading.Event().wait()
"""


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_program_that_waits_is_a_failure_and_does_not_outlive_the_sandbox(mechanism):
    with pytest.raises(sandbox.SandboxError, match="did not end within 1 s of wall time"):
        sandbox.LocalRunner(mechanism).run_inputs(OUTLIVE, [""], sandbox.Limits(1.0, 1.0, MEMORY_BYTES))
    assert not sandboxes()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_each_input_has_an_empty_folder_if_the_checkout_is_below_tmp(mechanism, monkeypatch):
    source = "import os\nprint(sorted(os.listdir('/tmp')))\nopen('/tmp/left', 'w').close()"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(sandbox_script, "__file__", shutil.copy(sandbox_script.__file__, folder))
        runs = sandbox.LocalRunner(mechanism).run_inputs(source, ["", "", ""], sandbox.Limits(10.0, 60.0))
    assert [run.output for run in runs] == 3 * [b"[]\n"] and all(run.succeeded for run in runs)
