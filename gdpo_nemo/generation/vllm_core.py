"""Minimal interface to vLLM with the operations that an engine needs. Not thread-safe."""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gdpo_nemo.config.schema import VllmConfig
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.generation.routing import RoutingRecorder, RoutingShape
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.models.hf_folder import tower_names, weight_names
from gdpo_nemo.utils.progress import hidden, import_transformers, importing
from gdpo_nemo.weights.adapters import modules_of, peft_name
from gdpo_nemo.weights.manifest import Manifest

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm import RequestOutput, SamplingParams

    from gdpo_nemo.generation.images import EngineImages, ImagePrompt
    from gdpo_nemo.weights.transports.base import Receiver

_BATCHED_TOKENS = 8192
"""Maximum number of tokens in one forward pass of a CPU engine."""
_CPU_BLOCK = 32
"""Number of tokens in a KV cache block of a CPU engine.

The samples of a group share only complete KV cache blocks of their prompt. With vLLM's default of 128, samples would
not share a prompt of 49 tokens. vLLM's CPU attention requires at least 32.
"""


@dataclass(frozen=True)
class EngineOptions:
    """Settings of an engine."""

    model: str
    """Hugging Face folder."""
    config: VllmConfig
    dtype: str
    """float32 or bfloat16."""
    max_model_len: int
    """Maximum length of prompt plus completion in tokens."""
    seed: int
    """vLLM's seed for requests without a seed."""
    on_cpu: bool
    """True to run vLLM's CPU build."""
    sleeps: bool = False
    """True to let ``Engine.sleep`` release GPU memory. On a CPU, ``sleep`` never releases memory."""
    targets: Sequence[str] = ()
    """``policy.lora.target_modules``. An update of LoRA adapters must contain these layers."""
    records_routing: bool = False
    """True to return the experts that the model chose (``Completion.routing``)."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer. None uses the tokenizer in the model folder."""
    images_per_prompt: int = 1
    """Number of images in a prompt for which a vision-language model reserves memory on a GPU."""


class Load(NamedTuple):
    """Load of an engine. ``EngineReport`` describes the fields with the same names."""

    running: int
    waiting: int
    kv_used: float
    tokens: int
    """Number of tokens that unfinished requests have sampled so far."""
    context: int
    """Number of tokens of the running requests, including their prompts."""


class VllmCore:
    """One vLLM engine. Call the methods only from the thread that created the object, because OpenMP's settings apply
    per calling thread."""

    def __init__(self, options: EngineOptions):
        import_vllm()
        with importing():
            from vllm import LLM

            from gdpo_nemo.weights import vllm_receiver

            if options.on_cpu:
                import torch

                from gdpo_nemo.utils import gloo

                # A forked process has OpenMP's settings of the fork server. vLLM later replaces this function.
                torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
                gloo.share_device()
                _register_model(options.model)
        config = options.config
        self._in_process = in_process(config)
        """True if vLLM runs in this process only, as on CPUs (``CPU_ENVIRONMENT``)."""
        self._llm = LLM(
            model=options.model,
            tokenizer=options.tokenizer,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel_size,
            seed=options.seed,
            logprobs_mode="processed_logprobs",  # after temperature, top_p and top_k
            disable_log_stats=True,
            weight_transfer_config={"backend": vllm_receiver.BACKEND},
            worker_extension_cls=f"{vllm_receiver.__name__}.Worker",
            **_device_arguments(options),
        )
        self._engine = self._llm.llm_engine
        self._steps_by_itself = hasattr(self._engine.engine_core, "outputs_queue")
        """True if vLLM's scheduler runs in a separate process, which continues without calls of ``step``."""
        self._paused = False
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._routing = RoutingShape(options.model) if options.records_routing else None
        self._recorder: RoutingRecorder | None = None
        if self._routing and options.on_cpu:
            self._recorder = RoutingRecorder(self._engine.engine_core.engine_core, self._routing)
        self._internal_names: dict[str, str] = {}
        """vLLM's internal name of each request, if a recorder needs them."""
        self._weights = weight_names(options.model)
        self._tower = frozenset(tower_names(options.model))
        self._is_empty = False
        """True after ``sleep``, until an update has provided the weights."""
        self._targets = tuple(options.targets)
        self.version = -1
        self._engine.set_weight_version("-1")
        self.images: EngineImages | None = None
        """Images for the prompts of a vision-language model. Other threads may use them."""
        if self._tower:
            from gdpo_nemo.generation.images import EngineImages

            self._engine.reset_mm_cache()  # wait until vLLM has tried its image processor
            self.images = EngineImages(self._engine.renderer, _config(options.model)["image_token_id"])
        self._updates = 0
        """Number of weight updates. This number is the salt of the prefix cache, so that requests do not share prefixes
        with requests of older weights."""
        self.asleep = False
        self.torn = False
        """True if the last weight update was interrupted, so that the weights are a mix of two versions."""

    @property
    def busy(self) -> bool:
        """True if at least one request is unfinished."""
        return bool(self._engine.has_unfinished_requests())

    def add(self, requests: Iterable[tuple[str, list[int], SamplingParams, ImagePrompt | None]]) -> None:
        """Add requests as (name, prompt token ids, parameters, images).

        If the engine is idle, all requests start in the same step. If the engine is busy and the scheduler runs in a
        separate process, steps continue while requests are added.
        """
        from vllm.inputs import mm_input, tokens_input

        salt = str(self._updates)
        pause_first = self._steps_by_itself and not self._paused and not self.busy
        if pause_first:
            self._pause()
        for name, prompt_ids, parameters, images in requests:
            if images is None:
                prompt = tokens_input(prompt_ids, cache_salt=salt)
            else:
                prompt = mm_input(prompt_ids, **images._asdict(), cache_salt=salt)
            internal = self._engine.add_request(name, prompt, parameters)
            if self._recorder:
                self._internal_names[name] = internal
        if pause_first:
            self.release()

    def abort(self, names: Collection[str]) -> int:
        """Drop requests. Return the number of tokens that these requests have sampled."""
        sampled = 0
        for state in self._states():
            if state.external_req_id in names:
                sampled += state.detokenizer.num_output_tokens()
        self._engine.abort_request(list(names))
        for name in names:
            self._internal_names.pop(name, None)
        return int(sampled)

    def step(self) -> list[RequestOutput]:
        """Run one step and return the requests that finished in it. With a separate process, wait for its next step."""
        finished = [output for output in self._engine.step() if output.finished]
        if self._routing:
            for output in finished:
                self._add_routing(output, self._routing)
        return finished

    def _add_routing(self, output: RequestOutput, shape: RoutingShape) -> None:
        """Set ``routed_experts`` of a finished request to ``Completion.routing``."""
        sample = output.outputs[0]
        tokens = len(output.prompt_token_ids) + len(sample.token_ids)
        if self._recorder:
            choices = self._recorder.choices(self._internal_names.pop(output.request_id), tokens - 1)
        else:
            choices = sample.routed_experts[: tokens - 1, shape.layers]
        sample.routed_experts = shape.by_token(choices, tokens)

    def hold(self) -> list[RequestOutput]:
        """Pause between two steps. Return the finished requests that have not been reported yet."""
        if self.asleep:
            return []  # ``sleep`` has already paused vLLM
        self._pause()
        finished = []
        while self._output_pending():
            finished += self.step()
        return finished

    def _output_pending(self) -> bool:
        """Return whether outputs of a step have not been read yet. These outputs must be read before the weights
        change."""
        core = self._engine.engine_core
        if self._steps_by_itself:  # the process sends all outputs before it confirms the pause
            return not core.outputs_queue.empty()
        return bool(core.engine_core.batch_queue)  # asynchronous scheduling has started these steps

    @property
    def processes(self) -> Sequence[BaseProcess]:
        """Process of vLLM's scheduler, or an empty sequence if the scheduler runs in this process. vLLM's workers end
        together with the scheduler."""
        return self._engine.engine_core.resources.engine_manager.processes if self._steps_by_itself else ()

    def _pause(self) -> None:
        self._llm.sleep(level=0, mode="keep")
        self._paused = True

    def release(self) -> None:
        """Continue after ``hold``."""
        self._paused = False
        if not self.asleep:
            self._llm.wake_up(["scheduling"])

    def unstarted(self) -> set[str]:
        """Return the names of the requests that have not sampled a token."""
        return {state.external_req_id for state in self._states() if not state.weight_version_starts}

    def drawn(self, name: str) -> list[int]:
        """Return the tokens that an unfinished request has sampled so far. The result is empty if the request is
        unknown or not started."""
        for state in self._states():
            if state.external_req_id == name:
                return list(state.detokenizer.output_token_ids)
        return []

    def _states(self) -> Any:
        return self._engine.output_processor.request_states.values()

    def load(self) -> Load:
        """Count the unfinished requests and their tokens."""
        cache = self._engine.vllm_config.cache_config
        running = blocks = tokens = context = 0
        for state in self._states():
            if state.weight_version_starts:
                sampled = state.detokenizer.num_output_tokens()
                length = state.prompt_len + sampled
                running += 1
                tokens += sampled
                context += length
                blocks += -(-length // cache.block_size)
        waiting = self._engine.get_num_unfinished_requests() - running
        return Load(running, waiting, min(1.0, blocks / cache.num_gpu_blocks), tokens, context)

    def sleep(self) -> None:
        """Release weights, KV cache and cached prefixes (vLLM's sleep level 2). Afterwards, an update must provide the
        weights."""
        self._llm.sleep(level=2)
        self.asleep = self._is_empty = True

    def wake(self, tag: str) -> None:
        """Reallocate memory after ``sleep``: first for ``weights``, which an update must provide, and later for
        ``kv_cache``."""
        self.asleep = not self._llm.wake_up(tags=[tag])

    def expect(self, manifest: Manifest) -> None:
        """Raise RunError if the tensors of a weight update are not exactly the tensors of this model. The tensors of a
        vision tower may be missing."""
        if manifest.adapters is None:
            manifest.check_names(self._weights, frozen=self._tower)
            return
        modules = modules_of((name for name in self._weights if name not in self._tower), self._targets)
        manifest.check_names(peft_name(module, letter) for module, letter in product(modules, "AB"))

    def update(self, manifest: Manifest, receiver: Receiver, data: Sequence[Any], keep: bool) -> None:
        """Replace all weights. Call this method between ``hold`` and ``release``.

        Args:
            manifest: description of the update.
            receiver: object that receives the tensors in each of vLLM's processes.
            data: additional arguments of ``Receiver.opened`` in this process.
            keep: True to keep the keys and values of running requests, False to recompute them.

        Raises:
            RunError: if names or checksums do not match, or the sender stopped early.
        """
        with receiver.opened(manifest, self._in_process, *data) as opened:
            self.expect(manifest)
            try:
                self._load_weights(manifest, opened)
            except BaseException:
                self.torn = True
                raise
        # The prefix cache keeps the blocks of running requests. The new salt hides these blocks from later requests.
        self._updates += 1
        if not keep:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        if any(entry.name in self._tower for entry in manifest.entries):
            # vLLM keeps the tower's outputs by image, also those of finished requests.
            self._engine.reset_encoder_cache()
        self.torn = self._is_empty = False
        self.version = manifest.version

    def _load_weights(self, manifest: Manifest, receiver: Receiver) -> None:
        update = (manifest, receiver, self._is_empty)
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"update": update if self._in_process else pickle.dumps(update)}})
        self._llm.finish_weight_update(str(manifest.version))
        for error in filter(None, self._llm.collective_rpc("update_error")):
            raise pickle.loads(error)

    def close_receiver(self, receiver: Receiver) -> None:
        """See ``Engine.close_receiver``."""
        self._llm.collective_rpc("close_receiver", args=(receiver if self._in_process else pickle.dumps(receiver),))

    def close(self) -> None:
        """Shut down vLLM and its processes."""
        self._engine.engine_core.shutdown()
        # Free oneDNN's handles now, because at interpreter exit torch's operators would be freed first.
        del self._llm, self._engine
        gc.collect()


def in_process(config: VllmConfig) -> bool:
    """Return whether vLLM runs in the engine's process only, without separate processes."""
    import_vllm()
    from vllm import envs

    return config.tensor_parallel_size == 1 and not envs.VLLM_ENABLE_V1_MULTIPROCESSING


def import_vllm() -> None:
    """Import vLLM, without ``torch._inductor.lowering`` if torch's compiler is disabled (``CPU_ENVIRONMENT``).

    vLLM patches this module if the module can be imported. The import would take 0.5 s of CPU time.
    """
    unused = ["torch._inductor.lowering"] if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else []
    if "torch._inductor.pattern_matcher" in sys.modules:
        unused = []  # vLLM patches this module as well, which needs the other one
    with importing():
        import_transformers()
        if "vllm" not in sys.modules:
            with hidden(*unused):
                importlib.import_module("vllm")


def _register_model(folder: str) -> None:
    """Register the model's class with vLLM in this process.

    vLLM inspects an unregistered class in a new process, because its import might initialize CUDA, and caches the
    result on disk. Without this registration, the first start with an architecture would import vLLM twice, which takes
    10 s of CPU time.
    """
    from vllm.model_executor.models import ModelRegistry

    for name in _config(folder).get("architectures") or ():
        known = ModelRegistry.models.get(name)
        if known is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


def _config(folder: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return content


def _description(folder: str) -> ModelDescription:
    return describe(_config(folder))


def _device_arguments(options: EngineOptions) -> dict[str, Any]:
    """Return vLLM's arguments that depend on the model and on the device type."""
    config = options.config
    model = _description(options.model)
    family = model.family
    # vLLM treats these options as fields of the model's config.json.
    fields = dict(family.engine_fields)
    if family.rotary_size:  # vLLM requires the older field
        fields[family.rotary_size] = model.rotary_size()
    if scale := model.query_scale:  # vLLM reads only the fields of Mistral's own format
        fields["llama_4_scaling"] = dict(zip(("beta", "original_max_position_embeddings"), scale))
    if any(indexed := model.indexed_layers):  # vLLM does not read indexer_types
        fields["index_topk_pattern"] = "".join("F" if has_index else "S" for has_index in indexed)
    arguments: dict[str, Any]
    if options.on_cpu:
        arguments = dict(
            enforce_eager=True,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            block_size=_CPU_BLOCK,
            # After each chunk of a prompt, vLLM rewinds the request's random generator. CPU generators do not support
            # this ("CPU Generator does not use offset").
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(_BATCHED_TOKENS, options.max_model_len),
        )
        if family.latent:
            # The kernel of vLLM's CPU build rotates only one head if tokens and heads are separate dimensions, as in
            # vLLM's latent attention (csrc/cpu/pos_encoding.cpp).
            arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        if model.is_recurrent:
            # vLLM caches the states of prefixes only with chunked prefill, and it derives the block size from a state.
            arguments |= dict(enable_prefix_caching=False, block_size=None)
    else:
        arguments = dict(
            enforce_eager=config.enforce_eager,
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_memory_bytes=config.gpu_kv_cache_memory_bytes,
            enable_sleep_mode=options.sleeps,
            enable_return_routed_experts=options.records_routing,
        )
        fields["head_dtype"] = config.head_dtype
    if family.tower:
        # ``EngineImages`` keeps processed images. The caches of vLLM's processes can get out of step.
        arguments |= dict(mm_processor_cache_gb=0, skip_mm_profiling=options.on_cpu)
        arguments["limit_mm_per_prompt"] = {"image": options.images_per_prompt, "video": 0}
    if fields:
        arguments["hf_overrides"] = fields
    if config.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    return arguments


def sampling_parameters(request: SampleRequest, sampling: Sampling, room: int) -> SamplingParams:
    """Convert a request to vLLM's sampling parameters.

    Args:
        room: number of tokens that fit in the context after the prompt.
    """
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
        detokenize=bool(sampling.stop_strings),  # only stop strings require it; the driver decodes the text
        skip_special_tokens=False,  # a stop string may be the text of a special token
        logprobs=0,  # return only the log-prob of the sampled token
        flat_logprobs=True,  # return flat lists instead of one object per token
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_parameters() -> SamplingParams:
    """Return vLLM's sampling parameters to score a prompt at temperature 1. The parameters request one token, because
    vLLM must sample at least one token."""
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
    """Convert a finished vLLM request to a ``Completion``."""
    sample = output.outputs[0]
    ids = np.array(sample.token_ids, np.int32)
    spans = tuple((int(span.version), span.end - span.start) for span in sample.weight_versions)
    logprobs = np.array(sample.logprobs.logprobs, np.float32)
    return Completion(ids, logprobs, str(sample.finish_reason), spans, sample.routed_experts)


def scores_of(output: RequestOutput) -> np.ndarray:
    """Return the log-probs of all prompt tokens except the first. Shape: float32 [prompt tokens - 1]."""
    return np.array(output.prompt_logprobs.logprobs, np.float32)
