"""Steps of a policy on a GPU that is not there (see ``fake_cuda``); prints what they cost as JSON.

python tests/megatron/fake_step.py [--shape hidden,layers,heads,groups,width,vocabulary] [--tokens 64] [--offload]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import fake_cuda
import numpy as np


def write_config(folder: Path, shape: list[int]) -> None:
    """A Qwen2 without weights."""
    from transformers import Qwen2Config

    hidden, layers, heads, groups, width, vocabulary = shape
    Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=width,
        vocab_size=vocabulary,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    ).save_pretrained(folder)


def sequences(count: int, tokens: int, vocabulary: int) -> list:
    """``count`` micro-batches of eight sequences, ``tokens`` tokens together."""
    from gdpo_nemo.data.packing import TrainSequence

    draw = np.random.default_rng(0)
    each = tokens // 16
    return [
        TrainSequence(
            draw.integers(0, vocabulary, each).astype(np.int32),
            draw.integers(0, vocabulary, each).astype(np.int32),
            np.full(each, -4.0, np.float32),
            advantage=1.0,
            weight=float(i % 3),  # a third is not trained
        )
        for i in range(8 * count)
    ]


def cost(recorder, what, batch) -> dict:
    """What one more micro-batch adds, and what a pass costs besides."""
    rows = []
    for count in (2, 2, 4):  # the first one makes what stays: moments, pinned memory
        recorder.counts.clear()
        recorder.where.clear()
        what(batch[: 8 * count], [list(range(8 * i, 8 * i + 8)) for i in range(count)])
        rows.append((Counter(recorder.counts), Counter(recorder.where)))
    (_, (two, where_two), (four, where_four)) = rows
    names = ("launches", "copies", "blocking", "syncs")
    each = {name: (four[name] - two[name]) / 2 for name in names}
    lines = {f"{kind} at {place}": (n - where_two[kind, place]) / 2 for (kind, place), n in where_four.items()}
    return {
        "micro_batch": each,
        "besides": {name: two[name] - 2 * each[name] for name in names},
        "waits": {line: n for line, n in lines.items() if n},
    }


def kept(recorder) -> dict[str, int]:
    """Count the operations that keep a bucket of a weight update in host memory."""
    import torch

    from gdpo_nemo.weights.host_memory import HostCopies

    copies = HostCopies(fake_cuda.DEVICE)
    copies.begin([64])
    bucket = torch.empty(64, dtype=torch.uint8, device=fake_cuda.DEVICE)
    recorder.counts.clear()
    copies.add(bucket)
    waited = torch.cuda.current_stream() in copies._stream.waited_for
    return {**recorder.counts, "after what fills it": int(waited)}


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="32,4,4,2,48,99")
    parser.add_argument("--tokens", type=int, default=128, help="of a micro-batch of eight sequences")
    parser.add_argument("--offload", action="store_true", help="optimizer.offload, and a KL reference")
    options = parser.parse_args()
    shape = [int(value) for value in options.shape.split(",")]
    from gdpo_nemo.algorithms import LossSettings
    from gdpo_nemo.config.schema import MegatronConfig, OptimizerConfig, PolicyConfig

    layout = MegatronConfig(data_parallel_size=1, optimizer=OptimizerConfig(offload=options.offload))
    if hasattr(layout, "fused_logprobs"):  # not of every checkout that this is run for
        # Triton would look for a driver; `tests/benchmarks/logprob_launches.py` counts its kernels.
        layout.fused_logprobs = False
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), shape)
        config = PolicyConfig(precision="bfloat16", megatron_cfg=layout)
        policy, mode, recorder = fake_cuda.make_policy(folder, config, keep_reference=options.offload)
    batch = sequences(4, options.tokens, shape[-1])
    with mode, recorder:
        with policy.optimizer_on_device():
            pass
        found = {
            "update": cost(recorder, lambda *given: policy.train(*given, LossSettings()), batch),
            "logprobs": cost(recorder, policy.logprobs, batch),
        }
        if options.offload:
            found["reference"] = cost(recorder, lambda *given: policy.logprobs(*given, reference=True), batch)
        main_weights = [p for group in policy.built.optimizer.param_groups for p in group["params"]]
        found["resting"] = sorted({p.device.type for p in main_weights})
        with policy.optimizer_on_device():
            found["updating"] = sorted({p.device.type for p in main_weights})
        found["kept"] = kept(recorder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
