"""A shorter start for processes that import large libraries."""

from __future__ import annotations

import contextlib
import gc
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
