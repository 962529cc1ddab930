"""Measurements of ``measure.py engine|ipc``: vLLM and a policy of one rank, without Ray.

``engine`` starts vLLM as a run does, puts it to sleep and reloads its weights. ``ipc`` hands it the weights of a
policy in this process, into the process of vLLM's own that GPUs have (and that ``VLLM_ENABLE_V1_MULTIPROCESSING`` gives
a CPU).
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from standing import ROOT, SHAPES, Model, Stand, assigned, batch_of, logprobs, one_by_one, record, scratch, write_model

BF16 = "bfloat16"
NEAR = {"float32": 1e-4, BF16: 0.02}
"""Mean difference of log-probs, in nats, that the precision explains. That of bf16 is the one of ``policy``."""
_ASLEEP = 0.25
"""Share of an engine's memory that may stay in use while it sleeps: the CUDA context, NCCL, and code."""


def served_model(folder: Path, arguments: argparse.Namespace, vocabulary: int | None = None) -> Model:
    """The model that ``--model`` names, or random weights with a tokenizer of bytes, which vLLM and recipes load."""
    if arguments.model:
        return Model(Path(arguments.model), (0,) * 7, 0)
    sys.path.insert(0, str(ROOT / "examples"))
    from make_tiny_model import byte_tokenizer

    shape = SHAPES["tiny" if arguments.cpu else "0.5b"]
    model = write_model(folder, (*shape[:5], vocabulary or shape[5], shape[6]), 2048, precision(arguments))
    byte_tokenizer().save_pretrained(folder)
    return model


def precision(arguments: argparse.Namespace) -> str:
    """That of the weights: a CPU computes in float32, where the transports have to be exact."""
    return "float32" if arguments.cpu else BF16


def start_engine(model: Model, arguments: argparse.Namespace, apart: bool = False) -> Any:
    """An ``Engine`` with the environment that its actor has in a run; ``apart``: vLLM in a process of its own."""
    from gdpo_nemo.config.schema import VllmConfig
    from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT, Engine, EngineOptions

    on_cpu = arguments.cpu
    os.environ.update(ENVIRONMENT | (CPU_ENVIRONMENT if on_cpu else {}))
    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
    if apart:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    config = VllmConfig(
        kv_cache_memory_bytes=64 << 20, max_num_seqs=16 if on_cpu else 256, gpu_memory_utilization=0.3
    )  # fmt: skip
    start = time.perf_counter()
    options = EngineOptions(str(model.folder), config, precision(arguments), 512, 0, on_cpu=on_cpu, sleeps=not on_cpu)
    made = Engine(options)
    record("start of the engine", time.perf_counter() - start, "s", key=True)
    return made


def engine(arguments: argparse.Namespace) -> None:
    """Start, CUDA graphs, sample, sleep, wake, reload: are the log-probs those from before, and the memory free?"""
    with scratch() as folder:
        model = served_model(Path(folder) / "model", arguments)
        made = start_engine(model, arguments)
        compiled = made._core._engine.vllm_config.compilation_config
        sizes = len(compiled.cudagraph_capture_sizes or ())
        record("CUDA graphs", f"{compiled.cudagraph_mode.name}, {sizes} sizes")
        sequences = _sample(made, model, arguments)
        before = made.score(sequences)
        awake = _device_gb()
        made.sleep()
        _record_memory(awake)
        made.wake("weights")
        load(made, model, 1)
        made.wake("kv_cache")
        exact = 0.0 if arguments.cpu else 1e-3
        record("log-probs after sleep and reload", _gap(before, made.score(sequences)), "nats", exact, key=True)
        load(made, model, 2, 1.5)
        unmoved = sum(map(np.array_equal, before, made.score(sequences)))
        record("sequences that do not notice other weights", unmoved, "", 0)
        load(made, model, 3)
        record("log-probs after two more updates", _gap(before, made.score(sequences)), "nats", exact)
        made.close()


def _sample(made: Any, model: Model, arguments: argparse.Namespace) -> list[np.ndarray]:
    """The sampled sequences, whose log-probs the engine's own scores have to repeat."""
    from gdpo_nemo.generation.requests import SampleRequest, Sampling

    count, length = (8, 24) if arguments.cpu else (256, 128)
    draw = np.random.default_rng(0)
    requests = [SampleRequest(draw.integers(3, 250, 40).astype(np.int32), 100 + n) for n in range(count)]
    made.generate(requests[:4], Sampling(1.0, 1.0, -1, 8))
    batch = made.generate(requests, Sampling(1.0, 1.0, -1, length))
    tokens = sum(len(completion.token_ids) for completion in batch.completions)
    record("sampling", tokens / batch.seconds, "tokens/s", key=True)
    pairs = list(zip(requests, batch.completions))
    sequences = [np.concatenate([request.prompt_ids, done.token_ids]) for request, done in pairs]
    scored = [score[-len(done.logprobs) :] for score, (_, done) in zip(made.score(sequences), pairs)]
    drawn = [done.logprobs for _, done in pairs]
    record("log-probs of samples against scores", _gap(drawn, scored), "nats", NEAR[precision(arguments)])
    return sequences


def _device_gb() -> float | None:
    """Gigabytes in use on the GPU, by whatever process."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, whole = torch.cuda.mem_get_info()
    return (whole - free) / 1e9


def _record_memory(awake: float | None) -> None:
    asleep = _device_gb()
    if awake is None or asleep is None:
        record("memory that sleep frees", "needs a GPU")
        return
    record("memory in use, awake", awake, "GB")
    record("memory in use, asleep", asleep, "GB", key=True)
    record("memory in use, asleep / awake", asleep / awake, "", _ASLEEP)


def _gap(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Mean absolute difference."""
    return float(np.abs(np.concatenate(one) - np.concatenate(other)).mean())


def load(made: Any, model: Model, version: int, factor: float = 1.0) -> None:
    """Give the engine the folder's weights times a factor."""
    from gdpo_nemo.models.hf_folder import open_weights, weight_names
    from gdpo_nemo.weights.manifest import pack
    from gdpo_nemo.weights.transports.memory import MemoryReceiver

    read = open_weights(str(model.folder))
    manifest, buffer = pack(((name, read(name) * factor) for name in weight_names(str(model.folder))), version)
    made.prepare_update(manifest, "drain")
    made.update_weights(manifest, MemoryReceiver(), buffer)


def ipc(arguments: argparse.Namespace) -> None:
    """A policy's weights into vLLM's own process, which sleeps until they come; before and after an update."""
    from gdpo_nemo.algorithms import LossSettings
    from gdpo_nemo.config.schema import OptimizerConfig

    with scratch() as folder:
        model = served_model(Path(folder) / "model", arguments)
        made = start_engine(model, arguments, apart=True)
        record("processes of vLLM's own", len(made._core.processes))
        stand = Stand(Path(folder))
        policy = stand.policy(model, precision(arguments), optimizer=OptimizerConfig(lr=1e-3))  # bf16 rounds less away
        batch = batch_of([40, 25, 61, 33], 250)
        start = logprobs(policy, batch, one_by_one(batch))
        for version in (1, 2):
            if version == 2:
                policy.train(batch, assigned(batch, 200), LossSettings())
            made.sleep()
            made.wake("weights")
            _hand_over(policy, made, version, stand)
            made.wake("kv_cache")
            trainer = logprobs(policy, batch, one_by_one(batch))
            scored = made.score([np.concatenate([s.prompt_ids, s.completion_ids]) for s in batch])
            sampler = [score[-len(s.completion_ids) :] for score, s in zip(scored, batch)]
            gap = float(np.abs(trainer - np.concatenate(sampler)).mean())
            name = f"log-probs of policy and engine, version {version}"
            record(name, gap, "nats", NEAR[precision(arguments)], key=version == 2)
        moved = float(np.abs(trainer - start).mean())
        record("log-probs that the update moved", moved, "nats")
        record("of that, what the engine lacks", gap / moved, "share", 0.1)
        made.close()


def _hand_over(policy: Any, made: Any, version: int, stand: Stand) -> None:
    """Send weights like ``IpcTransport``. This process is both the rank and the engine's actor."""
    from gdpo_nemo.weights.transports.ipc import IpcReceiver, IpcSender

    bucket = 256 << 20
    sender = IpcSender(policy, 0, "127.0.0.1")
    manifest = replace(sender.weight_metadata(), version=version)
    made.prepare_update(manifest, "drain")
    receiver = IpcReceiver((sender.listen(),), bucket, 120.0)
    failures: list[BaseException] = []

    def receive() -> None:
        try:
            made.update_weights(manifest, receiver)
        except BaseException as error:  # raised again below, in the thread that has the policy
            failures.append(error)

    stand.settle()
    start = time.perf_counter()
    thread = threading.Thread(target=receive)
    thread.start()
    sender.send(manifest, bucket, [0])
    thread.join()
    if failures:
        raise failures[0]
    record(f"weights, version {version}", manifest.nbytes / 1e9 / (time.perf_counter() - start), "GB/s")
