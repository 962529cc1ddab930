"""Loading: inheritance, overrides, interpolation, and one clear line for everything that is wrong."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from omegaconf import OmegaConf

from gdpo_nemo.config.algorithm_choice import ALGORITHMS
from gdpo_nemo.config.allowed_values import SECTIONS_OFF
from gdpo_nemo.config.changes import load_saved_config
from gdpo_nemo.config.load import all_keys, config_to_dict, load_config, save_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.utils.errors import ConfigError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
quick = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_result_is_the_typed_dataclass_with_defaults_filled_in(minimal):
    config = load_config(minimal)
    assert type(config) is Config
    assert config.gdpo.rewards == {"correctness": 1.0, "format": 0.5}
    assert config.policy.megatron_cfg.optimizer == Config().policy.megatron_cfg.optimizer


def test_interpolations_are_resolved_after_the_overrides(minimal):
    assert load_config(minimal, ["run.name=seven"]).run.dir == "results/seven"
    assert load_config(minimal, ["gdpo.max_num_steps=${run.seed}", "run.seed=3"]).gdpo.max_num_steps == 3


def test_a_file_wins_over_its_parents_and_later_parents_over_earlier(minimal, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.yaml").write_text("gdpo: {max_num_steps: 1, val_period: 1, num_prompts_per_step: 1}\n")
    (tmp_path / "b.yaml").write_text("defaults: sub/a.yaml\ngdpo: {val_period: 2, num_prompts_per_step: 2}\n")
    child = tmp_path / "child.yaml"
    child.write_text("defaults: [minimal.yaml, b.yaml]\ngdpo: {num_prompts_per_step: 3}\n")
    gdpo = load_config(child).gdpo
    assert (gdpo.max_num_steps, gdpo.val_period, gdpo.num_prompts_per_step) == (1, 2, 3)
    assert gdpo.rewards == {"correctness": 1.0, "format": 0.5}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "gdpo"])
def test_shared_section_may_have_the_name_of_the_algorithm(minimal, tmp_path, name):
    child = tmp_path / "child.yaml"
    child.write_text(f"defaults: minimal.yaml\nalgorithm: {{type: {name}}}\n{name}: {{max_num_steps: 4}}\n")
    assert load_config(child).gdpo == load_config(minimal, ["gdpo.max_num_steps=4"]).gdpo
    assert load_config(child, [f"{name}.val_period=3", "algorithm.type=gdpo"]).gdpo.val_period == 3
    assert load_config(child, [f"{name}.rewards={{format: 1}}"]).gdpo.rewards == {"format": 1.0}


def test_section_ppo_contains_keys_of_both_sections(minimal):
    config = load_config(minimal, ["algorithm.type=ppo", "ppo={lam: 0.5, max_num_steps: 4}"])
    assert (config.ppo.lam, config.gdpo.max_num_steps) == (0.5, 4)


@pytest.mark.parametrize(
    "content, said",
    [
        ("sft: {max_num_steps: 4}", "sft: algorithm.type is gdpo; name this section gdpo or set algorithm.type to sft"),
        ("sft: {max_num_steps: 4}\ngdpo: {}", "sft: names the same section as gdpo; use one of the names"),
        ("sft: {max_num_steps: 4}\ndpo: {seed: 1}", "dpo.seed: unknown key"),
        ("sft: {max_num_steps: 4}\ndpo: {val_period: 1}", "dpo: names the same section as sft"),
        ("sft: {max_steps: 4}", "sft.max_steps: unknown key"),
        ("sft:", "sft: is empty"),
        ("ppo: {lamb: 0.5}", "ppo.lamb: unknown key"),
    ],
)
def test_other_names_of_the_shared_section_are_checked(minimal, tmp_path, content, said):
    child = tmp_path / "child.yaml"
    child.write_text(f"defaults: minimal.yaml\n{content}\n")
    assert message(child).startswith(said)


def test_a_mapping_of_rewards_replaces_all_and_a_dotted_override_changes_one(minimal, tmp_path):
    child = tmp_path / "child.yaml"
    child.write_text("defaults: minimal.yaml\ngdpo: {rewards: {brevity: 2}}\n")
    assert load_config(child).gdpo.rewards == {"brevity": 2.0}
    assert load_config(child, ["gdpo.rewards.format=0.5"]).gdpo.rewards == {"brevity": 2.0, "format": 0.5}
    assert load_config(child, ["gdpo.rewards={format: 1}"]).gdpo.rewards == {"format": 1.0}


def test_inheritance_that_runs_in_a_circle_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("defaults: b.yaml\n")
    (tmp_path / "b.yaml").write_text("defaults: a.yaml\n")
    assert "a.yaml -> b.yaml -> a.yaml" in message(tmp_path / "a.yaml")


@quick
@given(steps=st.integers(-5, 10**6), lr=st.floats(0, 1, allow_nan=False), flag=st.booleans())
def test_overrides_read_values_as_yaml_and_the_last_one_wins(minimal, steps, lr, flag):
    overrides = ["gdpo.max_num_steps=7", f"gdpo.max_num_steps={steps}", f"policy.megatron_cfg.optimizer.lr={lr!r}"]
    config = load_config(minimal, [*overrides, f"gdpo.val_at_start={str(flag).lower()}", "gdpo.batch_norm=null"])
    assert config.gdpo.max_num_steps == steps
    assert config.policy.megatron_cfg.optimizer.lr == lr
    assert config.gdpo.val_at_start is flag and config.gdpo.batch_norm is None


@quick
@given(key=st.sampled_from([k for k in all_keys() if k not in ("env", "gdpo.options", "gdpo.rewards")]), data=st.data())
def test_a_misspelt_key_names_the_key_and_the_valid_one(minimal, key, data):
    name = key.rpartition(".")[2]
    cut = data.draw(st.integers(1, max(1, len(name) - 1)))
    wrong = key.removesuffix(name) + name[:cut] + "q" + name[cut:]
    text = message(minimal, f"{wrong}=1")
    assert text.startswith(f"{wrong}: unknown key") and "did you mean " in text
    if len(name) > 3:
        assert key in text


@pytest.mark.parametrize(
    "override, expected",
    [
        ("gdpo.max_num_steps=3.7", "gdpo.max_num_steps: expected an integer, got 3.7"),
        ("gdpo.max_num_steps=abc", "gdpo.max_num_steps: expected an integer, got 'abc'"),
        ("gdpo.max_num_steps=true", "gdpo.max_num_steps: expected an integer, got True"),
        ("gdpo.val_at_start=2", "gdpo.val_at_start: expected true or false, got 2"),
        ("gdpo.epsilon=.nan", "gdpo.epsilon: expected a number, got nan"),
        ("gdpo.rewards.format=high", "gdpo.rewards.format: expected a number, got 'high'"),
        ("policy=3", "policy: expected keys and values, got 3"),
        ("policy.model_name=null", "policy.model_name: expected text, got null"),
        ("gdpo.shaping={a: 1}", "gdpo.shaping: expected a list"),
        ("gdpo.max_num_steps=${run.name}", "gdpo.max_num_steps: "),
        ("run.dir=${run.nam}", "run.dir: "),
        ("gdpo.rewards=[", "gdpo.rewards: '[' is not a valid YAML value"),
        ("gdpo.estimator=gdop", "did you mean gdpo?"),
        ("gdpo.preset=verl2", "did you mean verl?"),
        ("no_equals_sign", "no_equals_sign: expected an override of the form section.key=value"),
        ("gdpo.lr=1", "did you mean policy.megatron_cfg.optimizer.lr?"),
    ],
)
def test_a_wrong_value_is_refused_by_name(minimal, override, expected):
    assert expected in message(minimal, override)


def test_a_mandatory_key_is_asked_for(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("policy: {model_name: a/b}\n")
    assert message(path).startswith("gdpo.rewards: must be set")


def test_messages_name_the_file_that_holds_the_mistake(minimal, tmp_path):
    child = tmp_path / "child.yaml"
    child.write_text("defaults: minimal.yaml\ngdpo: {val_perid: 2}\n")
    assert "child.yaml" in message(child) and "did you mean gdpo.val_period?" in message(child)
    assert "did you mean" in message(tmp_path / "minimol.yaml")


CHANGED: dict[str, dict[str, object]] = {
    "policy.lora": {"rank": 8, "alpha": 4.0},
    "teacher": {"model_name": "organisation/teacher"},
    "gdpo.dynamic_sampling": {"enabled": True, "max_rounds": 7},
    "rollout.selection": {"enabled": True, "memory": 0.5},
    "loss_fn.off_policy": {"mode": "truncate", "ratio_max": 4.0},
    "rollout.replay_buffer": {"groups": 2, "reuse": 3},
    "rollout.endpoint": {"enabled": True, "port": 9000},
    "checkpointing": {"enabled": True, "save_period": 3},
    "logger.tensorboard": {"enabled": True},
    "logger.wandb": {"enabled": True, "project": "other"},
    "logger.mlflow": {"enabled": True, "experiment": "other"},
    "logger.prometheus": {"port": 9100, "host": "0.0.0.0"},
}


def nested(section: str, value: object) -> dict:
    for name in reversed(section.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("section", sorted(SECTIONS_OFF))
def test_null_switches_an_inherited_section_off(minimal, tmp_path, section):
    """The result is that of a config that never named the section, with its switch off."""
    (switch, off) = SECTIONS_OFF[section]
    parent = tmp_path / "parent.yaml"
    parent.write_text(OmegaConf.to_yaml({"defaults": "minimal.yaml", **nested(section, CHANGED[section])}))
    child = tmp_path / "child.yaml"
    child.write_text(OmegaConf.to_yaml({"defaults": "parent.yaml", **nested(section, None)}))
    expected = load_config(minimal, {f"{section}.{switch}": off})
    assert load_config(parent) != expected
    assert load_config(child) == load_config(parent, [f"{section}=null"]) == expected
    assert load_config(parent, {section: None}) == expected


def test_a_section_that_null_switched_off_can_be_given_keys_again(minimal):
    config = load_config(minimal, ["policy.lora={rank: 8, alpha: 4}", "policy.lora=null", "policy.lora.rank=2"])
    assert (config.policy.lora.rank, config.policy.lora.alpha) == (2, 32.0)


@pytest.mark.parametrize("section", ["policy", "loss_fn", "policy.generation", "data.train"])
def test_a_section_without_a_switch_cannot_be_null(minimal, section):
    assert message(minimal, f"{section}=null").startswith(f"{section}: is empty; add keys or remove it")


@pytest.mark.parametrize("text", ["gdpo:\n  a: [1\nrun: x\n", "run: {name: x}\nrun: {name: y}\n", "a: b: c\n"])
def test_invalid_yaml_names_file_and_line(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    assert "broken.yaml, line " in message(path)


@pytest.fixture(scope="module")
def demo():
    return load_config(DEMO)


def test_loading_builds_the_schema_once_and_shares_no_value_between_configs(minimal, monkeypatch):
    load_config(minimal)
    built = []
    structured = OmegaConf.structured
    monkeypatch.setattr(OmegaConf, "structured", lambda *what, **how: built.append(what) or structured(*what, **how))
    changed = load_config(minimal, ["policy.lora.rank=2", "run.name=a", "env={digit_sort: {strict: true}}"])
    changed.policy.lora.target_modules.append("other")
    changed.gdpo.rewards["other"] = 1.0
    again = load_config(minimal)
    assert built == []
    assert again == load_config(minimal, ["policy.lora.rank=0"])
    assert "other" not in again.policy.lora.target_modules and "other" not in again.gdpo.rewards


@quick
@given(
    rewards=st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.floats(-10, 10), min_size=1, max_size=4),
    name=st.from_regex(r"[a-z0-9_.-]{1,12}", fullmatch=True),
    seed=st.integers(0, 2**31),
)
def test_a_saved_config_loads_back_equal(demo, tmp_path, rewards, name, seed):
    config = copy.deepcopy(demo)
    config.gdpo.rewards = rewards
    config.run.name = name
    config.run.seed = seed
    path = tmp_path / "nested" / "config.yaml"
    save_config(config, path)
    assert load_config(path) == config
    assert OmegaConf.to_container(OmegaConf.load(path)) == config_to_dict(config)


def test_environments_of_a_parent_stay_only_if_named_again(minimal, tmp_path):
    parent = tmp_path / "parent.yaml"
    child = tmp_path / "child.yaml"
    parent.write_text(minimal.read_text().replace("env: {", "env: {unused: {}, "))
    child.write_text("defaults: parent.yaml\nenv: {mine: {plugin: digit_sort}}\ndata: {train: {environment: mine}}\n")
    assert load_config(child).env == {"mine": {"plugin": "digit_sort"}}
    child.write_text("defaults: parent.yaml\nenv: {toy: {min_valid: 2}}\n")
    assert load_config(child).env == {"toy": {"plugin": "digit_sort", "min_valid": 2}}
    child.write_text("defaults: parent.yaml\nrun: {name: child}\n")
    assert list(load_config(child).env) == ["unused", "toy"]
    assert list(load_config(child, ["env.more={}"]).env) == ["unused", "toy", "more"]
    assert list(load_config(child, ["env={more: {}}"]).env) == ["more"]


def test_a_run_of_before_prompts_were_shared_is_read_as_one_that_shared_none(tmp_path):
    config = load_config(DEMO)
    save_config(config, tmp_path / "config.yaml")
    assert load_saved_config(tmp_path / "config.yaml") == config and config.policy.share_prompts == "auto"
    lines = (tmp_path / "config.yaml").read_text().splitlines(keepends=True)
    (tmp_path / "older.yaml").write_text("".join(line for line in lines if "share_prompts" not in line))
    assert load_saved_config(tmp_path / "older.yaml").policy.share_prompts is False


def test_overrides_of_one_load_do_not_reach_the_next_and_a_changed_file_is_read_again(minimal):
    assert load_config(minimal, ["gdpo.max_num_steps=3", "gdpo.rewards={format: 2}"]).gdpo.rewards == {"format": 2.0}
    again = load_config(minimal)
    assert again.gdpo.rewards == {"correctness": 1.0, "format": 0.5} and again.gdpo.max_num_steps != 3
    minimal.write_text(minimal.read_text().replace("format: 0.5", "format: 0.25"))
    assert load_config(minimal).gdpo.rewards == {"correctness": 1.0, "format": 0.25}


def test_a_mapping_with_a_value_that_cannot_be_pickled_is_refused_in_one_line():
    with pytest.raises(ConfigError) as caught:
        load_config({"gdpo": {"rewards": {"a": threading.Lock()}}})
    assert str(caught.value).startswith("gdpo.rewards.a: expected a number, got <unlocked") and "\n" not in str(
        caught.value
    )
