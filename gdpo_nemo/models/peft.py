"""PEFT adapter folders: reading of the config, and checks of the matrices against the base model. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.models.weight_files import tensor_shapes
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import read_json_object

CONFIG = "adapter_config.json"
MATRICES = "adapter_model.safetensors"

_KNOWN_FIELDS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type",
    "use_rslora",
}  # fmt: skip
"""Known fields of PEFT's LoraConfig. Other fields may change the formula W + scale * B A and are rejected if set."""
_UNSUPPORTED_FIELDS = ("alpha_pattern", "ensure_weight_tying", "fan_in_fan_out")
"""Known fields that are not supported and must not be set."""
_LARGEST_NUMBER = 1e6
"""Largest rank or alpha."""
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Supported values of ``init_lora_weights``. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the base model's weights."""


@dataclass(frozen=True)
class PeftAdapter:
    """A LoRA adapter in PEFT format."""

    folder: Path
    base: str
    """Folder or hub name of the base model (empty if unknown)."""
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    """True if the scale is alpha / sqrt(rank) instead of alpha / rank."""
    ranks_differ: bool
    """True if modules have different ranks (``rank_pattern``)."""
    targets: tuple[str, ...] | str
    """Last parts of module names, or a regular expression for full names."""

    def scale(self, rank: int) -> float:
        """Return the scaling factor of the LoRA product ``B @ A`` for a module with this rank."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    def base_folder(self) -> Path | None:
        """Return the folder of the base model, or None if it is not found.

        A relative path is tried from the current folder and from the adapter's folder.
        """
        folders = (Path(os.path.expanduser(self.base)), self.folder / self.base)
        return next((folder for folder in folders if self.base and (folder / "config.json").is_file()), None)


def read_peft_adapter(folder: Path, key: str) -> PeftAdapter:
    """Read ``adapter_config.json`` in ``folder``, and check that the file with the matrices exists.

    Args:
        key: config key or option that specifies the folder, for error messages.

    Raises:
        ConfigError: if a file is damaged or missing, or a setting is not supported.
    """
    content = read_json_object(folder / CONFIG, key)
    kind = content.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{key}: {folder} is a PEFT adapter of type {kind}, which is not supported; supported: LORA")
    for name in sorted(content):
        if content[name] and (name not in _KNOWN_FIELDS or name in _UNSUPPORTED_FIELDS):
            raise ConfigError(f"{key}: {folder} is a PEFT adapter with {name}, which is not supported")
    if content.get("bias", "none") != "none":
        raise ConfigError(f"{key}: {folder} is a PEFT adapter with bias {content['bias']}, which is not supported")
    init = content.get("init_lora_weights")
    if init not in _PLAIN_INITS:
        raise ConfigError(
            f"{key}: {folder} is a PEFT adapter with init_lora_weights {init}, which changes the base model; save it "
            "as plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    if not (folder / MATRICES).is_file():
        has_pickle = (folder / "adapter_model.bin").is_file()
        reason = " (adapter_model.bin is a pickle, which is not supported)" if has_pickle else ""
        raise ConfigError(f"{key}: {folder} has no {MATRICES}{reason}")
    targets = content.get("target_modules") or []
    if not isinstance(targets, str) and not (isinstance(targets, list) and all(isinstance(t, str) for t in targets)):
        raise ConfigError(f"{key}: {folder / CONFIG} has target_modules {targets!r}, which must be texts")
    dropout = content.get("lora_dropout") or 0.0
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ConfigError(f"{key}: {folder / CONFIG} has lora_dropout {dropout!r}, which must be from 0 to below 1")
    return PeftAdapter(
        folder,
        str(content.get("base_model_name_or_path") or ""),
        rank=int(_number(content, "r", folder, key)),
        alpha=float(_number(content, "lora_alpha", folder, key)),
        dropout=float(dropout),
        rslora=bool(content.get("use_rslora")),
        ranks_differ=bool(content.get("rank_pattern")),
        targets=targets if isinstance(targets, str) else tuple(sorted(targets)),
    )


def _number(content: dict[str, Any], name: str, folder: Path, key: str) -> float:
    value: Any = content.get(name, 8)  # PEFT's default for r and lora_alpha
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        value = math.nan
    if not 0 < value <= _LARGEST_NUMBER or (name == "r" and value % 1):
        raise ConfigError(f"{key}: {folder / CONFIG} has {name} {content[name]!r}, which must be a positive number")
    return float(value)


PREFIX = "base_model.model."
"""Prefix that PEFT adds to the Hugging Face names of modules."""
_A = ".lora_A.weight"
_B = ".lora_B.weight"


def changed_prefixes(base: Path | None) -> Mapping[str, str]:
    """Return the prefixes of modules in the folder of an adapter's base model that differ in the adapter's files.

    The values are the prefixes in these files. There are none if the folder is not known.
    """
    content = read_json_object(base / "config.json", "base model") if base else {}
    family = FAMILIES.get(str(content.get("model_type")))
    return family.tower.in_memory if family and family.tower else {}


def with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with the value of ``prefixes`` in place of the key with which it begins."""
    old = next(filter(name.startswith, prefixes), "")
    return prefixes.get(old, "") + name.removeprefix(old)


Shapes = Mapping[str, tuple[int, int, int]]
"""(rank, input size, output size) by Hugging Face module name."""


def read_shapes(adapter: PeftAdapter, key: str, base: Path | None = None) -> Shapes:
    """Read the shapes of an adapter's matrices from the header of its file, by the names in the base model's folder.

    Args:
        key: config key or option that specifies the adapter, for error messages.

    Raises:
        ConfigError: if a tensor is not a matrix A or B, a module has only one of the two, or the file cannot be read.
    """
    file = adapter.folder / MATRICES
    remaining = tensor_shapes(adapter.folder, key, MATRICES)
    shapes_by_module = {}
    in_folder = {stored: prefix for prefix, stored in changed_prefixes(base).items()}
    for name in [name for name in remaining if name.startswith(PREFIX) and name.endswith(_A)]:
        module = name.removeprefix(PREFIX).removesuffix(_A)
        a = remaining.pop(name)
        b = remaining.pop(PREFIX + module + _B, ())
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise ConfigError(f"{key}: {file} has only one of the two matrices for {module}")
        shapes_by_module[with_prefix(module, in_folder)] = (a[0], a[1], b[0])
    if remaining or not shapes_by_module:
        what = f"{min(remaining)}, which is not a matrix of a linear layer" if remaining else "no matrices"
        raise ConfigError(f"{key}: {file} has {what}")
    return shapes_by_module


def check_fit(shapes: Shapes, base: Path, key: str) -> None:
    """Check that the base model in the folder ``base`` has a weight of the right shape for every adapted module.

    Raises ConfigError.
    """
    weights = tensor_shapes(base, key)
    for module, (_, inputs, outputs) in shapes.items():
        weight = weights.get(f"{module}.weight")
        if weight is None:
            raise ConfigError(f"{key}: the base model {base} has no weight {module}.weight for the adapter")
        if weight != (outputs, inputs):
            raise ConfigError(
                f"{key}: the adapter of {module} is for shape {(outputs, inputs)}, but {base} has {weight}"
            )
