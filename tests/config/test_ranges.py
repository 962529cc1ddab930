"""Every number of the config has a lowest and a highest value."""

from __future__ import annotations

import math

import pytest

from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.ranges import _UNBOUNDED, check_ranges, number_keys
from gdpo_nemo.config.schema import Config, StridedConfig
from gdpo_nemo.errors import ConfigError


@pytest.fixture(scope="module")
def config():
    """With every section that may be null, so that its numbers are there."""
    found = load_config()
    for dataset in (found.data.train, found.data.validation):
        dataset.strided = StridedConfig(stride=8, context_length=8, generate_max_len=8)
    return found


@pytest.mark.parametrize("key", sorted(set(number_keys(Config)) - {*_UNBOUNDED}))
def test_a_number_out_of_all_range_is_refused_by_its_key(config, key):
    *sections, name = key.split(".")
    section = config
    for part in sections:
        section = getattr(section, part)
    before = getattr(section, name)
    try:
        for value in (math.nan, math.inf, -math.inf, 1e300, -1e300, 10**23, -(10**23), 10**4000):
            setattr(section, name, value)
            with pytest.raises(ConfigError, match=f"^{key}: must be "):
                check_ranges(config)
    finally:
        setattr(section, name, before)


@pytest.mark.parametrize("key, lowest", [("loss_fn.constant_length", 1), ("loss_fn.ratio_clip_min", 0)])
def test_a_number_is_accepted_at_its_bound_and_refused_below_it(key, lowest):
    check_ranges(load_config(overrides=[f"{key}={lowest}"]))
    with pytest.raises(ConfigError, match=f"^{key}: must be "):
        check_ranges(load_config(overrides=[f"{key}={lowest - 1}"]))


def test_the_config_that_comes_with_the_program_is_in_range(config):
    check_ranges(config)
    assert len(number_keys(Config)) > 80
