"""Updates of groups that share their prompts beside the same updates without, for ``policy.py --groups``.

Prompts are 1, 4 and 16 times as long as completions (32 to 96 tokens), groups of 8 and 16 samples; and a batch in which
no two samples begin alike, which ``auto`` must not slow down. Both ways take turns in one process, on one model.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

CASES = [(ratio, samples) for samples in (8, 16) for ratio in (1, 4, 16)] + [(0, 1)]
"""(prompt tokens for each completion token, samples of a group); ratio 0: rollout-like, nothing alike."""
COMPLETION = (32, 97)


def make_groups(ratio: int, samples: int, tokens: int, vocabulary: int):
    """Groups of about ``tokens`` tokens together, at least two of them."""
    import numpy as np

    from gdpo_nemo.algorithms import token_weights
    from gdpo_nemo.data.packing import TrainSequence

    draw = np.random.default_rng(0)
    batch: list[TrainSequence] = []
    while len(batch) < 2 * samples or sum(map(len, batch)) < tokens:
        prompt = draw.integers(0, vocabulary, ratio * sum(COMPLETION) // 2).astype(np.int32)
        for length in draw.integers(*COMPLETION, samples).tolist():
            completion = draw.integers(0, vocabulary, length).astype(np.int32)
            batch.append(TrainSequence(prompt, completion, np.full(length, -9.0, np.float32), float(draw.normal())))
    weights = token_weights([len(s.completion_ids) for s in batch], "token_mean").tolist()
    for sequence, weight in zip(batch, weights):
        sequence.weight = weight
    return batch


def flops(shape: tuple, batch, shared: list[int]) -> float:
    """Multiplications of a forward pass: layers and attention of what is computed, the head of completion tokens."""
    hidden, layers, heads, groups, width, vocabulary, _ = shape[:7]
    active = shape[7] if len(shape) > 7 else 1
    layer = hidden * hidden * 2 + 2 * hidden * (hidden // heads) * groups + 3 * hidden * width * active
    computed = sum(len(s) - count for s, count in zip(batch, shared))
    pairs = sum(len(s) ** 2 - count**2 for s, count in zip(batch, shared)) / 2
    head = hidden * vocabulary * sum(len(s.completion_ids) for s in batch)
    return layers * (layer * computed + 2 * hidden * pairs) + head


def measure(update, batch, ways, rounds: int, memory) -> dict:
    """Medians of wall and CPU seconds, largest peaks in bytes and losses of the updates, by way."""
    found: dict = {way: dict(wall=[], cpu=[], peak=[], loss=[]) for way in ways}
    for _ in range(rounds + 1):
        for way in ways:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            wall, cpu = time.perf_counter(), time.process_time()
            loss = update(batch, way)
            row = dict(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu, peak=memory(), loss=loss)
            for key, value in row.items():
                found[way][key].append(value)
    return {
        way: {key: max(rows) if key == "peak" else statistics.median(rows[1:]) for key, rows in kinds.items()}
        for way, kinds in found.items()
    }


def race(shape: tuple, make_batch, update, arguments, memory) -> None:
    """Measure every case and print it as a line of JSON."""
    from gdpo_nemo.data.packing import measure as packed

    chosen = arguments.case or [f"{ratio}:{samples}" for ratio, samples in CASES]
    for ratio, samples in (map(int, case.split(":")) for case in chosen):
        batch = make_groups(ratio, samples, arguments.tokens, shape[5]) if ratio else make_batch()
        ways = (False, True) if ratio else (False, None)
        found = measure(update, batch, ways, arguments.rounds, memory)
        layouts = {way: update.layout(batch, way) for way in ways}
        plain, shared = (dict(found[way], layout=layouts[way]) for way in ways)
        row = dict(ratio=ratio, samples=samples, tokens=sum(map(len, batch)))
        lengths = [len(s) for s in batch]
        row["saved"] = packed(layouts[ways[1]].assignment, lengths, 1, 1, 0.0, layouts[ways[1]].shared)["saved_share"]
        row["flops"] = flops(shape, batch, [0] * len(batch)) / flops(shape, batch, layouts[ways[1]].shared)
        for key in ("wall", "cpu", "peak", "loss"):
            row[key] = [plain[key], shared[key]]
        print(json.dumps(row), flush=True)


def show(line: str) -> None:
    """A line of ``race`` for a person."""
    row = json.loads(line)
    wall, cpu, peak = row["wall"], row["cpu"], row["peak"]
    what = f"{row['ratio']:2d}:1, G = {row['samples']:2d}" if row["ratio"] else "nothing alike"
    print(
        f"{what:14s}{row['tokens']:8,d} tokens, saved {row['saved']:5.1%}: {wall[0]:6.2f} -> {wall[1]:6.2f} s, "
        f"x {wall[0] / wall[1]:.2f} by wall, x {cpu[0] / cpu[1]:.2f} by CPU seconds, {row['flops']:.2f} by arithmetic; "
        f"{row['tokens'] / cpu[0]:,.0f} -> {row['tokens'] / cpu[1]:,.0f} real tokens a CPU second, peak "
        f"{peak[0] >> 20} -> {peak[1] >> 20} MiB",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit("python tests/benchmarks/policy.py --groups")
