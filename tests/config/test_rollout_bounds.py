"""Window, bound and depth of asynchronous runs: the numbers, the line that says them, and what contradicts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_nemo.config.description import describe
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.rollout_bounds import (
    admission_bound,
    replaceable_groups,
    resolved_bound,
    resolved_depth,
    resolved_window,
    steps_ahead,
    valid_needed,
)
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.validation import validate

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def of(minimal, *overrides: str):
    """A config of 16 groups of 8 samples a step; overrides of `rollout` without its name."""
    return load_config(minimal, [f"rollout.{text}" if not text.startswith("gdpo") else text for text in overrides])


def refused(minimal, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(of(minimal, *overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "overrides, ahead, window, bound, depth",
    [
        ([], 0, 1, 16, 16),
        (["max_staleness=1"], 1, 4, 29, None),
        (["max_staleness=4"], 4, 4, 77, None),
        (["max_staleness=1", "window=1"], 1, 1, 32, None),
        (["max_staleness=1", "window=17"], 1, 17, 16, None),
        (["max_staleness=2", "depth=20"], 2, 4, 45, 20),
        (["max_staleness=3", "sync_every=3"], 1, 4, 29, None),
        (["max_staleness=1", "sync_every=2"], 0, 1, 16, 16),
        (["max_staleness=1", "gdpo.num_prompts_per_step=1"], 1, 1, 2, None),
    ],
)
def test_window_bound_and_depth_follow_from_the_staleness(minimal, overrides, ahead, window, bound, depth):
    config = of(minimal, *overrides)
    assert validate(config) == []
    assert steps_ahead(config) == ahead
    assert (resolved_window(config), resolved_bound(config), resolved_depth(config)) == (window, bound, depth)


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("sync_every", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 3, 16])
def test_no_group_that_the_bound_admits_is_trained_too_late(staleness, sync_every, groups):
    ahead = staleness - (sync_every - 1)
    for window in range(1, ahead * groups + 2) if ahead >= 0 else ():
        bound = admission_bound(groups, ahead, window)
        assert bound >= groups
        for trained_steps in range(12):
            published = trained_steps - trained_steps % sync_every
            last_admitted = trained_steps * groups + bound - 1
            trained_in_step = (last_admitted + window - 1) // groups
            assert trained_in_step - published <= staleness


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["window=4"], "rollout.window: 4 leaves B = (0 + 1) * 16 - (4 - 1) = 13 groups under way, below the 16"),
        (["max_staleness=1", "window=18"], "B = (1 + 1) * 16 - (18 - 1) = 15"),
        (["max_staleness=1", "window=18"], "use at most 17, or a larger rollout.max_staleness"),
        (["max_staleness=2", "sync_every=2", "window=18"], "B = (2 - 1 + 1) * 16 - (18 - 1) = 15"),
        (["window=0"], "rollout.window: must be at least 1"),
        (["max_staleness=1", "depth=15"], "rollout.depth: 15 groups under way never fill a step of 16"),
        (["max_staleness=1", "depth=30"], "rollout.depth: 30 is above B = (1 + 1) * 16 - (4 - 1) = 29"),
        (["depth=17"], "rollout.depth: 17 is above B = (0 + 1) * 16 - (1 - 1) = 16"),
        (["depth=automatic"], "rollout.depth: must be auto or a whole number of groups, got 'automatic'"),
        (["max_staleness=1", "depth=17.5"], "rollout.depth: must be auto or a whole number"),
        (["max_staleness=1", "depth=true"], "rollout.depth: must be auto or a whole number"),
        (["max_staleness=1", "depth=null"], "rollout.depth"),
        (
            ["sync_every=2"],
            "rollout.sync_every: 2 lets staleness reach sync_every - 1 = 1, above rollout.max_staleness",
        ),
        (["sync_every=0"], "rollout.sync_every: must be at least 1"),
        (["kv=clear"], "rollout.kv: 'clear' is not one of its values"),
        (["kv=keep"], "rollout.kv: has no effect while no sample is under way when weights change"),
        (["kv=drain", "max_staleness=1", "sync_every=2"], "rollout.kv: has no effect"),
        (["group_timeout_s=0"], "rollout.group_timeout_s: must be more than 0"),
        (["min_valid=0.8"], "rollout.min_valid: has no effect while rollout.group_timeout_s is null"),
        (["group_timeout_s=9", "min_valid=0"], "rollout.min_valid: must be above 0 and at most 1, got 0"),
        (["group_timeout_s=9", "min_valid=1.01"], "rollout.min_valid: must be above 0 and at most 1"),
        (
            ["group_timeout_s=9", "min_valid=0.125"],
            "0.125 of the 8 samples of a group is 1, and samples compare from 2",
        ),
        (["group_timeout_s=9", "gdpo.num_generations_per_prompt=2"], "use more than 0.5"),
        (
            ["group_timeout_s=9", "min_valid=0.25", "gdpo.options={leave_one_out: true}"],
            "is 2, and the others of a sample have a deviation (gdpo.options.leave_one_out) from 3 on",
        ),
    ],
)
def test_what_contradicts_the_bound_is_refused_with_the_arithmetic(minimal, overrides, expected):
    assert expected in refused(minimal, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["max_staleness=1", "kv=keep"],
        ["max_staleness=1", "kv=drain", "depth=16"],
        ["max_staleness=1", "depth=29"],
        ["window=1", "depth=16"],
        ["group_timeout_s=9"],
        ["group_timeout_s=9", "min_valid=1", "max_staleness=3"],
    ],
)
def test_what_agrees_with_the_bound_is_accepted(minimal, overrides):
    assert validate(of(minimal, *overrides)) == []


@pytest.mark.parametrize("share, group, needed", [(0.5, 8, 4), (0.5, 9, 5), (0.28, 25, 7), (1.0, 8, 8), (0.3, 8, 3)])
def test_a_share_of_verdicts_is_rounded_up_to_whole_samples(minimal, share, group, needed):
    config = of(minimal, f"min_valid={share}", f"gdpo.num_generations_per_prompt={group}")
    assert valid_needed(config) == needed


def test_rounds_count_the_groups_that_a_step_may_replace(minimal):
    assert replaceable_groups(of(minimal)) == 0
    assert replaceable_groups(of(minimal, "gdpo.dynamic_sampling.enabled=true")) == 48
    assert replaceable_groups(of(minimal, "gdpo.dynamic_sampling={enabled: true, max_rounds: 1}")) == 0


@pytest.mark.parametrize(
    "overrides, line",
    [
        ([], "staleness  0, exactly on-policy"),
        (
            ["max_staleness=2"],
            "staleness  at most 2 steps, bound B = (2 + 1) * 16 - (4 - 1) = 45 groups, window 4, depth auto (16 to "
            "45), new weights every step, kv recompute",
        ),
        (
            ["max_staleness=1", "sync_every=2", "group_timeout_s=30"],
            "staleness  at most 1 step, bound B = (1 - 1 + 1) * 16 - (1 - 1) = 16 groups, window 1, depth 16, "
            "new weights every 2 steps; after 30 s a group is trained from 4 of 8 verdicts on, else dropped",
        ),
    ],
)
def test_the_plan_says_what_runs_ahead_and_by_how_much(minimal, overrides, line):
    assert line in describe(of(minimal, *overrides)).splitlines()


def test_an_evaluation_of_an_asynchronous_run_is_valid_whatever_it_set():
    from gdpo_nemo.commands.evaluate import without_policy

    ahead = ["max_staleness=2", "kv=keep", "window=8", "depth=20", "sync_every=2"]
    config = load_config(CONFIGS / "gdpo_tiny_cpu.yaml", [f"rollout.{text}" for text in ahead])
    validate(config)
    without_policy(config)
    validate(config)
