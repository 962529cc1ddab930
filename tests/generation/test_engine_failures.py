"""Whether a failure is the engine's own, and what is known of a process that ended or stands still."""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from gdpo_nemo.generation.engine_failures import (
    Standstill,
    death_of,
    engine_failure,
    start_failure,
    wait_for_steady_memory,
)
from gdpo_nemo.utils.errors import EngineFailed, RunError
from gdpo_nemo.weights.manifest import PeerLost

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


OF_VLLM = {
    "v1/worker/utils.py": {
        "Free memory on device 1 (1/1 GiB) on startup is less than desired GPU memory utilization": True,
        "Free memory on device 1 (1/1 GiB) on startup is less than the engine's budget": True,
        "Externally held weights on device 1": False,
    },
    "v1/worker/gpu_model_runner.py": {"CUDA out of memory occurred when warming up sampler with 1 dummy": True},
    "distributed/device_communicators/cuda_wrapper.py": {"CUDART error: 1": True},
    "distributed/device_communicators/pynccl_wrapper.py": {"NCCL error: 1": True},
    "v1/core/kv_cache_utils.py": {
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`": False,
        "To serve at least one request with the model's max seq len (1), (1 GiB KV cache is needed": False,
    },
    "v1/worker/gpu_worker.py": {
        "Error in memory profiling. Initial free memory 1 GiB, current free memory 1 GiB.": True,
        "start_weight_update must be called before update_weights.": False,
    },
    "v1/engine/utils.py": {"Engine core initialization failed. See root cause above.": False},
}
"""Beginnings of messages in vLLM's source, with 1 for what is computed, by file; whether another engine may do
better."""


def raised_by(file: Path) -> list[str]:
    """The messages of all exceptions that a file raises with a text of its own."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    calls = [node.exc for node in nodes if isinstance(node, ast.Raise)]
    texts = [call.args[0] for call in calls if isinstance(call, ast.Call) and call.args]
    texts += [node.msg for node in nodes if isinstance(node, ast.Assert)]
    texts = [text.left if isinstance(text, ast.BinOp) else text for text in texts]
    return [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in getattr(text, "values", [text]))
        for text in texts
        if isinstance(text, (ast.Constant, ast.JoinedStr))
    ]


@pytest.mark.parametrize("file", OF_VLLM)
def test_messages_in_vllms_source_are_classified(file):
    """A version of vLLM that words one of them in another way fails here."""
    raised = raised_by(Path(importlib.util.find_spec("vllm").origin).parent / file)
    for beginning, of_device in OF_VLLM[file].items():
        (text, *_) = [text for text in raised if text.startswith(beginning)] or [""]
        assert text, beginning
        assert isinstance(engine_failure(ValueError(text)), EngineFailed) == of_device, text


CORE_ENDED = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
OUTPUT = """(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7)   File "/vllm/v1/worker/gpu_worker.py", line 720, in determine_available_memory
(EngineCore pid=7) AssertionError: Error in memory profiling. Initial free memory 94.81 GiB
(EngineCore pid=7) RuntimeError: WorkerProc initialization failed due to an exception in a background process.
[rank0]: a warning
"""


def test_failed_start_of_vllms_process_quotes_the_last_error_of_its_output(tmp_path):
    """The error does not reach this process. What an earlier process wrote is not quoted."""
    log = tmp_path / "worker.err"
    earlier = "ValueError: of an earlier start\n"
    log.write_text(earlier + OUTPUT)
    with log.open() as file:
        failed = start_failure(RuntimeError(CORE_ENDED), {file.fileno(): len(earlier)})
        silent = start_failure(RuntimeError(CORE_ENDED), {file.fileno(): log.stat().st_size})
    assert isinstance(failed, EngineFailed) and isinstance(silent, EngineFailed)
    assert str(failed).startswith("vLLM did not start: AssertionError: Error in memory profiling. Initial free memory")
    assert "Failed core proc(s): {'EngineCore': 1}" in str(silent)
    other = ValueError("To serve at least one request with the model's max seq len")
    assert start_failure(other, {}) is other


def test_start_waits_until_the_free_memory_of_all_gpus_is_steady():
    readings = iter([[0, 9 << 30], [0, 8 << 30], [1 << 30, 8 << 30], *[[1 << 30, 8 << 30]] * 5])
    wait_for_steady_memory(lambda: next(readings), 0.0)
    assert len(list(readings)) == 3
    moving = iter(range(10**6))
    wait_for_steady_memory(lambda: [next(moving) << 30], 0.0)  # does not wait forever


def test_an_error_of_the_device_is_found_behind_one_of_its_cleanup():
    try:
        try:
            raise RuntimeError(OF_DEVICES[0])
        finally:
            raise ValueError("the cache is not there")
    except ValueError as error:
        assert isinstance(engine_failure(error), EngineFailed)


@pytest.mark.parametrize("error", [*map(RuntimeError, OF_OTHERS), RunError("checksum of x differs after transport")])
def test_an_error_that_another_engine_would_make_too_is_not(error):
    assert engine_failure(error) is None


def test_lost_sender_is_never_a_failure_of_the_engine():
    try:
        raise PeerLost("a member of the broadcast group was lost") from RuntimeError(OF_DEVICES[4])
    except PeerLost as error:
        assert engine_failure(error) is None


def test_the_death_of_vllms_own_process_is():
    from vllm.v1.engine.exceptions import EngineDeadError

    assert "vLLM's engine process failed" in str(engine_failure(EngineDeadError()))


class Child:
    """A process as multiprocessing has it, which another thread may be waiting for as well."""

    name = "EngineCore"

    def __init__(self, code: str):
        (self.sentinel, ours) = os.pipe()
        self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[ours])
        self.pid = self._process.pid
        os.close(ours)
        self.looks = 0

    @property
    def exitcode(self):
        self.looks += 1
        return self._process.poll() if self.looks > 2 else None

    def kill(self):
        self.send(signal.SIGKILL)

    def send(self, number):
        self._process.send_signal(number)


@pytest.mark.slow
def test_end_of_a_vllm_process_is_described():
    lives = Child("import time; time.sleep(600)")
    assert str(death_of([lives, Child("import sys; sys.exit(3)")], 60)) == (
        "vLLM's process EngineCore ended with status 3 (see its output in the engine's log)"
    )
    assert death_of([lives], 0.1) is None
    lives.kill()
    assert "vLLM's process EngineCore was killed by SIGKILL" in str(death_of([lives], 60))


class DeadCore:
    """vLLM whose own process is gone: who asks it for anything waits for ever, or is told that it is dead."""

    version = -1
    busy = asleep = torn = False

    def __init__(self, options):
        self.processes = [Child(options.code)]
        self.never = options.never

    def load(self):
        from gdpo_nemo.generation.vllm_core import Load

        return Load(0, 0, 0.0, 0, 0)

    def close_receiver(self, receiver):
        receiver()

    def wake(self, what):
        if what == "hangs":
            self.never.wait()
        raise Exception(OF_DEVICES[0])


class Options:
    """What takes the place of an engine's options: what its process does, and what never happens."""

    def __init__(self, code):
        self.code = code
        self.on_cpu = True
        self.model = self.tokenizer = self.max_model_len = None
        self.never = threading.Event()


SLEEPS = "import time; time.sleep(600)"
WORKS_LITTLE = "import time\nwhile True: time.sleep(0.2); sum(range(10**5))"


@pytest.fixture
def started(monkeypatch):
    """A function that starts an engine whose vLLM has a process which runs some code."""
    from gdpo_nemo.generation import engine as engines

    monkeypatch.setattr(engines, "VllmCore", DeadCore)
    made = []

    def start(code):
        made.append(Options(code))
        made.append(engines.Engine(made[-1]))
        return made[-1]

    yield start
    for options, engine in zip(made[::2], made[1::2]):
        options.never.set()
        engine._core.processes[0].kill()


@pytest.fixture
def engine(started):
    return started(SLEEPS)


@pytest.mark.slow
def test_waiter_for_a_killed_process_gets_an_error(engine):
    threading.Timer(0.5, engine._core.processes[0].kill).start()
    with pytest.raises(EngineFailed, match="was killed by SIGKILL"):
        engine.wake("hangs")
    for ask in (lambda: engine.poll(60), lambda: engine._hold("keep"), lambda: engine.submit({})):
        with pytest.raises(EngineFailed, match="was killed by SIGKILL"):
            ask()
    engine.close()


@pytest.mark.slow
def test_an_error_of_the_device_in_one_call_is_the_answer_to_every_later_one(engine):
    with pytest.raises(EngineFailed, match="illegal memory access"):
        engine.wake("kv_cache")
    with pytest.raises(EngineFailed, match="illegal memory access"):
        engine.poll(60)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(Standstill, "LIMIT_S", 3.0)
    monkeypatch.setattr(Standstill, "LOOK_S", 0.5)


def beside(call):
    """A thread that makes a call, whatever it raises in the end."""

    def run():
        try:
            call()
        except EngineFailed:
            pass  # who asks next is told

    threading.Thread(target=run, daemon=True).start()


@pytest.mark.slow
def test_waiter_for_a_stuck_process_gets_an_error(engine, impatient):
    engine._core.processes[0].send(signal.SIGSTOP)
    with pytest.raises(
        EngineFailed, match="used no CPU time or I/O for 3 s while the engine waited for them: the processes are"
    ):
        engine.wake("hangs")
    with pytest.raises(EngineFailed, match="used no CPU time or I/O"):
        engine.poll(60)


@pytest.fixture
def looks(monkeypatch):
    """How often each watcher has looked, whatever else the machine does."""
    counts = Counter()
    lasts = Standstill.lasts

    def counted(self, done, now):
        counts[id(self)] += 1
        return lasts(self, done, now)

    monkeypatch.setattr(Standstill, "lasts", counted)
    return counts


@pytest.mark.slow
def test_idle_slow_and_waiting_engines_are_not_replaced(started, impatient, looks):
    idle, slow, receives = started(SLEEPS), started(WORKS_LITTLE), started(SLEEPS)
    idle.close_receiver(lambda: None)  # the last thing that it had to do
    beside(lambda: slow.wake("hangs"))
    beside(lambda: receives.close_receiver(receives._core.never.wait))
    enough = 2 * Standstill.LIMIT_S / Standstill.LOOK_S
    while len(looks) < 3 or min(looks.values()) < enough:
        for engine in (idle, slow, receives):
            assert engine.poll(0.1).finished == []


def test_unobserved_time_does_not_count_as_standstill():
    """A stopped watcher, a machine that was suspended: one look may count as ``LOOK_S``."""
    standstill = Standstill()
    looks = [standstill.lasts(3.0, now) for now in (0.0, 2.0, 9000.0, 9002.0)]
    assert looks == [False] * 4
    assert [standstill.lasts(3.0, 9002.0 + 2 * n) for n in range(1, 60)].index(True) == 56  # 3 * 2 s before
    assert not standstill.lasts(3.01, 9200.0) and not standstill.lasts(None, 9400.0)
    assert not standstill.lasts(3.01, 9402.0)  # since somebody waited again
