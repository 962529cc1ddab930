"""What an environment is: rows in, verdicts with named reward components out."""

from __future__ import annotations

from typing import Any, Mapping, Protocol, Sequence, runtime_checkable

from gdpo_nemo.data.records import Trajectory, Verdict


@runtime_checkable
class Environment(Protocol):
    """Scores completions. Built in a worker process from the options of its YAML section, once per process."""

    reward_names: tuple[str, ...]
    """The components it may return; the config's weights are checked against them."""

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory, in order. May block; the pool enforces the time limit."""
        ...


@runtime_checkable
class PromptMaker(Protocol):
    """An environment that also makes its own prompts."""

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Rows with a `prompt` column (text or messages) and whatever `verify` needs; equal arguments, equal rows."""
        ...
