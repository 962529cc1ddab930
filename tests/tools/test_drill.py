"""What a drill must notice: programs that write metrics as a run does, and misbehave, in the place of runs."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gdpo_nemo.config.load import load_config
from gdpo_nemo.tools.drill.exercise import Drill, Result, compared, differing_steps, drill, is_exact
from gdpo_nemo.tools.drill.faults import DRIVER, FAULTS, Fault, Target, Then
from gdpo_nemo.tools.drill.run import DrilledRun, Outcome
from gdpo_nemo.utils.errors import ConfigError, RunError

PROGRAM = """
import json, os, pathlib, signal, subprocess, sys, time
run_dir = pathlib.Path(sys.argv[1])
run_dir.mkdir(exist_ok=True)
status = dict(time=time.time(), driver=os.getpid(), roles={}, waits=[], host="here")
(run_dir / "status.json").write_text(json.dumps(status))

def row(step):
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "loss": 0.5, "time/step": 0.01}) + "\\n")

def alert(text):
    with open(run_dir / "alerts.jsonl", "a") as file:
        file.write(json.dumps({"time": time.time(), "step": 0, "level": "ALERT", "text": text}) + "\\n")

def steps(first, last):
    for step in range(first, last + 1):
        row(step)
        time.sleep(0.1)

def first_step_and_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    steps(1, 1)
    signal.sigwait([signal.SIGUSR1])
"""


class Program(DrilledRun):
    """A program in the place of a run."""

    def __init__(self, folder: Path, lines: str, patience_s: float = 60.0):
        super().__init__(folder / "run", [], patience_s)
        self._lines = PROGRAM + textwrap.dedent(lines)

    def _command(self) -> list[str]:
        return [sys.executable, "-c", self._lines, str(self.run_dir)]


@pytest.fixture
def program(tmp_path):
    made = []

    def start(lines: str, **options) -> Program:
        made.append(Program(tmp_path, lines, **options))
        made[-1].start()
        assert made[-1].wait_for(1)
        return made[-1]

    yield start
    for run in made:
        run.close()


def poke(then: Then = Then.CONTINUES, says: str | None = None, number: int = signal.SIGUSR1) -> Fault:
    def act(target) -> str:
        (pid,) = target.processes.of(DRIVER)
        os.kill(pid, number)
        return f"driver {pid}"

    return Fault("poke", "a signal", act, says, then)


HEARS = "signal.signal(signal.SIGUSR1, lambda *_: alert('engine 3: it died'))\n"


@pytest.mark.parametrize(
    "how", ["Ray's raylet (process 7) on this machine ended", "x; last message of its Ray client: y"]
)
def test_both_words_of_a_lost_raylet_name_it(how):
    """Its clients may end the run's process before the run has noticed."""
    assert re.search(FAULTS["raylet-kill"].says, how) and re.search(FAULTS["gcs-kill"].says, how)


@pytest.mark.slow
def test_output_of_the_run_has_to_name_the_fault(program):
    run = program(HEARS + "steps(1, 600)")
    good = run.disturb(poke(says=r"^engine \d+: "))
    assert good.wrong is None and good.said == ["engine 3: it died"] and good.seconds < 30
    other = run.disturb(poke(says="^environments: "))
    assert "did not report the fault" in other.wrong and other.said == []
    again = run.disturb(poke(says=r"^engine \d+: ", number=0))
    assert "did not report the fault" in again.wrong, "what was said of the fault before is not said of this one"


@pytest.mark.slow
def test_run_that_ends_instead_of_continuing_is_reported(program):
    run = program("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3)); steps(1, 600)")
    assert "ended with exit status 3 instead of continuing" in run.disturb(poke()).wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, wrong", [("lost", "ended with exit status 3 and without a message"), ("error: lost", "")]
)
def test_run_that_may_end_after_a_kill_must_report_the_reason(program, line, wrong):
    ends = f"signal.signal(signal.SIGUSR1, lambda *_: (print('{line}', flush=True), sys.exit(3)))\n"
    run = program(ends + "steps(1, 60)")
    outcome = run.disturb(poke(Then.ANY))
    assert wrong in (outcome.wrong or "") and outcome.said == ["lost"] * (not wrong) and outcome.starts == 1


@pytest.mark.slow
def test_a_run_that_trains_no_further_step_is_given_up(program):
    run = program("steps(1, 1); time.sleep(600)", patience_s=2.0)
    with pytest.raises(RunError, match="timed out after 2 s waiting for a step after 1"):
        run.disturb(poke(number=0))


@pytest.mark.slow
def test_torn_checkpoint_is_never_the_only_one(program):
    """A run whose checkpoints are all damaged is refused, which is no recovery."""
    run = program(
        """
        for step in (2, 4):
            folder = run_dir / "checkpoints" / f"step_{step}"
            folder.mkdir(parents=True)
            (folder / "files.json").write_text("{}" * 8)
            steps(step - 1, step)
        time.sleep(600)
        """
    )
    victim = FAULTS["torn-checkpoint"].act(Target(run.run_dir, run._processes, random.Random(0)))
    assert victim == "checkpoints/step_4/files.json"


@pytest.mark.slow
def test_run_that_ends_before_its_recovery_is_reported(program):
    run = program("first_step_and_signal(); alert('engine 3: it died')")
    assert "ended before it trained another step" in run.disturb(poke()).wrong


@pytest.mark.slow
def test_the_time_of_a_restart_is_to_a_step_of_the_next_process_that_none_before_has_trained(program):
    """Steps under way when it happens do not count, nor do those that are trained again."""
    run = program(
        """
        first_step_and_signal()
        steps(2, 8)
        parent = os.getpid()
        if os.fork() == 0:
            time.sleep(1)
            status["driver"] = os.getpid()
            (run_dir / "status.json").write_text(json.dumps(status))
            alert("killed by SIGKILL")
            steps(5, 8)
            time.sleep(1)
            steps(9, 9)
            while os.getppid() == parent:
                time.sleep(0.1)
            os._exit(0)
        time.sleep(600)
        """
    )
    outcome = run.disturb(poke(Then.RESTARTS, "SIGKILL"))
    assert outcome.wrong is None and outcome.seconds > 2.4, outcome


@pytest.mark.slow
def test_time_of_a_rebuild_counts_steps_after_the_run_reported_its_loss(program):
    """A step under way may end, and be recorded, after a rank has died."""
    run = program(
        """
        def lose(*_):
            time.sleep(0.3)
            row(2)
            time.sleep(0.5)
            alert("training: a worker process died")
            time.sleep(1)
            steps(3, 4)

        signal.signal(signal.SIGUSR1, lose)
        steps(1, 1)
        while True:
            signal.pause()
        """
    )
    outcome = run.disturb(poke(Then.REBUILDS, "a worker process died"))
    assert outcome.wrong is None and outcome.seconds > 1.4, outcome


@pytest.mark.slow
def test_remaining_processes_shared_memory_and_files_are_reported(program, monkeypatch):
    monkeypatch.setattr("gdpo_nemo.tools.drill.run._CLEANUP_S", 1.0)
    monkeypatch.setattr("gdpo_nemo.tools.drill.run._LIST_S", 0.0)
    name = f"gdpo_nemo_test_{os.getpid()}"
    run = program(
        f"""
        import mmap, tempfile
        daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (run_dir / "daemon").write_text(str(daemon.pid))
        shared = open("/dev/shm/{name}", "wb+")
        shared.truncate(1)
        mapped = mmap.mmap(shared.fileno(), 1)
        tempfile.mkdtemp(prefix="stays")
        steps(1, 30)
        """
    )
    try:
        assert run.finish() == 0
        found = " ".join(run.left_behind())
        assert "(sleep)" in found and name in found and "/stays" in found, found
    finally:
        os.unlink(f"/dev/shm/{name}")
        psutil.Process(int((run.run_dir / "daemon").read_text())).kill()


def test_runs_are_equal_where_every_step_has_the_same_loss_and_gradient(tmp_path):
    def run(name: str, rows: list[tuple[int, float, float]]) -> Path:
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "loss": loss, "grad_norm": norm}) for step, loss, norm in rows]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return tmp_path / name

    one = run("one", [(1, 0.5, 1.0), (2, 0.25, 2.0)])
    assert differing_steps(one, run("same", [(1, 0.5, 1.0), (2, 0.25, 2.0)])) == []
    assert differing_steps(one, run("loss", [(1, 0.5, 1.0), (2, 0.26, 2.0)])) == [
        "step 2: loss is 0.26, undisturbed 0.25"
    ]
    assert differing_steps(one, run("norm", [(1, 0.5, 1.5), (2, 0.25, 2.0)])) == [
        "step 1: grad_norm is 1.5, undisturbed 1.0"
    ]
    assert differing_steps(one, run("lost", [(1, 0.5, 1.0)])) == ["step 2 exists in only one of the two runs"]


def test_a_journal_is_wanted_of_runs_that_sample(tmp_path):
    what = Drill("c", [], [], tmp_path, exact=False)
    what.disturbed.mkdir()
    assert compared(replace(what, samples=False)) == [], "supervised training has none"
    with pytest.raises(ConfigError, match=r"journal\.jsonl not found or empty"):
        compared(what)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_run_is_compared_with_an_uninterrupted_one_if_it_can_be_equal(tmp_path, monkeypatch, exact):
    class Run(Program):
        def __init__(self, run_dir, *settings):
            super().__init__(run_dir.parent, "(run_dir / 'model').mkdir(); steps(1, 2)")
            self.run_dir = run_dir

    monkeypatch.setattr(Drill, "run", lambda what, run_dir: Run(run_dir))
    monkeypatch.setattr("gdpo_nemo.tools.drill.exercise.compared", lambda what: [])
    what = Drill("c", [], [], tmp_path, exact=exact)
    assert drill(what, str).steps == 2
    assert what.disturbed.is_dir() and what.undisturbed.is_dir() == exact


def test_drill_passes_if_every_fault_and_the_whole_run_pass():
    good, bad = Outcome("a", "x"), Outcome("b", "x", wrong="lost")
    assert Result([good]).passed
    assert not Result([good, bad]).passed and not Result([good], wrong=["step 3 is lost"]).passed


def test_overrides_of_the_user_do_not_disable_a_drill():
    what = Drill("c", ["run.max_restarts=0", "checkpointing.enabled=false"], [FAULTS["rank-kill"]], Path("out"))
    config = load_config(None, what.changes)
    assert config.run.max_restarts > 0 and config.checkpointing.enabled and config.checkpointing.save_period == 2


@pytest.mark.parametrize(
    ("changes", "exact"),
    [([], True), (["rollout.max_staleness=1"], False), (["cluster.gpus_per_node=1"], False)],
)
def test_bits_are_compared_if_they_can_be_equal(changes, exact):
    assert is_exact(load_config(None, changes)) is exact
