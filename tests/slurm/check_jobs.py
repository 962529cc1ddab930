"""Jobs on a running Slurm of two nodes, submitted as a user does; started by ``run.sh``.

1. The tiny job over both nodes ends with status 0 and equals the run without Slurm.
2. The same job gets USR1, as Slurm sends it before the time limit: it saves, is queued again, resumes, and its curve is
   that of the first, bit for bit.
3. Without a command the cluster waits, and the attach script runs commands in it; the script runs in salloc, too.
4. A job that is too long for its time limit gets the signal from Slurm, saves, is queued again and goes on.
5. A job whose driver and then a policy rank are killed goes on by itself, in the same allocation, to the same weights.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "examples" / "slurm" / "run.sbatch"
STEPS = 12


def command(run_dir: Path, *overrides: str) -> str:
    words = [
        sys.executable,
        "examples/run_gdpo.py",
        f"run.dir={run_dir}",
        f"policy.model_name={run_dir.parent / 'model'}",
        f"gdpo.max_num_steps={STEPS}",
        "gdpo.num_prompts_per_step=4",
        "gdpo.val_period=0",
        "gdpo.val_at_start=false",
        "data.train.size=512",
        "cluster.cpus_per_node=2",
        "'checkpointing={save_period: 50, metric_name: null}'",
        "'logger={console: plain, plot: false}'",
        *overrides,
    ]
    return " ".join(words)


def environment(logs: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "REPOSITORY": str(REPOSITORY),
        "LOGS": str(logs),
        "ENV_BIN": str(Path(sys.executable).parent),
        **more,
    }


def submit(logs: Path, work: str, *options: str) -> str:
    """Submit the shipped script; returns the job's number."""
    asked = ["sbatch", "--parsable", f"--output={logs}.out", *options, str(SCRIPT)]
    done = subprocess.run(
        asked, env=environment(logs, COMMAND=work), cwd=REPOSITORY, check=True, text=True, stdout=subprocess.PIPE
    )
    return done.stdout.strip()


def state(job: str) -> str:
    shown = subprocess.run(
        ["scontrol", "show", "job", job, "--oneliner"], check=True, text=True, stdout=subprocess.PIPE
    )
    return dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)["JobState"]


def wait_for(what: str, holds, limit_s: float = 400.0) -> float:
    """Wait until ``holds()``; returns the seconds it took."""
    start = time.monotonic()
    while not holds():
        if time.monotonic() - start > limit_s:
            raise SystemExit(f"FAILED: {what} did not happen within {limit_s:.0f} s")
        time.sleep(0.2)
    return time.monotonic() - start


def rows(run_dir: Path) -> list[dict]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    clock = ("time/", "throughput/", "idle/", "engines/", "queue/", "driver/")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in found]


def output(logs: Path) -> str:
    """What the batch script has said so far."""
    file = Path(f"{logs}.out")
    return file.read_text() if file.exists() else ""


def status(run_dir: Path) -> dict:
    """What the run says of itself; nothing between two starts."""
    file = run_dir / "status.json"
    return json.loads(file.read_text()) if file.exists() else {}


def check(what: str, holds: bool) -> None:
    print(f"{'ok    ' if holds else 'FAILED'} {what}", flush=True)
    if not holds:
        raise SystemExit(1)


def same(one: Path, other: Path) -> bool:
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (one, other)]
    return rows(one) == rows(other) and len(rows(one)) == STEPS and weights[0] == weights[1]


def without_slurm(work: Path) -> None:
    subprocess.run(command(work / "alone"), shell=True, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)


def whole_job(work: Path) -> None:
    logs = work / "logs" / "whole"
    job = submit(logs, command(work / "whole", "cluster.num_nodes=2"), "--time=10")
    seconds = wait_for("the end of the job", lambda: state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    print(output(logs), end="")
    check(f"job {job} is COMPLETED (it is {state(job)}, {seconds:.0f} s)", state(job) == "COMPLETED")
    check("both nodes were in Ray", "2 of 2 nodes are in" in (logs / "0" / "command.log").read_text())
    check(
        "Ray's logs of both nodes are in one folder",
        all(any((logs / "0" / f"ray-{n}").iterdir()) for n in ("n1", "n2")),
    )
    check(
        "the curve and the weights are those of the run without Slurm, bit for bit",
        same(work / "whole", work / "alone"),
    )


def job_at_its_time_limit(work: Path) -> None:
    """Slurm itself sends the signal, up to a minute early; the run is too long for its limit and is ended after it
    resumed."""
    logs = work / "logs" / "limit"
    folder = work / "limit"
    job = submit(
        logs, command(folder, "cluster.num_nodes=2", "gdpo.max_num_steps=2000"), "--time=5", "--signal=B:USR1@120"
    )
    seconds = wait_for("the requeue", lambda: "] queued again" in output(logs), 330)
    saved = max(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").iterdir())
    check(
        f"{seconds:.0f} s after its submission job {job} had saved step {saved} and was queued again",
        saved == len(rows(folder)),
    )
    wait_for("three steps after the resume", lambda: len(rows(folder)) >= saved + 3)
    subprocess.run(["scancel", "--batch", "--signal=TERM", job], check=True)
    wait_for("its end", lambda: state(job) in ("FAILED", "COMPLETED", "CANCELLED"))
    check(
        "no step is missing or double", [row["step"] for row in rows(folder)] == list(range(1, len(rows(folder)) + 1))
    )
    check("its first steps are those of the run without Slurm", rows(folder)[:STEPS] == rows(work / "alone"))


def job_that_loses_processes(work: Path) -> None:
    """The supervisor's restart and the driver's own, inside of one allocation."""
    logs = work / "logs" / "lossy"
    folder = work / "lossy"
    often = "'checkpointing={save_period: 1, metric_name: null}'"
    job = submit(logs, command(folder, "cluster.num_nodes=2", often), "--time=10")
    wait_for("step 2", lambda: len(rows(folder)) >= 2)
    os.kill(status(folder)["driver"], signal.SIGKILL)
    wait_for("the restart and a step beyond", lambda: status(folder).get("restarts") == 1 and len(rows(folder)) >= 5)
    os.kill(status(folder)["roles"]["policy rank 0"][1], signal.SIGKILL)
    wait_for("the end of the job", lambda: state(job) in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"))
    print(output(logs), end="")
    check(f"job {job} is COMPLETED (it is {state(job)})", state(job) == "COMPLETED")
    said = [json.loads(line)["text"] for line in (folder / "alerts.jsonl").read_text().splitlines()]
    check("the driver's end is told", any("was killed by SIGKILL; the run is restarted" in text for text in said))
    check("the rank's end is told", any("the policy is restarted" in text for text in said))
    check("Slurm did not queue it again", "] queued again" not in output(logs) and not (logs / "1").exists())
    check("the curve and the weights are those of the run without Slurm, bit for bit", same(folder, work / "alone"))


def job_asked_to_save(work: Path) -> None:
    """The signal that Slurm sends before the time limit, at a step of our choice."""
    logs = work / "logs" / "limited"
    job = submit(logs, command(work / "limited", "cluster.num_nodes=2"), "--time=10")
    wait_for("step 3", lambda: len(rows(work / "limited")) >= 3)
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    wait_for("the requeue", lambda: "] queued again" in output(logs))
    saved = [folder.name for folder in (work / "limited" / "checkpoints").iterdir()]
    check(
        f"it was saved after the step ({saved}) and queued again",
        len(saved) == 1 and len(rows(work / "limited")) < STEPS,
    )
    wait_for("the end of the job", lambda: state(job) in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"))
    print(output(logs), end="")
    check(f"job {job} is COMPLETED (it is {state(job)})", state(job) == "COMPLETED")
    check("it went on from its checkpoint", "resuming from" in (logs / "1" / "command.log").read_text())
    check("the first attempt's logs are still there", "step" in (logs / "0" / "command.log").read_text())
    check(
        "the curve and the weights are those of the run without Slurm, bit for bit",
        same(work / "limited", work / "alone"),
    )


def interactive(work: Path) -> None:
    logs = work / "logs" / "attached"
    job = submit(logs, "", "--time=10")
    wait_for(
        "the cluster",
        lambda: (logs / "0" / "command.log").exists() and "nodes are in" in (logs / "0" / "command.log").read_text(),
    )
    ask = [
        "bash",
        str(logs / "0" / "attach.sh"),
        "python",
        "-c",
        "import ray; ray.init(); print('NODES', len(ray.nodes()))",
    ]
    answer = subprocess.run(ask, text=True, capture_output=True, timeout=120)
    check("a command given to attach.sh runs in the cluster of both nodes", "NODES 2" in answer.stdout)
    subprocess.run(["scancel", "--batch", "--signal=TERM", job], check=True)
    wait_for("its end", lambda: state(job) in ("FAILED", "COMPLETED", "CANCELLED"))
    check("TERM ends it and does not queue it again", "] queued again" not in output(logs))


def allocation(work: Path) -> None:
    """The same script inside salloc, with another command than a run; its status is the command's."""
    logs = work / "logs" / "allocation"
    status = 7
    code = f"import ray; ray.init(); print('NODES', len(ray.nodes())); raise SystemExit({status})"
    asked = ["salloc", "--nodes=2", "--exclusive", "--time=10", "bash", str(SCRIPT)]
    done = subprocess.run(asked, env=environment(logs, COMMAND=f'python -c "{code}"'), cwd=REPOSITORY, timeout=300)
    check("the command saw both nodes", "NODES 2" in (logs / "0" / "command.log").read_text())
    check(f"the script ends with the command's status ({done.returncode})", done.returncode == status)


def nothing_left() -> None:
    def left() -> str:
        found = subprocess.run(["ps", "-eo", "pid,args"], text=True, capture_output=True).stdout.splitlines()
        return "\n".join(line for line in found if "/tmp/gdpo-" in line and ("raylet" in line or "gcs_server" in line))

    wait_for("the end of Ray's processes", lambda: not left(), 30)
    check("no process of Ray is left", not left())


def main() -> None:
    work = Path(sys.argv[1])
    wanted = sys.argv[2:]
    (work / "logs").mkdir(exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(REPOSITORY)}
    code = (
        "import sys; sys.path.insert(0, 'examples'); import make_tiny_model as m; m.make_tiny_model(sys.argv[1], 0, "
        "steps=30)"
    )
    if not set(wanted) or set(wanted) - {"interactive", "allocation"}:
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(work / "model")], check=True, cwd=REPOSITORY)
        del os.environ["OMP_NUM_THREADS"]
        without_slurm(work)
    for step in (
        whole_job, job_asked_to_save, job_that_loses_processes, interactive, allocation, job_at_its_time_limit,
    ):  # fmt: skip
        if not wanted or step.__name__ in wanted:
            print(f"-- {step.__name__.replace('_', ' ')}", flush=True)
            step(work)
    nothing_left()


if __name__ == "__main__":
    main()
