"""Environments whose verdicts come from servers: called from threads of the driver, with all trajectories at once.

Such a class says ``remote = True`` and promises that its ``verify`` ends in bounded time, limits what it takes in, and
may be called from several threads. A worker process around it would only divide its concurrency.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Callable, Iterator, Mapping, Sequence, cast

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.base import declared
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep, RemoteEpisodes
from gdpo_nemo.environments.registry import environment_class, load_environment
from gdpo_nemo.environments.verdicts import checked_verdicts
from gdpo_nemo.errors import ConfigError, RunError


def is_remote(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the environment is a client of servers. False for what cannot be imported: its worker says why."""
    try:
        return declared(environment_class(name, options)).remote
    except ConfigError:
        return False


class RemoteEnvironments:
    """The remote environments of a config.

    Args:
        section: their part of the config section ``env``.
    """

    def __init__(self, section: Mapping[str, Mapping[str, Any]]):
        self._environments = {name: load_environment(name, options) for name, options in section.items()}
        self.names = frozenset(self._environments)

    @contextlib.contextmanager
    def verifying(self, trajectories: Sequence[Trajectory]) -> Iterator[Callable[[], dict[int, Verdict]]]:
        """Start verifying those trajectories that are theirs; the function that is given waits for all verdicts.

        The verdicts come by index in ``trajectories``. Raises RunError for verdicts that no environment may give.
        """
        indices = {
            name: [i for i, trajectory in enumerate(trajectories) if trajectory.prompt.environment == name]
            for name in self.names
        }
        indices = {name: chosen for name, chosen in indices.items() if chosen}
        with ThreadPoolExecutor(max(1, len(indices)), thread_name_prefix="remote") as threads:
            futures: dict[str, Future[list[Verdict]]] = {
                name: threads.submit(self._verify, name, [trajectories[i] for i in chosen])
                for name, chosen in indices.items()
            }
            yield lambda: {
                i: verdict for name, future in futures.items() for i, verdict in zip(indices[name], future.result())
            }

    def replies(self, steps: Mapping[int, EpisodeStep]) -> Callable[[], dict[int, EpisodeReply]]:
        """Begin steps of many episodes; the function that is returned waits for all replies.

        The function raises RunError for a mistake in the options, and where the environment is closed meanwhile.
        """
        begun = {i: self._start_step(step) for i, step in steps.items()}
        return lambda: {i: self._reply(steps[i], future) for i, future in begun.items()}

    async def reply(self, step: EpisodeStep) -> EpisodeReply:
        """The reply to one step, without a thread that waits for it. Cancelled, it abandons the episode. Raises
        RunError as ``replies``."""
        name = step.prompt.environment
        try:
            return await asyncio.wrap_future(self._start_step(step))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _closed(name) from None
        except ConfigError as error:
            raise RunError(f"environment {name!r}: {error}") from error

    def abandon(self, name: str, state: bytes) -> None:
        """Release an episode of the environment that nobody will step again."""
        self._episodes(name).abandon(state)

    def _episodes(self, name: str) -> RemoteEpisodes:
        return cast(RemoteEpisodes, self._environments[name])

    def _start_step(self, step: EpisodeStep) -> Future[EpisodeReply]:
        return self._episodes(step.prompt.environment).start_step(step)

    def _reply(self, step: EpisodeStep, future: Future[EpisodeReply]) -> EpisodeReply:
        name = step.prompt.environment
        try:
            return future.result()
        except CancelledError:
            raise _closed(name) from None
        except ConfigError as error:
            raise RunError(f"environment {name!r}: {error}") from error

    def close(self) -> None:
        """End what is under way."""
        for environment in self._environments.values():
            environment.close()

    def _verify(self, name: str, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        environment = self._environments[name]
        try:
            verdicts = environment.verify(trajectories)
            names: Sequence[str] = environment.reward_names
            if environment.open_rewards:
                names = [component for verdict in verdicts for component in verdict.rewards]
            return checked_verdicts(names, trajectories, verdicts)
        except (ConfigError, RunError) as error:
            raise RunError(f"environment {name!r}: {error}") from error


def _closed(name: str) -> RunError:
    return RunError(f"environment {name!r} was closed during a step")
