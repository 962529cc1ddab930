"""The checkpoint folder of a run: whole or not there, checked before use, pruned by age and merit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from power_loss import SyncedDisk

from gdpo_nemo.config.load import load_config
from gdpo_nemo.training import resume
from gdpo_nemo.training.checkpoints import Checkpoints, RunState, read_state
from gdpo_nemo.utils.errors import RunError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"


def shards(folder):
    """What a policy of two ranks would write."""
    for rank in range(2):
        (folder / f"__{rank}_0.distcp").write_bytes(bytes([rank]) * 5000)


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep_last=2, keep_best=1, metric="validation/correctness")


def flip(folder):
    """One bit of one shard."""
    file = folder / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[2500] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "__1_0.distcp has changed": flip,
    "__0_0.distcp is missing": lambda folder: (folder / "__0_0.distcp").unlink(),
    "__0_0.distcp has 4000 of 5000 bytes": lambda folder: (folder / "__0_0.distcp").write_bytes(bytes(4000)),
    "files.json is not readable": lambda folder: (folder / "files.json").write_text('{"__0_0.dis'),
    "files.json does not list state.json": lambda folder: (folder / "files.json").write_text("{}"),
    "files.json does not list common.pt": lambda folder: (folder / "common.pt").write_bytes(b"mine"),
    "files.json does not list linked": lambda folder: (folder / "linked").symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("content", ['{"state.json": ["1", 2]}', '{"/etc/passwd": [1, 2]}', "[" * 100_000])
def test_list_of_files_that_does_not_match_the_folder_is_not_trusted(checkpoints, content):
    checkpoints.save(RunState(step=4), shards)
    (checkpoints.path(4) / "files.json").write_text(content)
    heard = []
    assert checkpoints.newest(heard.append) is None
    assert heard == [f"checkpoint {checkpoints.path(4)} is damaged (files.json is not readable) and is skipped"]


@pytest.mark.parametrize("field, value", [("step", "4"), ("position", -1), ("ledger", []), ("metrics", {"a": "b"})])
def test_a_state_whose_fields_are_of_another_kind_is_damaged(checkpoints, field, value):
    checkpoints.save(RunState(step=4), shards)
    file = checkpoints.path(4) / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(RunError, match="state.json is not readable: ValueError"):
        read_state(checkpoints.path(4))


@pytest.mark.parametrize("sentence", DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_is_used(checkpoints, sentence):
    for step in (4, 8):
        checkpoints.save(RunState(step=step, position=10 * step), shards)
    DAMAGE[sentence](checkpoints.path(8))
    heard = []
    folder, state = checkpoints.newest(heard.append)
    assert (folder, state.step, state.position) == (checkpoints.path(4), 4, 40)
    assert heard == [f"checkpoint {checkpoints.path(8)} is damaged ({sentence}) and is skipped"]


def test_skipped_checkpoints_do_not_prune_later_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0, metric=None)
    checkpoints.save(RunState(step=8), shards)
    flip(checkpoints.path(8))
    assert checkpoints.newest(lambda _: None) is None
    checkpoints.set_aside()
    checkpoints.save(RunState(step=2), shards)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged_step_8", "step_2"]


def test_a_checkpoint_whose_files_are_still_being_written_is_none(checkpoints):
    checkpoints.save(RunState(step=2), shards)
    checkpoints.begin(RunState(step=4), shards)
    assert checkpoints.pending
    # What a process that starts now would find.
    assert Checkpoints(checkpoints.folder, 2, 1, None).newest(pytest.fail)[1].step == 2
    checkpoints.finish(lambda: None)
    assert not checkpoints.pending and checkpoints.newest(pytest.fail)[1].step == 4


def test_the_state_is_that_of_the_moment_the_checkpoint_began(checkpoints):
    state = RunState(step=2, position=20, metrics={"validation/correctness": 0.5})
    checkpoints.begin(state, shards)
    state.step = 3
    state.position = 30
    state.metrics["validation/correctness"] = 0.9
    checkpoints.finish(lambda: None)
    found = checkpoints.newest(pytest.fail)[1]
    assert (found.step, found.position, found.metrics) == (2, 20, {"validation/correctness": 0.5})


@pytest.mark.parametrize("when", ["begin", "finish"])
def test_failed_write_leaves_earlier_checkpoints_and_names_the_complete_one(checkpoints, when):
    checkpoints.save(RunState(step=2), shards)

    def fail(*_):
        raise RunError("a rank died")

    with pytest.raises(
        RunError, match="checkpoint of step 4 could not be written: a rank died; step 2 is the last complete checkpoint"
    ):
        checkpoints.begin(RunState(step=4), fail if when == "begin" else shards)
        checkpoints.finish(fail)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_2"]


def test_newest_and_best_checkpoints_are_retained(checkpoints):
    for step, value in enumerate([0.1, 0.9, 0.3, 0.9, 0.2, 0.5, 0.4], 1):
        checkpoints.save(RunState(step=step, metrics={"validation/correctness": value}), shards)
    assert checkpoints.steps() == [4, 6, 7]


def test_the_best_checkpoint_of_a_penalty_has_the_smallest_value(tmp_path):
    """The metric is that of a component with a negative weight, or its pass@k; any other metric is larger is better."""
    for metric, best in (("validation/long", 2), ("validation/long/pass_at/4", 2), ("validation/math/long", 2),
                         ("validation/math/correctness", 1), ("validation/mean_length", 1)):  # fmt: skip
        overrides = ["gdpo.rewards={correctness: 1, long: -1}", f"checkpointing.metric_name={metric}"]
        config = load_config(DEMO, [*overrides, "checkpointing.keep_last=1"])
        checkpoints = resume._checkpoints(config, tmp_path / metric)
        for step, value in enumerate([0.9, 0.1, 0.5], 1):
            checkpoints.save(RunState(step=step, metrics={metric: value}), shards)
        assert checkpoints.steps() == [best, 3]


def test_save_leaves_a_whole_checkpoint_when_power_is_lost_at_any_moment(tmp_path, monkeypatch):
    run = tmp_path / "run"
    checkpoints = Checkpoints(run / "checkpoints", keep_last=1, keep_best=0, metric=None)
    run.mkdir()
    disk = SyncedDisk(run)
    saved = [0]
    moments = []

    def moment():
        for eager in (False, True):
            left = disk.survivor(tmp_path / "left", eager)
            found = Checkpoints(left / "checkpoints", 1, 0, None).newest(lambda _: None)
            step = found[1].step if found else 0
            assert step >= saved[-1], f"step {saved[-1]} was saved, and {step} is left (eager: {eager})"
            moments.append(step)

    with monkeypatch.context() as watched:
        disk.watch(watched, moment)
        for step in (2, 4):
            checkpoints.save(RunState(step=step), nested)
            saved.append(step)
            disk.examine(moment)
    disk.close()
    assert {0, 2, 4} == set(moments)


def nested(folder):
    """What a policy writes with a model beside: folders within folders."""
    shards(folder)
    (folder / "hf" / "tokenizer").mkdir(parents=True)
    (folder / "hf" / "tokenizer" / "vocabulary.json").write_text("{}")
    (folder / ".metadata").write_bytes(b"index")


def test_checkpoint_whose_list_of_files_was_lost_is_damaged(checkpoints):
    """As after a loss of power: the folder's new name is there, the names in it are not."""
    checkpoints.save(RunState(step=2), shards)
    checkpoints.save(RunState(step=4), shards)
    (checkpoints.path(4) / "files.json").unlink()
    heard = []
    assert checkpoints.newest(heard.append)[1].step == 2
    assert heard == [f"checkpoint {checkpoints.path(4)} is damaged (files.json is not readable) and is skipped"]
    checkpoints.set_aside()
    assert checkpoints.path(4).with_name("damaged_step_4").is_dir()
