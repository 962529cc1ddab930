"""``gdpo-nemo env list | check | new``: which environments there are, whether one works, and the start of one's own."""

from __future__ import annotations

import argparse
import os
import sys
from itertools import zip_longest
from typing import Any, Mapping

from gdpo_nemo.commands.arguments import Parser, add_overrides, say
from gdpo_nemo.errors import ConfigError

_SHOWN_CHARACTERS = 40


_MOST_ROWS = 1_000_000


def add(commands) -> None:
    """Register ``env`` and its actions."""
    command = commands.add_parser("env", help="list, check or start environments")
    actions = command.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    action = actions.add_parser("list", help="environments and reward functions that have a name")
    action.set_defaults(command=list_all)
    action = actions.add_parser("check", help="verify a few rows in worker processes and show what each reward gives")
    action.add_argument("name", metavar="NAME", help="name in the section env of the config; without one, a plugin")
    action.add_argument("--config", metavar="FILE", help="config that holds the environment's options and data")
    action.add_argument(
        "--rows", type=int, default=4, metavar="N", help="rows to try, at least one of each server (%(default)s)"
    )
    action.add_argument(
        "--completion",
        action="append",
        default=[],
        metavar="TEXT",
        help="a completion to try on each row; may be repeated",
    )
    add_overrides(action)
    action.set_defaults(command=check)
    action = actions.add_parser("new", help="write a plugin package with an environment, a test and a config")
    action.add_argument("name", metavar="NAME", help="name of the environment: lower-case letters, digits and _")
    action.add_argument("--dir", default=".", metavar="D", help="folder to put the package's folder in (%(default)s)")
    action.set_defaults(command=new)


def list_all(arguments: argparse.Namespace) -> int:
    """Print the environments and the reward functions."""
    from rich.table import Table
    from rich.text import Text

    from gdpo_nemo.commands.env_list import list_environments, list_functions

    table = Table(title="environments: env: {NAME: {...}}", title_justify="left")
    for heading in ("name", "reward components", "where from"):
        table.add_column(heading, overflow="fold")
    for listed in list_environments():
        components = ", ".join(listed.components) if listed.components else listed.problem or "named in the config"
        table.add_row(Text(listed.name), Text(components), Text(listed.origin))
    functions = Table(title="reward functions of the environment functions", title_justify="left")
    for heading in ("name", "what it gives"):
        functions.add_column(heading, overflow="fold")
    for name, meaning in list_functions():
        functions.add_row(Text(name), Text(meaning))
    _print(table, functions)
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Verify a few rows and print every component; exit status 1 where a verdict failed."""
    from gdpo_nemo.commands.env_check import check_environment

    if arguments.rows < 1 or arguments.rows > _MOST_ROWS:
        raise ConfigError(f"--rows: must be at least 1 and at most {_MOST_ROWS:,}, got {arguments.rows}")
    options, environment, rows, key, rollout = _subject(arguments)
    found = check_environment(
        arguments.name,
        options,
        environment,
        rows,
        arguments.completion,
        rollout.env_workers,
        rollout.env_timeout_s,
        key,
    )
    _print(_table(arguments.name, found), *_findings(found, rollout.max_env_failure_share))
    return 1 if found.failed else 0


def new(arguments: argparse.Namespace) -> int:
    """Write the package and say what to do with it."""
    from gdpo_nemo.commands.env_new import write_plugin

    folder = write_plugin(arguments.name, arguments.dir)
    say(f"{folder}: an environment, its test and a config; {folder / 'README.md'} says how to go on")
    return 0


def _subject(arguments: argparse.Namespace):
    """Options, environment, rows, prompt column and rollout settings for the check."""
    from gdpo_nemo.config.load import load_config
    from gdpo_nemo.config.messages import nearest
    from gdpo_nemo.config.schema import DatasetConfig, RolloutConfig
    from gdpo_nemo.config.validate import check_ranges
    from gdpo_nemo.data.rows import load_rows
    from gdpo_nemo.environments.registry import load_environment

    name = arguments.name
    if arguments.config is None:
        if arguments.overrides:
            raise ConfigError(f"{arguments.overrides[0]}: an override changes a config; give one with --config")
        environment = load_environment(name)
        if not environment.makes_rows:
            raise ConfigError(f"{name} makes no prompts of its own; give a config whose data has some, with --config")
        dataset = DatasetConfig(environment=name, size=arguments.rows)
        return {}, environment, load_rows(dataset, {name: environment}, "train", 0), None, RolloutConfig()
    config = load_config(arguments.config, arguments.overrides)
    check_ranges(config)
    if name not in config.env:
        raise ConfigError(f"env has no {name!r}{nearest(name, config.env)}")
    options: Mapping[str, Any] = config.env[name] or {}
    environment = load_environment(name, options)
    splits: tuple[tuple[str, DatasetConfig | None], ...] = (
        ("train", config.data.train),
        ("validation", config.data.validation),
    )
    for split, chosen in splits:
        rows = _rows(config, name, environment, split, chosen, arguments.rows) if chosen is not None else []
        if chosen is not None and rows:
            if chosen.strided is not None:
                raise ConfigError(
                    f"data.{split}.strided: prompts are cut out of the rows by the model's tokenizer, which this check "
                    "has not"
                )
            return options, environment, rows, chosen.prompt_key, config.rollout
    if not environment.makes_rows:
        raise ConfigError(f"{name} makes no prompts of its own, and no row of data.train or data.validation is for it")
    rows = load_rows(
        DatasetConfig(environment=name, size=arguments.rows), {name: environment}, "train", config.run.seed
    )
    return options, environment, rows, None, config.rollout


def _rows(config, name: str, environment: Any, split: str, dataset: Any, wanted: int) -> list[dict[str, Any]]:
    """At most ``wanted`` rows of the split that the environment would verify."""
    from dataclasses import replace

    from gdpo_nemo.data.rows import environment_of_row, load_rows
    from gdpo_nemo.environments.registry import load_environments

    others = dataset.environment or (name if len(config.env) == 1 else None)
    if dataset.environment_key is None and others != name:
        return []
    if dataset.environment_key is None:
        own = replace(dataset, environment=name, size=wanted if dataset.path is None else dataset.size)
        return _of_each_server(load_rows(own, {name: environment}, split, config.run.seed), environment, wanted)
    everyone = load_environments(config.env)
    rows = load_rows(dataset, everyone, split, config.run.seed)
    named = [environment_of_row(row, dataset, everyone, split, index) for index, row in enumerate(rows)]
    return _of_each_server([row for row, verifier in zip(rows, named) if verifier == name], environment, wanted)


def _of_each_server(rows: list[dict[str, Any]], environment: Any, wanted: int) -> list[dict[str, Any]]:
    """``wanted`` rows, or more if there are more servers: the first of each server, then the second of each."""
    by_server: dict[str | None, list[dict[str, Any]]] = {}
    for row in rows:
        by_server.setdefault(environment.server_of(row), []).append(row)
    turns = zip_longest(*by_server.values())
    in_turn = [row for turn in turns for row in turn if row is not None]
    return in_turn[: max(wanted, len(by_server))]


def _table(name: str, found) -> Any:
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
        values = (verdict.rewards.get(component) for component in found.components)
        rewards = ["-" if value is None else f"{value:g}" for value in values]
        outcome = f"{verdict.outcome}: {verdict.detail}" if verdict.detail else str(verdict.outcome)
        table.add_row(Text(sample.prompt.id), _short(sample.text), *rewards, f"{latency:.3f}", Text(outcome))
    return table


def _short(text: str) -> Any:
    from rich.text import Text

    shown = repr(text)
    return Text(shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 3] + "...")


def _findings(found, failure_share: float) -> list[str]:
    """What a run would make of these verdicts, one sentence each."""
    total = len(found.samples)
    failed = found.failed
    lines = [
        f"first verdict after {found.start_s:.1f} s (workers start), then {max(found.latencies_s):.3f} s a row at most"
    ]
    if failed:
        reasons = dict.fromkeys(verdict.detail for verdict in found.verdicts if verdict.detail)
        lines.append(f"masked: {failed} of {total} samples, never a reward of 0: {'; '.join(reasons)}")
        lines += [f"a run stops where more than {failure_share:.0%} of a step's samples are masked"]
    rewarded = [verdict for verdict in found.verdicts if verdict.rewards]
    for component in found.components:
        missing = sum(verdict.rewards.get(component) is None for verdict in rewarded)
        if missing:
            lines.append(
                f"{component}: does not apply to {missing} of {len(rewarded)} samples, which it then does not touch"
            )
    if not found.repeated:
        lines.append("the first row was verified twice and got two verdicts: a resumed run would not repeat this one")
    return lines if failed else [*lines, f"nothing would be masked: {total} samples verified"]


def _print(*parts: Any) -> None:
    from rich.console import Console

    wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if wide else 120, highlight=False, markup=False)
    for part in parts:
        console.print(part)
