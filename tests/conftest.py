"""What several folders of tests share: the small model that they train and sample."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

# A property that is slow once because the machine is busy is not broken.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_addoption(parser):
    """``--layout-table FILE``: where tests/megatron write how far each layout is from transformers and torch."""
    parser.addoption("--layout-table", help="write the table of layouts and models (Markdown) to this file")


_LONGEST_FIRST = ("end_to_end", "megatron", "cluster", "turns", "environments", "examples")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(items):
    """Each folder of tests is a group that one process runs, since its tests share engines and ranks; long ones start first."""
    place = {name: number for number, name in enumerate(_LONGEST_FIRST)}
    here = Path(__file__).parent

    def folder(item) -> str:
        return item.path.relative_to(here).parts[0]

    items.sort(key=lambda item: place.get(folder(item), len(place)))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(folder(item)))


@pytest.fixture(scope="session")
def digit_model(tmp_path_factory) -> Path:
    """The demo's model after a warm-up too short to learn much, made by the factory that users run."""
    folder = tmp_path_factory.mktemp("model") / "digit_sort"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import make_tiny_model; "
        "make_tiny_model.make_tiny_model(sys.argv[2], 0, steps=30)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(REPOSITORY / "examples"), str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "2"}, stdout=subprocess.DEVNULL)
    return folder
