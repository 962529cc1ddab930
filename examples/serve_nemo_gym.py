"""Serve NeMo Gym resources servers from one process, without Ray: enough for verification on one machine.

    uv venv --python 3.12 gym && uv pip install --no-config --python gym/bin/python nemo-gym==0.4.0
    gym/bin/python examples/serve_nemo_gym.py example_tool_call_multireward=12503

Each argument is SERVER=PORT, a folder of `resources_servers` and where it listens; port 0 takes any free one. A head
server that knows them all listens at --head-port. Prints a line of JSON with the URLs once all of them answer. To be
run by a Python that has nemo-gym (0.4) and what the servers need; `gym env start` serves agents and models, too, and
takes half a minute and two gigabytes for it.
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
    """Command line; see the top of the file."""
    parser = argparse.ArgumentParser(description="Serve NeMo Gym resources servers without Ray.")
    parser.add_argument("servers", nargs="+", metavar="SERVER=PORT")
    parser.add_argument("--head-port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    chosen = parser.parse_args()
    wanted = [text.partition("=")[::2] for text in chosen.servers]
    listeners = {name: _listen(chosen.host, int(port or 0)) for name, port in wanted}
    head = _listen(chosen.host, chosen.head_port)
    ports = {name: listener.getsockname()[1] for name, listener in listeners.items()}
    config = OmegaConf.create(
        {k: v for name, port in ports.items() for k, v in _sections(name, chosen.host, port).items()}
    )
    global_config._GLOBAL_CONFIG_DICT = config
    address = BaseServerConfig(host=chosen.host, port=head.getsockname()[1])
    client = ServerClient(head_server_config=address, global_config_dict=config)
    apps = {name: _server(name, chosen.host, port, client).setup_webserver() for name, port in ports.items()}
    served = [
        (HeadServer(config=address).setup_webserver(), head),
        *((app, listeners[name]) for name, app in apps.items()),
    ]
    urls = {name: f"http://{chosen.host}:{port}" for name, port in ports.items()}
    asyncio.run(_serve(served, {"head": f"http://{chosen.host}:{address.port}", "servers": urls}))


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.create_server((host, port), backlog=2048)
    listener.setblocking(False)
    return listener


def _sections(name: str, host: str, port: int) -> dict:
    """What the head server tells about a server, and about the agent by which datasets name it."""
    agent = {"entrypoint": "app.py", "resources_server": {"type": "resources_servers", "name": name}}
    return {
        name: {"resources_servers": {name: {"entrypoint": "app.py", "domain": "other", "host": host, "port": port}}},
        f"{name}_simple_agent": {"responses_api_agents": {"simple_agent": agent}},
    }


def _server(name: str, host: str, port: int, client: ServerClient) -> SimpleResourcesServer:
    module = importlib.import_module(f"resources_servers.{name}.app")
    [kind] = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, SimpleResourcesServer) and value.__module__ == module.__name__
    ]
    settings = kind.model_fields["config"].annotation(
        host=host, port=port, entrypoint="app.py", name=name, domain="other"
    )
    return kind(config=settings, server_client=client)


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
