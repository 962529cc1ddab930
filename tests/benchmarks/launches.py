"""Kernel launches, copies and waits of one micro-batch on a GPU, counted on fake tensors: no GPU is needed, or used.

    python tests/benchmarks/launches.py [--size 1.5b] [--tokens 16384] [--offload] [--beside CHECKOUT]

An operation of aten counts as one launch. The layers are those without TransformerEngine, whose kernels are fewer.
``blocking`` copies and ``syncs`` make the process wait until the GPU has done all that is queued. ``--beside`` counts
the same for another checkout of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    # name: (hidden, layers, heads, key-value heads, MLP width, vocabulary)
    "tiny": (32, 4, 4, 2, 48, 99),
    "0.5b": (896, 24, 14, 2, 4864, 151936),
    "1.5b": (1536, 28, 12, 2, 8960, 151936),
    "7b": (3584, 28, 28, 4, 18944, 152064),
}
COLUMNS = ("launches", "copies", "blocking", "syncs")


def count(checkout: Path, options: argparse.Namespace) -> dict:
    """What ``tests/megatron/fake_step.py`` of this checkout finds in the package of that one."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/megatron/fake_step.py")]
    command += ["--shape", ",".join(map(str, SHAPES[options.size])), "--tokens", str(options.tokens)]
    command += ["--offload"] * options.offload
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, default="1.5b")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch of eight sequences (16384)")
    parser.add_argument("--offload", action="store_true", help="with optimizer.offload and a KL reference")
    parser.add_argument("--beside", type=Path, help="another checkout to count, too")
    options = parser.parse_args()
    checkouts = {"this": ROOT, **({"beside": options.beside.resolve()} if options.beside else {})}
    print(f"{options.size}, micro-batches of {options.tokens:,} tokens, by micro-batch (and once a pass besides)\n")
    print("| pass | checkout | " + " | ".join(COLUMNS) + " |\n|---" + "|---" * (len(COLUMNS) + 1) + "|")
    for name, checkout in checkouts.items():
        found = count(checkout, options)
        for what in ("update", "logprobs", "reference"):
            if what in found:
                each, besides = found[what]["micro_batch"], found[what]["besides"]
                cells = [f"{each[column]:g} (+{besides[column]:g})" for column in COLUMNS]
                print(f"| {what} | {name} | " + " | ".join(cells) + " |")
        for line, n in {**found["update"]["waits"], **found["logprobs"]["waits"]}.items():
            print(f"  {name} waits: {n:g} x {line.replace(str(checkout) + '/', '')}", file=sys.stderr)


if __name__ == "__main__":
    main()
