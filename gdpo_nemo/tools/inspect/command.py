"""``gdpo-nemo inspect``: show a run's samples as a page, from step to group to sample to token."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from gdpo_nemo.commands.arguments import Commands, between, say, terminal
from gdpo_nemo.utils.files import real_path


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "inspect",
        help="write a page to inspect a run's samples, with search, filters, rewards and tokens",
        description="Write a folder that works without a server or network. Open index.html in this folder.",
    )
    command.add_argument("run_dir", metavar="RUN_DIR", help="run folder, finished or not")
    command.add_argument("--out", metavar="DIR", help="output folder (default: inspect/ in the run folder)")
    command.add_argument("--open", action="store_true", help="open the page in a browser")
    command.add_argument("--serve", action="store_true", help="serve the page on this machine until Ctrl-C")
    command.add_argument(
        "--port", type=between(int, 0, 65535), default=0, metavar="N", help="port for --serve (default: a free port)"
    )
    command.add_argument("--follow", action="store_true", help="update the page while the run continues, until Ctrl-C")
    command.add_argument(
        "--every",
        type=between(float, 1, 3600),
        default=5.0,
        metavar="SECONDS",
        help="seconds between updates with --follow (default: %(default)g)",
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page. With ``--serve``, serve the page until Ctrl-C.

    With ``--follow``, update the page until Ctrl-C.
    """
    from gdpo_nemo.tools.inspect import builder, server

    out = Path(arguments.out or Path(arguments.run_dir) / "inspect")
    with terminal().status("reading samples") as status:
        built = builder.build(
            arguments.run_dir, out, live=arguments.follow, report=lambda text: status.update(f"reading samples: {text}")
        )
    say(f"{built.page} ({built.samples:,} samples, {built.bytes / 1e6:,.1f} MB)")
    if built.note:
        say(f"note: {built.note}")
    address = real_path(built.page).as_uri()
    if not arguments.serve and not arguments.follow:
        return _open(address, arguments.open)
    with (
        server.serving(out, arguments.port if arguments.serve else None) as served,
        contextlib.suppress(KeyboardInterrupt),
    ):
        if served:
            say(f"{served} (Ctrl-C to stop)")
        _open(served or address, arguments.open)
        server.follow(arguments.run_dir, out, arguments.every if arguments.follow else None)
    return 0


def _open(address: str, wanted: bool) -> int:
    if wanted:
        import webbrowser

        if not webbrowser.open(address):
            say(f"no browser found; open {address} manually")
    return 0
