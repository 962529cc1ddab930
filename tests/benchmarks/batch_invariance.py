"""Does a completion depend on what else an engine samples? Prints a table (Markdown) for CPU engines.

    batch_invariance.py [MODEL_FOLDER ...]      besides random models of 1 M and 10 M parameters

Twelve seeded requests of 24 tokens are drawn as one batch, and again in other company. A row has how many sequences
have the same tokens, and the largest difference of the log-probs up to the first other token.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
REQUESTS = 12
SIZES = {
    "1 M, random": dict(hidden_size=128, num_hidden_layers=4, intermediate_size=512),
    "10 M, random": dict(hidden_size=320, num_hidden_layers=8, intermediate_size=1024),
}


def main(folders: list[str]) -> None:
    """Make the random models and measure each model in a process of its own."""
    print("| model | dtype | again | reversed | halves | added in flight | one by one |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        named = {name: str(Path(scratch) / name.split()[0]) for name in SIZES}
        for name, folder in named.items():
            _make(folder, SIZES[name])
        for name, folder in (named | {Path(folder).name: folder for folder in folders}).items():
            for dtype in ("float32", "bfloat16"):
                program = [sys.executable, "-W", "ignore", __file__, "--measure", folder, dtype]
                done = subprocess.run(program, capture_output=True, text=True)
                row = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
                if not row:
                    raise SystemExit(done.stderr[-2000:])
                print(f"| {name} | {dtype} | {row[0].removeprefix('ROW ')} |", flush=True)


def _make(folder: str, fields: dict) -> None:
    sys.path.insert(0, str(REPOSITORY / "examples"))
    import make_tiny_model

    fields = make_tiny_model.MODEL_CONFIGS["make_random_model"] | fields
    heads = fields["hidden_size"] // 32
    fields |= dict(num_attention_heads=heads, num_key_value_heads=heads)
    make_tiny_model.MODEL_CONFIGS["make_random_model"] = fields
    make_tiny_model.make_random_model(folder, seed=0)


def measure(folder: str, dtype: str) -> None:
    """Print the row of a model."""
    from gdpo_nemo.config.schema import VllmConfig
    from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT, Engine, EngineOptions
    from gdpo_nemo.generation.requests import SampleRequest, Sampling

    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT)
    config = VllmConfig(kv_cache_memory_bytes=256 << 20, max_num_seqs=16)
    engine = Engine(EngineOptions(folder, config, dtype, 256, 0, on_cpu=True))
    rng = np.random.default_rng(0)
    wanted = [SampleRequest(rng.integers(5, 250, 30).astype(np.int32), seed) for seed in range(REQUESTS)]
    sampling = Sampling(1.0, 1.0, -1, 24)
    half = REQUESTS // 2

    def together(requests):
        return engine.generate(requests, sampling).completions

    def in_flight():
        named = [(f"r{i}", (request, sampling)) for i, request in enumerate(wanted)]
        engine.submit(dict(named[:half]))
        time.sleep(0.02)
        engine.submit(dict(named[half:]))
        found = {}
        while len(found) < REQUESTS:
            found |= dict(engine.poll(1.0).finished)
        return [found[name] for name, _ in named]

    batch = together(wanted)
    others = (
        together(wanted),
        together(wanted[::-1])[::-1],
        together(wanted[:half]) + together(wanted[half:]),
        in_flight(),
        [together([request])[0] for request in wanted],
    )
    print("ROW " + " | ".join(_difference(batch, other) for other in others), flush=True)
    engine.close()


def _difference(left, right) -> str:
    equal = 0
    off = 0.0
    for a, b in zip(left, right):
        length = min(len(a.token_ids), len(b.token_ids))
        differs = np.flatnonzero(a.token_ids[:length] != b.token_ids[:length])
        equal += not len(differs) and len(a.token_ids) == len(b.token_ids)
        common = differs[0] if len(differs) else length
        off = max(off, float(np.abs(a.logprobs[:common] - b.logprobs[:common]).max(initial=0)))
    return f"{equal}/{len(left)}, {off:.1e}"


if __name__ == "__main__":
    measure(*sys.argv[2:]) if sys.argv[1:2] == ["--measure"] else main(sys.argv[1:])
