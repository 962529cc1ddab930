"""Real NeMo Gym with agents: for every resources server named, it, a simple_agent whose model is a model server before
our endpoint, and a simple_agent whose model is our endpoint itself (``/v1/responses``).

    python serve_agents.py ENDPOINT_URL SERVER...

To be run by a Python that has nemo-gym 0.4. All servers share this process, without Ray; prints a JSON line with the
agents' URLs once they answer.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import socket
import sys
from urllib.parse import urlsplit

import uvicorn
from nemo_gym import global_config
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

HOST = "127.0.0.1"
STEPS = 8
ENDPOINT = "endpoint"
"""The model server that is ours: in the configuration, where agents look it up, but not started here."""


def sections(endpoint: str, servers: list[str]) -> dict[str, tuple[str, str, dict]]:
    """(kind, implementation, settings) of every instance, by name."""
    model = dict(
        base_url=f"{endpoint}/v1",
        api_key="none",
        model="policy",
        return_token_id_information=True,
        uses_reasoning_parser=False,
    )
    place = urlsplit(endpoint)
    made = {
        "policy_model": ("responses_api_models", "vllm_model", model),
        ENDPOINT: ("responses_api_models", "vllm_model", {**model, "host": place.hostname, "port": place.port}),
    }
    for name in servers:
        made[name] = ("resources_servers", name, {"domain": "agent"})
        for suffix, model_server in (("agent", "policy_model"), ("direct_agent", ENDPOINT)):
            agent = dict(
                max_steps=STEPS,
                resources_server={"type": "resources_servers", "name": name},
                model_server={"type": "responses_api_models", "name": model_server},
            )
            made[f"{name}_{suffix}"] = ("responses_api_agents", "simple_agent", agent)
    return made


def main() -> None:
    endpoint, *servers = sys.argv[1:]
    wanted = sections(endpoint, servers)
    listeners = {name: socket.create_server((HOST, 0), backlog=512) for name in wanted if name != ENDPOINT}
    config = {}
    for name, (kind, implementation, settings) in wanted.items():
        place = dict(entrypoint="app.py", host=HOST)
        if name in listeners:
            place["port"] = listeners[name].getsockname()[1]
        config[name] = {kind: {implementation: {**place, **settings}}}
    global_config._GLOBAL_CONFIG_DICT = OmegaConf.create(config)
    client = ServerClient(
        head_server_config=BaseServerConfig(host=HOST, port=1), global_config_dict=global_config._GLOBAL_CONFIG_DICT
    )
    apps = {}
    for name in listeners:
        kind, implementation, _ = wanted[name]
        server = server_class(f"{kind}.{implementation}.app")
        settings = server.model_fields["config"].annotation(name=name, **config[name][kind][implementation])
        apps[name] = server(config=settings, server_client=client).setup_webserver()
    agents = {
        name: f"http://{HOST}:{listeners[name].getsockname()[1]}" for name in listeners if name.endswith("_agent")
    }
    asyncio.run(serve([(apps[name], listeners[name]) for name in listeners], agents))


def server_class(module: str) -> type:
    """The server that a module defines: the class with a field `config` that nothing else there is derived from."""
    found = [
        value
        for value in vars(importlib.import_module(module)).values()
        if isinstance(value, type) and value.__module__ == module and hasattr(value, "setup_webserver")
    ]
    assert len(found) == 1, found
    return found[0]


async def serve(apps: list, agents: dict[str, str]) -> None:
    logging.disable(logging.INFO)
    servers = [uvicorn.Server(uvicorn.Config(app, log_level="warning")) for app, _ in apps]
    tasks = [asyncio.create_task(server.serve([listener])) for server, (_, listener) in zip(servers, apps)]
    while not all(server.started for server in servers):
        assert not any(task.done() for task in tasks)
        await asyncio.sleep(0.02)
    print(json.dumps(agents), flush=True)
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    main()
