"""Gradients by component, with a policy of one logit per token that torch differentiates. Megatron's gradients are
tested in tests/megatron/test_token_advantages.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gdpo_nemo.algorithms import LossSettings, TokenFields
from gdpo_nemo.algorithms.policy_loss import objective_loss
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import GradientProducts, Group, Prompt, Trajectory, UpdateResult
from gdpo_nemo.rollouts.batches import Rollout
from gdpo_nemo.rollouts.credit import advantages_of, updates_of
from gdpo_nemo.training.checkpoints import RunState
from gdpo_nemo.training.component_gradients import FEWEST_UPDATES, ComponentGradients, score_coefficients
from gdpo_nemo.training.gdpo import GDPO
from gdpo_nemo.training.replay import Segment, _compare_gradients
from gdpo_nemo.utils.errors import RunError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
NO_MOMENTUM = "policy.megatron_cfg.optimizer.adam_beta1=0"
TOKENS = 5
RATE = 1e-3


class Logits:
    """A policy whose log-probs are those of a softmax over ``weights``, updated by gradient descent."""

    def __init__(self):
        self.weights = torch.linspace(-1, 1, TOKENS, dtype=torch.float64)
        self.calls = []
        self.gradients = []
        self.earlier = FEWEST_UPDATES

    def logprobs(self, sequences):
        return [self.weights.log_softmax(0)[s.completion_ids].numpy() for s in sequences]

    def gradient(self, sequences, loss):
        weights = self.weights.clone().requires_grad_()
        lengths = [len(s.completion_ids) for s in sequences]
        fields = TokenFields(
            torch.tensor(np.concatenate([s.token_advantages() for s in sequences])),
            torch.tensor(np.repeat([s.weight for s in sequences], lengths)),
            torch.tensor(np.repeat(np.arange(len(sequences)), lengths)),
            len(sequences),
            terms=None if sequences[0].terms is None else torch.tensor(np.concatenate([s.terms for s in sequences])),
        )
        probs = weights.log_softmax(0)
        tokens = torch.tensor(np.concatenate([s.completion_ids for s in sequences])).long()
        entropy = -(probs.exp() * probs).sum().expand(len(tokens))
        objective_loss(loss)((probs[tokens], entropy), fields, loss, None, {})[0].backward()
        return weights.grad

    def component_gradients(self, sequences, terms, first=True):
        assert len({s.old_logprobs is None for s in sequences}) == 1
        self.calls.append(len(sequences))
        self.gradients = ([] if first else self.gradients) + [self.gradient(sequences, term) for term in terms]

    def train(self, sequences, loss):
        gradient = self.gradient(sequences, loss)
        self.before = self.weights
        self.weights = self.weights - RATE * gradient
        return UpdateResult(0.0, float(gradient.norm()), RATE, False, {"tokens": 1.0, "entropy": 1.0}, {})

    def gradient_products(self):
        rows = torch.stack(self.gradients)
        moved = rows @ (self.weights - self.before)
        return GradientProducts((rows @ rows.T).numpy(), RATE * (rows @ rows.T).numpy(), moved.numpy(), self.earlier)


def config(*overrides):
    return load_config(
        DEMO, ["gdpo.rewards={low: 1, high: 2}", "gdpo.component_gradient_period=2", NO_MOMENTUM, *overrides]
    )


def rollout(seed: int = 0, groups: int = 6, size: int = 4) -> Rollout:
    """Samples of three tokens: ``low`` and ``high`` count the lowest and the highest token, ``same`` has no weight."""
    draw = np.random.default_rng(seed)
    made = []
    for number in range(groups):
        prompt = Prompt(str(number), np.zeros(2, np.int32), "", "digit_sort")
        tokens = draw.integers(0, TOKENS, (size, 3)).astype(np.int32)
        rewards = [dict(low=float((t == 0).sum()), high=float((t == 4).sum()), same=float(t[0] == 0)) for t in tokens]
        made.append(Group(prompt, [
            Trajectory(prompt, j, t, np.full(3, -1.6, np.float32), 0, "", "stop", r)
            for j, (t, r) in enumerate(zip(tokens, rewards))
        ]))  # fmt: skip
    return Rollout(made, next_position=0, version=0)


def diagnosed(*overrides, loss=None, groups=6, missing=(), earlier=FEWEST_UPDATES):
    """The metrics of an update, the policy after it, and the step. Samples ``missing`` have no component ``low``."""
    settings, batch, policy = config(*overrides), rollout(groups=groups), Logits()
    policy.earlier = earlier
    for i in missing:
        batch.trajectories[i].rewards["low"] = None
    loss = loss or LossSettings()
    advantages = advantages_of(batch.groups, settings)
    (update,) = updates_of(batch.trajectories, advantages.values.numpy(), settings)
    found = ComponentGradients(policy, settings, update, batch.groups, advantages, loss)
    return found.metrics(policy.train(update, loss)), policy, (settings, batch, update)


def test_parts_of_the_gradient_sum_to_it_and_their_changes_to_that_of_the_update():
    row, policy, _ = diagnosed(loss=LossSettings(entropy_bonus=0.05), groups=60)
    parts = ("low", "high", "regularisation")
    assert row["gradient/residual"] < 1e-6 and policy.calls == [120, 120]
    for name in ("low", "high", "same"):
        # With many groups, both halves have nearly the gradient of all samples.
        total = sum(row[f"gradient/{name}/change/{part}"] for part in parts)
        assert total == pytest.approx(row[f"gradient/{name}/predicted_on_batch"], rel=0.2, abs=1e-5)
        assert row[f"gradient/{name}/measured_on_batch"] == pytest.approx(
            row[f"gradient/{name}/predicted_on_batch"], rel=0.02
        )
    assert row["gradient/low/change/low"] > 0 > row["gradient/low/change/high"]
    assert -1 <= row["gradient/low/cosine/high"] < 0
    assert "gradient/same/norm" not in row, "a component without a weight has no part of the gradient"


@pytest.mark.parametrize("groups, missing", [(6, ()), (5, (1, 5, 6, 7, 13))])
def test_changes_are_estimated_on_the_half_of_the_groups_that_the_gradient_does_not_read(groups, missing):
    """The halves have equal sizes, or 11 and 3 samples with the component besides a lone one."""
    row, _, (settings, batch, update) = diagnosed(groups=groups, missing=missing)
    low = np.array([t.rewards["low"] for t in batch.trajectories], float)
    ids = np.repeat(np.arange(groups), 4)
    start = Logits()
    expected = 0.0
    for half in (0, 1):
        own = [s for s in update if ids[s.trajectory] % 2 == half]
        other = [s for s in update if ids[s.trajectory] % 2 != half]
        scores = score_coefficients(np.where(ids % 2 != half, low, np.nan)[:, None], ids)[0]
        scored = [replace(s, advantage=float(scores[s.trajectory, 0]), weight=1.0) for s in other]
        ascent = -start.gradient(scored, LossSettings(type="reinforce"))
        expected += float(ascent @ (-RATE * start.gradient(own, LossSettings())))
    changes = [row[f"gradient/low/change/{part}"] for part in ("low", "high")]
    assert sum(changes) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("earlier", [FEWEST_UPDATES, 40])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_changes_have_the_share_of_the_gradient_in_the_update_of_adam(earlier, beta):
    loss = LossSettings(entropy_bonus=0.05)
    plain, *_ = diagnosed("policy.megatron_cfg.optimizer.clip_grad=0", loss=loss)
    found, *_ = diagnosed(
        f"policy.megatron_cfg.optimizer.adam_beta1={beta}", "policy.megatron_cfg.optimizer.clip_grad=0.01",
        loss=loss, earlier=earlier,
    )  # fmt: skip
    momentum = 0.0
    for gradient in [0.0] * earlier + [1.0]:
        momentum = beta * momentum + (1 - beta) * gradient
    _, policy, (_, _, update) = diagnosed(loss=loss)
    clip = 0.01 / (float(Logits().gradient(update, loss).norm()) + 1e-6)
    assert clip < 1
    factor = clip * momentum / (1 - beta ** (earlier + 1))
    changes = [key for key in plain if "/change/" in key]
    assert len(changes) == 9 and all(found[key] == pytest.approx(factor * plain[key], rel=1e-6) for key in changes)
    unsettled, *_ = diagnosed(loss=loss, earlier=FEWEST_UPDATES - 1)
    assert not any("/change/" in key for key in unsettled)


def test_score_coefficients_have_the_mean_of_the_other_samples_as_baseline():
    """The last group has a single sample with the second component, which has no baseline."""
    rewards = np.array([[1, 2], [0, np.nan], [5, 1], [3, np.nan], [4, np.nan], [2, 7], [2, np.nan]], float)
    ids = np.array([0, 0, 0, 1, 1, 2, 2])
    expected = np.array([[1 - 2.5, 2 - 1], [0 - 3, 0], [5 - 0.5, 1 - 2], [3 - 4, 0], [4 - 3, 0], [0, 0], [0, 0]])
    found, counted = score_coefficients(rewards, ids)
    np.testing.assert_allclose(found, expected / [7, 2])
    np.testing.assert_array_equal(counted, np.isfinite(rewards) & ((ids != 2)[:, None] | [True, False]))


def test_gradients_are_computed_before_the_first_update_of_every_second_step():
    settings = config(
        "policy.train_global_batch_size=12",
        "gdpo.num_prompts_per_step=6",
        "gdpo.num_generations_per_prompt=4",
        "policy.skip_zero_advantage=true",
    )
    for version, diagnoses in ((0, True), (1, False), (2, True)):
        policy = Logits()
        algorithm = GDPO(settings, policy, None, None)
        batch = replace(rollout(), version=version)
        for trajectory in batch.groups[0].trajectories:
            trajectory.rewards |= {"low": 0.0, "high": 0.0}  # no signal, so that the update skips the group
        prepared = algorithm.prepare(batch)
        for update in algorithm.updates(prepared):
            assert policy.calls == ([8, 4] if diagnoses else [])
            algorithm.observe(policy.train(update, algorithm.loss))
        assert ("gradient/low/norm" in prepared.measured) == diagnoses


def test_an_estimator_whose_terms_do_not_sum_to_its_advantages_is_refused_by_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from gdpo_nemo.algorithms import Terms\n"
        "def halved(table, settings):\n"
        "    terms = table.columns.copy()\n"
        "    return Terms(terms, table.scored, terms.sum(axis=0) / 2)\n"
    )
    with pytest.raises(RunError, match="the terms of gdpo.estimator .*mine.py:halved differ from its advantages"):
        diagnosed(f"gdpo.estimator={tmp_path}/mine.py:halved", "gdpo.batch_norm=false")


def test_a_replay_compares_gradients_of_both_objectives_and_leaves_the_trainer_as_it_was(tmp_path):
    policy, log = Logits(), SimpleNamespace()
    policy.before, shared = policy.weights, np.empty((2, 2))

    def products():
        np.copyto(shared, Logits.gradient_products(policy).products)
        return SimpleNamespace(products=shared)

    policy.gradient_products = products
    # The period would replace the stored gradients, and a second step of the constraint would move its weight.
    recorded = config("gdpo.component_gradient_period=1")
    other = config("gdpo.estimator=grpo", "gdpo.constraints={high: {at_least: 0.9, lr: 0.5}}")
    made = GDPO(other, policy, None, log)
    stream = SimpleNamespace(get_batch=lambda step: rollout())
    trainer = SimpleNamespace(algorithm=made, policy=policy, stream=stream, state=SimpleNamespace(step=0))
    plan = SimpleNamespace(
        segments=[Segment(1, 1, other, 1, recorded)], out=tmp_path, state=RunState(algorithm={"weights": {"high": 3.0}})
    )
    found = _compare_gradients(trainer, plan)
    shared.fill(np.nan)  # as memory of a session that has ended
    rows = []
    for settings, weight in ((recorded, 2.0), (other, 3.0 + 0.5 * (0.9 - np.mean(rewards_of("high"))))):
        batch, settings = rollout(), config(f"gdpo.estimator={settings.gdpo.estimator}", f"gdpo.rewards.high={weight}")
        (update,) = updates_of(batch.trajectories, advantages_of(batch.groups, settings).values.numpy(), settings)
        rows.append(policy.gradient(update, LossSettings()))
    expected = torch.stack(rows) @ torch.stack(rows).T
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert abs(expected[0, 1]) < 0.999 * (expected[0, 0] * expected[1, 1]) ** 0.5
    assert made.state() == {"weights": {"high": 2.0}}


def rewards_of(name: str) -> list[float]:
    return [t.rewards[name] for t in rollout().trajectories]
