"""Procedural tasks of the library reasoning-gym: it makes the prompts and scores the answers.

Some of its scorers hand the answer to SymPy's parser. They run in the pool's worker processes under its time limit
like every verifier, but that is a fence against accidents, not a sandbox.
"""

from __future__ import annotations

import hashlib
import warnings
from importlib.util import find_spec
from typing import Any, Mapping, Sequence

from gdpo_nemo.config.messages import first_line, nearest
from gdpo_nemo.data.records import Outcome, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.environments.tasks.answers import column, has_think_and_answer, tagged_answer
from gdpo_nemo.environments.verdicts import reward_value
from gdpo_nemo.errors import ConfigError

DEFAULT_ROWS = 1000
_ABSENT = (
    "the package reasoning-gym is not installed: `uv sync --extra reasoning-gym` does it, and compiles its solver "
    "(on Debian and Ubuntu: apt-get install gcc libc6-dev)"
)


class ReasoningGym(Environment):
    """One reasoning-gym task.

    Components: ``correctness`` (the library's score, mostly 0 to 1) and ``format`` (0 or 1: a think block and an answer
    block, nothing else). Without answer tags the whole completion is the answer.

    Options: ``task`` (the library's name of it) and ``task_options`` (its parameters).

    Raises:
        ConfigError: the library is not installed (it is an extra, because it needs a compiler), or no task is named.
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
        """Import the library (seconds) and build the task that scores."""
        self._scorer = self._make(size=1, seed=0)

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """``size`` rows (1000 when None) with the columns prompt, answer and metadata; each split draws its own.

        Raises ConfigError for an unknown task or parameters it refuses.
        """
        own_seed = int.from_bytes(hashlib.sha256(f"{split}/{seed}".encode()).digest()[:4], "little")
        entries = self._make(size=size or DEFAULT_ROWS, seed=own_seed)
        return [
            {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]} for entry in entries
        ]

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory. An answer on which the library's scorer stumbles is ``env_failed``."""
        if self._scorer is None:
            self.prepare()
        return [self._verdict(trajectory) for trajectory in trajectories]

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """The task's own answer, well-formed."""
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
        with warnings.catch_warnings():  # a dependency of the library is written for an older Python
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
            from reasoning_gym.factory import DATASETS

        if self._task not in DATASETS:
            raise ConfigError(f"reasoning-gym has no task {self._task!r}{nearest(self._task, DATASETS)}")
        try:
            return reasoning_gym.create_dataset(self._task, size=size, seed=seed, **self._task_options)
        except Exception as error:  # each task checks its own parameters, by assertion
            raise ConfigError(f"reasoning-gym task {self._task} refuses its options: {first_line(error)}") from error
