"""Episodes of Python environments: a coroutine that makes one trajectory, turn by turn.

The environment is reset first. Then the policy and the environment write alternately. An episode ends if the
environment is done, after ``rollout.turns.max_turns``, or if no further token or image fits. In the last two cases, the
outcome is ``truncated``. The caller selects the engine, and decides whether trajectories wait for each other between
turns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.messages import Message
from gdpo_nemo.data.records import Outcome, Prompt, Trajectory
from gdpo_nemo.data.replies import message_of
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.environments.images import without_bytes
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.rollouts.context import Transcript, check_trajectory
from gdpo_nemo.utils.errors import RunError


@dataclass(frozen=True)
class EpisodeJob:
    """Sampling settings of one episode, and the functions that the episode calls."""

    sampling: Sampling
    """Sampling settings that ``sample`` uses."""
    seed: Callable[[int], int]
    """Function that maps the index of a turn to the seed of its completion."""
    sample: Callable[[SampleRequest], Awaitable[Completion]]
    """Coroutine function that samples one turn."""
    step: Callable[[EpisodeStep], Awaitable[EpisodeReply]]
    """Coroutine function that runs one step of the environment, in a worker process or on a server."""
    version: int = 0
    """Version of the weights published when the episode began. An episode without policy tokens gets this version."""
    abandon: Callable[[EpisodeStep], None] = lambda step: None
    """Function that releases the environment's resources if the episode ends with an exception, such as a timeout."""


@dataclass(frozen=True)
class Limits:
    """Limits on the length of one trajectory."""

    max_turns: int
    max_tokens: int
    """Maximum number of tokens that the policy may write in all turns."""
    max_new_tokens: int
    """Maximum number of tokens that the policy may write in one turn."""
    max_sequence: int
    """Maximum number of tokens of prompt and completion together."""
    max_images: int = 0
    """Maximum number of images of prompt and completion together."""


async def play_episode(
    prompt: Prompt, sample_index: int, job: EpisodeJob, limits: Limits, conversation: Conversation
) -> Trajectory:
    """Play one episode of a Python environment and return its trajectory.

    Raises:
        RunError: if the environment returns an invalid observation, or the trajectory cannot be trained. Exceptions of
            ``job.sample`` and ``job.step`` propagate.
    """
    episode = _Episode(Transcript(prompt, sample_index), job, limits, conversation)
    try:
        await episode.reset()
        for turn in range(limits.max_turns):
            if episode.done or episode.room < 1:
                break
            await episode.take_turn(turn)
        if not episode.done:
            await episode.truncate()
    except BaseException:
        job.abandon(episode.next_step(None))
        raise
    made = episode.transcript.trajectory(conversation, job.version)
    check_trajectory(made, prompt, limits.max_sequence, f"environment {prompt.environment!r}")
    return made


class _Episode:
    """State of an episode between two turns."""

    def __init__(self, transcript: Transcript, job: EpisodeJob, limits: Limits, conversation: Conversation):
        self.transcript = transcript
        self.done = False
        self._job = job
        self._limits = limits
        self._conversation = conversation.for_row(transcript.prompt.fields)
        self._state: bytes | None = None
        self._messages: list[Message] | None = list(transcript.prompt.messages) if transcript.prompt.messages else None
        """Messages so far, for the chat template. The list is None if the prompt is plain text."""
        self._is_full = False
        """True if an observation was too long for the trajectory."""

    @property
    def room(self) -> int:
        """Number of tokens that the policy may write in its next turn."""
        if self._is_full:
            return 0
        t = self.transcript
        limits = self._limits
        return min(limits.max_new_tokens, limits.max_tokens - t.num_policy_tokens, limits.max_sequence - len(t))

    @property
    def _tools(self) -> list[Any] | None:
        """Tool definitions from the dataset row, for the chat template. Return None for a row without tools."""
        tools = self.transcript.prompt.fields.get("tools")
        return tools if isinstance(tools, list) else None

    async def reset(self) -> None:
        """Reset the environment. If the reset returns an observation, this observation replaces the prompt of the
        dataset row."""
        reply = await self._step(None)
        if self.done or reply.observation is None:
            return
        conversation = self._conversation
        t = self.transcript
        text, ids, images = conversation.prompt_with_images(reply.observation, self._tools)
        self._messages = conversation.messages(reply.observation) if conversation.chat else None
        if len(images) > self._limits.max_images:
            raise RunError(
                f"environment {t.prompt.environment!r}: a prompt has {len(images)} images, but "
                f"data.images.max_per_prompt is {self._limits.max_images}"
            )
        t.prompt = replace(t.prompt, token_ids=ids, text=text, messages=self._messages, images=images)

    async def take_turn(self, turn: int) -> None:
        """Sample one turn of the policy and pass it to the environment."""
        t = self.transcript
        completion = await self._job.sample(SampleRequest(t.token_ids, self._job.seed(turn), self.room, t.images))
        t.append_policy_tokens(completion)
        text = self._conversation.text(completion.token_ids)
        said: dict[str, Any] = {"role": "assistant", "content": text}
        message = {**said, "finish_reason": completion.finish_reason}
        if self._tools:
            parsed = message["reply"] = self._conversation.replies.parse(text, self._tools)
            said = message_of(parsed)
        t.messages.append(said)
        reply = await self._step(message)
        if not self.done and reply.observation is not None and turn + 1 < self._limits.max_turns:
            self._append_observation(said, reply.observation)

    async def truncate(self) -> None:
        """End the episode as truncated, because its limit on turns or tokens is reached."""
        await self._step(None)
        self.done = True
        self.transcript.finish_reason = "length"

    def next_step(self, message: Message | None) -> EpisodeStep:
        """Return the next request to the environment, with the policy's message if there is one."""
        t = self.transcript
        prompt = t.prompt if self._state is None else without_bytes(t.prompt)  # only a reset reads images of the row
        return EpisodeStep(prompt, t.sample_index, t.turns, self._state, message)

    async def _step(self, message: Message | None) -> EpisodeReply:
        t = self.transcript
        reply = await self._job.step(self.next_step(message))
        self._state = reply.state
        self.done = reply.done
        t.add_rewards(reply.rewards)
        if reply.outcome is not Outcome.OK:
            t.outcome = reply.outcome
            t.detail = reply.detail
            self.done = True
        return reply

    def _append_observation(self, said: Message, observation: str | Sequence[Message]) -> None:
        t = self.transcript
        conversation = self._conversation
        calls = said.get("tool_calls", ())
        last = int(t.token_ids[-1])
        ids, images = conversation.continuation_with_images(self._messages, observation, last, self._tools, calls)
        if not len(ids):
            start = str(observation)[:40]
            raise RunError(f"environment {t.prompt.environment!r}: an observation has no tokens: {start!r}")
        limits = self._limits
        is_long = len(t) + len(ids) >= limits.max_sequence or t.num_policy_tokens >= limits.max_tokens
        if is_long or images and len(t.images) + len(images) > limits.max_images:
            # The observation is not appended. A trajectory must end with policy tokens, which would not fit after the
            # observation.
            self._is_full = True
            return
        t.append_env_tokens(ids, images)
        t.messages += conversation.messages(observation)
        if self._messages is not None:
            self._messages += [said, *conversation.messages(observation)]
