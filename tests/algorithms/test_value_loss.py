"""The value loss is PPO's, value and gradient, beside a policy loss that it leaves as it was."""

from __future__ import annotations

import math
from dataclasses import fields as fields_of

import pytest
import torch
from hypothesis import given, strategies as st

from gdpo_nemo.algorithms.loss_selection import why_all_sequences
from gdpo_nemo.algorithms.loss_settings import LossSettings, OffPolicySettings
from gdpo_nemo.algorithms.losses import TokenFields
from gdpo_nemo.algorithms.policy_loss import (
    OBJECTIVES,
    actor_critic_loss,
    objective_loss,
    policy_loss,
    value_losses,
)
from gdpo_nemo.algorithms.ppo import ActorCriticSettings, PPOSettings

CLIPS = st.sampled_from([0.05, 0.2, 1.0])


def tokens(seed: int, count: int = 40):
    draw = torch.Generator().manual_seed(seed)
    made = [torch.randn(count, generator=draw) for _ in range(6)]
    logprobs, values, old, returns, advantages = (part.clone() for part in made[:5])
    fields = TokenFields(
        advantages=advantages,
        weights=made[5].abs() / count,
        sequence_ids=torch.arange(count) % 5,
        num_sequences=5,
        old_logprobs=logprobs + 0.3 * torch.randn(count, generator=draw),
        old_values=old,
        returns=returns,
    )
    return logprobs.requires_grad_(), values.requires_grad_(), fields


def one_by_one(value: float, old: float, target: float, clip: float) -> tuple[float, float]:
    """The loss of a token and its derivative by the value, in Python's own numbers."""
    near = min(max(value, old - clip), old + clip)
    plain, clipped = (value - target) ** 2, (near - target) ** 2
    if plain >= clipped:
        return 0.5 * plain, value - target
    return 0.5 * clipped, near - target if near == value else 0.0


@given(st.integers(0, 999), CLIPS)
def test_the_loss_of_a_value_is_the_larger_of_both_squares(seed, clip):
    _, values, fields = tokens(seed)
    each, clipped = value_losses(values, fields.old_values, fields.returns, clip)
    (gradient,) = torch.autograd.grad(each.sum(), values)
    expected = [
        one_by_one(*numbers, clip) for numbers in torch.stack((values, fields.old_values, fields.returns), 1).tolist()
    ]
    torch.testing.assert_close(each, torch.tensor([loss for loss, _ in expected]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([slope for _, slope in expected]), rtol=1e-5, atol=1e-6)
    assert (gradient[clipped] == 0).all()


def test_without_a_clip_it_is_half_the_square():
    _, values, fields = tokens(3)
    each, clipped = value_losses(values, fields.old_values, fields.returns, None)
    torch.testing.assert_close(each, 0.5 * (values - fields.returns) ** 2)
    assert not clipped.any()


@given(st.integers(0, 999), CLIPS)
def test_the_whole_loss_is_trls_mean_over_the_tokens(seed, clip):
    """TRL: masked_mean of the clipped policy loss + vf_coef * 0.5 * masked_mean of the larger square, on a padded
    batch (trl/experimental/ppo before 1.13, written down anew)."""
    logprobs, values, fields = tokens(seed)
    mask = torch.arange(40) % 3 > 0
    fields = TokenFields(**{**vars(fields), "weights": mask / mask.sum()}).select(mask)
    settings = ActorCriticSettings(vf_coef=0.3, cliprange_value=clip, ratio_clip_min=0.2, ratio_clip_max=0.2)
    ours, metrics = actor_critic_loss(logprobs[mask], None, values[mask], fields, settings)
    found = torch.autograd.grad(ours, (logprobs, values))

    near = torch.clamp(values[mask], fields.old_values - clip, fields.old_values + clip)
    square = torch.max((values[mask] - fields.returns) ** 2, (near - fields.returns) ** 2)
    ratio = (logprobs[mask] - fields.old_logprobs).exp()
    policy = torch.max(-fields.advantages * ratio, -fields.advantages * ratio.clamp(0.8, 1.2))
    theirs = policy.mean() + 0.3 * 0.5 * square.mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, torch.autograd.grad(theirs, (logprobs, values)), rtol=1e-5, atol=1e-6)
    count = float(mask.sum())
    assert metrics.sums["value_loss"] / count == pytest.approx(0.5 * square.mean().item(), rel=1e-5)
    assert metrics.sums["value"] / count == pytest.approx(values[mask].mean().item(), rel=1e-5, abs=1e-6)
    outside = ((near - fields.returns) ** 2 > (values[mask] - fields.returns) ** 2).sum()
    assert metrics.sums["value_clipped"] == outside


def test_the_policys_loss_and_gradient_are_those_without_a_value_head_bit_for_bit():
    logprobs, values, fields = tokens(5)
    plain = LossSettings(entropy_bonus=0.0, off_policy=OffPolicySettings())
    expected, known = policy_loss(logprobs, None, fields, plain, all_trained=True)
    settings = ActorCriticSettings.of(plain, PPOSettings(vf_coef=0.0))
    found, metrics = actor_critic_loss(logprobs, None, values, fields, settings)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(loss, logprobs)[0] for loss in (found, expected)))
    assert known.sums.items() <= metrics.sums.items() and known.maxima == metrics.maxima


def test_the_loss_adds_up_over_any_cut_of_the_tokens():
    logprobs, values, fields = tokens(7)
    settings = ActorCriticSettings()
    whole, _ = actor_critic_loss(logprobs, None, values, fields, settings)
    first = torch.arange(40) < 13
    parts = [
        actor_critic_loss(logprobs[keep], None, values[keep], fields.select(keep), settings)[0]
        for keep in (first, ~first)
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)


def test_missing_values_are_named():
    logprobs, values, fields = tokens(1)
    for name in ("old_values", "returns"):
        with pytest.raises(ValueError, match=f"requires {name}"):
            actor_critic_loss(
                logprobs, None, values, TokenFields(**{**vars(fields), name: None}), ActorCriticSettings()
            )


def test_the_settings_of_the_loss_are_carried_over():
    loss = LossSettings(type="gspo", ratio_clip_min=0.1, entropy_bonus=0.5, off_policy=OffPolicySettings(mode="mask"))
    found = ActorCriticSettings.of(loss, PPOSettings(vf_coef=0.4, cliprange_value=None))
    assert {f.name: getattr(found, f.name) for f in fields_of(LossSettings)} == vars(loss)
    assert found.vf_coef == 0.4 and found.cliprange_value is None
    assert why_all_sequences(found) and not why_all_sequences(LossSettings())


@pytest.mark.parametrize(
    "name, value",
    [("gamma", 2.0), ("gamma", -0.1), ("gamma", math.nan), ("lam", 1.01), ("lam", math.nan), ("vf_coef", -1.0),
     ("vf_coef", math.inf), ("vf_coef", math.nan), ("cliprange_value", 0.0), ("cliprange_value", math.inf)],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}: must be"):
        PPOSettings(**{name: value}).check()
    PPOSettings().check()
    PPOSettings(gamma=0.0, lam=0.0, vf_coef=0.0, cliprange_value=None).check()


def test_loss_is_chosen_by_the_type_of_the_settings_and_its_bases():
    class Custom(ActorCriticSettings):
        pass

    assert [objective_loss(kind()) for kind in (LossSettings, ActorCriticSettings)] == [
        OBJECTIVES[LossSettings],
        OBJECTIVES[ActorCriticSettings],
    ]
    assert objective_loss(Custom()) is OBJECTIVES[ActorCriticSettings]
    with pytest.raises(TypeError, match="no loss function for settings of type dict"):
        objective_loss({})
