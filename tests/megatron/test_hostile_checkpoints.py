"""A foreign checkpoint is data: nothing in it runs, and it names no file outside its folder."""

from __future__ import annotations

import io
import pickle
import shutil
import zipfile
from pathlib import Path

import checkpoint_cases
import pytest
import tiny_models
import torch
import torch.distributed.checkpoint as torch_checkpoint
from hostile_pickles import HOSTILE, RUNNING
from rank_pool import RankFailure
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from gdpo_nemo.megatron.checkpoint_index import load_plain, read_index
from gdpo_nemo.utils.errors import RunError


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint as torch writes it, of two tensors and an object."""
    folder = tmp_path_factory.mktemp("written")
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": {"steps": 3}}
    torch_checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def tampered(written: Path, file: Path, change) -> Path:
    """The index of ``written`` after ``change``, as ``file``."""
    metadata = FileSystemReader(written).read_metadata()
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    return file


def saved_object(content: bytes) -> io.BytesIO:
    """A file of ``torch.save`` whose pickle is ``content``."""
    whole, changed = io.BytesIO(), io.BytesIO()
    torch.save({}, whole)
    with zipfile.ZipFile(whole) as before, zipfile.ZipFile(changed, "w") as after:
        for name in before.namelist():
            after.writestr(name, content if name.endswith("data.pkl") else before.read(name))
    return io.BytesIO(changed.getvalue())


def test_an_index_is_read_as_torch_reads_it(written):
    ours = read_index(written / ".metadata")
    theirs = pickle.loads((written / ".metadata").read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.version == theirs.version
    parts = ("relative_path", "offset", "length")
    assert {key: [getattr(value, part) for part in parts] for key, value in ours.storage_data.items()} == {
        key: [getattr(value, part) for part in parts] for key, value in theirs.storage_data.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNNING)
def test_hostile_pickles_run_if_unpickled_without_protection(tmp_path, kind):
    pickle.loads(HOSTILE[kind](tmp_path / "mark"))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_index_is_refused_in_a_line_and_runs_nothing(tmp_path, kind):
    mark = tmp_path / "mark"
    (tmp_path / ".metadata").write_bytes(HOSTILE[kind](mark))
    with pytest.raises(RunError, match="metadata is not a supported checkpoint index") as refused:
        read_index(tmp_path / ".metadata")
    assert "\n" not in str(refused.value) and not mark.exists()


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_object_is_refused_in_a_line_and_runs_nothing(tmp_path, kind, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # a user's wish for own files reaches no checkpoint
    mark = tmp_path / "mark"
    with pytest.raises(RunError, match="a stored object cannot be read") as refused:
        load_plain(saved_object(HOSTILE[kind](mark)))
    assert "\n" not in str(refused.value) and not mark.exists()


def test_an_index_that_reserves_gigabytes_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")
    with pytest.raises(RunError, match="an index in its memo is too large"):
        read_index(tmp_path / ".metadata")


def test_changes_of_a_class_by_a_pickle_end_with_the_load(tmp_path):
    attack = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x03\x00\x00\x00badK\x01sttb."
    (tmp_path / ".metadata").write_bytes(attack)
    with pytest.raises(RunError):
        read_index(tmp_path / ".metadata")
    assert not hasattr(Metadata, "bad")


def move(path: str):
    def change(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = path

    return change


def transformed(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def negative(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).offset = -1


def huge(metadata: Metadata) -> None:
    metadata.state_dict_metadata["a"].size = torch.Size([2**60, 2**60])


CHANGES = {"outside": move("../../etc/x"), "absolute": move("/etc/passwd"), "a parent": move("..")}
CHANGES |= {"transformed": transformed, "negative": negative, "huge": huge}


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_that_points_outside_or_out_of_range_is_refused(tmp_path, written, change):
    with pytest.raises(RunError, match="metadata is not a supported checkpoint index"):
        read_index(tampered(written, tmp_path / ".metadata", CHANGES[change]))


@pytest.fixture(scope="module")
def checkpoint(on_ranks, model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    on_ranks("TP1", checkpoint_cases.save_and_go_on, model_folder("qwen3"), tiny_models.make_batch(), folder, 0)
    return folder


def hostile_object(folder: Path, mark: Path) -> None:
    """Have the optimizer's settings read from a hostile object behind the tensors."""
    shard = folder / "__0_0.distcp"
    content = saved_object(HOSTILE["os.system by reduce"](mark)).getvalue()

    def change(metadata: Metadata) -> None:
        place = next(value for key, value in metadata.storage_data.items() if key.fqn.startswith("common_state"))
        place.offset = shard.stat().st_size
        place.length = len(content)

    tampered(folder, folder / ".metadata", change)
    with open(shard, "ab") as file:
        file.write(content)


def hostile_index(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(HOSTILE["os.system by reduce"](mark))


@pytest.mark.slow
@pytest.mark.parametrize(
    "hide, said",
    [(hostile_index, "is not a supported checkpoint index"), (hostile_object, "a stored object cannot be read")],
)
def test_ranks_refuse_a_hostile_checkpoint_and_run_none_of_it(on_ranks, model_folder, checkpoint, tmp_path, hide, said):
    folder = tmp_path / "step_1"
    shutil.copytree(checkpoint, folder)
    hide(folder, tmp_path / "mark")
    arguments = (model_folder("qwen3"), tiny_models.make_batch(), folder)
    with pytest.raises(RankFailure, match=f"RunError: checkpoint {folder} cannot be read: .*{said}"):
        on_ranks("TP1", checkpoint_cases.load_and_go_on, *arguments)
    assert not (tmp_path / "mark").exists()
