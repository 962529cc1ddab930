"""``gdpo-nemo rollouts``: the samples of a run as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Iterator, TextIO

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.errors import ConfigError


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("rollouts", help="the samples of a run as JSON lines, one object a sample")
    command.add_argument("run_dir", metavar="RUN_DIR", help="the folder of the run")
    command.add_argument("--step", type=int, action="append", metavar="N", help="again for more; default: every step")
    command.add_argument("--out", default="-", metavar="FILE", help="default: standard output")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the samples of the chosen steps, in the order of the steps."""
    files = _chosen(Path(arguments.run_dir), arguments.step)
    try:
        with _opened(arguments.out) as out:
            for step, path in files:
                out.writelines(_lines(step, path))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"--out: {arguments.out} cannot be written ({error.strerror})") from None
    return 0


def _chosen(run_dir: Path, steps: list[int] | None) -> list[tuple[int, Path]]:
    from gdpo_nemo.observe.rollouts import rollout_files

    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is no folder of a run")
    files = dict(rollout_files(run_dir))
    if not files:
        raise ConfigError(f"{run_dir} holds no samples (rollout.save_samples writes them)")
    if missing := sorted(set(steps or []) - set(files)):
        raise ConfigError(
            f"--step: {run_dir} holds no samples of step {missing[0]}, but of {min(files)} to {max(files)}"
        )
    return [(step, path) for step, path in files.items() if not steps or step in steps]


def _lines(step: int, path: Path) -> Iterator[str]:
    from gdpo_nemo.observe.rollouts import iter_rollouts

    try:
        for record in iter_rollouts(path):
            yield json.dumps({"step": step, **record}) + "\n"
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is not a file of rollouts ({first_line(error)})") from None


@contextlib.contextmanager
def _opened(out: str) -> Iterator[TextIO]:
    from gdpo_nemo.config.writing import whole_file

    if out == "-":
        yield sys.stdout
        return
    with whole_file(out) as file:
        text = io.TextIOWrapper(file, encoding="utf-8")
        yield text
        text.detach()  # flushes and leaves the file open
