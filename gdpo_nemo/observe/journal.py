"""Journal of trained groups (``journal.jsonl``), and an audit that each prompt is trained or dropped once.

A line contains the fields of ``JournalEntry``. An entry of ``groups`` is [prompt index, prompt id, samples], and a
sample is [sample index, [[weight version, tokens], ...], outcome, hash]. Journals of old versions have no hashes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from gdpo_nemo.data.records import Group, Trajectory
from gdpo_nemo.observe.run_files import JOURNAL_MORE, JOURNAL_STEP, fault, read_lines
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.files import parse_json

FILE = "journal.jsonl"


@runtime_checkable
class TrainedBatch(Protocol):
    """Protocol of a batch that the journal records, implemented by ``rollouts.batches.Rollout``."""

    groups: list[Group]
    dropped: list[tuple[int, str]]
    next_position: int
    again: list[int]
    weights: dict[str, float]


@dataclass
class JournalEntry:
    """One line of the journal: the groups that a step trained. See the module docstring for ``groups``."""

    step: int
    groups: list[list[Any]]
    dropped: list[list[Any]]
    position: int
    published: int | None
    total_updates: int
    again: list[int] = field(default_factory=list)
    """Prompt indices in ``groups`` that an earlier step also trained (``rollout.replay_buffer``)."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of the reward components that ``gdpo.constraints``, ``gdpo.schedules`` or ``gdpo.weighting`` changes, in
    this step."""

    @property
    def samples(self) -> list[tuple[str, int]]:
        """(prompt id, sample index) of each trajectory, in training order."""
        return [(prompt, sample) for _, prompt, members in self.groups for sample, *_ in members]


class Journal:
    """Writer of the journal, one line per step.

    The file is synced to disk with each checkpoint. If the machine crashes, later lines may be lost, but their
    steps are trained again.
    """

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir) / FILE

    def append(
        self,
        step: int,
        groups: Sequence[Group],
        dropped: Sequence[tuple[int, str]] = (),
        *,
        position: int,
        published: int | None,
        total_updates: int,
        again: Sequence[int] = (),
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """Write the line of a trained step.

        Args:
            position: number of prompts trained or dropped so far.
            published: version of the weights that the engines used during the step.
            total_updates: number of optimizer updates in the whole run.
            again: prompt indices in ``groups`` that an earlier step also trained.
            weights: weights of the reward components that change during the run.

        Raises:
            RunError: if the line cannot be written.
        """
        entry = JournalEntry(
            step,
            [[group.position, group.prompt.id, list(map(_sample, group.trajectories))] for group in groups],
            list(map(list, dropped)),
            position,
            published,
            total_updates,
            list(again),
            dict(weights or {}),
        )
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(vars(entry), ensure_ascii=False, separators=(",", ":")) + "\n")
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def sync(self) -> None:
        """Sync the file to disk, so that its lines survive a machine crash.

        Raises:
            RunError: if the file cannot be written.
        """
        try:
            with open(self.path, "rb+") as file:
                os.fsync(file.fileno())
        except FileNotFoundError:
            return  # This algorithm does not write a journal.
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def truncate_after(self, step: int) -> None:
        """Remove the lines of steps after ``step``, and an incomplete last line.

        Raises:
            RunError: if the journal cannot be read or written.
        """
        if not self.path.exists():
            return
        remaining = [entry for entry in read_journal(self.path.parent) if entry.step <= step]
        partial = self.path.with_name(FILE + ".partial")
        try:
            with open(partial, "w", encoding="utf-8") as file:
                for entry in remaining:
                    file.write(json.dumps(vars(entry), ensure_ascii=False, separators=(",", ":")) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path)
        except OSError as error:
            raise _cannot_write(self.path, error) from None


def read_journal(run_dir: str | Path) -> list[JournalEntry]:
    """Read all complete lines in order. The result is empty if the file does not exist.

    An incomplete last line, left by a crash, is ignored.

    Raises:
        RunError: if an earlier line is invalid, or the file cannot be read.
    """
    path = Path(run_dir) / FILE
    lines = read_lines(path)
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(_entry(line))
        except ValueError as error:
            if number < len(lines):  # The text after the last newline is empty or incomplete.
                raise RunError(f"{path}, line {number}: not a valid step of a journal{error}") from None
    return entries


def _entry(line: bytes) -> JournalEntry:
    """Parse one line.

    Raises:
        ValueError: if the line is invalid. The error message is empty or names the invalid key.
    """
    try:
        content = parse_json(line)
    except ValueError:
        raise ValueError from None
    if not isinstance(content, dict):
        raise ValueError
    if (key := fault(content, JOURNAL_STEP, JOURNAL_MORE)) is not None:
        raise ValueError(f" ({key})")
    return JournalEntry(**{key: content[key] for key in (*JOURNAL_STEP, *JOURNAL_MORE) if key in content})


def _sample(trajectory: Trajectory) -> list[Any]:
    spans = trajectory.spans or ((trajectory.policy_version, trajectory.num_policy_tokens),)
    return [trajectory.sample_index, list(map(list, spans)), str(trajectory.outcome), sample_hash(trajectory)]


def sample_hash(trajectory: Trajectory) -> str:
    """Return a hash of the data that a sample trains, as 16 hexadecimal digits.

    The data are tokens, log-probs, mask and rewards, and the hashes and places of images.
    The hash of a trajectory that was read from a sample file is the same, because these files are lossless.
    """
    written = trajectory.where_written(trajectory.logprobs)  # NaN elsewhere
    mask = b"" if trajectory.loss_mask is None else np.ascontiguousarray(trajectory.loss_mask, bool)
    rewards: list[tuple[Any, ...]] = []
    for name, reward in sorted(trajectory.rewards.items()):
        rewards.append((name, None if reward is None or reward != reward else float(reward)))
    for name, criterion in sorted(trajectory.criteria.items()):
        rewards.append((name, criterion.weight, criterion.required))
    ids = (trajectory.prompt.token_ids, trajectory.completion_ids)
    digest = hashlib.blake2b(json.dumps([rewards, *map(len, ids)]).encode(), digest_size=8)
    for tokens in ids:
        digest.update(np.ascontiguousarray(tokens, np.int32))
    digest.update(np.ascontiguousarray(written, np.float32))
    digest.update(mask)
    for image, start, count in (*trajectory.prompt.images, *trajectory.images):
        digest.update(f"{image.sha256} {start} {count}".encode())
    return digest.hexdigest()


def _cannot_write(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be written: {error.strerror or error}")


@dataclass
class Audit:
    """Result of an audit."""

    found: list[str]
    """Inconsistencies, one sentence each. Empty for a consistent run."""
    unknown: list[str] = field(default_factory=list)
    """Checks that were not possible, with the reason, one sentence each."""
    compared: int = 0
    """Number of trained samples that were compared with the sample files."""


_MOST = 1000
"""Maximum number of missing prompts to report, because a damaged checkpoint may list an arbitrary number of prompts."""


def audit(
    run_dir: str | Path,
    staleness: int,
    window: int | None = None,
    ledger: Mapping[str, Any] | None = None,
    reuse: int = 0,
    max_age: int | None = None,
) -> Audit:
    """Audit the journal of ``run_dir``.

    Old versions did not record prompt indices (-1). If the first steps have no
    indices, the order of prompts and missing prompts are not checked.

    Args:
        staleness: largest ``rollout.max_staleness`` (S) that the run used.
        window: largest reorder window (W) that the run used. None disables the check of the order.
        ledger: ``RunState.ledger`` of the newest checkpoint. None disables the comparison with the checkpoint.
        reuse: maximum number of times that a group may be trained again.
        max_age: maximum staleness of groups that are trained again. None means ``staleness``.

    Raises:
        RunError: if the journal cannot be read.
    """
    entries = read_journal(run_dir)
    if not entries:
        return Audit(["journal.jsonl has no steps"])
    found = [
        *_check_steps(entries),
        *_check_members(entries),
        *_check_staleness(entries, staleness, staleness if max_age is None else max_age),
    ]
    old = list(itertools.takewhile(lambda entry: set(_positions([entry])) == {-1}, entries))
    new = entries[len(old) :]
    unknown = [f"step {entry.step}: a prompt index is missing (-1)" for entry in new if -1 in _positions([entry])]
    found += unknown
    found += _check_repeated(new, reuse)
    if old:
        return Audit(found, [f"order and number of prompts: steps 1 to {old[-1].step} did not record prompt indices"])
    if window is not None and not unknown:  # each later prompt would seem to be out of order
        found += _check_window(new, window)
    if ledger is not None:
        found += _check_checkpoint(new, ledger)
    return Audit(found)


def _positions(entries: Iterable[JournalEntry]) -> list[int]:
    return [index for entry in entries for index, *_ in (*entry.groups, *entry.dropped)]


def _check_steps(entries: list[JournalEntry]) -> list[str]:
    found = []
    before = 0
    for entry in entries:
        if entry.step != before + 1:
            found.append(f"step {entry.step} follows step {before}")
        before = entry.step
    return found


def _check_members(entries: list[JournalEntry]) -> list[str]:
    found = []
    for entry in entries:
        for _, prompt, members in entry.groups:
            counts = Counter(sample for sample, *_ in members)
            for sample, count in counts.items():
                if count > 1:
                    found.append(f"step {entry.step} trained sample {sample} of {prompt} {count} times in a group")
    return found


def _check_staleness(entries: list[JournalEntry], staleness: int, max_age: int) -> list[str]:
    """Check the staleness of the tokens. Step k trains weights of version k - 1."""
    found = []
    trained: set[int] = set()
    for entry in entries:
        for prompt_index, prompt, members in entry.groups:
            most = max_age if prompt_index in trained else staleness
            if prompt_index >= 0:
                trained.add(prompt_index)
            for sample, spans, outcome, *_ in members:
                oldest = min((version for version, tokens in spans if tokens), default=entry.step - 1)
                age = entry.step - 1 - oldest
                if outcome in ("ok", "truncated") and not 0 <= age <= most:
                    where = f"step {entry.step}, prompt index {prompt_index} ({prompt}), sample {sample}"
                    found.append(f"{where}: tokens of version {oldest} are {age} updates old; the maximum is {most}")
    return found


def _check_repeated(entries: list[JournalEntry], reuse: int) -> list[str]:
    found = []
    seen: dict[int, str] = {}
    repetitions: Counter[int] = Counter()
    for entry in entries:
        for what, rows in (("trained", entry.groups), ("dropped", entry.dropped)):
            for prompt_index, *_ in rows:
                if prompt_index < 0:
                    continue
                now = f"{what} in step {entry.step}"
                before = seen.get(prompt_index, "")
                repetitions[prompt_index] += bool(before)
                reused = what == "trained" and before.startswith("trained") and not before.endswith(f" {entry.step}")
                if before and not (reused and repetitions[prompt_index] <= reuse):
                    found.append(f"prompt index {prompt_index} was {now} and {before}")
                seen[prompt_index] = now
    return found


def _check_window(entries: list[JournalEntry], window: int) -> list[str]:
    """Check that no group was trained ``window`` or more indices before an index that was still outstanding.

    Dropped prompts count as finished at the beginning of a step, because the journal records drops with the next
    training step.
    """
    found = []
    done: set[int] = set()
    oldest = 0
    for entry in entries:
        done.update(prompt_index for prompt_index, _ in entry.dropped)
        for prompt_index in sorted(prompt_index for prompt_index, *_ in entry.groups):
            while oldest in done:
                oldest += 1
            if prompt_index >= oldest + window:
                found.append(
                    f"step {entry.step} trained the group of prompt index {prompt_index} before the group of index "
                    f"{oldest} was trained or dropped; the window is {window}"
                )
            done.add(prompt_index)
    return found


def _check_checkpoint(entries: list[JournalEntry], ledger: Mapping[str, Any]) -> list[str]:
    """Check that the journal contains all prompts that the ledger lists as trained or dropped.

    Prompts dropped since the last step are not in the journal yet, so dropped prompts in the ledger are also accepted.
    """
    accounted = set(_positions(entries))
    accounted.update(prompt_index for prompt_index, _ in ledger.get("dropped", ()))
    done = itertools.chain(range(ledger["position"]), ledger["retired"])
    missing = itertools.islice((prompt_index for prompt_index in done if prompt_index not in accounted), _MOST)
    return [f"prompt index {p} is missing in the journal, but the newest checkpoint lists it as done" for p in missing]
