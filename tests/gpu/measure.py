"""One measurement of the first hour: ``measure.py basics|engine|ipc|speed|policy|weights|... [--cpu]``.

Findings go to the file that ``FINDINGS`` names, a JSON line each, and to stdout. With ``--cpu`` the shapes are tiny and
CUDA stays hidden; the code is the same.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
from engines import engine, ipc  # noqa: E402
from one_rank import BF16, CHECKS  # noqa: E402
from runs import colocated, eight, rank  # noqa: E402
from standing import (  # noqa: E402
    SHAPES,
    Model,
    Stand,
    assigned,
    batch_of,
    benchmark,
    hf_config,
    logprobs,
    one_by_one,
    planned,
    policy_config,
    record,
    scratch,
    timed,
    write_model,
)

_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_GPU_SHARE = 0.9
"""Of the device's memory that a plan may take."""


# -- 1: basics --------------------------------------------------------------------------------------------------------


def basics(arguments: argparse.Namespace) -> None:
    """Does it import, does NCCL start, and is a bf16 update what float32 on the CPU says?"""
    found = {name: _update_elsewhere(precision, cpu) for name, precision, cpu in (
        ("CPU", "float32", True), ("device", BF16, arguments.cpu))}  # fmt: skip
    for key, limit in (("loss", 0.02), ("grad_norm", 0.03)):
        ours, reference = found["device"][key], found["CPU"][key]
        record(f"{key}, bf16 against float32 on the CPU", abs(ours - reference) / abs(reference), "relative", limit)
    for name, value in found["device"].items():
        if name not in ("loss", "grad_norm"):
            record(name, value)


def _update_elsewhere(precision: str, cpu: bool) -> dict[str, Any]:
    import json

    command = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "update",
        "--precision",
        precision,
        *(["--cpu"] if cpu else []),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "FINDINGS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"update in {precision} ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1])["value"])


def update(arguments: argparse.Namespace) -> None:
    """One update of the tiny model; the same weights and tokens everywhere."""
    import torch

    from gdpo_nemo.algorithms import LossSettings

    with scratch() as folder:
        stand = Stand(Path(folder))
        model = write_fixed(Path(folder) / "model", arguments.precision)
        policy = stand.policy(model, arguments.precision)
        batch = batch_of([40, 25, 61, 33], model.shape[5])
        result = policy.train(batch, assigned(batch, 100), LossSettings())
        layers = {type(module).__module__.split(".")[0] for chunk in policy.chunks for module in chunk.modules()}
        value = dict(loss=result.loss, grad_norm=result.grad_norm, backend=torch.distributed.get_backend(),
                     device=str(stand.runtime.device), TransformerEngine="transformer_engine" in layers)  # fmt: skip
        record("update", value)


def write_fixed(folder: Path, precision: str) -> Model:
    """The tiny model with values that do not depend on the device that draws them."""
    import torch
    from safetensors.torch import load_file, save_file

    model = write_model(folder, SHAPES["tiny"], 256, precision)
    (file,) = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(0)
    weights = load_file(file)
    for name in sorted(weights):
        if weights[name].dim() > 1:
            drawn = torch.randn(weights[name].shape, generator=generator) * 0.02
            weights[name] = drawn.bfloat16().to(weights[name].dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return model


# -- 2, 4: speed ------------------------------------------------------------------------------------------------------


def speed(arguments: argparse.Namespace) -> None:
    """Seconds, MFU, peak memory beside the plan, launches and syncs of an update, by length of the sequences."""
    import torch

    size = "tiny" if arguments.cpu else arguments.size
    cases = [(64, 256), (256, 256)] if arguments.cpu else [(512, 8192), (4096, 16384), (32768, 32768)]
    with scratch() as folder:
        stand = Stand(Path(folder))
        device = torch.cuda.get_device_properties(0).total_memory if stand.on_gpu else 64 << 30
        for length, budget in cases:
            shape, recompute = fitting(SHAPES[size], length, budget, device, stand.on_gpu)
            _speed_of(stand, Path(folder), size, shape, recompute, length, budget, arguments.rounds)
            stand.free()


def fitting(
    shape: tuple[Any, ...], length: int, budget: int, device: float, on_gpu: bool
) -> tuple[tuple[Any, ...], str]:
    """The shape with as many layers as the plan lets fit, and the least recomputation with at least half of them."""
    layers = shape[1]
    for share in (1.0, 0.5, 0.25, 0.125):
        for recompute in ("none", "selective", "full"):
            count = max(1, int(layers * share))
            cut = (shape[0], count, *shape[2:])
            policy = policy_config(BF16, recompute=recompute)
            if planned(hf_config(cut, length, BF16), policy, budget, budget, on_gpu).total <= _GPU_SHARE * device:
                return cut, recompute
    raise SystemExit(f"not even an eighth of {layers} layers fits {device / 1e9:.0f} GB")


def _speed_of(stand: Stand, folder: Path, size: str, shape, recompute: str, length: int, budget: int, rounds: int):
    import torch

    from gdpo_nemo.algorithms import LossSettings

    label = f"{size} ({shape[1]} layers), {budget // length} x {length}, recompute {recompute}"
    model = write_model(folder / "model", shape, max(length, 512), BF16)
    policy = stand.policy(model, BF16, recompute=recompute)
    batch = batch_of([length] * (2 * budget // length), shape[5])
    micro_batches = assigned(batch, budget)
    if stand.on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def work() -> None:
        policy.train(batch, micro_batches, LossSettings())

    seconds = float(np.median(timed(stand, work, rounds)))
    tokens = sum(map(len, batch))
    record(f"{label}: tokens a second", tokens / seconds)
    plan = planned(
        policy.built.hf_config, policy.config, budget, budget - budget // length * (length // 4), stand.on_gpu
    )
    if stand.on_gpu:
        name = torch.cuda.get_device_name()
        peak = next((flops for part, flops in benchmark.PEAK_FLOPS.items() if part in name), None)
        if peak:
            record(f"{label}: MFU", _flops(model, [len(s) for s in batch]) / seconds / peak)
        used = torch.cuda.max_memory_allocated()
        record(f"{label}: peak memory", used / 1e9, "GB")
        record(f"{label}: peak / plan - 1", abs(used / (plan.total - plan.reserve) - 1), "", 0.15)
    else:
        record(f"{label}: planned memory", plan.total / 1e9, "GB")
    _profile(stand, label, work, len(micro_batches))
    _profile_host(label, work, len(micro_batches))
    seconds = float(np.median(timed(stand, lambda: policy.logprobs(batch, micro_batches), rounds)))
    record(f"{label}: log-probs, tokens a second", tokens / seconds)


def _flops(model: Model, lengths: list[int]) -> float:
    hidden, layers, *_ = model.shape
    return 6.0 * model.parameters * sum(lengths) + sum(6.0 * layers * hidden * n * n for n in lengths)


def _profile(stand: Stand, label: str, work, micro_batches: int) -> None:
    """Launches and syncs of an update, and the kernels that take most of it."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if stand.on_gpu else [])]
    with profile(activities=activities) as profiled:
        work()
        stand.settle()
    counts = Counter({event.key: event.count for event in profiled.key_averages()})
    record(f"{label}: torch operators a micro-batch", sum(
        n for key, n in counts.items() if key.startswith("aten::")) / micro_batches)  # fmt: skip
    if not stand.on_gpu:
        return
    record(f"{label}: kernel launches a micro-batch", sum(counts[name] for name in _LAUNCHES) / micro_batches)
    record(f"{label}: syncs an update", sum(counts[name] for name in _SYNCS))
    timed_events = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in timed_events[:12]:
        record(f"{label}: {event.key[:80]}", event.self_device_time_total / 1e3, "ms on the device")


def _profile_host(label: str, work, micro_batches: int) -> None:
    """Python functions in which the host spends most time of an update: small micro-batches wait for the host."""
    profile = cProfile.Profile()
    profile.runcall(work)
    entries = sorted(profile.getstats(), key=lambda entry: -entry.inlinetime)
    for entry in entries[:12]:
        code = entry.code
        name = code if isinstance(code, str) else f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}"
        record(f"{label}: {name[:80]}", 1e3 * entry.inlinetime / micro_batches, "ms of the host a micro-batch")


# -- 3: the policy -----------------------------------------------------------------------------------------------------


def policy(arguments: argparse.Namespace) -> None:
    """Packing, checkpoint, reference, off-loading, LoRA, on one rank."""
    with scratch() as folder:
        stand = Stand(Path(folder))
        size = "tiny" if arguments.cpu else "0.5b"
        model = write_model(Path(folder) / "model", SHAPES[size], 2048, BF16)
        longest = 61 if arguments.cpu else 700
        batch = batch_of([longest, longest // 3, longest // 2, 17, longest - 5, 40], model.shape[5])
        for check in CHECKS:
            check(stand, model, batch, Path(folder))
            stand.free()


# -- 4: weights -------------------------------------------------------------------------------------------------------


def weights(arguments: argparse.Namespace) -> None:
    """Checksums of both devices, and an update handed from one process to another."""
    import torch

    from gdpo_nemo.weights.manifest import checksum

    device = torch.device("cpu" if arguments.cpu else "cuda")
    tensors = {}
    draw = torch.Generator().manual_seed(0)
    for number, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16)):
        for elements in (1, 7, 1 << 20, (1 << 20) + 3, 5 << 20):
            tensors[f"t{number}.{elements}"] = torch.randn(elements, generator=draw).to(dtype)
    wrong = [name for name, value in tensors.items() if int(checksum(value)) != int(checksum(value.to(device)))]
    record("checksums that differ between CPU and device", len(wrong), "", 0, which=wrong[:3])
    block = torch.zeros(1 << (22 if arguments.cpu else 30), dtype=torch.bfloat16, device=device)
    seconds = []
    for _ in range(3):
        seconds.append(_seconds(lambda: int(checksum(block))))
    record("checksums", block.nbytes / 1e9 / min(seconds), "GB/s")
    _handed_over({name: value.to(device) for name, value in tensors.items()} | {"large": block}, device)


def _seconds(work) -> float:
    import time

    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _handed_over(tensors: dict[str, Any], device) -> None:
    """Through ``ipc``, to a process of its own, which answers with its checksums."""
    import torch.multiprocessing

    from gdpo_nemo.weights.manifest import checksum, weight_metadata
    from gdpo_nemo.weights.transports.ipc import IpcServer

    manifest = weight_metadata(tensors.items(), 1)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    server = IpcServer()
    process = context.Process(target=_take, args=(manifest, server.address, str(device), answers))
    process.start()
    server.send(manifest, iter(tensors.items()), 256 << 20, device)
    found, seconds = answers.get(timeout=120)
    process.join()
    wrong = [name for name, value in tensors.items() if found.get(name) != int(checksum(value))]
    record("tensors that arrived changed in another process", len(wrong), "", 0, which=wrong[:3])
    record("handing over through shared memory of the device", manifest.nbytes / 1e9 / seconds, "GB/s")


def _take(manifest, address, device: str, answers) -> None:
    """The receiving process."""
    import torch

    from gdpo_nemo.weights.manifest import checksum
    from gdpo_nemo.weights.transports.ipc import IpcReceiver

    place = torch.device("cuda", 0) if device.startswith("cuda") else torch.device("cpu")
    torch.zeros(1, device=place)
    found = {}

    def receive() -> None:
        for name, tensor in IpcReceiver((address,), 256 << 20, 120.0).receive(manifest, place, 0):
            found[name] = int(checksum(tensor))

    seconds = _seconds(receive)
    answers.put((found, seconds))


# -- 5: log-probs -----------------------------------------------------------------------------------------------------


def logprob_chunks(arguments: argparse.Namespace) -> None:
    """Milliseconds of the head and its log-probs, forward and backward, by chunk; syncs of one update."""
    with scratch() as folder:
        stand = Stand(Path(folder))
        from gdpo_nemo.megatron import model as models

        size = "tiny" if arguments.cpu else "1.5b"
        hidden, *_, vocabulary, _ = SHAPES[size]
        written = write_model(Path(folder) / "model", (hidden, 1, *SHAPES[size][2:]), 16384, BF16)
        tokens = 512 if arguments.cpu else 16384
        batch = batch_of([tokens // 8] * 8, vocabulary)
        micro_batches = assigned(batch, tokens)
        for kernel in (False, True):
            if kernel and not stand.on_gpu:
                continue  # Triton's interpreter would measure itself
            built = stand.policy(written, BF16, fused_logprobs=kernel)
            stock = models._LOGIT_BYTES
            for mib in (stock >> 20,) if kernel else (64, 256, 1024, 4096):
                models._LOGIT_BYTES = mib << 20
                stand.free()
                _measure_head(stand, built, batch, micro_batches, "fused" if kernel else f"chunks of {mib} MiB")
            models._LOGIT_BYTES = stock
        _syncs(stand, stand.policy(written, BF16), batch)


def _measure_head(stand: Stand, built, batch, micro_batches, label: str) -> None:
    import torch

    from gdpo_nemo.algorithms import LossSettings

    if stand.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    work = timed(stand, lambda: built.train(batch, micro_batches, LossSettings()), 3)
    record(f"one layer and the head, {label}: an update", 1e3 * float(np.median(work)), "ms")
    work = timed(stand, lambda: built.logprobs(batch, micro_batches), 3)
    record(f"one layer and the head, {label}: log-probs", 1e3 * float(np.median(work)), "ms")
    if stand.on_gpu:
        record(f"one layer and the head, {label}: peak", torch.cuda.max_memory_allocated() / 1e9, "GB")


def _syncs(stand: Stand, built, batch) -> None:
    """What waits for the device in an update of one micro-batch more: where, and how often."""
    import torch

    from gdpo_nemo.algorithms import LossSettings

    if not stand.on_gpu:
        record("syncs of a micro-batch", "needs a GPU")
        return
    found = []
    for batches in (1, 2):
        members = [list(range(len(batch)))] * batches
        built.train(batch, members, LossSettings())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            built.train(batch, members, LossSettings())
            torch.cuda.set_sync_debug_mode("default")
        found.append(Counter(f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)))
    record("syncs of an update with one micro-batch", sum(found[0].values()))
    more = found[1] - found[0]
    record("syncs of another micro-batch", sum(more.values()), "", 0, where=dict(more.most_common(10)))


# -- 6: noise ---------------------------------------------------------------------------------------------------------


def noise(arguments: argparse.Namespace) -> None:
    """How far bf16 log-probs of sampled tokens are from float32: what a limit of parity has to allow."""
    with scratch() as folder:
        stand = Stand(Path(folder))
        if arguments.model:
            model = Model(Path(arguments.model), (0,) * 7, 0)
        else:  # logits of a spread that a trained model's have
            model = write_model(Path(folder) / "m", SHAPES["tiny" if arguments.cpu else "0.5b"], 2048, BF16, 10.0)
        batch = _sampled(stand, model, 4 if arguments.cpu else 24, 32 if arguments.cpu else 256)
        micro_batches = assigned(batch, 4096)
        exact = logprobs(stand.policy(model, "float32", transformer_engine=False), batch, one_by_one(batch))
        built = stand.policy(model, BF16)
        places = {
            "packed": logprobs(built, batch, micro_batches),
            "alone": logprobs(built, batch, one_by_one(batch)),
        }
        likely = exact > np.log(0.1)
        record("sampled tokens with a probability above 0.1", float(likely.mean()), "share")
        pairs = [(f"bf16 {name} against float32", values, exact) for name, values in places.items()]
        pairs.append(("bf16 packed against alone", places["packed"], places["alone"]))
        for name, one, other in pairs:
            gap = np.abs(one - other)
            record(f"{name}, mean", float(gap.mean()), "nats")
            record(f"{name}, 99 % of tokens below", float(np.quantile(gap, 0.99)), "nats")
            record(f"{name}, largest", float(gap.max()), "nats")
            if likely.any():
                record(f"{name}, mean over likely tokens", float(gap[likely].mean()), "nats")
                record(f"{name}, largest over likely tokens", float(gap[likely].max()), "nats")


def _sampled(stand: Stand, model: Model, count: int, length: int) -> list[Any]:
    """Sequences that transformers samples from the model itself, as an engine would."""
    import torch
    from transformers import AutoModelForCausalLM

    from gdpo_nemo.data.packing import TrainSequence

    torch.manual_seed(0)
    sampler = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.bfloat16).to(stand.runtime.device)
    prompts = torch.randint(0, sampler.config.vocab_size, (count, 16), device=stand.runtime.device)
    with torch.no_grad():
        drawn = sampler.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=length,
            min_new_tokens=length, pad_token_id=0,
        ).cpu().numpy().astype(np.int32)  # fmt: skip
    lengths = np.linspace(max(4, length // 4), length, count).astype(int)
    return [
        TrainSequence(row[:16], row[16 : 16 + n], np.zeros(n, np.float32), 0.0, 1.0)
        for row, n in zip(drawn, lengths.tolist())
    ]


_MEASUREMENTS = {
    "basics": basics,
    "update": update,
    "engine": engine,
    "ipc": ipc,
    "colocated": colocated,
    "eight": eight,
    "rank": rank,
    "speed": speed,
    "policy": policy,
    "weights": weights,
    "logprobs": logprob_chunks,
    "noise": noise,
}


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurement", choices=_MEASUREMENTS)
    parser.add_argument("--cpu", action="store_true", help="tiny shapes, no GPU")
    parser.add_argument("--size", default="0.5b", choices=SHAPES, help="of speed (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="updates that are timed (%(default)s)")
    parser.add_argument("--precision", default="float32", choices=("float32", BF16), help="of update")
    parser.add_argument("--model", metavar="DIR", help="a real model instead of random weights")
    parser.add_argument("--rank", type=int, default=0, help="of rank, which eight starts twice (%(default)s)")
    arguments = parser.parse_args()
    if arguments.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _MEASUREMENTS[arguments.measurement](arguments)
    if not arguments.cpu:
        # On the first machine with a GPU, the process did not end: NCCL waited at the interpreter's exit, and also in
        # destroy_process_group. A run is not affected, because it kills its ranks.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
