"""A small valid config file to vary."""

from __future__ import annotations

from pathlib import Path

import pytest

MINIMAL = """\
gdpo: {rewards: {correctness: 1.0, format: 0.5}}
policy: {model_name: organisation/model, precision: float32}
data: {train: {environment: toy}}
env: {toy: {plugin: digit_sort}}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path
