"""Properties of model families: their linear layers, and the text models inside image models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdpo_nemo.models.families import FAMILIES, Family
from gdpo_nemo.utils.errors import ConfigError


def last_name(module: str) -> str:
    """Return the last part of a module name, which selects modules for LoRA: ``q_proj`` for ``self_attn.q_proj``."""
    return module.rpartition(".")[2]


def linear_layers(family: Family) -> tuple[str, ...]:
    """Return the last parts of the names of the linear modules that may have adapters. The output layer comes last."""
    modules = family.modules
    mlp: tuple[str, ...] = modules.mlp
    if (experts := family.experts) and not experts.beside:  # dense layers have the same names as experts
        mlp = () if experts.only_stacked else tuple(filter(None, (experts.gate, experts.up, experts.down)))
    recurrent = (*(family.mamba.linear if family.mamba else ()), *(family.delta.linear if family.delta else ()))
    names = (*modules.qkv, modules.attention_output, *mlp, *recurrent, modules.head)
    return tuple(dict.fromkeys(map(last_name, names)))


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes supported by vLLM's CPU kernels."""

_TEXT_MODELS = {"mistral3": ("mistral", "ministral3")}
"""Types of text models by type of their image model, if they are not this type with ``_text``. The first is the default
of transformers."""


def text_fields(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config.json fields of the text model inside an image model.

    Return None for other models, and if the text model's family is not supported.

    Args:
        content: fields of the image model's config.json.
    """
    inner = content.get("text_config")
    kinds = _TEXT_MODELS.get(str(content.get("model_type")), (f"{content.get('model_type')}_text",))
    if not isinstance(inner, dict) or inner.get("model_type", kinds[0]) not in kinds:
        return None
    kind = str(inner.get("model_type", kinds[0]))
    if kind not in FAMILIES:
        return None
    shared = {key: content[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in content}
    quantised = {key: value for key, value in content.items() if key.startswith("quantization")}
    return {**shared, **inner, **quantised, "model_type": kind, "architectures": [FAMILIES[kind].architecture]}


def has_optional_experts(family: Family) -> bool:
    """Return whether only some models of the family have experts."""
    return bool(family.experts and (family.pattern or family.experts.enabled))


def model_error(problem: str) -> ConfigError:
    """Return the error of a model that is not supported."""
    return ConfigError(f"policy.model_name: {problem}")
