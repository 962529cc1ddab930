"""Environment workers behind actors: the same verdicts and the same containment as beside the driver."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
from environment_samples import HOSTILE, trajectories, trajectory
from test_cleanup_process import wait_until_guard_looked

from gdpo_nemo.cluster.cleanup_process import shared_memory
from gdpo_nemo.cluster.env_nodes import EnvironmentNodes, divide
from gdpo_nemo.cluster.reservation import place_on_this_machine
from gdpo_nemo.cluster.session import session
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Outcome
from gdpo_nemo.utils.errors import ConfigError, RunError


@pytest.fixture(scope="module")
def nodes():
    """Two nodes, which here are two actors of this machine; ``one`` has a worker of its own, on the second."""
    config = Config(
        env={"env": {"plugin": f"{HOSTILE}:Hostile"}, "one": {"plugin": f"{HOSTILE}:Hostile", "num_workers": 1}}
    )
    config.rollout.env_workers = 3
    config.rollout.env_timeout_s = 3.0
    with session(config.cluster):
        config.cluster.env_nodes = 2
        nodes = EnvironmentNodes(config, place_on_this_machine(config))
        nodes.verify(trajectories(["a", "b"]))  # so that both actors run
        yield nodes
        nodes.close()


def lengths(verdicts):
    return [verdict.rewards.get("length") for verdict in verdicts]


def hosts() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::EnvironmentHo")]


@pytest.mark.slow
def test_verdicts_keep_their_order_over_nodes_and_every_node_works(nodes):
    mixed = [trajectory("x" * i, "one" if i % 3 == 0 else "env", f"p{i // 4}", i % 4) for i in range(40)]
    assert lengths(nodes.verify(mixed)) == [float(i) for i in range(40)]
    assert [sum(child.is_running() for child in host.children()) > 0 for host in hosts()] == [True, True]
    assert sorted(nodes.process_locations()) == [0, 1] and nodes.verify([]) == []


@pytest.mark.slow
def test_hangs_crashes_and_errors_on_env_nodes_equal_those_of_the_driver(nodes):
    texts = ["a", "bb", "hang", "dddd", "crash", "ffffff"]
    verdicts = nodes.verify(trajectories(texts, group=1))
    assert [v.outcome is Outcome.ENV_FAILED for v in verdicts] == [False, False, True, False, True, False]
    assert "exceeded 3 s" in verdicts[2].detail and "died (exit code 7)" in verdicts[4].detail
    with pytest.raises(RunError, match="Hostile.verify raised ValueError: this sample"):
        nodes.verify(trajectories(["a", "raise"], group=1))
    with pytest.raises(RunError, match="its environment 'unknown' is not defined"):
        nodes.verify([trajectory("x", "unknown")])
    assert lengths(nodes.verify(trajectories(["still", "works"]))) == [5.0, 5.0]


@pytest.mark.slow
def test_a_killed_actor_is_replaced_and_asked_again_and_its_workers_end(nodes):
    before = hosts()
    orphans = [child for host in before for child in host.children()]
    answers: list = []
    thread = threading.Thread(target=lambda: answers.append(nodes.verify(trajectories(["hang", "bb", "ccc"], group=1))))
    thread.start()
    time.sleep(0.2)
    for host in before:
        os.kill(host.pid, signal.SIGKILL)
    thread.join(600)
    assert lengths(answers[0]) == [None, 2.0, 3.0]
    told = nodes.take_recoveries()
    assert {sentence[:44] for sentence in told} >= {"the process of node 0 died and was replaced "}, told
    assert any("exceeded" in sentence and sentence.endswith("(node 0)") for sentence in told), told
    assert nodes.take_recoveries() == {}
    assert not {host.pid for host in before} & {host.pid for host in hosts()}
    assert not psutil.wait_procs(orphans, timeout=120)[1]


def semaphores(host: psutil.Process) -> list[str]:
    """Return the paths of the semaphores that an actor and its workers have mapped."""
    return [path for path, _ in shared_memory([host.pid, *(child.pid for child in host.children())])]


def gone(files: list[str], limit_s: float = 240.0) -> bool:
    """Whether they go in that time."""
    deadline = time.monotonic() + limit_s
    while (left := list(filter(os.path.exists, files))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not left


@pytest.mark.slow
def test_neither_a_killed_actor_nor_a_closed_one_leaves_semaphores_on_its_node(nodes):
    config = Config(env={"env": {"plugin": f"{HOSTILE}:Hostile"}})
    config.cluster.env_nodes = 1
    before = hosts()
    other = EnvironmentNodes(config, place_on_this_machine(config))
    assert lengths(other.verify(trajectories(["bb"]))) == [2.0]
    [host] = [process for process in hosts() if process not in before]
    made = semaphores(host)
    assert made
    wait_until_guard_looked(host.pid)
    host.kill()
    assert lengths(other.verify(trajectories(["ccc"]))) == [3.0]
    assert gone(made)
    [host] = [process for process in hosts() if process not in (*before, host)]
    made = semaphores(host)
    assert made
    other.close()
    assert gone(made)


def test_parts_follow_the_shares_and_hold_whole_groups():
    for shares in ([1, 1], [3, 1, 2], [0, 1], [2, 0, 1]):
        parts = divide(range(120), shares, lambda index: index // 4)
        assert [len(part) for part in parts] == [120 * share // sum(shares) for share in shares]
        assert sorted(sum(parts, [])) == list(range(120))
        assert all(len({index // 4 for index in part}) == len(part) // 4 for part in parts)


def test_clients_of_servers_need_no_env_node():
    config = Config(env={"judge": {"plugin": "nemo_gym"}})
    config.cluster.env_nodes = 1
    with pytest.raises(ConfigError, match="cluster.env_nodes: has no effect"):
        EnvironmentNodes(config, place_on_this_machine(config))
