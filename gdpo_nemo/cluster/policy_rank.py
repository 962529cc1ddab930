"""Ray actors for one rank of the policy, and for calls to the ranks of a node.

The driver side is in ``policy_group``.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from gdpo_nemo.cluster.local_ray import stay_on
from gdpo_nemo.cluster.session import answer, ray, sendable
from gdpo_nemo.config.schema import PolicyConfig
from gdpo_nemo.data.records import GradientProducts, UpdateResult
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


class PolicyRank:
    """One rank of the policy in a Ray actor. Methods that use the model are collective over all ranks."""

    def __init__(self, rank: int, world_size: int):
        self.rank = rank
        self.world_size = world_size
        self._listener: socket.socket | None = None
        self._senders: dict[str, Any] = {}
        """Senders of the run's transport, by import path of their class."""
        # Ray sets CUDA_VISIBLE_DEVICES to the actor's GPU, so this GPU is device 0 on every rank.
        os.environ["LOCAL_RANK"] = "0"

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
        return sum(p.numel() for chunk in self.policy.chunks for p in chunk.parameters())

    def call_with_share(self, method: str, shares: Sequence[Share], number: int, options: Mapping[str, Any]) -> Any:
        """Call a method of this rank with one of the shares of its node. See ``RankCaller``."""
        return getattr(self, method)(shares[number], **options)

    def data_parallel_rank(self) -> int:
        """Return the data-parallel rank, which is the index of the share that this rank processes."""
        return self.policy.data_parallel_rank

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
            self._gradients = ComponentGradients(self.policy)
        self._gradients.add(share.sequences(), share.micro_batches, terms)

    def gradient_products(self) -> GradientProducts:
        """Return the products of the stored gradients after an update, and free the gradients."""
        found = self._gradients.products()
        del self._gradients
        return found

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

    def sync_reference(self, alpha: float) -> None:
        """Move the reference towards the policy (see ``Reference.follow``)."""
        self.policy.sync_reference(alpha)

    def load_teacher(self, folder: str) -> None:
        """Load the Hugging Face model in ``folder`` as a frozen teacher in the policy's layout."""
        self.policy.load_teacher(folder)

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

    def release(self) -> None:
        """Release GPU memory that is not needed until the next update, so that an engine on the same GPU can use it."""
        self.policy.release()

    def begin_save(self, folder: str, background: bool) -> None:
        """Start writing this rank's part of a checkpoint (see ``megatron.checkpoint.Save``)."""
        from gdpo_nemo.megatron.checkpoint import Save

        self._save = Save(self.policy, folder, background)

    def save_is_written(self) -> bool:
        """Return whether this rank's files are on disk."""
        return self._save.is_written

    def finish_save(self) -> None:
        """Complete and verify the checkpoint from ``begin_save``."""
        self._save.finish()
        del self._save

    def load_checkpoint(self, folder: str, weights_only: bool) -> None:
        """Load this rank's part of a checkpoint of any layout, or only its weights with ``weights_only``."""
        from gdpo_nemo.megatron.checkpoint import load_checkpoint, load_weights

        (load_weights if weights_only else load_checkpoint)(self.policy, folder)

    def load_adapter(self, folder: str) -> None:
        """Initialise the LoRA matrices from a PEFT adapter of this model."""
        from gdpo_nemo.models.peft import read_peft_adapter
        from gdpo_nemo.weights.adapters import read_pairs

        key = "policy.model_name"
        self.policy.start_adapters(read_pairs(read_peft_adapter(Path(folder), key), self.policy.folder, key))

    def next_learning_rate(self) -> float:
        """Return the learning rate of the next update."""
        return self.policy.next_learning_rate()

    def export_adapter(self, folder: str) -> None:
        """Write the LoRA matrices to a PEFT folder, on rank 0."""
        from gdpo_nemo.weights.adapters import write_adapter

        matrices = dict(self.policy.update())
        if self.rank == 0 and self.policy.adapters is not None:
            write_adapter(folder, matrices, self.policy.adapters)

    def save_megatron(self, folder: str) -> None:
        """Write the weights as a checkpoint of Megatron-core's GPTModel (see ``megatron.gpt_checkpoint``)."""
        from gdpo_nemo.megatron.gpt_checkpoint import save_megatron

        save_megatron(self.policy, folder)

    def export(self, folder: str) -> None:
        """Write the weights to a Hugging Face folder, on rank 0.

        Under LoRA, the adapters are merged into these weights, and also written to the PEFT folder ``adapter`` next to
        ``folder``.
        """
        from gdpo_nemo.megatron.classifier import write_classifier
        from gdpo_nemo.models.hf_folder import write_model
        from gdpo_nemo.weights.adapters import write_adapter

        if self.policy.adapters:
            matrices = dict(self.policy.update())
            if self.rank == 0:
                write_adapter(Path(folder).parent / "adapter", matrices, self.policy.adapters)
        if self.rank == 0:
            write = write_classifier if self.policy.scores else write_model
            write(folder, self.policy.weights(), self.policy.built.hf_config, self.policy.folder)
        else:
            for _ in self.policy.weights():
                pass


class RankCaller:
    """Ray actor on a node with policy ranks, which passes calls of the driver to these ranks.

    The driver needs one call per node, and stores all shares of a node in one object.

    Args:
        ranks: actors of the node's ranks.
    """

    def __init__(self, ranks: Sequence[Any]):
        self._ranks = ranks

    async def call_with_shares(
        self, method: str, shares: Sequence[Any], numbers: Sequence[int], what: str, options: Mapping[str, Any]
    ) -> list[Any]:
        """Call a method of all ranks. Return the results by rank of the node. The first failure is raised at once.

        Args:
            shares: list with a reference to the shares of the node.
            numbers: for each rank, the index of its share.
            what: description of the call, for messages.
            options: additional arguments of the method.
        """
        refs = [
            rank.call_with_share.remote(method, shares[0], number, options)
            for rank, number in zip(self._ranks, numbers, strict=True)
        ]
        try:
            return await asyncio.gather(*(answer(ref, what, math.inf) for ref in refs))
        except Exception as error:
            raise sendable(error, what) from None
