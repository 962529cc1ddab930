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
    mutant(
        "commands/gym/code.py",
        "return not isinstance(node.body[-1], ast.Raise)",
        "return True",
        "commands/test_gym.py::test_scan_gives_each_server_the_class_of_what_it_needs",
        "a server whose verify only raises is refused",
    ),
    mutant(
        "commands/gym/code.py",
        'if file.startswith("setup_") != prepares:',
        "if False:",
        "commands/test_gym.py::test_scan_gives_each_server_the_class_of_what_it_needs",
        "a download at the start is not code of the model",
    ),
    mutant(
        "commands/gym/scan.py",
        "elif argument is not None and not default:",
        "elif False:",
        "commands/test_gym.py::test_scan_gives_each_server_the_class_of_what_it_needs",
        "an environment variable without a default must be set",
    ),
    mutant(
        "commands/gym/environments.py",
        "own = [line for line in listed if not _GYM.match(line)]",
        "own = listed",
        "commands/test_gym.py::test_requirements_are_those_of_nemo_gym_and_the_server",
        "NeMo Gym is imported from the checkout, not installed",
    ),
    mutant(
        "commands/gym/processes.py",
        'listen(name, host, place.get("port", 0))',
        "listen(name, host, 0)",
        "commands/test_gym.py::test_dry_run_finds_files_references_ports_and_requirements",
        "servers listen on the ports of the config",
    ),
    mutant(
        "environments/http_client.py",
        "_ERROR_BYTES = 2**20",
        "_ERROR_BYTES = 16 * 1024",
        "environments/test_nemo_gym_hostile.py::test_preflight_says_in_one_line_what_would_fail_later",
        "the field that a server refuses is named for long rows also",
    ),
)
