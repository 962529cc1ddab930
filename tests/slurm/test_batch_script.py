"""What examples/slurm/run.sbatch keeps and removes. Slurm and Ray are replaced by a few lines of shell: their part is
in run.sh."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "scontrol": 'echo "$*" >> "$CALLS"; [[ $1 == show ]] && echo n1',
    # The ray step is node.sh itself; the command ends once that step has made its folder.
    "srun": 'while [[ $1 != bash ]]; do shift; done; [[ $3 == ray ]] && exec "$@"; '
    'until [[ -f $LOGS/head ]]; do sleep 0.1; done; echo "${STATUS:-0}" > "$LOGS/status"',
    "ray": "exec sleep 60",
    "python": "echo 127.0.0.1",
}


@pytest.fixture
def job(tmp_path):
    """Runs the script as Slurm would; returns (status, output)."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)

    def run(**variables: str) -> tuple[int, str]:
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_NODEID": "0",
            "SLURMD_NODENAME": "n1",
        }
        own = {
            "REPOSITORY": str(REPOSITORY),
            "ENV_BIN": str(programs),
            "COMMAND": "true",
            "CALLS": str(tmp_path / "calls"),
        }
        place = {
            "LOGS": str(tmp_path / "logs"),
            "RAY_TMP": str(tmp_path / "ray"),
            "PATH": f"{programs}:{os.environ['PATH']}",
        }
        environment = {**os.environ, **slurm, **own, **place, **variables}
        script = str(REPOSITORY / "examples" / "slurm" / "run.sbatch")
        done = subprocess.run(
            ["bash", script], env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_folder_for_logs_keeps_everything_that_lay_in_it(job, tmp_path):
    kept = tmp_path / "logs" / "thesis" / "chapter.tex"
    kept.parent.mkdir(parents=True)
    kept.write_text("years of work")
    status, output = job()
    assert status == 0 and kept.read_text() == "years of work", output
    assert (tmp_path / "logs" / "0" / "attach.sh").exists() and not (tmp_path / "logs" / "0" / "token").exists()


def test_an_attempt_that_was_queued_again_leaves_the_logs_of_the_one_before(job, tmp_path):
    logs = tmp_path / "logs"
    assert job()[0] == 0 and job(SLURM_RESTART_COUNT="1", STATUS="3")[0] == 3 and job(SLURM_RESTART_COUNT="1")[0] == 0
    assert sorted(path.name for path in logs.iterdir()) == ["0", "1", "1.2"]
    assert [(logs / name / "status").read_text().strip() for name in ("0", "1", "1.2")] == ["0", "3", "0"]


def test_folder_of_ray_is_removed_only_if_the_job_made_it(job, tmp_path):
    ray = tmp_path / "ray"
    assert job()[0] == 0 and not ray.exists()
    ray.mkdir()
    (ray / "mine").write_text("kept")
    assert job()[0] == 0 and (ray / "mine").read_text() == "kept"


def test_logs_that_cannot_be_written_end_the_job_with_a_line(job, tmp_path):
    (tmp_path / "file").write_text("in the way")
    status, output = job(LOGS=str(tmp_path / "file" / "logs"))
    assert status == 1 and "file" in output
