"""Real nemo-gym 0.4.0: the replies that were recorded for it, rewards by name, sessions, discovery."""

import json

import pytest
from environment_samples import trajectory
from real_nemo_gym import COMPILED, REPOSITORY

from gdpo_nemo.algorithms import compute_advantages
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.sections import ImagesConfig
from gdpo_nemo.data.images import read_image
from gdpo_nemo.data.records import Outcome
from gdpo_nemo.data.replies import Reply
from gdpo_nemo.environments.nemo_gym.environment import NemoGym
from gdpo_nemo.environments.nemo_gym.rows import ROW
from gdpo_nemo.tools.gym.trial import recorded_answers, verify_rows
from gdpo_nemo.utils.errors import ConfigError

pytestmark = pytest.mark.slow

TOOLS = "example_tool_call_multireward"
RULES = [{"name": "correctness"}, {"name": "schema_valid"}, {"name": "format"}]


def call(arguments):
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'


ANSWERS = {
    "right": (call('{"city": "San Francisco"}'), (1, 1, 1)),
    "wrong city": (call('{"city": "Paris"}'), (0, 1, 1)),
    "right call plus prose": ("Let me see. " + call('{"city": "San Francisco"}'), (1, 1, 0)),
    "broken arguments": (call('{"city": "San Francisco"'), (0, 0, 0)),
    "text only": ("It is sunny in San Francisco.", (0, 0, 0)),
}


def sample(row, text, group="p", index=0, finish_reason="stop"):
    return trajectory(text, "gym", group, index, finish_reason, **{ROW: row})


@pytest.fixture(scope="module")
def gym_of(real_gym):
    made = []

    def make(*servers, **options):
        urls = (
            {"servers": {name: real_gym.urls[name] for name in servers}} if servers else {"head_server": real_gym.head}
        )
        made.append(NemoGym({**urls, **options}))
        return made[-1]

    yield make
    for gym in made:
        gym.close()


def test_the_multireward_server_pays_each_component_for_itself(real_gym, gym_of):
    row = real_gym.rows(TOOLS)[0]
    verdicts = gym_of(TOOLS, rewards=RULES).verify(
        [sample(row, text, index=i) for i, (text, _) in enumerate(ANSWERS.values())]
    )
    found = {answer: tuple(verdict.rewards.values()) for answer, verdict in zip(ANSWERS, verdicts)}
    assert found == {answer: expected for answer, (_, expected) in ANSWERS.items()}


def test_wrong_city_and_right_call_plus_prose_differ_under_gdpo_and_not_under_grpo(real_gym, gym_of):
    row = real_gym.rows(TOOLS)[0]
    answers = ["right", "wrong city", "right call plus prose", "wrong city", "wrong city"]
    verdicts = gym_of(TOOLS, rewards=RULES).verify([sample(row, ANSWERS[a][0], index=i) for i, a in enumerate(answers)])
    columns = {
        name: [verdict.rewards[name] for verdict in verdicts] for name in ("correctness", "schema_valid", "format")
    }
    assert sum(column[1] for column in columns.values()) == sum(column[2] for column in columns.values()) == 2.0
    gdpo, grpo = (
        compute_advantages(columns, group_ids=[0] * 5, estimator=name).values.tolist() for name in ("gdpo", "grpo")
    )
    assert grpo[1] == grpo[2] and abs(gdpo[1] - gdpo[2]) > 0.3 and gdpo[1] == gdpo[3]


def reply_of(output) -> Reply:
    """A recorded response, which may be of several turns, as one parsed turn."""
    messages = [item for item in output if item["type"] == "message"]
    texts = [part["text"] for item in messages for part in item["content"] if part["type"] == "output_text"]
    calls = [(item["name"], item["arguments"]) for item in output if item["type"] == "function_call"]
    return Reply("\n".join(texts), calls=tuple(calls))


@pytest.mark.parametrize("server", [TOOLS, "mcqa", "format_verification", *COMPILED])
def test_recorded_responses_get_the_recorded_rewards(real_gym, gym_of, server):
    def asked(row):
        return json.dumps([[m["role"], m["content"]] for m in row["responses_create_params"]["input"]])

    rows = {asked(row): row for row in real_gym.rows(server)}
    recorded = real_gym.rows(server, "example_rollouts")
    batch = [sample(rows[asked(r)], "", f"p{i}") for i, r in enumerate(recorded)]
    for made, record in zip(batch, recorded):
        made.reply = reply_of(record["response"]["output"])
    verdicts = gym_of(server).verify(batch)
    assert len(recorded) == 5 and {v.outcome for v in verdicts} == {Outcome.OK}, verdicts
    assert [v.rewards["reward"] for v in verdicts] == [r["reward"] for r in recorded]
    for verdict, record in zip(verdicts, recorded):
        expected = record.get("reward_components") or {}
        assert {name: verdict.rewards[name] for name in verdict.rewards if name != "reward"} == expected


def test_servers_of_different_components_share_a_batch_through_the_head_server(real_gym, gym_of):
    rules = [{"name": "correctness", "servers": [TOOLS]}, {"name": "answer", "path": "reward", "servers": ["mcqa"]}]
    tool_row = {
        **real_gym.rows(TOOLS)[0],
        "agent_ref": {"type": "responses_api_agents", "name": f"{TOOLS}_simple_agent"},
    }
    choice_row = {
        **real_gym.rows("mcqa")[0],
        "agent_ref": {"type": "responses_api_agents", "name": "mcqa_simple_agent"},
    }
    batch = [
        sample(tool_row, ANSWERS["right"][0]),
        sample(choice_row, r"\boxed{B}", "q"),
        sample(choice_row, r"\boxed{A}", "q", 1),
    ]
    gym = gym_of(rewards=rules)
    assert gym.preflight([one.prompt for one in batch]) == {TOOLS: ("correctness",), "mcqa": ("answer",)}
    assert [dict(v.rewards) for v in gym.verify(batch)] == [
        {"correctness": 1.0, "answer": None},
        {"correctness": None, "answer": 1.0},
        {"correctness": None, "answer": 0.0},
    ]


def test_a_session_is_seeded_and_its_cookie_comes_back(real_gym, gym_of):
    row = {**real_gym.rows("example_session_state_mgmt")[0], "initial_count": 3, "expected_count": 3}
    seeded, bare = (
        gym_of("example_session_state_mgmt", seed_session=seed).verify([sample(row, "3")]) for seed in (True, False)
    )
    assert seeded[0].rewards == {"reward": 1.0} and bare[0].rewards == {"reward": 0.0}


def test_a_truncated_answer_with_thoughts_is_taken(real_gym, gym_of):
    row = real_gym.rows("mcqa")[0]
    [verdict] = gym_of("mcqa", split_reasoning=True).verify(
        [sample(row, "<think>A or B</think>so \\boxed{B}", finish_reason="length")]
    )
    assert verdict.rewards == {"reward": 1.0}


def test_preflight_names_the_field_that_a_row_lacks(real_gym, gym_of):
    row = {name: value for name, value in real_gym.rows("format_verification")[0].items() if name != "verifier"}
    with pytest.raises(ConfigError, match="row of prompt p: rejected: HTTP 422: verifier: Field required$"):
        gym_of("format_verification").preflight([sample(row, "x").prompt])


def test_a_custom_server_runs_under_nemo_gym_and_gives_its_three_rewards(gym_of):
    """examples/nemo_gym_plugin, with the rows and the rewards of configs/gdpo_nemo_gym_plugin.yaml."""
    config = load_config(REPOSITORY / "configs" / "gdpo_nemo_gym_plugin.yaml", [])
    row = json.loads((REPOSITORY / config.data.train.path).read_text().splitlines()[0])
    right = row["expected_answer"]
    answers = {
        f"<think>so</think>\n<answer>{right}</answer>": (1, 1, 1),
        f"<think>so</think>\n<answer>{right + 1}</answer>": (0, 1, 1),
        f"<answer>{right}</answer>": (1, 1, 0),
        f"<think>so</think>\n<answer>{right}.5</answer>": (0, 0, 1),
        "": (0, 0, 0),
    }
    gym = gym_of("tagged_sum", rewards=config.env["sums"]["rewards"])
    verdicts = gym.verify([sample(row, text, index=i) for i, text in enumerate(answers)])
    assert [tuple(verdict.rewards.values()) for verdict in verdicts] == list(answers.values())
    assert tuple(verdicts[0].rewards) == ("correctness", "whole_number", "tags") == tuple(config.gdpo.rewards)


def test_circles_of_an_image_are_counted_by_the_server_and_its_row_is_a_prompt_with_the_image(real_gym, gym_of):
    gym = gym_of("circle_count")
    rows = real_gym.rows("circle_count")
    image, text = gym.read_row(rows[0])["messages"][-1]["content"]
    assert text["text"].startswith("How many") and read_image(image["image"], ImagesConfig()).width == 1000
    count = sum(circle["color"] == rows[0]["target_color"] for circle in rows[0]["circles"])
    answers = {f"\\boxed{{{count}}}": 1.0, f"\\boxed{{{count + 1}}}": 0.0, "many": 0.0}
    verdicts = gym.verify([sample(rows[0], answer, index=i) for i, answer in enumerate(answers)])
    assert [verdict.rewards for verdict in verdicts] == [{"reward": value} for value in answers.values()]
    recorded = recorded_answers(real_gym.data / "circle_count")
    result = verify_rows("circle_count", real_gym.urls["circle_count"], rows[:1], recorded)
    assert (result["status"], result["recorded"], result["different"]) == ("verified", 5, [])


def test_scan_verifies_the_expected_answer_of_each_row_and_a_minimal_answer(real_gym):
    for server, components in (("mcqa", ["reward"]), (TOOLS, ["correctness", "format", "reward", "schema_valid"])):
        rows = real_gym.rows(server)[:2]
        recorded = recorded_answers(real_gym.data / server)
        result = verify_rows(server, real_gym.urls[server], rows, recorded)
        assert (result.get("recorded", 0), result.get("different", [])) == (5 if server == "mcqa" else 0, [])
        assert (result["status"], result["components"]) == ("verified", components), result["summary"]
        for index in ("0", "1"):
            minimal, *expected = [one["rewards"]["reward"] for one in result["answers"] if one["row"] == index]
            assert minimal < max(expected), result["answers"]
    refused = verify_rows("mcqa", real_gym.urls["mcqa"], [{"responses_create_params": {"input": "?"}, "options": 1}])
    assert refused["status"] == "failed" and "rejected: mcqa: HTTP 422: options" in refused["summary"]
