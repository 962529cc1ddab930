"""Interface of multi-turn environments: an episode is reset with a row and then answers each message of the policy.

A multi-turn environment defines ``reward_names`` and ``episode()``. ``episode()`` returns an object for one trajectory
with these methods:

* ``reset(row) -> prompt | None``: receives the row's columns. Returns the first prompt as text or chat messages, or
  None to use the row's prompt. Images of the row are PIL images.
* ``step(message) -> (observation, rewards, done)``: receives the policy's message, ``{"role": "assistant", "content":
  text, "finish_reason": "stop" | "length"}``. The observation is text or chat messages for the policy, or None when the
  episode is done. Contents of messages may have parts ``{"type": "image", "image": PIL image}``. The rewards of this
  step are a mapping from component name to reward, or None. ``done`` is True if the episode is over. Rewards of the
  same component are summed over the steps.
* ``cut() -> rewards | None``, optional: replaces the next step if the turn or token budget is exhausted.

Each step runs in any free worker process of the environment pool, with the time limit ``rollout.env_timeout_s``. The
episode is pickled between steps. If a worker is killed, the step is retried once from the state before the step. An
exception counts as a bug in the environment and stops the run. To report an external failure, such as an unavailable
server, raise ``EpisodeFailed``, which masks the trajectory.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from gdpo_nemo.algorithms.rubrics import criteria_of, is_known
from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.environments.base import Environment, reward_value
from gdpo_nemo.environments.images import encoded, with_pictures
from gdpo_nemo.utils.errors import ConfigError, RunError

MAX_STATE_BYTES = 16 * 2**20
"""Maximum size of a pickled episode in bytes."""
MAX_OBSERVATION_CHARACTERS = 2**20
"""Maximum length of an observation in characters."""

Observation = str | list[Mapping[str, Any]]


class EpisodeFailed(Exception):
    """Raised by an episode that cannot continue because of an external failure. The trajectory of the episode is masked
    and counted."""


class Episode(Protocol):
    """Interface of one multi-turn episode in an environment. The module docstring describes the methods."""

    def reset(self, row: Mapping[str, Any]) -> Observation | None:
        """Begin the episode and return the first prompt, or None to use the row's prompt."""
        ...

    def step(self, message: Mapping[str, Any]) -> tuple[Observation | None, Mapping[str, float | None] | None, bool]:
        """Process the policy's message and return (observation, rewards, done)."""
        ...


@dataclass(frozen=True)
class EpisodeStep:
    """Request to run one step of an episode.

    A request without ``state`` resets the episode. A request with ``state`` and ``message`` runs ``step``. A request
    with ``state`` only runs ``cut``.
    """

    prompt: Prompt
    sample_index: int
    turn: int
    state: bytes | None = None
    message: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class EpisodeReply:
    """Reply of a worker or a server to an ``EpisodeStep``.

    Only workers may unpickle ``state``, because unpickling runs code of the environment.
    """

    state: bytes = b""
    observation: Observation | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    done: bool = False
    outcome: Outcome = Outcome.OK
    detail: str = ""


class RemoteEpisodes(Protocol):
    """Interface of a ``remote`` multi-turn environment. The episodes run on servers or in threads of the driver, and
    are never pickled."""

    def start_step(self, step: EpisodeStep) -> Future[EpisodeReply]:
        """Start a step and return a future for its reply. The step has a time limit.

        ``state`` of the reply identifies the episode. Cancelling the future abandons the episode.
        """
        ...

    def abandon(self, state: bytes) -> None:
        """Release an episode that will not be stepped again."""
        ...


def advance(environment: Environment, step: EpisodeStep) -> EpisodeReply:
    """Run one step in this process. Raises RunError if the environment's code returns invalid values."""
    try:
        if step.state is None:
            episode = environment.episode()
            fields = dict(step.prompt.fields)
            observation = episode.reset(with_pictures(fields, {}) if step.prompt.images else fields)
            rewards = None
            done = False
        else:
            episode = pickle.loads(step.state)
            if step.message is None:
                observation = None
                rewards = episode.cut() if hasattr(episode, "cut") else None
                done = True
            else:
                observation, rewards, done = _checked_answer(episode.step(dict(step.message)))
    except EpisodeFailed as error:
        return EpisodeReply(outcome=Outcome.ENV_FAILED, detail=str(error) or "the episode failed")
    if not done and (observation is not None or step.state is not None):
        observation = _checked_observation(observation)
    state = b"" if done else _pickled(episode)
    return EpisodeReply(state, observation, _checked_rewards(environment, step, rewards), done)


def _checked_answer(answer: Any) -> tuple[Any, Any, bool]:
    if not isinstance(answer, tuple) or len(answer) != 3 or not isinstance(answer[2], bool):
        raise RunError("step must return (observation, rewards or None, done)")
    return answer


def _checked_observation(value: Any) -> Observation:
    observation: Observation
    if isinstance(value, str) and value:
        observation = value
    elif (
        isinstance(value, Sequence)
        and value
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value)
    ):
        if any(m["role"] == "assistant" for m in value):
            raise RunError("an observation contains an assistant message; only the policy may write assistant messages")
        try:
            observation = list(encoded(value))
        except ValueError as error:
            raise RunError(f"an observation: the image {error}") from None
    else:
        raise RunError(f"an observation must be text or chat messages, not {str(value)[:40]!r}")
    length = len(str(observation))
    if length > MAX_OBSERVATION_CHARACTERS:
        raise RunError(f"an observation has {length} characters, more than the limit of {MAX_OBSERVATION_CHARACTERS}")
    return observation


def _pickled(episode: Any) -> bytes:
    try:
        state = pickle.dumps(episode, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise RunError(f"{type(episode).__name__} cannot be pickled between steps: {error}") from error
    if len(state) > MAX_STATE_BYTES:
        raise RunError(
            f"the pickled {type(episode).__name__} has {len(state)} bytes, more than the limit of {MAX_STATE_BYTES}"
        )
    return state


def _checked_rewards(environment: Environment, step: EpisodeStep, rewards: Any) -> dict[str, float | None]:
    if rewards is None:
        return {}
    if not isinstance(rewards, Mapping):
        raise RunError(f"rewards must be a mapping or None, not {type(rewards).__name__}")
    unknown = [name for name in rewards if not is_known(name, environment.reward_names)]
    if unknown:
        raise RunError(f"a step returned the reward {unknown[0]!r}, which is not in reward_names")
    location = f"sample {step.sample_index} of prompt {step.prompt.id}, turn {step.turn}"
    try:
        criteria_of(step.prompt.fields, rewards)
    except ConfigError as error:
        raise RunError(f"{location}: {error}") from error
    return {name: reward_value(value, f"reward {name!r} of {location}") for name, value in rewards.items()}
