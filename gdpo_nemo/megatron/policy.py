"""The policy on one rank: update, evaluate, hand out weights.

Every method is collective: all ranks of the policy call it together with equal arguments.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from pathlib import Path
from typing import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from gdpo_nemo.algorithms import LossSettings
from gdpo_nemo.algorithms.own_functions import Functions
from gdpo_nemo.algorithms.policy_loss import policy_loss
from gdpo_nemo.algorithms.ppo_settings import ActorCriticSettings
from gdpo_nemo.algorithms.preference_losses import preference_loss
from gdpo_nemo.algorithms.preference_settings import PreferenceUpdate
from gdpo_nemo.algorithms.value_loss import actor_critic_loss
from gdpo_nemo.config.objects import load_functions
from gdpo_nemo.config.schema import PolicyConfig
from gdpo_nemo.data.packing import TrainSequence, pack_rows
from gdpo_nemo.data.results import TokenValues, UpdateResult
from gdpo_nemo.errors import RunError
from gdpo_nemo.megatron.attention import PackedAttention, local_positions
from gdpo_nemo.megatron.conversion import export_hf
from gdpo_nemo.megatron.logprobs import EntropyUse
from gdpo_nemo.megatron.lora import adapters_disabled, gather_adapters, start_adapters
from gdpo_nemo.megatron.micro_batch import MicroBatch, MicroBatches, make_micro_batch
from gdpo_nemo.megatron.model import BuiltModel, build, build_frozen
from gdpo_nemo.megatron.offload import OptimizerOffload, Reference
from gdpo_nemo.megatron.runtime import Runtime
from gdpo_nemo.weights.adapters import Adapters, Pairs, merged, named

_FP8_BLOCK = 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _count(batch: MicroBatch, like: torch.Tensor) -> torch.Tensor:
    """Number of the micro-batch's rows, filled in on the device: a copy from the host would wait for it.

    Megatron divides by this token count in its own reduction, which `model._finalize` leaves out.
    """
    return torch.full((), len(batch.rows.rows), dtype=torch.int, device=like.device)


def _read_back(parts: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]):
    """The same dictionaries with numbers for their scalars, which a device hands over in one go by type, not one by
    one."""
    scalars = [value.detach() for part in parts for values in part for value in values.values()]
    numbers = [0.0] * len(scalars)
    for dtype in {value.dtype for value in scalars}:
        alike = [place for place, value in enumerate(scalars) if value.dtype == dtype]
        for place, number in zip(alike, torch.stack([scalars[place] for place in alike]).tolist()):
            numbers[place] = number
    found = iter(numbers)
    return [tuple({name: next(found) for name in values} for values in part) for part in parts]


def _merge(shares: list[dict[str, float]], how) -> dict[str, float]:
    names = dict.fromkeys(name for share in shares for name in share)
    return {name: how([share[name] for share in shares if name in share]) for name in names}


class Policy:
    """A Megatron model with its optimizer, on one rank of a laid-out process group.

    Args:
        config: the policy section.
        folder: Hugging Face folder with the starting weights.
        runtime: what ``runtime.prepare()`` returned.
        total_updates: optimizer updates of the whole run, the horizon of a decaying schedule.
        keep_reference: hold a copy of the starting weights for ``logprobs(reference=True)``; under LoRA there is none,
            the model without its adapters is the reference.
        seed: of LoRA's starting adapters, and of a reward model's head.
        scores: the model is a reward model: ``logprobs`` returns scores.
        value_lr_mult: the model has a value head beside the policy's own, on the same hidden states, and learns it at
            this times the learning rate; None: it has none.
    """

    def __init__(
        self,
        config: PolicyConfig,
        folder: str | Path,
        runtime: Runtime,
        total_updates: int,
        keep_reference: bool = False,
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
            self.lora,
            seed,
            scores,
            value_lr_mult,
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
        self._rectangles = any(isinstance(m, PackedAttention) for chunk in self.chunks for m in chunk.modules())

    # -- what a rank knows of its place -------------------------------------------------------------------------

    @property
    def chunks(self):
        """The bare model chunks of this rank."""
        return self.built.chunks

    @property
    def reports(self) -> bool:
        """Whether this rank speaks for its data-parallel and context-parallel share (last stage, first tensor rank)."""
        return (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    @property
    def data_parallel_rank(self) -> int:
        """Number of the share of every update that this rank computes, with its tensor, pipeline and context peers."""
        return int(parallel_state.get_data_parallel_rank())

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (p for chunk in self.chunks for p in chunk.parameters())

    # -- update -------------------------------------------------------------------------------------------------

    def train(
        self,
        sequences: Sequence[TrainSequence],
        micro_batches: Sequence[Sequence[int]],
        settings: LossSettings | PreferenceUpdate,
    ) -> UpdateResult:
        """One optimizer update.

        Args:
            sequences: those of this data-parallel rank; it may have none.
            micro_batches: places in ``sequences``; equally many on every rank (see ``packing.assign``).

        Raises:
            RunError: a function of the user's own gave what no loss can be made of.
        """
        functions = load_functions("loss_fn", settings.places)
        for wrapped in self.built.wrapped:
            wrapped.restore_grad_buffers(synchronize=False)
            wrapped.zero_grad_buffer()
        self.built.optimizer.zero_grad()
        finish = partial(self._loss, settings, functions)
        self._ask_entropy("gradient" if settings.entropy_bonus else "value")
        self._ask_values(self.values)
        try:
            done = self._run(sequences, micro_batches, finish, forward_only=False)
        except ValueError as error:
            if functions:  # whose they are, the sentence says
                raise RunError(str(error)) from error
            raise
        # Before the gradients' norm, for which each gradient is given to its main weight: they must share a device.
        with self._optimizer_coming():
            sums, maxima = self._reduce(done)
            norm = self._gradient_norm()
            skipped = not (math.isfinite(norm) and math.isfinite(sums["loss"]))
            self.built.scheduler.tick(skipped)
            if not skipped:
                self._wait_for_optimizer()
                self.built.optimizer.step()
        lr = self.built.optimizer.param_groups[0]["lr"]
        return UpdateResult(sums.pop("loss"), norm, float(lr), skipped, sums, maxima)

    def next_learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self.built.scheduler.next_rate())

    def _gradient_norm(self) -> float:
        """Norm of the whole model's gradient before clipping; the same on every rank."""
        self.built.optimizer.prepare_grads()
        return float(self.built.optimizer.get_grad_norm())

    def _loss(
        self, settings: LossSettings | PreferenceUpdate, functions: Functions, batch: MicroBatch, output: torch.Tensor
    ):
        columns = output.float().unbind(-1)
        if batch.trained is not None:
            columns = tuple(values.index_select(0, batch.trained) for values in columns)
        logprobs = columns[0]
        assert batch.fields is not None
        if isinstance(settings, ActorCriticSettings):
            loss, metrics = actor_critic_loss(
                logprobs, columns[1], columns[2], batch.fields, settings, self._sum_over_context, functions
            )
            return loss, _count(batch, output), (loss.detach(), metrics)
        entropy = columns[1] if len(columns) > 1 else None  # a reward model has none
        if isinstance(settings, PreferenceUpdate):
            loss, metrics = preference_loss(logprobs, entropy, batch.fields, settings, self._sum_over_context)
        else:
            loss, metrics = policy_loss(
                logprobs, entropy, batch.fields, settings, self._sum_over_context, functions, all_trained=True
            )
        return loss, _count(batch, output), (loss.detach(), metrics)

    @staticmethod
    def _sum_over_context(partial_sums: torch.Tensor) -> torch.Tensor:
        """Sum a per-sequence value over the context-parallel ranks that hold parts of each sequence."""
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            dist.all_reduce(partial_sums, group=group)
        return partial_sums

    def _reduce(self, done: list) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over micro-batches, data and context ranks, known to every pipeline stage."""
        totals = None
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            sums: dict[str, float] = {}
            maxima: dict[str, float] = {}
            for part, largest in _read_back([({"loss": loss, **m.sums}, m.maxima) for loss, m in done]):
                for name, value in part.items():
                    sums[name] = sums.get(name, 0.0) + value
                for name, value in largest.items():
                    maxima[name] = max(maxima.get(name, float("-inf")), value)
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            shares: list = [None] * group.size()
            dist.all_gather_object(shares, (sums, maxima), group=group)
            # A rank whose micro-batches are all empty measures nothing, so the names are merged, not assumed equal.
            totals = (_merge([s for s, _ in shares], sum), _merge([m for _, m in shares], max))
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
        """Main weights and moments on the device, where ``optimizer.offload`` otherwise keeps them in host memory."""
        with self._optimizer_coming():
            self._wait_for_optimizer()
            yield

    @contextlib.contextmanager
    def _optimizer_coming(self):
        """As ``optimizer_on_device``, but what reads them is queued after ``_wait_for_optimizer``."""
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
        """Give back the GPU memory that nothing needs before the next update, for an engine that shares the device."""
        if self.runtime.device.type == "cuda":
            self.release_gradients()
            torch.cuda.empty_cache()

    def release_gradients(self) -> None:
        """Free the gradients' buffers, which every update starts with zeros, when all that is under way is done."""
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
        """Log-probs of all completion tokens of this rank's sequences under the current (or reference) weights.

        ``temperature`` replaces the sampling temperature for this call. With ``entropies`` the values are
        [tokens, 2]: log-prob, and entropy of the distribution that the token was drawn from. With ``values`` what the
        value head says of the state before the token is one more column.

        Returns:
            This rank's share where the rank reports (see ``reports``), else None.
        """
        with self._reference_weights() if reference else contextlib.nullcontext(), self._at_temperature(temperature):
            self._training(False)
            self._ask_entropy("value" if entropies else "none")
            self._ask_values(values)
            done = self._run(sequences, micro_batches, self._collect, forward_only=True)
            self._training(True)
        if not self.reports:
            return None
        sequence, offset = (
            np.concatenate([getattr(rows, name) for rows, _ in done]) for name in ("sequence", "offset")
        )
        return TokenValues(sequence, offset, torch.cat([values for _, values in done]).cpu().numpy())

    def load_teacher(self, folder: str | Path) -> None:
        """Keep the model in a Hugging Face ``folder`` beside this one, frozen and in the same layout."""
        self._teacher = build_frozen(folder, self.layout, DTYPES[self.config.precision])

    @contextlib.contextmanager
    def teacher_in_place(self) -> Iterator[None]:
        """Let ``logprobs`` be the teacher's, at temperature 1 unless it is given another one."""
        assert self._teacher is not None, "no teacher was loaded"
        own, self.built = self.built, self._teacher
        try:
            yield
        finally:
            self.built = own

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

    def _ask_entropy(self, use: EntropyUse) -> None:
        for chunk in self.chunks:
            chunk.entropy = use

    def _ask_values(self, wanted: bool) -> None:
        for chunk in self.chunks:
            chunk.values = wanted

    @staticmethod
    def _collect(batch: MicroBatch, output: torch.Tensor):
        values = output.float()
        return output.sum(), _count(batch, output), (batch.rows, values[:, 0] if values.size(-1) == 1 else values)

    @contextlib.contextmanager
    def _reference_weights(self):
        if self.lora:
            with adapters_disabled(self.chunks):
                yield
            return
        assert self._reference is not None, "the policy was built without keep_reference"
        with self.params_synced(), self._reference.in_place():
            yield

    @property
    def reference(self) -> Reference | None:
        """What ``logprobs(reference=True)`` is computed with; None under LoRA, and where nobody asks."""
        return self._reference

    def sync_reference(self, alpha: float) -> None:
        """Move the reference towards the policy (see ``Reference.follow``)."""
        assert self._reference is not None, "the policy was built without keep_reference"
        with self.params_synced():
            self._reference.follow(alpha)

    def _training(self, on: bool) -> None:
        for wrapped in self.built.wrapped:
            wrapped.train(on)

    # -- Megatron's schedule ------------------------------------------------------------------------------------

    def _run(self, sequences, micro_batches: Sequence[Sequence[int]], finish, forward_only: bool) -> list:
        """Run this rank's micro-batches through Megatron's schedule; ``finish(micro-batch, output)`` closes each on the
        last stage."""
        layout = self.layout
        context_size = layout.context_parallel_size
        context = parallel_state.get_context_parallel_rank(), context_size
        total_multiple = context_size * layout.tensor_model_parallel_size if layout.sequence_parallel else 1
        if layout.fp8:  # the tokens of each rank's matrix products come in blocks
            total_multiple = _FP8_BLOCK * context_size * layout.tensor_model_parallel_size

        def make(with_fields: bool, members: Sequence[int]) -> MicroBatch:
            rows = pack_rows(
                sequences,
                members,
                context_rank=context[0],
                context_size=context_size,
                total_multiple=total_multiple,
                positions=local_positions,
            )
            device = self.runtime.device
            return make_micro_batch(
                rows, sequences, context, device, rectangles=self._rectangles, with_fields=with_fields
            )

        def step(iterator: MicroBatches, model):
            batch = next(iterator)
            output = model(batch.tokens, batch.packing, batch.places, batch.targets)
            if self.runtime.device.type == "cuda":
                iterator.prefetch()  # while the forward pass runs
            return output, partial(finish, batch)

        wrapped = self.built.wrapped
        iterators = [
            MicroBatches(partial(make, chunk.post_process and not forward_only), micro_batches) for chunk in self.chunks
        ]
        done = self._forward_backward(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=len(micro_batches),
            seq_length=1,  # shapes vary and are exchanged (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return done

    # -- weights ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def params_synced(self):
        """Parameters as the last update left them: with overlapped gathering they are otherwise stale until used."""
        overlapped = [w for w in self.built.wrapped if self.layout.overlap_param_gather]
        for wrapped in overlapped:
            wrapped.disable_forward_pre_hook(param_sync=True)
        try:
            yield
        finally:
            for wrapped in overlapped:
                wrapped.enable_forward_pre_hook()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights under their Hugging Face names, whole, on every rank (see ``conversion.export_hf``); adapters
        merged."""
        with self.params_synced():
            tensors = export_hf(self.chunks, self.built.hf_config)
            if self.adapters:
                tensors = merged(tensors, gather_adapters(self.chunks), self.adapters.scale)
            yield from tensors

    def update(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What an engine with the starting weights lacks: all weights, or under LoRA the adapters alone (see
        ``adapters``)."""
        return iter(self.weights() if self.adapters is None else named(self.adapter()))

    def start_adapters(self, pairs: Pairs) -> None:
        """Give LoRA's matrices the values of ``pairs``, whole ones of every adapted module; the optimizer starts with
        them."""
        with self.optimizer_on_device():
            start_adapters(self.chunks, pairs)
            self.built.optimizer.reload_model_params()

    def adapter(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """LoRA's matrices by Hugging Face module, whole, on every rank (see ``lora.gather_adapters``)."""
        with self.params_synced():
            return gather_adapters(self.chunks)
