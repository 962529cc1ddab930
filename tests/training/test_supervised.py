"""Supervised and preference training: what a batch becomes, what is measured, and what is refused before a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.commands import cli
from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.data.examples import Answer
from gdpo_nemo.data.records import Prompt, UpdateResult
from gdpo_nemo.rollouts.batches import PromptBatch
from gdpo_nemo.training.algorithm import load_algorithm
from gdpo_nemo.training.supervised import PreferenceTuning, RewardModelTraining, SupervisedFineTuning
from gdpo_nemo.training.validation import validate

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SFT = CONFIGS / "sft_tiny_cpu.yaml"
DPO = CONFIGS / "dpo_tiny_cpu.yaml"
REWARD = CONFIGS / "reward_model_tiny_cpu.yaml"
KINDS = ("dpo", "kto", "orpo", "simpo", "cpo")


class Policy:
    """Log-probs that follow from the tokens, and from whether the starting weights are asked.

    Args:
        learnt: log-ratio of a token to the starting model, over a tenth of its id.
    """

    def __init__(self, learnt=0.3):
        self.asked = []
        self.learnt = learnt

    def logprobs(self, sequences, reference=False):
        self.asked.append((reference, [(tuple(s.prompt_ids), tuple(s.completion_ids)) for s in sequences]))
        found = [-(s.completion_ids + 1.0 + reference * self.learnt * s.completion_ids) / 10 for s in sequences]
        return [
            np.where(True if s.loss_mask is None else s.loss_mask, v, np.nan).astype(np.float32)
            for s, v in zip(sequences, found)
        ]


def prompt(number, *answers, mask=None):
    made = tuple(Answer(np.array(ids, np.int32), mask, sign) for ids, sign in answers)
    return Prompt(f"train/{number}", np.array([number, 7], np.int32), "", "", {"answers": made})


PAIRS = [prompt(0, ([1, 2], 1), ([9], -1)), prompt(1, ([3], 1), ([5, 6, 4], -1))]
SINGLES = [prompt(0, ([1, 2], 1)), prompt(1, ([9], -1)), prompt(2, ([3], 1))]


def algorithm(path=DPO, *overrides):
    config = load_config(path, list(overrides))
    policy = Policy()
    return load_algorithm(config, spec_of(config))(config, policy, None, None), policy


def score(ids, start=True):
    """Summed log-ratio of an answer to the starting model, or its log-prob."""
    now = sum(-(i + 1.0) / 10 for i in ids)
    return now + sum((i + 1.0 + 0.3 * i) / 10 for i in ids) if start else now


def softplus(value):
    return float(np.log1p(np.exp(value)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_tiny_configs_are_valid_for_every_objective(kind):
    config = load_config(DPO, [f"algorithm.type={kind}"])
    validate(config)
    assert load_algorithm(config, spec_of(config)) is PreferenceTuning and not PreferenceTuning.samples
    assert PreferenceTuning.needs_reference(config) == (kind in ("dpo", "kto"))
    assert resolve(
        load_config(DPO, [f"algorithm.type={kind}", "policy.train_global_batch_size=16"])
    ).updates_per_step == (2 if kind == "kto" else 4)
    validate(load_config(SFT))
    assert load_algorithm(load_config(SFT), spec_of(load_config(SFT))) is SupervisedFineTuning


def test_a_reference_free_dpo_keeps_no_starting_weights():
    assert not PreferenceTuning.needs_reference(load_config(DPO, ["preference.reference_free=true"]))


def test_supervised_weights_are_the_mean_over_the_trained_tokens():
    sft, policy = algorithm(SFT)
    mask = np.array([True, False, True])
    rows = [prompt(0, ([1, 2, 3], 1), mask=mask), prompt(1, ([4], 1))]
    (update,) = sft.updates(sft.prepare(PromptBatch(rows, 2)))
    assert [s.weight for s in update] == pytest.approx([1 / 3, 1 / 3]) and {s.advantage for s in update} == {1.0}
    assert sft.loss.type == "reinforce" and all(s.pair == 0 for s in update) and not policy.asked
    held_out = sft.validate(rows)
    assert held_out == {"validation/loss": pytest.approx((0.2 + 0.4 + 0.5) / 3)}


def test_pairs_are_numbered_and_scored_under_the_starting_weights():
    dpo, policy = algorithm()
    (update,) = dpo.updates(dpo.prepare(PromptBatch(PAIRS, 2)))
    assert [s.pair for s in update] == [1, -1, 2, -2] and [reference for reference, _ in policy.asked] == [True]
    assert update[3].reference_logprobs == pytest.approx(-(np.array([5, 6, 4]) * 1.3 + 1) / 10)
    assert (dpo.loss.kind, dpo.loss.count, dpo.loss.chosen_tokens) == ("dpo", 2, 3)


def test_a_step_of_several_updates_keeps_pairs_whole():
    dpo, _ = algorithm(DPO, "policy.train_global_batch_size=2")
    updates = list(dpo.updates(dpo.prepare(PromptBatch(PAIRS, 2))))
    assert [[s.pair for s in update] for update in updates] == [[1, -1], [2, -2]] and dpo.loss.count == 1


@pytest.mark.parametrize("kind", ["orpo", "simpo", "cpo"])
def test_objectives_without_a_reference_ask_for_no_logprobs(kind):
    tuning, policy = algorithm(DPO, f"algorithm.type={kind}")
    assert list(tuning.updates(tuning.prepare(PromptBatch(PAIRS, 2)))) and not policy.asked


def test_held_out_pairs_are_measured_with_the_training_objective():
    dpo, _ = algorithm()
    found = dpo.validate(PAIRS)
    gaps = [0.1 * (score([1, 2]) - score([9])), 0.1 * (score([3]) - score([5, 6, 4]))]
    assert found["validation/loss"] == pytest.approx(np.mean([softplus(-gap) for gap in gaps]), rel=1e-5)
    assert found["validation/margins"] == pytest.approx(np.mean(gaps), rel=1e-4)
    assert found["validation/accuracies"] == pytest.approx(np.mean([gap > 0 for gap in gaps]))


def test_kto_estimates_its_kl_from_answers_to_the_rows_before():
    kto, policy = algorithm(DPO, "algorithm.type=kto")
    prepared = kto.prepare(PromptBatch(SINGLES, 3))
    (update,) = kto.updates(prepared)
    expected = np.mean([score([3]), score([1, 2]), score([9])])
    assert expected > 0 and kto.loss.kl == pytest.approx(expected, rel=1e-5) == pytest.approx(prepared.kl[0], rel=1e-5)
    mismatched = policy.asked[-1][1]
    assert mismatched == [((0, 7), (3,)), ((1, 7), (1, 2)), ((2, 7), (9,))] and kto.loss.count == 3


def mismatched_pairs(prompts, *overrides):
    """(prompt, answer) of the rows from which kto estimates its KL in one update, and that KL."""
    kto, policy = algorithm(DPO, "algorithm.type=kto", *overrides)
    list(kto.updates(kto.prepare(PromptBatch(prompts, len(prompts)))))
    asked = [rows for reference, rows in policy.asked[1:] if not reference]
    return [(row[0][0], row[1]) for rows in asked for row in rows], kto.loss.kl


def test_kto_estimates_its_kl_from_other_prompts_if_both_answers_of_a_pair_are_neighbours():
    """Rows of pairs in the order of their file, as unshuffled data has them."""
    pairs = [prompt(n, (ids, sign)) for n in range(2) for ids, sign in (([n + 1], 1), ([n + 3], -1))]
    found, kl = mismatched_pairs(pairs)
    assert found == [(0, (2,)), (0, (4,)), (1, (1,)), (1, (3,))], "not the chosen answer of the same prompt"
    assert kl == pytest.approx(np.mean([score([token]) for token in (1, 2, 3, 4)]), rel=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 3), (1, 2, 3), (2, 1, 1, 1, 3), (1, 4), (3,)])
@pytest.mark.parametrize("order", [1, -1, 3])
def test_kto_uses_each_answer_at_most_once_and_at_another_prompt(sizes, order):
    """Every answer, unless one prompt has more than half of all."""
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    rows = [prompt(owner, ([place + 1], 1)) for place, owner in enumerate(owners)]
    mixed = sorted(rows, key=lambda row: int(row.fields["answers"][0].token_ids[0]) * order % 11)
    found, kl = mismatched_pairs(mixed)
    answers = [ids[0] - 1 for _, ids in found]
    assert len(set(answers)) == len(answers) and all(owners[a] != owner for (owner, _), a in zip(found, answers))
    assert len(found) == min(len(owners), 2 * (len(owners) - max(sizes)))
    assert kl == (pytest.approx(np.mean([score([a + 1]) for a in answers]), rel=1e-5) if found else 0.0)


def test_kto_leaves_rows_beyond_the_length_limit_out_of_its_kl():
    rows = [prompt(0, ([4, 4, 4], 1)), prompt(1, ([2, 2], -1)), prompt(2, ([3], 1))]
    found, kl = mismatched_pairs(rows, "policy.max_total_sequence_length=4")
    assert found == [(0, (3,)), (2, (2, 2))], "2 tokens of a prompt and 3 of an answer are one too many"
    assert kl == pytest.approx((score([3]) + score([2, 2])) / 2, rel=1e-5)
    assert mismatched_pairs(rows, "policy.max_total_sequence_length=3") == ([(0, (3,))], pytest.approx(score([3])))
    assert mismatched_pairs(rows, "policy.max_total_sequence_length=2") == ([], 0.0)


def test_kto_takes_0_if_the_estimate_of_its_kl_is_negative():
    """A KL is not negative: answers of other prompts that became less likely are no reason to expect less."""
    kto, policy = algorithm(DPO, "algorithm.type=kto")
    policy.learnt = -0.3
    prepared = kto.prepare(PromptBatch(SINGLES, 3))
    list(kto.updates(prepared))
    assert kto.loss.kl == 0.0 and prepared.kl == [0.0]


def test_metrics_are_means_over_pairs():
    dpo, _ = algorithm()
    prepared = dpo.prepare(PromptBatch(PAIRS, 2))
    sums = dict(
        preference_loss=1.2, rewards_chosen=4.0, rewards_rejected=2.0, rewards_margins=2.0, rewards_accuracies=1.0,
        logps_chosen=-8.0, logps_rejected=-6.0, chosen=2.0, rejected=2.0, pairs=2.0, entropy=7.0, tokens=7.0,
    )  # fmt: skip
    row = dpo.metrics(prepared, [UpdateResult(0.6, 1.0, 1e-4, False, sums, {})], 0)
    assert row["loss"] == 0.6 and row["preference/loss"] == pytest.approx(0.6) and row["policy/entropy"] == 1.0
    assert row["rewards/margins"] == 1.0 and row["rewards/accuracies"] == 0.5 and row["logps/chosen"] == -4.0
    assert row["train/tokens"] == 7.0 and not [key for key in row if key.startswith("policy/rewards")]


def test_a_reward_model_scores_an_answer_behind_its_last_token():
    tuning, policy = algorithm(REWARD)
    (update,) = tuning.updates(tuning.prepare(PromptBatch(PAIRS, 2)))
    assert type(tuning) is RewardModelTraining and not policy.asked and [s.pair for s in update] == [1, -1, 2, -2]
    assert update[3].completion_ids.tolist() == [5, 6, 4, 0]
    assert update[3].loss_mask.tolist() == [False, False, False, True] and tuning.count_tokens(update) == 7
    assert (tuning.loss.kind, tuning.loss.count) == ("reward_model", 2)


def test_held_out_pairs_of_a_reward_model_are_measured_by_their_scores():
    tuning, policy = algorithm(REWARD, "preference.center_rewards_coefficient=0.5")
    scores = iter([0.7, -0.2, 0.1, 0.4])
    policy.logprobs = lambda sequences: [
        np.where(s.loss_mask, next(scores), np.nan).astype(np.float32) for s in sequences
    ]
    found = tuning.validate(PAIRS)
    expected = [softplus(-0.9) + 0.5 * 0.5**2, softplus(0.3) + 0.5 * 0.5**2]
    assert found["validation/loss"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert found["validation/margins"] == pytest.approx(0.3, rel=1e-5) and found["validation/accuracies"] == 0.5


def test_a_reward_models_row_has_scores_and_the_tokens_of_the_answers():
    tuning, _ = algorithm(REWARD)
    prepared = tuning.prepare(PromptBatch(PAIRS, 2))
    sums = dict(
        preference_loss=1.2, rewards_chosen=4.0, rewards_rejected=2.0, rewards_margins=2.0, rewards_accuracies=1.0,
        logps_chosen=4.0, logps_rejected=2.0, chosen=2.0, rejected=2.0, pairs=2.0, tokens=4.0,
    )  # fmt: skip
    row = tuning.metrics(prepared, [UpdateResult(0.6, 1.0, 1e-4, False, sums, {})], 0)
    assert (row["rewards/chosen"], row["rewards/rejected"], row["rewards/mean"]) == (2.0, 1.0, 1.5)
    assert row["train/tokens"] == 7.0 and not [key for key in row if "logps" in key or "entropy" in key]


REFUSED = [
    (REWARD, "preference.beta=0.5", "preference.beta: has no effect on reward_model"),
    (REWARD, "preference.center_rewards_coefficient=.nan", "preference.center_rewards_coefficient: expected a number"),
    (REWARD, "policy.lora.rank=4", "policy.lora.rank: reward_model trains the whole model"),
    (REWARD, "policy.train_global_batch_size=1", "splits a pair of answers"),
    (DPO, "preference.center_rewards_coefficient=1", "has no effect unless algorithm.type is reward_model"),
    (DPO, "preference.loss_type=simpo", "preference.loss_type: 'simpo' is not supported by algorithm dpo"),
    (DPO, "preference.beta=-1", "preference.beta: must be more than 0"),
    (DPO, "preference.label_smoothing=0.5", "preference.label_smoothing: must be 0 or more and below 0.5"),
    (DPO, "preference.simpo_gamma=1", "preference.simpo_gamma: has no effect unless algorithm.type is simpo"),
    (SFT, "preference.beta=0.2", "preference.beta: has no effect unless algorithm.type is one of dpo"),
    (DPO, "data.train.type=chatml.intell", "data.train.type: unknown format 'chatml.intell'"),
    (DPO, "data.train.train_on=last", "data.train.train_on: has no effect with dpo, which compares whole answers"),
    (SFT, "data.train.train_on=user", "data.train.train_on: unknown 'user'; known: assistant, last, all"),
    (DPO, "policy.train_global_batch_size=1", "policy.train_global_batch_size: 1 splits a pair of answers"),
    (DPO, "policy.generation.temperature=0.7", "policy.generation.temperature: must be 1 with algorithm dpo"),
    (DPO, "data.train.path=null", "data.train.path: must be set, because algorithm dpo"),
    (SFT, "loss_fn.type=gspo", "loss_fn.type: has no effect with an algorithm that has its own loss"),
    (SFT, "loss_fn.aggregation=constant", "loss_fn.aggregation: constant requires sampled completions"),
    (DPO, "loss_fn.aggregation=sequence_mean", "loss_fn.aggregation: has no effect with the algorithms of"),
    (
        SFT,
        "loss_fn.ratio_clip_max=0.5",
        "loss_fn.ratio_clip_max: has no effect with an algorithm that has its own loss",
    ),
    (SFT, "gdpo.num_generations_per_prompt=4", "gdpo.num_generations_per_prompt: has no effect with"),
    (CONFIGS / "gdpo_tiny_cpu.yaml", "data.train.train_on=last", "data.train.train_on: has no effect with"),
    (CONFIGS / "gdpo_tiny_cpu.yaml", "preference.beta=1", "preference.beta: has no effect unless"),
    (CONFIGS / "gdpo_tiny_cpu.yaml", "data.train.type=examples/custom_reward.py:absent", "data.train.type: has no"),
    (SFT, "data.train.type=examples/custom_reward.py:absent", "data.train.type: "),
    (SFT, "data.train.type=absent.py:absent", "data.train.type: absent.py not found"),
    (SFT, "data.train.remove_columns=[answr]", "data.train.remove_columns: column 'answr' not found; did you mean"),
    (CONFIGS / "gdpo_tiny_cpu.yaml", "data.train.remove_columns=[a]", "data.train.remove_columns: has no effect"),
    (SFT, "data.train.columns={completion: prompt}", "data.train: row 0: no column 'prompt'"),
    (DPO, "data.train.path=examples/data/sorted_digits.jsonl", "data.train: row 0: no column 'chosen'"),
]


@pytest.mark.parametrize("path, override, sentence", REFUSED, ids=[case[1] for case in REFUSED])
def test_impossible_training_is_refused_in_one_line(path, override, sentence, capsys, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    assert cli.main(["train", "--config", str(path), override, "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1
