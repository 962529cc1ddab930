"""Child process of ``try_import``, which imports a user's module and writes to a pipe when the import has ended.

The script is started by its path and uses only the standard library, so that it imports little else.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def block_os_exit() -> None:
    """Make ``os._exit`` raise SystemExit in this process but not in forked processes.

    The real import that follows does the same and reports the error (``user_code.os_exit_blocked``).
    """
    real_exit = os._exit
    own_pid = os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != own_pid:
            real_exit(status)
        raise SystemExit

    os._exit = refuse


def main(name: str, pipe: int) -> NoReturn:
    """Try the import, write a byte to the descriptor ``pipe``, and exit with status 0."""
    real_exit = os._exit
    block_os_exit()
    try:
        importlib.import_module(name)
    except BaseException:  # the error is ignored, because the real import raises and reports it again
        pass
    os.write(pipe, b"1")
    real_exit(0)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    name, pipe, sys.path, sys.argv = json.loads(sys.argv[1])
    main(name, pipe)
