"""What an environment is: rows in, verdicts with named reward components out.

An environment is any class built as ``Class(options)`` from the mapping below its name in the YAML section ``env``.
Besides what the protocols ask for, it may have

* ``system_prompt: str | None``, put before its prompts unless the config says otherwise;
* ``examples(row) -> list[str]``, completions to a row that ``gdpo-nemo env check`` verifies, such as a right answer;
* ``prepare()``, called once in each worker process before the first time limit starts to run: the place for imports
  that take seconds. The constructor also runs on the driver, so it should be quick;
* ``read_row(row) -> row``, which turns a row of its dataset into one with a prompt column (and ``tools``);
* ``preflight(prompts)``, called on the driver before anything is started, with the run's prompts for it. It raises
  ConfigError or RunError for what would fail later;
* ``open_rewards``, true as long as it cannot know its ``reward_names``;
* ``remote = True`` with ``close()``: a client of servers, see ``remote.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Protocol, Sequence, runtime_checkable

from gdpo_nemo.data.records import Trajectory, Verdict


@runtime_checkable
class Environment(Protocol):
    """Scores completions. Built in a worker process from the options of its YAML section, once per process."""

    reward_names: tuple[str, ...]
    """The components it may return; the config's weights are checked against them."""

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory, in order. May block; the pool enforces the time limit.

        A reward of None or NaN means 'not applicable'. An exception or an infinite reward is a mistake of the
        environment's author and stops the run. A failure that is nobody's mistake (a server that is down) is a
        verdict with the outcome ``ENV_FAILED``.
        """
        ...


@runtime_checkable
class PromptMaker(Protocol):
    """An environment that also makes its own prompts."""

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Rows with a `prompt` column (text or messages) and whatever `verify` needs; equal arguments, equal rows.

        ``split`` is train, validation or test. A column ``id`` is used as the prompt id. ``size`` None takes as many
        rows as there are, or a number of the environment's choice.
        """
        ...


@dataclass(frozen=True)
class Failure:
    """What a reward function returns in the place of a reward that could not be had, through nobody's mistake.

    The sample becomes ``env_failed``: masked and counted. (None would only say that the reward does not apply.)
    """

    detail: str
    """Why, in one line; it is logged."""
