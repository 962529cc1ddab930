"""Samples are written beside the run: in order, by another thread, never more than two steps behind."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import termios
import threading
import time

import numpy as np
import pytest
from demo_run import demo_groups, demo_row
from image_samples import image_group
from power_loss import SyncedDisk

from gdpo_nemo.data.records import Group, pack_trajectories, unpack_trajectories
from gdpo_nemo.observe import sample_writer
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.run_files import read_alerts
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.sample_writer import SampleWriter
from gdpo_nemo.observe.samples import missing_images, read_rollouts, rollout_files, validation_files
from gdpo_nemo.utils import waits
from gdpo_nemo.utils.files import sync_folder


class Disk:
    """Stands for ``write_rollouts``: writes a step when it is let, and remembers who wrote."""

    def __init__(self, monkeypatch):
        self.written: list[int] = []
        self.threads: set[str] = set()
        self.error: Exception | None = None
        self.free = threading.Event()
        monkeypatch.setattr(sample_writer, "write_rollouts", self.write)

    def write(self, run_dir, step, *arguments, **columns):
        assert self.free.wait(120)
        self.threads.add(threading.current_thread().name)
        if self.error:
            raise self.error
        self.written.append(step)


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def writer(disk, tmp_path, complaints) -> SampleWriter:
    return SampleWriter(tmp_path, complaints.append)


def waited_for(start, done: str) -> threading.Thread:
    """``start`` in a thread, once it is known to wait for ``done``."""
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    end = time.monotonic() + 120
    while not any(done in wait.what and wait.owner == "driver" for wait in waits.current()):
        assert time.monotonic() < end, waits.current()
        time.sleep(0.005)
    return thread


def test_steps_are_written_in_order_by_a_separate_thread(writer, disk):
    writer.write(1, [])
    writer.write(2, [])
    assert disk.written == []
    disk.free.set()
    writer.write(3, [])
    writer.close()
    assert disk.written == [1, 2, 3] and disk.threads == {"samples"}


def test_run_faster_than_its_disk_waits_and_reports_this_once(writer, disk, complaints, monkeypatch):
    monkeypatch.setattr(sample_writer, "_SLOW_S", 0.0)
    writer.write(1, [])
    writer.write(2, [])
    third = waited_for(lambda: writer.write(3, []), "samples of step 3")
    assert disk.written == []
    disk.free.set()
    third.join(120)
    for step in range(4, 9):
        writer.write(step, [])
    writer.close()
    assert disk.written == list(range(1, 9)) and waits.current() == []
    assert len(complaints) == 1


def test_flush_waits_for_the_steps_up_to_its_own_and_no_others(writer, disk):
    disk.free.set()
    writer.write(1, [])
    writer.flush(1)
    assert disk.written == [1]
    disk.free.clear()
    writer.write(2, [])
    writer.flush(1)  # step 2 hangs, which is no matter of step 1
    second = waited_for(lambda: writer.flush(2), "samples to be written to disk")
    assert disk.written == [1]
    disk.free.set()
    second.join(120)
    assert disk.written == [1, 2]
    writer.close()


@pytest.mark.parametrize("ask", [lambda w: w.write(2, []), lambda w: w.flush(1), lambda w: w.close()])
def test_a_failure_is_raised_once_by_the_next_call(writer, disk, ask):
    disk.error = OSError(28, "No space left on device")
    writer.write(1, [])
    disk.free.set()
    while writer._steps:
        time.sleep(0.005)
    disk.error = None
    with pytest.raises(OSError, match="No space left"):
        ask(writer)
    writer.close()
    assert disk.written in ([], [2])


def test_a_writer_that_got_nothing_starts_no_thread(writer):
    writer.flush()
    writer.close()
    assert writer._thread is None


@pytest.mark.slow
def test_a_log_writes_the_samples_and_closes_with_all_of_them(config, run_dir):
    log = RunLog(config, run_dir)
    for step in range(1, 5):
        log.step(demo_row(step), demo_groups(step), SampleValues(np.arange(6.0), terms={"format": np.ones(6)}))
    log.flush(4)
    assert [step for step, _ in rollout_files(run_dir)] == [1, 2, 3, 4]
    log.step(demo_row(5), demo_groups(5), SampleValues(np.arange(6.0)))
    log.close("complete")
    records = {step: read_rollouts(path) for step, path in rollout_files(run_dir)}
    assert list(records) == [1, 2, 3, 4, 5] and records[2][1]["terms"] == {"format": 1.0}
    assert [record["advantage"] for record in records[5]] == [0, 1, 2, 3, 4, 5]
    assert not any("failed" in alert["text"] for alert in read_alerts(run_dir))


@pytest.mark.slow
def test_samples_that_a_checkpoint_counts_are_left_when_power_is_lost(config, run_dir, tmp_path, monkeypatch):
    run_dir.mkdir(exist_ok=True)
    disk = SyncedDisk(run_dir)
    disk.watch(monkeypatch, lambda: None)
    log = RunLog(config, run_dir)
    for step in (1, 2):
        log.step(demo_row(step), [*demo_groups(step), image_group(step)])
    log.flush(2)
    sync_folder(run_dir)  # as a checkpoint does
    for eager in (False, True):
        left = disk.survivor(tmp_path / "left", eager)
        assert [len(read_rollouts(path)) for _, path in rollout_files(left)] == [8, 8]
        assert missing_images(left, [path for _, path in rollout_files(left)]) == []
        assert [row["step"] for row in read_metrics(left)] == [1, 2]
    log.close("complete")
    disk.close()


@pytest.mark.slow
def test_requested_number_of_groups_is_written_with_all_their_fields(config, run_dir):
    config.rollout.save_groups = 2
    log = RunLog(config, run_dir)
    groups = demo_groups(1, prompts=3)
    lengths = [len(t.completion_ids) for group in groups for t in group.trajectories]
    scored = [np.full(length, place, np.float32) for place, length in enumerate(lengths)]
    terms = {"format": np.arange(9.0)}
    entropies = [-values for values in scored]
    log.step(demo_row(1), groups, SampleValues(np.arange(9.0), scored, terms, entropies=entropies))
    log.validation({"step": 1, "validation/format": 1.0}, groups)
    log.close("complete")
    records = read_rollouts(dict(rollout_files(run_dir))[1])
    assert [(r["prompt_id"], r["sample_index"]) for r in records] == [(f"p1-{p}", s) for p in (0, 1) for s in range(3)]
    assert [r["advantage"] for r in records] == [r["terms"]["format"] for r in records] == [0, 1, 2, 3, 4, 5]
    assert [r["trainer_logprobs"][0] for r in records] == [-r["entropies"][0] for r in records] == [0, 1, 2, 3, 4, 5]
    assert len(read_rollouts(dict(validation_files(run_dir))[1])) == 9


@pytest.mark.slow
def test_a_disk_that_fails_for_samples_is_one_alert_and_no_end(config, run_dir, disk):
    disk.error = OSError(28, "No space left on device")
    disk.free.set()
    log = RunLog(config, run_dir)
    for step in range(1, 5):
        log.step(demo_row(step), demo_groups(step))
        log.flush(step)
    log.close("complete")
    (alert,) = read_alerts(run_dir)
    assert "rollouts failed and is incomplete" in alert["text"] and "No space left" in alert["text"]


def mixed_groups(prompts: int) -> list[Group]:
    """Groups of which the last has images."""
    return [*demo_groups(prompts=prompts - 1), image_group()]


def packed_groups(prompts: int) -> list[Group]:
    """Groups as a driver gets them from rollout hosts."""
    groups = []
    for group in mixed_groups(prompts):
        data = pack_trajectories(group.trajectories)
        groups.append(Group(group.prompt, unpack_trajectories(data, group.prompt), group.position, data))
    return groups


@pytest.mark.slow
def test_groups_of_hosts_are_written_by_a_process_and_by_the_thread_if_it_is_killed(tmp_path, complaints):
    advantages = np.arange(8, dtype=np.float64)
    values = SampleValues(advantages, terms={"a": advantages})
    writer = SampleWriter(tmp_path, complaints.append)
    writer.write(1, mixed_groups(3), values)
    writer.flush()
    assert writer._process is None
    for path in (tmp_path / "images").iterdir():
        path.unlink()  # the process writes them
    first = packed_groups(3)
    part = Group(first[1].prompt, first[1].trajectories, first[1].position)  # as after a group was split
    writer.write(2, [first[0], part, first[2]], values)
    writer.flush()
    process = writer._process._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    writer.write(3, packed_groups(3), values)
    writer.flush()
    assert complaints == [] and writer._process is None
    writer.write(4, packed_groups(3), values)
    writer.flush()
    process = writer._process._process
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped; before, it could still read the next step
    writer.write(5, packed_groups(3), values)
    deadline = time.monotonic() + 120
    while not unread(process.stdin):  # until the thread has sent the step
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    writer.close()
    by_thread, *others = (read_rollouts(path) for _, path in rollout_files(tmp_path))
    assert len(others) == 4 and all(records == by_thread for records in others)
    assert missing_images(tmp_path, [path for _, path in rollout_files(tmp_path)]) == []


def unread(pipe) -> int:
    """Return the number of bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.slow
def test_an_error_of_the_writing_process_is_raised_by_the_next_call(tmp_path):
    (tmp_path / "rollouts").write_text("a file in place of the folder")
    writer = SampleWriter(tmp_path, lambda line: None)
    writer.write(1, packed_groups(1))
    with pytest.raises(FileExistsError):
        writer.close()
