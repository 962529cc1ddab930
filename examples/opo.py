"""An estimator of the summed reward: OPO, whose baseline weighs each sample by its length.

    uv run examples/run_gdpo.py gdpo.estimator=examples/opo.py:opo gdpo.batch_norm=false run.name=opo

Optimal reward baseline, arXiv 2505.23585: A = r - b with b = sum_i l_i r_i / sum_i l_i over the group, which has
the least variance where the squared norm of a sample's gradient grows with its length l. The paper scales nothing over
the batch and is on-policy throughout: ``batch_norm: false``, ``policy.train_global_batch_size: null``.
"""

import numpy as np

from gdpo_nemo.algorithms import RewardTable, Settings, Terms, z_scores


def opo(table: RewardTable, settings: Settings) -> Terms:
    """A = sum_k w_k (r_k - length-weighted mean of r_k in the group)."""
    groups = table.groups
    tokens = np.where(table.scored, table.lengths, 0.0)
    shares = table.columns * table.weights[:, None]
    baselines = [groups.rows(groups.sum(share * tokens) / np.maximum(groups.sum(tokens), 1.0)) for share in shares]
    has_signal = z_scores(table, settings)[1].any(axis=0)
    return Terms(np.where(has_signal, shares - np.stack(baselines), 0.0), has_signal)
