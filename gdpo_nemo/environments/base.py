"""What an environment is: rows in, verdicts with named reward components out.

An environment is a subclass of ``Environment``, built as ``Class(options)`` from the mapping below its name in the YAML
section ``env``. It defines ``reward_names`` and ``verify``, or ``episode`` where it has turns; everything else has a
default. A class that has the same members without being a subclass is taken, too (``adapted``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, NamedTuple, Sequence

from gdpo_nemo.data.records import Prompt, Trajectory, Verdict


class Environment:
    """Scores completions. Built in every worker process from the options of its YAML section, once per process, and on
    the driver: the constructor should be quick.

    The attributes say what it is and can do. A class may leave them as they are, say otherwise, or have a constructor
    that says otherwise.
    """

    reward_names: tuple[str, ...] = ()
    """The components it may give; the config's weights are checked against them."""
    open_rewards: bool = False
    """True as long as it cannot know its ``reward_names``: verdicts may then have any, and no weight is refused."""
    system_prompt: str | None = None
    """Put before its prompts unless the config says otherwise."""
    remote: bool = False
    """Said by the class: verdicts come from servers, in bounded time and size. ``verify`` is called on the driver, from
    several threads and with all trajectories at once, and no worker process is needed around it."""
    plays_with_endpoint: bool = False
    """Said by the class: its agents play whole episodes with the run's own endpoint (``rollout.endpoint``), by a method
    ``play(prompts, sampling)``, and return the verdicts."""
    by_sample: bool = False
    """Said by the class: the verdict on a sample needs no other sample, so it is asked for as soon as the sample is
    there, and not when its group is."""
    instant: bool = False
    """Said by the class: building it takes no time, reaches nothing and runs nobody else's code, so that ``--dry-run``
    may ask it for its components. Of built-in environments only: a dry run imports no others."""

    offers_tools: bool = False
    """True if ``read_row`` gives every row ``tools``, which the chat template must show to the policy."""

    def __init__(self, options: Mapping[str, Any] | None = None):
        pass

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory, in order. May block; the pool enforces the time limit.

        A reward of None or NaN means 'not applicable'. An exception or an infinite reward is a mistake of the
        environment's author and stops the run. A failure that is nobody's mistake (a server that is down) is a
        verdict with the outcome ``ENV_FAILED``.
        """
        raise NotImplementedError

    def episode(self) -> Any:
        """An object that plays one trajectory of several turns (``episodes.Episode``), in place of ``verify``."""
        raise NotImplementedError

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Prompts of its own: rows with a `prompt` column (text or messages) and whatever `verify` needs; equal
        arguments, equal rows.

        ``split`` is train, validation or test. A column ``id`` is used as the prompt id. ``size`` None takes as many
        rows as there are, or a number of the environment's choice.
        """
        raise NotImplementedError

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row of its dataset as one with a prompt column (and ``tools``). Raises ConfigError."""
        return row

    def server_of(self, row: Mapping[str, Any]) -> str | None:
        """Name of the server that verifies a row of ``read_row``, or None. ``gdpo-nemo env check`` tries rows of
        each."""
        return None

    def examples(self, row: Mapping[str, Any]) -> Sequence[str]:
        """Completions to a row that ``gdpo-nemo env check`` verifies, such as a right answer."""
        return ()

    def prepare(self) -> None:
        """Called once in each worker process before the first time limit starts to run: the place for imports that take
        seconds."""

    def preflight(self, prompts: Sequence[Prompt]) -> Any:
        """Called on the driver before anything is started, with the run's prompts for it. Raises ConfigError or
        RunError for what would fail later."""

    def close(self) -> None:
        """Drop what is in flight and release what is held; called on the driver after ``preflight``, and at the end of
        a ``remote`` environment."""

    @property
    def verifies(self) -> bool:
        """Whether it judges completions by ``verify``."""
        return _defines(self, "verify")

    @property
    def has_turns(self) -> bool:
        """Whether it plays episodes."""
        return _defines(self, "episode")

    @property
    def makes_rows(self) -> bool:
        """Whether it has prompts of its own."""
        return _defines(self, "rows")

    @property
    def has_preflight(self) -> bool:
        """Whether there is something to find out before a run, such as that servers are there."""
        return _defines(self, "preflight")


class Declared(NamedTuple):
    """What a class says before it is built."""

    reward_names: tuple[str, ...] | None
    """None: only the object knows."""
    remote: bool
    plays_with_endpoint: bool
    by_sample: bool
    instant: bool


def declared(make: Any) -> Declared:
    """What a class of environments, or a function that makes one, says of itself."""
    names = getattr(make, "reward_names", None)
    facts = (bool(getattr(make, fact, False)) for fact in Declared._fields[1:])
    return Declared(tuple(names) if names and isinstance(names, (tuple, list)) else None, *facts)


def adapted(environment: Any) -> Environment:
    """The environment itself, or around an object of another class the same members with defaults for those that it
    lacks."""
    return environment if isinstance(environment, Environment) else _Adapted(environment)


class _Adapted(Environment):
    """An object that has some members of an environment without being one; the others are those of ``Environment``."""

    def __init__(self, own: Any):
        object.__setattr__(self, "_own", own)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "_own")
        return getattr(own, name) if hasattr(own, name) else object.__getattribute__(self, name)


def _defines(environment: Environment, method: str) -> bool:
    """Whether a method is the author's, be it of the class or of the object."""
    own = getattr(environment, method)
    return callable(own) and getattr(own, "__func__", None) is not getattr(Environment, method)


@dataclass(frozen=True)
class Failure:
    """What a reward function returns instead of a reward that could not be computed, without a mistake of its author.

    The sample becomes ``env_failed``: masked and counted. (None would only say that the reward does not apply.)
    """

    detail: str
    """Why, in one line; it is logged."""
