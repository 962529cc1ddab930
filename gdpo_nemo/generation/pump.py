"""Thread that runs the steps of vLLM, and executes the operations of other threads between two steps.

    thread        calls                           effect
    ------------  ------------------------------  -----------------------------------------------------------
    any caller    submit                          appends to ``_operations`` and returns at once
                  call (abort, update, wake ...)  appends, then waits until the operation has run
                  hold                            appends, then waits until vLLM has stopped
                  poll                            waits for a finished request, at most ``wait_s`` seconds
    "vllm"        _run > _turn                    1. waits for operations, ``close``, a failure, or requests
                                                  2. runs all operations, in order of arrival
                                                  3. stops for a hold, or steps vLLM and delivers its outputs
    "vLLM's       _watch                          calls ``_fail`` if a process of vLLM ended, or if all are idle
    processes"                                    for too long while "vllm" waits for them

    state    _kv   _held  requests go to  transitions
    -------  ----  -----  --------------  -------------------------------------------------------------------
    running  None  False  vLLM            ``hold`` > halting
    halting  set   False  _parked         the next boundary between two steps (with ``drain``: the boundary at
                                          which vLLM is idle) > held; ``resume`` > running
    held     set   True   _parked         ``update``, ``resume`` > running, with the parked requests, or
                                          > asleep if vLLM sleeps; ``sleep`` > asleep
    asleep   None  False  _parked         ``wake("kv_cache")`` > running; ``hold`` > held, for an update

A failure is permanent: ``_fail`` sets the exception on all pending calls, and later calls raise it.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Collection, Iterable, Sequence, TypeVar

from gdpo_nemo.generation.engine_failures import (
    Standstill,
    death_of,
    engine_failure,
    output_sizes,
    start_failure,
    stuck_failure,
    wait_for_steady_memory,
)
from gdpo_nemo.generation.requests import EngineReport, FinishedRequest
from gdpo_nemo.generation.vllm_core import EngineOptions, Load, VllmCore, completion_of
from gdpo_nemo.utils.errors import GdpoError, RunError, first_line
from gdpo_nemo.utils.waits import work_done
from gdpo_nemo.weights.manifest import Manifest

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm import RequestOutput, SamplingParams

    from gdpo_nemo.weights.transports.base import Receiver

T = TypeVar("T")
_MEASURE_INTERVAL_S = 0.1
"""Minimum interval between two measurements of the load in seconds.

A measurement takes a microsecond per request in flight. A decode step of a small model takes a millisecond.
"""


@dataclass
class PumpedRequest:
    """Request with vLLM's types."""

    name: str
    prompt_ids: list[int]
    parameters: SamplingParams
    answer: Future[RequestOutput] | None = None
    """Future for the output, or None if ``poll`` returns the completion."""
    decodes: bool = False
    group: int | None = None
    """``decodes`` and ``group`` are those of the ``SampleRequest``."""


class Pump:
    """Thread that creates vLLM, runs its steps while requests are unfinished, and executes operations between two
    steps.

    Operations are executed in order of arrival. While a hold is requested or active, new requests are parked.

    Raises:
        Exception: if the creation of vLLM fails.
    """

    def __init__(self, options: EngineOptions):
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._reportable = threading.Condition(self._lock)
        self._operations: deque[Callable[[], None]] = deque()
        self._pending: set[Future[Any]] = set()
        """Pending calls to this thread. If the thread fails, all pending calls receive the exception."""
        self._failure: GdpoError | None = None
        self._closed = False
        # ``_lock`` protects the attributes above and ``_finished``. Only the thread uses the other attributes.
        self._finished: list[FinishedRequest] = []
        self._inflight: dict[str, PumpedRequest] = {}
        """Requests inside vLLM by name, in the order in which they were added."""
        self._parked: list[PumpedRequest] = []
        self._kept: list[tuple[int | None, FinishedRequest]] = []
        """(group, finished request) of groups with unfinished requests."""
        self._kv: str | None = None
        """Argument ``kv`` of the requested hold, or None if no hold is requested."""
        self._held = False
        self._holds: list[Future[None]] = []
        self._busy_s = 0.0
        self._decoded = 0
        """Number of tokens sampled by requests that have finished or were aborted."""
        self._recomputed = 0
        """Number of tokens whose keys and values were discarded at weight updates."""
        self._load = Load(0, 0, 0.0, 0, 0)
        self._num_kept = 0
        self._measured_s = 0.0
        self._waits_for_vllm = False
        """True while the thread waits for vLLM's processes and not for another process."""
        self.core: VllmCore
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(options, started), daemon=True, name="vllm")
        self._thread.start()
        started.result()

    # -- called by other threads --------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[PumpedRequest]) -> None:
        """Add requests without waiting. All requests of the call are added before the next step.

        Raises:
            RunError: if the thread has failed.
        """
        self._enqueue(partial(self._accept, requests), [r.answer for r in requests if r.answer is not None])

    def call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps. Return its result or raise its exception."""
        answer: Future[T] = Future()

        def operation() -> None:
            try:
                self._answer(answer, function())
            except Exception as error:
                failed = engine_failure(error)
                if failed is not None:
                    self._fail(failed)
                else:
                    self._answer(answer, error=error)

        self._enqueue(operation, [answer])
        return answer.result()

    def poll(self, wait_s: float) -> EngineReport:
        """Wait up to ``wait_s`` seconds until a request has finished, and return the engine's report.

        Raises:
            RunError: if the thread has failed.
        """
        with self._lock:
            self._reportable.wait_for(lambda: self._finished or self._failure, wait_s)
            if self._failure is not None:
                raise self._failure
            finished = self._finished
            self._finished = []
            load = self._load
            return EngineReport(
                finished=finished,
                version=self.core.version,
                running=load.running,
                waiting=load.waiting,
                kv_used=load.kv_used,
                busy_s=self._busy_s,
                decoded_tokens=self._decoded + load.tokens,
                recomputed_tokens=self._recomputed,
                kept=self._num_kept,
            )

    def abort(self, names: Collection[str]) -> None:
        """Drop requests in any state. After this call, ``poll`` does not return their completions."""
        self.call(partial(self._drop, frozenset(names)))

    def drawn(self, name: str) -> list[int]:
        """See ``VllmCore.drawn``."""
        return self.call(partial(self.core.drawn, name))

    def hold(self, kv: str) -> None:
        """Stop vLLM between two steps, and wait until it has stopped. With ``drain``, vLLM first finishes all requests.

        Raises:
            RunError: if ``resume`` ended the hold before vLLM stopped.
        """
        answer: Future[None] = Future()
        self._enqueue(partial(self._request_hold, kv, answer), [answer])
        answer.result()

    @property
    def held(self) -> bool:
        """True if vLLM is stopped for an update."""
        return self._held

    def resume(self) -> None:
        """End a hold without an update. Raises RunError if the engine has received only part of an update."""
        self.call(self._resume)

    def update(self, manifest: Manifest, receiver: Receiver, data: Sequence[Any]) -> None:
        """Load new weights during a hold, then end the hold. See ``VllmCore.update``."""
        self.call(partial(self._with_external_wait, partial(self._update, manifest, receiver, data)))

    def close_receiver(self, receiver: Receiver) -> None:
        """See ``Engine.close_receiver``."""
        self.call(partial(self._with_external_wait, partial(self.core.close_receiver, receiver)))

    def sleep(self) -> None:
        """Finish the requests in flight and release the device's memory."""
        self.hold("drain")
        self.call(self._sleep)

    def wake(self, tag: str) -> None:
        """See ``VllmCore.wake``."""
        self.call(partial(self._wake, tag))

    def close(self) -> None:
        """Shut down vLLM and the thread. Pending calls raise RunError."""
        with self._lock:
            self._closed = True
            self._arrived.notify()
            failed = self._failure is not None  # the thread may wait forever for a dead process
        if not failed:
            self._thread.join()

    def _enqueue(self, operation: Callable[[], None], answers: Iterable[Future[Any]]) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._pending.update(answers)
            self._operations.append(operation)
            self._arrived.notify()

    # -- called by the thread "vllm" ----------------------------------------------------------------------------------

    def _run(self, options: EngineOptions, started: Future[None]) -> None:
        sizes = output_sizes()
        try:
            if not options.on_cpu:
                wait_for_steady_memory()
            self.core = VllmCore(options)
        except BaseException as error:
            started.set_exception(start_failure(error, sizes))
            return
        self._watch(self.core.processes)
        started.set_result(None)
        try:
            while self._turn():
                pass
            if self._failure is None:
                self.core.close()
                self._fail(RunError("the engine is closed"))
        except Exception as error:
            traceback.print_exception(error)
            self._fail(engine_failure(error) or error)

    def _watch(self, processes: Sequence[BaseProcess]) -> None:
        """Start a thread that fails all pending calls if a process of vLLM ends, or if all processes are stuck.

        The thread "vllm" cannot detect this itself while it waits for these processes.
        """

        def watch() -> None:
            standstill = Standstill()
            pids = [process.pid for process in processes if process.pid is not None]
            while (failed := death_of(processes, Standstill.LOOK_S)) is None:
                done = [work_done(pid) for pid in pids] if self._waits_for_vllm else None
                if standstill.lasts(done, time.monotonic()):
                    failed = stuck_failure()
                    break
            if not self._closed:
                self._fail(failed)

        if processes:
            threading.Thread(target=watch, daemon=True, name="vLLM's processes").start()

    def _turn(self) -> bool:
        """Wait for work, execute the operations, then run one vLLM step. Return False after ``close`` or a failure."""
        with self._lock:
            self._arrived.wait_for(lambda: self._operations or self._closed or self._failure or self._can_step())
            operations = list(self._operations)
            self._operations.clear()
            self._pending = {answer for answer in self._pending if not answer.done()} if operations else self._pending
        if self._closed or self._failure:
            return False
        self._waits_for_vllm = True
        for operation in operations:
            operation()
        self._reach_hold()
        if self._can_step():
            self._step()
            self._reach_hold()
        elif operations:
            self._measure()
        self._waits_for_vllm = False
        return True

    def _can_step(self) -> bool:
        return not self._held and not self.core.asleep and self.core.busy

    def _step(self) -> None:
        start = time.monotonic()
        outputs = self.core.step()
        end = time.monotonic()
        self._busy_s += end - start
        if outputs or end - self._measured_s > _MEASURE_INTERVAL_S:
            self._deliver(outputs)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        finished = []
        for output in outputs:
            request = self._inflight.pop(output.request_id)
            self._decoded += len(output.outputs[0].token_ids)
            if request.answer is None:
                completion = completion_of(output)
                completion.text = "" if request.decodes else None
                finished.append((request.group, FinishedRequest(request.name, completion)))
            else:
                self._answer(request.answer, output)
        self._measure(finished)

    def _measure(self, finished: Sequence[tuple[int | None, FinishedRequest]] = ()) -> None:
        load = self.core.load()
        load = load._replace(waiting=load.waiting + len(self._parked))
        self._measured_s = time.monotonic()
        self._kept += finished
        unfinished = {request.group for request in (*self._inflight.values(), *self._parked)} - {None}
        reported = [done for group, done in self._kept if group not in unfinished]
        self._kept = [(group, done) for group, done in self._kept if group in unfinished]
        with self._lock:
            self._load = load
            self._num_kept = len(self._kept)
            self._finished += reported
            if reported:
                self._reportable.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error if isinstance(error, GdpoError) else RunError(f"vLLM failed: {first_line(error)}")
            for answer in self._pending:
                if not answer.done():
                    answer.set_exception(self._failure)
            self._reportable.notify_all()
            self._arrived.notify()

    def _answer(self, answer: Future[T], result: Any = None, error: Exception | None = None) -> None:
        """Set the result or the error of a call, unless ``_fail`` has already set an error."""
        with self._lock:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

    def _accept(self, requests: Sequence[PumpedRequest]) -> None:
        if self._kv is not None or self.core.asleep:
            self._parked += requests
        else:
            self._add(requests)

    def _add(self, requests: Collection[PumpedRequest]) -> None:
        self._inflight |= {request.name: request for request in requests}
        self.core.add((request.name, request.prompt_ids, request.parameters) for request in requests)

    def _drop(self, names: frozenset[str]) -> None:
        self._parked = [request for request in self._parked if request.name not in names]
        known = [name for name in names if self._inflight.pop(name, None)]
        self._decoded += self.core.abort(known)
        self._kept = [(group, done) for group, done in self._kept if done.name not in names]
        with self._lock:
            self._finished = [done for done in self._finished if done.name not in names]

    def _request_hold(self, kv: str, answer: Future[None]) -> None:
        if self._held and kv == "drain" and self.core.busy and not self.core.torn:
            self._held = False
            self.core.release()
        self._kv = kv
        self._holds.append(answer)

    def _reach_hold(self) -> None:
        """If a hold is requested and vLLM may stop now, stop it and complete the pending calls of ``hold``."""
        if not self._holds or (self._kv == "drain" and self.core.busy and not self.core.torn):
            return
        if not self._held:
            self._deliver(self.core.hold())
            self._held = True
        for answer in self._holds:
            self._answer(answer)
        self._holds.clear()

    def _resume(self) -> None:
        if self.core.torn:
            raise RunError("the engine cannot continue: it received only part of a weight update")
        for answer in self._holds:
            self._answer(answer, error=RunError("the engine resumed before it was idle"))
        self._holds.clear()
        self._end_hold()

    def _end_hold(self) -> None:
        if not self.core.asleep and self._parked:
            self._add(self._parked)
            self._parked = []
        if self._held:
            self.core.release()
        self._held = False
        self._kv = None

    def _with_external_wait(self, function: Callable[[], None]) -> None:
        """Call a function that also waits for other processes, such as the sender of the weights."""
        self._waits_for_vllm = False
        try:
            function()
        finally:
            self._waits_for_vllm = True

    def _update(self, manifest: Manifest, receiver: Receiver, data: Sequence[Any]) -> None:
        if not self._held:
            raise RunError(f"weight update {manifest.version}: the engine was not prepared for the update")
        keep = self._kv == "keep"
        discarded = 0 if keep else self.core.load().context
        self.core.update(manifest, receiver, data, keep)
        self._recomputed += discarded
        if keep:
            self._add_again(self.core.unstarted())
        self._end_hold()

    def _add_again(self, names: Collection[str]) -> None:
        """Abort requests and add them again, so that the requests do not use cached prefixes of the old weights."""
        requests = [request for name, request in self._inflight.items() if name in names]
        self.core.abort([request.name for request in requests])
        self._add(requests)

    def _sleep(self) -> None:
        self.core.sleep()
        self._end_hold()

    def _wake(self, tag: str) -> None:
        self.core.wake(tag)
        if self._kv is None:
            self._end_hold()
