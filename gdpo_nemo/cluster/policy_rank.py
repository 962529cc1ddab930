"""Ray actors for one rank of the policy, and for calls to the ranks of a node.

The driver side is in ``policy_group``.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.cluster.local_ray import stay_on
from gdpo_nemo.cluster.policy_operations import Operation, PolicyOperations
from gdpo_nemo.cluster.session import answer, ray, sendable
from gdpo_nemo.config.schema import PolicyConfig
from gdpo_nemo.data.records import UpdateResult
from gdpo_nemo.data.shares import FlatValues, Share
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.utils.progress import importing

if TYPE_CHECKING:
    from gdpo_nemo.algorithms.loss_selection import Objective


@dataclass(frozen=True)
class Columns:
    """Values to compute for each token in addition to its log-prob, in a forward pass without training."""

    entropies: bool = False
    """True to compute the entropy, in nats, of the distribution from which the token was sampled."""
    values: bool = False
    """True to compute the value head's estimate for the state before each token."""


LOGPROBS = Columns()
"""Only log-probs."""


class PolicyRank(PolicyOperations):
    """One rank of the policy in a Ray actor. Methods that use the model are collective over all ranks."""

    def __init__(self, rank: int, world_size: int):
        self.rank = rank
        self.world_size = world_size
        self._listener: socket.socket | None = None
        self._senders: dict[str, Any] = {}
        """Senders of the run's transport, by import path of their class."""
        # Ray sets CUDA_VISIBLE_DEVICES to the actor's GPU, so this GPU is device 0 on every rank.
        os.environ["LOCAL_RANK"] = "0"

    def run_operation(self, operation: Operation, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Run an operation on this rank."""
        return operation.method(self, *arguments, **options)

    def process_location(self) -> tuple[str, int]:
        """Return (host name, process id) of this rank."""
        return socket.gethostname(), os.getpid()

    def device(self) -> str:
        """Return this rank's GPU in the format of CUDA_VISIBLE_DEVICES, or an empty string on a CPU."""
        return ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def rendezvous(self) -> str:
        """Open a socket for torch's rendezvous and return its URL. Only rank 0 calls this method."""
        host = ray.util.get_node_ip_address()
        # Keep the socket open and pass it to torch. If the socket were closed, another process could take its port.
        self._listener = socket.create_server((host, 0), backlog=self.world_size + 1)
        return f"tcp://{host}:{self._listener.getsockname()[1]}"

    def build(
        self,
        config: PolicyConfig,
        seed: int,
        folder: str,
        init_method: str,
        *,
        total_updates: int,
        reference: bool,
        scores: bool,
        value_lr_mult: float | None,
    ) -> int:
        """Join the process group and load the model. Return the number of parameters on this rank.

        Args:
            folder: Hugging Face folder with the starting weights.
            init_method: torch's rendezvous URL, from ``rendezvous`` on rank 0.

        The other arguments are those of ``megatron.policy.Policy``.
        """
        stay_on(ray.util.get_node_ip_address())
        # Import here, because the driver imports this module, and Megatron must be imported after ``prepare``.
        with importing():
            from gdpo_nemo.megatron import runtime

            chosen = runtime.prepare()
            import torch

            from gdpo_nemo.megatron.policy import Policy

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        runtime.initialize(chosen, self.rank, self.world_size, init_method, self._listener)
        runtime.lay_out(config.megatron_cfg, seed)
        self.policy = Policy(
            config,
            folder,
            chosen,
            total_updates,
            keep_reference=reference,
            seed=seed,
            scores=scores,
            value_lr_mult=value_lr_mult,
        )
        with self.policy.optimizer_on_device():
            pass  # offload the optimizer, if configured, because engines need the memory
        count = 0
        for chunk in self.policy.chunks:
            count += sum(p.numel() for p in chunk.parameters())
        return count

    def call_with_share(
        self,
        method: str,
        shares: Sequence[Share],
        number: int,
        options: Mapping[str, Any],
        image_data: np.ndarray | None = None,
    ) -> Any:
        """Call a method of this rank with one of several shares, and with the data of the share's images if it needs
        them. See ``RankCaller``."""
        return getattr(self, method)(shares[number].with_image_data(image_data), **options)

    def position(self) -> tuple[int, bool]:
        """Return the data-parallel rank, which is the index of this rank's share, and whether it needs image data."""
        return self.policy.data_parallel_rank, self.policy.is_first_stage

    def train(self, share: Share, settings: Objective) -> UpdateResult | None:
        """Run an update. Return the result on rank 0 and None on other ranks."""
        result = self.policy.train(share.sequences(), share.micro_batches, settings)
        return result if self.rank == 0 else None

    def component_gradients(self, share: Share, terms: list[Objective], first: bool) -> None:
        """Compute the gradients of ``terms`` and store them until ``gradient_products``.

        Args:
            first: False to add the gradients to the stored gradients.
        """
        from gdpo_nemo.megatron.component_gradients import ComponentGradients

        if first:
            self.gradients = ComponentGradients(self.policy)
        self.gradients.add(share.sequences(), share.micro_batches, terms)

    def logprobs(
        self, share: Share, columns: Columns, reference: bool = False, temperature: float | None = None
    ) -> FlatValues | None:
        """Return this rank's log-probs, and the values of ``columns``, for completion tokens of the share.

        The result is None on ranks that do not return results (``Policy.reports``). The other arguments are those of
        ``Policy.logprobs``.
        """
        values = self.policy.logprobs(
            share.sequences(),
            share.micro_batches,
            reference=reference,
            temperature=temperature,
            entropies=columns.entropies,
            values=columns.values,
        )
        return None if values is None else share.flat(values, complete=self.policy.layout.context_parallel_size == 1)

    def teacher_logprobs(self, share: Share, columns: Columns, temperature: float | None = None) -> FlatValues | None:
        """Return the result of ``logprobs`` with the teacher's weights."""
        with self.policy.using_teacher():
            return self.logprobs(share, columns, temperature=temperature)

    def run_sender(self, import_path: str, method: str, *arguments: Any) -> Any:
        """Call a method of a transport's sender. The first call creates the sender.

        Args:
            import_path: import path of the sender's class.
        """
        if import_path not in self._senders:
            host = ray.util.get_node_ip_address()
            self._senders[import_path] = ImportPath(import_path).load()(self.policy, self.rank, host)
        return getattr(self._senders[import_path], method)(*arguments)


class RankCaller:
    """Ray actor on a node with policy ranks, which passes calls of the driver to these ranks.

    The driver needs one call per node, and stores all shares of a node in one object.

    Args:
        ranks: actors of the node's ranks.
    """

    def __init__(self, ranks: Sequence[Any]):
        self._ranks = ranks

    async def call_with_shares(
        self,
        method: str,
        shares: Sequence[Any],
        numbers: Sequence[int],
        what: str,
        options: Mapping[str, Any],
        image_data: Sequence[Any],
    ) -> list[Any]:
        """Call a method of all ranks. Return the results by rank of the node. The first failure is raised at once.

        Args:
            shares: list with a reference to the shares of the node.
            numbers: for each rank, the index of its share.
            what: description of the call, for messages.
            options: additional arguments of the method.
            image_data: for each rank, a reference to the encoded images of its share, or None.
        """
        refs = []
        for rank, number, data in zip(self._ranks, numbers, image_data, strict=True):
            refs.append(rank.call_with_share.remote(method, shares[0], number, options, data))
        try:
            return await asyncio.gather(*(answer(ref, what, math.inf) for ref in refs))
        except Exception as error:
            raise sendable(error, what) from None
