"""Time and memory of the advantages of one million sequences with eight rewards, in groups of 16, on one core.

    OMP_NUM_THREADS=1 python tests/benchmarks/advantages.py

Exits with status 1 when a limit is passed: 1 s of processor time (the best of three, since other programs may share
the core) and 1 GB of memory on top of the rewards.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc

import numpy as np

from gdpo_nemo.algorithms import compute_advantages

SECONDS = 1.0
BYTES = 1e9


def best_time(rewards: np.ndarray, ids: np.ndarray, **options: object) -> tuple[float, float]:
    """Processor seconds and wall seconds of the fastest of three runs."""
    runs = []
    for _ in range(3):
        wall = time.perf_counter()
        processor = time.process_time()
        compute_advantages(rewards, ids, **options)
        runs.append((time.process_time() - processor, time.perf_counter() - wall))
    return min(runs)


def peak_memory(rewards: np.ndarray, ids: np.ndarray, **options: object) -> int:
    """Bytes allocated at the worst moment of one run, the result included, the input not."""
    tracemalloc.start()
    compute_advantages(rewards, ids, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--components", type=int, default=8)
    parser.add_argument("--group", type=int, default=16)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    rewards = rng.integers(0, 2, (arguments.sequences, arguments.components)).astype(np.float64)
    ids = np.arange(arguments.sequences) // arguments.group
    holed = np.where(rng.random(rewards.shape) < 0.1, np.nan, rewards)
    cases = {
        "gdpo, sorted by group": (rewards, ids, {}),
        "gdpo, any order": (rewards, rng.permutation(ids), {}),
        "gdpo, any order, 10 % missing": (holed, rng.permutation(ids), {}),
        "grpo, any order": (rewards, rng.permutation(ids), {"estimator": "grpo"}),
    }
    failed = False
    for name, (table, order, options) in cases.items():
        processor, wall = best_time(table, order, **options)
        memory = peak_memory(table, order, **options)
        failed |= processor > SECONDS or memory > BYTES
        print(f"{name:32s} {processor:6.3f} s processor {wall:6.3f} s wall {memory / 1e6:6.0f} MB")
    result = compute_advantages(holed, ids)
    start = time.process_time()
    result.diagnostics.metrics()
    print(f"{'diagnosis, when asked for':32s} {time.process_time() - start:6.3f} s processor")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
