"""Mutants of config, observation, commands, planning and imported recipes."""

from __future__ import annotations

from mutant_tables.mutant import mutant

SETTINGS = (
    mutant(
        "config/rollout_checks.py",
        "(steps_ahead + 1) * groups - (window - 1)",
        "(steps_ahead + 1) * groups - window",
        "config/test_rollout_bounds.py::test_window_bound_and_depth_follow_from_the_staleness",
        "the bound of groups in flight",
    ),
    mutant(
        "utils/files.py",
        "                os.chmod(partial, stat.S_IMODE(before.st_mode))\n",
        "                pass\n",
        "utils/test_files.py::test_a_replaced_file_keeps_its_permissions_and_a_name_of_255_bytes",
        "a replaced file keeps its permissions",
    ),
    mutant(
        "observe/installation.py",
        "os.killpg(child.pid, signal.SIGKILL)",
        "child.kill()",
        "observe/test_gpu_libraries.py::test_import_is_killed_with_its_children_at_the_deadline",
        "an import that is stuck leaves no process",
    ),
    mutant(
        "observe/installation.py",
        "max(0.0, deadline - time.monotonic())",
        "_IMPORT_S + 60",
        "observe/test_gpu_libraries.py::test_import_is_killed_with_its_children_at_the_deadline",
        "an import has a deadline",
    ),
    mutant(
        "observe/installation.py",
        "format_exception_only(error)[0].strip().partition",
        "format_exception_only(error)[0].strip().rpartition",
        "observe/test_gpu_libraries.py::test_imports_report_one_line_for_each_module_that_fails",
        "a failed import is reported by the first line of its error",
    ),
    mutant(
        "observe/installation.py",
        "    if status == 0:\n        return None\n    if status < 0:",
        "    if status <= 0:\n        return None\n    if status < 0:",
        "observe/test_gpu_libraries.py::test_imports_report_one_line_for_each_module_that_fails",
        "an import that crashes is reported",
    ),
    mutant(
        "observe/installation.py",
        " and (on_gpu or package not in _WITH_DRIVER)]",
        "]",
        "observe/test_gpu_libraries.py::test_modules_that_require_the_driver_are_imported_only_on_a_gpu",
        "a machine without a GPU is not blamed for the driver's absence",
    ),
    mutant(
        "observe/health.py",
        "news = [check for check in found if check not in self._outside]",
        "news = list(found)",
        "observe/test_health_alerts.py::test_what_leaves_its_range_is_said_once_with_what_to_try",
        "an alert is written once, not every step",
    ),
    mutant(
        "observe/metrics.py",
        "values[max(0, i + 1 - window) : i + 1]",
        "values[max(0, i - window) : i + 1]",
        "commands/test_compare.py::test_equal_effort_is_what_all_runs_have_spent",
        "the trailing mean has window steps",
    ),
    mutant(
        "observe/journal.py",
        "if entry.step <= step]",
        "if entry.step < step]",
        "observe/test_journal.py::test_a_torn_last_line_is_dropped_and_the_resumed_run_writes_behind_the_others",
        "the step of the checkpoint remains in the journal",
    ),
    mutant(
        "commands/export_rollouts.py",
        "if not steps or step in steps]",
        "]",
        "observe/test_sample_files.py::test_the_export_is_the_records_with_their_step",
        "only the chosen steps are exported",
    ),
    mutant(
        "commands/chat/speakers.py",
        "(self._last[split] + 1) % len(rows) if number is None",
        "self._last[split] % len(rows) if number is None",
        "commands/test_chat.py::test_rows_are_those_of_the_run_by_their_number_and_one_after_the_other",
        "the next row of a chat is another one",
    ),
    mutant(
        "planning/speed.py",
        "max(generation + verify, training) + sync",
        "generation + verify + training + sync",
        "planning/test_plan.py::test_generation_beside_training_hides_the_shorter_one",
        "generation beside training hides the shorter one",
    ),
    mutant(
        "planning/shape.py",
        "count = groups_saved(resolved) * resolved.sequences_per_prompt",
        "count = groups_saved(resolved)",
        "planning/test_recorded_bytes.py::test_a_steps_file_has_the_announced_bytes_within_a_third",
        "bytes of all samples of a group",
    ),
    mutant(
        "interop/trl/objective.py",
        '"grpo": "sequence_mean"',
        '"grpo": "token_mean"',
        "interop/test_from_trl.py::test_each_field_arrives_where_it_means_the_same_or_says_how_it_differs",
        "TRL's loss_type grpo is a mean over sequences",
    ),
    mutant(
        "commands/drill/exercise.py",
        "if settings.exact and not",
        "if not",
        "commands/test_drilled_run.py::test_a_run_is_compared_with_an_undisturbed_one_where_it_can_be_equal",
        "a drill has an undisturbed run only if it is compared with it",
    ),
    mutant(
        "commands/drill/faults.py",
        "|its Ray client|",
        "|Ray's client|",
        "commands/test_drilled_run.py::test_both_words_of_a_lost_raylet_name_it",
        "a drill recognises the report of a lost raylet by a Ray client",
    ),
)
