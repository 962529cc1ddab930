"""Custom advantage estimators: GDPO with squashed z-scores, and GDPO with weights that change during the run.

    uv run examples/run_gdpo.py gdpo.estimator=examples/custom_estimator.py:squashed run.name=squashed
    uv run examples/run_gdpo.py gdpo.estimator=examples/custom_estimator.py:squashed gdpo.options.limit=1.5
    run.name=squashed_1.5
    uv run examples/run_gdpo.py gdpo.estimator=examples/custom_estimator.py:Fading run.name=fading

An estimator is a function of the rewards of a step, a table with rows sorted by group. It returns one weighted term per
component and sequence, and a mask of the sequences with a learning signal. Additional parameters of the function are
set in ``gdpo.options``. The trainer then sums and normalizes the terms, as for the built-in estimators in
gdpo_nemo/algorithms/estimators.py.

An estimator whose result depends on earlier steps is a class. A run creates one instance, calls the instance like a
function, and saves its state in checkpoints.
"""

from typing import Any

import numpy as np

from gdpo_nemo import RewardTable, Settings, Terms, weighted_terms, z_scores


def squashed(table: RewardTable, settings: Settings, limit: float = 2.0) -> Terms:
    """Return the terms of A = sum_k w_k limit tanh(z_k / limit), with z_k as in GDPO."""
    z, has_signal = z_scores(table, settings)
    return weighted_terms(limit * np.tanh(z / limit), has_signal, table.weights)


class Fading:
    """A = sum_k w_k exp(-|m_k - m_k0|) z_k: a component counts less the further its mean reward has moved.

    m_k is the running mean of the component's rewards, and m_k0 is its mean in the first step.
    """

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.running: dict[str, float] = {}

    def __call__(self, table: RewardTable, settings: Settings, newest: float = 0.1) -> Terms:
        scores = table.by_score()  # one column per component; a family of criteria has its score
        factors = dict.fromkeys(table.components, 1.0)
        for name, column, present in zip(scores.names, scores.columns, scores.present):
            if not present.any():
                continue
            mean = float(column[present].mean())
            before = self.running.get(name, mean)
            self.running[name] = before + newest * (mean - before)
            factors[name] = np.exp(-abs(self.running[name] - self.first.setdefault(name, mean)))
        weights = (table.weights.T * [factors[name] for name in table.names]).T
        return weighted_terms(*z_scores(table, settings), weights)

    def state(self) -> dict[str, Any]:
        """Return the means, for a checkpoint."""
        return {"first": self.first, "running": self.running}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the means from a checkpoint."""
        self.first = dict(state["first"])
        self.running = dict(state["running"])
