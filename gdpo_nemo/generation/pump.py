"""The thread that steps vLLM, and how others ask it for something between two steps."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Collection, Iterable, Sequence, TypeVar

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.errors import GdpoError, RunError
from gdpo_nemo.generation.engine_failures import (
    Standstill,
    death_of,
    engine_failure,
    standing_still,
)
from gdpo_nemo.generation.requests import EngineReport, FinishedRequest
from gdpo_nemo.generation.vllm_core import EngineOptions, Load, VllmCore, completion_of
from gdpo_nemo.waits import work_done
from gdpo_nemo.weights.manifest import Manifest

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm import RequestOutput, SamplingParams

    from gdpo_nemo.weights.transports.transport import Receiver

T = TypeVar("T")
_MEASURED_EVERY_S = 0.1
"""Counting what is in flight costs a microsecond a request; a decode step of a small model takes a millisecond."""


@dataclass
class PumpedRequest:
    """A request as vLLM takes it."""

    name: str
    prompt_ids: list[int]
    parameters: SamplingParams
    answer: Future[RequestOutput] | None = None
    """Whom it is for; None: whoever polls."""


class Pump:
    """One thread that constructs vLLM, steps it while there is work, and does everything else between two steps.

    Operations run in the order of their arrival. From the moment that a hold is asked for until it ends, requests are
    parked.

    Raises:
        Exception: what constructing vLLM raised.
    """

    def __init__(self, options: EngineOptions):
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._reportable = threading.Condition(self._lock)
        self._operations: deque[Callable[[], None]] = deque()
        self._pending: set[Future[Any]] = set()
        """Whoever waits for this thread; a failure reaches them all."""
        self._failure: GdpoError | None = None
        self._closed = False
        # Under the lock up to here and ``_finished``; what follows belongs to the thread alone.
        self._finished: list[FinishedRequest] = []
        self._inflight: dict[str, PumpedRequest] = {}
        """What vLLM has, by name, in the order in which it was added."""
        self._parked: list[PumpedRequest] = []
        self._kv: str | None = None
        """What becomes of keys and values at the next update; None: no hold was asked for."""
        self._held = False
        self._holds: list[Future[None]] = []
        self._busy_s = 0.0
        self._decoded = 0
        """Of requests that are gone."""
        self._recomputed = 0
        self._load = Load(0, 0, 0.0, 0, 0)
        self._measured_s = 0.0
        self._waits_for_vllm = False
        """Whether vLLM's processes, and nobody else, have to do something now."""
        self.core: VllmCore
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(options, started), daemon=True, name="vllm")
        self._thread.start()
        started.result()

    # -- what other threads call ------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[PumpedRequest]) -> None:
        """Add requests, all of them before the next step. Does not wait.

        Raises:
            RunError: the thread has ended by an error.
        """
        self._put(partial(self._accept, requests), [r.answer for r in requests if r.answer is not None])

    def call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps and return what it returns, or raise what it raises."""
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

        self._put(operation, [answer])
        return answer.result()

    def poll(self, wait_s: float) -> EngineReport:
        """Wait until a request has finished, at most ``wait_s`` seconds.

        Raises:
            RunError: the thread has ended by an error.
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
            )

    def abort(self, names: Collection[str]) -> None:
        """Drop requests, wherever they are; returns when none of them can be reported any more."""
        self.call(partial(self._drop, frozenset(names)))

    def drawn(self, name: str) -> list[int]:
        """See ``VllmCore.drawn``."""
        return self.call(partial(self.core.drawn, name))

    def hold(self, kv: str) -> None:
        """Wait for the boundary between two steps at which nothing is left (``drain``), or for the next one.

        Raises:
            RunError: the hold ended before it was reached.
        """
        answer: Future[None] = Future()
        self._put(partial(self._ask_hold, kv, answer), [answer])
        answer.result()

    @property
    def held(self) -> bool:
        """Whether vLLM is stopped for an update."""
        return self._held

    def resume(self) -> None:
        """End a hold. Raises RunError where half an update is held."""
        self.call(self._resume)

    def update(self, manifest: Manifest, receiver: Receiver, data: Sequence[Any]) -> None:
        """Take new weights during a hold, and end it; see ``VllmCore.update``."""
        self.call(partial(self._with_others, partial(self._update, manifest, receiver, data)))

    def close_receiver(self, receiver: Receiver) -> None:
        """See ``Engine``."""
        self.call(partial(self._with_others, partial(self.core.close_receiver, receiver)))

    def sleep(self) -> None:
        """Finish what is in flight and release the device's memory."""
        self.hold("drain")
        self.call(self._sleep)

    def wake(self, what: str) -> None:
        """See ``VllmCore.wake``."""
        self.call(partial(self._wake, what))

    def close(self) -> None:
        """End vLLM and the thread; whoever waits gets an error."""
        with self._lock:
            self._closed = True
            self._arrived.notify()
            waits = self._failure is not None  # perhaps for ever, for an answer of a process that is gone
        if not waits:
            self._thread.join()

    def _put(self, operation: Callable[[], None], answers: Iterable[Future[Any]]) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._pending.update(answers)
            self._operations.append(operation)
            self._arrived.notify()

    # -- what the thread does ---------------------------------------------------------------------------------------

    def _run(self, options: EngineOptions, started: Future[None]) -> None:
        try:
            self.core = VllmCore(options)
        except BaseException as error:
            started.set_exception(error)
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
        """Answer whoever waits once a process of vLLM's has ended, or all stand still while the thread waits for them:
        it can do neither itself."""

        def watch() -> None:
            standstill = Standstill()
            pids = [process.pid for process in processes if process.pid is not None]
            while (failed := death_of(processes, Standstill.LOOK_S)) is None:
                done = [work_done(pid) for pid in pids] if self._waits_for_vllm else None
                if standstill.lasts(done, time.monotonic()):
                    failed = standing_still()
                    break
            if not self._closed:
                self._fail(failed)

        if processes:
            threading.Thread(target=watch, daemon=True, name="vLLM's processes").start()

    def _turn(self) -> bool:
        """Do what was asked for, then one step; False once closed or failed."""
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
        if outputs or end - self._measured_s > _MEASURED_EVERY_S:
            self._deliver(outputs)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        finished = []
        for output in outputs:
            request = self._inflight.pop(output.request_id)
            self._decoded += len(output.outputs[0].token_ids)
            if request.answer is None:
                finished.append(FinishedRequest(request.name, completion_of(output)))
            else:
                self._answer(request.answer, output)
        self._measure(finished)

    def _measure(self, finished: Sequence[FinishedRequest] = ()) -> None:
        load = self.core.load()
        load = load._replace(waiting=load.waiting + len(self._parked))
        self._measured_s = time.monotonic()
        with self._lock:
            self._load = load
            self._finished += finished
            if finished:
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
        """Answer, unless a failure has done so already."""
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
        with self._lock:
            self._finished = [done for done in self._finished if done.name not in names]

    def _ask_hold(self, kv: str, answer: Future[None]) -> None:
        if self._held and kv == "drain" and self.core.busy and not self.core.torn:
            self._held = False
            self.core.release()
        self._kv = kv
        self._holds.append(answer)

    def _reach_hold(self) -> None:
        """Stop vLLM where whoever asked for a hold wants it stopped, and tell them."""
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
            raise RunError("the engine cannot go on: it holds part of a weight update")
        for answer in self._holds:
            self._answer(answer, error=RunError("the engine went on before it was idle"))
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

    def _with_others(self, function: Callable[[], None]) -> None:
        """Call what may have vLLM's processes wait, too: for whoever sends the weights."""
        self._waits_for_vllm = False
        try:
            function()
        finally:
            self._waits_for_vllm = True

    def _update(self, manifest: Manifest, receiver: Receiver, data: Sequence[Any]) -> None:
        if not self._held:
            raise RunError(f"weight update {manifest.version}: the engine was not told to prepare for it")
        keep = self._kv == "keep"
        thrown_away = 0 if keep else self.core.load().context
        self.core.update(manifest, receiver, data, keep)
        self._recomputed += thrown_away
        if keep:
            self._restart(self.core.unstarted())
        self._end_hold()

    def _restart(self, names: Collection[str]) -> None:
        """Add requests anew: their prompts must not find what the older weights have left in the prefix cache."""
        requests = [request for name, request in self._inflight.items() if name in names]
        self.core.abort([request.name for request in requests])
        self._add(requests)

    def _sleep(self) -> None:
        self.core.sleep()
        self._end_hold()

    def _wake(self, what: str) -> None:
        self.core.wake(what)
        if self._kv is None:
            self._end_hold()
