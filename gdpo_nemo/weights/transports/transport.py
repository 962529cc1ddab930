"""What a transport of weights is: a driver that steers, a sender on every policy rank, a receiver in the engines.

A transport is a file with a subclass of each. ``weights.transport`` names the driver's class, by its line in
``config/transports.py`` or by its place (``file.py:Class``); no other file knows it. What every transport shares is
done elsewhere, once: engines compare names before bytes are sent, load through vLLM's layer-wise reload
(``vllm_receiver``) and do not sample while they hold half an update; the fleet sends again what was lost; a probe
compares log-probs after each update.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Iterable, Iterator, Mapping, Protocol, Sequence, SupportsIndex

import torch

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.objects import PLUGIN_PREFIX, load_object, place_of
from gdpo_nemo.config.transports import transport_place
from gdpo_nemo.errors import ConfigError, GdpoError, RunError
from gdpo_nemo.weights.adapters import Adapters
from gdpo_nemo.weights.manifest import Manifest, weight_metadata

Tensors = Iterator[tuple[str, torch.Tensor]]
"""Hugging Face names with whole tensors, in the order of a manifest."""


class PolicyOnRank(Protocol):
    """What a sender sees of the policy on its rank (``megatron.policy.Policy``)."""

    adapters: Adapters | None
    runtime: Any
    """``runtime.device`` is where the weights are."""

    def update(self) -> Tensors:
        """What an engine with the starting weights lacks. Collective: every rank has to exhaust it."""


class PolicyRanks(Protocol):
    """What a transport sees of the policy from the driver (``cluster.policy_group.PolicyGroup``)."""

    timeout_s: float

    @property
    def ranks(self) -> Sequence[Any]:
        """Actors of the ranks."""
        ...

    @property
    def shared(self) -> Sequence[Sequence[int]]:
        """For every engine the ranks whose devices its processes share, in order; empty where engines are apart."""
        ...

    @property
    def engine_processes(self) -> int:
        """Processes of one engine."""
        ...

    def start_sender(
        self,
        sender: type[Sender],
        method: str,
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        num_returns: int = 1,
    ) -> list[Any]:
        """Call a method of the sender on ``ranks`` (None: all): references to the results, one a rank."""

    def wait(self, refs: Sequence[Any], what: str) -> list[Any]:
        """Results of references to work of the policy. Raises RunError where a rank fails, dies or is late."""


class Sender:
    """A transport's part on one rank of the policy; made there at its first call, and kept.

    The driver names it in ``PolicyRanks.start_sender`` with one of its methods. A method that takes weights is called
    on all ranks alike and must gather on each of them (``gathered``), whether or not this one sends.
    """

    def __init__(self, policy: PolicyOnRank, rank: int, host: str):
        self.policy = policy
        self.rank = rank
        self.host = host
        """Address of this rank's machine in the cluster."""

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Tensors]:
        """The tensors of an update. What the block leaves of them passes by: the other ranks gather along."""
        tensors = self.policy.update()
        try:
            yield tensors
        finally:
            for _ in tensors:
                pass

    def weight_metadata(self) -> Manifest | None:
        """On rank 0 the manifest of the weights without checksums: their values may change later, not their form."""
        with self.gathered() as tensors:
            return weight_metadata(tensors, -1, self.policy.adapters) if self.rank == 0 else None


class Receiver(ABC):
    """What one engine is told of an update: pickled to it and to each of its worker processes."""

    @contextlib.contextmanager
    def opened(self, manifest: Manifest, in_process: bool, *data: Any) -> Iterator[Receiver]:
        """Run once in the engine's own process, around an update; yields what its worker processes are given.

        Args:
            in_process: whether the only worker is this very process.
            data: what the transport passed to ``Engine.update_weights`` besides, references resolved.

        Raises:
            RunError: the bytes cannot be had. The engine is then as it was.
        """
        yield self

    @abstractmethod
    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """Yield the tensors of an update, each proven whole, in process ``worker`` (0 ..) of the engine on ``device``.

        Raises:
            PeerLost: the other end is gone; the update can be sent again. RunError: a tensor is not what was sent,
            which ends the run.
        """

    def close(self, worker: int) -> None:  # noqa: B027 - most keep nothing
        """Release what process ``worker`` keeps from one update to the next. ``Transport.close`` asks for it, by
        ``close_receiver.remote(receiver)``; most need not."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Classes of a config's author are in files that an engine's process cannot import by a module's name."""
        if not type(self).__module__.startswith(PLUGIN_PREFIX):
            return super().__reduce_ex__(protocol)
        return _restored, (place_of(type(self)), vars(self))


def _restored(place: str, state: dict[str, Any]) -> Receiver:
    receiver: Receiver = object.__new__(load_object(place))
    receiver.__dict__.update(state)
    return receiver


@dataclass(frozen=True)
class TransportOptions:
    """What the run tells every transport."""

    folder: Path = Path("weights")
    """Where files would go: in the run's folder, which all nodes see."""
    bucket_bytes: int = 256 << 20
    """``weights.bucket_mib``."""
    keep: bool = False
    """Whether an engine may have to start again while the policy trains: the version must then be kept somewhere.
    Otherwise the policy still holds it, and may gather it anew."""


class Transport(ABC):
    """A way of new weights from the policy to the engines, as the driver steers it.

    Order of calls, all from one thread at a time: ``prepare`` once a version; ``send`` to all engines; ``send`` of the
    same version again, as often as an engine was lost or has to start again (see ``TransportOptions.keep``); the next
    ``prepare``. ``close`` comes last, after a failure, too. Before every ``send`` the engines have said that the
    manifest's names are theirs, and wait.

    What fails: an exception of ``prepare`` ends the run. Of what ``send`` returned, an engine that died is replaced and
    ``PeerLost`` is answered with another ``send``, three times in a row; any other error ends the run.

    The attributes below are read from the source, before anything is imported (``config/transports.py``), so a subclass
    writes literals.
    """

    refuses: ClassVar[Mapping[str, str]] = {}
    """What it cannot work with -> why, as the rest of a sentence that starts with its name. The keys are those of
    ``config.transports.CONDITIONS``."""
    uses_buckets: ClassVar[bool] = True
    """Whether ``weights.bucket_mib`` means anything to it."""

    manifest: Any
    """The manifest of what was prepared, or a reference to it in Ray's object store."""

    def __init__(self, policy: PolicyRanks, options: TransportOptions = TransportOptions()):
        self.policy = policy
        self.options = options

    @abstractmethod
    def prepare(self, version: int) -> None:
        """Make the policy's current weights what ``send`` sends, as ``version``, and set ``manifest``."""

    @abstractmethod
    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """Start to give what was prepared to engines (number -> actor), each by ``update_weights.remote(manifest,
        receiver, *data)``. Returns references to these calls, in order, and to the policy's part in it."""

    def close(self) -> None:  # noqa: B027 - most leave nothing
        """Remove what would outlast the run."""


class StreamingTransport(Transport):
    """Base of transports that send while the ranks gather: ahead of time they take nothing but the weights' form."""

    sender: ClassVar[type[Sender]] = Sender
    _metadata: Manifest | None = None

    def prepare(self, version: int) -> None:
        """Name the version; the weights are gathered by ``send``."""
        if self._metadata is None:
            asked = self.policy.start_sender(self.sender, "weight_metadata")
            self._metadata = self.policy.wait(asked, "exporting weights")[0]
        self.manifest = replace(self._metadata, version=version)


def load_transport(name: str) -> type[Transport]:
    """The class behind a value of ``weights.transport`` other than ``auto``.

    Raises:
        ConfigError: it is not there, or is no transport.
    """
    try:
        found = load_object(transport_place(name))
    except ConfigError as error:
        raise ConfigError(f"weights.transport: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise ConfigError(f"weights.transport: {name} is no subclass of {Transport.__module__}.{Transport.__name__}")
    missing = ", ".join(sorted(found.__abstractmethods__))
    if missing:
        raise ConfigError(f"weights.transport: {name} does not define {missing}")
    return found


def make_transport(name: str, policy: PolicyRanks, folder: Path, bucket_bytes: int, keep: bool = False) -> Transport:
    """The transport called ``name``; for the other arguments see ``TransportOptions``."""
    kind = load_transport(name)
    with errors_named(kind, "__init__"):
        return kind(policy, TransportOptions(folder, bucket_bytes, keep))


@contextlib.contextmanager
def errors_named(kind: type, method: str) -> Iterator[None]:
    """Raise RunError, in one line, where a method of a transport of the user's own fails with an error of theirs."""
    try:
        yield
    except GdpoError:
        raise
    except Exception as error:
        if kind.__module__.startswith("gdpo_nemo."):
            raise
        raise RunError(f"weights.transport: {kind.__name__}.{method}: {first_line(error)}") from error


def close_transport(transport: Transport) -> None:
    """Close it. Raises RunError where a transport of the user's own fails to."""
    with errors_named(type(transport), "close"):
        transport.close()
