"""Host memory for tensors of a GPU: blocks of pinned memory, and copies that do not block other work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

# Size of a block of pinned memory in bytes. torch rounds pinned allocations up to a power of two, so separate tensors
# could waste half of the memory.
_BLOCK = 1 << 30
_ALIGNMENT = 256


def host_memory_like(tensors: Sequence[torch.Tensor], pinned: bool) -> list[torch.Tensor]:
    """Return uninitialised host tensors with the shapes and data types of ``tensors``, packed into a few blocks."""
    used: list[int] = []
    locations = []
    for tensor in tensors:
        size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        index = next((i for i, nbytes in enumerate(used) if nbytes + size <= _BLOCK), len(used))
        if index == len(used):
            used.append(0)
        locations.append((index, used[index]))
        used[index] += size
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in used]
    like = []
    for (index, start), tensor in zip(locations, tensors):
        like.append(blocks[index][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
    return like


class HostCopies:
    """Copies of buffers in host memory. The next sequence of buffers of the same sizes replaces them in order.

    Copies from a GPU go to pinned memory on a separate stream. Work that is queued afterwards on the current stream
    does not wait for them.

    Args:
        device: device of the buffers.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copies: list[torch.Tensor] = []
        self._count = 0

    def begin(self, sizes: Sequence[int]) -> None:
        """Start a sequence of buffers with the given numbers of bytes. If the sizes differ, discard the old copies."""
        self._count = 0
        if [copy.numel() for copy in self._copies] != list(sizes):
            like = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
            self._copies = host_memory_like(like, pinned=self._stream is not None)

    def replaced(self) -> torch.Tensor:
        """Return the copy that ``add`` replaces next, uint8 [bytes], on the device. Not a new copy on CPUs."""
        copy = self._copies[self._count]
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return copy.to(self._device, non_blocking=True)

    def add(self, buffer: torch.Tensor) -> None:
        """Start copying the next buffer, uint8 [bytes]. It may be the result of ``replaced``."""
        copy = self._copies[self._count]
        self._count += 1
        if self._stream is None:
            copy.copy_(buffer)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy.copy_(buffer, non_blocking=True)
        buffer.record_stream(self._stream)  # prevents reuse of the memory during the copy

    def on_device(self) -> Iterator[torch.Tensor]:
        """Yield the buffers again, on their device. Buffers of a CPU are not copied."""
        for copy in self.in_host_memory():
            yield copy.to(self._device, non_blocking=True)

    def in_host_memory(self) -> Iterator[torch.Tensor]:
        """Yield the copies, uint8 [bytes]."""
        if self._stream is not None:
            self._stream.synchronize()
        yield from self._copies[: self._count]
