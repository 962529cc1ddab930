"""Mutants of environments and reward functions."""

from __future__ import annotations

from mutant_tables.mutant import mutant

ENVIRONMENTS = (
    mutant(
        "environments/tasks/call_match.py",
        "type(item) is kind or type(item) is _first_kind(other)",
        "isinstance(item, kind) or type(item) is _first_kind(other)",
        "environments/test_call_match.py::test_calls_match_as_in_bfcl_on_hand_made_pairs",
        "true is not an integer",
    ),
    mutant(
        "rollouts/context.py",
        "total - math.fsum(values[:-1])",
        "total",
        "rollouts/test_endpoint_agents.py::test_step_rewards_of_an_agents_server_are_credited_to_their_turns",
        "the rewards of the turns add up to the total",
    ),
    mutant(
        "tools/gym/processes.py",
        "    for process in processes:\n        process.terminate()\n",
        "",
        "tools/test_gym.py::test_servers_are_asked_to_end_before_any_is_waited_for",
        "servers end at the same time",
    ),
    mutant(
        "environments/tasks/judge.py",
        "self._record.add(None if isinstance(result, Failure) else key, reply)",
        "self._record.add(key, reply)",
        "environments/test_judge.py::test_reply_without_every_score_masks_the_sample_and_is_not_reused",
        "an unreadable reply is requested again",
    ),
    mutant(
        "environments/tasks/judge_model.py",
        '"max_calls": self._calls + self._reserved + calls - 1,',
        '"max_calls": self._reserved + calls - 1,',
        "environments/test_judge.py::test_run_ends_before_the_call_that_exceeds_the_budget_also_after_a_restart",
        "calls of earlier starts count against the budget",
    ),
    mutant(
        "environments/tasks/judge_rubric.py",
        "                if component in found:\n",
        "                if False:\n",
        "environments/test_judge_rubric.py::test_every_other_reply_fails_its_sample_in_one_line_and_is_not_reused",
        "a criterion has one verdict",
    ),
    mutant(
        "environments/tasks/judge_ranking.py",
        "orders.append(order[:: -1 if number % 2 else 1])",
        "orders.append(order)",
        "environments/test_judge_ranking.py::test_preference_for_a_position_cancels",
        "the second order reverses the first",
    ),
    mutant(
        "utils/user_modules.py",
        "if _is_in_folder(place, top):",
        "if top not in sys.modules and _is_in_folder(place, top):",
        "utils/test_user_modules.py::test_a_module_of_the_folder_precedes_an_imported_package_with_its_name",
        "a file imports the modules of its folder",
    ),
    mutant(
        "environments/execution/worker.py",
        "return self._checks <= _CHECKS_AFTER_DEATH and not self._stopped",
        "return False",
        "environments/test_pool.py::"
        "test_a_worker_that_dies_before_its_acknowledgement_is_read_fails_its_sample_and_not_the_pool",
        "pebble reads the last messages of a worker before it sees its death",
    ),
    mutant(
        "environments/execution/pool.py",
        "if not pool.active:",
        "if False:",
        "environments/test_pool.py::"
        "test_a_task_that_pebble_takes_from_its_queue_while_the_pool_breaks_is_sent_to_a_new_pool",
        "a task that is lost while the pool breaks is sent to a new pool",
    ),
    mutant(
        "environments/execution/sandbox_script.py",
        "any_bit, 0x10000, 1), instruction(end, refuse)",
        "any_bit, 0x10000, 1), instruction(end, allow)",
        "environments/test_escapes.py::test_hostile_program_scores_0_and_harms_nothing",
        "a program cannot start processes",
    ),
    mutant(
        "environments/execution/sandbox_script.py",
        "if isinstance(other, _Remote) else NotImplemented",
        "if True else NotImplemented",
        "environments/test_escapes.py::test_hostile_program_scores_0_and_harms_nothing",
        "the program's __eq__ does not decide a test",
    ),
    mutant(
        "environments/execution/sandbox_script.py",
        '{*vars(builtins), "__name__"}',
        '{"__name__"}',
        "environments/test_escapes.py::test_hostile_program_scores_0_and_harms_nothing",
        "a program cannot replace the built-ins of a test",
    ),
    mutant(
        "environments/execution/sandbox_script.py",
        'stopped = "output" if len(output) > left else ""',
        'stopped = ""',
        "environments/test_escapes.py::test_program_that_prints_gigabytes_is_stopped",
        "output is limited",
    ),
    mutant(
        "environments/tasks/code.py",
        "run.succeeded and _same_output",
        "True and _same_output",
        "environments/test_code.py::test_program_is_scored_by_the_tests_of_common_rows",
        "a program that fails after printing the output does not pass",
    ),
    mutant(
        "environments/base.py",
        "    if math.isinf(number):\n",
        "    if False:\n",
        "environments/test_reward_functions.py::test_a_wrong_function_is_an_error_that_names_it",
        "an infinite reward is an error",
    ),
    mutant(
        "tools/adversary/trial.py",
        "if one.rewards and one.again and one.rewards.get(name)",
        "if one.rewards.get(name)",
        "tools/test_adversary.py::test_an_answer_without_verdict_and_an_unstable_verdict_are_reported",
        "a failed verification is not another reward",
    ),
    mutant(
        "training/resume.py",
        "if state.step >= gdpo.max_num_steps:",
        "if state.step > gdpo.max_num_steps:",
        "training/test_resume.py::test_a_complete_run_names_the_key_to_raise",
        "a run that is started again after its last step trains nothing",
    ),
    mutant(
        "environments/nemo_gym/evaluations.py",
        "rewards[member(family, name)] = None if score is None else finite_number(score, subject)",
        "rewards[member(family, name)] = 0.0 if score is None else finite_number(score, subject)",
        "environments/test_nemo_gym.py::test_the_evaluations_in_a_reply_are_the_criteria_of_a_family",
        "a criterion that a server could not judge has no reward",
    ),
    mutant(
        "environments/tasks/answers.py",
        "rewards.append(None if sizes[prompt] < 2 else unique / max(1, len(grams)))",
        "rewards.append(unique / max(1, len(grams)))",
        "environments/test_reward_functions.py::test_distinct_is_the_share_of_ngrams_that_no_other_sample_of_the_prompt_has",
        "a sample that is retried alone is not compared with anything",
    ),
)
