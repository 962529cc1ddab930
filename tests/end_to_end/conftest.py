"""The undisturbed run that the others are held against."""

from __future__ import annotations

import json

import pytest
from filelock import FileLock
from launch import START_S, UNDISTURBED, Ended, Launch


@pytest.fixture(autouse=True)
def no_run_outlives_its_test():
    """A run that a failed test leaves would be among the processes that later tests of this worker look at."""
    yield
    while Launch.started:
        process = Launch.started.pop()
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=START_S)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, worker_id, digit_model) -> Ended:
    """``UNDISTURBED_STEPS`` steps with validation, made once for all processes of the tests."""
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent  # of all processes of the tests
    run_dir, record = folder / "undisturbed", folder / "undisturbed.json"
    with FileLock(f"{record}.lock"):
        if not record.exists():
            launch = Launch(run_dir, digit_model, *UNDISTURBED)
            record.write_text(json.dumps([*launch.finish(), launch.left_behind()]))
    return Ended(run_dir, *json.loads(record.read_text()))
