"""The undisturbed run that the others are held against."""

from __future__ import annotations

import pytest
from launch import Launch


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, digit_model) -> tuple[Launch, int, str, str]:
    """``STEPS`` steps with validation: the launch, its exit status, stdout, stderr."""
    launch = Launch(tmp_path_factory.mktemp("runs") / "undisturbed", digit_model, "gdpo.val_at_start=true")
    return launch, *launch.finish()
