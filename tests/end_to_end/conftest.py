"""The undisturbed run that the others are held against."""

from __future__ import annotations

import pytest
from launch import START_S, UNDISTURBED, Launch


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
def undisturbed(tmp_path_factory, digit_model) -> tuple[Launch, int, str, str]:
    """``UNDISTURBED_STEPS`` steps with validation: the launch, its exit status, stdout, stderr."""
    launch = Launch(tmp_path_factory.mktemp("runs") / "undisturbed", digit_model, *UNDISTURBED)
    return launch, *launch.finish()
