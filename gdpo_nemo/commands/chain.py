"""``gdpo-nemo chain``: stages of training one after the other, each from the weights of the one before.

A stage is a run of its own, with the config and the folder that ``gdpo-nemo train`` would have; its model is the
``model/`` that the stage before exported. All of them are checked before the first one starts. The same command goes on
after an interruption: stages that are through are passed over, and the one under way resumes as a run does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from gdpo_nemo.commands import train
from gdpo_nemo.commands.arguments import add_verbosity, say
from gdpo_nemo.config.changes import Change, find_changes
from gdpo_nemo.config.files import model_source
from gdpo_nemo.config.load import load_config, to_yaml
from gdpo_nemo.config.model_formats import Format
from gdpo_nemo.config.model_sources import described_by
from gdpo_nemo.config.peft_config import read_peft_adapter
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError, GdpoError
from gdpo_nemo.observe.ownership import check_free
from gdpo_nemo.observe.run_files import read_run_config, status_if_whole
from gdpo_nemo.supervisor import in_child
from gdpo_nemo.validation import validate

_OVERRIDE = re.compile(r"(?:(\d+):)?([\w.]*=.*)", re.DOTALL)
"""``section.key=value``, or ``2:section.key=value`` for the second stage; a path has a slash before any ``=``."""
_MODEL = "policy.model_name"
_LENGTH = ("gdpo.max_num_steps", "gdpo.max_num_epochs")
_WITHOUT_EFFECT = ("logger.", "checkpointing.", "health.", "cluster.", "run.max_restarts")
"""Keys that may change behind a finished stage: its weights do not depend on them."""


@dataclass
class Stage:
    """One run of the chain."""

    name: str
    """For messages: its number and file."""
    file: str
    overrides: list[str]
    """With the model that it starts from, if another stage makes it."""
    config: Config
    finished: bool = False
    """Whether its folder holds the run, done as the config asks, with the weights."""

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.config.run.dir)

    @property
    def model(self) -> Path:
        """The weights that it exports."""
        return self.folder / "model"


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("chain", help="train stage after stage, each from the weights of the one before")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="FILE | [N:]section.key=value",
        help="config of each stage, in order; changes to all of them, or to the N-th alone",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="validate all stages, print their configs and plans, exit"
    )
    add_verbosity(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Check every stage, then train those that are not done."""
    stages = read_stages(arguments.overrides)
    notes = [_checked(stage, stages) for stage in stages]
    if arguments.dry_run:
        for stage, found in zip(stages, notes):
            _show(stage, stages, found)
        return 0
    left = [stage for stage in stages if not stage.finished]
    if len(left) > 1 and (status := _apart(arguments, lambda: _check_inputs(left, stages))):
        return status
    for stage in stages:
        if not arguments.quiet:
            say(f"stage {stage.name}: {stage.folder}{', finished' if stage.finished else ''}")
        if stage.finished:
            continue
        if status := _apart(arguments, partial(_train, arguments, stage)):
            return status
    return 0


def _train(arguments: argparse.Namespace, stage: Stage) -> int:
    return train.run(argparse.Namespace(**{**vars(arguments), "config": stage.file, "overrides": stage.overrides}))


def _show(stage: Stage, stages: Sequence[Stage], notes: Sequence[str]) -> None:
    """The stage's config and plan, as one document of a YAML file."""
    described = _as_it_will_be(stage, stages)
    found = _inputs(stage, stages)
    if described is not stage.config:
        model = described.policy.model_name
        found = [("start", f"from {stage.config.policy.model_name}, which is to come; planned as {model}"), *found]
    say(f"---\n# stage {stage.name}{', finished' if stage.finished else ''}")
    say(to_yaml(stage.config) + "\n" + train.plan_of(described, notes, found))


def _apart(arguments: argparse.Namespace, work: Callable[[], int]) -> int:
    """Do it in a process of its own, where this one may fork."""
    status: int = in_child(work) if arguments.alone else work()
    return status


def read_stages(words: Sequence[str]) -> list[Stage]:
    """The stages that a command line names.

    Raises:
        ConfigError: no file, or a config that cannot be read, writes into the folder of another stage, or leaves the
        next one without weights.
    """
    files = [word for word in words if not _OVERRIDE.fullmatch(word)]
    overrides = [match.groups() for word in words if (match := _OVERRIDE.fullmatch(word))]
    if not files:
        raise ConfigError("chain: name the config file of each stage, in order")
    for number, text in overrides:
        if number is not None and not 1 <= int(number) <= len(files):
            raise ConfigError(f"{number}:{text}: there is no stage {number}, but {len(files)}")
    stages: list[Stage] = []
    for number, file in enumerate(files, start=1):
        name = f"{number} of {len(files)} ({file})"
        own = [text for which, text in overrides if which in (None, str(number))]
        if stages:
            own = [text for text in own if not text.startswith((f"{_MODEL}=", "policy.model_factory="))]
            own += [f"{_MODEL}={json.dumps(str(stages[-1].model))}", "policy.model_factory=null"]
        with _named(name):
            config = load_config(file, own)
            _check_place(config, stages)
            if number < len(files) and not config.checkpointing.export_hf:
                raise ConfigError("checkpointing.export_hf: must be true, the next stage starts from these weights")
        stages.append(Stage(name, file, own, config))
    return stages


def _check_place(config: Config, before: Sequence[Stage]) -> None:
    """Refuse the folder of another stage. Raises ConfigError."""
    for stage in before:
        if stage.folder.absolute() == Path(config.run.dir).absolute():
            raise ConfigError(f"run.dir: stage {stage.name} writes {config.run.dir}, too; give one another run.name")


def _checked(stage: Stage, stages: Sequence[Stage]) -> list[str]:
    """Validate the stage and find out whether it is finished; returns ``validate``'s notes. Raises ConfigError."""
    with _named(stage.name):
        notes = validate(_as_it_will_be(stage, stages))
        check_free(stage.folder)
        before = stages[: stages.index(stage)]
        content = _recorded(stage.folder)
        if content is None:
            return notes
        if before and content.get("policy", {}).get("model_name") != stage.config.policy.model_name:
            raise ConfigError(
                f"run.dir: {stage.folder} holds a run from {content.get('policy', {}).get('model_name')}, not from "
                f"{stage.config.policy.model_name}; use another run.name"
            )
        for other in before:
            if not other.finished:
                raise ConfigError(
                    f"run.dir: {stage.folder} holds a run from other weights than stage {other.name} is to make; use "
                    "another run.name"
                )
        stage.finished = _finished(stage, find_changes(content, stage.config))
    return notes


def _recorded(run_dir: Path) -> dict[str, Any] | None:
    """The config that the run in ``run_dir`` was started with; None: there is none. Raises ConfigError."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        return None
    return read_run_config(run_dir, shown=False)


def _finished(stage: Stage, changes: Sequence[Change]) -> bool:
    """Whether the folder holds the stage's run, done, with its weights.

    Raises:
        ConfigError: it does, but of another config.
    """
    outcome = status_if_whole(stage.folder).get("outcome")  # None: unknown, so the stage is run
    if any(change.key in _LENGTH for change in changes) or outcome != "complete":
        return False
    if stage.config.checkpointing.export_hf and not any(stage.model.glob("*.safetensors")):
        return False
    for change in changes:
        if not change.key.startswith(_WITHOUT_EFFECT):
            raise ConfigError(
                f"{change.key}: {stage.folder} is finished with {change.before}, not {change.now}; use another "
                "run.name to train the stage again"
            )
    return True


def _as_it_will_be(stage: Stage, stages: Sequence[Stage]) -> Config:
    """The stage's config; while the weights that it starts from are still to come, with those that the chain starts
    from, which have the same architecture and tokenizer."""
    before = stages[: stages.index(stage)]
    if not before or before[-1].finished:
        return stage.config
    first = stages[0].config
    source = model_source(first)
    name, factory = first.policy.model_name, first.policy.model_factory
    if source is not None and source.format is Format.PEFT:
        name = str(described_by(source, _MODEL) or read_peft_adapter(source.path, _MODEL).base)
    overrides = [*stage.overrides, f"{_MODEL}={json.dumps(name)}", f"policy.model_factory={json.dumps(factory)}"]
    return load_config(stage.file, overrides)


def _check_inputs(left: Sequence[Stage], stages: Sequence[Stage]) -> int:
    """Read the data of the stages that are to come."""
    for stage in left:
        _inputs(stage, stages)
    return 0


def _inputs(stage: Stage, stages: Sequence[Stage]) -> list[tuple[str, str]]:
    with _named(stage.name):
        return train.check_inputs(_as_it_will_be(stage, stages))


@contextlib.contextmanager
def _named(stage: str) -> Iterator[None]:
    """Let errors of the block say which stage they are of."""
    try:
        yield
    except GdpoError as error:
        raise type(error)(f"stage {stage}: {error}") from None
