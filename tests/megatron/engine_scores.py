"""Run as a program: what vLLM makes of tiny models, before an update of their weights and after it.

``engine_scores.py OUT FOLDER NEWER ...``: the engine starts with FOLDER and is given the weights of NEWER; the scores
of ``sequences`` go to OUT, an npz with one array for each engine and state.
"""

from __future__ import annotations

import os
import sys

import numpy as np


def sequences() -> list[np.ndarray]:
    """int32 token ids of two sequences."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, 99, length).astype(np.int32) for length in (12, 19)]


def main(out: str, *folders: str) -> None:
    """Score with each engine in turn."""
    from gdpo_nemo.config.schema import VllmConfig
    from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT, Engine

    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT)
    from gdpo_nemo.weights.manifest import pack
    from gdpo_nemo.weights.model_folder import open_weights, weight_names

    found = {}
    config = VllmConfig(kv_cache_memory_bytes=64 << 20)
    for number, (folder, newer) in enumerate(zip(folders[::2], folders[1::2])):
        engine = Engine(folder, config, "float32", 64, 0, on_cpu=True)
        found[f"{number}.before"] = np.concatenate(engine.score(sequences()))
        read = open_weights(newer)
        engine.update(*pack(((name, read(name)) for name in weight_names(newer)), 1))
        found[f"{number}.after"] = np.concatenate(engine.score(sequences()))
        del engine
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
