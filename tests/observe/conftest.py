"""A config and a fresh run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(DEMO, [f"run.dir={tmp_path / 'run'}", "logger.console=plain"])


@pytest.fixture
def run_dir(config: Config) -> Path:
    return Path(config.run.dir)
