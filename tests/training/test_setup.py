"""What a run leaves for whoever looks for the reason of its failure."""

from __future__ import annotations

from pathlib import Path

from gdpo_nemo.training.setup import point_to_logs
from gdpo_nemo.utils.errors import RunError


def test_a_disk_too_full_for_the_logs_of_a_failure_does_not_hide_it(tmp_path):
    def keep_logs(run_dir: Path) -> Path:
        Path("/dev/full").write_text("what a worker wrote")
        return run_dir

    error = RunError("checkpoint of step 3 could not be written")
    assert point_to_logs(error, keep_logs, tmp_path) is False
    assert str(error) == (
        "checkpoint of step 3 could not be written (the worker logs could not be saved: No space left on device)"
    )
