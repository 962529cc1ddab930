"""The same engine where vLLM's scheduler has a process of its own and does not wait to be stepped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def drawn(engine_model, tmp_path_factory) -> dict[str, list[dict]]:
    """Kind of update -> what ``engine_with_process.across_update`` found."""
    out = tmp_path_factory.mktemp("with_process") / "drawn.json"
    program = [sys.executable, str(Path(__file__).with_name("engine_with_process.py")), str(engine_model), str(out)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("kv", ["drain", "recompute", "keep"])
def test_a_scheduler_in_another_process_keeps_versions_apart(drawn, kv):
    """20 requests of one long prompt: 16 before the update, half of which have not begun, and 4 after it."""
    rows = drawn[kv]
    assert len({row["name"] for row in rows}) == len(rows) == 20
    for row in rows:
        versions = [version for version, _ in row["spans"]]
        assert versions in ([0], [1], [0, 1]) and sum(tokens for _, tokens in row["spans"]) == row["tokens"]
        exact = row["off"][:1] if kv == "keep" else row["off"]
        assert max(exact) < 1e-4
    mixed = sum(len(row["spans"]) == 2 for row in rows)
    only_new = sum(row["spans"][0][0] == 1 for row in rows)
    assert (mixed == 0 and only_new == 4) if kv == "drain" else (mixed >= 4 and only_new >= 8)
