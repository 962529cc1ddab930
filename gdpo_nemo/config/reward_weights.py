"""Weights given with the rewards of an environment (``env.<name>.rewards: [{name, path, weight}]``).

``gdpo.rewards`` is what the run trains. Where it is not set, these lists say it; where it is, they must agree.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError

_PLUGINS = ("nemo_gym", "nemo_gym_agent")
"""Environments whose option ``rewards`` is such a list."""


def weights_beside_rewards(env: Mapping[str, Any]) -> dict[str, Any]:
    """Weight by component (1 where an entry has none), over all environments. Raises ConfigError for two weights of
    one."""
    weights: dict[str, Any] = {}
    for key, entry in _entries(env):
        name = entry["name"]
        weight = entry.get("weight", 1.0)
        if weights.setdefault(name, weight) != weight:
            raise ConfigError(
                f"{key}: weight {weight} of {name!r} differs from the {weights[name]} in another environment"
            )
    return weights


def check_reward_weights(config: Config) -> None:
    """Refuses a weight that differs from the one in ``gdpo.rewards``. Raises ConfigError."""
    for key, entry in _entries(config.env):
        trained = config.gdpo.rewards.get(entry["name"], 0.0)
        if "weight" in entry and entry["weight"] != trained:
            raise ConfigError(
                f"{key}: weight {entry['weight']} of {entry['name']!r} differs from gdpo.rewards, which has {trained}; "
                "keep one of the two"
            )


def _entries(env: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(key, entry) of every entry that names a component; malformed ones are the environment's to refuse."""
    for name, options in env.items():
        if not isinstance(options, Mapping) or options.get("plugin", name) not in _PLUGINS:
            continue
        entries = options.get("rewards")
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
                yield f"env.{name}.rewards[{index}]", entry
