"""What waits in host memory until the GPU needs it: Adam's state between updates, and the weights of the KL reference.

Host memory is pinned and taken once: copies from and to pageable memory pass through a small buffer of the driver's, at
a third of the speed, and the process waits for them.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, Iterator, Sequence

import torch

# torch rounds pinned allocations up to a power of two; tensor by tensor, half of the memory would be lost to that.
_BLOCK = 1 << 30
_ALIGNMENT = 256


def host_memory_like(tensors: Sequence[torch.Tensor], pinned: bool) -> list[torch.Tensor]:
    """Host tensors of the shapes and types of ``tensors``, uninitialised, packed into a few blocks."""
    sizes = [-(-t.numel() * t.element_size() // _ALIGNMENT) * _ALIGNMENT for t in tensors]
    used: list[int] = []
    places = []
    for size in sizes:
        index = next((i for i, taken in enumerate(used) if taken + size <= _BLOCK), len(used))
        if index == len(used):
            used.append(0)
        places.append((index, used[index]))
        used[index] += size
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in used]
    return [
        blocks[index][start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
        for (index, start), t in zip(places, tensors)
    ]


class OptimizerOffload:
    """Main weights and moments of an optimizer, in host memory between updates.

    Copies run on a stream of their own. On the way out the memory of each tensor is given back when its copy is done,
    while the process goes on; on the way in the work queued until ``wait`` runs beside them.

    Args:
        optimizer: Megatron's.
        parameters: the model's. Where one of them is a main weight itself (float32), it stays.
    """

    def __init__(self, optimizer: Any, parameters: Iterable[torch.nn.Parameter], device: torch.device):
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self._optimizers = [part.optimizer for part in parts if not getattr(part, "is_stub_optimizer", False)]
        self._parameters = list(parameters)
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        """By parameter and name of the state ("" for the parameter)."""
        self._away: list[tuple[dict | None, torch.Tensor, str]] = []
        """What is in host memory: state of the parameter, the parameter, the name."""

    def send(self) -> None:
        """Start moving everything to host memory; returns before it is there."""
        held = list(self._held())
        new = {(owner, name): tensor for _, owner, name, tensor in held if (owner, name) not in self._host}
        self._host.update(zip(new, host_memory_like(list(new.values()), pinned=self._stream is not None)))
        with self._beside():
            for state, owner, name, tensor in held:
                host = self._host[owner, name]
                host.copy_(tensor, non_blocking=True)
                if self._stream is not None:
                    tensor.record_stream(self._stream)  # else its memory could be written while it is being read
                _place(state, owner, name, host)
                self._away.append((state, owner, name))

    def fetch(self) -> None:
        """Start moving everything to the device. What reads it must be queued after ``wait``."""
        # In the memory of the stream that computes: another stream has memory of its own, and the activations that are
        # gone by now could not be reused.
        arrivals = [torch.empty_like(self._host[owner, name], device=self._device) for _, owner, name in self._away]
        with self._beside():
            for tensor, (state, owner, name) in zip(arrivals, self._away):
                tensor.copy_(self._host[owner, name], non_blocking=True)
                _place(state, owner, name, tensor)
        self._away = []

    def wait(self) -> None:
        """Let what is queued from now on wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _held(self) -> Iterator[tuple[dict | None, torch.Tensor, str, torch.Tensor]]:
        model = {p.untyped_storage()._cdata for p in self._parameters}
        for optimizer in self._optimizers:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.grad = None  # where the parameter is not, its gradient may not be
                if p.untyped_storage()._cdata not in model:
                    yield None, p, "", p.data
                state = optimizer.state.get(p, {})
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.device == self._device:
                        yield state, p, name, value

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Queue the copies of the block on their own stream, behind all that is queued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


def _place(state: dict | None, owner: torch.Tensor, name: str, value: torch.Tensor) -> None:
    if state is None:
        owner.data = value
    else:
        state[name] = value


class Reference:
    """The starting weights of the model, for passes under them; or what they became by ``follow``.

    Args:
        parameters: the model's, which hold the starting weights now.
        on_host: keep them in host memory and copy them to the device for every pass; else keep them on the device.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], on_host: bool):
        self._parameters = list(parameters)
        live = [p.detach() for p in self._parameters]
        # On a CPU there is one memory, in which the copy may stay.
        self._travels = on_host and any(value.is_cuda for value in live)
        if self._travels:
            self._weights = host_memory_like(live, pinned=True)
            for kept, value in zip(self._weights, live):
                kept.copy_(value)
        else:
            self._weights = [value.clone() for value in live]

    @property
    def weights(self) -> list[torch.Tensor]:
        """Its own tensors, in the order of the parameters."""
        return self._weights

    @torch.no_grad()
    def follow(self, alpha: float) -> None:
        """Become ``alpha`` of the policy's weights and 1 - ``alpha`` of its own (arXiv 2404.09656 eq. 7)."""
        for kept, p in zip(self._weights, self._parameters):
            kept.mul_(1.0 - alpha).add_(p.detach().to(kept.device), alpha=alpha)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the parameters be the starting weights; those of the policy are not touched, and come back after it."""
        live = [p.data for p in self._parameters]
        try:
            for p, kept in zip(self._parameters, self._weights):
                p.data = kept.to(p.device, non_blocking=True) if self._travels else kept
            yield
        finally:
            for p, value in zip(self._parameters, live):
                p.data = value
