"""The options of the ``nemo_gym`` environment, checked without asking any server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

from gdpo_nemo.environments.http_client import base_url
from gdpo_nemo.environments.nemo_gym.reward_mapping import RewardRule, read_rules
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.errors import ConfigError

TOOL_PARSERS = ("hermes", "none")
STRAGGLER_GRACE_S = 5.0


@dataclass(frozen=True)
class Limits:
    """What a server may cost."""

    concurrency: int
    """Requests in flight to one server."""
    deadline_s: float
    """Seconds one trajectory may take, retries and pauses included, from its first request on."""
    request_timeout_s: float
    """Seconds one request may take."""
    retries: int
    """Further attempts after a transport failure, a 5xx or a 429."""
    max_reply_bytes: int
    max_json_depth: int
    min_valid: int | None
    """Valid members after which a group waits for the others no longer than ``straggler_grace_s``."""
    straggler_grace_s: float
    group_deadline_s: float | None
    """Seconds a group may take from its first request on."""


@dataclass(frozen=True)
class Settings:
    """The options, read."""

    servers: Mapping[str, str]
    """Base URLs by server name; empty where the head server knows them."""
    agents: Mapping[str, str]
    """Server names by the agent names that rows carry in ``agent_ref``."""
    head_server: str | None
    rules: tuple[RewardRule, ...]
    check_sum: bool
    seed_session: bool
    tool_parser: str
    split_reasoning: bool
    api_key_env: str | None
    limits: Limits


def read_settings(options: Mapping[str, Any] | None) -> Settings:
    """The options with their defaults. Raises ConfigError."""
    chosen = read_options(
        "nemo_gym",
        options,
        servers={},
        agents={},
        head_server=None,
        rewards=None,
        check_sum=False,
        seed_session=True,
        tool_parser="hermes",
        split_reasoning=False,
        api_key_env=None,
        concurrency=256,
        deadline_s=60.0,
        request_timeout_s=30.0,
        retries=5,
        max_reply_bytes=8 * 2**20,
        max_json_depth=100,
        min_valid=None,
        straggler_grace_s=STRAGGLER_GRACE_S,
        group_deadline_s=None,
    )
    if bool(chosen.servers) == (chosen.head_server is not None):
        raise ConfigError("give either servers: {name: url} or head_server: url")
    servers = {name: base_url(f"servers.{name}", url) for name, url in chosen.servers.items()}
    for agent, server in chosen.agents.items():
        if servers and server not in servers:
            raise ConfigError(f"agents.{agent}: servers has no {server!r}")
    if chosen.tool_parser not in TOOL_PARSERS:
        raise ConfigError(f"tool_parser: {chosen.tool_parser!r} is not one of {', '.join(TOOL_PARSERS)}")
    if chosen.api_key_env is not None and (not isinstance(chosen.api_key_env, str) or not chosen.api_key_env):
        raise ConfigError(f"api_key_env: must be the name of an environment variable, not {chosen.api_key_env!r}")
    rules = read_rules(chosen.rewards)
    for rule in rules:
        for server in rule.servers or ():
            if servers and server not in servers:
                raise ConfigError(f"rewards.{rule.name}.servers: servers has no {server!r}")
    return Settings(
        servers,
        dict(chosen.agents),
        None if chosen.head_server is None else base_url("head_server", chosen.head_server),
        rules,
        chosen.check_sum,
        chosen.seed_session,
        chosen.tool_parser,
        chosen.split_reasoning,
        chosen.api_key_env,
        _limits(chosen),
    )


def _limits(chosen: Any) -> Limits:
    values = {name: getattr(chosen, name) for name in Limits.__dataclass_fields__}
    for name, value in values.items():
        least = 0 if name in ("retries", "straggler_grace_s") else 1 if isinstance(value, int) else 0.001
        if value is None and name in ("min_valid", "group_deadline_s"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
            raise ConfigError(f"{name}: must be a number of at least {least}, not {value!r}")
    if values["min_valid"] is not None and not isinstance(values["min_valid"], int):
        raise ConfigError(f"min_valid: must be a whole number of samples, not {values['min_valid']!r}")
    if values["min_valid"] is None and values["straggler_grace_s"] != STRAGGLER_GRACE_S:
        raise ConfigError("straggler_grace_s: has no effect without min_valid, so no group is closed early")
    return Limits(**values)
