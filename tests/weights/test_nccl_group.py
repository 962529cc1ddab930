"""What is asked of NCCL on both ends of an update, by a recording group in its place that lets gloo carry the bytes."""

from __future__ import annotations

import datetime
import os
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_streams import CPU, Received, model, same

from gdpo_nemo.weights import broadcast_group
from gdpo_nemo.weights.broadcast_group import JOIN_S, BroadcastServer
from gdpo_nemo.weights.manifest import PeerLost, divide, filled, joined, weight_metadata
from gdpo_nemo.weights.transports.collective import CollectiveReceiver

BUCKET = 700
_lock = threading.Lock()


class RecordedNccl:
    """``ProcessGroupNCCL`` as its binding declares it: (store, rank, size, options)."""

    Options = dist.ProcessGroupNCCL.Options
    made: list[RecordedNccl] = []
    orders: dict[int, list[tuple[int, str, int]]] = {}
    """(port of the sender, operation, bytes) of everything that a member asked for, by thread."""
    fails_at: int | None = None
    """Number of the receivers' broadcast at which a member is lost."""

    buffers: dict[int, list[weakref.ref]] = {}
    """The buffers of a member, by thread."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: dist.ProcessGroupNCCL.Options):
        assert isinstance(options, self.Options)
        self.rank = rank
        self.size = size
        self.limit = options._timeout
        self.blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
        self.blocks = options.config.max_ctas
        self.most_alive = 0
        self.port = getattr(store, "port", None)
        self.asked: list[tuple[str, int, torch.dtype]] = []
        self.aborts = 0
        self._gloo = broadcast_group._gloo(store, rank, size, "127.0.0.1", datetime.timedelta(seconds=60))
        with _lock:
            self.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions):
        (tensor,) = tensors
        assert opts.rootRank == 0 and opts.asyncOp
        if self.rank and len(self.asked) == self.fails_at:
            raise dist.DistBackendError("NCCL error in: NCCLUtils.cpp:94, remote process exited or there was an error")
        self._ask("broadcast", tensor)
        return self._gloo.broadcast(tensors, opts)

    def allreduce(self, tensors: list[torch.Tensor]):
        self._ask("allreduce", tensors[0])
        return self._gloo.allreduce(tensors)

    def _ask(self, operation: str, tensor: torch.Tensor) -> None:
        buffers = self.buffers.setdefault(threading.get_ident(), [])
        buffers.append(weakref.ref(tensor))
        self.most_alive = max(self.most_alive, sum(buffer() is not None for buffer in buffers))
        self.asked.append((operation, tensor.nbytes, tensor.dtype))
        self.orders.setdefault(threading.get_ident(), []).append((self.port, operation, tensor.nbytes))

    def abort(self) -> None:
        self.aborts += 1
        self._gloo.abort()
        self._gloo = None  # its connections close with it


@pytest.fixture
def groups(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", RecordedNccl)
    monkeypatch.setattr(RecordedNccl, "made", [])
    monkeypatch.setattr(RecordedNccl, "orders", {})
    monkeypatch.setattr(RecordedNccl, "buffers", {})
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    return RecordedNccl.made


def update(server: BroadcastServer, must_join: bool, version: int) -> None:
    """From this thread to the two processes of one engine, which are threads here."""
    manifest = weight_metadata(model(), version)
    receiver = CollectiveReceiver({0: (server.meeting, must_join)}, 0, 1, BUCKET, 30)
    found = [Received(receiver, manifest, worker) for worker in range(2)]
    server.send(filled(manifest, iter(model()), BUCKET, CPU))
    assert all(same(each.get(), model()) for each in found)


def test_both_ends_ask_nccl_for_the_same_in_the_same_order_update_after_update(groups):
    server = BroadcastServer("127.0.0.1", 2, "nccl", persistent=True)
    update(server, True, 1)
    update(server, False, 2)
    sizes = [bucket.nbytes for bucket in divide(weight_metadata(model(), 1), BUCKET)]
    of_one = [*(("broadcast", size, torch.uint8) for size in sizes), ("allreduce", 8, torch.int64)]
    assert len(sizes) == 4 and sorted(group.rank for group in groups) == [0, 1, 2]
    for group in groups:
        assert group.asked == 2 * of_one and group.size == 3 and group.aborts == 0
    server.end()
    for member in (0, 1):
        broadcast_group.leave(f"process {member} of engine 0 with rank 0")
    assert [group.aborts for group in groups] == [1, 1, 1]


def test_members_of_two_groups_ask_in_one_order_across_the_groups(groups, monkeypatch):
    """The order of the buckets, whichever sender is ready first. The second sender has one bucket more."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")  # the members' threads would race to set and remove it
    tensors = [model(), [*model(1), ("last", torch.ones(BUCKET))]]
    manifest = joined([weight_metadata(mine, 1, rank=rank) for rank, mine in enumerate(tensors)])
    servers = [BroadcastServer("127.0.0.1", 2, "nccl") for _ in tensors]
    receiver = CollectiveReceiver(
        {rank: (server.meeting, True) for rank, server in enumerate(servers)}, 0, 1, BUCKET, 30
    )
    found = [Received(receiver, manifest, worker, lambda pairs: sum(1 for _ in pairs)) for worker in range(2)]
    with ThreadPoolExecutor(2) as pool:
        sent = []
        for rank in (1, 0):
            own = tuple(entry for entry in manifest.entries if entry.rank == rank)
            mine = filled(replace(manifest, entries=own), iter(tensors[rank]), BUCKET, CPU)
            sent.append(pool.submit(servers[rank].send, mine))
        assert [each.result(60) for each in sent] == [None, None]
    assert [each.get() for each in found] == 2 * [len(manifest.entries)]
    ports = [server.meeting.port for server in servers]
    expected = [(ports[bucket.rank], "broadcast", bucket.nbytes) for bucket in divide(manifest, BUCKET)]
    ends = [(port, "allreduce", 8) for port in reversed(ports)]
    of_senders = [[ask for ask in expected + ends if ask[0] == port] for port in ports]
    assert sorted(RecordedNccl.orders.values()) == sorted([*of_senders, *2 * [expected + ends]])
    assert [port for port, *_ in expected][-3:] == [ports[0], ports[1], ports[1]]
    assert {group.blocks for group in groups} == {4} and len(groups) == 6
    # One bucket in transfer for each sender, the next one, and the one that has just been loaded. A thread of each gloo
    # group may release its last buffer a little later.
    assert max(group.most_alive for group in groups if group.rank) <= 2 * len(servers) + 2 < len(expected)


@pytest.mark.parametrize("before", [None, "0"])
def test_a_wait_for_nccl_ends_with_an_exception_when_its_time_is_up(groups, monkeypatch, before):
    """torch reads the variable when a group is made; afterwards it is as the user had it."""
    if before is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
    limit = datetime.timedelta(seconds=7)
    group = broadcast_group._nccl(dist.HashStore(), 0, 1, "127.0.0.1", limit)
    assert (group.blocking, group.limit) == ("1", limit) and os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before


def test_each_end_waits_for_its_configured_time(groups, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    update(BroadcastServer("127.0.0.1", 2, "nccl"), True, 1)
    assert {group.rank: group.limit.total_seconds() for group in groups} == {0: JOIN_S, 1: 30, 2: 30}


def test_an_error_of_nccls_is_a_lost_member_on_every_end_and_all_leave(groups, monkeypatch):
    monkeypatch.setattr(RecordedNccl, "fails_at", 2)
    server = BroadcastServer("127.0.0.1", 2, "nccl", persistent=True)
    manifest = weight_metadata(model(), 1)
    receiver = CollectiveReceiver({0: (server.meeting, True)}, 0, 1, BUCKET, 30)
    found = [Received(receiver, manifest, worker) for worker in range(2)]
    with pytest.raises(PeerLost):
        server.send(filled(manifest, iter(model()), BUCKET, CPU))
    for each in found:
        with pytest.raises(PeerLost, match="weight update 1: a member of the broadcast group was lost"):
            each.get()
    assert server.ended and broadcast_group._groups == {} and [group.aborts for group in groups] == [1, 1, 1]


def test_recorded_group_has_the_signatures_of_torchs_group():
    """From the stub beside torch's extension and the methods' own words: the group itself is made on a GPU only."""
    stub = (Path(torch.__file__).with_name("_C") / "_distributed_c10d.pyi").read_text()
    declared = stub.partition("class ProcessGroupNCCL(Backend):")[2]
    (of_options, of_group) = re.findall(r"def __init__\((.*?)\)", declared, re.DOTALL)[:2]
    assert of_options == "self, is_high_priority_stream: bool = False"
    assert re.findall(r"(\w+):", of_group) == ["store", "rank", "size", "options"]
    real = dist.ProcessGroupNCCL
    for name, options in (("broadcast", "BroadcastOptions"), ("allreduce", "AllreduceOptions")):
        declared = f"tensors: collections.abc.Sequence[torch.Tensor], opts: torch._C._distributed_c10d.{options} ="
        assert declared in getattr(real, name).__doc__
    assert real.abort.__doc__.startswith("abort(self: torch._C._distributed_c10d.Backend) -> None")
