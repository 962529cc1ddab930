"""Recorded advantages of the GDPO paper's formula and of other trainers, for small batches that tell them apart.

``conformance.json`` contains the batches and the advantages. ``tests/compat/conformance_vectors.py`` computed them: the
paper's in float64 from its equations, and the trainers' in float32 with their source code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VECTORS = Path(__file__).with_name("conformance.json")
TOLERANCE = 1e-3
"""Largest difference of equal advantages. Advantages have unit variance, and other epsilons change them by 2e-4."""

Outcome = list[float | None] | str
"""Advantage of each sample (None for NaN), or the message of an error."""
Estimator = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Function of rewards (float64 [samples, components], NaN if missing), groups (int [samples]), weights (float64
[components]) and lengths in tokens (int [samples]) that returns the advantages, [samples]."""


IMPLEMENTATIONS = {
    "paper": "arXiv 2601.05242, equations 4 to 7, over the rewards that are present",
    "trl": "TRL f2cd577 with multi_objective_aggregation: normalize_then_sum",
    "trl_fork": "the TRL of GDPO's authors, NVlabs/GDPO b080e63",
    "verl": "verl 1dda039, algorithm.adv_estimator: gdpo",
    "ms_swift": "ms-swift 3602360, scale_rewards: gdpo",
    "ms_swift_turns": "ms-swift 3602360 for requests of several turns, scale_rewards: gdpo",
    "nemo_rl": "NeMo-RL 7ea279a, adv_estimator.name: gdpo, without the leave-one-out baseline",
    "nemo_rl_loo": "NeMo-RL 7ea279a, adv_estimator.name: gdpo, with the leave-one-out baseline, its default",
    "axolotl": "axolotl 067b021, rl: gdpo, asynchronous trainer",
    "axolotl_streaming": "axolotl 067b021, rl: gdpo, asynchronous trainer with trl.streaming_partial_batch",
    "tunix": "Tunix's pull request 978, commit 07fdb46",
    "grpo": "GRPO, which normalises the sum of the rewards: TRL f2cd577, sum_then_normalize",
}
"""Recorded implementations, with the commit of their source code."""


@dataclass(frozen=True)
class Case:
    """One batch."""

    name: str
    question: str
    """Rule that a correct implementation follows in this batch."""
    rewards: np.ndarray
    """float64 [samples, components]; NaN if a sample does not have the component."""
    groups: np.ndarray
    """int64 [samples]; samples of the same prompt have the same number and follow each other."""
    weights: np.ndarray
    """float64 [components]."""
    lengths: np.ndarray
    """int64 [samples]; sampled tokens."""
    advantages: dict[str, Outcome]
    """Recorded outcome of each implementation, by name."""


def load_cases() -> list[Case]:
    """Read the recorded batches and advantages."""
    return [
        Case(
            record["name"],
            record["question"],
            np.array(record["rewards"], dtype=np.float64),
            np.repeat(np.arange(len(record["sizes"])), record["sizes"]),
            np.array(record["weights"], dtype=np.float64),
            np.array(record.get("lengths") or [8] * len(record["rewards"])),
            record["advantages"],
        )
        for record in json.loads(VECTORS.read_text(encoding="utf-8"))
    ]


def evaluate(estimator: Estimator, case: Case) -> Outcome:
    """Return the advantages that ``estimator`` computes for a batch, or type and first line of its error.

    Raises:
        TypeError: if the result is not one number per sample.
    """
    try:
        # Copies, because an estimator may modify its arguments.
        values = estimator(case.rewards.copy(), case.groups.copy(), case.weights.copy(), case.lengths.copy())
    except Exception as error:  # any error of an implementation is its outcome
        return error_line(error)
    try:
        array = np.asarray(values, dtype=np.float64)
    except Exception as error:  # a type of the user's own may raise any exception
        raise TypeError(f"{case.name}: the result is not an array of numbers ({error_line(error)})") from None
    if array.shape != case.groups.shape:
        raise TypeError(f"{case.name}: expected one advantage per sample, shape {case.groups.shape}, got {array.shape}")
    return [None if np.isnan(value) else float(value) for value in array]


def error_line(error: Exception) -> str:
    """Return type and first line of an exception, which is cut to 300 characters."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # the method of a user-defined exception may fail
        lines = []
    name = type(error).__name__
    return f"{name}: {lines[0][:300]}" if lines else name


def difference(first: Outcome, second: Outcome) -> float:
    """Return the largest difference of two outcomes: 0 if both are errors, infinity if only one is or is not a number
    where the other is."""
    if isinstance(first, str) or isinstance(second, str):
        return 0.0 if isinstance(first, str) and isinstance(second, str) else float("inf")
    a, b = (np.array(values, dtype=np.float64) for values in (first, second))
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    return float(np.abs(a - b).max(where=~np.isnan(a), initial=0.0))
