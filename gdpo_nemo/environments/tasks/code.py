"""Programming problems: the policy writes a Python program, and a sandbox runs it against the tests of the row."""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gdpo_nemo.data.records import Outcome, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment, read_options
from gdpo_nemo.environments.execution import sandbox
from gdpo_nemo.environments.execution.remote_sandbox import RemoteRunner
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import check_pickle

_FENCE = re.compile(r"^```[^\n`]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
_CHECK = "code_check"
"""Column that ``read_row`` adds, with the tests in one format."""
_MAX_TESTS = 1000


class Code(Environment):
    """Environment for programs in Python. Each program runs in a sandbox (``execution/sandbox.py``).

    Components, each from 0 to 1:
        compiles: 1 if the program is valid Python, is not empty, and the sandbox did not have to stop it, else 0.
        tests: share of the tests that the program passes.
        time: 0 unless the program passes all tests. Otherwise, 1 up to ``fast_s`` seconds of CPU time, decreasing
            linearly to 0 at ``time_limit_s``. The slowest run counts. The value is rounded to tenths, so that noise is
            rarely a training signal.

    The program is the last code block of the completion, or the whole completion without a code block.

    Rows contain the columns of one of these formats:
        MBPP: ``test_list`` (assertions), ``test_imports`` or ``test_setup_code``, and ``text`` or ``prompt``.
        HumanEval: ``prompt``, ``test`` and ``entry_point``.
        APPS: ``question`` and ``input_output``, with ``fn_name`` for functions.
        LiveCodeBench: ``question_content``, ``public_test_cases`` and ``private_test_cases``.
        other rows: ``prompt`` and ``tests``, a list of assertions or of ``{input, output}``, and optionally
            ``entry_point``, the name that the assertions take from the program.

    Options:
        time_limit_s (4): CPU time limit in seconds of a program, for all assertions of a row or for one input.
        sample_limit_s (20): wall time limit in seconds of all tests of a sample, after which the verification has
            failed: the machine is too busy, or the program waits without computing. The limit should be below
            rollout.env_timeout_s. After half of this time as CPU time, but at least time_limit_s, no further input is
            tried, and the remaining tests are not passed.
        memory_mb (1024): memory limit in MiB.
        fast_s (1): see ``time``.
        sandbox (auto): ``bubblewrap`` or ``namespaces`` to require a mechanism. ``auto`` uses bubblewrap if it works.
            ``e2b`` runs programs on machines of the service E2B (``execution/remote_sandbox.py``).

    Raises:
        ConfigError: if an option is invalid, or the machine cannot run the sandbox.
    """

    instant = True
    by_sample = True

    reward_names = ("compiles", "tests", "time")
    system_prompt = (
        "Solve the programming problem in Python, with the standard library only. Think briefly, and end with the "
        "whole program in one block between ```python and ```."
    )

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options(
            "code", options, time_limit_s=4.0, sample_limit_s=20.0, memory_mb=1024, fast_s=1.0, sandbox="auto"
        )
        if not 0 < chosen.fast_s < chosen.time_limit_s <= chosen.sample_limit_s:
            raise ConfigError(
                "time_limit_s: must be greater than fast_s and at most sample_limit_s, and fast_s above 0"
            )
        if chosen.sandbox not in ("auto", *sandbox.MECHANISMS, "e2b"):
            raise ConfigError(f"sandbox: must be auto, bubblewrap, namespaces or e2b ({chosen.sandbox})")
        if chosen.memory_mb < 64:
            raise ConfigError(f"memory_mb: must be at least 64 ({chosen.memory_mb})")
        self._fast_s = float(chosen.fast_s)
        self._limits = sandbox.Limits(
            chosen.time_limit_s,
            chosen.sample_limit_s,
            chosen.memory_mb * 2**20,
            total_cpu_s=max(chosen.time_limit_s, chosen.sample_limit_s / 2),
        )
        try:
            self._runner: sandbox.Runner = (
                RemoteRunner() if chosen.sandbox == "e2b" else sandbox.LocalRunner(chosen.sandbox)
            )
        except sandbox.SandboxError as error:
            raise ConfigError(
                f"the sandbox for model-written programs cannot run on this machine ({error}); install bubblewrap, or "
                "allow user namespaces, in Docker for example with --security-opt seccomp=unconfined"
            ) from None

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the row's tests in one format. Raises ConfigError if the row has no tests or they are invalid."""
        prompt, check = _read(row)
        count = len(check.get("tests", check.get("inputs", ())))
        if not 1 <= count <= _MAX_TESTS:
            raise ConfigError(f"must have 1 to {_MAX_TESTS} tests, not {count}")
        return {**row, "prompt": prompt, _CHECK: json.dumps(check)}

    def examples(self, row: Mapping[str, Any]) -> Sequence[str]:
        """Return the row's solution."""
        if isinstance(solution := row.get("canonical_solution"), str):
            return [f"```python\n{json.loads(row[_CHECK])['prefix']}{solution}\n```"]
        return [f"```python\n{row['code']}\n```"] if isinstance(row.get("code"), str) else ()

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory. If the sandbox fails or the row's tests are invalid, the outcome is
        ``ENV_FAILED``."""
        return list(map(self._verdict, trajectories))

    def _verdict(self, trajectory: Trajectory) -> Verdict:
        check = json.loads(trajectory.prompt.fields[_CHECK])
        program = _program(trajectory.text, check)
        try:
            runs, passed = self._run_inputs(program, check) if "inputs" in check else self._run_tests(program, check)
        except sandbox.SandboxError as error:
            return Verdict({}, Outcome.ENV_FAILED, f"code: {error}")
        stopped = next((run.stopped for run in runs if run.stopped), "")
        rewards = {
            "compiles": float(all(run.compiled for run in runs) and not stopped and bool(program.strip())),
            "tests": sum(passed) / len(passed),
            "time": self._time(max(run.cpu_s for run in runs)) if all(passed) else 0.0,
        }
        return Verdict(rewards, extra={"stopped": stopped})

    def _run_tests(self, program: str, check: Mapping[str, Any]) -> tuple[list[sandbox.Run], list[bool]]:
        run, passed = self._runner.run_tests(program, check["setup"], check["tests"], check["names"], self._limits)
        return [run], passed

    def _run_inputs(self, program: str, check: Mapping[str, Any]) -> tuple[list[sandbox.Run], list[bool]]:
        """Run the program on each input. Tests whose input was not tried are not passed."""
        runs = self._runner.run_inputs(program, check["inputs"], self._limits)
        passed = [False] * len(check["outputs"])
        for index, run in enumerate(runs):
            output = run.output.decode(errors="replace")
            passed[index] = run.succeeded and _same_output(output, check["outputs"][index])
        return runs, passed

    def _time(self, cpu_s: float) -> float:
        """Return the component ``time`` of a program that passed all tests."""
        share = (self._limits.cpu_s - cpu_s) / (self._limits.cpu_s - self._fast_s)
        return math.floor(10 * min(1.0, max(0.0, share)) + 0.5) / 10


def _program(text: str, check: Mapping[str, Any]) -> str:
    """Return the program in a completion. A completion that continues HumanEval's prompt is appended to it."""
    blocks = _FENCE.findall(text)
    program: str = blocks[-1] if blocks else text
    prefix = check.get("prefix", "")
    if prefix and not re.search(
        rf"^\s*(?:async )?(?:def|class) {re.escape(check['names'][0])}\b", program, re.MULTILINE
    ):
        return f"{prefix}{program}"
    return program


def _same_output(output: str, expected: str) -> bool:
    """Compare outputs line by line, ignoring trailing white space and empty lines at the end."""
    return _lines(output) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _read(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the prompt of a row, and its tests in one of two formats.

    The formats are ``{setup, tests, names}`` for assertions and ``{inputs, outputs}`` for standard input and output.
    """
    if "test_list" in row:
        tests = _texts("test_list", row["test_list"])
        setup = "\n".join(_texts("test_imports", row.get("test_imports") or []))
        asked = row.get("text") or row.get("prompt")
        if isinstance(asked, str) and tests:
            asked = f"{asked}\nThe program must pass this test: {tests[0]}"
        return asked, _assertions(f"{setup}\n{row.get('test_setup_code') or ''}", tests, None)
    if "test" in row and "entry_point" in row:
        prompt, test, name = (_text(column, row.get(column)) for column in ("prompt", "test", "entry_point"))
        _check_name(name)
        task = f"Complete this function:\n```python\n{prompt.rstrip()}\n```"
        check = _assertions(f"{prompt}\n{test}", [f"check({name})"], [name])
        return task, {**check, "prefix": prompt}
    if "input_output" in row:
        return _with_starter(row, "question"), _input_output(_json("input_output", row["input_output"]))
    if "public_test_cases" in row:
        return _with_starter(row, "question_content"), _live_code_bench(row)
    if "tests" in row:
        given = _json("tests", row["tests"])
        if isinstance(given, list) and given and isinstance(given[0], Mapping):
            return row.get("prompt"), _pairs("tests", given)
        taken = row.get("entry_point")
        return row.get("prompt"), _assertions(
            "", _texts("tests", given), None if taken is None else [_check_name(taken)]
        )
    raise ConfigError("must have a column test_list, test, input_output, public_test_cases or tests")


def _input_output(found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping) or not all(isinstance(found.get(key), list) for key in ("inputs", "outputs")):
        raise ConfigError("input_output: must contain the lists inputs and outputs")
    if len(found["inputs"]) != len(found["outputs"]):
        raise ConfigError("input_output: inputs and outputs must have the same length")
    if name := found.get("fn_name"):
        return _calls(name, found["inputs"], list(map(_unwrapped, found["outputs"])))
    return {"inputs": list(map(_joined, found["inputs"])), "outputs": list(map(_joined, found["outputs"]))}


def _live_code_bench(row: Mapping[str, Any]) -> dict[str, Any]:
    public = _json("public_test_cases", row["public_test_cases"])
    cases = [*public, *_private(row.get("private_test_cases"))] if isinstance(public, list) else [public]
    if not all(isinstance(case, Mapping) for case in cases):
        raise ConfigError("public_test_cases: must be a list of objects")
    if not any(case.get("testtype") == "functional" for case in cases):
        return _pairs("public_test_cases", cases)
    metadata = _json("metadata", row.get("metadata"))
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    check = _pairs("public_test_cases", cases)
    arguments = []
    for given in check["inputs"]:
        arguments.append([_json("input", line) for line in given.splitlines() if line.strip()])
    return _calls(name, arguments, [_json("output", output) for output in check["outputs"]])


def _private(value: Any) -> list[Any]:
    """Return private test cases: JSON, or compressed as LiveCodeBench publishes them (base64, zlib, a pickled text)."""
    if not value:
        return []
    try:
        return list(json.loads(value) if isinstance(value, str) else value)
    except (ValueError, TypeError, RecursionError):  # not a list in JSON
        return _compressed(value)


def _compressed(value: Any) -> list[Any]:
    """Return the private test cases in a compressed text. Raises ConfigError."""
    try:
        packed = zlib.decompressobj().decompress(base64.b64decode(value), 2**28)
        return list(json.loads(_TextOnly(io.BytesIO(check_pickle(packed))).load()))
    except Exception as error:  # every layer raises other exceptions
        raise ConfigError(f"private_test_cases: cannot be read ({type(error).__name__})") from None


class _TextOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse all classes, so that reading runs no code."""
        raise pickle.UnpicklingError(f"{module}.{name} is not text")


def _calls(name: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[str, Any]:
    """Return assertions that call a function, or the method of this name of a class ``Solution``, and compare JSON."""
    function = _check_name(name)
    setup = (
        "def call(arguments):\n"
        f"    function = {function!r} in globals() and {function} or Solution().{function}\n"
        "    result = function(*arguments)\n"
        "    return list(result) if isinstance(result, tuple) else result"
    )
    tests = [f"assert call({arguments!r}) == {expected!r}" for arguments, expected in zip(inputs, outputs)]
    return _assertions(setup, tests, [function, "Solution"])


def _unwrapped(output: Any) -> Any:
    """Return the expected value of a call. APPS writes it as a list with one value."""
    return output[0] if isinstance(output, list) and len(output) == 1 else output


def _pairs(column: str, cases: Sequence[Any]) -> dict[str, Any]:
    for case in cases:
        if not isinstance(case, Mapping) or not all(isinstance(case.get(key), str) for key in ("input", "output")):
            raise ConfigError(f"{column}: a test must contain the texts input and output ({str(case)[:60]})")
    return {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}


def _assertions(setup: str, tests: Sequence[str], names: Sequence[str] | None) -> dict[str, Any]:
    return {"setup": setup, "tests": list(tests), "names": names}


def _with_starter(row: Mapping[str, Any], column: str) -> str:
    question = _text(column, row.get(column) or row.get("prompt"))
    starter = row.get("starter_code")
    return f"{question}\n\nBegin with this code:\n```python\n{starter.rstrip()}\n```" if starter else question


def _joined(entry: Any) -> str:
    return "\n".join(map(str, entry)) if isinstance(entry, list) else str(entry)


def _json(column: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ConfigError(f"{column}: is not valid JSON ({value[:60]!r})") from None


def _text(column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{column}: must be text, not {str(value)[:60]!r}")
    return value


def _texts(column: str, value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
        raise ConfigError(f"{column}: must be a list of texts, not {str(value)[:60]!r}")
    return list(value)


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"the name of the tested function must be an identifier, not {str(name)[:60]!r}")
    return name
