"""Serve NeMo Gym servers from one process, without Ray, on one machine.

    uv venv --python 3.12 gym && uv pip install --no-config --python gym/bin/python nemo-gym==0.4.0
    gym/bin/python examples/serve_nemo_gym.py example_tool_call_multireward=12503

Each argument is SERVER=PORT: a folder in `resources_servers` and its port, or 0 for any free port. A head server, which
lists all servers, listens on --head-port. After all servers have started, the script prints a line of JSON with their
URLs. It requires a Python environment with nemo-gym 0.4 and the servers' dependencies. `gym env start` takes half a
minute and two gigabytes.

`gdpo-nemo gym` passes --global-config FILE instead: JSON in the form of NeMo Gym's global config, which may also
contain agents and model servers. With --resolve, the script prints this config with the files in `config_paths` and all
interpolations resolved. With --listener, it serves only the named servers, on sockets that the caller has opened.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import logging
import os
import re
import socket
import sys
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import uvicorn  # noqa: E402
from nemo_gym import global_config  # noqa: E402
from nemo_gym.config_types import BaseServerConfig  # noqa: E402
from nemo_gym.server_utils import HeadServer, ServerClient  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

KINDS = ("resources_servers", "responses_api_agents", "responses_api_models")


def main() -> None:
    """Parse the command line and serve until interrupted."""
    parser = argparse.ArgumentParser(description="Serve NeMo Gym servers without Ray.")
    parser.add_argument("servers", nargs="*", metavar="SERVER=PORT")
    parser.add_argument("--global-config", metavar="FILE", help="JSON file, or - for standard input")
    parser.add_argument("--resolve", action="store_true", help="print the global config and end")
    parser.add_argument("--listener", action="append", default=[], metavar="NAME=FD", help="server and its open socket")
    parser.add_argument("--head-port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    arguments = parser.parse_args()
    _prefer_own_folders()
    requested = dict(text.partition("=")[::2] for text in arguments.servers)
    content = {k: v for name, port in requested.items() for k, v in _sections(name, arguments.host, port).items()}
    if arguments.global_config:
        content = json.loads(_text(arguments.global_config))
    if "config_paths" in content or arguments.resolve:
        content = _resolved(content)
    if arguments.resolve:
        print("\n" + json.dumps(content), flush=True)
        return
    instances = {name: (kind, implementation) for name, kind, implementation in _instances(content)}
    listeners = {}
    for text in arguments.listener:
        name, _, number = text.rpartition("=")
        listeners[name] = socket.socket(fileno=int(number))
    if not listeners:
        for name, (kind, implementation) in instances.items():
            settings = content[name][kind][implementation]
            listeners[name] = _listen(settings.setdefault("host", arguments.host), int(settings.get("port") or 0))
            settings["port"] = listeners[name].getsockname()[1]
        listeners[""] = _listen(arguments.host, arguments.head_port)
    try:
        asyncio.run(_serve(content, instances, listeners))
    except SystemExit as error:  # a server did not start; threads of its libraries could keep this process alive
        sys.stderr.flush()
        os._exit(int(error.code or 1))


def _text(file: str) -> str:
    return sys.stdin.read() if file == "-" else Path(file).read_text()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.create_server((host, port), backlog=2048)
    listener.setblocking(False)
    return listener


def _sections(name: str, host: str, port: str) -> dict:
    """Return the head server's config of a server and of the agent by which datasets refer to it."""
    agent = {"resources_server": {"type": "resources_servers", "name": name}}  # without an entrypoint: not served
    server = {"entrypoint": "app.py", "domain": "other", "host": host, "port": int(port or 0)}
    return {
        name: {"resources_servers": {name: server}},
        f"{name}_simple_agent": {"responses_api_agents": {"simple_agent": agent}},
    }


def _resolved(content: dict) -> dict:
    """Return NeMo Gym's global config with the files in `config_paths` and all interpolations resolved.

    NeMo Gym selects the ports that are not set.
    """
    parsed = global_config.GlobalConfigDictParser().parse_no_environment(OmegaConf.create(content))
    resolved = OmegaConf.to_container(parsed, resolve=True)
    resolved.pop("config_paths", None)
    return resolved


def _prefer_own_folders() -> None:
    """Make the servers in the folders of PYTHONPATH precede those of the installed package with the same name.

    The folders of a checkout are not regular packages, so Python would import the installed servers.
    """
    for kind in KINDS:
        package = importlib.import_module(kind)
        folders = [str(Path(path, kind)) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        own = [folder for folder in folders if os.path.isdir(folder)]
        package.__path__ = [*own, *(folder for folder in package.__path__ if folder not in own)]


def _instances(content: dict) -> list[tuple[str, str, str]]:
    """Return (name, kind, implementation) of the servers to serve: entries with an entrypoint."""
    return [
        (name, kind, implementation)
        for name, section in content.items()
        for kind in KINDS
        for implementation, settings in ((section.get(kind) or {}) if isinstance(section, dict) else {}).items()
        if settings.get("entrypoint")
    ]


def _server(kind: str, implementation: str, settings: dict, client: ServerClient) -> object:
    """Return the web application of a server, from the class that its module runs as a program.

    If the module runs none by name, use the last class with `setup_webserver` that it defines.
    """
    module = importlib.import_module(f"{kind}.{implementation}.{Path(settings['entrypoint']).stem}")
    run = re.search(r"^ +(\w+)\.run_webserver\(\)", inspect.getsource(module), re.MULTILINE)
    server_class = getattr(module, run[1], None) if run else None
    if server_class is None:
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "setup_webserver")
        ]
        [server_class] = [
            one for one in classes if not any(other is not one and issubclass(other, one) for other in classes)
        ]
    config = server_class.model_fields["config"].annotation(**settings)
    return server_class(config=config, server_client=client).setup_webserver()


async def _serve(content: dict, instances: dict, listeners: dict[str, socket.socket]) -> None:
    """Serve the servers in `listeners` until interrupted. The name of the head server is an empty string."""
    logging.disable(logging.INFO)
    config = global_config._GLOBAL_CONFIG_DICT = OmegaConf.create(content)
    head = listeners[""].getsockname() if "" in listeners else content["head_server"].values()
    address = BaseServerConfig(**dict(zip(("host", "port"), head)))
    client = ServerClient(head_server_config=address, global_config_dict=config)
    served = []
    report: dict = {"head": f"http://{address.host}:{address.port}", "servers": {}, "agents": {}, "models": {}}
    for name, listener in listeners.items():
        if not name:
            served.append((HeadServer(config=address).setup_webserver(), listener))
            continue
        kind, implementation = instances[name]
        settings = content[name][kind][implementation]
        served.append((_server(kind, implementation, {"name": name, **settings}, client), listener))
        report[kind.rpartition("_")[2]][name] = f"http://{settings['host']}:{settings['port']}"
    servers = [uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=30)) for app, _ in served]
    running = [asyncio.create_task(server.serve([listener])) for server, (_, listener) in zip(servers, served)]
    while not all(server.started for server in servers) and not any(task.done() for task in running):
        await asyncio.sleep(0.02)
    print(json.dumps(report), flush=True)
    await asyncio.gather(*running)


if __name__ == "__main__":
    main()
