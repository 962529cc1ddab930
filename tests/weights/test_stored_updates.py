"""Updates through the object store and through a folder: from two ranks to two engines, in full and by difference."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_copies import BUCKET_BYTES, CPU, Update, bits

from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights import copies
from gdpo_nemo.weights.copies import BaseMissing
from gdpo_nemo.weights.pieces import assembled
from gdpo_nemo.weights.transports.base import make_transport

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


def transferred(value):
    """Return a value as Ray transfers it: a copy whose arrays are read-only."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(pickled, buffers=[bytes(buffer) for buffer in buffers])


class Ranks:
    """The policy's two ranks in this process. Calls of senders return values instead of references."""

    def __init__(self, update: Update):
        self.update = update
        self.senders: dict[int, object] = {}
        self.calls: list[tuple] = []

    def start_sender(self, sender, method, *args, ranks=None, num_returns=1):
        self.calls.append((method, *args))
        return [self._call(sender, rank, method, args) for rank in (range(2) if ranks is None else ranks)]

    def _call(self, sender, rank, method, args):
        if rank not in self.senders:
            policy = SimpleNamespace(
                adapters=None,
                runtime=SimpleNamespace(device=CPU),
                pieces=lambda: self.update.pieces(rank),
            )
            self.senders[rank] = sender(policy, rank, "localhost")
        return transferred(getattr(self.senders[rank], method)(*args))

    def wait(self, refs, what):
        return list(refs)

    def forms(self) -> list[bool]:
        """Return whether each stored delivery since the last call was a difference."""
        found = [call[-1] for call in self.calls if call[0] in ("store", "write")]
        self.calls.clear()
        return found


class Engine:
    """An engine's process, which starts without a copy."""

    def __init__(self, number: int, in_process: bool):
        copies._COPIES.pop(f"process 0 of engine {number}", None)
        self.in_process = in_process
        self.update_weights = SimpleNamespace(remote=self.receive)

    def receive(self, manifest, receiver, *data):
        """Return the tensors of an update by their names, or the error."""
        manifest, receiver, *data = transferred((manifest, receiver, *data))
        try:
            with receiver.opened(manifest, self.in_process, *data) as opened:
                tensors = transferred(opened).receive(manifest, CPU, 0)
                return {name: tensor.clone() for name, tensor in tensors}
        except RunError as error:
            return error


class Parts:
    """Two ranks, a transport and two engines: one with its worker in its main process, one with a separate worker."""

    def __init__(self, name: str, folder: Path, mode: str = "difference"):
        self.update = Update(0)
        self.ranks = Ranks(self.update)
        self.engines = {0: Engine(0, True), 1: Engine(1, False)}
        self.transport = make_transport(name, self.ranks, folder, BUCKET_BYTES, mode=mode)

    def prepare(self, share: float = 0.05) -> None:
        """Train, and prepare the next version."""
        self.update.train(share)
        self.transport.prepare(self.update.manifest.version)

    def send(self) -> list:
        """Deliver the prepared version to all engines, and return what ``Engine.receive`` returned."""
        updates, _ = self.transport.send(self.engines)
        return updates

    def check(self, updates: list) -> None:
        """Compare what engines received with the ranks' tensors, bit for bit."""
        expected = dict(assembled(piece for rank in (0, 1) for piece in self.update.pieces(rank)))
        for received in updates:
            assert isinstance(received, dict), received
            assert received.keys() == expected.keys()
            assert all(torch.equal(bits(received[name]), bits(tensor)) for name, tensor in expected.items())


@pytest.fixture(params=["memory", "folder"])
def name(request):
    return request.param


@pytest.fixture(autouse=True)
def shared_memory_stays_empty():
    folder, prefix = Path("/dev/shm"), f"gdpo_nemo_weights_{os.path.basename(tempfile.gettempdir())}_"
    before = set(folder.glob(f"{prefix}*"))
    yield
    assert set(folder.glob(f"{prefix}*")) <= before


def test_engines_get_the_bits_of_both_ranks_in_full_and_by_difference(name, tmp_path):
    """A replaced engine gets all weights, and so does the other engine in the same delivery."""
    parts = Parts(name, tmp_path / "weights")
    forms = []
    for share in (0.05, 0.05, 0.0, 1.0):
        parts.prepare(share)
        parts.check(parts.send())
        forms += parts.ranks.forms()
    assert forms == [False, True, True, True]
    parts.engines[1] = Engine(1, False)
    parts.prepare()
    parts.check(parts.send())
    assert parts.ranks.forms() == [True, False]
    parts.prepare()
    parts.check(parts.send())
    parts.check(parts.send())  # again, as after a lost engine
    assert parts.ranks.forms() == [True, False]


def test_full_mode_stores_each_version_once(name, tmp_path):
    parts = Parts(name, tmp_path / "weights", mode="full")
    for _ in range(3):
        parts.prepare()
        parts.check(parts.send())
        parts.check(parts.send())
        assert parts.ranks.forms() == [False]
    assert not any(engine.holds for engine in copies._COPIES.values())


def test_engine_that_lost_its_copy_gets_all_weights_next(name, tmp_path):
    parts = Parts(name, tmp_path / "weights")
    parts.prepare()
    parts.check(parts.send())
    copies.engine_copy("process 0 of engine 1").holds = None
    parts.prepare()
    correct, error = parts.send()
    assert isinstance(error, BaseMissing)
    parts.check([correct])
    parts.check(parts.send())


def damaged(file: Path, fault: str) -> None:
    """Change the first byte of a file, remove the last byte, or delete the file."""
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    if fault == "missing":
        file.unlink()
    else:
        file.write_bytes(content if fault == "changed" else content[:-1])


@pytest.mark.parametrize("form", ["full", "difference"])
@pytest.mark.parametrize("fault", ["changed", "short", "missing"])
def test_damage_to_a_rank_s_file_is_an_error_in_every_engine(fault, form, tmp_path):
    """The error names the version and the file or tensor. A changed difference is replaced by all weights."""
    parts = Parts("folder", tmp_path / "weights")
    parts.prepare()
    if form == "difference":
        parts.check(parts.send())
        parts.prepare()
    version = parts.update.manifest.version
    file = tmp_path / "weights" / f"version_{version}" / f"{form}_00001.bin"
    damaged(file, fault)
    for error in parts.send():
        assert isinstance(error, RunError)
        assert str(error).startswith(f"weight update {version}: ")
        assert fault == "changed" or str(file) in str(error)
        assert isinstance(error, BaseMissing) == (fault == "changed" and form == "difference")
    if form == "difference":
        parts.check(parts.send())


def test_folder_has_complete_files_of_the_newest_version_only(tmp_path):
    """Files of the same version that a stopped run left are removed."""
    folder = tmp_path / "weights"
    (folder / "version_1").mkdir(parents=True)
    (folder / "version_1" / "difference_00007.bin").write_bytes(b"left")
    parts = Parts("folder", folder)
    for form in ("full", "difference", "difference"):
        parts.prepare()
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
        version = parts.update.manifest.version
        assert files == [f"version_{version}/{form}_0000{rank}.bin" for rank in (0, 1)]
        parts.check(parts.send())
        assert [path.name for path in folder.iterdir()] == [f"version_{version}"]
    parts.transport.close()
    assert not folder.exists()


def test_file_that_cannot_be_written_is_an_error_with_version_and_folder(tmp_path):
    (tmp_path / "weights").write_text("a file in place of the folder")
    parts = Parts("folder", tmp_path / "weights")
    with pytest.raises(RunError, match=r"weight update 1 could not be written to .*/weights/version_1: "):
        parts.prepare()
