"""The config in the folder of a run, as the run understood it."""

from __future__ import annotations

from pathlib import Path

from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config


def load_saved_config(path: str | Path) -> Config:
    """Read a config that a run wrote. One without ``policy.share_prompts`` is of a version that shared no prompts, and
    what was measured, or is to be computed again bit for bit, was computed without. Raises ConfigError."""
    config = load_config(path)
    if "\n  share_prompts:" not in Path(path).read_text():
        config.policy.share_prompts = False
    return config
