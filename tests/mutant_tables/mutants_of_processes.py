"""Mutants of the processes from which workers are forked, of the guard of an actor, and of the status file."""

from __future__ import annotations

from mutant_tables.mutant import mutant

_SERVER = "cluster/fork_server.py"
_TESTS = "cluster/test_fork_server.py"

PROCESSES = (
    mutant(
        _SERVER,
        'with hidden("ray"):',
        "with contextlib.nullcontext():",
        f"{_TESTS}::test_a_worker_is_forked_from_one_thread_with_its_libraries_and_the_launchers_surroundings",
        "Ray is not imported before the fork",
    ),
    mutant(
        _SERVER,
        "        os.setpgid(0, 0)",
        "        pass",
        f"{_TESTS}::test_a_worker_is_forked_from_one_thread_with_its_libraries_and_the_launchers_surroundings",
        "Ray can kill a worker's process group",
    ),
    mutant(
        _SERVER,
        'sys.modules["numpy"].random.seed()',
        "pass",
        f"{_TESTS}::test_a_worker_is_forked_from_one_thread_with_its_libraries_and_the_launchers_surroundings",
        "workers draw different numbers",
    ),
    mutant(
        _SERVER,
        "{**changes, **self.environment}",
        "self.environment",
        f"{_TESTS}::test_what_a_library_sets_in_the_environment_at_import_reaches_the_worker_unless_the_worker_has_its_own",
        "variables that imports set reach the worker",
    ),
    mutant(
        _SERVER,
        "{**changes, **self.environment}",
        "{**self.environment, **changes}",
        f"{_TESTS}::test_what_a_library_sets_in_the_environment_at_import_reaches_the_worker_unless_the_worker_has_its_own",
        "a worker's own variables take precedence",
    ),
    mutant(
        _SERVER,
        "        os.kill(worker, signal.SIGKILL)",
        "        pass",
        f"{_TESTS}::test_a_killed_launcher_takes_its_worker_with_it",
        "a worker ends with its launcher",
    ),
    mutant(
        _SERVER,
        "if _read_at_import(request.environment) != self._environment:",
        "if False:",
        f"{_TESTS}::test_a_worker_that_no_server_can_fork_is_started_by_ray",
        "a worker with other settings of libraries is not forked",
    ),
    mutant(
        "cluster/cleanup_process.py",
        "scans - first_scan[child] < _MEMORY_SCANS_OF_NEW",
        "scans == first_scan[child]",
        "cluster/test_cleanup_process.py::test_what_a_killed_process_started_under_its_guard_is_gone_in_seconds[True]",
        "shared memory that a process maps some time after its start is removed",
    ),
    mutant(
        "cluster/worker_launcher.py",
        'any("$" in value for value in variables.values())',
        "False",
        f"{_TESTS}::test_a_worker_that_no_server_can_fork_is_started_by_ray",
        "Ray expands references to other variables",
    ),
    mutant(
        "cluster/worker_launcher.py",
        "if not answer.readline().strip():",
        "if False:",
        f"{_TESTS}::test_a_server_that_dies_while_it_is_asked_leaves_the_worker_to_ray",
        "a worker starts without its server",
    ),
    mutant(
        "cluster/worker_launcher.py",
        "status if status >= 0 else 128 - status",
        "0",
        f"{_TESTS}::test_the_launcher_ends_as_its_worker",
        "the launcher reports how its worker ended",
    ),
    mutant(
        "cluster/fork_server.py",
        "os.killpg(process.pid, signal.SIGTERM)",
        "pass",
        f"{_TESTS}::test_servers_end_with_their_block_even_while_they_import",
        "an early error does not wait for imports",
    ),
    mutant(
        "observe/run_files.py",
        "if number < self._written:",
        "if False:",
        "observe/test_doctor.py::test_the_status_thread_replaces_no_newer_status",
        "an older status does not replace a newer one",
    ),
    mutant(
        "observe/run_files.py",
        "[*self._waits, *waiting]",
        "waiting",
        "observe/test_doctor.py::test_the_status_thread_replaces_no_newer_status",
        "the status keeps a wait that has expired until it is examined",
    ),
)
