"""What a rollout function gets, what it owes, and the check that it delivered.

``rollout.function: file.py:function`` puts a function of yours in place of the built-in loop. It is called as
``function(prompts, context)`` in a thread of the driver, and returns for each prompt, in order, a list of
``context.samples`` trajectories. With ``rollout.max_staleness`` 0 a call has the prompts of a whole batch; above 0 it
has one, and several calls run at once, in threads of their own. One that takes longer than ``rollout.group_timeout_s``
is given up: its samples are aborted, and its ``context.sample`` raises from then on.

``Transcript`` builds a trajectory: it keeps every token as it was sampled, so that ids, mask and log-probs cannot drift
apart. Trajectories without rewards are given to the prompt's environment to verify. The function may call
``context.sample`` as often as it likes and must not keep prompts or completions for a later call: what it returns for
equal arguments and weights has to be equal, or a resumed run differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Mapping, Protocol, Sequence

import numpy as np

from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.records import Outcome, Prompt, Trajectory
from gdpo_nemo.environments.execution.executor import EnvironmentExecutor
from gdpo_nemo.errors import RunError
from gdpo_nemo.generation.requests import Completion, CompletionBatch, SampleRequest, Sampling

if TYPE_CHECKING:
    from gdpo_nemo.endpoint.server import Endpoint

_ROUNDING = 1e-4


@dataclass(frozen=True)
class RolloutContext:
    """The means of a rollout function for one batch."""

    samples: int
    """Trajectories per prompt."""
    seed: Callable[[int, int, int], int]
    """(prompt's place in the batch, sample, turn) -> seed of that completion."""
    sample: Callable[[Sequence[SampleRequest]], CompletionBatch]
    """Draws completions on the engines with the settings of the batch; waits for them."""
    conversation: Conversation
    """Turns messages into the tokens of a prompt or of a continuation."""
    pool: EnvironmentExecutor
    """The environments of the config, in their worker processes."""
    max_turns: int
    max_tokens: int
    """Tokens that the policy may write in one trajectory."""
    max_new_tokens: int
    """Tokens that it may write in one turn."""
    max_sequence: int
    """Tokens of prompt and completion together."""
    sampling: Sampling
    """The settings of the batch."""
    version: int = 0
    """Of the weights that were published when the call began, for trajectories in which the policy writes nothing."""
    endpoint: Endpoint | None = None
    """Where agents find the policy, with ``rollout.endpoint.enabled``. Sample inside ``endpoint.service.phase``."""


class RolloutFunction(Protocol):
    """See the top of the file."""

    def __call__(self, prompts: Sequence[Prompt], context: RolloutContext) -> list[list[Trajectory]]:
        """Trajectories of each prompt."""
        ...


class Transcript:
    """A trajectory while it is being played."""

    def __init__(self, prompt: Prompt, sample_index: int):
        self.prompt = prompt
        self.sample_index = sample_index
        self.turns = 0
        self.finish_reason = "stop"
        self.rewards: dict[str, float | None] = {}
        self.outcome = Outcome.OK
        self.detail = ""
        self.messages: list[Mapping[str, Any]] = []
        """Turns behind the prompt, for verifiers; empty if the caller does not record them."""
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._written: list[bool] = []
        """Of each piece of ``_ids`` and ``_logprobs``, whether the policy wrote it."""
        self._spans: list[tuple[int, int]] = []
        self._turn_tokens: list[int] = []
        self._turn_rewards: dict[int, dict[str, float | None]] = {}
        """By turn, from 0. What is given before the policy's first turn counts as that one's."""
        self._length = 0
        self._policy_tokens = 0

    def __len__(self) -> int:
        return len(self.prompt.token_ids) + self._length

    @property
    def num_policy_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return self._policy_tokens

    @property
    def ids(self) -> np.ndarray:
        """int32: everything behind the prompt."""
        return _joined(self._ids, np.int32)

    @property
    def logprobs(self) -> np.ndarray:
        """float32: the sampler's log-probs of ``ids``; NaN on tokens of the environment."""
        return _joined(self._logprobs, np.float32)

    @property
    def mask(self) -> np.ndarray:
        """bool: where of ``ids`` the policy wrote."""
        return np.repeat(np.array(self._written, bool), [len(piece) for piece in self._ids])

    @property
    def token_ids(self) -> np.ndarray:
        """int32: everything so far, the prompt of the next turn."""
        return _joined([self.prompt.token_ids, *self._ids], np.int32)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """((version, tokens), ...): which weights wrote the policy's tokens, in order."""
        return tuple(self._spans)

    @property
    def version(self) -> int | None:
        """Of the oldest weights that wrote in it; None before the policy's first turn."""
        return min((version for version, _ in self._spans), default=None)

    def append_policy_tokens(self, completion: Completion, version: int | None = None) -> None:
        """Append a turn of the policy.

        Args:
            version: of the weights that drew it, for a completion without spans.
        """
        drawn = completion.spans
        if not drawn and version is not None:
            drawn = ((version, len(completion.token_ids)),)
        for by, tokens in drawn:
            if self._spans and self._spans[-1][0] == by:
                tokens += self._spans.pop()[1]
            self._spans.append((by, tokens))
        self._append(completion.token_ids, completion.logprobs, written=True)
        self.turns += 1
        self._turn_tokens.append(len(completion.token_ids))
        self.finish_reason = completion.finish_reason

    def append_env_tokens(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens of the environment, which are never trained."""
        self._append(token_ids, np.full(len(token_ids), np.nan), written=False)

    def _append(self, ids: Sequence[int] | np.ndarray, logprobs: np.ndarray, written: bool) -> None:
        self._ids.append(np.asarray(ids, np.int32))
        self._logprobs.append(np.asarray(logprobs, np.float32))
        self._written.append(written)
        self._length += len(ids)
        self._policy_tokens += len(ids) * written

    def add_rewards(self, rewards: Mapping[str, float | None]) -> None:
        """Add rewards up, over all turns and for the last one so far; None leaves a component as it is."""
        earned = self._turn_rewards.setdefault(max(0, self.turns - 1), {})
        for name, value in rewards.items():
            for totals in (self.rewards, earned):
                before = totals.get(name)
                totals[name] = before if value is None else value + (before or 0.0)

    def _rewards_by_turn(self) -> tuple[dict[str, float | None], ...]:
        """What each turn earned; empty where nobody gave rewards step by step."""
        return tuple(self._turn_rewards.get(turn, {}) for turn in range(self.turns)) if self._turn_rewards else ()

    def trajectory(self, conversation: Conversation, version: int = 0) -> Trajectory:
        """The finished trajectory; ``version`` is that of one in which the policy wrote nothing."""
        if self.outcome is Outcome.OK and self.finish_reason == "length":
            self.outcome = Outcome.TRUNCATED
        ids = self.ids
        oldest = self.version
        return Trajectory(
            prompt=self.prompt,
            sample_index=self.sample_index,
            completion_ids=ids,
            logprobs=self.logprobs,
            policy_version=version if oldest is None else oldest,
            text=conversation.text(ids),
            finish_reason=self.finish_reason,
            rewards=self.rewards,
            outcome=self.outcome,
            detail=self.detail,
            loss_mask=self.mask,
            turns=self.turns,
            turn_tokens=tuple(self._turn_tokens),
            turn_rewards=self._rewards_by_turn(),
            spans=self.spans,
            messages=tuple(self.messages) or None,
        )


def _joined(pieces: Sequence[np.ndarray], kind: type) -> np.ndarray:
    return np.concatenate(pieces).astype(kind, copy=False) if pieces else np.zeros(0, kind)


def checked(made: object, prompts: Sequence[Prompt], context: RolloutContext, name: str) -> list[list[Trajectory]]:
    """What a rollout function returned, if it is what the contract asks for.

    Raises:
        RunError: one sentence on what is not.
    """
    if not isinstance(made, list) or len(made) != len(prompts):
        raise RunError(f"{name}: must return one list of trajectories per prompt ({len(prompts)})")
    for prompt, trajectories in zip(prompts, made):
        if not isinstance(trajectories, list) or not all(isinstance(t, Trajectory) for t in trajectories):
            raise RunError(f"{name}: must return lists of Trajectory; Transcript.trajectory makes them")
        if [t.sample_index for t in trajectories] != list(range(context.samples)):
            raise RunError(f"{name}: prompt {prompt.id}: wants samples 0 to {context.samples - 1}, in order")
        for trajectory in trajectories:
            check_trajectory(trajectory, prompt, context.max_sequence, name)
    return made


def check_trajectory(trajectory: Trajectory, prompt: Prompt, max_sequence: int, name: str) -> None:
    """Refuses a trajectory of ``prompt`` that cannot be trained. Raises RunError, which begins with ``name``."""
    fault = _fault(trajectory, prompt, max_sequence)
    if fault:
        raise RunError(f"{name}: prompt {prompt.id}, sample {trajectory.sample_index}: {fault}")


def _fault(t: Trajectory, prompt: Prompt, max_sequence: int) -> str | None:
    count = len(t.completion_ids)
    if t.prompt.id != prompt.id:
        return f"belongs to prompt {t.prompt.id}"
    if len(t.logprobs) != count or (t.loss_mask is not None and len(t.loss_mask) != count):
        return "ids, log-probs and mask differ in length"
    if not t.trains:
        return None
    if not t.num_policy_tokens:
        return f"the policy wrote nothing, but the outcome is {t.outcome}"
    if t.turn_tokens and sum(t.turn_tokens) != t.num_policy_tokens:
        return "the tokens of its turns do not add up to those that the policy wrote"
    if t.turn_rewards and len(t.turn_rewards) != len(t.turn_tokens):
        return f"has rewards of {len(t.turn_rewards)} turns and tokens of {len(t.turn_tokens)}"
    if t.spans and sum(tokens for _, tokens in t.spans) != t.num_policy_tokens:
        return "the spans of versions do not add up to the tokens that the policy wrote"
    if len(t.prompt.token_ids) + count > max_sequence:
        return f"{len(t.prompt.token_ids) + count} tokens are more than policy.max_total_sequence_length"
    chosen = t.logprobs if t.loss_mask is None else t.logprobs[t.loss_mask]
    # Written so that NaN fails, too.
    if not np.all(chosen <= _ROUNDING) or not np.isfinite(chosen).all():
        return "a log-prob of a token that the policy wrote is no finite number of at most 0"
    return None
