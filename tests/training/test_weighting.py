"""``gdpo.weighting`` in the steps of a run: state, gradients, custom rules, refusals, and the law of covariances."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_component_gradients import Logits, config as gradient_config, rollout
from test_trainer import DEMO, Recorder

from gdpo_nemo.algorithms.weighting_rules import RULES
from gdpo_nemo.commands import replay
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.validate import validate
from gdpo_nemo.rollouts.credit import advantages_of, reward_columns
from gdpo_nemo.rollouts.user_functions import check_own_functions
from gdpo_nemo.training.component_gradients import contributions, score_coefficients
from gdpo_nemo.training.gdpo import GDPO
from gdpo_nemo.utils.errors import ConfigError, NumericsFailed, UserCodeFailed
from gdpo_nemo.utils.state import from_json, to_json

EXAMPLE = "examples/custom_weighting.py"
OPTIONS = {
    "ctwa": "target: 0.5, lr: 0.5",
    "gradnorm": "alpha: 0.5, best: {low: 3, high: 3}",
    "tchebycheff": "temperature: 0.5",
}


def weighting(name: str) -> str:
    return f"gdpo.weighting={{rule: {name}, {OPTIONS.get(name, '')}}}"


def algorithm(*overrides: str) -> tuple[GDPO, Logits]:
    policy = Logits()
    settings = gradient_config("gdpo.component_gradient_period=2", *overrides)
    return GDPO(settings, policy, None, Notes()), policy


class Notes:
    """A log of notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)


def step(made: GDPO, policy: Logits, version: int) -> tuple[dict[str, float], np.ndarray]:
    """One step on the samples of its version: the weights in force and the advantages."""
    batch = replace(rollout(seed=version), version=version)
    prepared = made.prepare(batch)
    for update in made.updates(prepared):
        made.observe(policy.train(update, made.loss))
    return batch.weights, prepared.advantages.values.numpy()


@pytest.mark.parametrize("name", RULES)
def test_a_resumed_run_computes_the_same_weights_bit_for_bit(name):
    """The checkpoint is that of step 3, whose rule has observed advantages in each step and gradients in two."""
    overrides = [weighting(name), "gdpo.batch_norm=false"]
    unbroken, policy = algorithm(*overrides)
    weights = [step(unbroken, policy, version)[0] for version in range(3)]
    assert weights[0].keys() == {"low", "high"} and (name == "hypervolume" or weights[2] != {"low": 1.0, "high": 2.0})
    saved, logits = json.dumps(to_json(unbroken.state())), policy.weights
    expected = [step(unbroken, policy, version) for version in range(3, 6)]
    resumed, again = algorithm(*overrides)
    again.weights = logits
    resumed.load_state(from_json(json.loads(saved)))
    assert resumed.log.notes == []
    for (weight, advantages), version in zip(expected, range(3, 6)):
        found = step(resumed, again, version)
        assert found[0] == weight
        np.testing.assert_array_equal(found[1], advantages)
    assert to_json(resumed.state()) == to_json(unbroken.state())


def test_another_rule_on_recorded_samples_equals_a_run_with_that_rule_from_its_first_step():
    """A replay with another rule has the state of the run's checkpoint, which does not fit."""
    run, policy = algorithm(weighting("ctwa"))
    step(run, policy, 0)
    other, again = algorithm(weighting("pow3r"))
    other.load_state(from_json(to_json(run.state())))
    assert other.log.notes == ["gdpo.weighting: pow3r starts anew, because the checkpoint has the state of ctwa"]
    fresh, third = algorithm(weighting("pow3r"))
    for version in (1, 2):
        found, expected = step(other, again, version), step(fresh, third, version)
        assert found[0] == expected[0] != {"low": 1.0, "high": 2.0} or version == 1
        np.testing.assert_array_equal(found[1], expected[1])


def test_the_trainer_records_weights_and_factors_of_each_step():
    recorder = Recorder("gdpo.weighting={rule: ctwa, target: 2, lr: 0.25}", "gdpo.constraints={b: {at_least: 0.75}}")
    for _ in range(3):
        recorder.trainer.step()
    rows = [row for row, *_ in recorder.rows]
    assert rows[0]["reward/a/factor"] == rows[0]["reward/b/factor"] == 1.0
    assert rows[2]["reward/a/factor"] > rows[1]["reward/a/factor"] > 1.0
    for row, (_, batch, *_) in zip(rows, recorder.trained):
        assert {name: row[f"reward/{name}/weight"] for name in "ab"} == batch.weights
        assert row["reward/a/weight"] == row["reward/a/factor"]
    bases = [row["reward/b/weight"] / row["reward/b/factor"] for row in rows]
    assert bases == pytest.approx([1.025, 1.05, 1.075])


def test_gradients_of_a_rule_belong_to_terms_of_weight_one():
    """Weights and the batch norm scale the measured gradients; both are known, so a fixed policy gives the products of
    its components' gradients alone."""
    made, policy = algorithm(weighting("mgda"), "gdpo.batch_norm=false", "gdpo.rewards.high=-4")
    seen = []
    made.weights.rule.observe_gradients = lambda gradients: seen.append(gradients)
    batch = rollout()
    prepared = made.prepare(replace(batch, version=0))
    for update in made.updates(prepared):
        made.observe(policy.train(update, made.loss))
    alone = []
    for overrides in ("gdpo.rewards={low: 1, high: 0}", "gdpo.rewards={low: 0, high: -1}"):
        single, start = algorithm(overrides, "gdpo.batch_norm=false")
        (update,) = single.prepare(replace(batch, version=1)).updates
        alone.append(start.gradient(update, single.loss))
    expected = torch.stack(alone) @ torch.stack(alone).T
    (found,) = seen
    assert found.names == ("low", "high")
    np.testing.assert_allclose(found.products, expected.numpy(), rtol=1e-5)


def test_the_change_of_a_reward_by_the_update_is_its_covariance_with_the_advantage():
    """The law of CTWA (2602.06869), for a softmax whose natural gradient is the advantage: dE[r] = E_x Cov(r, A). The
    coefficients and terms are those of the measured gradients (``gradient/NAME/change/NAME``), whose gradient of the
    log-prob of sample i with respect to the logits of its group is e_i - p. With a uniform policy over the samples of
    a group, the natural gradient is the gradient times the number of samples."""
    settings = gradient_config("gdpo.batch_norm=false")
    batch = rollout(seed=4)
    advantages = advantages_of(batch.groups, settings)
    columns = reward_columns(batch.trajectories, settings)
    rewards = np.column_stack([columns[name] for name in advantages.names])
    groups, size = np.repeat(np.arange(6), 4), 4
    coefficients, _ = score_coefficients(rewards, groups)
    weighted = [advantages.names.index(name) for name in ("low", "high")]
    terms = np.concatenate(contributions(advantages, batch.trajectories, weighted))[:, :2]
    scores = np.eye(24) - (groups[:, None] == groups) / size
    by_terms = (scores @ coefficients).T @ (scores @ terms)
    made, _ = algorithm("gdpo.weighting={rule: ctwa, target: 1, ema: 1}", "gdpo.batch_norm=false")
    made.prepare(replace(batch, version=0))
    averages = made.functions.weighting.state()["averages"]
    for k, name in enumerate(advantages.names):
        if name in averages:
            # The coefficients have the mean of the group's other samples as baseline, a factor of 4 / 3.
            assert averages[name] == pytest.approx(by_terms[k].sum() * (size - 1) / size, abs=1e-12)
    assert averages.keys() == {"low", "high"}


CUSTOM = """
import numpy as np

def halves(batch, name="low"):
    return {n: 0.5 if n == name else 1.0 for n in batch.names}

class Counting:
    def __init__(self): self.sums = {}
    def __call__(self, batch, rate=1.0):
        return {n: 1 + rate * abs(self.sums.get(n, 0.0)) for n in batch.names}
    def observe(self, trained):
        for n, term in trained.terms.items():
            self.sums[n] = self.sums.get(n, 0.0) + float(np.abs(term).sum()) + float(trained.advantages[0])
    def state(self): return {"sums": self.sums}
    def load_state(self, state): self.sums = dict(state["sums"])

class Forgetful(Counting):
    def state(self): return {}
    def load_state(self, state): pass

def negative(batch):
    return {n: -1.0 for n in batch.names}

def later(batch):
    return {n: 1.0 for n in batch.names} if batch.step < 3 else {}
"""


@pytest.fixture
def custom(tmp_path):
    (tmp_path / "mine.py").write_text(CUSTOM)
    return lambda name, options="": f"gdpo.weighting={{rule: '{tmp_path}/mine.py:{name}', {options}}}"


def test_a_custom_rule_multiplies_the_weights_and_keeps_its_state(custom):
    made, policy = algorithm(custom("halves", "name: high"))
    assert step(made, policy, 0)[0] == {"low": 1.0, "high": 1.0} and "weighting" not in made.state()
    assert check_own_functions(made.config) == []
    for name in ("shortfall, best: 2.0", "Slow, newest: 0.5"):
        assert check_own_functions(gradient_config(f"gdpo.weighting={{rule: {EXAMPLE}:{name}}}")) == []
    unbroken, policy = algorithm(custom("Counting", "rate: 0.1"))
    assert check_own_functions(unbroken.config) == []
    weights = [step(unbroken, policy, version)[0] for version in range(3)]
    saved = json.dumps(to_json(unbroken.state()))
    expected = step(unbroken, policy, 3)[0]
    assert weights[0] == {"low": 1.0, "high": 2.0} and len({str(w) for w in (*weights, expected)}) == 4
    resumed, again = algorithm(custom("Counting", "rate: 0.1"))
    resumed.load_state(from_json(json.loads(saved)))
    assert step(resumed, again, 3)[0] == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "negative",
            r"gdpo.weighting: .*mine.py:negative, step 1: returned -1.0 for component 'low'; a factor must be",
        ),
        ("Forgetful", r"gdpo.weighting: .*Forgetful returns other values after its state was restored"),
        ("missing", r"gdpo.weighting: .*mine.py has no 'missing'"),
    ],
)
def test_a_dry_run_refuses_a_custom_rule(custom, name, message):
    with pytest.raises(ConfigError, match=message):
        check_own_functions(gradient_config(custom(name)))


def test_a_custom_rule_that_fails_later_ends_the_run_with_its_step(custom):
    made, policy = algorithm(custom("later"))
    for version in range(2):
        step(made, policy, version)
    with pytest.raises(UserCodeFailed, match=r"mine.py:later, step 3: returned factors of other components \(none\)"):
        step(made, policy, 2)


def test_a_built_in_rule_that_is_not_defined_for_the_rewards_ends_the_run():
    made, policy = algorithm(weighting("saw"), "gdpo.shaping=[{component: low, linear: {from: [0, 1], to: [0, -1]}}]")
    with pytest.raises(NumericsFailed, match="gdpo.weighting: saw, step 1: component 'low' has the reward -"):
        step(made, policy, 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gdpo.weighting={rule: swa}"], "gdpo.weighting.rule: unknown rule 'swa'; did you mean 'saw'?"),
        (["gdpo.weighting={ema: 1}"], "gdpo.weighting.rule: must be the name of a rule or an import path; known: ctwa"),
        (["gdpo.weighting={rule: saw, ema: 1}"], "gdpo.weighting.ema: not an option of saw; known: lower"),
        (["gdpo.weighting={rule: saw, lower: {lenght: 0}}"], "gdpo.weighting.lower.lenght: not in gdpo.rewards; did"),
        (["gdpo.weighting={rule: saw, lower: -3}"], "gdpo.weighting: saw: lower must be a mapping of component to"),
        (["gdpo.weighting={rule: saw, lower: {length: .nan}}"], "lower must be a finite number for length, got nan"),
        (["gdpo.weighting={rule: ctwa}"], "gdpo.weighting: ctwa: target must be set to a positive covariance, got 0.0"),
        (["gdpo.weighting={rule: ctwa, target: 1, ema: 2}"], "ctwa: ema must be a number above 0 and at most 1, got 2"),
        (["gdpo.weighting={rule: pow3r, low: 2}"], "gdpo.weighting: pow3r: low must be a number above 0 and at most 1"),
        (["gdpo.weighting={rule: tchebycheff, temperature: -1}"], "temperature must be a number at least 0, got -1"),
        (["gdpo.weighting={rule: mgda}"], "gdpo.weighting: mgda requires gdpo.component_gradient_period, such as 10"),
        (
            ["gdpo.weighting={rule: gradnorm, alpha: 1}", "gdpo.component_gradient_period=1"],
            "gdpo.weighting: gradnorm: alpha requires best",
        ),
        (
            ["gdpo.weighting={rule: hypervolume}"],
            "gdpo.weighting: hypervolume multiplies all weights by one factor, which gdpo.estimator gdpo cancels",
        ),
        (
            ["gdpo.weighting={rule: hypervolume}", "gdpo.rewards={a: 1, b: 1, c: 1, d: 1, e: 1, f: 1}"],
            "gdpo.weighting: hypervolume supports at most 5 components in gdpo.rewards",
        ),
        (["gdpo.weighting={rule: hypervolume}", "gdpo.estimator=grpo"], "which gdpo.estimator grpo cancels"),
        (
            ["gdpo.weighting={rule: saw}", "gdpo.preset=nemo_rl"],
            "gdpo.preset: this variant of gdpo requires at least two components with a weight",
        ),
        (
            ["gdpo.weighting={rule: saw}", "gdpo.dynamic_sampling.enabled=true"],
            "gdpo.dynamic_sampling.enabled: conflicts with gdpo.weighting",
        ),
        (["gdpo.weighting={rule: saw}", "gdpo.rewards={length: 1}"], "weighting: requires at least two components"),
        (["gdpo.weighting={rule: nowhere.py:rule}"], "gdpo.weighting: nowhere.py not found"),
    ],
)  # fmt: skip
def test_an_invalid_rule_is_refused_with_its_key(overrides, message):
    with pytest.raises(ConfigError) as error:
        validate(load_config(DEMO, overrides))
    assert message in str(error.value)


def test_another_rule_replaces_the_options_of_the_earlier_one():
    before = "gdpo.weighting={rule: ctwa, target: 0.1}"
    assert load_config(DEMO, [before, "gdpo.weighting={rule: saw}"]).gdpo.weighting == {"rule": "saw"}
    assert load_config(DEMO, [before, "gdpo.weighting={}"]).gdpo.weighting == {}
    assert load_config(DEMO, [before, "gdpo.weighting.lr=1"]).gdpo.weighting == {"rule": "ctwa", "target": 0.1, "lr": 1}


def test_a_replay_uses_every_change_of_a_repeated_option():
    parser = argparse.ArgumentParser()
    replay.add(parser.add_subparsers())
    found = parser.parse_args(["replay", "run", "--instead", "a=1", "b=2", "--instead", "c=3"])
    assert found.instead == ["a=1", "b=2", "c=3"]


def test_ppo_refuses_a_rule_that_reads_the_advantages_of_an_estimator():
    ppo = DEMO.with_name("ppo_tiny_cpu.yaml")
    with pytest.raises(ConfigError, match="gdpo.weighting: ctwa requires the advantages of an estimator"):
        validate(load_config(ppo, ["gdpo.weighting={rule: ctwa, target: 1}"]))
    validate(load_config(ppo, ["gdpo.weighting={rule: pow3r}"]))


def test_hypervolume_is_accepted_if_the_scale_of_the_weights_has_an_effect():
    for overrides in (["gdpo.batch_norm=false"], ["gdpo.estimator=dr_grpo"], ["gdpo.estimator=rloo"]):
        validate(load_config(DEMO, ["gdpo.weighting={rule: hypervolume}", *overrides]))
