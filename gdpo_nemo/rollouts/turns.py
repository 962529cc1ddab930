"""Episodes of Python environments: all trajectories of a batch take their turns together.

Every turn is one call to the engines and one to the environment workers. A trajectory ends when its environment says
so, after ``rollout.turns.max_turns``, or when no further token fits; the last two are ``truncated``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Sequence

from gdpo_nemo.data.conversation import Message
from gdpo_nemo.data.records import Outcome, Prompt, Trajectory
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.errors import RunError
from gdpo_nemo.generation.requests import SampleRequest
from gdpo_nemo.rollouts.context import RolloutContext, Transcript


@dataclass
class _Play:
    """One trajectory and its episode."""

    transcript: Transcript
    place: int
    messages: list[Message] | None
    """The conversation so far, for the chat template; None if the prompt is plain text."""
    state: bytes = b""
    done: bool = False

    def step(self, message: Message | None, reset: bool = False) -> EpisodeStep:
        """The next request to the environment."""
        t = self.transcript
        return EpisodeStep(t.prompt, t.sample_index, t.turns, None if reset else self.state, message)


def play(prompts: Sequence[Prompt], context: RolloutContext) -> list[list[Trajectory]]:
    """The built-in rollout function of environments with turns.

    Raises:
        RunError: a mistake in an environment's code; engines or workers failed for good.
    """
    plays = [
        _Play(Transcript(prompt, j), place, list(prompt.messages) if prompt.messages else None)
        for place, prompt in enumerate(prompts)
        for j in range(context.samples)
    ]
    _reset(plays, context)
    for turn in range(context.max_turns):
        playing = [p for p in plays if not p.done]
        if not playing:
            break
        _turn(playing, turn, context)
    _truncate([p for p in plays if not p.done], context)
    version = max((p.transcript.version or 0 for p in plays), default=0)
    finished = [p.transcript.trajectory(context.conversation, version) for p in plays]
    return [finished[i : i + context.samples] for i in range(0, len(finished), context.samples)]


def _reset(plays: Sequence[_Play], context: RolloutContext) -> None:
    for p, reply in zip(plays, context.pool.step([p.step(None, reset=True) for p in plays])):
        _apply_reply(p, reply)
        if not p.done and reply.observation is not None:
            text, ids = context.conversation.prompt(reply.observation)
            p.messages = context.conversation.messages(reply.observation) if context.conversation.chat else None
            p.transcript.prompt = replace(p.transcript.prompt, token_ids=ids, text=text, messages=p.messages)


def _room(p: _Play, context: RolloutContext) -> int:
    """Tokens that the policy may write in its next turn."""
    t = p.transcript
    return min(context.max_new_tokens, context.max_tokens - t.num_policy_tokens, context.max_sequence - len(t))


def _turn(playing: Sequence[_Play], turn: int, context: RolloutContext) -> None:
    """Run one turn of every unfinished trajectory."""
    _truncate([p for p in playing if _room(p, context) < 1], context)
    playing = [p for p in playing if not p.done]
    if not playing:
        return
    requests = [
        SampleRequest(p.transcript.token_ids, context.seed(p.place, p.transcript.sample_index, turn), _room(p, context))
        for p in playing
    ]
    batch = context.sample(requests)
    answers = []
    for p, completion in zip(playing, batch.completions):
        p.transcript.append_policy_tokens(completion, batch.version)
        text = context.conversation.text(completion.token_ids)
        answers.append({"role": "assistant", "content": text, "finish_reason": completion.finish_reason})
    replies = context.pool.step([p.step(answer) for p, answer in zip(playing, answers)])
    for p, answer, reply in zip(playing, answers, replies):
        _apply_reply(p, reply)
        if not p.done and reply.observation is not None and turn + 1 < context.max_turns:
            _append_observation(p, answer, reply.observation, context)


def _append_observation(
    p: _Play, answer: Message, observation: str | Sequence[Message], context: RolloutContext
) -> None:
    """Append the observation; a trajectory without room for it is left to ``_truncate``."""
    t = p.transcript
    talk = context.conversation
    tools = t.prompt.fields.get("tools")
    ids = talk.continuation(p.messages, observation, t.ids[-1], tools if isinstance(tools, list) else None)
    if not len(ids):
        raise RunError(f"environment {t.prompt.environment!r}: an observation has no tokens: {str(observation)[:40]!r}")
    if len(t) + len(ids) >= context.max_sequence or t.num_policy_tokens >= context.max_tokens:
        # Not appended: a trajectory must end with tokens of the policy, and there is no room for one after these.
        t.finish_reason = "length"
        return
    t.append_env_tokens(ids)
    if p.messages is not None:
        p.messages += [{"role": "assistant", "content": answer["content"]}, *talk.messages(observation)]


def _apply_reply(p: _Play, reply: EpisodeReply) -> None:
    p.state = reply.state
    p.done = reply.done
    p.transcript.add_rewards(reply.rewards)
    if reply.outcome is not Outcome.OK:
        p.transcript.outcome = reply.outcome
        p.transcript.detail = reply.detail
        p.done = True


def _truncate(plays: Sequence[_Play], context: RolloutContext) -> None:
    """End episodes whose budget of turns or tokens is used up."""
    for p, reply in zip(plays, context.pool.step([p.step(None) for p in plays]) if plays else []):
        _apply_reply(p, reply)
        p.done = True
        p.transcript.finish_reason = "length"
