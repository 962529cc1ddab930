"""JSON Schema of a config: accepts what loading accepts; refuses unknown keys, wrong types and numbers out of range."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from gdpo_nemo.algorithms.ranges import fields_of
from gdpo_nemo.commands.config_schema import config_schema
from gdpo_nemo.commands.explain import keys_of
from gdpo_nemo.config.load import config_to_dict, load_config
from gdpo_nemo.config.schema import Config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
VALIDATOR = Draft7Validator(config_schema())


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def all_fields(section: type, prefix: str = ""):
    """Yield (dotted path, key, range) of every key that is not a section."""
    ranges = {field.name: field.range for field in fields_of(section)}
    for key in keys_of(section, prefix):
        if key.section is not None:
            yield from all_fields(key.section, key.path)
        else:
            yield key.path, key, ranges[key.name]


FIELDS = list(all_fields(Config))


def test_schema_is_valid():
    Draft7Validator.check_schema(VALIDATOR.schema)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_fit_the_schema_as_written_and_as_loaded(path):
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    VALIDATOR.validate(OmegaConf.to_container(OmegaConf.load(path)))
    VALIDATOR.validate(config_to_dict(load_config(path)))


def test_every_key_refuses_a_value_of_another_type_and_accepts_an_interpolation():
    for path, key, _ in FIELDS:
        VALIDATOR.validate(nested(path, "${run.name}"))
        wrong: Any = 7 if key.type.startswith(("text", "list", "mapping")) else "seven"
        assert key.type == "any" or not VALIDATOR.is_valid(nested(path, wrong)), path


def test_bounds_of_numbers_are_those_that_a_run_checks():
    compared = 0
    for path, key, valid in FIELDS:
        if valid is None or not key.type.startswith(("integer", "number")):
            continue
        for number in (valid.least, valid.most, valid.above, valid.below, *valid.also):
            for value in () if math.isinf(number) or abs(number) >= 10**15 else (number - 1, number, number + 1):
                whole = int(value) if value == int(value) else value
                if key.type.startswith("integer") and isinstance(whole, float):
                    continue
                assert VALIDATOR.is_valid(nested(path, whole)) == (whole in valid), (path, whole)
                compared += 1
    assert compared > 300


@pytest.mark.parametrize(
    "content",
    [
        {"gdpoo": {}},
        {"gdpo": {"estimatr": "gdpo"}},
        {"gdpo": {"estimator": "gdp"}},
        {"policy": {"precision": "float16"}},
        {"run": None},
        {"sft": {"lam": 0.5}},
        {"defaults": 3},
    ],
    ids=str,
)
def test_mistakes_are_refused(content):
    assert not VALIDATOR.is_valid(content)


@pytest.mark.parametrize(
    "content",
    [
        {"gdpo": {"estimator": "mine.py:estimator"}, "defaults": ["a.yaml", "b.yaml"]},
        {"policy": {"lora": None}},
        {"sft": {"max_num_steps": 3}},
        {"ppo": {"max_num_steps": 3, "lam": 0.5}},
        {"env": {"mine": {"anything": [1, {"a": None}]}}},
    ],
    ids=str,
)
def test_files_functions_and_other_names_of_sections_are_accepted(content):
    assert VALIDATOR.is_valid(content)
