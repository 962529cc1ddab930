"""What a reward function is called with besides the columns: TRL's ``trainer_state``, ``log_extra``, ``log_metric``.

Held against ``GRPOTrainer._calculate_rewards`` of TRL 1.16 (``tests/environments/test_trl_signature.py``). There the
two loggers write into the trainer; here a function runs in a worker process, so what it logs goes back with the
verdicts of its call.
"""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

from gdpo_nemo.data.records import TrainerState
from gdpo_nemo.environments.verdicts import reward_value
from gdpo_nemo.errors import ConfigError, RunError

REFUSED = {
    "environments": "TRL's instances of environment_factory; the environment tool_class gives them (docs/turns.md)",
}
"""Arguments of TRL's that no run here can give, and what to do instead."""


@dataclass
class CallLog:
    """What the functions of one call logged.

    Args:
        samples: completions in the call.
    """

    samples: int
    _columns: dict[str, list[Any]] = field(default_factory=dict)
    _values: dict[str, list[float]] = field(default_factory=dict)

    def arguments(self, function: str, state: TrainerState | None) -> dict[str, Any]:
        """TRL's three arguments for one function, which is named in what they refuse."""
        return {
            "trainer_state": state or TrainerState(),
            "log_extra": functools.partial(self._log_extra, function),
            "log_metric": functools.partial(self._log_metric, function),
        }

    def extra(self, row: int) -> dict[str, Any]:
        """The columns' values for one completion."""
        return {column: values[row] for column, values in self._columns.items()}

    def metrics(self) -> dict[str, float]:
        """Each metric's mean over the times that it was logged."""
        return {name: math.fsum(values) / len(values) for name, values in self._values.items()}

    def _log_extra(self, function: str, column: str, values: Sequence[Any]) -> None:
        values = list(values)
        if len(values) != self.samples:
            raise RunError(f"{function}: log_extra({column!r}) got {len(values)} values for {self.samples} completions")
        if column in self._columns:
            raise RunError(f"{function}: log_extra({column!r}) was called before for the same completions")
        self._columns[str(column)] = [plain(value) for value in values]

    def _log_metric(self, function: str, name: str, value: float) -> None:
        number = reward_value(value, f"{function}: the value of log_metric({name!r})")
        if number is not None:
            self._values.setdefault(str(name), []).append(number)


def is_async(call: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: a function, a partial of one, or an object with an async ``__call__``."""
    while isinstance(call, functools.partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def parameters_of(call: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the arguments it takes; None where it takes any, or does not say."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:  # builtins in C
        return None
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return None if takes_all else frozenset(parameter.name for parameter in parameters)


def check_demands(name: str, reference: str, call: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse a function that cannot do without an argument which only TRL has. Raises ConfigError."""
    try:
        parameters = inspect.signature(call).parameters
    except ValueError:
        return
    for argument, why in REFUSED.items():
        parameter = parameters.get(argument)
        if parameter is not None and parameter.default is parameter.empty and argument not in given:
            raise ConfigError(f"functions.{name}: {reference} asks for {argument}, which is not given here: {why}")


def plain(value: Any) -> Any:
    """The value as JSON can hold it: arrays as lists, NaN as None, what JSON does not know as text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return str(value)
