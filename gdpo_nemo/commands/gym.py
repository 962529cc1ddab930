"""``gdpo-nemo gym up``: start the NeMo Gym servers and agents of a config, and end them with the command."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from gdpo_nemo.commands.arguments import Commands, Parser, add_overrides, say
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.files import write_whole
from gdpo_nemo.utils.source import find_file

if TYPE_CHECKING:
    from gdpo_nemo.config.schema import Config

_PLUGINS = ("nemo_gym", "nemo_gym_agent")
_SCRIPT = "examples/serve_nemo_gym.py"
_POLL_S = 0.2
_END_S = 20.0
_LAST_LINES = 5
"""Number of lines of a log in an error message."""


def add(commands: Commands) -> None:
    """Register ``gym`` and its actions."""
    command = commands.add_parser("gym", help="start the NeMo Gym servers of a config")
    actions = command.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    action = actions.add_parser(
        "up",
        help="start the servers and agents, print their addresses and end them with Ctrl-C or SIGTERM",
        epilog="Exit status: 1 if a server does not start or ends, 2 if the config or an option is invalid.",
    )
    action.add_argument("config", metavar="CONFIG", help="config with an environment nemo_gym or nemo_gym_agent")
    action.add_argument(
        "--checkout",
        metavar="DIR",
        help="checkout of NeMo Gym, or the site-packages folder that contains it (default: NeMo Gym of --python)",
    )
    action.add_argument(
        "--python",
        metavar="FILE",
        help="Python with the dependencies of NeMo Gym and its servers (default: the one in or around --checkout)",
    )
    action.add_argument(
        "--log-dir", metavar="DIR", default="gym_logs", help="folder for logs and addresses.json (default: %(default)s)"
    )
    action.add_argument(
        "--timeout", metavar="S", type=float, default=600.0, help="seconds until all servers answer (default: 600)"
    )
    add_overrides(action)
    action.set_defaults(command=up)


def up(arguments: argparse.Namespace) -> int:
    """Start the servers, wait until they answer, and wait until the command is ended.

    Raises:
        ConfigError: if the config has no NeMo Gym environment, or an option is invalid.
        RunError: if a server does not start, or ends.
    """
    from gdpo_nemo.cluster.cleanup_process import guard_children
    from gdpo_nemo.config.load import load_config

    config = load_config(arguments.config, arguments.overrides)
    wanted = {name: content for name, options in config.env.items() if (content := to_serve(config, name, options))}
    if not wanted:
        raise ConfigError(f"{arguments.config}: no environment of env is {' or '.join(_PLUGINS)} with servers to start")
    checkout = _checkout(arguments.checkout)
    python = find_python(arguments.python, checkout)
    for content in wanted.values():
        _check_free(content)
        if "config_paths" in content and checkout is not None:
            files = [checkout / path for path in content["config_paths"]]
            content["config_paths"] = [str(f) if f.is_file() else p for f, p in zip(files, content["config_paths"])]
    logs = Path(arguments.log_dir)
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log-dir: {logs} cannot be created ({error.strerror})") from None
    guard_children()  # also ends the servers after SIGKILL
    started = {name: _Served(name, content, python, checkout, logs) for name, content in wanted.items()}
    try:
        deadline = time.monotonic() + arguments.timeout
        addresses = {name: served.addresses(deadline) for name, served in started.items()}
        write_whole(logs / "addresses.json", json.dumps(addresses, indent=2) + "\n")
        for name, kinds in addresses.items():
            lines = [f"  {server} {url}" for urls in kinds.values() for server, url in urls.items()]
            say("\n".join([f"env.{name}:", *lines]))
        say(f"ready; addresses in {logs / 'addresses.json'}, logs in {logs}; end with Ctrl-C")
        while True:
            for served in started.values():
                served.check()
            time.sleep(_POLL_S)
    finally:
        for served in started.values():
            served.end()


def to_serve(config: Config, name: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return NeMo Gym's global config of the servers of an environment (empty if it has no servers to start).

    The servers get the ports of the URLs in the environment's options. Other servers get free ports.

    Raises:
        ConfigError: if the servers of the environment's agents are unknown, or the agents cannot reach the endpoint.
    """
    from gdpo_nemo.environments.registry import load_environment, plugin_of

    plugin = plugin_of(name, options)
    if plugin not in _PLUGINS or not options:
        return {}
    load_environment(name, options)  # checks the types of the options
    if plugin == "nemo_gym":
        return {
            server: {"resources_servers": {server: {"entrypoint": "app.py", "domain": "other", **_place(url)}}}
            for server, url in (options.get("servers") or {}).items()
        }
    content: dict[str, Any] = json.loads(json.dumps(options.get("global_config") or {}, default=str))
    if not content:
        raise ConfigError(f"env.{name}.global_config: not set; list NeMo Gym's files in config_paths")
    paths = content.get("config_paths", [])
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"env.{name}.global_config.config_paths: must be a list of files, not {paths!r}")
    endpoint = config.rollout.endpoint
    if endpoint.port == 0:
        raise ConfigError("rollout.endpoint.port: must not be 0, because the agents need to know the port")
    content["policy_base_url"] = f"http://{endpoint.host}:{endpoint.port}/v1"
    content |= {"policy_api_key": "none", "policy_model_name": config.policy.model_name}
    content["error_on_almost_servers"] = False  # recipes contain changes to servers that they do not use
    content["_endpoint"] = {"host": endpoint.host, "port": endpoint.port}
    return {**content, "_places": {agent: _place(url) for agent, url in (options.get("agents") or {}).items()}}


def _place(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {"host": parts.hostname or "127.0.0.1", "port": parts.port or 80}


def _check_free(content: Mapping[str, Any]) -> None:
    """Check that the ports of the environment's URLs are free. Raises RunError."""
    places = content.get("_places")
    if places is None:
        places = {name: kinds["resources_servers"][name] for name, kinds in content.items()}
    for name, place in places.items():
        try:
            socket.create_server((place["host"], place["port"])).close()
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise RunError(f"{name}: cannot listen on {place['host']}:{place['port']} ({why})") from None


def _checkout(given: str | None) -> Path | None:
    checkout = None if given is None else Path(given).absolute()
    if checkout is not None and not (checkout / "resources_servers").is_dir():
        raise ConfigError(f"--checkout: {given} does not contain the folder resources_servers of NeMo Gym")
    return checkout


def find_python(given: str | None, checkout: Path | None) -> Path:
    """Return the Python that runs NeMo Gym: the given one, or the one of the environment in or around the checkout.

    Raises:
        ConfigError: if it is not found.
    """
    candidates = [Path(given).absolute()] if given else []
    if checkout is not None and not given:
        candidates += [checkout / ".venv" / "bin" / "python", *(p / "bin" / "python" for p in checkout.parents[2:3])]
    found = next((path for path in candidates if os.access(path, os.X_OK) and path.is_file()), None)
    if found is None:
        tried = f" ({', '.join(map(str, candidates))} not found)" if candidates else ""
        raise ConfigError(f"--python: specify a Python that has nemo-gym installed{tried}")
    return found


class _Served:
    """Process that serves one environment's servers."""

    def __init__(self, name: str, content: dict[str, Any], python: Path, checkout: Path | None, logs: Path):
        self.name = name
        script = find_file(_SCRIPT)
        if script is None:
            raise RunError(f"{_SCRIPT} was not found")
        self._log = logs / f"{name}.log"
        self._report = logs / f"{name}.report.json"
        paths = [str(checkout)] if checkout is not None else []
        paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        with open(self._log, "w") as log:
            self._report.unlink(missing_ok=True)
            self._process = subprocess.Popen(
                [str(python), str(script.absolute()), "--global-config", "-", "--report", self._report.name],
                stdin=subprocess.PIPE,  # not a file, because the config may contain keys of judge models
                stdout=log,
                stderr=log,
                env=variables,
                cwd=logs,
                start_new_session=True,  # Ctrl-C ends this command, which ends the servers
                text=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # check() reports that the process has ended
            self._process.stdin.write(json.dumps(content))
            self._process.stdin.close()

    def addresses(self, deadline: float) -> dict[str, dict[str, str]]:
        """Wait until every server answers, and return the URLs by kind and name. Raises RunError."""
        while not self._report.exists():
            self._wait(deadline, "the servers")
        report = json.loads(self._report.read_text())
        for kind in ("servers", "agents", "models"):
            for server, url in report[kind].items():
                while not _answers(url):
                    self._wait(deadline, f"{server} at {url}")
        return {"head": {"head server": report["head"]}, **{k: v for k, v in report.items() if k != "head"}}

    def _wait(self, deadline: float, what: str) -> None:
        self.check()
        if time.monotonic() > deadline:
            raise RunError(f"env.{self.name}: {what} did not answer before --timeout; see {self._log}")
        time.sleep(_POLL_S)

    def check(self) -> None:
        """Raise RunError with the end of the log if the process has ended."""
        status = self._process.poll()
        if status is not None:
            last = self._log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
            raise RunError(
                f"env.{self.name}: the servers ended with status {status}; see {self._log}: {' | '.join(last)}"
            )

    def end(self) -> None:
        """End the process. The cleanup process of this command ends its remaining descendants."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _answers(url: str) -> bool:
    try:
        build_opener(ProxyHandler({})).open(url + "/", timeout=5.0).close()
    except HTTPError:  # NeMo Gym 0.4 has only some of the routes
        return True
    except OSError:
        return False
    return True
