"""Recorded advantages of other trainers, and the command that compares a function with them."""

import os

import numpy as np
import pytest
import torch
from algorithms.test_presets import reference, trl_advantages

from gdpo_nemo.algorithms.settings import PRESETS
from gdpo_nemo.commands import cli
from gdpo_nemo.tools.conformance.command import built_in
from gdpo_nemo.tools.conformance.portable.cases import IMPLEMENTATIONS, TOLERANCE, difference, evaluate, load_cases
from gdpo_nemo.utils.exits import exits_contained

CASES = {case.name: case for case in load_cases()}
GROUPS = {"unequal groups", "single-sample group"}
MISSING = {"missing reward", "missing sample", "lone reward"}
UNLIKE = {
    "paper": set(),
    # TRL and ms-swift reshape the batch and therefore require groups of the same size.
    "trl": GROUPS | {"opposed rewards"},
    "trl_fork": GROUPS | {"opposed rewards"},
    # ms-swift counts a sample without a reward as 0. Its epsilon of 1e-8 turns float32 rounding noise into a signal.
    "ms_swift": GROUPS | {"missing sample", "rounding", "opposed rewards"},
    # The preset raises an error where verl returns NaN for the whole batch. verl trains on rounding noise of size 0.04.
    "verl": MISSING | {"rounding", "opposed rewards"},
    # NeMo-RL's estimator returns NaN; the preset counts missing rewards as 0. Its variance loses precision in float32.
    "nemo_rl": MISSING | {"large offset", "opposed rewards"},
}
"""Batches in which a preset differs from the recorded trainer."""


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_equal_the_recorded_trainers_except_in_the_listed_batches(preset):
    gaps = {name: difference(evaluate(built_in(preset), case), case.advantages[preset]) for name, case in CASES.items()}
    assert {name for name, gap in gaps.items() if gap > TOLERANCE} == UNLIKE[preset]
    assert max(gap for name, gap in gaps.items() if name not in UNLIKE[preset] | {"rounding"}) < 1e-5


def test_the_default_rule_differs_from_the_paper_only_by_constant_groups_in_the_batch_statistics():
    unlike = {n for n, c in CASES.items() if difference(evaluate(built_in(), c), c.advantages["paper"]) > TOLERANCE}
    assert unlike == {"constant groups", "single-sample group", "rounding"}


@pytest.mark.parametrize("name", CASES)
def test_the_recorded_paper_is_its_formula_element_by_element(name):
    case = CASES[name]
    weighted = case.weights != 0
    found = reference("paper", case.rewards[:, weighted], case.groups, case.weights[weighted], case.lengths)
    np.testing.assert_allclose(case.advantages["paper"], found, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES.keys() - GROUPS))
@pytest.mark.parametrize("column, aggregation", [("trl", "normalize_then_sum"), ("grpo", "sum_then_normalize")])
def test_the_recorded_trl_is_the_installed_trl(name, column, aggregation):
    case = CASES[name]
    rewards, weights = (torch.tensor(values, dtype=torch.float32) for values in (case.rewards, case.weights))
    found = trl_advantages(rewards, np.bincount(case.groups)[0], weights, aggregation)
    np.testing.assert_allclose(case.advantages[column], found.numpy(), rtol=0, atol=0.01 if "opposed" in name else 2e-4)


def test_every_case_tells_two_implementations_apart():
    for case in CASES.values():
        assert case.advantages.keys() == IMPLEMENTATIONS.keys()
        assert any(difference(case.advantages["paper"], found) > TOLERANCE for found in case.advantages.values())


def test_errors_and_nan_are_never_equal_to_numbers():
    numbers, gaps = [1.0, 2.0], [1.0, None]
    assert difference(numbers, [1.0, 2.5]) == 0.5
    assert difference(gaps, [1.0, None]) == 0 == difference("one message", "another")
    assert difference(numbers, gaps) == difference(gaps, numbers) == difference("error", numbers) == float("inf")


ESTIMATORS = """
import numpy as np

def summed(rewards, groups, weights, lengths):
    total = np.nansum(rewards * weights, axis=1)
    if len(set(np.bincount(groups))) > 1:
        raise RuntimeError("groups differ")
    total[np.isnan(rewards).all(axis=1)] = np.nan
    for group in set(groups):
        rows = groups == group
        total[rows] = (total[rows] - np.nanmean(total[rows])) / (np.nanstd(total[rows], ddof=1) + 1e-4)
    return np.nan_to_num(total)

def per_component(rewards, groups, weights, lengths):
    return rewards

def ragged(rewards, groups, weights, lengths):
    return [[1], [1, 2]]

class Odd:
    def __array__(self, *arguments, **options):
        raise RuntimeError

def odd(rewards, groups, weights, lengths):
    return Odd()
"""


@pytest.mark.slow
def test_the_command_names_the_rule_that_a_function_follows(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(ESTIMATORS)
    assert cli.main(["conformance", f"{path}:summed"]) == 1
    out = capsys.readouterr().out
    assert "equals paper in 1 of 17 batches" in out and "agrees most often with grpo, in 17 batches" in out
    assert cli.main(["conformance", f"{path}:summed", "--rule", "grpo"]) == 0
    assert cli.main(["conformance", "paper"]) == 0
    assert "paper equals paper in 17 of 17 batches" in capsys.readouterr().out


def test_the_command_without_a_function_shows_each_recorded_implementation(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert cli.main(["conformance"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: " in out for name in IMPLEMENTATIONS)
    assert "nan" in out and "error" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{d}/mine.py:per_component"], "FUNCTION: worked example: expected one advantage per sample"),
        (["{d}/mine.py:np"], "mine.py:np is not a function"),
        (["{d}/mine.py:ragged"], "FUNCTION: worked example: the result is not an array of numbers (ValueError"),
        (["{d}/mine.py:odd"], "FUNCTION: worked example: the result is not an array of numbers (RuntimeError"),
    ],
)
def test_command_refuses_objects_that_are_not_estimators(arguments, message, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(ESTIMATORS)
    assert cli.main(["conformance", *(argument.format(d=tmp_path) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("exit_with", [SystemExit(3), GeneratorExit("x"), BaseException("x")])
def test_exits_of_a_custom_function_are_its_outcome(exit_with):
    def leave(*_):
        raise exit_with

    assert isinstance(evaluate(exits_contained()(leave), load_cases()[0]), str)
    assert "os._exit" in evaluate(exits_contained()(lambda *_: os._exit(3)), load_cases()[0])
