"""The group that stands: kept while its engines are the same, not in the way of a loss, nothing left behind."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from broadcast_members import Actor, Policy, counts

from gdpo_nemo.weights import broadcast_group
from gdpo_nemo.weights.broadcast_group import BroadcastGroup, BroadcastServer, Meeting, Operation, joined_group
from gdpo_nemo.weights.copies import BaseMissing, RankCopy
from gdpo_nemo.weights.manifest import PeerLost
from gdpo_nemo.weights.transports.base import TransportOptions
from gdpo_nemo.weights.transports.collective import GlooSender, GlooTransport

pytestmark = pytest.mark.slow

BUCKET = 4096


class Handle:
    """An engine as the fleet names it: anew at each delivery, and equal if the actor is the same."""

    def __init__(self, actor: Actor):
        self.actor = actor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self.actor is other.actor

    def __getattr__(self, name: str):
        return getattr(self.actor, name)


class Run:
    """A transport between one policy rank and engines."""

    def __init__(self, stack: contextlib.ExitStack, workers: int = 1, ranks: int = 2, **options):
        self.stack = stack
        self.workers = workers
        self.policy = Policy(workers, ranks)
        self.transport = GlooTransport(self.policy, TransportOptions(bucket_bytes=BUCKET, **options))
        self.version = 0

    def engine(self) -> Actor:
        actor = Actor(self.workers)
        self.stack.callback(actor.end)
        return actor

    def start(self, engines: dict[int, Actor]):
        return self.transport.send({number: Handle(actor) for number, actor in engines.items()})

    def prepare(self) -> None:
        self.version += 1
        self.policy.train(float(self.version))
        self.transport.prepare(self.version)

    def deliver(self, engines: dict[int, Actor]) -> None:
        """Send what was prepared; every process of every engine must get the whole of it."""
        (updates, sent) = self.start(engines)
        self.policy.wait(sent, "sending")
        whole = self.policy.whole()
        assert [ref.answer() for ref in updates] == [[whole] * self.workers] * len(engines)

    def publish(self, engines: dict[int, Actor]) -> tuple[str, ...]:
        """A version to all; returns the names of the groups that it went through, by rank."""
        self.prepare()
        self.deliver(engines)
        return names_of(self.transport._persistent_receivers[0])


def names_of(receiver) -> tuple[str, ...]:
    return tuple(meeting.name for meeting, _ in receiver.groups.values())


@pytest.fixture
def run():
    with contextlib.ExitStack() as stack:
        yield Run(stack)


def test_updates_go_through_one_group_while_the_engines_are_the_same():
    with contextlib.ExitStack() as stack:
        run = Run(stack, workers=2)
        engines = {0: run.engine(), 1: run.engine()}
        assert len({run.publish(engines) for _ in range(4)}) == 1
        for number, actor in engines.items():
            assert [{must for _, must in receiver.groups.values()} for receiver in actor.told] == [
                {True},
                *3 * [{False}],
            ]
            names = [
                f"process {worker} of engine {number} with rank {rank}" for worker in range(2) for rank in range(2)
            ]
            assert actor.counts()[2] == names


def test_an_engine_that_is_replaced_lost_or_added_makes_another_group(run):
    engines = {0: run.engine(), 1: run.engine()}
    first = run.publish(engines)
    engines[1].end()
    replaced = run.publish({**engines, 1: run.engine()})
    lost = run.publish({0: engines[0]})
    added = run.publish({0: engines[0], 2: run.engine()})
    assert len({first, replaced, lost, added}) == 4
    assert engines[0].counts()[2] == [f"process 0 of engine 0 with rank {rank}" for rank in range(2)]


def test_single_delivery_has_a_separate_group_and_keeps_the_standing_one(run):
    engines = {0: run.engine(), 1: run.engine()}
    first = run.publish(engines)
    (descriptors, threads, standing) = engines[1].counts()
    run.deliver({1: engines[1]})
    assert set(names_of(engines[1].told[-1])).isdisjoint(first)
    assert engines[1].counts() == (descriptors, threads, standing)
    assert run.publish(engines) == first


def test_replacement_gets_the_stored_weights_and_joins_the_next_update():
    """The policy has trained by then."""
    with contextlib.ExitStack() as stack:
        run = Run(stack, keep=True)
        engines = {0: run.engine(), 1: run.engine()}
        first = run.publish(engines)
        engines[0].end()
        engines[0] = run.engine()
        whole = run.policy.whole()
        run.policy.train(100.0)
        (updates, sent) = run.start({0: engines[0]})
        run.policy.wait(sent, "sending")
        assert updates[0].answer() == [whole] != [run.policy.whole()]
        second = run.publish(engines)
        assert first != second == run.publish(engines)


def test_every_rank_sends_its_pieces_only(monkeypatch):
    """The bytes of two ranks are almost equal, and together those of the model once."""
    sent: dict[str, list[int]] = {}

    def broadcast(group, buffer, original=BroadcastGroup.broadcast):
        sent.setdefault(group.meeting.name, []).append(buffer.nbytes)
        return original(group, buffer)

    monkeypatch.setattr(BroadcastGroup, "broadcast", broadcast)
    with contextlib.ExitStack() as stack:
        run = Run(stack, workers=2)
        names = run.publish({0: run.engine(), 1: run.engine()})
        nbytes = [sum(sent[name]) for name in names]
        tensors = sum(tensor.nbytes for tensor in run.policy.ranks[0].whole().values())
        assert len(sent) == 2 and max(nbytes) <= 1.01 * min(nbytes)
        assert tensors <= sum(nbytes) <= 1.01 * tensors
        assert run.transport.statistics["weights/sent_mib"] == sum(nbytes) / 2**20


ACCIDENTS = [("raise", 0), ("die", 0), ("raise", 5), ("die", 5), ("raise", 9), ("die", 9)]
"""Faults of an engine before it loads a tensor of the update, by the index of the tensor (0 to 9)."""


@pytest.mark.parametrize("mode", ["full", "difference"])
def test_failure_at_any_point_of_an_update_is_noticed_by_all_and_the_next_delivery_is_right(mode):
    with contextlib.ExitStack() as stack:
        run = Run(stack, workers=2, mode=mode)
        engines = {0: run.engine(), 1: run.engine()}
        run.publish(engines)
        for number, (accident, at) in enumerate(ACCIDENTS):
            engines[1].fail_at(number % 2, accident, at)
            run.prepare()
            (updates, sent) = run.start(engines)
            assert [outcome(ref.result) for ref in sent] == [PeerLost, PeerLost]
            assert isinstance(updates[0].answer(), PeerLost)
            assert outcome(updates[1].answer) in (EOFError, ConnectionResetError, None)
            if accident == "die":
                engines[1].end()
                engines[1] = run.engine()
            run.deliver(engines)
            assert engines[0].bases[-2:] == [run.version - 1 if mode == "difference" else None, None]
            run.publish(engines)


@pytest.mark.parametrize("at", [0, 3, 5])
def test_rank_that_fails_ends_the_update_for_ranks_and_engines(run, at):
    """Either of two ranks, of which each has six pieces."""
    engines = {0: run.engine(), 1: run.engine()}
    run.publish(engines)
    for rank in (0, 1):
        run.prepare()
        run.policy.ranks[rank].fails_at = at
        (updates, sent) = run.start(engines)
        assert [outcome(ref.result) for ref in sent] == [RuntimeError if rank == r else PeerLost for r in (0, 1)]
        assert [type(update.answer()) for update in updates] == [PeerLost, PeerLost]
        run.deliver(engines)
        run.publish(engines)


def outcome(call):
    """Return the class of the exception that a call raises, or None."""
    try:
        call()
    except Exception as error:
        return type(error)


def test_differences_follow_a_full_update_and_replaced_engines_get_everything(run):
    """All engines get all weights in a delivery to a replaced one. Differences go through the persistent groups."""
    run = Run(run.stack, workers=2, mode="auto")
    engines = {0: run.engine(), 1: run.engine()}
    first = run.publish(engines)
    full = run.transport.statistics
    assert (full["weights/full"], full["weights/fallbacks"]) == (1, 0) and "weights/changed" not in full
    for _ in range(3):
        assert run.publish(engines) == first
        found = run.transport.statistics
        assert (found["weights/full"], found["weights/fallbacks"]) == (0, 0)
        assert 0.05 < found["weights/changed"] < 0.07
        assert found["weights/sent_mib"] < 0.2 * full["weights/sent_mib"]
    assert engines[0].bases == [None, 1, 2, 3]
    engines[1].end()
    engines[1] = run.engine()
    run.publish(engines)
    found = run.transport.statistics
    assert (found["weights/full"], found["weights/fallbacks"]) == (1, 1) and "weights/changed" in found
    assert found["weights/sent_mib"] == full["weights/sent_mib"]
    run.publish(engines)
    run.deliver({1: engines[1]})
    assert run.transport.statistics["weights/fallbacks"] == 1
    run.publish(engines)
    assert engines[0].bases[4:] == [None, 5, 6] and engines[1].bases == [None, 5, None, 6]


def test_difference_that_an_engine_cannot_apply_is_followed_by_all_weights(run, monkeypatch):
    """The second of three engines lacks the previous version, or gets a damaged message."""

    def damaged(copy, difference, original=RankCopy.messages):
        for message in original(copy, difference):
            message = message.clone()
            message[-1] ^= 1
            yield message

    run = Run(run.stack, mode="difference")
    engines = {number: run.engine() for number in range(3)}
    run.publish(engines)
    run.prepare()
    engines[1].fail_at(0, "raise", 5)
    (updates, _) = run.start(engines)
    assert not any(isinstance(update.answer(), list) for update in updates)
    run.deliver({number: engines[number] for number in (0, 2)})
    for damage in (False, True):
        run.prepare()
        with monkeypatch.context() as patch:
            if damage:
                patch.setattr(RankCopy, "messages", damaged)
            (updates, sent) = run.start(engines)
            answers = [update.answer() for update in updates]
            assert [outcome(ref.result) for ref in sent] == [PeerLost, PeerLost]
        assert isinstance(answers[1], BaseMissing) and all(isinstance(answer, PeerLost) for answer in answers)
        assert str(answers[1]).startswith(f"weight update {run.version}: the ")
        run.deliver(engines)
        found = run.transport.statistics
        assert (found["weights/full"], found["weights/fallbacks"]) == (0, 1)
        run.publish(engines)
    assert engines[1].bases == [None, 1, 2, None, 3, 4, None, 5]


def test_auto_stops_to_compare_when_differences_do_not_pay(run):
    """After three in a row; neither a rank nor an engine keeps a copy then."""
    run = Run(run.stack, mode="auto")
    engines = {0: run.engine()}
    run.publish(engines)
    shares = [1.0, 1 / 16, 1 / 16, 1.0, 1.0, 1.0, 1 / 16, 1 / 16]  # the second one restores what the first one changed
    compared = []
    for share in shares:
        run.version += 1
        run.policy.train(float(run.version), share)
        run.transport.prepare(run.version)
        run.deliver(engines)
        compared.append("weights/changed" in run.transport.statistics)
    assert compared == [True] * 6 + [False] * 2
    assert engines[0].bases == [None, None, None, 3, None, None, None, None, None]
    assert run.transport.manifest.keeper == ""
    assert [run.policy.sender(GlooSender, rank).copy for rank in (0, 1)] == [None, None]


def test_engine_that_dies_in_an_update_ends_it_for_all_and_the_others_continue(run):
    engines = {0: run.engine(), 1: run.engine(), 2: run.engine()}
    first = run.publish(engines)
    os.kill(engines[1].process.pid, signal.SIGSTOP)
    run.prepare()
    (updates, sent) = run.start(engines)
    engines[1].process.kill()
    with pytest.raises(PeerLost):
        run.policy.wait(sent, "sending")
    with pytest.raises((EOFError, ConnectionError)):
        updates[1].answer()
    assert [type(updates[place].answer()) for place in (0, 2)] == [PeerLost, PeerLost]
    left = {0: engines[0], 2: engines[2]}
    run.deliver(left)
    assert run.publish(left) != first


def test_an_update_that_broke_off_with_all_alive_is_followed_by_another_group(run):
    engines = {0: run.engine(), 1: run.engine()}
    first = run.publish(engines)
    run.prepare()
    # As if it had missed the end of the update before.
    engines[0].close_receiver.remote(run.transport._persistent_receivers[0])
    engines[0].answer()
    (updates, sent) = run.start(engines)
    with pytest.raises(PeerLost):
        run.policy.wait(sent, "sending")
    assert "no longer a member" in str(updates[0].answer()) and isinstance(updates[1].answer(), PeerLost)
    run.deliver(engines)
    second = run.publish(engines)
    assert first != second == run.publish(engines)


def test_a_group_with_a_member_that_hangs_is_left_at_once(run):
    """Neither the sender nor the survivor waits for it."""
    engines = {0: run.engine(), 1: run.engine()}
    first = run.publish(engines)
    os.kill(engines[1].process.pid, signal.SIGSTOP)
    start = time.monotonic()
    assert run.publish({0: engines[0]}) != first
    run.transport.close()
    assert engines[0].answer() == [None]
    assert time.monotonic() - start < 150  # its limit is 300 s


def test_members_stop_waiting_when_the_sender_gives_up(monkeypatch):
    """One of two receivers never joins. An actor may keep the error, and with it the frames of its traceback."""
    monkeypatch.setattr(broadcast_group, "JOIN_S", 0.2)
    server = BroadcastServer("127.0.0.1", 2, "gloo")

    def receive():
        with joined_group(server.meeting, "member", 1, True, 300.0):
            pass

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(receive)
        with pytest.raises(PeerLost) as kept:
            server.send(iter([torch.zeros(8, dtype=torch.uint8)]))
        assert isinstance(joining.exception(150), PeerLost), kept


def test_receiver_that_gloo_does_not_wake_notices_that_the_sender_has_left(monkeypatch):
    """Seen rarely when engines are killed; here, the operation never completes."""
    monkeypatch.setattr(broadcast_group, "_CHECK", datetime.timedelta(seconds=0))
    waited = threading.Event()

    def wait(limit):
        waited.set()
        raise RuntimeError("Operation timed out!")

    server = BroadcastServer("127.0.0.1", 1, "gloo")
    store = dist.TCPStore("127.0.0.1", server.meeting.port, is_master=False)
    operation = Operation(SimpleNamespace(wait=wait, is_completed=lambda: False), store)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(operation.finish)
        assert waited.wait(150) and not waiting.done()
        server.end()
        assert isinstance(waiting.exception(150), PeerLost)


def test_fifty_updates_and_five_replacements_leave_nothing_behind(run):
    engines = {0: run.engine(), 1: run.engine()}
    empty = engines[0].counts()
    run.publish(engines)
    here = counts()
    there = engines[0].counts()
    for update in range(50):
        if update % 10 == 9:
            engines[1].end()
            engines[1] = run.engine()
            run.deliver({1: engines[1]})
        run.publish(engines)
    # Other threads may close the connections of ended members a little later.
    deadline = time.monotonic() + 120
    while (left := (counts(), engines[0].counts())) != (here, there):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    run.transport.close()
    run.policy.settle()
    assert [actor.answer() for actor in engines.values()] == [[None], [None]]
    assert counts() < here and engines[0].counts() == empty
    assert run.publish(engines)


def test_receiver_without_the_group_raises_at_once():
    meeting = Meeting("127.0.0.1", 1, 2, "gloo", True, "gone")
    with pytest.raises(PeerLost, match="nobody is no longer a member"), joined_group(meeting, "nobody", 1, False, 600):
        pass
