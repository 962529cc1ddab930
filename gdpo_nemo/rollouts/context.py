"""What a rollout function gets, what it owes, and the check that it delivered.

``rollout.function: file.py:function`` puts a function of yours in place of the built-in loop. It is called as
``function(prompts, context)`` in the driver's rollout thread, for every batch and for validation, and returns for each
prompt, in order, a list of ``context.samples`` trajectories. ``Transcript`` builds one: it keeps every token as it was
sampled, so that ids, mask and log-probs cannot drift apart. Trajectories without rewards are given to the prompt's
environment to verify. The function may call ``context.sample`` as often as it likes and must not keep prompts or
completions for a later call: what it returns for equal arguments and weights has to be equal, or a resumed run differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Callable, Mapping, Protocol, Sequence

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
    endpoint: Endpoint | None = None
    """Where agents find the policy, with ``rollout.endpoint.enabled``. Sample inside ``endpoint.service.phase``."""


class RolloutFunction(Protocol):
    """See the top of the file."""

    def __call__(self, prompts: Sequence[Prompt], context: RolloutContext) -> list[list[Trajectory]]:
        """Trajectories of each prompt."""
        ...


@dataclass
class Transcript:
    """A trajectory while it is being played."""

    prompt: Prompt
    sample_index: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turns: int = 0
    version: int | None = None
    """Of the oldest weights that wrote in it."""
    finish_reason: str = "stop"
    rewards: dict[str, float | None] = field(default_factory=dict)
    outcome: Outcome = Outcome.OK
    detail: str = ""

    def __len__(self) -> int:
        return len(self.prompt.token_ids) + len(self.ids)

    @property
    def num_policy_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return sum(self.mask)

    @property
    def token_ids(self) -> np.ndarray:
        """int32: everything so far, the prompt of the next turn."""
        ids: np.ndarray = np.concatenate([self.prompt.token_ids, np.array(self.ids, np.int32)]).astype(np.int32)
        return ids

    def append_policy_tokens(self, completion: Completion, version: int) -> None:
        """Append a turn of the policy."""
        self.ids += completion.token_ids.tolist()
        self.logprobs += completion.logprobs.tolist()
        self.mask += [True] * len(completion.token_ids)
        self.version = version if self.version is None else min(self.version, version)
        self.turns = self.turns + 1
        self.finish_reason = completion.finish_reason

    def append_env_tokens(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens of the environment, which are never trained."""
        self.ids += [int(token) for token in token_ids]
        self.logprobs += [math.nan] * len(token_ids)
        self.mask += [False] * len(token_ids)

    def add_rewards(self, rewards: Mapping[str, float | None]) -> None:
        """Add rewards up; None leaves a component as it is."""
        for name, value in rewards.items():
            before = self.rewards.get(name)
            self.rewards[name] = before if value is None else value + (before or 0.0)

    def trajectory(self, conversation: Conversation, version: int) -> Trajectory:
        """The finished trajectory; ``version`` is that of one in which the policy wrote nothing."""
        if self.outcome is Outcome.OK and self.finish_reason == "length":
            self.outcome = Outcome.TRUNCATED
        return Trajectory(
            prompt=self.prompt,
            sample_index=self.sample_index,
            completion_ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            policy_version=version if self.version is None else self.version,
            text=conversation.text(self.ids),
            finish_reason=self.finish_reason,
            rewards=self.rewards,
            outcome=self.outcome,
            detail=self.detail,
            loss_mask=np.array(self.mask, bool),
            turns=self.turns,
        )


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
            fault = _fault(trajectory, prompt, context)
            if fault:
                raise RunError(f"{name}: prompt {prompt.id}, sample {trajectory.sample_index}: {fault}")
    return made


def _fault(t: Trajectory, prompt: Prompt, context: RolloutContext) -> str | None:
    count = len(t.completion_ids)
    if t.prompt.id != prompt.id:
        return f"belongs to prompt {t.prompt.id}"
    if len(t.logprobs) != count or (t.loss_mask is not None and len(t.loss_mask) != count):
        return "ids, log-probs and mask differ in length"
    if not t.trains:
        return None
    if not t.num_policy_tokens:
        return f"the policy wrote nothing, but the outcome is {t.outcome}"
    if len(t.prompt.token_ids) + count > context.max_sequence:
        return f"{len(t.prompt.token_ids) + count} tokens are more than policy.max_total_sequence_length"
    chosen = t.logprobs if t.loss_mask is None else t.logprobs[t.loss_mask]
    # Written so that NaN fails, too.
    if not np.all(chosen <= _ROUNDING) or not np.isfinite(chosen).all():
        return "a log-prob of a token that the policy wrote is no finite number of at most 0"
    return None
