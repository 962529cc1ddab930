"""Base of transports with which every policy rank sends the pieces that it holds, in full or as a difference.

With ``TransportOptions.mode`` ``full``, ``prepare`` needs only metadata, and ranks may send while they read their
weights. Otherwise each rank copies its buckets in ``prepare`` and encodes the difference from its previous copy.
Engines that hold the previous version then get the difference. All engines of a delivery get all weights if one of them
needs them: at the first update, for a replaced engine, and after a failed delivery.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from gdpo_nemo.weights.copies import Changes, RankCopy
from gdpo_nemo.weights.manifest import Base, Manifest, divide, joined, weight_metadata
from gdpo_nemo.weights.transports.base import PolicyRanks, Sender, Transport, TransportOptions

METRICS = {
    "weights/sent_mib": ("MiB", "Size of the messages with which each engine process got the new weights"),
    "weights/changed": ("share", "Changed 16-bit words of the weights since the version before (weights.mode)"),
    "weights/full": ("", "1 if the engines got all weights, 0 if they got the difference from the version before"),
    "weights/fallbacks": ("", "Deliveries of all weights in an update for which the policy had prepared a difference"),
}

_LEAST_BUCKET = 4 << 20
"""Minimum bytes of a bucket if many ranks send. Smaller messages would take mostly latency."""
_WORTHWHILE = 0.5
"""Share of the bytes of all weights above which a difference is not sent in mode ``auto``."""
_ATTEMPTS = 3
"""Number of differences in a row that were not worthwhile, after which ``auto`` sends all weights for the whole run."""


class ShardTransport(Transport):
    """Transport with which every policy rank sends the pieces that it holds."""

    sends_differences = True
    sender: ClassVar[type[ShardSender]]
    copies_full: ClassVar[bool] = False
    """True if ranks copy their buckets in ``prepare`` even with mode ``full``."""

    def __init__(self, policy: PolicyRanks, options: TransportOptions | None = None):
        super().__init__(policy, options or TransportOptions())
        self._name = secrets.token_hex(8)
        self._metadata: Manifest | None = None
        self._order: list[int] = []
        """Rank of each bucket, in the order of ``divide``."""
        self._full_bytes = 0
        """Bytes of all buckets."""
        self._holders: dict[int, Any] = {}
        """Actors that were sent the previous version, by engine number. A replacement is another actor."""
        self._copied: int | None = None
        """Version of the ranks' copies."""
        self._base: Base | None = None
        """Base of the prepared difference, if it is worthwhile."""
        self._sent = False
        self._futile = 0
        """Number of differences in a row that were not worthwhile."""

    @property
    def differs(self) -> bool:
        """True if this transport still sends differences."""
        return self.options.mode == "difference" or (self.options.mode == "auto" and self._futile < _ATTEMPTS)

    def prepare(self, version: int) -> None:
        """Set the version to send. In most modes, copy the weights on the ranks."""
        if self._metadata is None:
            self._metadata = self._describe()
        keeper = self._name if self.differs else ""
        self.manifest = replace(self._metadata, version=version, keeper=keeper)
        self._base = None
        self._sent = False
        self.statistics = {}
        if self.differs or self.copies_full:
            self._copy(version)

    def _describe(self) -> Manifest:
        refs = self.policy.start_sender(self.sender, "describe")
        manifest = joined(self.policy.wait(refs, "exporting weights"))
        bucket_bytes = self.options.bucket_bytes
        self.bucket_bytes = max(bucket_bytes // max(1, len(manifest.ranks)), min(bucket_bytes, _LEAST_BUCKET))
        buckets = divide(manifest, self.bucket_bytes)
        self._order = [bucket.rank for bucket in buckets]
        self._full_bytes = sum(bucket.nbytes for bucket in buckets)
        return manifest

    def _copy(self, version: int) -> None:
        before = self._copied if self.differs else None
        refs = self.policy.start_sender(self.sender, "take", version, self.bucket_bytes, before is not None)
        changes = self.policy.wait(refs, "exporting weights")
        self._copied = version
        if before is not None:
            self._count(changes, before)

    def _count(self, changes: Sequence[Changes], before: int) -> None:
        """Decide whether to send the difference from the version ``before``.

        Args:
            changes: the changes on each rank, in the order of the ranks.
        """
        sizes_of_ranks = [iter(found.sizes) for found in changes]
        sizes = tuple(next(sizes_of_ranks[rank]) for rank in self._order)
        words = sum(found.words for found in changes)
        self.statistics = {"weights/changed": sum(found.changed for found in changes) / max(1, words)}
        if self.options.mode == "difference" or sum(sizes) <= _WORTHWHILE * self._full_bytes:
            self._base = Base(before, sizes)
            self._futile = 0
            return
        self._futile += 1
        if not self.differs:
            self.manifest = replace(self.manifest, keeper="")

    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """Start a delivery: of the difference if all engines hold the previous version, otherwise of all weights."""
        held = all(self._holders.get(number) == engine for number, engine in engines.items())
        first, self._sent = not self._sent, True
        base = self._base if held and first else None
        statistics = dict(self.statistics)
        if first:
            self._holders = {}
            nbytes = sum(base.sizes) if base else self._full_bytes
            statistics |= {"weights/sent_mib": nbytes / 2**20, "weights/full": float(base is None)}
        fell_back = self._base is not None and base is None
        statistics["weights/fallbacks"] = statistics.get("weights/fallbacks", 0.0) + fell_back
        self.statistics = statistics
        self._holders |= engines
        return self.deliver(engines, replace(self.manifest, base=base), first)

    @abstractmethod
    def deliver(self, engines: Mapping[int, Any], manifest: Manifest, first: bool) -> tuple[list[Any], list[Any]]:
        """Start sending to the given engines. For the result, see ``Transport.send``.

        Args:
            manifest: what to send. ``Manifest.base`` is set for the difference.
            first: True for the first delivery of a version. Ranks that have no copy must send their current weights.
        """


class ShardSender(Sender):
    """Part of a transport on a policy rank, which sends the pieces that the rank holds."""

    _metadata: Manifest
    copy: RankCopy | None = None
    """Copy of a version, if there is any."""

    def describe(self) -> Manifest:
        """Return the manifest of what this rank sends, which is valid for all updates."""
        with self.pieces() as pieces:
            self._metadata = weight_metadata(pieces, -1, self.policy.adapters, self.rank)
        return self._metadata

    def metadata(self, version: int) -> Manifest:
        """Return the manifest of what this rank sends as ``version``. Call ``describe`` first."""
        return replace(self._metadata, version=version)

    def take(self, version: int, bucket_bytes: int, compare: bool) -> Changes | None:
        """Copy the current weights as ``version``. See ``RankCopy.take``."""
        self.copy = self.copy or RankCopy(self.device())
        with self.pieces() as pieces:
            return self.copy.take(divide(self.metadata(version), bucket_bytes), pieces, compare)

    def device(self) -> torch.device:
        """Return the device from which this rank sends."""
        device: torch.device = self.policy.runtime.device
        return device

    def messages(self, difference: bool) -> Iterator[torch.Tensor]:
        """Yield the copied buckets in host memory, in full or as a difference."""
        assert self.copy is not None
        return self.copy.messages(difference)
