"""``journal.jsonl``: what was trained, whatever crashes; and the audit that finds what must not be in it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from power_loss import SyncedDisk

from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.observe.journal import FILE, Journal, audit, read_journal, sample_hash
from gdpo_nemo.utils.errors import RunError


def group(position: int, version: int = 0, spans=(), outcome=Outcome.OK, samples: int = 2) -> Group:
    prompt = Prompt(f"row {position}", np.arange(2, dtype=np.int32), "", "digit_sort")
    ids = np.arange(5, dtype=np.int32)
    trajectories = [
        Trajectory(prompt, j, ids, np.zeros(5, np.float32), version, "", "stop", outcome=outcome, spans=spans)
        for j in range(samples)
    ]
    return Group(prompt, trajectories, position)


def write(run_dir, *steps, first: int = 1) -> Journal:
    """A journal of these steps: each a list of groups, or of groups and drops."""
    journal = Journal(run_dir)
    for step, trained in enumerate(steps, first):
        groups, dropped = trained if isinstance(trained, tuple) else (trained, [])
        journal.append(step, groups, dropped, position=2 * step, published=step - 1, total_updates=9)
    return journal


def ledger(position: int, retired=(), dropped=()) -> dict:
    """As a checkpoint holds it."""
    return {"position": position, "retired": list(retired), "dropped": [list(d) for d in dropped]}


def test_a_line_names_groups_in_order_spans_outcomes_drops_and_versions(tmp_path):
    spans = ((3, 4), (4, 1))
    write(tmp_path, ([group(7, 3, spans), group(5, 4, outcome=Outcome.ABORTED, samples=1)], [(6, "timeout")]), first=5)
    (line,) = (tmp_path / FILE).read_text().splitlines()
    known = sample_hash(group(7).trajectories[0])
    assert json.loads(line) == {
        "step": 5,
        "groups": [
            [7, "row 7", [[0, [[3, 4], [4, 1]], "ok", known], [1, [[3, 4], [4, 1]], "ok", known]]],
            [5, "row 5", [[0, [[4, 5]], "aborted", known]]],
        ],
        "dropped": [[6, "timeout"]],
        "position": 10,
        "published": 4,
        "total_updates": 9,
        "again": [],
        "weights": {},
    }
    assert read_journal(tmp_path)[0].samples == [("row 7", 0), ("row 7", 1), ("row 5", 0)]


@pytest.mark.parametrize("torn", [b'{"step": 3, "gro', b"\xff", b"{}"])
def test_a_torn_last_line_is_dropped_and_the_resumed_run_writes_behind_the_others(tmp_path, torn):
    journal = write(tmp_path, [group(0)], [group(1)])
    with open(journal.path, "ab") as file:
        file.write(torn)
    assert [entry.step for entry in read_journal(tmp_path)] == [1, 2]
    journal.truncate_after(2)
    write(tmp_path, [group(2)], first=3)
    assert [entry.step for entry in read_journal(tmp_path)] == [1, 2, 3]


def test_steps_after_the_checkpoint_are_cut_and_those_before_it_keep_their_bytes(tmp_path):
    journal = write(tmp_path, [group(0)], [group(1)])
    before = journal.path.read_bytes()
    write(tmp_path, [group(2)], [group(3)], first=3)
    journal.truncate_after(2)
    assert journal.path.read_bytes() == before
    journal.truncate_after(0)
    assert read_journal(tmp_path) == []


def test_truncation_leaves_the_lines_of_a_checkpoint_when_power_is_lost_at_any_moment(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    disk = SyncedDisk(run)

    def moment():
        left = disk.survivor(tmp_path / "left", eager=True)
        assert [entry.step for entry in read_journal(left)][:2] == [1, 2]

    with monkeypatch.context() as watched:
        disk.watch(watched, lambda: None)
        journal = write(run, [group(0)], [group(1)], [group(2)])
        journal.sync()
    with monkeypatch.context() as watched:
        disk.watch(watched, moment)
        journal.truncate_after(2)
    disk.examine(moment)
    disk.close()


def test_a_damaged_line_before_the_last_is_named(tmp_path):
    journal = write(tmp_path, [group(0)])
    journal.path.write_bytes(b"not a line\n" + journal.path.read_bytes())
    with pytest.raises(RunError, match="journal.jsonl, line 1: not a valid step of a journal"):
        read_journal(tmp_path)


def test_a_journal_that_cannot_be_written_ends_the_run(tmp_path):
    with pytest.raises(RunError, match="journal.jsonl cannot be written: No such file"):
        write(tmp_path / "gone", [group(0)])


def test_a_run_without_a_journal_has_none(tmp_path):
    assert read_journal(tmp_path) == [] and audit(tmp_path, 0).found == ["journal.jsonl has no steps"]
    Journal(tmp_path).truncate_after(3)
    assert not (tmp_path / FILE).exists()


def test_the_audit_finds_nothing_in_a_sound_run(tmp_path):
    write(tmp_path, [group(1), group(0)], ([group(2, 1), group(4, 0)], [(3, "timeout")]), [group(5, 1), group(7, 2)])
    assert audit(tmp_path, staleness=1, window=2, ledger=ledger(6, [7])).found == []


FAULTS = {
    "prompt index 1 was trained in step 2 and trained in step 1": ([group(0), group(1)], [group(1, 1)]),
    "prompt index 2 was dropped in step 2 and trained in step 1": (
        [group(0), group(2)],
        ([group(1, 1)], [(2, "late")]),
    ),
    "prompt index 0 is missing in the journal, but the newest checkpoint lists it as done": ([group(1)], [group(2, 1)]),
    "prompt index 2 is missing in the journal, but the newest checkpoint lists it as done": ([group(0)], [group(1, 1)]),
    "step 2 trained the group of prompt index 4 before the group of index 1 was trained or dropped; the window is 3": (
        [group(0), group(2)],
        [group(4, 1)],
    ),
    "step 3, prompt index 2 (row 2), sample 0: tokens of version 0 are 2 updates old; the maximum is 1": (
        [group(0)],
        [group(1)],
        [group(2, 2, ((0, 1), (2, 4)), samples=1)],
    ),
    "step 1, prompt index 0 (row 0), sample 0: tokens of version 1 are -1 updates old; the maximum is 1": (
        [group(0, 1, samples=1)],
    ),
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_audit_names_violations(tmp_path, sentence):
    write(tmp_path, *FAULTS[sentence])
    assert sentence in audit(tmp_path, staleness=1, window=3, ledger=ledger(3)).found


def test_groups_dropped_since_the_last_step_are_not_missing(tmp_path):
    write(tmp_path, [group(0)])
    assert audit(tmp_path, 0, ledger=ledger(2, dropped=[(1, "late")])).found == []
    assert len(audit(tmp_path, 0, ledger=ledger(2)).found) == 1


def test_groups_may_be_trained_again_as_often_and_as_old_as_the_run_allows(tmp_path):
    write(tmp_path, [group(0)], [group(1, 1), group(0)], [group(2, 2), group(0)])
    assert audit(tmp_path, 0, window=1, ledger=ledger(3), reuse=2, max_age=2).found == []
    assert audit(tmp_path, 0, reuse=1, max_age=2).found == [
        "prompt index 0 was trained in step 3 and trained in step 2"
    ]
    assert len(audit(tmp_path, 0, reuse=2, max_age=1).found) == 2  # both samples of step 3
    write(tmp_path, [group(3, 3), group(3, 3)], first=4)
    assert audit(tmp_path, 0, reuse=9, max_age=2).found == [
        "prompt index 3 was trained in step 4 and trained in step 4"
    ]


def test_the_audit_finds_a_step_that_is_missing(tmp_path):
    write(tmp_path, [group(0)])
    write(tmp_path, [group(1)], first=3)
    assert "step 3 follows step 1" in audit(tmp_path, staleness=9).found


def test_samples_that_are_masked_may_be_of_any_age(tmp_path):
    write(tmp_path, [group(0)], [group(1, 0, outcome=Outcome.ABORTED)])
    assert audit(tmp_path, staleness=0).found == []


def test_prompt_indices_of_runs_without_a_ledger_are_not_audited(tmp_path):
    write(tmp_path, [group(-1), group(-1)], [group(-1, 1)])
    result = audit(tmp_path, staleness=0, window=1, ledger=ledger(3))
    assert result.found == [] and result.unknown == [
        "order and number of prompts: steps 1 to 2 did not record prompt indices"
    ]
    write(tmp_path, [group(5, 2), group(-1, 2)], [group(5, 3)], first=3)
    assert audit(tmp_path, staleness=0).found == [
        "step 3: a prompt index is missing (-1)",
        "prompt index 5 was trained in step 4 and trained in step 3",
    ]
