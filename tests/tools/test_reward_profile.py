"""The profile of rewards names planted defects, names none in sound rewards, and predicts effective weights."""

from dataclasses import replace

import numpy as np
import pytest

from gdpo_nemo.algorithms import compute_advantages
from gdpo_nemo.algorithms.rubrics import Criterion
from gdpo_nemo.data.records import Group, Prompt, Trajectory, trajectories_of
from gdpo_nemo.tools.profile.criteria import profile_criteria
from gdpo_nemo.tools.profile.reward_profile import error_deviation, profile_rewards

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


def profile(rewards, repeats=None, weights=None, lengths=None, repeated=None, **rule):
    weights = weights or dict.fromkeys(rewards, 1.0)
    return profile_rewards(
        rewards, IDS, weights=weights, lengths=lengths, repeats=repeats or {}, repeated=repeated, rule=rule
    )


@pytest.mark.slow
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


def z_scores(values):
    """float64 [samples]: deviation from the group's mean in sample standard deviations; 0 without a value."""
    scores = np.zeros(len(values))
    for group in range(GROUPS):
        rows = np.flatnonzero((group == IDS) & ~np.isnan(values))
        if len(rows) > 1 and np.ptp(values[rows]) > 0:
            scores[rows] = (values[rows] - values[rows].mean()) / (values[rows].std(ddof=1) + 1e-6)
    return scores


def test_correlations_conflicts_and_shares_of_a_profile_equal_plain_loops():
    rewards, rng = sound(3), np.random.default_rng(5)
    rewards["brief"][rng.random(GROUPS * SIZE) < 0.4] = np.nan
    lengths = np.round(200 - 50 * np.nan_to_num(rewards["brief"], nan=1.0) + rng.integers(0, 40, GROUPS * SIZE))
    found = profile(rewards, lengths=lengths)
    z = {name: z_scores(values) for name, values in rewards.items()}
    long = z_scores(lengths)
    for a in rewards:
        having = ~np.isnan(rewards[a])
        sizes = [np.sqrt(sum(one[i] ** 2 for i in np.flatnonzero(having))) for one in (z[a], long)]
        assert found.components[a].length == pytest.approx(z[a] @ long / np.prod(sizes), abs=1e-6)
        live = [np.ptp(rewards[a][having & (group == IDS)]) > 0 for group in range(GROUPS)]
        assert found.components[a].live == pytest.approx(
            (np.mean(live), np.sqrt(np.mean(live) * (1 - np.mean(live)) / GROUPS)), abs=1e-12
        )
        for b in set(rewards) - {a}:
            both = np.flatnonzero(having & ~np.isnan(rewards[b]))
            products = [z[a][i] * z[b][i] for i in both]
            sizes = [np.sqrt(sum(one[i] ** 2 for i in both)) for one in (z[a], z[b])]
            assert found.correlation[a][b] == pytest.approx(sum(products) / np.prod(sizes), abs=1e-6)
            share = sum(product < 0 for product in products) / sum(product != 0 for product in products)
            assert found.conflicts[a][b] == pytest.approx(share, abs=1e-6)


def test_errors_of_effective_weights_are_those_of_leaving_out_one_group_at_a_time():
    rewards = sound(4)
    found = profile(rewards, estimator="grpo").effective["config"]
    kept = [
        compute_advantages(
            {name: values[group != IDS] for name, values in rewards.items()}, IDS[group != IDS], estimator="grpo"
        ).diagnostics.effective_weight
        for group in range(GROUPS)
    ]
    jackknife = np.sqrt((GROUPS - 1) * np.var(kept, axis=0))
    assert [one.value for one in found.values()] == pytest.approx(np.mean(kept, axis=0), abs=1e-3)
    assert [one.error for one in found.values()] == pytest.approx(jackknife, rel=0.06)


def test_proposed_weights_give_each_component_the_share_that_its_weight_promises():
    """Redundant components divide one share, and noise and groups without a signal lower a share."""
    rewards, noise = sound(1), np.random.default_rng(8).normal(size=(2, GROUPS * SIZE))
    rewards |= {"against": -rewards["calls"], "noisy": rewards["brief"] + 0.2 * noise[0]}
    weights = {"correct": 1.5, "calls": 1.0, "against": -1.0, "noisy": 1.0}
    found = profile(rewards, {"noisy": rewards["brief"][None] + 0.2 * noise[1:]}, weights)
    assert {finding.kind for finding in found.findings} == {"redundant", "noisy"}
    assert 0.2 < found.components["noisy"].noise < 0.8
    target = {
        name: weight**2 * found.components[name].live.value * (1 - (found.components[name].noise or 0)) ** 2
        / (2 if name in ("calls", "against") else 1)
        for name, weight in weights.items()
    }  # fmt: skip
    proposed = {name: one.weight for name, one in found.proposals.items()}
    shares = profile(rewards, weights=proposed).effective["config"]
    for name, value in target.items():
        assert shares[name].value == pytest.approx(value / sum(target.values()), abs=0.01)
        assert np.sign(proposed[name]) == np.sign(weights[name])
    assert sum(map(abs, proposed.values())) == pytest.approx(4.5, abs=0.01)


def test_sign_of_a_weight_decides_between_redundant_and_opposed_components():
    rewards = sound(1)
    rewards |= {"again": 5 * rewards["calls"] + 2, "against": -rewards["calls"]}
    cases = [("again", 1.0, "redundant"), ("again", -1.0, "opposed"), ("against", 1.0, "opposed")]
    for other, sign, kind in [*cases, ("against", -1.0, "redundant")]:
        (finding,) = profile(rewards, weights={"calls": 1.0, other: sign}).findings
        assert (finding.kind, finding.components) == (kind, ("calls", other))
    # The correlation of the eight samples of a single group may be chance.
    rewards = {name: np.where(IDS == 0, values, 0.0) for name, values in rewards.items()}
    assert [finding.kind for finding in profile(rewards, weights={"calls": 1.0, "again": 1.0}).findings] == ["dead"] * 2


def test_best_value_of_a_penalty_is_its_smallest():
    rng = np.random.default_rng(0)
    rewards = {"correct": (rng.random(GROUPS * SIZE) < 0.5) + 0.0, "rude": (rng.random(GROUPS * SIZE) < 0.97) + 0.0}
    penalised = profile(rewards, weights={"correct": 1.0, "rude": -0.5})
    assert penalised.findings == [] and penalised.components["rude"].pass_rate == np.mean(rewards["rude"] == 0)
    assert penalised.components["rude"].saturation == pytest.approx(np.mean(rewards["rude"] == 0))
    polite = profile(rewards | {"rude": 1 - rewards["rude"]}, weights={"correct": 1.0, "rude": -0.5})
    assert [finding.kind for finding in polite.findings] == ["saturated"]
    for value, kind, rate in ((0.0, "saturated", 1.0), (1.0, "dead", 0.0)):
        constant = profile(rewards | {"rude": np.full(GROUPS * SIZE, value)}, weights={"correct": 1.0, "rude": -0.5})
        assert [finding.kind for finding in constant.findings] == [kind]
        assert constant.components["rude"].pass_rate == rate


def test_failed_repetitions_are_left_out_of_noise_and_changed_rewards():
    rewards = {"correct": sound(2)["correct"]}
    rewards["correct"][::7] = np.nan
    repeats = np.stack([rewards["correct"]] * 2)
    repeated = np.random.default_rng(1).random(repeats.shape) < 0.5
    flipped = np.where(repeated & (np.arange(GROUPS * SIZE) % 5 == 0), 1 - repeats, repeats)
    again = {"correct": np.where(repeated, flipped, np.nan)}
    compared = repeated & ~np.isnan(rewards["correct"])
    share = np.mean([np.mean(np.arange(GROUPS * SIZE)[row] % 5 == 0) for row in compared])
    found = profile(rewards, again, repeated=repeated).components["correct"]
    assert found.changed == pytest.approx(share) and found.noise > 0.1
    same = profile(rewards, {"correct": np.where(repeated, repeats, np.nan)}, repeated=repeated).components["correct"]
    assert same.changed == 0 and same.noise == pytest.approx(0, abs=1e-9)
    none = profile(rewards, {"correct": repeats}, repeated=np.zeros_like(repeated)).components["correct"]
    assert none.changed is None and none.noise is None
    # A component that is sometimes missing changes. A sample without it in both verifications does not count.
    missing = profile(rewards, {"correct": np.where(repeated, repeats, np.nan)}).components["correct"]
    counted = ~np.isnan(rewards["correct"])
    assert missing.changed == pytest.approx(np.mean([np.mean(~row[counted]) for row in repeated]))


def test_criteria_of_a_family_are_profiled_as_a_whole_and_few_are_listed():
    rng = np.random.default_rng(0)
    groups, again = [], []
    for row in range(6):
        rubric = {f"r/{k}": Criterion(f"{k} is so", -1.0 if k == 1 else 1.0, required=k == 0) for k in range(30)}
        rubric["r/noisy"] = Criterion("n" * 500, 1.0)
        prompt = Prompt(f"row {row}", np.arange(2, dtype=np.int32), "p", "toy")
        samples = []
        for index in range(8):
            sample = Trajectory(prompt, index, np.arange(3), np.zeros(3, np.float32), 0, "abc", "stop", criteria=rubric)
            sample.rewards = {f"r/{k}": float(k < 3 or (index + k) % 2) for k in range(30)} | {
                "r/noisy": index % 2 + 0.0
            }
            samples.append(sample)
        samples[0].rewards["r/29"] = None
        groups.append(Group(prompt, samples))
        again += [replace(s, rewards=s.rewards | {"r/noisy": float(rng.random() < 0.5)}) for s in samples]
    repeated = np.ones((1, 48), bool)
    repeated[0, 0] = False
    (found,) = profile_criteria(groups, [again], repeated).values()
    verdicts = [(name, value) for group in groups for t in group.trajectories for name, value in t.rewards.items()]
    known = [(name, value) for name, value in verdicts if value is not None]
    changed = [t.rewards["r/noisy"] != s.rewards["r/noisy"] for t, s in zip(trajectories_of(groups), again)]
    assert found.criteria == 6 * 31 and found.dead == pytest.approx(3 / 31)
    assert found.met == pytest.approx(np.mean([value == float(name != "r/1") for name, value in known]))
    assert found.missing == pytest.approx(1 - len(known) / len(verdicts))
    assert found.agreement == pytest.approx(1 - sum(changed[1:]) / (31 * 47 - 5))
    assert 0 < found.noise < 0.2
    assert len(found.worst) == 5 and {one.criterion for one in found.worst} == {f"noisy: {'n' * 80}..."}
    (same,) = profile_criteria(groups, [trajectories_of(groups)], repeated).values()
    assert same.agreement == 1 and same.noise == pytest.approx(0, abs=1e-9)
    assert [one.problem for one in same.worst] == ["always 1"] * 5
    (once,) = profile_criteria(groups, [], np.zeros((0, 48), bool)).values()
    assert once.agreement is None and once.noise is None and once.met == found.met


def test_the_deviation_of_errors_averages_the_variances_of_samples():
    values = np.array([[0.0, 1.0, np.nan, 5.0], [2.0, 1.0, 3.0, np.nan], [np.nan, 1.0, 5.0, np.nan]])
    # Variances 2 and 2 with one degree of freedom each, and 0 with two.
    assert error_deviation(values) == pytest.approx((4 / 4) ** 0.5)
    assert error_deviation(values[:1]) is None
    assert error_deviation(np.full((3, 2), 0.3)) == 0
