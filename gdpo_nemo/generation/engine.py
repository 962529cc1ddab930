"""One vLLM engine inside this process: token ids in, token ids and log-probs out."""

from __future__ import annotations

import os
import pickle
import socket
import time
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.schema import VllmConfig
from gdpo_nemo.errors import RunError
from gdpo_nemo.generation.requests import Completion, CompletionBatch, FinishedRequest, SampleRequest, Sampling
from gdpo_nemo.weights.adapters import modules_of, peft_name
from gdpo_nemo.weights.manifest import Manifest
from gdpo_nemo.weights.model_folder import weight_names

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
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # our update manifest travels to the engine's own worker processes
    "TOKENIZERS_PARALLELISM": "false",
}

_BATCHED_TOKENS = 8192
"""Most tokens of one forward pass of a CPU engine."""
SLICE_S = 0.05
"""Longest that one ``advance`` works, in seconds: requests that arrive meanwhile wait for its end."""


class Engine:
    """A vLLM engine. Create one per process; it starts with the weights of ``model`` and version -1 until
    ``update_weights``.

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
        from vllm import LLM, envs

        from gdpo_nemo.weights import vllm_receiver

        placed: dict[str, Any] = (
            dict(
                enforce_eager=True,
                kv_cache_memory_bytes=config.kv_cache_memory_bytes,
                # After a chunk of a prompt vLLM rewinds the generator of its sample, which CPU generators cannot do
                # ("CPU Generator does not use offset"); so prompts are prefilled whole.
                enable_chunked_prefill=False,
                max_num_batched_tokens=max(_BATCHED_TOKENS, max_model_len),
            )
            if on_cpu
            else dict(
                enforce_eager=config.enforce_eager,
                gpu_memory_utilization=config.gpu_memory_utilization,
                enable_sleep_mode=sleeps,
            )
        )
        if config.tensor_parallel_size > 1:
            placed["distributed_executor_backend"] = "mp"
        self._in_process = config.tensor_parallel_size == 1 and not envs.VLLM_ENABLE_V1_MULTIPROCESSING
        """Whether vLLM's only worker is this process, which it is on CPUs (``CPU_ENVIRONMENT``)."""
        self._max_model_len = max_model_len
        self._llm = LLM(
            model=model,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel_size,
            seed=seed,
            logprobs_mode="processed_logprobs",  # of the distribution sampled from: after temperature, top_p and top_k
            disable_log_stats=True,
            weight_transfer_config={"backend": vllm_receiver.BACKEND},
            worker_extension_cls=f"{vllm_receiver.__name__}.Worker",
            **placed,
        )
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._weights = weight_names(model)
        self._targets = tuple(targets)
        self.version = -1
        self._asleep = self._torn = False
        self._finished: list[FinishedRequest] = []
        """Requests that are done and that ``advance`` has not returned yet."""

    def process_location(self) -> tuple[str, int]:
        """Return (host, process id) of this engine."""
        return socket.gethostname(), os.getpid()

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> CompletionBatch:
        """Sample one completion per request.

        Raises:
            RunError: a prompt leaves no room for a completion, or the engine sleeps.
        """
        self._prepare()
        start = time.monotonic()
        prompts = [{"prompt_token_ids": request.prompt_ids.tolist()} for request in requests]
        params = [self._parameters(request, sampling) for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False) if prompts else []
        return CompletionBatch([_completion(o.outputs[0]) for o in outputs], self.version, time.monotonic() - start)

    def advance(self, new: Mapping[str, tuple[SampleRequest, Sampling]]) -> list[FinishedRequest]:
        """Add requests, by name, and run engine steps until one is finished, for at most ``SLICE_S``.

        Finished requests are returned once. A call without new ones continues the work. Every other method first
        finishes all requests, so that no completion is begun by one version of the weights and ended by another.

        Raises:
            RunError: a prompt leaves no room for a completion, or the engine sleeps.
        """
        if new:
            self._check_can_sample()
        engine = self._llm.llm_engine
        end = time.monotonic() + SLICE_S
        for name, (request, sampling) in new.items():
            engine.add_request(
                name, {"prompt_token_ids": request.prompt_ids.tolist()}, self._parameters(request, sampling)
            )
        while not self._finished and engine.has_unfinished_requests() and time.monotonic() < end:
            self._step()
        finished = self._finished
        self._finished = []
        return finished

    def _step(self) -> None:
        outputs = (output for output in self._llm.llm_engine.step() if output.finished)
        self._finished += [
            FinishedRequest(output.request_id, _completion(output.outputs[0]), self.version) for output in outputs
        ]

    def _finish_inflight(self) -> None:
        while self._llm.llm_engine.has_unfinished_requests():
            self._step()

    def _prepare(self) -> None:
        """Check that the engine may sample, and finish the requests in flight, before other work than ``advance``."""
        self._check_can_sample()
        self._finish_inflight()

    def _check_can_sample(self) -> None:
        if self._asleep or self._torn:
            state = "it sleeps" if self._asleep else "it holds part of a weight update"
            raise RunError(f"the engine cannot sample: {state}")

    def _parameters(self, request: SampleRequest, sampling: Sampling):
        """Translate a request for vLLM. Raises RunError where its prompt leaves no room."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self._max_model_len - len(request.prompt_ids)
        if room < 1:
            raise RunError(f"a prompt of {len(request.prompt_ids)} tokens fills the context of {self._max_model_len}")
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(sampling.max_new_tokens, room, request.max_tokens or room),
            seed=request.seed,
            stop=list(sampling.stop_strings) or None,
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop_strings),  # only to find stop strings; the driver decodes the text
            logprobs=0,  # of the sampled token alone
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Score sequences: float32 [tokens - 1] of each, the log-probs of all tokens but the first at temperature 1."""
        from vllm import SamplingParams

        self._prepare()
        prompts = [[int(token) for token in ids] for ids in sequences]
        # vLLM has no call that scores only; one token is the least it samples.
        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, seed=0)
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [
            np.array([entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:])], np.float32)
            for output, ids in zip(outputs, prompts)
        ]

    def sleep(self) -> None:
        """Release weights and KV cache (vLLM's level 2: the next update brings the weights) and cached prefixes."""
        self._finish_inflight()
        self._llm.sleep(level=2)
        self._asleep = True

    def wake(self, what: str) -> None:
        """Allocate memory again: first ``weights``, whose values an update has to bring, then ``kv_cache``."""
        self._asleep = not self._llm.wake_up(tags=[what])

    def expect(self, manifest: Manifest) -> None:
        """Finish all requests and check that an update fits, before its bytes are sent.

        Raises RunError where a name is missing, unexpected or double.
        """
        self._finish_inflight()
        names: list[str] = self._weights
        if manifest.adapters is not None:
            modules = modules_of(self._weights, self._targets)
            names = [peft_name(module, letter) for module in modules for letter in "AB"]
        manifest.check_names(names)

    def update_weights(self, manifest: Manifest, receiver: Receiver, *data: Any) -> int:
        """Replace all weights by those that ``receiver`` yields in each of the engine's processes, as they come.

        Cached prefixes are forgotten. Returns the version now held.

        Args:
            data: what the receiver needs in this process, once (see ``Receiver.opened``).

        Raises:
            RunError: names or checksums do not match, or the sender broke off. The engine then holds parts of two
            versions and does not sample before the next update.
        """
        with receiver.opened(manifest, self._in_process, *data) as opened:
            self.expect(manifest)
            self._torn = True
            self._llm.start_weight_update()
            update = (manifest, opened)
            self._llm.update_weights({"update_info": {"update": update if self._in_process else pickle.dumps(update)}})
            self._llm.finish_weight_update(str(manifest.version))
            for error in filter(None, self._llm.collective_rpc("update_error")):
                raise pickle.loads(error)
        self._llm.reset_prefix_cache()
        self._torn = False
        self.version = manifest.version
        return self.version


def _completion(output) -> Completion:
    ids = np.array(output.token_ids, np.int32)
    logprobs = np.array([step[token].logprob for step, token in zip(output.logprobs, output.token_ids)], np.float32)
    return Completion(ids, logprobs, str(output.finish_reason))
