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
        by_rank = [copy.full() if base is None else copy.difference() for copy in self.ranks]
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


FAULTS = st.sampled_from(["", "", "damaged", "truncated", "stopped", "missed", "rank failed"])
KEEPERS = st.sampled_from(["transport", "transport", "transport", "another", ""])


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(0, 9))
def test_engine_holds_the_newest_version_or_none_after_any_faults(data, seed):
    update = Update(seed)
    for _ in range(data.draw(st.integers(1, 8))):
        update.train(data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])))
        version = update.manifest.version
        fault = data.draw(FAULTS)
        if fault == "rank failed":
            with pytest.raises(RunError, match="the policy has"):
                update.ranks[0].take(update.own[0], iter(()), True)
        update.take(compare=True)
        manifest, messages = update.sent(version - 1 if data.draw(st.booleans()) else None)
        manifest = replace(manifest, keeper=data.draw(KEEPERS) or ("transport" if manifest.base else ""))
        assert fault != "rank failed" or messages[0].nbytes == update.buckets[0].nbytes
        if fault == "missed":
            continue
        if fault in ("damaged", "truncated"):
            damage(messages, fault, data)
        check_update(update, manifest, messages, fault)


def damage(messages: list[torch.Tensor], fault: str, data) -> None:
    """Change one of the messages. The first byte is that of a checksum or of a tensor, but not of padding."""
    number = data.draw(st.integers(0, len(messages) - 1))
    if fault == "damaged":
        messages[number][0] ^= data.draw(st.integers(1, 255))
    else:
        messages[number] = messages[number][: data.draw(st.integers(0, messages[number].nbytes - 1))]


def check_update(update: Update, manifest: Manifest, messages: list[torch.Tensor], fault: str) -> None:
    """Receive an update, of which all content must be correct and the errors must be those of the fault."""
    has_base = manifest.base is None or update.engine.holds == (manifest.keeper, manifest.base.version)
    is_damaged = fault in ("damaged", "truncated")
    before = [message.clone() for message in messages]
    yielded: list[Piece] = []
    try:
        for piece in update.engine.pieces(manifest, update.buckets, messages, CPU):
            assert update.engine.holds is None and update.is_correct(piece)
            yielded.append(piece)
            if fault == "stopped":
                break
    except BaseMissing as error:
        assert manifest.base and (is_damaged or not has_base), error
    except RunError as error:
        assert is_damaged and manifest.base is None, error
    else:
        assert has_base and not is_damaged
    assert all(map(torch.equal, messages, before))
    is_complete = has_base and not is_damaged and fault != "stopped"
    held = manifest.keeper, manifest.version
    assert update.engine.holds == (held if is_complete and manifest.keeper else None)
    if is_complete:
        tensors = dict(assembled(yielded))
        assert tensors.keys() == update.tensors.keys()
        assert all(torch.equal(bits(tensors[name]), bits(tensor)) for name, tensor in update.tensors.items())


def test_first_comparison_and_unchanged_weights():
    """Without an older copy, all words count as changed. Unchanged weights take little more than their checksums."""
    update = Update(0)
    update.take(compare=True)
    assert all(changes.changed == changes.words for changes in update.changes)
    update.take(compare=True)
    for changes, own in zip(update.changes, update.own):
        assert changes.changed == 0
        assert changes.sizes == tuple(8 * len(bucket.entries) + 8 for bucket in own)
