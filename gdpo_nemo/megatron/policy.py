"""Policy on one rank: optimizer updates, evaluation and weight export.

Every method is collective: all ranks of the policy call it together with equal arguments.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from gdpo_nemo.algorithms.loss_selection import Functions, Objective, loss_import_paths
from gdpo_nemo.algorithms.policy_loss import objective_loss
from gdpo_nemo.config.schema import PolicyConfig
from gdpo_nemo.config.sections import replays_router
from gdpo_nemo.data.packing import TrainSequence, pack_rows
from gdpo_nemo.data.records import TokenValues, UpdateResult
from gdpo_nemo.megatron.conversion import export_hf
from gdpo_nemo.megatron.logprobs import EntropyUse
from gdpo_nemo.megatron.lora import adapters_disabled, gather_adapters, start_adapters
from gdpo_nemo.megatron.micro_batch import MicroBatch, MicroBatches, make_micro_batch
from gdpo_nemo.megatron.model import BuiltModel, build, build_frozen
from gdpo_nemo.megatron.model_config import description_of
from gdpo_nemo.megatron.optimizer import OptimizerOffload, Reference
from gdpo_nemo.megatron.packing import local_positions
from gdpo_nemo.megatron.pieces import RankPieces
from gdpo_nemo.megatron.recurrent_layers import needs_of_layers
from gdpo_nemo.megatron.router_replay import RouterReplay
from gdpo_nemo.megatron.runtime import Runtime
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.import_path import load_functions
from gdpo_nemo.weights.adapters import Adapters, Pairs, merged, named
from gdpo_nemo.weights.pieces import Piece

_FP8_BLOCK = 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _to_numbers(parts: list[dict[str, torch.Tensor]]) -> list[dict[str, float]]:
    """Return copies of the dictionaries with Python numbers in place of scalar tensors."""
    by_dtype: dict[torch.dtype, list[tuple[dict[str, float], str, torch.Tensor]]] = {}
    numbers = []
    for part in parts:
        values = dict.fromkeys(part, 0.0)
        numbers.append(values)
        for name, scalar in part.items():
            by_dtype.setdefault(scalar.dtype, []).append((values, name, scalar.detach()))
    # One transfer for each data type: every transfer waits for the device.
    for entries in by_dtype.values():
        transferred = torch.stack([scalar for _, _, scalar in entries]).tolist()
        for (values, name, _), number in zip(entries, transferred):
            values[name] = number
    return numbers


def _merge_metrics(by_rank: Iterable[dict[str, float]], reduce) -> dict[str, float]:
    """Reduce each metric over the ranks that have it."""
    collected: dict[str, list[float]] = {}
    for metrics in by_rank:
        for name, value in metrics.items():
            collected.setdefault(name, []).append(value)
    return {name: reduce(values) for name, values in collected.items()}


class Policy:
    """A Megatron model with its optimizer on one rank. Megatron's process groups must exist (``runtime.lay_out``).

    Args:
        config: config section ``policy``.
        folder: Hugging Face folder with the starting weights.
        runtime: result of ``runtime.prepare()``.
        total_updates: total number of updates of the run, after which the learning-rate decay ends by default.
        keep_reference: True to store a copy of the starting weights for ``logprobs(reference=True)``.
            ``keep_reference`` has no effect under LoRA, whose reference is the model without its adapters.
        seed: random seed of LoRA's initial adapters, and of a reward model's score head.
        scores: True for a reward model, for which ``logprobs`` returns scores.
        value_lr_mult: learning-rate multiplier of a value head, or None for no value head.
    """

    def __init__(
        self,
        config: PolicyConfig,
        folder: str | Path,
        runtime: Runtime,
        total_updates: int,
        keep_reference: bool = False,
        *,
        seed: int = 0,
        scores: bool = False,
        value_lr_mult: float | None = None,
    ):
        self.config = config
        self.runtime = runtime
        self.folder = Path(folder)
        self.layout = config.megatron_cfg
        self.lora = config.lora if config.lora.rank else None
        self.adapters: Adapters | None = None
        if self.lora:
            self.adapters = Adapters(self.lora.rank, self.lora.alpha, self.lora.dropout, str(folder))
        self.built: BuiltModel = build(
            folder,
            self.layout,
            DTYPES[config.precision],
            config.generation.temperature or 1.0,
            total_updates,
            lora=self.lora,
            seed=seed,
            scores=scores,
            value_lr_mult=value_lr_mult,
            sharing=config.share_prompts is not False,
            train_tower=config.vision.train,
        )
        self.scores = scores
        self.values = value_lr_mult is not None
        self._forward_backward = get_forward_backward_func()
        keep_reference = keep_reference and not self.lora
        self._reference = Reference(self._parameters(), config.offload_reference) if keep_reference else None
        self._teacher: BuiltModel | None = None
        self._offload: OptimizerOffload | None = None
        if self.layout.optimizer.offload and runtime.device.type == "cuda":
            self._offload = OptimizerOffload(self.built.optimizer, self._parameters(), runtime.device)
        symbols = description_of(self.built.hf_config).symbols
        self._replay = RouterReplay(self.chunks if replays_router(config) else [], symbols)
        self._layers = needs_of_layers(self.chunks)

    # -- rank in the layout --------------------------------------------------------------------------------------

    @property
    def chunks(self):
        """Model chunks of this rank, without wrappers."""
        return self.built.chunks

    @property
    def reports(self) -> bool:
        """True if this rank returns results for its data- and context-parallel ranks.

        Results come from the first tensor-parallel rank of the last pipeline stage.
        """
        return (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    @property
    def data_parallel_rank(self) -> int:
        """Data-parallel rank. Ranks with the same data-parallel rank process the same sequences."""
        return int(parallel_state.get_data_parallel_rank())

    @property
    def is_first_stage(self) -> bool:
        """True if this rank has the embedding and the vision tower, and therefore needs the data of images."""
        return bool(parallel_state.is_pipeline_first_stage(ignore_virtual=True))

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for chunk in self.chunks:
            yield from chunk.parameters()

    # -- update -------------------------------------------------------------------------------------------------

    def train(
        self, sequences: Sequence[TrainSequence], micro_batches: Sequence[Sequence[int]], settings: Objective
    ) -> UpdateResult:
        """Run one optimizer update. Arguments and errors are those of ``backward``."""
        self._replay.count(self.runtime.device)
        done = self.backward(sequences, micro_batches, settings)
        # Fetch the optimizer state first: computing the norm attaches each gradient to its main weight, and both must
        # be on the same device.
        with self._optimizer_prefetched():
            sums, maxima = self._reduce(done)
            sums |= self._replay.counted()
            if self.built.vision is not None:
                sums["tower_images"] = self.built.vision.counted(self.chunks, self.runtime.device)
            optimizer = self.built.optimizer
            optimizer.prepare_grads()
            norm = float(optimizer.get_grad_norm())  # of the complete model before clipping, equal on all ranks
            skipped = not (math.isfinite(norm) and math.isfinite(sums["loss"]))
            self.built.scheduler.tick(skipped)
            if not skipped:
                self._wait_for_optimizer()
                optimizer.step()
        return UpdateResult(sums.pop("loss"), norm, self.built.scheduler.rate(), skipped, sums, maxima)

    def backward(
        self, sequences: Sequence[TrainSequence], micro_batches: Sequence[Sequence[int]], settings: Objective
    ) -> list[Any]:
        """Compute the gradients of a loss, and return the loss and metrics of each micro-batch on the last stage.

        Args:
            sequences: sequences of this data-parallel rank, possibly empty.
            micro_batches: indices into ``sequences`` for each micro-batch. All ranks must have the same number of
                micro-batches (see ``packing.assign``).
            settings: settings of the loss.

        Raises:
            RunError: if a custom function returns values from which no loss can be computed.
        """
        functions = load_functions("loss_fn", loss_import_paths(settings))
        for wrapped in self.built.wrapped:
            wrapped.restore_grad_buffers(synchronize=False)
            wrapped.zero_grad_buffer()
        self.built.optimizer.zero_grad()
        finish = partial(self._loss, settings, functions)
        self._set_entropy_use("gradient" if settings.entropy_bonus else "value")
        self._set_value_output(self.values)
        try:
            return self._run(sequences, micro_batches, finish, forward_only=False)
        except ValueError as error:
            if functions:  # the message names the custom function
                raise RunError(str(error)) from error
            raise

    def next_learning_rate(self) -> float:
        """Return the learning rate of the next update."""
        return float(self.built.scheduler.next_rate())

    def _loss(self, settings: Objective, functions: Functions, batch: MicroBatch, output: torch.Tensor):
        columns = output.float().unbind(-1)
        if batch.trained is not None:
            columns = tuple(values.index_select(0, batch.trained) for values in columns)
        assert batch.fields is not None
        compute = objective_loss(settings)
        loss, metrics = compute(columns, batch.fields, settings, self._sum_over_context, functions)
        return loss, batch.row_count(), (loss.detach(), metrics)

    @staticmethod
    def _sum_over_context(partial_sums: torch.Tensor) -> torch.Tensor:
        """Sum per-sequence values over the context-parallel ranks, each of which holds a part of each sequence."""
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            dist.all_reduce(partial_sums, group=group)
        return partial_sums

    def _reduce(self, done: list[Any]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the sums and maxima of metrics over micro-batches and data- and context-parallel ranks.

        All pipeline stages get the result.
        """
        totals = None
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            sums: dict[str, float] = {}
            maxima: dict[str, float] = {}
            parts = [{"loss": loss, **metrics.sums} for loss, metrics in done]
            parts += [metrics.maxima for _, metrics in done]
            numbers = _to_numbers(parts)
            for part in numbers[: len(done)]:
                for name, value in part.items():
                    sums[name] = sums.get(name, 0.0) + value
            for part in numbers[len(done) :]:
                for name, value in part.items():
                    maxima[name] = max(maxima.get(name, -math.inf), value)
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            by_rank: list[Any] = [None] * group.size()
            dist.all_gather_object(by_rank, (sums, maxima), group=group)
            # A rank with only empty micro-batches has no metrics, so the names may differ.
            all_sums, all_maxima = zip(*by_rank)
            totals = _merge_metrics(all_sums, sum), _merge_metrics(all_maxima, max)
        return self._from_last_stage(totals)

    @staticmethod
    def _from_last_stage(value):
        stages = parallel_state.get_pipeline_model_parallel_group()
        if stages.size() == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, parallel_state.get_pipeline_model_parallel_last_rank(), group=stages)
        return box[0]

    @contextlib.contextmanager
    def optimizer_on_device(self):
        """Keep main weights and moments on the device in the block, even if ``optimizer.offload`` is set."""
        with self._optimizer_prefetched():
            self._wait_for_optimizer()
            yield

    @contextlib.contextmanager
    def _optimizer_prefetched(self):
        """Start moving main weights and moments to the device, and move them back after the block.

        Call ``_wait_for_optimizer`` before you queue work that reads this state.
        """
        if self._offload is not None:
            self._offload.fetch()
        try:
            yield
        finally:
            if self._offload is not None:
                self._offload.send()

    def _wait_for_optimizer(self) -> None:
        if self._offload is not None:
            self._offload.wait()

    def release(self) -> None:
        """Release GPU memory that is not needed until the next update, so that an engine on the same GPU can use it."""
        if self.runtime.device.type == "cuda":
            self.release_gradients()
            torch.cuda.empty_cache()

    def release_gradients(self) -> None:
        """Free the gradient buffers once all queued work is done. Every update starts with zero gradients."""
        for wrapped in self.built.wrapped:
            wrapped.offload_grad_buffers(empty_cache=False)

    # -- evaluate -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(
        self,
        sequences: Sequence[TrainSequence],
        micro_batches: Sequence[Sequence[int]],
        reference: bool = False,
        temperature: float | None = None,
        entropies: bool = False,
        values: bool = False,
    ) -> TokenValues | None:
        """Return the log-probs of all completion tokens of this rank's sequences.

        Args:
            sequences: sequences of this data-parallel rank.
            micro_batches: indices into ``sequences`` for each micro-batch, as in ``train``.
            reference: True to use the reference weights.
            temperature: temperature that replaces the sampling temperature, or None to use the sampling temperature.
            entropies: True to add a column with the entropy of each token's distribution.
            values: True to add a column with the value head's estimate for the state before each token.

        Returns:
            The values of this rank's tokens if ``reports`` is true, otherwise None. The shape is [tokens], or [tokens,
            columns] with additional columns.
        """
        with self._reference_weights() if reference else contextlib.nullcontext(), self._at_temperature(temperature):
            self._set_training(mode=False)
            self._set_entropy_use("value" if entropies else "none")
            self._set_value_output(values)
            done = self._run(sequences, micro_batches, self._collect, forward_only=True)
            self._set_training(mode=True)
        if not self.reports:
            return None
        rows, found = zip(*done)
        sequence = np.concatenate([part.sequence for part in rows])
        offset = np.concatenate([part.offset for part in rows])
        return TokenValues(sequence, offset, torch.cat(found).cpu().numpy())

    def load_teacher(self, folder: str | Path) -> None:
        """Load the model in a Hugging Face folder as a frozen teacher in the same layout, unless a teacher is loaded.

        A run has one teacher, which several of its environments may use.
        """
        if self._teacher is not None:
            return
        sharing = self.config.share_prompts is not False
        self._teacher = build_frozen(folder, self.layout, DTYPES[self.config.precision], sharing)
        if self.built.vision is not None and self._teacher.vision is None:
            raise RunError(f"the teacher in {folder} is a text model, but the policy has a vision tower")
        self._layers = needs_of_layers([*self.chunks, *self._teacher.chunks])

    @contextlib.contextmanager
    def using_teacher(self) -> Iterator[None]:
        """Make ``logprobs`` use the teacher in the block, with 1 as the default temperature."""
        assert self._teacher is not None, "no teacher was loaded"
        student, self.built = self.built, self._teacher
        try:
            yield
        finally:
            self.built = student

    @contextlib.contextmanager
    def _at_temperature(self, temperature: float | None):
        usual = [chunk.temperature for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.temperature = temperature or chunk.temperature
        try:
            yield
        finally:
            for chunk, value in zip(self.chunks, usual):
                chunk.temperature = value

    def _set_entropy_use(self, use: EntropyUse) -> None:
        for chunk in self.chunks:
            chunk.entropy = use

    def _set_value_output(self, enabled: bool) -> None:
        for chunk in self.chunks:
            chunk.values = enabled

    @staticmethod
    def _collect(batch: MicroBatch, output: torch.Tensor):
        values = output.float()
        return output.sum(), batch.row_count(), (batch.rows, values[:, 0] if values.size(-1) == 1 else values)

    @contextlib.contextmanager
    def _reference_weights(self):
        if self.lora:
            with adapters_disabled(self.chunks):
                yield
            return
        assert self._reference is not None, "the policy was built without keep_reference"
        with self.params_synced(), self._reference.as_parameters():
            yield

    @property
    def reference(self) -> Reference | None:
        """Weights for ``logprobs(reference=True)``. None under LoRA, or if no reference is stored."""
        return self._reference

    def sync_reference(self, alpha: float) -> None:
        """Move the reference towards the policy (see ``Reference.follow``)."""
        assert self._reference is not None, "the policy was built without keep_reference"
        with self.params_synced():
            self._reference.follow(alpha)

    def _set_training(self, *, mode: bool) -> None:
        for wrapped in self.built.wrapped:
            wrapped.train(mode)

    # -- Megatron's schedule ------------------------------------------------------------------------------------

    def _run(self, sequences, micro_batches: Sequence[Sequence[int]], finish, forward_only: bool) -> list[Any]:
        """Run this rank's micro-batches through Megatron's pipeline schedule.

        Args:
            finish: function called with each micro-batch and its output on the last stage, as in Megatron's schedule.
                The function returns a loss, a token count, and the micro-batch's result.

        Returns:
            Results of the micro-batches on the last stage.
        """
        layout = self.layout
        context_size = layout.context_parallel_size
        context = parallel_state.get_context_parallel_rank(), context_size
        total_multiple = context_size * layout.tensor_model_parallel_size if layout.sequence_parallel else 1
        if layout.fp8:  # the number of tokens of each rank must be a multiple of the block size
            total_multiple = _FP8_BLOCK * context_size * layout.tensor_model_parallel_size

        vision = self.built.vision

        def make(chunk: Any, members: Sequence[int]) -> MicroBatch:
            rows = pack_rows(
                sequences,
                members,
                context_rank=context[0],
                context_size=context_size,
                total_multiple=total_multiple,
                positions=local_positions,
                grid=None if vision is None else vision.grid,
            )
            options: Any = dict(self._layers, with_fields=chunk.post_process and not forward_only, vision=chunk.vision)
            return make_micro_batch(rows, sequences, context, self.runtime.device, **options)

        def step(iterator: MicroBatches, model):
            batch = next(iterator)
            output = model(batch.tokens, batch.packing, batch.token_indices, batch.targets)
            if self.runtime.device.type == "cuda":
                iterator.prefetch()  # overlaps with the forward pass
            return output, partial(finish, batch)

        wrapped = self.built.wrapped
        iterators = []
        for chunk in self.chunks:
            iterators.append(MicroBatches(partial(make, chunk), micro_batches))
        return self._forward_backward(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=len(micro_batches),
            seq_length=1,  # shapes vary and are exchanged (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )

    # -- weights ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def params_synced(self):
        """Keep the parameters synchronised with the last update in the block.

        With ``overlap_param_gather``, parameters would otherwise be stale until the next forward pass.
        """
        overlapped = [w for w in self.built.wrapped if self.layout.overlap_param_gather]
        for wrapped in overlapped:
            wrapped.disable_forward_pre_hook(param_sync=True)
        try:
            yield
        finally:
            for wrapped in overlapped:
                wrapped.enable_forward_pre_hook()

    def weights(self, tower: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, unsharded tensor) of all weights on every rank, with adapters merged.

        See ``conversion.export_hf``.
        """
        with self.params_synced():
            tensors = export_hf(self.chunks, self.built.hf_config, tower)
            if self.adapters:
                tensors = merged(tensors, gather_adapters(self.chunks), self.adapters.scale)
            yield from tensors

    def update(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that training changes: the weights, without a frozen tower, or under LoRA the adapters."""
        return iter(self.weights(self.config.vision.train) if self.adapters is None else named(self.adapter()))

    def pieces(self) -> Iterator[Piece]:
        """Yield what this rank sends of the tensors of ``update``. Under LoRA, rank 0 sends all of them."""
        if self.adapters is None:
            with self.params_synced():
                yield from self._pieces
            return
        for name, tensor in self.update():
            if dist.get_rank() == 0:
                yield Piece(name, tensor)

    @cached_property
    def _pieces(self) -> RankPieces:
        return RankPieces(self.chunks, self.built.hf_config, self.config.vision.train)

    def start_adapters(self, pairs: Pairs) -> None:
        """Initialise LoRA matrices and the optimizer's main weights from the unsharded ``pairs`` of all modules."""
        with self.optimizer_on_device():
            start_adapters(self.chunks, pairs)
            self.built.optimizer.reload_model_params()

    def adapter(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the unsharded LoRA matrices by Hugging Face module on every rank (see ``lora.gather_adapters``)."""
        with self.params_synced():
            return gather_adapters(self.chunks)
