"""OPO, an advantage estimator for the summed reward whose baseline is weighted by completion length.

    uv run examples/run_gdpo.py gdpo.estimator=examples/opo.py:opo gdpo.batch_norm=false run.name=opo

Optimal reward baseline, arXiv 2505.23585: A = r - b with b = sum_i l_i r_i / sum_i l_i over the group. This baseline
has the least variance if the squared norm of a sample's gradient grows with its length l. The paper does not normalize
over the batch and trains on-policy: ``batch_norm: false``, ``policy.train_global_batch_size: null``.
"""

import numpy as np

from gdpo_nemo import RewardTable, Settings, Terms, z_scores


def opo(table: RewardTable, settings: Settings) -> Terms:
    """Return the terms of A = sum_k w_k (r_k - length-weighted mean of r_k in the group)."""
    groups = table.groups
    tokens = np.where(table.scored, table.lengths, 0.0)
    weighted_rewards = table.columns * table.row_weights
    group_tokens = np.maximum(groups.sum(tokens), 1.0)
    baselines = [groups.rows(groups.sum(rewards * tokens) / group_tokens) for rewards in weighted_rewards]
    has_signal = z_scores(table, settings)[1].any(axis=0)
    return Terms(np.where(has_signal, weighted_rewards - np.stack(baselines), 0.0), has_signal)
