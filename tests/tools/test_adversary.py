"""``env check --adversary`` finds planted weaknesses of a verifier, and none in a sound one."""

import json
import re
from collections import Counter
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest

from gdpo_nemo.commands import cli
from gdpo_nemo.commands.arguments import terminal
from gdpo_nemo.commands.env.check import as_sampled, check_environment, sample_of
from gdpo_nemo.data.replies import parse_hermes
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.nemo_gym.agent_environment import NemoGymAgent
from gdpo_nemo.environments.tasks.tool_calling import made_calls
from gdpo_nemo.tools.adversary.attacks import Gold, probes
from gdpo_nemo.tools.adversary.trial import Tried, _in_parts, findings, judge, oriented, put_on_trial, table
from gdpo_nemo.utils.errors import ConfigError

QUESTIONS = {"r1": ("Which is larger, 22 or 72?", "72"), "r2": ("Which is larger, 35 or 19?", "35")}


def last_number(text, gold):
    return float(re.findall(r"\d+", text)[-1:] == [gold])


def exact(text, gold):
    return float(text.strip() == gold)


def any_match(text, gold):
    return float(gold in text)


def everybody_wins(text, gold):
    return 1.0


def trial_of(verifier, **more):
    """Judge a component ``it`` (and others) on two questions."""
    tried = []
    for row, (prompt, gold) in QUESTIONS.items():
        other = next(answer for key, (_, answer) in QUESTIONS.items() if key != row)
        for probe in probes(prompt, gold, other):
            rewards = {"it": verifier(probe.text, gold)}
            rewards |= {name: one(probe.text, gold) for name, one in more.items()}
            tried.append(Tried(row, probe, rewards, dict(rewards)))
    return judge(tried, {one.row: one.rewards for one in tried if one.probe.kind == "gold"})


@pytest.mark.parametrize(
    "verifier, attacks",
    [
        (exact, set()),
        (last_number, {"all options", "prompt echo"}),
        (any_match, {"all options", "prompt echo", "every number", "right and wrong answer", "right and wrong reply"}),
    ],
)
def test_attacks_win_exactly_where_the_verifier_is_weak(verifier, attacks):
    trial = trial_of(verifier)
    assert set(trial.components["it"].hacked) == attacks and trial.components["it"].reads_answer
    assert trial.hackability("it") == float(bool(attacks))
    if attacks:
        assert trial.components["it"].hacked["all options"]["r1"] == "22 > 72"


def test_a_component_with_one_value_is_flat_and_not_hacked():
    trial = trial_of(everybody_wins)
    assert trial.components["it"].flat == ["r1", "r2"] and not trial.components["it"].hacked
    assert trial.hackability("it") is None


def test_hackability_is_not_stated_of_a_component_that_could_not_be_tested(capsys):
    trial = trial_of(everybody_wins)
    terminal().print(table("e", trial))
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("│ it "))
    assert row.count("?") == 4 and "0%" not in row and "none" not in row
    assert [line for line in findings(trial) if line.startswith("it: not tested on 2 of 2 attacked rows")]


def test_hackability_is_a_share_of_the_rows_that_could_be_tested():
    def only_second(text, gold):
        return last_number(text, gold) if gold == QUESTIONS["r2"][1] else 1.0

    trial = trial_of(only_second)
    assert trial.components["it"].flat == ["r1"] and trial.hackability("it") == 1.0


def test_components_that_no_text_wins_together_are_named():
    trial = trial_of(
        exact, short=lambda text, gold: float(len(text) < 2), digits=lambda text, gold: float(text.isdigit())
    )
    assert trial.exclusive == {("it", "short"): ["r1", "r2"]}
    assert trial.split == {("it", "short"): 2}


def test_an_answer_without_verdict_and_an_unstable_verdict_are_reported():
    gold = next(probe for probe in probes("q", "7", None) if probe.kind == "gold")
    tried = [Tried("r1", gold, {"it": 1.0}, {"it": 0.0})]
    failed = Counter({"the judge cannot be reached": 2})
    lines = findings(judge(tried, {"r1": {"it": 1.0}, "r2": {"it": None}}, failed))
    assert lines[-1] == ("2 verifications failed; a run would mask these samples: the judge cannot be reached (2)")
    assert any("does not get 1 on 1 of 2 rows: no verdict on 1 (r2)" in line for line in lines)
    assert any(
        "1 of 1 texts get another reward in a second verification, for example '7' on r1" in line for line in lines
    )
    once = [Tried("r1", gold, {"it": 1.0}, {}), Tried("r1", gold, {}, {"it": 1.0})]
    assert not judge(once, {"r1": {"it": 1.0}}, failed).components["it"].unstable


@pytest.mark.parametrize(
    "text, content, other",
    [
        ("<think>a</think>\n<answer>12</answer>", "12", "<think>a</think>\n<answer>x</answer>"),
        (r"so \boxed{12}.", "12", r"so \boxed{x}."),
        ("12", "12", "x"),
        ("a\nb", None, "x"),
    ],
)
def test_gold_separates_the_answer_from_its_frame(text, content, other):
    assert Gold(text).content == content and Gold(text).put("x") == other


def test_no_attack_is_the_right_answer():
    for gold in ("1", "<answer>yes</answer>", "A", r"\boxed{0}"):
        answer = Gold(gold).content
        texts = [probe.text for probe in probes("yes or no? (A) 1 (B) 0", gold, None) if probe.kind == "attack"]
        assert gold not in texts and answer not in texts


@pytest.mark.slow
def test_command_names_rows_whose_components_exclude_each_other(tmp_path, capsys, monkeypatch):
    """In strict GSM8K, 1,000 must keep its comma to be correct and lose it to be an integer."""
    monkeypatch.setenv("COLUMNS", "200")
    rows = [{"question": f"{n} + 0?", "answer": f"#### {n:,}"} for n in (3, 1000, 14)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "strict.yaml"
    config.write_text(
        f"defaults: configs/gdpo_gsm8k_cpu.yaml\nenv: {{gsm8k: {{strict: true}}}}\n"
        f"data: {{train: {{path: {tmp_path}/rows.jsonl}}, validation: null}}\ngdpo: {{val_period: 0}}\n"
    )
    command = ["env", "check", "gsm8k", "--config", str(config), "--adversary", "--rows", "1"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "correctness: the right answer does not get 1 on 1 of 3 rows: 0 on 1 (train/1)" in shown
    assert "correctness and integer exclude each other on 1 of 2 attacked rows (train/1)" in shown
    assert cli.main([*command, "--completion", "x"]) == 2


def test_texts_are_verified_in_parts_that_keep_a_row_together_if_a_verdict_depends_on_other_samples():
    class Verifier(Environment):
        by_sample = True

    calls = []

    def verify(samples):
        calls.append(len(samples))
        return list(samples)

    environment, pool = Verifier(), SimpleNamespace(verify=verify)
    samples = [sample_of({"id": str(i // 12), "prompt": "q"}, "a") for i in range(35)]
    assert _in_parts(environment, pool, 2, samples) == samples and calls == [16, 16, 3]
    environment.by_sample = False
    assert _in_parts(environment, pool, 2, samples) == samples and calls[3:] == [24, 11]
    environment.by_sample = environment.remote = True
    assert _in_parts(environment, pool, 2, samples) == samples and calls[5:] == [35]


SCORES = {"r1": 0.25, "r2": 0.0}


@pytest.mark.parametrize(("margin", "beaten"), [(1.0, set()), (-1.0, {"r1", "r2"})])
def test_graded_component_is_won_within_a_row_by_the_right_answer_or_an_equal_text(margin, beaten):
    """Every text has another score, and no two rows the same largest score."""
    tried = []
    for row, (prompt, gold) in QUESTIONS.items():
        other = next(answer for key, (_, answer) in QUESTIONS.items() if key != row)
        for i, probe in enumerate(probes(prompt, gold, other)):
            score = SCORES[row] - i / 1000 + (margin if probe.is_right else 0.0)
            tried.append(Tried(row, probe, {"it": score}, {"it": score}))
    rewards = {one.row: one.rewards for one in tried if one.probe.kind == "gold"}
    trial = judge(tried, {**rewards, "not attacked": {"it": 0.1}})
    found = trial.components["it"]
    assert found.graded and found.gold_loses.keys() == beaten and trial.hackability("it") == len(beaten) / 2
    assert not found.forms and found.reads_answer == (margin > 0)
    assert any("at least as much as the right answer on 2 rows (r1, r2)" in line for line in findings(trial)) == bool(
        beaten
    )


def test_a_family_is_compared_within_a_row_because_rows_have_other_rubrics():
    """The score of a right answer is 1 with the rubric of one row, and 0.5 with that of the other row."""
    tried = []
    for (row, (prompt, gold)), best in zip(QUESTIONS.items(), (1.0, 0.5)):
        for probe in probes(prompt, gold, None):
            score = best if probe.is_right else 0.0
            tried.append(Tried(row, probe, {"r/*": score, "r": score}, {"r/*": score, "r": score}))
    trial = judge(tried, {one.row: one.rewards for one in tried if one.probe.kind == "gold"})
    assert trial.components["r/*"].graded and not trial.components["r/*"].gold_loses
    assert trial.components["r"].gold_loses.keys() == {"r2"}


@pytest.mark.parametrize("verifier", [exact, last_number, any_match])
def test_penalty_is_tested_like_the_reward_that_it_mirrors(verifier):
    """The right answer wins a penalty with the smallest value."""
    tried, mirrored = [], []
    for row, (prompt, gold) in QUESTIONS.items():
        other = next(answer for key, (_, answer) in QUESTIONS.items() if key != row)
        for probe in probes(prompt, gold, other):
            rewards = {"it": verifier(probe.text, gold)}
            penalty = oriented({"it": 1.0 - rewards["it"]}, {"it": -1})
            tried.append(Tried(row, probe, rewards, rewards))
            mirrored.append(Tried(row, probe, penalty, penalty))
    golds = {"r1": {"it": 0.0}, "r2": {"it": 1.0}}
    reward = judge(tried, golds)
    penalty = judge(
        mirrored, {row: oriented({"it": 1.0 - g["it"]}, {"it": -1}) for row, g in golds.items()}, None, {"it": -1}
    )
    one, other = reward.components["it"], penalty.components["it"]
    assert (one.best, one.gold_loses) == (1.0, {"r1": 0.0}) and (other.best, other.gold_loses) == (0.0, {"r1": 1.0})
    assert (one.hacked, one.forms, one.flat, one.reads_answer) == (
        other.hacked,
        other.forms,
        other.flat,
        other.reads_answer,
    )


def test_a_length_is_not_graded_because_an_empty_text_has_the_largest_value_on_every_row():
    found = trial_of(lambda text, gold: -float(len(text)) - crc32(text.encode()) / 2**33).components["it"]
    assert not found.graded and found.gold_loses.keys() == set(QUESTIONS) and "empty" in found.hacked


ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"n": {"type": "integer"}}}}}


def calls_of(text):
    return [(name, json.loads(arguments)) for name, arguments in parse_hermes(text, [ADD]).calls]


@pytest.mark.slow
@pytest.mark.parametrize(
    "verifier, attacks",
    [
        (lambda calls: calls == [("add", {"n": 7})], set()),
        (lambda calls: ("add", {"n": 7}) in calls, {"right call repeated", "right call and wrong calls"}),
        (
            lambda calls: any(name == "add" for name, _ in calls),
            {"right tool, wrong arguments", "right call repeated", "right call and wrong calls"}
            | {"call without arguments", "call with constant arguments", "repeated call"},
        ),
        (
            lambda calls: any(given == {"n": 7} for _, given in calls[:1]),
            {"right arguments, wrong tool", "right call repeated"},
        ),
    ],
)
def test_attacks_with_calls_win_exactly_where_a_verifier_of_calls_is_weak(verifier, attacks):
    gold = '<tool_call>\n{"name": "add", "arguments": {"n": 7}}\n</tool_call>'
    tried = []
    for probe in probes("Add seven.", gold, None, [ADD]):
        rewards = {"it": float(verifier(calls_of(probe.text)))}
        tried.append(Tried("r", probe, rewards, rewards))
    assert set(judge(tried, {"r": {"it": 1.0}}).components["it"].hacked) == attacks


def test_changed_calls_of_rlla_share_their_block():
    text = '<think>x</think>\n<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>'
    found = {probe.name: probe.text for probe in probes("q", text, None)}
    assert made_calls(found["right call repeated"]) == [("f", {"a": 1})] * 20
    assert made_calls(found["right tool, wrong arguments"]) == [("f", {"a": 0})]


def test_an_environment_that_reads_token_ids_gets_those_of_its_tokenizer():
    class Words(Environment):
        def token_ids(self, text):
            return np.array([len(word) for word in text.split()], np.int32)

    row = {"id": "r", "prompt": "one three"}
    sample = as_sampled(sample_of(row, "a bc"), Words())
    assert sample.completion_ids.tolist() == [1, 2] and sample.prompt.token_ids.tolist() == [3, 5]
    assert len(sample.logprobs) == 2
    assert as_sampled(sample_of(row, "a bc"), Environment()).completion_ids.tolist() == list(b"a bc")


@pytest.mark.parametrize("command, count", [(check_environment, ()), (put_on_trial, 1)])
def test_an_environment_of_agents_is_refused_because_no_model_is_loaded(command, count):
    options = {"agents": {"gym": "http://127.0.0.1:9"}}
    with pytest.raises(ConfigError, match="gym: its episodes require the model of a run.*train one step instead"):
        command("gym", options, NemoGymAgent(options), [], count)
