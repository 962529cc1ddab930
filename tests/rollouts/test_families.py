"""Rubrics of rows from the verifier to the advantages: slots, weights, required criteria, turns, spans and files."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.algorithms.component_weights import ComponentWeights
from gdpo_nemo.algorithms.rubrics import Criterion, criteria_of, read_rubric, restored, with_scores
from gdpo_nemo.algorithms.weighting import RuleRunner
from gdpo_nemo.algorithms.weighting_rules import Pow3r
from gdpo_nemo.commands import cli
from gdpo_nemo.commands.advantage_tables import read_step
from gdpo_nemo.commands.env.check import Check
from gdpo_nemo.config.load import load_config, save_config
from gdpo_nemo.config.validate import validate
from gdpo_nemo.data.records import Group, Prompt, Trajectory, Verdict, trajectories_of
from gdpo_nemo.environments.base import checked_verdicts
from gdpo_nemo.observe.html_report import write_report
from gdpo_nemo.observe.journal import Journal, read_journal, sample_hash
from gdpo_nemo.observe.metric_registry import alias_values
from gdpo_nemo.observe.metrics import History
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.samples import read_rollouts, write_rollouts
from gdpo_nemo.observe.trackers import completion_table
from gdpo_nemo.rollouts.batches import recorded_groups
from gdpo_nemo.rollouts.credit import advantages_of, by_span, reward_columns
from gdpo_nemo.rollouts.families import criterion_terms, families_of, weigh_criteria
from gdpo_nemo.rollouts.group_signal import has_signal, top_variance
from gdpo_nemo.rollouts.metrics import validation_metrics
from gdpo_nemo.rollouts.prompt_pools import signals_of
from gdpo_nemo.tools.chat.speakers import rewards_line
from gdpo_nemo.training.component_gradients import contributions
from gdpo_nemo.training.ppo import action_rewards
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.state import from_json, to_json

TINY = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
TURNS = TINY.with_name("gdpo_turns_cpu.yaml")
POLITE = {"criterion": "is polite", "id": "polite", "weight": 2}
LONG = {"criterion": "is too long", "id": "long", "weight": -1}
RIGHT = {"criterion": "is right", "id": "right", "required": True}


def config(*overrides: str, base: Path = TINY):
    return load_config(base, ["gdpo.rewards={rubric/*: 1}", "gdpo.num_generations_per_prompt=3", *overrides])


def group(identity: str, rubric, rewards: list[dict]) -> Group:
    """A group whose samples the verifier scored with ``rewards`` by criterion."""
    prompt = Prompt(identity, np.arange(2, dtype=np.int32), "p", "toy", {"rubric": rubric})
    samples = []
    for index, values in enumerate(rewards):
        tokens = np.arange(3, dtype=np.int32)
        sample = Trajectory(prompt, index, tokens, tokens.astype(np.float32), 0, "abc", "stop")
        found = Verdict({f"rubric/{name}": value for name, value in values.items()})
        (verdict,) = checked_verdicts(("rubric/*",), [sample], [found])
        samples.append(replace(sample, rewards=dict(verdict.rewards), criteria=dict(verdict.criteria)))
    return Group(prompt, samples)


def test_rows_with_other_rubrics_share_slots_and_not_statistics():
    first = group("1", [POLITE, LONG], [{"polite": 1, "long": 1}, {"polite": 0, "long": 0}, {"polite": 1, "long": 0}])
    second = group("2", ["a", "b", "c"], [{"1": 1, "2": 0, "3": None}, {"1": 0, "2": 0}, {"1": 0, "2": 0, "3": 1}])
    settings = config("gdpo.batch_norm=false")
    together = advantages_of([first, second], settings)
    assert together.names == ("rubric/*",) and together.criteria["rubric/*"].shape == (6, 3)
    for number, alone in enumerate([first, second]):
        expected = advantages_of([alone], settings).values.numpy()
        np.testing.assert_array_equal(together.values.numpy()[3 * number : 3 * number + 3], expected)
    z = np.array([1, -2, 1]) / 3 / np.sqrt(1 / 3)  # of polite; long has z (2, -1, -1) / 3 and the weight -1
    expected = (2 * z - np.array([2, -1, -1]) / 3 / np.sqrt(1 / 3)) / 3
    np.testing.assert_allclose(together.values[:3], expected, atol=1e-5)


def test_scores_and_metrics_are_one_per_family():
    made = group("1", [POLITE, LONG], [{"polite": 1, "long": 1}, {"polite": None, "long": 0}, {"polite": 0}])
    columns = reward_columns(made.trajectories, config())
    assert list(columns) == ["rubric/*"]
    np.testing.assert_allclose(columns["rubric/*"], [1 / 3, 0, 0])
    assert [t.component_rewards for t in made.trajectories][0] == {"rubric/*": pytest.approx(1 / 3)}
    row = validation_metrics([made])
    assert row["validation/rubric/*"] == pytest.approx(1 / 9)
    rewards = action_rewards(made.trajectories, config("gdpo.rewards={rubric/*: 3}"))
    np.testing.assert_allclose([of_actions[-1] for of_actions in rewards], [1, 0, 0])
    assert not any("polite" in key for key in row | advantages_of([made], config()).diagnostics.metrics())


@pytest.mark.parametrize(
    "right, polite, expected",
    [(1, 1, 1.0), (0, 1, 0.0), (0.5, 1, 0.0), (None, 1, np.nan), (1, 0, 0.0)],
)
def test_criteria_count_only_if_the_required_ones_are_met(right, polite, expected):
    made = group("1", [RIGHT, POLITE, LONG], [{"right": right, "polite": polite, "long": 1}])
    family = families_of(made.trajectories, "row")["rubric/*"]
    assert family.names[0] == ("rubric/right", "rubric/polite", "rubric/long")
    np.testing.assert_array_equal(family.rewards[1:, 0], [expected, 1.0])  # a fault always counts
    np.testing.assert_array_equal(family.weights[:, 0], [1.0, 2.0, -1.0])


def test_shaping_applies_to_each_criterion():
    rule = "gdpo.shaping=[{component: 'rubric/*', condition: {on: ok, ge: 1}}, {component: 'rubric/*', scale: 2.0}]"
    settings = config(rule, "gdpo.rewards={rubric/*: 1, ok: 1}")
    made = group("1", [POLITE, LONG], [{"polite": 1, "long": 1}, {"polite": 1, "long": 0}])
    for sample, ok in zip(made.trajectories, (1.0, 0.0)):
        sample.rewards["ok"] = ok
    np.testing.assert_allclose(reward_columns(made.trajectories, settings)["rubric/*"], [2 / 3, 0.0])


@pytest.mark.parametrize(
    "rule, message",
    [
        ("{component: 'rubric/*', length: {full: 3}}", "length is not supported for a family"),
        ("{component: ok, condition: {on: 'rubric/*', ge: 1}}", "is not a single reward"),
    ],
)
def test_rules_that_need_one_reward_are_refused_for_a_family(rule, message):
    with pytest.raises(ConfigError, match=message):
        validate(config(f"gdpo.shaping=[{rule}]", "gdpo.rewards={rubric/*: 1, ok: 1}"))


def test_turns_earn_criteria():
    settings = config("gdpo.credit=turn", "gdpo.turn_baseline=turn", base=TURNS)
    made = group("1", [POLITE, LONG], [{"polite": p, "long": p} for p in (1.0, 0.0, 1.0)])
    for sample in made.trajectories:
        sample.turns, sample.turn_tokens = 2, (1, 2)
        value = sample.rewards["rubric/polite"]
        sample.turn_rewards = ({"rubric/polite": value}, {"rubric/long": value})
    found = advantages_of([made], settings)
    assert found.names == ("rubric/*",)
    polite, both = found.of_turns.criteria["rubric/*"][0], found.of_turns.criteria["rubric/*"][1]
    assert polite[0] > 0 and polite[1] < 0, "the first turn is credited for what follows it"
    assert both[0] == 0.0 and both[1] < 0, "the second turn did not earn polite"
    np.testing.assert_allclose(reward_columns(made.trajectories, settings)["rubric/*"], [1 / 3, 0, 1 / 3])


def test_the_term_of_a_criterion_acts_on_its_tokens():
    made = group("1", [POLITE, LONG], [{"polite": p, "long": p} for p in (1.0, 0.0, 1.0)])
    made.trajectories[0].reward_tokens = {"rubric/polite": ((0, 1),)}
    found = advantages_of([made], config("gdpo.batch_norm=false"))
    tokens = by_span(found, made.trajectories)[0]
    polite, long = found.criteria["rubric/*"][0]
    np.testing.assert_allclose(tokens, [polite + long, long, long], rtol=1e-6)


def test_recorded_criteria_give_the_same_advantages_in_a_replay_and_in_explain(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    verdicts = [{"polite": 1, "long": 1, "right": 1}, {"polite": 0, "long": 0, "right": None}, {"right": 0}]
    made = group("1", [POLITE, LONG, RIGHT], verdicts)
    made.position = 0
    settings = config()
    save_config(settings, tmp_path / "config.yaml")
    expected = advantages_of([made], settings)
    path = write_rollouts(tmp_path, 1, [made], SampleValues(expected.values.numpy()))
    Journal(tmp_path).append(1, [made], position=1, published=0, total_updates=1)
    (entry,) = read_journal(tmp_path)
    for again in (read_step(path)[0], recorded_groups(entry, read_rollouts(path), path.name)):
        assert [t.criteria for t in again[0].trajectories] == [t.criteria for t in made.trajectories]
        np.testing.assert_array_equal(advantages_of(again, settings).values, expected.values)
    heavier = {name: replace(criterion, weight=9.0) for name, criterion in made.trajectories[0].criteria.items()}
    assert sample_hash(replace(made.trajectories[0], criteria=heavier)) != sample_hash(made.trajectories[0])
    assert cli.main(["explain-advantages", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "The run recorded the same advantages." in shown and "rubric/*" in shown and "rubric/polite" not in shown
    assert "3 of 3 criteria" in shown and "polite: is polite" in shown


def test_explain_lists_few_criteria_and_the_pairs_that_their_sum_would_merge(tmp_path, capsys):
    """Three samples meet as many criteria, and the second one meets other ones."""
    verdicts = [{str(k): float(k < 5) for k in range(1, 31)}, {str(k): float(k > 26) for k in range(1, 31)}]
    verdicts += [{str(k): float(k != 1) for k in range(1, 31)}, verdicts[0]]
    made = group("1", [f"criterion {k}" for k in range(1, 31)], verdicts)
    save_config(config(), tmp_path / "config.yaml")
    path = write_rollouts(tmp_path, 1, [made], SampleValues(advantages_of([made], config()).values.numpy()))
    assert cli.main(["explain-advantages", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "5 of 30 criteria" in shown and sum("criterion" in line for line in shown.splitlines()) == 6
    assert "Summing the rewards would give the same advantage to 2 pairs" in shown


def test_unequal_weights_within_a_group_end_the_step_in_a_sentence():
    made = group("7", [POLITE], [{"polite": 1}, {"polite": 0}])
    made.trajectories[1].criteria = {"rubric/polite": Criterion(weight=3.0)}
    with pytest.raises(RunError, match="criterion 'rubric/polite' of prompt 7 has the weights 2 and 3"):
        advantages_of([made], config())


@pytest.mark.parametrize(
    "rubric, message",
    [
        ("polite", "must be a list of criteria, got str"),
        ([POLITE, POLITE], "criterion 2: id 'polite' is not unique"),
        ([{"criterion": "a", "weight": float("nan")}], "criterion 1: weight must be a finite number, got 'nan'"),
        ([{"criterion": "a", "weight": "1"}], "criterion 1: weight must be a finite number"),
        ([{"criterion": "a", "weight": 0}], "every criterion has the weight 0"),
        ([{"criterion": " "}], "criterion 1: criterion must be a text"),
        (["a"] * 10_000, "has 10000 criteria, more than 1000"),
        (["a" * 1_000_000], "criterion 1: criterion has 1000000 characters, more than 65536"),
        ([7], "criterion 1: must be a text or a mapping, got int"),
        ([{"criterion": "a", "required": "yes"}], "criterion 1: required must be true or false"),
        ([{"criterion": "a", "scale": [3, 1]}], "criterion 1: scale must ascend"),
    ],
)
def test_an_invalid_rubric_is_refused_with_its_criterion(rubric, message):
    with pytest.raises(ConfigError, match=message):
        read_rubric(rubric)


def test_a_reward_that_is_not_in_the_rubric_fails_its_sample():
    with pytest.raises(RunError, match="'rubric/rude' is not a criterion of the row's rubric"):
        group("1", [POLITE], [{"rude": 1}])
    with pytest.raises(RunError, match="which is not in reward_names"):
        checked_verdicts(("format",), group("1", [POLITE], [{"polite": 1}]).trajectories, [Verdict({"rubric/a": 1.0})])


def test_rewards_without_a_rubric_have_the_weight_1():
    assert criteria_of({}, ["rubric/a", "format"]) == {"rubric/a": Criterion()}
    assert with_scores({"rubric/a": 1.0, "rubric/b": 0.0, "ok": 1.0}, criteria_of({}, ["rubric/a", "rubric/b"])) == {
        "ok": 1.0,
        "rubric/*": 0.5,
    }


@pytest.mark.parametrize(
    "rewards, message",
    [
        ("{rubric/polite: 1}", "only the name of a family"),
        ("{'rubric/*': 1, rubric: 1}", "conflicts with 'rubric'"),
        ("{'/*': 1}", "is not a valid component name"),
    ],
)
def test_names_of_families_are_checked(rewards, message):
    with pytest.raises(ConfigError, match=message):
        validate(config(f"gdpo.rewards={rewards}"))


def test_family_scale_needs_a_family():
    with pytest.raises(ConfigError, match="gdpo.family_scale: has no effect unless gdpo.rewards has a family"):
        validate(config("gdpo.family_scale=none", "gdpo.rewards={ok: 1}"))


def test_each_row_of_a_group_adds_its_criteria():
    """The second group has another prompt and the criteria of the third, which is compared with the first."""
    first, other, third = (
        group(str(number), rubric, [{name: 1}, {name: 0}])
        for number, rubric, name in ((1, [POLITE], "polite"), (2, [LONG], "long"), (3, [LONG], "long"))
    )
    for sample in other.trajectories:
        sample.prompt = replace(sample.prompt, token_ids=np.arange(5, dtype=np.int32))
    family = families_of(trajectories_of([first, other, third]), "prompt")["rubric/*"]
    assert family.names[0] == family.names[4] == ("rubric/polite", "rubric/long")
    np.testing.assert_array_equal(family.rewards[1], [np.nan, np.nan, np.nan, np.nan, 1, 0])
    np.testing.assert_array_equal(family.rewards[0], [1, 0, 1, 0, np.nan, np.nan])


def test_ppo_with_turn_credit_refuses_a_family():
    base = TINY.with_name("ppo_tiny_cpu.yaml")
    with pytest.raises(ConfigError, match="gdpo.credit: turn is not supported with algorithm ppo and a family"):
        validate(load_config(base, ["gdpo.rewards={rubric/*: 1}", "gdpo.credit=turn", "rollout.turns.max_turns=2"]))


def test_a_constraint_bounds_the_score_of_a_family():
    weights = ComponentWeights({"rubric/*": 0.5, "ok": 1.0}, {"rubric/*": {"at_least": 0.5, "lr": 1.0}}, {})
    made = group("1", [POLITE, LONG], [{"polite": 1, "long": 1}, {"polite": 1, "long": 0}])
    weights.update(1, reward_columns(made.trajectories, config()))
    assert weights.values["rubric/*"] == pytest.approx(0.5 + 0.5 - (1 / 3 + 2 / 3) / 2)


def test_dynamic_sampling_keeps_groups_whose_criteria_vary():
    settings = config("gdpo.dynamic_sampling.enabled=true")
    cancelling = [{"criterion": "a"}, {"criterion": "b", "weight": -1}]
    assert has_signal(group("1", [POLITE, LONG], [{"polite": 1, "long": 0}, {"polite": 0, "long": 0}]), settings)
    assert not has_signal(group("2", [POLITE], [{"polite": 1}, {"polite": 1}]), settings)
    assert not has_signal(group("3", cancelling, [{"1": 1, "2": 1}, {"1": 0, "2": 0}]), settings)


def test_selection_treats_a_family_as_one_component_by_its_score():
    settings = config("rollout.selection.enabled=true")
    varied = group("1", [POLITE, LONG], [{"polite": 1, "long": 0}, {"polite": 0, "long": 0}])
    constant = group("2", [POLITE], [{"polite": 1}, {"polite": 1}])
    assert signals_of(varied, settings) == {"rubric/*": (True, pytest.approx(1 / 3))}
    assert signals_of(constant, settings) == {"rubric/*": (False, pytest.approx(1.0))}
    groups = [replace(varied, position=0), replace(constant, position=1)]
    assert top_variance(groups, settings, 0.9) == {0}


def test_rows_with_equal_prompts_and_other_rubrics_are_compared_by_criterion():
    """With group_by: prompt, a criterion that only one of the rows has is compared within this row."""
    first = group("1", [POLITE, LONG], [{"polite": 1, "long": 0}, {"polite": 0, "long": 1}])
    second = group("2", [POLITE, {**RIGHT, "required": False}], [{"polite": 1, "right": 0}, {"polite": 1, "right": 1}])
    found = advantages_of([first, second], config("gdpo.group_by=prompt", "gdpo.batch_norm=false"))
    polite, long, right = found.criteria["rubric/*"].T
    assert np.count_nonzero(polite) == 4 and (long != 0).tolist() == [True, True, False, False]
    assert (right != 0).tolist() == [False, False, True, True]


def test_a_family_is_one_term_of_the_component_gradients():
    made = group("1", [POLITE, LONG], [{"polite": 1, "long": 1}, {"polite": 0, "long": 0}, {"polite": 1, "long": 0}])
    found = advantages_of([made], config())
    terms = np.concatenate(contributions(found, made.trajectories, [0]))
    assert terms.shape == (3, 2)
    np.testing.assert_allclose(terms[:, 0], found.values, atol=1e-12)


def test_terms_of_criteria_add_up_to_the_term_of_their_family():
    """Rows with other rubrics share slots; a row has terms of its own criteria only."""
    first = group("1", [POLITE, LONG], [{"polite": 1, "long": 0}, {"polite": 0, "long": 1}, {"polite": 1, "long": 1}])
    second = group("2", ["a", "b", "c"], [{"1": 1, "2": 0, "3": None}, {"1": 0, "2": 1}, {"1": 0, "2": 0, "3": 1}])
    trajectories = first.trajectories + second.trajectories
    for settings in (config("gdpo.batch_norm=false"), config("gdpo.credit=turn", base=TURNS)):
        found = advantages_of([first, second], settings)
        terms = criterion_terms(found.criteria, trajectories, "row")
        assert [list(row) for row in terms] == [list(trajectory.criteria) for trajectory in trajectories]
        expected = found.components[:, found.names.index("rubric/*")]
        np.testing.assert_allclose([sum(row.values()) for row in terms], expected, atol=1e-12)


def test_a_sample_file_has_the_terms_of_criteria_beside_those_of_families(tmp_path):
    made = group("1", [POLITE, LONG], [{"polite": 1, "long": 0}, {"polite": 0, "long": 1}, {"polite": 1, "long": 1}])
    found = advantages_of([made], config())
    terms = criterion_terms(found.criteria, made.trajectories, "row")
    families = dict(zip(found.names, found.components.numpy().T))
    path = write_rollouts(tmp_path, 1, [made], SampleValues(terms=families, criterion_terms=terms))
    for record, family, own in zip(read_rollouts(path), families["rubric/*"], terms):
        assert record["terms"] == {"rubric/*": family, **own}


def test_displays_name_a_family_once(tmp_path):
    made = group("1", [POLITE, LONG], [{"polite": 1, "long": 1}, {"polite": 0, "long": 1}])
    (sample, _) = made.trajectories
    verdict = Verdict(sample.rewards, criteria=sample.criteria)
    assert rewards_line(sample, ["rubric/*"]) == "rubric/* 0.333"
    assert Check(("rubric/*",), 0.0, [sample], [verdict]).components == ["rubric/*"]
    assert completion_table([made], None, 2).columns[-1] == "reward/rubric/*"
    assert alias_values({"reward/rubric/*/mean": 0.5}, ["trl"]) == {"train/rewards/rubric/*/mean": 0.5}
    history = History.of([{"step": 1, "validation/rubric/*": 0.5, "validation/rubric/*/pass_at/2": 0.7}])
    assert history.components == ["rubric/*"]
    write_rollouts(tmp_path, 1, [made], SampleValues(np.array([0.5, -0.5])))
    report = write_report(tmp_path, history).read_text()
    assert "rubric/* 0.333" in report and "rubric/polite" not in report


def pow3r_by_hand(rewards: np.ndarray, weights: np.ndarray, alphas: np.ndarray) -> np.ndarray:
    """Equations 4 to 7 of arXiv 2605.20164 for one prompt and one category: rewards [criteria, samples]."""
    contrast = np.sqrt([np.nanmean((row - np.nanmean(row)) ** 2) + 1e-4 for row in rewards])
    valid = np.isfinite(rewards).sum(axis=1) >= np.ceil(0.75 * rewards.shape[1])
    ratio = contrast / (weights[valid] @ contrast[valid] / weights[valid].sum())
    goal = np.clip(0.5 + 0.5 * ratio, 0.67, 1.5)
    return np.where(valid, np.clip(0.8 * alphas + 0.2 * goal, 0.67, 1.5), alphas)


def test_pow3r_weighs_the_criteria_of_a_row_by_their_contrast_when_the_row_comes_again():
    rubric = [{"criterion": "a", "weight": 2}, {"criterion": "b", "weight": 1}, {"criterion": "c", "weight": -3}, "d"]
    columns = np.array([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1], [1, np.nan, np.nan, 0]], float)
    values = [{str(j + 1): None if np.isnan(r) else r for j, r in enumerate(sample)} for sample in columns.T]
    other = group("2", ["x", "y"], [{"1": 1, "2": 0}, {"1": 0, "2": 0}, {"1": 0, "2": 1}, {"1": 1, "2": 1}])
    settings = config("gdpo.batch_norm=false", "gdpo.num_generations_per_prompt=4")
    runner, alphas, sizes = RuleRunner(Pow3r()), np.ones(4), np.array([2.0, 1, 3, 1])
    for step in (1, 2, 3):
        seen = group("1", rubric, values)
        weigh_criteria([seen, other], runner, step)
        factors = [criterion.factor for criterion in seen.trajectories[2].criteria.values()]
        np.testing.assert_allclose(factors, alphas * sizes.sum() / (sizes @ alphas), rtol=1e-12)
        # The advantages are those of a rubric with these weights; scores are those of the human weights.
        weights = [
            criterion.weight * factor for criterion, factor in zip(seen.trajectories[0].criteria.values(), factors)
        ]
        reweighted = group("1", [{"criterion": "-", "weight": weight} for weight in weights], values)
        found, expected = (advantages_of([each], settings).values.numpy() for each in (seen, reweighted))
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        scores = reward_columns(seen.trajectories, settings)["rubric/*"]
        np.testing.assert_array_equal(
            scores, reward_columns(group("1", rubric, values).trajectories, settings)["rubric/*"]
        )
        alphas = pow3r_by_hand(columns, sizes, alphas)
    assert alphas[1] < 1 < alphas[0] and alphas[3] == 1.0, "a criterion with too few verdicts keeps its alpha"
    # Recorded samples keep the factors of their run, until a step without such a rule.
    again = restored({name: asdict(criterion) for name, criterion in seen.trajectories[0].criteria.items()})
    assert again == seen.trajectories[0].criteria
    resumed = RuleRunner(Pow3r())
    resumed.rule.load_state(from_json(to_json(runner.rule.state())))
    first, second = group("1", rubric, values), group("1", rubric, values)
    weigh_criteria([first], runner, 4), weigh_criteria([second], resumed, 4)
    assert first.trajectories[0].criteria == second.trajectories[0].criteria != again
    weigh_criteria([first], None, 5)
    assert {criterion.factor for t in first.trajectories for criterion in t.criteria.values()} == {1.0}


def test_pow3r_accepts_a_single_family_and_leaves_its_weight():
    validate(config("gdpo.weighting={rule: pow3r}"))
    with pytest.raises(ConfigError, match="gdpo.weighting: pow3r requires gdpo.group_by: row for a family"):
        validate(config("gdpo.weighting={rule: pow3r}", "gdpo.group_by=prompt"))
    with pytest.raises(ConfigError, match="gdpo.weighting: requires at least two components"):
        validate(config("gdpo.weighting={rule: tchebycheff}"))
    columns = {"rubric/*": np.array([0.1, 0.9]), "a": np.array([0.0, 1.0]), "b": np.array([1.0, 1.0])}
    weights = ComponentWeights(dict.fromkeys(columns, 1.0), {}, {}, Pow3r())
    for step in (1, 2):
        weights.update(step, columns, np.zeros(2, int))
    assert weights.values["rubric/*"] == 1.0 != weights.values["a"]
    assert weights.values["a"] + weights.values["b"] == pytest.approx(2.0, abs=1e-12)
