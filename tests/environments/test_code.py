"""Programs written by a model: rows of the usual data sets, and hostile programs in the real sandbox."""

import base64
import importlib
import json
import os
import pickle
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


def test_no_input_is_tried_after_the_total_cpu_time():
    burn = "import time\nwhile time.process_time() < 0.4:\n    pass\nprint(input())"
    runs = sandbox.LocalRunner().run_inputs(burn, ["1"] * 4, sandbox.Limits(wall_s=60.0, total_cpu_s=0.5))
    assert [(run.succeeded, run.output) for run in runs] == [(True, b"1\n")] * 2


def test_program_runs_equally_twice_including_the_order_of_sets():
    program = "print({str(i) for i in range(50)}, open('/tmp/x', 'w').write('state'))\n"
    first, second = sandbox.LocalRunner().run_inputs(program, ["", ""], sandbox.Limits(wall_s=60.0))
    assert first.output == second.output != b""


def test_machine_without_a_sandbox_is_refused_with_the_reason(monkeypatch):
    def unavailable(wanted):
        raise sandbox.SandboxError("namespaces: unshare: Operation not permitted")

    monkeypatch.setattr(sandbox, "mechanism", unavailable)
    with pytest.raises(
        ConfigError, match=r"cannot run on this machine \(namespaces: unshare: Operation not permitted\)"
    ):
        Code()


def test_sandbox_that_cannot_start_is_a_failure_with_the_reason(monkeypatch):
    monkeypatch.setattr(sandbox, "_python", lambda mechanism: ["/bin/sh", "-c", "echo no such machine >&2; exit 3"])
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
