"""What a step trains: groups of judged trajectories, and the seeds that they are drawn with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Sequence

import numpy as np

from gdpo_nemo.data.records import Group, Outcome, Prompt, TrainerState, Trajectory
from gdpo_nemo.environments.execution.executor import EnvironmentExecutor
from gdpo_nemo.generation.requests import Completion
from gdpo_nemo.rollouts.prompt_stream import Span


@dataclass
class Rollout:
    """Complete groups of one step, with the time they took."""

    groups: list[Group]
    next_position: int
    """Prompts trained or dropped since the start of training once this rollout is trained."""
    generation_s: float = 0.0
    verify_s: float = 0.0
    rounds: int = 1
    dropped_groups: int = 0
    """Groups that dynamic sampling did not keep."""
    dropped: list[tuple[int, str]] = field(default_factory=list)
    """(position, reason) of what was given up since the step before."""
    again: list[int] = field(default_factory=list)
    """Positions of the groups at its end that an earlier step trained first."""
    measured: dict[str, float] = field(default_factory=dict)
    """Metrics of engines and queue."""
    spans: list[Span] = field(default_factory=list)
    version: int | None = None
    """Of the weights that its step starts from."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, group by group."""
        return [t for group in self.groups for t in group.trajectories]


def sample_seed(run_seed: int, position: int, sample: int, turn: int = 0) -> int:
    """Seed of one sample: from the run's seed, the prompt's position in the run (negative: validation), sample and
    turn.

    Independent of engines, batches and resumes, so that a lost sample is sampled again exactly.
    """
    # Entropy must be non-negative, so the sign is a separate entry. Turn 0 adds none: a first turn has the seed of a
    # single-turn sample.
    entropy = [run_seed, abs(position), int(position < 0), sample, *([turn] if turn else [])]
    # 31 bits: non-negative as a signed 32-bit integer, too.
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)


def sampled(prompt: Prompt, sample: int, completion: Completion) -> Trajectory:
    """A trajectory of one turn without text and verdict."""
    return Trajectory(
        prompt=prompt,
        sample_index=sample,
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        policy_version=completion.version,
        text="",
        finish_reason=completion.finish_reason,
        spans=completion.spans,
    )


def aborted(prompt: Prompt, sample: int, version: int, reason: str) -> Trajectory:
    """A trajectory that was given up: counted, and masked."""
    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Trajectory(prompt, sample, *nothing, version, "", "abort", outcome=Outcome.ABORTED, detail=reason)


def decode(trajectories: Sequence[Trajectory], tokenizer: Any) -> None:
    """Fill in the texts of trajectories of one turn."""
    texts = tokenizer.batch_decode([t.completion_ids.tolist() for t in trajectories], skip_special_tokens=True)
    for trajectory, text in zip(trajectories, texts):
        trajectory.text = text


def apply_verdicts(
    trajectories: Sequence[Trajectory], pool: EnvironmentExecutor, state: TrainerState | None = None
) -> None:
    """Fill in rewards and outcomes. A failure of the environment is an outcome, never a reward.

    ``state`` goes to the environments with the trajectories.
    """
    for trajectory in trajectories:
        trajectory.trainer_state = state
    for trajectory, verdict in zip(trajectories, pool.verify(trajectories)):
        trajectory.rewards = dict(verdict.rewards)
        trajectory.turn_rewards = tuple(dict(rewards) for rewards in verdict.turn_rewards)
        trajectory.detail = verdict.detail
        trajectory.extra = dict(verdict.extra)
        trajectory.metrics = dict(verdict.metrics)
        if verdict.outcome is not Outcome.OK:
            trajectory.outcome = verdict.outcome
        elif (
            trajectory.finish_reason == "length" and trajectory.prompt.answer_ids is None
        ):  # else it is as long as asked
            trajectory.outcome = Outcome.TRUNCATED


def num_samples(groups: Sequence[Group]) -> int:
    """Trajectories of groups."""
    return sum(len(group.trajectories) for group in groups)


def cut(groups: Sequence[Group], count: int) -> list[Group]:
    """The first ``count`` samples; the last group is cut where they end."""
    chosen: list[Group] = []
    for group in groups:
        left = count - num_samples(chosen)
        if left <= 0:
            break
        whole = len(group.trajectories) <= left
        chosen.append(group if whole else Group(group.prompt, group.trajectories[:left], group.position))
    return chosen
