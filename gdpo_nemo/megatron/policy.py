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

from gdpo_nemo.algorithms import LossSettings, TokenFields
from gdpo_nemo.algorithms.own_functions import Functions
from gdpo_nemo.algorithms.policy_loss import policy_loss
from gdpo_nemo.config.objects import load_functions
from gdpo_nemo.config.schema import PolicyConfig
from gdpo_nemo.data.packing import PackedRows, TrainSequence, pack_rows
from gdpo_nemo.data.results import TokenValues, UpdateResult
from gdpo_nemo.errors import RunError
from gdpo_nemo.megatron.attention import local_positions, make_packing
from gdpo_nemo.megatron.conversion import export_hf
from gdpo_nemo.megatron.logprobs import EntropyUse
from gdpo_nemo.megatron.lora import adapters_disabled, gather_adapters
from gdpo_nemo.megatron.model import BuiltModel, build
from gdpo_nemo.megatron.runtime import Runtime
from gdpo_nemo.weights.adapters import Adapters, merged, named

_FP8_BLOCK = 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        keep_reference: hold a copy of the starting weights in host memory for ``logprobs(reference=True)``; under LoRA
            there is none, the model without its adapters is the reference.
        seed: of LoRA's starting adapters.
    """

    def __init__(
        self,
        config: PolicyConfig,
        folder: str | Path,
        runtime: Runtime,
        total_updates: int,
        keep_reference: bool = False,
        seed: int = 0,
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
        )
        self._forward_backward = get_forward_backward_func()
        keep_reference = keep_reference and not self.lora
        self._reference = [p.detach().to("cpu", copy=True) for p in self._parameters()] if keep_reference else None

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
        self, sequences: Sequence[TrainSequence], micro_batches: Sequence[Sequence[int]], settings: LossSettings
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
            wrapped.zero_grad_buffer()
        self.built.optimizer.zero_grad()
        finish = partial(self._loss, sequences, settings, functions)
        self._ask_entropy("gradient" if settings.entropy_bonus else "value")
        try:
            done = self._run(sequences, micro_batches, finish, forward_only=False)
        except ValueError as error:
            if functions:  # whose they are, the sentence says
                raise RunError(str(error)) from error
            raise
        sums, maxima = self._reduce(done)
        norm = self._gradient_norm()
        skipped = not (math.isfinite(norm) and math.isfinite(sums["loss"]))
        if not skipped:
            self.built.scheduler.step(increment=1)
            with self.optimizer_on_device():
                self.built.optimizer.step()
        lr = self.built.optimizer.param_groups[0]["lr"]
        return UpdateResult(sums.pop("loss"), norm, float(lr), skipped, sums, maxima)

    def next_learning_rate(self) -> float:
        """The learning rate of the next update."""
        scheduler = self.built.scheduler
        scheduler.num_steps += 1
        try:
            return float(scheduler.get_lr(self.built.optimizer.param_groups[0]))
        finally:
            scheduler.num_steps -= 1

    def _gradient_norm(self) -> float:
        """Norm of the whole model's gradient before clipping; the same on every rank."""
        self.built.optimizer.prepare_grads()
        return float(self.built.optimizer.get_grad_norm())

    def _loss(self, sequences, settings, functions: Functions, rows: PackedRows, output: torch.Tensor):
        logprobs, entropy = output.float().unbind(-1)
        fields = self._fields(sequences, rows)
        loss, metrics = policy_loss(logprobs, entropy, fields, settings, self._sum_over_context, functions)
        # Megatron divides by this token count in its own reduction, which `model._finalize` leaves out.
        tokens = torch.tensor(len(rows.rows), dtype=torch.int, device=output.device)
        return loss, tokens, (loss.detach(), metrics)

    def _fields(self, sequences: Sequence[TrainSequence], rows: PackedRows) -> TokenFields:
        # The rows of a sequence stand together, so each sequence is read once.
        starts = np.flatnonzero(np.diff(rows.sequence, prepend=-1))
        members = [sequences[i] for i in rows.sequence[starts].tolist()]
        counts = np.diff(starts, append=len(rows.sequence))
        offsets = np.split(rows.offset, starts[1:])

        def column(name: str, kind: type = np.float32) -> torch.Tensor | None:
            # Of a rank without a sequence nobody knows what the others have; no token of anything is right for all.
            if sequences and getattr(sequences[0], name) is None:
                return None
            parts = [getattr(member, name)[places] for member, places in zip(members, offsets)]
            array = np.concatenate(parts) if parts else np.zeros(0)
            return torch.from_numpy(np.ascontiguousarray(array, dtype=kind)).to(self.runtime.device)

        def constant(name: str) -> torch.Tensor:
            values = np.array([getattr(member, name) for member in members], np.float32)
            return torch.from_numpy(np.repeat(values, counts)).to(self.runtime.device)

        return TokenFields(
            sampler_logprobs=column("sampler_logprobs"),
            old_logprobs=column("old_logprobs"),
            reference_logprobs=column("reference_logprobs"),
            advantages=constant("advantage"),
            weights=constant("weight"),
            staleness=column("staleness", np.int32),
            sequence_ids=torch.from_numpy(rows.sequence).to(self.runtime.device),
            num_sequences=len(sequences),
        )

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
            for loss, metrics in done:
                for name, value in {"loss": loss, **metrics.sums}.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                for name, value in metrics.maxima.items():
                    maxima[name] = max(maxima.get(name, float("-inf")), float(value))
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
        offloads = self.layout.optimizer.offload and self.runtime.device.type == "cuda"
        if offloads:
            self.built.optimizer.restore_from_cpu()
        try:
            yield
        finally:
            if offloads:
                self.built.optimizer.offload_to_cpu()

    # -- evaluate -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(
        self,
        sequences: Sequence[TrainSequence],
        micro_batches: Sequence[Sequence[int]],
        reference: bool = False,
        temperature: float | None = None,
    ) -> TokenValues | None:
        """Log-probs of all completion tokens of this rank's sequences under the current (or reference) weights.

        ``temperature`` replaces the sampling temperature for this call.

        Returns:
            This rank's share where the rank reports (see ``reports``), else None.
        """
        with self._reference_weights() if reference else contextlib.nullcontext(), self._at_temperature(temperature):
            self._training(False)
            self._ask_entropy("none")
            done = self._run(sequences, micro_batches, self._collect, forward_only=True)
            self._training(True)
        if not self.reports:
            return None
        return TokenValues(*(np.concatenate([part[i] for part in done]) for i in range(3)))

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

    @staticmethod
    def _collect(rows: PackedRows, output: torch.Tensor):
        values = output[:, 0].float().cpu().numpy()
        tokens = torch.tensor(len(rows.rows), dtype=torch.int, device=output.device)
        return output.sum(), tokens, (rows.sequence, rows.offset, values)

    @contextlib.contextmanager
    def _reference_weights(self):
        if self.lora:
            with adapters_disabled(self.chunks):
                yield
            return
        with self.params_synced():
            live = [p.detach().clone() for p in self._parameters()]
            try:
                self._copy_in(self._reference)
                yield
            finally:
                self._copy_in(live)

    @torch.no_grad()
    def _copy_in(self, values) -> None:
        for parameter, value in zip(self._parameters(), values):
            parameter.copy_(value)

    def _training(self, on: bool) -> None:
        for wrapped in self.built.wrapped:
            wrapped.train(on)

    # -- Megatron's schedule ------------------------------------------------------------------------------------

    def _run(self, sequences, micro_batches: Sequence[Sequence[int]], finish, forward_only: bool) -> list:
        """Run this rank's micro-batches through Megatron's schedule; ``finish(rows, output)`` closes each on the last
        stage."""
        layout = self.layout
        context_size = layout.context_parallel_size
        total_multiple = context_size * layout.tensor_model_parallel_size if layout.sequence_parallel else 1
        if layout.fp8:  # the tokens of each rank's matrix products come in blocks
            total_multiple = _FP8_BLOCK * context_size * layout.tensor_model_parallel_size

        def packed():
            for members in micro_batches:
                rows = pack_rows(
                    sequences,
                    members,
                    context_rank=parallel_state.get_context_parallel_rank(),
                    context_size=context_size,
                    total_multiple=total_multiple,
                    positions=local_positions,
                )
                yield rows

        def step(iterator, model):
            rows = next(iterator)
            device = self.runtime.device
            packing = make_packing(
                rows.padded_lengths, parallel_state.get_context_parallel_rank(), context_size, device
            )
            tokens, places, targets = (torch.from_numpy(x).to(device) for x in (rows.tokens, rows.rows, rows.targets))
            return model(tokens[None], packing, places, targets), partial(finish, rows)

        wrapped = self.built.wrapped
        iterators = [packed() for _ in wrapped]
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

    def adapter(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """LoRA's matrices by Hugging Face module, whole, on every rank (see ``lora.gather_adapters``)."""
        with self.params_synced():
            return gather_adapters(self.chunks)
