"""Train the demo while its processes are killed at random, resume it whenever it ends, and audit its journal.

    python tests/soak/kill_everything.py --kills 200

A kill takes the driver, a policy rank, an engine or an environment worker, while the run starts, samples, trains, saves
or publishes. The driver and ranks take the run with them, which is started again. After every end, and at last, the
journal must account for every prompt. Status 0: it did; 1: it did not, or the run did not go on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from gdpo_nemo.observe.journal import read_journal
from gdpo_nemo.rerun import audit_run

REPOSITORY = Path(__file__).resolve().parents[2]
ROLES = ("driver", "policy rank", "engine", "environment worker")
FATAL = ("driver", "policy rank")
"""Roles whose death ends the run."""
PATIENCE_S = 900.0
"""Longest time without a new step, and for the end of a run that lost a process."""


class Soak:
    """One run folder, started as often as it takes."""

    def __init__(self, run_dir: Path, overrides: list[str], seed: int):
        self.run_dir = run_dir
        self.random = random.Random(seed)
        self.killed: Counter[str] = Counter()
        self.starts = 0
        self._next_roles: list[str] = []
        self._overrides = overrides
        self._log = open(run_dir.parent / f"{run_dir.name}.log", "ab")

    def start(self) -> None:
        """Start the run, or resume it."""
        self.starts += 1
        command = [
            sys.executable, str(REPOSITORY / "examples" / "run_gdpo.py"), f"run.dir={self.run_dir}",
            "run.max_restarts=0", "gdpo.max_num_steps=1000000", "gdpo.num_prompts_per_step=4", "gdpo.val_period=0",
            "gdpo.val_at_start=false", "rollout.max_staleness=2", "rollout.env_workers=2", "rollout.save_samples=false",
            "checkpointing.save_period=2", "checkpointing.metric_name=null", "logger.console=plain",
            "logger.tensorboard.enabled=false", "logger.plot=false", *self._overrides,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stdout=self._log, stderr=self._log)

    def step(self) -> int:
        """Steps that the journal holds."""
        return max((entry.step for entry in read_journal(self.run_dir)), default=0)

    def run_for(self, steps: int) -> None:
        """Return when so many further steps are trained, or the run has ended."""
        goal = self.step() + steps
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and self.step() < goal:
            if time.monotonic() > deadline:
                raise SystemExit(f"no new step in {PATIENCE_S:.0f} s after {sum(self.killed.values())} kills")
            time.sleep(0.2)

    def processes(self, role: str) -> list[int]:
        """Those of a role that live now."""
        if role == "driver":
            return [self.process.pid]
        if role == "environment worker":
            children = psutil.Process(self.process.pid).children()
            return [c.pid for c in children if "multiprocessing.spawn" in " ".join(c.cmdline())]
        status = json.loads((self.run_dir / "status.json").read_text())
        if status["driver"] != self.process.pid:
            return []
        return [pid for name, (_, pid) in status["roles"].items() if name.startswith(role) and psutil.pid_exists(pid)]

    def kill(self) -> bool:
        """Kill one process of the next role, each as often as the others; False where there is none at the moment."""
        if not self._next_roles:
            self._next_roles = self.random.sample(ROLES, len(ROLES))
        role = self._next_roles[-1]
        try:
            pid = self.random.choice(self.processes(role))
            os.kill(pid, signal.SIGKILL)
        except (IndexError, OSError, psutil.NoSuchProcess):
            return False
        self._next_roles.pop()
        self.killed[role] += 1
        print(f"kill {sum(self.killed.values())}: {role} {pid} after step {self.step()}", flush=True)
        if role in FATAL:
            self.end()
        return True

    def end(self) -> None:
        """Wait for the end of the run, then audit what it left."""
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"the run goes on without a process that it cannot do without; see {self._log.name}"
            ) from None
        if self.step():
            self.audit()

    def audit(self) -> None:
        """Stop with what the journal must not show."""
        found = audit_run(self.run_dir)
        if found:
            raise SystemExit("\n".join([f"after {sum(self.killed.values())} kills:", *found]))

    def finish(self) -> None:
        """Let the run go on for a step, end it as a user would, and audit it."""
        if self.process.poll() is not None:
            self.start()
        self.run_for(2)
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(PATIENCE_S)
        if status != 128 + signal.SIGTERM:
            raise SystemExit(f"the run ended with status {status} after SIGTERM; see {self._log.name}")
        self.audit()

    def close(self) -> None:
        """Leave no process behind."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()


def soak(run_dir: Path, kills: int, seed: int, overrides: list[str]) -> Counter[str]:
    """Kill ``kills`` processes of a run. Returns how many of each role; SystemExit says what went wrong."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    run = Soak(run_dir, overrides, seed)
    run.start()
    try:
        while sum(run.killed.values()) < kills:
            if run.process.poll() is not None:
                run.start()
            # 0: while the run starts or resumes, or just after a step.
            run.run_for(run.random.choice((0, 1, 1, 2)))
            time.sleep(run.random.uniform(0, 4))
            if not run.kill():
                time.sleep(1)
        run.finish()
        print(f"{dict(run.killed)}, {run.starts} starts, {run.step()} steps: every prompt accounted for")
        return run.killed
    finally:
        run.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, help="run folder; default: a new temporary one")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_args()
    soak(asked.run or Path(tempfile.mkdtemp(prefix="soak")) / "run", asked.kills, asked.seed, asked.overrides)


if __name__ == "__main__":
    main()
