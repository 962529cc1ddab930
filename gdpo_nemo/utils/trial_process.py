"""Child process of ``try_import``, which imports a user's module and writes to a pipe when the import has ended.

The script is started by its path and imports only ``exits`` besides the standard library.
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


def main(name: str, pipe: int) -> NoReturn:
    """Try the import, write a byte to the descriptor ``pipe``, and exit with status 0."""
    from gdpo_nemo.utils.exits import os_exit_blocked  # found on the search path of the parent process

    try:
        with os_exit_blocked():
            importlib.import_module(name)
    except BaseException:  # the error is ignored, because the real import raises and reports it again
        pass
    os.write(pipe, b"1")
    os._exit(0)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    name, pipe, sys.path, sys.argv = json.loads(sys.argv[1])
    main(name, pipe)
