"""What a config takes from the environment is in no file and no message; nothing that a message quotes acts on a
terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gdpo_nemo.config.changes import find_changes
from gdpo_nemo.config.load import load_config, recorded, save_config, to_yaml
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.run_files import read_alerts
from gdpo_nemo.tools.interop.nemo_rl.translate import translate
from gdpo_nemo.utils.errors import ConfigError

SECRET = "hunter2-and-more"
OVERRIDES = [
    "logger.mlflow.tracking_uri=${oc.env:GDPO_TEST_URI}",
    "env.digit_sort.key=${oc.env:GDPO_TEST_KEY}",
    "env.digit_sort.header=Bearer ${env.digit_sort.key}",
    "env.digit_sort.several=[a, '${oc.env:GDPO_TEST_KEY}']",
]


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setenv("GDPO_TEST_KEY", SECRET)
    monkeypatch.setenv("GDPO_TEST_URI", f"http://me:{SECRET}@host")
    return load_config(None, OVERRIDES)


def test_values_of_the_environment_reach_the_program_and_no_file(config, tmp_path):
    assert config.env["digit_sort"]["header"] == f"Bearer {SECRET}"
    for same in (config, replace(config, run=replace(config.run, dir="elsewhere"))):
        assert SECRET not in to_yaml(same) and SECRET not in str(recorded(same))
    save_config(config, tmp_path / "config.yaml")
    assert "${oc.env:GDPO_TEST_KEY}" in (tmp_path / "config.yaml").read_text()
    assert load_config(tmp_path / "config.yaml") == config


def test_passwords_in_urls_are_masked():
    config = load_config(None, [f"logger.mlflow.tracking_uri=http://me:{SECRET}@host:5000/x"])
    assert config.logger.mlflow.tracking_uri.endswith(f"{SECRET}@host:5000/x")
    assert recorded(config)["logger"]["mlflow"]["tracking_uri"] == "http://me:***@host:5000/x"


def test_resume_under_the_same_environment_reports_no_change_and_no_secret(config, monkeypatch):
    before = recorded(config)
    assert find_changes(before, config) == []
    monkeypatch.setenv("GDPO_TEST_KEY", "another-" + SECRET)
    changed = load_config(None, [*OVERRIDES, "gdpo.max_num_steps=7"])
    assert [change.key for change in find_changes(before, changed)] == ["gdpo.max_num_steps"]


def test_escape_sequences_are_written_out_in_messages(tmp_path):
    assert str(ConfigError("a\x1b[2J\x9b31m\u202eb\n\tc")) == r"a\x1b[2J\x9b31m\u202eb c"
    log = RunLog(load_config(None, ["logger.console=quiet", "logger.tensorboard.enabled=false"]), tmp_path)
    log.alert("server said \x1b]0;owned\x07")
    log.close("failed")
    assert [alert["text"] for alert in read_alerts(tmp_path)] == [r"server said \x1b]0;owned\x07"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunter2-and-more@host", "redis://:***@host"),
        ("https://hunter2-and-more@host/x", "https://***@host/x"),
        ("https://host/x?api_key=hunter2-and-more&n=3", "https://host/x?api_key=***&n=3"),
        ("https://host/x?n=3&X-Amz-Signature=hunter2-and-more", "https://host/x?n=3&X-Amz-Signature=***"),
        ("https://host/x?code=hunter2-and-more&page=3#access=hunter2", "https://host/x?code=***&page=3#access=***"),
        ("https://host/x?sslmode=require;pw=hunter2#usage", "https://host/x?sslmode=require;pw=***#usage"),
        ("https://me:hunter2@and-more@host/x", "https://me:***@host/x"),
        ("ssh://git@host/x@y", "ssh://git@host/x@y"),
        ("ssh://git:hunter2-and-more@host/x", "ssh://git:***@host/x"),
        ("https://host/a@b?n=3", "https://host/a@b?n=3"),
    ],
)
def test_credentials_in_urls_are_masked_in_files_and_messages(url, shown):
    config = load_config(None, [f"logger.mlflow.tracking_uri='{url}'"])
    assert config.logger.mlflow.tracking_uri == url
    assert recorded(config)["logger"]["mlflow"]["tracking_uri"] == shown
    assert str(ConfigError(f"{url} gives no answer")) == f"{shown} gives no answer"


def test_values_that_are_not_urls_are_saved_unchanged():
    pattern = "(?P<a>x?b=1&c=2;d=3)"
    assert recorded(load_config(None, [f"run.name='{pattern}'"]))["run"]["name"] == pattern


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=${oc.env:GDPO_TEST_KEY}",
        "policy.precision=${oc.env:GDPO_TEST_KEY}",
        "gdpo.rewards=${oc.env:GDPO_TEST_KEY}",
        "policy.model_name='${oc.env:GDPO_TEST_KEY,x}/${oc.env:GDPO_TEST_UNSET}'",
    ],
)
@pytest.mark.parametrize("secret", [SECRET, "'\\" + 80 * "s3cret"])
def test_messages_about_a_secret_show_the_name_of_its_variable(override, secret, monkeypatch):
    monkeypatch.setenv("GDPO_TEST_KEY", secret)
    with pytest.raises(ConfigError) as refused:
        load_config(None, [override])
    assert secret[:12] not in str(refused.value) and repr(secret)[1:12] not in str(refused.value)


RECIPE = """\
grpo: {num_prompts_per_step: "${mul:${oc.env:GDPO_TEST_SIZE},2}", num_generations_per_prompt: 4}
policy: {model_name: Qwen/Qwen2.5-1.5B}
checkpointing: {checkpoint_dir: "results/${oc.env:GDPO_TEST_KEY}"}
logger:
  wandb_enabled: true
  wandb: {project: "${oc.env:GDPO_TEST_KEY}", name: "${oc.env:GDPO_TEST_KEY,x}-${oc.decode:${oc.env:GDPO_TEST_KEY}}"}
"""


def test_a_translated_recipe_holds_no_value_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("GDPO_TEST_KEY", SECRET)
    monkeypatch.setenv("GDPO_TEST_SIZE", "8")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    translation = translate(tmp_path / "recipe.yaml")
    text = translation.to_text("recipe.yaml")
    assert SECRET not in text and "${oc.env:GDPO_TEST_KEY}" in text
    assert translation.content["gdpo"]["num_prompts_per_step"] == 16
    assert translation.variables == ["GDPO_TEST_KEY"]
    monkeypatch.setenv("GDPO_TEST_SIZE", SECRET)
    with pytest.raises(ConfigError, match="uses .{oc.env:GDPO_TEST_SIZE} in a computation, but its value is not a"):
        translate(tmp_path / "recipe.yaml")
