"""Rollout routing replay: MoE layers use the experts that the sampler chose (arXiv 2510.11370).

Megatron's ``RouterReplay`` keeps the experts of a micro-batch in global lists, whose order must match the pipeline
schedule and the recomputation. Here, each layer reads them from the micro-batch (``Packing.routing``), which Megatron
also passes to a layer that it recomputes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gdpo_nemo.megatron.packing import Packing


class SamplerChoice:
    """Replacement of Megatron's ``RouterReplay`` in the router of one layer.

    The scores of the chosen experts are those of the trained router, so the router still receives gradients.
    """

    def __init__(self) -> None:
        self.chosen: torch.Tensor | None = None
        """int64 [tokens of the router, experts per token], with -1 for unknown choices. None without replay."""
        self.counts: torch.Tensor | None = None
        """float64 [2]: number of known decisions, and of those in which the router would have chosen other experts.
        None if the layer is not counted in this pass."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: Callable[..., Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and indices of the experts of each token, [tokens, topk]. Megatron's router calls this."""
        values, own = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.chosen is None:
            return values, own
        known = self.chosen[:, :1] >= 0
        experts = torch.where(known, self.chosen, own)
        if self.counts is not None:
            differ = (experts.sort(-1).values != own.sort(-1).values).any(-1)
            self.counts += torch.stack((known.sum(), differ.sum()))
        return scores.gather(1, experts), experts


class RouterReplay:
    """Replay of the sampler's routing in all MoE layers of the model chunks on this rank.

    Args:
        chunks: model chunks without wrappers, or an empty list for no replay.
        symbols: Hybrid layers of the whole model (``ModelDescription.symbols``).
    """

    def __init__(self, chunks: Sequence[Any], symbols: Sequence[str]):
        self._replays = bool(chunks)
        self._counts: torch.Tensor | None = None
        """float64 [2]: ``SamplerChoice.counts`` of all layers of this rank. None if decisions are not counted."""
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                if router := getattr(getattr(layer, "mlp", None), "router", None):
                    router.router_replay = SamplerChoice()
                    number = "".join(symbols)[: layer.layer_number - 1].count("E")
                    layer.register_forward_pre_hook(partial(self._choose, router, number), with_kwargs=True)

    def _choose(self, router: Any, number: int, layer: Any, arguments: Any, options: dict[str, Any]) -> None:
        """Give the router of MoE layer ``number`` of the model its experts, before each forward pass of the layer."""
        packing: Packing = options["packed_seq_params"]
        choice = router.router_replay
        choice.chosen = choice.counts = None
        if packing.routing is None:
            return
        chosen = packing.routing[:, number * router.topk : (number + 1) * router.topk]
        if router.config.sequence_parallel:
            tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
            chosen = chosen.chunk(tensor_ranks)[parallel_state.get_tensor_model_parallel_rank()]
        choice.chosen = chosen.long()
        if number not in packing.counted:  # recomputation passes through the layer again
            packing.counted.add(number)
            choice.counts = self._counts

    def count(self, device: torch.device) -> None:
        """Begin to count the decisions of an update. A decision is the choice of a token's experts in a layer."""
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)

    def counted(self) -> dict[str, float]:
        """Stop counting, and return the numbers of known and of differing decisions on all ranks by metric."""
        counts, self._counts = self._counts, None
        if not self._replays or counts is None:
            return {}
        dist.all_reduce(counts)
        return dict(zip(("routing_decisions", "routing_differing"), counts.tolist()))
