"""Recipes of NeMo-RL that use NeMo Gym, with a small Gym checkout in NeMo Gym's layout.

Names of agents and rewards come from its files, and without them no weight is said to be translated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.tools.interop.nemo_rl.translate import translate
from gdpo_nemo.tools.interop.translation import CANNOT_RUN, DIFFERENT, DIFFERS, NO_EFFECT, SAME, TRANSLATED
from gdpo_nemo.training.validation import validate

FOLDER = Path(__file__).with_name("nemo_rl")
SUBMODULE = "3rdparty/Gym-workspace/Gym"
PATHS = ["resources_servers/weather/configs/weather.yaml"]
SERVER = """\
weather:
  resources_servers:
    weather: {entrypoint: app.py, domain: agent}
weather_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: weather}
      model_server: {type: responses_api_models, name: policy_model}
"""
LITERAL = """\
async def verify(self, body):
    reward_components = {"correctness": 1.0, "schema_valid": 0.5, "format": 0.0}
    return Reply(reward=1.5, reward_components=reward_components)
"""
BY_KEY = """\
async def verify(self, body):
    self.reward_components = {"schema_valid": 0.5}
    self.reward_components["format"] = await format(body)
    return Reply(reward=1.5, reward_components={"correctness": 1.0, **self.more})
"""
COMPUTED = "async def verify(self, body):\n    return Reply(reward=1.5, reward_components=score(body))\n"
SINGLE = "async def verify(self, body):\n    return Reply(reward=1.0)\n"
WEIGHTS = {"correctness": 1.0, "format": 0.5, "schema_valid": 0.25}


def recorded(*names: str) -> str:
    return json.dumps({"reward": 1.0, "reward_components": dict.fromkeys(names, 1.0)}) + "\n"


def make_checkout(folder: Path, code: str = LITERAL, replies: str = "", name: str = "weather") -> Path:
    """A checkout with one server, which may have several calls for several servers."""
    server = folder / "resources_servers" / name
    for place in ("configs", "data"):
        (server / place).mkdir(parents=True)
    (server / "app.py").write_text(code)
    (server / "configs" / f"{name}.yaml").write_text(SERVER.replace("weather", name))
    (server / "data" / "example.jsonl").write_text(json.dumps({"responses_create_params": {"input": "Paris?"}}) + "\n")
    if replies:
        (server / "data" / "example_rollouts.jsonl").write_text(replies)
    return folder


def make_recipe(folder: Path, change: str = "", paths: list[str] = PATHS) -> Path:
    path = folder / "recipe.yaml"
    rows = f"{SUBMODULE}/resources_servers/weather/data/example.jsonl"
    path.write_text(
        f"defaults: {FOLDER / 'gym_weights.yaml'}\n"
        f"data: {{train: {{data_path: {rows}}}}}\n"
        f"env: {{nemo_gym: {{config_paths: {json.dumps(paths)}, port_range_low: 7000, policy_model: "
        "{responses_api_models: {vllm_model: {extra_body: {chat_template_kwargs: {enable_thinking: false}}}}}}}\n"
        f"{change}\n"
    )
    return path


def test_agents_rows_and_weights_by_name_come_from_the_checkout(tmp_path):
    checkout = make_checkout(tmp_path / "Gym")
    translation = translate(make_recipe(tmp_path), checkout)
    assert translation.status == SAME, translation.summary()
    ours = tmp_path / "ours.yaml"
    ours.write_text(translation.to_text("recipe"))
    config = load_config(ours)
    validate(config)
    assert config.gdpo.rewards == WEIGHTS
    assert config.env["nemo_gym"] == {
        "plugin": "nemo_gym_agent",
        "agents": {"weather_agent": "http://127.0.0.1:7001"},
        "rewards": [{"name": name, "missing": "error"} for name in WEIGHTS],
        "check_sum": True,
        "global_config": {"config_paths": PATHS},
    }
    assert config.rollout.endpoint.enabled and config.rollout.turns.max_turns > 1
    train = config.data.train
    assert train.path == str(checkout / "resources_servers" / "weather" / "data" / "example.jsonl")
    assert (train.environment, train.prompt_key, train.columns) == ("nemo_gym", None, {})
    assert train.chat_template_kwargs == {"enable_thinking": False}
    [line] = [line for line in translation.lines if line.key == "grpo.adv_estimator.reward_weights"]
    assert (line.status, line.targets) == (TRANSLATED, ("gdpo.rewards",))


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, replies, reason",
    [
        (BY_KEY.replace(", **self.more", ""), "", ""),
        (COMPUTED, recorded("format", "schema_valid") + recorded("correctness"), ""),
        (LITERAL, recorded("format", "schema_valid", "correctness"), ""),
        (COMPUTED, "", "computes the names of its reward components"),
        (BY_KEY, "", "computes the names of its reward components"),
        ("def verify(:", "", "computes the names of its reward components"),
        (LITERAL, recorded("format", "style"), "in app.py, but format, style in its recorded replies"),
        (SINGLE, "", "GDPO requires several reward components, but weather returns only reward"),
    ],
)
def test_weights_are_translated_only_if_all_names_are_known(tmp_path, code, replies, reason):
    translation = translate(make_recipe(tmp_path), make_checkout(tmp_path / "Gym", code, replies))
    [line] = [line for line in translation.lines if line.key == "grpo.adv_estimator.reward_weights"]
    if not reason:
        assert translation.status == SAME and translation.content["gdpo"]["rewards"] == WEIGHTS
        return
    assert translation.status == CANNOT_RUN and reason in translation.blockers["env.nemo_gym"]
    assert line.status == DIFFERENT and "rewards" not in translation.content["gdpo"]


def test_weights_of_another_number_than_the_components_cannot_run(tmp_path):
    change = "grpo: {adv_estimator: {reward_weights: [1.0, 2.0]}}"
    translation = translate(make_recipe(tmp_path, change), make_checkout(tmp_path / "Gym"))
    assert "2 weights for the components correctness, format, schema_valid" in translation.summary()


def test_two_servers_share_the_components_and_an_absent_component_is_zero(tmp_path):
    """NeMo-RL's build_reward_component_columns: the union of the names, 0 for absent ones."""
    checkout = make_checkout(tmp_path / "Gym")
    make_checkout(checkout, LITERAL.replace("schema_valid", "brevity"), name="haiku")
    (checkout / "both.yaml").write_text(f"config_paths: [{PATHS[0]}]\nweather_agent: {{responses_api_agents: "
    "{simple_agent: {max_steps: 6}}}\n")  # fmt: skip
    change = "grpo: {adv_estimator: {reward_weights: [1, 2, 3, 4]}}"
    recipe = make_recipe(tmp_path, change, ["both.yaml", "resources_servers/haiku/configs/haiku.yaml"])
    translation = translate(recipe, checkout)
    assert translation.content["gdpo"]["rewards"] == {"brevity": 1, "correctness": 2, "format": 3, "schema_valid": 4}
    options = translation.content["env"]["nemo_gym"]
    assert options["agents"] == {"weather_agent": "http://127.0.0.1:7001", "haiku_agent": "http://127.0.0.1:7002"}
    assert {rule["missing"] for rule in options["rewards"]} == {"zero"}


def test_other_estimators_train_the_scalar_reward_within_the_agents_turns(tmp_path):
    checkout = make_checkout(tmp_path / "Gym", COMPUTED)
    config = checkout / PATHS[0]
    config.write_text(config.read_text().replace("simple_agent:", "simple_agent:\n      max_steps: 6"))
    change = "grpo: {adv_estimator: {name: grpo, reward_weights: null}}"
    translation = translate(make_recipe(tmp_path, change), checkout)
    assert translation.status == SAME, translation.summary()
    assert translation.content["gdpo"]["rewards"] == {"reward": 1.0}
    assert translation.content["env"]["nemo_gym"]["rewards"] == [
        {"name": "reward", "path": "reward", "missing": "error"}
    ]
    assert translation.content["rollout"]["turns"]["max_turns"] == 6


def test_unset_variables_of_servers_and_disabled_validation_do_not_prevent_a_run(tmp_path, monkeypatch):
    """Keys of NeMo Gym's own launcher are not written, and NeMo-RL validates only if the period is above 0."""
    monkeypatch.delenv("GYM_ABSENT", raising=False)
    recipe = make_recipe(tmp_path, "grpo: {val_period: -1}")
    judge = "judge: {responses_api_models: {vllm_model: {api_key: '${oc.env:GYM_ABSENT}'}}}"
    text = recipe.read_text().replace(
        "port_range_low",
        f"uv_venv_dir: '${{oc.env:GYM_ABSENT}}/x', skip_venv_if_present: true, {judge}, port_range_low",
    )
    validation = f"validation: {{data_path: {SUBMODULE}/resources_servers/weather/data/example.jsonl}}"
    recipe.write_text(text.replace("data: {", f"data: {{{validation}, "))
    translation = translate(recipe, make_checkout(tmp_path / "Gym"))
    assert translation.status == SAME, translation.summary()
    assert translation.content["gdpo"].get("val_period") == 0 and translation.variables == ["GYM_ABSENT"]
    content = translation.content["env"]["nemo_gym"]["global_config"]
    assert set(content) == {"config_paths", "judge"}


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "resources_servers/weather/configs/weather.yaml was not found in "),
        ("a: 1", "no file in config_paths defines an agent"),
        (SERVER.replace("name: weather", "nom: weather"), "the agent weather_agent does not name a resources server"),
        (SERVER.replace("weather:\n", "other:\n"), "no file in config_paths defines the resources server weather"),
        (SERVER.replace("app.py", "absent.py"), "absent.py was not found"),
    ],
)
def test_missing_parts_of_a_checkout_are_the_reason(tmp_path, content, reason):
    checkout = make_checkout(tmp_path / "Gym")
    (checkout / PATHS[0]).unlink()
    if content is not None:
        (checkout / PATHS[0]).write_text(content)
    translation = translate(make_recipe(tmp_path), checkout)
    assert translation.status == CANNOT_RUN and reason in translation.blockers["env.nemo_gym"]


def test_the_submodule_of_a_nemo_rl_checkout_is_found_and_a_wrong_folder_is_one_line(tmp_path, capsys):
    make_checkout(tmp_path / SUBMODULE)
    command = ["config", "from-nemo-rl", str(make_recipe(tmp_path)), "--out", str(tmp_path / "ours.yaml")]
    assert cli.main(command) == 0
    assert cli.main([*command, "--gym-checkout", str(FOLDER)]) == 2
    assert "--gym-checkout: " in capsys.readouterr().err
    (tmp_path / SUBMODULE / PATHS[0]).write_text("a: [")
    assert cli.main(command) == 2
    assert "weather.yaml is not valid YAML" in capsys.readouterr().err


def penalized(folder: Path, estimator: str = "grpo", rewards: dict | None = None, **penalties):
    penalty = json.dumps({"default": {"enabled": True, **penalties}}) if penalties else "null"
    estimator = f"{{name: {estimator}, reward_weights: {'null' if estimator == 'grpo' else [1.0, 0.5, 0.25]}}}"
    change = f"grpo: {{adv_estimator: {estimator}, length_penalty: {penalty}}}"
    change += f"\nreward_penalties: {json.dumps(rewards or {})}"
    return translate(make_recipe(folder, change), make_checkout(folder / "Gym"))


def test_length_penalty_becomes_a_component_with_the_coefficient_as_weight(tmp_path):
    translation = penalized(
        tmp_path, group_total_length_penalty_coeff=0.2, group_answer_length_penalty_coeff=0.1, top_percentile=0.2
    )
    assert translation.status == SAME, translation.summary()
    gdpo = translation.content["gdpo"]
    assert gdpo["rewards"] == {"reward": 1.0, "brevity": 0.2, "answer_brevity": 0.1}
    correct = {"on": "reward", "gt": 0.0}
    assert gdpo["shaping"] == [
        {"component": "brevity", "shortest": correct},
        {"component": "answer_brevity", "shortest": {**correct, "thinking": False}},
    ]


def test_length_penalty_has_no_effect_on_components_of_gdpo(tmp_path):
    translation = penalized(tmp_path, "gdpo", group_total_length_penalty_coeff=0.2)
    assert translation.status == SAME and "shaping" not in translation.content["gdpo"]
    [line] = [line for line in translation.lines if line.key.endswith("group_total_length_penalty_coeff")]
    assert line.status == NO_EFFECT and "several reward components" in line.text


@pytest.mark.parametrize(
    ("penalties", "key", "reason"),
    [
        ({"total_bonus": 0.5}, "grpo.length_penalty", "share the bonus"),
        ({"group_total_length_penalty_coeff": 1.5}, "grpo.length_penalty", "may be negative"),
        ({"answer_zmad_penalty": 0.5}, "grpo.length_penalty.default.answer_zmad_penalty", "is not supported"),
        ({"reasoning_bonus": 0.5}, "grpo.length_penalty.default.reasoning_bonus", "reasoning alone"),
        ({"length_type": "chars"}, "grpo.length_penalty.default.length_type", "numbers of sampled tokens"),
    ],
)
def test_differences_of_length_penalties_are_reported(tmp_path, penalties, key, reason):
    translation = penalized(tmp_path, **penalties)
    assert translation.status == DIFFERS and reason in translation.differences[key], translation.summary()


PENALTIES = {
    "penalize_duplicated_reasoning": True,
    "penalize_empty_final_answer": True,
    "penalize_unwanted_tokens": True,
    "token_ids": {"unwanted": [2], "think_open": 12, "think_close": 13},
}


def test_reward_penalties_become_a_condition_on_a_component(tmp_path):
    translation = penalized(tmp_path, rewards=PENALTIES)
    assert translation.status == SAME, translation.summary()
    assert translation.content["gdpo"]["rewards"] == {"reward": 1.0}
    assert translation.content["gdpo"]["shaping"] == [
        {"component": "reward", "condition": {"on": "well_formed", "ge": 1.0}}
    ]
    options = translation.content["env"]["nemo_gym"]
    assert options["well_formed"] == {"repeated_reasoning": True, "empty_answer": True, "unwanted_tokens": [2]}
    ours = tmp_path / "ours.yaml"
    ours.write_text(translation.to_text("recipe"))
    validate(load_config(ours))


@pytest.mark.parametrize(
    ("estimator", "tokens", "checks", "reason"),
    [
        ("grpo", PENALTIES["token_ids"], {"think_tokens": [12, 13]}, "spelled with several tokens"),
        ("grpo", None, None, "set reward_penalties.token_ids.think_open and think_close"),
        ("gdpo", PENALTIES["token_ids"], None, "NeMo-RL sets the sum of the rewards to 0, and refuses a sample"),
    ],
)
def test_differences_of_reward_penalties_are_reported(tmp_path, estimator, tokens, checks, reason):
    rewards = {"penalize_malformed_think_tag": True, "token_ids": tokens}
    translation = penalized(tmp_path, estimator, rewards)
    assert translation.status == DIFFERS
    assert reason in translation.differences["reward_penalties.penalize_malformed_think_tag"]
    assert translation.content["env"]["nemo_gym"].get("well_formed") == checks
