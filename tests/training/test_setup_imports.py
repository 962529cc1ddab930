"""What a start imports in a thread while it waits for Ray: found, there in time, and never what ends a run."""

from __future__ import annotations

import importlib.util
import sys
import time

import pytest

from gdpo_nemo.training import setup
from gdpo_nemo.utils import progress


@pytest.mark.parametrize("name", setup._PRELOADED)
def test_a_module_wanted_soon_is_one(name):
    """A name that went stale would be skipped without a word."""
    assert importlib.util.find_spec(name) is not None


def wanted(monkeypatch, tmp_path, text: str) -> str:
    name = f"wanted_soon_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(setup, "_PRELOADED", (name,))
    return name


def test_modules_are_imported_while_the_block_waits(monkeypatch, tmp_path):
    name = wanted(monkeypatch, tmp_path, "done = True\n")
    with setup._preloaded_imports():
        deadline = time.monotonic() + 120
        while not hasattr(sys.modules.get(name), "done"):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_block_ends_after_the_imports_and_the_wait_has_a_name(monkeypatch, tmp_path):
    text = "import time\nfrom gdpo_nemo.utils import progress\n"
    text += "while not (names := [p.name for p in progress.current()]):\n"
    name = wanted(monkeypatch, tmp_path, text + "    time.sleep(0.01)\n")
    with setup._preloaded_imports():
        assert not progress.current()
    assert sys.modules[name].names == ["imports"]


def test_failed_import_is_raised_only_at_its_use(monkeypatch, tmp_path):
    name = wanted(monkeypatch, tmp_path, "raise OSError('no')\n")
    with setup._preloaded_imports():
        pass
    assert name not in sys.modules
