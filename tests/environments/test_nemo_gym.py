"""Rows, completions, options and weights of the nemo_gym environment, without any server."""

import json
import math
import re
import time

import pytest
from environment_samples import REPLIES, trajectory
from hypothesis import given, settings, strategies as st

from gdpo_nemo.algorithms.rubrics import Criterion
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.conversation import output_items
from gdpo_nemo.data.records import Outcome
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.environments.http_client import Cookies, api_key
from gdpo_nemo.environments.nemo_gym.agent_environment import NemoGymAgent
from gdpo_nemo.environments.nemo_gym.environment import NemoGym
from gdpo_nemo.environments.nemo_gym.rows import ROW, read_row, request_body, reward_spans_of, routes_of
from gdpo_nemo.environments.nemo_gym.settings import read_rules, read_settings, rewards_of
from gdpo_nemo.environments.registry import announced_components, load_environment
from gdpo_nemo.environments.server_replies import Failure, check_measurement, depth_exceeds, parse_json, retry_after_s
from gdpo_nemo.rollouts.metrics import rollout_metrics
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

SERVERS = {"servers": {"one": "http://127.0.0.1:1"}}
TOOL = {"type": "function", "name": "f", "description": "d", "strict": True, "parameters": {"type": "object"}}


@pytest.mark.slow
def test_a_row_becomes_a_chat_with_tools_and_stays_itself():
    row = {
        "responses_create_params": {
            "instructions": "be brief",
            "input": [
                {"role": "developer", "content": "rules"},
                {"role": "user", "type": "message", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": []},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me"}]},
                {"type": "function_call", "name": "f", "call_id": "c1", "arguments": '{"x": 1}'},
                {"type": "function_call", "name": "f", "call_id": "c2", "arguments": "broken"},
                {"type": "function_call_output", "call_id": "c1", "output": "7"},
            ],
            "tools": [TOOL],
            "temperature": None,
        },
        "id": 3,
    }
    read = read_row(row)
    assert [(m["role"], m["content"]) for m in read["messages"]] == [
        ("system", "be brief"), ("system", "rules"), ("user", "hi"), ("assistant", "let me"), ("tool", "7"),
    ]  # fmt: skip
    arguments = [call["function"]["arguments"] for call in read["messages"][3]["tool_calls"]]
    assert arguments == [{"x": 1}, "broken"] and read["tools"][0]["function"]["name"] == "f"
    assert read[ROW] is row and "id" not in read
    body = json.loads(request_body(trajectory("hello", **read), False))
    assert body["id"] == 3 and "temperature" not in body["responses_create_params"]
    assert body["response"]["tools"] == [TOOL] and body["response"]["output"][0]["content"][0]["text"] == "hello"
    assert {"id", "created_at", "model", "object", "parallel_tool_calls", "tool_choice"} <= body["response"].keys()


def test_images_of_a_row_become_parts_of_its_messages_and_are_sent_as_in_the_row():
    url = "data:image/png;base64,AAAA"
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": "Count."}]
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Box."}]},
        {"role": "user", "content": parts},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": url}]},
    ]
    row = {"responses_create_params": {"input": items}, "target": 3}
    columns = read_row(row)
    image = {"type": "image", "image": url}
    assert columns["messages"] == [
        {"role": "system", "content": "Box."},
        {"role": "user", "content": [image, {"type": "text", "text": "Count."}]},
        {"role": "tool", "tool_call_id": "c", "content": [image]},
    ]
    body = json.loads(request_body(trajectory("3", **columns), split_reasoning=False))
    assert body["responses_create_params"] == row["responses_create_params"] and body["target"] == 3


def test_a_row_without_messages_is_read_for_an_agent_and_refused_for_a_server():
    """Agents such as Aviary's write the first prompt themselves, and the row is sent to them as it is."""
    row = {"responses_create_params": {"input": []}, "task_idx": 3}
    found = NemoGymAgent({"agents": {"aviary": "http://127.0.0.1:1"}}).read_row(row)
    assert found == {"messages": [{"role": "user", "content": ""}], ROW: row}
    with pytest.raises(ConfigError, match="responses_create_params.input must be text or a list"):
        read_row(row)


def test_the_spans_of_a_reply_count_from_the_begin_of_the_text_with_its_reasoning():
    sample = trajectory("<think>so</think>1 or 2", **read_row({"responses_create_params": {"input": "a"}}))
    reply = {"reward_spans": {"reward": [[0, 1], [5, 6]]}}
    body = json.loads(request_body(sample, split_reasoning=True))
    message = body["response"]["output"][1]["content"][0]["text"]
    found = reward_spans_of(reply, sample, {"reward": 1.0}, split_reasoning=True)
    assert [sample.text[start:end] for start, end in found["reward"]] == [message[0], message[5]] == ["1", "2"]


def test_rows_are_read_by_their_environment_and_a_bad_one_is_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"responses_create_params": {"input": "a"}, "id": 5}\n{"responses_create_params": {"input": "b"}}\n'
    )
    environments = {"gym": NemoGym(SERVERS)}
    rows = load_rows(DatasetConfig(path=str(file)), environments, "train", 0)
    assert [row["id"] for row in rows] == ["train/0", "train/1"] and rows[0][ROW]["id"] == 5
    for text, message in (
        ('{"prompt": "x"}', "row 0 has no responses_create_params"),
        ('{"responses_create_params": {"input": []}}', "input must be text or a list of items"),
        (
            '{"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}}',
            "content other than text and images",
        ),
        ('{"responses_create_params": {"input": [{"type": "web_search_call"}]}}', "type 'web_search_call'"),
        ('{"responses_create_params": {"input": "a"}, "x": NaN}', "cannot be sent as JSON"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_rows(DatasetConfig(path=str(file)), environments, "train", 0)


CALLABLE = [{"type": "function", "function": {"name": "f"}}]


def items_of(text, tools=CALLABLE, split=False):
    return output_items(REPLIES.parse(text, tools), split)


def kinds(*how):
    return [item["type"] for item in items_of(*how)]


@pytest.mark.slow
def test_a_completion_becomes_thoughts_message_and_calls():
    block = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    assert kinds("hi " + block + block) == ["message", "function_call", "function_call"]
    assert kinds(block) == ["function_call"] and kinds(block, None) == ["message"]
    assert kinds("<think>so</think>" + block, CALLABLE, True) == ["reasoning", "function_call"]
    assert kinds("") == ["message"] and kinds("<think>so</think>", None, True) == ["reasoning"]
    for broken in ("{}", "[1]", '{"name": "f", "arguments": {"x": }}'):  # as on vLLM's server
        assert kinds(f"<tool_call>{broken}</tool_call>") == ["message"]
    assert json.loads(items_of(block)[0]["arguments"]) == {"x": "é"}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='<>/tool_cal{}"name:argumets\\ \n[]é\ud800', max_size=120))
def test_any_completion_can_be_sent(text):
    row = {"responses_create_params": {"input": "x", "tools": [TOOL]}}
    body = json.loads(request_body(trajectory(text, **{ROW: row}), True))
    assert body["response"]["output"]


_NAMES = st.sampled_from(
    ["reward", "reward_components", "a", "mask_sample", "failure_kind", "instance_config", "x/y", ""]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(reply=st.dictionaries(_NAMES, _JSON, max_size=6), named=st.booleans(), check_sum=st.booleans())
def test_any_reply_is_finite_rewards_or_a_failure_in_one_line(reply, named, check_sum):
    family = {"name": "rubric/*", "path": "reward_components", "missing": "mask"}
    rules = read_rules([{"name": "a", "missing": "mask"}, {"name": "b", "path": "reward"}, family]) if named else ()
    try:
        parsed = parse_json(json.dumps(reply).encode(), 100)
        check_measurement(parsed)
        rewards = rewards_of(parsed, rules, "one", check_sum).rewards
    except Failure as failure:
        assert len(failure.detail) < 600 and failure.detail.isprintable()
    else:
        assert rewards and all(value is None or math.isfinite(value) for value in rewards.values())


MULTICHALLENGE = [
    {"question": "Did it avoid peanuts?", "pass_criteria": "NO", "judge_prompt": "...", "judge_response": "[[NO]]",
     "verdict": "NO", "score": 1.0, "weight": 2.0},
    {"question": "Did it use the name?", "pass_criteria": "YES", "verdict": "NO", "score": 0.0, "weight": 1.0},
]  # fmt: skip
INVERSE_IF = [
    {"criterion_id": "C1", "criteria": "Three sentences?", "verdict": "PASS", "explanation": "", "score": 1.0},
    {"criterion_id": "", "criteria": "No letter e?", "verdict": "FAIL", "explanation": "", "score": 0.0},
]
FINANCE = [{"criteria": "Revenue", "severity": 3.0, "must_pass": True, "score": None, "votes": []}]


@pytest.mark.parametrize(
    ("path", "evaluations", "rewards", "criteria"),
    [
        ("rubric_evaluations", MULTICHALLENGE, {"rubric/1": 1.0, "rubric/2": 0.0},
         [Criterion("Did it avoid peanuts? (expected answer: NO)", 2.0), Criterion("Did it use the name?")]),
        ("rubric_evaluations", INVERSE_IF, {"rubric/C1": 1.0, "rubric/2": 0.0},
         [Criterion("Three sentences?"), Criterion("No letter e?")]),
        ("rubric_judgements", FINANCE, {"rubric/1": None}, [Criterion("Revenue", 3.0, True)]),
        ("rubric_evaluations", [], {}, []),
    ],
)  # fmt: skip
def test_the_evaluations_in_a_reply_are_the_criteria_of_a_family(path, evaluations, rewards, criteria):
    family = {"name": "rubric/*"} | ({"path": path} if path != "rubric_evaluations" else {})
    rules = read_rules([family, {"name": "mean", "path": "reward"}])
    found = rewards_of({"reward": 0.5, path: evaluations}, rules, "one")
    assert found.rewards == {**rewards, "mean": 0.5}
    assert found.criteria == dict(zip(rewards, criteria))
    present = any(value is not None for value in rewards.values())
    assert found.names == ("rubric/*", "mean")[0 if present else 1 :]


def test_a_reply_without_evaluations_fails_or_has_no_criteria():
    reply = {"reward": 0.5, "num_total": 3}
    with pytest.raises(Failure, match="missing_reward: rubric_evaluations is not in the reply; the reply has reward, "):
        rewards_of(reply, read_rules([{"name": "rubric/*"}]), "one")
    for change in ({"missing": "mask"}, {"servers": ["two"]}):
        assert rewards_of(reply, read_rules([{"name": "rubric/*", **change}]), "one") == ({}, {})


@pytest.mark.parametrize(
    ("evaluations", "message"),
    [
        ({"C1": 1.0}, "expected a list of evaluations as rubric_evaluations, got"),
        ([3], "expected a list of evaluations as rubric_evaluations, got"),
        ([INVERSE_IF[0], INVERSE_IF[0]], "rubric_evaluations: criterion 2: id 'C1' is not unique"),
        ([{"criterion_id": "C1", "score": 1.0}], "rubric_evaluations: criterion 1: criterion must be a text"),
        ([{"criteria": "a", "score": "PASS"}], "the score of 1 in rubric_evaluations is of type str, not a number"),
        ([{"criteria": "a", "score": 1.0, "weight": "2"}], "rubric_evaluations: criterion 1: weight must be a finite"),
        ([{"criteria": "a", "score": 1.0}] * 10_000, "rubric_evaluations: has 10000 criteria, more than 1000"),
    ],
)
def test_evaluations_that_are_not_a_rubric_fail_the_sample_in_one_line(evaluations, message):
    with pytest.raises(Failure) as failure:
        rewards_of({"rubric_evaluations": evaluations}, read_rules([{"name": "rubric/*"}]), "one")
    assert failure.value.kind == "bad_reply" and failure.value.detail.startswith(message)
    assert failure.value.detail.isprintable() and len(failure.value.detail) < 400


@pytest.mark.slow
def test_long_hostile_texts_are_read_in_linear_time():
    begin = time.process_time()
    items_of("<tool_call>" * 30_000)
    items_of('<tool_call>{"name": "f", "arguments":' + " " * 300_000 + "x</tool_call>")
    assert depth_exceeds(b"[" * 200 + b'"' + b'\\"' * 500_000, 100)
    assert not depth_exceeds(b'["' + b"[" * 10_000 + b'"]', 100) and not depth_exceeds(b'"\\', 0)
    assert depth_exceeds(b'{"a": ' * 101, 100) and not depth_exceeds(b'{"a": [{}, {}]}' * 200, 100)
    assert time.process_time() - begin < 4.0


@pytest.mark.parametrize(
    "value, seconds",
    [(None, None), ("3", 3.0), ("-1", 0.0), ("nan", None), ("soon", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)
def test_retry_after_is_seconds_or_a_date(value, seconds):
    assert retry_after_s(value) == seconds


def test_cookies_are_stored_unchanged_and_deleted_on_request():
    jar = Cookies()
    jar.update(['a="x.y"; path=/; Max-Age=99', "b=2; Domain=example.org", "no cookie"])
    assert jar.header() == 'a="x.y"; b=2'
    jar.update(["a=; Max-Age=0"])
    assert jar.header() == "b=2"
    with pytest.raises(Failure, match="too large"):
        jar.update(["a=" + "x" * 10_000])


def test_the_head_servers_configuration_names_servers_and_agents():
    settings = read_settings({"head_server": "http://head.example:11000", "agents": {"mine": "tools"}})
    text = """
    tools: {resources_servers: {impl: {entrypoint: app.py, host: 0.0.0.0, port: 12503}}}
    other: {resources_servers: {x: {host: 10.0.0.7, port: 5}, y: null}}
    tools_agent: {responses_api_agents: {simple: {resources_server: {name: tools}}}}
    policy_model: {responses_api_models: {vllm: {host: h, port: 1}}}
    config_paths: [a, b]
    """
    routes = routes_of(text, settings)
    assert routes.servers == {"tools": "http://head.example:12503", "other": "http://10.0.0.7:5"}
    assert (
        routes.server_of({"agent_ref": {"name": "tools_agent"}})
        == routes.server_of({"agent_ref": {"name": "mine"}})
        == "tools"
    )
    assert routes.server_of({"agent_ref": {"name": "other"}}) == "other"
    for row in ({}, {"agent_ref": {"name": "nobody"}}):
        with pytest.raises(ConfigError, match="agent"):
            routes.server_of(row)
    for bad in ("a: [", "[1]", "tools: {resources_servers: {x: {host: 'a b', port: x}}}", "{}", None, 3):
        with pytest.raises(Failure):
            routes_of(bad, settings)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "set either servers"),
        ({**SERVERS, "head_server": "http://h:1"}, "set either servers"),
        ({"servers": {"a": "127.0.0.1:80"}}, "servers.a: must be a URL"),
        ({"servers": {"a": "http://user:pass@h:80"}}, "must not contain a user, password or query"),
        ({"servers": {"a": "http://h:99999"}}, "servers.a: must be a valid URL"),
        ({**SERVERS, "agents": {"x": "two"}}, "agents.x: servers has no entry 'two'"),
        ({**SERVERS, "deadline": 3}, "unknown option 'deadline'; did you mean 'deadline_s'"),
        ({**SERVERS, "deadline_s": 0}, "deadline_s: must be a number of at least"),
        ({**SERVERS, "min_valid": 0.5}, "min_valid: must be"),
        ({**SERVERS, "straggler_grace_s": 2}, "straggler_grace_s: has no effect without min_valid"),
        ({**SERVERS, "api_key_env": 3}, "api_key_env: must be the name"),
        ({**SERVERS, "rewards": []}, "rewards: must be a list"),
        ({**SERVERS, "rewards": [{"path": "x"}]}, "every entry requires a name"),
        ({**SERVERS, "rewards": [{"name": "x", "pat": "x"}]}, "unknown key 'pat'; did you mean 'path'"),
        ({**SERVERS, "rewards": [{"name": "x", "missing": "0"}]}, "rewards.x.missing: '0' is not one of error, mask, "
                                                                  "zero"),
        ({**SERVERS, "rewards": [{"name": "x/*", "missing": "zero"}]}, "rewards.x/*.missing: zero is not supported"),
        ({**SERVERS, "rewards": [{"name": "x", "weight": "1"}]}, "rewards.x.weight: must be a number"),
        ({**SERVERS, "rewards": [{"name": "x"}, {"name": "x"}]}, "'x' is listed twice"),
        ({**SERVERS, "rewards": [{"name": "x", "servers": ["two"]}]}, "rewards.x.servers: servers has no entry 'two'"),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused_in_one_line(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        NemoGym(options)
    assert "\n" not in str(error.value) and "pass@" not in str(error.value)


def test_remote_environment_option_without_effect_is_also_refused_by_dry_run():
    agent = {"agents": {"one": "http://h:1"}}
    for name, options in (("nemo_gym", SERVERS), ("nemo_gym_agent", agent)):
        for read in (load_environment, announced_components):
            with pytest.raises(
                ConfigError, match=f"env.{name}.num_workers: has no effect, because {name} runs on servers"
            ):
                read(name, {**options, "num_workers": 2})
    with pytest.raises(ConfigError, match="rewards.x.servers: agents has no entry 'on'; did you mean 'one'"):
        announced_components("nemo_gym_agent", {**agent, "rewards": [{"name": "x", "servers": ["on"]}]})
    assert announced_components("nemo_gym_agent", {**agent, "rewards": [{"name": "x", "servers": ["one"]}]}) == ("x",)


def test_the_key_is_read_from_the_environment_and_never_from_the_config(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        api_key("NO_SUCH_KEY")
    monkeypatch.setenv("NO_SUCH_KEY", "k")
    assert (
        api_key("NO_SUCH_KEY") == "k"
        and "k" not in vars(read_settings({**SERVERS, "api_key_env": "NO_SUCH_KEY"})).values()
    )


CONFIG = "configs/gdpo_nemo_gym_multireward.yaml"


def test_weights_may_be_given_with_the_rewards_but_not_contradict(monkeypatch):
    config = load_config(CONFIG)
    validate(config)
    assert config.gdpo.rewards == {"correctness": 1.0, "schema_valid": 1.0, "format": 1.0}
    lighter = load_config(CONFIG, ["env.tools.rewards=[{name: a, weight: 0.5}, {name: b}]"])
    validate(lighter)
    assert lighter.gdpo.rewards == {"a": 0.5, "b": 1.0}
    with pytest.raises(
        ConfigError, match=r"env.tools.rewards\[2\]: weight 1.0 of 'format' conflicts with gdpo.rewards"
    ):
        validate(load_config(CONFIG, ["gdpo.rewards={correctness: 1.0, schema_valid: 1.0, format: 2.0}"]))
    with pytest.raises(ConfigError, match="gdpo.rewards.style: no environment returns this component"):
        validate(load_config(CONFIG, ["gdpo.rewards={style: 1.0}", "env.tools.rewards=[{name: a}]"]))
    with pytest.raises(ConfigError, match="gdpo.rewards: must be set"):
        load_config(CONFIG, ["env.tools.rewards=null"])
    validate(load_config(CONFIG, ["env.tools.rewards=null", "gdpo.rewards={anything: 1.0}"]))  # known when asked


def test_failures_are_counted_per_environment_and_stragglers_apart():
    batch = [trajectory("x", name, index=i) for name in ("gym", "math") for i in range(4)]
    batch[0].outcome = Outcome.ENV_FAILED
    batch[1].outcome = Outcome.ABORTED
    found = rollout_metrics(batch, 0)
    assert found["rollout/env_failed"] == found["rollout/aborted"] == 0.125
    assert found["rollout/env_failed/gym"] == 0.25 and found["rollout/env_failed/math"] == 0.0
