"""PAPO, an advantage estimator that uses process rewards only among correct answers.

    uv run examples/run_gdpo.py gdpo.estimator=examples/papo.py:papo gdpo.batch_norm=false run.name=papo

Process-aware policy optimization, arXiv 2603.26535: A = A_out + A_proc. The outcome reward is normalized over all
samples of a group. Every other component is normalized over the samples with a correct outcome and is 0 for all others.
A wrong answer thus does not profit from process rewards, and a group of correct answers still has a learning signal. A
single correct answer in a group gets process advantages of 0. The paper uses two components of weight 1 without batch
norm.
"""

from dataclasses import replace

import numpy as np

from gdpo_nemo import RewardTable, Settings, Terms, weighted_terms, z_scores


def papo(table: RewardTable, settings: Settings, outcome: str = "correctness", right_from: float = 1.0) -> Terms:
    """Return the terms of A = w_out z(r_out) + sum_k w_k z(r_k among the samples with r_out >= right_from).

    Raises:
        ValueError: if the component ``outcome`` does not exist.
    """
    if outcome not in table.names:
        raise ValueError(f"outcome: no reward is called {outcome!r}; there are {', '.join(table.names)}")
    outcome_index = table.names.index(outcome)
    right = table.present[outcome_index] & (table.columns[outcome_index] >= right_from)
    used = np.where((np.arange(len(table.names)) == outcome_index)[:, None], table.present, table.present & right)
    restricted = replace(table, present=used, columns=np.where(used, table.columns, 0.0))
    return weighted_terms(*z_scores(restricted, settings), table.weights)
