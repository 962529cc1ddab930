"""Run as a program: what vLLM makes of a tiny model, before an update of its weights and after it.

``engine_scores.py OUT FOLDER NEWER``: the engine starts with FOLDER and is given the weights of NEWER; its scores of
``sequences`` in both states go to OUT, an npz.
"""

from __future__ import annotations

import os
import sys

import numpy as np


def sequences() -> list[np.ndarray]:
    """int32 token ids of two sequences."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, 99, length).astype(np.int32) for length in (12, 19)]


def main(out: str, folder: str, newer: str) -> None:
    """Score with the engine in both states."""
    from gdpo_nemo.config.schema import VllmConfig
    from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT, Engine

    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT)
    from gdpo_nemo.weights.manifest import pack
    from gdpo_nemo.weights.model_folder import open_weights, weight_names
    from gdpo_nemo.weights.transports.memory import MemoryReceiver

    engine = Engine(folder, VllmConfig(kv_cache_memory_bytes=64 << 20), "float32", 64, 0, on_cpu=True)
    before = np.concatenate(engine.score(sequences()))
    np.savez(out, before=before)
    read = open_weights(newer)
    manifest, buffer = pack(((name, read(name)) for name in weight_names(newer)), 1)
    engine.update_weights(manifest, MemoryReceiver(), buffer)
    np.savez(out, before=before, after=np.concatenate(engine.score(sequences())))


if __name__ == "__main__":
    main(*sys.argv[1:])
