"""Compute the vectors of ``gdpo-nemo conformance`` with the source code of the trainers:

    python tests/compat/conformance_vectors.py FOLDER [--write]

FOLDER contains checkouts named trl, verl, ms_swift, nemo_rl, axolotl, tunix (pull request 978) and gdpo (NVlabs/GDPO).
The adapters of ``gdpo_conformance`` run their functions that turn rewards into advantages, in float32 as the trainers
do, without importing the trainers. Without ``--write``, the script lists the cases whose recorded vectors differ. Tunix
needs JAX.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gdpo_nemo.tools.conformance.portable import ports
from gdpo_nemo.tools.conformance.portable.cases import VECTORS, Estimator, Outcome, evaluate, load_cases
from gdpo_nemo.tools.conformance.portable.checks import RUBRICS
from gdpo_nemo.tools.conformance.portable.source import Statement


def trl_fork(folder: Path) -> Estimator:
    """The GRPOTrainer of NVlabs/GDPO, with ``apply_gdpo``."""
    file = folder / "trl-GDPO/trl-0.18.0-gdpo/trl/trainer/grpo_trainer.py"
    test = "self.apply_gdpo and len(self.reward_weights) > 1"
    nodes = ast.walk(ast.parse(file.read_text()))
    branch = Statement(next(n for n in nodes if isinstance(n, ast.If) and ast.unparse(n.test) == test), str(file))

    def compute(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        trainer = SimpleNamespace(
            apply_gdpo=True,
            reward_weights=torch.tensor(weights, dtype=torch.float32),
            num_generations=ports.group_size(groups),
            scale_rewards=True,
        )
        columns = torch.tensor(rewards, dtype=torch.float32)
        found = branch.run(torch=torch, self=trainer, device="cpu", rewards_per_func=columns, print=lambda text: None)
        return np.asarray(found["advantages"])

    return compute


def leave_one_out(folder: Path) -> Estimator:
    """NeMo-RL's estimator with its default baseline."""
    estimator = ports.nemo_rl(folder).leave_one_out
    assert estimator is not None
    return estimator


TRAINERS: dict[str, tuple[str, Callable[[Path], Estimator]]] = {
    "trl": ("trl", lambda folder: ports.trl(folder).advantages),
    "trl_fork": ("gdpo", trl_fork),
    "verl": ("verl", lambda folder: ports.verl(folder).advantages),
    "ms_swift": ("ms_swift", lambda folder: ports.ms_swift(folder).advantages),
    "ms_swift_turns": ("ms_swift", lambda folder: ports.ms_swift(folder).paths["requests of several turns"]),
    "nemo_rl": ("nemo_rl", lambda folder: ports.nemo_rl(folder).advantages),
    "nemo_rl_loo": ("nemo_rl", leave_one_out),
    "axolotl": ("axolotl", lambda folder: ports.axolotl(folder).advantages),
    "axolotl_streaming": ("axolotl", lambda folder: ports.axolotl(folder).paths["trl.streaming_partial_batch"]),
    "tunix": ("tunix", lambda folder: ports.tunix(folder).advantages),
    "grpo": ("trl", lambda folder: ports.trl(folder, aggregation="sum_then_normalize").advantages),
}
"""Checkout and function of each recorded trainer."""


def paper(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> list[float]:
    """Compute equations 4 to 7 of the paper element by element, over the rewards that are present.

    Args:
        rewards: [samples, components], NaN if missing.
        weights: [samples, components].
    """
    total = np.zeros(len(groups))
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        for k in range(rewards.shape[1]):
            values = rewards[rows, k]
            present = values[~np.isnan(values)]
            if len(present) > 1 and np.ptp(present) > 0:
                scores = weights[rows, k] * (values - present.mean()) / (present.std(ddof=1) + 1e-6)
                total[rows] += np.nan_to_num(scores)
    scored = (~np.isnan(rewards) & (weights != 0)).any(axis=1)
    spread = total[scored].std(ddof=1) + 1e-6
    return rounded(np.where(scored, (total - total[scored].mean()) / spread, 0.0).tolist())


def rubric(record: dict[str, Any]) -> dict[str, list[float]]:
    """Compute the advantages of a batch whose prompts have their own criteria and weights.

    Criterion j of a prompt is column j in the prompt's group. A criterion that does not apply to a sample is NaN.
    """
    groups = np.repeat(np.arange(len(record["sizes"])), record["sizes"])
    rewards = np.array(record["rewards"], dtype=np.float64)
    weights = np.array(record["weights"], dtype=np.float64)[groups]
    # The weights of a prompt's rubric are divided by the sum of their absolute values.
    shares = weights / np.abs(weights).sum(axis=1, keepdims=True)
    present = np.where(np.isnan(rewards), 0.0, np.abs(weights))
    score = np.nansum(rewards * weights, axis=1, keepdims=True) / present.sum(axis=1, keepdims=True)
    return {
        "by criterion": paper(rewards, groups, shares),
        "by criterion, unscaled": paper(rewards, groups, weights),
        "sum of criteria": paper(score, groups, np.ones_like(score)),
    }


def rounded(values: Outcome) -> Any:
    """Return advantages with seven digits."""
    if isinstance(values, str):
        return values
    return [None if value is None or np.isnan(value) else float(f"{value:.7g}") for value in values]


def write(path: Path, records: list[dict[str, Any]]) -> None:
    """Write one record per line."""
    lines = ",\n".join(json.dumps(record) for record in records)
    path.write_text(f"[\n{lines}\n]\n")


def main() -> None:
    """Compute all vectors and compare or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the vectors into the package")
    arguments = parser.parse_args()
    estimators = {name: make(arguments.folder / checkout) for name, (checkout, make) in TRAINERS.items()}
    records = json.loads(VECTORS.read_text())
    for record, case in zip(records, load_cases(), strict=True):
        weights = np.broadcast_to(case.weights, case.rewards.shape)
        found: dict[str, Outcome] = {"paper": paper(case.rewards, case.groups, weights)}
        found |= {name: rounded(evaluate(estimator, case)) for name, estimator in estimators.items()}
        record["advantages"] = report(case.name, record["advantages"], found)
    rubrics = json.loads(RUBRICS.read_text())
    for record in rubrics:
        record["advantages"] = report(record["name"], record["advantages"], rubric(record))
    if arguments.write:
        write(VECTORS, records)
        write(RUBRICS, rubrics)


def report(name: str, recorded: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Print which vectors of a batch changed, and return the new ones."""
    changed = [key for key, value in found.items() if recorded.get(key) != value]
    print(f"{name:25} {'changed: ' + ', '.join(changed) if changed else 'equal'}")
    return found


if __name__ == "__main__":
    main()
