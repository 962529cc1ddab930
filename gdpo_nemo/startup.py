"""A shorter and quieter start for processes that import large libraries."""

from __future__ import annotations

import contextlib
import gc
import logging
from pathlib import Path
from typing import Iterator


@contextlib.contextmanager
def importing(freeze: bool = True) -> Iterator[None]:
    """Keep Python's garbage collector away from what the block imports.

    Modules live as long as their process, and those of vLLM and Megatron are more than a million objects, which the
    collector would look at again and again: a fifth of an engine's start.

    Args:
        freeze: leave all objects that live at the end of the block out of later collections, too (``gc.freeze``). For
            processes of our own: garbage in cycles that is there by then stays for ever.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if collects:
            gc.enable()


def quiet_torch() -> None:
    """Hide torch's warning that a CUDA toolkit has no runtime, on a machine without a GPU.

    Torch warns if an `nvcc` is found, in each process that imports its extension builder. If there is a GPU that torch
    cannot use, the warning stays.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
