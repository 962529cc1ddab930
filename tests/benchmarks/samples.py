"""What the samples of a step cost the run: seconds of the main thread, of the writer, bytes, memory.

    uv run tests/benchmarks/samples.py [--samples 8192 --tokens 4000]

Token ids are drawn by Zipf's law from a vocabulary of 151,000 and texts have a word for each; log-probs are those of a
sampler that is mostly sure. JSON lines, as runs used to write them, are timed on a sixteenth of the samples and scaled.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gdpo_nemo.data.records import Group, Prompt, Trajectory
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.sample_writer import SampleWriter
from gdpo_nemo.observe.samples import read_columns, rollout_path, write_samples

VOCABULARY = 151_000
SAMPLES_PER_PROMPT = 16


def batch(samples: int, tokens: int) -> list[Group]:
    """Groups as a step has them; everything a sample holds is its own memory."""
    random = np.random.default_rng(0)
    words = [f"w{i % 5000}" for i in range(VOCABULARY)]
    groups = []
    for start in range(0, samples, SAMPLES_PER_PROMPT):
        prompt = Prompt(f"train/{start}", random.integers(0, VOCABULARY, 400).astype(np.int32), "x " * 400, "math")
        made = []
        for index in range(min(SAMPLES_PER_PROMPT, samples - start)):
            ids = np.minimum(random.zipf(1.2, tokens), VOCABULARY - 1).astype(np.int32)
            scale = np.where(random.random(tokens) < 0.6, 0.01, 1.5)
            logprobs = -random.exponential(scale).astype(np.float32)
            text = " ".join([words[i] for i in ids.tolist()])
            made.append(Trajectory(prompt, index, ids, logprobs, 3, text, "stop", {"a": 1.0, "b": None, "c": 0.5}))
        groups.append(Group(prompt, made))
    return groups


def peak_mib() -> float:
    """The largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def loops(until: Callable[[], bool]) -> int:
    """Rounds of a loop of Python until ``until`` says so."""
    rounds = 0
    while not until():
        sum(range(1000))
        rounds += 1
    return rounds


def write(writer: SampleWriter, step: int, groups: list[Group], advantages: np.ndarray, busy: bool) -> None:
    """Write a step and say what it took, the main thread waiting, or busy with Python of its own."""
    terms = dict.fromkeys("abc", advantages)
    cpu = time.process_time() - time.thread_time()
    start = time.perf_counter()
    writer.write(step, groups, SampleValues(advantages, terms=terms))
    handed = time.perf_counter() - start
    rounds = 0
    if busy:
        rounds = loops(lambda: not writer._steps)
    writer.flush()
    wall = time.perf_counter() - start
    cpu = time.process_time() - time.thread_time() - cpu
    speed = f", {rounds / wall:.0f} rounds/s of Python beside it" if busy else ""
    print(f"step {step}: main thread {1000 * handed:.2f} ms; on the disk after {wall:.2f} s, {cpu:.2f} CPU s{speed}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4000)
    arguments = parser.parse_args()
    groups = batch(arguments.samples, arguments.tokens)
    advantages = np.random.default_rng(1).normal(size=arguments.samples)
    print(f"{arguments.samples} samples of {arguments.tokens} tokens")
    with tempfile.TemporaryDirectory() as folder:
        before = peak_mib()
        writer = SampleWriter(folder, print)
        for step in (1, 2, 3):
            write(writer, step, groups, advantages, busy=False)
        end = time.perf_counter() + 3
        rounds = loops(lambda: time.perf_counter() > end)
        print(f"Python alone: {rounds / 3:.0f} rounds/s")
        write(writer, 4, groups, advantages, busy=True)
        writer.close()
        path = rollout_path(folder, 1)
        print(
            f"{path.stat().st_size / 1e6:.0f} MB a file; {peak_mib() - before:.0f} MiB beside the samples at the peak"
        )
        start = time.perf_counter()
        table = read_columns(path, ["rewards", "advantage", "outcome"])
        print(f"rewards, advantages and outcomes of {table.num_rows}: read in {time.perf_counter() - start:.3f} s")
        few = groups[: max(1, len(groups) // 16)]
        share = sum(len(group.trajectories) for group in few) / arguments.samples
        start = time.process_time()
        lines = write_samples(Path(folder) / "few.jsonl", few)
        seconds = time.process_time() - start
        print(f"JSON lines: {seconds / share:.1f} CPU s, {lines.stat().st_size / share / 1e6:.0f} MB (scaled)")


if __name__ == "__main__":
    main()
