"""``gdpo-nemo gym up``: start the NeMo Gym servers and agents of a config, and end them with the command."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gdpo_nemo.commands.arguments import say
from gdpo_nemo.environments.nemo_gym.checkout import KINDS, Instance, Unknown, config_contents, instances_of
from gdpo_nemo.tools.gym.environments import Environments, default_cache
from gdpo_nemo.tools.gym.processes import HEAD, Addressed, Served, address, end_all, resolve, served_instances
from gdpo_nemo.utils.errors import ConfigError, GdpoError, RunError
from gdpo_nemo.utils.files import write_whole

if TYPE_CHECKING:
    from gdpo_nemo.config.schema import Config

_PLUGINS = ("nemo_gym", "nemo_gym_agent")
_POLL_S = 0.2


@dataclass
class Wanted:
    """Servers that an environment of the config needs."""

    content: dict[str, Any]
    """NeMo Gym's global config, not yet resolved."""
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host and port by name, from the URLs in the config."""
    endpoint: dict[str, Any] = field(default_factory=dict)
    """Address of the run's endpoint. Model servers with this address already run."""
    only: frozenset[str] = frozenset()
    """Servers to start, or empty for all."""


@dataclass
class Source:
    """Code of the servers, and the Python that runs it."""

    folder: Path | None
    """Checkout of NeMo Gym, or the site-packages folder that contains it."""
    python: Path | None
    """Python of all servers, or None for an environment per server."""
    environments: Environments | None = None

    @property
    def path(self) -> list[Path]:
        """Folders for PYTHONPATH. A site-packages folder is not among them if the environment contains NeMo Gym."""
        installed = self.python is None and self.folder is not None and not (self.folder / "pyproject.toml").is_file()
        return [] if self.folder is None or installed else [self.folder]

    def base(self) -> Path:
        """Return a Python that can import NeMo Gym."""
        if self.python is None:
            assert self.environments is not None
            return self.environments.python_of()
        return self.python


def up(arguments: argparse.Namespace) -> int:
    """Start the servers, wait until they answer, and wait until the command is ended.

    Raises:
        ConfigError: if the config has no NeMo Gym environment, or an option is invalid.
        RunError: if a server does not start, or ends.
    """
    from gdpo_nemo.cluster.cleanup_process import guard_children
    from gdpo_nemo.config.load import load_config

    config = load_config(arguments.config, arguments.overrides)
    wanted = {}
    for name, options in config.env.items():
        if content := to_serve(config, name, options):
            wanted[name] = content
    if not wanted:
        raise ConfigError(f"{arguments.config}: no environment of env is {' or '.join(_PLUGINS)} with servers to start")
    source = source_of(arguments)
    if arguments.dry_run:
        return _dry_run(wanted, source)
    logs = log_folder(arguments.log_dir)
    guard_children()  # also ends the servers after SIGKILL
    with contextlib.ExitStack() as stack:
        started: dict[str, tuple[Addressed, list[Served]]] = {}
        running: list[Served] = []
        stack.callback(end_all, running)
        for name, one in wanted.items():
            addressed = wanted_address(one, source)
            stack.callback(addressed.close)
            first = len(running)
            running.extend(start(f"env.{name}", name, addressed, source, logs))  # appends each as it starts
            started[name] = addressed, running[first:]
            addressed.close()
        deadline = time.monotonic() + arguments.timeout
        _wait_until_ready(started, logs, deadline)
        while True:
            for process in running:
                process.check()
            time.sleep(_POLL_S)


def _wait_until_ready(started: Mapping[str, tuple[Addressed, list[Served]]], logs: Path, deadline: float) -> None:
    """Wait until all servers answer, and print and write their addresses."""
    say(f"starting; logs in {logs}")
    addresses = {}
    titles = {"resources_servers": "servers", "responses_api_agents": "agents", "responses_api_models": "models"}
    for name, (addressed, processes) in started.items():
        for process in processes:
            process.wait_until_ready(addressed.urls, deadline)
        kinds: dict[str, dict[str, str]] = {"head": {"head server": addressed.urls[HEAD]}}
        for title in titles.values():
            kinds[title] = {}
        for server, instance in addressed.instances.items():
            kinds[titles[instance.kind]][server] = addressed.urls[server]
        addresses[name] = kinds
    write_whole(logs / "addresses.json", json.dumps(addresses, indent=2) + "\n")
    for name, kinds in addresses.items():
        lines = [f"env.{name}:"]
        for urls in kinds.values():
            lines += [f"  {server} {url}" for server, url in urls.items()]
        say("\n".join(lines))
    say(f"ready; addresses in {logs / 'addresses.json'}, logs in {logs}; end with Ctrl-C")


def start(label: str, name: str, addressed: Addressed, source: Source, logs: Path) -> Iterator[Served]:
    """Start servers: one process per server, or one for all if they share a Python.

    Args:
        label: subject of error messages.
        name: begin of the logs' names.

    Raises:
        RunError: if the requirements of a server cannot be installed.
    """
    if source.python is not None:
        names = [*addressed.instances, HEAD]
        yield Served(label, addressed, names, source.python, path=source.path, folder=logs, log=logs / f"{name}.log")
        return
    assert source.environments is not None and source.folder is not None
    pythons = {}
    for server, (kind, implementation, _) in addressed.instances.items():
        pythons[server] = source.environments.python_of(kind, implementation)
    for index, (server, (kind, implementation, _)) in enumerate(addressed.instances.items()):
        folder = source.folder / kind / implementation
        names = [server, HEAD] if index == 0 else [server]
        log = logs.absolute() / (f"{name}.{server}.log" if server != name else f"{name}.log")
        # As in NeMo Gym, a server runs in its own folder and imports files next to its entry point.
        path = [folder, *source.path]
        yield Served(label, addressed, names, pythons[server], path=path, folder=folder, log=log)


def wanted_address(wanted: Wanted, source: Source) -> Addressed:
    """Resolve NeMo Gym's global config, and open a socket for each server to start.

    Raises:
        RunError: if NeMo Gym refuses the config, or an address is in use.
    """
    content = wanted.content
    if "config_paths" in content:
        content["config_paths"] = _files(content["config_paths"], source.folder)
        content = resolve(content, source.base(), source.path)
    for server, (kind, implementation, settings) in served_instances(content).items():
        place = settings | wanted.places.get(server, {})
        runs = kind == "responses_api_models" and wanted.endpoint and wanted.endpoint.items() <= place.items()
        if runs or wanted.only and server not in wanted.only:
            del content[server][kind][implementation]["entrypoint"]
    return address(content, wanted.places)


def _files(paths: list[str], folder: Path | None) -> list[str]:
    """Return the paths in the checkout ``folder``, or in the working directory if the checkout has no such file."""
    found = []
    for path in paths:
        candidates = (f for f in (folder and folder / path, Path(path)) if f and f.is_file())
        file = next(candidates, None)
        found.append(path if file is None else str(file.absolute()))
    return found


def to_serve(config: Config, name: str, options: Mapping[str, Any] | None) -> Wanted | None:
    """Return the servers of an environment, or None if it has no servers to start.

    The servers and agents that the environment lists get the ports of their URLs.

    Raises:
        ConfigError: if the servers of the environment's agents are unknown, or the agents cannot reach the endpoint.
    """
    from gdpo_nemo.environments.registry import load_environment, plugin_of

    plugin = plugin_of(name, options)
    if plugin not in _PLUGINS or not options:
        return None
    load_environment(name, options)  # checks the types of the options
    if plugin == "nemo_gym":
        places = {server: _place(url) for server, url in (options.get("servers") or {}).items()}
        entry = {"entrypoint": "app.py", "domain": "other"}
        content: dict[str, Any] = {server: {"resources_servers": {server: dict(entry)}} for server in places}
        return Wanted(content, places) if content else None
    content = json.loads(json.dumps(options.get("global_config") or {}, default=str))
    if not content:
        raise ConfigError(f"env.{name}.global_config: not set; list NeMo Gym's files in config_paths")
    paths = content.setdefault("config_paths", [])
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"env.{name}.global_config.config_paths: must be a list of files, not {paths!r}")
    endpoint = config.rollout.endpoint
    if endpoint.port == 0:
        raise ConfigError("rollout.endpoint.port: must not be 0, because the agents need to know the port")
    content["policy_base_url"] = f"http://{endpoint.host}:{endpoint.port}/v1"
    content |= {"policy_api_key": "none", "policy_model_name": config.policy.model_name}
    content["error_on_almost_servers"] = False  # recipes contain changes to servers that they do not use
    places = {agent: _place(url) for agent, url in (options.get("agents") or {}).items()}
    return Wanted(content, places, {"host": endpoint.host, "port": endpoint.port})


def _place(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {"host": parts.hostname or "127.0.0.1", "port": parts.port or 80}


def log_folder(given: str) -> Path:
    """Create the folder for logs. Raises ConfigError if it cannot be created."""
    logs = Path(given)
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log-dir: {logs} cannot be created ({error.strerror})") from None
    return logs


def source_of(arguments: argparse.Namespace) -> Source:
    """Return the code and the Python that the options select. Raises ConfigError if they are invalid."""
    folder = checkout_of("--checkout", arguments.checkout)
    python = None if arguments.python is None else Path(arguments.python).absolute()
    if python is None and folder is None:
        raise ConfigError("--python: specify a Python that has nemo-gym installed, or NeMo Gym's files with --checkout")
    if python is not None and not (python.is_file() and os.access(python, os.X_OK)):
        raise ConfigError(f"--python: {python} not found or not executable")
    if python is not None or folder is None:
        return Source(folder, python)
    cache = Path(arguments.venvs) if arguments.venvs else default_cache()
    return Source(folder, None, Environments(folder, cache, arguments.venv_python))


def checkout_of(option: str, given: str | None) -> Path | None:
    """Return the absolute path of a checkout. Raises ConfigError if it is not a folder of NeMo Gym."""
    folder = None if given is None else Path(given).absolute()
    if folder is not None and not (folder / "resources_servers").is_dir():
        raise ConfigError(f"{option}: {given} does not contain the folder resources_servers of NeMo Gym")
    return folder


# -- dry run ----------------------------------------------------------------------------------------------------


def _dry_run(wanted: Mapping[str, Wanted], source: Source) -> int:
    """Check files, addresses and requirements without starting a server. The exit status is 1 if a check fails."""
    folder = source.folder or _installed(source.python)
    problems = 0
    for name, one in wanted.items():
        say(f"env.{name}:")
        try:
            files = _files(one.content.get("config_paths", []), folder)
            instances = instances_of((*config_contents(files, folder), one.content))
        except (Unknown, ConfigError) as error:
            say(f"  config_paths: {error}")
            problems += 1
            continue
        served = {server: instance for server, instance in instances.items() if instance.settings.get("entrypoint")}
        for server, instance in served.items():
            found = list(_problems(server, instance, instances, one, folder, source))
            say(f"  {server}: {'; '.join(found) or 'ready to start'}")
            problems += bool(found)
        for server in one.places.keys() - served.keys():
            say(f"  {server}: no file in config_paths defines this server")
            problems += 1
        for file in _absent_data(served, folder):
            say(f"  note: {file} was not found; the servers start without it")
    say(f"{problems or 'no'} problem{'' if problems == 1 else 's'}")
    return 1 if problems else 0


def _problems(
    name: str, instance: Instance, instances: Mapping[str, Instance], wanted: Wanted, folder: Path, source: Source
) -> Iterator[str]:
    """Yield the reasons why a server cannot start."""
    kind, implementation, settings = instance
    code = folder / kind / implementation / str(settings["entrypoint"])
    if not code.is_file():
        yield f"{code} was not found"
        return
    for key, value in settings.items():
        if value == "???":
            yield f"{key} is not set"
        target = value.get("name") if isinstance(value, dict) and value.get("type") in KINDS else None
        if isinstance(target, str) and "$" not in target and target not in instances:
            yield f"{key} names the server {target}, which no file in config_paths defines"
    try:
        if name in wanted.places:
            address({name: {kind: {implementation: dict(settings)}}}, wanted.places).close()
        environments = source.environments or Environments(folder, default_cache())
        environments.check(kind, implementation, source.python)
    except GdpoError as error:
        yield str(error).removeprefix(f"{name}: ")


def _absent_data(served: Mapping[str, Instance], folder: Path) -> Iterator[str]:
    for instance in served.values():
        for dataset in instance.settings.get("datasets") or []:
            path = dataset.get("jsonl_fpath") if isinstance(dataset, dict) else None
            if isinstance(path, str) and not (folder / path).is_file():
                yield path


def _installed(python: Path | None) -> Path:
    """Return the folder with the NeMo Gym of a Python. Raises RunError if it is not installed."""
    assert python is not None
    found = [path.parent for path in python.parent.parent.glob("lib/python3.*/site-packages/resources_servers")]
    if not found:
        raise RunError(f"--python: nemo-gym is not installed for {python}")
    return found[0]
