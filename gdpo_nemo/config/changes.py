"""Differences between the config of a checkpoint and the config that resumes from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_nemo.config.algorithm_choice import ALGORITHMS
from gdpo_nemo.config.load import config_to_dict, load_config, recorded
from gdpo_nemo.config.schema import Config
from gdpo_nemo.utils.errors import ConfigError, mask_urls

_ABSENT = object()

_FIXED = {
    "policy.lora.rank": "the checkpoint contains adapters of that rank, or the whole model if the rank is 0",
    "policy.lora.alpha": "the adapters would have a different scale, which changes the policy",
    "policy.lora.target_modules": "the checkpoint contains the adapters of those modules",
    "policy.lora.share_a": "the checkpoint contains either one matrix A or several matrices A for fused layers",
    "policy.megatron_cfg.optimizer.type": "the checkpoint contains the state of that optimizer",
    "policy.megatron_cfg.freeze_moe_router": "the checkpoint's optimizer state covers only parameters trained so far",
    "policy.vision.train": "the checkpoint's optimizer state covers only parameters trained so far",
}
"""Keys that must not change when a run is resumed, with the reason. Model and data are not listed, because their
contents are compared instead."""
_HEADS = {"value": "a value head", "score": "a reward model's head"}
"""Heads (``AlgorithmSpec.head``) whose parameters are missing in checkpoints of algorithms with another head."""

_CONSEQUENCES = {
    "run.seed": "the order of prompts changes at this step; some prompts of this epoch repeat and others are skipped",
    "data.train.shuffle": "the order of prompts changes at this step; some prompts of this epoch repeat and others are "
    "skipped",
}


@dataclass(frozen=True)
class Change:
    """A changed config key."""

    key: str
    before: str
    """Earlier value as readable text."""
    now: str
    """New value as readable text."""
    is_ignored: bool = False
    """True if the state in the checkpoint has priority: the weight of a constraint (``gdpo.constraints``)."""

    def sentence(self, step: int) -> str:
        """Describe the change and the first step to which it applies, with the consequence if it is not obvious."""
        if self.is_ignored:
            return f"{self.key}: {self.before} -> {self.now} has no effect; the checkpoint contains the current weight"
        consequence = _CONSEQUENCES.get(self.key)
        return f"{self.key}: {self.before} -> {self.now} from step {step} on" + (
            f"; {consequence}" if consequence else ""
        )


def find_changes(before: Mapping[str, Any], config: Config) -> list[Change]:
    """Return the keys whose value in ``config`` differs from ``before``, in the order of the schema.

    Args:
        before: content of an earlier config file of the same run. A missing key is treated as the default, because the
            file may be older than the key.
    """
    then = {key: mask_urls(value) if isinstance(value, str) else value for key, value in flattened(before).items()}
    now = flattened(recorded(config))
    defaults = flattened(config_to_dict(Config()))
    restored = [f"gdpo.rewards.{name}" for name in config.gdpo.constraints if _has_constraint(before, name)]
    found = []
    for key in dict.fromkeys([*now, *then]):
        old = then.get(key, defaults.get(key, _ABSENT))
        new = now.get(key, _ABSENT)
        if old != new:
            found.append(Change(key, _text(old), _text(new), key in restored))
    return found


def _has_constraint(content: Mapping[str, Any], name: str) -> bool:
    return name in ((content.get("gdpo") or {}).get("constraints") or {})


def check_changes(changes: list[Change], what: str) -> None:
    """Raise ConfigError if the run cannot be resumed from the checkpoint ``what`` with these changes."""
    for change in changes:
        if reason := _why_fixed(change):
            raise ConfigError(
                f"{change.key}: cannot change from {change.before} to {change.now} when resuming {what}: {reason}; "
                "restore the value, or use another run.name"
            )


def _why_fixed(change: Change) -> str | None:
    if change.key == "algorithm.type":
        heads = {name: ALGORITHMS[name].head for name in (change.before, change.now) if name in ALGORITHMS}
        if len(heads) == 2 and len(set(heads.values())) == 1:
            return None
        return next((f"only {name} trains {_HEADS[head]}" for name, head in heads.items() if head in _HEADS), None)
    return _FIXED.get(change.key)


def flattened(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to a mapping with dotted keys. An empty section adds no keys."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for name, branch in tree.items():
        found |= flattened(branch, f"{prefix}.{name}".strip("."))
    return found


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def load_saved_config(path: str | Path) -> Config:
    """Read the config file that a run has written. Raises ConfigError.

    A file without ``policy.share_prompts`` was written before prompts could be shared. Sharing is then disabled, so
    that measurements and bitwise replays remain valid.
    """
    config = load_config(path)
    if "\n  share_prompts:" not in Path(path).read_text():
        config.policy.share_prompts = False
    return config
