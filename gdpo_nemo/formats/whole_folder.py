"""A folder that is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Iterator

from gdpo_nemo.errors import RunError


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Give a folder to write, which becomes ``out`` at the end of the block. Raises RunError."""
    temporary = out.absolute().parent / f".writing_{out.name}_{os.getpid()}"
    try:
        yield temporary
        if out.is_dir():
            out.rmdir()
        os.replace(temporary, out)
    except OSError as error:
        raise RunError(f"{out} could not be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
