"""Environments with turns: an episode is reset with a row, then answers every message of the policy.

An environment with turns has ``reward_names`` and ``episode()``, which makes an object for one trajectory with

* ``reset(row) -> prompt | None``: the row's columns in; the first prompt as text or chat messages out, None for the
  row's own;
* ``step(message) -> (observation, rewards, done)``: the policy's message in, ``{"role": "assistant", "content": text,
  "finish_reason": "stop" | "length"}``; out what it is told next (text or chat messages; None when done), the rewards
  of this step by name (or None), and whether the episode is over. A component that comes at several steps is summed up;
* ``cut() -> rewards | None``, optional: called in place of the next step when a budget ends the episode.

Steps run in the environment pool's worker processes, each in whichever is free, under ``rollout.env_timeout_s``.
Between steps the episode is pickled, so a worker that is killed loses nothing: the step is tried once more from the
state before it. An exception is a mistake of the author and stops the run; ``EpisodeFailed`` says that nobody is to
blame (a server is down) and masks the trajectory.
"""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Mapping, Protocol, Sequence

from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.verdicts import reward_value
from gdpo_nemo.errors import RunError

MAX_STATE_BYTES = 16 * 2**20
"""Largest pickled episode."""
MAX_OBSERVATION_CHARACTERS = 2**20

Observation = str | list[Mapping[str, Any]]


class EpisodeFailed(Exception):
    """The episode cannot continue, through no mistake of its author: its trajectory is masked and counted."""


class Episode(Protocol):
    """One trajectory's side of the environment; see the top of the file."""

    def reset(self, row: Mapping[str, Any]) -> Observation | None:
        """Begin; returns the first prompt, or None for the row's own."""
        ...

    def step(self, message: Mapping[str, Any]) -> tuple[Observation | None, Mapping[str, float | None] | None, bool]:
        """Answer the policy: observation, rewards, done."""
        ...


@dataclass(frozen=True)
class EpisodeStep:
    """What a worker is asked: to reset (no state), to step (state and message), or to cut (a state alone)."""

    prompt: Prompt
    sample_index: int
    turn: int
    state: bytes | None = None
    message: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class EpisodeReply:
    """The answer of a worker or a server. ``state`` is for them only: unpickling runs code of the environment."""

    state: bytes = b""
    observation: Observation | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    done: bool = False
    outcome: Outcome = Outcome.OK
    detail: str = ""


class RemoteEpisodes(Protocol):
    """What a ``remote`` environment with turns has: its episodes live on servers, and nothing of them is pickled."""

    def start_step(self, step: EpisodeStep) -> Future[EpisodeReply]:
        """Begin a step without waiting for it, in bounded time. ``state`` of a reply is what it finds the episode by.

        Whoever cancels the future abandons the episode.
        """
        ...

    def abandon(self, state: bytes) -> None:
        """Release an episode that nobody will step again."""
        ...


def advance(environment: Environment, step: EpisodeStep) -> EpisodeReply:
    """Run one step. Raises RunError for what the environment's author has to fix."""
    try:
        if step.state is None:
            episode = environment.episode()
            observation = episode.reset(dict(step.prompt.fields))
            rewards = None
            done = False
        else:
            episode = pickle.loads(step.state)
            if step.message is None:
                observation = None
                rewards = episode.cut() if hasattr(episode, "cut") else None
                done = True
            else:
                observation, rewards, done = _answer(episode.step(dict(step.message)))
    except EpisodeFailed as error:
        return EpisodeReply(outcome=Outcome.ENV_FAILED, detail=str(error) or "the episode failed")
    if not done and (observation is not None or step.state is not None):
        observation = _observation(observation)
    return EpisodeReply(b"" if done else _state(episode), observation, _rewards(environment, step, rewards), done)


def _answer(answer: Any) -> tuple[Any, Any, bool]:
    if not isinstance(answer, tuple) or len(answer) != 3 or not isinstance(answer[2], bool):
        raise RunError("step must return (observation, rewards or None, done)")
    return answer


def _observation(value: Any) -> Observation:
    if isinstance(value, str) and value:
        text = value
    elif (
        isinstance(value, Sequence)
        and value
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value)
    ):
        if any(m["role"] == "assistant" for m in value):
            raise RunError("an observation holds a message of the assistant, which only the policy may write")
        value = [dict(message) for message in value]
        text = str(value)
    else:
        raise RunError(f"an observation must be text or chat messages, not {str(value)[:40]!r}")
    if len(text) > MAX_OBSERVATION_CHARACTERS:
        raise RunError(f"an observation of {len(text)} characters; at most {MAX_OBSERVATION_CHARACTERS} are taken")
    return value


def _state(episode: Any) -> bytes:
    try:
        state = pickle.dumps(episode, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise RunError(f"{type(episode).__name__} cannot be pickled between steps: {error}") from error
    if len(state) > MAX_STATE_BYTES:
        raise RunError(f"{type(episode).__name__} takes {len(state)} bytes between steps; at most {MAX_STATE_BYTES}")
    return state


def _rewards(environment: Environment, step: EpisodeStep, rewards: Any) -> dict[str, float | None]:
    if rewards is None:
        return {}
    if not isinstance(rewards, Mapping):
        raise RunError(f"rewards must be a mapping or None, not {type(rewards).__name__}")
    unknown = [name for name in rewards if name not in environment.reward_names]
    if unknown:
        raise RunError(f"a step returned the reward {unknown[0]!r}, which is not in reward_names")
    where = f"sample {step.sample_index} of prompt {step.prompt.id}, turn {step.turn}"
    return {name: reward_value(value, f"reward {name!r} of {where}") for name, value in rewards.items()}
