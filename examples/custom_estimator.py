"""An advantage estimator of one's own: GDPO whose z-scores are squashed, so that no single reward of an outlier
decides.

    uv run examples/run_gdpo.py gdpo.estimator=examples/custom_estimator.py:squashed run.name=squashed
    uv run examples/run_gdpo.py gdpo.estimator=examples/custom_estimator.py:squashed gdpo.options.limit=1.5
    run.name=squashed_1.5

An estimator takes the rewards of a whole step as a table (rows sorted by group) and returns a weighted term per
component and sequence, and which sequences carry signal. Its further parameters are the keys of ``gdpo.options``. What
follows (the sum of the terms, its scale over the batch, diagnosis, metrics) is as with the built-in ones, in
gdpo_nemo/algorithms/estimators.py.
"""

import numpy as np

from gdpo_nemo.algorithms import RewardTable, Settings, Terms, weighted_terms, z_scores


def squashed(table: RewardTable, settings: Settings, limit: float = 2.0) -> Terms:
    """A = sum_k w_k limit tanh(z_k / limit), z_k as in GDPO."""
    z, has_signal = z_scores(table, settings)
    return weighted_terms(limit * np.tanh(z / limit), has_signal, table.weights)
