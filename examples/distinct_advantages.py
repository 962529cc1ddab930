"""Count the distinct advantages that a group of rollouts can get, as in Figure 3 of the GDPO paper.

    python examples/distinct_advantages.py [--out distinct_advantages.png]

The script enumerates all groups of G rollouts with n binary rewards, computes their advantages with the trainer's code,
and counts the distinct sorted results. GDPO, which normalizes each reward first, distinguishes groups that GRPO, which
sums the rewards first, does not. Up to G = 3, GDPO and GRPO without division by the standard deviation distinguish the
same number of groups.
"""

from __future__ import annotations

import argparse
from itertools import chain, combinations_with_replacement

import numpy as np

from gdpo_nemo import compute_advantages

ESTIMATORS = {"grpo": "GRPO", "dr_grpo": "GRPO without std", "gdpo": "GDPO"}


def every_group(rewards: int, size: int) -> np.ndarray:
    """Return all multisets of `size` vectors in {0, 1}^rewards: float [groups, size, rewards]."""
    multisets = chain.from_iterable(combinations_with_replacement(range(2**rewards), size))
    codes = np.fromiter(multisets, dtype=np.int64).reshape(-1, size)
    return (codes[:, :, None] >> np.arange(rewards) & 1).astype(np.float64)


def count(groups: np.ndarray, estimator: str) -> int:
    """Return the number of distinct sorted advantage vectors, before batch norm."""
    number, size, rewards = groups.shape
    ids = np.repeat(np.arange(number), size)
    table = groups.reshape(-1, rewards)
    advantages = compute_advantages(table, ids, estimator=estimator, batch_norm=False, epsilon=0.0).values
    levels = np.sort(advantages.numpy().reshape(number, size), axis=1).round(7) + 0.0
    return len(set(map(bytes, levels)))


def curve(cases: list[tuple[int, int]]) -> dict[str, list[int]]:
    """Return the counts of each estimator for each (rewards, group size), and print them."""
    counts: dict[str, list[int]] = {name: [] for name in ESTIMATORS}
    for rewards, size in cases:
        groups = every_group(rewards, size)
        for name in ESTIMATORS:
            counts[name].append(count(groups, name))
        row = "".join(f"{counts[name][-1]:>18}" for name in ESTIMATORS)
        print(f"{rewards:>8} {size:>6} {len(groups):>10}{row}")
    return counts


def draw(panels: list[tuple[str, list[int], dict[str, list[int]]]], path: str) -> None:
    """Plot a panel on a logarithmic scale for each (axis label, axis values, counts)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(9, 3.6), layout="constrained")
    for axis, (label, values, counts) in zip(axes, panels, strict=True):
        for (name, title), style in zip(ESTIMATORS.items(), ("o-", "s--", "^-"), strict=True):
            axis.plot(values, counts[name], style, label=title)
        axis.set(xlabel=label, ylabel="distinct advantage groups", yscale="log", xticks=values)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=150)
    print(f"saved plot to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="distinct_advantages.png", help="image file to write (default: %(default)s)")
    arguments = parser.parse_args()
    print(f"{'rewards':>8} {'group':>6} {'multisets':>10}" + "".join(f"{title:>18}" for title in ESTIMATORS.values()))
    sizes = list(range(2, 13))
    numbers = list(range(1, 6))
    by_size = curve([(2, size) for size in sizes])
    by_number = curve([(number, 4) for number in numbers])
    draw([("group size G (2 rewards)", sizes, by_size), ("rewards n (G = 4)", numbers, by_number)], arguments.out)


if __name__ == "__main__":
    main()
