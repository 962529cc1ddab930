"""``gdpo-nemo watch``: a run in the terminal, from outside."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import between, terminal


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "watch",
        help="a run in the terminal, redrawn while it goes on",
        description="Ends with the run: status 0 if it is complete, else 1. Ctrl-C ends the view, not the run.",
    )
    command.add_argument("run_dir", metavar="RUN_DIR", help="the folder of the run")
    command.add_argument("--once", action="store_true", help="draw it once, as is done where there is no terminal")
    command.add_argument(
        "--every", type=between(float, 0.1, 3600), default=1.0, metavar="SECONDS", help="default: %(default)g"
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw a run until it ends."""
    from gdpo_nemo.observe.live_view import snapshot, view

    screen = terminal()
    now = snapshot(arguments.run_dir)
    if arguments.once or not screen.is_terminal:
        screen.print(view(now))
        return 0
    now = _follow(screen, now, arguments)
    screen.print(view(now))
    return 0 if now.outcome == "complete" else 1


def _follow(screen, now, arguments: argparse.Namespace):
    """Redraw until the run is over; the last look at it. The view is on the terminal's other screen, so that a panel
    higher than the window leaves nothing behind."""
    import time

    from rich.live import Live

    from gdpo_nemo.observe.live_view import changed, snapshot, view

    seen = changed(arguments.run_dir)
    with Live(view(now), console=screen, screen=True, auto_refresh=False) as live:
        while now.outcome is None:
            time.sleep(arguments.every)
            stamp = changed(arguments.run_dir)
            # A torn row, as while it is written, is no news yet; ages go on without news, too.
            now = snapshot(arguments.run_dir) if stamp != seen else now
            seen = stamp
            live.update(view(now), refresh=True)
    return now
