"""An episode of a Python environment: one trajectory that takes its turns, as a coroutine.

Reset, then turn by turn: the engines write, the environment answers. A trajectory ends when its environment says so,
after ``rollout.turns.max_turns``, or when no further token fits; the last two are ``truncated``. Whoever awaits it
decides which engine samples and whether trajectories wait for each other between turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Awaitable, Callable, Sequence

from gdpo_nemo.data.conversation import Conversation, Message
from gdpo_nemo.data.records import Outcome, Prompt, Trajectory
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.errors import RunError
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.rollouts.context import Transcript, check_trajectory


@dataclass(frozen=True)
class EpisodeJob:
    """The means of one episode."""

    sampling: Sampling
    """The settings that ``sample`` draws with."""
    seed: Callable[[int], int]
    """turn -> seed of its completion."""
    sample: Callable[[SampleRequest], Awaitable[Completion]]
    """Draws one turn."""
    step: Callable[[EpisodeStep], Awaitable[EpisodeReply]]
    """Runs one step of the environment, in a worker process or on a server."""
    version: int = 0
    """Of the weights that were published when the episode began, for one in which the policy writes nothing."""
    abandon: Callable[[EpisodeStep], None] = lambda step: None
    """Releases the environment's side of an episode that ends here with an exception: late, or a mistake."""


@dataclass(frozen=True)
class Limits:
    """Budgets of one trajectory."""

    max_turns: int
    max_tokens: int
    """Tokens that the policy may write in all turns."""
    max_new_tokens: int
    """Tokens that it may write in one."""
    max_sequence: int
    """Tokens of prompt and completion together."""


async def play_episode(
    prompt: Prompt, sample_index: int, asked: EpisodeJob, limits: Limits, conversation: Conversation
) -> Trajectory:
    """One trajectory of an environment with turns.

    Raises:
        RunError: a mistake in the environment's code; whatever ``asked.sample`` and ``asked.step`` raise.
    """
    episode = _Episode(Transcript(prompt, sample_index), asked, limits, conversation)
    try:
        await episode.reset()
        for turn in range(limits.max_turns):
            if episode.done or episode.room < 1:
                break
            await episode.take_turn(turn)
        if not episode.done:
            await episode.truncate()
    except BaseException:
        asked.abandon(episode.next_step(None))
        raise
    made = episode.transcript.trajectory(conversation, asked.version)
    check_trajectory(made, prompt, limits.max_sequence, f"environment {prompt.environment!r}")
    return made


class _Episode:
    """The state of an episode between two turns."""

    def __init__(self, transcript: Transcript, asked: EpisodeJob, limits: Limits, conversation: Conversation):
        self.transcript = transcript
        self.done = False
        self._asked = asked
        self._limits = limits
        self._conversation = conversation
        self._state: bytes | None = None
        self._messages: list[Message] | None = list(transcript.prompt.messages) if transcript.prompt.messages else None
        """The conversation so far, for the chat template; None if the prompt is plain text."""
        self._full = False
        """Whether an observation had no room."""

    @property
    def room(self) -> int:
        """Tokens that the policy may write in its next turn."""
        if self._full:
            return 0
        t = self.transcript
        limits = self._limits
        return min(limits.max_new_tokens, limits.max_tokens - t.num_policy_tokens, limits.max_sequence - len(t))

    @property
    def _tools(self) -> list[Any] | None:
        """Tools of the row, which the chat template shows with every prompt."""
        offered = self.transcript.prompt.fields.get("tools")
        return offered if isinstance(offered, list) else None

    async def reset(self) -> None:
        """Begin; the environment may put a prompt of its own in the row's place."""
        reply = await self._step(None)
        if self.done or reply.observation is None:
            return
        talk = self._conversation
        t = self.transcript
        text, ids = talk.prompt(reply.observation, self._tools)
        self._messages = talk.messages(reply.observation) if talk.chat else None
        t.prompt = replace(t.prompt, token_ids=ids, text=text, messages=self._messages)

    async def take_turn(self, turn: int) -> None:
        """The policy writes, the environment answers."""
        t = self.transcript
        completion = await self._asked.sample(SampleRequest(t.token_ids, self._asked.seed(turn), self.room))
        t.append_policy_tokens(completion)
        text = self._conversation.text(completion.token_ids)
        t.messages.append({"role": "assistant", "content": text})
        reply = await self._step({"role": "assistant", "content": text, "finish_reason": completion.finish_reason})
        if not self.done and reply.observation is not None and turn + 1 < self._limits.max_turns:
            self._append_observation(text, reply.observation)

    async def truncate(self) -> None:
        """End the episode: its budget of turns or tokens is used up."""
        await self._step(None)
        self.done = True
        self.transcript.finish_reason = "length"

    def next_step(self, message: Message | None) -> EpisodeStep:
        """What the environment is asked next."""
        t = self.transcript
        return EpisodeStep(t.prompt, t.sample_index, t.turns, self._state, message)

    async def _step(self, message: Message | None) -> EpisodeReply:
        t = self.transcript
        reply = await self._asked.step(self.next_step(message))
        self._state = reply.state
        self.done = reply.done
        t.add_rewards(reply.rewards)
        if reply.outcome is not Outcome.OK:
            t.outcome = reply.outcome
            t.detail = reply.detail
            self.done = True
        return reply

    def _append_observation(self, answer: str, observation: str | Sequence[Message]) -> None:
        t = self.transcript
        talk = self._conversation
        ids = talk.continuation(self._messages, observation, int(t.token_ids[-1]), self._tools)
        if not len(ids):
            start = str(observation)[:40]
            raise RunError(f"environment {t.prompt.environment!r}: an observation has no tokens: {start!r}")
        if len(t) + len(ids) >= self._limits.max_sequence or t.num_policy_tokens >= self._limits.max_tokens:
            # Not appended: a trajectory must end with tokens of the policy, and there is no room for one after these.
            self._full = True
            return
        t.append_env_tokens(ids)
        t.messages += talk.messages(observation)
        if self._messages is not None:
            self._messages += [{"role": "assistant", "content": answer}, *talk.messages(observation)]
