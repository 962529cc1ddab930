"""The profile of rewards names planted defects, names none in sound rewards, and predicts effective weights."""

import numpy as np
import pytest

from gdpo_nemo.algorithms import compute_advantages
from gdpo_nemo.algorithms.reward_profile import profile_rewards

GROUPS, SIZE = 64, 8
IDS = np.repeat(np.arange(GROUPS), SIZE)


def sound(seed):
    """Two pass-or-fail rewards of different difficulty, a graded one and one on another scale, loosely related."""
    rng = np.random.default_rng(seed)
    ability = rng.normal(size=(GROUPS, 1)) + 0.4 * rng.normal(size=(GROUPS, SIZE))
    drawn = {
        name: (ability * mix + rng.normal(size=(GROUPS, SIZE))).ravel() for name, mix in zip("abcd", (1, 0.5, -0.3, 0))
    }
    return {
        "correct": (drawn["a"] > 0.7).astype(float),
        "format": (drawn["b"] > -0.9).astype(float),
        "brief": np.clip(0.5 + 0.3 * drawn["c"], 0, 1),
        "calls": np.clip(np.round(drawn["d"]), -3, 3),
    }


def planted(seed):
    """Sound rewards, and one with each defect. ``noisy`` is drawn anew in each verification."""
    rng = np.random.default_rng([seed, 1])
    rewards = sound(seed)
    noise = rng.random((3, GROUPS * SIZE))
    rewards["noisy"] = rewards["correct"] + noise[0]
    rewards["dead"] = np.zeros(GROUPS * SIZE)
    rewards["easy"] = (rng.random(GROUPS * SIZE) > 0.02).astype(float)
    rewards["same"] = 10 * rewards["calls"] + rng.normal(size=GROUPS * SIZE)
    rewards["against"] = -rewards["brief"] + 0.1 * rng.normal(size=GROUPS * SIZE)
    return rewards, {name: np.stack([values] * 2) for name, values in rewards.items()} | {
        "noisy": rewards["correct"] + noise[1:]
    }


def profile(rewards, repeats=None, weights=None, **rule):
    return profile_rewards(
        rewards, IDS, weights=weights or dict.fromkeys(rewards, 1.0), repeats=repeats or {}, rule=rule
    )


@pytest.mark.parametrize("seed", range(10))
def test_profile_names_planted_defects_and_none_in_sound_rewards(seed):
    rewards = sound(seed)
    repeats = {name: np.stack([values] * 2) for name, values in rewards.items()}
    found = profile(rewards, repeats)
    assert found.findings == []
    assert {name: one.weight for name, one in found.proposals.items()} == dict.fromkeys(rewards, 1.0)
    found = profile(*planted(seed))
    assert {(finding.kind, finding.components) for finding in found.findings} == {
        ("noisy", ("noisy",)),
        ("dead", ("dead",)),
        ("saturated", ("easy",)),
        ("redundant", ("calls", "same")),
        ("opposed", ("brief", "against")),
    }


def test_effective_weights_of_a_sample_contain_those_of_the_population():
    """At least 17 of 20 profiles are within two standard errors for each component. The scales differ."""
    truth = [compute_advantages(sound(seed), IDS, estimator="grpo").diagnostics.effective_weight for seed in range(20)]
    mean = np.mean(truth, axis=0)
    profiles = [profile(sound(seed), estimator="grpo").effective["config"] for seed in range(20)]
    for k, name in enumerate(sound(0)):
        assert sum(abs(one[name].value - mean[k]) <= 2 * one[name].error for one in profiles) >= 17
