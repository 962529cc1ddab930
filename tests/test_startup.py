"""What the garbage collector is told while large libraries are imported."""

from __future__ import annotations

import gc
import weakref

import pytest

from gdpo_nemo.startup import importing


class Circle:
    """Garbage that only the collector finds."""

    def __init__(self):
        self.itself = self


def allocate() -> None:
    """Enough for the collector to run several times, had it not been told to wait."""
    kept = [[] for _ in range(10 * gc.get_threshold()[0])]
    del kept


def followed(thing: object) -> bool:
    """Whether the collector still looks at it: ``gc.get_objects`` leaves out what is frozen."""
    return any(other is thing for other in gc.get_objects())


@pytest.fixture
def collections():
    """Phases of the collections of this test. What it freezes stays so: test files are frozen, too."""
    seen = []

    def note(phase, info):
        seen.append(phase)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.enable()


@pytest.mark.parametrize("freeze", [True, False])
def test_nothing_is_collected_in_the_block_and_the_collector_works_again_after_it(freeze, collections):
    with importing(freeze):
        allocate()
        assert collections == []
    allocate()
    assert "stop" in collections
    garbage = weakref.ref(Circle())
    gc.collect()
    assert garbage() is None


def test_what_lives_at_the_end_of_the_block_is_frozen_only_where_that_is_asked_for(collections):
    kept = [[]]
    with importing(freeze=False):
        pass
    assert followed(kept)
    with importing():
        pass
    assert not followed(kept)


def test_a_collector_that_is_off_stays_off_and_an_import_that_fails_leaves_it_as_it_was(collections):
    with pytest.raises(ImportError), importing():
        raise ImportError("no")
    assert gc.isenabled()
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()
