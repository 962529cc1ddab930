"""What the tests run on ranks. Megatron is imported inside the functions: the test process itself never imports it."""

from __future__ import annotations

import numpy as np

from gdpo_nemo.config.schema import GenerationConfig, PolicyConfig
from gdpo_nemo.data.packing import assign


def build_policy(place, folder, precision="float32", temperature=1.0, keep_reference=False, updates=100):
    """A Policy on this rank."""
    from gdpo_nemo.megatron.policy import Policy

    config = PolicyConfig(
        model_name=str(folder),
        precision=precision,
        megatron_cfg=place.layout,
        generation=GenerationConfig(temperature=temperature),
    )
    return Policy(config, folder, place.runtime, updates, keep_reference=keep_reference)


def spread(place, batch, budget):
    """The batch's assignment to this layout's data-parallel ranks."""
    from megatron.core import parallel_state

    layout = place.layout
    multiple = layout.pipeline_model_parallel_size if layout.virtual_pipeline_model_parallel_size else 1
    return assign([len(s) for s in batch], parallel_state.get_data_parallel_world_size(), budget, multiple)


def updates(place, folder, batch, steps=3, budget=80, precision="float32", temperature=1.0, settings=None):
    """Log-probs before, (loss, norm, entropy) of each update, and the weights after them (rank 0)."""
    from gdpo_nemo.algorithms.policy_loss import LossSettings

    policy = build_policy(place, folder, precision, temperature)
    assignment = spread(place, batch, budget)
    before = policy.logprobs(batch, assignment)
    rows = []
    for _ in range(steps):
        result = policy.train(batch, assignment, settings or LossSettings())
        rows.append((result.loss, result.grad_norm, result.sums["entropy"] / result.sums["tokens"]))
    weights = exported(policy)
    return before, np.array(rows), weights if place.rank == 0 else None


def exported(policy) -> dict:
    """All weights as plain arrays (float32 holds bfloat16 exactly)."""
    return {name: tensor.detach().float().numpy().copy() for name, tensor in policy.weights()}
