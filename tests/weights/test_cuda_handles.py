"""Handles of memory on a GPU, as far as they go without one: what torch is asked to make of them, and for which
device."""

from __future__ import annotations

import inspect
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from gdpo_nemo.weights.transports import ipc

HANDLE = dict(
    tensor_cls=torch.Tensor,
    tensor_size=torch.Size([64]),
    tensor_stride=(1,),
    tensor_offset=0,
    storage_cls=torch.UntypedStorage,
    dtype=torch.uint8,
    storage_device=3,  # as the sender counts
    storage_handle=b"handle",
    storage_size_bytes=64,
    storage_offset_bytes=0,
    requires_grad=False,
    ref_counter_handle=b"counter",
    ref_counter_offset=0,
    event_handle=b"event",
    event_sync_required=True,
)


@pytest.fixture
def connected():
    ours, theirs = Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_handle_is_opened_on_the_receivers_own_device(connected, monkeypatch):
    """Both processes count the GPUs that they see from 0: the sender's number means nothing here."""
    assert list(inspect.signature(rebuild_cuda_tensor).parameters) == list(HANDLE)
    made = torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(ipc, "reduce_tensor", lambda buffer: (rebuild_cuda_tensor, tuple(HANDLE.values())))
    opened = []
    monkeypatch.setattr(
        ipc,
        "rebuild_cuda_tensor",
        lambda *arguments: opened.append(inspect.signature(rebuild_cuda_tensor).bind(*arguments).arguments) or made,
    )
    (ours, theirs) = connected
    ipc._send_handles(ours, [SimpleNamespace(is_cuda=True)] * 2)
    buffers = [ipc._open_handle(theirs, 64, torch.device("cuda", 1)) for _ in range(2)]
    assert buffers == [made, made] and opened == 2 * [HANDLE | {"storage_device": 1}]


def test_torch_gives_a_tensor_on_a_gpu_as_a_handle_in_this_order():
    """``reduce_tensor`` needs CUDA to run; its source names what it hands over."""
    source = inspect.getsource(torch.multiprocessing.reductions.reduce_tensor)
    handed = source.partition("rebuild_cuda_tensor,")[2]
    words = [line.partition("#")[0].strip().removeprefix("(").rstrip(",") for line in handed.splitlines()]
    places = [word for word in words if word]
    assert places[:5] == ["type(tensor)", "tensor.size()", "tensor.stride()", "tensor_offset", "type(storage)"]
    assert places[5:8] == ["tensor.dtype", "device", "handle"] and places[ipc._DEVICE] == "device"


def test_queued_gpu_work_ends_before_the_other_process_is_notified(monkeypatch):
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: waited.append(device) or stream)
    ipc._synchronize(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1), True]
    ipc._synchronize(torch.device("cpu"))
    assert len(waited) == 2
