"""The section `loss_fn` is the class that the loss takes: no key can be in one and not in the other."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import get_type_hints

import pytest

from gdpo_nemo.algorithms import LossSettings, OffPolicySettings
from gdpo_nemo.config.allowed_values import CHOICES
from gdpo_nemo.config.load import all_keys, load_config, to_yaml
from gdpo_nemo.config.schema import Config
from gdpo_nemo.training.gdpo import GDPO

KEYS = [
    key.removeprefix("loss_fn.") for key in all_keys() if key.startswith("loss_fn.") and key != "loss_fn.off_policy"
]


def at(node, key: str):
    for name in key.split("."):
        node = getattr(node, name)
    return node


def another(key: str):
    """A value that the key does not have by default."""
    default = at(LossSettings(), key)
    names = CHOICES.get(f"loss_fn.{key}")
    if names:
        return next(name for name in names if name != default)
    return {bool: not default, float: 1.5, int: 3, dict: {"a": 1}}.get(type(default), 2)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_the_section_reaches_the_settings_that_the_ranks_get(minimal, key):
    value = another(key)
    loss = GDPO(load_config(minimal, [f"loss_fn.{key}={value}"]), None, None, None).loss
    assert isinstance(loss, LossSettings) and at(loss, key) == value != at(LossSettings(), key)


def test_the_section_is_the_class_of_the_settings_and_survives_yaml(minimal, tmp_path):
    assert get_type_hints(Config)["loss_fn"] is LossSettings
    assert len(KEYS) == len(dataclasses.fields(LossSettings)) - 1 + len(dataclasses.fields(OffPolicySettings))
    config = load_config(minimal, ["loss_fn.type=gspo", "loss_fn.off_policy={mode: mask, level: sequence}"])
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml").loss_fn == config.loss_fn


def test_a_section_imports_no_torch():
    code = "import gdpo_nemo.config.validate, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
