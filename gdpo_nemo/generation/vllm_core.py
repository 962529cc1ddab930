"""vLLM behind the few verbs that an engine needs. Nothing in here is safe to call from two threads."""

from __future__ import annotations

import gc
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Collection, Iterable, NamedTuple, Sequence

import numpy as np

from gdpo_nemo.config.schema import VllmConfig
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.startup import importing
from gdpo_nemo.weights.adapters import modules_of, peft_name
from gdpo_nemo.weights.manifest import Manifest
from gdpo_nemo.weights.model_folder import weight_names

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm import RequestOutput, SamplingParams

    from gdpo_nemo.weights.transports.transport import Receiver

_BATCHED_TOKENS = 8192
"""Most tokens of one forward pass of a CPU engine."""
_CPU_BLOCK = 32
"""Tokens of a block of a CPU engine's cache. Samples of a group share whole blocks of their prompt alone: with vLLM's
128 the samples of a prompt of 49 tokens share none and take a block each. 32 is the least that its attention takes."""


@dataclass(frozen=True)
class EngineOptions:
    """What ``Engine`` is constructed with; see there."""

    model: str
    config: VllmConfig
    dtype: str
    max_model_len: int
    seed: int
    on_cpu: bool
    sleeps: bool = False
    targets: Sequence[str] = field(default=())


class Load(NamedTuple):
    """How much an engine has to do; the fields are those of ``EngineReport``."""

    running: int
    waiting: int
    kv_used: float
    tokens: int
    """Sampled for requests that are not finished."""
    context: int
    """Tokens of the running requests, prompts included."""


class VllmCore:
    """One vLLM engine. All calls come from the thread that constructed it: OpenMP counts threads by their parent."""

    def __init__(self, options: EngineOptions):
        with importing():
            from vllm import LLM

            from gdpo_nemo.weights import vllm_receiver

        config = options.config
        self._in_process = in_process(config)
        """Whether vLLM's only worker is this process, which it is on CPUs (``CPU_ENVIRONMENT``)."""
        self._llm = LLM(
            model=options.model,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel_size,
            seed=options.seed,
            logprobs_mode="processed_logprobs",  # of the distribution sampled from: after temperature, top_p and top_k
            disable_log_stats=True,
            weight_transfer_config={"backend": vllm_receiver.BACKEND},
            worker_extension_cls=f"{vllm_receiver.__name__}.Worker",
            **_placed(options),
        )
        self._engine = self._llm.llm_engine
        self._steps_by_itself = hasattr(self._engine.engine_core, "outputs_queue")
        """Whether vLLM's scheduler has a process of its own, which does not wait for ``step``."""
        self._paused = False
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._weights = weight_names(options.model)
        self._targets = tuple(options.targets)
        self.version = -1
        self._engine.set_weight_version("-1")
        self._updates = 0
        """Salt of the prefix cache: a prompt finds what requests left that were added under the same weights."""
        self.asleep = False
        self.torn = False
        """Whether the weights are partly those of an update that broke off."""

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._engine.has_unfinished_requests())

    def add(self, requests: Iterable[tuple[str, list[int], SamplingParams]]) -> None:
        """Let requests (name, prompt, how) join at the next step, all at the same one where the engine is idle.

        In a process of its own a busy engine takes steps while they arrive.
        """
        from vllm.inputs import tokens_input

        pauses = self._steps_by_itself and not self._paused and not self.busy
        if pauses:
            self._pause()
        for name, prompt_ids, parameters in requests:
            self._engine.add_request(name, tokens_input(prompt_ids, cache_salt=str(self._updates)), parameters)
        if pauses:
            self.release()

    def abort(self, names: Collection[str]) -> int:
        """Drop requests; returns the number of tokens that they had drawn."""
        drawn = sum(state.detokenizer.num_output_tokens() for state in self._states() if state.external_req_id in names)
        self._engine.abort_request(list(names))
        return drawn

    def step(self) -> list[RequestOutput]:
        """Run one step, or wait for one of the engine's own process; returns the requests that it finished."""
        return [output for output in self._engine.step() if output.finished]

    def hold(self) -> list[RequestOutput]:
        """Stop between two steps and keep all requests; returns those whose end had not been reported yet."""
        if self.asleep:
            return []  # has been paused by that
        self._pause()
        finished = []
        while self._output_pending():
            finished += self.step()
        return finished

    def _output_pending(self) -> bool:
        """Whether a step's outputs have not been taken yet, which belong to the weights before an update."""
        core = self._engine.engine_core
        if self._steps_by_itself:  # it sends them before it confirms that it has paused
            return not core.outputs_queue.empty()
        return bool(core.engine_core.batch_queue)  # steps that asynchronous scheduling has begun

    @property
    def processes(self) -> Sequence[BaseProcess]:
        """vLLM's scheduler where it has a process of its own; its workers end with it, and it with them."""
        return self._engine.engine_core.resources.engine_manager.processes if self._steps_by_itself else ()

    def _pause(self) -> None:
        self._llm.sleep(level=0, mode="keep")
        self._paused = True

    def release(self) -> None:
        """Go on after ``hold``."""
        self._paused = False
        if not self.asleep:
            self._llm.wake_up(["scheduling"])

    def unstarted(self) -> set[str]:
        """Names of the requests that have no token yet."""
        return {state.external_req_id for state in self._states() if not state.weight_version_starts}

    def drawn(self, name: str) -> list[int]:
        """Tokens that an unfinished request has so far; none of one that is unknown, or that waits."""
        found = (state for state in self._states() if state.external_req_id == name)
        return [token for state in found for token in state.detokenizer.output_token_ids]

    def _states(self) -> Any:
        return self._engine.output_processor.request_states.values()

    def load(self) -> Load:
        """Count what is unfinished."""
        drawn = [
            (state.prompt_len, state.detokenizer.num_output_tokens())
            for state in self._states()
            if state.weight_version_starts
        ]
        cache = self._engine.vllm_config.cache_config
        blocks = sum(-(-sum(lengths) // cache.block_size) for lengths in drawn)
        return Load(
            running=len(drawn),
            waiting=self._engine.get_num_unfinished_requests() - len(drawn),
            kv_used=min(1.0, blocks / cache.num_gpu_blocks),
            tokens=sum(tokens for _, tokens in drawn),
            context=sum(map(sum, drawn)),
        )

    def sleep(self) -> None:
        """Release weights and KV cache (vLLM's level 2: the next update brings the weights) and cached prefixes."""
        self._llm.sleep(level=2)
        self.asleep = True

    def wake(self, what: str) -> None:
        """Allocate memory again: first ``weights``, whose values an update has to bring, then ``kv_cache``."""
        self.asleep = not self._llm.wake_up(tags=[what])

    def expect(self, manifest: Manifest) -> None:
        """Check that an update has the tensors of this model. Raises RunError where it has not."""
        names: list[str] = self._weights
        if manifest.adapters is not None:
            modules = modules_of(self._weights, self._targets)
            names = [peft_name(module, letter) for module in modules for letter in "AB"]
        manifest.check_names(names)

    def update(self, manifest: Manifest, receiver: Receiver, data: Sequence[Any], keep: bool) -> None:
        """Replace all weights, between ``hold`` and ``release``.

        Args:
            data: what the receiver needs in this process, once (see ``Receiver.opened``).
            keep: whether running requests keep their keys and values; otherwise these are computed again.

        Raises:
            RunError: names or checksums do not match, or the sender broke off.
        """
        with receiver.opened(manifest, self._in_process, *data) as opened:
            self.expect(manifest)
            try:
                self._load_weights(manifest, opened)
            except BaseException:
                self.torn = True
                raise
        # The blocks of running requests cannot leave the prefix cache while they are used: their salt keeps later
        # requests from them.
        self._updates += 1
        if not keep:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        self.torn = False
        self.version = manifest.version

    def _load_weights(self, manifest: Manifest, receiver: Receiver) -> None:
        update = (manifest, receiver)
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"update": update if self._in_process else pickle.dumps(update)}})
        self._llm.finish_weight_update(str(manifest.version))
        for error in filter(None, self._llm.collective_rpc("update_error")):
            raise pickle.loads(error)

    def close_receiver(self, receiver: Receiver) -> None:
        """See ``Engine``."""
        self._llm.collective_rpc("close_receiver", args=(receiver if self._in_process else pickle.dumps(receiver),))

    def close(self) -> None:
        """End vLLM and its processes."""
        self._engine.engine_core.shutdown()
        # What is left for the interpreter's end frees oneDNN's handles when torch's operators are gone already.
        del self._llm, self._engine
        gc.collect()


def in_process(config: VllmConfig) -> bool:
    """Whether vLLM schedules and computes in the process that makes an engine, and has none of its own."""
    from vllm import envs

    return config.tensor_parallel_size == 1 and not envs.VLLM_ENABLE_V1_MULTIPROCESSING


def _placed(options: EngineOptions) -> dict[str, Any]:
    """Arguments of vLLM that the kind of device decides."""
    config = options.config
    placed: dict[str, Any]
    if options.on_cpu:
        placed = dict(
            enforce_eager=True,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            block_size=_CPU_BLOCK,
            # After a chunk of a prompt vLLM rewinds the generator of its sample, which CPU generators cannot do
            # ("CPU Generator does not use offset"); so prompts are prefilled whole.
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(_BATCHED_TOKENS, options.max_model_len),
        )
    else:
        placed = dict(
            enforce_eager=config.enforce_eager,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enable_sleep_mode=options.sleeps,
            # vLLM reads it as a field of the model's config.json.
            hf_overrides={"head_dtype": config.head_dtype},
        )
    if config.tensor_parallel_size > 1:
        placed["distributed_executor_backend"] = "mp"
    return placed


def sampling_parameters(request: SampleRequest, sampling: Sampling, room: int) -> SamplingParams:
    """A request in vLLM's words; ``room`` is what its prompt leaves of the context, in tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

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
        flat_logprobs=True,  # lists of numbers, not an object per token
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_parameters() -> SamplingParams:
    """Score a prompt at temperature 1. vLLM has no call that scores only; one token is the least it samples."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        seed=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(output: RequestOutput) -> Completion:
    """What a finished request drew."""
    drawn = output.outputs[0]
    ids = np.array(drawn.token_ids, np.int32)
    spans = tuple((int(span.version), span.end - span.start) for span in drawn.weight_versions)
    return Completion(ids, np.array(drawn.logprobs.logprobs, np.float32), str(drawn.finish_reason), spans)


def scores_of(output: RequestOutput) -> np.ndarray:
    """float32 [prompt tokens - 1], the log-probs of all but the first."""
    return np.array(output.prompt_logprobs.logprobs, np.float32)
