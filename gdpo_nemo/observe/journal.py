"""``journal.jsonl``: what each step trained, one JSON object a step, in the order of training.

* ``step``: steps done with this one.
* ``groups``: [position, prompt id, [[sample, [[version, tokens], ...], outcome], ...]] of every group. Tokens are those
  that the policy wrote, by the versions of the weights that wrote them.
* ``dropped``: [position, reason] of what was given up since the step before.
* ``position``: prompts dealt once this step is trained.
* ``published``: version of the weights that the engines had when the step was trained.
* ``total_updates``: optimizer updates of the whole run as they were planned then, the horizon of the learning rate.

With the samples in ``rollouts/`` that is all it takes to train the same weights again.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Sequence, runtime_checkable

from gdpo_nemo.config.reading import parse_json
from gdpo_nemo.data.records import Group, Trajectory
from gdpo_nemo.errors import RunError
from gdpo_nemo.observe.metrics import read_lines
from gdpo_nemo.observe.run_files import JOURNAL_MORE, JOURNAL_STEP, fault

FILE = "journal.jsonl"


@runtime_checkable
class TrainedBatch(Protocol):
    """A batch of groups, as ``rollouts`` makes it."""

    groups: list[Group]
    dropped: list[tuple[int, str]]
    next_position: int
    again: list[int]


@dataclass
class JournalEntry:
    """One line: see the top of the file."""

    step: int
    groups: list[list[Any]]
    dropped: list[list[Any]]
    position: int
    published: int | None
    total_updates: int
    again: list[int] = field(default_factory=list)
    """Positions among those of ``groups`` that an earlier step trained first (``rollout.replay_buffer``)."""

    @property
    def samples(self) -> list[tuple[str, int]]:
        """(prompt id, sample) of every trajectory, in the order of training."""
        return [(prompt, sample) for _, prompt, members in self.groups for sample, *_ in members]


class Journal:
    """Appends a line a step. Synced with each checkpoint: a crash of the machine may lose later lines, whose steps are
    trained again anyway."""

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
    ) -> None:
        """Write the line of a step that was trained. Raises RunError: it could not be written."""
        entry = JournalEntry(
            step,
            [[g.position, g.prompt.id, [_sample(t) for t in g.trajectories]] for g in groups],
            [[position, reason] for position, reason in dropped],
            position,
            published,
            total_updates,
            list(again),
        )
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(entry), ensure_ascii=False, separators=(",", ":")) + "\n")
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def sync(self) -> None:
        """Have the lines so far outlive a crash of the machine. Raises RunError: they could not be written."""
        try:
            with open(self.path, "rb+") as file:
                os.fsync(file.fileno())
        except FileNotFoundError:
            return  # an algorithm that keeps none
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def truncate_after(self, step: int) -> None:
        """Drop the lines of steps after ``step`` and a torn last line. Raises RunError: it could not be written."""
        if not self.path.exists():
            return
        kept = [entry for entry in read_journal(self.path.parent) if entry.step <= step]
        partial = self.path.with_name(FILE + ".partial")
        try:
            with open(partial, "w", encoding="utf-8") as file:
                for entry in kept:
                    file.write(json.dumps(asdict(entry), ensure_ascii=False, separators=(",", ":")) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path)
        except OSError as error:
            raise _cannot_write(self.path, error) from None


def read_journal(run_dir: str | Path) -> list[JournalEntry]:
    """All complete lines in order; empty where there is no file. A torn last line, as a crash leaves it, is ignored.

    Raises:
        RunError: a line before the last is none of a journal, or the file cannot be read.
    """
    path = Path(run_dir) / FILE
    lines = read_lines(path)
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(_entry(line))
        except ValueError as error:
            if number < len(lines):  # The last piece follows the last newline: torn, or empty.
                raise RunError(f"{path}, line {number}: not a step of a journal{error}") from None
    return entries


def _entry(line: bytes) -> JournalEntry:
    """Parse one step. Raises ValueError if the line does not hold one; the message names the wrong key, if any."""
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
    return [trajectory.sample_index, [list(span) for span in spans], str(trajectory.outcome)]


def _cannot_write(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be written: {error.strerror or error}")
