"""Custom shaping rule: a length reward that decreases along a cosine instead of a straight line.

    gdpo:
      shaping:
        - {component: length, examples/custom_shaping.py:cosine: {full: 20, zero: 40}}

A rule is a function that returns the shaped rewards of a component. Its arguments are the component's rewards in a step
(NaN if missing) and a context. The context contains ``lengths``, ``max_length``, ``truncated``, and in ``columns`` the
shaped rewards of other components. Additional parameters of the function are set in the config, as above. If no
environment returns the component, the rule creates it and gets rewards of 0.
"""

import numpy as np

from gdpo_nemo import ShapingContext


def cosine(values: np.ndarray, context: ShapingContext, full: float = 0.0, zero: float = 100.0) -> np.ndarray:
    """Return 1 up to `full` tokens, 0 from `zero` tokens, and half a cosine period in between."""
    done = np.clip((context.need("lengths") - full) / (zero - full), 0.0, 1.0)
    return (1 + np.cos(np.pi * done)) / 2
