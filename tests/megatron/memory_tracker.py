"""How many bytes of tensors are alive, counted at every operation, forward and backward."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorBytes(TorchDispatchMode):
    """Within the block, ``live`` is the size of the storages made so far that still exist, ``peak`` its largest value.

    Sees what operations return, not what they allocate inside; memory that the allocator keeps is not counted.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.add(leaf.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it dies."""
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak_of_update(place, folder, batch, budget: int, precision: str = "float32") -> dict[str, float]:
    """Peak tensor bytes of building the policy and training two updates on this rank, and RSS beside it."""
    import gc
    from pathlib import Path

    import rank_cases
    from transformers import AutoConfig

    import gdpo_nemo.megatron.policy  # noqa: F401

    AutoConfig.from_pretrained(folder)  # libraries are here before anything is measured

    def resident(field: str) -> int:
        line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
        return int(line.split()[1]) * 1024

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    with TensorBytes() as tracker:
        policy = rank_cases.build_policy(place, folder, precision)
        mine = rank_cases.spread(place, batch, budget)
        rank_cases.train(policy, batch, mine, 2)
    loads = [
        (sum(len(batch[i]) for i in members), sum(len(batch[i].completion_ids) for i in members)) for members in mine
    ]
    return {
        "tensors": tracker.peak,
        "rss": resident("VmHWM") - before,
        "tokens": max(tokens for tokens, _ in loads),
        "rows": max(rows for _, rows in loads),
    }
