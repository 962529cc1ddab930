"""Batches as a run recorded them: its journal says which groups a step trained, its sample files what they were."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.errors import RunError
from gdpo_nemo.observe.journal import JournalEntry, read_journal
from gdpo_nemo.observe.rollouts import read_rollouts, rollout_files
from gdpo_nemo.rollouts.rollout_batch import Rollout


class RecordedStream:
    """The batches of a finished run, in place of engines and environments.

    Prompts have no further columns (``Prompt.fields``), and what verifiers logged (``Trajectory.metrics``) is not
    there: samples do not hold them.

    Args:
        entries: of the run's journal.
    """

    def __init__(self, run_dir: Path, entries: Iterable[JournalEntry]):
        self._entries = {entry.step: entry for entry in entries}
        self._files = dict(rollout_files(run_dir))

    def schedule(self, version: int) -> None:
        """Nothing has to be made ahead."""

    def get_batch(self, step: int) -> Rollout:
        """The batch that was trained after ``step`` steps. Raises RunError: its samples are not those of the
        journal."""
        entry = self._entries[step + 1]
        file = self._files[step + 1]
        try:
            records = read_rollouts(file)
        except (OSError, ValueError) as error:
            raise RunError(f"{file}: cannot be read ({first_line(error)})") from None
        groups = recorded_groups(entry, records, str(file))
        dropped = [(position, reason) for position, reason in entry.dropped]
        return Rollout(groups, entry.position, dropped=dropped, again=entry.again, version=step)

    def evaluate(self, prompts: Sequence[Prompt]) -> Future[Any]:
        """Nothing is sampled here."""
        raise RunError("a replay has no engines to validate with")

    def ledger(self) -> dict[str, Any]:
        """A replay draws nothing, so nothing is outstanding."""
        return {}

    def progress(self) -> str:
        """Nothing takes long enough."""
        return ""

    def queues(self) -> dict[str, Any]:
        """Nothing is in flight."""
        return {}

    def take_events(self) -> list[str]:
        """Nothing happens here."""
        return []

    def close(self) -> None:
        """Nothing is in flight."""


def recorded(run_dir: Path, step: int, positions: Sequence[int]) -> list[Group]:
    """The groups of these positions that ``step`` trained. Raises RunError: they cannot be read."""
    entry = next((entry for entry in read_journal(run_dir) if entry.step == step), None)
    file = dict(rollout_files(run_dir)).get(step)
    if entry is None or file is None:
        raise RunError(f"{run_dir}: journal or samples of step {step} are gone (rollout.replay_buffer, save_samples)")
    groups = recorded_groups(entry, read_rollouts(file), str(file))
    return [group for group in groups if group.position in positions]


def recorded_groups(entry: JournalEntry, records: Sequence[Mapping[str, Any]], name: str) -> list[Group]:
    """The groups of a step, in the order in which they were trained.

    Args:
        records: the samples of the step, as ``read_rollouts`` gives them.
        name: of their file, for messages.

    Raises:
        RunError: these are not the samples that the journal names, or one is damaged.
    """
    named = [(record.get("prompt_id"), record.get("sample_index")) for record in records if isinstance(record, Mapping)]
    if entry.samples != named:
        raise RunError(f"{name}: does not hold the samples that journal.jsonl names for step {entry.step}")
    rest = iter(records)
    groups = []
    for position, _, members in entry.groups:
        made: list[Trajectory] = []
        for sample, spans, outcome in members:
            record = next(rest)
            try:
                prompt = made[0].prompt if made else _prompt(record)
                made.append(_trajectory(prompt, record, [(version, tokens) for version, tokens in spans]))
            except (KeyError, TypeError, ValueError) as error:
                what = f"{type(error).__name__}: {error}"
                raise RunError(f"{name}: sample {sample} of {record['prompt_id']} is damaged ({what})") from None
            if made[-1].outcome != outcome:
                raise RunError(
                    f"{name}: sample {sample} of {record['prompt_id']} is {made[-1].outcome}, but {outcome} in "
                    "journal.jsonl"
                )
        groups.append(Group(made[0].prompt, made, position))
    return groups


def _prompt(record: Mapping[str, Any]) -> Prompt:
    return Prompt(
        record["prompt_id"], np.array(record["prompt_ids"], np.int32), record["prompt"], record["environment"]
    )


def _trajectory(prompt: Prompt, record: Mapping[str, Any], spans: Sequence[tuple[int, int]]) -> Trajectory:
    ids = np.array(record["completion_ids"], np.int32)
    # None, as JSON has no NaN, on tokens of the environment.
    logprobs = np.array(record["logprobs"], np.float32)
    mask = None if record.get("loss_mask") is None else np.array(record["loss_mask"], bool)
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
        turn_rewards=tuple(dict(rewards) for rewards in record.get("turn_rewards", ())),
        spans=tuple(spans),
    )
    if not len(ids) == len(logprobs) == len(ids if mask is None else mask):
        raise ValueError("ids, log-probs and mask differ in length")
    return trajectory
