"""What a config takes from the environment is in no file and no message; nothing that a message quotes acts on a
terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gdpo_nemo.config.changes import find_changes
from gdpo_nemo.config.load import load_config, recorded, save_config, to_yaml
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.observe.alerts import read_alerts
from gdpo_nemo.observe.log import RunLog

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


def test_a_resume_under_the_same_environment_is_no_change_and_shows_no_secret(config, monkeypatch):
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
