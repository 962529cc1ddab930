"""Compute the vectors of ``gdpo-nemo conformance`` with the source code of the trainers:

    python tests/compat/conformance_vectors.py FOLDER [--write]

FOLDER contains checkouts named trl, verl, ms_swift, nemo_rl and gdpo (NVlabs/GDPO). The script runs their functions
that turn rewards into advantages, in float32 as the trainers do, without importing the trainers. Without ``--write``,
it lists the cases whose recorded vectors differ.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gdpo_nemo.tools.conformance.cases import VECTORS, Case, Outcome, load_cases


def functions(file: Path, *names: str, **namespace: Any) -> dict[str, Any]:
    """Compile functions and classes out of a source file, without their decorators and annotations."""
    chosen = [n for n in ast.parse(file.read_text()).body if getattr(n, "name", None) in names]
    for node in chosen:
        node.decorator_list = []  # type: ignore[attr-defined]
    annotations = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    tree = ast.fix_missing_locations(ast.Module([annotations, *chosen], []))
    exec(compile(tree, str(file), "exec"), namespace)
    return namespace


def statements(file: Path, condition: str) -> ast.If:
    """Return the ``if`` statement of a source file with this condition."""
    tree = ast.parse(file.read_text())
    return next(n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == condition)


def run(branch: ast.If, **namespace: Any) -> torch.Tensor:
    """Execute statements and return their variable ``advantages``."""
    exec(compile(ast.Module([branch], []), "trainer", "exec"), namespace)
    advantages: torch.Tensor = namespace["advantages"]
    return advantages


def group_size(case: Case) -> int:
    """Return the number of samples per group, for trainers that reshape the batch."""
    sizes = set(np.unique(case.groups, return_counts=True)[1].tolist())
    if len(sizes) > 1:
        raise ValueError("groups must have the same size")
    return int(sizes.pop())


def trl(folder: Path, aggregation: str = "normalize_then_sum") -> Callable[[Case], torch.Tensor]:
    """TRL's GRPOTrainer with ``multi_objective_aggregation``."""
    nanstd = functions(folder / "trl/trainer/utils.py", "nanstd", torch=torch)["nanstd"]
    branch = statements(
        folder / "trl/trainer/grpo_trainer.py", "self.multi_objective_aggregation == 'sum_then_normalize'"
    )

    def compute(case: Case) -> torch.Tensor:
        rewards = torch.tensor(case.rewards, dtype=torch.float32)
        trainer = SimpleNamespace(
            multi_objective_aggregation=aggregation,
            scale_rewards="group",
            reward_weights=torch.tensor(case.weights, dtype=torch.float32),
            reward_funcs=[None] * rewards.shape[1],
        )
        advantages = run(
            branch, torch=torch, nanstd=nanstd, self=trainer, device="cpu", num_generations=group_size(case),
            rewards_per_func=rewards, unscorable_mask=rewards.isnan().all(dim=1),
        )  # fmt: skip
        return torch.nan_to_num(advantages, nan=0.0)

    return compute


def trl_fork(folder: Path) -> Callable[[Case], torch.Tensor]:
    """The GRPOTrainer of NVlabs/GDPO, with ``apply_gdpo``."""
    file = folder / "trl-GDPO/trl-0.18.0-gdpo/trl/trainer/grpo_trainer.py"
    branches = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "self.apply_gdpo and len(self.reward_weights) > 1"
    ]
    branch = branches[0]

    def compute(case: Case) -> torch.Tensor:
        weights = torch.tensor(case.weights, dtype=torch.float32)
        trainer = SimpleNamespace(
            apply_gdpo=True, reward_weights=weights, num_generations=group_size(case), scale_rewards=True
        )
        rewards = torch.tensor(case.rewards, dtype=torch.float32)
        return run(branch, torch=torch, self=trainer, device="cpu", rewards_per_func=rewards, print=lambda text: None)

    return compute


def ms_swift(folder: Path) -> Callable[[Case], torch.Tensor]:
    """ms-swift's ``compute_advantages`` with ``scale_rewards="gdpo"``."""
    nanstd = functions(folder / "swift/utils/torch_utils.py", "nanstd", torch=torch)["nanstd"]
    compute_advantages = functions(
        folder / "swift/rl_core/advantage.py", "compute_advantages", torch=torch, nanstd=nanstd
    )["compute_advantages"]

    def compute(case: Case) -> torch.Tensor:
        rewards = torch.tensor(case.rewards, dtype=torch.float32)
        weights = torch.tensor(case.weights, dtype=torch.float32)
        advantages: torch.Tensor = compute_advantages(rewards, weights, group_size(case), scale_rewards="gdpo")[0]
        return advantages

    return compute


def ms_swift_turns(folder: Path) -> Callable[[Case], torch.Tensor]:
    """ms-swift's ``compute_advantages_dynamic``, which it uses if a request may have several turns."""
    compute_advantages = functions(folder / "swift/rl_core/advantage.py", "compute_advantages_dynamic", torch=torch)[
        "compute_advantages_dynamic"
    ]

    def compute(case: Case) -> torch.Tensor:
        rewards = torch.tensor(case.rewards, dtype=torch.float32)
        weights = torch.tensor(case.weights, dtype=torch.float32)
        requests = [str(number) for number in range(len(rewards))]
        advantages: torch.Tensor = compute_advantages(
            rewards, weights, [str(group) for group in case.groups], requests, scale_rewards="gdpo"
        )[0]
        return advantages

    return compute


def verl(folder: Path) -> Callable[[Case], torch.Tensor]:
    """verl's ``compute_gdpo_outcome_advantage``, whitened over the tokens of the responses."""
    masked = functions(
        folder / "verl/utils/torch_functional.py", "masked_sum", "masked_mean", "masked_var", "masked_whiten",
        torch=torch,
    )  # fmt: skip
    estimator = functions(
        folder / "verl/trainer/ppo/core_algos.py", "compute_grpo_outcome_advantage", "compute_gdpo_outcome_advantage",
        torch=torch, np=np, defaultdict=defaultdict, verl_F=SimpleNamespace(**masked),
    )["compute_gdpo_outcome_advantage"]  # fmt: skip

    def compute(case: Case) -> torch.Tensor:
        mask = torch.arange(int(case.lengths.max()))[None] < torch.tensor(case.lengths)[:, None]
        names = [f"reward_{k}" for k in range(len(case.weights))]
        advantages, _ = estimator(
            torch.zeros(mask.shape),
            mask.float(),
            case.groups,
            config={"gdpo_reward_keys": names, "gdpo_reward_weights": case.weights.tolist()},
            non_tensor_batch=dict(zip(names, case.rewards.T)),
            batch={"prompts": torch.zeros(len(mask), 1), "attention_mask": torch.cat([mask[:, :1], mask], dim=1)},
        )
        first: torch.Tensor = advantages[:, 0]
        return first

    return compute


def nemo_rl(folder: Path) -> Callable[[Case], torch.Tensor]:
    """NeMo-RL's ``GDPOAdvantageEstimator`` with the settings of its GDPO recipes: no leave-one-out baseline."""
    statistics = functions(
        folder / "nemo_rl/algorithms/utils.py", "calculate_baseline_and_std_per_prompt", torch=torch
    )["calculate_baseline_and_std_per_prompt"]
    estimator = functions(
        folder / "nemo_rl/algorithms/advantage_estimator.py", "GDPOAdvantageEstimator", torch=torch,
        calculate_baseline_and_std_per_prompt=statistics,
        get_gdpo_reward_component_keys=lambda batch: sorted(batch),
    )["GDPOAdvantageEstimator"]  # fmt: skip

    def compute(case: Case) -> torch.Tensor:
        config = SimpleNamespace(
            use_leave_one_out_baseline=False, normalize_rewards=True, reward_weights=case.weights.tolist()
        )
        batch = {f"reward/{k}": torch.tensor(row, dtype=torch.float32) for k, row in enumerate(case.rewards.T)}
        prompts = torch.tensor(case.groups)[:, None]
        advantages = estimator(config, None).compute_advantage(prompts, None, torch.ones(len(prompts), 1), batch)
        first: torch.Tensor = advantages[:, 0]
        return first

    return compute


TRAINERS: dict[str, tuple[str, Callable[[Path], Callable[[Case], torch.Tensor]]]] = {
    "trl": ("trl", trl),
    "trl_fork": ("gdpo", trl_fork),
    "verl": ("verl", verl),
    "ms_swift": ("ms_swift", ms_swift),
    "ms_swift_turns": ("ms_swift", ms_swift_turns),
    "nemo_rl": ("nemo_rl", nemo_rl),
    "grpo": ("trl", partial(trl, aggregation="sum_then_normalize")),
}
"""Checkout and function of each recorded trainer."""


def paper(case: Case) -> list[float]:
    """Compute equations 4 to 7 of the paper element by element, over the rewards that are present."""
    total = np.zeros(len(case.groups))
    for group in np.unique(case.groups):
        rows = np.flatnonzero(case.groups == group)
        for k, weight in enumerate(case.weights):
            values = case.rewards[rows, k]
            present = values[~np.isnan(values)]
            if len(present) > 1 and np.ptp(present) > 0:
                total[rows] += np.nan_to_num(weight * (values - present.mean()) / (present.std(ddof=1) + 1e-6))
    scored = ~np.isnan(case.rewards[:, case.weights != 0]).all(axis=1)
    spread = total[scored].std(ddof=1) + 1e-6
    return np.where(scored, (total - total[scored].mean()) / spread, 0.0).tolist()


def outcome(compute: Callable[[Case], torch.Tensor], case: Case) -> Outcome:
    """Return the advantages, rounded to seven digits, or the message of the trainer's error."""
    try:
        return [None if np.isnan(value) else float(f"{value:.7g}") for value in compute(case).tolist()]
    except (ValueError, RuntimeError) as error:
        return str(error).splitlines()[0][:100]


def main() -> None:
    """Compute all vectors and compare or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the vectors into the package")
    arguments = parser.parse_args()
    estimators = {name: make(arguments.folder / checkout) for name, (checkout, make) in TRAINERS.items()}
    records = json.loads(VECTORS.read_text())
    for record, case in zip(records, load_cases(), strict=True):
        found: dict[str, Outcome] = {"paper": [float(f"{value:.7g}") for value in paper(case)]}
        found |= {name: outcome(compute, case) for name, compute in estimators.items()}
        changed = [name for name, value in found.items() if record["advantages"].get(name) != value]
        print(f"{case.name:25} {'changed: ' + ', '.join(changed) if changed else 'equal'}")
        record["advantages"] = found
    if arguments.write:
        lines = ",\n".join(json.dumps(record) for record in records)
        VECTORS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
