"""Trajectories out of episodes that agents played through the endpoint.

An agent's reply says which turns the policy took. What was sampled in them is read from the endpoint's own memory, so
that no agent can put tokens before the trainer that the policy did not write. The turns must continue each other: the
prompt of each begins with all tokens before it. Where one does not (the agent has edited or shortened its history), the
trajectory is a failure, counted and masked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping, Protocol, Sequence

import numpy as np

from gdpo_nemo.config.turn_limits import TURNS_KEPT
from gdpo_nemo.data.failures import Failure, printable
from gdpo_nemo.data.records import NOT_CONTIGUOUS, Outcome, Prompt, Trajectory
from gdpo_nemo.endpoint.conversations import History
from gdpo_nemo.errors import RunError
from gdpo_nemo.rollouts.context import RolloutContext, Transcript

_MAX_TOKENS = 2**22


class BrokenEpisode(Exception):
    """What was returned is no trajectory; the message says why."""


class AgentEpisode(Protocol):
    """What an agent made of one prompt."""

    @property
    def response(self) -> Mapping[str, Any]:
        """The agent's reply, in the form of OpenAI's Responses API."""
        ...

    @property
    def rewards(self) -> Mapping[str, float | None]:
        """Components by name; None: not applicable."""
        ...


class AgentEnvironment(Protocol):
    """An environment whose agents sample from the endpoint by themselves."""

    def play(self, prompts: Sequence[Prompt], sampling: Mapping[str, float]) -> Sequence[AgentEpisode | Failure]:
        """Run one episode per prompt; ``sampling`` holds temperature and top_p."""
        ...


def play_with_agents(
    environment: AgentEnvironment, prompts: Sequence[Prompt], context: RolloutContext
) -> list[list[Trajectory]]:
    """The rollout function of environments whose agents call the endpoint.

    Raises:
        RunError: there is no endpoint, or the engines failed for good.
    """
    if context.endpoint is None:
        raise RunError("rollout.endpoint.enabled: must be true, agents play with it")
    service = context.endpoint.service
    wanted = [(prompt, j) for prompt in prompts for j in range(context.samples)]
    settings = {"temperature": context.sampling.temperature, "top_p": context.sampling.top_p}
    with service.phase(context.sampling, context.seed(0, 0, 0)):
        played = environment.play([prompt for prompt, _ in wanted], settings)
        if service.failure is not None:
            raise service.failure
        transcripts = [
            _transcript(Transcript(prompt, j), result, service.history) for (prompt, j), result in zip(wanted, played)
        ]
    version = max((t.version for t in transcripts if t.version is not None), default=context.version)
    for t in transcripts:
        if t.turns:
            t.prompt = replace(t.prompt, text=context.conversation.text(t.prompt.token_ids))
    finished = [t.trajectory(context.conversation, version) for t in transcripts]
    return [finished[i : i + context.samples] for i in range(0, len(finished), context.samples)]


def _transcript(t: Transcript, result: AgentEpisode | Failure, history: History) -> Transcript:
    if isinstance(result, Failure):
        t.outcome = Outcome.ENV_FAILED
        t.detail = str(result)
        return t
    try:
        follow(t, result.response, history)
    except BrokenEpisode as error:
        t.outcome = Outcome.ENV_FAILED
        t.detail = str(error)
        return t
    t.rewards = dict(result.rewards)
    return t


def follow(t: Transcript, response: Mapping[str, Any], history: History) -> None:
    """Read the turns of a response into ``t``, whose prompt becomes that of the first turn.

    Raises:
        BrokenEpisode: no turn, a turn that was not sampled here, or one that does not continue those before.
        RunError: a turn is not known here, and turns of episodes under way had to be forgotten.
    """
    output = response.get("output")
    if not isinstance(output, list):
        raise BrokenEpisode("bad_reply: the response has no output")
    for item in output:
        if not isinstance(item, Mapping) or not item.get("generation_token_ids"):
            continue
        prompt, generated = (_ids(item.get(key)) for key in ("prompt_token_ids", "generation_token_ids"))
        turn = history.turn(np.concatenate([prompt, generated]))
        if turn is None and history.forgotten:
            raise RunError(
                f"rollout.endpoint: agents took more than the {TURNS_KEPT:,} turns of a batch that are kept (side "
                "conversations count too); lower gdpo.num_prompts_per_step, gdpo.num_generations_per_prompt or the "
                "agents' calls"
            )
        if turn is None or len(turn.prompt_ids) != len(prompt):
            raise BrokenEpisode(f"bad_reply: turn {t.turns + 1} holds tokens that this run did not sample")
        if t.turns == 0:
            t.prompt = replace(t.prompt, token_ids=turn.prompt_ids)
        else:
            seen = t.token_ids
            if len(prompt) < len(seen) or not np.array_equal(prompt[: len(seen)], seen):
                place = _first_difference(seen, prompt)
                raise BrokenEpisode(
                    f"{NOT_CONTIGUOUS}: turn {t.turns + 1} departs from the turns before it at token {place}"
                )
            t.append_env_tokens(prompt[len(seen) :])
        t.append_policy_tokens(turn.completion)
    if t.turns == 0:
        raise BrokenEpisode(f"no turn of the policy is in the response{_reason(response)}")
    if response.get("incomplete_details"):
        t.finish_reason = "length"


def _reason(response: Mapping[str, Any]) -> str:
    """What an agent says where it stopped early; for a prompt that has no room that is max_output_tokens."""
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, Mapping) else None
    return f" ({printable(str(reason), 40)})" if reason else ""


def _ids(value: Any) -> np.ndarray:
    good = isinstance(value, list) and len(value) <= _MAX_TOKENS
    if not good or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise BrokenEpisode("bad_reply: token ids are no list of whole numbers")
    return np.array(value, np.int32)


def _first_difference(one: np.ndarray, other: np.ndarray) -> int:
    shared = min(len(one), len(other))
    differs = np.flatnonzero(one[:shared] != other[:shared])
    return int(differs[0]) if len(differs) else shared
