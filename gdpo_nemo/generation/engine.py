"""One vLLM engine that several threads use: it samples while requests, weights and questions come in."""

from __future__ import annotations

import itertools
import os
import socket
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Collection, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.schema import VllmConfig
from gdpo_nemo.errors import RunError
from gdpo_nemo.generation.pump import Pump, PumpedRequest
from gdpo_nemo.generation.requests import CompletionBatch, EngineReport, SampleRequest, Sampling
from gdpo_nemo.generation.vllm_core import (
    EngineOptions,
    completion_of,
    sampling_parameters,
    scores_of,
    scoring_parameters,
)
from gdpo_nemo.weights.manifest import Manifest

if TYPE_CHECKING:
    from gdpo_nemo.weights.transports.transport import Receiver

CPU_ENVIRONMENT = {
    # One process instead of three, and no C++ compiler at the first sample.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "CUDA_VISIBLE_DEVICES": "",
}
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}

KV_AT_UPDATE = ("drain", "recompute", "keep")
"""What becomes of requests under way when weights arrive."""


class Engine:
    """A vLLM engine. Create one per process; it starts with the weights of ``model`` and version -1 until
    ``update_weights``.

    Every method may be called from any thread. One thread of the engine's own steps vLLM while there is work; what the
    others ask for happens between two steps, in the order in which they ask.

    Args:
        model: Hugging Face folder.
        dtype: float32 or bfloat16.
        max_model_len: longest prompt plus completion in tokens.
        seed: of the engine, for requests without one.
        on_cpu: whether to run vLLM's CPU build.
        sleeps: whether ``sleep`` releases the device's memory; on a CPU it never does.
        targets: ``policy.lora.target_modules``, the layers that an update of adapters must have.
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
    ):
        self._max_model_len = max_model_len
        self._pump = Pump(EngineOptions(model, config, dtype, max_model_len, seed, on_cpu, sleeps, targets))
        self._core = self._pump.core
        self._numbers = itertools.count()

    @property
    def version(self) -> int:
        """Of the weights held; -1: those of the model's folder."""
        return self._core.version

    def process_location(self) -> tuple[str, int]:
        """Return (host, process id) of this engine."""
        return socket.gethostname(), os.getpid()

    def submit(self, requests: Mapping[str, tuple[SampleRequest, Sampling]]) -> None:
        """Add requests, by name; ``poll`` returns their completions. Does not wait.

        All of one call join at the same step, in their order: completions may depend in their last digits on what else
        is in a batch, so that a batch has to be a function of the calls. During an update they wait for its end.

        Raises:
            RunError: a prompt leaves no room for a completion, the engine sleeps or holds part of an update, or vLLM
            has failed.
        """
        self._check_can_sample()
        self._pump.submit([self._pumped(name, *request) for name, request in requests.items()])

    def poll(self, wait_s: float) -> EngineReport:
        """Return what has finished since the last call, as soon as something has, at the latest after ``wait_s`` s.

        Raises:
            RunError: vLLM has failed; so it is from then on.
        """
        return self._pump.poll(wait_s)

    def abort(self, names: Collection[str]) -> None:
        """Drop requests; they are not reported. Unknown names are passed over."""
        self._pump.abort(names)

    def drawn(self, name: str) -> list[int]:
        """Return the tokens that a submitted request has so far; none once it has finished, or where it waits."""
        return self._pump.drawn(name)

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> CompletionBatch:
        """Sample one completion per request, and wait for them.

        Raises:
            RunError: as ``submit``.
        """
        self._check_can_sample()
        start = time.monotonic()
        outputs = self._answers([self._pumped(self._name(), request, sampling) for request in requests])
        completions = [completion_of(output) for output in outputs]
        version = min((completion.version for completion in completions), default=self.version)
        return CompletionBatch(completions, version, time.monotonic() - start)

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Score sequences: float32 [tokens - 1] of each, the log-probs of all tokens but the first at temperature 1.

        They are requests like others: they join those under way, and wait for the end of an update.
        """
        self._check_can_sample()
        parameters = scoring_parameters()
        asked = [PumpedRequest(self._name(), np.asarray(ids).tolist(), parameters) for ids in sequences]
        return [scores_of(output) for output in self._answers(asked)]

    def _answers(self, requests: Sequence[PumpedRequest]) -> list[Any]:
        answers: list[Future[Any]] = [Future() for _ in requests]
        for request, answer in zip(requests, answers):
            request.answer = answer
        self._pump.submit(requests)
        return [answer.result() for answer in answers]

    def _name(self) -> str:
        return f"of this engine: {next(self._numbers)}"

    def _check_can_sample(self) -> None:
        if self._core.asleep or self._core.torn:
            state = "it sleeps" if self._core.asleep else "it holds part of a weight update"
            raise RunError(f"the engine cannot sample: {state}")

    def _pumped(self, name: str, request: SampleRequest, sampling: Sampling) -> PumpedRequest:
        length = len(request.prompt_ids)
        room = self._max_model_len - length
        if room < 1:
            raise RunError(f"a prompt of {length} tokens fills the context of {self._max_model_len}")
        if not length:
            raise RunError("a prompt without a token cannot be continued")
        return PumpedRequest(name, request.prompt_ids.tolist(), sampling_parameters(request, sampling, room))

    def prepare_update(self, manifest: Manifest, kv: str = "drain") -> None:
        """Check that an update fits, before its bytes are sent, and stop between two steps until it has arrived.

        Args:
            kv: ``drain`` first finishes all requests, so that one version draws the whole of each. The others stop at
                once: ``recompute`` computes the keys and values of the running requests again with the new weights,
                ``keep`` goes on with the old ones. Requests that come later are drawn by the new weights alone.

        Raises:
            RunError: a name is missing, unexpected or double. The engine then goes on.
        """
        if kv not in KV_AT_UPDATE:
            raise ValueError(f"kv={kv!r} is none of {KV_AT_UPDATE}")
        self._core.expect(manifest)
        self._pump.hold(kv)

    def update_weights(self, manifest: Manifest, receiver: Receiver, *data: Any) -> int:
        """Replace all weights by those that ``receiver`` yields in each of the engine's processes, as they come.

        No cached prefix of older weights is used after it. Returns the version now held. An engine that was not
        prepared finishes its requests first.

        Args:
            data: what the receiver needs in this process, once (see ``Receiver.opened``).

        Raises:
            RunError: names or checksums do not match, or the sender broke off. The engine then holds parts of two
            versions, and samples again after the next update.
        """
        if not self._pump.held:
            self.prepare_update(manifest)
        self._pump.update(manifest, receiver, data)
        return manifest.version

    def close_receiver(self, receiver: Receiver) -> None:
        """Release what a transport's receiver keeps in the engine's processes from one update to the next."""
        self._pump.close_receiver(receiver)

    def resume(self) -> None:
        """Go on without the update that was prepared. Raises RunError where the engine holds part of it."""
        self._pump.resume()

    def sleep(self) -> None:
        """Release weights and KV cache (vLLM's level 2: the next update brings the weights) and cached prefixes."""
        self._pump.sleep()

    def wake(self, what: str) -> None:
        """Allocate memory again: first ``weights``, whose values an update has to bring, then ``kv_cache``."""
        self._pump.wake(what)

    def close(self) -> None:
        """End vLLM; whoever waits for an answer gets an error."""
        self._pump.close()
