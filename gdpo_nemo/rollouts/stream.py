"""The stream of rollouts: batch k of prompts, sampled, verified, complete.

One path serves synchronous and asynchronous training. Batch k is trained by update k + 1, on weights of version k, so
it may be sampled by any version from k - max_staleness on. ``schedule(version)`` starts every batch that this rule
allows: with 0 exactly the next one, with 1 also the one after it, which the engines sample while the policy trains. The
engines serve calls in order, so new weights reach them only behind the calls already submitted.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Sequence

import numpy as np

from gdpo_nemo.cluster.fleet import EngineFleet, Ticket
from gdpo_nemo.config.layout import prompts_per_round, updates_per_step
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.prompts import PromptSource
from gdpo_nemo.data.records import Group, Outcome, Prompt, TrainerState, Trajectory
from gdpo_nemo.environments.execution.executor import EnvironmentExecutor
from gdpo_nemo.generation.requests import CompletionBatch, SampleRequest, Sampling
from gdpo_nemo.rollouts.functions import RolloutRunner, SamplingJob, needs_verdict
from gdpo_nemo.rollouts.learning import part_with_signal
from gdpo_nemo.waits import waiting

Span = tuple[str, str, float, float]
"""(lane, name, start, end) in seconds since the epoch, for the trace."""


@dataclass
class Rollout:
    """Complete groups of one step, with the time they took."""

    groups: list[Group]
    next_position: int
    """Prompts consumed since the start of training once this rollout is trained."""
    generation_s: float = 0.0
    verify_s: float = 0.0
    rounds: int = 1
    dropped_groups: int = 0
    """Groups that dynamic sampling did not keep."""
    spans: list[Span] = field(default_factory=list)
    version: int | None = None
    """Of the weights that its step starts from."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, group by group."""
        return [t for group in self.groups for t in group.trajectories]


class RolloutStream:
    """Makes rollouts ahead of the trainer, never further than the staleness bound.

    Args:
        position: prompts consumed by earlier steps: 0, or the checkpoint's number.
        step: steps done; the next batch is number ``step``.
        limit: prompts of the whole run (``gdpo.max_num_epochs``); None: as many as the steps take.
        updates: optimizer updates done, and those of the whole run, as reward functions are told.
    """

    def __init__(
        self,
        config: Config,
        prompts: PromptSource,
        fleet: EngineFleet,
        pool: EnvironmentExecutor,
        tokenizer: Any,
        position: int,
        step: int,
        limit: int | None = None,
        updates: tuple[int, int] = (0, 1),
    ):
        self._config = config
        self._prompts = prompts
        self._fleet = fleet
        self._pool = pool
        self._tokenizer = tokenizer
        generation = config.policy.generation
        self._sampling = Sampling(
            generation.temperature,
            generation.top_p,
            generation.top_k,
            generation.max_new_tokens,
            tuple(generation.stop_strings),
        )
        self._player = RolloutRunner(config, fleet, pool, tokenizer)
        self._position = position
        self._next = step
        self._first = step
        self._done = step
        self._consumed = position
        self._updates = updates
        self._limit = limit
        self._pending: dict[int, Future[Rollout]] = {}
        # One thread, concurrent with training in the main thread: rollouts are finished in their order.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rollouts")

    def schedule(self, version: int) -> None:
        """Start every batch that weights of ``version`` may sample."""
        count = prompts_per_round(self._config)
        last = min(version + self._config.rollout.max_staleness, self._config.gdpo.max_num_steps - 1)
        while self._next <= last and count <= self._left():
            # Submitted here and not in the worker thread: the engines must have the call before the next weights.
            ticket, prompts = self._submit(self._position, count)
            self._position += count
            state = self.trainer_state(self._next, self._position - count)
            self._pending[self._next] = self._worker.submit(self._complete, ticket, prompts, self._position, state)
            self._next += 1

    def trainer_state(self, step: int, position: int) -> TrainerState:
        """What reward functions are told with the batch of ``step``, the prompts before ``position`` being dealt."""
        done, total = self._updates
        done += (step - self._first) * updates_per_step(self._config)
        return TrainerState(done, total, position / len(self._prompts))

    def get_batch(self, step: int) -> Rollout:
        """Wait for the rollout of batch ``step`` and return it.

        Raises:
            RunError: engines or environments failed for good.
        """
        with waiting(f"batch {step}", "rollouts"):
            rollout = self._pending.pop(step).result()
        self._done = step + 1
        self._consumed = rollout.next_position
        rollout.version = step
        return rollout

    @property
    def in_flight(self) -> int:
        """Number of batches under way or finished but not yet consumed."""
        return len(self._pending)

    def close(self) -> None:
        """Drop the batches in flight without waiting for them."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._player.close()

    def _left(self) -> float:
        """Prompts that are left of the limit."""
        return float("inf") if self._limit is None else self._limit - self._position

    # -- one batch ----------------------------------------------------------------------------------------------

    def _submit(self, position: int, count: int) -> tuple[Ticket | None, list[Prompt]]:
        prompts = self._prompts.batch(position, count)
        if self._player.plays(prompts[0]):
            return None, prompts
        samples = self._config.gdpo.num_generations_per_prompt
        requests = [
            SampleRequest(prompt.token_ids, sample_seed(self._config.run.seed, position + place, j))
            for place, prompt in enumerate(prompts)
            for j in range(samples)
        ]
        return self._fleet.submit(requests, self._sampling), prompts

    def _complete(self, ticket: Ticket | None, prompts: list[Prompt], position: int, state: TrainerState) -> Rollout:
        rollout = self._verified(ticket, prompts, position, state)
        if self._config.gdpo.dynamic_sampling.enabled:
            self._replace_dead(rollout, state)
        return rollout

    def _verified(self, ticket: Ticket | None, prompts: list[Prompt], position: int, state: TrainerState) -> Rollout:
        if ticket is None:
            return self._run_function(prompts, position, state)
        batch = self._fleet.collect(ticket)
        sampled = time.time()
        groups = grouped(prompts, batch, self._tokenizer)
        apply_verdicts([t for g in groups for t in g.trajectories], self._pool, state)
        verified = time.time()
        spans = [
            ("rollout", f"sample {len(batch.completions)}", sampled - batch.seconds, sampled),
            ("verify", f"verify {len(batch.completions)}", sampled, verified),
        ]
        return Rollout(groups, position, batch.seconds, verified - sampled, spans=spans)

    def _run_function(self, prompts: list[Prompt], position: int, state: TrainerState) -> Rollout:
        """Run the rollout function of the batch, which calls engines and environments itself."""
        start = time.time()
        first = position - len(prompts)
        seed = partial(sample_seed, self._config.run.seed)
        asked = SamplingJob(
            self._sampling, self._config.gdpo.num_generations_per_prompt, lambda i, j, turn: seed(first + i, j, turn)
        )
        groups, sampling = self._groups(prompts, asked, state)
        end = time.time()
        spans = [("rollout", f"play {len(prompts) * asked.samples}", start, end)]
        return Rollout(groups, position, sampling, end - start - sampling, spans=spans)

    def _groups(self, prompts: Sequence[Prompt], asked: SamplingJob, state: TrainerState) -> tuple[list[Group], float]:
        """Groups by the environment's rollout function, and the seconds that the engines took for them."""
        made, seconds = self._player.play(prompts, asked)
        apply_verdicts([t for group in made for t in group if needs_verdict(t)], self._pool, state)
        return [Group(prompt, trajectories) for prompt, trajectories in zip(prompts, made)], seconds

    def _replace_dead(self, rollout: Rollout, state: TrainerState) -> None:
        """Dynamic sampling: further prompts for groups in which every weighted component is constant.

        Only without staleness, so no other batch is in flight and the positions stay consecutive.
        """
        wanted = self._config.gdpo.num_prompts_per_step
        dynamic = self._config.gdpo.dynamic_sampling
        drawn = len(rollout.groups)
        per_round = prompts_per_round(self._config) if dynamic.batch_multiplier else 0
        size = self._config.gdpo.num_generations_per_prompt
        kept, spare = self._split_by_signal(rollout.groups)
        while (
            (missing := wanted * size - _samples(kept)) > 0 and rollout.rounds < dynamic.max_rounds and self._left() > 0
        ):
            position = self._position
            count = int(min(per_round or -(-missing // size), self._left()))
            self._position += count
            extra = self._verified(*self._submit(position, count), position=self._position, state=state)
            kept += self._split_by_signal(extra.groups)[0]
            rollout.next_position = self._position
            rollout.generation_s += extra.generation_s
            rollout.verify_s += extra.verify_s
            rollout.spans += extra.spans
            rollout.rounds += 1
            drawn += count
        # The batch keeps its size, which the layout divides: groups without a replacement stay, with advantage 0.
        rollout.groups = _cut(kept + spare, wanted * size)
        # At least 0: both parts of a group that was split may be kept, and then count as two.
        rollout.dropped_groups = max(0, drawn - len(rollout.groups))

    def _split_by_signal(self, groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        """Split groups into the parts that dynamic sampling keeps and the rest."""
        kept = []
        spare = []
        for group in groups:
            part = part_with_signal(group, self._config)
            chosen = {t.sample_index for t in part.trajectories} if part else set()
            rest = [t for t in group.trajectories if t.sample_index not in chosen]
            kept += [part] if part else []
            spare += [Group(group.prompt, rest)] if rest else []
        return kept, spare

    # -- validation ---------------------------------------------------------------------------------------------

    def evaluate(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Sample and verify held-out prompts with the engines' current weights; seeds are the same at every call."""
        state = self.trainer_state(self._done, self._consumed)
        gdpo = self._config.gdpo
        generation = self._config.policy.generation
        sampling = Sampling(gdpo.val_temperature, 1.0, -1, generation.max_new_tokens, tuple(generation.stop_strings))
        if self._player.plays(prompts[0]):
            seed = partial(sample_seed, self._config.run.seed)
            asked = SamplingJob(sampling, gdpo.val_generations_per_prompt, lambda i, j, turn: seed(-1 - i, j, turn))
            return self._groups(prompts, asked, state)[0]
        requests = [
            SampleRequest(prompt.token_ids, sample_seed(self._config.run.seed, -1 - place, j))
            for place, prompt in enumerate(prompts)
            for j in range(gdpo.val_generations_per_prompt)
        ]
        groups = grouped(prompts, self._fleet.collect(self._fleet.submit(requests, sampling)), self._tokenizer)
        apply_verdicts([t for g in groups for t in g.trajectories], self._pool, state)
        return groups


def _samples(groups: Sequence[Group]) -> int:
    return sum(len(group.trajectories) for group in groups)


def _cut(groups: Sequence[Group], count: int) -> list[Group]:
    """The first ``count`` samples; the last group is cut where they end."""
    chosen: list[Group] = []
    for group in groups:
        left = count - _samples(chosen)
        if left <= 0:
            break
        chosen.append(group if len(group.trajectories) <= left else Group(group.prompt, group.trajectories[:left]))
    return chosen


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


def grouped(prompts: Sequence[Prompt], batch: CompletionBatch, tokenizer: Any) -> list[Group]:
    """Groups of trajectories without verdicts, from completions in the order of the prompts."""
    per_prompt = len(batch.completions) // len(prompts)
    texts = tokenizer.batch_decode([c.token_ids.tolist() for c in batch.completions], skip_special_tokens=True)
    groups = []
    for place, prompt in enumerate(prompts):
        span = range(place * per_prompt, (place + 1) * per_prompt)
        trajectories = [
            Trajectory(
                prompt=prompt,
                sample_index=j,
                completion_ids=batch.completions[i].token_ids,
                logprobs=batch.completions[i].logprobs,
                policy_version=batch.version,
                text=texts[i],
                finish_reason=batch.completions[i].finish_reason,
            )
            for j, i in enumerate(span)
        ]
        groups.append(Group(prompt, trajectories))
    return groups


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
        trajectory.detail = verdict.detail
        trajectory.extra = dict(verdict.extra)
        trajectory.metrics = dict(verdict.metrics)
        if verdict.outcome is not Outcome.OK:
            trajectory.outcome = verdict.outcome
        elif trajectory.finish_reason == "length":
            trajectory.outcome = Outcome.TRUNCATED
