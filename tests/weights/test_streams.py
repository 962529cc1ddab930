"""What streams of buckets promise: every byte proven, bounded memory on both ends, a lost end noticed, nothing left
behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights import manifest as checksums
from gdpo_nemo.weights.broadcast_group import BroadcastServer
from gdpo_nemo.weights.manifest import _BLOCK, PeerLost, checksum, divide, filled, weight_metadata
from gdpo_nemo.weights.transports.collective import CollectiveReceiver
from gdpo_nemo.weights.transports.ipc import IpcReceiver, IpcServer

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def model(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Tensors of many sizes, odd ones and a view of a larger one among them."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ((7,), (64, 3), (1,), (129, 17), (5, 5, 5), (33,))
    made = [(f"layer.{i}", torch.randn(shape, generator=draw).to(DTYPES[i % 3])) for i, shape in enumerate(shapes)]
    alike = [(f"expert.{i}", torch.randn(33, generator=draw).to(torch.bfloat16)) for i in range(3)]
    return [*made, *alike, ("part", torch.randn(9, generator=draw).to(torch.bfloat16)[1:4])]


def same(received, sent) -> bool:
    pairs = list(zip(received, sent, strict=True))
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) and a[1].dtype == b[1].dtype for a, b in pairs)


# -- checksums --------------------------------------------------------------------------------------------------


def reference(tensor: torch.Tensor) -> int:
    """The same sum in integers without bounds, from the formula in the module's docstring."""
    from gdpo_nemo.weights.manifest import _CHAIN, _INTEGERS, _weights

    words = tensor.contiguous().flatten().view(_INTEGERS[tensor.element_size()]).tolist()
    assert len(words) <= _BLOCK
    weights = _weights(CPU)[: len(words)].tolist()
    total = (len(words) * _CHAIN + sum(word * weight for word, weight in zip(words, weights))) % (1 << 64)
    return total - (1 << 64) if total >> 63 else total


def of(values: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).clone().view(dtype)


@settings(max_examples=60)
@given(st.binary(min_size=8, max_size=240).map(lambda b: b[: len(b) // 8 * 8]), st.sampled_from(DTYPES))
def test_a_checksum_is_exact_integer_arithmetic(values, dtype):
    assert int(checksum(of(values, dtype))) == reference(of(values, dtype))


@settings(max_examples=200)
@given(st.data(), st.binary(min_size=16, max_size=240).map(lambda b: b[: len(b) // 8 * 8]), st.sampled_from(DTYPES))
def test_flipped_swapped_and_shifted_bytes_change_the_checksum(data, values, dtype):
    before = int(checksum(of(values, dtype)))
    place = st.integers(0, len(values) - 1)
    flipped = bytearray(values)
    swapped = bytearray(values)
    flipped[data.draw(place)] ^= 1 << data.draw(st.integers(0, 7))
    a = data.draw(place)
    b = data.draw(place)
    swapped[a] = values[b]
    swapped[b] = values[a]
    shift = data.draw(st.integers(1, len(values) - 1))
    for changed in (bytes(flipped), bytes(swapped), values[shift:] + values[:shift], bytes(shift) + values[:-shift]):
        assert (int(checksum(of(changed, dtype))) == before) == (changed == values)


class Launches(TorchDispatchMode):
    """Counts the operations that are kernels on a GPU: all but views."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += not function.is_view
        return function(*arguments, **(named or {}))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [0, 5, _BLOCK - 1, _BLOCK, _BLOCK + 1, 35 * _BLOCK + 77])
def test_a_gpu_adds_many_blocks_at_once_to_the_same_checksum(dtype, elements, monkeypatch):
    drawn = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    here = int(checksum(drawn.view(dtype)))
    monkeypatch.setattr(checksums, "_is_on_cpu", lambda words: False)
    assert int(checksum(drawn.view(dtype))) == here


def test_the_checksums_of_7b_are_some_thousand_launches():
    """Shapes of Qwen2.5-7B, on a device without memory; 37 thousand with a block at a time."""
    layer = [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), (18944, 3584), (18944, 3584), (3584, 18944)]
    shapes = 28 * [*layer, (3584,), (512,), (512,), (3584,), (3584,)] + [(152064, 3584), (152064, 3584), (3584,)]
    weights = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    checksum(weights[0])
    with Launches() as launches:
        for weight in weights:
            checksum(weight)
    print(f"{launches.count} launches for {sum(weight.numel() for weight in weights) / 1e9:.1f} G elements")
    assert launches.count < 6500


def test_an_expert_shares_the_launches_of_its_layer():
    """A layer of Qwen3-30B-A3B on a device without memory: 16 launches for each matrix with a matrix at a time."""
    shapes = {"gate": (768, 2048), "up": (768, 2048), "down": (2048, 768)}
    layer = [
        (f"{expert}.{name}", torch.empty(shape, dtype=torch.bfloat16, device="meta"))
        for expert in range(128)
        for name, shape in shapes.items()
    ]
    manifest = weight_metadata(layer, 0)
    with Launches() as launches:
        sent = sum(buffer.nbytes for buffer in filled(manifest, iter(layer), 256 << 20, torch.device("meta")))
    assert sent == 384 * (2 * 768 * 2048 + 8)
    assert launches.count < len(layer) // 2, launches.count


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("words", [0, 5, _BLOCK + 7])
def test_rows_of_a_table_have_the_checksums_of_single_tensors(words, on_cpu, monkeypatch):
    rows = torch.randint(-(2**15), 2**15, (19, words), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    alone = [int(checksum(row)) for row in rows]
    monkeypatch.setattr(checksums, "_is_on_cpu", lambda words: on_cpu)
    assert checksums.row_checksums(rows).tolist() == alone and len(set(alone)) == (19 if words else 1)


def test_blocks_that_change_places_and_lengths_that_differ_change_the_checksum():
    blocks = torch.randint(
        -(2**15), 2**15, (2 * _BLOCK,), dtype=torch.int16, generator=torch.Generator().manual_seed(0)
    )
    assert int(checksum(blocks)) != int(checksum(blocks.roll(_BLOCK)))
    assert len({int(checksum(torch.zeros(n))) for n in (0, 1, 2, _BLOCK, _BLOCK + 1)}) == 5


# -- buckets ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 10_000))
def test_buckets_return_their_content(bucket_bytes):
    manifest = weight_metadata(model(), 3)
    buckets = divide(manifest, bucket_bytes)
    assert [e for b in buckets for e in b.entries] == list(manifest.entries)
    assert all(len(b.entries) == 1 or sum(e.nbytes for e in b.entries) <= bucket_bytes for b in buckets)
    received = [
        pair
        for b, data in zip(buckets, filled(manifest, iter(model()), bucket_bytes, CPU), strict=True)
        for pair in b.open(data)
    ]
    assert same(received, model())


def test_any_changed_byte_of_a_bucket_is_found_and_its_tensor_named():
    manifest = weight_metadata(model(), 3)
    (bucket,) = divide(manifest, 1 << 20)
    (data,) = filled(manifest, iter(model()), 1 << 20, CPU)
    for entry in manifest.entries:
        for byte in (entry.offset, entry.offset + entry.nbytes - 1):
            data[byte] ^= 4
            with pytest.raises(RunError, match=f"weight update 3: checksum of {entry.name} differs"):
                list(bucket.open(data))
            data[byte] ^= 4
    assert same(bucket.open(data), model())


def test_a_model_that_is_not_the_manifests_is_refused_before_it_is_sent():
    manifest = weight_metadata(model(), 3)
    for wrong in (model()[:-1], [("other", model()[0][1]), *model()[1:]], [("layer.0", torch.zeros(8)), *model()[1:]]):
        with pytest.raises(RunError, match="weight update 3: the policy has .* where its manifest has"):
            list(filled(manifest, iter(wrong), 1000, CPU))


# -- by collective and ipc --------------------------------------------------------------------------------------


def by_collective(manifest, tensors, bucket_bytes: int, take=list, receivers: int = 2):
    """Sent from this thread to two processes of one engine, which are threads here."""
    server = BroadcastServer("127.0.0.1", receivers, "gloo")
    receiver = CollectiveReceiver({0: (server.meeting, True)}, 0, 1, bucket_bytes, 30)
    found = [Received(receiver, manifest, worker, take) for worker in range(receivers)]
    server.send(filled(manifest, tensors, bucket_bytes, CPU))
    return [each.get() for each in found]


def by_ipc(manifest, tensors, bucket_bytes: int, take=list):
    server = IpcServer()
    found = Received(IpcReceiver((("nowhere", b"none"), server.address), bucket_bytes, 30), manifest, 1, take)
    server.send(manifest, tensors, bucket_bytes, CPU)
    return [found.get()]


class Received(threading.Thread):
    """The tensors that a receiver yields, or the exception it raises."""

    def __init__(self, receiver, manifest, worker: int, take=list):
        super().__init__(daemon=True)
        self.receiver = receiver
        self.manifest = manifest
        self.worker = worker
        self.take = take
        self.start()

    def run(self):
        try:
            self.result = self.take(self.receiver.receive(self.manifest, CPU, self.worker))
        except RunError as error:
            self.result = error

    def get(self):
        self.join(300)
        if isinstance(self.result, RunError):
            raise self.result
        return self.result


TRANSPORTS = {"collective": by_collective, "ipc": by_ipc}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 20])
def test_every_process_receives_every_tensor(name, bucket_bytes):
    for received in TRANSPORTS[name](weight_metadata(model(), 1), iter(model()), bucket_bytes):
        assert same(received, model())


_MEMORY = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_streams as t

def resident():
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {k: int(v.split()[0]) for k, _, v in lines if k in ("VmHWM", "VmRSS")}

def tensors():
    for i in range(48):
        yield f"w{i}", torch.full((1 << 20,), float(i))

manifest = t.weight_metadata(((n, x) for n, x in tensors()), 0)
t.checksum(torch.ones(1 << 20))
for way in t.TRANSPORTS.values():
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()["VmRSS"]
    totals = way(manifest, tensors(), 8 << 20, lambda pairs: sum(float(x[0]) for _, x in pairs))
    assert set(totals) == {float(sum(range(48)))}
    print((resident()["VmHWM"] - before) / 1024)
"""


@pytest.mark.slow
def test_neither_end_holds_a_copy_of_the_model():
    """192 MiB in buckets of 8 MiB, both ends (two receivers of the broadcast) in one process."""
    # What is freed goes back to the system at once, so that it does not count.
    prompt = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _MEMORY, str(Path(__file__).parent)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **prompt}).stdout
    assert max(map(float, shown.split())) < 150, shown


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_receiver_that_gives_up_ends_the_senders_wait(name):
    manifest = weight_metadata(model(), 1)
    start = time.monotonic()
    with pytest.raises(PeerLost):
        if name == "ipc":
            server = IpcServer()
            Received(IpcReceiver((server.address,), 1, 600), manifest, 0, take=next)
            server.send(manifest, iter(model()), 1, CPU)
        else:
            server = BroadcastServer("127.0.0.1", 1, "gloo")
            Received(CollectiveReceiver({0: (server.meeting, True)}, 0, 1, 1, 600), manifest, 0, take=next)
            server.send(filled(manifest, iter(model()), 1, CPU))
    assert time.monotonic() - start < 300


@pytest.mark.slow
def test_shared_memory_has_no_name_that_a_kill_could_leave_behind():
    """Looked at in the middle of an update, and memory and socket are there all the same."""
    server = IpcServer()
    manifest = weight_metadata(model(), 1)
    before = set(os.listdir("/dev/shm"))
    seen = []

    def look(pairs):
        received = [next(pairs)]
        seen.extend(set(os.listdir("/dev/shm")) - before)
        return received + list(pairs)

    found = Received(IpcReceiver((server.address,), 1, 600), manifest, 0, take=look)
    server.send(manifest, iter(model()), 1, CPU)
    assert same(found.get(), model())
    assert [name for name in seen if name.startswith("torch")] == []
