"""Programs written by a model: rows of the usual data sets, and hostile programs in the real sandbox."""

import base64
import functools
import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
import zlib

import pytest
from environment_samples import trajectory
from right_programs import MBPP as ASSERTED, cases, together

from gdpo_nemo.data.records import Outcome
from gdpo_nemo.environments.execution import sandbox
from gdpo_nemo.environments.tasks.code import Code
from gdpo_nemo.utils.errors import ConfigError

pytestmark = pytest.mark.slow

ADD = "def add(a, b):\n    return a + b\n"
MBPP = {
    "text": "Add two numbers.",
    "code": ADD,
    "test_list": ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"],
}
STDIO = {"question": "Add one.", "input_output": json.dumps({"inputs": ["1\n", "5\n"], "outputs": ["2\n", "6"]})}


def verdict_of(program, row, **options):
    environment = Code(options)
    check = environment.read_row(row)["code_check"]
    [verdict] = environment.verify([trajectory(program, code_check=check)])
    return verdict


def rewards(program, row, **options):
    verdict = verdict_of(program, row, **options)
    assert verdict.outcome is Outcome.OK, verdict.detail
    return tuple(verdict.rewards[name] for name in Code.reward_names)


def private(cases):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


HUMAN_EVAL = {
    "prompt": 'def double(x):\n    """Return twice x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate('ab') == 'abab'\n",
    "entry_point": "double",
}
HUGE_MEMO = b"\x80\x02]r\xff\xff\xff\x7f."
"""A pickle of 10 bytes for which Python's unpickler allocates 64 GB."""
LIVE_CODE_BENCH = {
    "question_content": "Sum.",
    "starter_code": "class Solution:\n    def total(self, numbers: list[int]) -> int:",
    "public_test_cases": json.dumps([{"input": "[1, 2]", "output": "3", "testtype": "functional"}]),
    "private_test_cases": private([{"input": "[]", "output": "0", "testtype": "functional"}]),
    "metadata": '{"func_name": "total"}',
}
PAIRS = {"question": "?", "input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 1]]}}
TOTAL = "class Solution:\n    def total(self, numbers):\n        return sum(numbers)"


@pytest.mark.parametrize(
    "program, row, expected",
    [
        (f"Here:\n```python\n{ADD}```\nDone.", MBPP, (1, 1, 1)),
        ("def add(a, b):\n    return 3", MBPP, (1, 0.5, 0)),
        ("def add(a, b) return 3", MBPP, (0, 0, 0)),
        (f"{ADD}raise ValueError", MBPP, (1, 0, 0)),
        ("", MBPP, (0, 0, 0)),
        (HUMAN_EVAL["canonical_solution"], HUMAN_EVAL, (1, 1, 1)),
        ("```\ndef double(x):\n    return x * 2\n```", HUMAN_EVAL, (1, 1, 1)),
        ("    return 4\n", HUMAN_EVAL, (1, 0, 0)),
        ("print(int(input()) + 1)", STDIO, (1, 1, 1)),
        ("import sys\nprint(2)\nsys.exit(0)", STDIO, (1, 0.5, 0)),
        ("print(int(input()) + 1)\nsys.exit(1)", STDIO, (1, 0, 0)),
        (TOTAL, LIVE_CODE_BENCH, (1, 1, 1)),
        (TOTAL.replace("sum(numbers)", "3"), LIVE_CODE_BENCH, (1, 0.5, 0)),
        ("def f(x):\n    return x, x", PAIRS, (1, 1, 1)),
        ("print(input()[::-1])", {"prompt": "Reverse.", "tests": [{"input": "ab", "output": "ba"}]}, (1, 1, 1)),
        (
            "class Stack:\n    def __init__(self):\n        self.items = []\n"
            "    def push(self, x):\n        self.items.append(x)\n"
            "    def __len__(self):\n        return len(self.items)\ndef fill(found):\n    found.append(1)\n"
            "def fail():\n    raise KeyError('k')\ndef count():\n    yield from range(3)\n",
            {
                "prompt": "?",
                "tests": [
                    "s = Stack(); s.push({1: (2.5, None)}); assert len(s) == 1 and s.items == [{1: (2.5, None)}]",
                    "found = []; fill(found); assert found == [1]",
                    "try:\n    fail()\n    assert False\nexcept KeyError:\n    pass",
                    "assert list(count()) == [0, 1, 2] and math.isclose(len(list(count())), 3)",
                ],
            },
            (1, 1, 1),
        ),
    ],
)  # fmt: skip
def test_program_is_scored_by_the_tests_of_common_rows(program, row, expected):
    assert rewards(program, row) == expected


RIGHT = cases()
MECHANISMS = [name for name in sandbox.MECHANISMS if name == "namespaces" or sandbox.shutil.which("bwrap")]


def passes_in_plain_python(program, check, folder):
    """Return whether a program passes a row's tests without a sandbox. At most two inputs are tried."""
    for number, (given, expected) in enumerate(zip(check.get("inputs", ())[:2], check.get("outputs", ()))):
        (folder / str(number)).mkdir()
        command = [sys.executable, "-S", "-c", f"exit = quit = __import__('sys').exit\n{program}"]
        done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=folder / str(number))
        if done.stdout.split() != expected.split():
            return False
    scope = {name: importlib.import_module(name) for name in ("collections", "datetime", "math")}
    scope["__name__"] = "solution"
    for code in (program, check.get("setup", ""), *check.get("tests", ())) if "tests" in check else ():
        exec(code, scope)
    return True


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_right_programs_pass_assertions_as_in_plain_python(tmp_path):
    for name in ASSERTED:
        program, row = RIGHT[name]
        assert passes_in_plain_python(program, json.loads(Code().read_row(row)["code_check"]), tmp_path), name
    program, row = together()
    check = json.loads(Code().read_row(row)["code_check"])
    run, passed = sandbox.LocalRunner().run_tests(
        program, check["setup"], check["tests"], None, sandbox.Limits(20.0, 120.0)
    )
    assert [test for test, ok in zip(check["tests"], passed) if not ok] == [] and run.compiled and run.succeeded


@pytest.mark.parametrize("name", [name for name in RIGHT if name not in ASSERTED])
def test_right_program_passes_as_in_plain_python(name, tmp_path):
    program, row = RIGHT[name]
    assert passes_in_plain_python(program, json.loads(Code().read_row(row)["code_check"]), tmp_path)
    compiles, tests, _ = rewards(program, row, time_limit_s=20, sample_limit_s=120)
    assert (compiles, tests) == (1, 1)


def test_slow_program_gets_less_for_time_in_tenths():
    burn = "import time\nwhile time.process_time() < 1:\n    pass\n"
    compiles, tests, quick = rewards(burn + ADD, MBPP, time_limit_s=4, fast_s=0.01)
    assert (compiles, tests) == (1, 1) and 0.5 <= quick <= 0.8 and (10 * quick).is_integer()


# In each program, success of the attack would pass the test. Programs for MBPP define add(a, b).
ATTEMPT = "import os, socket, sys\ndef add(a, b):\n    {}\n    return a + b\n"
FORGED = """import os
for fd in range(50):
    try: os.write(fd, b'{}' * 99)
    except OSError: pass
"""
HOSTILE = {
    "fork bomb": ATTEMPT.format("while True: os.fork()"),
    "fork": ATTEMPT.format("if os.fork() == 0: os._exit(0)"),
    "spawn": ATTEMPT.format("import subprocess; subprocess.run(['/bin/sh', '-c', 'true'])"),
    "10 GB of memory": ATTEMPT.format("x = b'x' * (10 * 2**30)"),
    "10 GB in files": ATTEMPT.format("[open(f'/tmp/{i}', 'wb').write(b'x' * 2**23) for i in range(1200)]"),
    "10 GB in memory files": ATTEMPT.format("[os.write(os.memfd_create(str(i)), b'x' * 2**23) for i in range(1200)]"),
    "1000 threads": ATTEMPT.format(
        "import threading; [threading.Thread(target=threading.Event().wait, daemon=True).start() for _ in range(1000)]"
    ),
    "network": ATTEMPT.format("socket.create_connection(('127.0.0.1', int('PORT')), 5)"),
    "local socket": ATTEMPT.format("socket.socket(socket.AF_UNIX).connect('/run/docker.sock')"),
    "read the checkout": ATTEMPT.format("open('CHECKOUT/pyproject.toml').read()"),
    "read home": ATTEMPT.format("assert len(os.listdir('HOME')) > 1"),
    "read other processes": ATTEMPT.format("open('/proc/1/environ').read()"),
    "write outside": ATTEMPT.format("open('OUTSIDE/harm', 'w').write('x')"),
    "write the library": ATTEMPT.format("open(os.__file__, 'a').write('x')"),
    "mount": ATTEMPT.format("import ctypes; c = ctypes.CDLL(None); assert not c.unshare(0x10000000)"),
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
}  # fmt: skip
TESTS = [
    "assert add(1, 2) == 3",
    "assert len({add(1, 2), 7}) == 2 and abs(add(1, 2)) == 3",
    "assert math.isclose(add(1, 2), 3)",
]


@pytest.fixture(scope="module")
def neighbour(tmp_path_factory):
    """A server and a folder that hostile programs try to reach."""
    folder = tmp_path_factory.mktemp("outside")
    folder.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield folder, server


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_scores_0_and_harms_nothing(name, neighbour):
    folder, server = neighbour
    program = HOSTILE[name].replace("PORT", str(server.getsockname()[1])).replace("OUTSIDE", str(folder))
    program = program.replace("CHECKOUT", os.getcwd()).replace("HOME", os.path.expanduser("~"))
    run, passed = sandbox.LocalRunner().run_tests(
        program, "", TESTS, None, sandbox.Limits(1.0, 60.0, MEMORY_MB * 2**20)
    )
    assert passed == [False, False, False]
    # A program that ignores SIGXCPU is killed by the kernel's count of ticks, which may differ from the reported time.
    reasons = {"endless loop": {"cpu time"}, "endless loop without a signal": {"cpu time", ""}}
    assert run.stopped in reasons.get(name, {""})
    assert not list(folder.iterdir())
    with pytest.raises(BlockingIOError):
        server.accept()
    assert not sandboxes()


MEMORY_MB = 1024 + os.getpid() % 4096
"""Memory limit of programs, which tells the sandboxes of this process from others."""


def sandboxes(memory_bytes=MEMORY_MB * 2**20):
    """Return the command lines of the running sandboxes with this memory limit."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
        except OSError:  # the process has ended
            continue
        if b"sandbox_script.py" in command and f'"memory_bytes": {memory_bytes}'.encode() in command:
            found.append(command)
    return found


def test_program_that_prints_gigabytes_is_stopped():
    [run] = sandbox.LocalRunner().run_inputs("while True: print('x' * 2**16)", ["", ""], sandbox.Limits(20.0, 120.0))
    assert run.stopped == "output" and len(run.output) <= 2**20 and not run.succeeded and run.compiled


def test_hostile_program_scores_0_in_every_component_if_it_is_stopped():
    assert rewards("while True: pass", STDIO, time_limit_s=1, fast_s=0.5, sample_limit_s=300) == (0, 0, 0)


@pytest.mark.parametrize(
    "row, said",
    [
        ({"test_setup_code": "import no_such_module"}, "the tests of the row are invalid"),
        ({"test_list": ["import os; os._exit(0)"]}, "the tests of the row end their process"),
        ({"test_list": ["import os; os.write(3, b'[' * 10**5); os._exit(0)"]}, "tests of the row end their process"),
        ({"test_list": ["import os; os.write(3, b'5'); os._exit(3)"]}, "the tests of the row end their process"),
    ],
)
def test_invalid_tests_of_a_row_mask_the_sample_instead_of_scoring_0(row, said):
    verdict = verdict_of(ADD, {**MBPP, **row})
    assert verdict.outcome is Outcome.ENV_FAILED and said in verdict.detail


def test_wrong_program_fails_the_tests_if_the_setup_needs_its_class():
    program, row = RIGHT["setup with the program's class"]
    assert rewards(program.replace("class Node", "class Other"), row) == (1, 0, 0)


def test_program_cannot_change_the_limits_of_the_sandbox():
    program = """import ctypes, resource
call = ctypes.CDLL(None, use_errno=True).syscall
number = {"x86_64": (302, 434, 438), "aarch64": (261, 434, 438)}["MACHINE"]
first = call(number[1], 1, 0)  # pidfd_open of the first process
print(call(number[0], 1, 0, 0, 0), call(number[2], first, 1, 0))
print(resource.getrlimit(0)[0])
"""
    [run] = sandbox.LocalRunner().run_inputs(
        program.replace("MACHINE", os.uname().machine), [""], sandbox.Limits(2.0, 60.0)
    )
    assert run.output == b"-1 -1\n2\n"


def test_no_input_is_tried_after_the_total_cpu_time():
    burn = "import time\nwhile time.process_time() < 0.4:\n    pass\nprint(input())"
    runs = sandbox.LocalRunner().run_inputs(burn, ["1"] * 4, sandbox.Limits(wall_s=60.0, total_cpu_s=0.5))
    assert [(run.succeeded, run.output) for run in runs] == [(True, b"1\n")] * 2


def test_program_runs_equally_twice_including_the_order_of_sets():
    program = "print({str(i) for i in range(50)}, open('/tmp/x', 'w').write('state'))\n"
    first, second = sandbox.LocalRunner().run_inputs(program, ["", ""], sandbox.Limits(wall_s=60.0))
    assert first.output == second.output != b""


OUTLIVE = """import ctypes, os, signal, threading
ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
threading.Event().wait()
"""


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_program_that_waits_masks_the_sample_and_does_not_outlive_the_sandbox(mechanism):
    options = {"time_limit_s": 1, "fast_s": 0.5, "sample_limit_s": 1, "memory_mb": MEMORY_MB, "sandbox": mechanism}
    verdict = verdict_of(OUTLIVE, STDIO, **options)
    assert verdict.outcome is Outcome.ENV_FAILED and "did not end within 1 s of wall time" in verdict.detail
    assert not sandboxes()


def test_machine_without_a_sandbox_is_refused_with_the_reason(monkeypatch):
    def unavailable(wanted):
        raise sandbox.SandboxError("namespaces: unshare: Operation not permitted")

    monkeypatch.setattr(sandbox, "mechanism", unavailable)
    with pytest.raises(
        ConfigError, match=r"cannot run on this machine \(namespaces: unshare: Operation not permitted\)"
    ):
        Code()


def test_sandbox_that_cannot_start_is_a_failure_with_the_reason(monkeypatch):
    monkeypatch.setattr(
        sandbox, "_python", functools.partial(list, ["/bin/sh", "-c", "echo no such machine >&2; exit 3"])
    )
    with pytest.raises(sandbox.SandboxError, match="no such machine"):
        sandbox.LocalRunner().run_inputs("", [""], sandbox.Limits())


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "?"}, "must have a column test_list, test, input_output"),
        ({"prompt": "?", "tests": []}, "must have 1 to 1000 tests, not 0"),
        ({"prompt": "?", "tests": [{"input": 3}]}, "a test must contain the texts input and output"),
        ({"question": "?", "input_output": "{"}, "input_output: is not valid JSON"),
        ({"question": "?", "input_output": {"inputs": [1], "outputs": []}}, "must have the same length"),
        ({**HUMAN_EVAL, "entry_point": "f(); evil"}, "must be an identifier"),
        ({**LIVE_CODE_BENCH, "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(os.getcwd))).decode()},
         "private_test_cases: cannot be read (UnpicklingError)"),
        ({**LIVE_CODE_BENCH, "private_test_cases": base64.b64encode(zlib.compress(HUGE_MEMO)).decode()},
         "private_test_cases: cannot be read (UnpicklingError)"),
        ({**LIVE_CODE_BENCH, "public_test_cases": "5"}, "public_test_cases: must be a list of objects"),
        ({"text": "?", "test_list": "assert"}, "test_list: must be a list of texts"),
    ],
)  # fmt: skip
def test_invalid_row_is_refused(row, message):
    with pytest.raises(ConfigError) as error:
        Code().read_row(row)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"time_limit_s": 30}, "time_limit_s: must be"),
        ({"memory_mb": 1}, "memory_mb: must be"),
        ({"limit": 1}, "unknown"),
    ],
)
def test_invalid_option_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Code(options)
