"""Environments with different algorithms in one step: each is trained as in a separate run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from gdpo_nemo.algorithms.loss_settings import LossByPart, LossSettings
from gdpo_nemo.algorithms.losses import TokenFields, part_metric
from gdpo_nemo.algorithms.policy_loss import objective_loss, policy_loss
from gdpo_nemo.config.environment_algorithms import OTHERS, check_rows_of, config_of, trained_configs
from gdpo_nemo.config.load import load_config, to_yaml
from gdpo_nemo.config.validate import validate
from gdpo_nemo.data.records import Group, Prompt, Trajectory, UpdateResult
from gdpo_nemo.observe.metric_registry import unknown_metrics
from gdpo_nemo.rollouts.batches import Rollout
from gdpo_nemo.rollouts.group_signal import has_signal
from gdpo_nemo.training.algorithm import load_algorithm
from gdpo_nemo.training.by_environment import ByEnvironment
from gdpo_nemo.training.gdpo import GDPO
from gdpo_nemo.utils.errors import ConfigError, RunError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
ENV = {
    "digit_sort": {},
    "twin": {"plugin": "digit_sort"},
    "sums": {"plugin": "digit_sort", "algorithm": {"gdpo": {"estimator": "grpo", "rewards": {"a": 1.0, "b": 2.0}}}},
    "kl": {
        "plugin": "digit_sort",
        "algorithm": {
            "gdpo": {"batch_norm": False, "rewards": {"b": 1.0}},
            "loss_fn": {"aggregation": "sequence_mean", "reference_policy_kl_penalty": 0.1, "ratio_clip_max": 0.4},
        },
    },
    "taught": {"plugin": "digit_sort", "algorithm": {"type": "distillation"}},
}


def config_with(env=ENV, **overrides):
    settings = {
        "gdpo.rewards": {"a": 1.0, "b": 1.0}, "gdpo.num_prompts_per_step": 8, "gdpo.num_generations_per_prompt": 4,
        "data.train.environment": "digit_sort", "data.validation.environment": "digit_sort", "env": env, **overrides,
    }  # fmt: skip
    return load_config(DEMO, settings)


class Policy:
    """Log-probs that depend on the model and the tokens, and results of updates with the metrics of each part."""

    def __init__(self):
        self.updates = []
        self.loaded = []

    def logprobs(self, sequences, reference=False, teacher=False):
        shift = 0.5 * reference + 0.25 * teacher
        return [np.float32(-1 - shift - s.completion_ids / 100) for s in sequences]

    def load_teacher(self, folder):
        self.loaded.append(folder)

    def train(self, update, loss):
        self.updates.append((update, loss))
        tokens = sum(len(s.completion_ids) for s in update)
        sums = {"tokens": float(tokens), "entropy": 2.0 * tokens}
        maxima = {}
        for number in range(len(loss.parts)):
            own = sum(len(s.completion_ids) for s in update if s.part[0] == number)
            if own:
                sums |= {part_metric(number, "tokens"): own, part_metric(number, "entropy"): (1.0 + number) * own}
                maxima[part_metric(number, "ratio")] = 1.0 + number
        return UpdateResult(0.5, 1.0, 1e-4, False, sums, maxima, packing={})


def batch_of(environments, seed=0, failed=()):
    """Return a rollout with one group for each name, in this order."""
    rng = np.random.default_rng(seed)
    groups = []
    for index, environment in enumerate(environments):
        prompt = Prompt(f"{environment}/{index}", np.arange(2, dtype=np.int32), "", environment)
        members = []
        for sample in range(4):
            tokens = rng.integers(0, 50, rng.integers(1, 7)).astype(np.int32)
            rewards = {"a": float(rng.integers(0, 3)), "b": float(rng.random())}
            members.append(
                Trajectory(prompt, sample, tokens, np.full(len(tokens), -1, np.float32), 0, "", "stop", rewards)
            )
            if environment in failed:
                members[-1].outcome = type(members[-1].outcome).ENV_FAILED
        groups.append(Group(prompt, members, index))
    return Rollout(groups, next_position=len(groups), version=0)


def algorithm_of(config, cls=ByEnvironment):
    log = SimpleNamespace(alerts=[], rows=[], history=None)
    log.alert = log.note = log.alerts.append
    log.step = lambda row, groups, values: log.rows.append((row, groups, values))
    return cls(config, Policy(), None, log)


@pytest.fixture(autouse=True)
def teacher(monkeypatch):
    monkeypatch.setattr("gdpo_nemo.training.distillation.teacher_folder", lambda teacher: Path("teacher"))


MIXED = ["sums", "digit_sort", "kl", "taught", "digit_sort", "sums", "kl", "twin"]


def test_each_environment_gets_the_advantages_and_losses_of_a_separate_run():
    config = config_with()
    mixed = algorithm_of(config)
    batch = batch_of(MIXED)
    prepared = mixed.prepare(batch)
    [update] = list(mixed.updates(prepared))
    names = list(mixed.algorithms)
    assert names == [OTHERS, "sums", "kl", "taught"]
    trained = {}
    for name in names:
        environments = ("digit_sort", "twin") if name == OTHERS else (name,)
        groups = [group for group in batch.groups if group.prompt.environment in environments]
        alone = algorithm_of(config_of(config, name), type(mixed.algorithms[name]))
        expected = alone.prepare(replace(batch, groups=groups))
        found = prepared.parts[name]
        assert torch.equal(found.advantages.values, expected.advantages.values)
        [own] = list(alone.updates(expected))
        part = [s for s in update if s.part[0] == names.index(name)]
        trained[name] = len(own)
        for s, o in zip(part, own, strict=True):
            assert np.array_equal(s.token_advantages(), o.token_advantages())
            assert s.weight == pytest.approx(o.weight * len(own) / 32, rel=1e-12)
            if o.reference_logprobs is not None:
                assert np.array_equal(s.reference_logprobs, o.reference_logprobs)
            else:
                assert np.isnan(s.reference_logprobs).all()
    assert trained == {OTHERS: 12, "sums": 8, "kl": 8, "taught": 4}
    assert sorted(s.trajectory for s in update) == list(range(32))
    assert [part.aggregation for part in mixed.loss.parts] == [
        "token_mean",
        "token_mean",
        "sequence_mean",
        "token_mean",
    ]


def test_metrics_and_samples_are_those_of_their_environments():
    mixed = algorithm_of(config_with())
    batch = batch_of(MIXED)
    prepared = mixed.prepare(batch)
    results = [mixed.policy.train(update, mixed.loss) for update in mixed.updates(prepared)]
    row = mixed.metrics(prepared, results, 0)
    assert not unknown_metrics([row]) and "advantage/taught/std" not in row and "advantage/kl/std" in row
    assert row["policy/entropy"] == 2.0 and row["policy/kl/entropy"] == 3.0 and row["policy/others/entropy"] == 1.0
    a = [t.rewards["a"] for t in batch.trajectories]
    assert row["reward/a/mean"] == pytest.approx(np.mean(a)) and "reward/a/dead_groups" not in row
    own = [t.rewards["a"] for t in batch.trajectories if t.prompt.environment == "sums"]
    assert row["reward/sums/a/mean"] == pytest.approx(np.mean(own)) and row["reward/sums/b/weight"] == 2.0
    mixed.record(row, prepared)
    [(_, groups, values)] = mixed.log.rows
    assert groups is batch.groups
    for name, part in prepared.parts.items():
        expected = mixed.algorithms[name].sample_values(part).advantages
        assert np.array_equal(values.advantages[prepared.rows[name]], expected)


def test_a_part_without_scored_samples_is_left_out_and_all_failures_count_together():
    config = config_with(**{"rollout.max_env_failure_share": 0.3})
    mixed = algorithm_of(config)
    prepared = mixed.prepare(batch_of(MIXED, failed=("kl",)))
    [update] = mixed.updates(prepared)
    assert set(prepared.parts) == {OTHERS, "sums", "taught"} and sum(s.weight > 0 for s in update) == 24
    with pytest.raises(RunError, match="failed"):
        mixed.prepare(batch_of(MIXED, failed=("kl", "sums")))
    everything = algorithm_of(config_with(**{"rollout.max_env_failure_share": 1.0}))
    with pytest.raises(RunError, match="no sample of the step can be trained"):
        everything.prepare(batch_of(["kl", "sums"], failed=("kl", "sums")))
    [only] = mixed.updates(mixed.prepare(batch_of(["kl", "kl"])))
    assert {int(s.part[0]) for s in only} == {2}


def test_the_loss_of_parts_is_the_sum_of_their_losses_and_gradients():
    parts = (LossSettings(), LossSettings(type="reinforce"), LossSettings(reference_policy_kl_penalty=0.3))
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(12, generator=generator)
    fields = TokenFields(
        advantages=torch.randn(12, generator=generator), weights=torch.rand(12, generator=generator),
        sequence_ids=torch.arange(12) // 3, num_sequences=4, sampler_logprobs=logprobs - 0.1,
        old_logprobs=logprobs + 0.4 * torch.randn(12, generator=generator), part=torch.arange(12) // 3 % 3,
        reference_logprobs=torch.where(torch.arange(12) // 3 % 3 == 2, logprobs + 0.2, torch.nan),
    )  # fmt: skip
    found = logprobs.clone().requires_grad_()
    loss, metrics = objective_loss(LossByPart(parts))((found, found.detach()), fields, LossByPart(parts), None, {})
    loss.backward()
    other = logprobs.clone().requires_grad_()
    total = 0.0
    for number, settings in enumerate(parts):
        chosen = fields.part == number
        of_part, own = policy_loss(other[chosen], other[chosen].detach(), fields.select(chosen), settings)
        total = total + of_part
        for name, value in own.sums.items():
            assert metrics.sums[part_metric(number, name)] == value
    total.backward()
    assert torch.equal(loss, total) and torch.equal(found.grad, other.grad) and found.grad.isfinite().all()
    assert metrics.sums["tokens"] == 12 and "reference_kl" not in metrics.sums and "ratio" not in metrics.sums
    assert metrics.sums["entropy"] == pytest.approx(float(logprobs.double().sum()))


def test_settings_of_environments_survive_a_saved_config_and_select_the_algorithm(tmp_path):
    config = config_with()
    again = load_config({**yaml.safe_load(to_yaml(config))})
    assert trained_configs(again) == trained_configs(config)
    resolved = SimpleNamespace(import_path="gdpo_nemo.training.gdpo:GDPO", samples=True)
    assert load_algorithm(config, resolved) is ByEnvironment
    assert load_algorithm(config_with({"digit_sort": {}}), resolved) is GDPO
    assert ByEnvironment.needs_reference(config)
    kl = config_of(config, "kl")
    assert (kl.loss_fn.ratio_clip_max, kl.loss_fn.ratio_clip_min, kl.gdpo.estimator) == (0.4, 0.2, "gdpo")


def test_an_algorithm_without_training_rows_is_refused_by_name():
    check_rows_of(config_with(), ["digit_sort", "taught", "kl", "sums", "kl"])
    with pytest.raises(ConfigError, match="env.kl.algorithm: no row of data.train has the environment 'kl'; remove"):
        check_rows_of(config_with(), ["digit_sort", "taught", "sums"])


def test_a_run_whose_environments_all_have_weights_needs_no_others():
    env = {name: options for name, options in ENV.items() if name in ("sums", "kl")}
    config = config_with(env, **{"data.train.environment": "kl", "data.validation.environment": "kl"})
    mapping = yaml.safe_load(to_yaml(config))
    del mapping["gdpo"]["rewards"]
    again = load_config(mapping)
    assert again.gdpo.rewards == {"a": 1.0, "b": 2.0} and OTHERS not in algorithm_of(again).algorithms


def test_the_signal_of_a_group_is_that_of_its_environment():
    config = config_with()
    signals = {}
    for name in ("digit_sort", "sums", "kl", "taught"):
        [group] = batch_of([name]).groups
        for trajectory, a in zip(group.trajectories, (0, 0, 1, 1)):
            trajectory.rewards = {"a": float(a), "b": (1.0 - a) / 2 if name == "sums" else 0.5}
        signals[name] = has_signal(group, config)
    # GRPO's sum a + 2 b is constant, only b counts for kl, and a teacher needs no rewards.
    assert signals == {"digit_sort": True, "sums": False, "kl": False, "taught": True}


@pytest.mark.parametrize(
    ("algorithm", "overrides", "message"),
    [
        (None, {}, "env.kl.algorithm: is empty"),
        ({"gdop": {}}, {}, "env.kl.algorithm.gdop: unknown key"),
        ({"type": "ppo"}, {}, "env.kl.algorithm.type: 'ppo' is not supported for one environment"),
        ({"gdpo": {"estimator": "grop"}}, {}, "env.kl.algorithm: gdpo.estimator: 'grop' is not a valid value; did"),
        ({"gdpo": {"max_num_steps": 3}}, {}, "env.kl.algorithm.gdpo.max_num_steps: applies to the whole run"),
        ({"gdpo": {"rewards": {}}}, {}, "env.kl.algorithm: gdpo.rewards: must not be empty"),
        ({"gdpo": {"batch_norm": "yes"}}, {}, "env.kl.algorithm.gdpo.batch_norm: expected true or false"),
        ({"loss_fn": {"ratio_clip_min": -1}}, {}, "env.kl.algorithm: loss_fn.ratio_clip_min: "),
        ({"loss_fn": {"use_adaptive_entropy": True}}, {}, "env.kl.algorithm.loss_fn.use_adaptive_entropy: applies"),
        ({"loss_fn": {"constant_length": 9}}, {}, "env.kl.algorithm: loss_fn.constant_length: has no effect"),
        ({"type": "distillation"}, {}, "env.kl.algorithm: teacher.model_name: must be set"),
        ({}, {"policy.train_global_batch_size": 16}, "env.kl.algorithm: conflicts with policy.train_global_batch_size"),
        ({}, {"gdpo.weighting": {"rule": "saw"}}, "env.kl.algorithm: conflicts with gdpo.weighting"),
    ],
)
def test_invalid_algorithms_are_refused_with_their_key(algorithm, overrides, message):
    env = {"digit_sort": {}, "kl": {"plugin": "digit_sort", "algorithm": algorithm}}
    with pytest.raises(ConfigError) as error:
        validate(config_with(env, **overrides), weights=False)
    assert str(error.value).startswith(message)
