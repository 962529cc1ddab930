import logging

import pytest
from environment_samples import trajectory
from reward_server import RewardServer

from gdpo_nemo.data.records import Outcome, TrainerState
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.registry import announced_components, load_environment
from gdpo_nemo.environments.tasks.reward_functions import Functions
from gdpo_nemo.utils.errors import ConfigError, RunError

KEY = "sk-verysecret-0123456789"


@pytest.fixture
def server():
    server = RewardServer()
    yield server
    server.stop()


def verdicts(server, answers, **arguments):
    section = {"functions": {"helpful": {"function": "http", "url": server.url, **arguments}}}
    return Functions(section).verify([trajectory(a, prompt_id=f"p{i}", answer=i) for i, a in enumerate(answers)])


def test_a_url_is_posted_prompts_completions_and_columns_and_its_list_is_the_reward(server):
    messages = [{"role": "user", "content": "u"}]
    sample = trajectory("four", prompt_id="p", messages=messages, answer=42, odd=float("nan"))
    sample.trainer_state = TrainerState(3, 12, 0.5)
    env = Functions({"functions": {"helpful": server.url}})
    assert [v.rewards["helpful"] for v in env.verify([trajectory("a"), trajectory("none")])] == [0.1, None]
    assert [v.rewards["helpful"] for v in env.verify([trajectory("object"), trajectory("b", index=1)])] == [0.5, 0.5]
    [verdict] = env.verify([sample])
    headers, body = server.requests[-1]
    assert verdict.rewards == {"helpful": 0.4}
    assert body == {
        "prompts": [messages],
        "completions": [[{"role": "assistant", "content": "four"}]],
        "columns": {"answer": [42], "odd": [None]},
        "trainer_state": {"global_step": 3, "max_steps": 12, "epoch": 0.5},
    }
    assert "Authorization" not in headers


MISDEEDS = {
    "raw <html>busy</html>": "bad_reply: the reply is not JSON: it begins with '<html>busy</html>'",
    "raw 3": "bad_reply: the reply must be a list of rewards or an object with the key rewards",
    'raw {"reward": [1]}': "bad_reply: the reply must be a list of rewards or an object with the key rewards",
    "raw [1, 2]": "bad_reply: the reply has 2 rewards for 1 completions",
    'raw ["0.5"]': "bad_reply: a reward in the reply must be a number or null, not '0.5'",
    'raw [{"kind": 1}]': "bad_reply: a reward in the reply must be a number or null, not {'kind': 1}",
    "raw [true]": "bad_reply: a reward in the reply must be a number or null, not True",
    "raw [Infinity]": "bad_reply: a reward in the reply is infinite (inf)",
    "raw [[[[[[[[[[1]]]]]]]]]]": "bad_reply: the reply is nested more than 8 levels deep",
    'raw {"rewards": [1], "rewards": [0]}': "bad_reply: the reply is ambiguous: it contains the key 'rewards' twice",
    'raw {"rewards": [1], "spans": []}': "bad_reply: spans must be a list with one entry for each of 1 completions",
    'raw {"rewards": [1], "spans": [[[0, 900]]]}': "bad_reply: spans: [0, 900] is not a range of the 43 characters",
    'raw {"rewards": [1], "spans": [[[2, 1]]]}': "bad_reply: spans: [2, 1] is not a range of the 41 characters",
    'raw {"rewards": [1], "spans": [3]}': "bad_reply: spans: expected a list of [start, end], got 3",
    "huge": "too_large: the reply has 10000000 bytes, more than max_reply_bytes (1048576)",
    "redirect": "redirect: HTTP 307 to",
    "status 401": "rejected: HTTP 401: completions: unwanted",
    "status 503": "server_error: HTTP 503: completions: unwanted (3 attempts)",
    "busy 60": "rate_limited: HTTP 429 (1 attempts; the server requested a pause of 60 s; time_limit_s is 2)",
    "hang": "timeout: no reply within 2",
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_every_server_failure_masks_the_samples_and_is_never_a_zero(server, misdeed):
    # Room for three attempts on a busy machine; the server hangs for longer.
    limit = 2 if misdeed in ("hang", "busy 60") else 60
    [failed] = verdicts(server, [misdeed], time_limit_s=limit, max_retries=2)
    assert failed.outcome is Outcome.ENV_FAILED and failed.rewards == {}
    assert failed.detail.startswith("helpful: " + MISDEEDS[misdeed])


def test_the_spans_of_a_reply_become_those_of_the_verdict(server):
    [verdict] = verdicts(server, ['raw {"rewards": [0.5], "spans": [[[0, 3], [5, 5]]]}'])
    assert verdict.rewards == {"helpful": 0.5} and verdict.reward_spans == {"helpful": ((0, 3), (5, 5))}


RUBRIC = [{"id": "kind", "criterion": "Is it kind?"}, {"id": "short", "criterion": "Is it short?"}]


def criteria_verdict(server, reply):
    env = Functions({"functions": {"rubric/*": server.url}})
    [verdict] = env.verify([trajectory(f"raw {reply}", rubric=RUBRIC)])
    return verdict


def test_a_server_returns_the_rewards_of_criteria_by_id(server):
    found = criteria_verdict(server, '[{"kind": 1, "short": null}]')
    assert found.rewards == {"rubric/kind": 1.0, "rubric/short": None} and found.reward_spans == {}
    found = criteria_verdict(server, '{"rewards": [{"kind": 0.5}], "spans": [{"kind": [[0, 3]]}]}')
    assert found.rewards == {"rubric/kind": 0.5} and found.reward_spans == {"rubric/kind": ((0, 3),)}
    assert criteria_verdict(server, "[null]").rewards == {}


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        ("[1]", "bad_reply: rewards and spans of criteria must be objects by id"),
        ('[{"kind": "1"}]', "bad_reply: a reward in the reply must be a number or null, not '1'"),
        ('{"rewards": [{"kind": 1}], "spans": [[[0, 1]]]}', "bad_reply: rewards and spans of criteria must be objects"),
        ('[{"kid": 1}]', "reward 'rubric/kid' is not a criterion of the row's rubric; did you mean 'rubric/kind'?"),
    ],
)
def test_an_invalid_reply_about_criteria_masks_the_sample(server, reply, detail):
    found = criteria_verdict(server, reply)
    assert found.outcome is Outcome.ENV_FAILED and found.rewards == {}
    assert found.detail.startswith(f"rubric/*: {detail}")


def test_one_request_that_fails_costs_its_own_batch_only(server):
    found = verdicts(server, ["good", "fine", "status 500", "beside", "none"], batch_size=2, max_retries=0)
    assert [verdict.rewards.get("helpful") for verdict in found] == [0.4, 0.4, None, None, None]
    assert [verdict.outcome for verdict in found] == [Outcome.OK] * 2 + [Outcome.ENV_FAILED] * 2 + [Outcome.OK]


def test_a_server_that_recovers_is_asked_again_and_one_that_is_gone_is_a_failure(server):
    found = verdicts(server, ["flaky 503", "reset", "busy 0"], max_retries=3, batch_size=1)
    assert [verdict.outcome for verdict in found] == [Outcome.OK] * 3
    assert server.seen["flaky", "503"] == 3 and server.seen["reset", ""] == server.seen["busy", "0"] == 2
    server.stop()
    [gone] = verdicts(server, ["good"], max_retries=1)
    assert gone.outcome is Outcome.ENV_FAILED and gone.detail.startswith("helpful: connection: ")
    assert gone.detail.endswith("(2 attempts)")


def test_the_key_goes_to_the_server_and_nowhere_else(server, monkeypatch, caplog, capfd):
    monkeypatch.setenv("REWARD_KEY", KEY)
    with caplog.at_level(logging.DEBUG):
        found = verdicts(server, ["good", "status 422"], api_key_env="REWARD_KEY", max_retries=0, batch_size=1)
    assert {headers["Authorization"] for headers, _ in server.requests} == {f"Bearer {KEY}"}
    assert "unwanted Bearer ***" in found[1].detail
    assert KEY not in repr(found) + caplog.text + "".join(capfd.readouterr())


def test_columns_and_tokens_are_sent_according_to_the_config(server):
    verdicts(server, ["good"], columns=[], completion_ids=True)
    assert server.requests[0][1]["columns"] == {} and server.requests[0][1]["completion_ids"] == [[0, 1, 2, 3]]
    with pytest.raises(RunError, match="columns: the rows have no column 'anwser'; did you mean 'answer'"):
        verdicts(server, ["good"], columns=["anwser"])


@pytest.mark.slow
def test_it_works_in_worker_processes_and_is_announced_without_the_server(server):
    section = {"plugin": "functions", "functions": {"helpful": server.url}}
    assert announced_components("env", section) == ("helpful",) and server.requests == []
    with EnvironmentPool({"env": section}, timeout_s=20.0) as pool:
        [verdict] = pool.verify([trajectory("good")])
    assert verdict.rewards == {"helpful": 0.4}


@pytest.mark.parametrize(
    "entry, message",
    [
        ("http://u:secret@h/score", "functions.a.url: must not contain a user, password or query"),
        ("http://", "functions.a.url: must be a URL such as http://"),
        ({"function": "http"}, "functions.a: http could not be built: TypeError"),
        ({"function": "http", "url": "http://h", "api_key_env": "NO_SUCH_KEY"}, "variable NO_SUCH_KEY is not set"),
        ({"function": "http", "url": "http://h", "batch_size": 0}, "batch_size: must be a number of at least 1"),
        ({"function": "http", "url": "http://h", "time_limit_s": 0}, "time_limit_s: must be a number of at least"),
        (
            {"function": "http", "url": "http://h", "retries": 3},
            "http does not accept the argument 'retries'; did you",
        ),
    ],
)
def test_a_reward_that_cannot_be_asked_for_is_refused_before_the_run(entry, message):
    with pytest.raises(ConfigError) as error:
        load_environment("mine", {"plugin": "functions", "functions": {"a": entry}})
    assert message in str(error.value) and "secret" not in str(error.value)
