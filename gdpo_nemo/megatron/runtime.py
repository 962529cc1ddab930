"""One entry that decides what a policy process runs on: NCCL and CUDA, or gloo and the CPU."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import socket
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Iterator

import numpy as np
import torch
import torch.distributed as dist

from gdpo_nemo.config.schema import MegatronConfig
from gdpo_nemo.megatron import cpu_shim


@dataclass(frozen=True)
class Runtime:
    """What this process computes on."""

    device: torch.device
    backend: str


def prepare() -> Runtime:
    """Choose device and backend and make megatron-core importable on it. Call before importing megatron.core."""
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    # Megatron's timers import trackers that are there, 1 s of a core, to recognise a writer that is handed to them.
    # None is.
    with hidden("wandb", "torch.utils.tensorboard"):
        on_cpu = cpu_shim.install()  # before the next line, which imports Megatron
        import megatron.core.timers  # noqa: F401
    _use_group_step_adam()
    if on_cpu:
        return Runtime(torch.device("cpu"), "gloo")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank)
    return Runtime(torch.device("cuda", local_rank), "nccl")


def _use_group_step_adam() -> None:
    """Without TransformerEngine or apex, give Megatron an Adam with the state layout of theirs."""
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.distrib_optimizer as distributed

    from gdpo_nemo.megatron.adam import GroupStepAdam

    # Two modules bind Adam and these flags at import; the flags make Megatron take the step from the parameter group.
    if optimizers.USING_PYTORCH_OPTIMIZER:
        optimizers.Adam = GroupStepAdam
        optimizers.USING_PYTORCH_OPTIMIZER = False
        distributed.Adam = GroupStepAdam
        distributed.HAVE_APEX_OR_TE = True
        distributed.USING_APEX_OPTIMIZER = True


@contextlib.contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Modules that cannot be imported in this block, for libraries that import them where they are there."""
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    absent: dict[str, Any] = dict.fromkeys(names)
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def initialize(
    runtime: Runtime,
    rank: int,
    world_size: int,
    init_method: str,
    listener: socket.socket | None = None,
    timeout_s: float = 1800.0,
) -> None:
    """Join the default process group.

    Args:
        init_method: a torch URL: ``file://path``, or ``tcp://host:port`` of rank 0.
        listener: on rank 0 with ``tcp``: the socket that already listens there; torch takes ownership of it.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    meeting: dict = dict(init_method=init_method)
    if init_method.startswith("tcp://"):
        host, _, port = init_method.removeprefix("tcp://").rpartition(":")
        given: dict[str, Any] = dict(master_listen_fd=listener.detach()) if listener else {}
        meeting = dict(
            store=dist.TCPStore(host, int(port), world_size, rank == 0, timeout, wait_for_workers=False, **given)
        )
    dist.init_process_group(runtime.backend, rank=rank, world_size=world_size, timeout=timeout, **meeting)


def lay_out(layout: MegatronConfig, seed: int) -> None:
    """Build Megatron's process groups for ``layout`` and seed every random stream."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
    )
    seed_everything(seed)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and Megatron's named random streams."""
    from megatron.core import tensor_parallel

    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy accepts 32 bits only
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def tear_down() -> None:
    """Undo ``lay_out`` and ``initialize``, so that the process can take another layout."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
