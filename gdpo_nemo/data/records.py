"""The records that travel from prompt to update, one type per stage.

Prompt -> Trajectory (one sample with its verdict) -> Group (all samples of one prompt). Arrays are NumPy on the driver;
torch begins at the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Mapping, Sequence

import numpy as np


class Outcome(StrEnum):
    """How a trajectory ended. Only OK and TRUNCATED are trained on; the others are masked and counted."""

    OK = "ok"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    ENV_FAILED = "env_failed"


NOT_CONTIGUOUS = "not_contiguous"
"""First word of ``Trajectory.detail`` where a turn did not go on from the exact tokens before it."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``id`` is unique and stable over epochs and resumes; groups are formed by it and by nothing else."""

    id: str
    token_ids: np.ndarray
    """int32 [prompt tokens]"""
    text: str
    """The rendered prompt, for logs and for reward functions."""
    environment: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The remaining columns of the row, as reward functions receive them."""
    messages: Sequence[Mapping[str, str]] | None = None
    answer_ids: np.ndarray | None = None
    """int32 [answer tokens], what the data itself goes on with; of the anchors of a text alone
    (``data.<split>.strided``)."""


@dataclass(frozen=True)
class TrainerState:
    """How far the run is when a batch is rewarded: the fields of TRL's ``trainer_state`` that a run here has."""

    global_step: int = 0
    """Optimizer updates done before the batch is trained; several in a step where train_global_batch_size says so."""
    max_steps: int = 1
    """Optimizer updates of the whole run; 1 where nothing is trained, because functions divide by it."""
    epoch: float = 0.0
    """Passes over the training prompts that were dealt before the batch."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has no {name!r} here; it has global_step, max_steps and epoch")


@dataclass
class Trajectory:
    """One sampled completion, of one turn or several, with everything training and verification need."""

    prompt: Prompt
    sample_index: int
    completion_ids: np.ndarray
    """int32 [completion tokens], exactly as sampled, never re-tokenised. With several turns: all that follows the
    prompt, the environment's tokens between the turns included."""
    logprobs: np.ndarray
    """float32 [completion tokens], the sampler's log-probs of those tokens; NaN on tokens of the environment."""
    policy_version: int
    """Updates that the sampling weights had seen."""
    text: str
    """The decoded completion, without special tokens."""
    finish_reason: str
    """stop or length, from the engine."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    outcome: Outcome = Outcome.OK
    detail: str = ""
    """What went wrong, when something did."""
    loss_mask: np.ndarray | None = None
    """bool [completion tokens]: true where the policy wrote; None: everywhere."""
    turns: int = 1
    """Turns that the policy took."""
    trainer_state: TrainerState | None = None
    """How far the run is, for verifiers that ask."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the verifier wants written beside the sample, by column."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the verifier logged for the call in which it judged the sample, by name."""
    turn_tokens: tuple[int, ...] = ()
    """Tokens that the policy wrote in each turn; empty: one turn, or nobody noted them."""
    turn_rewards: tuple[Mapping[str, float | None], ...] = ()
    """What of ``rewards`` each turn earned; components that none has, and all where it is empty, the last one did."""
    spans: tuple[tuple[int, int], ...] = ()
    """((version, tokens), ...): which weights wrote the policy's tokens, in order; empty: ``policy_version`` all."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The turns behind the prompt as chat messages of the policy and the environment, for verifiers. None: the policy
    wrote one turn, or the turns were not recorded."""

    @property
    def num_policy_tokens(self) -> int:
        """Tokens of the completion that the policy wrote."""
        return len(self.completion_ids) if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))

    @property
    def trains(self) -> bool:
        """Whether this trajectory may carry an advantage."""
        return self.outcome in (Outcome.OK, Outcome.TRUNCATED)


@dataclass
class Group:
    """The trajectories of one prompt id."""

    prompt: Prompt
    trajectories: list[Trajectory]
    position: int = -1
    """Prompts dealt before this one since the start of the run; -1: not one of the training's."""


@dataclass(frozen=True)
class Verdict:
    """What an environment says about one completion: named components, None for 'not applicable'."""

    rewards: Mapping[str, float | None]
    outcome: Outcome = Outcome.OK
    detail: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Plain values to be written beside the sample, by column."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the call, the same for all samples that it judged."""
    turn_rewards: Sequence[Mapping[str, float | None]] = ()
    """What of ``rewards`` each turn of the policy earned, for ``gdpo.credit: turn``; empty: the last one did."""
