"""Mutants of environments and reward functions."""

from __future__ import annotations

from mutant_tables.mutant import mutant

ENVIRONMENTS = (
    mutant(
        "environments/tasks/tool_calling.py",
        "WORST + (BEST - WORST) * _score(expected, made) / highest",
        "BEST * _score(expected, made) / highest",
        "environments/test_tool_calling.py::test_correctness_has_the_published_values",
        "rewards of tool calls go from -3 to 3",
    ),
    mutant(
        "environments/tasks/number_answer.py",
        "_value(numbers[-1]) == self._wanted",
        "_value(numbers[0]) == self._wanted",
        "environments/test_number_answer.py::test_each_reward_is_paid_for_itself",
        "the last number is the answer",
    ),
)
