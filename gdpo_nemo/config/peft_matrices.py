"""The matrices of a PEFT adapter against its base model and the adapters of a run, by their shapes. No torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Mapping

from gdpo_nemo.config.peft_config import MATRICES, PeftAdapter
from gdpo_nemo.config.policy_section import LoraConfig
from gdpo_nemo.config.weight_files import tensor_shapes
from gdpo_nemo.errors import ConfigError

PREFIX = "base_model.model."
"""What PEFT puts before the Hugging Face names of modules."""
_A = ".lora_A.weight"
_B = ".lora_B.weight"

Shapes = Mapping[str, tuple[int, int, int]]
"""Hugging Face module -> (rank, inputs, outputs)."""


def read_shapes(adapter: PeftAdapter, key: str) -> Shapes:
    """The modules of an adapter.

    Args:
        key: what the user named the adapter by, for messages.

    Raises:
        ConfigError: a tensor that is no matrix A or B, one without its partner, or an unreadable file.
    """
    file = adapter.folder / MATRICES
    left = tensor_shapes(adapter.folder, key, MATRICES)
    found = {}
    for name in [name for name in left if name.startswith(PREFIX) and name.endswith(_A)]:
        module = name.removeprefix(PREFIX).removesuffix(_A)
        a = left.pop(name)
        b = left.pop(PREFIX + module + _B, ())
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise ConfigError(f"{key}: {file} has no pair of matrices for {module}")
        found[module] = (a[0], a[1], b[0])
    if left or not found:
        what = f"{min(left)}, which is no matrix of a linear layer" if left else "no matrix"
        raise ConfigError(f"{key}: {file} has {what}")
    return found


def check_fit(shapes: Shapes, base: Path, key: str) -> None:
    """Every pair has a weight of its shape in the Hugging Face folder ``base``. Raises ConfigError."""
    weights = tensor_shapes(base, key)
    for module, (_, inputs, outputs) in shapes.items():
        weight = weights.get(f"{module}.weight")
        if weight is None:
            raise ConfigError(f"{key}: the base model {base} has no weight {module}.weight for the adapter")
        if weight != (outputs, inputs):
            raise ConfigError(f"{key}: the adapter of {module} is for {(outputs, inputs)}, {base} has {weight}")


def check_continued(adapter: PeftAdapter, lora: LoraConfig, base: Path | None, key: str) -> None:
    """A run with ``lora`` can go on with the matrices of ``adapter``: they are what it would train.

    Args:
        base: Hugging Face folder of the frozen model; None: it is not here yet, and shapes and layers are left out.
        key: what the user named the adapter by, for messages.

    Raises:
        ConfigError: rank, alpha, modules or sharing are others, or the adapter does not fit ``base``.
    """
    shapes = read_shapes(adapter, key)
    place = adapter.folder
    ranks = sorted({rank for rank, _, _ in shapes.values()})
    if ranks != [lora.rank]:
        raise _unequal("rank", lora.rank, " and ".join(map(str, ranks)), place)
    alpha = adapter.scale(lora.rank) * lora.rank
    if not math.isclose(alpha, lora.alpha, rel_tol=1e-9):
        why = f" (rsLoRA: {adapter.alpha:g} x the root of {lora.rank})" if adapter.rslora else ""
        raise _unequal("alpha", f"{lora.alpha:g}", f"{alpha:.10g}{why}", place)
    names = {module.rpartition(".")[2] for module in shapes}
    if names != set(lora.target_modules):
        raise _unequal("target_modules", ", ".join(sorted(lora.target_modules)), ", ".join(sorted(names)), place)
    if lora.share_a:
        raise _unequal("share_a", "true", "an A for each module", place)
    if base is None:
        return
    check_fit(shapes, base, key)
    modules = (name.removesuffix(".weight") for name in tensor_shapes(base, key) if name.endswith(".weight"))
    missing = sorted(module for module in modules if module.rpartition(".")[2] in names and module not in shapes)
    if missing:
        raise ConfigError(
            f"policy.lora.target_modules: the adapter {place} has no matrices of {missing[0]}, which the run would "
            "train"
        )


def _unequal(name: str, wanted: object, found: str, place: Path) -> ConfigError:
    return ConfigError(
        f"policy.lora.{name}: {wanted}, but the adapter {place}, with whose matrices training goes on, has {found}"
    )
