"""A torch.distributed process group in which rank 0, a policy rank, broadcasts to the processes of the engines.

This group is separate from torch's default group, because the policy and every engine already have separate default
groups. An engine process is a member of the groups of all policy ranks that send. A persistent group is reused for
later updates. The sender stores the group in its ``BroadcastServer``, and a receiving process stores it in this module,
under its member name. When an update fails, each member that detects the failure aborts the group without waiting for
other members. The abort closes the member's connections, so that the other members also detect the failure.

Aborting an NCCL communicator with a dead member follows torch's documentation, but has never run on a GPU. Members of
an NCCL group detect a dead member when a broadcast times out. Members of a gloo group detect a dead member at once.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gdpo_nemo.utils.errors import message_line
from gdpo_nemo.weights.manifest import PeerLost

JOIN_S = 120.0
"""Time limit for the engines to join, and for the transfer of a bucket. Engines already wait when the sender starts."""
_NCCL_BLOCKS = 4
"""Maximum number of thread blocks of a communicator. NCCL allocates buffers per block and peer.

An engine process has a communicator for each sending rank (up to eight). With NCCL's default of up to 64 blocks, their
buffers could take GiB of GPU memory, and kernels that wait for different senders could occupy every multiprocessor. The
assumption is that four blocks saturate a link of 400 Gbit/s. It has not been measured.
"""
_CHECK = datetime.timedelta(seconds=5)
"""Interval at which a receiver checks whether the sender is still there."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass(frozen=True)
class Meeting:
    """Rendezvous of a group: address and identity of the group."""

    host: str
    port: int
    world: int
    """Number of members, including rank 0."""
    backend: str
    persistent: bool
    """True if the group is reused for later updates."""
    name: str
    """Unique name of the group."""


class Operation:
    """A collective operation in progress.

    Args:
        store: the sender's store, if the operation may wait forever for a sender that has left the group. This was seen
            with gloo when engines were killed at random.
    """

    def __init__(self, work: Any, store: dist.TCPStore | None = None):
        self._work: Any = work
        self._store = store

    def finish(self) -> None:
        """Wait for the operation to complete. Raises PeerLost if a member was lost."""
        with _as_peer_lost():
            while self._store is not None and not self._completes_soon():
                self._store.check(["any"])  # fails if the sender has closed the store
            self._work.wait()
        self.drop()

    def _completes_soon(self) -> bool:
        """Wait for a short time. Return whether the operation has completed or failed."""
        with contextlib.suppress(RuntimeError):  # of the operation, or because the time is over
            self._work.wait(_CHECK)
        completed: bool = self._work.is_completed()
        return completed

    @property
    def dropped(self) -> bool:
        """True if the operation has completed or ``drop`` has released it."""
        return self._work is None

    def drop(self) -> None:
        """Release torch's handle of the operation, which keeps the buffer and the group's connections alive.

        The traceback of an exception may keep this object alive, but the other members wait until the connections
        close.
        """
        self._work = self._store = None


class BroadcastGroup:
    """Membership of this process in a group. The constructor waits for all other members.

    Args:
        store: store for the rendezvous. The store must live as long as the group, because NCCL creates communicators at
            their first use.
        address: address of this machine on the route to the other members.
        timeout_s: time limit of the rendezvous, and of each operation.

    Raises:
        PeerLost: if a member did not join.
    """

    def __init__(self, meeting: Meeting, store: dist.TCPStore, rank: int, address: str, timeout_s: float):
        limit = datetime.timedelta(seconds=timeout_s)
        make = {"gloo": _gloo, "nccl": _nccl}[meeting.backend]
        self.meeting = meeting
        self._store: dist.TCPStore | None = store
        self._watched_store = store if rank and meeting.backend == "gloo" else None
        self._group: Any = None
        self._operations: list[Operation] = []
        """Operations of the update in progress."""
        self._device: torch.device | None = None
        """Device of the transferred buffers. This device may differ from the thread's current GPU."""
        with _as_peer_lost():
            self._group = make(store, rank, meeting.world, address, limit)

    @property
    def ended(self) -> bool:
        """True if this member has left the group."""
        return self._group is None

    def broadcast(self, buffer: torch.Tensor) -> Operation:
        """Start sending (rank 0) or receiving (other ranks) a buffer, uint8 [bytes]."""
        self._device = buffer.device
        with _as_peer_lost():
            return self._add_operation(self._group.broadcast([buffer], dist.BroadcastOptions()))

    def _add_operation(self, work: Any) -> Operation:
        self._operations = [operation for operation in self._operations if not operation.dropped]
        self._operations.append(Operation(work, self._watched_store))
        return self._operations[-1]

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Run one update in the block. After the block, wait until all members have received all buffers.

        If the block fails, this member leaves the group, and the other members can no longer use the group.

        Raises:
            PeerLost: if a member was lost.
        """
        try:
            yield
            done = torch.ones(1, dtype=torch.int64, device=self._device)
            with _as_peer_lost():
                last = self._add_operation(self._group.allreduce([done]))
            last.finish()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Abort all operations and leave the group.

        Without the abort, an operation with a dead member would never end.
        """
        group = self._group
        self._group = None
        self._store = self._watched_store = None
        if group is not None:
            group.abort()
        for operation in self._operations:
            operation.drop()


class BroadcastServer:
    """Sender (rank 0) of a group. The sender opens a rendezvous store, whose address is in ``meeting``.

    Args:
        host: address of this machine at which the store listens.
        receivers: number of receiving processes.
        backend: ``nccl`` or ``gloo``.
        persistent: True to use the group for successive updates, until ``end`` or the first failure.
    """

    def __init__(self, host: str, receivers: int, backend: str, persistent: bool = False):
        limit = datetime.timedelta(seconds=JOIN_S)
        # Create the socket here, because a socket created by torch would listen on every interface.
        listener = socket.create_server((host, 0), backlog=receivers + 1)
        port = listener.getsockname()[1]
        self._store: dist.TCPStore | None = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
        )
        self._group: BroadcastGroup | None = None
        self.meeting = Meeting(host, self._store.port, 1 + receivers, backend, persistent, secrets.token_hex(8))

    @property
    def ended(self) -> bool:
        """True if the server can no longer send."""
        return self._store is None

    def send(self, buckets: Iterable[torch.Tensor]) -> None:
        """Broadcast buckets to the receivers that have joined the group or are about to join it.

        The next bucket is requested while the previous bucket is in transfer.

        Args:
            buckets: buffers, uint8 [bytes], on a device that the backend supports.

        Raises:
            PeerLost: if a receiver did not join or was lost.
        """
        completed = False
        try:
            if self._group is None:
                assert self._store is not None
                self._group = BroadcastGroup(self.meeting, self._store, 0, self.meeting.host, JOIN_S)
            self._broadcast(self._group, buckets)
            completed = True
        except PeerLost as error:
            # Frames in tracebacks hold the store. Members that have not joined the group wait until it closes.
            for failure in (error, error.__cause__):
                traceback.clear_frames(failure.__traceback__ if failure else None)
            raise
        finally:
            if not (completed and self.meeting.persistent):
                self.end()

    def _broadcast(self, group: BroadcastGroup, buckets: Iterable[torch.Tensor]) -> None:
        with group.update():
            sent = None
            for bucket in buckets:
                if sent:
                    sent[1].finish()
                sent = bucket, group.broadcast(bucket)  # the tuple keeps the buffer alive
            if sent:
                sent[1].finish()

    def end(self) -> None:
        """End the group and its store. Members that have not joined yet stop waiting."""
        if self._group is not None:
            self._group.end()
        self._group = None
        self._store = None


_groups: dict[str, BroadcastGroup] = {}
"""Persistent groups in which this process is a receiver, by member name."""


@contextlib.contextmanager
def joined_group(
    meeting: Meeting, member: str, rank: int, must_join: bool, timeout_s: float
) -> Iterator[BroadcastGroup]:
    """Provide a receiver with the group of a rendezvous, for one update.

    Args:
        member: name under which this process stores a persistent group. A new group replaces the previous group of this
            name.
        must_join: True if the group is new and all members join it now. False if the members joined the group in an
            earlier update.

    Raises:
        PeerLost: if the sender or another receiver was lost.
    """
    if must_join:
        if meeting.persistent:
            leave(member)
        group = _new_group(meeting, rank, timeout_s)
        if meeting.persistent:
            _groups[member] = group
    else:
        group = _existing_group(meeting, member)
    try:
        with group.update():
            yield group
    finally:
        if group.ended:
            _groups.pop(member, None)
        elif not meeting.persistent:
            group.end()


def leave(member: str, meeting: Meeting | None = None) -> None:
    """End the persistent group of a member if it exists.

    Args:
        meeting: rendezvous of the group to end. A group of another rendezvous is not ended. None ends any group.
    """
    group = _groups.get(member)
    if group is not None and meeting in (None, group.meeting):
        del _groups[member]
        group.end()


def _existing_group(meeting: Meeting, member: str) -> BroadcastGroup:
    group = _groups.get(member)
    if group is None or group.meeting != meeting:
        # This process detected the failure of the previous update, but the sender did not.
        raise PeerLost(f"a member of the broadcast group was lost ({member} is no longer a member)")
    return group


def _new_group(meeting: Meeting, rank: int, timeout_s: float) -> BroadcastGroup:
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
    except RuntimeError as error:
        raise PeerLost(f"no sender at {meeting.host}:{meeting.port} ({message_line(error)[:160]})") from error
    return BroadcastGroup(meeting, store, rank, _own_address(meeting.host, meeting.port), timeout_s)


def _gloo(store: dist.Store, rank: int, world: int, address: str, limit: datetime.timedelta) -> Any:
    # torch's stubs do not declare gloo's class as a ProcessGroup, although it has the same interface.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    # Use the IP address, because a host name often resolves to a loopback address, which other hosts cannot reach.
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, world, options)


def _nccl(store: dist.Store, rank: int, world: int, address: str, limit: datetime.timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    options.config.max_ctas = _NCCL_BLOCKS
    # torch reads this variable when it creates a group. With this variable, a timeout raises an exception instead of
    # ending the process.
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, world, options)
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


def _own_address(host: str, port: int) -> str:
    """Return this machine's address on the route to ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
    return address


@contextlib.contextmanager
def _as_peer_lost() -> Iterator[None]:
    """Convert torch errors in the block to PeerLost."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"a member of the broadcast group was lost ({message_line(error)[:160]})") from error
