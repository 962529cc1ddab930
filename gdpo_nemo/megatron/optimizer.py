"""Optimizer on one rank: Adam, Muon, offloading of optimizer state to host memory, and the learning-rate schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from inspect import unwrap
from typing import Any

import torch
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from gdpo_nemo.config.allowed_values import MUON_KEYS
from gdpo_nemo.config.schema import MegatronConfig, OptimizerConfig
from gdpo_nemo.weights.host_memory import host_memory_like


def chained(optimizer: Any) -> list[Any]:
    """Return the optimizers that Megatron chains, or the only optimizer.

    Dense and expert parameters have separate optimizers, and with Muon also matrices and other parameters.
    """
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def optimized(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of all groups of a torch optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


class OptimizerOffload:
    """Offloading of an optimizer's main weights and moments to host memory between updates.

    Copies run on a separate stream. ``send`` releases the memory of each tensor when its copy is done, without blocking
    the process. The copies of ``fetch`` overlap with the work that is queued until ``wait``.

    Args:
        optimizer: Megatron's optimizer.
        parameters: parameters of the model. A parameter that is also a main weight (float32) is not offloaded.
    """

    def __init__(self, optimizer: Any, parameters: Iterable[torch.nn.Parameter], device: torch.device):
        self._optimizers = []
        for part in chained(optimizer):
            if not getattr(part, "is_stub_optimizer", False):  # a rank without parameters of a kind has a stub
                self._optimizers.append(part.optimizer)
        self._parameters = list(parameters)
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        """Host tensors by (parameter, name of its state). The name is empty for the parameter itself."""
        self._offloaded: list[tuple[dict[str, Any] | None, torch.Tensor, str]] = []
        """(state dictionary, parameter, name) of every tensor in host memory (see ``_device_tensors``)."""

    def send(self) -> None:
        """Start moving all tensors to host memory. Return before the copies are done."""
        tensors = list(self._device_tensors())
        new = {(owner, name): tensor for _, owner, name, tensor in tensors if (owner, name) not in self._host}
        self._host.update(zip(new, host_memory_like(list(new.values()), pinned=self._stream is not None)))
        with self._copy_stream():
            for state, owner, name, tensor in tensors:
                host = self._host[owner, name]
                host.copy_(tensor, non_blocking=True)
                if self._stream is not None:
                    tensor.record_stream(self._stream)  # prevents reuse of the memory during the copy
                _assign(state, owner, name, host)
                self._offloaded.append((state, owner, name))

    def fetch(self) -> None:
        """Start moving all tensors back to the device. Call ``wait`` before you queue work that reads these tensors."""
        # Allocate on the compute stream. torch caches memory per stream, so the copy stream could not reuse the memory
        # of freed activations.
        host_tensors = [self._host[owner, name] for _, owner, name in self._offloaded]
        on_device = [torch.empty_like(tensor, device=self._device) for tensor in host_tensors]
        with self._copy_stream():
            for tensor, (state, owner, name) in zip(on_device, self._offloaded):
                tensor.copy_(self._host[owner, name], non_blocking=True)
                _assign(state, owner, name, tensor)
        self._offloaded = []

    def wait(self) -> None:
        """Make work that is queued later wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _device_tensors(self) -> Iterator[tuple[dict[str, Any] | None, torch.Tensor, str, torch.Tensor]]:
        """Yield (state dictionary, parameter, name, tensor) of every tensor to offload.

        For a main weight, the dictionary is None and the name is empty.
        """
        model = {p.untyped_storage()._cdata for p in self._parameters}
        for optimizer in self._optimizers:
            for p in optimized(optimizer):
                p.grad = None  # gradient and parameter must be on the same device
                if p.untyped_storage()._cdata not in model:
                    yield None, p, "", p.data
                state = optimizer.state.get(p, {})
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.device == self._device:
                        yield state, p, name, value

    @contextlib.contextmanager
    def _copy_stream(self) -> Iterator[None]:
        """Queue the copies in the block on the copy stream, after all work that has been queued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


def _assign(state: dict[str, Any] | None, owner: torch.Tensor, name: str, value: torch.Tensor) -> None:
    if state is None:
        owner.data = value
    else:
        state[name] = value


class Reference:
    """Weights of the reference model. They start as a copy of the policy's weights, and ``follow`` updates them.

    Args:
        parameters: parameters of the policy, with the starting weights.
        on_host: True to store the reference in host memory and copy it to the device for every forward pass. False to
            store it on the device.
    """

    weights: list[torch.Tensor]
    """Tensors of the reference, in the order of the parameters."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], on_host: bool):
        self._parameters = list(parameters)
        live = [p.detach() for p in self._parameters]
        # On a CPU, host memory and device memory are the same.
        self._on_host = on_host and any(value.is_cuda for value in live)
        if self._on_host:
            self.weights = host_memory_like(live, pinned=True)
            for weight, value in zip(self.weights, live):
                weight.copy_(value)
        else:
            self.weights = [value.clone() for value in live]

    @torch.no_grad()
    def follow(self, alpha: float) -> None:
        """Set the reference to alpha * policy + (1 - alpha) * reference (arXiv 2404.09656, equation 7)."""
        for weight, p in zip(self.weights, self._parameters):
            weight.mul_(1.0 - alpha).add_(p.detach().to(weight.device), alpha=alpha)

    @contextlib.contextmanager
    def as_parameters(self) -> Iterator[None]:
        """Use the reference as the model's parameters in the block. Afterwards restore the policy's weights."""
        live = [p.data for p in self._parameters]
        try:
            for p, weight in zip(self._parameters, self.weights):
                p.data = weight.to(p.device, non_blocking=True) if self._on_host else weight
            yield
        finally:
            for p, value in zip(self._parameters, live):
                p.data = value


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW (``adam_w_mode``) or Adam with L2 decay, with one step count per parameter group.

    The state of a parameter consists of ``exp_avg`` and ``exp_avg_sq``. ``step`` is an entry of the group.
    """

    # torch wraps these methods to exclude them from compilation. The first call imports torch's compiler, which takes 1
    # s of CPU time on every rank. ``GroupStepAdam`` is never compiled.
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)

    def __init__(
        self,
        params,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        **unused,
    ):
        self._update = adamw if adam_w_mode else adam
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            step = int(group.get("step", 0))
            group["step"] = step + 1
            for p in params:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
            self._update(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                # torch adds 1 to these step counts. The counts are created on the device, because a copy from the host
                # would wait for the device.
                list(torch.full((len(params),), float(step), device=params[0].device).unbind()),
                fused=True,
                foreach=False,
                amsgrad=False,
                maximize=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )


class UpdateSchedule(OptimizerParamScheduler):
    """Megatron's schedule, advanced once per update.

    NeMo-RL advances its schedule once after all updates of a step (``MegatronPolicyWorker.train``), so that these
    updates share one learning rate.

    Args:
        hold: number of consecutive updates that share the learning rate of their first update.
    """

    num_steps: int
    """Number of updates counted so far."""

    def __init__(self, *arguments: Any, hold: int = 1, **options: Any):
        self._hold = hold
        super().__init__(*arguments, **options)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the learning rate of the current update for a parameter group of the optimizer.

        Before the first update, return the learning rate of the first update.
        """
        ticks = self.num_steps
        self.num_steps = max(1, ticks - (ticks - 1) % self._hold)
        try:
            rate = float(super().get_lr({}))
        finally:
            self.num_steps = ticks
        # Megatron would use the policy's initial rate and the group's own peak rate. The warmup of a value head would
        # then start at the wrong rate, which could be negative.
        multiplier = param_group.get("max_lr", self.max_lr) / self.max_lr if self.max_lr else 1.0
        return rate * multiplier

    def tick(self, skipped: bool) -> None:
        """Count an update and set the learning rate.

        A skipped update counts only if several updates share a learning rate (``hold``). Otherwise a shared learning
        rate would no longer start with the first update of a step after a skipped update.
        """
        if not skipped or self._hold > 1:
            self.step(increment=1)

    def rate(self) -> float:
        """Return the learning rate of the current update."""
        return self.get_lr({})

    def next_rate(self) -> float:
        """Return the learning rate of the next update."""
        self.num_steps += 1
        try:
            return self.rate()
        finally:
            self.num_steps -= 1


def make_schedule(optimizer: Any, layout: MegatronConfig, total_updates: int) -> UpdateSchedule:
    """Create the schedule that the config section ``scheduler`` specifies.

    Args:
        optimizer: optimizer of Megatron or torch. A group with ``max_lr`` in its ``param_groups`` has the schedule's
            rate times ``max_lr / lr``.
        total_updates: total number of updates of the run, after which the learning-rate decay ends by default.
    """
    o = layout.optimizer
    s = layout.scheduler
    warmup = s.lr_warmup_steps
    decay_steps = s.lr_decay_steps or max(total_updates, warmup + 1)
    init = 0.0
    if not (warmup and s.lr_warmup_init is None):
        # The first update is tick 1 and must use the rate that Megatron has at tick 0. A warmup of one more tick delays
        # the schedule by one tick. Its initial rate is extrapolated, so that tick 1 has the intended rate.
        first = s.lr_warmup_init or 0.0
        init = first - (o.lr - first) / warmup if warmup else o.lr
        warmup = warmup + 1
        decay_steps = decay_steps + 1
    return UpdateSchedule(
        optimizer,
        init_lr=init,
        max_lr=o.lr,
        min_lr=o.lr if s.lr_decay_style == "constant" else o.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay_steps,
        lr_decay_style=s.lr_decay_style,
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # Load only the number of updates from a checkpoint. All other values come from the config.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        hold=s.lr_hold_updates,
    )


def mark_as_output(module: torch.nn.Module) -> None:
    """Mark the parameters of a module as those of an output layer, which AdamW updates in a run with Muon."""
    for parameter in module.parameters():
        setattr(parameter, "is_embedding_or_output_parameter", True)  # noqa: B010


def _muon_settings(config: OptimizerConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of Megatron's optimizer config that have the same names as the keys of Muon."""
    settings = {name: getattr(config, name) for name in MUON_KEYS}
    precision = "highest" if dtype == torch.float32 else "medium"
    return {**settings, "muon_fp32_matmul_prec": config.muon_fp32_matmul_prec or precision}


def _mark_queries_and_keys(chunk: torch.nn.Module) -> None:
    """Set the rows of queries, keys and values by which Muon splits the projections of layers with their own heads.

    Megatron has set the rows from the model's config, which differs from the config of such layers.
    """
    for module in chunk.modules():
        if not hasattr(module, "keys_as_values"):
            continue
        attention: Any = module
        layer = attention.config
        queries = layer.num_attention_heads // layer.num_query_groups * layer.kv_channels
        rows = [queries, *[layer.kv_channels] * (1 if attention.keys_as_values else 2)]
        weight = attention.linear_qkv.weight
        for matrix in (weight, getattr(weight, "main_param", weight)):
            matrix.is_qkv = True
            matrix.qkv_split_shapes = rows


def build_optimizer(
    layout: MegatronConfig,
    dtype: torch.dtype,
    wrapped: list[Any],
    total_updates: int,
    value_lr_mult: float | None = None,
):
    """Return Megatron's AdamW or Muon, and a learning-rate scheduler that takes one step per update.

    Args:
        wrapped: wrapped chunks of the model.
        total_updates: total number of updates of the run, after which the learning-rate decay ends by default.
        value_lr_mult: learning-rate multiplier of the value head, or None if the model has no value head.
    """
    o = layout.optimizer
    config = MegatronOptimizerConfig(
        optimizer="muon" if o.type == "muon" else "adam",
        lr=o.lr,
        min_lr=o.min_lr,
        weight_decay=o.weight_decay,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_eps=o.adam_eps,
        clip_grad=o.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=layout.use_distributed_optimizer,
        overlap_param_gather=layout.overlap_param_gather,
        use_precision_aware_optimizer=o.use_precision_aware_optimizer,
        # The 16-bit remainders of the main weights could not be loaded by an optimizer that stores the main weights.
        store_param_remainders=False,
        exp_avg_dtype=getattr(torch, o.exp_avg_dtype),
        exp_avg_sq_dtype=getattr(torch, o.exp_avg_sq_dtype),
        main_grads_dtype=getattr(torch, o.main_grads_dtype),
        **_muon_settings(o, dtype),
    )
    overrides = None
    if value_lr_mult is not None:
        # is_decoupled_lr identifies this group when a checkpoint is loaded. The learning rates cannot identify the
        # group, because a resumed run may change them.
        head: Any = dict(is_decoupled_lr=True, max_lr=value_lr_mult * o.lr, min_lr=value_lr_mult * o.min_lr)
        overrides = {**get_standard_config_overrides(config), ParamKey(name="*value_head.*"): head}
    optimizer = get_megatron_optimizer(config, wrapped, overrides)
    for chunk in wrapped:
        _mark_queries_and_keys(chunk)
    return optimizer, make_schedule(optimizer, layout, total_updates)
