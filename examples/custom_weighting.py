"""Custom weighting rules: factors from the rewards of the step, and from the rewards of earlier steps.

    uv run examples/run_gdpo.py gdpo.weighting='{rule: examples/custom_weighting.py:shortfall}' run.name=shortfall
    uv run examples/run_gdpo.py gdpo.weighting='{rule: examples/custom_weighting.py:Slow, newest: 0.2}' run.name=slow

A rule gets the rewards of a step and returns a factor for each component in ``batch.names``. The component's weight in
the step is its weight in ``gdpo.rewards`` times this factor. Additional parameters are options of the rule.

A rule whose result depends on earlier steps is a class. A run creates one instance, calls the instance like a function,
passes the advantages of each step to its method ``observe`` if it has one, and saves its state in checkpoints.
"""

from typing import Any

import numpy as np

from gdpo_nemo import StepAdvantages, StepRewards


def shortfall(batch: StepRewards, best: float = 1.0) -> dict[str, float]:
    """Return 1 + the distance of each component's mean reward from the best reward."""
    factors = {}
    for name in batch.names:
        given = batch.present(name)
        factors[name] = 1.0 + max(best - float(given.mean()), 0.0) if len(given) else 1.0
    return factors


class Slow:
    """Factor 1 / (0.1 + s), where s is the moving average of the component's share in the size of all terms."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self.newest = 0.1

    def __call__(self, batch: StepRewards, newest: float = 0.1) -> dict[str, float]:
        self.newest = newest
        return {name: 1.0 / (0.1 + self.shares[name]) if name in self.shares else 1.0 for name in batch.names}

    def observe(self, trained: StepAdvantages) -> None:
        """Move the averages by the terms of the step."""
        sizes = {name: float(np.abs(trained.terms[name]).sum()) for name in trained.batch.names}
        total = sum(sizes.values())
        for name, size in sizes.items() if total else ():
            before = self.shares.get(name, size / total)
            self.shares[name] = before + self.newest * (size / total - before)

    def state(self) -> dict[str, Any]:
        """Return the averages, for a checkpoint."""
        return {"shares": self.shares}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the averages from a checkpoint."""
        self.shares = dict(state["shares"])
