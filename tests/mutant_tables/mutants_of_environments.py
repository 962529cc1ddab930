"""Mutants of environments and reward functions."""

from __future__ import annotations

from mutant_tables.mutant import mutant

ENVIRONMENTS = (
    mutant(
        "environments/tasks/digit_sort.py",
        "correct = ended and bool(runs)",
        "correct = bool(runs)",
        "environments/test_environments.py::test_digit_sort_pays_what_the_task_says",
        "an answer that was cut off is not correct",
    ),
    mutant(
        "environments/tasks/tool_calling.py",
        "WORST + (BEST - WORST) * _score(expected, made) / highest",
        "BEST * _score(expected, made) / highest",
        "environments/test_tool_calling.py::test_correctness_has_the_published_values",
        "rewards of tool calls go from -3 to 3",
    ),
    mutant(
        "environments/tasks/answers.py",
        "if tokens <= max_tokens:",
        "if tokens < max_tokens:",
        "environments/test_functions.py::test_length_pays_in_full_up_to_the_limit_and_then_nothing_or_less_and_less",
        "an answer of exactly max_tokens has the whole reward",
    ),
    mutant(
        "environments/tasks/number_answer.py",
        "_value(numbers[-1]) == self._wanted",
        "_value(numbers[0]) == self._wanted",
        "environments/test_number_answer.py::test_each_reward_is_paid_for_itself",
        "the last number is the answer",
    ),
    mutant(
        "environments/tasks/number_answer.py",
        "(end - length) / (end - start)",
        "(end - length) / end",
        "environments/test_number_answer.py::test_brief_pays_nothing_for_characters_left_out_of_what_is_free",
        "brevity falls from brief_from on",
    ),
    mutant(
        "environments/base.py",
        "    if math.isinf(number):\n",
        "    if False:\n",
        "environments/test_functions.py::test_a_wrong_function_is_an_error_that_names_it",
        "an infinite reward is an error",
    ),
)
