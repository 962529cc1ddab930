"""``gdpo-nemo chain``: train stages in sequence, each from the weights of the previous stage.

Each stage is a run with a config and a folder, as with ``gdpo-nemo train``. The initial model of a stage is the folder
``model/`` that the previous stage exported. All stages are checked before the first stage starts. After an
interruption, the same command continues: finished stages are skipped, and the interrupted stage resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gdpo_nemo.commands import train
from gdpo_nemo.commands.arguments import Commands, add_verbosity, say
from gdpo_nemo.config.changes import Change, find_changes
from gdpo_nemo.config.layout import Resolved
from gdpo_nemo.config.load import load_config, to_yaml
from gdpo_nemo.config.model_checks import model_source
from gdpo_nemo.config.schema import Config, RunConfig
from gdpo_nemo.models.peft import read_peft_adapter
from gdpo_nemo.models.sources import Format, described_by
from gdpo_nemo.observe.ownership import check_free
from gdpo_nemo.observe.run_files import read_run_config, status_if_whole
from gdpo_nemo.training.supervisor import in_child
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError, GdpoError

_OVERRIDE = re.compile(r"(?:(\d+):)?([\w.]*=.*)", re.DOTALL)
"""``section.key=value``, or ``2:section.key=value`` for stage 2. File paths with a slash before ``=`` do not match."""
_MODEL = "policy.model_name"
_LENGTH_KEYS = ("gdpo.max_num_steps", "gdpo.max_num_epochs")
_WITHOUT_EFFECT = ("logger.", "checkpointing.", "health.", "cluster.", "run.max_restarts", "run.date")
"""Keys that may change for a finished stage, because the stage's weights do not depend on these keys."""


@dataclass
class Stage:
    """One stage of the chain, which is a training run."""

    name: str
    """Name of the stage in messages: its number and config file."""
    file: str
    overrides: list[str]
    """Config overrides of this stage, including the initial model if a previous stage exports it."""
    config: Config
    finished: bool = False
    """True if the folder contains the finished run of this config and its exported weights."""

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.config.run.dir)

    @property
    def model(self) -> Path:
        """Path of the weights that the stage exports."""
        return self.folder / "model"


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "chain", help="train several stages in sequence, each from the weights of the previous stage"
    )
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="FILE | [N:]section.key=value",
        help="config of each stage, in order; config changes for all stages, or only for stage N",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="validate all stages, print their configs and plans, and exit"
    )
    add_verbosity(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Check all stages, then train the unfinished stages."""
    stages = read_stages(arguments.overrides)
    checked = check_stages(stages)
    if arguments.dry_run:
        for stage, resolved in checked:
            _show(stage, resolved)
        return 0
    unfinished = [(stage, resolved) for stage, resolved in checked if not stage.finished]
    if len(unfinished) > 1 and (status := _in_subprocess(arguments, lambda: check_stage_inputs(unfinished))):
        return status
    for stage in stages:
        if not arguments.quiet:
            say(f"stage {stage.name}: {stage.folder}{', finished' if stage.finished else ''}")
        if stage.finished:
            continue
        if status := _in_subprocess(arguments, partial(_train, arguments, stage)):
            return status
    return 0


def _train(arguments: argparse.Namespace, stage: Stage) -> int:
    return train.run(argparse.Namespace(**{**vars(arguments), "config": stage.file, "overrides": stage.overrides}))


def _show(stage: Stage, resolved: Resolved) -> None:
    """Print the stage's config and plan as one YAML document."""
    checked_config = resolved.config
    found = _inputs(stage, resolved)
    if checked_config is not stage.config:
        model = checked_config.policy.model_name
        found = [
            ("start", f"from {stage.config.policy.model_name}, which does not exist yet; planned as {model}"),
            *found,
        ]
    say(f"---\n# stage {stage.name}{', finished' if stage.finished else ''}")
    say(to_yaml(stage.config) + "\n" + train.plan_of(resolved, resolved.notes, found))


def _in_subprocess(arguments: argparse.Namespace, work: Callable[[], int]) -> int:
    """Call ``work`` in a child process if forking is allowed, otherwise in this process. Return the exit status."""
    status: int = in_child(work) if arguments.alone else work()
    return status


def read_stages(arguments: Sequence[str]) -> list[Stage]:
    """Return the stages specified on the command line.

    Raises:
        ConfigError: if no file is specified, a config cannot be read, two stages use the same folder, or a stage does
            not export the weights for the next stage.
    """
    files = [word for word in arguments if not _OVERRIDE.fullmatch(word)]
    overrides = [match.groups() for word in arguments if (match := _OVERRIDE.fullmatch(word))]
    if not files:
        raise ConfigError("chain: specify the config file of each stage, in order")
    for number, text in overrides:
        if number is not None and not 1 <= int(number) <= len(files):
            raise ConfigError(f"{number}:{text}: stage {number} does not exist; the number of stages is {len(files)}")
    stages: list[Stage] = []
    for number, file in enumerate(files, start=1):
        name = f"{number} of {len(files)} ({file})"
        stage_overrides = [text for which, text in overrides if which in (None, str(number))]
        if stages:
            replaced = (f"{_MODEL}=", "policy.model_factory=")
            stage_overrides = [text for text in stage_overrides if not text.startswith(replaced)]
            stage_overrides += [f"{_MODEL}={json.dumps(str(stages[-1].model))}", "policy.model_factory=null"]
        with _stage_in_errors(name):
            config = load_config(file, stage_overrides)
            _check_folder(config.run, stages)
            if number < len(files) and not config.checkpointing.export_hf:
                raise ConfigError(
                    "checkpointing.export_hf: must be true, because the next stage starts from these weights"
                )
        stages.append(Stage(name, file, stage_overrides, config))
    return stages


def _check_folder(run: RunConfig, earlier: Sequence[Stage]) -> None:
    """Raise ConfigError if an earlier stage uses the same folder."""
    for stage in earlier:
        if stage.folder.absolute() == Path(run.dir).absolute():
            raise ConfigError(f"run.dir: stage {stage.name} also writes {run.dir}; use another run.name for one stage")


def _check_stage(stage: Stage, stages: Sequence[Stage]) -> Resolved:
    """Validate the stage's config, and determine whether the stage is finished. Raises ConfigError."""
    with _stage_in_errors(stage.name):
        resolved = validate(_config_for_checks(stage, stages))
        check_free(stage.folder)
        earlier = stages[: stages.index(stage)]
        content = _recorded(stage.folder)
        if content is None:
            return resolved
        if earlier and content.get("policy", {}).get("model_name") != stage.config.policy.model_name:
            raise ConfigError(
                f"run.dir: {stage.folder} contains a run from {content.get('policy', {}).get('model_name')}, not from "
                f"{stage.config.policy.model_name}; use another run.name"
            )
        for other in earlier:
            if not other.finished:
                raise ConfigError(
                    f"run.dir: {stage.folder} contains a run that did not start from stage {other.name}, which is "
                    "not finished; use another run.name"
                )
        stage.finished = _finished(stage, find_changes(content, stage.config))
    return resolved


def _recorded(run_dir: Path) -> dict[str, Any] | None:
    """Return the saved config of the run in ``run_dir``, or None if it contains no run. Raises ConfigError."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        return None
    return read_run_config(run_dir, shown=False)


def _finished(stage: Stage, changes: Sequence[Change]) -> bool:
    """Return whether the folder contains the stage's finished run and its exported weights.

    Raises:
        ConfigError: if the finished run has a different config.
    """
    outcome = status_if_whole(stage.folder).get("outcome")  # None if unknown, so that the stage is trained
    if any(change.key in _LENGTH_KEYS for change in changes) or outcome != "complete":
        return False
    if stage.config.checkpointing.export_hf and not any(stage.model.glob("*.safetensors")):
        return False
    for change in changes:
        if not change.key.startswith(_WITHOUT_EFFECT):
            raise ConfigError(
                f"{change.key}: {stage.folder} is already finished with {change.before}, not {change.now}; use another "
                "run.name to train the stage again"
            )
    return True


def _config_for_checks(stage: Stage, stages: Sequence[Stage]) -> Config:
    """Return the stage's config for validation before the stage starts.

    If the stage's initial weights do not exist yet, the first stage's initial weights replace them, because they have
    the same architecture and tokenizer.
    """
    earlier = stages[: stages.index(stage)]
    if not earlier or earlier[-1].finished:
        return stage.config
    first = stages[0].config
    source = model_source(first.policy)
    name, factory = first.policy.model_name, first.policy.model_factory
    if source is not None and source.format is Format.PEFT:
        name = str(described_by(source, _MODEL) or read_peft_adapter(source.path, _MODEL).base)
    overrides = [*stage.overrides, f"{_MODEL}={json.dumps(name)}", f"policy.model_factory={json.dumps(factory)}"]
    return load_config(stage.file, overrides)


def check_stages(stages: Sequence[Stage]) -> list[tuple[Stage, Resolved]]:
    """Return the stages with their validated configs. Raises ConfigError."""
    return [(stage, _check_stage(stage, stages)) for stage in stages]


def check_stage_inputs(unfinished: Sequence[tuple[Stage, Resolved]]) -> int:
    """Read the data of the unfinished stages. Raises ConfigError if the data is invalid."""
    for stage, resolved in unfinished:
        _inputs(stage, resolved)
    return 0


def _inputs(stage: Stage, resolved: Resolved) -> list[tuple[str, str]]:
    with _stage_in_errors(stage.name):
        return train.check_inputs(resolved)


@contextlib.contextmanager
def _stage_in_errors(stage: str) -> Iterator[None]:
    """Prefix errors that are raised in the block with the name of the stage."""
    try:
        yield
    except GdpoError as error:
        raise type(error)(f"stage {stage}: {error}") from None
