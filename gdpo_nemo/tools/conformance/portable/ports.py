"""Adapters of six trainers and of gdpo_nemo: each calls the trainer's own functions that turn rewards into advantages.

The functions are those of the installed trainer or of a checkout. They compute in float32, as the trainers do.
"""

from __future__ import annotations

import importlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from .cases import Estimator
from .source import PortError, Source


@dataclass(frozen=True)
class Port:
    """Functions of one trainer. A function is None if the trainer has no such option."""

    title: str
    """Name and version."""
    advantages: Estimator
    """Advantages with the settings of the trainer's GDPO recipes."""
    named: Callable[[Sequence[str], np.ndarray, Sequence[float]], np.ndarray] | None = None
    """Advantages of one group from names, rewards [samples, components], and weights in the order of the names.
    None if components have no names."""
    without_signal: Callable[[np.ndarray, np.ndarray], float] | None = None
    """Share of groups that the trainer drops, or reports as groups without a signal, from rewards [samples, components]
    and groups [samples]."""
    kl_in_reward: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | None = None
    """Advantages from rewards, groups and each sample's KL penalty [samples]."""
    leave_one_out: Estimator | None = None
    """Advantages with a leave-one-out baseline."""
    paths: Mapping[str, Estimator] = field(default_factory=dict)
    """Other code that computes advantages for GDPO, by setting."""


def group_size(groups: np.ndarray) -> int:
    """Return the number of samples per group, for trainers that reshape the batch.

    Raises:
        ValueError: if groups have different sizes.
    """
    sizes = set(np.unique(groups, return_counts=True)[1].tolist())
    if len(sizes) > 1:
        raise ValueError("groups must have the same size")
    return int(sizes.pop())


def _library(name: str) -> Any:
    """Import a library of the trainer. This package does not depend on it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PortError(f"--port: {name} cannot be imported in this environment ({error})") from None


def trl(folder: Path | None = None, aggregation: str = "normalize_then_sum") -> Port:
    """Return TRL's GRPOTrainer with ``multi_objective_aggregation``."""
    torch, source = _library("torch"), Source("trl", folder)
    nanstd = source.functions("trainer/utils.py", "nanstd", torch=torch)["nanstd"]
    file = "trainer/grpo_trainer.py"
    found = source.condition(file, "self.multi_objective_aggregation == 'sum_then_normalize'")

    def run(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
        return found.run(**_trl_variables(torch, nanstd, rewards, groups, weights, aggregation))

    def advantages(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.asarray(torch.nan_to_num(run(rewards, groups, weights)["advantages"], nan=0.0))

    def without_signal(rewards: np.ndarray, groups: np.ndarray) -> float:
        return float(run(rewards, groups, np.ones(rewards.shape[1]))["is_std_zero"].float().mean())

    return Port(f"TRL {source.version('trl')}", advantages, without_signal=without_signal)


def _trl_variables(
    torch: Any, nanstd: Any, rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, aggregation: str
) -> dict[str, Any]:
    """Return the variables that TRL's statements read."""
    columns = torch.tensor(rewards, dtype=torch.float32)
    trainer = SimpleNamespace(
        multi_objective_aggregation=aggregation,
        scale_rewards="group",
        reward_weights=torch.tensor(weights, dtype=torch.float32),
        reward_funcs=[None] * rewards.shape[1],
    )
    return {
        "torch": torch,
        "nanstd": nanstd,
        "self": trainer,
        "device": "cpu",
        "num_generations": group_size(groups),
        "rewards_per_func": columns,
        "unscorable_mask": columns.isnan().all(dim=1),
    }


def axolotl(folder: Path | None = None) -> Port:
    """Return axolotl's asynchronous trainer. Without asynchronous rollouts, axolotl uses TRL's trainer."""
    torch, source = _library("torch"), Source("axolotl", folder)
    trl_source = Source("trl", folder.parent / "trl" if folder else None)
    nanstd = trl_source.functions("trainer/utils.py", "nanstd", torch=torch)["nanstd"]
    file, test = "core/trainers/grpo/async_trainer.py", "self.multi_objective_aggregation == 'sum_then_normalize'"
    whole, streamed = (source.condition(file, test, occurrence) for occurrence in (0, 1))

    def run(statement: Any, rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
        variables = _trl_variables(torch, nanstd, rewards, groups, weights, "normalize_then_sum")
        found: dict[str, Any] = statement.run(**variables)
        return found

    def advantages(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.asarray(run(whole, rewards, groups, weights)["advantages"])

    def streaming(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.asarray(run(streamed, rewards, groups, weights)["advantages"])

    def without_signal(rewards: np.ndarray, groups: np.ndarray) -> float:
        return float(run(whole, rewards, groups, np.ones(rewards.shape[1]))["is_std_zero"].float().mean())

    return Port(
        f"axolotl {source.version('axolotl')}",
        advantages,
        without_signal=without_signal,
        paths={"trl.streaming_partial_batch": streaming},
    )


def ms_swift(folder: Path | None = None) -> Port:
    """Return ms-swift with ``scale_rewards="gdpo"``."""
    torch, source = _library("torch"), Source("swift", folder)
    nanstd = source.functions("utils/torch_utils.py", "nanstd", torch=torch)["nanstd"]
    names = ("compute_advantages", "compute_advantages_dynamic", "RewardMetrics", "compute_reward_metrics")
    found = source.functions("rl_core/advantage.py", *names, torch=torch, nanstd=nanstd, Dict=dict)
    # Without its decorator, the class has no constructor.
    metrics = found["compute_reward_metrics"]
    found["RewardMetrics"] = SimpleNamespace

    def tensors(rewards: np.ndarray, weights: np.ndarray) -> tuple[Any, Any]:
        return torch.tensor(rewards, dtype=torch.float32), torch.tensor(weights, dtype=torch.float32)

    def advantages(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        arguments = (*tensors(rewards, weights), group_size(groups))
        return np.asarray(found["compute_advantages"](*arguments, scale_rewards="gdpo")[0])

    def turns(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        prompts, requests = [str(group) for group in groups], [str(row) for row in range(len(rewards))]
        arguments = (*tensors(rewards, weights), prompts, requests)
        return np.asarray(found["compute_advantages_dynamic"](*arguments, scale_rewards="gdpo")[0])

    def kl_in_reward(rewards: np.ndarray, groups: np.ndarray, kl: np.ndarray) -> np.ndarray:
        options = {"scale_rewards": "gdpo", "kl_in_reward": True, "beta": 1.0, "kl_values": torch.tensor(kl)}
        arguments = (*tensors(rewards, np.ones(rewards.shape[1])), group_size(groups))
        return np.asarray(found["compute_advantages"](*arguments, **options)[0])

    def without_signal(rewards: np.ndarray, groups: np.ndarray) -> float:
        columns, weights = tensors(rewards, np.ones(rewards.shape[1]))
        names = [str(k) for k in range(rewards.shape[1])]
        reported = metrics(columns @ weights, columns, names, group_size(groups), "gdpo")
        return float(reported.frac_reward_zero_std)

    return Port(
        f"ms-swift {source.version('ms-swift')}",
        advantages,
        without_signal=without_signal,
        kl_in_reward=kl_in_reward,
        paths={"requests of several turns": turns},
    )


def verl(folder: Path | None = None) -> Port:
    """Return verl with ``algorithm.adv_estimator: gdpo``, whose batch statistics are over tokens."""
    torch, source = _library("torch"), Source("verl", folder)
    masked = source.functions(
        "utils/torch_functional.py", "masked_sum", "masked_mean", "masked_var", "masked_whiten", torch=torch
    )
    estimator = source.functions(
        "trainer/ppo/core_algos.py", "compute_grpo_outcome_advantage", "compute_gdpo_outcome_advantage",
        torch=torch, np=np, defaultdict=defaultdict, verl_F=SimpleNamespace(**masked),
    )["compute_gdpo_outcome_advantage"]  # fmt: skip

    def compute(
        columns: Mapping[str, np.ndarray], groups: np.ndarray, weights: Sequence[float], lengths: np.ndarray,
        penalty: np.ndarray | float = 0.0,
    ) -> np.ndarray:  # fmt: skip
        mask = torch.arange(int(lengths.max()))[None] < torch.tensor(lengths)[:, None]
        rewards = torch.zeros(mask.shape)
        rewards[:, 0] = -torch.as_tensor(penalty, dtype=torch.float32)
        values, _ = estimator(
            rewards,
            mask.float(),
            groups,
            config={"gdpo_reward_keys": list(columns), "gdpo_reward_weights": list(weights)},
            non_tensor_batch=dict(columns),
            batch={"prompts": torch.zeros(len(mask), 1), "attention_mask": torch.cat([mask[:, :1], mask], dim=1)},
        )
        return np.asarray(values[:, 0])

    def advantages(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        columns = {f"reward_{k}": column for k, column in enumerate(rewards.T)}
        return compute(columns, groups, weights.tolist(), lengths)

    def named(names: Sequence[str], rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
        zeros = np.zeros(len(rewards), dtype=np.int64)
        return compute(dict(zip(names, rewards.T, strict=True)), zeros, weights, zeros + 8)

    def kl_in_reward(rewards: np.ndarray, groups: np.ndarray, kl: np.ndarray) -> np.ndarray:
        columns = {f"reward_{k}": column for k, column in enumerate(rewards.T)}
        return compute(columns, groups, [1.0] * len(columns), np.full(len(rewards), 8), kl)

    return Port(
        f"verl {source.version('verl')}",
        advantages,
        named=named,
        without_signal=_verl_filter(source),
        kl_in_reward=kl_in_reward,
    )


def _verl_filter(source: Source) -> Callable[[np.ndarray, np.ndarray], float]:
    """Return the share of groups that ``algorithm.filter_groups`` drops if its metric is the score."""
    requests: list[dict[str, Any]] = []
    store = SimpleNamespace(kv_batch_get=lambda **_: {"extra_fields": requests})
    name = "_dapo_filtered_keys"
    filtered = source.functions(
        "trainer/ppo/v1/replay_buffer.py", f"ReplayBuffer.{name}", np=np, tq=store, defaultdict=defaultdict,
        Counter=Counter,
    )[name]  # fmt: skip

    def without_signal(rewards: np.ndarray, groups: np.ndarray) -> float:
        requests[:] = [{"reward_extra_info": {"score": score}} for score in rewards.sum(axis=1)]
        names = {str(group) for group in groups}
        buffer = SimpleNamespace(
            filter_groups_metric="score",
            finished_keys={"train": names},
            _dapo_classification_cache={"train": {}},
            partitions={"train": [f"{group}_{row}" for row, group in enumerate(groups)]},
        )
        return len(filtered(buffer, "train")[0]) / len(names)

    return without_signal


class _Rows(dict[str, Any]):
    """Part of NeMo-RL's BatchedDataDict that its dynamic sampling uses."""

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self["row"])

    def select_indices(self, indices: list[int]) -> _Rows:
        """Return rows by index."""
        return _Rows({key: value[indices] for key, value in self.items()})


def nemo_rl(folder: Path | None = None) -> Port:
    """Return NeMo-RL's ``GDPOAdvantageEstimator``. Its recipes do not use the leave-one-out baseline, its default."""
    torch, source = _library("torch"), Source("nemo_rl", folder)
    statistics = source.functions("algorithms/utils.py", "calculate_baseline_and_std_per_prompt", torch=torch)[
        "calculate_baseline_and_std_per_prompt"
    ]
    estimator = source.functions(
        "algorithms/advantage_estimator.py", "GDPOAdvantageEstimator", torch=torch,
        calculate_baseline_and_std_per_prompt=statistics,
        get_gdpo_reward_component_keys=sorted,
    )["GDPOAdvantageEstimator"]  # fmt: skip
    loss = SimpleNamespace(use_kl_in_reward=True, reference_policy_kl_penalty=1.0, reference_policy_kl_type="k1")

    def compute(
        columns: Mapping[str, np.ndarray], groups: np.ndarray, weights: Sequence[float], leave_one_out: bool = False,
        kl: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        config = SimpleNamespace(
            use_leave_one_out_baseline=leave_one_out, normalize_rewards=True, reward_weights=list(weights)
        )
        batch = {f"reward/{name}": torch.tensor(row, dtype=torch.float32) for name, row in columns.items()}
        options = {}
        if kl is not None:
            logprobs = torch.tensor(kl, dtype=torch.float32)[:, None]
            options = {"logprobs_policy": logprobs, "logprobs_reference": logprobs * 0}
        mask = torch.ones(len(groups), 1)
        prompts = torch.tensor(groups)[:, None]
        values = estimator(config, loss).compute_advantage(prompts, None, mask, batch, **options)
        return np.asarray(values[:, 0])

    def numbered(rewards: np.ndarray) -> dict[str, np.ndarray]:
        return {f"{k:03d}": column for k, column in enumerate(rewards.T)}

    def advantages(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return compute(numbered(rewards), groups, weights.tolist())

    def one_out(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return compute(numbered(rewards), groups, weights.tolist(), leave_one_out=True)

    def named(names: Sequence[str], rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
        return compute(dict(zip(names, rewards.T, strict=True)), np.zeros(len(rewards), dtype=np.int64), weights)

    def kl_in_reward(rewards: np.ndarray, groups: np.ndarray, kl: np.ndarray) -> np.ndarray:
        return compute(numbered(rewards), groups, [1.0] * rewards.shape[1], kl=kl)

    return Port(
        f"NeMo-RL {source.version('nemo-rl')}",
        advantages,
        named=named,
        without_signal=_nemo_rl_filter(source, statistics, torch),
        kl_in_reward=kl_in_reward,
        leave_one_out=one_out,
    )


def _nemo_rl_filter(source: Source, statistics: Any, torch: Any) -> Callable[[np.ndarray, np.ndarray], float]:
    """Return the share of groups that ``grpo.use_dynamic_sampling`` drops. It uses the sum of the components."""
    sampling = source.functions(
        "algorithms/grpo.py", "dynamic_sampling", torch=torch, BatchedDataDict=_Rows, print=lambda *_: None
    )["dynamic_sampling"]

    def without_signal(rewards: np.ndarray, groups: np.ndarray) -> float:
        total = torch.tensor(rewards.sum(axis=1), dtype=torch.float32)
        prompts = torch.tensor(groups)[:, None]
        # Since pull request 4158, the function has a third result.
        baseline, std = statistics(prompts, total, torch.ones_like(total), leave_one_out_baseline=False)[:2]
        grpo = SimpleNamespace(
            num_prompts_per_step=len(set(groups.tolist())), num_generations_per_prompt=len(groups),
            use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=10,
        )  # fmt: skip
        batch = _Rows(total_reward=total, row=torch.arange(len(groups)))
        timer = SimpleNamespace(time=lambda name: nullcontext())
        kept = sampling(batch, std, baseline, 1, SimpleNamespace(grpo=grpo), timer)[0]["row"]
        alive = {int(groups[row]) for row in kept.tolist()}
        return 1.0 - len(alive) / len(set(groups.tolist()))

    return without_signal


def tunix(folder: Path | None = None) -> Port:
    """Return the GDPO of Tunix's pull request 978. It has no weights."""
    jnp, source = _library("jax.numpy"), Source("tunix", folder)
    name = "compute_advantages"
    estimator = source.functions("rl/grpo/gdpo_learner.py", name, jnp=jnp)[name]

    def advantages(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.asarray(estimator(jnp.asarray(rewards), group_size(groups)))

    return Port(f"Tunix {source.version('google-tunix')}", advantages)


def gdpo_nemo(folder: Path | None = None) -> Port:
    """Return gdpo_nemo with ``gdpo.preset: paper``. It is the only port that is imported."""
    if folder is not None:
        raise PortError("--source: gdpo_nemo must be installed; remove --source")
    compute = _library("gdpo_nemo.algorithms").compute_advantages
    source = Source("gdpo_nemo")

    def advantages(
        rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray, **options: Any
    ) -> np.ndarray:
        return np.asarray(compute(rewards, groups, weights=weights, lengths=lengths, preset="paper", **options).values)

    def named(names: Sequence[str], rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
        columns = dict(zip(names, rewards.T, strict=True))
        groups = np.zeros(len(rewards), dtype=np.int64)
        found = compute(columns, groups, weights=dict(zip(names, weights, strict=True)), preset="paper")
        return np.asarray(found.values)

    def without_signal(rewards: np.ndarray, groups: np.ndarray) -> float:
        alive = set(groups[compute(rewards, groups, preset="paper").has_advantage].tolist())
        return 1.0 - len(alive) / len(set(groups.tolist()))

    def kl_in_reward(rewards: np.ndarray, groups: np.ndarray, kl: np.ndarray) -> np.ndarray:
        return np.asarray(compute(rewards, groups, kl=kl, kl_coefficient=1.0, preset="paper").values)

    return Port(
        f"gdpo_nemo {source.version('gdpo-nemo')}",
        advantages,
        named=named,
        without_signal=without_signal,
        kl_in_reward=kl_in_reward,
        leave_one_out=partial(advantages, leave_one_out=True),
    )


PORTS: dict[str, Callable[[Path | None], Port]] = {
    "trl": trl,
    "verl": verl,
    "ms_swift": ms_swift,
    "nemo_rl": nemo_rl,
    "axolotl": axolotl,
    "tunix": tunix,
    "gdpo_nemo": gdpo_nemo,
}
"""Adapters by the name of ``--port``. The argument is a checkout, or None for the installed package."""


def find_port(name: str, folder: Path | None = None) -> Port:
    """Return a port by name, or an estimator by ``MODULE:FUNCTION``.

    Raises:
        PortError: if the name is unknown, or the trainer is not found or not supported.
    """
    if name in PORTS:
        return PORTS[name](folder)
    module, _, function = name.partition(":")
    if function and folder is not None:
        raise PortError("--source: conflicts with MODULE:FUNCTION; remove --source")
    if not function:
        raise PortError(f"--port: unknown name {name!r}; known: {', '.join(PORTS)}, or MODULE:FUNCTION")
    estimator = getattr(_library(module), function, None)
    if not callable(estimator):
        raise PortError(f"--port: {module} does not contain a function {function!r}")
    return Port(name, estimator)
