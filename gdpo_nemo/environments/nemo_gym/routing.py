"""Which server verifies a row, and where it listens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping
from urllib.parse import urlsplit

import yaml

from gdpo_nemo.config.reading import parse_yaml
from gdpo_nemo.data.failures import Failure, FailureKind, printable
from gdpo_nemo.environments.http_client import HttpClient, base_url
from gdpo_nemo.environments.nemo_gym.gym_rows import choose_server
from gdpo_nemo.environments.nemo_gym.server_settings import Settings
from gdpo_nemo.errors import ConfigError


@dataclass(frozen=True)
class Routes:
    """Servers by name, and the agents that name them in rows."""

    servers: Mapping[str, str]
    """Base URLs by server name."""
    agents: Mapping[str, str]
    """Server names by agent name."""

    def server_of(self, row: Mapping[str, Any]) -> str:
        """The name of the server that verifies ``row``: the only one, or that of the row's ``agent_ref``.

        Raises ConfigError where that is none of the servers.
        """
        try:
            return choose_server(row, self.servers, self.agents)
        except ConfigError as error:
            raise ConfigError(f"a row {error}") from None


async def find_routes(settings: Settings, client: HttpClient) -> Routes:
    """The routes of the options, or those of the head server.

    Raises:
        Failure: the head server does not answer, or answers something else than its configuration.
    """
    if settings.head_server is None:
        return Routes(settings.servers, settings.agents)
    text = await client.get(f"{settings.head_server}/global_config_dict_yaml", settings.limits.request_timeout_s)
    return routes_of(text, settings)


def routes_of(text: Any, settings: Settings) -> Routes:
    """The routes in a head server's configuration, YAML inside a JSON string. Raises Failure(BAD_REPLY)."""
    try:
        config = parse_yaml(text) if isinstance(text, str) else None
    except (yaml.YAMLError, RecursionError) as error:
        raise Failure(
            FailureKind.BAD_REPLY, f"the head server's configuration is no YAML: {printable(str(error), 80)}"
        ) from None
    if not isinstance(config, Mapping):
        raise Failure(FailureKind.BAD_REPLY, "the head server sent no configuration")
    head = urlsplit(settings.head_server).hostname if settings.head_server else None
    servers = {}
    agents = dict(settings.agents)
    for name, section in config.items():
        for kind, entry in _entries(section):
            if kind == "resources_servers" and entry.get("port") is not None:
                servers[str(name)] = _url(str(name), entry, head)
            elif kind == "responses_api_agents" and isinstance(entry.get("resources_server"), Mapping):
                agents.setdefault(str(name), str(entry["resources_server"].get("name")))
    if not servers:
        raise Failure(FailureKind.BAD_REPLY, "the head server knows no resources server")
    return Routes(servers, agents)


def _entries(section: Any):
    """(type, settings) of what an instance consists of; its name inside the type may differ from the instance's."""
    for kind, implementations in section.items() if isinstance(section, Mapping) else ():
        for entry in implementations.values() if isinstance(implementations, Mapping) else ():
            if isinstance(entry, Mapping):
                yield kind, entry


def _url(name: str, entry: Mapping[str, Any], head: str | None) -> str:
    host = entry.get("host") or head
    host = head if host in ("0.0.0.0", "::") else host
    try:
        return base_url(f"server {name}", f"http://{host}:{entry['port']}")
    except ConfigError as error:
        raise Failure(FailureKind.BAD_REPLY, f"head server: {error}") from None
