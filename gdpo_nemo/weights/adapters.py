"""LoRA's matrices on their way: their names, how they are merged into the weights beside them, and PEFT's description.

An update of adapters carries A and B of every adapted module in place of the model. The engine reads the frozen weights
from its own model folder, one tensor at a time, and merges as the policy's export does, so both give the same bits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable, Iterator, Mapping

import torch

from gdpo_nemo.errors import RunError
from gdpo_nemo.weights.model_folder import save_tensors

Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Hugging Face module -> (A [rank, in], B [out, rank])."""

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapters:
    """What an update of adapters is besides its matrices."""

    rank: int
    alpha: float
    dropout: float
    base: str
    """Folder or name of the frozen model."""

    @property
    def scale(self) -> float:
        """Factor on B A."""
        return self.alpha / self.rank

    def description(self, modules: Iterable[str]) -> dict:
        """PEFT's ``adapter_config.json`` for these Hugging Face modules."""
        return dict(
            peft_type="LORA",
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base,
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=sorted({module.rpartition(".")[2] for module in modules}),
            bias="none",
            fan_in_fan_out=False,
            inference_mode=True,
        )


def peft_name(module: str, letter: str) -> str:
    """PEFT's name of the matrix A or B (``letter``) of a Hugging Face module."""
    return f"{_PREFIX}{module}.lora_{letter}.weight"


def peft_modules(names: Iterable[str]) -> set[str]:
    """The Hugging Face modules behind names of ``peft_name``."""
    return {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in names}


def named(pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices under PEFT's names."""
    for module, pair in pairs.items():
        for letter, matrix in zip("AB", pair):
            yield peft_name(module, letter), matrix.contiguous()


def modules_of(weights: Iterable[str], targets: Iterable[str]) -> list[str]:
    """The modules of a model with these weights (Hugging Face names) that adapters on ``targets``, by the last part of
    their names, belong to. Targets are never a mixture's experts, which cannot be adapted."""
    wanted = set(targets)
    modules = (name.removesuffix(".weight") for name in weights if name.endswith(".weight"))
    return [module for module in modules if module.rpartition(".")[2] in wanted]


def merge(weight: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
    """W + scale * B A, computed in float32, in the type and on the device of ``weight`` [out, in]."""
    a, b = (matrix.to(weight.device, torch.float32) for matrix in pair)
    return (weight.float() + scale * (b @ a)).to(weight.dtype)


def merged(
    tensors: Iterable[tuple[str, torch.Tensor]], pairs: Pairs, scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face ``tensors`` (name, tensor), merged where their module has a pair."""
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
    """The weights ``names`` of the frozen model, each read when its turn comes, with the adapters merged on ``device``.

    Args:
        matrices: A and B under PEFT's names. Their type is the policy's, which holds the frozen weights in it, too.

    Raises:
        RunError: a matrix has no partner, no weight of its module, or a shape that does not fit it.
    """
    left = dict(matrices)
    for name in names:
        module = name.removesuffix(".weight")
        a = left.pop(peft_name(module, "A"), None)
        b = left.pop(peft_name(module, "B"), None)
        if a is None and b is None:
            yield name, read(name)
            continue
        if a is None or b is None:
            raise RunError(f"adapters: {module} has one matrix of two")
        weight = read(name).to(device, a.dtype)
        if weight.shape != (len(b), a.size(1)) or len(a) != b.size(1):
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise RunError(f"adapters: A and B of {module} are {shapes}, which does not fit {tuple(weight.shape)}")
        yield name, merge(weight, (a, b), scale)
    if left:
        raise RunError(f"adapters: the model has no weight for {len(left)} matrices, for instance {min(left)}")


def write_adapter(folder: str | Path, matrices: Mapping[str, torch.Tensor], adapters: Adapters) -> None:
    """Write A and B, by PEFT's names, as a folder that PEFT and vLLM load. Raises OSError."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(matrices, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = adapters.description(peft_modules(matrices))
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=1))
