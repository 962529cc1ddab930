"""What a TRL script or its arguments say of a run, resolved: the input of the translation's rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping

from gdpo_nemo.config.algorithm_choice import PREFERENCES, declares_sampling
from gdpo_nemo.interop.trl import trl_async
from gdpo_nemo.interop.trl.static_names import Unresolved
from gdpo_nemo.interop.trl.trl_trainers import TRAINERS


@dataclass
class Reward:
    """One of the reward functions."""

    name: str
    """As TRL calls it: the function's ``__name__``, or its class."""
    place: str | None = None
    """Where it can be imported from; None: it cannot."""
    problem: str = ""
    """Why not."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """What the function at ``place`` is given besides, by the environment's options."""

    @property
    def entry(self) -> Any:
        """The function as the option `functions` of an environment names it."""
        return {"function": self.place, **self.arguments} if self.arguments else self.place


@dataclass
class Rows:
    """Where the rows of a split come from."""

    path: Any = None
    """As in ``data.train.path``."""
    split: str | None = None
    size: int | None = None
    columns: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] | None = None
    """The rows themselves, where the script has them."""
    problem: str = ""
    """Why they cannot be had."""


@dataclass
class TrlRun:
    """A run of TRL's, and the ``Recipe`` that rules ask.

    Args:
        given: fields of the trainer's config that the script or its arguments set.
        processes: data-parallel processes, which the launcher decides and no script says.
    """

    given: dict[str, Any]
    processes: int = 1
    trainer: str = "GRPOTrainer"
    """Name of its class, one of ``TRAINERS``."""
    model: Any = None
    tokenizer: Any = None
    rewards: list[Reward] = field(default_factory=list)
    rollout: Reward | None = None
    """``rollout_func``; a place like a reward's."""
    teacher: Any = None
    """``teacher_model`` of distillation."""
    reference: Any = None
    """``ref_model``; None: the model that training starts from."""
    reward_model: Any = None
    """``reward_model`` of PPO."""
    tools: list[Reward] = field(default_factory=list)
    """``tools``; import paths like a reward's."""
    factory: Reward | None = None
    """``environment_factory``; an import path like a reward's."""
    train: Rows = field(default_factory=Rows)
    evaluation: Rows | None = None
    lora: dict[str, Any] | None = None
    """Fields of ``LoraConfig``; None: the whole model is trained."""
    others: dict[str, str] = field(default_factory=dict)
    """Further arguments of the trainer, as their source."""
    files: dict[str, str] = field(default_factory=dict)
    """Files to write beside the config: name -> text."""
    notes: dict[str, str] = field(default_factory=dict)
    """Key -> why what it says could not be read."""
    stem: str = ""
    """Path of the config without its suffix; names of ``files`` begin with it."""
    images: str = ""
    """The part of the script that reads images; empty if none."""

    @property
    def asynchronous(self) -> bool:
        """Return whether ``AsyncGRPOTrainer`` runs it."""
        return self.trainer == trl_async.TRAINER

    @property
    def algorithm(self) -> str:
        """``algorithm.type`` here, as far as the trainer's class tells it."""
        return TRAINERS[self.trainer].algorithm

    @property
    def samples(self) -> bool:
        """Return whether the trainer samples completions. The others read answers from the rows."""
        return declares_sampling(self.algorithm)

    @property
    def pairs(self) -> bool:
        """Return whether a row has a chosen and a rejected answer."""
        return PREFERENCES.get(self.algorithm) == "pairs"

    @property
    def fields(self) -> Mapping[str, Any]:
        """Every field of the trainer's config, with TRL's default."""
        return TRAINERS[self.trainer].defaults

    @property
    def defaults(self) -> dict[str, Any]:
        """``fields``, and what the trainer does without having a field for it."""
        return {**self.fields, **(TRAINERS[self.trainer].also or {})}

    def get(self, key: str, default: Any = None) -> Any:
        """The field, or TRL's default for it; ``default`` where both are None or only running would tell."""
        value = self.given.get(key, self.defaults.get(key))
        if isinstance(value, Unresolved):
            value = self.defaults.get(key)
        return default if value is None else value

    @property
    def completion_length(self) -> int:
        """Tokens of a completion, at most; each trainer has a name of its own for it."""
        names = ("max_completion_length", "max_new_tokens", "response_length")
        return next(int(length) for name in names if (length := self.get(name)))

    @property
    def samples_per_update(self) -> int:
        """Completions that one optimizer update is made of."""
        return self.get("per_device_train_batch_size") * self.processes * self.get("gradient_accumulation_steps")

    @property
    def samples_per_generation(self) -> int:
        """Completions that are sampled at once."""
        if self.get("generation_batch_size"):
            return int(self.get("generation_batch_size"))
        steps = self.get("steps_per_generation") or self.get("gradient_accumulation_steps")
        return self.get("per_device_train_batch_size") * self.processes * steps

    @property
    def samples_per_step(self) -> int:
        """Completions of a step here: those of a generation, or of the update where that spans several."""
        return max(self.samples_per_generation, self.samples_per_update)

    @property
    def updates(self) -> int:
        """Optimizer updates of a step here."""
        return max(1, self.samples_per_step // self.samples_per_update)

    @property
    def total_updates(self) -> int | None:
        """Optimizer updates of the whole run; None where that depends on how many rows there are."""
        if self.get("max_steps") > 0:
            return int(self.get("max_steps"))
        rows = self.train.rows
        if rows is None:
            return None
        prompts = max(1, self.samples_per_step // self.get("num_generations", 1))
        # An epoch of the trainers that sample has whole steps; the others also train the remaining rows.
        steps = len(rows) // prompts if self.samples else -(-len(rows) // prompts)
        per_epoch = max(1, steps) * self.updates
        return -(-int(self.get("num_train_epochs") * per_epoch * 1000) // 1000)

    def updates_of(self, key: str) -> int | None:
        """A number of updates that may be given as a share (below 1) of the whole run; None where that is unknown."""
        value = self.get(key, 0)
        if value >= 1 or not value:
            return int(value)
        return None if self.total_updates is None else -(-int(value * self.total_updates * 1000) // 1000)

    def steps_of(self, key: str) -> int | None:
        """The same in steps here, at least one."""
        updates = self.updates_of(key)
        return None if updates is None else max(1, -(-updates // self.updates))
