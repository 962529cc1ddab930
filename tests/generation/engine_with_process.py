"""Run as a program: an engine whose vLLM has a process of its own, as on GPUs, takes weights in flight.

``engine_with_process.py MODEL OUT``: what it drew and how far its log-probs are from its own scores goes to OUT, JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np


def main(model: str, out: str) -> None:
    """Draw while an update of every kind arrives."""
    from gdpo_nemo.config.schema import VllmConfig
    from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT, Engine

    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT | own)
    engine = Engine(model, VllmConfig(kv_cache_memory_bytes=64 << 20, max_num_seqs=8), "float32", 256, 0, on_cpu=True)
    found = {
        kv: across_update(engine, model, kv, 10 * number) for number, kv in enumerate(("drain", "recompute", "keep"))
    }
    Path(out).write_text(json.dumps(found))
    engine.close()


def across_update(engine, model: str, kv: str, version: int) -> list[dict]:
    """Per request: name, spans, and the largest difference of each span's log-probs from its own version's scores."""
    from gdpo_nemo.generation.requests import SampleRequest, Sampling

    load(engine, weights(model, version, 1.0))
    newer = weights(model, version + 1, 1.7)
    prompt = np.random.default_rng(version).integers(2, 250, 60).astype(np.int32)
    # Only those that the update finds under way have to be long.
    under_way, others = Sampling(1.0, 1.0, -1, 24 if kv == "drain" else 100), Sampling(1.0, 1.0, -1, 8)
    drawn = submit_and_meet_running(
        engine,
        {f"{kv} {seed}": (SampleRequest(prompt, seed), under_way if 0 < seed < 8 else others) for seed in range(16)},
    )
    load(engine, newer, kv)
    engine.submit({f"{kv} {seed}": (SampleRequest(prompt, seed), others) for seed in range(16, 20)})
    end = time.monotonic() + 120
    while len(drawn) < 20 and time.monotonic() < end:
        drawn |= dict(engine.poll(1.0).finished)
    sequences = [np.concatenate([prompt, completion.token_ids]) for completion in drawn.values()]
    by_version = {version + 1: engine.score(sequences)}
    load(engine, weights(model, version + 2, 1.0))
    by_version[version] = engine.score(sequences)
    rows = []
    for place, (name, completion) in enumerate(drawn.items()):
        start = 0
        off = []
        for drawn_by, tokens in completion.spans:
            span = slice(start, start + tokens)
            own = by_version[drawn_by][place][len(prompt) - 1 :]
            off.append(float(np.abs(completion.logprobs[span] - own[span]).max()))
            start += tokens
        spans = [(drawn_by - version, tokens) for drawn_by, tokens in completion.spans]
        rows.append({"name": name, "tokens": len(completion.token_ids), "spans": spans, "off": off})
    return rows


def submit_and_meet_running(engine, requests: dict) -> dict:
    """Return what had finished when at least four requests were running.

    The engine counts them when one finishes, so the first must be shorter than the others.
    """
    while True:
        engine.submit(requests)
        drawn = {}
        while len(drawn) < len(requests):
            report = engine.poll(0.001)
            drawn |= dict(report.finished)
            if report.running >= 4:
                return drawn
        # On a busy machine, all may finish before this process reads the count.


def weights(model: str, version: int, factor: float):
    """The manifest and the bytes of the folder's weights times a factor."""
    from gdpo_nemo.models.hf_folder import open_weights, weight_names
    from gdpo_nemo.weights.manifest import pack

    read = open_weights(model)
    return pack(((name, read(name) * factor) for name in weight_names(model)), version)


def load(engine, update, kv: str = "drain") -> None:
    """Give it what ``weights`` packed."""
    from gdpo_nemo.weights.transports.memory import MemoryReceiver

    manifest, buffer = update
    engine.prepare_update(manifest, kv)
    engine.update_weights(manifest, MemoryReceiver(), buffer)


if __name__ == "__main__":
    main(*sys.argv[1:])
