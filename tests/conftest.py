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


def _folder(nodeid: str) -> str:
    return nodeid.partition("::")[0].split("/")[1]


def pytest_collection_modifyitems(items):
    """Long folders start first."""
    place = {name: number for number, name in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(_folder(item.nodeid), len(place)))


def pytest_xdist_make_scheduler(config, log):
    """A folder of tests shares engines and ranks, so one process runs all of it. (xdist's own groups are lost on pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _folder(nodeid)

    return ByFolder(config, log)


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
