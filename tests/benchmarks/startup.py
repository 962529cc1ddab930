"""Seconds from the command to the first samples, by what they were spent on; the demo's model and config.

    python tests/benchmarks/startup.py [--times 3] [section.key=value ...]

The model must be there (the demo makes it); the second and later starts have warm file caches. Policy ranks and engines
start side by side, so the engines' line counts only what they needed longer. The last line is the end of the first
batch of samples, which is later than the first token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(overrides: list[str]) -> dict[str, float]:
    """One start of a run of one step: seconds by what was done."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"run.dir={folder}/run", "gdpo.max_num_steps=1", "gdpo.val_at_start=false", "gdpo.val_period=0"]
        fixed += ["checkpointing.enabled=false", "checkpointing.export_hf=false", "logger.console=plain"]
        began = time.time()
        command = [sys.executable, str(ROOT / "examples" / "run_gdpo.py"), *fixed, *overrides]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        ended = time.time()
        trace = json.loads((Path(folder) / "run" / "trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    lanes = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    spans = [(lanes[e["tid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e.get("ph") == "X"]
    found = {name: length for lane, name, _, length in spans if lane == "start"}
    groups = [
        (at, at + length) for lane, name, at, length in spans if lane.startswith("engine") and name.startswith("group")
    ]
    first = min(start for start, _ in groups)
    last = max(end for _, end in groups)
    ready = max(at + length for lane, _, at, length in spans if lane == "start")
    found["first weights to the engines"] = first - ready
    found["first batch of samples"] = last - first
    found["command to first samples"] = last - began
    found["whole run of one step"] = ended - began
    return found


def main() -> None:
    """Prints the median of every line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3, help="starts (3)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    runs = [start(arguments.overrides) for _ in range(arguments.times)]
    for name in runs[0]:
        values = sorted(run[name] for run in runs)
        print(f"{name:32s} {values[len(values) // 2]:7.1f} s   ({', '.join(f'{value:.1f}' for value in values)})")


if __name__ == "__main__":
    main()
