"""The loop by itself: what is called in which order, with parts that record it. The real parts run in
tests/end_to_end."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.config.validate import validate
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory, UpdateResult
from gdpo_nemo.observe.metric_registry import unknown_metrics
from gdpo_nemo.rollouts.batches import PromptBatch, Rollout
from gdpo_nemo.training import gdpo
from gdpo_nemo.training.algorithm import Algorithm
from gdpo_nemo.training.checkpoints import RunState
from gdpo_nemo.training.gdpo import GDPO
from gdpo_nemo.training.goals import Goals
from gdpo_nemo.training.resume import _nothing_to_train
from gdpo_nemo.training.supervisor import Attempt
from gdpo_nemo.training.trainer import METRICS, Trainer
from gdpo_nemo.utils import progress
from gdpo_nemo.utils.errors import ConfigError, RunError, UserCodeFailed
from gdpo_nemo.utils.state import from_json

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
SMALL = [
    "gdpo.rewards={a: 1, b: 1}",
    "gdpo.num_prompts_per_step=2",
    "gdpo.num_generations_per_prompt=2",
    "gdpo.max_num_steps=4",
]


def done(result) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future


class Recorder:
    """The parts of a run: they note what they are asked, and answer like a policy whose log-probs rise with every
    update."""

    def __init__(self, *overrides: str, stale: int = 0, skipped: bool = False, prompt_limit: int | None = None):
        self.config = load_config(DEMO, [*SMALL, *overrides])
        self.calls = []
        self.rows = []
        self.alerts = []
        self.updates = []
        self.stale = stale
        self.skipped = skipped
        self.version = 0
        self.spans = []
        self.trained = []
        checkpoints = SimpleNamespace(pending=False, begin=self.begin, finish=self.finish)
        log = SimpleNamespace(step=self.row,
                              validation=lambda row, groups: self.calls.append(f"validate {row['step']}"),
                              span=lambda *span: self.spans.append(span), alert=self.alerts.append,
                              note=self.alerts.append,
                              trained=lambda *trained: self.trained.append(trained),
                              flush=lambda step: self.calls.append(f"samples {step}"))  # fmt: skip
        self.log = log
        policy = SimpleNamespace(train=self.train, logprobs=self.logprobs, begin_save=None,
                                 finish_save=lambda: self.calls.append("files"),
                                 save_is_written=lambda: True)  # fmt: skip
        stream = SimpleNamespace(schedule=lambda step: self.calls.append(f"schedule {step}"), get_batch=self.get_batch,
                                 evaluate=lambda p: done(self.groups(0)), ledger=self.ledger,
                                 take_events=list, progress=str)  # fmt: skip
        sync = SimpleNamespace(version=None, publish=self.publish, sleep_engines=lambda: self.calls.append("sleep"))
        self.checkpoints = checkpoints
        self.parts = SimpleNamespace(
            config=self.config,
            resolved=resolve(self.config),
            state=RunState(),
            algorithm=GDPO(self.config, policy, None, log),
            policy=policy,
            stream=stream,
            sync=sync,
            log=log,
            checkpoints=checkpoints,
            # fmt: skip
            stop=SimpleNamespace(requested=False),
            attempt=Attempt(),
            validation_prompts=[],
            prompt_limit=prompt_limit,
            total_updates=4,
        )
        self.trainer = Trainer(self.parts)

    def groups(self, version: int) -> list[Group]:
        made = []
        for name, rewards in (("x", [(1.0, 0.0), (0.0, 0.0)]), ("y", [(0.0, 2.0), (0.0, 0.0)])):
            prompt = Prompt(name, np.arange(2, dtype=np.int32), name, "digit_sort")
            made.append(Group(prompt, [
                Trajectory(prompt, j, np.arange(3, dtype=np.int32), np.full(3, -1, np.float32), version, "", "stop",
                dict(a=a, b=b))
                for j, (a, b) in enumerate(rewards)
            ]))  # fmt: skip
        return made

    def get_batch(self, step: int) -> Rollout:
        self.calls.append(f"get batch {step}")
        groups = self.groups(max(0, step - self.stale))
        return Rollout(groups, next_position=2 * step + 2, dropped_groups=5, version=step)

    def train(self, update, loss) -> UpdateResult:
        self.calls.append("train")
        self.updates.append((update, loss))
        self.version += 1
        sums = {"tokens": 12.0, "entropy": 6.0, "parity_abs": 0.0, "parity_kl": 0.0}
        maxima = {"parity_abs": 0.0, "parity_prob": 0.0}
        return UpdateResult(
            loss=0.5, grad_norm=1.0, lr=1e-4, skipped=self.skipped, sums=sums, maxima=maxima, packing={}
        )

    def logprobs(self, update, reference: bool = False):
        self.calls.append("reference" if reference else "logprobs")
        return [np.full(3, -9.0 if reference else -1.0 + self.version, np.float32) for _ in update]

    def publish(self, version: int) -> dict:
        self.calls.append(f"publish {version}")
        self.parts.sync.version = version
        return {"time/sync": 0.25}

    def ledger(self) -> dict:
        return {"position": 2 * self.version, "retired": [], "dropped": []}

    def begin(self, state, write) -> None:
        self.calls.append(f"save {state.step} at {state.position}")
        self.checkpoints.pending = True

    def finish(self, wait) -> None:
        wait()
        self.calls.append("checkpoint is whole")
        self.checkpoints.pending = False

    def row(self, row, groups, values) -> None:
        values.check(sum(len(group.trajectories) for group in groups))
        assert values.turn_advantages is None and values.entropies is None and values.terms.keys() == set("ab")
        self.rows.append((row, groups, values.advantages))


def of(recorder: Recorder, *words: str) -> list[str]:
    return [call for call in recorder.calls if call.startswith(words)]


def test_every_step_takes_its_batch_trains_and_publishes_the_next_version():
    recorder = Recorder("gdpo.val_period=0", "gdpo.val_at_start=false", "checkpointing.enabled=false")
    recorder.trainer.fit()
    steps = [
        [f"get batch {k}", "sleep", "train", f"publish {k + 1}", f"schedule {k + 1}", f"schedule {k + 1}"]
        for k in range(4)
    ]
    assert recorder.calls == ["publish 0", "schedule 0", *(call for step in steps for call in step)]
    assert [row["step"] for row, *_ in recorder.rows] == [1, 2, 3, 4]
    assert (recorder.trainer.state.step, recorder.trainer.state.position) == (4, 8)


def test_the_phases_of_a_run_follow_its_steps():
    recorder = Recorder("gdpo.max_num_steps=2", "gdpo.val_period=2", "gdpo.val_at_start=true")
    ended = []
    with progress.watched(lambda phase: ended.append(phase.name)):
        recorder.trainer.fit()
    steps = [[f"step {n}: batch", f"step {n}: training", f"weights {n}"] for n in (1, 2)]
    assert ended == ["weights 0", "validation", *steps[0], *steps[1], "validation", "checkpoint 2"]
    assert progress.current() == []


def test_trained_groups_of_a_step_are_recorded_before_the_weight_update():
    recorder = Recorder("gdpo.val_period=0", "gdpo.val_at_start=false", "checkpointing.enabled=false")
    recorder.trainer.publish()
    noted = []
    recorder.parts.sync.publish = lambda version: noted.extend(recorder.trained) or {}
    recorder.trainer.step()
    ((step, batch, published, total),) = noted
    assert (step, batch.next_position, published, total) == (1, 2, 0, 4)


def test_a_checkpoint_holds_the_ledger_of_its_moment():
    recorder = Recorder("gdpo.val_period=0", "gdpo.val_at_start=false", "checkpointing.save_period=2")
    saved = []
    recorder.checkpoints.begin = lambda state, write: saved.append((state.step, state.ledger["position"]))
    recorder.trainer.fit()
    assert saved == [(2, 4), (4, 8)]


def test_validation_and_checkpoints_come_at_their_periods_and_at_the_end():
    recorder = Recorder(
        "gdpo.val_period=3", "gdpo.val_at_start=true", "checkpointing.save_period=2", "checkpointing.metric_name=null"
    )
    recorder.trainer.fit()
    assert of(recorder, "validate", "save") == ["validate 0", "save 2 at 4", "validate 3", "validate 4", "save 4 at 8"]
    assert recorder.trainer.state.metrics["validation/b"] == 0.5 and not recorder.checkpoints.pending


def test_ahead_of_the_trainer_validation_is_waited_for_before_the_next_weights_and_no_sooner():
    recorder = Recorder("rollout.max_staleness=1", "gdpo.val_period=1", "gdpo.val_at_start=false",
                        "gdpo.max_num_steps=2", "checkpointing.enabled=false")  # fmt: skip
    under_way = []

    def evaluate(prompts):
        recorder.calls.append("evaluate")
        under_way.append(Future())
        return under_way[-1]

    def publish(version):
        recorder.calls.append(f"publish {version}")
        assert all(future.done() for future in under_way)
        return {"time/sync": 0.25}

    recorder.parts.stream.evaluate = evaluate
    recorder.parts.sync.publish = publish
    train = recorder.train

    def slowly(update, loss):
        for future in under_way:  # it ends while the next step trains
            if not future.done():
                future.set_result(recorder.groups(0))
        return train(update, loss)

    recorder.parts.policy.train = slowly
    threading.Timer(1.0, lambda: under_way[-1].set_result(recorder.groups(0))).start()
    recorder.trainer.fit()
    calls = of(recorder, "evaluate", "validate", "publish", "train")
    assert calls == ["publish 0", "train", "publish 1", "evaluate", "train", "validate 1", "publish 2", "evaluate",
                     "validate 2"]  # fmt: skip


@pytest.mark.parametrize("period, published", [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3, 4])])
def test_weights_are_published_every_so_many_steps_and_at_the_end(period, published):
    recorder = Recorder(f"rollout.sync_every={period}", "rollout.max_staleness=2", "gdpo.val_period=4",
                        "gdpo.val_at_start=false", "checkpointing.enabled=false")  # fmt: skip
    recorder.trainer.fit()
    assert of(recorder, "publish") == [f"publish {version}" for version in published]


@pytest.mark.parametrize("later, steps", [("false", [2, 4]), ("true", [2, 4])])
def test_a_checkpoint_is_whole_when_the_samples_up_to_it_are_on_the_disk(later, steps):
    recorder = Recorder("checkpointing.save_period=2", f"checkpointing.async_save={later}")
    recorder.trainer.fit()
    calls = of(recorder, "samples", "files", "checkpoint")
    assert calls == [call for step in steps for call in (f"samples {step}", "files", "checkpoint is whole")]


@pytest.mark.parametrize("limit, steps", [(6, 3), (7, 3), (8, 4), (100, 4)])
def test_a_run_ends_with_its_prompts_and_validates_and_saves_then(limit, steps):
    """A step takes two prompts, and one too few is no step; the run has four steps at most."""
    recorder = Recorder(
        "gdpo.val_period=10", "gdpo.val_at_start=false", "checkpointing.save_period=10", prompt_limit=limit
    )
    recorder.trainer.fit()
    assert recorder.trainer.complete and recorder.trainer.state.step == steps
    assert of(recorder, "validate", "save") == [f"validate {steps}", f"save {steps} at {2 * steps}"]


def test_a_run_that_is_asked_to_stop_saves_after_the_step_and_ends():
    recorder = Recorder("gdpo.val_period=0", "gdpo.val_at_start=false", "checkpointing.save_period=100")
    recorder.parts.sync.publish = lambda version: (
        setattr(recorder.parts.stop, "requested", version == 2) or {"time/sync": 0.0}
    )
    recorder.trainer.sync = recorder.parts.sync
    recorder.trainer.fit()
    assert of(recorder, "save") == ["save 2 at 4"] and recorder.trainer.state.step == 2


@pytest.mark.parametrize("stale", [0, 1])
def test_a_step_reports_staleness_and_the_gap_to_the_sampler_and_parity_only_on_policy(stale):
    recorder = Recorder(f"rollout.max_staleness={stale}", "loss_fn.old_logprobs=trainer", stale=stale)
    recorder.trainer.state.step = 3
    recorder.trainer.step()
    row = recorder.rows[0][0]
    assert row["staleness/mean"] == row["staleness/max"] == stale
    assert ("parity/max_abs" in row) == (stale == 0)
    assert {f"sampler_gap/{key}" for key in ("mean_abs", "max_abs", "kl")} <= set(row)


def test_a_steps_row_holds_rewards_times_and_tokens():
    recorder = Recorder("gdpo.rewards.b=2")
    recorder.trainer.step()
    row, groups, advantages = recorder.rows[0]
    assert row["reward/total/mean"] == 0.25 + 2 * 0.5 and row["rollout/dropped_groups"] == 5
    assert row["skipped_steps"] == 0 and row["time/sync"] == 0.25
    assert row["rollout/tokens"] == 12 == pytest.approx(row["throughput/tokens_per_second"] * row["time/step"])
    assert all(0 <= row[f"time/{key}"] <= row["time/step"] for key in ("idle", "train", "advantages"))
    assert [g.prompt.id for g in groups] == ["x", "y"] and np.sign(advantages).tolist() == [1, -1, 1, -1]
    tracks = {track: (start, end) for track, _, start, end in recorder.spans}
    assert (
        tracks["idle"][0]
        <= tracks["idle"][1]
        == tracks["train"][0]
        <= tracks["train"][1]
        == tracks["sync"][0]
        <= tracks["sync"][1]
    )


def test_several_updates_of_a_step_share_the_log_probs_from_before_the_first():
    recorder = Recorder("policy.train_global_batch_size=2", "loss_fn.reference_policy_kl_penalty=0.1")
    recorder.trainer.step()
    assert of(recorder, "logprobs", "reference", "train") == ["logprobs", "reference"] * 2 + ["train"] * 2
    for update, loss in recorder.updates:
        assert len(update) == 2 and loss is recorder.config.loss_fn
        assert all((s.old_logprobs == -1).all() and (s.reference_logprobs == -9).all() for s in update)


def test_sequences_that_are_left_out_are_not_scored_before_the_first_update():
    recorder = Recorder("policy.train_global_batch_size=2", "policy.skip_zero_advantage=true", "gdpo.batch_norm=false")
    batch = recorder.get_batch(0)
    batch.groups[1].trajectories[0].outcome = Outcome.ABORTED
    recorder.parts.stream.get_batch = lambda step: batch
    recorder.trainer.step()
    scored = [[s.old_logprobs is not None for s in update] for update, _ in recorder.updates]
    advantages = [[s.advantage != 0 for s in update] for update, _ in recorder.updates]
    assert advantages == [[True, True], [False, False]], "whoever is alone in a group has nobody to be compared with"
    assert scored == [[True, True], [True, False]], "one is kept for the ranks' schedule"


def test_target_pos_coefficients_are_of_the_weights_that_each_update_meets():
    recorder = Recorder("loss_fn.type=target_po", "policy.train_global_batch_size=2", "loss_fn.old_logprobs=sampler")
    recorder.trainer.step()
    assert of(recorder, "logprobs", "train") == ["logprobs", "train"] * 2
    for update, _ in recorder.updates:  # the one that scored better is pulled up as much as the other one down
        assert update[0].advantage == pytest.approx(-update[1].advantage) and update[0].advantage > 0


def test_samples_of_several_versions_are_not_measured_for_parity():
    recorder = Recorder("rollout.max_staleness=1", "loss_fn.old_logprobs=trainer")
    recorder.trainer.state.step = 3
    batch = recorder.get_batch(3)
    batch.groups[0].trajectories[0].policy_version = 2
    recorder.parts.stream.get_batch = lambda step: batch
    recorder.trainer.step()
    assert not [key for key in recorder.rows[0][0] if key.startswith("parity/")]


def test_one_update_needs_no_log_probs_beforehand():
    recorder = Recorder()
    recorder.trainer.step()
    ((update, _),) = recorder.updates
    assert of(recorder, "logprobs", "reference") == []
    assert all(s.old_logprobs is None and s.reference_logprobs is None for s in update)


def test_updates_that_were_not_finite_are_counted_and_too_many_in_a_row_end_the_run():
    recorder = Recorder("gdpo.max_skipped_steps=2", skipped=True)
    for _ in range(2):
        recorder.trainer.step()
    assert [row["skipped_steps"] for row, *_ in recorder.rows] == [1, 1]
    recorder.skipped = False
    recorder.trainer.step()
    assert recorder.trainer.skipped_in_a_row == 0
    recorder.skipped = True
    for _ in range(2):
        recorder.trainer.step()
    with pytest.raises(RunError, match="not finite in 3 steps in a row"):
        recorder.trainer.step()


def test_a_step_writes_every_metric_that_the_trainer_describes_and_no_other():
    rows = []
    bounds = "gdpo.constraints={b: {at_least: 0.5}}"
    for overrides in (["gdpo.kl_in_reward=0.1"], ["loss_fn.type=kl_cov", "loss_fn.use_adaptive_entropy=true", bounds]):
        recorder = Recorder(*overrides)
        recorder.trainer.step()
        rows.append(recorder.rows[0][0])
    assert {*METRICS, *gdpo.METRICS} <= rows[0].keys() | rows[1].keys() and unknown_metrics(rows) == []


def test_a_constraint_moves_the_weight_before_each_update_and_resumes_from_the_checkpoint():
    """The mean of b is 0.5 in every step. b alone varies in the second group, so its weight decides between groups."""
    goal = "gdpo.constraints={b: {at_least: 0.75, lr: 0.4}}"
    recorder = Recorder(goal)
    states = []
    for _ in range(3):
        recorder.trainer.step()
        states.append(json.loads(json.dumps(recorder.trainer.algorithm.state())))
    start = recorder.config.gdpo.rewards["b"]
    weights = [start + 0.4 * 0.25, start + 0.4 * 0.25 + 0.4 * 0.25, start + 0.4 * 0.25 + 0.4 * 0.25 + 0.4 * 0.25]
    assert [row["reward/b/weight"] for row, *_ in recorder.rows] == weights
    assert [batch.weights for _, batch, *_ in recorder.trained] == [{"b": weight} for weight in weights]
    fixed = Recorder(f"gdpo.rewards.b={weights[2]}")
    fixed.trainer.step()
    np.testing.assert_array_equal(recorder.rows[2][2], fixed.rows[0][2])
    totals = [row["reward/total/mean"] for row, *_ in recorder.rows]
    assert totals == pytest.approx([0.25 + 0.5 * weight for weight in weights])
    resumed = Recorder(goal)
    resumed.trainer.algorithm.load_state(states[1])
    resumed.trainer.step()
    assert resumed.rows[0][0]["reward/b/weight"] == weights[2] and resumed.trainer.algorithm.state() == states[2]


WITH_STATE = """
import numpy as np
from gdpo_nemo import weighted_terms, z_scores

class Counting:
    def __init__(self): self.calls = np.zeros(2)
    def state(self): return {"calls": self.calls}
    def load_state(self, state): self.calls = state["calls"]

class Estimator(Counting):
    def __call__(self, table, settings):
        self.calls += [1, 0.25]
        z, has_signal = z_scores(table, settings)
        return weighted_terms(z / self.calls[:, None], has_signal, table.weights)

class Rule(Counting):
    def __call__(self, values, context):
        self.calls += 1
        return values + self.calls[0]

class BadState(Estimator):
    def state(self): return {"calls": {1, 2}}
"""


def test_a_resumed_run_continues_with_the_state_of_its_custom_functions(tmp_path):
    """Rewards are equal in every step, so that advantages and means change with the state only."""
    file = tmp_path / "mine.py"
    file.write_text(WITH_STATE)
    custom = (f"gdpo.estimator={file}:Estimator", f"gdpo.shaping=[{{component: b, '{file}:Rule': {{}}}}]")
    unbroken, resumed = Recorder(*custom), Recorder(*custom)
    states = []
    for _ in range(4):
        unbroken.trainer.step()
        unbroken.trainer.save()
        states.append(json.dumps(unbroken.parts.state.algorithm))
    assert [row["reward/b/mean"] for row, *_ in unbroken.rows] == [1.5, 2.5, 3.5, 4.5], "one call in each step"
    assert len({advantages.tobytes() for *_, advantages in unbroken.rows}) == 4
    resumed.trainer.algorithm.load_state(from_json(json.loads(states[1])))
    for row, _, advantages in unbroken.rows[2:]:
        resumed.trainer.step()
        assert resumed.rows[-1][0]["reward/b/mean"] == row["reward/b/mean"]
        np.testing.assert_array_equal(resumed.rows[-1][2], advantages)
    renamed = Recorder(custom[0], custom[1].replace("Rule", "Estimator"))
    renamed.log.note = renamed.alerts.append
    renamed.trainer.algorithm.load_state(from_json(json.loads(states[1])))
    (note,) = renamed.alerts
    assert note.startswith("gdpo.shaping: ") and "does not contain its state" in note
    broken = Recorder(f"gdpo.estimator={file}:BadState")
    with pytest.raises(
        UserCodeFailed, match=r"checkpoint 0: the algorithm's state.*BadState.*calls.*: cannot save set"
    ):
        broken.trainer.save()


def test_the_first_step_of_a_schedule_has_the_weight_of_the_config():
    recorder = Recorder("gdpo.schedules={b: [[3, 2.0]]}")
    for _ in range(4):
        recorder.trainer.step()
    assert [row["reward/b/weight"] for row, *_ in recorder.rows] == [1.0, 1.5, 2.0, 2.0]


class Halving(Algorithm):
    """Samples nothing; every update asks how often the policy was trained before it."""

    samples = False

    def prepare(self, batch):
        return batch.prompts

    def updates(self, prepared):
        for prompt in prepared:
            seen = self.policy.logprobs([prompt])[0][0]
            yield [TrainSequence(prompt, np.arange(3, dtype=np.int32), np.zeros(3, np.float32), advantage=float(seen))]

    def validate(self, evaluated):
        return {"validation/loss": float(len(evaluated))}


def without_engines(recorder: Recorder, kind: type[Algorithm]) -> Recorder:
    parts = recorder.parts
    parts.algorithm = kind(recorder.config, parts.policy, None, parts.log)
    parts.sync = None
    parts.validation_prompts = ["one", "two"]
    parts.stream = SimpleNamespace(
        ledger=dict,
        schedule=lambda step: None,
        get_batch=lambda step: PromptBatch([np.arange(2, dtype=np.int32)] * 2, 2 * step + 2),
        progress=str,
        evaluate=done,
        take_events=list,
    )
    parts.log.step = lambda row: recorder.rows.append(row)
    parts.state = RunState()
    recorder.trainer = Trainer(parts)
    return recorder


def test_an_algorithm_without_sampling_trains_validates_and_saves_without_engines():
    recorder = without_engines(Recorder("gdpo.val_period=4", "checkpointing.save_period=4"), Halving)
    recorder.trainer.fit()
    assert of(recorder, "publish", "sleep", "validate", "save") == ["validate 0", "validate 4", "save 4 at 8"]
    assert [row["step"] for row in recorder.rows] == [1, 2, 3, 4] and recorder.trainer.state.metrics == {
        "validation/loss": 2.0
    }
    assert all("time/sync" not in row and row["loss"] == 0.5 for row in recorder.rows)
    assert recorder.rows[0]["throughput/tokens_per_second"] * recorder.rows[0]["time/step"] == pytest.approx(6)


def test_an_update_is_made_after_the_one_before_it_was_trained():
    recorder = without_engines(Recorder("gdpo.val_at_start=false"), Halving)
    recorder.trainer.step()
    assert of(recorder, "logprobs", "train") == ["logprobs", "train"] * 2
    assert [update[0].advantage for update, _ in recorder.updates] == [-1.0, 0.0]


@pytest.mark.parametrize("method", ["prepare", "updates", "metrics", "record", "validate"])
def test_exception_of_a_custom_algorithm_ends_the_run_with_a_sentence(method):
    def fail(self, *arguments):
        raise KeyError("x")
        yield

    broken = type("Broken", (Halving,), {method: fail if method == "updates" else lambda self, *arguments: {}["x"]})
    recorder = without_engines(Recorder("gdpo.val_at_start=true"), broken)
    with pytest.raises(RunError, match=f"algorithm.type: Broken.{method} raised KeyError: 'x'"):
        recorder.trainer.fit()


GOALS = ["gdpo.val_period=1", "gdpo.val_at_start=false", "gdpo.stop_when={a: 0.2, b: 0.4}"]
"""The held-out means are 0.25 and 0.5, each with the standard error of two prompts: 0.25 and 0.5."""


@pytest.mark.parametrize(
    "overrides, steps",
    [
        (["gdpo.stop_errors=0"], 1),
        (["gdpo.stop_errors=0", "gdpo.val_at_start=true"], 0),
        (["gdpo.stop_errors=0", "gdpo.stop_patience=3"], 3),
        (["gdpo.stop_errors=0.15"], 1),
        (["gdpo.stop_errors=0.21"], 4),
        ([], 4),
        (["gdpo.stop_errors=0", "gdpo.stop_when={a: 0.3, b: 0.4}"], 4),
        (["gdpo.stop_errors=0", "gdpo.rewards={a: -1, b: 1}"], 4),
        (["gdpo.stop_errors=0", "gdpo.rewards={a: -1, b: 1}", "gdpo.stop_when={a: 0.3, b: 0.4}"], 1),
    ],
)
def test_a_run_ends_when_every_goal_is_met(overrides, steps):
    run = Recorder(*GOALS, "checkpointing.save_period=100", *overrides)
    run.trainer.fit()
    assert run.trainer.state.step == steps
    assert run.trainer.state.goals_met == (0 if steps == 4 else max(steps, 1))
    assert (run.calls[-1] == "checkpoint is whole") == (steps > 0), "the final state is saved"
    told = [line for line in run.alerts if "gdpo.stop_when" in line]
    assert len(told) == (steps < 4)
    if steps < 4:
        assert told[0].startswith(
            f"the validation after step {steps} meets all goals of gdpo.stop_when: a 0.25 ± 0.25 (goal 0."
        )


def test_a_resumed_run_knows_the_goals_that_it_met():
    gdpo = load_config(DEMO, [*SMALL, *GOALS, "gdpo.stop_errors=0"]).gdpo
    state = RunState(step=3, metrics={"validation/a": 0.25, "validation/b": 0.5}, goals_met=1)
    Goals(gdpo).restore(state)
    assert Goals(gdpo).reached(state)
    assert "raise the goals in gdpo.stop_when" in _nothing_to_train(gdpo, state, 100)
    raised = replace(gdpo, stop_when={"a": 0.9})
    Goals(raised).restore(state)
    assert state.goals_met == 0 and _nothing_to_train(raised, state, 100) == ""


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["gdpo.stop_when={a: 0.2}", "gdpo.val_period=0"], "gdpo.stop_when: requires validations"),
        ([*GOALS, "gdpo.stop_when={c: 0.2}"], "gdpo.stop_when: must only have components of gdpo.rewards"),
        (["gdpo.stop_patience=2"], "gdpo.stop_patience: has no effect unless gdpo.stop_when has goals"),
    ],
)
def test_goals_without_validations_or_components_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(load_config(DEMO, [*SMALL, *overrides]))
