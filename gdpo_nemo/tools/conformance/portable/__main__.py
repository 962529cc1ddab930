"""``python -m gdpo_conformance --port trl``: compare the installed trainer's GDPO with the paper."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .cases import IMPLEMENTATIONS, TOLERANCE, Outcome, difference, evaluate, load_cases
from .checks import CHECKS, Finding, run_checks
from .ports import PORTS, Port, find_port
from .source import PortError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables and the summary. The exit status is 1 if a batch or a check fails, and 2 if nothing can run."""
    parser = argparse.ArgumentParser(prog="gdpo_conformance", description=__doc__)
    parser.add_argument(
        "--port",
        metavar="NAME",
        help=f"trainer: {', '.join(PORTS)}, or MODULE:FUNCTION with the arguments rewards, groups, weights and "
        "lengths (default: count the equal batches of the recorded implementations)",
    )
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="checkout (default: the installed package)")
    parser.add_argument(
        "--rule",
        default="paper",
        metavar="NAME",
        choices=sorted(IMPLEMENTATIONS),
        help=f"recorded implementation to compare with: {', '.join(IMPLEMENTATIONS)} (default: %(default)s)",
    )
    parser.add_argument("--badge", type=Path, metavar="FILE", help="write the summary as JSON for shields.io")
    options = parser.parse_args(arguments)
    if options.port is None:
        _print_recorded(options.rule)
        return 0
    try:
        port = find_port(options.port, options.source)
        findings = run_checks(port)
    except PortError as error:
        print(f"gdpo_conformance: {error}", file=sys.stderr)
        return 2
    gaps = _print_batches(port, options.rule)
    _print_checks(findings)
    badge = summary(gaps, findings)
    print(f"\n{port.title}: GDPO {badge['message']}")
    if options.badge:
        try:
            options.badge.write_text(json.dumps(badge) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"gdpo_conformance: --badge: {options.badge} cannot be written ({error.strerror})", file=sys.stderr)
            return 2
    return 0 if badge["color"] == "brightgreen" else 1


def _print_recorded(rule: str) -> None:
    """Print the number of batches in which each recorded implementation equals the rule."""
    cases = load_cases()
    print(f"Recorded batches that are equal to {rule}, of {len(cases)}.\n")
    for name, source in IMPLEMENTATIONS.items():
        equal = sum(difference(case.advantages[name], case.advantages[rule]) <= TOLERANCE for case in cases)
        print(f"  {name:<20}{equal:>4}   {source}")


def _print_batches(port: Port, rule: str) -> dict[str, float]:
    """Print and return the largest difference from the rule in each recorded batch."""
    print(f"{port.title}: largest difference from {rule} ({IMPLEMENTATIONS[rule]}) in each batch.\n")
    gaps: dict[str, float] = {}
    for case in load_cases():
        outcome, expected = evaluate(port.advantages, case), case.advantages[rule]
        gaps[case.name] = difference(outcome, expected)
        print(f"  {case.name:<22}{cell(outcome, expected):<10}{case.question}")
    return gaps


def _print_checks(findings: Mapping[str, Finding]) -> None:
    print("\nCode around the estimator.\n")
    words = {True: "pass", False: "FAIL", None: "-"}
    for name, finding in findings.items():
        print(f"  {name:<22}{words[finding.passed]:<10}{finding.detail}")
        if finding.passed is False:
            rule = (CHECKS[name].__doc__ or "").splitlines()[0]
            print(f"  {'':<32}rule: {rule}")


def cell(outcome: Outcome, expected: Outcome) -> str:
    """Describe the difference of an outcome from the expected outcome briefly."""
    gap = difference(outcome, expected)
    if gap <= TOLERANCE:
        return "equal"
    if isinstance(outcome, str):
        return "error"
    if None in outcome:
        return "nan"
    return f"{gap:.2g}" if gap < float("inf") else "no error"


def summary(gaps: Mapping[str, float], findings: Mapping[str, Finding]) -> dict[str, str | int]:
    """Return the numbers of equal batches and passed checks as the fields of a shields.io badge."""
    equal = sum(gap <= TOLERANCE for gap in gaps.values())
    known = [finding.passed for finding in findings.values() if finding.passed is not None]
    share = (equal + sum(known)) / (len(gaps) + len(known))
    color = "brightgreen" if share == 1 else "yellow" if share >= 0.6 else "red"
    message = f"{equal}/{len(gaps)} batches, {sum(known)}/{len(known)} checks"
    return {"schemaVersion": 1, "label": "GDPO", "message": message, "color": color}


if __name__ == "__main__":
    sys.exit(main())
