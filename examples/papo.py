"""An estimator that trusts a process reward among right answers alone: PAPO.

    uv run examples/run_gdpo.py gdpo.estimator=examples/papo.py:papo gdpo.batch_norm=false run.name=papo

Process-aware policy optimization, arXiv 2603.26535: A = A_out + A_proc. The outcome is normalised over all samples of a
group, every other component over those whose outcome is right, and is 0 for the rest: a wrong answer cannot earn
anything by its manners, and a group of right ones still tells the better from the worse. One right answer alone has
nothing to be compared with. The paper's two components have weight 1 and no batch norm.
"""

from dataclasses import replace

import numpy as np

from gdpo_nemo.algorithms import RewardTable, Settings, Terms, weighted_terms, z_scores


def papo(table: RewardTable, settings: Settings, outcome: str = "correctness", right_from: float = 1.0) -> Terms:
    """A = w_out z(r_out) + sum_k w_k z(r_k among the samples with r_out >= right_from).

    Raises:
        ValueError: no component is called ``outcome``.
    """
    if outcome not in table.names:
        raise ValueError(f"outcome: no reward is called {outcome!r}; there are {', '.join(table.names)}")
    judged = table.names.index(outcome)
    right = table.present[judged] & (table.columns[judged] >= right_from)
    among = np.where((np.arange(len(table.names)) == judged)[:, None], table.present, table.present & right)
    narrowed = replace(table, present=among, columns=np.where(among, table.columns, 0.0))
    return weighted_terms(*z_scores(narrowed, settings), table.weights)
