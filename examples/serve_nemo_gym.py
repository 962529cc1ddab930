"""Serve NeMo Gym resources servers from one process, without Ray, for verification on one machine.

    uv venv --python 3.12 gym && uv pip install --no-config --python gym/bin/python nemo-gym==0.4.0
    gym/bin/python examples/serve_nemo_gym.py example_tool_call_multireward=12503

Each argument is SERVER=PORT: a folder in `resources_servers` and its port, or 0 for any free port. A head server, which
lists all servers, listens on --head-port. After all servers have started, the script prints a line of JSON with their
URLs. It requires a Python environment with nemo-gym 0.4 and the servers' dependencies. `gym env start` also serves
agents and models, but takes half a minute and two gigabytes.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import logging
import os
import socket

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import uvicorn  # noqa: E402
from nemo_gym import global_config  # noqa: E402
from nemo_gym.base_resources_server import SimpleResourcesServer  # noqa: E402
from nemo_gym.config_types import BaseServerConfig  # noqa: E402
from nemo_gym.server_utils import HeadServer, ServerClient  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402


def main() -> None:
    """Parse the command line and serve until interrupted."""
    parser = argparse.ArgumentParser(description="Serve NeMo Gym resources servers without Ray.")
    parser.add_argument("servers", nargs="+", metavar="SERVER=PORT")
    parser.add_argument("--head-port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    arguments = parser.parse_args()
    requested = [text.partition("=")[::2] for text in arguments.servers]
    listeners = {name: _listen(arguments.host, int(port or 0)) for name, port in requested}
    head = _listen(arguments.host, arguments.head_port)
    ports = {name: listener.getsockname()[1] for name, listener in listeners.items()}
    config = OmegaConf.create(
        {k: v for name, port in ports.items() for k, v in _sections(name, arguments.host, port).items()}
    )
    global_config._GLOBAL_CONFIG_DICT = config
    address = BaseServerConfig(host=arguments.host, port=head.getsockname()[1])
    client = ServerClient(head_server_config=address, global_config_dict=config)
    apps = {name: _server(name, arguments.host, port, client).setup_webserver() for name, port in ports.items()}
    served = [
        (HeadServer(config=address).setup_webserver(), head),
        *((app, listeners[name]) for name, app in apps.items()),
    ]
    urls = {name: f"http://{arguments.host}:{port}" for name, port in ports.items()}
    asyncio.run(_serve(served, {"head": f"http://{arguments.host}:{address.port}", "servers": urls}))


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.create_server((host, port), backlog=2048)
    listener.setblocking(False)
    return listener


def _sections(name: str, host: str, port: int) -> dict:
    """Return the head server's config of a server and of the agent by which datasets refer to it."""
    agent = {"entrypoint": "app.py", "resources_server": {"type": "resources_servers", "name": name}}
    return {
        name: {"resources_servers": {name: {"entrypoint": "app.py", "domain": "other", "host": host, "port": port}}},
        f"{name}_simple_agent": {"responses_api_agents": {"simple_agent": agent}},
    }


def _server(name: str, host: str, port: int, client: ServerClient) -> SimpleResourcesServer:
    module = importlib.import_module(f"resources_servers.{name}.app")
    [server_class] = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, SimpleResourcesServer) and value.__module__ == module.__name__
    ]
    settings = server_class.model_fields["config"].annotation(
        host=host, port=port, entrypoint="app.py", name=name, domain="other"
    )
    return server_class(config=settings, server_client=client)


async def _serve(served: list, report: dict) -> None:
    logging.disable(logging.INFO)
    servers = [uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=30)) for app, _ in served]
    running = [asyncio.create_task(server.serve([listener])) for server, (_, listener) in zip(servers, served)]
    while not all(server.started for server in servers) and not any(task.done() for task in running):
        await asyncio.sleep(0.02)
    print(json.dumps(report), flush=True)
    await asyncio.gather(*running)


if __name__ == "__main__":
    main()
