"""Recorded advantages of other trainers, and the command that compares a function with them."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from algorithms.test_presets import reference

from gdpo_nemo.algorithms import compute_advantages
from gdpo_nemo.algorithms.settings import PRESETS
from gdpo_nemo.commands import cli
from gdpo_nemo.tools.conformance.command import built_in
from gdpo_nemo.tools.conformance.portable import ports
from gdpo_nemo.tools.conformance.portable.__main__ import main
from gdpo_nemo.tools.conformance.portable.cases import IMPLEMENTATIONS, TOLERANCE, difference, evaluate, load_cases
from gdpo_nemo.tools.conformance.portable.checks import CHECKS, RUBRICS, run_checks
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


@pytest.mark.parametrize("column, aggregation", [("trl", "normalize_then_sum"), ("grpo", "sum_then_normalize")])
def test_the_recorded_trl_is_the_installed_trl(column, aggregation):
    installed = ports.trl(aggregation=aggregation).advantages
    gaps = {name: difference(evaluate(installed, case), case.advantages[column]) for name, case in CASES.items()}
    assert max(gap for name, gap in gaps.items() if name != "opposed rewards") < 2e-4
    assert gaps["opposed rewards"] < 0.01


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
    assert "Criteria that only one prompt has: neither by criterion nor" in out
    assert cli.main(["conformance", f"{path}:summed", "--rule", "grpo"]) == 0
    assert cli.main(["conformance", "paper"]) == 0
    out = capsys.readouterr().out
    assert "paper equals paper in 17 of 17 batches" in out and "only one prompt has: by criterion, unscaled." in out


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


@pytest.mark.parametrize("record", json.loads(RUBRICS.read_text()), ids=lambda record: record["name"])
def test_recorded_rubrics_are_families_by_criterion_and_not_their_sum(record):
    groups = np.repeat(np.arange(len(record["sizes"])), record["sizes"])
    verdicts = np.array(record["rewards"], dtype=float)
    weights = np.array(record["weights"], dtype=float)[groups]
    family = {"criterion_weights": {"rubric/*": weights}, "preset": "paper"}
    for name, scale in (("by criterion", "sum"), ("by criterion, unscaled", "none")):
        found = compute_advantages({"rubric/*": verdicts}, groups, family_scale=scale, **family).values
        np.testing.assert_allclose(record["advantages"][name], found, rtol=0, atol=1e-6)
    weight_of_present = np.where(np.isnan(verdicts), 0.0, np.abs(weights)).sum(axis=1)
    score = np.nansum(verdicts * weights, axis=1) / weight_of_present
    summed = compute_advantages({"rubric": score}, groups, preset="paper").values
    np.testing.assert_allclose(record["advantages"]["sum of criteria"], summed, rtol=0, atol=1e-6)
    assert difference(record["advantages"]["by criterion"], record["advantages"]["sum of criteria"]) > 0.1


def own(**options):
    return lambda rewards, groups, weights, lengths: compute_advantages(
        rewards, groups, weights=weights, lengths=lengths, **({"preset": "paper"} | options)
    ).values.numpy()


def sum_varies_nowhere(rewards, groups):
    return float(not compute_advantages(rewards, groups, estimator="grpo").has_advantage.any())


def alphabetical(names, rewards, weights):
    return ports.gdpo_nemo().named(sorted(names), rewards[:, np.argsort(names)], weights)


def of_the_sum(rewards, groups, weights, lengths):
    return own()(np.nansum(rewards, axis=1, keepdims=True), groups, weights[:1], lengths)


DEFECTS = {
    "groups without signal": ({"without_signal": sum_varies_nowhere}, "by the sum"),
    "KL in the reward": (
        {"kl_in_reward": lambda rewards, groups, kl: own()(rewards, groups, None, kl)},
        "has no effect",
    ),
    "weights by name": ({"named": alphabetical}, "alphabetical order"),
    "number of weights": ({"advantages": lambda r, g, w, n: own()(r, g, w[: r.shape[1]], n)}, "three weights"),
    "missing reward": ({"advantages": own(preset="nemo_rl")}, "counts as 0"),
    "standard deviation": ({"advantages": own(ddof=0)}, "population: 1.069"),
    "empty response": ({"advantages": own(preset="verl")}, "changes other advantages"),
    "other code paths": ({"paths": {"streamed": own(), "turns": of_the_sum}}, "turns differs by"),
    "equal peers": ({"leave_one_out": lambda r, g, w, n: own()(r, g, w * [1, 0], n)}, "vanishes in 16 of 16"),
    "rubric": ({"advantages": of_the_sum}, "sum of criteria"),
}
"""For each check, a function with the defect that the check finds, and a part of the message."""


@pytest.mark.parametrize("check", CHECKS)
def test_check_finds_its_defect(check):
    fields, message = DEFECTS[check]
    correct = replace(ports.gdpo_nemo(), paths={"streamed": own()})
    assert CHECKS[check](correct).passed
    finding = CHECKS[check](replace(correct, **fields))
    assert finding.passed is False and message in finding.detail


def test_nan_and_errors_of_a_trainer_fail_its_checks():
    correct = ports.gdpo_nemo()
    spoiled = run_checks(replace(correct, advantages=lambda r, g, w, n: own()(np.nan_to_num(r), g, w, n) * r.sum()))
    assert "makes 8 of 8 advantages NaN" in spoiled["missing reward"].detail
    broken = run_checks(replace(correct, named=lambda *_: 1 / 0))
    assert broken["weights by name"].passed is False and "ZeroDivisionError" in broken["weights by name"].detail


def test_the_portable_command_counts_the_recorded_batches_and_checks_a_function(capsys):
    assert main([]) == 0
    counts = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:])
    assert counts.keys() == IMPLEMENTATIONS.keys() and counts["paper"] == "17"
    assert (counts["trl"], counts["verl"], counts["tunix"]) == ("13", "0", "0")
    assert main(["--port", f"{__name__}:of_the_sum", "--rule", "grpo"]) == 1
    assert f"{__name__}:of_the_sum: GDPO" in capsys.readouterr().out


def test_the_portable_command_prints_batches_checks_and_a_badge(tmp_path, capsys):
    badge = tmp_path / "badge.json"
    assert main(["--port", "gdpo_nemo"]) == 0
    assert "GDPO 17/17 batches, 9/9 checks" in capsys.readouterr().out
    assert main(["--port", "trl", "--badge", str(badge)]) == 1
    out = capsys.readouterr().out
    assert "unequal groups        error" in out and "groups without signal FAIL" in out
    assert json.loads(badge.read_text()) == {
        "schemaVersion": 1, "label": "GDPO", "message": "13/17 batches, 5/6 checks", "color": "yellow",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--port verl --source {d}", "--source: {d} does not contain the package 'verl'"),
        ("--port trl --source {d}", "--port: trl/trainer/utils.py cannot be read (FileNotFoundError)"),
        ("--port ms_swift --source {d}", "swift/utils/torch_utils.py does not contain 'nanstd'; this version"),
        ("--port nemo_rl", "package 'nemo_rl' is not installed; use --source"),
        ("--port trll", "--port: unknown name 'trll'; known: trl, verl,"),
        ("--port numpy:no_such", "--port: numpy does not contain a function 'no_such'"),
        ("--port numpy:sum --source {d}", "--source: conflicts with MODULE:FUNCTION"),
        ("--port no_such_module:f", "--port: no_such_module cannot be imported in this environment (No module named"),
        ("--port gdpo_nemo --source {d}", "gdpo_nemo must be installed"),
        ("--port gdpo_nemo --badge {d}", "--badge: {d} cannot be written (Is a directory)"),
    ],
)
def test_the_portable_command_refuses_trainers_that_it_cannot_check(arguments, message, tmp_path, capsys):
    (tmp_path / "trl").mkdir()
    (tmp_path / "src" / "swift" / "utils").mkdir(parents=True)
    (tmp_path / "src" / "swift" / "utils" / "torch_utils.py").write_text("LIMIT = 3\n")
    assert main(arguments.format(d=tmp_path).split()) == 2
    assert message.format(d=tmp_path) in capsys.readouterr().err


def test_the_second_distribution_contains_only_files_that_import_numpy_and_each_other():
    folder = Path(ports.__file__).parent
    assert (folder.parents[3] / "conformance" / "gdpo_conformance").resolve() == folder
    for path in folder.glob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith(("import ", "from ")):
                assert line.split()[1].split(".")[0] in {"", "numpy", *sys.stdlib_module_names}, (path.name, line)
