import json
import random
from itertools import permutations

import pytest
from environment_samples import trajectory

from gdpo_nemo.data.records import Outcome
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.tasks.judge import requests_of
from gdpo_nemo.utils.errors import ConfigError

FIXED = {"sunny": "a lot of sun", "wet": "more rain"}
TEXTS = ["sun sun rain", "sun", "none", "none sun"]


def options(server, **arguments):
    return {"plugin": "judge", "base_url": server.url, "model": "judge-1", "ranking": True, **arguments}


def ranked(server, samples, run_folder=None, **arguments):
    with EnvironmentPool({"env": options(server, **arguments)}, run_folder=run_folder) as pool:
        return pool.verify(samples)


def group(texts, prompt_id="p", **fields):
    return [trajectory(text, prompt_id=prompt_id, index=index, **fields) for index, text in enumerate(texts)]


@pytest.mark.parametrize("arguments, requests", [({}, 2), ({"orders": 1}, 1), ({"orders": 3}, 3),
                                                 ({"calls": "criterion"}, 4)])  # fmt: skip
def test_reward_is_the_share_of_samples_that_a_sample_precedes(server, arguments, requests):
    verdicts = ranked(server, group(TEXTS), rubric=FIXED, **arguments)
    assert [verdict.rewards["sunny"] for verdict in verdicts] == [1.0, 0.5, 0.0, 0.5]
    assert [verdict.rewards["wet"] for verdict in verdicts] == pytest.approx([1.0, 1 / 3, 1 / 3, 1 / 3])
    assert len(server.requests) == requests and verdicts[0].metrics["judge/calls"] == requests / 4
    assert verdicts[0].metrics.get("judge/disagreement", 0.0) == 0.0 and verdicts[0].criteria == {}
    [planned] = requests_of("env.x", "judge", options(server, rubric=FIXED, **arguments))
    assert planned.requests == requests and planned.by_group and not planned.by_criterion


def test_answers_are_shown_in_an_order_and_its_reverse(server):
    ranked(server, group(TEXTS), rubric=FIXED, orders=4, concurrency=1)
    shown = []
    for _, _, body in server.requests:
        [line] = [line for line in body["messages"][1]["content"].split("\n") if line.startswith("answers: ")]
        answers = json.loads(line.removeprefix("answers: "))
        assert [answer["id"] for answer in answers] == ["1", "2", "3", "4"]
        shown.append([answer["answer"] for answer in answers])
    assert sorted(shown[0]) == sorted(TEXTS) and shown[1] == shown[0][::-1] and shown[3] == shown[2][::-1]
    assert shown[2] not in shown[:2]


def test_preference_for_a_position_cancels(server):
    verdicts = ranked(server, group(TEXTS), rubric={"first": "biased"})
    assert {verdict.rewards["first"] for verdict in verdicts} == {0.5}
    assert verdicts[0].metrics["judge/disagreement"] == 1.0


def test_order_of_the_samples_does_not_change_the_rewards_and_requests(server, tmp_path):
    for texts in permutations(TEXTS):
        verdicts = ranked(server, group(texts), tmp_path, rubric=FIXED)
        found = {text: dict(verdict.rewards) for text, verdict in zip(texts, verdicts)}
        assert found["sun"]["sunny"] == found["none sun"]["sunny"] == 0.5 and found["sun sun rain"]["wet"] == 1.0
    assert len(server.requests) == 2


def test_rewards_of_a_group_have_the_mean_of_a_tie(server):
    draw = random.Random(0)
    for size in range(2, 12):
        texts = [" ".join(["sun"] * draw.randrange(4) + ["rain"] * draw.randrange(4)) for _ in range(size)]
        for verdict in (verdicts := ranked(server, group([*texts, "sun x"]), rubric=FIXED)):
            assert all(0 <= reward <= 1 for reward in verdict.rewards.values())
        for name in FIXED:
            assert sum(verdict.rewards[name] for verdict in verdicts) == pytest.approx(len(verdicts) / 2)


def test_equal_answers_tie_and_are_shown_once(server):
    verdicts = ranked(
        server, [*group(["sun", "none", "none"]), *group(["x", "x"], "q"), *group(["sun"], "r")], rubric=FIXED
    )
    assert [verdict.rewards["sunny"] for verdict in verdicts] == [1.0, 0.25, 0.25, None, None, None]
    assert len(server.requests) == 2  # a ranking needs two different answers
    assert {verdict.outcome for verdict in verdicts} == {Outcome.OK}
    assert server.requests[0][2]["messages"][1]["content"].count("none") == 1


def test_criteria_of_the_row_rank_its_group(server):
    rubrics = [{"id": "a", "criterion": "sun", "weight": 3}, "the mood is unknown"], ["more rain"]
    samples = [*group(TEXTS, "p", rubric=rubrics[0]), *group(TEXTS, "q", rubric=rubrics[1])]
    verdicts = ranked(server, samples, rubric="rubric")
    assert verdicts[0].rewards == {"rubric/a": 1.0, "rubric/2": None} and verdicts[4].rewards == {"rubric/1": 1.0}
    assert verdicts[0].criteria["rubric/a"].weight == 3 and set(verdicts[0].criteria) == {"rubric/a", "rubric/2"}
    environment = load_environment("env", options(server, rubric="rubric"))
    environment.preflight([sample.prompt for sample in samples])
    needed = trajectory("x", rubric=[{"id": "a", "criterion": "sun", "required": True}])
    with pytest.raises(ConfigError, match="row p: criterion 'a': required conflicts with ranking; remove it"):
        environment.preflight([needed.prompt])


def rankings(*orders):
    return json.dumps([{"id": str(number), "ranking": order} for number, order in enumerate(orders, 1)])


@pytest.mark.parametrize(
    "reply, detail",
    [
        (rankings(["1", "2"], ["2"]), "criterion 'wet': the judge did not rank the answer 1"),
        (rankings(["1", ["2", "1"]], ["1", "2"]), "criterion 'sunny': the judge ranked the answer 1 twice"),
        (rankings(["1", "2", "3"], ["1", "2"]), "criterion 'sunny': the judge ranked '3', which is not an answer"),
        (rankings(["1", [["2"]]], ["1", "2"]), "criterion 'sunny': the judge ranked \"['2']\", which is not an answer"),
        (rankings("12", ["1", "2"]), "criterion 'sunny': the judge's ranking must be a list, got '12'"),
        (rankings(["1", "2"]), "criterion 'wet' is missing"),
        (rankings(["1", "2"], ["1", "2"], ["1", "2"]), "criterion '3' is not in the request"),
        ("The first is better.", "the reply is not JSON"),
    ],
)
def test_invalid_ranking_fails_the_whole_group_and_only_this(server, reply, detail):
    samples = [*group(["sun", "rain"], "say " + reply), *group(["sun", "rain"])]
    *bad, first, second = ranked(server, samples, rubric=FIXED)
    for verdict in bad:
        assert verdict.outcome is Outcome.ENV_FAILED and verdict.rewards == {} and verdict.detail.isprintable()
        assert verdict.detail.startswith(f"row say {reply}: ") and detail in verdict.detail
    assert first.rewards == {"sunny": 1.0, "wet": 0.0} and second.rewards == {"sunny": 0.0, "wet": 1.0}


def test_null_in_one_order_leaves_the_ranking_of_the_other(server):
    samples = group(["sun", "rain"], "say " + rankings([2, 1], None))
    verdicts = ranked(server, samples, rubric=FIXED)
    assert [verdict.rewards for verdict in verdicts] == [{"sunny": 0.5, "wet": None}] * 2
    votes = ranked(server, group(TEXTS), rubric=FIXED, votes=2, temperature=1)
    assert votes[0].metrics["judge/noise/sunny"] == 0.0 and votes[0].rewards["sunny"] == 1.0
