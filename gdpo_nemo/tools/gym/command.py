"""``gdpo-nemo gym up | scan``: start the NeMo Gym servers of a config, or classify the servers of a checkout."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import Commands, Parser, add_overrides


def add(commands: Commands) -> None:
    """Register ``gym`` and its actions."""
    command = commands.add_parser("gym", help="start the NeMo Gym servers of a config, or classify those of a checkout")
    actions = command.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    action = actions.add_parser(
        "up",
        help="start the servers and agents, print their addresses and end them with Ctrl-C or SIGTERM",
        epilog="Exit status: 1 if a server does not start or ends, or a check of --dry-run fails; "
        "2 if the config or an option is invalid.",
    )
    action.add_argument("config", metavar="CONFIG", help="config with an environment nemo_gym or nemo_gym_agent")
    action.add_argument(
        "--checkout",
        metavar="DIR",
        help="checkout of NeMo Gym, or the site-packages folder that contains it (default: NeMo Gym of --python)",
    )
    _add_environments(action)
    action.add_argument("--dry-run", action="store_true", help="check files, ports and requirements; start no server")
    action.add_argument(
        "--timeout", metavar="S", type=float, default=600.0, help="seconds until all servers answer (default: 600)"
    )
    add_overrides(action)
    action.set_defaults(command=_up)
    action = actions.add_parser(
        "scan",
        help="list every server and agent of a checkout with its needs",
        epilog="Without --try, no code of the checkout is executed.",
    )
    action.add_argument("checkout", metavar="CHECKOUT", help="checkout of NeMo Gym")
    action.add_argument(
        "--only", metavar="PATTERN", action="append", default=[], help="names to scan, such as math_*; repeatable"
    )
    action.add_argument("--limit", metavar="N", type=int, help="number of servers and of agents to try (default: all)")
    action.add_argument("--json", metavar="FILE", help="also write the result as JSON")
    action.add_argument(
        "--try",
        dest="trial",
        action="store_true",
        help="start each server that needs nothing else, and verify the answers to its example rows",
    )
    action.add_argument(
        "--model",
        metavar="DIR",
        help="with --try, also start each plain agent and let it play an example row with this model",
    )
    action.add_argument(
        "--rows", metavar="N", type=int, default=5, help="number of example rows per server (default: 5)"
    )
    _add_environments(action)
    action.add_argument(
        "--timeout", metavar="S", type=float, default=300.0, help="seconds until a server answers (default: 300)"
    )
    action.set_defaults(command=_scan)


def _add_environments(action: argparse.ArgumentParser) -> None:
    """Add the options of virtual environments and logs."""
    action.add_argument(
        "--python",
        metavar="FILE",
        help="existing Python with the dependencies of NeMo Gym and all servers, which then share one process "
        "(default: an environment per server, with its requirements)",
    )
    action.add_argument(
        "--venvs", metavar="DIR", help="folder of the environments (default: gdpo_nemo/gym in the user's cache)"
    )
    action.add_argument(
        "--venv-python",
        metavar="VERSION",
        help="Python of the environments (default: the version that NeMo Gym requires)",
    )
    action.add_argument(
        "--log-dir", metavar="DIR", default="gym_logs", help="folder for logs and addresses.json (default: %(default)s)"
    )


def _up(arguments: argparse.Namespace) -> int:
    from gdpo_nemo.tools.gym.up import up

    return up(arguments)


def _scan(arguments: argparse.Namespace) -> int:
    from gdpo_nemo.tools.gym.scan import scan

    return scan(arguments)
