"""Description of a TRL run, read from a script or its arguments. The translation rules read this description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gdpo_nemo.config.algorithm_choice import spec_named
from gdpo_nemo.tools.interop.trl import defaults
from gdpo_nemo.tools.interop.trl.names import Unresolved
from gdpo_nemo.tools.interop.trl.releases import Release, defaults_of
from gdpo_nemo.tools.interop.trl.trainers import TRAINERS


@dataclass
class Reward:
    """A reward function, or another function or class that the script passes to the trainer."""

    name: str
    """Name of the reward in TRL: the function's ``__name__``, or the name of its class."""
    import_path: str | None = None
    """Import path (None if the function cannot be imported)."""
    problem: str = ""
    """Reason why the function cannot be imported."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of the function, which are written to the environment's options."""

    @property
    def entry(self) -> Any:
        """Entry for the option `functions` of an environment."""
        return {"function": self.import_path, **self.arguments} if self.arguments else self.import_path


@dataclass
class Rows:
    """Source of the rows of a dataset split."""

    path: Any = None
    """Value of ``data.<split>.path`` (None if it is not known)."""
    split: str | None = None
    """Name of the dataset's split (None if it is not specified)."""
    size: int | None = None
    """Number of rows to use (None for all rows)."""
    columns: dict[str, str] = field(default_factory=dict)
    """Renamed columns: new name -> old name."""
    rows: list[dict[str, Any]] | None = None
    """Rows that the script contains as literals (None if the script loads its rows)."""
    problem: str = ""
    """Reason why the rows are not available (empty if they are available)."""


@dataclass
class TrlRun:
    """A TRL run, which implements the ``Recipe`` protocol.

    Args:
        given: fields of the trainer's config that the script or its arguments set.
        processes: number of data-parallel processes, which is set by the launcher and not in the script.
    """

    given: dict[str, Any]
    processes: int = 1
    trainer: str = "GRPOTrainer"
    """Class name of the trainer, a key of ``TRAINERS``."""
    model: Any = None
    tokenizer: Any = None
    rewards: list[Reward] = field(default_factory=list)
    rollout: Reward | None = None
    """Argument ``rollout_func``."""
    teacher: Any = None
    """Argument ``teacher_model`` of distillation trainers."""
    reference: Any = None
    """Argument ``ref_model`` (None for the initial model)."""
    reward_model: Any = None
    """Argument ``reward_model`` of the PPO trainer."""
    tools: list[Reward] = field(default_factory=list)
    """Argument ``tools``."""
    factory: Reward | None = None
    """Argument ``environment_factory``."""
    train: Rows = field(default_factory=Rows)
    evaluation: Rows | None = None
    lora: dict[str, Any] | None = None
    """Fields of ``LoraConfig`` (None if the whole model is trained)."""
    others: dict[str, str] = field(default_factory=dict)
    """Other arguments of the trainer -> their source text."""
    files: dict[str, str] = field(default_factory=dict)
    """Files to write next to the config, name -> text."""
    notes: dict[str, str] = field(default_factory=dict)
    """Argument -> note on a value that could not be read or is not supported."""
    stem: str = ""
    """Path of the config without its suffix. All names in ``files`` begin with this path."""
    release: Release | None = None
    """Last release of TRL for which the run can be written, or None for the present release (``releases``)."""
    images: str = ""
    """Part of the script that reads images (empty if there is none)."""

    @property
    def asynchronous(self) -> bool:
        """True if the trainer is ``AsyncGRPOTrainer``."""
        return self.trainer == defaults.TRAINER

    @property
    def algorithm(self) -> str:
        """Default value of ``algorithm.type`` for the trainer's class."""
        return TRAINERS[self.trainer].algorithm

    @property
    def samples(self) -> bool:
        """True if the trainer samples completions. Other trainers read answers from the data."""
        return spec_named(self.algorithm).samples

    @property
    def pairs(self) -> bool:
        """True if a row has a chosen and a rejected answer."""
        return spec_named(self.algorithm).rows == "pairs"

    @property
    def fields(self) -> Mapping[str, Any]:
        """All fields of the trainer's config -> default in the run's release."""
        trainer = TRAINERS[self.trainer]
        return {**trainer.defaults, **defaults_of(trainer.config, self.release)}

    @property
    def defaults(self) -> dict[str, Any]:
        """All fields in ``fields``, plus the trainer's fixed settings -> value."""
        return {**self.fields, **(TRAINERS[self.trainer].also or {})}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a field. If the field is not set or is only known at run time, use TRL's default. If the
        value is None, return ``default``."""
        value = self.given.get(key, self.defaults.get(key))
        if isinstance(value, Unresolved):
            value = self.defaults.get(key)
        return default if value is None else value

    def word(self, name: str) -> str:
        """Return a field that transformers defines as an enumeration, such as ``IntervalStrategy.NO``, as ``no``."""
        return str(self.get(name)).rpartition(".")[2].lower()

    @property
    def eval_strategy(self) -> str:
        """When TRL validates: no, steps or epoch."""
        return self.word("eval_strategy" if self.get("evaluation_strategy") is None else "evaluation_strategy")

    @property
    def validates(self) -> bool:
        """True if the run has validation data and uses it."""
        return self.evaluation is not None and self.eval_strategy != "no"

    @property
    def completion_length(self) -> int:
        """Maximum number of tokens in a completion."""
        names = ("max_completion_length", "max_new_tokens", "response_length")
        return next(int(length) for name in names if (length := self.get(name)))

    @property
    def samples_per_update(self) -> int:
        """Number of samples or rows in one optimizer update."""
        return self._in_device_batches(self.get("gradient_accumulation_steps"))

    @property
    def samples_per_generation(self) -> int:
        """Number of samples in one generation batch."""
        if self.get("generation_batch_size"):
            return int(self.get("generation_batch_size"))
        steps = self.get("steps_per_generation") or self.get("gradient_accumulation_steps")
        return self._in_device_batches(steps)

    def _in_device_batches(self, count: int) -> int:
        """Return the number of samples in ``count`` micro-batches on all processes."""
        size: int = self.get("per_device_train_batch_size")
        return size * self.processes * count

    @property
    def samples_per_step(self) -> int:
        """Number of samples in a gdpo_nemo step, which is a generation batch or an update, whichever is larger."""
        return max(self.samples_per_generation, self.samples_per_update)

    @property
    def updates(self) -> int:
        """Number of optimizer updates in a gdpo_nemo step."""
        return max(1, self.samples_per_step // self.samples_per_update)

    @property
    def total_updates(self) -> int | None:
        """Number of optimizer updates in the whole run (None if it depends on an unknown number of rows)."""
        if self.get("max_steps") > 0:
            return int(self.get("max_steps"))
        rows = self.train.rows
        if rows is None:
            return None
        prompts = max(1, self.samples_per_step // self.get("num_generations", 1))
        # Trainers that sample drop an incomplete step at the end of an epoch. Other trainers also train the rows of
        # this step.
        steps = len(rows) // prompts if self.samples else -(-len(rows) // prompts)
        per_epoch = max(1, steps) * self.updates
        return -(-int(self.get("num_train_epochs") * per_epoch * 1000) // 1000)

    def updates_of(self, key: str) -> int | None:
        """Return the value of a field as a number of updates. The field may be a fraction (below 1) of the run. Return
        None if the length of the run is unknown."""
        value = self.get(key, 0)
        if value >= 1 or not value:
            return int(value)
        return None if self.total_updates is None else -(-int(value * self.total_updates * 1000) // 1000)

    def steps_of(self, key: str) -> int | None:
        """Return the value of a field as a number of gdpo_nemo steps, at least 1. Return None if the length of the
        run is unknown."""
        updates = self.updates_of(key)
        return None if updates is None else max(1, -(-updates // self.updates))
