"""Files that are written whole: links are followed, pipes and devices stay, and a failure leaves the old content."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from pathlib import Path

import pytest

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config, save_config
from gdpo_nemo.observe.html_report import write_report
from gdpo_nemo.observe.plot import plot_rewards
from gdpo_nemo.tools.compare import page
from gdpo_nemo.tools.compare.comparison import RunRecord, variants_of
from gdpo_nemo.training import api
from gdpo_nemo.utils import files
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import remove_partial_files, whole_file, write_whole

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEMO = CONFIGS / "gdpo_tiny_cpu.yaml"
GPU_CONFIG = CONFIGS / "gdpo_gsm8k_qwen2.5_1.5b_8gpu.yaml"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of three steps."""
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": step, "loss": 0.1, "reward/correctness/mean": 0.1 * step} for step in (1, 2, 3)]
    save_config(load_config(DEMO), folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _plot(run: Path) -> Path:
    return plot_rewards(run)


def _report(run: Path) -> Path:
    return write_report(run)


def _comparison(run: Path) -> Path:
    variants = variants_of([RunRecord.read(run)])
    return page.write(variants, ["reward/correctness/mean"], "steps", run)[1]


def _simulation(run: Path) -> Path:
    picture = run / "simulation.png"
    assert cli.main(["simulate", "--config", str(GPU_CONFIG), "--steps", "3", "--png", str(picture)]) == 0
    return picture


def _inline(run: Path) -> Path:
    with api.written(run, {"rows.jsonl": b"{}\n"}):
        return run / "rows.jsonl"


PLACES = [_plot, _report, _comparison, _simulation, _inline]
by_place = pytest.mark.parametrize("write", PLACES, ids=lambda write: write.__name__.strip("_"))


@by_place
def test_every_writer_follows_a_link_and_keeps_a_pipe(write, run, tmp_path):
    path = write(run)
    target = tmp_path / "elsewhere"
    target.write_text("old")
    path.unlink()
    path.symlink_to(target)
    write(run)
    assert path.is_symlink() and target.read_bytes() not in (b"old", b"")

    path.unlink()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
        write(run)
        assert stat.S_ISFIFO(path.lstat().st_mode) and os.read(reader, 1 << 20) == target.read_bytes()
    finally:
        os.close(reader)
    assert not [left for left in run.iterdir() if "partial" in left.name]


def test_a_pipe_without_a_reader_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError) as caught:
        write_whole(tmp_path / "pipe", b"x")
    assert caught.value.errno == errno.ENXIO


def test_a_full_device_fails_and_remains_a_device():
    with pytest.raises(OSError) as caught:
        write_whole("/dev/full", b"x")
    assert caught.value.errno == errno.ENOSPC and stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_descriptor_of_a_removed_file_receives_the_content(tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        os.unlink(file.name)
        write_whole(f"/dev/fd/{file.fileno()}", b"content")
        assert file.read() == b"content" and list(tmp_path.iterdir()) == []


def test_a_broken_link_makes_its_target(tmp_path):
    (tmp_path / "link").symlink_to("target")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "target").read_text() == "text" and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("kind", ["folder", "loop", "missing"])
def test_failed_write_is_an_error_and_leaves_no_file(tmp_path, kind):
    path = tmp_path / "place"
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path = path / "file"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError):
        write_whole(path, b"x")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_replaced_file_keeps_its_permissions_and_a_name_of_255_bytes(tmp_path):
    path = tmp_path / ("ä" * 127)
    path.write_text("secret")
    path.chmod(0o600)
    write_whole(path, b"new")
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failed_block_keeps_the_old_content_and_leaves_no_partial_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ConfigError), whole_file(path) as file:
        file.write(b"new")
        raise ConfigError("a row is damaged")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_synced_file_is_on_the_disk_before_its_name_and_its_name_before_the_return(tmp_path, monkeypatch):
    path = tmp_path / "file"
    calls = []
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor):
        calls.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", record_sync)
    monkeypatch.setattr(files.os, "replace", lambda old, new: (calls.append(("rename",)), replace(old, new)))
    write_whole(path, b"x")
    assert calls == [("rename",)]
    path.unlink()
    calls.clear()
    write_whole(path, b"x", sync=True)
    assert [call[0] for call in calls] == ["sync", "rename", "sync"]
    assert calls[0][2] is False and calls[2][1:] == (str(tmp_path), True)


def test_partial_files_of_a_killed_process_are_removed_and_no_others(tmp_path):
    for name in (".partial-71-ab", ".partial-712-ab", "file"):
        (tmp_path / name).write_text("")
    remove_partial_files(tmp_path, 71)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-712-ab", "file"]


def test_samples_are_exported_into_a_link(tmp_path, capsys):
    from gdpo_nemo.commands import export_rollouts

    (tmp_path / "link").symlink_to("target")
    with export_rollouts._open_output(str(tmp_path / "link")) as out:
        out.write("{}\n")
    assert (tmp_path / "target").read_text() == "{}\n" and (tmp_path / "link").is_symlink()
