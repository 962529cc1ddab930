"""A group of torch.distributed in which rank 0 broadcasts to the processes of the engines.

It is apart from torch's world, since the policy and every engine have worlds of their own. A group may stand: both ends
then keep it from one update to the next, the sender in a ``BroadcastServer``, a receiving process under its own name in
this module. Whatever breaks an update ends the group on the end that notices, by an abort, which waits for nobody: its
connections close, so that the others notice, too.

``abort`` of an NCCL communicator with a dead member was written by torch's documentation; no GPU has run it. The
members of such a group notice the death by the deadline of a broadcast, those of gloo at once.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
from dataclasses import dataclass
from typing import Any, Iterable, Iterator

import torch
import torch.distributed as dist

from gdpo_nemo.config.messages import message_line
from gdpo_nemo.weights.buckets import PeerLost

JOIN_S = 120.0
"""Limit for the engines to join and for one bucket to pass; they wait already when the sender begins."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass(frozen=True)
class Meeting:
    """Where a group meets, and which one it is."""

    host: str
    port: int
    world: int
    """Rank 0 and all receiving processes."""
    backend: str
    stands: bool
    """Whether the group is there for the next update, too."""
    name: str


class Operation:
    """Something under way in a group."""

    def __init__(self, work: Any):
        self._work: Any = work

    def finish(self) -> None:
        """Wait until it is done. Raises PeerLost where a member was lost."""
        with _named():
            self._work.wait()
        self.drop()

    @property
    def dropped(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._work is None

    def drop(self) -> None:
        """Let go of its bytes and of the group's connections, which frames of an exception would hold with this object:
        the others wait until these are closed."""
        self._work = None


class BroadcastGroup:
    """One member's end of a group. Constructing it waits for all others.

    Args:
        store: where they meet; lives as long as the group, since NCCL makes its communicators at the first use.
        address: of this machine on the way to the others.
        timeout_s: limit of the wait for the others, and of each operation.

    Raises:
        PeerLost: not all of them came.
    """

    def __init__(self, meeting: Meeting, store: dist.TCPStore, rank: int, address: str, timeout_s: float):
        limit = datetime.timedelta(seconds=timeout_s)
        make = {"gloo": _gloo, "nccl": _nccl}[meeting.backend]
        self.meeting = meeting
        self._store: dist.TCPStore | None = store
        self._group: Any = None
        self._operations: list[Operation] = []
        """Of the update under way."""
        self._device: torch.device | None = None
        """Of the bytes that pass; a thread's current GPU may be another one."""
        with _named():
            self._group = make(store, rank, meeting.world, address, limit)

    @property
    def ended(self) -> bool:
        """Whether the member has left."""
        return self._group is None

    def broadcast(self, buffer: torch.Tensor) -> Operation:
        """Start to send (rank 0) or receive uint8 [bytes]."""
        self._device = buffer.device
        with _named():
            return self._started(self._group.broadcast([buffer], dist.BroadcastOptions()))

    def _started(self, work: Any) -> Operation:
        self._operations = [operation for operation in self._operations if not operation.dropped]
        self._operations.append(Operation(work))
        return self._operations[-1]

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """One update; at its end all wait until all have everything. Without that the member leaves the group, in which
        the others cannot go on either.

        Raises:
            PeerLost: a member was lost.
        """
        try:
            yield
            done = torch.ones(1, dtype=torch.int64, device=self._device)
            with _named():
                last = self._started(self._group.allreduce([done]))
            last.finish()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Leave, whether or not the others are alive; what is under way with a lost member would never end."""
        group = self._group
        self._group = None
        self._store = None
        if group is not None:
            group.abort()
        for operation in self._operations:
            operation.drop()


class BroadcastServer:
    """The sending end, rank 0. Opens a store at ``host``, an address of this machine; ``meeting`` says where.

    Args:
        stands: whether one update after the other passes through it, until ``end`` or the first that fails.
    """

    def __init__(self, host: str, receivers: int, backend: str, stands: bool = False):
        limit = datetime.timedelta(seconds=JOIN_S)
        # A socket of ours: torch's own would listen on every interface.
        listener = socket.create_server((host, 0), backlog=receivers + 1)
        port = listener.getsockname()[1]
        self._store: dist.TCPStore | None = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
        )
        self._group: BroadcastGroup | None = None
        self.meeting = Meeting(host, self._store.port, 1 + receivers, backend, stands, secrets.token_hex(8))

    @property
    def ended(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._store is None

    def send(self, buckets: Iterable[torch.Tensor]) -> None:
        """Broadcast ``buckets`` (uint8 [bytes], on the backend's device) to the receivers that were told the meeting.

        A bucket is asked for while the one before is on its way.

        Raises:
            PeerLost: not all of them came, or one was lost on the way.
        """
        whole = False
        try:
            if self._group is None:
                assert self._store is not None
                self._group = BroadcastGroup(self.meeting, self._store, 0, self.meeting.host, JOIN_S)
            self._broadcast(self._group, buckets)
            whole = True
        finally:
            if not (whole and self.meeting.stands):
                self.end()

    def _broadcast(self, group: BroadcastGroup, buckets: Iterable[torch.Tensor]) -> None:
        with group.update():
            sent = None
            for bucket in buckets:
                if sent:
                    sent[1].finish()
                sent = bucket, group.broadcast(bucket)  # the pair keeps the bytes alive
            if sent:
                sent[1].finish()

    def end(self) -> None:
        """End the group, and with its store the wait of those who have not joined yet."""
        if self._group is not None:
            self._group.end()
        self._group = None
        self._store = None


_standing: dict[str, BroadcastGroup] = {}
"""By the member's name: the group that it stands in as a receiver, in this process."""


@contextlib.contextmanager
def joined(meeting: Meeting, member: str, rank: int, joins: bool, timeout_s: float) -> Iterator[BroadcastGroup]:
    """The group of a meeting, for one update that this process receives.

    Args:
        member: name under which this process keeps a group that stands; a new one of that name takes the place of the
            one before.
        joins: whether all members come together now; otherwise they did at an update before.

    Raises:
        PeerLost: the sender or another receiver was lost.
    """
    if joins:
        if meeting.stands:
            leave(member)
        group = _meet(meeting, rank, timeout_s)
        if meeting.stands:
            _standing[member] = group
    else:
        group = _kept(meeting, member)
    try:
        with group.update():
            yield group
    finally:
        if group.ended:
            _standing.pop(member, None)
        elif not meeting.stands:
            group.end()


def leave(member: str, meeting: Meeting | None = None) -> None:
    """End the group in which a member stands, if there is one.

    Args:
        meeting: end it only if it is the one of this meeting.
    """
    group = _standing.get(member)
    if group is not None and meeting in (None, group.meeting):
        del _standing[member]
        group.end()


def _kept(meeting: Meeting, member: str) -> BroadcastGroup:
    group = _standing.get(member)
    if group is None or group.meeting != meeting:
        # It noticed that the update before broke off, and the sender did not.
        raise PeerLost(f"a member of the broadcast group was lost ({member} is no longer in it)")
    return group


def _meet(meeting: Meeting, rank: int, timeout_s: float) -> BroadcastGroup:
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
    except RuntimeError as error:
        raise PeerLost(f"no sender at {meeting.host}:{meeting.port} ({message_line(error)[:160]})") from error
    return BroadcastGroup(meeting, store, rank, _own_address(meeting.host, meeting.port), timeout_s)


def _gloo(store: dist.Store, rank: int, world: int, address: str, limit: datetime.timedelta) -> Any:
    # torch declares these groups apart from ProcessGroup, though they are used as one.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    # By address: a host's name often resolves to its loopback, where no other host can answer.
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, world, options)


def _nccl(store: dist.Store, rank: int, world: int, address: str, limit: datetime.timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    # Read when a group is made: waits then end with an exception when their time is up, not with the process.
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
    """This machine's address on the way to ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """What an error of torch's means here."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"a member of the broadcast group was lost ({message_line(error)[:160]})") from error
