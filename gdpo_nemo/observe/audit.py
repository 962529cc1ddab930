"""What a journal must show: every position trained or dropped once, in its window, and no token too old."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any, Iterable, Mapping

from gdpo_nemo.observe.journal import JournalEntry, read_journal

_MOST = 1000
"""Missing positions that are named; a damaged checkpoint may miss any number."""


def audit(
    run_dir: str | Path,
    staleness: int,
    window: int | None = None,
    ledger: Mapping[str, Any] | None = None,
    reuse: int = 0,
    max_age: int | None = None,
) -> list[str]:
    """A sentence for everything in the journal of ``run_dir`` that must not be; empty where all is well.

    Positions of -1, of runs whose prompts were counted by the batch, are not judged.

    Args:
        staleness: the run's largest ``rollout.max_staleness`` (S).
        window: its largest reorder window (W); None: not judged.
        ledger: ``RunState.ledger`` of the newest checkpoint, where that has one.
        reuse: steps, after the one that trained it first, in which a group may be trained again.
        max_age: bound on staleness of groups that are trained again; None: ``staleness``.

    Raises:
        RunError: the journal cannot be read.
    """
    entries = read_journal(run_dir)
    if not entries:
        return ["journal.jsonl holds no step"]
    found = [*_steps(entries), *_ages(entries, staleness, staleness if max_age is None else max_age)]
    if not has_positions(entries):
        return found
    found += _repeated(entries, reuse)
    if window is not None:
        found += _overtaken(entries, window)
    if ledger is not None:
        found += _forgotten(entries, ledger)
    return found


def has_positions(entries: Iterable[JournalEntry]) -> bool:
    """Whether the journal says which positions were trained."""
    return all(position >= 0 for position in _positions(entries))


def _positions(entries: Iterable[JournalEntry]) -> list[int]:
    return [position for entry in entries for position, *_ in (*entry.groups, *entry.dropped)]


def _steps(entries: list[JournalEntry]) -> list[str]:
    return [
        f"step {entry.step} follows step {before}"
        for before, entry in zip([0, *(entry.step for entry in entries)], entries)
        if entry.step != before + 1
    ]


def _ages(entries: list[JournalEntry], staleness: int, max_age: int) -> list[str]:
    """Step k trains on weights of version k - 1."""
    found = []
    trained: set[int] = set()
    for entry in entries:
        for position, prompt, members in entry.groups:
            most = max_age if position in trained else staleness
            if position >= 0:
                trained.add(position)
            for sample, spans, outcome in members:
                oldest = min((version for version, tokens in spans if tokens), default=entry.step - 1)
                age = entry.step - 1 - oldest
                if outcome in ("ok", "truncated") and not 0 <= age <= most:
                    where = f"step {entry.step}, position {position} ({prompt}), sample {sample}"
                    found.append(f"{where}: tokens of version {oldest} are {age} updates old, of at most {most}")
    return found


def _repeated(entries: list[JournalEntry], reuse: int) -> list[str]:
    found = []
    seen: dict[int, str] = {}
    again: Counter[int] = Counter()
    for entry in entries:
        for what, rows in (("trained", entry.groups), ("dropped", entry.dropped)):
            for position, *_ in rows:
                now = f"{what} in step {entry.step}"
                before = seen.get(position, "")
                again[position] += bool(before)
                reused = what == "trained" and before.startswith("trained") and not before.endswith(f" {entry.step}")
                if before and not (reused and again[position] <= reuse):
                    found.append(f"position {position} was {now}, and {before}")
                seen[position] = now
    return found


def _overtaken(entries: list[JournalEntry], window: int) -> list[str]:
    """Groups that were trained ``window`` or more places ahead of one that was neither trained nor dropped by then.

    Drops count as of the step's beginning: the journal has them with the step that was trained next.
    """
    found = []
    done: set[int] = set()
    oldest = 0
    for entry in entries:
        done.update(position for position, _ in entry.dropped)
        for position in sorted(position for position, *_ in entry.groups):
            while oldest in done:
                oldest += 1
            if position >= oldest + window:
                found.append(
                    f"step {entry.step} trained position {position} while position {oldest} was neither trained nor "
                    f"dropped; the window is {window}"
                )
            done.add(position)
    return found


def _forgotten(entries: list[JournalEntry], ledger: Mapping[str, Any]) -> list[str]:
    """What was dropped just before the checkpoint is in the journal with the step after it."""
    accounted = {*_positions(entries), *(position for position, _ in ledger.get("dropped", ()))}
    done = itertools.chain(range(ledger["position"]), ledger["retired"])
    missing = itertools.islice((position for position in done if position not in accounted), _MOST)
    return [f"position {p} is in no step of the journal, but done by the newest checkpoint" for p in missing]
