"""The completions of a step as rows of text and numbers, for the tables of trackers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np

from gdpo_nemo.data.records import Group, Trajectory
from gdpo_nemo.errors import printable_lines

LONGEST = 4000
"""Characters of a text in a table; the samples of the run folder have all of it."""


@dataclass(frozen=True)
class CompletionTable:
    """Named columns; every row has a value for each, None where there is none."""

    columns: list[str]
    rows: list[list[Any]]


def completion_table(groups: Sequence[Group], advantages: np.ndarray | None, count: int) -> CompletionTable:
    """The first ``count`` trajectories, so that the samples of a prompt stand together.

    Args:
        advantages: [trajectories], in the order of the groups; None: not known.
    """
    samples = [trajectory for group in groups for trajectory in group.trajectories][:count]
    names = list(dict.fromkeys(name for trajectory in samples for name in trajectory.rewards))
    rows = []
    for place, trajectory in enumerate(samples):
        advantage = None if advantages is None else float(advantages[place])
        rewards = [_number(trajectory.rewards.get(name)) for name in names]
        rows.append([*_texts(trajectory), trajectory.num_policy_tokens, _number(advantage), *rewards])
    fixed = ["prompt_id", "environment", "prompt", "completion", "outcome", "tokens", "advantage"]
    return CompletionTable([*fixed, *(f"reward/{name}" for name in names)], rows)


def markdown(table: CompletionTable) -> str:
    """The table as Markdown shows it, whatever the texts hold."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _texts(trajectory: Trajectory) -> list[str]:
    prompt = trajectory.prompt
    texts = (prompt.id, prompt.environment, prompt.text, trajectory.text, str(trajectory.outcome))
    return [_short(text) for text in texts]


def _short(text: str) -> str:
    text = printable_lines(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text):,} characters)"


def _number(value: float | None) -> float | None:
    """Trackers keep tables as JSON, which has no NaN."""
    return None if value is None or not np.isfinite(value) else float(value)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
