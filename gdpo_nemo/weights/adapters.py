"""LoRA matrices: naming and files as in PEFT, and merging into weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gdpo_nemo.models.architectures import last_name
from gdpo_nemo.models.hf_folder import open_weights, save_tensors, weight_names
from gdpo_nemo.models.peft import (
    CONFIG,
    MATRICES,
    PREFIX,
    PeftAdapter,
    changed_prefixes,
    check_fit,
    read_shapes,
    with_prefix,
)
from gdpo_nemo.utils.errors import ConfigError, RunError

Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""(A [rank, in], B [out, rank]) by Hugging Face module."""


@dataclass(frozen=True)
class Adapters:
    """LoRA settings that belong to the matrices A and B."""

    rank: int
    alpha: float
    dropout: float
    base: str
    """Folder or name of the frozen base model."""

    @property
    def scale(self) -> float:
        """Scaling factor of the product B A."""
        return self.alpha / self.rank

    def description(self, modules: Iterable[str]) -> dict[str, Any]:
        """Return the content of PEFT's ``adapter_config.json`` for adapters on these Hugging Face modules."""
        return dict(
            peft_type="LORA",
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base,
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=sorted(set(map(last_name, modules))),
            bias="none",
            fan_in_fan_out=False,
            inference_mode=True,
        )


def peft_name(module: str, letter: str) -> str:
    """Return PEFT's name for matrix ``letter`` (A or B) of a Hugging Face module."""
    return f"{PREFIX}{module}.lora_{letter}.weight"


def peft_modules(names: Iterable[str]) -> set[str]:
    """Return the Hugging Face modules of matrices with these PEFT names. This is the inverse of ``peft_name``."""
    return {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in names}


def named(pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (PEFT's name, matrix) of every A and B."""
    for module, pair in pairs.items():
        for letter, matrix in zip("AB", pair):
            yield peft_name(module, letter), matrix.contiguous()


def modules_of(weights: Iterable[str], targets: Iterable[str]) -> list[str]:
    """Return the Hugging Face modules that get adapters for the target modules ``targets``.

    Args:
        weights: Hugging Face names of the model's weights.
        targets: last components of module names, for example ``q_proj``.
    """
    target_names = set(targets)
    modules = (name.removesuffix(".weight") for name in weights if name.endswith(".weight"))
    return [module for module in modules if last_name(module) in target_names]


def merge(weight: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
    """Return W + scale * B A for a weight W [out, in].

    The sum is computed in float32. The result has the data type and device of ``weight``.
    """
    a, b = (matrix.to(weight.device, torch.float32) for matrix in pair)
    return (weight.float() + scale * (b @ a)).to(weight.dtype)


def merged(
    tensors: Iterable[tuple[str, torch.Tensor]], pairs: Pairs, scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of Hugging Face weights, with the matrices in ``pairs`` merged into their modules."""
    for name, tensor in tensors:
        pair = pairs.get(name.removesuffix(".weight"))
        yield name, tensor if pair is None else merge(tensor, pair, scale)


def merged_into(
    names: Iterable[str],
    read: Callable[[str], torch.Tensor],
    matrices: Mapping[str, torch.Tensor],
    scale: float,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the frozen model's weights, with the adapters merged on ``device``.

    Args:
        names: Hugging Face names of the weights to yield.
        read: function that returns a weight by name. The function is called when the weight is needed.
        matrices: A and B under PEFT's names, in the data type of the policy's frozen weights.

    Raises:
        RunError: if A or B is missing, or if a matrix does not match a weight of the model by name or by shape.
    """
    unused = dict(matrices)
    for name in names:
        module = name.removesuffix(".weight")
        a = unused.pop(peft_name(module, "A"), None)
        b = unused.pop(peft_name(module, "B"), None)
        if a is None and b is None:
            yield name, read(name)
            continue
        if a is None or b is None:
            raise RunError(f"adapters: {module} has only one of the matrices A and B")
        weight = read(name).to(device, a.dtype)
        if weight.shape != (len(b), a.size(1)) or len(a) != b.size(1):
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise RunError(
                f"adapters: the shapes {shapes} of A and B of {module} do not match the weight {tuple(weight.shape)}"
            )
        yield name, merge(weight, (a, b), scale)
    if unused:
        raise RunError(f"adapters: the model has no weight for {len(unused)} matrices, for example {min(unused)}")


def write_adapter(
    folder: str | Path, matrices: Mapping[str, torch.Tensor], adapters: Adapters, base: Path | None = None
) -> None:
    """Write an adapter to a folder that PEFT and vLLM can load.

    Args:
        matrices: A and B under PEFT's names.
        base: folder of the base model, whose modules may have other names in memory. None does not change the names.

    Raises:
        OSError: if the folder cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    in_file = changed_prefixes(base)
    stored = {PREFIX + with_prefix(name.removeprefix(PREFIX), in_file): matrix for name, matrix in matrices.items()}
    save_tensors(stored, folder / MATRICES, metadata={"format": "pt"})
    description = adapters.description(peft_modules(matrices))
    if in_file:  # PEFT selects modules by their last names, which modules of the tower share
        description["exclude_modules"] = r".*visual\..*"
    (folder / CONFIG).write_text(json.dumps(description, indent=1))


def read_pairs(adapter: PeftAdapter, base: Path, key: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Read an adapter's matrices: (A [rank, in], B [out, rank]) by Hugging Face module.

    Args:
        base: Hugging Face folder of the adapter's base model.
        key: config key or option that specifies the adapter, for messages.

    Raises:
        ConfigError: if the matrices cannot be read, if A or B is missing, or if they do not match the base model.
    """
    shapes = read_shapes(adapter, key, base)
    check_fit(shapes, base, key)
    in_file = changed_prefixes(base)
    file = adapter.folder / MATRICES
    try:
        matrices = load_file(file)
    except Exception as error:  # noqa: BLE001 - safetensors raises its own exception type and OSError
        raise ConfigError(f"{key}: {file} cannot be read ({error})") from None
    pairs = {}
    for module in shapes:
        stored = with_prefix(module, in_file)
        pairs[module] = matrices[peft_name(stored, "A")], matrices[peft_name(stored, "B")]
    return pairs


def merged_weights(adapter: PeftAdapter, base: Path, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the base model's weights in their data type, with the adapter merged.

    For the arguments and errors, see ``read_pairs``.
    """
    pairs = read_pairs(adapter, base, key)
    read = open_weights(base, finite=True)
    for name in weight_names(base):
        pair = pairs.get(name.removesuffix(".weight"))
        yield name, read(name) if pair is None else merge(read(name), pair, adapter.scale(len(pair[0])))
