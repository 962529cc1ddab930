"""pass@k of several samples of a prompt, without bias for every k up to their number."""

from __future__ import annotations

from math import comb
from typing import Sequence

import numpy as np


def pass_at_k(values: Sequence[float], k: int) -> float:
    """Expected largest of k values drawn from ``values`` without replacement.

    For values of 0 and 1 this is pass@k, 1 - C(n - c, k) / C(n, k) with c ones among n (arXiv 2107.03374 eq. 1), and
    for any others the expected best of k. Both are unbiased, which the best of n samples at k < n, or
    1 - (1 - c / n)^k, is not.

    Raises:
        ValueError: k is not between 1 and the number of values.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the number of values ({n}), got {k}")
    # The i-th smallest (from 0) is the largest of those drawn in C(i, k - 1) of the C(n, k) draws.
    return sum(value * (comb(i, k - 1) / comb(n, k)) for i, value in enumerate(sorted(values)))


def mean_pass_at_k(rows: Sequence[Sequence[float | None]], k: int) -> float | None:
    """Mean of ``pass_at_k`` over the prompts that have k values or more; None where none has.

    Args:
        rows: of each prompt the values of its samples; None for those without.
    """
    present = [[value for value in row if value is not None] for row in rows]
    found = [pass_at_k(values, k) for values in present if len(values) >= k]
    return float(np.mean(found)) if found else None
