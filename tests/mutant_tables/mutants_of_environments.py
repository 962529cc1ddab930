"""Mutants of environments and reward functions."""

from __future__ import annotations

from mutant_tables.mutant import mutant

ENVIRONMENTS = (
    mutant(
        "rollouts/context.py",
        "total - math.fsum(values[:-1])",
        "total",
        "turns/test_shared_endpoint.py::test_step_rewards_of_an_agents_server_are_credited_to_their_turns",
        "the rewards of the turns add up to the total",
    ),
    mutant(
        "environments/openenv/episodes.py",
        "result = StepResult({}, self.settings.invalid_action_reward, done=False)",
        "result = StepResult({}, None, done=False)",
        "turns/test_openenv_episodes.py::test_reward_of_each_step_on_a_server_is_credited_to_its_turn",
        "the reward of an invalid action belongs to its turn",
    ),
    mutant(
        "environments/tasks/judge.py",
        "(first[name] + 1 - second[name]) / 2",
        "(first[name] + second[name]) / 2",
        "environments/test_judge.py::test_comparison_asks_in_both_orders_and_reports_disagreement",
        "in the swapped order, the second answer is the sample's",
    ),
    mutant(
        "environments/tasks/judge.py",
        "self._record.add(None if isinstance(self._read(reply), Failure) else key, reply)",
        "self._record.add(key, reply)",
        "environments/test_judge.py::test_reply_without_every_score_masks_the_sample_and_is_not_reused",
        "an unreadable reply is requested again",
    ),
    mutant(
        "environments/tasks/judge.py",
        '"max_calls": self._calls + self._reserved + calls - 1,',
        '"max_calls": self._reserved + calls - 1,',
        "environments/test_judge.py::test_run_ends_before_the_call_that_exceeds_the_budget_also_after_a_restart",
        "calls of earlier starts count against the budget",
    ),
    mutant(
        "environments/execution/sandbox_script.py",
        "any_bit, 0x10000, 1), instruction(end, refuse)",
        "any_bit, 0x10000, 1), instruction(end, allow)",
        "environments/test_code.py::test_hostile_program_scores_0_and_harms_nothing",
        "a program cannot start processes",
    ),
    mutant(
        "environments/execution/sandbox_script.py",
        "isinstance(other, _Remote) and other._index == self._index",
        "self._peer.request('getattr', self, '__eq__')(other)",
        "environments/test_code.py::test_hostile_program_scores_0_and_harms_nothing",
        "the program's __eq__ does not decide a test",
    ),
    mutant(
        "environments/execution/sandbox_script.py",
        "| {*scope, *vars(builtins)}",
        "| {*scope}",
        "environments/test_code.py::test_hostile_program_scores_0_and_harms_nothing",
        "a program cannot replace the built-ins of a test",
    ),
    mutant(
        "environments/execution/sandbox.py",
        "elif len(self.output) + len(chunk) > self.limits.output_bytes:",
        "elif False:",
        "environments/test_code.py::test_program_that_prints_gigabytes_is_stopped",
        "output is limited",
    ),
    mutant(
        "environments/tasks/code.py",
        "passed[index] = run.succeeded and",
        "passed[index] = True and",
        "environments/test_code.py::test_program_is_scored_by_the_tests_of_common_rows",
        "a program that fails after printing the output does not pass",
    ),
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
