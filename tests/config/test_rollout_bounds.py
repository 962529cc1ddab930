"""Window, bound and depth of asynchronous runs: the numbers, the line that says them, and what contradicts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.config.rollout_checks import (
    admission_bound,
    replaceable_groups,
    resolved_bound,
    resolved_depth,
    resolved_window,
    steps_ahead,
    valid_needed,
)
from gdpo_nemo.planning.report import describe
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def of(minimal, *overrides: str):
    """A config of 16 groups of 8 samples a step; overrides of `rollout` without its name."""
    return load_config(
        minimal, [text if text.startswith(("data", "gdpo", "loss_fn")) else f"rollout.{text}" for text in overrides]
    )


def refused(minimal, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(of(minimal, *overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "overrides, ahead, window, bound, depth",
    [
        ([], 0, 1, 16, 16),
        (["max_staleness=1"], 1, 1, 32, None),
        (["max_staleness=4"], 4, 1, 80, None),
        (["max_staleness=4", "window=4"], 4, 4, 77, None),
        (["max_staleness=1", "window=17"], 1, 17, 16, None),
        (["max_staleness=2", "depth=20"], 2, 1, 48, 20),
        (["max_staleness=3", "sync_every=3"], 1, 1, 32, None),
        (["max_staleness=1", "sync_every=2"], 0, 1, 16, 16),
        (["max_staleness=1", "gdpo.num_prompts_per_step=1"], 1, 1, 2, None),
    ],
)
def test_window_bound_and_depth_follow_from_the_staleness(minimal, overrides, ahead, window, bound, depth):
    config = of(minimal, *overrides)
    assert validate(config).notes == ()
    assert steps_ahead(config) == ahead
    assert (resolved_window(config.rollout), resolved_bound(config), resolved_depth(config)) == (window, bound, depth)


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
        (["window=4"], "rollout.window: 4 allows only B = (0 + 1) * 16 - (4 - 1) = 13 groups in flight, below the 16"),
        (["max_staleness=1", "window=18"], "B = (1 + 1) * 16 - (18 - 1) = 15"),
        (["max_staleness=1", "window=18"], "use at most 17, or a larger rollout.max_staleness"),
        (["max_staleness=2", "sync_every=2", "window=18"], "B = (2 - 1 + 1) * 16 - (18 - 1) = 15"),
        (["window=0"], "rollout.window: must be at least 1"),
        (["max_staleness=1", "depth=15"], "rollout.depth: 15 groups in flight never fill a step of 16"),
        (["max_staleness=1", "depth=33"], "1 allows (B = (1 + 1) * 16 - (1 - 1) = 32); use at most 32"),
        (["depth=17"], "0 allows (B = (0 + 1) * 16 - (1 - 1) = 16); use at most 16"),
        (["depth=automatic"], "rollout.depth: must be auto or a whole number of groups, got 'automatic'"),
        (["max_staleness=1", "depth=17.5"], "rollout.depth: must be auto or a whole number"),
        (["max_staleness=1", "depth=true"], "rollout.depth: must be auto or a whole number"),
        (["max_staleness=1", "depth=null"], "rollout.depth"),
        (
            ["sync_every=2"],
            "rollout.sync_every: 2 lets staleness reach sync_every - 1 = 1, above rollout.max_staleness",
        ),
        (["sync_every=0"], "rollout.sync_every: must be at least 1"),
        (["kv=clear"], "rollout.kv: 'clear' is not a valid value"),
        (["kv=keep"], "rollout.kv: has no effect while no sample is in flight when weights change"),
        (["kv=drain", "max_staleness=1", "sync_every=2"], "rollout.kv: has no effect"),
        (["group_timeout_s=0"], "rollout.group_timeout_s: must be more than 0"),
        (["min_valid=0.8"], "rollout.min_valid: has no effect while rollout.group_timeout_s is null"),
        (["group_timeout_s=9", "min_valid=0"], "rollout.min_valid: must be more than 0 and at most 1, got 0"),
        (["group_timeout_s=9", "min_valid=1.01"], "rollout.min_valid: must be more than 0 and at most 1"),
        (
            ["group_timeout_s=9", "min_valid=0.125"],
            "0.125 of the 8 samples of a group is 1, but a comparison requires at least 2",
        ),
        (["group_timeout_s=9", "gdpo.num_generations_per_prompt=2"], "use more than 0.5"),
        (
            ["group_timeout_s=9", "min_valid=0.25", "gdpo.options={leave_one_out: true}"],
            "is 2, but a leave-one-out deviation (gdpo.options.leave_one_out) requires at least 3",
        ),
    ],
)
def test_settings_that_contradict_the_bound_are_refused_with_the_arithmetic(minimal, overrides, expected):
    assert expected in refused(minimal, *overrides)


AGAIN = ["max_staleness=1", "loss_fn.old_logprobs=trainer"]
REROLL = "gdpo.dynamic_sampling={enabled: true, reroll_after: 2"
LEVELS = "selection={enabled: true, difficulties: {new: 1, hard: 1, medium: 2, easy: 1}}"
TOP_P = ["gdpo.dynamic_sampling.enabled=true", "selection.variance_top_p=0.9"]


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (
            ["replay_buffer.groups=4", "loss_fn.old_logprobs=trainer"],
            "groups of earlier weights conflict with rollout.max_staleness 0",
        ),
        ([*AGAIN, "replay_buffer.groups=9"], "9 of 16 (gdpo.num_prompts_per_step) leave 7 new groups per step"),
        ([*AGAIN, "replay_buffer.groups=9"], "which supply at most 7 replayed groups (reuse 1); use at most 8"),
        (
            [*AGAIN, "replay_buffer={groups: 11, reuse: 2}"],
            "leave 5 new groups per step, which supply at most 10 replayed groups (reuse 2)",
        ),
        ([*AGAIN, "replay_buffer.groups=16"], "leave 0 new groups per step"),
        (
            [*AGAIN, "replay_buffer={groups: 4, max_age: 1}"],
            "max_age: 1 excludes groups that were already 1 steps old (rollout.max_staleness)",
        ),
        (["max_staleness=1", "replay_buffer.groups=4"], "requires loss_fn.old_logprobs: trainer"),
        ([*AGAIN, "replay_buffer.groups=4", "save_samples=false"], "requires rollout.save_samples"),
        ([*AGAIN, "replay_buffer.groups=4", "save_groups=15"], "requires rollout.save_groups null"),
        (["save_groups=17"], "rollout.save_groups: 17 exceeds the 16 groups of a step (gdpo.num_prompts_per_step)"),
        (["save_groups=0"], "rollout.save_groups: must be at least 1, got 0"),
        (["save_groups=4", "save_samples=false"], "rollout.save_groups: has no effect while rollout.save_samples is"),
        (["save_entropies=true", "save_samples=false"], "rollout.save_entropies: has no effect while"),
        ([*AGAIN, "replay_buffer.groups=4", "gdpo.group_by=prompt"], "requires gdpo.group_by row"),
        ([*AGAIN, "replay_buffer.reuse=2"], "rollout.replay_buffer.reuse: has no effect while"),
        ([*AGAIN, "replay_buffer.groups=-1"], "rollout.replay_buffer.groups: must be 0 or more"),
        (
            [*AGAIN, "replay_buffer={groups: 10, reuse: 2}"],
            "replay_buffer.groups: 10 allows only B = (1 + 1) * (16 - 10) - (1 - 1) = 12 groups in flight, below the "
            "16 of a step (gdpo.num_prompts_per_step), because the first step has no groups to replay; use at most 8",
        ),
        ([*AGAIN, "replay_buffer.groups=4", "window=10"], "B = (1 + 1) * (16 - 4) - (10 - 1) = 15 groups in flight"),
        (["gdpo.dynamic_sampling.reroll_after=2"], "gdpo.dynamic_sampling.reroll_after: has no effect while"),
        ([REROLL.replace("reroll_after: 2", "max_rerolls: 2") + "}"], "max_rerolls: has no effect while"),
        ([f"{REROLL}, max_rerolls: 0}}"], "gdpo.dynamic_sampling.max_rerolls: must be at least 1"),
        ([f"{REROLL}, leave_one_out: true}}"], "gdpo.dynamic_sampling.reroll_after: conflicts with leave_one_out"),
        (
            ["selection.min_rate=0.2"],
            "rollout.selection.min_rate: has no effect while rollout.selection.enabled is false",
        ),
        (["selection.difficulties={new: 1}"], "rollout.selection.difficulties: has no effect while"),
        (["selection={enabled: true, min_rate: 0}"], "rollout.selection.min_rate: must be more than 0"),
        (["selection={enabled: true, memory: 1}"], "rollout.selection.memory: must be 0 or more and below 1"),
        (["data.mix_key=dataset"], "data.mix_key: has no effect without data.mix"),
        (["data.mix={toy: -0.5}"], "data.mix.toy: must be 0 or more, got -0.5"),
        (["data.mix={toy: .nan}"], "data.mix.toy: expected a number, got nan"),
        (["data.mix={toy: half}"], "data.mix.toy: expected a number, got 'half'"),
        (["data.mix={toy: 0}"], "data.mix: all fractions are 0; at least one must be more than 0"),
        (["data.mix={toys: 1}"], "data.mix.toys: env does not define 'toys'; did you mean 'toy'?"),
        ([LEVELS.replace("easy", "eazy")], "difficulties: unknown difficulty 'eazy'; did you mean 'easy'?"),
        ([LEVELS.replace(", easy: 1", "")], "rollout.selection.difficulties: lacks easy; a difficulty without a quota"),
        (
            ["selection.enabled=true", f"{REROLL}}}"],
            "selection.enabled: conflicts with gdpo.dynamic_sampling.reroll_after",
        ),
        (["selection.enabled=true", "gdpo.constraints={format: {at_least: 0.5}}"], "conflicts with gdpo.constraints"),
        (["selection.variance_top_p=0.9"], "rollout.selection.variance_top_p: has no effect while"),
        ([*TOP_P, "max_staleness=1"], "rollout.selection.variance_top_p: requires rollout.max_staleness 0, got 1"),
        ([*TOP_P, "gdpo.group_by=prompt"], "rollout.selection.variance_top_p: requires gdpo.group_by row"),
        (
            [*TOP_P, "selection.variance_top_p=1.5"],
            "rollout.selection.variance_top_p: must be more than 0 and at most 1",
        ),
    ],
)
def test_impossible_reuse_is_refused_with_the_arithmetic(minimal, overrides, expected):
    assert expected in refused(minimal, *overrides)


@pytest.mark.parametrize(
    "overrides, window, bound",
    [
        (["max_staleness=1", "replay_buffer.groups=4"], 1, 24),
        (["max_staleness=1", "window=3", "replay_buffer.groups=4"], 3, 22),
        (["max_staleness=1", "replay_buffer.groups=8"], 1, 16),
        (["max_staleness=3", "replay_buffer={groups: 10, reuse: 2}"], 1, 24),
    ],
)
def test_groups_that_are_trained_again_reduce_the_groups_in_flight(minimal, overrides, window, bound):
    config = of(minimal, *overrides, "loss_fn.old_logprobs=trainer")
    assert validate(config).notes == ()
    assert (resolved_window(config.rollout), resolved_bound(config)) == (window, bound)
    assert f"{config.rollout.replay_buffer.groups} of the 16 groups of a step come from earlier steps" in describe(
        resolve(config)
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ["max_staleness=1", "kv=keep"],
        ["max_staleness=1", "kv=drain", "depth=16"],
        [*AGAIN, "replay_buffer={groups: 8, max_age: 2}", "loss_fn.off_policy.mode=truncate"],
        [f"{REROLL}, max_rerolls: 3}}", "max_staleness=2"],
        ["max_staleness=1", "depth=32"],
        ["window=1", "depth=16"],
        [LEVELS, "max_staleness=2"],
        TOP_P,
        ["group_timeout_s=9"],
        ["group_timeout_s=9", "min_valid=1", "max_staleness=3"],
    ],
)
def test_settings_that_agree_with_the_bound_are_accepted(minimal, overrides):
    assert validate(of(minimal, *overrides)).notes == ()


@pytest.mark.parametrize("share, group, needed", [(0.5, 8, 4), (0.5, 9, 5), (0.28, 25, 7), (1.0, 8, 8), (0.3, 8, 3)])
def test_a_share_of_verdicts_is_rounded_up_to_whole_samples(minimal, share, group, needed):
    config = of(minimal, f"min_valid={share}", f"gdpo.num_generations_per_prompt={group}")
    assert valid_needed(config) == needed


def test_rounds_count_the_groups_that_a_step_may_replace(minimal):
    assert replaceable_groups(of(minimal).gdpo) == 0
    assert replaceable_groups(of(minimal, "gdpo.dynamic_sampling.enabled=true").gdpo) == 48
    assert replaceable_groups(of(minimal, "gdpo.dynamic_sampling={enabled: true, max_rounds: 1}").gdpo) == 0


@pytest.mark.parametrize(
    "overrides, line",
    [
        ([], "staleness  0, on-policy"),
        (
            ["max_staleness=2"],
            "staleness  at most 2 steps, bound B = (2 + 1) * 16 - (1 - 1) = 48 groups, window 1, depth auto (16 to "
            "48), new weights every step, kv recompute",
        ),
        (
            ["max_staleness=1", "sync_every=2", "group_timeout_s=30"],
            "staleness  at most 1 step, bound B = (1 - 1 + 1) * 16 - (1 - 1) = 16 groups, window 1, depth 16, "
            "new weights every 2 steps; after 30 s a group is trained if at least 4 of 8 samples have "
            "reward results, otherwise the group is dropped",
        ),
    ],
)
def test_plan_states_the_number_of_groups_sampled_ahead(minimal, overrides, line):
    assert line in describe(resolve(of(minimal, *overrides))).splitlines()


def test_evaluation_of_an_asynchronous_run_is_valid_for_all_settings():
    from gdpo_nemo.commands.evaluate import without_policy

    ahead = ["max_staleness=2", "kv=keep", "window=2", "depth=20", "sync_every=2", "replay_buffer.groups=5"]
    overrides = ["loss_fn.old_logprobs=trainer", *(f"rollout.{text}" for text in ahead)]
    config = load_config(CONFIGS / "gdpo_tiny_cpu.yaml", overrides)
    validate(config)
    without_policy(config)
    validate(config)
