"""Compare GRPO and GDPO on five pairs of rewards, with a table of logits as the policy.

    python examples/when_gdpo_helps.py [--seeds 10]

Each of 16 prompts has 32 possible answers with two binary features. A sixth of the answers have the first feature, and
half of them the second. The policy is trained for 30 steps by gradient ascent on its logits, with 8 sampled answers per
prompt. The trainer's code computes the advantages, which are scaled to a root mean square of 1 for each estimator. The
script prints the probability of each feature under the trained policy, as mean ± standard error over the seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from gdpo_nemo import compute_advantages

PROMPTS, ANSWERS, SAMPLES, STEPS, RATE = 16, 32, 8, 30, 1.0

Rewards = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]
"""Function of the sampled answers' two features, [samples] each, that returns rewards, [samples, 2]."""


def scaled(second: float) -> Rewards:
    """Return both features as rewards, the second one multiplied by a scale."""
    return lambda a, b, draw: np.stack([a, second * b], axis=1)


def noisy(a: np.ndarray, b: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return the first feature, and noise with a standard deviation of 0.01."""
    return np.stack([a, 0.01 * draw.normal(size=len(a))], axis=1)


def conditional(a: np.ndarray, b: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return both features, the second one only for answers with the first."""
    return np.stack([a, a * b], axis=1)


CASES: dict[str, tuple[Rewards, float, dict[str, float]]] = {
    "equal scales": (scaled(1.0), 0.0, {}),
    "second reward a tenth as large": (scaled(0.1), 0.0, {}),
    "second reward is noise": (noisy, 0.0, {}),
    "the same, with gdpo.noise": (noisy, 0.0, {}),
    "short answers are often wrong": (scaled(1.0), -0.8, {}),
    "the same, second reward a tenth as large": (scaled(0.1), -0.8, {}),
    "the same, weight 0.1 for the second": (scaled(0.1), -0.8, {"second": 0.1}),
    "the same, second only if the first": (conditional, -0.8, {}),
}
"""Rewards, correlation of the features over the answers, and weights of GDPO (default 1), by name."""
NOISE = {"the same, with gdpo.noise": {"second": 0.01}}
"""Measurement errors that GDPO knows, by name of the case."""


def features(correlation: float, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return two binary features of every answer with the given correlation before thresholding."""
    x, noise = draw.normal(size=(2, PROMPTS, ANSWERS))
    y = correlation * x + np.sqrt(1 - correlation**2) * noise
    return (x > 1.0).astype(float), (y > 0.0).astype(float)


def train(name: str, estimator: str, seed: int) -> np.ndarray:
    """Train a policy. Return the probabilities that an answer has the first and the second feature."""
    rewards, correlation, weights = CASES[name]
    draw = np.random.default_rng(seed)
    a, b = features(correlation, draw)
    logits = np.zeros((PROMPTS, ANSWERS))
    prompt = np.repeat(np.arange(PROMPTS), SAMPLES)
    for _ in range(STEPS):
        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        answer = np.concatenate([draw.choice(ANSWERS, SAMPLES, p=row) for row in probs])
        values = rewards(a[prompt, answer], b[prompt, answer], draw)
        given = weights if estimator == "gdpo" else {}
        columns = {"first": values[:, 0], "second": values[:, 1]}
        known = {"noise": NOISE[name]} if name in NOISE and estimator == "gdpo" else {}
        found = compute_advantages(
            columns,
            prompt,
            weights={k: given.get(k, 1.0) for k in columns},
            estimator=estimator,
            batch_norm=False,
            **known,
        ).values.numpy()
        found = found / max(np.sqrt((found**2).mean()), 1e-12)
        gradient = np.zeros_like(logits)
        np.add.at(gradient, (prompt, answer), found / SAMPLES)
        gradient -= probs * np.bincount(prompt, found / SAMPLES, PROMPTS)[:, None]
        logits += RATE * gradient
    return np.array([(probs * feature).sum(axis=1).mean() for feature in (a, b)])


def main() -> None:
    """Train all cases and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds (default: 10)")
    seeds = range(parser.parse_args().seeds)
    print("| rewards | GRPO, first | GRPO, second | GDPO, first | GDPO, second |\n| --- | --- | --- | --- | --- |")
    for name in CASES:
        cells = []
        for estimator in ("grpo", "gdpo"):
            runs = np.array([train(name, estimator, seed) for seed in seeds])
            errors = runs.std(axis=0, ddof=1) / np.sqrt(len(runs))
            cells += [f"{mean:.3f} ± {error:.3f}" for mean, error in zip(runs.mean(axis=0), errors)]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
