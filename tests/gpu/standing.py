"""A policy on one rank with random weights of a given shape, and batches for it: what ``measure.py`` measures on."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
_SHARD_BYTES = 4 << 30


def _benchmark() -> ModuleType:
    """``tests/benchmarks/policy.py``, whose shapes and count of operations are used here, too."""
    spec = importlib.util.spec_from_file_location("policy_benchmark", ROOT / "tests" / "benchmarks" / "policy.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark = _benchmark()
SHAPES: dict[str, tuple[Any, ...]] = {"tiny": (256, 2, 8, 4, 512, 1024, True), **benchmark.SHAPES}
"""(hidden, layers, heads, key-value heads, MLP width, vocabulary, tied) by size."""


def record(name: str, value: Any, unit: str = "", limit: float | None = None, **more: Any) -> None:
    """Append a finding to the file that the driver reads; with a limit it passes where it is not above it."""
    row: dict[str, Any] = dict(name=name, value=value, unit=unit, **more)
    if limit is not None:
        row |= dict(limit=limit, passed=bool(value <= limit))
    line = json.dumps(row)
    print(line, flush=True)
    if path := os.environ.get("FINDINGS"):
        with open(path, "a") as file:
            file.write(line + "\n")


@dataclass(frozen=True)
class Model:
    """A model folder with random weights."""

    folder: Path
    shape: tuple[Any, ...]
    parameters: int


def hf_config(shape: Sequence[Any], positions: int, precision: str):
    """The shape as transformers' Qwen2."""
    from transformers import Qwen2Config

    hidden, layers, heads, groups, width, vocabulary, tied = shape
    return Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, intermediate_size=width, max_position_embeddings=positions,
        tie_word_embeddings=tied, dtype=precision, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip


def write_model(folder: Path, shape: Sequence[Any], positions: int, precision: str, sharpness: float = 1.0) -> Model:
    """Write random weights, drawn where that is fast. ``sharpness`` scales the logits."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = hf_config(shape, positions, precision)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device("meta"):
        names = {
            name: tuple(value.shape) for name, value in AutoModelForCausalLM.from_config(config).named_parameters()
        }
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, sizes in names.items():
        value = torch.empty(sizes, dtype=getattr(torch, precision), device=device)
        if name.endswith("norm.weight"):
            value.fill_(sharpness if name == "model.norm.weight" else 1.0)
        elif name.endswith("bias"):
            value.zero_()
        else:
            value.normal_(0, 0.02)
        if shards[-1] and size + value.nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = value.cpu()
        size += value.nbytes
    files = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    for file, shard in zip(files, shards):
        save_file(shard, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, shard in zip(files, shards) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return Model(folder, tuple(shape), sum(int(np.prod(sizes)) for sizes in names.values()))


class Stand:
    """One laid-out rank, on which policies are built; ``layout``: fields of MegatronConfig."""

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1, **layout: Any):
        from gdpo_nemo.megatron import runtime

        self.runtime = runtime.prepare()
        from gdpo_nemo.config.schema import MegatronConfig

        self.folder = folder
        runtime.initialize(self.runtime, rank, ranks, f"file://{folder}/meeting")
        runtime.lay_out(MegatronConfig(**{"data_parallel_size": 1, **layout}), 0)

    @property
    def on_gpu(self) -> bool:
        """Whether this is CUDA."""
        return bool(self.runtime.device.type == "cuda")

    def policy(self, model: Model, precision: str, keep_reference=False, lora: int = 0, share=False, **layout: Any):
        """A Policy, which ``share``s prompts; ``layout``: fields of MegatronConfig, ``offload`` of its optimizer."""
        from gdpo_nemo.config.schema import LoraConfig
        from gdpo_nemo.megatron.policy import Policy

        config = policy_config(precision, **layout)
        config.share_prompts = share
        if lora:
            config.lora = LoraConfig(rank=lora)
        return Policy(config, model.folder, self.runtime, 1000, keep_reference)

    def free(self) -> None:
        """Free the memory of the policies that are no longer used, which reference cycles keep until a collection."""
        import torch

        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def settle(self) -> None:
        """Wait for the device."""
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()


def policy_config(precision: str, offload: bool = False, **layout: Any):
    """The policy section for one rank."""
    from gdpo_nemo.config.schema import MegatronConfig, OptimizerConfig, PolicyConfig

    optimizer = OptimizerConfig(lr=1e-5, clip_grad=1.0)
    optimizer.offload = offload
    config = PolicyConfig(precision=precision)
    config.megatron_cfg = replace(MegatronConfig(data_parallel_size=1, optimizer=optimizer), **layout)
    return config


def planned(model_config: Any, policy: Any, tokens: int, rows: int, on_gpu: bool):
    """What ``gdpo-nemo plan`` says of one rank with that micro-batch (``footprint.RankMemory``)."""
    from gdpo_nemo.config.model_checks import resolve
    from gdpo_nemo.config.schema import Config
    from gdpo_nemo.models.family_checks import describe
    from gdpo_nemo.planning.memory import policy_memory

    config = Config()
    config.policy.precision = policy.precision
    config.policy.megatron_cfg = policy.megatron_cfg
    config.policy.generation.engines = 0
    config.cluster.gpus_per_node = int(on_gpu)
    return policy_memory(resolve(config), describe(model_config.to_dict()), tokens, rows)


def batch_of(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[Any]:
    """Random sequences, a quarter of each prompt, with weights of the mean over all tokens."""
    from gdpo_nemo.data.packing import TrainSequence

    draw = np.random.default_rng(seed)
    prompts = [max(1, n // 4) for n in lengths]
    total = sum(lengths) - sum(prompts)
    return [
        TrainSequence(
            draw.integers(0, vocabulary, prompt).astype(np.int32),
            draw.integers(0, vocabulary, n - prompt).astype(np.int32),
            np.full(n - prompt, -9.0, np.float32),
            advantage=float(draw.normal()),
            weight=1.0 / total,
        )
        for n, prompt in zip(lengths, prompts)
    ]


def assigned(batch: Sequence[Any], budget: int) -> list[list[int]]:
    """Micro-batches of at most ``budget`` tokens."""
    from gdpo_nemo.data.packing import Budget, assign

    return assign([len(s) for s in batch], Budget(1, budget))[0]


def one_by_one(batch: Sequence[Any]) -> list[list[int]]:
    """A micro-batch for each sequence."""
    return [[index] for index in range(len(batch))]


def logprobs(policy: Any, batch: Sequence[Any], micro_batches: Sequence[Sequence[int]], **how: Any) -> np.ndarray:
    """float32 [all completion tokens], sequence by sequence."""
    values = policy.logprobs(batch, micro_batches, **how)
    out = [np.full(len(s.completion_ids), np.nan, np.float32) for s in batch]
    for sequence, offset, value in zip(*vars(values).values()):
        out[sequence][offset] = value
    whole = np.concatenate(out)
    assert not np.isnan(whole).any(), "a token without a log-prob"
    return whole


def timed(stand: Stand, work: Any, rounds: int) -> list[float]:
    """Seconds of each of ``rounds`` calls, after one that is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        stand.settle()
        start = time.perf_counter()
        work()
        stand.settle()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


@contextlib.contextmanager
def kept_on_failure() -> Iterator[Path]:
    """A folder in ``--out`` with the name of the step, which goes with the block unless it fails or is killed."""
    if "FINDINGS" not in os.environ:
        with scratch() as folder:
            yield Path(folder)
        return
    kept = Path(os.environ["FINDINGS"]).absolute().with_suffix("")
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    yield kept
    shutil.rmtree(kept)


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with the block."""
    return tempfile.TemporaryDirectory(prefix="models-")


if __name__ == "__main__":
    sys.exit("run measure.py")
