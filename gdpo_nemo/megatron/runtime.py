"""Setup of a policy process: device and backend (CUDA and NCCL, or CPU and gloo), process groups, random seeds."""

from __future__ import annotations

import datetime
import os
import random
import socket
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gdpo_nemo.config.schema import MegatronConfig
from gdpo_nemo.megatron import cpu_shim
from gdpo_nemo.utils import gloo
from gdpo_nemo.utils.progress import hidden, import_transformers


@dataclass(frozen=True)
class Runtime:
    """Device and backend of this process."""

    device: torch.device
    backend: str


def prepare() -> Runtime:
    """Choose device and backend, and make megatron-core importable on this device.

    Call this function before you import megatron.core.
    """
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    import_transformers()
    # Megatron's timers import installed experiment trackers, to recognise the writer that is passed to them. These
    # imports take 1 s of CPU time, and this project passes no writer.
    with hidden("wandb", "torch.utils.tensorboard"):
        on_cpu = cpu_shim.install()  # must precede the import of Megatron
        import megatron.core.timers  # noqa: F401
    _use_group_step_adam()
    if on_cpu:
        gloo.share_device()
        return Runtime(torch.device("cpu"), "gloo")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank)
    return Runtime(torch.device("cuda", local_rank), "nccl")


def _use_group_step_adam() -> None:
    """Make Megatron use ``GroupStepAdam``, with the same state layout, if TransformerEngine and apex are missing."""
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.distrib_optimizer as distributed

    from gdpo_nemo.megatron.optimizer import GroupStepAdam

    # Two modules of Megatron copy Adam and these flags at import. The flags make Megatron read the step from the
    # parameter group.
    if optimizers.USING_PYTORCH_OPTIMIZER:
        optimizers.Adam = GroupStepAdam
        optimizers.USING_PYTORCH_OPTIMIZER = False
        distributed.Adam = GroupStepAdam
        distributed.HAVE_APEX_OR_TE = True
        distributed.USING_APEX_OPTIMIZER = True


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
        init_method: torch's rendezvous URL: ``file://path``, or ``tcp://host:port`` of rank 0.
        listener: socket that already listens at this host and port, for rank 0 with ``tcp``. torch takes ownership of
            the socket.
        timeout_s: time limit of the rendezvous and of each collective.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    rendezvous: dict[str, Any] = dict(init_method=init_method)
    if init_method.startswith("tcp://"):
        host, _, port = init_method.removeprefix("tcp://").rpartition(":")
        options: dict[str, Any] = dict(master_listen_fd=listener.detach()) if listener else {}
        rendezvous = dict(
            store=dist.TCPStore(host, int(port), world_size, rank == 0, timeout, wait_for_workers=False, **options)
        )
    dist.init_process_group(runtime.backend, rank=rank, world_size=world_size, timeout=timeout, **rendezvous)


def lay_out(layout: MegatronConfig, seed: int) -> None:
    """Create Megatron's process groups for ``layout`` and seed every random stream."""
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
    np.random.seed(seed % 2**32)  # NumPy accepts only 32 bits
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the state of every random stream that ``seed_everything`` seeds, and of CUDA's generator."""
    from megatron.core import tensor_parallel

    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "streams": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the random streams from a result of ``random_state``."""
    from megatron.core import tensor_parallel

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["streams"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def tear_down() -> None:
    """Destroy the process groups of ``lay_out`` and ``initialize``, so that the process can use another layout."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
