"""CPU seconds of a weight update by difference on a policy rank and in an engine process, without transport.

    OMP_NUM_THREADS=1 python tests/benchmarks/difference.py [--parameters 100e6] [--bucket-mib 256] [--zlib]

For random bfloat16 tensors of which a share changed by one unit in the last place, up or down:

* fill: fill buckets with tensors and checksums, as an update in full does
* take: the same, encode the difference from the previous copy, and replace the copy
* apply: patch the engine's copy and verify the checksums of the result

``--zlib`` also compresses the messages at level 1. Times are the best of three.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable
from dataclasses import replace

import torch

from gdpo_nemo.weights.copies import EngineCopy, RankCopy
from gdpo_nemo.weights.manifest import Base, divide, weight_metadata

CPU = torch.device("cpu")
ROW = 4096


def timed(function: Callable, *arguments: object):
    """Return (CPU seconds of a call, its result)."""
    start = time.process_time()
    result = function(*arguments)
    return time.process_time() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--zlib", action="store_true")
    arguments = parser.parse_args()
    rows = [int(arguments.parameters / 16 / ROW)] * 16
    tensors = [(f"w{i}", torch.randn(count, ROW).mul_(0.02).to(torch.bfloat16)) for i, count in enumerate(rows)]
    manifest = replace(weight_metadata(tensors, 0), keeper="benchmark")
    buckets = divide(manifest, arguments.bucket_mib << 20)
    buffer = torch.zeros(max(bucket.nbytes for bucket in buckets), dtype=torch.uint8)
    rank, engine = RankCopy(CPU), EngineCopy()

    def fill() -> None:
        pieces = iter(tensors)
        for bucket in buckets:
            bucket.fill(pieces, buffer)

    def receive(messages: list[torch.Tensor]) -> None:
        for _ in engine.pieces(manifest, buckets, messages, CPU):
            pass

    rank.take(buckets, iter(tensors), False)
    receive(list(rank.messages(False)))
    for share in (0, 0.005, 0.02, 0.1, 0.6):
        runs = []
        for _ in range(3):
            for _, tensor in tensors:
                drawn = torch.rand(tensor.shape)
                tensor.view(torch.int16).add_((drawn < share).to(torch.int16) - 2 * (drawn < share / 2))
            filled, _ = timed(fill)
            taken, changes = timed(rank.take, buckets, iter(tensors), True)
            manifest = replace(manifest, version=manifest.version + 1, base=Base(manifest.version, changes.sizes))
            messages = list(rank.messages(True))
            applied, _ = timed(receive, messages)
            runs.append((filled, taken, applied))
        filled, taken, applied = map(min, zip(*runs))
        sent = sum(changes.sizes) / sum(bucket.nbytes for bucket in buckets)
        print(
            f"{share:6.1%} changed: fill {filled:.2f} s, take {taken:.2f} s ({taken / filled:.2f} times), "
            f"apply {applied:.2f} s, {sent:.2%} of the bytes"
        )
        if arguments.zlib:
            spent, packed = timed(lambda found: [zlib.compress(message.numpy(), 1) for message in found], messages)
            print(f"        zlib: {spent:.2f} s, {sum(map(len, packed)) / sum(changes.sizes):.0%} of the message")


if __name__ == "__main__":
    main()
