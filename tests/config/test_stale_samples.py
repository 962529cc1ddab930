"""Samples of older weights are never trained as if they were new, unless the config says so: what corrects them by
default, what is refused or noted, and what is measured."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from gdpo_nemo.algorithms import LOSSES, LossSettings, TokenFields
from gdpo_nemo.algorithms.policy_loss import policy_loss
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.planning.report import describe
from gdpo_nemo.training.gdpo import GDPO
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

TRAINER = "loss_fn.old_logprobs=trainer"
STALE = ["rollout.max_staleness=4", TRAINER]
AGAIN = [*STALE, "rollout.replay_buffer={groups: 4, max_age: 6}"]
NOTE = "loss_fn.off_policy.mode: none trains samples up to"
WITH_GRADIENT = sorted(set(LOSSES) - {"target_po"})
"""Losses whose gradient of a token is -A times a ratio, or -A; target_po's advantages are coefficients of its own."""


def loss_of(path: Path, *overrides: str) -> LossSettings:
    """The settings that the ranks get."""
    return GDPO(load_config(path, overrides), None, None, None).loss


def gradient(loss: LossSettings, sampler: list[float], trainer: list[float], advantages: list[float]) -> np.ndarray:
    """Of each token's log-prob, in the first update of a step: the policy is still the one that the step began with."""
    logprobs = torch.tensor(trainer, dtype=torch.float32, requires_grad=True)
    drawn = torch.tensor(sampler, dtype=torch.float32)
    fields = TokenFields(
        torch.tensor(advantages, dtype=torch.float32),
        torch.ones(len(trainer)),
        torch.zeros(len(trainer), dtype=torch.int64),
        1,
        old_logprobs=drawn if loss.old_logprobs == "sampler" else None,
        sampler_logprobs=drawn,
    )
    value, _ = policy_loss(logprobs, None, fields, loss)
    return torch.autograd.grad(value, logprobs)[0].numpy()


logprobs = st.floats(-6.0, -0.125, width=32)
tokens = st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=6)


@pytest.mark.parametrize("kind", WITH_GRADIENT)
def test_stale_tokens_weigh_by_the_truncated_ratio_to_the_sampler_by_default(minimal, kind):
    ahead = [] if kind == "reinforce" else [TRAINER]  # which has no ratio, so null is trainer, too
    losses = [
        loss_of(minimal, f"loss_fn.type={kind}", *overrides)
        for overrides in (STALE, AGAIN, ["rollout.max_staleness=2", *ahead])
    ]
    validate(load_config(minimal, [f"loss_fn.type={kind}", *AGAIN]))

    @settings(max_examples=40)
    @given(tokens, st.sampled_from([-1.5, 0.5]))
    def check(drawn, advantage):
        sampler, trainer = ([pair[side] for pair in drawn] for side in (0, 1))
        gaps = [new - old for old, new in drawn]
        of_tokens = [sum(gaps) / len(gaps)] * len(gaps) if kind == "gspo" else gaps
        expected = [-advantage * min(math.exp(gap), 2.0) for gap in of_tokens]
        for loss in losses:
            got = gradient(loss, sampler, trainer, [advantage] * len(gaps))
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)

    check()


@pytest.mark.parametrize("kind", sorted(LOSSES))
@pytest.mark.parametrize("overrides", [[], [TRAINER], ["rollout.max_staleness=2"]], ids=["null", "trainer", "stale"])
def test_samples_that_are_new_or_have_a_ratio_to_the_sampler_get_no_correction(minimal, kind, overrides):
    loss = loss_of(minimal, f"loss_fn.type={kind}", *overrides)
    corrected = kind == "reinforce" and "rollout.max_staleness=2" in overrides
    assert loss.off_policy.correction == ("truncate" if corrected else "none")


@pytest.mark.parametrize(
    "overrides, mode, level",
    [
        (["loss_fn.off_policy.mode=mask"], "mask", "token"),
        (["loss_fn.off_policy.level=sequence"], "truncate", "sequence"),
        (["loss_fn.type=gspo"], "truncate", "geometric"),
        (["loss_fn.type=gspo", "loss_fn.off_policy.level=sequence"], "truncate", "sequence"),
        (["loss_fn.type=target_po"], "none", "token"),
        (["loss_fn.off_policy.sequence_mask_threshold=0.1"], "truncate", "token"),
        (["loss_fn.off_policy.ratio_max=5.0"], "truncate", "token"),
    ],
)
def test_null_mode_is_replaced_by_the_mode_of_the_config(minimal, overrides, mode, level):
    loss = loss_of(minimal, *STALE, *overrides)
    assert (loss.off_policy.correction, loss.off_policy.level) == (mode, level)
    assert not any(NOTE in note for note in validate(load_config(minimal, [*STALE, *overrides])).notes)


@pytest.mark.parametrize("overrides, steps", [(STALE, 4), (AGAIN, 6)], ids=["ahead", "again"])
def test_stale_samples_without_a_correction_are_noted_with_their_age(minimal, overrides, steps):
    config = load_config(minimal, [*overrides, "loss_fn.off_policy.mode=none"])
    said = describe(resolve(config), validate(config).notes)
    assert f"{NOTE} {steps} steps old without a correction; use null or truncate" in said
    assert GDPO(config, None, None, None).loss.off_policy.correction == "none"


def test_a_custom_loss_is_left_to_correct_by_itself_and_noted(minimal):
    loss = "loss_fn.type=examples/sapo.py:sapo"
    config = load_config(minimal, [*STALE, loss])
    assert "use truncate, unless the custom loss includes a correction" in describe(
        resolve(config), validate(config).notes
    )
    assert GDPO(config, None, None, None).loss.off_policy.correction == "none"
    assert not any(NOTE in n for n in validate(load_config(minimal, ["rollout.max_staleness=4", loss])).notes)


def test_a_correction_by_a_ratio_that_the_loss_does_not_have_is_refused(minimal):
    with pytest.raises(ConfigError, match="^loss_fn.old_logprobs: sampler has no effect with type reinforce"):
        validate(load_config(minimal, ["loss_fn.type=reinforce", "loss_fn.old_logprobs=sampler"]))


def test_bounds_of_the_default_correction_have_no_effect_without_a_correction(minimal):
    validate(load_config(minimal, [*STALE, "loss_fn.off_policy.ratio_max=3.0"]))
    for overrides in ([], [*STALE, "loss_fn.off_policy.mode=none"]):
        with pytest.raises(ConfigError, match="loss_fn.off_policy.ratio_max: has no effect unless"):
            validate(load_config(minimal, [*overrides, "loss_fn.off_policy.ratio_max=3.0"]))


@pytest.mark.parametrize(
    "overrides, sampled", [([], False), (STALE, False), (["rollout.max_staleness=4"], True)], ids=["new", "old", "null"]
)
def test_gap_to_the_sampler_is_measured_for_every_source_of_old_log_probs(minimal, overrides, sampled):
    loss = loss_of(minimal, *overrides)
    new, drawn = torch.full((4,), -1.0), torch.full((4,), -1.5)
    old = drawn if sampled else None
    fields = TokenFields(
        torch.ones(4), torch.ones(4), torch.zeros(4, dtype=torch.int64), 1, old_logprobs=old, sampler_logprobs=drawn
    )
    _, found = policy_loss(new, None, fields, loss)
    assert float(found.sums["parity_abs"]) == 2.0 and float(found.maxima["parity_abs"]) == 0.5
