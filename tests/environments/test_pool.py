import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress

import pytest
from environment_samples import HOSTILE, trajectories, trajectory
from pebble.pool.process import Acknowledgement, PoolManager, WorkerManager

from gdpo_nemo.data.records import Outcome
from gdpo_nemo.environments.execution import worker
from gdpo_nemo.environments.execution.pool import RETRY_FAILURES, EnvironmentPool, _split_into_shards
from gdpo_nemo.utils.errors import RunError

pytestmark = pytest.mark.slow

ENVIRONMENTS = {
    "env": {"plugin": f"{HOSTILE}:Hostile"},
    "short": {"plugin": f"{HOSTILE}:Hostile", "short": True},
    "unbuildable": {"plugin": f"{HOSTILE}:FailsToBuild"},
    "unprepared": {"plugin": f"{HOSTILE}:FailsToPrepare"},
    "digit_sort": {},
}


@pytest.fixture(scope="module")
def pool():
    with EnvironmentPool(ENVIRONMENTS, workers=2, timeout_s=120.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def impatient():
    with EnvironmentPool({"env": ENVIRONMENTS["env"]}, workers=2, timeout_s=2.0) as pool:
        yield pool


def lengths(verdicts):
    return [verdict.rewards.get("length") for verdict in verdicts]


def test_verdicts_keep_the_order_of_the_trajectories_across_shards_and_environments(pool):
    mixed = []
    for index in range(150):
        mixed.append(trajectory("x" * index, "env", f"p{index // 4}", index % 4))
        mixed.append(trajectory("<t></t><a>12</a>", "digit_sort", f"q{index}", digits="21"))
    verdicts = pool.verify(mixed)
    assert lengths(verdicts[::2]) == [float(index) for index in range(150)]
    assert all(verdict.rewards["all"] == 1.0 for verdict in verdicts[1::2])


def test_no_trajectories_no_verdicts(pool):
    assert pool.verify([]) == []


@pytest.mark.parametrize(
    "misdeed, detail",
    [("hang", "exceeded 2 s"), ("spin", "exceeded 2 s"), ("crash", "died (exit code 7)"), ("leave", "os._exit(0)")],
)
def test_sample_that_hangs_or_crashes_fails_without_affecting_others(impatient, misdeed, detail):
    verdicts = impatient.verify(trajectories(["a", "bb", misdeed, "dddd", "eeeee", "ffffff"]))
    assert verdicts[2].outcome is Outcome.ENV_FAILED and detail in verdicts[2].detail and verdicts[2].rewards == {}
    others = verdicts[:2] + verdicts[3:]
    assert lengths(others) == [1.0, 2.0, 4.0, 5.0, 6.0] and {v.outcome for v in others} == {Outcome.OK}


def test_a_worker_that_dies_before_its_acknowledgement_is_read_fails_its_sample_and_not_the_pool(
    impatient, monkeypatch
):
    inspect, receive = WorkerManager.inspect_workers, WorkerManager.receive
    inspected = threading.Event()

    def inspect_workers(manager):
        dead = any(process.exitcode is not None for process in manager.workers.values())
        expired = inspect(manager)
        if dead:
            inspected.set()
        return expired

    def receive_late(manager, timeout):
        message = receive(manager, timeout)
        if isinstance(message, Acknowledgement):
            assert inspected.wait(120)
            inspected.clear()
        return message

    monkeypatch.setattr(WorkerManager, "inspect_workers", inspect_workers)
    monkeypatch.setattr(WorkerManager, "receive", receive_late)
    [verdict] = impatient.verify([trajectory("crash")])
    assert verdict.outcome is Outcome.ENV_FAILED and "died (exit code 7)" in verdict.detail


def test_every_recovery_is_reported_once_with_its_reason(impatient):
    impatient.take_recoveries()
    impatient.verify(trajectories(["a", "bb", "crash", "dddd", "hang"]))
    told = impatient.take_recoveries()
    assert "verification process died (exit code 7); the samples of its shard were retried individually" in told, told
    assert told["a worker process ended with status 7 and was replaced"] == 2, "with the others, and alone"
    assert any("exceeded 2 s" in sentence for sentence in told), told
    assert impatient.verify(trajectories(["abc"])) and impatient.take_recoveries() == {}


def test_a_verifier_that_always_hangs_costs_a_few_time_limits(impatient):
    verdicts = impatient.verify([trajectory("hang", index=index) for index in range(20)])
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ENV_FAILED}
    assert sum("not retried individually" in verdict.detail for verdict in verdicts) == 20 - RETRY_FAILURES


def test_none_and_nan_mean_not_applicable(pool):
    verdicts = pool.verify(trajectories(["none", "nan", "abc"]))
    assert lengths(verdicts) == [None, None, 3.0]
    assert {verdict.outcome for verdict in verdicts} == {Outcome.OK}


def test_an_environment_may_declare_a_failure_itself(pool):
    [down, good] = pool.verify(trajectories(["down", "good"]))
    assert (down.outcome, down.detail) == (Outcome.ENV_FAILED, "server is down")
    assert lengths([good]) == [4.0]


def test_output_of_a_verifier_changes_nothing_and_is_not_on_standard_output(pool, capfd):
    assert lengths(pool.verify(trajectories(["print", "good"]))) == [5.0, 4.0]
    assert "garbage" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "text, environment, message",
    [
        ("raise", "env", "environment 'env': Hostile.verify raised ValueError: this sample"),
        ("exit", "env", "environment 'env': Hostile.verify raised SystemExit: 0"),
        ("inf", "env", "environment 'env': reward 'length' of sample 0 of prompt p1 is infinite (inf)"),
        ("text", "env", "reward 'length' of sample 0 of prompt p1 is '1', which is not a number"),
        ("stray", "env", "returned the reward 'unannounced', which is not in reward_names"),
        ("x", "short", "environment 'short': verify returned 1 verdicts for 2 trajectories"),
        ("x", "unbuildable", "env.unbuildable: .*FailsToBuild could not be built: KeyError: 'model_url'"),
        ("x", "unprepared", "environment 'unprepared' could not be prepared: OSError: no such server"),
        ("x", "unknown", "prompt p0: its environment 'unknown'"),
    ],
)
def test_an_authors_mistake_is_an_error_in_one_line_and_never_a_reward(pool, text, environment, message):
    with pytest.raises(RunError, match=message.replace("(", r"\(").replace(")", r"\)")) as error:
        pool.verify(trajectories(["a", "b", text, "d"], environment, group=2))
    assert "\n" not in str(error.value)
    assert lengths(pool.verify(trajectories(["still", "works"]))) == [5.0, 5.0]


def test_verify_is_safe_from_several_threads(pool):
    results = {}

    def run(number):
        texts = ["x" * (number * 10 + i) for i in range(8)]
        results[number] = lengths(pool.verify(trajectories(texts))) == [float(len(text)) for text in texts]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == dict.fromkeys(range(6), True)


def kill(pid):
    """Kill a worker, and wait until it has ended."""
    os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # its pool has collected its status already
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_a_worker_killed_while_idle_is_replaced_and_reported(pool):
    for _ in range(2):
        [pid] = lengths(pool.verify([trajectory("pid")]))
        pool.take_recoveries()
        kill(int(pid))
        assert lengths(pool.verify(trajectories(["a", "bb", "ccc"]))) == [1.0, 2.0, 3.0]
        assert pool.take_recoveries() == {"a worker process ended by SIGKILL and was replaced": 1}


def test_a_task_that_pebble_takes_from_its_queue_while_the_pool_breaks_is_sent_to_a_new_pool(impatient, monkeypatch):
    schedule = PoolManager.schedule
    broken = []

    def schedule_late(manager, task):
        if not broken:
            broken.append(manager)
            kill(next(iter(manager.worker_manager.workers)))
            while manager.context.alive:
                time.sleep(0.05)
        schedule(manager, task)

    monkeypatch.setattr(worker, "STARTUP_LIMIT_S", 100.0)  # without a new pool, the test fails after 134 s
    monkeypatch.setattr(PoolManager, "schedule", schedule_late)
    assert lengths(impatient.verify(trajectories(["abc"]))) == [3.0] and broken


def test_workers_that_die_while_starting_are_an_error_and_not_a_hang():
    with EnvironmentPool({"env": {"plugin": f"{HOSTILE}:DiesWhilePreparing"}}, timeout_s=5.0) as pool:
        with pytest.raises(RunError, match="die during startup or while idle"):
            pool.verify([trajectory("x")])


def test_close_ends_a_running_verification(tmp_path):
    pool = EnvironmentPool({"env": {**ENVIRONMENTS["env"], "meeting": str(tmp_path)}}, timeout_s=600.0)
    caught = []

    def run():
        try:
            pool.verify([trajectory("meet")])
        except RunError as error:
            caught.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    wait_for_file(tmp_path)
    pool.close()
    thread.join(120)
    assert caught == ["the environment pool was closed during verification"]
    pool.close()


def wait_for_file(folder):
    deadline = time.monotonic() + 300.0
    while not os.listdir(folder):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_workers_survive_an_interrupt_and_end_when_the_driver_is_killed(tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(f"""
            import signal, sys, time
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sys.path.insert(0, {os.path.dirname(HOSTILE)!r})
            if __name__ == "__main__":
                from environment_samples import trajectory
                from gdpo_nemo.environments.execution.pool import EnvironmentPool
                section = {{"plugin": {HOSTILE!r} + ":Hostile", "meeting": {str(tmp_path)!r}}}
                pool = EnvironmentPool({{"env": section}}, workers=1, timeout_s=600.0)
                for _ in range(2):
                    print(int(pool.verify([trajectory("pid")])[0].rewards["length"]), flush=True)
                    sys.stdin.readline()
                pool.verify([trajectory("meet")])
        """)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    first = int(driver.stdout.readline())
    os.killpg(driver.pid, signal.SIGINT)
    driver.stdin.write("\n")
    driver.stdin.flush()
    assert int(driver.stdout.readline()) == first
    driver.stdin.write("\n")
    driver.stdin.flush()
    wait_for_file(tmp_path)
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 60.0
    while os.path.exists(f"/proc/{first}") and time.monotonic() < deadline:
        if open(f"/proc/{first}/stat").read().split(")")[1].split()[0] == "Z":
            break  # ended, and only waiting for an init process to collect it
        time.sleep(0.1)
    else:
        assert not os.path.exists(f"/proc/{first}")


def test_a_worker_needs_no_torch_and_starts_in_seconds():
    code = (
        "import sys, gdpo_nemo.environments.execution.worker, gdpo_nemo.environments.execution.pool; "
        "sys.exit('torch' in sys.modules)"
    )
    begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin < 8.0


def test_shards_hold_one_environment_and_whole_groups():
    mixed = [trajectory("x", f"e{i % 2}", f"p{i // 8}", i % 8) for i in range(160)]
    shards = _split_into_shards(mixed, workers=3)
    assert sorted(index for shard in shards for index in shard) == list(range(160))
    for shard in shards:
        assert len({mixed[index].prompt.environment for index in shard}) == 1
    homes = {}
    for number, shard in enumerate(shards):
        for index in shard:
            homes.setdefault((mixed[index].prompt.environment, mixed[index].prompt.id), set()).add(number)
    assert all(len(shards_of_group) == 1 for shards_of_group in homes.values())
