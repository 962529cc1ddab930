"""``gdpo-nemo gym scan``: classify every server and agent of a NeMo Gym checkout by the parts that it needs.

Code and configuration are parsed, never executed. With ``--try``, ``trial.py`` starts the servers that need no other
part and verifies answers to their example rows. With ``--model``, ``agent_trial.py`` lets the agents play.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gdpo_nemo.commands.arguments import say, terminal
from gdpo_nemo.data.messages import is_image, parts_of
from gdpo_nemo.environments.nemo_gym.checkout import Unknown, component_names, instances_of, read_config
from gdpo_nemo.environments.nemo_gym.rows import read_row
from gdpo_nemo.tools.gym.agent_trial import POLICY_KEYS, Trials, choose, serve
from gdpo_nemo.tools.gym.code import Code
from gdpo_nemo.tools.gym.environments import Environments
from gdpo_nemo.tools.gym.trial import example_rows, try_server
from gdpo_nemo.tools.gym.up import checkout_of, log_folder, source_of
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import write_whole

REFUSED = "refused"
IMAGES = "needs images"
JUDGE = "needs a judge"
EXECUTES = "executes code"
CONFIGURATION = "needs a configuration"
TOOLS = "tools"
PLAIN = "plain"
CLASSES = (REFUSED, IMAGES, JUDGE, EXECUTES, CONFIGURATION, TOOLS, PLAIN)
"""Classes. If several apply, the first is the server's class."""
_SERVERS, _AGENTS = "resources_servers", "responses_api_agents"
_GIVEN = {"host", "port", "entrypoint", "name", "domain", "num_workers", "model_server", "resources_server"}
"""Config fields that this project or NeMo Gym sets."""
_UNSET = re.compile(r"\?\?\?|\$\{([\w.]+)(?::([^,}]*),?(?:\s*null)?([^}]*))?\}")
"""Matches a missing value, ``${name}``, and ``${oc.env:NAME,default}``."""


@dataclass
class Scanned:
    """A server or agent of a checkout."""

    kind: str
    name: str
    needs: dict[str, str] = field(default_factory=dict)
    """Reason by class."""
    components: list[str] | None = None
    """Reward components, or None if they are only known at run time."""
    rows: int = 0
    """Number of example rows."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The server's entry in its configuration."""
    files: tuple[str, ...] = ()
    """Configuration files with the server, as paths in the checkout."""
    unset: tuple[str, ...] = ()
    """Settings without a value."""
    outside: tuple[str, ...] = ()
    """Requirements from other places than the package index, and calls that install or download them."""
    trial: dict[str, Any] = field(default_factory=dict)

    @property
    def category(self) -> str:
        """The server's class."""
        return next((one for one in CLASSES if one in self.needs), PLAIN)


def scan(arguments: argparse.Namespace) -> int:
    """Print the class of each server and agent, and with ``--try`` the results of its example rows.

    Raises:
        ConfigError: if the checkout is invalid, or no name matches ``--only``.
    """
    checkout = checkout_of("CHECKOUT", arguments.checkout)
    assert checkout is not None
    for option in ("limit", "rows"):
        if getattr(arguments, option) is not None and getattr(arguments, option) < 1:
            raise ConfigError(f"--{option}: must be at least 1, got {getattr(arguments, option)}")
    found = [one for one in scan_checkout(checkout) if _selected(one.name, arguments.only)]
    if not found:
        raise ConfigError(f"--only: no server or agent of {arguments.checkout} matches {', '.join(arguments.only)}")
    if arguments.trial:
        _try(found, checkout, arguments)
    elif arguments.model:
        raise ConfigError("--model: requires --try")
    _print(found)
    if arguments.json:
        content = [{"class": one.category, **asdict(one)} for one in found]
        write_whole(Path(arguments.json), json.dumps(content, indent=2, default=str) + "\n")
    return 0


def _try(found: list[Scanned], checkout: Path, arguments: argparse.Namespace) -> None:
    """Start the servers that need no judge or configuration, and record what they return. With ``--model``, also start
    the plain agents."""
    from gdpo_nemo.cluster.cleanup_process import guard_children

    logs = log_folder(arguments.log_dir)
    source = source_of(arguments)
    able = [one for one in found if one.kind == _SERVERS and not one.needs.keys() - {TOOLS, EXECUTES, IMAGES}]
    guard_children()  # also ends the servers after SIGKILL
    for one in able[: arguments.limit]:
        folder = checkout / one.kind / one.name
        limits = {"limit": arguments.rows, "timeout_s": arguments.timeout}
        one.trial = try_server(one.name, one.settings, folder, source=source, logs=logs, **limits)
        say(f"{one.name}: {one.trial['summary']}")
    agents = [one for one in found if one.kind == _AGENTS and one.category == PLAIN][: arguments.limit]
    if agents and arguments.model:
        _try_agents(agents, Trials(checkout, source, logs, arguments.timeout), Path(arguments.model))


def _try_agents(agents: list[Scanned], trials: Trials, model: Path) -> None:
    """Let agents play an example row with a model. The engine starts if at least one agent can be started."""
    unset = {(one.kind, one.name): one.unset for one in scan_checkout(trials.checkout)}
    chosen = [choose(one.name, one.files, trials.checkout, unset) for one in agents]
    with serve(model) if not all(one.lacking for one in chosen) else contextlib.nullcontext() as context:
        for one, playable in zip(agents, chosen):
            one.trial = trials.run(playable, context)
            say(f"{one.name}: {one.trial['summary']}")


def _selected(name: str, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def scan_checkout(checkout: Path) -> list[Scanned]:
    """Classify all servers and agents of a checkout, in the order of their names."""
    environments = Environments(checkout, Path("unused"))
    configs = _configs(checkout)
    found = []
    for kind in (_SERVERS, _AGENTS):
        if not (checkout / kind).is_dir():
            continue
        folders = sorted(p for p in (checkout / kind).iterdir() if p.is_dir() and not p.name.startswith(("_", ".")))
        for folder in folders:
            one = Scanned(kind, folder.name)
            try:
                one.outside = environments.requirements(kind, folder.name).outside
                _classify(one, folder, checkout, configs.get((kind, folder.name), []))
            except (ConfigError, UnicodeDecodeError, OSError) as error:
                one.needs[REFUSED] = str(error)
            found.append(one)
    return found


class _Config(NamedTuple):
    """A server's entry in a configuration file."""

    settings: dict[str, Any]
    content: dict[str, Any]
    """The whole file."""
    file: str
    """Path in the checkout."""


def _configs(checkout: Path) -> dict[tuple[str, str], list[_Config]]:
    """Return the entries by (kind, folder), from all configuration files of servers and agents."""
    found: dict[tuple[str, str], list[_Config]] = {}
    for file in sorted(checkout.glob("res*/*/configs/*.yaml")):
        try:
            content = read_config(file)
        except (ConfigError, OSError):
            continue  # not a configuration of NeMo Gym's servers, or a pipe or a device
        for instance in instances_of([content]).values():
            key = (instance.kind, instance.implementation)
            own = file.parent.parent.name == instance.implementation
            entries = found.setdefault(key, [])
            entry = _Config(instance.settings, content, str(file.relative_to(checkout)))
            entries.insert(0 if own and not entries else len(entries), entry)
    return found


def _classify(one: Scanned, folder: Path, checkout: Path, configs: list[_Config]) -> None:
    options = [(entry.settings, list(_unset(entry.settings, entry.content))) for entry in configs]
    one.settings, unset = min(options, key=lambda option: len(option[1]), default=({}, []))
    one.files = tuple(dict.fromkeys(entry.file for entry in configs))
    entrypoint = folder / str(one.settings.get("entrypoint") or "app.py")
    if not entrypoint.is_file():
        one.needs[REFUSED] = f"contains no {entrypoint.name}"
        return
    code = Code(checkout, entrypoint)
    fields = code.fields()
    references = _judges(one.settings, fields)
    if references:
        one.needs[JUDGE] = ", ".join(references)
    if program := code.runs_programs():
        one.needs[EXECUTES] = program
    if program := code.runs_programs(prepares=True):
        one.outside += (program,)
    known = {*one.settings, *references, *_GIVEN}
    unset += [name for name, (_, needed) in fields.items() if needed and name not in known]
    if one.kind == _AGENTS:
        unset = [name for name in unset if name not in POLICY_KEYS]
    one.unset = tuple(dict.fromkeys(unset))
    if unset:
        one.needs[CONFIGURATION] = ", ".join(one.unset)
    if one.kind == _SERVERS:
        _classify_server(one, folder, entrypoint, code)
    elif not code.samples_from_model_server():
        one.needs[REFUSED] = "runs another program, whose replies do not contain the sampled tokens"


def _judges(settings: Mapping[str, Any], fields: Mapping[str, tuple[str, bool]]) -> list[str]:
    """Return the config fields that refer to a model other than the policy."""
    references = []
    for name, (annotation, needed) in fields.items():
        if "ModelServerRef" in annotation and (needed or name in settings):
            references.append(name)
    references += [key for key, value in settings.items() if _is_model(value)]
    distinct = dict.fromkeys(references)
    distinct.pop("model_server", None)
    return list(distinct)


def _classify_server(one: Scanned, folder: Path, entrypoint: Path, code: Code) -> None:
    if not code.method("verify"):
        one.needs[REFUSED] = "has no /verify; its agent reads the rewards from other routes"
    try:
        one.components = sorted(component_names(folder, entrypoint.name)) or ["reward"]
    except Unknown:
        one.components = None
    rows = example_rows(folder)
    one.rows = len(rows)
    if not rows:
        one.needs.setdefault(CONFIGURATION, "no data/example.jsonl")
    if routes := code.routes():
        one.needs[TOOLS] = ", ".join(routes)
    for row in rows:
        try:
            columns = read_row(row)
        except ConfigError as error:
            one.needs[REFUSED] = f"row: {error}"
            continue
        if "tools" in columns:
            one.needs.setdefault(TOOLS, "tools of the rows")
        if any(map(is_image, parts_of(columns["messages"]))):
            one.needs.setdefault(IMAGES, "images of the rows")


def _is_model(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "responses_api_models"


def _unset(settings: Mapping[str, Any], content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings without a value, and names in ``${name}`` that the file does not define."""
    for key, value in settings.items():
        if key == "datasets":
            continue
        for match in _UNSET.finditer(json.dumps(value, default=str)):
            name, argument, default = match.groups()
            if name is None:
                yield key
            elif argument is not None and not default:
                yield argument
            elif argument is None and name.split(".")[0] not in content:
                yield name


def _print(found: list[Scanned]) -> None:
    """Print a table of the servers and agents, and their number by class."""
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in ("name", "class", "reward components", "details"):
        table.add_column(heading, overflow="fold")
    for one in found:
        details = [f"{name}: {why}" for name, why in one.needs.items()]
        if one.outside:
            details.append(f"installs {', '.join(one.outside)}")
        if one.trial:
            details.append(f"try: {one.trial['summary']}")
        components = "" if one.kind == _AGENTS else ", ".join(one.components) if one.components else "computed"
        table.add_row(*map(Text, (one.name, one.category, components, "\n".join(details))))
    terminal().print(table)
    for kind, title in ((_SERVERS, "servers"), (_AGENTS, "agents")):
        counts = Counter(one.category for one in found if one.kind == kind)
        numbers = ", ".join(f"{counts[name]} {name}" for name in reversed(CLASSES) if counts[name])
        say(f"{sum(counts.values())} {title}: {numbers or 'none'}")
