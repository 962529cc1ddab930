"""Where a run goes on: the newest good checkpoint of its folder, if data, model and config are such that it can."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gdpo_nemo.checkpoints import UPDATES_UNKNOWN, Checkpoints, RunState, model_fingerprint
from gdpo_nemo.config.changes import Change, check_changes, find_changes
from gdpo_nemo.config.layout import prompt_limit, prompts_per_round, updates_per_step
from gdpo_nemo.config.load import save_config, to_yaml
from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.reading import parse_yaml, read_text
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError, RunError

if TYPE_CHECKING:  # it imports torch, which the dry run does without
    from gdpo_nemo.inputs import Inputs

CONFIG = "config.yaml"
_HISTORY = "config_history"
_NUMBERED = re.compile(r"(\d+)_from_step_(\d+)\.yaml")


@dataclass
class Start:
    """Where a run starts."""

    checkpoints: Checkpoints
    state: RunState
    path: Path | None
    """The checkpoint to load; None: from the model."""
    damaged: list[str]
    """A sentence per checkpoint that was passed over."""
    remarks: list[str]
    """Where the run goes on, and what is different from there."""
    changes: list[Change]
    """What differs from the config that the checkpoint was written under."""


def find_start(config: Config, run_dir: Path, inputs: Inputs) -> Start:
    """The start of the run in ``run_dir``; writes nothing.

    Raises:
        ConfigError: the folder holds a run on other data, of another model, or with a setting that cannot change, or
            every checkpoint in it is damaged.
    """
    checkpoints = _checkpoints(config, run_dir)
    damaged: list[str] = []
    data = inputs.prompts.fingerprint
    model = model_fingerprint(inputs.folder)
    found = checkpoints.newest(damaged.append) if config.checkpointing.enabled else None
    if found is None and damaged:
        # Step 0 would be a new run, and its first checkpoints would replace what may be restored.
        raise ConfigError(
            f"run.dir: every checkpoint in {checkpoints.folder} is damaged; restore one, or remove that folder to "
            f"start at step 0 ({'; '.join(damaged)})"
        )
    if found is None:
        return Start(checkpoints, RunState(data=data, model=model), None, damaged, [], [])
    path, state = found
    for what, then, now in (("training data", state.data, data), ("model", state.model, model)):
        if then != now:
            raise ConfigError(
                f"run.dir: {run_dir} was started with another {what}; use another run.name or the same {what}"
            )
    changes = _changes(config, path, run_dir)
    if state.updates == UPDATES_UNKNOWN:  # written before checkpoints knew it
        state.updates = state.step * updates_per_step(config)
    remarks = [
        f"resuming from {path} after step {state.step}",
        *(change.sentence(state.step + 1) for change in changes),
    ]
    return Start(checkpoints, state, path, damaged, remarks, changes)


def planned_changes(config: Config) -> list[str]:
    """What a resume of the run's folder would change, a sentence each, by its newest checkpoint; nothing for a new run.

    Raises:
        ConfigError: a setting cannot change. Data and model are compared at the start only.
    """
    run_dir = Path(config.run.dir)
    checkpoints = _checkpoints(config, run_dir)
    if not checkpoints.steps():
        return []
    step = checkpoints.steps()[-1]
    return [change.sentence(step + 1) for change in _changes(config, checkpoints.path(step), run_dir)]


def _checkpoints(config: Config, run_dir: Path) -> Checkpoints:
    section = config.checkpointing
    checkpoints = Checkpoints(run_dir / "checkpoints", section.keep_last, section.keep_best, section.metric_name)
    if not section.enabled and checkpoints.steps():
        raise ConfigError(
            f"checkpointing.enabled: {run_dir} holds checkpoints up to step {checkpoints.steps()[-1]}; a run without "
            "them starts at step 0 and discards its metrics; use another run.name"
        )
    return checkpoints


def _changes(config: Config, checkpoint: Path, run_dir: Path) -> list[Change]:
    changes = find_changes(_config_of(checkpoint, run_dir), config)
    check_changes(changes, str(checkpoint))
    return changes


def total_updates(config: Config, state: RunState, prompts: int) -> int:
    """Optimizer updates of the whole run: those of the steps done, and of those to come under this config.

    The horizon of a decaying learning rate. Steps done count as they were planned, skipped updates included, so that a
    run which was stopped has the horizon of one which was not. ``prompts``: training prompts, for
    ``gdpo.max_num_epochs``.
    """
    left = config.gdpo.max_num_steps - state.step
    limit = prompt_limit(config, prompts)
    if limit is not None:  # an upper bound where dynamic sampling takes further prompts for a step
        left = min(left, (limit - state.position) // prompts_per_round(config))
    return state.updates + max(0, left) * updates_per_step(config)


def config_files(run_dir: Path) -> list[tuple[int, Path]]:
    """(first step, file) of the configs of a run, in the order in which they came: each holds from its step on,
    whatever came before it."""
    return [(first, path) for _, first, path in _numbered(run_dir)] or [(1, run_dir / CONFIG)]


def record_config(config: Config, run_dir: Path, step: int) -> None:
    """Write ``config.yaml``, and a numbered copy into ``config_history/`` where it differs from the one before, or that
    held from a later step on.

    Args:
        step: steps done; the config applies to those after it.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        _record_config(config, run_dir, step)
    except OSError as error:
        raise RunError(f"{run_dir} cannot be written: {error.strerror or error}") from None


def _record_config(config: Config, run_dir: Path, step: int) -> None:
    file = run_dir / CONFIG
    history = run_dir / _HISTORY
    before = file.read_text(encoding="utf-8") if file.is_file() else None
    if before is not None and not _numbered(run_dir):  # of a program that kept no history
        history.mkdir(exist_ok=True)
        (history / "0001_from_step_1.yaml").write_text(before, encoding="utf-8")
    (number, first, _) = (_numbered(run_dir) or [(0, 0, file)])[-1]
    if before is None or before != to_yaml(config) or first > step + 1:
        save_config(config, history / f"{number + 1:04d}_from_step_{step + 1}.yaml")
    save_config(config, file)


def _numbered(run_dir: Path) -> list[tuple[int, int, Path]]:
    """(number, first step, file) of ``config_history/``, in order."""
    files = [(_NUMBERED.fullmatch(path.name), path) for path in (run_dir / _HISTORY).glob("*.yaml")]
    return sorted((int(match[1]), int(match[2]), path) for match, path in files if match)


def _config_of(checkpoint: Path, run_dir: Path) -> dict[str, Any]:
    """The config that a checkpoint was written under; for one without it, that of the run's last start.

    Raises:
        ConfigError: the file is damaged.
    """
    for file in (checkpoint / CONFIG, run_dir / CONFIG):
        if file.is_file():
            break
    else:
        return {}
    try:
        found = parse_yaml(read_text(file))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file}: cannot be read ({first_line(error)}); remove it to go on without a comparison"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: is no config; remove it to go on without a comparison")
    return found
