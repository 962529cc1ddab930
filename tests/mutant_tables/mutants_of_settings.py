"""Mutants of config, observation, commands, planning and imported recipes."""

from __future__ import annotations

from mutant_tables.mutant import mutant

SETTINGS = (
    mutant(
        "tools/interop/rollout_dumps.py",
        "if value is None or (isinstance(value, float) and np.isnan(value)):",
        "if value is None:",
        "tools/test_rollout_dumps.py::test_nan_of_a_dump_is_a_missing_reward",
        "NaN of a dump is a missing reward",
    ),
    mutant(
        "config/rollout_checks.py",
        "(steps_ahead + 1) * groups - (window - 1)",
        "(steps_ahead + 1) * groups - window",
        "config/test_rollout_bounds.py::test_window_bound_and_depth_follow_from_the_staleness",
        "the bound of groups in flight",
    ),
    mutant(
        "config/load.py",
        "_merged(pickle.dumps(sources))",
        "_merged(pickle.dumps(sources[-1:]))",
        "config/test_load.py::test_environments_of_a_parent_stay_only_if_named_again",
        "a merge that is used again contains the parents",
    ),
    mutant(
        "config/load.py",
        "    if isinstance(config, (Mapping, Config)):  # may",
        "    if isinstance(config, Config):  # may",
        "config/test_load.py::test_a_mapping_with_a_value_that_cannot_be_pickled_is_refused_in_one_line",
        "only files are pickled",
    ),
    mutant(
        "observe/installation.py",
        "os.killpg(child.pid, signal.SIGKILL)",
        "child.kill()",
        "observe/test_gpu_libraries.py::test_import_is_killed_with_its_children_at_the_deadline",
        "an import that is stuck leaves no process",
    ),
    mutant(
        "observe/journal.py",
        "if entry.step <= step]",
        "if entry.step < step]",
        "observe/test_journal.py::test_a_torn_last_line_is_dropped_and_the_resumed_run_writes_behind_the_others",
        "the step of the checkpoint remains in the journal",
    ),
    mutant(
        "models/sources.py",
        "if len(names) == _MOST_MEMBERS or read > _MOST_BYTES:",
        "if False:",
        "models/test_model_formats.py::test_a_compressed_archive_is_listed_up_to_a_limit_and_its_members_are_not_unpacked",
        "a compressed archive is not read to its end",
    ),
    mutant(
        "models/sources.py",
        'if any(name.endswith(".ckpt") for name in files):',
        "if False:",
        "models/test_model_formats.py::test_format_of_a_file_follows_from_its_content",
        "an archive with a pickle is refused as such",
    ),
)
