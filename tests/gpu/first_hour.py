"""Runs measurements one after another, each under a time limit of its own, and keeps what they found.

    bash tests/gpu/first_hour.sh [--out DIR] [--only NAME ...] [--skip NAME ...] [--all] [--model DIR] [--cpu] [--list]

Every step is a process of its own (``measure.py``, or pytest) that writes a JSON line for each finding as soon as it
has it, so that a step which hangs, and is killed, leaves what it had, but no process. After each step
``first_hour.json`` and ``first_hour.md`` are written again. The driver needs the standard library alone; ``engine`` and
``ipc`` need vLLM, ``colocated`` and ``eight`` also Ray, the other steps neither, and none a network. The limits of the
steps that run without ``--all`` add up to 25 minutes on one GPU. ``--cpu`` runs the same code on tiny shapes without a
GPU.

Exit status: 0 where every step ended and nothing exceeded its limit, 1 otherwise, 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_MEASURE = str(Path(__file__).with_name("measure.py"))
GPU_TESTS = ("tests/megatron/test_policy_on_gpu.py", "tests/megatron/test_fused_logprobs_gpu.py")
"""Files with tests marked ``gpu``. Other files import packages that a GPU installation lacks."""
GPU_TESTS_NEED = ("pytest", "pytest-xdist", "hypothesis", "filelock")
"""Packages that these tests need and the dependency group ``gpu`` lacks."""
_END_S = 5.0
"""What a process that is told to end has for it before it is killed."""
_CPU_LIMIT_S = 1200.0
_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): orphaned descendants become children of the process."""


@dataclass(frozen=True)
class Step:
    """One process: ``command`` is what follows the interpreter; ``FINDINGS`` in its environment names its file."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    what: str
    extra: bool = False
    """True if only ``--all`` or ``--only`` runs it."""
    several_gpus: bool = False
    """True if it ends at once where there is one GPU."""


@dataclass
class Outcome:
    """What became of a step."""

    name: str
    what: str
    status: str
    """ok, skipped (its finding of this name says why), failed (its process ended with an error), exceeded (a finding is
    over its limit) or timeout."""
    seconds: float
    limit_s: float
    findings: list[dict[str, Any]] = field(default_factory=list)
    """Each with `name`, `value`, `unit`, `limit` and `passed` where it is judged, and `key` for the table of steps."""
    error: str = ""
    """Last line of its log, or why it was skipped."""


def steps(cpu: bool, model: str = "") -> list[Step]:
    """All of them in order; ``cpu``: on tiny shapes; ``model``: a folder, in place of random weights."""

    def measured(name: str, seconds: float, *arguments: str, what: str, **options: bool) -> Step:
        command = (_MEASURE, *arguments, *(["--cpu"] if cpu else []), *(["--model", model] if model else []))
        return Step(name, _CPU_LIMIT_S if cpu else seconds, command, what, **options)

    marked = ("-m", "pytest", "-m", "gpu", "-n", "0", "-q", *GPU_TESTS)
    return [
        measured("basics", 120, "basics", what="imports, NCCL of one rank, a bf16 update against float32 on the CPU"),
        measured("engine", 270, "engine", what="vLLM: start, CUDA graphs, sample, sleep, wake, reload"),
        measured("ipc", 210, "ipc", what="a policy's weights into vLLM's own process, asleep until they come"),
        measured("colocated", 480, "colocated", what="a one-GPU recipe of three steps; kill -9, and resume"),
        measured("eight", 600, "eight", what="TP2+SP, CP2, PP2, EP2 against one rank; weights to separate engines",
                 several_gpus=True),
        measured("weights", 90, "weights", what="checksums, CUDA IPC between two processes"),
        measured("policy", 180, "policy",
                 what="packing, checkpoint, LoRA, reference swap, off-loading, shared prompts at one rank"),
        measured("speed-0.5b", 150, "speed", "--size", "0.5b", what="MFU, memory, launches and syncs of an update"),
        measured("speed-1.5b", 300, "speed", "--size", "1.5b", what="the same at 1.5 B", extra=True),
        measured("speed-7b", 420, "speed", "--size", "7b", what="the same at 7 B, as many layers as fit", extra=True),
        measured("logprobs", 240, "logprobs", what="log-prob chunks against the fused kernel; syncs of a micro-batch",
                 extra=True),
        measured("noise", 240, "noise", what="bf16 log-probs, packed and alone, against float32", extra=True),
        Step("gpu-tests", 900, (*marked, *(["--collect-only"] if cpu else [])),
             f"the tests marked gpu (needs {', '.join(GPU_TESTS_NEED)})",
             extra=True),
    ]  # fmt: skip


def run_step(step: Step, out: Path) -> Outcome:
    """Run it; its processes that are left at its end or after its limit are killed, in whatever session they are."""
    findings = out / f"{step.name}.jsonl"
    findings.unlink(missing_ok=True)
    log = out / f"{step.name}.log"
    start = time.monotonic()
    others = _descendants()
    with log.open("w") as file, _scratch() as folder, _adopting_orphans():
        environment = {
            **os.environ, "FINDINGS": str(findings), "PYTHONPATH": _path(), "PYTHONWARNINGS": "ignore",
            "PYTHONUNBUFFERED": "1",  # what a step prints comes before its error
            "TMPDIR": folder, "RAY_TMPDIR": os.environ.get("RAY_TMPDIR", tempfile.gettempdir()),
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, *step.command], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(timeout=step.limit_s)
            status = "ok" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            _end(process, others)
    found = _read(findings)
    skipped = [str(row["value"]) for row in found if row["name"] == "skipped"]
    if status == "ok":
        exceeded = any(row.get("passed") is False for row in found)
        status = "exceeded" if exceeded else "skipped" if skipped else "ok"
    lines = log.read_text(errors="replace").strip().splitlines()
    error = lines[-1][:300] if status in ("failed", "timeout") and lines else "".join(skipped)
    return Outcome(step.name, step.what, status, time.monotonic() - start, step.limit_s, found, error)


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Keep the processes of a step below this one, so that those of a run, in sessions of their own, are found."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for a step's files, also of one that is killed; in memory where that has room for a model of 7 B."""
    shm = Path("/dev/shm")
    statistics = os.statvfs(shm) if shm.is_dir() else None
    roomy = statistics is not None and statistics.f_bavail * statistics.f_frsize > 40e9
    return tempfile.TemporaryDirectory(dir=shm if roomy else None, prefix="first-hour-", ignore_cleanup_errors=True)


def _descendants() -> dict[int, bool]:
    """Map each descendant to True if it is alive, or False if it is a zombie."""
    children: dict[int, dict[int, bool]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), {})[int(path.parent.name)] = state not in "ZX"
    found: dict[int, bool] = {}
    below = [os.getpid()]
    while below:
        new = {pid: lives for parent in below for pid, lives in children.get(parent, {}).items()}
        found |= new
        below = [*new]
    return found


def _end(process: subprocess.Popen[bytes], others: Container[int]) -> None:
    """End the step's process, and all below this one but ``others``: told to end first, and killed after a while."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while left := {pid: lives for pid, lives in _descendants().items() if pid not in others}:
        for pid, lives in left.items():
            if pid == process.pid:
                process.poll()
            elif not lives:
                with contextlib.suppress(ChildProcessError):  # that of another process, which ends as well
                    os.waitpid(pid, os.WNOHANG)
            if lives and time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    process.wait()


def _read(path: Path) -> list[dict[str, Any]]:
    """The findings; a last line that was cut off when its process was killed is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def report(machine: dict[str, str], outcomes: Sequence[Outcome]) -> str:
    """Markdown: the machine, a row a step, and the findings of each."""
    lines = ["# The first hour", "", *(f"* {name}: {value}" for name, value in machine.items()), ""]
    lines += table(outcomes)
    for outcome in outcomes:
        if outcome.findings:
            lines += ["", f"## {outcome.name}", "", "| finding | value | unit | limit | |", "|---|---|---|---|---|"]
            lines += [_row(row) for row in outcome.findings]
    return "\n".join(lines) + "\n"


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """A row a step."""
    lines = ["| step | what | status | seconds | key figures |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        status = f"{outcome.status}: {_cell(outcome.error)}" if outcome.error else outcome.status
        figures = [f"{row['name']} {_number(row['value'])} {row['unit']}" for row in outcome.findings if row.get("key")]
        lines.append(
            f"| {outcome.name} | {_cell(outcome.what)} | {status} | {outcome.seconds:.0f} of {outcome.limit_s:.0f} | "
            f"{_cell('; '.join(figures))} |"
        )
    return lines


def _row(row: dict[str, Any]) -> str:
    verdict = {True: "ok", False: "**exceeded**"}.get(row.get("passed"), "")  # type: ignore[arg-type]
    limit = "" if row.get("limit") is None else _number(row["limit"])
    return f"| {_cell(row['name'])} | {_number(row['value'])} | {_cell(row.get('unit', ''))} | {limit} | {verdict} |"


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _cell(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def machine() -> dict[str, str]:
    """What the steps ran on; asked in a process of its own, whose CUDA context ends with it."""
    code = (
        "import importlib.metadata as m, torch\n"
        "def v(p):\n try: return m.version(p)\n except m.PackageNotFoundError: return 'absent'\n"
        "n = torch.cuda.device_count()\n"
        "print(f'{n} x {torch.cuda.get_device_name()}' if n else 'no GPU', '|', torch.version.cuda, '|', "
        "', '.join(f'{p} {v(p)}' for p in "
        "('torch', 'triton', 'megatron-core', 'transformer-engine', 'vllm', 'ray', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    gpu, cuda, packages = (done.stdout.strip().split(" | ") + ["?"] * 3)[:3]
    return {
        "device": gpu or "torch does not import",
        "CUDA": cuda,
        "packages": packages,
        "host": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def chosen(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Step]:
    """The steps that were asked for, in order."""
    known = steps(arguments.cpu, arguments.model)
    names = {step.name for step in known}
    for name in (*arguments.only, *arguments.skip):
        if name not in names:
            parser.error(f"no step {name!r}; there are {', '.join(step.name for step in known)}")
    usual = {step.name for step in known if arguments.all or not step.extra}
    wanted = set(arguments.only or usual) - set(arguments.skip)
    return [step for step in known if step.name in wanted]


def main(argv: Sequence[str] | None = None) -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(prog="first_hour.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "first_hour", metavar="DIR", help="%(default)s")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these steps")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="all but these")
    parser.add_argument("--all", action="store_true", help="also the steps that take longer than 25 minutes together")
    parser.add_argument("--model", default="", metavar="DIR", help="a real model in place of random weights")
    parser.add_argument("--cpu", action="store_true", help="rehearse on tiny shapes, without a GPU")
    parser.add_argument("--list", action="store_true", help="name the steps and their limits, and end")
    arguments = parser.parse_args(argv)
    wanted = chosen(arguments, parser)
    if arguments.list:
        for step in wanted:
            print(f"{step.name:12s}{step.limit_s:6.0f} s  {step.what}")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    on = machine()
    for step in wanted:
        print(f"{step.name:12s}", end="", flush=True)
        outcomes.append(run_step(step, arguments.out))
        print(f"{outcomes[-1].status:10s}{outcomes[-1].seconds:6.0f} s  {outcomes[-1].error}", flush=True)
        whole = {"machine": on, "steps": [asdict(outcome) for outcome in outcomes]}
        (arguments.out / "first_hour.json").write_text(json.dumps(whole, indent=1) + "\n")
        (arguments.out / "first_hour.md").write_text(report(on, outcomes))
    print(*table(outcomes), arguments.out / "first_hour.md", sep="\n")
    return 0 if all(outcome.status in ("ok", "skipped") for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
