"""``gdpo-nemo health``: a run against thresholds."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import say, terminal


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("health", help="hold the metrics of a run against thresholds")
    command.add_argument("run_dir", metavar="RUN_DIR", help="the folder of the run, for instance results/tiny")
    command.add_argument("--thresholds", metavar="FILE", help="default: health.checks of the run's config")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Hold a run against thresholds; exit status 1 where it fails one."""
    from gdpo_nemo.observe.health_findings import check_health, findings_table, healthy, thresholds_of

    checks, origin = (arguments.thresholds,) * 2 if arguments.thresholds else thresholds_of(arguments.run_dir)
    findings = check_health(arguments.run_dir, checks)
    sound = healthy(findings)
    say(f"{arguments.run_dir} against {origin}")
    terminal().print(findings_table(findings))
    say("healthy" if sound else "not healthy")
    return 0 if sound else 1
