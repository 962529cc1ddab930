"""The group that stands: kept while its engines are the same, not in the way of a loss, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
from broadcast_members import Actor, Policy, counts

from gdpo_nemo.weights.broadcast_group import Meeting, joined_group
from gdpo_nemo.weights.manifest import PeerLost
from gdpo_nemo.weights.transports.base import TransportOptions
from gdpo_nemo.weights.transports.collective import GlooTransport

pytestmark = pytest.mark.slow

BUCKET = 4096


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
        return self.transport.send(engines)

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
