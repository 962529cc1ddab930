"""Presets against the formulas of their originals, written anew here with loops, and against TRL's own source."""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gdpo_nemo.algorithms import compute_advantages

REWARDS = [[1, 3], [1, -3], [0, -3], [0, 3], [1, 1], [1, -1], [1, 0.5], [1, -3]]
IDS = [0] * 4 + [1] * 4
NAN = float("nan")


def advantages(rewards, ids=IDS, **options):
    return compute_advantages(torch.tensor(rewards).double(), ids, **options).values


@pytest.mark.parametrize(
    ("preset", "options", "expected", "tolerance"),
    [
        ("trl", {}, [1.527368, -0.00011, -1.527368, 0.00011, 0.797463, -0.184030, 0.552090, -1.165523], 1e-6),
        ("trl_fork", {}, [1.527368, -0.00011, -1.527368, 0.00011, 0.797463, -0.184030, 0.552090, -1.165523], 2e-6),
        ("ms_swift", {}, [1.527525, 0, -1.527525, 0, 0.797510, -0.184041, 0.552122, -1.165591], 1e-6),
        ("nemo_rl", {}, [1.527525, 0, -1.527525, 0, 0.797510, -0.184041, 0.552122, -1.165591], 1e-5),
        (
            "nemo_rl",
            {"leave_one_out": True},
            [1.398157, 0.091116, -1.215924, 0.091117, 0.789464, -0.038725, 0.515591, -1.630796],
            2e-6,
        ),
        ("verl", {"lengths": [10] * 8}, [1.622755, 0, -1.622755, 0, 0.847228, -0.195514, 0.586543, -1.238257], 2e-6),
        (
            "verl",
            {"lengths": [2, 4, 8, 16, 3, 6, 12, 24]},
            [2.324930, 0.472545, -1.379837, 0.472548, 1.439662, 0.249366, 1.142088, -0.940931],
            2e-6,
        ),
    ],
)
def test_presets_give_the_values_measured_with_their_originals(preset, options, expected, tolerance):
    got = advantages(REWARDS, preset=preset, **options)
    torch.testing.assert_close(got, torch.tensor(expected).double(), rtol=0, atol=tolerance)


def test_token_whitening_of_verl_flips_a_sign_and_loses_the_groups_zero_sum():
    by_sequence = advantages(REWARDS, preset="paper")
    by_token = advantages(REWARDS, preset="verl", lengths=[2, 4, 8, 16, 3, 6, 12, 24])
    assert by_sequence[5] < 0 < by_token[5]
    assert abs(by_sequence[:4].sum()) < 1e-9 < 1 < by_token[:4].sum()


def test_missing_rewards_per_preset():
    """Half a group without its second reward, and one row without any."""
    rewards = [[1, 2], [0, 1], [0, NAN], [0, NAN], [1, 0], [0, 0], [1, NAN], [NAN, NAN]]
    trl = advantages(rewards, preset="trl")
    assert trl[7] == 0 and trl.isfinite().all()
    fork = advantages(rewards, preset="trl_fork")
    filled = advantages(np.nan_to_num(rewards).tolist(), preset="trl_fork")
    torch.testing.assert_close(fork, filled, rtol=0, atol=0)
    assert fork[7] != 0 and (fork - trl).abs().max() > 0.1
    with pytest.raises(ValueError, match="does not support missing rewards; 5 are missing, in reward_0, reward_1"):
        advantages(rewards, preset="verl", lengths=[1] * 8)


def test_a_lone_value_is_dropped_by_trl_and_made_a_signal_by_its_fork():
    rewards = [[1, 5], [1, NAN], [0, NAN], [0, NAN], [1, 1], [0, 1], [1, 1], [0, 1]]
    components = compute_advantages(torch.tensor(rewards).double(), IDS, preset="trl").components
    assert (components[:, 1] == 0).all()
    fork = compute_advantages(torch.tensor(rewards).double(), IDS, preset="trl_fork").components[:, 1]
    torch.testing.assert_close(fork[:4], torch.tensor([1.5, -0.5, -0.5, -0.5]).double(), rtol=0, atol=1e-3)


def test_a_group_of_one_passes_its_raw_reward_in_verl_and_nothing_elsewhere():
    rewards = [[1.0, 0], [0, 1], [1, 1], [5, 5]]
    ids = [0, 0, 0, 1]
    lone = compute_advantages(torch.tensor(rewards), ids, preset="verl", lengths=[1] * 4).components[3]
    torch.testing.assert_close(lone, torch.tensor([5.0, 5.0]).double(), rtol=0, atol=1e-4)
    for preset in ("paper", "trl", "ms_swift", "nemo_rl"):
        assert (compute_advantages(torch.tensor(rewards), ids, preset=preset).components[3] == 0).all()


def test_one_component_is_refused_by_nemo_rl_and_plain_grpo_in_the_trl_fork():
    rewards = [[1.0], [0], [0], [0], [1], [1], [0], [0]]
    with pytest.raises(ValueError, match="at least two components"):
        advantages(rewards, preset="nemo_rl")
    fork = advantages(rewards, preset="trl_fork")
    torch.testing.assert_close(fork, advantages(rewards, estimator="grpo", epsilon=1e-4), rtol=0, atol=0)


def reference(
    preset: str, rewards: np.ndarray, ids: np.ndarray, weights: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """The published formulas, element by element."""
    eps = {"paper": 1e-6, "trl": 1e-4, "trl_fork": 1e-4, "verl": 1e-6, "ms_swift": 1e-8, "nemo_rl": 1e-6}[preset]
    filled = np.nan_to_num(rewards) if preset in ("trl_fork", "nemo_rl") else rewards
    total = np.zeros(len(ids))
    for group in set(ids):
        rows = np.flatnonzero(ids == group)
        for k, weight in enumerate(weights):
            values = filled[rows, k]
            there = values[~np.isnan(values)]
            if len(there) < 2 or (preset in ("paper", "nemo_rl") and np.ptp(there) == 0):
                continue
            total[rows] += np.nan_to_num(weight * (values - there.mean()) / (there.std(ddof=1) + eps))
    scored = ~np.isnan(filled).all(axis=1)
    counted = np.repeat(total, lengths) if preset == "verl" else total[scored]
    mean = counted.mean()
    std = counted.std(ddof=1)
    divisor = {"verl": np.sqrt(std**2 + 1e-8), "nemo_rl": std}.get(preset, std + eps)
    return np.where(scored, (total - mean) / divisor, 0.0)


@pytest.mark.parametrize("preset", ["paper", "trl", "trl_fork", "verl", "ms_swift", "nemo_rl"])
@pytest.mark.parametrize("seed", range(5))
def test_presets_equal_their_published_formula_on_random_tables(preset, seed):
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.repeat(np.arange(6), rng.integers(2, 7, 6)))
    rewards = np.round(rng.normal(size=(len(ids), 3)), 1)
    if preset != "verl":
        rewards[rng.random(rewards.shape) < 0.2] = np.nan
    weights = np.array([1.0, 2.0, 0.25])
    lengths = rng.integers(1, 50, len(ids))
    got = compute_advantages(rewards, ids, weights=weights, lengths=lengths, preset=preset).values.numpy()
    np.testing.assert_allclose(got, reference(preset, rewards, ids, weights, lengths), rtol=0, atol=1e-9)


def trl_source(file: str) -> ast.Module:
    folder = Path(importlib.util.find_spec("trl").submodule_search_locations[0])
    return ast.parse((folder / "trainer" / file).read_text())


def function_from(file: str, name: str):
    """One function of TRL, compiled out of its source without importing the trainer."""
    node = next(n for n in ast.walk(trl_source(file)) if isinstance(n, ast.FunctionDef) and n.name == name)
    node.decorator_list = []
    namespace = {"torch": torch}
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), file, "exec"), namespace)
    return namespace[name]


def trl_advantages(rewards: torch.Tensor, generations: int, weights: torch.Tensor, aggregation: str) -> torch.Tensor:
    """The statements of `GRPOTrainer` that turn rewards into advantages, executed as TRL ships them."""
    test = "self.multi_objective_aggregation == 'sum_then_normalize'"
    tree = trl_source("grpo_trainer.py")
    branch = next(n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == test)
    trainer = SimpleNamespace(
        multi_objective_aggregation=aggregation,
        reward_weights=weights,
        scale_rewards="group",
        reward_funcs=[None] * rewards.shape[1],
    )
    namespace = {
        "torch": torch,
        "nanstd": function_from("utils.py", "nanstd"),
        "self": trainer,
        "device": "cpu",
        "num_generations": generations,
        "rewards_per_func": rewards,
        "unscorable_mask": rewards.isnan().all(dim=1),
    }
    exec(compile(ast.Module([branch], []), "grpo_trainer.py", "exec"), namespace)
    return torch.nan_to_num(namespace["advantages"], nan=0.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("aggregation", "options"), [
    ("normalize_then_sum", {"preset": "trl"}),
    ("sum_then_normalize", {"estimator": "grpo", "epsilon": 1e-4}),
])  # fmt: skip
def test_trl_gives_the_same_advantages(seed, aggregation, options):
    rng = np.random.default_rng(seed)
    rewards = torch.from_numpy(rng.integers(0, 3, (40, 3)).astype(float))
    rewards[torch.from_numpy(rng.random((40, 3)) < 0.2)] = NAN
    rewards[7] = NAN
    weights = torch.tensor([1.0, 0.5, 2.0]).double()
    theirs = trl_advantages(rewards, 8, weights, aggregation)
    ours = compute_advantages(rewards, np.repeat(np.arange(5), 8), weights=weights, **options).values
    # Their Bessel factor is a quotient of integers, which torch gives in float32.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert ours[7] == 0
