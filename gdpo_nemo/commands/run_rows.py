"""Rows of a run's data as prompts, and what the run's environments say of a reply to one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np

from gdpo_nemo.config.schema import Config, DatasetConfig
from gdpo_nemo.data.anchors import TEXT_KEY, prompts_of
from gdpo_nemo.data.records import Outcome, Prompt, TrainerState, Trajectory
from gdpo_nemo.data.rows import PROMPT_KEYS, Row, load_rows
from gdpo_nemo.data.splits import room_for_prompts
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.execution.dispatch import EnvironmentPools
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.rollouts.rollout_batch import apply_verdicts

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class RunRow:
    """A row, by its place in a split."""

    split: str
    number: int
    """From 0 on, in the order of the data."""
    content: Row
    question: str
    """Its prompt, for a person to read."""


class RunRows:
    """The rows of a config, read when the first of a split is asked for, and its rewards.

    Args:
        config: None: there is no run, and every row is refused.
    """

    def __init__(self, config: Config | None):
        self._config = config
        self._rows: dict[str, list[Row]] = {}
        self._environments: Mapping[str, Environment] | None = None
        self._pools: EnvironmentPools | None = None
        self._last = dict.fromkeys(SPLITS, -1)

    def row(self, split: str | None = None, number: int | None = None) -> RunRow:
        """A row of the data.

        Args:
            split: None: validation where the run has one, else train.
            number: None: the one after the last that was asked for.

        Raises:
            ConfigError: there is no such row, or something is wrong with the data.
        """
        config = self._of_a_run()
        split = split or ("validation" if config.data.validation else "train")
        dataset = self._dataset(split)
        if split not in self._rows:
            self._rows[split] = load_rows(dataset, self.environments, split, config.run.seed)
        rows = self._rows[split]
        number = (self._last[split] + 1) % len(rows) if number is None else number
        if not 0 <= number < len(rows):
            raise ConfigError(f"data.{split} has rows 0 to {len(rows) - 1}, and no row {number}")
        self._last[split] = number
        return RunRow(split, number, rows[number], _question(rows[number], dataset))

    def prompt(self, row: RunRow, tokenizer: Any) -> Prompt:
        """The row as the run asks it, in tokens of a model; of a text the first anchor. Raises ConfigError."""
        config = self._of_a_run()
        source = prompts_of(
            self._dataset(row.split),
            self.environments,
            tokenizer,
            split=row.split,
            seed=config.run.seed,
            max_prompt_tokens=room_for_prompts(config),
            rows=[row.content],
        )
        return source.head()[0]

    def verdict(self, prompt: Prompt, tokens: np.ndarray, text: str, finish_reason: str) -> Trajectory | None:
        """The reply with its rewards or the reason why there are none; None where the rewards are those of whole
        episodes, of which the reply is only the first turn.

        Raises:
            RunError: the environment's code is wrong.
        """
        config = self._of_a_run()
        environment = self.environments[prompt.environment]
        if config.rollout.function is not None or environment.has_turns or environment.plays_with_endpoint:
            return None
        if self._pools is None:
            rollout = config.rollout
            self._pools = EnvironmentPools(config.env, rollout.env_workers, rollout.env_timeout_s, config.run.seed)
        logprobs = np.zeros(len(tokens), np.float32)
        judged = Trajectory(prompt, 0, tokens, logprobs, -1, text, finish_reason)
        apply_verdicts([judged], self._pools, TrainerState())
        return judged

    @property
    def environments(self) -> Mapping[str, Environment]:
        """Those of the config. Raises ConfigError where one cannot be built."""
        if self._environments is None:
            self._environments = load_environments(self._of_a_run().env)
        return self._environments

    @property
    def weighted(self) -> list[str]:
        """Names of the components that are trained."""
        return list(self._config.gdpo.rewards) if self._config else []

    def close(self) -> None:
        """End the verifiers."""
        if self._pools is not None:
            self._pools.close()

    def _of_a_run(self) -> Config:
        if self._config is None:
            raise ConfigError("--config: must say whose rows are meant, the model lies in no run folder")
        return self._config

    def _dataset(self, split: str) -> DatasetConfig:
        dataset: DatasetConfig | None = getattr(self._of_a_run().data, split)
        if dataset is None:
            raise ConfigError(f"data.{split}: the run has none")
        return dataset


def rewards_line(judged: Trajectory, weighted: list[str]) -> str:
    """The components of a verdict by name, those that are trained first."""
    if judged.outcome is Outcome.ENV_FAILED:
        return f"no rewards, the environment failed: {judged.detail}"
    names = dict.fromkeys([*(name for name in weighted if name in judged.rewards), *judged.rewards])
    values = {name: judged.rewards[name] for name in names}
    return "  ".join(f"{name} {'-' if value is None else f'{value:.3g}'}" for name, value in values.items())


def _question(row: Row, dataset: DatasetConfig) -> str:
    keys = PROMPT_KEYS if dataset.strided is None else (TEXT_KEY,)
    key = dataset.prompt_key or next((key for key in keys if key in row), "")
    value = row.get(key)
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    return str(value) if dataset.prompt_template is None else dataset.prompt_template.replace("{prompt}", str(value))
