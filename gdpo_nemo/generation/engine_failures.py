"""Which failures are an engine's own, so that another in its place may do, and how one of vLLM's processes ended."""

from __future__ import annotations

import re
import signal
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Sequence

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.errors import EngineFailed, GdpoError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

# By their words: an error of vLLM's own process reaches this one as the text of a plain Exception.
_OF_DEVICE = re.compile(
    r"\b(CUDA|HIP|NCCL|CUBLAS|CUDNN)( driver| runtime)? (error|out of memory)|error \[CUDA\]|device-side assert"
    r"|\b(CUBLAS|CUDNN|CUSOLVER)_STATUS_(?!SUCCESS)",
    re.IGNORECASE,
)
_SEE_LOG = "(what it wrote is in the engine's log)"


def engine_failure(error: BaseException) -> EngineFailed | None:
    """What an error of vLLM's says of the engine; None where the engine is not to blame, so that another would fail,
    too.

    After an error of CUDA's a process can do nothing with its device any more, whatever it is asked for.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, EngineFailed):
        return error
    if isinstance(error, EngineDeadError):
        return EngineFailed(f"vLLM's own process has failed {_SEE_LOG}")
    link: BaseException | None = error
    while link is not None and not isinstance(link, GdpoError):
        if _OF_DEVICE.search(str(link)):
            return EngineFailed(f"vLLM failed: {first_line(link)}")
        link = link.__cause__ or link.__context__
    return None


def wait_for_death(processes: Sequence[BaseProcess]) -> EngineFailed:
    """Wait until one of these children has ended; returns how.

    vLLM answers nobody who waits for a process of its own that was killed: they would wait for ever.
    """
    (ended, *_) = wait([process.sentinel for process in processes])
    process = next(process for process in processes if process.sentinel == ended)
    while process.exitcode is None:  # a thread of vLLM's that waits, too, may be about to note it
        time.sleep(0.01)
    code = process.exitcode
    how = f"ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    return EngineFailed(f"vLLM's process {process.name} {how} {_SEE_LOG}")
