"""Detection of engine failures: fatal errors of vLLM, and processes of vLLM that have ended or are stuck.

A failed engine can be replaced by a new one. Other errors would also occur in the new engine.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from gdpo_nemo.utils.errors import EngineFailed, GdpoError, first_line

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

# Match the message, because errors of vLLM's separate process arrive as plain Exceptions.
_DEVICE_ERROR = re.compile(
    r"\b(CUDA|CUDART|HIP|NCCL|CUBLAS|CUDNN)( driver| runtime)? (error|out of memory)|error \[CUDA\]|device-side assert"
    r"|\b(CUBLAS|CUDNN|CUSOLVER)_STATUS_(?!SUCCESS)"
    # Other processes, such as the engine that is replaced, still hold memory.
    r"|\bFree memory on device .* is less than|\bError in memory profiling",
    re.IGNORECASE,
)
_CORE_ENDED = "Engine core initialization failed"
"""vLLM's message if a separate process ended while it started. Only the output of this process contains the cause."""
_ERROR_LINE = re.compile(r"^(?:\([^)]*\) )?(?:ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception)\b: \S.*)$", re.MULTILINE)
_TAIL_BYTES = 1 << 20
_STEADY_BYTES = 64 << 20
_STEADY_READINGS = 3
_MOST_READINGS = 60
_SEE_LOG = "(see its output in the engine's log)"


def engine_failure(error: BaseException) -> EngineFailed | None:
    """Return the failure for an error of vLLM that makes the engine unusable, or None for other errors.

    Errors of the GPU count as failures, because a process cannot use its GPU after a CUDA error.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, EngineFailed):
        return error
    if isinstance(error, EngineDeadError):
        return EngineFailed(f"vLLM's engine process failed {_SEE_LOG}")
    link: BaseException | None = error
    while link is not None and not isinstance(link, GdpoError):
        if _DEVICE_ERROR.search(str(link)):
            return EngineFailed(f"vLLM failed: {first_line(link)}")
        link = link.__cause__ or link.__context__
    return None


def output_sizes() -> dict[int, int]:
    """Return the current size of this process's standard output and standard error, for those that are files."""
    states = {descriptor: os.fstat(descriptor) for descriptor in (1, 2)}
    return {descriptor: state.st_size for descriptor, state in states.items() if stat.S_ISREG(state.st_mode)}


def start_failure(error: BaseException, sizes: Mapping[int, int]) -> BaseException:
    """Return the failure for an error during the start of vLLM, or the error itself if it is not an engine failure.

    Args:
        error: exception that vLLM raised.
        sizes: ``output_sizes`` before the start. The message quotes the last error in the later output, because the
            error of a separate process does not reach this process.
    """
    failed = engine_failure(error)
    if _CORE_ENDED in str(error):
        failed = EngineFailed(f"vLLM did not start: {_last_error(sizes) or first_line(error)} {_SEE_LOG}")
    return failed or error


def _last_error(sizes: Mapping[int, int]) -> str:
    """Return the last error line in the output since ``sizes`` that states a cause, or an empty string."""
    found = ""
    for descriptor, size in sizes.items():
        with open(f"/proc/self/fd/{descriptor}", "rb") as file:
            file.seek(max(size, os.fstat(descriptor).st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
        lines = [line for line in _ERROR_LINE.findall(text) if "initialization failed" not in line]
        found = lines[-1][:300] if lines else found
    return found


def wait_for_steady_memory(read: Callable[[], list[int]] | None = None, interval_s: float = 1.0) -> None:
    """Wait until the free memory of this process's GPUs is steady, for at most a minute.

    vLLM fails to start if another process, such as the engine that is replaced, releases memory in the meantime.

    Args:
        read: function that returns the free bytes of each GPU; None reads them through NVML.
        interval_s: time between two readings in seconds.
    """
    read = read or _free_bytes
    steady, last = 1, read()
    for _ in range(_MOST_READINGS):
        if steady == _STEADY_READINGS:
            return
        time.sleep(interval_s)
        now = read()
        moved = any(abs(one - other) > _STEADY_BYTES for one, other in zip(now, last, strict=True))
        steady, last = 1 if moved else steady + 1, now


def _free_bytes() -> list[int]:
    # torch would create a CUDA context in this process, which takes memory and prevents vLLM from forking its process.
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
        free = []
        for name in names:
            if name.isdigit():
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            free.append(int(pynvml.nvmlDeviceGetMemoryInfo(handle).free))
        return free
    finally:
        pynvml.nvmlShutdown()


def death_of(processes: Sequence[BaseProcess], wait_s: float) -> EngineFailed | None:
    """Wait until a child process ends, and return the failure. Return None if all processes are alive after ``wait_s``
    seconds.

    Without this check, calls that wait for a killed process of vLLM would wait forever.
    """
    ended = wait([process.sentinel for process in processes], wait_s)
    if not ended:
        return None
    process = next(process for process in processes if process.sentinel == ended[0])
    while process.exitcode is None:  # another thread of vLLM may be about to set the exit code
        time.sleep(0.01)
    code = process.exitcode
    ending = f"ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    return EngineFailed(f"vLLM's process {process.name} {ending} {_SEE_LOG}")


class Standstill:
    """Detector of stuck processes, which use no CPU time and do no I/O although a call waits for them.

    Stopped or deadlocked processes are detected. Processes in a busy loop are not detected. Slow processes, for example
    on a busy machine or with a long prompt, are not considered stuck. Time during which the machine or the detector was
    suspended does not count.
    """

    LIMIT_S = 120.0
    """Seconds without progress after which processes are considered stuck."""
    LOOK_S = 2.0
    """Seconds between two checks. A longer interval counts as ``LOOK_S`` seconds."""

    def __init__(self) -> None:
        self._done: object = None
        self._last_check_s = 0.0
        self._idle_s = 0.0

    def lasts(self, done: object | None, now: float) -> bool:
        """Record a check. Return whether the processes have made no progress for ``LIMIT_S`` seconds.

        Args:
            done: measure of the work that the processes have done so far (``waits.work_done``), or None if no call
                waits for the processes.
            now: time of a monotonic clock in seconds.
        """
        if done is None or done != self._done:
            self._idle_s = 0.0
        else:
            self._idle_s += min(now - self._last_check_s, self.LOOK_S)
        self._done, self._last_check_s = done, now
        return self._idle_s >= self.LIMIT_S


def stuck_failure() -> EngineFailed:
    """Return the failure for an engine whose processes are stuck."""
    return EngineFailed(
        f"vLLM's processes used no CPU time or I/O for {Standstill.LIMIT_S:.0f} s while the engine waited for them: "
        f"the processes are stopped or stuck {_SEE_LOG}"
    )
