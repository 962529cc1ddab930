"""Checkpoints of model, optimizer, schedule and random state, readable at any other layout.

Megatron's ``dist_checkpointing`` in its fully reshardable format. The caller writes into a temporary folder and renames
it, so a folder with the final name is whole.
"""

from __future__ import annotations

import queue
import random
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from gdpo_nemo.errors import RunError

_NO_SPACE = 4 << 20

# Megatron hands write results to itself through a manager process, for the sake of asynchronous saves. Ours are
# synchronous and stay in this process: a plain queue spares its start (seconds) and its orphan after a kill.
filesystem_async._results_queue = queue.Queue()


def save(policy, folder: str | Path) -> None:
    """Write the policy's whole state; collective.

    Raises:
        RunError: it could not be written; the text says why (the disk is full, say).
    """
    folder = Path(folder)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    _fill_moments(policy.built.optimizer)
    with policy.settled():
        state = _state(policy, is_loading=False)
        try:
            dist_checkpointing.save(state, str(folder))
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            raise RunError(_reason(error, folder)) from error
    dist.barrier()


def _reason(error: BaseException, folder: Path) -> str:
    """Why a write failed. Megatron's writer hands on the type of the error only, so a full disk is looked for first."""
    free = shutil.disk_usage(folder).free
    if free < _NO_SPACE:
        return f"No space left on device ({free >> 10} KiB free)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"


def _fill_moments(optimizer) -> None:
    """Give parameters that were never updated their (zero) moments: a checkpoint is complete from the start."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.init_state_fn(part.optimizer, part.config)


def load(policy, folder: str | Path) -> None:
    """Read a checkpoint written at any layout; collective."""
    wanted = _state(policy, is_loading=True)
    # Random streams belong to ranks: with another number of ranks there is none to continue, and fresh ones are right.
    if wanted["random"].unique_key not in load_sharded_metadata(str(folder)):
        del wanted["random"]
    state = dist_checkpointing.load(wanted, str(folder))
    for name, chunk in _named_chunks(policy):
        chunk.load_state_dict(state[name])
    optimizer = policy.built.optimizer
    optimizer.load_state_dict(_fit_chains(state["optimizer"], len(getattr(optimizer, "chained_optimizers", [None]))))
    policy.built.scheduler.load_state_dict(state["scheduler"])
    if "random" in state:
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
    }


def _fit_chains(state: dict, chains: int) -> dict:
    """Optimizer state as saved -> as an optimizer of ``chains`` parts loads it.

    With expert parallelism Megatron chains two optimizers (dense and expert parameters), whose step counts and the like
    sit under 0 and 1; without, it makes one. Tensors are stored alike in both cases.
    """
    if (chains > 1) == (0 in state and "optimizer" not in state):
        return state
    common = {key: value for key, value in state.items() if key not in (0, 1)}
    if chains == 1:
        return {**state[0], **common}
    groups = state["optimizer"]["param_groups"]

    def part(index: int) -> dict:
        own = [dict(group, is_expert_parallel=index == chains - 1) for group in groups]
        return {**common, **state[index], "optimizer": {"param_groups": own}}

    return {index: part(index) for index in range(chains)}


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
