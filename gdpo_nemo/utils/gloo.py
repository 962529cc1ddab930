"""One gloo device per process for all process groups.

A gloo device has a thread that wakes up every 10 ms, even if no data arrives. By default, torch creates a device for
each group. Megatron creates 24 groups and vLLM 15, so a waiting rank would use 1 % of a core.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as groups

_GLOO: Any = dist.ProcessGroupGloo  # torch's type stubs lack its options


class _OnSharedDevice(dist.ProcessGroupGloo):
    """A gloo group on the device of this process's first group, which torch chooses (``GLOO_SOCKET_IFNAME``)."""

    _devices: list[Any] = []
    """Empty until this process creates its first group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta):
        if not _OnSharedDevice._devices:
            super().__init__(store, rank, size, timeout)
            chosen: Any = self.options
            _OnSharedDevice._devices = chosen._devices
            return
        options = _GLOO._Options()
        options._devices = _OnSharedDevice._devices
        options._threads = 2 * len(options._devices)  # like torch
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def share_device() -> None:
    """Create all further gloo groups of this process on one device.

    ``torch.distributed.new_group`` ignores options for gloo groups. Therefore this function replaces the class that
    ``new_group`` instantiates. Code that names ``torch.distributed.ProcessGroupGloo`` is not affected.
    """
    groups.ProcessGroupGloo = _OnSharedDevice  # type: ignore[misc]
