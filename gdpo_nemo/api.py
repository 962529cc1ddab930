"""A run from Python: ``from gdpo_nemo import train``. The command line's ``train`` is ``run``, below."""

from __future__ import annotations

import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping

from gdpo_nemo.config.files import check_folder_can_be
from gdpo_nemo.config.import_trial import imports_tried
from gdpo_nemo.config.load import ConfigSource, Overrides
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import RunError
from gdpo_nemo.inline import Reward, Rows, inline_run, written
from gdpo_nemo.observe.display import NORMAL, QUIET, shown
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.ownership import check_free
from gdpo_nemo.phases import phase
from gdpo_nemo.startup import quiet_torch
from gdpo_nemo.validation import validate

_STOPPED = (128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class TrainResult:
    """What a run left."""

    status: int
    """Exit status of the command line: 0, or 130, 143, 129 where SIGINT, SIGTERM or SIGHUP ended the run early."""
    run_dir: Path
    """The run's folder: ``config.yaml``, ``metrics.jsonl``, ``report.html``, ``rollouts/``, ``checkpoints/``."""
    model: Path | None
    """Folder with the final weights in Hugging Face's format; None where the run ended early or writes none
    (``checkpointing.export_hf``)."""
    metrics: dict[str, float] = field(repr=False)
    """The row of the last step, by metric key; empty where none was done."""
    validation: dict[str, float] = field(repr=False)
    """The row of the last validation, by metric key; empty where there was none."""
    config: Config = field(repr=False)
    """What the run was made of, resolved."""

    @property
    def complete(self) -> bool:
        """Whether the run did what was asked."""
        return self.status == 0

    def history(self) -> list[dict[str, Any]]:
        """Every row of ``metrics.jsonl``, in order: a training row has a loss, a validation row has not."""
        return read_metrics(self.run_dir)


def train(
    config: ConfigSource = None,
    *,
    rewards: Mapping[str, Reward] | None = None,
    data: Rows | None = None,
    validation: Rows | None = None,
    overrides: Overrides = (),
) -> TrainResult:
    """Train to the last step, or resume the run of the same folder.

    Args:
        config: YAML file, the same as a mapping, a loaded config, or None for the demo.
        rewards: components by name, each a function as TRL calls them, ``f(completions, **columns) -> list[float |
            None]``, alone or as (function, weight). In place of the config's environments and rewards.
        data: training prompts in place of the config's: rows (dictionaries, a ``datasets.Dataset``), a file, or a
            dataset on the hub.
        validation: held-out prompts, likewise. Without them those of the config stay, unless its environment made
            them and ``rewards`` replaces it: then nothing is validated.
        overrides: {"section.key": value}, or texts ``section.key=value``; they come last.

    Raises:
        ConfigError: the run cannot be made as asked; nothing was changed. RunError: it failed.
    """
    begin = time.time()
    quiet_torch()
    wanted = inline_run(config, rewards, data, validation, overrides)
    check_folder_can_be("run.dir", wanted.config.run.dir)
    check_free(Path(wanted.config.run.dir))
    with written(Path(wanted.config.run.dir), wanted.files), imports_tried():
        validate(wanted.config)
        return run(wanted.config, begin)


def run(config: Config, begin: float | None = None) -> TrainResult:
    """Run a validated config; one at a time in a process.

    Args:
        begin: seconds since the epoch when the user asked for it; None: when this process started.

    Raises:
        ConfigError, RunError: as ``train``.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise RunError("a run is under way in this process; wait for its end, or train in another process")
    try:
        with shown(sys.stdout, NORMAL, begin) as display:
            if config.logger.console == "quiet":
                display.level = QUIET
            with phase("imports"):
                from gdpo_nemo.trainer import run as fit

            status = fit(config, begin)
    except SystemExit as end:  # a signal that came before training had started, or the second one
        if end.code not in _STOPPED:
            raise RunError(f"the run was ended by sys.exit({end.code!r})") from end
        status = int(end.code)
    finally:
        _one_at_a_time.release()
    return _result(config, status)


def _result(config: Config, status: int) -> TrainResult:
    run_dir = Path(config.run.dir).absolute()
    steps: dict[str, float] = {}
    validation: dict[str, float] = {}
    for row in read_metrics(run_dir):
        if "loss" in row:
            steps = row
        else:
            validation = row
    exported = status == 0 and config.checkpointing.export_hf
    return TrainResult(status, run_dir, run_dir / "model" if exported else None, steps, validation, config)
