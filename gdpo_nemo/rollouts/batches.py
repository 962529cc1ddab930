"""Training batches: sampled groups, dataset rows for algorithms that do not sample, and recorded batches of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gdpo_nemo.algorithms.rubrics import restored
from gdpo_nemo.config.layout import prompts_per_round
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.images import Images
from gdpo_nemo.data.prompts import PromptSource, with_unique_ids
from gdpo_nemo.data.records import Group, Outcome, Prompt, TrainerState, Trajectory, trajectories_of
from gdpo_nemo.environments.execution.pools import EnvironmentExecutor
from gdpo_nemo.generation.requests import Completion
from gdpo_nemo.observe.journal import JournalEntry, read_journal, sample_hash
from gdpo_nemo.observe.sample_images import RecordedImages, split_images
from gdpo_nemo.observe.samples import read_rollouts, rollout_files
from gdpo_nemo.utils.errors import RunError, first_line

if TYPE_CHECKING:
    from gdpo_nemo.data.replies import ReplyParser


@dataclass
class Rollout:
    """Groups that one step trains, with timing and metrics."""

    groups: list[Group]
    next_position: int
    """Number of prompts trained or dropped since the start of training, including the prompts of this rollout."""
    generation_s: float = 0.0
    verify_s: float = 0.0
    rounds: int = 1
    dropped_groups: int = 0
    """Number of groups that dynamic sampling rejected."""
    dropped: list[tuple[int, str]] = field(default_factory=list)
    """(prompt index, reason) of each prompt dropped since the previous step."""
    again: list[int] = field(default_factory=list)
    """Prompt indices of the groups reused from earlier steps. The reused groups are at the end of ``groups``."""
    measured: dict[str, float] = field(default_factory=dict)
    """Metrics of the engines and the queue."""
    spans: list[Span] = field(default_factory=list)
    version: int | None = None
    """Version of the weights that the step starts from. None if unknown."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of the components with a constraint or schedule, which ``GDPO.prepare`` sets for the journal."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, in group order."""
        return trajectories_of(self.groups)


def make_prompt_ids_unique(groups: Sequence[Group]) -> None:
    """Make the prompt ids of a batch unique. A batch may contain the same prompt several times, from different
    epochs."""
    for group, prompt in zip(groups, with_unique_ids([group.prompt for group in groups])):
        if prompt is not group.prompt:
            group.prompt = prompt
            for trajectory in group.trajectories:
                trajectory.prompt = replace(trajectory.prompt, id=prompt.id)


def sample_seed(run_seed: int, position: int, sample: int, turn: int = 0) -> int:
    """Return the seed of one sample.

    The seed depends on the run's seed, the prompt's index in the run (negative for validation), the sample and the
    turn. The seed does not depend on engines, batches or resumes, so that a lost sample is reproduced exactly.
    """
    # Entropy must be non-negative, so the sign is a separate entry. Turn 0 does not add an entry, so the first turn has
    # the same seed as a single-turn sample.
    entropy = [run_seed, abs(position), int(position < 0), sample, *([turn] if turn else [])]
    # 31 bits: also non-negative as a signed 32-bit integer.
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)


def sampled(prompt: Prompt, sample: int, completion: Completion) -> Trajectory:
    """Return a single-turn trajectory without rewards. Its text is empty if the engine did not decode it."""
    return Trajectory(
        prompt=prompt,
        sample_index=sample,
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        policy_version=completion.version,
        text=completion.text or "",
        finish_reason=completion.finish_reason,
        spans=completion.spans,
        routing=completion.routing,
    )


def aborted(prompt: Prompt, sample: int, version: int, reason: str) -> Trajectory:
    """Return an empty trajectory with the outcome ``ABORTED``. The trajectory counts in the metrics but is not
    trained."""
    no_tokens = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Trajectory(prompt, sample, *no_tokens, version, "", "abort", outcome=Outcome.ABORTED, detail=reason)


def decode(trajectories: Sequence[Trajectory], replies: ReplyParser) -> None:
    """Decode the completions of single-turn trajectories without a text. Parse them if their prompts have tools."""
    without = [t for t in trajectories if not t.text]
    for trajectory, text in zip(without, replies.texts([t.completion_ids.tolist() for t in without])):
        trajectory.text = text
    for trajectory in trajectories:
        if replies.counts_thinking:
            trajectory.thinking_tokens = replies.thinking_tokens(trajectory.completion_ids)
        tools = trajectory.prompt.fields.get("tools")
        if replies.splits_reasoning or isinstance(tools, list) and tools:
            trajectory.reply = replies.parse(trajectory.text, tools if isinstance(tools, list) else None)


def apply_verdicts(
    trajectories: Sequence[Trajectory],
    pool: EnvironmentExecutor,
    state: TrainerState | None = None,
    replies: ReplyParser | None = None,
) -> None:
    """Verify the trajectories and store their rewards and outcomes. An environment failure never becomes a reward.

    Args:
        state: training progress, which the environments receive with the trajectories.
        replies: parser that decoded the completions. If the argument is None, ``Verdict.reward_spans`` is ignored.
    """
    for trajectory in trajectories:
        trajectory.trainer_state = state
    for trajectory, verdict in zip(trajectories, pool.verify(trajectories)):
        trajectory.rewards = dict(verdict.rewards)
        trajectory.turn_rewards = tuple(map(dict, verdict.turn_rewards))
        trajectory.criteria = dict(verdict.criteria)
        if replies is not None:
            trajectory.reward_tokens = {}
            for name, spans in verdict.reward_spans.items():
                tokens = replies.token_ranges(trajectory.completion_ids, trajectory.text, spans)
                trajectory.reward_tokens[name] = tokens
        trajectory.detail = verdict.detail
        trajectory.extra = dict(verdict.extra)
        trajectory.metrics = dict(verdict.metrics)
        if verdict.outcome is not Outcome.OK:
            trajectory.outcome = verdict.outcome
        elif trajectory.finish_reason == "length" and trajectory.prompt.answer_ids is None:
            # A prompt with ``answer_ids`` requests a fixed length, so reaching it is not a truncation.
            trajectory.outcome = Outcome.TRUNCATED


def num_samples(groups: Sequence[Group]) -> int:
    """Return the number of trajectories in the groups."""
    return sum(len(group.trajectories) for group in groups)


def first_samples(groups: Sequence[Group], count: int) -> list[Group]:
    """Return groups with the first ``count`` samples. The last group is split if necessary."""
    chosen: list[Group] = []
    for group in groups:
        missing = count - num_samples(chosen)
        if missing <= 0:
            break
        if len(group.trajectories) <= missing:
            chosen.append(group)
        else:
            chosen.append(Group(group.prompt, group.trajectories[:missing], group.position))
    return chosen


Span = tuple[str, str, float, float]
"""(trace row, name, start, end). Times are in seconds since the epoch."""


class Batch(Protocol):
    """Input of one training step."""

    next_position: int
    """Number of prompts used since the start of training, including the prompts of this batch."""
    spans: list[Span]
    """Timeline spans of the work that produced the batch."""


class BatchStream:
    """Source of training batches: ``RolloutScheduler`` if the algorithm samples, otherwise ``PromptStream``.

    The methods with a body are those of a stream whose batches are prepared almost instantly, so that no work is in
    flight.
    """

    def get_batch(self, step: int) -> Batch | None:
        """Wait for batch number ``step`` and return it. Return None after the last prompt."""
        raise NotImplementedError

    def evaluate(self, prompts: Sequence[Prompt]) -> Future[Any]:
        """Start preparing the held-out prompts as input for the algorithm's ``validate``."""
        raise NotImplementedError

    def schedule(self, step: int) -> None:
        """Record that ``step`` steps are trained, and start all work that is possible with the published weights."""

    def queues(self) -> dict[str, Any]:
        """Return the work in flight, for the status file. Another thread calls this method."""
        return {}

    def progress(self) -> str:
        """Describe the progress of the current batch or validation, for display. Another thread calls this method."""
        return ""

    def take_events(self) -> list[str]:
        """Return the notable events since the last call as a list of sentences."""
        return []

    def ledger(self) -> dict[str, Any]:
        """Return the prompt ledger for a checkpoint, which records the trained and dropped prompts.

        The result is a ``LedgerState`` as a dictionary. The dictionary is empty if prompts are used strictly in order.
        """
        return {}

    def close(self) -> None:
        """Cancel the work in flight."""


@dataclass
class PromptBatch:
    """Batch of dataset rows for one step. ``Prompt.fields`` contains the columns other than the prompt."""

    prompts: list[Prompt]
    next_position: int
    spans: list[Span] = field(default_factory=list)


class PromptStream(BatchStream):
    """Source of training prompts, in order, for an algorithm that does not sample.

    Args:
        position: number of prompts that earlier steps used: 0 for a new run, otherwise the value in the checkpoint.
    """

    def __init__(self, config: Config, prompts: PromptSource, position: int):
        self._count = prompts_per_round(config.gdpo)
        self._prompts = prompts
        self._position = position

    def get_batch(self, step: int) -> PromptBatch:
        """Return the next prompts."""
        prompts = self._prompts.batch(self._position, self._count)
        self._position += self._count
        return PromptBatch(prompts, self._position)

    def evaluate(self, prompts: Sequence[Prompt]) -> Future[Sequence[Prompt]]:
        """Return the prompts unchanged."""
        done: Future[Sequence[Prompt]] = Future()
        done.set_result(prompts)
        return done


class RecordedStream(BatchStream):
    """Source of the recorded batches of a run. A replay uses this source instead of engines and environments.

    Sample files contain neither ``Prompt.fields`` nor ``Trajectory.metrics``, so both fields are empty here.

    Args:
        entries: entries of the run's journal.
    """

    def __init__(self, run_dir: Path, entries: Iterable[JournalEntry]):
        self._entries = {entry.step: entry for entry in entries}
        self._files = dict(rollout_files(run_dir))
        self._run_dir = run_dir

    def get_batch(self, step: int) -> Rollout:
        """Return the recorded batch of step number ``step``, counted from 0.

        Raises:
            RunError: if the samples of the step cannot be read or do not match the journal.
        """
        entry = self._entries[step + 1]
        file = self._files[step + 1]
        groups = recorded_groups(entry, read_recorded(file), str(file), RecordedImages(self._run_dir))
        dropped = [(position, reason) for position, reason in entry.dropped]
        return Rollout(groups, entry.position, dropped=dropped, again=entry.again, version=step)

    def evaluate(self, prompts: Sequence[Prompt]) -> Future[Any]:
        """Raise RunError, because a replay does not sample."""
        raise RunError("a replay has no engines to validate with")


def read_trained_groups(run_dir: Path, step: int, positions: Sequence[int]) -> list[Group]:
    """Read the groups that ``step`` trained from the run folder.

    Args:
        positions: prompt indices of the groups.

    Raises:
        RunError: if the journal or the samples of the step cannot be read.
    """
    entry = next((entry for entry in read_journal(run_dir) if entry.step == step), None)
    file = dict(rollout_files(run_dir)).get(step)
    if entry is None or file is None:
        raise RunError(
            f"{run_dir}: journal or samples of step {step} not found; rollout.replay_buffer requires them "
            "(save_samples)"
        )
    groups = recorded_groups(entry, read_recorded(file), str(file), RecordedImages(run_dir))
    return [group for group in groups if group.position in positions]


def read_recorded(file: Path) -> list[dict[str, Any]]:
    """Read the samples of one file as dictionaries.

    Raises:
        RunError: if the file cannot be read.
    """
    try:
        return read_rollouts(file)
    except (OSError, ValueError) as error:
        raise RunError(f"{file}: cannot be read ({first_line(error)})") from None


def recorded_groups(
    entry: JournalEntry, records: Sequence[Mapping[str, Any]], name: str, images: RecordedImages | None = None
) -> list[Group]:
    """Return the groups of a step, in the order in which they were trained.

    Args:
        records: samples of the step, from ``read_rollouts``.
        name: name of the sample file, for messages.
        images: images of the run. None leaves ``Image.data`` empty.

    Raises:
        RunError: if the samples do not match the journal, a sample is damaged, or an image is missing.
    """
    images = images or RecordedImages()
    sample_keys = []
    for record in records:
        if isinstance(record, Mapping):
            sample_keys.append((record.get("prompt_id"), record.get("sample_index")))
    if entry.samples != sample_keys:
        raise RunError(f"{name}: does not contain the samples that journal.jsonl lists for step {entry.step}")
    remaining = iter(records)
    groups = []
    for position, _, members in entry.groups:
        made: list[Trajectory] = []
        for sample, spans, *known in members:
            record = next(remaining)
            try:
                # Agents choose the first prompt of each sample, so the prompts of a group may differ.
                own, later = split_images(images.placed(record.get("images")), len(record["prompt_ids"]))
                prompt = _prompt(record, own)
                if made and _is_same_prompt(made[0].prompt, prompt):
                    prompt = made[0].prompt
                made.append(_trajectory(prompt, record, [(version, tokens) for version, tokens in spans]))
                made[-1].images = later
                problem = _difference(made[-1], *known)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise RunError(f"{name}: sample {sample} of {record['prompt_id']} is damaged ({reason})") from None
            if problem:
                raise RunError(f"{name}: sample {sample} of {record['prompt_id']} {problem}")
        groups.append(Group(made[0].prompt, made, position))
    return groups


def _difference(read: Trajectory, outcome: str, known_hash: str | None = None) -> str | None:
    """Describe how a sample differs from the journal, or return None if it does not."""
    tokens = sum(tokens for _, tokens in read.spans)
    if read.outcome != outcome:
        return f"is {read.outcome}, but {outcome} in journal.jsonl"
    if read.num_policy_tokens != tokens:
        return f"has {read.num_policy_tokens} tokens of the policy, but {tokens} in journal.jsonl"
    if known_hash is not None and sample_hash(read) != known_hash:
        return "has other tokens, log-probs, rewards or images than the trained sample in journal.jsonl"
    return None


def _prompt(record: Mapping[str, Any], images: Images) -> Prompt:
    token_ids = np.array(record["prompt_ids"], np.int32)
    return Prompt(record["prompt_id"], token_ids, record["prompt"], record["environment"], images=images)


def _is_same_prompt(a: Prompt, b: Prompt) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and a.images == b.images


def _routing(tokens: int, choices: Any) -> np.ndarray | None:
    return None if choices is None else np.array(choices, np.int16).reshape(tokens, -1)


def _trajectory(prompt: Prompt, record: Mapping[str, Any], spans: Sequence[tuple[int, int]]) -> Trajectory:
    ids = np.array(record["completion_ids"], np.int32)
    # The file contains None for environment tokens, because JSON does not support NaN. NumPy converts None back to NaN.
    logprobs = np.array(record["logprobs"], np.float32)
    mask = None if record.get("loss_mask") is None else np.array(record["loss_mask"], bool)
    reward_tokens = {}
    for name, ranges in record.get("reward_tokens", {}).items():
        reward_tokens[name] = tuple((start, end) for start, end in ranges)
    trajectory = Trajectory(
        prompt=prompt,
        sample_index=record["sample_index"],
        completion_ids=ids,
        logprobs=logprobs,
        policy_version=record["policy_version"],
        text=record["completion"],
        finish_reason=record["finish_reason"],
        rewards=dict(record["rewards"]),
        outcome=Outcome(record["outcome"]),
        detail=record.get("detail", ""),
        loss_mask=mask,
        turns=record.get("turns", 1),
        turn_tokens=tuple(record.get("turn_tokens", ())),
        thinking_tokens=record.get("thinking_tokens", 0),
        turn_rewards=tuple(map(dict, record.get("turn_rewards", ()))),
        turn_parents=tuple(record.get("turn_parents", ())),
        criteria=restored(record.get("criteria", {})),
        reward_tokens=reward_tokens,
        spans=tuple(spans),
        routing=_routing(len(prompt.token_ids) + len(ids), record.get("routing")),
    )
    if not len(ids) == len(logprobs) == len(ids if mask is None else mask):
        raise ValueError("ids, log-probs and mask differ in length")
    return trajectory
