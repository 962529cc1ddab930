"""Starting point of a run: the newest undamaged checkpoint, if data, model and config are compatible with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gdpo_nemo.algorithms.component_weights import directions
from gdpo_nemo.config.changes import Change, check_changes, find_changes
from gdpo_nemo.config.layout import Resolved, prompt_limit, prompts_per_round
from gdpo_nemo.config.load import CONFIG, CONFIG_HISTORY, save_config, to_yaml
from gdpo_nemo.config.schema import Config, GdpoConfig
from gdpo_nemo.data.tokenizer import writes_date
from gdpo_nemo.training.checkpoints import UPDATES_UNKNOWN, Checkpoints, RunState, model_fingerprint
from gdpo_nemo.training.goals import Goals
from gdpo_nemo.utils.errors import ConfigError, RunError, first_line
from gdpo_nemo.utils.files import parse_yaml, read_text

if TYPE_CHECKING:  # This module imports torch, which a dry run does not need.
    from gdpo_nemo.training.inputs import Inputs

_NUMBERED = re.compile(r"(\d+)_from_step_(\d+)\.yaml")


@dataclass
class Start:
    """Starting point of a run."""

    checkpoints: Checkpoints
    state: RunState
    path: Path | None
    """Checkpoint to load. None: start from the model."""
    damaged: list[str]
    """One sentence for each damaged checkpoint that was skipped."""
    remarks: list[str]
    """Sentences about the step from which the run resumes, and about config changes."""
    changes: list[Change]
    """Differences from the config of the checkpoint."""


def find_start(resolved: Resolved, run_dir: Path, inputs: Inputs) -> Start:
    """Return the starting point of the run in ``run_dir``. Writes nothing.

    Raises:
        ConfigError: if the folder contains a run with different data, a different model or another value of a
            fixed setting, or contains only damaged checkpoints.
    """
    config = resolved.config
    checkpoints = _checkpoints(config, run_dir)
    damaged: list[str] = []
    data = inputs.prompts.fingerprint
    model = model_fingerprint(inputs.folder)
    found = checkpoints.newest(damaged.append) if config.checkpointing.enabled else None
    if found is None and damaged:
        # A new run from step 0 would overwrite damaged checkpoints that the user may be able to restore.
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
                f"run.dir: {run_dir} was started with different {what}; use another run.name or the same {what}"
                + (_DATE_UNKNOWN if what == "training data" and _is_undated(config, inputs) else "")
            )
    changes = _changes(config, path, run_dir)
    if state.updates == UPDATES_UNKNOWN:  # The checkpoint is older than this field.
        state.updates = state.step * resolved.updates_per_step
    Goals(config.gdpo).restore(state)
    remarks = [
        f"resuming from {path} after step {state.step}" + _nothing_to_train(config.gdpo, state, len(inputs.prompts)),
        *(change.sentence(state.step + 1) for change in changes),
    ]
    return Start(checkpoints, state, path, damaged, remarks, changes)


_DATE_UNKNOWN = (
    "; the prompts contain the date, which this run did not record: set run.date to the day on which it was started"
)


def _is_undated(config: Config, inputs: Inputs) -> bool:
    return config.run.date is None and writes_date(inputs.tokenizer)


def run_date(config: Config, run_dir: Path) -> str | None:
    """Return the date that chat templates write: ``run.date``, the date in the run folder, or today for a new run.

    Return None for a run that was started before runs recorded their date.
    """
    if config.run.date is not None:
        return config.run.date
    known = (_config_of(run_dir, run_dir).get("run") or {}).get("date")
    is_new = not Checkpoints(run_dir / "checkpoints", 0, 0, None).steps()
    return str(known) if known else date.today().isoformat() if is_new else None


def _nothing_to_train(gdpo: GdpoConfig, state: RunState, prompts: int) -> str:
    """Return the end of a sentence that names the key that ends the run here, or an empty text."""
    limit = prompt_limit(gdpo, prompts)
    if state.step >= gdpo.max_num_steps:
        key = f"gdpo.max_num_steps ({gdpo.max_num_steps})"
    elif limit is not None and state.position + prompts_per_round(gdpo) > limit:
        key = f"gdpo.max_num_epochs ({gdpo.max_num_epochs})"
    elif Goals(gdpo).reached(state):
        key = "the goals in gdpo.stop_when, which are met"
    else:
        return ""
    return f": the run is complete, so nothing is trained; to continue, raise {key}"


def planned_changes(config: Config) -> list[str]:
    """Return one sentence for each config change since the newest checkpoint. Empty for a new run.

    Raises:
        ConfigError: if a setting must not change. Data and model are only compared when the run starts.
    """
    run_dir = Path(config.run.dir)
    checkpoints = _checkpoints(config, run_dir)
    if not checkpoints.steps():
        return []
    step = checkpoints.steps()[-1]
    return [change.sentence(step + 1) for change in _changes(config, checkpoints.path(step), run_dir)]


def _checkpoints(config: Config, run_dir: Path) -> Checkpoints:
    section, gdpo = config.checkpointing, config.gdpo
    metric = section.metric_name or ""
    component = metric.removeprefix("validation/").partition("/pass_at/")[0]
    found = directions(gdpo.rewards, gdpo.constraints, gdpo.schedules)
    better = found.get(component) or found.get(component.partition("/")[2], 1)  # ``<environment>/<component>``
    checkpoints = Checkpoints(run_dir / "checkpoints", section.keep_last, section.keep_best, metric or None, better)
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


def total_updates(resolved: Resolved, state: RunState, prompts: int) -> int:
    """Return the number of optimizer updates of the whole run: completed updates plus the updates of the remaining
    steps.

    By default, the learning rate decays over this number of updates. Skipped updates are also counted, so that an
    interrupted run has the same learning rates as an uninterrupted one.

    Args:
        prompts: number of training prompts, for ``gdpo.max_num_epochs``.
    """
    gdpo = resolved.config.gdpo
    left = gdpo.max_num_steps - state.step
    limit = prompt_limit(gdpo, prompts)
    if limit is not None:  # With dynamic sampling, this is an upper bound.
        left = min(left, (limit - state.position) // prompts_per_round(gdpo))
    return state.updates + max(0, left) * resolved.updates_per_step


def config_files(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (first step, file) for each config of a run, in chronological order.

    A config applies from its first step until the first step of the next config.
    """
    return [(first, path) for _, first, path in _numbered(run_dir)] or [(1, run_dir / CONFIG)]


def record_config(config: Config, run_dir: Path, step: int) -> None:
    """Write ``config.yaml``, and if necessary a numbered copy in ``config_history/``.

    A copy is written if the config differs from the previous config, or if the previous config starts at a later step.

    Args:
        step: number of completed steps. The config applies to later steps.

    Raises:
        RunError: if the folder cannot be written.
    """
    try:
        _record_config(config, run_dir, step)
    except OSError as error:
        raise RunError(f"{run_dir} cannot be written: {error.strerror or error}") from None


def _record_config(config: Config, run_dir: Path, step: int) -> None:
    file = run_dir / CONFIG
    history = run_dir / CONFIG_HISTORY
    before = file.read_text(encoding="utf-8") if file.is_file() else None
    if before is not None and not _numbered(run_dir):  # The run was started before config_history/ existed.
        history.mkdir(exist_ok=True)
        (history / "0001_from_step_1.yaml").write_text(before, encoding="utf-8")
    (number, first, _) = (_numbered(run_dir) or [(0, 0, file)])[-1]
    if before is None or before != to_yaml(config) or first > step + 1:
        save_config(config, history / f"{number + 1:04d}_from_step_{step + 1}.yaml")
    save_config(config, file)


def _numbered(run_dir: Path) -> list[tuple[int, int, Path]]:
    """Return (number, first step, file) for each file in ``config_history/``, in order."""
    files = [(_NUMBERED.fullmatch(path.name), path) for path in (run_dir / CONFIG_HISTORY).glob("*.yaml")]
    return sorted((int(match[1]), int(match[2]), path) for match, path in files if match)


def _config_of(checkpoint: Path, run_dir: Path) -> dict[str, Any]:
    """Return the config saved with a checkpoint, or the run's latest config if the checkpoint has none.

    Raises:
        ConfigError: if the file is damaged.
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
            f"{file}: cannot be read ({first_line(error)}); remove it to continue without a comparison"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: is not a config; remove it to continue without a comparison")
    return found
