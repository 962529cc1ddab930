"""``gdpo-nemo health``: check a run against thresholds."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import Commands, say, terminal


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser("health", help="check the metrics of a run against thresholds")
    command.add_argument("run_dir", metavar="RUN_DIR", help="run folder, for example results/tiny")
    command.add_argument(
        "--thresholds", metavar="FILE", help="file with checks (default: health.checks of the run's config)"
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Check a run against thresholds. The exit status is 1 if a check fails."""
    from gdpo_nemo.observe.health import check_health, findings_table, healthy, thresholds_of, verdict

    checks, origin = (arguments.thresholds,) * 2 if arguments.thresholds else thresholds_of(arguments.run_dir)
    findings = check_health(arguments.run_dir, checks)
    say(f"{arguments.run_dir}, checked with {origin}")
    terminal().print(findings_table(findings))
    say(verdict(findings))
    return 0 if healthy(findings) else 1
