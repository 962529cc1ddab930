"""Where a run goes on: the newest good checkpoint of its folder, if data and model are those it was made with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from gdpo_nemo.checkpoints import Checkpoints, RunState, model_fingerprint
from gdpo_nemo.config.load import config_to_dict
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.inputs import Inputs


@dataclass
class Start:
    """Where a run starts."""

    checkpoints: Checkpoints
    state: RunState
    path: Path | None
    """The checkpoint to load; None: from the model."""
    remarks: list[str]
    """What a person should know about it."""


def find_start(config: Config, run_dir: Path, inputs: Inputs) -> Start:
    """The start of the run in ``run_dir``.

    Raises:
        ConfigError: the folder holds a run on other data or of another model.
    """
    section = config.checkpointing
    checkpoints = Checkpoints(run_dir / "checkpoints", section.keep_last, section.keep_best, section.metric_name)
    remarks: list[str] = []
    data, model = inputs.prompts.fingerprint, model_fingerprint(inputs.folder)
    found = checkpoints.newest(remarks.append) if section.enabled else None
    if found is None:
        return Start(checkpoints, RunState(data=data, model=model), None, remarks)
    path, state = found
    for what, then, now in (("training data", state.data, data), ("model", state.model, model)):
        if then != now:
            raise ConfigError(f"run.dir: {run_dir} was started with another {what}; use another run.name or the same {what}")
    remarks += [*_changes(config, run_dir), f"resuming from {path} after step {state.step}"]
    return Start(checkpoints, state, path, remarks)


def _changes(config: Config, run_dir: Path) -> list[str]:
    """One line naming the keys that differ from the config this run folder was last started with."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        return []
    before, now = _flat(yaml.safe_load(file.read_text())), _flat(config_to_dict(config))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [f"the config differs from the last start of this run in: {', '.join(changed)}"] if changed else []


def _flat(tree, prefix: str = "") -> dict:
    """A tree of sections as dotted keys."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {key: value for name, branch in tree.items() for key, value in _flat(branch, f"{prefix}.{name}".strip(".")).items()}
