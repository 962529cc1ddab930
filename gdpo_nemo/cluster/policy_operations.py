"""Operations that all ranks of the policy run together, such as writing a checkpoint.

To add an operation, write a method of ``PolicyOperations`` with the decorator ``on_all_ranks``. The driver calls the
method of ``PolicyGroup``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate

from gdpo_nemo.data.records import GradientProducts

if TYPE_CHECKING:
    from gdpo_nemo.megatron.component_gradients import ComponentGradients
    from gdpo_nemo.megatron.policy import Policy

type Method[**P, T] = Callable[Concatenate[PolicyOperations, P], T]


def _of_rank_0(results: Sequence[Any]) -> Any:
    return results[0]


@dataclass(frozen=True)
class Operation:
    """Operation with the settings of ``on_all_ranks``."""

    method: Callable[..., Any]
    """Method of ``PolicyOperations``, which runs the operation on a rank."""
    what: str
    phase: str | None
    combine: Callable[[Sequence[Any]], Any]

    def description(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> str:
        """Return ``what`` with the values of the arguments."""
        bound = inspect.signature(self.method).bind(None, *arguments, **options)
        return self.what.format_map(bound.arguments)


def on_all_ranks[**P, T](
    what: str, phase: str | None = None, combine: Callable[[Sequence[Any]], Any] = _of_rank_0
) -> Callable[[Method[P, T]], Method[P, T]]:
    """Make a method an operation: a rank runs its body, and the driver calls it on all ranks.

    Args:
        what: description of the operation, for messages. ``{name}`` is replaced with the argument ``name``.
        phase: name of the run's phase for the duration of the operation.
        combine: function that computes the driver's result from the results of all ranks.
    """

    def decorate(method: Method[P, T]) -> Method[P, T]:
        operation = Operation(method, what, phase, combine)

        @functools.wraps(method)
        def call(self: PolicyOperations, /, *arguments: P.args, **options: P.kwargs) -> T:
            result: T = self.run_operation(operation, arguments, options)
            return result

        return call

    return decorate


class PolicyOperations:
    """Operations on the policy, for the driver (``PolicyGroup``) and for a rank (``PolicyRank``).

    The bodies of the methods run on the ranks, and are collective over all ranks.
    """

    rank: int
    policy: Policy
    """Model and optimizer of this rank. Only ranks have these attributes."""
    gradients: ComponentGradients
    """Gradients that ``PolicyRank.component_gradients`` stores."""

    def run_operation(self, operation: Operation, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Run an operation: on this rank, or on all ranks if this object is the driver's."""
        raise NotImplementedError

    @on_all_ranks("releasing memory")
    def release(self) -> None:
        """Release GPU memory that is not needed until the next update, so that an engine on the same GPU can use it."""
        self.policy.release()

    @on_all_ranks("comparing gradients by component")
    def gradient_products(self) -> GradientProducts:
        """Return the products of the stored gradients after an update, and free the gradients."""
        found = self.gradients.products()
        del self.gradients
        return found

    @on_all_ranks("updating the reference")
    def sync_reference(self, alpha: float) -> None:
        """Set the reference to ``alpha`` times the policy's weights plus (1 - ``alpha``) times its previous weights."""
        self.policy.sync_reference(alpha)

    @on_all_ranks("querying the learning rate")
    def next_learning_rate(self) -> float:
        """Return the learning rate of the next update."""
        return self.policy.next_learning_rate()

    @on_all_ranks("writing {folder}")
    def begin_save(self, folder: Path, background: bool = False) -> None:
        """Start writing a checkpoint (see ``megatron.checkpoint.Save``).

        With ``background``, return as soon as the ranks have copied their state.
        """
        from gdpo_nemo.megatron.checkpoint import Save

        self._save = Save(self.policy, folder, background)

    @on_all_ranks("polling a checkpoint", combine=all)
    def save_is_written(self) -> bool:
        """Return whether all files of the checkpoint from ``begin_save`` are on disk."""
        return self._save.is_written

    @on_all_ranks("completing a checkpoint")
    def finish_save(self) -> None:
        """Wait for the checkpoint from ``begin_save``, complete it and verify it."""
        self._save.finish()
        del self._save

    @on_all_ranks("reading {folder}", phase="checkpoint")
    def load_checkpoint(self, folder: Path, weights_only: bool = False) -> None:
        """Load a checkpoint of any layout. With ``weights_only``, keep optimizer, schedule and random state."""
        from gdpo_nemo.megatron.checkpoint import load_checkpoint, load_weights

        (load_weights if weights_only else load_checkpoint)(self.policy, folder)

    @on_all_ranks("reading {folder}")
    def load_adapter(self, folder: Path) -> None:
        """Initialise the LoRA matrices from a PEFT adapter of this model."""
        from gdpo_nemo.models.peft import read_peft_adapter
        from gdpo_nemo.weights.adapters import read_pairs

        key = "policy.model_name"
        self.policy.start_adapters(read_pairs(read_peft_adapter(folder, key), self.policy.folder, key))

    @on_all_ranks("reading {folder}", phase="teacher")
    def load_teacher(self, folder: Path) -> None:
        """Load the Hugging Face model in ``folder`` as a frozen teacher in the policy's layout."""
        self.policy.load_teacher(folder)

    @on_all_ranks("writing {folder}")
    def save_megatron(self, folder: Path) -> None:
        """Write the weights as a checkpoint of Megatron-core's GPTModel (see ``megatron.gpt_checkpoint``)."""
        from gdpo_nemo.megatron.gpt_checkpoint import save_megatron

        save_megatron(self.policy, folder)

    @on_all_ranks("exporting {folder}")
    def export_adapter(self, folder: Path) -> None:
        """Write the LoRA matrices to a PEFT folder, on rank 0."""
        from gdpo_nemo.weights.adapters import write_adapter

        matrices = dict(self.policy.update())
        if self.rank == 0 and self.policy.adapters is not None:
            write_adapter(folder, matrices, self.policy.adapters, self.policy.folder)

    @on_all_ranks("exporting {folder}", phase="export")
    def export(self, folder: Path) -> None:
        """Write the weights to a Hugging Face folder, on rank 0.

        Under LoRA, the adapters are merged into these weights, and also written to the PEFT folder ``adapter`` next to
        ``folder``.
        """
        from gdpo_nemo.megatron.classifier import write_classifier
        from gdpo_nemo.models.hf_folder import write_model
        from gdpo_nemo.weights.adapters import write_adapter

        if self.policy.adapters:
            matrices = dict(self.policy.update())
            if self.rank == 0:
                write_adapter(folder.parent / "adapter", matrices, self.policy.adapters, self.policy.folder)
        if self.rank == 0:
            write = write_classifier if self.policy.scores else write_model
            write(folder, self.policy.weights(), self.policy.built.hf_config, self.policy.folder)
        else:
            for _ in self.policy.weights():
                pass
