"""Thread-safe vLLM engine that accepts requests and weight updates during sampling."""

from __future__ import annotations

import itertools
import os
import socket
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Collection, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.schema import VllmConfig
from gdpo_nemo.data.replies import ReplyParser
from gdpo_nemo.data.tokenizer import load_tokenizer
from gdpo_nemo.generation.pump import Pump, PumpedRequest
from gdpo_nemo.generation.requests import CompletionBatch, EngineReport, SampleRequest, Sampling
from gdpo_nemo.generation.vllm_core import (
    EngineOptions,
    completion_of,
    sampling_parameters,
    scores_of,
    scoring_parameters,
)
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights.manifest import Manifest

if TYPE_CHECKING:
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


class Engine:
    """A vLLM engine. Create at most one engine per process.

    The engine starts with the weights of ``model`` as version -1. All methods are thread-safe. A dedicated thread steps
    vLLM while requests are unfinished. Calls from other threads are executed between two engine steps, in order of
    arrival.

    Args:
        model: Hugging Face folder.
        config: config section of vLLM.
        dtype: float32 or bfloat16.
        max_model_len: maximum length of prompt plus completion in tokens.
        seed: vLLM's seed for requests without a seed.
        on_cpu: True to run vLLM's CPU build.
        sleeps: True to let ``sleep`` release GPU memory. On a CPU, ``sleep`` never releases memory.
        targets: ``policy.lora.target_modules``. An update of LoRA adapters must contain these layers.
        records_routing: True to return the experts that the model chose (``Completion.routing``).
        replies: arguments of ``ReplyParser`` after the tokenizer. None to return completions without their text.
        tokenizer: folder or hub name of the tokenizer. None uses the tokenizer in the model folder.
    """

    def __init__(
        self,
        model: str,
        config: VllmConfig,
        dtype: str,
        max_model_len: int,
        seed: int,
        on_cpu: bool,
        sleeps: bool = False,
        targets: Sequence[str] = (),
        records_routing: bool = False,
        replies: tuple[Any, ...] | None = None,
        tokenizer: str | None = None,
    ):
        self._max_model_len = max_model_len
        options = EngineOptions(
            model, config, dtype, max_model_len, seed, on_cpu, sleeps, targets, records_routing, tokenizer
        )
        self._pump = Pump(options)
        self._core = self._pump.core
        self._replies = None if replies is None else ReplyParser(load_tokenizer(None, tokenizer or model), *replies)
        self._request_numbers = itertools.count()

    @property
    def version(self) -> int:
        """Version of the current weights; -1 before the first update."""
        return self._core.version

    def process_location(self) -> tuple[str, int]:
        """Return the host name and the process id of this engine."""
        return socket.gethostname(), os.getpid()

    def submit(self, requests: Mapping[str, tuple[SampleRequest, Sampling]]) -> None:
        """Add requests without waiting. ``poll`` returns their completions.

        All requests of a call are added before the same step, in order. This makes batches reproducible. The last
        digits of a log-prob may depend on the other requests in the batch. Requests that arrive during a weight update
        start after the update.

        Args:
            requests: requests and sampling settings by name.

        Raises:
            RunError: if a prompt is empty or leaves no room for a completion, if the engine sleeps or has received only
                part of an update, or if vLLM has failed.
        """
        self._check_can_sample()
        self._pump.submit([self._to_pump_request(name, *request) for name, request in requests.items()])

    def poll(self, wait_s: float) -> EngineReport:
        """Return the requests that have finished since the last call, and the engine's load.

        Wait up to ``wait_s`` seconds until at least one request has finished.

        Raises:
            RunError: if vLLM has failed. The failure is permanent.
        """
        report = self._pump.poll(wait_s)
        if self._replies is not None:
            # The driver would decode the completions of all engines.
            completions = [done.completion for done in report.finished if done.completion.text is not None]
            texts = self._replies.texts([completion.token_ids.tolist() for completion in completions])
            for completion, text in zip(completions, texts):
                completion.text = text
        return report

    def abort(self, names: Collection[str]) -> None:
        """Drop requests, so that ``poll`` does not return their completions. Unknown names are ignored."""
        self._pump.abort(names)

    def drawn(self, name: str) -> list[int]:
        """Return the tokens that a submitted request has sampled so far. The result is empty if the request has
        finished or not started."""
        return self._pump.drawn(name)

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> CompletionBatch:
        """Sample one completion per request and return them, in order.

        Raises:
            RunError: in the same cases as ``submit``.
        """
        self._check_can_sample()
        start = time.monotonic()
        outputs = self._run_and_wait(
            [self._to_pump_request(self._unique_name(), request, sampling) for request in requests]
        )
        completions = [completion_of(output) for output in outputs]
        version = min((completion.version for completion in completions), default=self.version)
        return CompletionBatch(completions, version, time.monotonic() - start)

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probs of all tokens except the first, at temperature 1.

        Sequences are batched with the requests in flight. Sequences that arrive during a weight update start after the
        update.

        Args:
            sequences: token ids. Shape: [tokens] each.

        Returns:
            One array per sequence. Shape: float32 [tokens - 1].
        """
        self._check_can_sample()
        parameters = scoring_parameters()
        scoring_requests = [
            PumpedRequest(self._unique_name(), np.asarray(ids).tolist(), parameters) for ids in sequences
        ]
        return [scores_of(output) for output in self._run_and_wait(scoring_requests)]

    def _run_and_wait(self, requests: Sequence[PumpedRequest]) -> list[Any]:
        answers: list[Future[Any]] = [Future() for _ in requests]
        for request, answer in zip(requests, answers):
            request.answer = answer
        self._pump.submit(requests)
        return [answer.result() for answer in answers]

    def _unique_name(self) -> str:
        return f"of this engine: {next(self._request_numbers)}"

    def _check_can_sample(self) -> None:
        if self._core.asleep or self._core.torn:
            state = "it is asleep" if self._core.asleep else "it received only part of a weight update"
            raise RunError(f"the engine cannot sample: {state}")

    def _to_pump_request(self, name: str, request: SampleRequest, sampling: Sampling) -> PumpedRequest:
        length = len(request.prompt_ids)
        room = self._max_model_len - length
        if room < 1:
            raise RunError(
                f"a prompt has {length} tokens, which leaves no room in the context of {self._max_model_len} tokens"
            )
        if not length:
            raise RunError("a prompt must have at least one token")
        parameters = sampling_parameters(request, sampling, room)
        return PumpedRequest(name, request.prompt_ids.tolist(), parameters, None, request.decodes, request.group)

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
        self._pump.hold(kv)

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
        if not self._pump.held:
            self.prepare_update(manifest)
        self._pump.update(manifest, receiver, data)
        return manifest.version

    def close_receiver(self, receiver: Receiver) -> None:
        """Release the resources that a receiver keeps between updates in the engine's processes."""
        self._pump.close_receiver(receiver)

    def resume(self) -> None:
        """Cancel a prepared update and continue sampling. Raises RunError if the engine has received part of the
        update."""
        self._pump.resume()

    def sleep(self) -> None:
        """Finish the requests in flight, then release weights, KV cache and cached prefixes (vLLM's sleep
        level 2)."""
        self._pump.sleep()

    def wake(self, tag: str) -> None:
        """Reallocate memory after ``sleep``. Call this method with ``weights``, update the weights, then call it with
        ``kv_cache``."""
        self._pump.wake(tag)

    def close(self) -> None:
        """Shut down vLLM. Pending calls raise RunError."""
        self._pump.close()
