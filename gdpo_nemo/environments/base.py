"""Base class of environments, and checks of the verdicts that they return and the options that they accept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from gdpo_nemo.algorithms.rubrics import criteria_of, is_known
from gdpo_nemo.data.records import Prompt, Trajectory, Verdict
from gdpo_nemo.utils.errors import ConfigError, RunError, nearest

if TYPE_CHECKING:
    import numpy as np


class Environment:
    """Base class of environments, which score completions.

    Each worker process builds one instance from the options of the YAML section. The driver also builds an instance,
    so the constructor should be fast.

    The attributes describe the environment. Subclasses override these attributes in the class body or in the
    constructor.
    """

    reward_names: tuple[str, ...] = ()
    """Names of the reward components that the environment may return. The reward weights of the config must use these
    names."""
    open_rewards: bool = False
    """True while the component names are unknown. In this case, verdicts may contain any component, and the reward
    weights of the config are not checked."""
    component_origins: Mapping[str, str] = MappingProxyType({})
    """Origins of components whose names a third-party package chose, by component. Components with the same name in
    several environments must have the same origin."""
    system_prompt: str | None = None
    """Default system prompt for this environment's prompts. The config may set a different system prompt."""
    remote: bool = False
    """Class attribute. True if servers compute the verdicts, with limits on time and reply size. In this case,
    ``verify`` runs on the driver without worker processes. Several threads call ``verify``, and its trajectories are
    not split into shards."""
    plays_with_endpoint: bool = False
    """Class attribute. True if external agents play whole episodes against the run's endpoint (``rollout.endpoint``).
    In this case, the class defines ``play(prompts, sampling)``, which returns the results of the episodes."""
    by_sample: bool = False
    """Class attribute. True if the verdict on a sample does not depend on other samples. In this case, each sample is
    verified as soon as it is complete, without waiting for its group."""
    instant: bool = False
    """Class attribute. True if the constructor is fast, opens no connection and runs no third-party code. In this case,
    ``--dry-run`` builds the environment to read its ``reward_names``. The attribute is ignored for classes outside this
    package, because a dry run does not import them."""

    offers_tools: bool = False
    """True if ``read_row`` adds a column ``tools`` to every row. The chat template must support tools in this case."""

    def __init__(self, options: Mapping[str, Any] | None = None):
        pass

    def token_ids(self, text: str) -> np.ndarray | None:
        """Return the token ids of a text if ``verify`` reads token ids, for checks without a policy."""
        return None

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory, in order. The method may block; the pool enforces the time limit.

        A reward of None or NaN means "not applicable". An exception or an infinite reward counts as a bug in the
        environment and stops the run. For an external failure, such as an unavailable server, return a verdict with the
        outcome ``ENV_FAILED``.
        """
        raise NotImplementedError

    def episode(self) -> Any:
        """Return a new ``episodes.Episode`` for one multi-turn trajectory. Multi-turn environments define this method
        instead of ``verify``."""
        raise NotImplementedError

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Return built-in prompts as rows. Equal arguments must give equal rows.

        A row has a column ``prompt`` (text or messages) and the columns that ``verify`` needs. An optional column
        ``id`` becomes the prompt id.

        Args:
            split: train, validation or test.
            size: maximum number of rows. If ``size`` is None, return all rows or a default number of rows.
            seed: seed of the row selection and order.
        """
        raise NotImplementedError

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a row of the dataset to a row with a prompt column, and optionally a column ``tools``.

        Raises ConfigError if the row is invalid.
        """
        return row

    def server_of(self, row: Mapping[str, Any]) -> str | None:
        """Return the name of the server that verifies a row from ``read_row``, or None without named servers.

        ``gdpo-nemo env check`` verifies rows of each server.
        """
        return None

    def examples(self, row: Mapping[str, Any]) -> Sequence[str]:
        """Return example completions for a row, such as a correct answer. ``gdpo-nemo env check`` verifies these
        completions."""
        return ()

    def prepare(self) -> None:
        """Prepare a worker process, for example by slow imports. The pool calls this method once per process, before
        any time limit starts."""

    def preflight(self, prompts: Sequence[Prompt]) -> Any:
        """Check the environment on the driver before the run starts workers and engines.

        Args:
            prompts: prompts of the run that use this environment.

        Raises:
            ConfigError, RunError: for errors that would otherwise occur during training.
        """

    def use_run_folder(self, folder: Path) -> None:
        """Use the run folder, for example for a cache that survives restarts. The driver calls this method at the start
        of a training run if the environment is ``remote`` or ``plays_with_endpoint``."""

    def use_endpoint(self, url: str, api_key: str | None) -> None:
        """Use the run's endpoint in ``play``. The driver calls this method once if the environment
        ``plays_with_endpoint``.

        Args:
            url: URL of the endpoint, without a path.
            api_key: access token, or None if the endpoint accepts every request.
        """

    def close(self) -> None:
        """Cancel requests in flight and release resources. The driver calls this method after ``preflight``, and at the
        end of the run if the environment is ``remote`` or ``plays_with_endpoint``."""

    @property
    def verifies(self) -> bool:
        """True if ``verify`` scores completions."""
        return _defines(self, "verify")

    @property
    def has_turns(self) -> bool:
        """True if the environment plays episodes."""
        return _defines(self, "episode")

    @property
    def makes_rows(self) -> bool:
        """True if the environment has built-in prompts."""
        return _defines(self, "rows")

    @property
    def has_preflight(self) -> bool:
        """True if the environment overrides ``preflight``."""
        return _defines(self, "preflight")


class Declared(NamedTuple):
    """Attributes of ``Environment`` that can be read from the class, before it is instantiated."""

    reward_names: tuple[str, ...] | None
    """Component names, or None if the names are known only after instantiation."""
    remote: bool
    plays_with_endpoint: bool
    by_sample: bool
    instant: bool


def declared(make: Any) -> Declared:
    """Return the declared attributes of an environment class, or of a function that returns an environment."""
    names = getattr(make, "reward_names", None)
    flags = (bool(getattr(make, flag, False)) for flag in Declared._fields[1:])
    return Declared(tuple(names) if names and isinstance(names, (tuple, list)) else None, *flags)


def adapted(environment: Any) -> Environment:
    """Return an ``Environment``: the object itself, or a wrapper if its class is not a subclass of ``Environment``.

    The wrapper inherits missing members from ``Environment``.
    """
    return environment if isinstance(environment, Environment) else _Adapted(environment)


class _Adapted(Environment):
    """Wrapper of a user's object. Members that the object lacks are inherited from ``Environment``."""

    def __init__(self, wrapped: Any):
        object.__setattr__(self, "_wrapped", wrapped)

    def __getattribute__(self, name: str) -> Any:
        wrapped = object.__getattribute__(self, "_wrapped")
        return getattr(wrapped, name) if hasattr(wrapped, name) else object.__getattribute__(self, name)


def _defines(environment: Environment, method: str) -> bool:
    """Return whether the class or the instance overrides a method of ``Environment``."""
    member = getattr(environment, method)
    return callable(member) and getattr(member, "__func__", None) is not getattr(Environment, method)


@dataclass(frozen=True)
class Failure:
    """Result of a reward function if a reward could not be computed, for example after a timeout.

    The sample gets the outcome ``env_failed``: it is masked and counted. In contrast, a reward of None means that the
    reward does not apply to the sample.
    """

    detail: str
    """Reason in one line, for the log."""


@dataclass(frozen=True)
class SpanReward:
    """Result of a reward function for one completion: a reward, and the characters that the reward is about."""

    value: float | None
    """Reward, or None if the reward does not apply."""
    spans: Sequence[tuple[int, int]]
    """Ranges [start, end) of characters of the completion."""


def checked_verdicts(reward_names: Sequence[str], trajectories: Sequence[Trajectory], verdicts: Any) -> list[Verdict]:
    """Check the return value of ``verify``, and convert rewards to float and NaN to None.

    Raises:
        RunError: if the number of verdicts is wrong, an element is not a ``Verdict``, a component is not in
            ``reward_names``, or a reward is infinite or not a number.
    """
    verdicts = list(verdicts) if isinstance(verdicts, (list, tuple)) else verdicts
    if not isinstance(verdicts, list) or not all(isinstance(verdict, Verdict) for verdict in verdicts):
        raise RunError(f"verify must return a list of Verdict, not {type(verdicts).__name__}")
    if len(verdicts) != len(trajectories):
        raise RunError(f"verify returned {len(verdicts)} verdicts for {len(trajectories)} trajectories")
    return [_checked(reward_names, trajectory, verdict) for trajectory, verdict in zip(trajectories, verdicts)]


def reward_value(value: Any, subject: str) -> float | None:
    """Convert a reward to float. None and NaN ("not applicable") become None.

    Raises RunError if the reward is infinite or not a number; the message begins with ``subject``.
    """
    if value is None:
        return None
    if isinstance(value, (str, bytes)):
        raise RunError(f"{subject} is {value[:40]!r}, which is not a number")
    try:
        number = float(value)
    except Exception:
        raise RunError(f"{subject} is of type {type(value).__name__}, which is not a number") from None
    if math.isinf(number):
        raise RunError(f"{subject} is infinite ({number})")
    return None if math.isnan(number) else number


def _checked(reward_names: Sequence[str], trajectory: Trajectory, verdict: Verdict) -> Verdict:
    sample = f"sample {trajectory.sample_index} of prompt {trajectory.prompt.id}"
    rewards = _checked_rewards(reward_names, verdict.rewards, sample)
    if len(verdict.turn_rewards) not in (0, trajectory.turns):
        raise RunError(
            f"verify returned turn_rewards for {len(verdict.turn_rewards)} turns of {sample}, which has "
            f"{trajectory.turns} turns"
        )
    turn_rewards = []
    for turn, given in enumerate(verdict.turn_rewards, 1):
        turn_rewards.append(_checked_rewards(reward_names, given, f"turn {turn} of {sample}"))
    for component in chain.from_iterable(turn_rewards):
        if component not in rewards:
            raise RunError(
                f"verify returned turn_rewards of {component!r} for {sample}, but the rewards do not contain this "
                "component"
            )
    spans = {}
    for component, ranges in verdict.reward_spans.items():
        if component not in rewards:
            raise RunError(
                f"verify returned reward_spans of {component!r} for {sample}, but no reward of this component"
            )
        spans[component] = character_spans(ranges, len(trajectory.text), f"reward_spans of {component!r} for {sample}")
    try:
        criteria = criteria_of(trajectory.prompt.fields, rewards, verdict.criteria)
    except ConfigError as error:
        raise RunError(f"verify: {sample}: {error}") from error
    return replace(verdict, rewards=rewards, turn_rewards=tuple(turn_rewards), reward_spans=spans, criteria=criteria)


def character_spans(value: Any, characters: int, subject: str) -> tuple[tuple[int, int], ...]:
    """Check ranges of characters, and return them as tuples.

    Args:
        value: list of pairs [start, end).
        characters: number of characters in the text.
        subject: begin of the message.

    Raises:
        RunError: if the value is not a list of ranges within the text.
    """
    try:
        ranges = tuple((start, end) for start, end in value)
    except (TypeError, ValueError):
        raise RunError(f"{subject}: expected a list of [start, end], got {str(value)[:40]}") from None
    for pair in ranges:
        if not all(type(place) is int for place in pair) or not 0 <= pair[0] <= pair[1] <= characters:
            raise RunError(f"{subject}: [{pair[0]}, {pair[1]}] is not a range of the {characters} characters")
    return ranges


def _checked_rewards(
    reward_names: Sequence[str], rewards: Mapping[str, float | None], sample: str
) -> dict[str, float | None]:
    for component in rewards:
        if not is_known(component, reward_names):
            raise RunError(f"verify returned the reward {component!r}, which is not in reward_names")
    return {name: reward_value(value, f"reward {name!r} of {sample}") for name, value in rewards.items()}


_LARGEST_NUMBER = 10**15


def read_options(environment: str, options: Mapping[str, Any] | None, **defaults: Any) -> SimpleNamespace:
    """Return the options of an environment as attributes, with ``defaults`` for options that are not set.

    Args:
        environment: name of the environment, for messages.
        options: options from the config.
        defaults: default of every known option. The type of an option must match its default. A default of None accepts
            any type.

    Raises:
        ConfigError: if an option is unknown, has the wrong type, or is a number beyond 10**15.
    """
    values = dict(defaults)
    for key, value in (options or {}).items():
        if key not in defaults:
            raise ConfigError(f"environment {environment}: unknown option {key!r}{nearest(key, defaults)}")
        if not _same_kind(value, defaults[key]):
            expected = type(defaults[key]).__name__
            raise ConfigError(f"environment {environment}: option {key} must be of type {expected}, not {value!r}")
        if isinstance(value, (int, float)) and not abs(value) <= _LARGEST_NUMBER:  # rejects NaN as well
            raise ConfigError(
                f"environment {environment}: option {key} must be at most {_LARGEST_NUMBER:,}, not {value!r:.40}"
            )
        values[key] = value
    return SimpleNamespace(**values)


def number_option(key: str, value: Any, minimum: float) -> float:
    """Return the value of an option. Raises ConfigError if it is not a finite number of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value < float("inf"):
        raise ConfigError(f"{key}: must be a number{'' if minimum < 0 else f' of at least {minimum:g}'}, not {value!r}")
    return value


def count_option(key: str, value: Any) -> int | None:
    """Return the value of an option. Raises ConfigError if it is neither a positive integer nor null."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{key}: must be a positive integer or null ({value!r})")
    return value


def _same_kind(value: Any, default: Any) -> bool:
    if default is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    if isinstance(default, (list, tuple)):
        return isinstance(value, (list, tuple))
    return isinstance(value, type(default))
