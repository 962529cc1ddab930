"""Training again from a run's record: what it takes is found before a process starts, and what is built from it is what
was trained. Ranks train in tests/end_to_end."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from image_samples import SECOND, image, image_group

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.models.hf_folder import differences, save_tensors
from gdpo_nemo.observe.journal import Audit, Journal, read_journal
from gdpo_nemo.observe.metrics import MetricsLog
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.samples import rollout_path, write_rollouts
from gdpo_nemo.rollouts.batches import RecordedStream
from gdpo_nemo.training import replay
from gdpo_nemo.training.checkpoints import Checkpoints, RunState, model_fingerprint
from gdpo_nemo.training.resume import config_files, record_config
from gdpo_nemo.utils.errors import ConfigError, RunError

pytestmark = pytest.mark.slow

STEPS = 4


def config(tmp_path, *overrides):
    base = {"policy.model_name": tmp_path / "model", "run.dir": tmp_path / "run"}
    return load_config(None, [*(f"{key}={value}" for key, value in base.items()), *overrides])


def group(position: int, version: int) -> Group:
    """Two samples: one of several turns whose tokens two versions wrote, one that failed."""
    prompt = Prompt(f"train/{position}", np.array([5, position], np.int32), "5?", "digit_sort", {"answer": "7"})
    logprobs = np.array([-0.1, math.nan, -1e-7, np.float32(-1) / 3], np.float32)
    mask = np.array([True, False, True, True])
    first = Trajectory(
        prompt, 0, np.arange(4, dtype=np.int32), logprobs, version, "1234", "length",
        {"a": 0.1, "b": None}, Outcome.TRUNCATED, loss_mask=mask, turns=2, spans=((version, 1), (version + 1, 2)),
    )  # fmt: skip
    second = Trajectory(
        prompt, 1, np.array([9], np.int32), np.array([-2.5], np.float32), version, "9", "stop", {}, Outcome.ENV_FAILED,
        "timeout",
    )  # fmt: skip
    return Group(prompt, [first, second], position)


@pytest.fixture
def run(tmp_path):
    """The record of a run of four steps, whose third and fourth have another learning rate."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    folder = tmp_path / "run"
    record_config(config(tmp_path), folder, 0)
    record_config(config(tmp_path, "policy.megatron_cfg.optimizer.lr=0.5"), folder, 2)
    journal = Journal(folder)
    metrics = MetricsLog(folder)
    for step in range(1, STEPS + 1):
        groups = [group(2 * step - 1, step - 1), group(2 * step - 2, step - 1)]
        journal.append(step, groups, [], position=2 * step, published=step - 1, total_updates=STEPS)
        write_rollouts(folder, step, groups, SampleValues(np.zeros(4)))
        metrics.append({"step": step, "loss": step / 3, "grad_norm": 0.1, "lr": 1e-3})
    checkpoints = Checkpoints(folder / "checkpoints", 9, 0, None)
    fingerprint = model_fingerprint(tmp_path / "model")
    for step in (2, 4):
        state = RunState(step=step, position=2 * step, updates=step, model=fingerprint)
        checkpoints.save(state, lambda path: (path / "weights").write_bytes(b"w"))
    return folder


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    """The model's folder stands for a real one, which ``model_folder`` would look into."""
    monkeypatch.setattr(replay, "model_folder", lambda config, source: tmp_path / "model")


def test_a_recorded_batch_is_the_one_that_was_trained(run):
    stream = RecordedStream(run, read_journal(run))
    batch = stream.get_batch(2)
    assert batch.next_position == 6 and [g.position for g in batch.groups] == [5, 4]
    for made, trained in zip(batch.groups, [group(5, 2), group(4, 2)], strict=True):
        assert made.prompt.id == trained.prompt.id and (made.prompt.token_ids == trained.prompt.token_ids).all()
        for a, b in zip(made.trajectories, trained.trajectories, strict=True):
            for name in ("completion_ids", "logprobs"):
                (values, wanted) = (getattr(a, name), getattr(b, name))
                assert values.dtype == wanted.dtype and values.tobytes() == wanted.tobytes()
            assert (a.loss_mask is None) == (b.loss_mask is None) and a.num_policy_tokens == b.num_policy_tokens
            for name in ("sample_index", "policy_version", "text", "finish_reason", "rewards", "outcome", "detail",
                         "turns", "trains"):  # fmt: skip
                assert getattr(a, name) == getattr(b, name), name
    first = batch.groups[0].trajectories
    assert first[0].spans == ((2, 1), (3, 2)) and first[1].spans == ((2, 1),)


def with_images(run, step=2):
    """The run, of which a step trained images."""
    entries = read_journal(run)
    (run / "journal.jsonl").unlink()
    for entry in entries:
        groups = [group(position, entry.step - 1) for position, *_ in entry.groups]
        if entry.step == step:
            groups = [image_group(position, entry.step - 1) for position, *_ in entry.groups]
            write_rollouts(run, step, groups, SampleValues(np.zeros(4)))
        Journal(run).append(
            entry.step, groups, [], position=2 * entry.step, published=entry.step - 1, total_updates=STEPS
        )
    return run


def test_images_of_a_recorded_batch_are_those_that_were_trained(run):
    batch = RecordedStream(with_images(run), read_journal(run)).get_batch(1)
    for made, trained in zip(batch.groups, [image_group(3, 1), image_group(2, 1)], strict=True):
        assert made.prompt.images == trained.prompt.images
        for a, b in zip(made.trajectories, trained.trajectories, strict=True):
            assert a.images == b.images and a.prompt is made.prompt
            for mine, theirs in zip((*a.prompt.images, *a.images), (*b.prompt.images, *b.images), strict=True):
                assert mine.image.data == theirs.image.data
    assert batch.groups[0].prompt.images[0].image is batch.groups[1].prompt.images[0].image
    assert replay.audit_run(run).found == []


def test_replay_names_the_image_that_is_missing_or_damaged(run):
    stored = with_images(run) / "images" / f"{SECOND.sha256}.jpg"
    stored.write_bytes(SECOND.data[:-1])
    with pytest.raises(RunError, match=f"{SECOND.sha256}.jpg: damaged; its content does not have this SHA-256"):
        RecordedStream(run, read_journal(run)).get_batch(1)
    stored.unlink()
    with pytest.raises(ConfigError, match=f"images/ lacks image {SECOND.sha256}, which the samples to replay contain"):
        replay.plan_rerun(run, None, None)
    assert replay.plan_rerun(run, 1, None).last == 1  # this step has no images
    (found,) = replay.audit_run(run).found
    assert found == f"{run / 'images'}: image {SECOND.sha256} not found"


@given(st.lists(st.floats(max_value=0, width=32), min_size=1, max_size=8), st.floats(allow_nan=False))
def test_log_probs_and_rewards_keep_their_bits_on_the_way_through_the_record(tmp_path_factory, logprobs, reward):
    folder = tmp_path_factory.mktemp("bits")
    made = group(0, 0)
    made.trajectories = made.trajectories[:1]
    ids = np.arange(len(logprobs), dtype=np.int32)
    made.trajectories[0] = dataclasses.replace(
        made.trajectories[0], completion_ids=ids, logprobs=np.array(logprobs, np.float32), loss_mask=None,
        rewards={"a": reward}, spans=(),
    )  # fmt: skip
    Journal(folder).append(1, [made], [], position=1, published=0, total_updates=1)
    write_rollouts(folder, 1, [made])
    (found,) = RecordedStream(folder, read_journal(folder)).get_batch(0).trajectories
    assert found.logprobs.tobytes() == made.trajectories[0].logprobs.tobytes() and found.rewards == {"a": reward}


def test_samples_other_than_the_journals_are_refused(run):
    write_rollouts(run, 3, [group(4, 2), group(5, 2)], SampleValues(np.zeros(4)))
    with pytest.raises(RunError, match="does not contain the samples that journal.jsonl lists for step 3"):
        RecordedStream(run, read_journal(run)).get_batch(2)


@pytest.mark.parametrize("damage", [b"\xff", b"", b"1\n"])
def test_a_damaged_file_of_samples_is_named(run, damage):
    rollout_path(run, 2).write_bytes(damage)
    with pytest.raises(RunError, match=r"step_0002[.a-z]*: (cannot be read|does not hold)"):
        RecordedStream(run, read_journal(run)).get_batch(1)


def test_every_step_is_trained_under_the_config_that_it_had(run):
    plan = replay.plan_rerun(run, None, None)
    assert [(s.first, s.last, s.total_updates) for s in plan.segments] == [(1, 2, STEPS), (3, 4, STEPS)]
    assert [s.config.policy.megatron_cfg.optimizer.lr for s in plan.segments][1] == 0.5
    assert (plan.last, plan.checkpoint, plan.state.step) == (4, None, 0)
    assert plan.original == run / "checkpoints" / "step_4" and plan.out == run / "replay_4"


def test_moved_run_is_replayed_with_the_paths_of_its_new_folder(run):
    moved = run.rename(run.parent / "archive")
    plan = replay.plan_rerun(moved, None, None)
    assert [segment.config.run.dir for segment in plan.segments] == [str(moved)] * 2
    assert plan.out == moved / "replay_4"


def test_another_objective_holds_at_every_step_and_changes_nothing_else(run):
    before = replay.plan_rerun(run, None, None).segments
    changes = ["gdpo.estimator=grpo", "gdpo.options={scale_rewards: none}", "loss_fn.ratio_clip_max=0.5"]
    changes += ["gdpo.weighting={rule: mgda}", "gdpo.component_gradient_period=1"]
    after = replay.plan_rerun(run, None, None, instead=changes).segments
    assert [segment.last for segment in after] == [2, 4]
    for then, now in zip(before, after, strict=True):
        assert (now.config.gdpo.estimator, now.config.loss_fn.ratio_clip_max) == ("grpo", 0.5)
        assert now.config.gdpo.weighting == {"rule": "mgda"}
        gdpo = dataclasses.replace(
            now.config.gdpo, estimator=then.config.gdpo.estimator, options={}, weighting={}, component_gradient_period=0
        )
        assert dataclasses.replace(now.config, gdpo=gdpo, loss_fn=then.config.loss_fn) == then.config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("gdpo.num_prompts_per_step=2", "--instead: gdpo.num_prompts_per_step does not belong to the objective"),
        ("policy.precision=bfloat16", "--instead: policy.precision does not belong to the objective"),
        ("gdpo.options_x=1", "--instead: gdpo.options_x does not belong"),
        ("gdpo.estimator=grp", "gdpo.estimator: 'grp'"),
        ("loss_fn.ratio_clip_max=-1", "loss_fn.ratio_clip_max"),
    ],
)
def test_changes_of_the_samples_and_invalid_objectives_are_refused(change, message, run):
    with pytest.raises(ConfigError, match=message):
        replay.plan_rerun(run, None, None, instead=[change])


OWN = """
from gdpo_nemo.training.gdpo import GDPO

class Own(GDPO):
    def _credit(self, batch):
        return super()._credit(batch)

class Logging(GDPO):
    def metrics(self, prepared, results, version):
        return super().metrics(prepared, results, version) | {"own": 1.0}
"""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gdpo.kl_in_reward=0.1"], "gdpo.kl_in_reward: requires log-probs of the initial model"),
        (["algorithm.type=ppo"], "algorithm.type: ppo's advantages come from a value head"),
        (["algorithm.type=distillation"], "algorithm.type: distillation's advantages come from a teacher"),
        (["gdpo.estimator=examples/custom_estimator.py:Fading"], "gdpo.estimator: .*Fading has state, which is only"),
        (["algorithm.type=OWN:Own"], "because algorithm.type .*:Own computes its own; train again"),
        (["algorithm.type=OWN:Logging"], None),
    ],
)
def test_another_objective_is_refused_if_advantages_do_not_follow_from_the_record(overrides, message, run, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    overrides = [override.replace("OWN", f"{tmp_path}/own.py") for override in overrides]
    record_config(config(tmp_path, *overrides), run, 0)
    assert replay.plan_rerun(run, None, None).last == STEPS, "a replay of the same objective needs no comparison"
    if message is None:
        assert replay.plan_rerun(run, None, None, instead=["gdpo.estimator=grpo"]).last == STEPS
        return
    with pytest.raises(ConfigError, match=f"--instead: cannot compare advantages.*{message}"):
        replay.plan_rerun(run, None, None, instead=["gdpo.epsilon=0.5"])


@pytest.mark.parametrize("start, step", [(0, 0), (1, 0), (2, 2), (3, 2), (4, 2), (9, 2)])
def test_a_replay_starts_from_the_newest_checkpoint_of_at_most_from(run, start, step):
    plan = replay.plan_rerun(run, 4, None, start)
    assert plan.state.step == step and [entry.step for entry in plan.entries] == list(range(step + 1, 5))


def test_a_learning_rates_horizon_is_that_of_each_step(run):
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    lines[3]["total_updates"] = 9
    (run / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(s.first, s.total_updates) for s in replay.plan_rerun(run, 4, None).segments] == [(1, 4), (3, 4), (4, 9)]


def test_a_config_that_holds_again_from_an_earlier_step_on_is_written_into_the_history(run, tmp_path):
    """The checkpoint of step 2 is damaged, and the run goes on from the model under the config of its last start."""
    record_config(config(tmp_path, "policy.megatron_cfg.optimizer.lr=0.5"), run, 0)
    assert [first for first, _ in config_files(run)] == [1, 3, 1]
    assert [(s.first, s.last) for s in replay.plan_rerun(run, None, None).segments] == [(1, 4)]


def spoil_checkpoint(run):
    (run / "checkpoints" / "step_2" / "weights").write_bytes(b"x")


REFUSED = {
    "no such run folder": (dict(run_dir="absent"), None),
    "journal.jsonl not found or empty": ({}, lambda run: (run / "journal.jsonl").unlink()),
    "--to: must be from 1 to 4, the last step": (dict(to=5), None),
    "--to: must be from 1 to 4, the last step of": (dict(to=0), None),
    r"rollouts/ \(rollout.save_samples\) lacks step 3;": ({}, lambda run: rollout_path(run, 3).unlink()),
    r"rollouts/ \(rollout.save_samples\) lacks step 2 and 1 more": (
        {},
        lambda run: [rollout_path(run, step).unlink() for step in (2, 3)],
    ),
    "journal.jsonl lacks step 1;": (
        {},
        lambda run: (run / "journal.jsonl").write_text((run / "journal.jsonl").read_text().split("\n", 1)[1]),
    ),
    "checkpoint .*step_2 is damaged": (dict(start=2), spoil_checkpoint),
    "is not the model that": ({}, lambda run: (run.parent / "model" / "config.json").write_text("{}")),
    "--out: .*model exists and is not empty": (dict(out="model"), None),
    "--out: .*config.json is not a folder": (dict(out="model/config.json"), None),
    "--check: .*run has no checkpoint of step 3; there are: 2, 4": (dict(to=3, check=True), None),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_incomplete_record_is_refused_with_the_missing_parts(run, sentence):
    (given, spoil) = REFUSED[sentence]
    if spoil:
        spoil(run)
    (to, start, check) = (given.get("to"), given.get("start", 0), given.get("check", False))
    out = run.parent / given["out"] if "out" in given else None
    with pytest.raises((ConfigError, RunError), match=sentence) as refused:
        replay.plan_rerun(run.parent / given.get("run_dir", "run"), to, out, start, check)
    assert "\n" not in str(refused.value)


def test_run_with_samples_of_only_some_groups_is_not_replayed(run, tmp_path):
    record_config(config(tmp_path, "rollout.save_groups=1"), run, 2)
    with pytest.raises(ConfigError, match=r"groups of steps 3 to 4 the samples of 1 were written \(rollout.save_gro"):
        replay.plan_rerun(run, None, None)


def test_an_algorithm_that_samples_nothing_is_not_replayed(run, tmp_path):
    own = "algorithm.type=examples/custom_sft.py:SupervisedFineTuning"
    record_config(config(tmp_path, own, "gdpo.num_generations_per_prompt=1"), run, 0)
    with pytest.raises(ConfigError, match="does not sample, so it cannot be replayed"):
        replay.plan_rerun(run, None, None)


def test_a_metric_that_is_another_number_is_named_with_its_step(run):
    plan = replay.plan_rerun(run, 3, None)
    log = MetricsLog(plan.out)
    for step in (1, 2, 3):
        log.append({"step": step, "loss": step / 3, "grad_norm": 0.1 + (step == 2) * 1e-9, "lr": 1e-3})
    assert replay.compare_metrics(plan) == [f"step 2: grad_norm is {0.1 + 1e-9!r} and was 0.1"]


def tensors(folder, **values):
    folder.mkdir()
    save_tensors(values, folder / "model.safetensors")
    return folder


def test_tensors_that_differ_in_one_bit_are_named_the_largest_first(tmp_path):
    a = torch.tensor([0.5, 0.0, math.nan])
    b = torch.tensor([1.0], dtype=torch.bfloat16)
    one = tensors(tmp_path / "one", a=a, b=b, same=a.clone())
    other = tensors(tmp_path / "other", a=torch.tensor([0.5, -0.0, math.nan]), b=b + 0.25, same=a.clone())
    more = tensors(tmp_path / "more", a=a, same=a.clone(), c=b)
    assert differences(one, one) == []
    assert differences(one, other) == ["b differs by up to 0.25", "a differs by up to 0"]
    assert differences(one, more) == ["b is in only one of the two folders", "c is in only one of the two folders"]


def test_the_audit_of_a_run_goes_by_its_own_configs_and_checkpoint(run, tmp_path):
    assert replay.audit_run(run).found == []  # masked samples and those of the step's own version
    state = RunState(step=4, ledger={"position": 9, "retired": [], "dropped": []})
    Checkpoints(run / "checkpoints", 9, 0, None).save(state, lambda path: None)
    sentence = "prompt index 8 is missing in the journal, but the newest checkpoint lists it as done"
    assert replay.audit_run(run).found == [sentence]


def _rewritten(run, step, change):
    """Write the sample file of a step again, with changed groups."""
    groups = RecordedStream(run, read_journal(run)).get_batch(step - 1).groups
    write_rollouts(run, step, change(groups) or groups)


def _first(field, value):
    return lambda groups: setattr(groups[0].trajectories[0], field, value(groups[0].trajectories[0]))


def _other_image(groups):
    return [image_group(5, 2, images=(image(64, 48, 9), SECOND)), *groups[1:]]


def _other_place(groups):
    trajectory = groups[0].trajectories[0]
    moved = (trajectory.prompt.images[0]._replace(start=0), trajectory.prompt.images[1])
    trajectory.prompt = dataclasses.replace(trajectory.prompt, images=moved)


def _copied(run, source, target):
    rollout_path(run, target).write_bytes(rollout_path(run, source).read_bytes())


def _journal_edited(run, old, new):
    file = run / "journal.jsonl"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


OTHER = "sample 0 of train/5 has other tokens, log-probs, rewards or images than the trained sample"
LISTED = "does not contain the samples that journal.jsonl lists for step 3"
ALTERED = {
    "sample twice in a group": (
        lambda run: _journal_edited(run, "[1,[[2,1]]", "[0,[[2,1]]"), "trained sample 0 of train/5 2 times in a group"
    ),
    "index of -1": (lambda run: _journal_edited(run, "[[5,", "[[-1,"), "step 3: a prompt index is missing (-1)"),
    "missing file": (lambda run: rollout_path(run, 3).unlink(), "step 3: the sample file in"),
    "copied file": (lambda run: _copied(run, 2, 3), LISTED),
    "file of an untrained step": (lambda run: _copied(run, 2, 9), "journal.jsonl has no step 9"),
    "swapped groups": (lambda run: _rewritten(run, 3, lambda groups: groups[::-1]), LISTED),
    "damaged file": (lambda run: rollout_path(run, 3).write_bytes(b"x"), "step_0003.parquet: cannot be read"),
    "outcome": (lambda run: _rewritten(run, 3, _first("outcome", lambda t: Outcome.OK)), "is ok, but truncated in"),
    "length": (
        lambda run: _rewritten(run, 3, _first("loss_mask", lambda t: None)), "has 4 tokens of the policy, but 3 in"
    ),
    "mask": (lambda run: _rewritten(run, 3, _first("loss_mask", lambda t: t.loss_mask[::-1])), OTHER),
    "tokens": (lambda run: _rewritten(run, 3, _first("completion_ids", lambda t: t.completion_ids + 1)), OTHER),
    "log-probs": (lambda run: _rewritten(run, 3, _first("logprobs", lambda t: t.logprobs / 2)), OTHER),
    "image": (lambda run: _rewritten(with_images(run, 3), 3, _other_image), OTHER),
    "place of an image": (lambda run: _rewritten(with_images(run, 3), 3, _other_place), OTHER),
    "rewards": (lambda run: _rewritten(run, 3, _first("rewards", lambda t: {"a": 0.1, "b": 0.0})), OTHER),
}  # fmt: skip


def test_audit_fails_if_a_sample_is_not_the_trained_one(run, tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "load_saved_config", functools.cache(replay.load_saved_config))
    run.rename(tmp_path / "sound")
    for kind, (alter, sentence) in ALTERED.items():
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(tmp_path / "sound", run)
        alter(run)
        found = replay.audit_run(run).found
        assert sentence in "\n".join(found), (kind, found)


def test_audit_accepts_unsaved_samples_only_where_the_run_may_lack_them(run, tmp_path):
    rollout_path(run, 4).unlink()
    (run / "checkpoints" / "step_4").rename(tmp_path / "step_4")  # step 4 would be trained again
    unsaved = ["4 of 16 samples: they were not saved"]
    assert replay.audit_run(run) == Audit([], unsaved, 12)
    (run / "status.json").write_text('{"time": 1, "host": "a", "driver": 1, "waits": [], "outcome": "complete"}')
    assert "step 4: the sample file in" in replay.audit_run(run).found[0]


def test_audit_compares_only_the_groups_that_the_config_saves(run, tmp_path):
    record_config(config(tmp_path, "rollout.save_groups=1"), run, 3)
    write_rollouts(run, 4, [group(7, 3)], SampleValues(np.zeros(2)))
    assert replay.audit_run(run) == Audit([], ["2 of 16 samples: they were not saved"], 14)


def test_audit_reports_its_coverage(run, capsys):
    from gdpo_nemo.commands.cli import main

    def audit() -> str:
        assert main(["replay", str(run), "--audit"]) == 0
        return capsys.readouterr().out

    assert audit() == "every prompt was trained or dropped once, no sample is too old, and 16 samples are as trained\n"
    file = run / "journal.jsonl"
    file.write_text(re.sub(r',"[0-9a-f]{16}"', "", file.read_text()))
    assert audit().splitlines() == [
        "no errors; 16 samples are as trained",
        "not checked: tokens and rewards of 16 samples: their hashes were not recorded",
    ]
    for index in range(8):
        file.write_text(file.read_text().replace(f'[{index},"train', '[-1,"train'))
    assert "not checked: order and number of prompts: steps 1 to 4 did not record prompt indices" in audit()
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[1:]))
    assert main(["replay", str(run), "--audit"]) == 1
    assert capsys.readouterr().out.startswith("step 2 follows step 0\n")


@pytest.mark.parametrize("option, said", [("--verbose", "imports: "), ("--quiet", "")])
def test_a_replay_shows_its_phases_or_nothing_beside_the_result(option, said, run, capsys, monkeypatch):
    from gdpo_nemo.commands.cli import main

    monkeypatch.setattr(replay, "rerun", lambda plan: None)
    monkeypatch.setattr(replay, "compare_metrics", lambda plan: [])
    assert main(["replay", str(run), option]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith(said) and bool(shown.err) == bool(said) and "are equal" in shown.out


def test_a_replay_validates_nothing_and_tells_no_tracker(tmp_path):
    asked = config(tmp_path, "logger.wandb.enabled=true", "cluster.env_nodes=0", "gdpo.val_at_start=true")
    quiet = replay._quiet(asked, tmp_path / "out")
    assert (quiet.gdpo.val_period, quiet.gdpo.val_at_start, quiet.logger.wandb.enabled) == (0, False, False)
    assert quiet.run.dir == str(tmp_path / "out") and quiet.gdpo.max_num_steps == asked.gdpo.max_num_steps


def test_the_loop_saves_between_two_configs_and_exports_at_the_end(run, monkeypatch):
    calls = []

    class Loop:
        def __init__(self, state):
            self.state = state
            self.policy = SimpleNamespace(
                export=lambda folder: calls.append(f"export {folder.relative_to(run)}"),
                load_checkpoint=lambda folder, weights_only: calls.append(f"load {folder.name}"),
            )
            self.checkpoints = Checkpoints(run / "replay_4" / "checkpoints", 1, 0, None)

        def step(self):
            self.state.step += 1
            calls.append(f"step {self.state.step}")

        def save(self):
            calls.append("save")

    class Context:
        def __init__(self, plan, segment, state, checkpoint, log):
            calls.append(f"from {checkpoint.name if checkpoint else 'the model'}")
            self.loop = Loop(state)

        def __enter__(self):
            return self.loop

        def __exit__(self, *error):
            calls.append("close")

    monkeypatch.setattr(replay, "_trainer", Context)
    replay._train(replay.plan_rerun(run, 4, None, check=True), None)
    assert calls == [
        "from the model", "step 1", "step 2", "save", "close",
        "from step_2", "step 3", "step 4", "export replay_4/model", "load step_4", "export replay_4/original/model",
        "close",
    ]  # fmt: skip
