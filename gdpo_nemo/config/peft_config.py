"""What a PEFT adapter folder says of itself, read without torch; what is more than two matrices a layer is refused."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_nemo.config.json_files import read_json_object
from gdpo_nemo.errors import ConfigError

CONFIG = "adapter_config.json"
MATRICES = "adapter_model.safetensors"

_UNDERSTOOD = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type",
    "use_rslora",
}  # fmt: skip
"""Fields of PEFT's LoraConfig that leave an adapter W + scale * B A; with another one set, it is something else."""
_REFUSED = ("alpha_pattern", "ensure_weight_tying", "fan_in_fan_out")
"""Those of them that must not be set."""
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""``init_lora_weights`` that leave the base as it is; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it."""


@dataclass(frozen=True)
class PeftAdapter:
    """A LoRA adapter in a folder."""

    folder: Path
    base: str
    """Folder or name of the model it belongs to."""
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    ranks_differ: bool
    targets: tuple[str, ...] | str
    """Last names of modules, or a regular expression of whole names."""

    def scale(self, rank: int) -> float:
        """Factor on B A of a module with matrices of ``rank``."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    def base_folder(self) -> Path | None:
        """The base's folder, from here or from the adapter's folder; None where it is none on this machine."""
        places = (Path(os.path.expanduser(self.base)), self.folder / self.base)
        return next((place for place in places if self.base and (place / "config.json").is_file()), None)


def read_peft_adapter(folder: Path, key: str) -> PeftAdapter:
    """Read ``adapter_config.json`` of ``folder`` and check that its matrices are there.

    Args:
        key: what the user named the folder by, for messages.

    Raises:
        ConfigError: the file is damaged, or says something that is not supported, which the message names.
    """
    content = read_json_object(folder / CONFIG, key)
    kind = content.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{key}: {folder} is a PEFT adapter of type {kind}, which is not supported; supported: LORA")
    for name in sorted(content):
        if content[name] and (name not in _UNDERSTOOD or name in _REFUSED):
            raise ConfigError(f"{key}: {folder} is a PEFT adapter with {name}, which is not supported")
    if content.get("bias", "none") != "none":
        raise ConfigError(f"{key}: {folder} is a PEFT adapter with bias {content['bias']}, which is not supported")
    start = content.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise ConfigError(
            f"{key}: {folder} is a PEFT adapter with init_lora_weights {start}, which changes the base model; save it "
            "as plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    if not (folder / MATRICES).is_file():
        pickled = (
            " (adapter_model.bin is a pickle, which is not read)" if (folder / "adapter_model.bin").is_file() else ""
        )
        raise ConfigError(f"{key}: {folder} has no {MATRICES}{pickled}")
    targets = content.get("target_modules")
    return PeftAdapter(
        folder,
        str(content.get("base_model_name_or_path") or ""),
        rank=int(_number(content, "r", folder, key)),
        alpha=float(_number(content, "lora_alpha", folder, key)),
        dropout=float(content.get("lora_dropout") or 0.0),
        rslora=bool(content.get("use_rslora")),
        ranks_differ=bool(content.get("rank_pattern")),
        targets=targets if isinstance(targets, str) else tuple(sorted(map(str, targets or ()))),
    )


def _number(content: dict[str, Any], name: str, folder: Path, key: str) -> float:
    value = content.get(name, 8)  # PEFT's default of both
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0 or (name == "r" and value % 1):
        raise ConfigError(f"{key}: {folder / CONFIG} has {name} {value!r}, which must be a positive number")
    return value
