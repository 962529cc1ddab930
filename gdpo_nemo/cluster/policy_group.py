"""Driver side of the policy, whose ranks are Ray actors."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.algorithms.loss_selection import loss_import_paths, reads_whole_sequences, why_all_sequences
from gdpo_nemo.cluster.fork_server import RANK, thread_environment
from gdpo_nemo.cluster.policy_operations import Operation, PolicyOperations
from gdpo_nemo.cluster.policy_rank import LOGPROBS, Columns, PolicyRank, RankCaller
from gdpo_nemo.cluster.reservation import Placement, place_on_this_machine
from gdpo_nemo.cluster.session import answered, cores, gather, one_has_ended, ray
from gdpo_nemo.cluster.worker_launcher import PRELOADED
from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.layout import has_flex_attention, prompt_sharing
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.config.objective_checks import reference_passes
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import (
    Budget,
    TrainSequence,
    assign_singly,
    attention_cost,
    has_split_trajectory,
    measure,
    with_gradient,
)
from gdpo_nemo.data.prefixes import (
    NO_SAVING,
    Layout,
    choose_layout,
    shared_attention_cost,
    typical_saving,
    whole_layout,
)
from gdpo_nemo.data.records import UpdateResult
from gdpo_nemo.data.shares import SCORING, TRAINING, Share, by_sequence
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.utils.import_path import load_functions
from gdpo_nemo.utils.progress import phase
from gdpo_nemo.utils.waits import Patience

if TYPE_CHECKING:
    from gdpo_nemo.algorithms.loss_selection import Objective
    from gdpo_nemo.weights.transports.base import Sender

_START_S = 900.0
"""Time limit for the ranks to start and to load the model."""
_SHORTEST_DEADLINE_S = 300.0
"""Minimum of an adaptive timeout in seconds. A busy machine or file system may delay ranks that were fast before."""
_MANY_RANKS = 8
"""Number of ranks above which the driver calls the ranks of a node together."""
_COMPUTES = ("train", "component_gradients", "logprobs", "teacher_logprobs")
"""Methods with an adaptive timeout. Other methods wait for disks, which may be fast for days and then become busy."""


def gpu_environment(config: Config) -> dict[str, str]:
    """Return environment variables for policy ranks on GPUs, without those that the user's environment sets."""
    layout = config.policy.megatron_cfg
    variables = {
        # The default folder is in TMPDIR, which is removed with the run. Each start would compile again.
        "TORCHINDUCTOR_CACHE_DIR": os.path.expanduser("~/.cache/gdpo_nemo/inductor"),
        # By default, each rank starts up to 32 compiler processes.
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }
    if max(layout.tensor_model_parallel_size, layout.context_parallel_size) > 1:
        # Megatron overlaps communication with matrix products, and relies on kernels that start in launch order
        # (megatron/core/tensor_parallel/layers.py).
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if config.cluster.placement == "separate" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # The lengths of micro-batches vary, which fragments torch's memory. Colocated ranks send weights by CUDA IPC,
        # which not every driver supports for expandable segments.
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return {name: value for name, value in variables.items() if name not in os.environ}


class PolicyGroup(PolicyOperations):
    """All ranks of the policy. The constructor starts the actors, and ``ready`` waits until they have loaded the model.

    Loading starts at once if the engines have separate devices. If they share the policy's devices, loading starts in
    ``ready``: vLLM measures the free memory when it starts, so it must start first.

    Args:
        folder: Hugging Face folder with the starting weights.
        total_updates: total number of updates of the run, after which the learning-rate decay ends by default.
        placement: placement of the ranks. None places all ranks on this machine.
        reference: True to keep the starting weights for ``logprobs(reference=True)``. None keeps these weights if the
            loss or the reward contains a KL term.
    """

    callers: Sequence[tuple[Any, Sequence[int]]] = ()
    """(``RankCaller``, ranks) of each node if there are many ranks."""

    def __init__(
        self,
        config: Config,
        folder: str,
        total_updates: int,
        placement: Placement | None = None,
        reference: bool | None = None,
    ):
        placement = placement or place_on_this_machine(config)
        nodes = placement.places.policy
        self.layout = config.policy.megatron_cfg
        self.shared = placement.places.shared
        """For each engine, the ranks whose devices its processes share (see ``Places``)."""
        self.timeout_s = config.rollout.train_timeout_s
        self._patience = {method: Patience(self.timeout_s, _SHORTEST_DEADLINE_S) for method in _COMPUTES}
        self._quadratic = attention_cost(describe(json.loads((Path(folder) / "config.json").read_text())))
        self._choose_sharing(config)
        on_gpu = config.cluster.gpus_per_node > 0
        # All ranks get the number of threads that suits the node with the most ranks. The ranks run in lockstep, so
        # more threads on other nodes would not help.
        ranks_per_node = max(placement.places.policy_on(node) for node in nodes)
        threads = config.policy.num_threads or max(1, cores(config.cluster) // ranks_per_node)
        environment = thread_environment(threads)
        environment |= gpu_environment(config) if on_gpu else {"CUDA_VISIBLE_DEVICES": "", PRELOADED: RANK}
        options = dict(num_cpus=0, num_gpus=1 if on_gpu else 0, runtime_env={"env_vars": environment})
        actor = ray.remote(PolicyRank)
        self.ranks = []
        for rank, node in enumerate(nodes):
            self.ranks.append(actor.options(**options, **placement.on(node)).remote(rank, len(nodes)))
        if len(nodes) > _MANY_RANKS:
            self.callers = self._start_callers(placement)
        self._locations = {rank: actor.process_location.remote() for rank, actor in enumerate(self.ranks)}
        self._devices = [rank.device.remote() for rank in self.ranks]
        if reference is None:
            reference = reference_passes(config) > 0
        head = spec_of(config).head
        self._seed = config.run.seed
        self._folder = folder
        self._build_options: dict[str, Any] = dict(
            total_updates=total_updates,
            reference=reference,
            scores=head == "score",
            value_lr_mult=config.ppo.head_lr_mult if head == "value" else None,
        )
        self._building: list[Any] = []
        self._data_ranks: list[int] = []
        """Data-parallel rank of each rank. The list is empty until the first call that needs it."""
        self._decodes: list[bool] = []
        """For each rank, True if it is on the first pipeline stage, which needs the data of images."""
        if not placement.places.shared:
            self._build()

    def _start_callers(self, placement: Placement) -> list[tuple[Any, list[int]]]:
        nodes: dict[int, list[int]] = {}
        for rank, node in enumerate(placement.places.policy):
            nodes.setdefault(node, []).append(rank)
        actor = ray.remote(RankCaller)
        options = dict(num_cpus=0, runtime_env={"env_vars": {**thread_environment(1), "CUDA_VISIBLE_DEVICES": ""}})
        callers = []
        for node, ranks in nodes.items():
            members = [self.ranks[rank] for rank in ranks]
            callers.append((actor.options(**options, **placement.on(node)).remote(members), ranks))
        return callers

    def _choose_sharing(self, config: Config) -> None:
        """Determine whether updates may share prompts.

        With ``auto`` on GPUs, the decision is made before the layers are built, because only layers without shared
        prompts use TransformerEngine's rotary kernel.
        """
        self._sharing = prompt_sharing(config)
        self._shared_attention = shared_attention_cost(config)
        if self._sharing is None and has_flex_attention(config):
            saving = typical_saving(resolve(config), self._quadratic)
            self._sharing = False if saving == NO_SAVING else None
        self.config = replace(config.policy, share_prompts=self._sharing is not False)

    def _build(self) -> None:
        url = self.ranks[0].rendezvous.remote()
        self._building = []
        for rank in self.ranks:
            self._building.append(rank.build.remote(self.config, self._seed, self._folder, url, **self._build_options))

    def ready(self) -> list[int]:
        """Wait until all ranks have loaded the model. Return the number of parameters on each rank."""
        if not self._building:
            self._build()
        with phase("policy"):
            return gather(self._building, "building the policy", _START_S, "policy")

    def devices(self) -> list[str]:
        """Return the GPU of each rank in the format of CUDA_VISIBLE_DEVICES, or empty strings on CPUs."""
        return gather(self._devices, "placing the policy", _START_S, "policy")

    def process_locations(self) -> dict[int, tuple[str, int]]:
        """Return (host name, process id) of every rank that has started, by rank."""
        return answered(self._locations)

    def run_operation(self, operation: Operation, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Run an operation on all ranks, and combine their results."""
        what = operation.description(arguments, options)
        with phase(operation.phase) if operation.phase else contextlib.nullcontext():
            refs = [getattr(rank, operation.method.__name__).remote(*arguments, **options) for rank in self.ranks]
            return operation.combine(gather(refs, what, self.timeout_s, "policy"))

    def _call_with_shares(
        self,
        method: str,
        sequences: Sequence[TrainSequence],
        layout: Layout,
        fields: Sequence[str],
        what: str,
        **arguments: Any,
    ) -> list[Any]:
        """Call a method on all ranks, each with its share of the sequences. Return the results by rank.

        Each share is stored once in Ray's object store, and all ranks with the same data-parallel rank read it. With
        many ranks, the shares of a node are stored together. The data of images are separate objects, which only the
        ranks of the first pipeline stage read.

        Args:
            layout: assignment of the sequences to data-parallel ranks and micro-batches.
            fields: fields of the sequences that the method needs.
            what: description of the call, for messages.
            arguments: additional arguments of the method.
        """
        if not self._data_ranks:
            refs = [rank.position.remote() for rank in self.ranks]
            positions = gather(refs, "querying the layout", self.timeout_s, "policy")
            self._data_ranks, self._decodes = map(list, zip(*positions))
        shares = [Share.of(sequences, micro_batches, fields, layout.shared) for micro_batches in layout.assignment]
        images = [None if share.image_data is None else ray.put(share.image_data) for share in shares]
        shares = [share.with_image_data(None) for share in shares]
        patience = self._patience[method]
        start = time.monotonic()
        if self.callers:
            refs = [self._call_node(node, method, shares, images, what, arguments) for node in self.callers]
            by_rank: dict[int, Any] = {}
            for (_, ranks), results in zip(self.callers, gather(refs, what, patience.limit_s, "policy"), strict=True):
                by_rank |= zip(ranks, results, strict=True)
            results = [by_rank[rank] for rank in range(len(self.ranks))]
        else:
            stored = [ray.put([share]) for share in shares]
            refs = []
            for number, rank in enumerate(self.ranks):
                share, data = stored[self._data_ranks[number]], self._image_data(number, images)
                refs.append(rank.call_with_share.remote(method, share, 0, arguments, data))
            results = gather(refs, what, patience.limit_s, "policy")
        patience.took(time.monotonic() - start)
        return results

    def _image_data(self, rank: int, images: Sequence[Any]) -> Any:
        """Return the reference to the data of a rank's images, or None if it needs none."""
        return images[self._data_ranks[rank]] if self._decodes[rank] else None

    def _call_node(
        self,
        node: tuple[Any, Sequence[int]],
        method: str,
        shares: Sequence[Share],
        images: Sequence[Any],
        what: str,
        options: dict[str, Any],
    ) -> Any:
        """Call a method on all ranks of a node, and return the reference. See ``RankCaller.call_with_shares``."""
        caller, ranks = node
        stored: dict[int, Share] = {}
        numbers = []
        for rank in ranks:
            data_rank = self._data_ranks[rank]
            stored[data_rank] = shares[data_rank]
            numbers.append(list(stored).index(data_rank))
        data = [self._image_data(rank, images) for rank in ranks]
        return caller.call_with_shares.remote(method, [ray.put(list(stored.values()))], numbers, what, options, data)

    @property
    def _multiple(self) -> int:
        """Multiple to which the length of each sequence is padded.

        Megatron gives every context-parallel rank two chunks of a sequence, one from each end, so that causal attention
        takes the same time on all ranks.
        """
        context = self.layout.context_parallel_size
        return 2 * context if context > 1 else 1

    @property
    def _chunks(self) -> int:
        """Required divisor of the number of micro-batches: the number of pipeline stages with interleaving, else 1."""
        return self.layout.pipeline_model_parallel_size if self.layout.virtual_pipeline_model_parallel_size else 1

    def _lay_out(self, sequences: Sequence[TrainSequence], whole: bool = False, budget: int | None = None) -> Layout:
        """Distribute the sequences over data-parallel ranks and micro-batches.

        Args:
            whole: True to put all sequences of a pair or trajectory in the same micro-batch.
            budget: maximum number of tokens of a micro-batch; None for ``policy.micro_batch_tokens``.
        """
        # The token budget of a micro-batch includes the padding of each sequence.
        multiple = self._multiple
        longest = max(-(-len(s) // multiple) * multiple for s in sequences)
        limits = Budget(
            ranks=self.layout.data_parallel_size or 1,
            tokens=max(budget or self.config.micro_batch_tokens, longest),  # fits the longest sequence
            stages=self._chunks,
            multiple=multiple,
            quadratic=self._quadratic,
            attention=self._shared_attention,
        )
        return (whole_layout if whole else choose_layout)(self._sharing, sequences, limits)

    def _skips(self, settings: Objective) -> bool:
        """Return whether an update skips sequences that have no gradient.

        The decision is made for each update, because an algorithm may use a loss that differs from the config.
        """
        return self.config.skip_zero_advantage and not why_all_sequences(
            settings, load_functions("loss_fn", loss_import_paths(settings))
        )

    def train(self, sequences: list[TrainSequence], settings: Objective) -> UpdateResult:
        """Run one optimizer update, and return its metrics."""
        skips = self._skips(settings)
        num_sequences = len(sequences)
        if skips:
            sequences = with_gradient(sequences)
        split = reads_whole_sequences(settings) and has_split_trajectory(sequences)
        layout = self._lay_out(sequences, whole=split or any(s.pair for s in sequences))
        result: UpdateResult = self._call_with_shares(
            "train", sequences, layout, TRAINING, what="training", settings=settings
        )[0]
        parallel = self.layout
        lengths = [len(s) for s in sequences]
        total_multiple = 1
        if parallel.sequence_parallel:
            total_multiple = parallel.context_parallel_size * parallel.tensor_model_parallel_size
        result.sequences = num_sequences
        result.skipped_sequences = num_sequences - len(sequences) if skips else None
        quadratic = self._quadratic * (self._shared_attention if any(layout.shared) else 1.0)
        result.packing = measure(layout.assignment, lengths, self._multiple, total_multiple, quadratic, layout.shared)
        return result

    def component_gradients(
        self, sequences: list[TrainSequence], terms: Sequence[Objective], first: bool = True
    ) -> None:
        """Compute gradients at the current weights. The ranks store them until ``gradient_products``.

        Args:
            sequences: sequences of an update, with ``TrainSequence.terms`` if a ``TermLoss`` is requested.
            terms: objectives whose gradients are computed.
            first: False to add the gradients to the stored gradients.
        """
        split = any(reads_whole_sequences(term) for term in terms) and has_split_trajectory(sequences)
        layout = self._lay_out(sequences, whole=split)
        what = "computing gradients by component"
        self._call_with_shares(
            "component_gradients", sequences, layout, TRAINING, what=what, terms=list(terms), first=first
        )

    def logprobs(
        self,
        sequences: list[TrainSequence],
        *,
        reference: bool = False,
        temperature: float | None = None,
        packed: bool = True,
        teacher: bool = False,
    ) -> list[np.ndarray]:
        """Return the log-probs of each sequence, float32 [completion tokens], with NaN for masked tokens.

        Args:
            reference: True to use the reference weights.
            temperature: temperature that replaces the sampling temperature, or None to use the sampling temperature.
            packed: False to process each sequence in a separate micro-batch.
            teacher: True to use the teacher's weights.
        """
        if reference or teacher:  # these models choose their experts themselves
            sequences = [replace(s, routing=None) for s in sequences]
        if teacher:
            return self._scores("teacher_logprobs", sequences, packed=packed, temperature=temperature)
        return self._scores("logprobs", sequences, packed=packed, reference=reference, temperature=temperature)

    def logprobs_and_entropies(self, sequences: list[TrainSequence]) -> list[np.ndarray]:
        """Compute log-probs and entropies in one pass with the current weights.

        Returns:
            float32 [completion tokens, 2] for each sequence: the token's log-prob, and the entropy of its distribution
            in nats. NaN for masked tokens.
        """
        return self._scores("logprobs", sequences, Columns(entropies=True))

    def logprobs_and_values(self, sequences: list[TrainSequence], entropies: bool = False) -> list[np.ndarray]:
        """Compute log-probs and values in one pass with the current weights.

        Returns:
            float32 [completion tokens, 2] for each sequence: the token's log-prob, and the value head's estimate for
            the state before the token. With ``entropies``, the shape is [completion tokens, 3]: the columns of
            ``logprobs_and_entropies``, then the value. NaN for masked tokens.
        """
        return self._scores("logprobs", sequences, Columns(entropies=entropies, values=True))

    def _scores(
        self,
        method: str,
        sequences: list[TrainSequence],
        columns: Columns = LOGPROBS,
        *,
        packed: bool = True,
        **options: bool | float | None,
    ) -> list[np.ndarray]:
        """Call a method that returns token values on all ranks. Return the values of each sequence's completion."""
        if packed:
            layout = self._lay_out(sequences, budget=self.config.logprob_micro_batch_tokens)
        else:
            assignment = assign_singly(len(sequences), self.layout.data_parallel_size or 1, self._chunks)
            layout = Layout(assignment, [0] * len(sequences))
        results = self._call_with_shares(
            method, sequences, layout, SCORING, what="evaluating log-probs", columns=columns, **options
        )
        return by_sequence(sequences, layout.assignment, list(zip(self._data_ranks, results, strict=True)))

    @property
    def engine_processes(self) -> int:
        """Number of processes of one engine."""
        return self.config.generation.vllm_cfg.tensor_parallel_size

    def start_sender(
        self,
        sender: type[Sender],
        method: str,
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        num_returns: int = 1,
    ) -> list[Any]:
        """Call a method of a transport's sender on selected ranks. See ``PolicyRanks.start_sender``."""
        import_path = f"{sender.__module__}:{sender.__qualname__}"
        refs = []
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            run_sender = self.ranks[rank].run_sender.options(num_returns=num_returns)
            refs.append(run_sender.remote(import_path, method, *arguments))
        return refs

    def wait(self, refs: Sequence[Any], what: str) -> list[Any]:
        """Wait for results of ``start_sender`` and return them. See ``PolicyRanks.wait``."""
        return gather(refs, what, self.timeout_s, "policy")

    def save(self, folder: Path) -> None:
        """Write a checkpoint and verify it."""
        self.begin_save(folder)
        self.finish_save()

    def has_lost_ranks(self, patience_s: float) -> bool:
        """Return whether a rank's process has ended, or ends within ``patience_s``."""
        return one_has_ended([rank.process_location.remote() for rank in self.ranks], patience_s)

    def close(self) -> None:
        """Stop the rank processes."""
        for actor in (*self.ranks, *(caller for caller, _ in self.callers)):
            ray.kill(actor)
