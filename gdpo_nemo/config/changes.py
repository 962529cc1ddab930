"""What differs between the config a checkpoint was written under and the one a run goes on with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

from gdpo_nemo.config.algorithm_choice import PPO
from gdpo_nemo.config.load import config_to_dict, recorded
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError, mask_urls

_ABSENT = object()

_FIXED = {
    "policy.lora.rank": "the checkpoint holds adapters of that rank, or the whole model where it is 0",
    "policy.lora.alpha": "the adapters would count otherwise, and the policy would be another one",
    "policy.lora.target_modules": "the checkpoint holds the adapters of those modules",
    "policy.lora.share_a": "the checkpoint holds one A or several for the layers that are fused",
    "policy.megatron_cfg.freeze_moe_router": "the checkpoint's optimizer state is that of the parameters trained so "
    "far",
}
"""Keys that a run keeps, with the reason. Model and data are compared by their contents instead."""
_HEADS = {PPO: "a value head", "reward_model": "a reward model's head"}
"""Algorithms whose checkpoints hold other parameters than those of the others."""

_CONSEQUENCES = {
    "run.seed": "prompts are drawn in another order from there on: of this epoch some come again and some do not come",
    "data.train.shuffle": "prompts are drawn in another order from there on: of this epoch some come again and some do "
    "not come",
}


@dataclass(frozen=True)
class Change:
    """One key whose value differs; ``before`` and ``now`` as a person would write them."""

    key: str
    before: str
    now: str

    def sentence(self, step: int) -> str:
        """The change, the first step it applies to, and what follows from it where that is not plain."""
        consequence = _CONSEQUENCES.get(self.key)
        return f"{self.key}: {self.before} -> {self.now} from step {step} on" + (
            f"; {consequence}" if consequence else ""
        )


def find_changes(before: Mapping[str, Any], config: Config) -> list[Change]:
    """The keys of ``config`` whose value differs from ``before``, a config file of the same run, in the schema's order.

    A key that is not in ``before`` had its default: the file may have been written before the key was introduced.
    """
    then = {key: mask_urls(value) if isinstance(value, str) else value for key, value in flattened(before).items()}
    now = flattened(recorded(config))
    defaults = flattened(config_to_dict(Config()))
    found = []
    for key in dict.fromkeys([*now, *then]):
        old = then.get(key, defaults.get(key, _ABSENT))
        new = now.get(key, _ABSENT)
        if old != new:
            found.append(Change(key, _text(old), _text(new)))
    return found


def check_changes(changes: list[Change], what: str) -> None:
    """Refuse changes that ``what``, a checkpoint, cannot be continued with. Raises ConfigError."""
    for change in changes:
        if reason := _why_fixed(change):
            raise ConfigError(
                f"{change.key}: cannot change from {change.before} to {change.now} on resuming {what}: "
                f"{reason}; keep it, or use another run.name"
            )


def _why_fixed(change: Change) -> str | None:
    if change.key == "algorithm.type":
        kinds = dict.fromkeys((change.before, change.now))
        return next((f"{kind} alone trains {_HEADS[kind]}" for kind in kinds if kind in _HEADS), None)
    return _FIXED.get(change.key)


def flattened(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A tree of sections as dotted keys; an empty section has none."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    return {
        key: value
        for name, branch in tree.items()
        for key, value in flattened(branch, f"{prefix}.{name}".strip(".")).items()
    }


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
