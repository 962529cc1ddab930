"""Wall and CPU seconds from the command to the first samples, by phase and process; the demo's model and config.

    python tests/benchmarks/startup.py [--times 3] [section.key=value ...]

The model must be there (the demo makes it); the second and later starts have warm file caches. Policy ranks and engines
start side by side, so the engines' line counts only what they needed longer. The first batch of samples ends later than
its first token. CPU seconds are those of all processes of the run. On a busy machine only they can be compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cpu_seconds import CpuSeconds, measured

ROOT = Path(__file__).resolve().parents[2]


def start(overrides: list[str]) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Return (wall, CPU) seconds of a run of one step by phase, and CPU seconds by process."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"run.dir={folder}/run", "gdpo.max_num_steps=1", "gdpo.val_at_start=false", "gdpo.val_period=0"]
        fixed += ["checkpointing.enabled=false", "checkpointing.export_hf=false", "logger.console=plain"]
        command = [sys.executable, str(ROOT / "examples" / "run_gdpo.py"), *fixed, *overrides]
        with measured() as cpu:
            began = time.time()
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            ended = time.time()
        trace = json.loads((Path(folder) / "run" / "trace.json").read_text())
    return _by_phase(trace, cpu, began, ended), cpu.by_process()


def _by_phase(trace: dict, cpu: CpuSeconds, began: float, ended: float) -> dict[str, tuple[float, float]]:
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    tracks = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    spans = [(tracks[e["tid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e.get("ph") == "X"]

    def spent(start: float, end: float) -> tuple[float, float]:
        return end - start, cpu.until(end) - cpu.until(start)

    found = {name: spent(at, at + length) for track, name, at, length in spans if track == "start"}
    groups = [
        (at, at + length)
        for track, name, at, length in spans
        if track.startswith("engine") and name.startswith("group")
    ]
    first = min(start for start, _ in groups)
    last = max(end for _, end in groups)
    ready = max(at + length for track, _, at, length in spans if track == "start")
    found["first weights to the engines"] = spent(ready, first)
    found["first batch of samples"] = spent(first, last)
    found["command to first samples"] = spent(began, last)
    found["whole run of one step"] = spent(began, ended)
    return found


def main() -> None:
    """Print the median of every line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3, help="starts (3)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    runs = [start(arguments.overrides) for _ in range(arguments.times)]
    for name in runs[0][0]:
        walls, cpus = zip(*(phases[name] for phases, _ in runs))
        every = ", ".join(f"{wall:.1f}/{cpu:.1f}" for wall, cpu in zip(walls, cpus))
        print(f"{name:32s} {statistics.median(walls):7.1f} s {statistics.median(cpus):7.1f} CPU s   ({every})")
    print("CPU seconds of the whole run by process:")
    for name in runs[0][1]:
        seconds = statistics.median(processes.get(name, 0.0) for _, processes in runs)
        if seconds >= 0.05:
            print(f"{name:60s} {seconds:7.1f} CPU s")


if __name__ == "__main__":
    main()
