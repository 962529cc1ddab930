"""``gdpo-nemo conformance``: compare an implementation of GDPO with the paper and with other trainers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gdpo_nemo.commands.arguments import Commands, say, terminal

if TYPE_CHECKING:
    import numpy as np

    from gdpo_nemo.tools.conformance.portable.cases import Case, Estimator

WIDTH = 6
"""Implementations in a table. More columns would be wrapped in a terminal of 80 columns."""


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "conformance", help="compare an implementation of GDPO with the paper and with other trainers"
    )
    command.add_argument(
        "function",
        metavar="FUNCTION",
        nargs="?",
        help="function of rewards [samples, components], groups [samples], weights [components] and lengths [samples] "
        "that returns the advantages [samples], as file.py:name or package.module:name, or a value of gdpo.preset "
        "(default: show the recorded implementations and gdpo_nemo's default)",
    )
    command.add_argument(
        "--rule", default="paper", metavar="NAME", help="recorded implementation to compare with (default: %(default)s)"
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the differences in each recorded batch. The exit status is 1 if a function differs from the rule."""
    from gdpo_nemo.algorithms.settings import PRESETS
    from gdpo_nemo.tools.conformance.portable.cases import IMPLEMENTATIONS, load_cases
    from gdpo_nemo.utils.errors import ConfigError, nearest
    from gdpo_nemo.utils.exits import exits_contained
    from gdpo_nemo.utils.import_path import ImportPath

    name, rule = arguments.function, arguments.rule
    if rule not in IMPLEMENTATIONS:
        raise ConfigError(f"--rule: unknown name {rule!r}{nearest(rule, IMPLEMENTATIONS)}")
    if name is None:
        _print_recorded(load_cases(), rule)
        return 0
    if not ImportPath.matches(name) and name not in PRESETS:
        raise ConfigError(f"FUNCTION: {name!r} is neither an import path nor a preset{nearest(name, PRESETS)}")
    estimator = built_in(name) if name in PRESETS else ImportPath(name).load()
    if not callable(estimator):
        raise ConfigError(f"FUNCTION: {name} is not a function")
    return _compare(exits_contained()(estimator), name, load_cases(), rule)


def built_in(preset: str | None = None) -> Estimator:
    """Return gdpo_nemo's estimator with a preset, or with the default rule."""
    from gdpo_nemo.algorithms.advantages import compute_advantages

    def estimator(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        found = compute_advantages(rewards, groups, weights=weights, lengths=lengths, preset=preset)
        return found.values.numpy()

    return estimator


def _print_recorded(cases: list[Case], rule: str) -> None:
    """Print the difference of each implementation from the rule in each batch."""
    from rich.table import Table

    from gdpo_nemo.tools.conformance.portable.__main__ import cell
    from gdpo_nemo.tools.conformance.portable.cases import IMPLEMENTATIONS, evaluate

    own = built_in()
    columns = ["gdpo_nemo", *(name for name in IMPLEMENTATIONS if name != rule)]
    say(f"Largest difference from {rule} in each batch.")
    for start in range(0, len(columns), WIDTH):
        names = columns[start : start + WIDTH]
        table = Table("batch", *names)
        for case in cases:
            outcomes = [evaluate(own, case) if name == "gdpo_nemo" else case.advantages[name] for name in names]
            table.add_row(case.name, *(cell(outcome, case.advantages[rule]) for outcome in outcomes))
        terminal().print(table)
    say("gdpo_nemo: the default rule")
    for name, source in IMPLEMENTATIONS.items():
        say(f"{name}: {source}")


def _compare(estimator: Estimator, name: str, cases: list[Case], rule: str) -> int:
    """Print the difference of a function from the rule in each batch, and the implementations with equal results."""
    from rich.table import Table

    from gdpo_nemo.tools.conformance.portable.__main__ import cell
    from gdpo_nemo.tools.conformance.portable.cases import IMPLEMENTATIONS, TOLERANCE, difference, evaluate
    from gdpo_nemo.tools.conformance.portable.checks import rubrics_are_by_criterion
    from gdpo_nemo.tools.conformance.portable.ports import Port
    from gdpo_nemo.utils.errors import ConfigError

    table = Table("batch", "what it shows", f"{rule}", "equal to")
    agreements = dict.fromkeys(IMPLEMENTATIONS, 0)
    for case in cases:
        try:
            outcome = evaluate(estimator, case)
        except TypeError as error:
            raise ConfigError(f"FUNCTION: {error}") from None
        equal = [other for other in IMPLEMENTATIONS if difference(outcome, case.advantages[other]) <= TOLERANCE]
        for other in equal:
            agreements[other] += 1
        table.add_row(case.name, case.question, cell(outcome, case.advantages[rule]), ", ".join(equal) or "none")
    say(
        f"Column {rule}: largest difference of an advantage from {rule}, for advantages of variance 1. error: {name} "
        f"raises an error; no error: only {rule} raises one."
    )
    terminal().print(table)
    nearest = max(agreements, key=lambda other: (agreements[other], other == rule))
    say(f"{name} equals {rule} in {agreements[rule]} of {len(cases)} batches.")
    if nearest != rule:
        say(f"It agrees most often with {nearest}, in {agreements[nearest]} batches.")
    say(f"Criteria that only one prompt has: {rubrics_are_by_criterion(Port(name, estimator)).detail}.")
    return 0 if agreements[rule] == len(cases) else 1
