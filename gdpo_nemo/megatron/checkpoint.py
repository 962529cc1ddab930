"""Checkpoints of model, optimizer, schedule and random state, readable at any other layout.

Megatron's ``dist_checkpointing`` in its fully reshardable format. The caller writes into a temporary folder and renames
it, so a folder with the final name is whole.
"""

from __future__ import annotations

import queue
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import get_cuda_rng_tracker

# Megatron hands write results to itself through a manager process, for the sake of asynchronous saves. Ours are
# synchronous and stay in this process: a plain queue spares its start (seconds) and its orphan after a kill.
filesystem_async._results_queue = queue.Queue()


def save(policy, folder: str | Path) -> None:
    """Write the policy's whole state; collective.

    Raises:
        OSError: the disk is full or not writable.
    """
    folder = Path(folder)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with policy.settled():
        state = _state(policy, is_loading=False)
        dist_checkpointing.save(state, str(folder))
    dist.barrier()


def load(policy, folder: str | Path) -> None:
    """Read a checkpoint written at any layout; collective."""
    state = dist_checkpointing.load(_state(policy, is_loading=True), str(folder))
    for name, chunk in _named_chunks(policy):
        chunk.load_state_dict(state[name])
    policy.built.optimizer.load_state_dict(state["optimizer"])
    policy.built.scheduler.load_state_dict(state["scheduler"])
    # Random streams belong to ranks; at another layout there is no such stream to continue, and fresh ones are right.
    if state["world"] == _world():
        _set_random_state(state["random"])
    dist.barrier()


def _named_chunks(policy):
    chunks = policy.chunks
    return [("model" if len(chunks) == 1 else f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _state(policy, is_loading: bool) -> dict:
    metadata = dict(
        distrib_optim_sharding_type="fully_reshardable",
        singleton_local_shards=False,
        chained_optim_avoid_prefix=True,
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    chunks = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(policy)}
    model = chunks if len(chunks) > 1 else chunks["model"]
    return {
        **chunks,
        "optimizer": policy.built.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
        "scheduler": policy.built.scheduler.state_dict(),
        "random": _random_object(),
        "world": _world(),
    }


def _world() -> int:
    return dist.get_world_size()


def _random_object() -> ShardedObject:
    """This rank's random state, stored under its rank; read back only where the ranks are the same."""
    return ShardedObject("random", _random_state(), (dist.get_world_size(),), (dist.get_rank(),))


def _random_state() -> dict:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "streams": get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["streams"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
