"""Which failures are an engine's own, so that another in its place may do, how one of vLLM's processes ended, and
whether they stand still."""

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


def death_of(processes: Sequence[BaseProcess], wait_s: float) -> EngineFailed | None:
    """Wait until one of these children has ended, and return how; None where all live on after ``wait_s`` seconds.

    vLLM answers nobody who waits for a process of its own that was killed: they would wait for ever.
    """
    ended = wait([process.sentinel for process in processes], wait_s)
    if not ended:
        return None
    process = next(process for process in processes if process.sentinel == ended[0])
    while process.exitcode is None:  # a thread of vLLM's that waits, too, may be about to note it
        time.sleep(0.01)
    code = process.exitcode
    how = f"ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    return EngineFailed(f"vLLM's process {process.name} {how} {_SEE_LOG}")


class Standstill:
    """For how long processes that somebody waits for have done nothing.

    One that is stopped or in a deadlock does nothing; one that is slow, on a busy machine or with a long prompt, does
    something. Time counts only while it is watched: a machine that was suspended, or a watcher that was stopped, is not
    held against the processes. A hang that spins is not seen.
    """

    LIMIT_S = 120.0
    LOOK_S = 2.0
    """Between two looks; a longer gap counts as this."""

    def __init__(self) -> None:
        self._done: object = None
        self._looked = 0.0
        self._still_s = 0.0

    def lasts(self, done: object | None, now: float) -> bool:
        """Whether it has lasted for ``LIMIT_S``.

        Args:
            done: what the processes have done so far (``waits.work_done``); None: nobody waits for them.
            now: of a monotonic clock, in seconds.
        """
        if done is None or done != self._done:
            self._still_s = 0.0
        else:
            self._still_s += min(now - self._looked, self.LOOK_S)
        self._done, self._looked = done, now
        return self._still_s >= self.LIMIT_S


def standing_still() -> EngineFailed:
    """What is said of an engine whose processes stand still."""
    return EngineFailed(
        f"vLLM's processes have done nothing for {Standstill.LIMIT_S:.0f} s in which they were waited for: they are "
        f"stopped, or hang {_SEE_LOG}"
    )
