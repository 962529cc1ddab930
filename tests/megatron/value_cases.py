"""What the tests of the value head run on ranks. Megatron is imported inside the functions, as in ``rank_cases``."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
from rank_cases import budget_of, exported, spread

from gdpo_nemo.config.schema import PolicyConfig
from gdpo_nemo.data.shares import Share


@dataclass
class Valued:
    """What one rank saw of two updates of a policy with a value head."""

    before: object
    """(places in the batch, ``TokenValues`` of [tokens, 3]) where the rank reports."""
    alone: object
    """``TokenValues`` of the log-probs that a policy is asked for without values."""
    steps: np.ndarray
    """float64 [updates, 4]: loss, gradient norm, value loss and value, means over the tokens"""
    resumed: np.ndarray
    """The last of them again, from the checkpoint before it."""
    weights: dict | None
    """rank 0: all Hugging Face tensors afterwards"""
    head: np.ndarray | None
    """The value head afterwards, weight and bias, where it is."""
    head_of_resumed: np.ndarray | None


HEAD_LR = 3.0


def build(place, folder, precision="float32"):
    """A Policy with a value head whose weights are far from 0."""
    import torch

    from gdpo_nemo.megatron.policy import Policy

    config = PolicyConfig(model_name=str(folder), precision=precision, megatron_cfg=place.layout)
    policy = Policy(config, folder, place.runtime, 100, value_lr_mult=HEAD_LR)
    for chunk in policy.chunks:
        if hasattr(chunk, "value_head"):
            with torch.no_grad():
                chunk.value_head.weight.copy_(torch.linspace(-0.4, 0.5, chunk.value_head.in_features)[None])
                chunk.value_head.bias.fill_(0.3)
    policy.built.optimizer.reload_model_params()
    return policy


def head_of(policy) -> np.ndarray | None:
    """Weight and bias of the value head, end to end, where this rank has it."""
    with policy.params_synced():
        for chunk in policy.chunks:
            if hasattr(chunk, "value_head"):
                parts = (chunk.value_head.weight, chunk.value_head.bias)
                return np.concatenate([part.detach().float().cpu().numpy().ravel() for part in parts])
    return None


def of_values(place, folder, batch, settings, out, sharing=False, budget=120, precision="float32") -> Valued:
    """Log-probs, entropies and values, then two updates with a checkpoint between them, laid out as the driver does."""
    from megatron.core import parallel_state

    from gdpo_nemo.data.packing import assign_singly
    from gdpo_nemo.data.prefixes import Layout, choose_layout
    from gdpo_nemo.megatron.checkpoint import load_checkpoint, save

    limits = budget_of(place.layout, budget)
    if budget:
        layout = choose_layout(sharing, batch, limits)
    else:
        layout = Layout(assign_singly(len(batch), limits.ranks, limits.stages), [0] * len(batch))
    mine = layout.assignment[parallel_state.get_data_parallel_rank()]
    share = pickle.loads(pickle.dumps(Share.of(batch, mine, shared=layout.shared)))

    def update(policy):
        result = policy.train(share.sequences(), share.micro_batches, settings)
        sums = result.sums
        return result.loss, result.grad_norm, sums["value_loss"] / sums["tokens"], sums["value"] / sums["tokens"]

    policy = build(place, folder, precision)
    found = policy.logprobs(share.sequences(), share.micro_batches, entropies=True, values=True)
    before = None if found is None else ([i for members in mine for i in members], found)
    alone = policy.logprobs(share.sequences(), share.micro_batches)
    steps = [update(policy)]
    save(policy, out / "checkpoint")
    again = build(place, folder, precision)
    load_checkpoint(again, out / "checkpoint")
    resumed = update(again)
    steps.append(update(policy))
    weights = exported(policy)
    return Valued(
        before, alone, np.array(steps), np.array(resumed), weights if place.rank == 0 else None, head_of(policy),
        head_of(again),
    )  # fmt: skip


def learning_rates(place, folder, batch, count) -> list[tuple[float, set[float]]]:
    """(reported rate, rates of the value head's groups) of each of ``count`` updates."""
    from gdpo_nemo.algorithms.policy_loss import LossSettings

    policy = build(place, folder)
    found = []
    for _ in range(count):
        reported = policy.train(batch, spread(place, batch), LossSettings()).lr
        groups = policy.built.optimizer.param_groups
        found.append((reported, {group["lr"] for group in groups if group["is_decoupled_lr"]}))
    return found
