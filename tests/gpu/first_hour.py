"""Runs measurements one after another, each under a time limit of its own, and keeps what they found.

    bash tests/gpu/first_hour.sh [--out DIR] [--only NAME ...] [--skip NAME ...] [--cpu] [--list]

Every step is a process of its own (``measure.py``, or pytest) that writes a JSON line for each finding as soon as it
has it, so that a step which hangs, and is killed, leaves what it had. After each step ``first_hour.json`` and
``first_hour.md`` are written again. The driver needs the standard library alone; steps 1 to 4 of the note need torch,
megatron-core, transformers and omegaconf, and neither Ray nor vLLM nor a network. ``--cpu`` runs the same code on tiny
shapes without a GPU.

Exit status: 0 where every step ended and nothing exceeded its limit, 1 otherwise, 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Sequence

ROOT = Path(__file__).resolve().parents[2]
_MEASURE = str(Path(__file__).with_name("measure.py"))
_END_S = 5.0
"""What a process that is told to end has for it before it is killed."""
_CPU_LIMIT_S = 600.0


@dataclass(frozen=True)
class Step:
    """One process: ``command`` is what follows the interpreter; ``FINDINGS`` in its environment names its file."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    what: str


@dataclass
class Outcome:
    """What became of a step."""

    name: str
    what: str
    status: str
    """ok, failed (its process ended with an error), exceeded (a finding is over its limit) or timeout."""
    seconds: float
    limit_s: float
    findings: list[dict[str, Any]] = field(default_factory=list)
    """Each with `name`, `value`, `unit`, and `limit` and `passed` where it is judged."""
    error: str = ""
    """Last line of its log."""


def steps(cpu: bool) -> list[Step]:
    """All of them in order; ``cpu``: on tiny shapes."""

    def measured(name: str, minutes: float, *arguments: str, what: str) -> Step:
        options = (*arguments, *(["--cpu"] if cpu else []))
        return Step(name, _CPU_LIMIT_S if cpu else 60 * minutes, (_MEASURE, *options), what)

    marked = ("-m", "pytest", "-m", "gpu", "-n", "0", "-q", "tests", "--ignore", "tests/gpu")
    return [
        measured("basics", 3, "basics", what="imports, NCCL of one rank, a bf16 update against float32 on the CPU"),
        measured("speed-0.5b", 4, "speed", "--size", "0.5b", what="MFU, memory, launches and syncs of an update"),
        measured("policy", 8, "policy", what="packing, checkpoint, LoRA, reference swap, off-loading at one rank"),
        measured("weights", 5, "weights", what="checksums, CUDA IPC between two processes"),
        measured("speed-1.5b", 6, "speed", "--size", "1.5b", what="the same at 1.5 B"),
        measured("speed-7b", 8, "speed", "--size", "7b", what="the same at 7 B, as many layers as fit"),
        measured("logprobs", 5, "logprobs", what="log-prob chunks against the fused kernel; syncs of a micro-batch"),
        measured("noise", 5, "noise", what="bf16 log-probs, packed and alone, against float32"),
        Step("gpu-tests", 900, (*marked, *(["--collect-only"] if cpu else [])), "pytest -m gpu tests"),
    ]


def run_step(step: Step, out: Path) -> Outcome:
    """Run it; what is left of its process group after the limit is killed."""
    findings = out / f"{step.name}.jsonl"
    findings.unlink(missing_ok=True)
    environment = {**os.environ, "FINDINGS": str(findings), "PYTHONPATH": _path(), "PYTHONWARNINGS": "ignore"}
    log = out / f"{step.name}.log"
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *step.command], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(timeout=step.limit_s)
            status = "ok" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            _end(process)
    found = _read(findings)
    if status == "ok" and any(row.get("passed") is False for row in found):
        status = "exceeded"
    lines = log.read_text(errors="replace").strip().splitlines()
    error = lines[-1][:300] if status in ("failed", "timeout") and lines else ""
    return Outcome(step.name, step.what, status, time.monotonic() - start, step.limit_s, found, error)


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the step's whole process group, which its own session makes its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            continue
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
    lines += ["| step | what | status | seconds |", "|---|---|---|---|"]
    for outcome in outcomes:
        status = f"{outcome.status}: {_cell(outcome.error)}" if outcome.error else outcome.status
        lines.append(
            f"| {outcome.name} | {_cell(outcome.what)} | {status} | {outcome.seconds:.0f} of {outcome.limit_s:.0f} |"
        )
    for outcome in outcomes:
        if outcome.findings:
            lines += ["", f"## {outcome.name}", "", "| finding | value | unit | limit | |", "|---|---|---|---|---|"]
            lines += [_row(row) for row in outcome.findings]
    return "\n".join(lines) + "\n"


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
        "c = torch.cuda.is_available()\n"
        "print(torch.cuda.get_device_name() if c else 'no GPU', '|', torch.version.cuda, '|', "
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
    known = steps(arguments.cpu)
    names = {step.name for step in known}
    for name in (*arguments.only, *arguments.skip):
        if name not in names:
            parser.error(f"no step {name!r}; there are {', '.join(step.name for step in known)}")
    wanted = set(arguments.only or names) - set(arguments.skip)
    return [step for step in known if step.name in wanted]


def main(argv: Sequence[str] | None = None) -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(prog="first_hour.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "first_hour", metavar="DIR", help="%(default)s")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these steps")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="all but these")
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
    print(arguments.out / "first_hour.md")
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
