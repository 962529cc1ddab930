"""Thread-safe vLLM engine that accepts requests and weight updates during sampling.

A dedicated thread runs the steps of vLLM, and executes the operations of other threads between two steps.

    thread        calls                           effect
    ------------  ------------------------------  -----------------------------------------------------------
    any caller    submit                          appends to ``_operations`` and returns at once
                  abort, update_weights, wake ... append (``_call``), then wait until the operation has run
                  prepare_update, sleep           append, then wait until vLLM has stopped (``_hold``)
                  poll                            waits for a finished request, at most ``wait_s`` seconds
    "vllm"        _run > _turn                    1. waits for operations, ``close``, a failure, or requests
                                                  2. runs all operations, in order of arrival
                                                  3. stops for a hold, or steps vLLM and delivers its outputs
    "vLLM's       _watch                          calls ``_fail`` if a process of vLLM ended, or if all are idle
    processes"                                    for too long while "vllm" waits for them

    state    _kv   _held  requests go to  transitions
    -------  ----  -----  --------------  -------------------------------------------------------------------
    running  None  False  vLLM            ``_hold`` > halting
    halting  set   False  _parked         the next boundary between two steps (with ``drain``: the boundary at
                                          which vLLM is idle) > held; ``resume`` > running
    held     set   True   _parked         ``_update``, ``resume`` > running, with the parked requests, or
                                          > asleep if vLLM sleeps; ``_sleep`` > asleep
    asleep   None  False  _parked         ``wake("kv_cache")`` > running; ``_hold`` > held, for an update

A failure is permanent: ``_fail`` sets the exception on all pending calls, and later calls raise it.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gdpo_nemo.data.images import Images
from gdpo_nemo.data.replies import ReplyParser
from gdpo_nemo.data.tokenizer import load_tokenizer
from gdpo_nemo.generation.engine_failures import (
    Standstill,
    death_of,
    engine_failure,
    output_sizes,
    start_failure,
    stuck_failure,
    wait_for_steady_memory,
)
from gdpo_nemo.generation.requests import CompletionBatch, EngineReport, FinishedRequest, SampleRequest, Sampling
from gdpo_nemo.generation.vllm_core import (
    EngineOptions,
    Load,
    VllmCore,
    completion_of,
    sampling_parameters,
    scores_of,
    scoring_parameters,
)
from gdpo_nemo.utils.errors import GdpoError, RunError, first_line
from gdpo_nemo.utils.waits import work_done
from gdpo_nemo.weights.manifest import Manifest

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm import RequestOutput, SamplingParams

    from gdpo_nemo.generation.images import ImagePrompt
    from gdpo_nemo.weights.transports.base import Receiver

CPU_ENVIRONMENT = {
    # Run vLLM in a single process instead of three, and without torch's compiler, which needs a C++ compiler.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM's kernel of latent attention for CPUs supports only latent vectors of 512 and 64 elements.
    "VLLM_MLA_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    # FlashInfer's sampler supports neither requests with seeds nor processed log-probs, so no run can use it. By
    # default, vLLM imports FlashInfer for it, and an engine would not start without FlashInfer.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}

KV_AT_UPDATE = ("drain", "recompute", "keep")
"""Options for the requests in flight at a weight update. ``Engine.prepare_update`` describes these options."""

T = TypeVar("T")
_MEASURE_INTERVAL_S = 0.1
"""Minimum interval between two measurements of the load in seconds.

A measurement takes a microsecond per request in flight. A decode step of a small model takes a millisecond.
"""


@dataclass
class VllmRequest:
    """Request with vLLM's types."""

    name: str
    prompt_ids: list[int]
    parameters: SamplingParams
    images: ImagePrompt | None = None
    answer: Future[RequestOutput] | None = None
    """Future for the output, or None if ``poll`` returns the completion."""
    decodes: bool = False
    group: int | None = None
    """``decodes`` and ``group`` are those of the ``SampleRequest``."""


class Engine:
    """A vLLM engine. Create at most one engine per process.

    The engine starts with the weights of ``options.model`` as version -1. All methods are thread-safe. A dedicated
    thread steps vLLM while requests are unfinished. Calls from other threads are executed between two engine steps, in
    order of arrival.

    Args:
        replies: arguments of ``ReplyParser`` after the tokenizer. None to return completions without their text.
    """

    def __init__(self, options: EngineOptions, replies: tuple[Any, ...] | None = None):
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._reportable = threading.Condition(self._lock)
        self._operations: deque[Callable[[], None]] = deque()
        self._pending: set[Future[Any]] = set()
        """Pending calls to the thread "vllm". If the thread fails, all pending calls receive the exception."""
        self._failure: GdpoError | None = None
        self._closed = False
        # ``_lock`` protects the attributes above and ``_finished``. Only the thread uses the attributes below.
        self._finished: list[FinishedRequest] = []
        self._inflight: dict[str, VllmRequest] = {}
        """Requests inside vLLM by name, in the order in which they were added."""
        self._parked: list[VllmRequest] = []
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
        self._core: VllmCore
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(options, started), daemon=True, name="vllm")
        self._thread.start()
        started.result()
        self._max_model_len = options.max_model_len
        self._request_numbers = itertools.count()
        tokenizer = options.tokenizer or options.model
        self._replies = None if replies is None else ReplyParser(load_tokenizer(None, tokenizer), *replies)

    # -- called by other threads --------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the current weights; -1 before the first update."""
        return self._core.version

    def process_location(self) -> tuple[str, int]:
        """Return the host name and the process id of this engine."""
        return socket.gethostname(), os.getpid()

    def submit(self, requests: Mapping[str, tuple[SampleRequest, Sampling]]) -> list[str]:
        """Add requests without waiting. ``poll`` returns their completions.

        All requests of a call are added before the same step, in order. This makes batches reproducible. The last
        digits of a log-prob may depend on the other requests in the batch. Requests that arrive during a weight update
        start after the update.

        Args:
            requests: requests and sampling settings by name. An image without data must have been sent earlier.

        Returns:
            Hashes of images without data that the engine does not have (any more). If there are any, no request was
            added, and the call must be repeated with their data.

        Raises:
            RunError: if a prompt is empty or leaves no room for a completion, if vLLM needs another number of tokens
                for an image than its request has, if the engine sleeps or has received only part of an update, or if
                vLLM has failed.
        """
        self._check_can_sample()
        images, missing = self._image_prompts([request.images for request, _ in requests.values()])
        if not missing:
            added = [self._to_vllm_request(name, *r, i) for (name, r), i in zip(requests.items(), images)]
            self._enqueue_requests(added)
        return missing

    def poll(self, wait_s: float) -> EngineReport:
        """Return the requests that have finished since the last call, and the engine's load.

        Wait up to ``wait_s`` seconds until at least one request has finished.

        Raises:
            RunError: if vLLM has failed. The failure is permanent.
        """
        with self._lock:
            self._reportable.wait_for(lambda: self._finished or self._failure, wait_s)
            if self._failure is not None:
                raise self._failure
            finished = self._finished
            self._finished = []
            load = self._load
            report = EngineReport(
                finished=finished,
                version=self._core.version,
                running=load.running,
                waiting=load.waiting,
                kv_used=load.kv_used,
                busy_s=self._busy_s,
                decoded_tokens=self._decoded + load.tokens,
                recomputed_tokens=self._recomputed,
                kept=self._num_kept,
            )
        if self._replies is not None:
            # The driver would decode the completions of all engines.
            completions = [done.completion for done in report.finished if done.completion.text is not None]
            texts = self._replies.texts([completion.token_ids.tolist() for completion in completions])
            for completion, text in zip(completions, texts):
                completion.text = text
        return report

    def abort(self, names: Collection[str]) -> None:
        """Drop requests, so that ``poll`` does not return their completions. Unknown names are ignored."""
        self._call(partial(self._drop, frozenset(names)))

    def drawn(self, name: str) -> list[int]:
        """Return the tokens that a submitted request has sampled so far. The result is empty if the request has
        finished or not started."""
        return self._call(partial(self._core.drawn, name))

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> CompletionBatch:
        """Sample one completion per request and return them, in order.

        Raises:
            RunError: in the same cases as ``submit``.
        """
        self._check_can_sample()
        start = time.monotonic()
        images = self._all_image_prompts([request.images for request in requests])
        outputs = self._run_and_wait(
            [self._to_vllm_request(self._unique_name(), r, sampling, i) for r, i in zip(requests, images)]
        )
        completions = list(map(completion_of, outputs))
        version = min((completion.version for completion in completions), default=self.version)
        return CompletionBatch(completions, version, time.monotonic() - start)

    def score(self, sequences: Sequence[np.ndarray], images: Sequence[Images] = ()) -> list[np.ndarray]:
        """Return the log-probs of all tokens except the first, at temperature 1.

        Sequences are batched with the requests in flight. Sequences that arrive during a weight update start after the
        update.

        Args:
            sequences: token ids. Shape: [tokens] each.
            images: images of each sequence, or empty if no sequence has images.

        Returns:
            One array per sequence. Shape: float32 [tokens - 1].
        """
        self._check_can_sample()
        parameters = scoring_parameters()
        requests = []
        for ids, prompt in zip(sequences, self._all_image_prompts(images or [()] * len(sequences))):
            requests.append(VllmRequest(self._unique_name(), np.asarray(ids).tolist(), parameters, prompt))
        return list(map(scores_of, self._run_and_wait(requests)))

    def _run_and_wait(self, requests: Sequence[VllmRequest]) -> list[Any]:
        answers: list[Future[Any]] = [Future() for _ in requests]
        for request, answer in zip(requests, answers):
            request.answer = answer
        self._enqueue_requests(requests)
        return [answer.result() for answer in answers]

    def _unique_name(self) -> str:
        return f"of this engine: {next(self._request_numbers)}"

    def _check_can_sample(self) -> None:
        if self._core.asleep or self._core.torn:
            state = "it is asleep" if self._core.asleep else "it received only part of a weight update"
            raise RunError(f"the engine cannot sample: {state}")

    def _image_prompts(self, images: Sequence[Images]) -> tuple[Sequence[ImagePrompt | None], list[str]]:
        """See ``EngineImages.prompts``. Images are processed by the calling thread, while the engine samples."""
        if not any(images):
            return [None] * len(images), []
        if self._core.images is None:
            raise RunError("a prompt has images, but the model has no vision tower")
        return self._core.images.prompts(images)

    def _all_image_prompts(self, images: Sequence[Images]) -> Sequence[ImagePrompt | None]:
        prompts, missing = self._image_prompts(images)
        if missing:
            raise RunError(f"{len(missing)} images have no data")
        return prompts

    def _to_vllm_request(
        self, name: str, request: SampleRequest, sampling: Sampling, images: ImagePrompt | None
    ) -> VllmRequest:
        length = len(request.prompt_ids)
        room = self._max_model_len - length
        if room < 1:
            raise RunError(
                f"a prompt has {length} tokens, which leaves no room in the context of {self._max_model_len} tokens"
            )
        if not length:
            raise RunError("a prompt must have at least one token")
        parameters = sampling_parameters(request, sampling, room)
        return VllmRequest(
            name, request.prompt_ids.tolist(), parameters, images, decodes=request.decodes, group=request.group
        )

    def prepare_update(self, manifest: Manifest, kv: str = "drain") -> None:
        """Check the tensor names of a weight update, then stop the engine between two steps until the weights arrive.

        Args:
            manifest: description of the update.
            kv: treatment of the requests in flight. ``drain`` first finishes these requests, so that each completion
                has a single version. ``recompute`` stops immediately and recomputes the keys and values with the new
                weights. ``keep`` stops immediately and keeps the old keys and values. With every option, requests that
                have not sampled a token yet use only the new weights.

        Raises:
            RunError: if a name is missing, unexpected or duplicated. In this case, the engine continues without the
                update.
        """
        if kv not in KV_AT_UPDATE:
            raise ValueError(f"kv must be one of {', '.join(KV_AT_UPDATE)}, not {kv!r}")
        self._core.expect(manifest)
        self._hold(kv)

    def update_weights(self, manifest: Manifest, receiver: Receiver, *data: Any) -> int:
        """Replace all weights and return their version.

        Afterwards, cached prefixes of older weights are not used. Without a call of ``prepare_update``, the engine
        first finishes its requests (``drain``).

        Args:
            manifest: description of the update.
            receiver: object that receives the tensors in each process of the engine.
            data: additional arguments of ``Receiver.opened`` in this process.

        Raises:
            RunError: if names or checksums do not match, or the sender stopped early. In this case, the engine has a
                mix of two versions and cannot sample until an update succeeds.
        """
        if not self._held:
            self.prepare_update(manifest)
        self._call(partial(self._with_external_wait, partial(self._update, manifest, receiver, data)))
        return manifest.version

    def close_receiver(self, receiver: Receiver) -> None:
        """Release the resources that a receiver keeps between updates in the engine's processes."""
        self._call(partial(self._with_external_wait, partial(self._core.close_receiver, receiver)))

    def resume(self) -> None:
        """Cancel a prepared update and continue sampling. Raises RunError if the engine has received part of the
        update."""
        self._call(self._resume)

    def sleep(self) -> None:
        """Finish the requests in flight, then release weights, KV cache and cached prefixes (vLLM's sleep
        level 2)."""
        self._hold("drain")
        self._call(self._sleep)

    def wake(self, tag: str) -> None:
        """Reallocate memory after ``sleep``. Call this method with ``weights``, update the weights, then call it with
        ``kv_cache``."""
        self._call(partial(self._wake, tag))

    def close(self) -> None:
        """Shut down vLLM. Pending calls raise RunError."""
        with self._lock:
            self._closed = True
            self._arrived.notify()
            failed = self._failure is not None  # the thread may wait forever for a dead process
        if not failed:
            self._thread.join()

    def _enqueue_requests(self, requests: Sequence[VllmRequest]) -> None:
        self._enqueue(partial(self._accept, requests), [r.answer for r in requests if r.answer is not None])

    def _call(self, function: Callable[[], T]) -> T:
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

    def _hold(self, kv: str) -> None:
        """Stop vLLM between two steps, and wait until it has stopped. With ``drain``, vLLM first finishes all requests.

        Raises:
            RunError: if ``resume`` ended the hold before vLLM stopped.
        """
        answer: Future[None] = Future()
        self._enqueue(partial(self._request_hold, kv, answer), [answer])
        answer.result()

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
            self._core = VllmCore(options)
        except BaseException as error:
            started.set_exception(start_failure(error, sizes))
            return
        self._watch(self._core.processes)
        started.set_result(None)
        try:
            while self._turn():
                pass
            if self._failure is None:
                self._core.close()
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
        return not self._held and not self._core.asleep and self._core.busy

    def _step(self) -> None:
        start = time.monotonic()
        outputs = self._core.step()
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
        load = self._core.load()
        load = load._replace(waiting=load.waiting + len(self._parked))
        self._measured_s = time.monotonic()
        self._kept += finished
        unfinished = {request.group for request in (*self._inflight.values(), *self._parked)} - {None}
        kept = []
        reported = []
        for group, done in self._kept:
            if group in unfinished:
                kept.append((group, done))
            else:
                reported.append(done)
        self._kept = kept
        with self._lock:
            self._load = load
            self._num_kept = len(kept)
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

    def _accept(self, requests: Sequence[VllmRequest]) -> None:
        if self._kv is not None or self._core.asleep:
            self._parked += requests
        else:
            self._add(requests)

    def _add(self, requests: Collection[VllmRequest]) -> None:
        self._inflight |= {request.name: request for request in requests}
        self._core.add((request.name, request.prompt_ids, request.parameters, request.images) for request in requests)

    def _drop(self, names: frozenset[str]) -> None:
        self._parked = [request for request in self._parked if request.name not in names]
        known = [name for name in names if self._inflight.pop(name, None)]
        self._decoded += self._core.abort(known)
        self._kept = [(group, done) for group, done in self._kept if done.name not in names]
        with self._lock:
            self._finished = [done for done in self._finished if done.name not in names]

    def _request_hold(self, kv: str, answer: Future[None]) -> None:
        if self._held and kv == "drain" and self._core.busy and not self._core.torn:
            self._held = False
            self._core.release()
        self._kv = kv
        self._holds.append(answer)

    def _reach_hold(self) -> None:
        """If a hold is requested and vLLM may stop now, stop it and complete the pending calls of ``hold``."""
        if not self._holds or (self._kv == "drain" and self._core.busy and not self._core.torn):
            return
        if not self._held:
            self._deliver(self._core.hold())
            self._held = True
        for answer in self._holds:
            self._answer(answer)
        self._holds.clear()

    def _resume(self) -> None:
        if self._core.torn:
            raise RunError("the engine cannot continue: it received only part of a weight update")
        for answer in self._holds:
            self._answer(answer, error=RunError("the engine resumed before it was idle"))
        self._holds.clear()
        self._end_hold()

    def _end_hold(self) -> None:
        if not self._core.asleep and self._parked:
            self._add(self._parked)
            self._parked = []
        if self._held:
            self._core.release()
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
        discarded = 0 if keep else self._core.load().context
        self._core.update(manifest, receiver, data, keep)
        self._recomputed += discarded
        if keep:
            self._add_again(self._core.unstarted())
        self._end_hold()

    def _add_again(self, names: Collection[str]) -> None:
        """Abort requests and add them again, so that the requests do not use cached prefixes of the old weights."""
        requests = [request for name, request in self._inflight.items() if name in names]
        self._core.abort([request.name for request in requests])
        self._add(requests)

    def _sleep(self) -> None:
        self._core.sleep()
        self._end_hold()

    def _wake(self, tag: str) -> None:
        self._core.wake(tag)
        if self._kv is None:
            self._end_hold()
