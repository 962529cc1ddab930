"""Gradients of the terms of a loss on one rank, and their products with each other and with the next update.

Every method is collective, like the methods of ``Policy``. Gradients are stored in host memory as float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.module import param_is_not_shared

from gdpo_nemo.algorithms.loss_selection import Objective
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import GradientProducts
from gdpo_nemo.megatron.optimizer import chained
from gdpo_nemo.megatron.policy import Policy
from gdpo_nemo.megatron.runtime import random_state, set_random_state

_CHUNK = 1 << 22
"""Number of weights whose products are computed at once, in float64."""


@dataclass
class _Weight:
    """Weights that this rank counts, before the update, with Adam's step size and their gradients: [weights] each."""

    parameter: torch.nn.Parameter
    before: torch.Tensor
    second: torch.Tensor | None
    """Bias-corrected second moments. None before the first update."""
    gradients: list[torch.Tensor]


class ComponentGradients:
    """Gradients at the weights of the policy when ``add`` is called, which must be the same each time.

    ``add`` changes neither weights nor random state. ``products`` is called after the next update.
    """

    def __init__(self, policy: Policy):
        self._policy = policy
        self._count = 0
        self._weights: list[list[_Weight]] = []
        """Weights by optimizer."""
        with policy.optimizer_on_device():
            for part in self._optimizers:
                groups = _groups(part)
                self._weights.append([_Weight(p, _on_host(p), _second(part, p, groups[p]), []) for p in _counted(part)])
            self._earlier = max(int(group.get("step", 0)) for group in policy.built.optimizer.param_groups)

    @property
    def _optimizers(self) -> list[Any]:
        return chained(self._policy.built.optimizer)

    def add(
        self, sequences: Sequence[TrainSequence], micro_batches: Sequence[Sequence[int]], terms: Sequence[Objective]
    ) -> None:
        """Compute a gradient for each term, with the random numbers (dropout) that the next update will use.

        Args:
            sequences, micro_batches: as in ``Policy.backward``.
        """
        state = random_state()
        with self._policy.optimizer_on_device():
            for term in terms:
                self._policy.backward(sequences, micro_batches, term)
                self._policy.built.optimizer.prepare_grads()
                for weight in chain.from_iterable(self._weights):
                    found = weight.parameter.grad
                    weight.gradients.append(torch.zeros_like(weight.before) if found is None else _on_host(found))
                set_random_state(state)
        self._count += len(terms)

    def products(self) -> GradientProducts:
        """Return the products of all gradients, equal on all ranks."""
        count = self._count
        total = torch.zeros((count, 2 * count + 1), dtype=torch.float64)
        with self._policy.optimizer_on_device():
            for optimizer, weights in zip(self._optimizers, self._weights, strict=True):
                found = self._of_optimizer(optimizer, weights)
                dist.all_reduce(found, group=optimizer.get_grad_stats_parallel_group())
                total += found.cpu()
        values = total.numpy()
        return GradientProducts(values[:, :count], values[:, count:-1], values[:, -1], self._earlier)

    def _of_optimizer(self, optimizer: Any, weights: Sequence[_Weight]) -> torch.Tensor:
        """Return the sums over this rank's weights: float64 [gradients, 2 x gradients + 1]."""
        device = self._policy.runtime.device
        total = torch.zeros((self._count, 2 * self._count + 1), dtype=torch.float64, device=device)
        groups = _groups(optimizer)
        for weight in weights:
            group = groups[weight.parameter]
            after = weight.parameter.detach().flatten()
            for part in _chunks(after.numel()):
                rows = torch.stack([gradient[part] for gradient in weight.gradients]).to(device, torch.float64)
                scale = 0.0
                if weight.second is not None:
                    scale = group["lr"] / (weight.second[part].to(device, torch.float64).sqrt() + group["eps"])
                moved = after[part].to(torch.float64) - weight.before[part].to(device, torch.float64)
                total += rows @ torch.cat([rows, rows * scale, moved[None]]).T
        return total


def _second(optimizer: Any, parameter: torch.nn.Parameter, group: dict[str, Any]) -> torch.Tensor | None:
    """Return Adam's bias-corrected second moments of a parameter, or None before its first update."""
    state = optimizer.optimizer.state.get(parameter, {})
    if "exp_avg_sq" not in state:
        return None
    return _on_host(state["exp_avg_sq"]) / (1.0 - group["betas"][1] ** int(group["step"]))


def _groups(optimizer: Any) -> dict[torch.nn.Parameter, dict[str, Any]]:
    """Return the group with Adam's settings of each parameter."""
    groups: dict[torch.nn.Parameter, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        groups |= dict.fromkeys(group["params"], group)
    return groups


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, count, _CHUNK))


def _on_host(values: torch.Tensor) -> torch.Tensor:
    return values.detach().flatten().to("cpu", torch.float32, copy=True)


def _counted(optimizer: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer that this rank counts in the gradient norm.

    Other ranks count copies of tied weights and of weights that tensor parallelism does not split, as in Megatron's
    ``get_grads_for_grad_norm``.
    """
    groups = {name: getattr(optimizer, name, None) for name in ("tp_group", "expert_tp_group")}
    counts = tensor_parallel.param_is_not_tensor_parallel_duplicate
    return [p for p in optimizer.get_parameters() if param_is_not_shared(p) and counts(p, **groups)]
