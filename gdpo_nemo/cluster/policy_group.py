"""The policy as the driver sees it: one object whose ranks are Ray actors."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Sequence

import numpy as np

from gdpo_nemo.cluster.network import stay_on
from gdpo_nemo.cluster.reservation import Placement, here
from gdpo_nemo.cluster.session import answered, cores, gather, one_has_ended, ray, thread_environment
from gdpo_nemo.config.algorithm_choice import has_score_head, has_value_head
from gdpo_nemo.config.objective_checks import kl_in_reward
from gdpo_nemo.config.objects import load_functions, load_object, place_of
from gdpo_nemo.config.prompt_sharing import prompt_sharing
from gdpo_nemo.config.schema import Config, MegatronConfig, PolicyConfig
from gdpo_nemo.data.packing import (
    TrainSequence,
    assign_singly,
    attention_cost,
    measure,
    with_gradient,
)
from gdpo_nemo.data.prefixes import Layout, choose_layout, pair_layout
from gdpo_nemo.data.results import UpdateResult
from gdpo_nemo.data.shares import SCORING, TRAINING, FlatValues, Share, by_sequence
from gdpo_nemo.phases import phase
from gdpo_nemo.startup import importing
from gdpo_nemo.waits import Patience

if TYPE_CHECKING:
    from gdpo_nemo.algorithms import LossSettings
    from gdpo_nemo.algorithms.preference_settings import PreferenceUpdate
    from gdpo_nemo.weights.transports.transport import Sender

_START_S = 900.0
_SHORTEST_DEADLINE_S = 300.0
"""Of what ranks compute, however fast they were: a busy machine or file system may hold them up."""
_COMPUTES = ("train", "logprobs", "teacher_logprobs")
"""Calls whose deadline is learnt. The others wait for disks, which may be fast for days and then full of other work."""


class PolicyRank:
    """One rank of the policy inside a Ray actor; every method is collective over all ranks."""

    def __init__(self, rank: int, world_size: int):
        self.rank = rank
        self.world_size = world_size
        self._listener: socket.socket | None = None
        self._senders: dict[str, Any] = {}
        """Of the run's transport, by place."""
        # Ray's CUDA_VISIBLE_DEVICES holds the actor's own GPU alone, so it is device 0 whatever the rank.
        os.environ["LOCAL_RANK"] = "0"

    def process_location(self) -> tuple[str, int]:
        """(host, process) of this rank."""
        return socket.gethostname(), os.getpid()

    def device(self) -> str:
        """Number of this rank's GPU on its node, as CUDA_VISIBLE_DEVICES takes it; empty on a CPU."""
        return ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def rendezvous(self) -> str:
        """Open a socket and return the torch URL at which the ranks meet."""
        host = ray.util.get_node_ip_address()
        # Kept open and handed to torch: another process could take a port that is only looked up.
        self._listener = socket.create_server((host, 0), backlog=self.world_size + 1)
        return f"tcp://{host}:{self._listener.getsockname()[1]}"

    def build(
        self,
        config: PolicyConfig,
        seed: int,
        folder: str,
        init_method: str,
        total_updates: int,
        reference: bool,
        scores: bool,
        value_lr_mult: float | None,
    ) -> int:
        """Join the process group and build the model; returns the number of parameters on this rank."""
        stay_on(ray.util.get_node_ip_address())
        # Not at the top: the driver imports this module, and Megatron may only be imported after ``prepare``.
        with importing():
            from gdpo_nemo.megatron import runtime

            chosen = runtime.prepare()
            import torch

            from gdpo_nemo.megatron.policy import Policy

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        runtime.initialize(chosen, self.rank, self.world_size, init_method, self._listener)
        runtime.lay_out(config.megatron_cfg, seed)
        self.policy = Policy(config, folder, chosen, total_updates, reference, seed, scores, value_lr_mult)
        with self.policy.optimizer_on_device():
            pass  # leaving the block offloads it, if configured: engines need the room before the first update
        return sum(p.numel() for chunk in self.policy.chunks for p in chunk.parameters())

    def data_parallel_rank(self) -> int:
        """Number of the share that this rank computes."""
        return self.policy.data_parallel_rank

    def train(self, share: Share, settings: LossSettings | PreferenceUpdate) -> UpdateResult | None:
        """One update; its result on rank 0, else None."""
        result = self.policy.train(share.sequences(), share.micro_batches, settings)
        return result if self.rank == 0 else None

    def logprobs(
        self, share: Share, reference: bool, temperature: float | None, entropies: bool, values: bool = False
    ) -> FlatValues | None:
        """This rank's part of the log-probs, entropies and values of the share's completion tokens, or None."""
        found = self.policy.logprobs(share.sequences(), share.micro_batches, reference, temperature, entropies, values)
        return None if found is None else share.flat(found, self.policy.layout.context_parallel_size == 1)

    def sync_reference(self, alpha: float) -> None:
        """Move the reference towards the policy."""
        self.policy.sync_reference(alpha)

    def load_teacher(self, folder: str) -> None:
        """Load a frozen model beside the policy, in the same layout."""
        self.policy.load_teacher(folder)

    def teacher_logprobs(self, share: Share, temperature: float | None) -> FlatValues | None:
        """As ``logprobs``, under the teacher's weights."""
        with self.policy.teacher_in_place():
            return self.logprobs(share, False, temperature, False)

    def run_sender(self, place: str, method: str, *arguments: Any) -> Any:
        """Call a method of the transport's sender at ``place``, which is made at its first call and kept."""
        if place not in self._senders:
            host = ray.util.get_node_ip_address()
            self._senders[place] = load_object(place)(self.policy, self.rank, host)
        return getattr(self._senders[place], method)(*arguments)

    def release(self) -> None:
        """Give back the GPU memory that nothing needs before the next update, for the engine that shares the device."""
        self.policy.release()

    def begin_save(self, folder: str, background: bool) -> None:
        """Start this rank's part of a checkpoint."""
        from gdpo_nemo.megatron.checkpoint import Save

        self._save = Save(self.policy, folder, background)

    def save_is_written(self) -> bool:
        """Whether this rank's files are on disk."""
        return self._save.is_written

    def finish_save(self) -> None:
        """Complete the checkpoint of ``begin_save`` and check it."""
        self._save.finish()
        del self._save

    def load_checkpoint(self, folder: str, weights_only: bool) -> None:
        """Read this rank's part of a checkpoint of any layout."""
        from gdpo_nemo.megatron.checkpoint import load_checkpoint, load_weights

        (load_weights if weights_only else load_checkpoint)(self.policy, folder)

    def load_adapter(self, folder: str) -> None:
        """Start LoRA's matrices as those of a PEFT adapter of this model."""
        from gdpo_nemo.config.peft_config import read_peft_adapter
        from gdpo_nemo.formats.peft_merge import read_pairs

        key = "policy.model_name"
        self.policy.start_adapters(read_pairs(read_peft_adapter(Path(folder), key), self.policy.folder, key))

    def next_learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.policy.next_learning_rate()

    def export_adapter(self, folder: str) -> None:
        """Write LoRA's matrices as a folder of PEFT (rank 0)."""
        from gdpo_nemo.weights.adapters import write_adapter

        matrices = dict(self.policy.update())
        if self.rank == 0 and self.policy.adapters is not None:
            write_adapter(folder, matrices, self.policy.adapters)

    def save_megatron(self, folder: str) -> None:
        """Write the weights as a checkpoint of Megatron-core's GPTModel."""
        from gdpo_nemo.formats.megatron_writer import save_megatron

        save_megatron(self.policy, folder)

    def export(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder (rank 0), and LoRA's adapter as ``adapter`` next to it."""
        from gdpo_nemo.megatron.hf_files import write_model
        from gdpo_nemo.megatron.reward_head import write_classifier
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


def layout_ranks(layout: MegatronConfig) -> int:
    """Ranks of a layout whose data_parallel_size is resolved."""
    return (
        layout.tensor_model_parallel_size
        * layout.pipeline_model_parallel_size
        * layout.context_parallel_size
        * (layout.data_parallel_size or 1)
    )


class PolicyGroup:
    """All ranks of the policy. Constructing it starts the actors; ``ready`` waits until each has built the model.

    Building starts at once, unless engines share the devices: vLLM measures free memory at its start and has to come
    first.

    Args:
        reference: keep the starting weights for ``logprobs(reference=True)``; None: where a KL in loss or reward asks.
    """

    def __init__(
        self,
        config: Config,
        folder: str,
        total_updates: int,
        placement: Placement | None = None,
        reference: bool | None = None,
    ):
        placement = placement or here(config)
        nodes = placement.places.policy
        self.config = config.policy
        self.layout = config.policy.megatron_cfg
        self.shared = placement.places.shared
        """For every engine the ranks whose devices its processes share (see ``Places``)."""
        self.timeout_s = config.rollout.train_timeout_s
        self._patience = {method: Patience(self.timeout_s, _SHORTEST_DEADLINE_S) for method in _COMPUTES}
        self._sharing = prompt_sharing(config)
        self._quadratic = attention_cost(json.loads((Path(folder) / "config.json").read_text()))
        world = layout_ranks(self.layout)
        on_gpu = config.cluster.gpus_per_node > 0
        # By the fullest node for all ranks: they run in lockstep, so more threads elsewhere would gain nothing.
        crowd = max(placement.places.policy_on(node) for node in nodes)
        threads = config.policy.num_threads or max(1, cores(config.cluster) // crowd)
        environment = thread_environment(threads)
        if not on_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        options = dict(num_cpus=0, num_gpus=1 if on_gpu else 0, runtime_env={"env_vars": environment})
        actor = ray.remote(PolicyRank)
        self.ranks = [
            actor.options(**options, **placement.on(node)).remote(rank, world) for rank, node in enumerate(nodes)
        ]
        self._locations = {rank: actor.process_location.remote() for rank, actor in enumerate(self.ranks)}
        self._devices = [rank.device.remote() for rank in self.ranks]
        if reference is None:
            reference = config.loss_fn.reference_policy_kl_penalty > 0 or kl_in_reward(config)
        heads = has_score_head(config), config.ppo.head_lr_mult if has_value_head(config) else None
        self._model = (config.policy, config.run.seed, folder), (total_updates, reference, *heads)
        self._building: list[Any] = []
        self._data_ranks: list[int] = []
        """Of every rank its data-parallel rank, once it has been asked."""
        if not placement.places.shared:
            self._build()

    def _build(self) -> None:
        what, how = self._model
        meeting = self.ranks[0].rendezvous.remote()
        self._building = [rank.build.remote(*what, meeting, *how) for rank in self.ranks]

    def ready(self) -> list[int]:
        """Wait for the models; returns the parameters on each rank."""
        if not self._building:
            self._build()
        with phase("policy"):
            return gather(self._building, "building the policy", _START_S, "policy")

    def devices(self) -> list[str]:
        """The GPU of every rank on its node; empty strings on CPUs."""
        return gather(self._devices, "placing the policy", _START_S, "policy")

    def release(self) -> None:
        """Give back what no rank needs before the next update."""
        self._call("release", what="releasing memory")

    def process_locations(self) -> dict[int, tuple[str, int]]:
        """(host, process) of every rank that has started, by its number."""
        return answered(self._locations)

    def _call(self, method: str, *arguments: Any, what: str) -> list[Any]:
        refs = [getattr(rank, method).remote(*arguments) for rank in self.ranks]
        return gather(refs, what, self.timeout_s, "policy")

    def _call_with_shares(
        self,
        method: str,
        sequences: Sequence[TrainSequence],
        layout: Layout,
        fields: Sequence[str],
        *arguments: Any,
        what: str,
    ) -> list[Any]:
        """Call a method of all ranks with the share of each, which goes into the object store once and is read by no
        other than the tensor-, pipeline- and context-parallel peers that share it."""
        if not self._data_ranks:
            self._data_ranks = self._call("data_parallel_rank", what="asking for the layout")
        shares = [
            ray.put(Share.of(sequences, micro_batches, fields, layout.shared)) for micro_batches in layout.assignment
        ]
        refs = [
            getattr(rank, method).remote(shares[place], *arguments)
            for rank, place in zip(self.ranks, self._data_ranks, strict=True)
        ]
        patience = self._patience[method]
        start = time.monotonic()
        found = gather(refs, what, patience.limit_s, "policy")
        patience.took(time.monotonic() - start)
        return found

    @property
    def _multiple(self) -> int:
        """What each sequence is padded to: Megatron gives every context-parallel rank two chunks, one from each end, so
        that causal attention costs them the same."""
        context = self.layout.context_parallel_size
        return 2 * context if context > 1 else 1

    @property
    def _chunks(self) -> int:
        """What the number of micro-batches must divide by: the pipeline stages, if Megatron interleaves them."""
        return self.layout.pipeline_model_parallel_size if self.layout.virtual_pipeline_model_parallel_size else 1

    def _lay_out(self, sequences: Sequence[TrainSequence], together: bool = False) -> Layout:
        """Spread the sequences; ``together``: with both of a pair in one micro-batch."""
        # Each sequence may be padded to the layout's multiple; leave room for that in the budget.
        multiple = self._multiple
        longest = max(-(-len(s) // multiple) * multiple for s in sequences)
        choose = pair_layout if together else choose_layout
        return choose(
            self._sharing,
            sequences,
            self.layout.data_parallel_size or 1,
            max(self.config.micro_batch_tokens, longest),  # the longest sequence has to fit into a micro-batch
            self._chunks,
            self._quadratic,
            multiple,
        )

    def _skips(self, settings: LossSettings | PreferenceUpdate) -> bool:
        """Whether sequences without a gradient are left out. An algorithm may train with a loss of its own making,
        which no check of the config has seen."""
        return self.config.skip_zero_advantage and not settings.why_all_sequences(
            load_functions("loss_fn", settings.places)
        )

    def train(self, sequences: list[TrainSequence], settings: LossSettings | PreferenceUpdate) -> UpdateResult:
        """Run one optimizer update."""
        skips = self._skips(settings)
        whole = len(sequences)
        if skips:
            sequences = with_gradient(sequences)
        found = self._lay_out(sequences, together=any(s.pair for s in sequences))
        result: UpdateResult = self._call_with_shares("train", sequences, found, TRAINING, settings, what="training")[0]
        layout = self.layout
        lengths = [len(s) for s in sequences]
        total = layout.context_parallel_size * layout.tensor_model_parallel_size if layout.sequence_parallel else 1
        result.sequences = whole
        result.skipped_sequences = whole - len(sequences) if skips else None
        result.packing = measure(found.assignment, lengths, self._multiple, total, self._quadratic, found.shared)
        return result

    def logprobs(
        self,
        sequences: list[TrainSequence],
        reference: bool = False,
        temperature: float | None = None,
        packed: bool = True,
        teacher: bool = False,
    ) -> list[np.ndarray]:
        """float32 [completion tokens] for each sequence, under the current (or reference) weights, or the teacher's;
        NaN under its mask.

        ``temperature`` replaces the sampling temperature; without ``packed`` each sequence is a micro-batch of its own.
        """
        if teacher:
            return self._scores("teacher_logprobs", sequences, packed, temperature)
        return self._scores("logprobs", sequences, packed, reference, temperature, False)

    def logprobs_and_entropies(self, sequences: list[TrainSequence]) -> list[np.ndarray]:
        """float32 [completion tokens, 2] for each sequence under the current weights, from one pass: the token's
        log-prob, and the entropy in nats of the distribution that it was drawn from; NaN under its mask."""
        return self._scores("logprobs", sequences, True, False, None, True)

    def logprobs_and_values(self, sequences: list[TrainSequence], entropies: bool = False) -> list[np.ndarray]:
        """float32 [completion tokens, 2] for each sequence under the current weights, from one pass: the token's
        log-prob, and what the value head says of the state before it; with ``entropies`` [completion tokens, 3], as of
        ``logprobs_and_entropies`` and the value. NaN under its mask."""
        return self._scores("logprobs", sequences, True, False, None, entropies, True)

    def _scores(
        self, method: str, sequences: list[TrainSequence], packed: bool, *arguments: bool | float | None
    ) -> list[np.ndarray]:
        """What a method of the ranks finds for the completion tokens of each sequence."""
        data = self.layout.data_parallel_size or 1
        alone = Layout(assign_singly(len(sequences), data, self._chunks), [0] * len(sequences))
        layout = self._lay_out(sequences) if packed else alone
        found = self._call_with_shares(method, sequences, layout, SCORING, *arguments, what="evaluating log-probs")
        return by_sequence(sequences, layout.assignment, list(zip(self._data_ranks, found, strict=True)))

    def sync_reference(self, alpha: float) -> None:
        """Let the reference be ``alpha`` of the policy's weights and 1 - ``alpha`` of its own."""
        self._call("sync_reference", alpha, what="moving the reference")

    @property
    def engine_processes(self) -> int:
        """Processes of one engine."""
        return self.config.generation.vllm_cfg.tensor_parallel_size

    def start_sender(
        self,
        sender: type[Sender],
        method: str,
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        num_returns: int = 1,
    ) -> list[Any]:
        """Call a method of a transport's sender on ``ranks`` (None: all), where it is made if it is not there yet.

        Returns:
            A reference to the result of each; ``num_returns`` above 1: a list of as many.
        """
        place = place_of(sender)
        chosen = self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]
        return [rank.run_sender.options(num_returns=num_returns).remote(place, method, *arguments) for rank in chosen]

    def wait(self, refs: Sequence[Any], what: str) -> list[Any]:
        """Results of ``start_sender``. Raises RunError where a rank fails, dies or is late."""
        return gather(refs, what, self.timeout_s, "policy")

    def begin_save(self, folder: Path, background: bool = False) -> None:
        """Start a checkpoint; with ``background`` it returns once the ranks hold a copy of their state."""
        self._call("begin_save", str(folder), background, what=f"writing {folder}")

    def save_is_written(self) -> bool:
        """Whether all files of the checkpoint of ``begin_save`` are on disk."""
        return all(self._call("save_is_written", what="polling a checkpoint"))

    def finish_save(self) -> None:
        """Wait for the checkpoint of ``begin_save``, complete it and check it."""
        self._call("finish_save", what="completing a checkpoint")

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        self.begin_save(folder)
        self.finish_save()

    def load_checkpoint(self, folder: Path, weights_only: bool = False) -> None:
        """Read a checkpoint; ``weights_only`` leaves optimizer, schedule and random state as they are."""
        with phase("checkpoint"):
            self._call("load_checkpoint", str(folder), weights_only, what=f"reading {folder}")

    def load_adapter(self, folder: Path) -> None:
        """Start LoRA's matrices as those of a PEFT adapter of this model."""
        self._call("load_adapter", str(folder), what=f"reading {folder}")

    def load_teacher(self, folder: Path) -> None:
        """Load the Hugging Face model in ``folder`` beside the policy, for ``logprobs(teacher=True)``."""
        with phase("teacher"):
            self._call("load_teacher", str(folder), what=f"reading {folder}")

    def next_learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self._call("next_learning_rate", what="asking for the learning rate")[0]

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        with phase("export"):
            self._call("export", str(folder), what=f"exporting {folder}")

    def export_adapter(self, folder: Path) -> None:
        """Write LoRA's matrices as a folder of PEFT."""
        self._call("export_adapter", str(folder), what=f"exporting {folder}")

    def save_megatron(self, folder: Path) -> None:
        """Write a checkpoint of Megatron-core's GPTModel."""
        self._call("save_megatron", str(folder), what=f"writing {folder}")

    def has_lost_ranks(self, patience_s: float) -> bool:
        """Whether a rank's process has ended, or is known to within that time."""
        return one_has_ended([rank.process_location.remote() for rank in self.ranks], patience_s)

    def close(self) -> None:
        """End the rank processes."""
        for rank in self.ranks:
            ray.kill(rank)
