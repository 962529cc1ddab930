"""``gdpo-nemo rollouts``: export the samples of a run as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from gdpo_nemo.commands.arguments import Commands
from gdpo_nemo.utils.errors import ConfigError, first_line


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser("rollouts", help="export a run's samples as JSON lines, one object per sample")
    command.add_argument("run_dir", metavar="RUN_DIR", help="run folder")
    command.add_argument(
        "--step", type=int, action="append", metavar="N", help="step to export; repeatable (default: all steps)"
    )
    command.add_argument("--out", default="-", metavar="FILE", help="file to write (default: standard output)")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the samples of the selected steps in step order."""
    files = _selected_files(Path(arguments.run_dir), arguments.step)
    try:
        with _open_output(arguments.out) as out:
            for step, path in files:
                out.writelines(_lines(step, path))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"--out: {arguments.out} cannot be written ({error.strerror})") from None
    return 0


def _selected_files(run_dir: Path, steps: list[int] | None) -> list[tuple[int, Path]]:
    from gdpo_nemo.observe.samples import rollout_files

    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: not a run folder")
    files = dict(rollout_files(run_dir))
    if not files:
        raise ConfigError(f"{run_dir}: no samples found; set rollout.save_samples to write samples")
    if missing := sorted(set(steps or []) - set(files)):
        raise ConfigError(
            f"--step: {run_dir} has no samples of step {missing[0]}; existing samples are from steps "
            f"{min(files)} to {max(files)}"
        )
    return [(step, path) for step, path in files.items() if not steps or step in steps]


def _lines(step: int, path: Path) -> Iterator[str]:
    from gdpo_nemo.observe.samples import iter_rollouts

    try:
        for record in iter_rollouts(path):
            yield json.dumps({"step": step, **record}) + "\n"
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is not a rollout file ({first_line(error)})") from None


@contextlib.contextmanager
def _open_output(out: str) -> Iterator[TextIO]:
    from gdpo_nemo.utils.files import whole_file

    if out == "-":
        yield sys.stdout
        return
    with whole_file(out) as file:
        text = io.TextIOWrapper(file, encoding="utf-8")
        yield text
        text.detach()  # flush the text, but leave the file open
