"""``gdpo-nemo gym scan``: classify every server and agent of a NeMo Gym checkout by the parts that it needs.

Code and configuration are parsed, never executed. With ``--try``, ``trial.py`` starts the servers that need no other
part and verifies answers to their example rows.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Iterator, Mapping

from gdpo_nemo.commands.arguments import say, terminal
from gdpo_nemo.commands.gym.code import Code
from gdpo_nemo.commands.gym.environments import Environments
from gdpo_nemo.commands.gym.trial import example_rows, try_server
from gdpo_nemo.commands.gym.up import checkout_of, log_folder, source_of
from gdpo_nemo.environments.nemo_gym.checkout import Unknown, component_names, instances_of, read_config
from gdpo_nemo.environments.nemo_gym.rows import read_row
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
_POLICY = ("policy_base_url", "policy_api_key", "policy_model_name")
"""Names that ``gdpo-nemo gym up`` defines for agents."""


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
    _print(found)
    if arguments.json:
        content = [{"class": one.category, **asdict(one)} for one in found]
        write_whole(Path(arguments.json), json.dumps(content, indent=2, default=str) + "\n")
    return 0


def _try(found: list[Scanned], checkout: Path, arguments: argparse.Namespace) -> None:
    """Start the servers that need no judge, images or configuration, and record what they return."""
    from gdpo_nemo.cluster.cleanup_process import guard_children

    logs = log_folder(arguments.log_dir)
    source = source_of(arguments)
    able = [one for one in found if one.kind == _SERVERS and not one.needs.keys() - {TOOLS, EXECUTES}]
    guard_children()  # also ends the servers after SIGKILL
    for one in able[: arguments.limit]:
        folder = checkout / one.kind / one.name
        one.trial = try_server(one.name, one.settings, folder, arguments.rows, source, logs, arguments.timeout)
        say(f"{one.name}: {one.trial['summary']}")


def _selected(name: str, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def scan_checkout(checkout: Path) -> list[Scanned]:
    """Classify all servers and agents of a checkout, in the order of their names."""
    environments = Environments(checkout, Path("unused"))
    configs = _configs(checkout)
    found = []
    for kind in (_SERVERS, _AGENTS):
        folders = sorted(p for p in (checkout / kind).iterdir() if p.is_dir() and not p.name.startswith(("_", ".")))
        for folder in folders:
            one = Scanned(kind, folder.name)
            try:
                one.outside = environments.requirements(kind, folder.name).outside
                _classify(one, folder, checkout, configs.get((kind, folder.name), []))
            except (ConfigError, UnicodeDecodeError) as error:
                one.needs[REFUSED] = str(error)
            found.append(one)
    return found


def _configs(checkout: Path) -> dict[tuple[str, str], list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Return [(settings, file's content)] by (kind, folder), from all configuration files of servers and agents."""
    found: dict[tuple[str, str], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for file in sorted(checkout.glob("res*/*/configs/*.yaml")):
        try:
            content = read_config(file)
        except ConfigError:
            continue  # not a configuration of NeMo Gym's servers
        for instance in instances_of([content]).values():
            key = (instance.kind, instance.implementation)
            own = file.parent.parent.name == instance.implementation
            found.setdefault(key, []).insert(0 if own and not found.get(key) else len(found.get(key, [])), (
                instance.settings, content))  # fmt: skip
    return found


def _classify(one: Scanned, folder: Path, checkout: Path, configs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    options = [(settings, list(_unset(settings, content))) for settings, content in configs]
    one.settings, unset = min(options, key=lambda option: len(option[1])) if options else ({}, [])
    entrypoint = folder / str(one.settings.get("entrypoint") or "app.py")
    if not entrypoint.is_file():
        one.needs[REFUSED] = f"contains no {entrypoint.name}"
        return
    code = Code(checkout, entrypoint)
    fields = code.fields()
    references = [name for name, (kind, needed) in fields.items() if "ModelServerRef" in kind and name != "model_server"
                  and (needed or name in one.settings)]  # fmt: skip
    references += [key for key, value in one.settings.items() if key != "model_server" and _is_model(value)]
    if references:
        one.needs[JUDGE] = ", ".join(dict.fromkeys(references))
    if program := code.runs_programs():
        one.needs[EXECUTES] = program
    if program := code.runs_programs(prepares=True):
        one.outside += (program,)
    lacking = [n for n, (_, needed) in fields.items() if needed and n not in one.settings and n not in references]
    unset = [*unset, *(name for name in lacking if name not in _GIVEN)]
    if one.kind == _AGENTS:
        unset = [name for name in unset if name not in _POLICY]
    if unset:
        one.needs[CONFIGURATION] = ", ".join(dict.fromkeys(unset))
    if one.kind == _SERVERS:
        _classify_server(one, folder, entrypoint, code)
    elif not code.samples_from_model_server():
        one.needs[REFUSED] = "runs another program, whose replies do not contain the sampled tokens"


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
            if "tools" in read_row(row):
                one.needs.setdefault(TOOLS, "tools of the rows")
        except ConfigError as error:
            images = '_image"' in json.dumps(row.get("responses_create_params"))
            one.needs[IMAGES if images else REFUSED] = f"row: {error}"


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
        details += [f"installs {', '.join(one.outside)}"] if one.outside else []
        details += [f"try: {one.trial['summary']}"] if one.trial else []
        components = "" if one.kind == _AGENTS else ", ".join(one.components) if one.components else "computed"
        table.add_row(*(Text(text) for text in (one.name, one.category, components, "\n".join(details))))
    terminal().print(table)
    for kind, title in ((_SERVERS, "servers"), (_AGENTS, "agents")):
        counts = Counter(one.category for one in found if one.kind == kind)
        numbers = ", ".join(f"{counts[name]} {name}" for name in reversed(CLASSES) if counts[name])
        say(f"{sum(counts.values())} {title}: {numbers or 'none'}")
