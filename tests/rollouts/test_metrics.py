"""What a step says of its samples: how stale they are, how long, how they ended."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from gdpo_nemo.data.records import NOT_CONTIGUOUS, Group, Outcome, Prompt, Trajectory, UpdateResult, Verdict
from gdpo_nemo.data.replies import ReplyParser
from gdpo_nemo.generation.requests import Completion
from gdpo_nemo.observe.metric_registry import about_of, unknown_metrics
from gdpo_nemo.rollouts.batches import apply_verdicts, decode, sample_seed, sampled
from gdpo_nemo.rollouts.credit import advantages_of
from gdpo_nemo.rollouts.environment_metrics import environment_metrics
from gdpo_nemo.rollouts.metrics import check_failures, rollout_metrics, update_metrics, validation_metrics
from gdpo_nemo.utils.errors import RunError


def sample(version: int = 0, tokens: int = 3, environment: str = "toy", **changes) -> Trajectory:
    prompt = Prompt("p", np.arange(2, dtype=np.int32), "p", environment)
    values = dict(
        completion_ids=np.arange(tokens, dtype=np.int32), logprobs=np.zeros(tokens, np.float32), finish_reason="stop"
    )
    return Trajectory(prompt, 0, policy_version=version, text="", **{**values, **changes})


@pytest.mark.parametrize("versions, mean, most", [((4, 4, 4), 0, 0), ((3, 3, 3), 1, 1), ((4, 3, 1, 4), 1, 3)])
def test_staleness_is_the_age_of_the_weights_that_sampled(versions, mean, most):
    row = rollout_metrics([sample(version) for version in versions], version=4)
    assert (row["staleness/mean"], row["staleness/max"]) == (mean, most)


def test_duplicates_are_samples_of_one_prompt_with_the_same_tokens():
    other = Prompt("q", np.arange(2, dtype=np.int32), "q", "toy")
    samples = [sample(), sample(), sample(tokens=2), sample(tokens=4)]
    assert rollout_metrics(samples, version=0)["rollout/duplicates"] == 0.5
    assert rollout_metrics([sample(), replace(sample(), prompt=other)], version=0)["rollout/duplicates"] == 0


def test_trajectory_has_version_log_probs_and_end_of_its_completion():
    ends = ["stop", "length", "stop", "length"]
    completions = [
        Completion(np.full(2, i, np.int32), np.full(2, -i, np.float32), ends[i], ((7, 1), (8, 1))) for i in range(4)
    ]
    tokenizer = SimpleNamespace(
        all_special_ids=(),
        all_special_tokens=(),
        batch_decode=lambda ids, skip_special_tokens: [f"{skip_special_tokens} {i[0]}" for i in ids],
    )
    tokenizer.apply_chat_template = lambda *args, **kwargs: ""
    found = [sampled(sample().prompt, j, completion) for j, completion in enumerate(completions)]
    decode(found, ReplyParser(tokenizer))
    assert [t.spans for t in found] == [((7, 1), (8, 1))] * 4
    assert [t.policy_version for t in found] == [7] * 4
    assert [t.finish_reason for t in found] == ends
    assert [t.logprobs.tolist() for t in found] == [[-i, -i] for i in range(4)]
    assert [t.text for t in found] == [f"True {i}" for i in range(4)]


def test_lengths_and_outcomes_are_counted_as_shares_of_the_samples():
    mask = np.array([True, False, True])
    samples = [
        sample(outcome=Outcome.TRUNCATED, tokens=5),
        sample(outcome=Outcome.ENV_FAILED, environment="other"),
        sample(outcome=Outcome.ABORTED, loss_mask=mask, turns=2, detail=f"{NOT_CONTIGUOUS}: turn 2"),
        sample(loss_mask=mask, turns=4),
    ]
    row = rollout_metrics(samples, version=0)
    assert (row["rollout/tokens"], row["rollout/mean_length"]) == (5 + 3 + 2 + 2, 3)
    assert {row[f"rollout/{key}"] for key in ("truncated", "env_failed", "aborted", "not_contiguous")} == {0.25}
    assert (row["rollout/env_failed/toy"], row["rollout/env_failed/other"]) == (0, 1)
    assert row["rollout/turns"] == (1 + 1 + 2 + 4) / 4
    assert "rollout/turns" not in rollout_metrics(samples[:2], version=0)


def test_a_run_stops_above_its_share_of_failures_and_not_at_it():
    samples = [sample(outcome=Outcome.ENV_FAILED, detail="it hung"), sample(), sample(), sample()]
    check_failures(samples, 0.25)
    with pytest.raises(RunError, match=r"1 of 4 samples failed in the environment 'toy' .* is 0.24\): it hung"):
        check_failures(samples, 0.24)


def test_validation_is_the_mean_over_the_samples_that_have_a_component():
    samples = [
        sample(rewards={"a": 1.0, "b": None}),
        sample(rewards={"a": 0.0, "b": 3.0}, tokens=5),
        sample(outcome=Outcome.ENV_FAILED),
    ]
    row = validation_metrics([Group(samples[0].prompt, samples)])
    assert row == {
        "validation/a": 0.5,
        "validation/b": 3.0,
        "validation/mean_length": pytest.approx(11 / 3),
        "validation/env_failed": pytest.approx(1 / 3),
    }


def test_validation_has_the_unbiased_pass_at_k_of_every_component_on_request():
    groups = [
        Group(sample().prompt, [sample(rewards={"a": value, "b": value}) for value in values])
        for values in ([1.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    ]
    row = validation_metrics(groups, [1, 2, 3])
    for name in ("a", "b"):
        assert row[f"validation/{name}/pass_at/1"] == pytest.approx(row[f"validation/{name}"])
        assert row[f"validation/{name}/pass_at/2"] == pytest.approx(2 / 3 / 2)
        assert row[f"validation/{name}/pass_at/3"] == pytest.approx(1 / 2)
    penalty = validation_metrics(groups, [2], {"a": -1})
    assert (
        penalty["validation/a/pass_at/2"] == 0.0 and penalty["validation/b/pass_at/2"] == row["validation/b/pass_at/2"]
    )
    assert unknown_metrics([row]) == []
    assert "unbiased" in about_of("validation/a/pass_at/2")


def test_validation_is_also_measured_by_environment_if_the_prompts_have_several():
    rewards = {"math": [{"a": 1.0, "b": 2.0}, {"a": 0.0, "b": 4.0}], "code": [{"a": 0.5}, {"a": 0.5}]}
    both = []
    for name, found in rewards.items():
        made = [sample(rewards=values, environment=name) for values in found]
        both.append(Group(made[0].prompt, made))
    row = validation_metrics(both, [2], {"b": -1})
    alone = {name: validation_metrics([group], [2], {"b": -1}) for name, group in zip(("math", "code"), both)}
    expected = {}
    for name, found in alone.items():
        for key, value in found.items():
            if key not in ("validation/mean_length", "validation/env_failed"):
                expected[key.replace("validation/", f"validation/{name}/")] = value
    together = [key for key in row if key not in expected]
    assert len(expected) == 6 and {key: row[key] for key in expected} == expected
    assert together == [f"validation/{key}" for key in ("a", "a/pass_at/2", "b", "b/pass_at/2", "mean_length",
                                                        "env_failed")]  # fmt: skip
    assert unknown_metrics([row]) == [] and "component math/a " in about_of("validation/math/a")


@pytest.mark.parametrize("seed", range(3))
def test_rewards_by_environment_are_those_of_a_batch_of_this_environment(config, seed):
    """Also after shaping, with missing rewards, and in groups of the same prompt."""
    rng = np.random.default_rng(seed)
    config.gdpo.rewards = {"correctness": 1.0, "format": 0.5}
    config.gdpo.shaping = [{"component": "format", "condition": {"on": "correctness", "ge": 0.5}}]
    config.gdpo.group_by = ["row", "prompt", "row"][seed]
    config.env = {"math": {}, "code": {}, "unused": {}}
    config.data.train.environment = None
    groups = []
    for index in range(12):
        prompt = Prompt(str(index), np.array([index // 3], np.int32), "", ("math", "code")[index % 3 == 0])
        samples = [sample(rewards={"correctness": float(rng.integers(2)), "format": rng.choice([None, 0.0, 1.0])})
                   for _ in range(4)]  # fmt: skip
        if rng.random() < 0.5:
            samples[0].outcome = Outcome.ENV_FAILED
        groups.append(Group(prompt, [replace(made, prompt=prompt) for made in samples], index))
    row = environment_metrics(groups, config)
    assert unknown_metrics([row]) == []
    assert [row.pop(f"rollout/groups/{name}") for name in config.env] == [8, 4, 0]
    expected = {}
    for name in ("math", "code"):
        alone = advantages_of([group for group in groups if group.prompt.environment == name], config).diagnostics
        for key, value in alone.metrics().items():
            if key.startswith("reward/") and key.endswith(("/mean", "/std", "/missing", "/dead_groups")):
                expected[key.replace("reward/", f"reward/{name}/")] = pytest.approx(value, abs=1e-12)
    assert row == expected and len(row) == 16
    config.data.train.environment = "math"
    assert environment_metrics(groups, config) == {}


def test_a_verdict_gives_rewards_and_outcome_and_a_cut_completion_is_truncated():
    samples = [sample(finish_reason="length"), sample(finish_reason="length"), sample(), sample()]
    verdicts = [
        Verdict({"a": 1.0}),
        Verdict({}, Outcome.ENV_FAILED, "hung"),
        Verdict({"a": 0.0}),
        Verdict({}, Outcome.ABORTED),
    ]
    apply_verdicts(samples, SimpleNamespace(verify=lambda trajectories: verdicts))
    assert [t.outcome for t in samples] == [Outcome.TRUNCATED, Outcome.ENV_FAILED, Outcome.OK, Outcome.ABORTED]
    assert [t.rewards for t in samples] == [{"a": 1.0}, {}, {"a": 0.0}, {}]
    assert samples[1].detail == "hung"


def test_a_completion_as_long_as_the_answer_behind_an_anchor_is_whole():
    anchor = Prompt("row@8", np.arange(4, dtype=np.int32), "", "e", answer_ids=np.arange(2, dtype=np.int32))
    samples = [replace(sample(finish_reason="length"), prompt=anchor) for _ in range(2)]
    verdicts = [Verdict({"a": 1.0}), Verdict({}, Outcome.ENV_FAILED)]
    apply_verdicts(samples, SimpleNamespace(verify=lambda trajectories: verdicts))
    assert [t.outcome for t in samples] == [Outcome.OK, Outcome.ENV_FAILED]


def test_seeds_differ_by_run_place_side_sample_and_turn_and_are_stable():
    places = [(r, p, s, t) for r in (0, 1) for p in (-2, -1, 0, 1, 2) for s in (0, 1) for t in (0, 1)]
    seeds = [sample_seed(*place) for place in places]
    assert len(set(seeds)) == len(places) and all(0 <= seed < 2**31 for seed in seeds)
    # A resumed run of an older version draws the same samples.
    assert (sample_seed(42, 7, 3), sample_seed(42, -7, 3, 1)) == (807134886, 863442561)


def test_metrics_of_a_step_are_means_over_its_tokens_and_maxima_over_its_updates():
    def result(tokens, entropy, ratio, gap, lr):
        sums = {
            "tokens": tokens,
            "entropy": entropy * tokens,
            "parity_abs": gap * tokens,
            "parity_kl": 0.5 * gap * tokens,
            "clipped": 0.5 * tokens,
            "clipped_low": 0.125 * tokens,
        }
        return UpdateResult(
            loss=float(tokens), grad_norm=2.0 * tokens, lr=lr, skipped=False, sums=sums,
            maxima={"ratio": ratio, "ratio_negated": ratio - 2, "parity_abs": 3 * gap, "parity_prob": gap},
            packing={"imbalance": 0.1 * tokens},
        )  # fmt: skip

    results = [result(1, 1.0, 1.5, 0.1, 1e-3), result(3, 2.0, 1.2, 0.3, 2e-3)]
    row = update_metrics(results, on_policy=True)
    assert row["policy/entropy"] == pytest.approx(1.75) and row["policy/ratio_max"] == 1.5
    assert row["policy/ratio_min"] == 0.5 and "policy/ratio_negated" not in row
    assert (row["policy/clip_fraction"], row["policy/clip_low"], row["policy/clip_high"]) == (0.5, 0.125, 0.375)
    assert (row["loss"], row["grad_norm"], row["lr"]) == (2, 4, 2e-3)
    assert row["packing/imbalance"] == pytest.approx(0.2)
    assert row["parity/max_abs"] == pytest.approx(0.9) and row["parity/mean_abs"] == pytest.approx(0.25)
    assert row["parity/max_prob"] == pytest.approx(0.3)
    assert row["parity/kl"] == pytest.approx(0.125)
    stale = update_metrics(results, on_policy=False)
    assert not any(key.startswith(("parity/", "policy/parity")) for key in stale)
    assert stale["sampler_gap/mean_abs"] == pytest.approx(0.25) and stale["sampler_gap/kl"] == pytest.approx(0.125)
    assert stale["sampler_gap/max_abs"] == pytest.approx(0.9)


def test_the_share_of_sequences_left_out_is_that_of_all_updates_of_the_step():
    update = dict(loss=0.0, grad_norm=0.0, lr=0.0, skipped=False, sums={"tokens": 1.0}, maxima={})
    made = [UpdateResult(**update, sequences=n, skipped_sequences=k) for n, k in ((6, 3), (2, 1))]
    assert update_metrics(made, False)["rollout/skipped_zero_adv"] == 0.5
    assert "rollout/skipped_zero_adv" not in update_metrics([UpdateResult(**update, sequences=6)], False)
