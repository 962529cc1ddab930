"""Named rewards out of a reply: which number is which component, and what holds where one is not there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from gdpo_nemo.config.messages import nearest
from gdpo_nemo.data.failures import Failure, FailureKind, printable
from gdpo_nemo.errors import ConfigError

MISSING = ("error", "mask", "zero")
MAX_COMPONENTS = 64
"""Components taken from one reply where the config names none; a reply with more is refused."""
_KEYS = ("name", "path", "weight", "missing", "servers")


@dataclass(frozen=True)
class RewardRule:
    """Where in a reply one component is found."""

    name: str
    path: tuple[str, ...]
    missing: str = "error"
    """error: the trajectory fails; mask: 'not applicable'; zero: 0."""
    servers: frozenset[str] | None = None
    """Servers that give it; None: all. For trajectories of others it is 'not applicable'."""

    @property
    def place(self) -> str:
        """The path as text."""
        return ".".join(self.path)


def read_rules(entries: Any) -> tuple[RewardRule, ...]:
    """The rules of the option ``rewards``; none where it is absent. Raises ConfigError."""
    if entries is None:
        return ()
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ConfigError("rewards: must be a list of {name, path, weight, missing}")
    rules = tuple(_rule(entry) for entry in entries)
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"rewards: {name!r} is there twice")
    return rules


def rewards_of(
    reply: Mapping[str, Any], rules: Sequence[RewardRule], server: str, check_sum: bool = False
) -> dict[str, float | None]:
    """The components in ``reply``, by the rules; without rules those of ``reward_components`` and the scalar
    ``reward``.

    Args:
        server: who sent the reply.
        check_sum: whether the components must add up to ``reward`` (relative 1e-5).

    Raises:
        Failure: MISSING_REWARD, or BAD_REPLY for a value that is no finite number.
    """
    if check_sum:
        _check_sum(reply)
    if not rules:
        return _found(reply)
    rewards: dict[str, float | None] = {}
    for rule in rules:
        if rule.servers is not None and server not in rule.servers:
            rewards[rule.name] = None
            continue
        value = _at(reply, rule.path)
        if value is not None:
            rewards[rule.name] = _number(value, rule.place)
        elif rule.missing == "error":
            raise Failure(FailureKind.MISSING_REWARD, f"{rule.place} is not in the reply{_present(reply)}")
        else:
            rewards[rule.name] = 0.0 if rule.missing == "zero" else None
    return rewards


def _found(reply: Mapping[str, Any]) -> dict[str, float | None]:
    components = reply.get("reward_components")
    if components is not None and not isinstance(components, Mapping):
        raise Failure(FailureKind.BAD_REPLY, f"reward_components is a {type(components).__name__}, not an object")
    values = {**(components or {})}
    if "reward" not in values and reply.get("reward") is not None:
        values["reward"] = reply["reward"]
    if not values:
        raise Failure(
            FailureKind.MISSING_REWARD, f"neither reward nor reward_components is in the reply{_present(reply)}"
        )
    if len(values) > MAX_COMPONENTS:
        raise Failure(FailureKind.BAD_REPLY, f"{len(values)} components, more than {MAX_COMPONENTS}")
    for name in values:
        if not name or len(name) > 100 or "/" in name or not name.isprintable() or name == "total":
            raise Failure(FailureKind.BAD_REPLY, f"{printable(name, 40)!r} cannot name a component")
    return {name: None if value is None else _number(value, name) for name, value in values.items()}


def _check_sum(reply: Mapping[str, Any]) -> None:
    components = reply.get("reward_components")
    if not isinstance(components, Mapping) or reply.get("reward") is None:
        return
    total = math.fsum(_number(value, name) for name, value in components.items() if value is not None)
    scalar = _number(reply["reward"], "reward")
    if not math.isclose(total, scalar, rel_tol=1e-5, abs_tol=1e-6):
        raise Failure(FailureKind.BAD_REPLY, f"reward is {scalar:g}, but its components add up to {total:g}")


def _at(reply: Any, path: Sequence[str]) -> Any:
    for part in path:
        if not isinstance(reply, Mapping) or part not in reply:
            return None
        reply = reply[part]
    return reply


def _number(value: Any, what: str) -> float:
    """A JSON number or boolean as float."""
    if not isinstance(value, (int, float)):
        raise Failure(FailureKind.BAD_REPLY, f"{printable(what, 60)} is a {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Failure(FailureKind.BAD_REPLY, f"{printable(what, 60)} is not finite")
    return number


def _present(reply: Mapping[str, Any]) -> str:
    """The numbers that a reply does hold, for a message."""
    names = [name for name, value in reply.items() if isinstance(value, (int, float))]
    components = reply.get("reward_components")
    if isinstance(components, Mapping):
        names += [f"reward_components.{name}" for name in components]
    return f"; it has {printable(', '.join(names), 160)}" if names else ""


def _rule(entry: Any) -> RewardRule:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"rewards: an entry must be {{name, path, weight, missing}}, not {entry!r}")
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"rewards: unknown key {key!r}{nearest(str(key), _KEYS)}")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError("rewards: every entry needs a name")
    path = entry.get("path", f"reward_components.{name}")
    parts = path.split(".") if isinstance(path, str) else path
    if not isinstance(parts, (list, tuple)) or not parts or not all(isinstance(part, str) and part for part in parts):
        raise ConfigError(f"rewards.{name}.path: must be a dotted text or a list of texts, not {path!r}")
    missing = entry.get("missing", "error")
    if missing not in MISSING:
        raise ConfigError(f"rewards.{name}.missing: {missing!r} is not one of {', '.join(MISSING)}")
    weight = entry.get("weight")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, (int, float))):
        raise ConfigError(f"rewards.{name}.weight: must be a number, not {weight!r}")
    servers = entry.get("servers")
    if servers is not None and (isinstance(servers, str) or not all(isinstance(one, str) for one in servers)):
        raise ConfigError(f"rewards.{name}.servers: must be a list of server names")
    return RewardRule(name, tuple(parts), missing, None if servers is None else frozenset(servers))
