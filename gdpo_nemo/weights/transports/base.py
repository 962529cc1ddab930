"""Interface of a weight transport: a driver class, a sender on every policy rank, and a receiver in the engines.

A transport is a file with a subclass of ``Transport``, ``Sender`` and ``Receiver``. ``weights.transport`` selects the
driver class, by its name in ``config/transports.py`` or by its import path (``file.py:Class``). No other file depends
on a transport. The steps that all transports have in common are implemented only once. Engines check tensor names
before any bytes are sent, and load tensors through vLLM's layer-wise reload (``vllm_receiver``). Engines do not sample
while an update is incomplete. The fleet repeats failed deliveries. A sync check compares log-probs after each update.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from gdpo_nemo.config.transports import transport_import_path
from gdpo_nemo.utils.errors import ConfigError, GdpoError, RunError, first_line
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.utils.user_modules import is_built_in
from gdpo_nemo.weights.adapters import Adapters
from gdpo_nemo.weights.manifest import Manifest, weight_metadata
from gdpo_nemo.weights.pieces import Piece

Tensors = Iterator[tuple[str, torch.Tensor]]
"""Iterator over (Hugging Face name, unsharded tensor) of every weight, in the order of the manifest."""


class PolicyOnRank(Protocol):
    """Interface of the policy on a rank, for a sender (implemented by ``megatron.policy.Policy``)."""

    adapters: Adapters | None
    """LoRA settings. None if all weights are trained."""
    runtime: Any
    """``runtime.device`` is the device of the weights."""

    def update(self) -> Tensors:
        """Yield the tensors that training changes. This call is collective: every rank must exhaust the iterator."""

    def pieces(self) -> Iterator[Piece]:
        """Yield what this rank sends of the tensors that training changes.

        The pieces of all ranks make up every tensor once. Under LoRA, rank 0 sends all tensors. This call is
        collective: every rank must exhaust the iterator.
        """


class PolicyRanks(Protocol):
    """Interface of the policy on the driver, for a transport (``cluster.policy_group.PolicyGroup``)."""

    timeout_s: float
    """Time limit of a call to the ranks in seconds (``rollout.train_timeout_s``)."""

    @property
    def ranks(self) -> Sequence[Any]:
        """Ray actor of each rank."""
        ...

    @property
    def shared(self) -> Sequence[Sequence[int]]:
        """For each engine, the ranks whose devices its processes share, in the order of the processes.

        The sequence is empty if the engines have separate devices.
        """
        ...

    @property
    def engine_processes(self) -> int:
        """Number of processes of one engine."""
        ...

    def start_sender(
        self,
        sender: type[Sender],
        method: str,
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        num_returns: int = 1,
    ) -> list[Any]:
        """Call a method of the sender on selected ranks. The first call on a rank creates the sender.

        Args:
            sender: class of the sender.
            ranks: ranks to call, or None for all ranks.
            num_returns: number of values that the method returns. If it is above 1, each value gets a separate
                reference.

        Returns:
            For each rank, a reference to the result, or a list of ``num_returns`` references.
        """

    def wait(self, refs: Sequence[Any], what: str) -> list[Any]:
        """Wait for results of ``start_sender`` and return them.

        Args:
            what: description of the work, for messages.

        Raises:
            RunError: if a rank fails, dies or does not answer in time.
        """


class Sender:
    """Part of a transport that runs on a policy rank. The first call creates the sender.

    The driver calls methods of the sender through ``PolicyRanks.start_sender``. A method that reads weights must be
    called on all ranks, and must gather the weights on every rank (``gathered``), even on ranks that do not send.
    """

    def __init__(self, policy: PolicyOnRank, rank: int, host: str):
        self.policy = policy
        self.rank = rank
        self.host = host
        """Address of this rank's machine."""

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Tensors]:
        """Provide an iterator over the tensors of an update.

        Tensors that the block does not consume are consumed afterwards, because gathering is collective.
        """
        tensors = self.policy.update()
        try:
            yield tensors
        finally:
            for _ in tensors:
                pass

    @contextlib.contextmanager
    def pieces(self) -> Iterator[Iterator[Piece]]:
        """Provide an iterator over what this rank sends of an update. See ``gathered``."""
        pieces = self.policy.pieces()
        try:
            yield pieces
        finally:
            for _ in pieces:
                pass

    def weight_metadata(self) -> Manifest | None:
        """Return a manifest of the weights without checksums on rank 0, and None on other ranks.

        The manifest is valid for all updates, because names and shapes do not change.
        """
        with self.gathered() as tensors:
            return weight_metadata(tensors, -1, self.policy.adapters) if self.rank == 0 else None


class Receiver(ABC):
    """Engine side of a transport, which receives updates. It is pickled and sent to the engine and its workers."""

    @contextlib.contextmanager
    def opened(self, manifest: Manifest, in_process: bool, *data: Any) -> Iterator[Receiver]:
        """Provide the receiver for the worker processes. The engine's main process enters this context for each update.

        Args:
            in_process: True if the main process is the only worker.
            data: additional arguments that the transport has passed to ``Engine.update_weights``. Ray has replaced
                references with their values.

        Raises:
            RunError: if the bytes of the update are not available. The engine's weights are then unchanged.
        """
        yield self

    @abstractmethod
    def receive(self, manifest: Manifest, device: torch.device, worker: int) -> Tensors:
        """Yield the verified tensors of an update on ``device``.

        Args:
            worker: index of this worker process in its engine, from 0.

        Raises:
            PeerLost: if the sender was lost. In this case, the update can be sent again.
            RunError: if the checksum of a tensor differs. This error ends the run.
        """

    def close(self, worker: int) -> None:  # noqa: B027 - optional: most receivers have no resources
        """Release the resources that worker process ``worker`` keeps between updates.

        ``Transport.close`` triggers this method by calling ``close_receiver.remote(receiver)`` on the engines. Most
        transports do not need this method.
        """


@dataclass(frozen=True)
class TransportOptions:
    """Options that the run passes to every transport."""

    folder: Path = Path("weights")
    """Folder for the transport's files, inside the run folder. All nodes can access this folder."""
    bucket_bytes: int = 256 << 20
    """``weights.bucket_mib`` in bytes."""
    keep: bool = False
    """True if the transport must store the current version, because an engine may restart while the policy trains.

    If False, the transport may gather this version from the policy again.
    """
    mode: str = "full"
    """``weights.mode``, where ``auto`` may have been replaced by ``full`` (``config.transports.chosen_mode``)."""


class Transport(ABC):
    """Driver side of a transport, which sends weights from the policy to the engines.

    Only one thread at a time calls the methods. For each version, ``prepare`` is called once, then ``send`` for all
    engines. ``send`` is called again for the same version if an engine was lost or restarts (see
    ``TransportOptions.keep``). ``close`` is called last, even after a failure. When ``send`` is called, the engines
    have checked the names in the manifest and wait for the weights.

    An exception in ``prepare`` ends the run. After a failed ``send``, dead engines are replaced. After ``PeerLost``,
    ``send`` is called again, up to three times in a row. Any other exception ends the run.

    The class attributes ``refuses``, ``uses_buckets`` and ``sends_differences`` are read from the source code before
    the file is imported (``config/transports.py``), so a subclass must assign literals to them.
    """

    refuses: ClassVar[Mapping[str, str]] = {}
    """Reasons for unsupported conditions, by condition.

    An error message consists of the transport's name and the reason. The keys are those of
    ``config.transports.CONDITIONS``.
    """
    uses_buckets: ClassVar[bool] = True
    """True if the transport uses ``weights.bucket_mib``."""

    sends_differences: ClassVar[bool] = False
    """True if the transport supports ``weights.mode: difference``."""

    manifest: Any
    """Manifest of the prepared version, or a reference to it in Ray's object store."""
    statistics: Mapping[str, float] = {}
    """Metrics ``weights/...`` of the prepared version, which are complete after the first ``send``."""

    def __init__(self, policy: PolicyRanks, options: TransportOptions = TransportOptions()):
        self.policy = policy
        self.options = options

    @abstractmethod
    def prepare(self, version: int) -> None:
        """Prepare to send the policy's current weights as ``version``. Set ``manifest``."""

    @abstractmethod
    def send(self, engines: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """Start sending the prepared version to the given engines, without waiting for them.

        Implementations call ``update_weights.remote(manifest, receiver, *data)`` on each engine.

        Args:
            engines: engine actors by engine number.

        Returns:
            References to the engines' calls, in the order of ``engines``, and references to the calls of the policy's
            ranks.
        """

    def close(self) -> None:  # noqa: B027 - optional: most transports have nothing to remove
        """Remove everything that would otherwise remain after the run."""


class StreamingTransport(Transport):
    """Base class of transports that send weights while the ranks gather them. ``prepare`` needs only metadata."""

    sender: ClassVar[type[Sender]] = Sender
    _metadata: Manifest | None = None

    def prepare(self, version: int) -> None:
        """Set the version to send. ``send`` gathers the weights."""
        if self._metadata is None:
            refs = self.policy.start_sender(self.sender, "weight_metadata")
            self._metadata = self.policy.wait(refs, "exporting weights")[0]
        self.manifest = replace(self._metadata, version=version)


def load_transport(name: str) -> type[Transport]:
    """Load the class of a transport.

    Args:
        name: value of ``weights.transport`` other than ``auto``.

    Raises:
        ConfigError: if the class is not found, is not a transport, or is abstract.
    """
    try:
        transport_class = ImportPath(transport_import_path(name)).load()
    except ConfigError as error:
        raise error.within("weights.transport") from error
    if not (isinstance(transport_class, type) and issubclass(transport_class, Transport)):
        raise ConfigError(f"weights.transport: {name} is not a subclass of gdpo_nemo.Transport")
    missing = ", ".join(sorted(transport_class.__abstractmethods__))
    if missing:
        raise ConfigError(f"weights.transport: {name} does not define {missing}")
    return transport_class


def make_transport(
    name: str, policy: PolicyRanks, folder: Path, bucket_bytes: int, keep: bool = False, mode: str = "full"
) -> Transport:
    """Create a transport by its name in the config. For the other arguments, see ``TransportOptions``."""
    transport_class = load_transport(name)
    with errors_named(transport_class, "__init__"):
        return transport_class(policy, TransportOptions(folder, bucket_bytes, keep, mode))


@contextlib.contextmanager
def errors_named(transport_class: type, method: str) -> Iterator[None]:
    """Convert exceptions of a user-defined transport to a RunError that names the class and the method.

    A ``GdpoError``, and exceptions of built-in transports, are not converted.
    """
    try:
        yield
    except GdpoError:
        raise
    except Exception as error:
        if is_built_in(transport_class):
            raise
        raise RunError(f"weights.transport: {transport_class.__name__}.{method}: {first_line(error)}") from error


def close_transport(transport: Transport) -> None:
    """Close a transport. Raises RunError if a user-defined transport raises an exception."""
    with errors_named(type(transport), "close"):
        transport.close()
