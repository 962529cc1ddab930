"""Every number of the config declares the values that it may have, and a value outside is refused by its key."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, Any

import pytest

from gdpo_nemo.algorithms.ranges import Field, Range, check_numbers, fields_of
from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config, DifficultyConfig, StridedConfig
from gdpo_nemo.config.validate import check_ranges
from gdpo_nemo.utils.errors import ConfigError


def number_fields(section: type = Config, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Dotted keys and fields with numbers, in the sections below also."""
    for field in fields_of(section):
        if field.section is not None:
            yield from number_fields(field.section, f"{prefix}{field.name}.")
        elif field.has_numbers:
            yield prefix + field.name, field


NUMBERS = dict(number_fields())
RANGES = {key: field.range for key, field in NUMBERS.items() if field.range is not None}


@pytest.fixture(scope="module")
def config() -> Config:
    """With every section that may be null, so that its numbers are there."""
    found = load_config()
    for dataset in (found.data.train, found.data.validation):
        dataset.strided = StridedConfig(stride=8, context_length=8, generate_max_len=8)
        dataset.difficulty = DifficultyConfig(path="rows.jsonl")
    return found


@pytest.fixture
def changed(config):
    """A function that sets a key, of a list or a mapping the only item; the test's end restores it."""
    before: list[tuple[Any, str, Any]] = []

    def change(key: str, value: float) -> None:
        *sections, name = key.split(".")
        section: Any = config
        for part in sections:
            section = getattr(section, part)
        old = getattr(section, name)
        before.append((section, name, old))
        setattr(section, name, [value] if isinstance(old, list) else {"x": value} if isinstance(old, dict) else value)

    yield change
    for section, name, old in reversed(before):
        setattr(section, name, old)


def test_every_number_declares_a_range():
    assert [key for key, field in NUMBERS.items() if field.range is None] == []
    assert len(NUMBERS) > 110


def test_every_default_is_in_its_range(config):
    check_ranges(config)
    check_numbers(Config(data=config.data, gdpo=config.gdpo, policy=config.policy))


@pytest.mark.parametrize("key", sorted(RANGES))
def test_a_number_out_of_its_range_is_refused_by_its_key(config, changed, key):
    outside = [math.nan, -math.inf, -1e300, -(10**23), 10**4000, *_just_outside(RANGES[key])]
    outside += [] if RANGES[key].most == math.inf else [math.inf, 1e300, 10**23]
    if RANGES[key].most == math.inf:
        outside.remove(10**4000)
    for value in outside:
        changed(key, value)
        with pytest.raises(ConfigError, match=rf"^{key}(\[0\]|\.x)?: must be "):
            check_ranges(config)


@pytest.mark.parametrize("key", sorted(RANGES))
def test_a_number_at_the_edge_of_its_range_is_accepted(config, changed, key):
    for value in _just_inside(RANGES[key]):
        changed(key, value)
        check_ranges(config)


def _just_outside(range_: Range) -> list[float]:
    low = range_.least - 1 if math.isinf(range_.above) else range_.above
    high = range_.most + 1 if math.isinf(range_.below) else range_.below
    return [value for value in (low, high) if math.isfinite(value) and value not in range_.also]


def _just_inside(range_: Range) -> list[float]:
    low = range_.least if math.isinf(range_.above) else math.nextafter(range_.above, math.inf)
    high = range_.most if math.isinf(range_.below) else math.nextafter(range_.below, -math.inf)
    return [low, high, *range_.also]


@pytest.mark.parametrize(
    "range_, words",
    [
        (Range(), "finite"),
        (Range(1), "at least 1"),
        (Range(0, 65_535), "0 or more and at most 65,535"),
        (Range(above=0), "more than 0"),
        (Range(0, below=0.5), "0 or more and below 0.5"),
        (Range(above=0, most=math.inf), "more than 0"),
        (Range(1, also=(-1,)), "-1 or at least 1"),
        (Range(-(10**12), 10**12), "at least -1,000,000,000,000 and at most 1,000,000,000,000"),
    ],
)
def test_range_is_described_as_a_condition_on_the_number(range_, words):
    assert str(range_) == words


def test_number_beyond_a_default_limit_is_refused_with_the_limit():
    assert Range(0).demand(1e300) == "at most 1,000,000,000,000,000"
    assert Range().demand(-1e300) == "at least -1,000,000,000,000,000"
    assert Range(0).demand(-1e300) == "0 or more"


@dataclasses.dataclass
class _Inner:
    share: Annotated[float | None, Range(0, 1)] = None


@dataclasses.dataclass
class _Outer:
    plain: int = 0
    several: Annotated[list[int], Range(1)] = dataclasses.field(default_factory=list)
    named: Annotated[dict[str, float], Range(0)] = dataclasses.field(default_factory=dict)
    inner: _Inner = dataclasses.field(default_factory=_Inner)


def test_a_number_without_a_range_is_found():
    found = {field.name: (field.has_numbers, field.range) for field in fields_of(_Outer)}
    assert found["plain"] == (True, None) and found["several"] == (True, Range(1))
    assert fields_of(_Outer)[-1].section is _Inner


@pytest.mark.parametrize(
    "section, message",
    [
        (_Outer(several=[3, 0]), "several[1]: must be at least 1, got 0"),
        (_Outer(named={"a": 0, "b": -1.5}), "named.b: must be 0 or more, got -1.5"),
        (_Outer(inner=_Inner(2)), "inner.share: must be 0 or more and at most 1, got 2"),
    ],
)
def test_a_range_holds_for_items_and_for_sections_below(section, message):
    with pytest.raises(ValueError) as caught:
        check_numbers(section)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "override, message",
    [
        ("policy.megatron_cfg.optimizer.adam_beta1=1.5", "must be 0 or more and below 1, got 1.5"),
        ("policy.megatron_cfg.optimizer.adam_beta2=1", "must be 0 or more and below 1, got 1.0"),
        ("rollout.max_env_failure_share=7", "must be 0 or more and at most 1, got 7.0"),
        ("logger.prometheus.port=-5", "must be at least 1 and at most 65,535, got -5"),
    ],
)
def test_the_dry_run_refuses_a_number_out_of_its_range(override, message, capsys):
    assert cli.main(["train", "--config", "configs/gdpo_tiny_cpu.yaml", "--dry-run", override]) == 2
    assert capsys.readouterr().err.strip().endswith(f"{override.partition('=')[0]}: {message}")


def test_explain_prints_the_range_of_a_number(capsys):
    assert cli.main(["explain", "policy.megatron_cfg.optimizer.adam_beta1"]) == 0
    assert "  range    0 or more and below 1\n" in capsys.readouterr().out
    assert cli.main(["explain", "gdpo.estimator"]) == 0
    assert "  range" not in capsys.readouterr().out
