"""When a lost policy is started again in its driver, and when that is for the supervisor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gdpo_nemo.training.recovery import Decision, RetainedSession
from gdpo_nemo.training.supervisor import Attempt
from gdpo_nemo.utils.errors import START_AGAIN, ConfigError, InfrastructureFailed, NumericsFailed, RunError

LOST = InfrastructureFailed("training: a worker process died" + START_AGAIN)


class Policy:
    """Ranks of which some may be gone."""

    def __init__(self, lost: bool = True):
        self.lost = lost
        self.closed = False

    def has_lost_ranks(self, patience_s: float) -> bool:
        return self.lost

    def close(self) -> None:
        self.closed = True


class Fleet:
    """Engines."""

    def __init__(self, ready: bool = True):
        self.ready = ready
        self.closed = self.forgot = False

    def all_ready(self) -> bool:
        return self.ready

    def forget_weights(self) -> None:
        self.forgot = True

    def close(self) -> None:
        self.closed = True


def run(step=5, lost=True, patient=True, requested=False, max_restarts=10):
    return SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(max_restarts=max_restarts)),
        stop=SimpleNamespace(patient=patient, requested=requested),
        state=SimpleNamespace(step=step),
        policy=Policy(lost),
    )


SECOND_RESTART = Attempt(restarts=2, supervised=True)


def kept(ready=True, shared=(), lost_nodes=(), attempt=SECOND_RESTART):
    found = RetainedSession(attempt)
    found.fleet = Fleet(ready)
    found.placement = SimpleNamespace(
        places=SimpleNamespace(policy=(0, 0, 1), shared=shared), is_lost=lambda node: node in lost_nodes
    )
    return found


def test_run_that_lost_only_ranks_continues_with_its_engines():
    parts, stays = run(), kept()
    error = InfrastructureFailed(str(LOST))
    stays.decide(parts, error)
    assert stays.decision is Decision.RESTART and parts.policy.closed, (
        "ranks that wait for the lost one hold its devices"
    )
    fleet = stays.fleet
    stays.end_engines()
    stays.end_session()
    assert fleet.forgot and not fleet.closed and stays.fleet is fleet and stays.placement is not None
    assert START_AGAIN not in str(error) and "the policy is restarted" in str(error)
    assert stays.attempt.rebuilds == 1 and stays.attempt.metrics(None)["driver/rebuilds"] == 1.0
    assert stays.attempt.reason == str(error) and stays.attempt.restarts == 2


@pytest.mark.parametrize(
    "parts, stays",
    [
        pytest.param(run(), kept(ready=False), id="an engine is gone, or in the middle of an update"),
        pytest.param(run(), kept(shared=((0,), (1,))), id="engines share the devices"),
        pytest.param(run(), kept(lost_nodes=(1,)), id="a node with ranks is gone"),
        pytest.param(run(lost=False), kept(), id="all ranks live"),
        pytest.param(run(patient=False), kept(), id="it had not begun to train"),
        pytest.param(run(requested=True), kept(), id="somebody asked it to stop"),
        pytest.param(run(max_restarts=2), kept(), id="no restart is left"),
        pytest.param(run(), RetainedSession(SECOND_RESTART), id="nothing was started"),
    ],
)
def test_where_anything_else_is_amiss_the_supervisor_decides(parts, stays):
    error = InfrastructureFailed(str(LOST))
    fleet = stays.fleet
    stays.decide(parts, error)
    assert stays.decision is Decision.FAIL and not parts.policy.closed and str(error) == str(LOST)
    assert stays.attempt.rebuilds == 0
    stays.end_engines()
    stays.end_session()
    assert stays.fleet is None and stays.placement is None and (fleet is None or fleet.closed)


@pytest.mark.parametrize("error", [ConfigError("a key"), NumericsFailed("not finite"), RunError("no reason known")])
def test_only_a_failure_of_the_infrastructure_is_tried_again(error):
    stays = kept()
    stays.decide(run(), error)
    assert stays.decision is Decision.FAIL


def test_a_failure_that_the_infrastructure_caused_counts_as_one():
    error = RunError("checkpoint of step 6 could not be written")
    error.__cause__ = LOST
    stays = kept()
    assert stays.decide(run(), error) is stays.decision is Decision.RESTART


def test_ranks_lost_twice_without_a_further_step_are_for_the_supervisor():
    stays = kept()
    for step, restarts in ((5, True), (6, True), (6, False)):
        stays.decide(run(step=step), InfrastructureFailed(str(LOST)))
        assert (stays.decision is Decision.RESTART) is restarts


def test_a_run_without_a_supervisor_ends():
    stays = kept(attempt=Attempt())
    stays.decide(run(), InfrastructureFailed(str(LOST)))
    assert stays.decision is Decision.FAIL


def test_rebuilds_count_among_the_restarts_that_are_allowed():
    attempt = Attempt(restarts=1, rebuilds=2, supervised=True)
    for most, restarts in ((3, False), (4, True)):
        stays = kept(attempt=attempt)
        stays.decide(run(max_restarts=most), InfrastructureFailed(str(LOST)))
        assert (stays.decision is Decision.RESTART) is restarts


def test_engines_retained_for_a_start_that_never_happened_are_closed():
    stays = kept()
    stays.decide(run(), InfrastructureFailed(str(LOST)))
    fleet = stays.fleet
    ended = []
    stays.session.callback(lambda: ended.append("session"))
    stays.close()
    assert fleet.closed and ended == ["session"]
