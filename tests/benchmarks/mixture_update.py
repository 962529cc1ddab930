"""Tensor operations, collectives and CPU seconds of one weight update of a mixture, without a GPU.

    python tests/benchmarks/mixture_update.py [--layers 48] [--experts 128] [--beside CHECKOUT]

Layers and experts are those of Qwen3-30B-A3B, matrices and buckets 1,024 times smaller, and so are the blocks of the
checksums, so that the operations are as many as with matrices of the real size. An operation of aten other than a view
counts as one. On a GPU, a kernel that copies several tensors copies about 13 matrices at a time. ``--beside`` counts
the same for another checkout of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, WIDTH = 64, 24  # 2,048 and 768 of the real model, so that a matrix has 1.5 blocks
BLOCK = 1 << 10
BUCKET = 256 << 10


def write_config(folder: Path, layers: int, experts: int) -> None:
    """A Qwen3 mixture without weights."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_hidden_layers=layers, num_experts=experts, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, num_experts_per_tok=8, vocab_size=256,
        max_position_embeddings=512, tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)


def weights_of(layers: int, experts: int) -> list:
    """The tensors of the experts, bfloat16, in Megatron's order."""
    import torch

    shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    return [
        (f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", torch.randn(shape).bfloat16())
        for layer in range(layers)
        for expert in range(experts)
        for name, shape in shapes.items()
    ]


def of_buckets(options: argparse.Namespace) -> dict:
    """Buckets filled by the sender and opened by the receiver, with a GPU's way to add checksums."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from gdpo_nemo.weights import manifest

    class Operations(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            self.count += not function.is_view
            return function(*arguments, **(named or {}))

    manifest._BLOCK = BLOCK
    manifest._is_on_cpu = lambda words: False
    tensors = weights_of(options.layers, options.experts)
    found = {}
    described = manifest.weight_metadata(tensors, 0)
    for counted in (False, True):  # CPU seconds without the counting
        with Operations() as sender:
            start = time.process_time()
            if not counted:
                sender.__exit__(None, None, None)
            buckets = list(manifest.filled(described, iter(tensors), BUCKET, torch.device("cpu")))
            middle = time.process_time()
            sent = sender.count
            for bucket, buffer in zip(manifest.divide(described, BUCKET), buckets):
                assert len(list(bucket.open(buffer))) == len(bucket.entries)
            end = time.process_time()
            if not counted:
                found |= {"send CPU s": middle - start, "receive CPU s": end - middle}
                sender.__enter__()
        if counted:
            found |= {"send operations": sent, "receive operations": sender.count - sent}
    return {"tensors": len(tensors), **found}


def of_reload(options: argparse.Namespace) -> dict:
    """vLLM's layer-wise reload on its CUDA platform with CPU tensors."""
    sys.path.insert(0, str(ROOT / "tests/generation"))
    import cuda_platform
    from safetensors.torch import save_file

    cuda_platform.use_cuda_platform()
    from gdpo_nemo.generation.vllm_core import _register_model

    with tempfile.TemporaryDirectory() as scratch:
        write_config(Path(scratch), options.layers, options.experts)
        save_file(dict(weights_of(options.layers, options.experts)), Path(scratch) / "model.safetensors")
        _register_model(scratch)
        cuda_platform.join_group(scratch)
        found = cuda_platform.reloaded(Path(scratch))["together"]
    return {"reload operations": found["operations"], "reload CPU s": found["cpu_s"]}


def of_export(options: argparse.Namespace) -> dict:
    """Megatron's export on two gloo ranks: expert parallelism (EP 2) and pipeline stages (PP 2)."""
    found = {}
    for layout in ("EP", "PP"):
        with tempfile.TemporaryDirectory() as scratch:
            write_config(Path(scratch), options.layers, options.experts)
            command = [sys.executable, "-W", "ignore", __file__, "--part", "rank", "--layout", layout]
            command += ["--folder", scratch, "--layers", str(options.layers), "--experts", str(options.experts)]
            ranks = [
                subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                for rank in range(2)
            ]
            lines = [rank.communicate()[0].splitlines() for rank in ranks]
        found |= {f"{layout} 2 {name}": value for name, value in json.loads(lines[0][-1]).items()}
    return found


def of_rank(options: argparse.Namespace) -> dict:
    """One of the ranks of ``of_export``."""
    from gdpo_nemo.config.schema import MegatronConfig
    from gdpo_nemo.megatron import runtime

    chosen = runtime.prepare()
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig

    from gdpo_nemo.megatron import conversion
    from gdpo_nemo.megatron.model import build_chunks

    name = {"EP": "expert_model_parallel_size", "PP": "pipeline_model_parallel_size"}[options.layout]
    layout = MegatronConfig(**{name: 2})
    runtime.initialize(chosen, options.rank, 2, f"file://{options.folder}/store")
    runtime.lay_out(layout, 0)
    hf = AutoConfig.from_pretrained(options.folder)
    _, chunks = build_chunks(hf, layout, torch.bfloat16)
    calls: Counter[str] = Counter()

    def counting(function):
        def call(*arguments, **named):
            calls[function.__name__] += 1
            return function(*arguments, **named)

        return call

    for function in ("all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list"):
        setattr(dist, function, counting(getattr(dist, function)))
    if hasattr(conversion, "_BATCH_BYTES"):
        conversion._BATCH_BYTES = BUCKET
    start = time.process_time()
    count = sum(1 for _ in conversion.export_hf(chunks, hf))
    used = time.process_time() - start
    objects = sum(calls.pop(name, 0) for name in ("all_gather_object", "broadcast_object_list"))
    dist.barrier()
    return {"tensors": count, "collectives": sum(calls.values()), "pickled objects": objects, "CPU s": used}


PARTS = {"buckets": of_buckets, "reload": of_reload, "export": of_export, "rank": of_rank}


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--beside", type=Path, help="checkout to compare with")
    parser.add_argument("--part", choices=PARTS, help="run only this part, in this process")
    parser.add_argument("--layout")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options)))
        return
    for checkout in (ROOT, *([options.beside.resolve()] if options.beside else [])):
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        for part in ("buckets", "reload", "export"):
            command = [sys.executable, "-W", "ignore", __file__, "--part", part]
            command += ["--layers", str(options.layers), "--experts", str(options.experts)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{checkout}: {done.stderr.strip()[-2000:]}")
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                print(f"{checkout.name:12} {part:8} {name:24} {value:,.2f}" if isinstance(value, float) else
                      f"{checkout.name:12} {part:8} {name:24} {value:,}")  # fmt: skip


if __name__ == "__main__":
    main()
