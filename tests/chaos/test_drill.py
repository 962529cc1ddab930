"""Faults of a run on purpose, with real processes; ``soak.py`` does a thousand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hostile_verifier import DEEDS
from soak import RECORD, REPOSITORY, VARIANTS, read, soak, table, verifier_faults

from gdpo_nemo.cluster.worker_launcher import FOLDER
from gdpo_nemo.commands.cli import main
from gdpo_nemo.tools.drill.exercise import by_fault
from gdpo_nemo.tools.drill.run import Outcome

pytestmark = pytest.mark.slow

KILLS = ("engine-kill", "supervisor-kill")
"""The kernel kills the driver with its supervisor. Ranks and Ray are lost in `end_to_end/test_run.py`."""


def test_a_run_ahead_of_its_weights_accounts_for_every_prompt_after_kills_and_bad_verdicts(
    tmp_path, digit_model, monkeypatch, capfd
):
    """``gdpo-nemo drill``, with a verifier that hangs, dies, fails and says nothing."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv(FOLDER)  # each start has a fork server of its own, which must end with it
    hostile = VARIANTS["a hostile verifier"]
    changes = (f"policy.model_name={digit_model}", "rollout.max_staleness=2", *hostile.changes)
    options = ("--faults", ",".join(KILLS), "--steps", "2", "--patience", "900", "--out", str(tmp_path / "drill"))
    status = main(["drill", "--config", f"configs/{hostile.config}", *changes, *options])
    out, err = capfd.readouterr()
    assert status == 0 and "passed: every prompt of" in out and "Traceback" not in out + err, out + err
    assert "bitwise" not in out and not (tmp_path / "drill" / "undisturbed").exists(), (
        "there is nothing to compare with"
    )
    found = json.loads((tmp_path / "drill" / "drill.json").read_text())
    assert [outcome["fault"] for outcome in found["outcomes"]] == list(KILLS)
    assert all(outcome["victim"] and outcome["seconds"] > 0 for outcome in found["outcomes"])
    assert found["passed"] and not found["exact"] and found["wrong"] == []
    assert found["outcomes"][0]["said"][0].startswith("engine 0") and found["outcomes"][1]["starts"] == 1
    spoilt = verifier_faults(tmp_path / "drill" / "disturbed", hostile.spoilt, hostile.reasons)
    assert [outcome for outcome in spoilt if outcome.wrong] == []
    assert {outcome.fault for outcome in spoilt} == set(DEEDS)


def test_soak_continues_from_its_record_and_its_table_lists_failures(tmp_path: Path):
    faults = [Outcome("engine-kill", "pid", 3, 2.0), Outcome("engine-kill", "pid", 9, 4.0, wrong="lost")]
    rows = [{"run": 0, "variant": "LoRA", **asdict(fault)} for fault in faults]
    (tmp_path / RECORD).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert soak(tmp_path, 2, 2, 10, [], 900.0, ["LoRA"]) == read(tmp_path / RECORD) == rows
    shown = table(rows)
    assert "| engine-kill | 2 | 3.0 s | 4.0 s |" in shown and "1 x LoRA" in shown
    assert "run 0 (LoRA), engine-kill: lost\n1 of 2 faults as they should be" in shown


def test_the_table_has_median_and_longest_of_every_fault_that_met_something():
    outcomes = [Outcome("a", "pid", 3, seconds) for seconds in (1.0, 5.0, 2.0)] + [Outcome("b", ""), Outcome("c", "x")]
    assert by_fault(outcomes) == [("a", 3, 2.0, 5.0), ("c", 0, None, None)]
