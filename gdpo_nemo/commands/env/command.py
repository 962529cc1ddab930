"""``gdpo-nemo env list | check | new | scan``: list, check, create or try environments."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from gdpo_nemo.commands.arguments import Commands, Parser, add_overrides, say
from gdpo_nemo.environments.base import declared
from gdpo_nemo.environments.registry import BUILT_IN, ENTRY_POINT_GROUP, find_plugin, load_environment, origin
from gdpo_nemo.environments.tasks import reward_functions as functions
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.import_path import ImportPath

if TYPE_CHECKING:
    from gdpo_nemo.commands.env.check import Check
    from gdpo_nemo.config.schema import Config, GdpoConfig, RolloutConfig
    from gdpo_nemo.data.rows import Row
    from gdpo_nemo.environments.base import Environment


_SHOWN_CHARACTERS = 40


_MOST_ROWS = 1_000_000


_GOLD_ROWS = 10_000
"""Maximum number of rows whose right answer ``--adversary`` verifies."""


def add(commands: Commands) -> None:
    """Register ``env`` and its actions."""
    command = commands.add_parser("env", help="list and check environments, or create a new environment")
    actions = command.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    action = actions.add_parser("list", help="list the named environments and reward functions")
    action.set_defaults(command=list_all)
    action = actions.add_parser("check", help="verify a few rows in worker processes and show each reward")
    action.add_argument(
        "name",
        metavar="NAME",
        help="environment in the config's section env, or without --config a built-in environment or plugin",
    )
    action.add_argument("--config", metavar="FILE", help="config with the environment's options and data")
    action.add_argument(
        "--rows",
        type=int,
        default=4,
        metavar="N",
        help="number of rows to verify, at least one for each server (default: %(default)s)",
    )
    action.add_argument(
        "--completion",
        action="append",
        default=[],
        metavar="TEXT",
        help="additional completion to verify for each row; repeatable",
    )
    action.add_argument(
        "--adversary",
        action="store_true",
        help="test the verifier: the right answer of every row, and forms of it and attacks on --rows rows",
    )
    add_overrides(action)
    action.set_defaults(command=check)
    action = actions.add_parser("new", help="create a plugin package with an environment, a test and a config")
    action.add_argument("name", metavar="NAME", help="name of the environment: lower-case letters, digits and _")
    action.add_argument(
        "--dir", default=".", metavar="D", help="parent folder of the new package (default: %(default)s)"
    )
    action.set_defaults(command=new)
    action = actions.add_parser("scan", help="try the installed packages of a library, and show their components")
    action.add_argument("library", choices=("verifiers",), help="library of the packages")
    action.add_argument(
        "packages", nargs="*", metavar="PACKAGE", help="packages to try (default: all that require the library)"
    )
    action.add_argument(
        "--venv", default="", metavar="DIR", help="virtual environment of the packages (default: that of this command)"
    )
    action.add_argument("--model", metavar="DIR", help="also play episodes with this model")
    action.add_argument(
        "--rows", type=int, default=2, metavar="N", help="number of tasks to play, twice each (default: %(default)s)"
    )
    action.set_defaults(command=scan)


def list_all(arguments: argparse.Namespace) -> int:
    """Print a table of environments and a table of reward functions."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="environments: env: {NAME: {...}}", title_justify="left")
    for heading in ("name", "reward components", "source"):
        table.add_column(heading, overflow="fold")
    for listed in list_environments():
        components = ", ".join(listed.components) if listed.components else listed.problem or "set in the config"
        table.add_row(Text(listed.name), Text(components), Text(listed.origin))
    functions = Table(title="reward functions of the environment `functions`", title_justify="left")
    for heading in ("name", "reward"):
        functions.add_column(heading, overflow="fold")
    for name, meaning in list_functions():
        functions.add_row(Text(name), Text(meaning))
    _print(table, functions)
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Verify a few rows and print their rewards. The exit status is 1 if a verification fails."""
    from gdpo_nemo.commands.env.check import check_environment

    if arguments.rows < 1 or arguments.rows > _MOST_ROWS:
        raise ConfigError(f"--rows: must be between 1 and {_MOST_ROWS:,}, got {arguments.rows}")
    if arguments.adversary:
        return _check_adversary(arguments)
    options, environment, rows, key, rollout, _ = _read_arguments(arguments, arguments.rows)
    found = check_environment(
        arguments.name,
        options,
        environment,
        rows,
        arguments.completion,
        timeout_s=rollout.env_timeout_s,
        key=key,
    )
    _print(_table(arguments.name, found), *_findings(found, rollout.max_env_failure_share))
    return 1 if found.failed else 0


def _check_adversary(arguments: argparse.Namespace) -> int:
    """Put the verifier on trial and print the result. The exit status is 1 if a verification fails."""
    from gdpo_nemo.algorithms.component_weights import directions
    from gdpo_nemo.tools.adversary.trial import findings, put_on_trial, table

    if arguments.completion:
        raise ConfigError("--completion: conflicts with --adversary, which makes its own completions")
    options, environment, rows, key, rollout, gdpo = _read_arguments(arguments, _GOLD_ROWS)
    trial = put_on_trial(
        arguments.name,
        options,
        environment,
        rows[: arguments.rows] if environment.remote else rows,
        arguments.rows,
        workers=rollout.env_workers,
        timeout_s=rollout.env_timeout_s,
        key=key,
        directions=directions(gdpo.rewards, gdpo.constraints, gdpo.schedules) if gdpo else None,
    )
    _print(table(arguments.name, trial), *findings(trial))
    return 1 if trial.failed else 0


def new(arguments: argparse.Namespace) -> int:
    """Create a plugin package and print the path of the README with the next steps."""
    from gdpo_nemo.commands.env.new import write_plugin

    folder = write_plugin(arguments.name, arguments.dir)
    say(f"{folder}: created an environment, a test and a config; see {folder / 'README.md'} for the next steps")
    return 0


def scan(arguments: argparse.Namespace) -> int:
    """Try packages of verifiers and print the result. The exit status is 1 if a package fails."""
    from gdpo_nemo.commands.env.scan import scan

    return scan(arguments)


def _read_arguments(
    arguments: argparse.Namespace, count: int
) -> tuple[Mapping[str, Any], Environment, list[Row], str | None, RolloutConfig, GdpoConfig | None]:
    """Return options, environment, at most ``count`` rows, prompt column, rollout settings, and the section ``gdpo``
    of the config, for the check."""
    from gdpo_nemo.config.load import load_config
    from gdpo_nemo.config.schema import DatasetConfig, RolloutConfig
    from gdpo_nemo.config.validate import check_ranges
    from gdpo_nemo.data.rows import load_rows
    from gdpo_nemo.environments.registry import load_environment
    from gdpo_nemo.utils.errors import nearest

    name = arguments.name
    if arguments.config is None:
        if arguments.overrides:
            raise ConfigError(f"{arguments.overrides[0]}: overrides require --config")
        environment = load_environment(name)
        if not environment.makes_rows:
            raise ConfigError(f"{name} does not provide prompts; specify a config that contains data with --config")
        dataset = DatasetConfig(environment=name, size=count)
        return {}, environment, load_rows(dataset, {name: environment}, "train", 0), None, RolloutConfig(), None
    config = load_config(arguments.config, arguments.overrides)
    check_ranges(config)
    if name not in config.env:
        raise ConfigError(f"env: {name!r} not found{nearest(name, config.env)}")
    options: Mapping[str, Any] = config.env[name] or {}
    environment = load_environment(name, options)
    splits: tuple[tuple[str, DatasetConfig | None], ...] = (
        ("train", config.data.train),
        ("validation", config.data.validation),
    )
    for split, data in splits:
        rows = _rows(config, name, environment, split, data, count) if data is not None else []
        if data is not None and rows:
            if data.strided is not None:
                raise ConfigError(
                    f"data.{split}.strided: requires the model's tokenizer to split rows into prompts, but this "
                    "check does not load a tokenizer"
                )
            return options, environment, rows, data.prompt_key, config.rollout, config.gdpo
    if not environment.makes_rows:
        raise ConfigError(f"{name} does not provide prompts, and no row of data.train or data.validation uses it")
    rows = load_rows(DatasetConfig(environment=name, size=count), {name: environment}, "train", config.run.seed)
    return options, environment, rows, None, config.rollout, config.gdpo


def _rows(config: Config, name: str, environment: Any, split: str, dataset: Any, count: int) -> list[dict[str, Any]]:
    """Return rows of the split that the environment verifies. ``_spread_over_servers`` defines the number of rows."""
    from dataclasses import replace

    from gdpo_nemo.data.rows import environment_of_row, load_rows
    from gdpo_nemo.environments.registry import load_environments

    environment_name = dataset.environment or (name if len(config.env) == 1 else None)
    if dataset.environment_key is None and environment_name != name:
        return []
    if dataset.environment_key is None:
        own_dataset = replace(dataset, environment=name, size=count if dataset.path is None else dataset.size)
        rows = load_rows(own_dataset, {name: environment}, split, config.run.seed)
        rows = _checked(rows, own_dataset, split, config)
        return _spread_over_servers(rows, environment, count)
    environments = load_environments(config.env)
    rows = load_rows(dataset, environments, split, config.run.seed)
    rows = _checked(rows, dataset, split, config)
    names = [environment_of_row(row, dataset, environments, split, index) for index, row in enumerate(rows)]
    return _spread_over_servers([row for row, verifier in zip(rows, names) if verifier == name], environment, count)


def _checked(rows: list[dict[str, Any]], dataset: Any, split: str, config: Config) -> list[dict[str, Any]]:
    """Return the rows with their images read. Raise ConfigError if a run would refuse a prompt."""
    from gdpo_nemo.data.prompts import check_prompts
    from gdpo_nemo.data.row_images import rows_with_images

    if dataset.strided is None:
        rows = rows_with_images(rows, dataset, split, config.data.images)
        check_prompts(rows, dataset, split)
    return rows


def _spread_over_servers(rows: list[dict[str, Any]], environment: Any, count: int) -> list[dict[str, Any]]:
    """Return the first row of each server, then the second row of each server, up to ``count`` rows.

    If there are more servers than ``count``, return one row per server.
    """
    by_server: dict[str | None, list[dict[str, Any]]] = {}
    for row in rows:
        by_server.setdefault(environment.server_of(row), []).append(row)
    turns = zip_longest(*by_server.values())
    interleaved = [row for turn in turns for row in turn if row is not None]
    return interleaved[: max(count, len(by_server))]


def _table(name: str, found: Check) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{name}: {len(found.samples)} samples", title_justify="left")
    table.add_column("row", overflow="fold")
    table.add_column("completion", overflow="fold")
    for component in found.components:
        table.add_column(Text(component), justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("outcome", overflow="fold")
    for sample, verdict, latency in zip(found.samples, found.verdicts, found.latencies_s):
        rewards = []
        for component in found.components:
            value = verdict.component_rewards.get(component)
            rewards.append("-" if value is None else f"{value:g}")
        outcome = f"{verdict.outcome}: {verdict.detail}" if verdict.detail else str(verdict.outcome)
        table.add_row(Text(sample.prompt.id), _short(sample.text), *rewards, f"{latency:.3f}", Text(outcome))
    return table


def _short(text: str) -> Any:
    from rich.text import Text

    shown = repr(text)
    return Text(shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 3] + "...")


def _findings(found: Check, failure_share: float) -> list[str]:
    """Describe the start-up time, masked samples, missing rewards and reproducibility."""
    total = len(found.samples)
    failed = found.failed
    lines = [
        f"first result after {found.start_s:.1f} s (including worker start), then at most "
        f"{max(found.latencies_s):.3f} s per row"
    ]
    if failed:
        lines.append(f"masked instead of getting a reward of 0: {failed} of {total} samples ({found.reasons})")
        lines += [f"a run stops if more than {failure_share:.0%} of a step's samples are masked"]
    rewarded = [verdict for verdict in found.verdicts if verdict.rewards]
    for component in found.components:
        missing = sum(verdict.component_rewards.get(component) is None for verdict in rewarded)
        if missing:
            lines.append(
                f"{component}: does not apply to {missing} of {len(rewarded)} samples, so it does not affect their "
                "advantages"
            )
    if not found.repeated:
        lines.append("the first row was verified twice with different results; a resumed run would not be reproducible")
    return lines if failed else [*lines, f"no samples would be masked ({total} verified)"]


def _print(*parts: Any) -> None:
    from rich.console import Console

    wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if wide else 120, highlight=False, markup=False)
    for part in parts:
        console.print(part)


@dataclass(frozen=True)
class Listed:
    """Environment in the output of ``env list``."""

    name: str
    components: tuple[str, ...] | None
    """Reward components. None if the config defines them, or if the plugin cannot be loaded (see ``problem``)."""
    origin: str
    problem: str = ""
    """Reason why the environment cannot be used, or an empty string if it is usable."""


def list_environments() -> list[Listed]:
    """Return the built-in environments and then the installed plugins, both sorted by name.

    For a plugin that cannot be imported, ``problem`` contains the reason.
    """
    listed = [_listed(name, "built in") for name in sorted(BUILT_IN)]
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value)):
        if point.name in BUILT_IN:
            listed.append(
                Listed(point.name, None, origin(point), "hidden by the built-in environment with the same name")
            )
        else:
            listed.append(_listed(point.name, origin(point)))
    return listed


def list_functions() -> list[tuple[str, str]]:
    """Return the built-in reward functions as (name, first line of the docstring)."""
    loaded = {name: ImportPath(place).load() for name, place in sorted(functions.BUILT_IN.items())}
    return [(name, (inspect.getdoc(function) or "").partition("\n")[0]) for name, function in loaded.items()]


def _listed(name: str, origin_text: str) -> Listed:
    try:
        make = find_plugin(name, name)
    except ConfigError as error:
        return Listed(name, None, origin_text, str(error))
    # Some environments cannot be created without options, but their class may declare the rewards.
    components = declared(make).reward_names
    try:
        return Listed(name, tuple(load_environment(name).reward_names), origin_text)
    except ConfigError as error:
        is_expected = components is not None or name in BUILT_IN
        return Listed(name, components, origin_text, "" if is_expected else str(error))
