"""Options of the ``nemo_gym`` environment, and extraction of reward components from replies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gdpo_nemo.algorithms.rubrics import Criterion, family_name, is_family
from gdpo_nemo.environments.base import number_option, read_options
from gdpo_nemo.environments.http_client import base_url
from gdpo_nemo.environments.nemo_gym.evaluations import PATH, read_evaluations
from gdpo_nemo.environments.server_replies import Failure, FailureKind, finite_number, printable
from gdpo_nemo.utils.errors import ConfigError, nearest

STRAGGLER_GRACE_S = 5.0


@dataclass(frozen=True)
class Limits:
    """Limits on time, reply size and concurrency."""

    concurrency: int = 256
    """Maximum number of requests in flight to one server."""
    deadline_s: float = 60.0
    """Time limit of one trajectory in seconds, from its first request, including retries and pauses."""
    request_timeout_s: float = 30.0
    """Time limit of one request in seconds."""
    retries: int = 5
    """Maximum number of retries after a transport failure, a 5xx or a 429 reply."""
    max_reply_bytes: int = 8 * 2**20
    """Maximum size of a reply in bytes."""
    max_json_depth: int = 100
    """Maximum nesting depth of a reply."""
    min_valid: int | None = None
    """Number of valid members of a group after which ``straggler_grace_s`` starts, or None to wait for all members."""
    straggler_grace_s: float = STRAGGLER_GRACE_S
    """Seconds to wait for the remaining members of a group that has ``min_valid`` valid members."""
    group_deadline_s: float | None = None
    """Time limit of a group in seconds, from its first request, or None for no limit."""


@dataclass(frozen=True)
class Settings:
    """Validated options of the ``nemo_gym`` environment. ``NemoGym`` describes them."""

    servers: Mapping[str, str]
    """Base URLs by server name; empty with a head server."""
    agents: Mapping[str, str]
    """Server names by agent name, as in a row's ``agent_ref``."""
    head_server: str | None
    rules: tuple[RewardRule, ...]
    check_sum: bool
    seed_session: bool
    split_reasoning: bool
    api_key_env: str | None
    limits: Limits


def read_settings(options: Mapping[str, Any] | None) -> Settings:
    """Validate the options and add defaults. Raises ConfigError if an option is invalid."""
    chosen = read_options(
        "nemo_gym",
        options,
        servers={},
        agents={},
        head_server=None,
        rewards=None,
        check_sum=False,
        seed_session=True,
        split_reasoning=False,
        api_key_env=None,
        **vars(Limits()),
    )
    if bool(chosen.servers) == (chosen.head_server is not None):
        raise ConfigError("set either servers: {name: url} or head_server: url")
    servers = {name: base_url(f"servers.{name}", url) for name, url in chosen.servers.items()}
    for agent, server in chosen.agents.items():
        if servers and server not in servers:
            raise ConfigError(f"agents.{agent}: servers has no entry {server!r}")
    if chosen.api_key_env is not None and (not isinstance(chosen.api_key_env, str) or not chosen.api_key_env):
        raise ConfigError(f"api_key_env: must be the name of an environment variable, not {chosen.api_key_env!r}")
    rules = read_rules(chosen.rewards)
    for rule in rules:
        for server in rule.servers or ():
            if servers and server not in servers:
                raise ConfigError(f"rewards.{rule.name}.servers: servers has no entry {server!r}")
    return Settings(
        servers,
        dict(chosen.agents),
        None if chosen.head_server is None else base_url("head_server", chosen.head_server),
        rules,
        chosen.check_sum,
        chosen.seed_session,
        chosen.split_reasoning,
        chosen.api_key_env,
        _limits(chosen),
    )


def _limits(chosen: Any) -> Limits:
    values = {name: getattr(chosen, name) for name in Limits.__dataclass_fields__}
    for name, value in values.items():
        minimum: float = 1 if isinstance(value, int) else 0.001
        if name in ("retries", "straggler_grace_s"):
            minimum = 0
        if value is None and name in ("min_valid", "group_deadline_s"):
            continue
        number_option(name, value, minimum)
    if values["min_valid"] is not None and not isinstance(values["min_valid"], int):
        raise ConfigError(f"min_valid: must be a whole number of samples, not {values['min_valid']!r}")
    if values["min_valid"] is None and values["straggler_grace_s"] != STRAGGLER_GRACE_S:
        raise ConfigError("straggler_grace_s: has no effect without min_valid; set min_valid or remove it")
    return Limits(**values)


MISSING = ("error", "mask", "zero")
MAX_COMPONENTS = 64
"""Maximum number of components in a reply if the option ``rewards`` is not set. Larger replies are rejected."""
_KEYS = ("name", "path", "weight", "missing", "servers")


@dataclass(frozen=True)
class RewardRule:
    """Rule that extracts one reward component from a reply, or a family of criteria."""

    name: str
    path: tuple[str, ...]
    """Path of the reward, or of the list of evaluations if the name is that of a family."""
    missing: str = "error"
    """Treatment of a missing value: error (the trajectory fails), mask (the reward is None) or zero (the reward is
    0)."""
    servers: frozenset[str] | None = None
    """Servers that return the component, or None for all servers. The component is None for trajectories of other
    servers."""

    @property
    def dotted_path(self) -> str:
        """The path as a dotted string."""
        return ".".join(self.path)


def read_rules(entries: Any) -> tuple[RewardRule, ...]:
    """Parse the option ``rewards``. Return no rules if the option is None. Raises ConfigError if the option is
    invalid."""
    if entries is None:
        return ()
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ConfigError("rewards: must be a list of {name, path, weight, missing}")
    rules = tuple(map(_rule, entries))
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"rewards: {name!r} is listed twice")
    return rules


class Scores(NamedTuple):
    """Rewards in a reply."""

    rewards: dict[str, float | None]
    """Reward of each component (None if the component does not apply)."""
    criteria: dict[str, Criterion]
    """Criteria of the families by component."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components with a reward. The criteria of a family have one name."""
        found = (family_name(n) if n in self.criteria else n for n, value in self.rewards.items() if value is not None)
        return tuple(dict.fromkeys(found))


def rewards_of(reply: Mapping[str, Any], rules: Sequence[RewardRule], server: str, check_sum: bool = False) -> Scores:
    """Extract the reward components of a reply by the rules. Without rules, return all ``reward_components`` and the
    scalar ``reward``.

    Args:
        server: name of the server that sent the reply.
        check_sum: True to require that the components add up to ``reward`` (relative tolerance 1e-5).

    Raises:
        Failure: MISSING_REWARD if a value is missing; BAD_REPLY if a value is not a finite number, or the components do
            not add up.
    """
    if check_sum:
        _check_sum(reply)
    if not rules:
        return Scores(_all_components(reply), {})
    rewards: dict[str, float | None] = {}
    criteria: dict[str, Criterion] = {}
    for rule in rules:
        applies = rule.servers is None or server in rule.servers
        value = _value_at(reply, rule.path) if applies else None
        if value is None and applies and rule.missing == "error":
            raise Failure(FailureKind.MISSING_REWARD, f"{rule.dotted_path} is not in the reply{_listed_numbers(reply)}")
        if not is_family(rule.name):
            rewards[rule.name] = _reward(value, rule) if applies else None
        elif value is not None:
            scores, found = read_evaluations(value, rule.dotted_path, rule.name)
            rewards |= scores
            criteria |= found
    return Scores(rewards, criteria)


def _reward(value: Any, rule: RewardRule) -> float | None:
    if value is not None:
        return finite_number(value, rule.dotted_path)
    return 0.0 if rule.missing == "zero" else None


def step_rewards_of(
    reply: Mapping[str, Any], rules: Sequence[RewardRule], server: str
) -> tuple[dict[str, float | None], ...]:
    """Extract the rewards of an episode's steps from ``step_rewards``, a list with one entry per turn of the policy.

    An entry is a number (the component ``reward``), an object of components, or null. The paths of the rules are looked
    up in each entry, without ``reward_components``. The result is empty if the reply has no ``step_rewards``.

    Raises:
        Failure: BAD_REPLY if an entry has another type or a value is not a finite number.
    """
    steps = reply.get("step_rewards")
    if steps is None:
        return ()
    if not isinstance(steps, list):
        raise Failure(FailureKind.BAD_REPLY, f"expected a list as step_rewards, got {type(steps).__name__}")
    return tuple(_of_step(step, rules, server) for step in steps)


def _of_step(step: Any, rules: Sequence[RewardRule], server: str) -> dict[str, float | None]:
    if step is None:
        return {}
    entry = step if isinstance(step, Mapping) else {"reward": finite_number(step, "step_rewards")}
    if not rules:
        return _all_components({"reward_components": entry}) if entry else {}
    rewards: dict[str, float | None] = {}
    for rule in rules:
        if is_family(rule.name):  # servers evaluate criteria at the end of an episode
            continue
        value = _value_at({"reward_components": entry, **entry}, rule.path)
        if value is not None and (rule.servers is None or server in rule.servers):
            rewards[rule.name] = finite_number(value, f"step_rewards.{rule.name}")
    return rewards


def _all_components(reply: Mapping[str, Any]) -> dict[str, float | None]:
    components = reply.get("reward_components")
    if components is not None and not isinstance(components, Mapping):
        raise Failure(
            FailureKind.BAD_REPLY, f"expected an object as reward_components, got {type(components).__name__}"
        )
    values = {**(components or {})}
    if "reward" not in values and reply.get("reward") is not None:
        values["reward"] = reply["reward"]
    if not values:
        raise Failure(
            FailureKind.MISSING_REWARD, f"neither reward nor reward_components is in the reply{_listed_numbers(reply)}"
        )
    if len(values) > MAX_COMPONENTS:
        raise Failure(
            FailureKind.BAD_REPLY, f"the reply has {len(values)} components, more than the limit of {MAX_COMPONENTS}"
        )
    for name in values:
        if not name or len(name) > 100 or "/" in name or not name.isprintable() or name == "total":
            raise Failure(FailureKind.BAD_REPLY, f"{printable(name, 40)!r} is not a valid component name")
    rewards: dict[str, float | None] = {}
    for name, value in values.items():
        rewards[name] = None if value is None else finite_number(value, name)
    return rewards


def _check_sum(reply: Mapping[str, Any]) -> None:
    components = reply.get("reward_components")
    if not isinstance(components, Mapping) or reply.get("reward") is None:
        return
    total = math.fsum(finite_number(value, name) for name, value in components.items() if value is not None)
    scalar = finite_number(reply["reward"], "reward")
    if not math.isclose(total, scalar, rel_tol=1e-5, abs_tol=1e-6):
        raise Failure(FailureKind.BAD_REPLY, f"reward is {scalar:g}, but its components add up to {total:g}")


def _value_at(reply: Any, path: Sequence[str]) -> Any:
    for part in path:
        if not isinstance(reply, Mapping) or part not in reply:
            return None
        reply = reply[part]
    return reply


def _listed_numbers(reply: Mapping[str, Any]) -> str:
    """List the names of the numbers in a reply as the end of an error message. Return an empty string if the reply
    contains no numbers."""
    names = [name for name, value in reply.items() if isinstance(value, (int, float))]
    components = reply.get("reward_components")
    if isinstance(components, Mapping):
        names += [f"reward_components.{name}" for name in components]
    return f"; the reply has {printable(', '.join(names), 160)}" if names else ""


def _rule(entry: Any) -> RewardRule:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"rewards: an entry must be {{name, path, weight, missing}}, not {entry!r}")
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"rewards: unknown key {key!r}{nearest(str(key), _KEYS)}")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError("rewards: every entry requires a name")
    path = entry.get("path", PATH if is_family(name) else f"reward_components.{name}")
    parts = path.split(".") if isinstance(path, str) else path
    if not isinstance(parts, (list, tuple)) or not parts or not all(isinstance(part, str) and part for part in parts):
        raise ConfigError(f"rewards.{name}.path: must be a dotted path or a list of strings, not {path!r}")
    missing = entry.get("missing", "error")
    if missing not in MISSING:
        raise ConfigError(f"rewards.{name}.missing: {missing!r} is not one of {', '.join(MISSING)}")
    if missing == "zero" and is_family(name):
        raise ConfigError(f"rewards.{name}.missing: zero is not supported for a family of criteria; use error or mask")
    weight = entry.get("weight")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, (int, float))):
        raise ConfigError(f"rewards.{name}.weight: must be a number, not {weight!r}")
    servers = entry.get("servers")
    if servers is not None and (isinstance(servers, str) or not all(isinstance(one, str) for one in servers)):
        raise ConfigError(f"rewards.{name}.servers: must be a list of server names")
    return RewardRule(name, tuple(parts), missing, None if servers is None else frozenset(servers))
