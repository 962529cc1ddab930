"""Process that calls ``policy.model_factory``. Started with ``python -m`` and the arguments FILE FUNCTION FOLDER SEED
ERROR.

This process does not import large libraries itself. The user's function can import libraries that the driver must not
import, and can train a model.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from gdpo_nemo.utils.errors import GdpoError
from gdpo_nemo.utils.progress import quiet_torch

_MODULE = "model_factory"
"""Module name under which the user's file is imported."""


def call_factory(path: str, function: str, folder: str, seed: int) -> None:
    """Import a file and call its function, which creates a model in ``folder``. Exceptions propagate."""
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None and spec.loader is not None  # The file name ends with .py.
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    spec.loader.exec_module(module)
    getattr(module, function)(folder, seed)


def main(path: str, function: str, folder: str, seed: str, error_file: str) -> int:
    """Create the model and return the exit status. The message of a ``GdpoError`` is written to ``error_file``."""
    quiet_torch()
    try:
        call_factory(path, function, folder, int(seed))
    except GdpoError as error:
        # The driver reads this message and prints it as the run's error.
        Path(error_file).write_text(str(error), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
