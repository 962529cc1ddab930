"""Mutants of the processes from which workers are forked, of the guard of an actor, and of the status file."""

from __future__ import annotations

from mutant_tables.mutant import mutant

_SERVER = "cluster/fork_server.py"
_TESTS = "cluster/test_fork_server.py"

PROCESSES = (
    mutant(
        _SERVER,
        'sys.modules["numpy"].random.seed()',
        "pass",
        f"{_TESTS}::test_a_worker_is_forked_from_one_thread_with_its_libraries_and_the_launchers_surroundings",
        "workers draw different numbers",
    ),
    mutant(
        _SERVER,
        "        os.kill(worker, signal.SIGKILL)",
        "        pass",
        f"{_TESTS}::test_a_killed_launcher_takes_its_worker_with_it",
        "a worker ends with its launcher",
    ),
    mutant(
        "cluster/cleanup_process.py",
        "scans - first_scan[child] < _MEMORY_SCANS_OF_NEW",
        "scans == first_scan[child]",
        "cluster/test_cleanup_process.py::test_children_of_a_killed_guarded_process_end_in_seconds[True]",
        "shared memory that a process maps some time after its start is removed",
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
        "observe/run_files.py",
        "if number < self._written:",
        "if False:",
        "observe/test_diagnosis.py::test_the_status_thread_replaces_no_newer_status",
        "an older status does not replace a newer one",
    ),
    mutant(
        "observe/run_files.py",
        "[*self._waits, *waiting]",
        "waiting",
        "observe/test_diagnosis.py::test_the_status_thread_replaces_no_newer_status",
        "the status keeps a wait that has expired until it is examined",
    ),
)
