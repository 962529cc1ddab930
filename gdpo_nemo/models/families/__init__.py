"""Model families that are supported, one declaration each."""

from __future__ import annotations

from collections.abc import Mapping

from gdpo_nemo.models.families import deepseek, gemma, glm, gpt_oss, llama, nemotron, qwen
from gdpo_nemo.models.families.declaration import DeltaNet, Experts, Family, Latent, Mamba, Modules, Tower

_DECLARATIONS = (
    *deepseek.FAMILIES,
    *gemma.FAMILIES,
    *glm.FAMILIES,
    *gpt_oss.FAMILIES,
    *llama.FAMILIES,
    *nemotron.FAMILIES,
    *qwen.FAMILIES,
)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in sorted(_DECLARATIONS, key=lambda family: family.model_type)
}
"""Families by ``model_type``, the field in config.json."""

__all__ = ["FAMILIES", "DeltaNet", "Experts", "Family", "Latent", "Mamba", "Modules", "Tower"]
