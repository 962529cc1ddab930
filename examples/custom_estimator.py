"""Custom advantage estimator: GDPO with squashed z-scores, which limits the effect of outliers.

    uv run examples/run_gdpo.py gdpo.estimator=examples/custom_estimator.py:squashed run.name=squashed
    uv run examples/run_gdpo.py gdpo.estimator=examples/custom_estimator.py:squashed gdpo.options.limit=1.5
    run.name=squashed_1.5

An estimator is a function of the rewards of a step, a table with rows sorted by group. It returns one weighted term per
component and sequence, and a mask of the sequences with a learning signal. Additional parameters of the function are
set in ``gdpo.options``. The trainer then sums and normalizes the terms, as for the built-in estimators in
gdpo_nemo/algorithms/estimators.py.
"""

import numpy as np

from gdpo_nemo import RewardTable, Settings, Terms, weighted_terms, z_scores


def squashed(table: RewardTable, settings: Settings, limit: float = 2.0) -> Terms:
    """Return the terms of A = sum_k w_k limit tanh(z_k / limit), with z_k as in GDPO."""
    z, has_signal = z_scores(table, settings)
    return weighted_terms(limit * np.tanh(z / limit), has_signal, table.weights)
