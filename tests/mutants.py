"""Mutation check: break one line of the package at a time, and see the tests that are named for it fail.

    python tests/mutants.py [--only PATTERN] [--jobs 2]

The tables are in `tests/mutant_tables`. The script copies the tracked files of the checkout to a temporary folder,
runs all named tests there without a mutant, and then each mutant's tests with the mutant. The exit status is 1 if a
mutant is not noticed or if a test fails without one.

Each pytest runs in a fork of a process that has imported torch, which saves most of its start. `gdpo_nemo` is not
imported before the fork.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401 - imported for the forks
import pytest
import torch  # noqa: F401 - imported for the forks
from mutant_tables.table import MUTANTS, Mutant

CHECKOUT = Path(__file__).resolve().parents[1]
LIMIT_S = 600
"""A mutant may turn a loop into an endless one: seconds after which its tests are killed and count as failed."""


@dataclass(frozen=True)
class Outcome:
    """Result of pytest for one mutant, or for the tests without a mutant."""

    status: int
    """Exit status of pytest; negative: the signal that ended it."""
    failed: str
    """The first test that failed; empty if none did."""
    cpu_s: float
    output: str

    @property
    def noticed(self) -> bool:
        """True if a test failed or was killed at the limit; an error of collection does not count."""
        return self.status in (pytest.ExitCode.TESTS_FAILED, -signal.SIGALRM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen mutants and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", default="", help="regular expression on file, text and reason")
    parser.add_argument("--jobs", type=int, default=2, help="pytest processes at a time (default: 2)")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if re.search(options.only, mutant.describe())]
    if not chosen:
        parser.error(f"--only: no mutant matches {options.only!r}")
    wrong = [problem for mutant in chosen for problem in problems(mutant)]
    if wrong:
        print(*wrong, sep="\n")
        return 1
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [copy_checkout(Path(folder) / str(number)) for number in range(options.jobs)]
        living = check_all(chosen, copies)
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(chosen) - living} of {len(chosen)} mutants noticed, {living} not; "
        f"{time.monotonic() - start:.0f} s, {cpu.ru_utime + cpu.ru_stime:.0f} CPU s"
    )
    return int(living > 0)


def problems(mutant: Mutant) -> Iterator[str]:
    """Yield a sentence for each way in which a mutant does not fit the checkout."""
    path = CHECKOUT / mutant.path
    count = path.read_text().count(mutant.text) if path.is_file() else 0
    if count != 1:
        yield f"{mutant.path}: the text occurs {count} times, not once: {mutant.text!r}"
    for test in mutant.tests:
        if not (CHECKOUT / test.partition("::")[0]).is_file():
            yield f"{mutant.path}: no file of tests {test!r}"


def copy_checkout(folder: Path) -> Path:
    """Copy the tracked files, as they are in the checkout, and link its environment."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source = CHECKOUT / name
        if source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    if (CHECKOUT / ".venv").is_dir():
        (folder / ".venv").symlink_to(CHECKOUT / ".venv")
    return folder


def check_all(mutants: Sequence[Mutant], copies: Sequence[Path]) -> int:
    """Run the tests without and with every mutant, print a line a mutant, and return how many were not noticed."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    sound = finished(start(copies[0], tests, stop=False), copies[0])
    if sound.status != pytest.ExitCode.OK:
        print(sound.output[-4000:], "without a mutant, the tests must pass", sep="\n")
        return len(mutants)
    print(f"without a mutant: {len(tests)} tests pass ({sound.cpu_s:.0f} CPU s)", flush=True)
    free = list(copies)
    running: dict[int, tuple[Mutant, Path]] = {}
    waiting = list(mutants)
    living = 0
    while waiting or running:
        while waiting and free:
            mutant, copy = waiting.pop(0), free.pop()
            put(copy / mutant.path, mutant.text, mutant.replacement)
            running[start(copy, mutant.tests)] = mutant, copy
        process, status, usage = os.wait3(0)
        mutant, copy = running.pop(process)
        outcome = read_outcome(copy, status, usage)
        shutil.copy2(CHECKOUT / mutant.path, copy / mutant.path)
        free.append(copy)
        living += not outcome.noticed
        print(sentence(mutant, outcome), flush=True)
    return living


def put(path: Path, text: str, replacement: str) -> None:
    """Replace a text of a file, and remove its bytecode: of the same second and size, it would pass for new."""
    path.write_text(path.read_text().replace(text, replacement))
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def start(copy: Path, tests: Sequence[str], stop: bool = True) -> int:
    """Start pytest in a fork, in a copy of the checkout, and return the process id."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    status = 70
    try:
        status = run_tests(copy, tests, stop)
    finally:
        sys.stdout.flush()
        os._exit(status)


def run_tests(copy: Path, tests: Sequence[str], stop: bool) -> int:
    """Run pytest in this process, with the copy's package first on the path and all output in a file."""
    os.chdir(copy)
    output = os.open(copy / "mutant.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    own = str(Path(__file__).parent)
    sys.path[:] = [str(copy), *(entry for entry in sys.path if entry != own)]
    os.environ["PYTHONPATH"] = str(copy)
    if stop:
        signal.alarm(LIMIT_S)
    chosen = ["-n", "0", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=line", *(["-x"] if stop else []), *tests]
    return int(pytest.main(chosen))


def finished(process: int, copy: Path) -> Outcome:
    """Wait for a pytest process and return its outcome."""
    _, status, usage = os.wait4(process, 0)
    return read_outcome(copy, status, usage)


def read_outcome(copy: Path, status: int, usage: resource.struct_rusage) -> Outcome:
    """Read the output of a pytest process that has ended."""
    output = ""
    with contextlib.suppress(FileNotFoundError):
        output = (copy / "mutant.log").read_text(errors="replace")
    failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
    code = os.waitstatus_to_exitcode(status)
    return Outcome(code, failed[1] if failed else "", usage.ru_utime + usage.ru_stime, output)


def sentence(mutant: Mutant, outcome: Outcome) -> str:
    """Describe the outcome of a mutant in a line; for an error, with the end of what pytest wrote."""
    if outcome.noticed:
        return f"noticed      {mutant.describe()} | {outcome.failed or 'killed at the limit'}"
    line = f"NOT NOTICED  {mutant.describe()}"
    if outcome.status == pytest.ExitCode.OK:
        return line
    return f"{line} | pytest ended with status {outcome.status}:\n{outcome.output[-1500:]}"


if __name__ == "__main__":
    sys.exit(main())
