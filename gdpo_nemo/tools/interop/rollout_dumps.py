"""Readers of the rollout dumps of other trainers.

* trl: ``completions/completions_00001.parquet`` of a GRPOTrainer with ``log_completions: true``.
* verl: ``1.jsonl`` in ``trainer.rollout_data_dir``.

NeMo-RL, slime and prime-rl record only the sum of the rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.data.records import Group, Prompt, Trajectory
from gdpo_nemo.utils.errors import ConfigError, first_line, message_line
from gdpo_nemo.utils.files import open_file, parse_json

TRAINERS = ("trl", "verl")
_NO_TOKENS = np.zeros(0, np.int32)


def read_dump(trainer: str, path: Path) -> tuple[list[Group], np.ndarray]:
    """Return the groups of a dump, and the advantages that it records (NaN if it records none), [samples] in group
    order.

    Every column of numbers that the trainer does not write itself is a component. The samples have no tokens.

    Args:
        trainer: one of ``TRAINERS``.

    Raises:
        ConfigError: if the path is a folder, or the file cannot be read, or has no samples or no rewards.
    """
    if path.is_dir():
        suffix = ".parquet" if trainer == "trl" else ".jsonl"
        last = max(path.glob(f"*{suffix}"), key=lambda file: (len(file.name), file.name), default=None)
        raise ConfigError(
            f"{path}: is a folder; specify the dump of one step, for example {last}"
            if last
            else f"{path}: is a folder without dumps of {trainer} (*{suffix}); specify the dump of one step"
        )
    rows, prompt, completion, own = _read_trl(path) if trainer == "trl" else _read_verl(path)
    if not rows:
        raise ConfigError(f"{path}: is not a rollout dump of {trainer} (no samples)")
    for number, row in enumerate(rows, 1):
        for name in (prompt, completion):
            if name not in row:
                raise ConfigError(f"{path}: is not a rollout dump of {trainer} (sample {number} has no {name})")
    names = [name for name in rows[0] if name not in own and _has_numbers(rows, name)]
    if not names:
        raise ConfigError(f"{path}: contains no rewards by component")
    groups: list[Group] = []
    recorded = []
    for indices in _groups_of_prompts([str(row[prompt]) for row in rows], by_order=trainer == "trl"):
        group = Group(Prompt(f"{len(groups)}", _NO_TOKENS, str(rows[indices[0]][prompt]), ""), [])
        groups.append(group)
        for sample_index, index in enumerate(indices):
            row, where = rows[index], f"{path}: sample {index + 1}"
            rewards = {name: _number(row, name, where) for name in names}
            sampled = (_NO_TOKENS, _NO_TOKENS, 0, str(row[completion]), "stop")
            group.trajectories.append(Trajectory(group.prompt, sample_index, *sampled, rewards))
            recorded.append(_number(row, "advantage", where))
    return groups, np.array(recorded, np.float64)  # None becomes NaN


def _read_trl(path: Path) -> tuple[list[dict[str, Any]], str, str, Sequence[str]]:
    import pyarrow.parquet as parquet
    from pyarrow import ArrowException

    try:
        rows = parquet.read_table(path).to_pylist()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({first_line(error)})") from None
    except ArrowException as error:
        raise ConfigError(f"{path}: is not a Parquet file ({first_line(error)})") from None
    return rows, "prompt", "completion", ("step", "prompt", "completion", "advantage")


def _read_verl(path: Path) -> tuple[list[dict[str, Any]], str, str, Sequence[str]]:
    rows: list[dict[str, Any]] = []
    number = 0
    try:
        with open_file(path) as file:
            for line in file:
                number += 1
                if line.strip():
                    rows.append(parse_json(line))
                    if not isinstance(rows[-1], dict):
                        raise ValueError("every line must be a mapping")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{path}:{number}: is not a JSONL file ({message_line(error)})") from None
    return rows, "input", "output", ("step", "input", "output", "gts", "score", "request_id", "reward")


def _groups_of_prompts(prompts: Sequence[str], by_order: bool) -> list[list[int]]:
    """Return the row indices of each group.

    TRL keeps the samples of a prompt together, and the same prompt may follow itself. verl sorts a batch by length, so
    all rows of a prompt are one group.
    """
    groups: dict[Any, list[int]] = {}
    run = 0
    for index, prompt in enumerate(prompts):
        if index and prompt != prompts[index - 1]:
            run += 1
        groups.setdefault(run if by_order else prompt, []).append(index)
    return list(groups.values())


def _has_numbers(rows: Sequence[Mapping[str, object]], name: str) -> bool:
    return any(isinstance(row.get(name), (int, float)) for row in rows)


def _number(row: Mapping[str, object], name: str, where: str) -> float | None:
    """Return a reward or an advantage, or None if it is missing."""
    value = row.get(name)
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return None
    if not isinstance(value, (int, float)):
        raise ConfigError(f"{where}: {name} must be a number, got {repr(value)[:40]}")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{where}: {name} must be a number of at most 1.8e308, got {str(value)[:20]}...") from None
