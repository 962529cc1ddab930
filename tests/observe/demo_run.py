"""A made-up run whose curves look like those of the demo."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory

GROWTH = {
    "correctness": (0.25, 0.85, 18.0),
    "format": (0.40, 0.97, 7.0),
    "length": (0.48, 1.0, 4.0),
    "all": (0.05, 0.82, 16.0),
}
NASTY = 'a<script>alert("x")</script>\u2028\ud800 "quotes" \\n </pre>'


def demo_row(step: int, noise: float = 0.03) -> dict[str, Any]:
    random = np.random.default_rng(step)
    row: dict[str, Any] = {
        "step": step,
        "loss": float(random.normal(0, 0.01)),
        "grad_norm": 0.3 + 0.4 * random.random(),
    }
    for name, (start, end, pace) in GROWTH.items():
        mean = end - (end - start) * math.exp(-(step - 1) / pace)
        row[f"reward/{name}/mean"] = float(np.clip(mean + random.normal(0, noise), 0, 1))
        row[f"reward/{name}/dead_groups"] = 0.1
    row |= {"advantage/std": 1.0, "policy/entropy": 0.06 + 0.34 * math.exp(-step / 14), "parity/max_abs": 2e-5}
    row |= {
        "rollout/mean_length": 20 + 4.7 * math.exp(-step / 9),
        "staleness/max": 0,
        "throughput/tokens_per_second": 2900.0,
    }
    times = {
        "time/step": 1.0,
        "time/rollout": 0.45,
        "time/verify": 0.05,
        "time/train": 0.4,
        "time/sync": 0.06,
        "time/idle": 0.04,
    }
    return row | times


def demo_validation(step: int) -> dict[str, Any]:
    row = demo_row(step + 1, noise=0.0)
    return {"step": step, **{f"validation/{name}": row[f"reward/{name}/mean"] for name in GROWTH}}


def demo_groups(step: int = 1, prompts: int = 2, samples: int = 3) -> list[Group]:
    random = np.random.default_rng(step)
    groups = []
    for p in range(prompts):
        prompt = Prompt(f"p{step}-{p}", np.arange(6, dtype=np.int32), "39172=<b>", "digit_sort")
        groups.append(Group(prompt, [_trajectory(prompt, s, random) for s in range(samples)]))
    return groups


def _trajectory(prompt: Prompt, sample: int, random: np.random.Generator) -> Trajectory:
    length = 3 + sample
    return Trajectory(
        prompt=prompt,
        sample_index=sample,
        completion_ids=random.integers(0, 21, length).astype(np.int32),
        logprobs=np.log(random.random(length)).astype(np.float32),
        policy_version=4,
        text=NASTY if sample == 0 else "<t></t><a>12379</a>",
        finish_reason="stop",
        rewards={"correctness": float(sample % 2), "format": None, "length": float("nan")},
        outcome=Outcome.OK if sample else Outcome.TRUNCATED,
    )
