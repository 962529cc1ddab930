"""The ``verifiers`` environment: packages of the library verifiers, whose reward functions are components."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, groupby
from math import ceil
from pathlib import Path
from typing import Any

from gdpo_nemo.data.records import Prompt
from gdpo_nemo.environments.base import Environment, read_options
from gdpo_nemo.environments.server_replies import Failure, FailureKind, printable
from gdpo_nemo.environments.verifiers.process import LOAD_S, WorkerDied, WorkerError, WorkerProcess
from gdpo_nemo.utils.errors import ConfigError, RunError, nearest

_SPLITS = frozenset({"train", "validation", "test"})
_TASK = "task"
"""Column with the data by which the package finds the task of a row."""


@dataclass(frozen=True)
class Played:
    """Result of one episode that the package played."""

    response: Mapping[str, Any]
    """Turns of the policy, in the format of an agent's response."""
    rewards: Mapping[str, float | None]
    metrics: Mapping[str, float] = field(default_factory=dict)


class Verifiers(Environment):
    """Environment from a package of verifiers 0.4, or of its earlier API. The package plays with the run's endpoint.

    Options:
        package: name of the installed package, as in ``vf-eval NAME``.
        args: arguments of the package: keywords of ``load_environment``, or the section ``env`` of verifiers 0.4.
        venv: virtual environment with verifiers and the package. The default is that of the run.
        rewards: names of components, ``{component: function}``. Other reward functions keep their names. Functions of
            weight 0 are metrics unless they have an entry.
        select: tasks of each split, ``{train: {...}, validation: {...}}``. For verifiers 0.4, the entries are its
            ``SelectConfig``.
        concurrency (64): maximum number of episodes in flight.
        deadline_s (600): time limit of one episode in seconds.
    """

    instant = True
    plays_with_endpoint = True

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options(
            "verifiers", options, package="", args={}, venv="", rewards={}, select={}, concurrency=64, deadline_s=600.0
        )
        if not chosen.package:
            raise ConfigError("package: must be the name of a package of verifiers")
        for name in ("concurrency", "deadline_s"):
            if not getattr(chosen, name) > 0:
                raise ConfigError(f"{name}: must be greater than 0")
        for split in chosen.select.keys() - _SPLITS:
            raise ConfigError(f"select: unknown split {split!r}{nearest(split, _SPLITS)}")
        for name, function in chosen.rewards.items():
            if not isinstance(function, str):
                raise ConfigError(f"rewards.{name}: must be the name of a reward function ({function!r})")
        self._options = chosen
        self._components = {function: str(name) for name, function in chosen.rewards.items()}
        if len(self._components) < len(chosen.rewards):
            raise ConfigError("rewards: two components have the same function")
        self.open_rewards = True
        self.reward_names = tuple(chosen.rewards) or ("reward",)
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._log: Path | None = None
        self._metrics: set[str] = set()
        """Reward functions of weight 0 without a component."""
        self._url = self._api_key = ""
        self._in_flight = 0
        """Number of episodes that calls of ``play`` wait for."""
        self._ids: dict[str, set[str]] = {}
        """Ids of the rows of each split."""

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raise ConfigError, because the rows are tasks of the package."""
        raise ConfigError("is from a file, but the package has the tasks of env.NAME; remove the path")

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Return tasks of the package as rows.

        Raises:
            ConfigError: if the package cannot be loaded or has no tasks, or the split contains tasks of another split.
        """
        worker = self._loaded()
        choice = self._options.select.get(split) or {}
        try:
            future = worker.submit("rows", split=split, size=size, seed=seed, choice=choice)
            rows: list[Mapping[str, Any]] = worker.result(future, LOAD_S)
        except (WorkerError, WorkerDied) as error:
            raise ConfigError(
                f"{self._options.package}: no tasks for the split {split}: {printable(str(error))}"
            ) from None
        if not rows:
            raise ConfigError(f"{self._options.package}: no tasks for the split {split}; check select.{split}")
        self._check_splits(split, {str(row["id"]) for row in rows})
        # Rows of several packages may be mixed, but ids must be unique.
        return [{**row, "id": f"{self._options.package}/{row['id']}"} for row in rows]

    def preflight(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Load the package and set the names of the components.

        Returns:
            Description of the package by its adapter.

        Raises:
            ConfigError: if the package cannot be loaded, or has no reward functions.
        """
        return self._loaded().description()

    def use_run_folder(self, folder: Path) -> None:
        """Write the output of the package to the run folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"verifiers_{Path(self._options.package).name}.log"

    def use_endpoint(self, url: str, api_key: str | None) -> None:
        """Play with the endpoint at ``url``. Raises ConfigError if the virtual environment does not exist."""
        self._url = f"{url}/v1"
        self._api_key = api_key or "none"
        self._started()  # while the engines start

    def play(self, prompts: Sequence[Prompt], sampling: Mapping[str, float]) -> list[Played | Failure]:
        """Play one episode per prompt and return the results, in order. Samples of a prompt are scored together.

        Raises:
            RunError: if the package cannot be loaded, or its tasks are not those of the prompts.
        """
        try:
            worker = self._loaded()
        except ConfigError as error:
            raise RunError(str(error)) from None
        requests = []
        for _, group in groupby(prompts, key=lambda prompt: prompt.id):
            tasks = [prompt.fields[_TASK] for prompt in group]
            future = worker.submit("play", tasks=tasks, url=self._url, api_key=self._api_key, **sampling)
            requests.append((len(tasks), future))
        with self._lock:
            self._in_flight += len(prompts)
            # The worker limits the time of each episode, and other calls may be before this one in its queue.
            limit_s = 2 * self._options.deadline_s * (1 + ceil(self._in_flight / self._options.concurrency))
        try:
            return list(chain.from_iterable(self._results(worker, *request, limit_s) for request in requests))
        finally:
            with self._lock:
                self._in_flight -= len(prompts)

    def _results(
        self, worker: WorkerProcess, samples: int, future: Future[Any], limit_s: float
    ) -> list[Played | Failure]:
        """Return the results of the episodes of one prompt."""
        try:
            return [self._result(episode) for episode in worker.result(future, limit_s)]
        except WorkerDied as error:
            return [Failure(FailureKind.VERIFIER, printable(f"{self._options.package}: {error}", 300))] * samples
        except WorkerError as error:
            raise RunError(f"{self._options.package}: {printable(str(error))}") from None

    def close(self) -> None:
        """End the worker process."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _started(self) -> WorkerProcess:
        """Return the worker. Start it, again if it has ended."""
        chosen = self._options
        python = interpreter(chosen.venv)
        settings = {name: getattr(chosen, name) for name in ("package", "args", "concurrency", "deadline_s")}
        with self._lock:
            if self._worker is not None and not self._worker.alive:
                self._worker.close()
                self._worker = None
            if self._worker is None:
                self._worker = WorkerProcess(python, self._log, settings)
            return self._worker

    def _loaded(self) -> WorkerProcess:
        """Return the worker after it has loaded the package. Raises ConfigError if the package cannot be loaded."""
        worker = self._started()
        try:
            self._use(worker.description())
        except (WorkerError, WorkerDied) as error:
            package = self._options.package
            raise ConfigError(f"package: {package} could not be loaded: {printable(str(error), 300)}") from None
        return worker

    def _use(self, description: Mapping[str, Any]) -> None:
        """Read the names of the components from the description of a package. Raises ConfigError."""
        weights = {function["name"]: function["weight"] for function in description["functions"]}
        is_open = bool(description.get("open"))
        for function, component in self._components.items():
            if function not in weights and not is_open:
                raise ConfigError(f"rewards.{component}: no reward function {function!r}{nearest(function, weights)}")
        self._metrics = {function for function, weight in weights.items() if not weight} - self._components.keys()
        for function in weights:
            if function not in self._metrics:
                self._components.setdefault(function, function)
        self.reward_names = tuple(self._components.values()) or ("reward",) * is_open
        self.open_rewards = is_open
        chosen = self._options.rewards
        self.component_origins = {n: self._options.package for n in self.reward_names if n not in chosen}
        if len(set(self.reward_names)) < len(self.reward_names):
            raise ConfigError("rewards: a component has the name of another reward function; rename both")
        if not self.reward_names:
            raise ConfigError(f"package: {self._options.package} has no reward function with a weight")

    def _check_splits(self, split: str, ids: set[str]) -> None:
        self._ids[split] = ids
        for other, others in self._ids.items():
            common = len(ids & others) if other != split else 0
            if common:
                raise ConfigError(
                    f"select.{split}: {common} tasks are also in the split {other}; "
                    f"for example, set select.{split}.include.idx to other tasks"
                )

    def _result(self, episode: Mapping[str, Any]) -> Played | Failure:
        package = self._options.package
        faults = [f"reward function {name} {problem}" for name, problem in episode["problems"].items()]
        if episode["error"]:
            faults.append(episode["error"])
        if faults:
            return Failure(FailureKind.VERIFIER, printable(f"{package}: {'; '.join(faults)}", 300))
        rewards = {}
        metrics = dict(episode["metrics"])
        for function, value in episode["rewards"].items():
            if function not in self._metrics:
                rewards[self._components.get(function, function)] = value
            elif value is not None:
                metrics[function] = value
        unknown = rewards.keys() - set(self.reward_names)
        if unknown and not self.open_rewards:
            names = ", ".join(sorted(unknown))
            return Failure(FailureKind.BAD_REPLY, f"{package}: {names} is not the name of a reward function")
        if not rewards:
            return Failure(FailureKind.MISSING_REWARD, f"{package}: the episode has no rewards")
        details = {"reason": "max_output_tokens"} if episode["incomplete"] else None
        return Played({"output": episode["turns"], "incomplete_details": details}, rewards, metrics)


def interpreter(venv: str) -> Path:
    """Return the Python interpreter of a virtual environment, or that of the run if ``venv`` is empty."""
    python = Path(venv).expanduser().absolute() / "bin" / "python" if venv else Path(sys.executable)
    if not python.exists():
        raise ConfigError(f"venv: not a virtual environment, because {python} does not exist")
    return python
