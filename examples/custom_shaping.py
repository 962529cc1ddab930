"""A shaping rule of one's own: a length reward that falls along a cosine instead of a straight line.

    gdpo:
      shaping:
        - {component: length, examples/custom_shaping.py:cosine: {full: 20, zero: 40}}

A rule takes a component's rewards of a step (missing ones are NaN) and a context (``lengths``, ``max_length``,
``truncated``, and the finished components of other names in ``columns``) and returns them changed. Its further
parameters are what the rule gives. One that stands alone makes its component: the rewards it is given are then 0.
"""

import numpy as np

from gdpo_nemo.algorithms.rewards import Context


def cosine(values: np.ndarray, context: Context, full: float = 0.0, zero: float = 100.0) -> np.ndarray:
    """1 up to `full` tokens, 0 from `zero` tokens on, half a cosine between."""
    done = np.clip((context.need("lengths") - full) / (zero - full), 0.0, 1.0)
    return (1 + np.cos(np.pi * done)) / 2
