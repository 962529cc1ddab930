"""Interface of training algorithms. An algorithm turns the batch of a step into optimizer updates, and computes
metrics.

``Trainer`` contains the training loop, which is the same for all algorithms. In each step it gets a batch, calls
``prepare``, trains the ``updates`` and records the ``metrics``. For an algorithm that samples, see ``gdpo.GDPO``. For
an algorithm that does not sample, see ``examples/custom_sft.py``.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from gdpo_nemo.algorithms import LossSettings
from gdpo_nemo.algorithms.component_weights import directions
from gdpo_nemo.algorithms.loss_selection import Objective, loss_import_paths
from gdpo_nemo.config.algorithm_choice import ALGORITHMS, AlgorithmSpec, resolved_loss, spec_of
from gdpo_nemo.config.environment_algorithms import own_configs
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import UpdateResult
from gdpo_nemo.rollouts.metrics import update_metrics, validation_metrics
from gdpo_nemo.utils.errors import ConfigError, GdpoError, UserCodeFailed, first_line
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.utils.user_modules import is_built_in

if TYPE_CHECKING:
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.data.tokenizer import Tokenizer
    from gdpo_nemo.observe.log import RunLog


class Algorithm[Batch, Prepared](ABC):
    """Base class of all algorithms. Instances run in the driver process.

    If a method of a custom class raises an exception, the run ends with a message that contains the class and the
    method.

    ``Batch`` is the type of a batch: ``Rollout`` if the algorithm samples, otherwise ``PromptBatch``. ``Prepared`` is
    the return type of ``prepare``, which the training loop only passes to the other methods.

    Args:
        policy: computes log-probs with the current or the reference weights. The training loop updates it.
    """

    samples: bool = True
    """True if batches are rollouts, which engines sample and environments score. False if batches are rows of the data.

    Assign a literal in the class body, because the value is read without executing the file.
    """
    loss: Objective
    """Loss settings that every rank receives with an update."""

    def __init__(self, config: Config, policy: PolicyGroup, tokenizer: Tokenizer, log: RunLog):
        self.config = config
        self.policy = policy
        self.tokenizer = tokenizer
        self.log = log
        self.loss = with_absolute_paths(resolved_loss(config, spec_of(config)))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not is_built_in(cls):
            _name_errors(cls)

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ConfigError if this algorithm does not support the config. Called before any process starts."""
        return

    @classmethod
    def needs_reference(cls, config: Config) -> bool:
        """Return whether log-probs of the initial weights are needed. The policy then keeps a copy of these weights."""
        return config.loss_fn.reference_policy_kl_penalty > 0

    @abstractmethod
    def prepare(self, batch: Batch) -> Prepared:
        """Compute log-probs, advantages and training sequences of a step, with the weights before the step.

        Args:
            batch: ``Rollout`` if the algorithm samples, otherwise ``PromptBatch``.
        """

    @abstractmethod
    def updates(self, prepared: Prepared) -> Iterable[list[TrainSequence]]:
        """Yield the sequences of each optimizer update, ``config.layout.updates_per_step`` times.

        In a generator, the code after a ``yield`` runs with the weights after that update. The loss of an update is the
        sum over its tokens, multiplied by their weights.
        """

    def observe(self, result: UpdateResult) -> None:
        """Receive the result of an update, directly after the update."""
        return

    def _set_reference_logprobs(self, sequences: list[TrainSequence]) -> None:
        """Set the log-probs of the initial model in all sequences."""
        for sequence, values in zip(sequences, self.policy.logprobs(sequences, reference=True), strict=True):
            sequence.reference_logprobs = values

    def state(self) -> dict[str, Any]:
        """Return the algorithm's state for a checkpoint, with values that ``utils.state.to_json`` supports."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint. The state is empty if the checkpoint contains none."""
        return

    def count_tokens(self, update: Sequence[TrainSequence]) -> int:
        """Return the number of tokens in an update, for ``throughput/tokens_per_second``."""
        return sum(sequence.num_policy_tokens for sequence in update)

    def metrics(self, prepared: Prepared, results: Sequence[UpdateResult], version: int) -> dict[str, float]:
        """Return the metrics of a step, without time measurements.

        Args:
            version: version of the weights before the step.
        """
        return update_metrics(results, on_policy=False)

    def record(self, row: Mapping[str, Any], prepared: Prepared) -> None:
        """Log the metrics of a step, and write any other files of the algorithm."""
        self.log.step(row)

    def validate(self, evaluated: Sequence[Any]) -> dict[str, float]:
        """Return the metrics ``validation/...``.

        Args:
            evaluated: ``Group`` objects with rewards if the algorithm samples, otherwise ``Prompt`` objects.
        """
        gdpo = self.config.gdpo
        return validation_metrics(evaluated, gdpo.val_pass_at_k, self._directions, gdpo.stop_when)

    @property
    def _directions(self) -> dict[str, int]:
        """Result of ``component_weights.directions`` for the current weights."""
        gdpo = self.config.gdpo
        return directions(gdpo.rewards, gdpo.constraints, gdpo.schedules)


BY_ENVIRONMENT = "gdpo_nemo.training.by_environment:ByEnvironment"
"""Import path of the algorithm of runs in which an environment has its own algorithm."""


def with_absolute_paths(loss: LossSettings) -> LossSettings:
    """Return the settings with absolute import paths, because ranks run in other working directories."""
    if not loss_import_paths(loss):
        return loss
    off_policy = replace(loss.off_policy, mode=ImportPath(loss.off_policy.correction).absolute())
    return replace(loss, type=ImportPath(loss.type).absolute(), off_policy=off_policy)


def load_algorithm(config: Config, spec: AlgorithmSpec) -> type[Algorithm[Any, Any]]:
    """Import the class of the run's algorithm and let it check the config.

    Raises:
        ConfigError: if the class is not found, is not an ``Algorithm``, or rejects the config.
    """
    name = config.algorithm.type
    try:
        found = ImportPath(BY_ENVIRONMENT if own_configs(config) else spec.import_path).load()
    except ConfigError as error:
        raise error.within("algorithm.type") from error
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(f"algorithm.type: {name} is not a subclass of gdpo_nemo.Algorithm")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"algorithm.type: {name} does not define {' and '.join(missing)}")
    if found.samples != spec.samples:
        raise ConfigError(
            f"algorithm.type: must define `samples = {found.samples}` in the class {found.__name__} itself"
        )
    if config.algorithm.options and name in ALGORITHMS:
        raise ConfigError(f"algorithm.options: {name} does not support options; remove them")
    found.check(config)
    return found


# -- errors of custom classes ---------------------------------------------------------------------------------------

_BEFORE_THE_RUN = ("check", "needs_reference")
"""Class methods whose exceptions are converted to ConfigError."""
_IN_THE_RUN = (
    "prepare", "updates", "observe", "state", "load_state", "count_tokens", "metrics", "record", "validate"
)  # fmt: skip


def _name_errors(cls: type[Algorithm[Any, Any]]) -> None:
    """Wrap the methods of a custom class, including inherited ones, so that error messages name the failed method.

    The wrapper of an inherited method calls the next class in the method resolution order, so mixins work as usual.
    """
    for method in (*_BEFORE_THE_RUN, *_IN_THE_RUN):
        visible = getattr(cls, method)
        definition = vars(cls).get(method)
        is_method = definition is None or hasattr(definition, "__get__")
        if callable(visible) and is_method and not getattr(visible, "__isabstractmethod__", False):
            setattr(cls, method, _named(cls, method, definition))


def _named(cls: type[Algorithm[Any, Any]], method: str, definition: Any) -> Any:
    """Return the wrapper of a method.

    Args:
        definition: the entry in the dictionary of the class, or None if the method is inherited.
    """

    def bound(target: Any) -> Callable[..., Any]:
        if definition is None:
            found: Callable[..., Any] = getattr(super(cls, target), method)
        elif isinstance(target, type):
            found = definition.__get__(None, target)
        else:
            found = definition.__get__(target, type(target))
        return found

    @wraps(getattr(cls, method))
    def class_wrapper(kind: type, *arguments: Any, **options: Any) -> Any:
        with _errors_named(kind, method, ConfigError):
            return bound(kind)(*arguments, **options)

    @wraps(getattr(cls, method))
    def instance_wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
        with _errors_named(type(self), method, UserCodeFailed):
            return bound(self)(*arguments, **options)

    @wraps(getattr(cls, method))
    def updates_wrapper(self: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        # The code of a generator runs between the updates, so every call of ``next`` must be wrapped.
        updates = iter(instance_wrapper(self, *arguments, **options))
        while True:
            with _errors_named(type(self), method, UserCodeFailed):
                update = next(updates, None)
            if update is None:
                return
            yield update

    if method in _BEFORE_THE_RUN:
        return classmethod(class_wrapper)
    return updates_wrapper if method == "updates" else instance_wrapper


@contextlib.contextmanager
def _errors_named(owner: type, method: str, kind: type[GdpoError]) -> Iterator[None]:
    """Convert any exception that is not a ``GdpoError`` to ``kind``, with a message for users."""
    try:
        yield
    except GdpoError:
        raise
    except Exception as error:
        raise kind(f"algorithm.type: {owner.__name__}.{method} raised {first_line(error)}") from error
