"""Temporary folder, cleanup process and fork server of a run on the driver's machine.

This module does not import Ray, so that a fork server can import its libraries before the driver has imported Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from gdpo_nemo.cluster.cleanup_process import OWNER, CleanupProcess, inode_of, remove_run
from gdpo_nemo.cluster.fork_server import fork_server
from gdpo_nemo.cluster.worker_launcher import FOLDER
from gdpo_nemo.config.placement import joined
from gdpo_nemo.config.schema import ClusterConfig
from gdpo_nemo.observe.installation import SHORT_FOLDERS, socket_folder, socket_folder_problem
from gdpo_nemo.utils.errors import RunError

_prepared = False
"""True in the block of ``worker_processes``."""


@contextlib.contextmanager
def worker_processes(config: ClusterConfig, ahead: Collection[str] = ()) -> Iterator[None]:
    """Prepare the processes of a Ray session that starts in this block, and end those that remain after the block.

    In the block of another call, this function does nothing.

    Args:
        ahead: kinds of workers whose libraries the fork server imports at once (``fork_server``).
    """
    global _prepared
    if _prepared:
        yield
        return
    with _scratch() as scratch, contextlib.ExitStack() as stack:
        stack.callback(CleanupProcess(scratch).close)
        if not joined(config) and config.gpus_per_node == 0 and FOLDER not in os.environ:
            stack.enter_context(fork_server(Path(scratch), ahead))
        _prepared = True
        try:
            yield
        finally:
            _prepared = False


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """Create a folder for temporary files of the run's processes, and set TMPDIR to it in the block.

    The cleanup process removes the folder, because some files remain even after a clean exit (vLLM's sockets). Ray
    stores its own files elsewhere. If the user has no writable home directory, this folder also becomes the home
    directory, because Ray and the caches of libraries need a home directory.

    Raises:
        RunError: if no folder has a path that is short enough for sockets.
    """
    if problem := socket_folder_problem():
        raise RunError(problem)
    before = {name: os.environ.get(name) for name in ("TMPDIR", "RAY_TMPDIR", "HOME", "HF_HOME")}
    remove_leftovers()
    sockets = socket_folder(tempfile.gettempdir())
    (folder, owner) = _claim(sockets)
    target = os.path.join(tempfile.gettempdir(), os.path.basename(folder))
    os.mkdir(target, 0o700)
    if target != folder:
        # The files stay where TMPDIR is, and the processes reach them and their sockets by a short path.
        os.symlink(target, folder)
    os.environ["RAY_TMPDIR"] = before["RAY_TMPDIR"] or sockets
    os.environ["TMPDIR"] = folder
    _set_home(folder)
    try:
        yield folder
    finally:
        os.close(owner)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_PREFIX = "gdpo-"


def _claim(parent: str) -> tuple[str, int]:
    """Return a path in ``parent`` for a temporary folder, and a file whose lock shows that this process is alive."""
    while True:
        (owner, path) = tempfile.mkstemp(prefix=_PREFIX, suffix=OWNER, dir=parent)
        _lock(owner, fcntl.LOCK_EX)
        if inode_of(path):  # otherwise another process has removed the file before it was locked
            return path.removesuffix(OWNER), owner
        os.close(owner)


def _lock(file: int, operation: int) -> bool:
    """Lock a file for this process, but not for its forks. Return False if it is locked or does not support locks."""
    try:
        fcntl.lockf(file, operation)
    except OSError:
        return False
    return True


def remove_leftovers() -> list[str]:
    """Clean up after runs of this user whose driver and cleanup process were killed. Return a sentence for each run."""
    found = []
    for parent in {tempfile.gettempdir(), *SHORT_FOLDERS}:
        for path in map(str, Path(parent).glob(f"{_PREFIX}{'?' * 8}{OWNER}")):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                if os.lstat(path).st_uid != os.geteuid():
                    continue
                with open(path, "r+b") as owner:
                    if _lock(owner.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB) and inode_of(path):
                        found.append(remove_run(path.removesuffix(OWNER)))
    return found


def _set_home(folder: str) -> None:
    """Set HOME to ``folder`` if the user's home directory is missing or not writable.

    Hugging Face's cache in the user's home directory is still used.
    """
    home = os.path.expanduser("~")
    if os.path.isabs(home) and os.access(home, os.W_OK):
        return
    os.environ["HOME"] = folder
    models = os.path.join(home, ".cache", "huggingface")
    if os.path.isabs(home) and os.path.isdir(models):
        os.environ.setdefault("HF_HOME", models)
