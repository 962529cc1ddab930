"""Copies of the newest version on ranks and in an engine process: updates in full and by difference, which may fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights.copies import BaseMissing, Changes, EngineCopy, RankCopy
from gdpo_nemo.weights.manifest import Base, Manifest, divide, joined, weight_metadata
from gdpo_nemo.weights.pieces import Piece, Region, assembled

CPU = torch.device("cpu")
SHAPES = ((7,), (64, 30), (1,), (129, 17), (0,), (33,))
DTYPES = (torch.bfloat16, torch.float32, torch.uint8)
BUCKET_BYTES = 2000


class Update:
    """Two ranks that each send half of one tensor and some whole tensors, and one engine process."""

    def __init__(self, seed: int):
        self.draw = torch.Generator().manual_seed(seed)
        self.tensors = {
            f"{i}": torch.randn(shape, generator=self.draw).to(DTYPES[i % 3]) for i, shape in enumerate(SHAPES)
        }
        self.tensors["halves"] = torch.randn(40, 9, generator=self.draw).to(torch.bfloat16)
        manifests = [weight_metadata(self.pieces(rank), 0, rank=rank) for rank in (0, 1)]
        self.manifest = replace(joined(manifests), keeper="transport")
        self.buckets = divide(self.manifest, BUCKET_BYTES)
        self.own = [divide(manifest, BUCKET_BYTES) for manifest in manifests]
        self.ranks = [RankCopy(CPU), RankCopy(CPU)]
        self.engine = EngineCopy()
        self.changes: list[Changes | None] = []

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Yield what a rank sends."""
        half = self.tensors["halves"][20 * rank : 20 * rank + 20]
        yield Piece("halves", half, Region((20 * rank, 0), (40, 9)))
        for name in sorted(self.tensors.keys() - {"halves"})[rank::2]:
            yield Piece(name, self.tensors[name])

    def train(self, share: float) -> None:
        """Change the tensors' bits."""
        for tensor in self.tensors.values():
            values = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
            values += (torch.rand(values.shape, generator=self.draw) < share).to(values.dtype)
        self.manifest = replace(self.manifest, version=self.manifest.version + 1)

    def take(self, compare: bool) -> None:
        """Copy the tensors on both ranks."""
        self.changes = [
            copy.take(own, self.pieces(rank), compare) for rank, (copy, own) in enumerate(zip(self.ranks, self.own))
        ]

    def sent(self, base: int | None) -> tuple[Manifest, list[torch.Tensor]]:
        """Return (manifest, messages in the order of ``divide``) of the current version."""
        by_rank = [copy.messages(base is not None) for copy in self.ranks]
        messages = [next(by_rank[bucket.rank]).clone() for bucket in self.buckets]
        sizes = tuple(message.nbytes for message in messages)
        if base is None:
            return self.manifest, messages
        for rank, changes in enumerate(self.changes):
            assert changes.sizes == tuple(s for s, b in zip(sizes, self.buckets) if b.rank == rank)
        return replace(self.manifest, base=Base(base, sizes)), messages

    def is_correct(self, piece: Piece) -> bool:
        """Return whether a piece has the bits of the current version."""
        parts = [part for rank in (0, 1) for part in self.pieces(rank)]
        (part,) = (part for part in parts if (part.name, part.region) == (piece.name, piece.region))
        return torch.equal(bits(part.values), bits(piece.values))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, so that NaN equals itself."""
    return tensor.contiguous().flatten().view(torch.uint8)


FAULTS = st.sampled_from(["", "", "damaged", "damaged", "truncated", "stopped", "missed", "rank failed"])
KEEPERS = st.sampled_from(["transport", "transport", "transport", "another", ""])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 9))
def test_engine_holds_the_newest_version_or_none_after_any_faults(data, seed):
    update = Update(seed)
    update.take(compare=True)
    check_update(update, *update.sent(None), "")
    for _ in range(data.draw(st.integers(1, 6))):
        update.train(data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])))
        fault = data.draw(FAULTS)
        if fault == "rank failed":
            with pytest.raises(RunError, match="the policy has"):
                update.ranks[0].take(update.own[0], iter(()), True)
        update.take(compare=True)
        by_difference = data.draw(st.sampled_from([True, True, False]))
        manifest, messages = update.sent(update.manifest.version - 1 if by_difference else None)
        manifest = replace(manifest, keeper=data.draw(KEEPERS) or ("transport" if manifest.base else ""))
        assert fault != "rank failed" or messages[0].nbytes == update.buckets[0].nbytes
        if fault in ("damaged", "truncated"):
            damage(messages, fault, data)
        if fault != "missed":
            check_update(update, manifest, messages, fault)


def damage(messages: list[torch.Tensor], fault: str, data) -> None:
    """Change a byte of one of the messages, or remove the end of one."""
    number = data.draw(st.integers(0, len(messages) - 1))
    byte = data.draw(st.integers(0, messages[number].nbytes - 1))
    if fault == "damaged":
        messages[number][byte] ^= data.draw(st.integers(1, 255))
    else:
        messages[number] = messages[number][:byte]


def check_update(update: Update, manifest: Manifest, messages: list[torch.Tensor], fault: str) -> None:
    """Receive an update, of which all content must be correct and the errors must be those of the fault."""
    has_base = manifest.base is None or update.engine.holds == (manifest.keeper, manifest.base.version)
    before = [message.clone() for message in messages]
    yielded: list[Piece] = []
    try:
        for piece in update.engine.pieces(manifest, update.buckets, messages, CPU):
            assert update.engine.holds is None and update.is_correct(piece)
            yielded.append(piece)
            if fault == "stopped":
                break
    except RunError as error:
        assert fault in ("damaged", "truncated") or not has_base, error
        assert isinstance(error, BaseMissing) == (manifest.base is not None)
        fault = "stopped"
    else:
        assert has_base and fault != "truncated"
    assert all(map(torch.equal, messages, before))
    if fault == "stopped":
        assert update.engine.holds is None
        return
    assert update.engine.holds == ((manifest.keeper, manifest.version) if manifest.keeper else None)
    tensors = dict(assembled(yielded))
    assert tensors.keys() == update.tensors.keys()
    assert all(torch.equal(bits(tensors[name]), bits(tensor)) for name, tensor in update.tensors.items())


def test_damage_of_a_difference_is_found():
    """A changed byte in any message leads to an error, or has no effect on the tensors (in the padding)."""
    update = Update(0)
    update.take(compare=True)
    full = update.sent(None)
    update.train(0.3)
    update.take(compare=True)
    manifest, sent = update.sent(0)
    failed = 0
    for number, byte in (
        (number, byte) for number, message in enumerate(sent) for byte in range(0, message.nbytes, 37)
    ):
        list(update.engine.pieces(full[0], update.buckets, full[1], CPU))
        messages = [message.clone() for message in sent]
        messages[number][byte] ^= 5
        check_update(update, manifest, messages, "damaged")
        failed += update.engine.holds is None
    assert failed > 100


def words(update: Update, rank: int) -> torch.Tensor:
    """Return the words of a rank's pieces without the padding between them, int16 [words]."""
    padded = [torch.cat([b, b.new_zeros(b.numel() % 2)]) for b in (bits(p.values) for p in update.pieces(rank))]
    return torch.cat(padded).view(torch.int16)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_changes_are_counted(share):
    """Without an older copy, all words count as changed. Unchanged buckets take little more than their checksums."""
    update = Update(0)
    update.take(compare=True)
    assert all(changes.changed == changes.words for changes in update.changes)
    before = [words(update, rank) for rank in (0, 1)]
    update.train(share)
    update.take(compare=True)
    for rank, changes in enumerate(update.changes):
        assert changes.changed == int((words(update, rank) != before[rank]).sum())
        if share == 0:
            assert changes.sizes == tuple(8 * len(bucket.entries) + 8 for bucket in update.own[rank])
