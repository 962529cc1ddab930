"""Procedural tasks of the library reasoning-gym, which generates the prompts and scores the answers.

Some scorers of the library pass the answer to SymPy's parser. The scorers run in worker processes with a time limit,
like all verifiers. The time limit protects against accidents, but the process is not a sandbox.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from gdpo_nemo.data.records import Outcome, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment, read_options, reward_value
from gdpo_nemo.environments.tasks.answers import column, has_think_and_answer, tagged_answer
from gdpo_nemo.utils.errors import ConfigError, first_line, nearest

DEFAULT_ROWS = 1000
_ABSENT = (
    "the package reasoning-gym is not installed; run `uv sync --extra reasoning-gym`, which requires a C compiler "
    "(Debian, Ubuntu: apt-get install gcc libc6-dev)"
)


class ReasoningGym(Environment):
    """Environment for a task of reasoning-gym.

    Components:
        correctness: score of the library, usually from 0 to 1. Without answer tags, the whole completion is the answer.
        format: 1 if the completion consists of one think block and one answer block, else 0.

    Options:
        task: name of the task in the library.
        task_options: parameters of the task.

    Raises:
        ConfigError: if the option ``task`` is not set, or the library is not installed. The library is an optional
            dependency, because its installation requires a C compiler.
    """

    instant = True

    reward_names = ("correctness", "format")
    system_prompt = (
        "Think about the problem inside <think> and </think>, then give only the final answer inside <answer> and "
        "</answer>."
    )

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options("reasoning_gym", options, task="", task_options={})
        if find_spec("reasoning_gym") is None:
            raise ConfigError(_ABSENT)
        if not chosen.task:
            raise ConfigError("task: must be set to the name of a reasoning-gym task, such as chain_sum")
        self._task = chosen.task
        self._task_options = chosen.task_options
        self._scorer: Any = None

    def prepare(self) -> None:
        """Import the library, which takes seconds, and create the scorer of the task."""
        self._scorer = self._make(size=1, seed=0)

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Generate ``size`` rows (1000 if None) with the columns prompt, answer and metadata.

        Each split has different rows. Raises ConfigError if the task is unknown or rejects the parameters.
        """
        split_seed = int.from_bytes(hashlib.sha256(f"{split}/{seed}".encode()).digest()[:4], "little")
        entries = self._make(size=size or DEFAULT_ROWS, seed=split_seed)
        rows: list[Mapping[str, Any]] = []
        for entry in entries:
            rows.append({"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]})
        return rows

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory. If the library's scorer raises, the outcome is ``ENV_FAILED``."""
        if self._scorer is None:
            self.prepare()
        return list(map(self._verdict, trajectories))

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """Return the right answer in the right format."""
        return [f"<think>...</think>\n<answer>{row.get('answer')}</answer>"]

    def _verdict(self, trajectory: Trajectory) -> Verdict:
        fields = trajectory.prompt.fields
        entry = {"question": "", "answer": fields.get("answer"), "metadata": column(trajectory.prompt, "metadata")}
        try:
            score = self._scorer.score_answer(answer=tagged_answer(trajectory.text), entry=entry)
        except Exception as error:
            return Verdict({}, Outcome.ENV_FAILED, f"the scorer of {self._task} failed: {first_line(error)}")
        value = reward_value(score, f"the score of reasoning-gym task {self._task}")
        return Verdict({"correctness": value, "format": float(has_think_and_answer(trajectory.text))})

    def _make(self, size: int, seed: int) -> Any:
        with warnings.catch_warnings():  # a dependency of the library causes SyntaxWarnings in recent Python versions
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
            from reasoning_gym.factory import DATASETS

        if self._task not in DATASETS:
            raise ConfigError(f"reasoning-gym has no task {self._task!r}{nearest(self._task, DATASETS)}")
        try:
            return reasoning_gym.create_dataset(self._task, size=size, seed=seed, **self._task_options)
        except Exception as error:  # tasks check their parameters with assertions
            raise ConfigError(f"reasoning-gym task {self._task} rejected its options: {first_line(error)}") from error
