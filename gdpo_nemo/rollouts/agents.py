"""Conversion of episodes that agents played through the endpoint to trajectories.

An agent's reply lists the turns of the policy. The tokens and log-probs of these turns are read from the endpoint's
history, so that an agent cannot submit training tokens that the policy did not write. A turn continues the earlier turn
whose tokens its prompt begins with. If an agent edits or shortens its history or starts a sub-agent, the prompt begins
with no earlier turn, and the turn begins a new context of the trajectory (``data.contexts``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import batched, product, starmap
from typing import Any, Protocol

import numpy as np

from gdpo_nemo.config.rollout_checks import TURNS_KEPT
from gdpo_nemo.data.images import moved
from gdpo_nemo.data.records import Outcome, Prompt, Trajectory
from gdpo_nemo.environments.server_replies import Failure, FailureKind, printable
from gdpo_nemo.rollouts.context import RolloutContext, Transcript
from gdpo_nemo.rollouts.endpoint.conversations import History, Turn
from gdpo_nemo.rollouts.endpoint.requests import are_token_ids
from gdpo_nemo.rollouts.endpoint.service import Service
from gdpo_nemo.utils.errors import RunError

_MAX_TOKENS = 2**22


class BrokenEpisode(Exception):
    """Raised if an agent's reply is not a valid trajectory. The message contains the reason."""


class AgentEpisode(Protocol):
    """Result of one episode that an agent played.

    An optional attribute ``step_rewards`` is a list with the rewards of each turn of the policy. An optional attribute
    ``criteria`` contains the criteria of families of rewards by component (``Verdict.criteria``), and ``metrics``
    numbers by name (``Verdict.metrics``).
    """

    @property
    def response(self) -> Mapping[str, Any]:
        """Agent's reply, in the format of OpenAI's Responses API."""
        ...

    @property
    def rewards(self) -> Mapping[str, float | None]:
        """Rewards by component name. None means that the component does not apply."""
        ...


class AgentEnvironment(Protocol):
    """Environment whose agents sample from the endpoint."""

    def play(self, prompts: Sequence[Prompt], sampling: Mapping[str, float]) -> Sequence[AgentEpisode | Failure]:
        """Run one episode per prompt. ``sampling`` contains temperature and top_p."""
        ...


def play_with_agents(
    environment: AgentEnvironment, prompts: Sequence[Prompt], context: RolloutContext
) -> list[list[Trajectory]]:
    """Let the environment's agents play one episode per sample through the endpoint. This function is a
    ``RolloutFunction``.

    Raises:
        RunError: if the endpoint is not enabled, or the engines failed permanently.
    """
    if context.endpoint is None:
        raise RunError("rollout.endpoint.enabled: must be true, because agents require it")
    service = context.endpoint.service
    transcripts = list(starmap(Transcript, product(prompts, range(context.samples))))
    settings = {"temperature": context.sampling.temperature, "top_p": context.sampling.top_p}
    with service.phase(context.sampling, context.seed(0, 0, 0)):
        episodes = environment.play([t.prompt for t in transcripts], settings)
        if service.failure is not None:
            raise service.failure
        # All turns are claimed before the rewards are set, because a turn in several episodes fails in each of them.
        claims = [_turns(t, result, service) for t, result in zip(transcripts, episodes)]
        for t, result, turns in zip(transcripts, episodes, claims):
            _finish(t, result, turns)
    version = max((t.version for t in transcripts if t.version is not None), default=context.version)
    for t in transcripts:
        if t.turns:
            t.prompt = replace(t.prompt, text=context.conversation.text(t.prompt.token_ids))
    finished = [t.trajectory(context.conversation, version) for t in transcripts]
    return list(map(list, batched(finished, context.samples)))


def _turns(t: Transcript, result: AgentEpisode | Failure, service: Service) -> list[Turn]:
    """Append the turns of an episode to ``t``, and claim and return them. A failed episode has no turns."""
    try:
        if isinstance(result, Failure):
            # Agents do not report why a request to their model failed.
            reason = service.refusals() if result.kind is FailureKind.SERVER_ERROR else ""
            raise BrokenEpisode(f"{result}{reason}")
        turns = follow(t, result.response, service.history)
    except BrokenEpisode as error:
        _fail(t, str(error))
        return []
    service.history.claim(turns)
    return turns


def _finish(t: Transcript, result: AgentEpisode | Failure, turns: Sequence[Turn]) -> None:
    """Set the rewards of an episode. It fails if a turn is part of more episodes than requests that sampled it.

    Such a turn comes from a cache of responses. One sample would be trained with the rewards of several episodes.
    """
    if isinstance(result, Failure) or t.outcome is Outcome.ENV_FAILED:
        return
    for number, turn in enumerate(turns, 1):
        uses = turn.uses
        if uses.claimed > uses.sampled:
            times = "once" if uses.sampled == 1 else f"{uses.sampled} times"
            counts = f"{uses.claimed} episodes contain turn {number}, but it was sampled {times}"
            _fail(t, f"bad_reply: {counts}; disable response caches between agent and endpoint")
            return
    try:
        t.set_rewards(result.rewards, getattr(result, "step_rewards", ()))
        t.criteria = getattr(result, "criteria", {})
        t.metrics = dict(getattr(result, "metrics", {}))
    except ValueError as error:
        _fail(t, f"bad_reply: {error}")


def _fail(t: Transcript, detail: str) -> None:
    t.outcome = Outcome.ENV_FAILED
    t.detail = detail


def follow(t: Transcript, response: Mapping[str, Any], history: History) -> list[Turn]:
    """Append the turns of an agent's response to ``t``, and return them. The first turn's prompt replaces the prompt of
    ``t``. If the response contains a turn several times, only the first one is appended.

    Raises:
        BrokenEpisode: if the response has no turns, or a turn was not sampled by this run.
        RunError: if a turn is not found and the history has already dropped turns because of its size limit.
    """
    output = response.get("output")
    if not isinstance(output, list):
        raise BrokenEpisode("bad_reply: the response has no output")
    turns: list[Turn] = []
    seen: list[np.ndarray] = []
    for item in output:
        if not isinstance(item, Mapping) or not item.get("generation_token_ids"):
            continue
        prompt = _ids(item.get("prompt_token_ids"))
        generated = _ids(item.get("generation_token_ids"))
        turn = history.turn(np.concatenate([prompt, generated]))
        if turn is None and history.forgotten:
            raise RunError(
                f"rollout.endpoint: agents took more than {TURNS_KEPT:,} turns in a batch, the maximum number of "
                "stored turns (side conversations also count); lower gdpo.num_prompts_per_step, "
                "gdpo.num_generations_per_prompt or the agents' calls"
            )
        if turn is None or len(turn.prompt_ids) != len(prompt):
            raise BrokenEpisode(f"bad_reply: turn {t.turns + 1} contains tokens that this run did not sample")
        if any(np.array_equal(turn.client_ids, ids) for ids in seen):
            continue
        if t.turns == 0:
            t.prompt = replace(t.prompt, token_ids=turn.prompt_ids, images=turn.images)
        else:
            _continue(t, seen, turn)
        t.append_policy_tokens(turn.completion)
        turns.append(turn)
        seen.append(turn.client_ids)
    if t.turns == 0:
        raise BrokenEpisode(f"the response contains no turn of the policy{_reason(response)}")
    if response.get("incomplete_details"):
        t.finish_reason = "length"
    return turns


def _continue(t: Transcript, seen: Sequence[np.ndarray], turn: Turn) -> None:
    """Append the tokens of a turn's prompt, after the turn that the prompt continues or in a new context.

    Args:
        seen: for each earlier turn, the ``client_ids`` of all tokens up to its end.
    """
    prompt = turn.client_ids[: len(turn.prompt_ids)]
    for earlier in sorted(range(len(seen)), key=lambda k: -len(seen[k])):
        length = len(seen[earlier])
        if length <= len(prompt) and np.array_equal(prompt[:length], seen[earlier]):
            if earlier != t.turns - 1:
                t.return_to(earlier)
            new = tuple(placed for placed in turn.images if placed.start >= length)
            t.append_env_tokens(turn.prompt_ids[length:], moved(new, -length))
            return
    t.begin_context(turn.prompt_ids, turn.images)


def _reason(response: Mapping[str, Any]) -> str:
    """Format the reason why a response is incomplete, for example max_output_tokens if the prompt did not fit."""
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, Mapping) else None
    return f" ({printable(str(reason), 40)})" if reason else ""


def _ids(value: Any) -> np.ndarray:
    if not are_token_ids(value, _MAX_TOKENS):
        raise BrokenEpisode("bad_reply: token ids are not a list of integers")
    return np.array(value, np.int64)
