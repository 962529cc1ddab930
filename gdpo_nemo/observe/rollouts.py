"""``rollouts/step_*.jsonl``: every sample of a step with its rewards and advantage, one JSON object per trajectory.

Numbers keep their full precision (a float32 log-prob reads back as the same float32), so a step can be recomputed.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import numpy as np

from gdpo_nemo.data.records import Group, Trajectory

FOLDER = "rollouts"


def rollout_path(run_dir: str | Path, step: int) -> Path:
    """The file of one step."""
    return Path(run_dir) / FOLDER / f"step_{step:04d}.jsonl"


def write_rollouts(
    run_dir: str | Path,
    step: int,
    groups: Sequence[Group],
    advantages: np.ndarray | None = None,
    trainer_logprobs: Sequence[np.ndarray] | None = None,
) -> Path:
    """Write the trajectories of ``groups`` as the samples of a step.

    Args:
        advantages: [trajectories], in the order of the groups.
        trainer_logprobs: per trajectory, [completion tokens], in the same order.

    Raises:
        ValueError: an argument has another length than there are trajectories.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for name, column in (("advantages", advantages), ("trainer_logprobs", trainer_logprobs)):
        if column is not None and len(column) != len(trajectories):
            raise ValueError(f"{name}: {len(column)} entries for {len(trajectories)} trajectories")
    more: list[dict[str, Any]] = [{} for _ in trajectories]
    for index, record in enumerate(more):
        if advantages is not None:
            record["advantage"] = _number(advantages[index])
        if trainer_logprobs is not None:
            record["trainer_logprobs"] = _list(trainer_logprobs[index])
    path = rollout_path(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_samples(path, groups, more)


def write_samples(path: Path, groups: Sequence[Group], more: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write one object per trajectory of ``groups``, with what ``more`` adds to each; the file appears whole or not at
    all."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        for trajectory, added in zip(trajectories, more or [{}] * len(trajectories)):
            file.write(json.dumps({**_record(trajectory), **added}) + "\n")
    os.replace(partial, path)
    return path


def read_rollouts(path: str | Path) -> list[dict[str, Any]]:
    """The records of one file, as written."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def loss_mask_of(record: dict[str, Any]) -> np.ndarray | None:
    """The mask of a record, bool [completion tokens]; None where the policy wrote every token (and in older files)."""
    mask = record.get("loss_mask")
    return None if mask is None else np.array(mask, bool)


def rollout_files(run_dir: str | Path) -> Iterator[tuple[int, Path]]:
    """(step, file) of every step that was written, in order."""
    found = ((int(path.stem.removeprefix("step_")), path) for path in (Path(run_dir) / FOLDER).glob("step_*.jsonl"))
    yield from sorted(found)


def remove_rollouts_after(run_dir: str | Path, step: int) -> None:
    """Remove the files of later steps, which a resumed run will write again."""
    for later, path in list(rollout_files(run_dir)):
        if later > step:
            path.unlink()


def _record(trajectory: Trajectory) -> dict[str, Any]:
    prompt = trajectory.prompt
    extra = {"extra": trajectory.extra} if trajectory.extra else {}
    return {
        "prompt_id": prompt.id,
        "sample_index": trajectory.sample_index,
        "environment": prompt.environment,
        "prompt": prompt.text,
        "completion": trajectory.text,
        "rewards": {name: _number(value) for name, value in trajectory.rewards.items()},
        "outcome": str(trajectory.outcome),
        "detail": trajectory.detail,
        "finish_reason": trajectory.finish_reason,
        "policy_version": trajectory.policy_version,
        "prompt_ids": np.asarray(prompt.token_ids).tolist(),
        "completion_ids": np.asarray(trajectory.completion_ids).tolist(),
        "logprobs": _list(trajectory.logprobs),
        "turns": trajectory.turns,
        "loss_mask": None if trajectory.loss_mask is None else np.asarray(trajectory.loss_mask).astype(int).tolist(),
        **extra,
    }


def _list(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in np.asarray(values).tolist()]


def _number(value: float | None) -> float | None:
    """None for what is not applicable; JSON has no NaN."""
    return None if value is None or math.isnan(value) else float(value)
