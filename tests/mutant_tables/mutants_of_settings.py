"""Mutants of config, observation, commands, planning and imported recipes."""

from __future__ import annotations

from mutant_tables.mutant import mutant

SETTINGS = (
    mutant(
        "config/rollout_bounds.py",
        "(steps_ahead + 1) * groups - (window - 1)",
        "(steps_ahead + 1) * groups - window",
        "config/test_rollout_bounds.py::test_window_bound_and_depth_follow_from_the_staleness",
        "the bound of groups in flight",
    ),
    mutant(
        "observe/health_alerts.py",
        "news = [check for check in found if check not in self._outside]",
        "news = list(found)",
        "observe/test_health_alerts.py::test_what_leaves_its_range_is_said_once_with_what_to_try",
        "an alert is written once, not every step",
    ),
    mutant(
        "planning/speed.py",
        "max(generation + verify, training) + sync",
        "generation + verify + training + sync",
        "planning/test_plan.py::test_generation_beside_training_hides_the_shorter_one",
        "generation beside training hides the shorter one",
    ),
    mutant(
        "interop/trl/trl_objective.py",
        '"grpo": "sequence_mean"',
        '"grpo": "token_mean"',
        "config/test_from_trl.py::test_each_field_arrives_where_it_means_the_same_or_says_how_it_differs",
        "TRL's loss_type grpo is a mean over sequences",
    ),
)
