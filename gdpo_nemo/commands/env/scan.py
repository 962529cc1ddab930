"""``gdpo-nemo env scan verifiers``: load installed packages for verifiers, and let each play a few episodes."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.commands.arguments import say
from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.environments.server_replies import printable
from gdpo_nemo.environments.verifiers.environment import Verifiers, interpreter
from gdpo_nemo.utils.errors import ConfigError, GdpoError

if TYPE_CHECKING:
    from gdpo_nemo.rollouts.context import RolloutContext

_SAMPLES = 2
"""Episodes of each task, because some reward functions compare the samples of a group."""
_DEADLINE_S = 300.0
_DETAIL = 200
_LIST = """
import importlib.metadata, json, re
names = set()
for package in importlib.metadata.distributions():
    if any(re.match(r"verifiers\\b(?![-_.])", requirement) for requirement in package.requires or ()):
        names.add(package.name)
print(json.dumps(sorted(names)))
"""
"""Program that prints the names of the packages that require verifiers."""


def scan(arguments: argparse.Namespace) -> int:
    """Print for each package if it loads and plays, and how to use it. The exit status is 1 if a package fails."""
    if arguments.rows < 1:
        raise ConfigError(f"--rows: must be at least 1, got {arguments.rows}")
    packages = arguments.packages or installed_packages(interpreter(arguments.venv))
    if not packages:
        raise ConfigError("no installed package requires verifiers; name the packages, or set --venv")
    failed = 0
    with contextlib.ExitStack() as stack:
        context = None
        if arguments.model:
            from gdpo_nemo.tools.gym.agent_trial import serve

            context = stack.enter_context(serve(Path(arguments.model)))
        for package in packages:
            try:
                for line in try_package(package, arguments.venv, arguments.rows, context):
                    say(line)
            except GdpoError as error:
                failed += 1
                say(f"{package}: failed: {printable(str(error), _DETAIL)}")
    say(f"{len(packages) - failed} of {len(packages)} packages {'played' if arguments.model else 'loaded'}")
    return 1 if failed else 0


def installed_packages(python: Path) -> list[str]:
    """Return the names of the packages in a virtual environment that require verifiers."""
    found: list[str] = json.loads(subprocess.check_output([python, "-P", "-c", _LIST], text=True))
    return found


def try_package(package: str, venv: str, rows: int, context: RolloutContext | None) -> Iterator[str]:
    """Load a package and let it play a few rows with the policy of ``context``. Yield the lines of the report.

    Raises:
        ConfigError: if the package cannot be loaded or has no tasks, or no episode can be trained.
        RunError: if the engine failed.
    """
    options = {"package": package, **({"venv": venv} if venv else {})}
    environment = Verifiers({**options, "deadline_s": _DEADLINE_S})
    try:
        description = environment.preflight(())
        found = environment.rows("train", rows, 0)
        played = _played(environment, found, context) if context is not None else []
    finally:
        environment.close()
    trained = [t for t in played if t.trains]
    failures = list(dict.fromkeys(printable(t.detail, _DETAIL) for t in played if not t.trains))
    if failures and not trained:
        raise ConfigError(f"no episode can be trained: {'; '.join(failures[:3])}")
    turns = [t.turns for t in trained]
    result = (
        f"{len(trained)} of {len(played)} episodes played, {min(turns)} to {max(turns)} turns" if turns else "loaded"
    )
    tools = "tools" if description["tools"] else "no tools"
    yield f"{package}: {result}, {tools} (verifiers {description['version']}, {description['api']} API)"
    yield from (f"  failed episodes: {failure}" for failure in failures[:3])
    weights: dict[str, float] = {}
    for function in description["functions"]:
        name, weight = function["name"], function["weight"]
        scored = [{**t.component_rewards, **t.metrics} for t in trained]
        values = [value for each in scored if (value := each.get(name)) is not None]
        mean = f", mean {np.mean(values):.3g} of {len(values)} samples" if values else ""
        weights |= {name: weight} if weight else {}
        kind = f"{'group ' * function['group']}component of weight {weight:g}" if weight else "metric"
        yield f"  {name}: {kind}{mean}"
    yield from (f"  {name}: metric" for name in description["metrics"])
    if description.get("open"):
        yield "  further components: known only when episodes are scored"
    yield from ("  " + line for line in _snippet(package, options, weights))


def _played(environment: Verifiers, rows: Sequence[Mapping[str, Any]], context: RolloutContext) -> list[Trajectory]:
    from gdpo_nemo.rollouts.agents import play_with_agents

    assert context.endpoint is not None
    environment.use_endpoint(context.endpoint.url, None)
    prompts = []
    for row in rows:
        fields = {name: value for name, value in row.items() if name not in ("id", "prompt")}
        prompts.append(Prompt(str(row["id"]), np.zeros(1, np.int32), "", "scan", fields, row["prompt"]))
    groups = play_with_agents(environment, prompts, replace(context, samples=_SAMPLES))
    return [trajectory for group in groups for trajectory in group]


def _snippet(package: str, options: Mapping[str, str], weights: Mapping[str, float]) -> Iterator[str]:
    """Yield the sections of a config that trains the package with its own weights."""
    name = package.rpartition("/")[2].partition("@")[0].replace("-", "_")
    sections = {
        "data": {"train": {"environment": name}},
        "env": {name: {"plugin": "verifiers", **options}},
        "gdpo": {"rewards": weights},
    }
    for section, content in sections.items():
        yield f"{section}: {json.dumps(content)}"
    yield "rollout: {endpoint: {enabled: true, port: 0}}"
