"""Whether a failure is the engine's own, and what is known of a process that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from gdpo_nemo.errors import EngineFailed, RunError
from gdpo_nemo.generation.engine_failures import engine_failure, wait_for_death
from gdpo_nemo.weights.buckets import PeerLost

OF_DEVICES = (
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported",
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb)`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.29.7",
    "Triton Error [CUDA]: device-side assert triggered",
    "CUDA driver error: unknown error",
    "Call to update_weights method failed: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139",
)
"""As torch, Triton and vLLM word them."""
OF_OTHERS = (
    "Call to update_weights method failed: shape '[3]' is invalid for input of size 4",
    "The decoder prompt (length 70) is longer than the maximum model length of 64",
    "There is no module or parameter named 'model.layers.9' in Qwen2ForCausalLM",
)


@pytest.mark.parametrize("text", OF_DEVICES)
def test_an_error_of_the_device_is_a_failure_of_the_engine(text):
    found = engine_failure(Exception(text))
    assert isinstance(found, EngineFailed) and str(found).startswith("vLLM failed: Exception: ")
    try:
        raise RuntimeError("wrapped") from RuntimeError(text)
    except RuntimeError as error:
        assert isinstance(engine_failure(error), EngineFailed)


@pytest.mark.parametrize("error", [*map(RuntimeError, OF_OTHERS), RunError("checksum of x differs after transport")])
def test_an_error_that_another_engine_would_make_too_is_not(error):
    assert engine_failure(error) is None


def test_a_lost_sender_is_not_a_failure_of_the_engine_whatever_it_is_made_of():
    try:
        raise PeerLost("a member of the broadcast group was lost") from RuntimeError(OF_DEVICES[4])
    except PeerLost as error:
        assert engine_failure(error) is None


def test_the_death_of_vllms_own_process_is():
    from vllm.v1.engine.exceptions import EngineDeadError

    assert "vLLM's own process has failed" in str(engine_failure(EngineDeadError()))


class Child:
    """A process as multiprocessing has it, which another thread may be waiting for as well."""

    name = "EngineCore"

    def __init__(self, code: str):
        (self.sentinel, ours) = os.pipe()
        self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[ours])
        os.close(ours)
        self.looks = 0

    @property
    def exitcode(self):
        self.looks += 1
        return self._process.poll() if self.looks > 2 else None

    def kill(self):
        self._process.send_signal(signal.SIGKILL)


def test_how_a_process_of_vllms_ended_is_said():
    lives = Child("import time; time.sleep(600)")
    assert str(wait_for_death([lives, Child("import sys; sys.exit(3)")])) == (
        "vLLM's process EngineCore ended with status 3 (what it wrote is in the engine's log)"
    )
    lives.kill()
    assert "vLLM's process EngineCore was killed by SIGKILL" in str(wait_for_death([lives]))


class DeadCore:
    """vLLM whose own process is gone: who asks it for anything waits for ever, or is told that it is dead."""

    version = -1
    busy = asleep = torn = False

    def __init__(self, options):
        self.processes = [Child("import time; time.sleep(600)")]
        self.never = options

    def load(self):
        from gdpo_nemo.generation.vllm_core import Load

        return Load(0, 0, 0.0, 0, 0)

    def wake(self, what):
        if what == "hangs":
            self.never.wait()
        raise Exception(OF_DEVICES[0])


@pytest.fixture
def pump(monkeypatch):
    from gdpo_nemo.generation import pump as pumps

    monkeypatch.setattr(pumps, "VllmCore", DeadCore)
    never = threading.Event()
    yield pumps.Pump(never)
    never.set()


def test_whoever_waits_for_a_process_that_was_killed_is_told(pump):
    threading.Timer(0.5, pump.core.processes[0].kill).start()
    with pytest.raises(EngineFailed, match="was killed by SIGKILL"):
        pump.wake("hangs")
    for ask in (lambda: pump.poll(60), lambda: pump.hold("keep"), lambda: pump.submit([])):
        with pytest.raises(EngineFailed, match="was killed by SIGKILL"):
            ask()
    pump.close()


def test_an_error_of_the_device_in_one_call_is_the_answer_to_every_later_one(pump):
    with pytest.raises(EngineFailed, match="illegal memory access"):
        pump.wake("kv_cache")
    with pytest.raises(EngineFailed, match="illegal memory access"):
        pump.poll(60)
    pump.core.processes[0].kill()
