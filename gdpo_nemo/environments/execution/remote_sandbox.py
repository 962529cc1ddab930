"""Sandbox on machines of the service E2B, for the case that this machine must not run model-written programs.

``RemoteRunner`` starts a machine for each sample, copies ``FILES`` and the job there, and runs this file on it. The
copy calls ``LocalRunner``, so a program has the limits and the isolation of ``sandbox.py`` on the remote machine too:
it sees neither the job with the tests nor the result. The remote machine needs Linux and Python 3.11, and nothing
else. Expected outputs of inputs never leave this machine.

A machine is used for one sample only. Therefore samples cannot affect each other, no machine must be kept alive, and a
machine that this process could not end reaches its own time limit.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gdpo_nemo.environments.execution.sandbox import Limits, LocalRunner, Run, Runner, SandboxError
from gdpo_nemo.utils.errors import ConfigError

FILES = (
    "environments/execution/remote_sandbox.py",
    "environments/execution/sandbox.py",
    "environments/execution/sandbox_script.py",
    "utils/errors.py",
)
"""Files of this package that the remote machine needs."""
_COMMAND = "python3 -m gdpo_nemo.environments.execution.remote_sandbox job.json"
_SERVICE_S = 30.0
"""Time in seconds for a request to the service, and for starting Python on its machine."""


class RemoteRunner(Runner):
    """Runs programs on machines of E2B, or of a server with the same interface.

    The client reads the variables ``E2B_API_KEY``, and ``E2B_DOMAIN`` for another server.

    Raises:
        ConfigError: if the client is not installed or the key is missing.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("e2b") is None:
            raise ConfigError("sandbox: e2b needs the package of this name, which is not installed; pip install e2b")
        if not os.environ.get("E2B_API_KEY"):
            raise ConfigError("sandbox: e2b needs a key; set the environment variable E2B_API_KEY")

    def run_inputs(self, source: str, inputs: Sequence[str], limits: Limits) -> list[Run]:
        """Run a program for each input on one machine. See ``Runner.run_inputs``."""
        return list(map(_run, _remote("run_inputs", [source, list(inputs)], limits)))

    def run_tests(
        self, source: str, setup: str, tests: Sequence[str], names: Sequence[str] | None, limits: Limits
    ) -> tuple[Run, list[bool]]:
        """Run a program and its tests on one machine. See ``Runner.run_tests``."""
        run, passed = _remote("run_tests", [source, setup, list(tests), names and list(names)], limits)
        return _run(run), passed


def _remote(method: str, arguments: Sequence[Any], limits: Limits) -> Any:
    """Call a method of ``LocalRunner`` on a new remote machine.

    Raises SandboxError if the method raises it, and if the service or the machine fails, which says nothing about the
    program.
    """
    client = importlib.import_module("e2b")
    package = Path(__file__).parents[2]
    job = json.dumps([method, arguments, dataclasses.asdict(limits)])
    files = [{"path": f"gdpo_nemo/{name}", "data": (package / name).read_text(encoding="utf-8")} for name in FILES]
    run_s = limits.wall_s + _SERVICE_S
    try:
        with client.Sandbox.create(
            timeout=math.ceil(run_s + 2 * _SERVICE_S), allow_internet_access=False, request_timeout=_SERVICE_S
        ) as machine:
            machine.files.write_files([*files, {"path": "job.json", "data": job}], user="root")
            reply = json.loads(machine.commands.run(_COMMAND, user="root", timeout=run_s).stdout)
    except Exception as error:  # the client and the libraries below it raise unrelated classes
        lines = str(error).strip().splitlines() or [""]
        raise SandboxError(f"the remote sandbox failed ({type(error).__name__}: {lines[-1][:300]})") from error
    if "error" in reply:
        raise SandboxError(f"on the remote machine: {reply['error']}")
    return reply["result"]


def _run(fields: Mapping[str, Any]) -> Run:
    return Run(**{**fields, "output": base64.b64decode(fields["output"])})


def _encoded(value: Run | bytes) -> Any:
    return dataclasses.asdict(value) if isinstance(value, Run) else base64.b64encode(value).decode()


def _main(job: str) -> None:
    """Execute a job on the remote machine and print its result."""
    method, arguments, limits = json.loads(Path(job).read_text(encoding="utf-8"))
    try:
        reply = {"result": getattr(LocalRunner(), method)(*arguments, Limits(**limits))}
    except SandboxError as error:
        reply = {"error": str(error)}
    print(json.dumps(reply, default=_encoded))


if __name__ == "__main__":
    _main(sys.argv[1])
