"""What the name of a model on the hub tells about its family, for recipes, which name a model and have no config.json."""

from __future__ import annotations

import re
from typing import NamedTuple


class KnownModel(NamedTuple):
    """A model by its name."""

    model_type: str
    """As in config.json; empty where the name does not tell."""
    supported: bool
    """Whether the policy can be built."""
    mixture: bool = False
    """Whether it has experts."""


_FAMILIES = (
    (r".*(VL|Omni|Vision|Audio)(?![a-z]).*", "a model of images or sound", False, False),
    (r"Qwen/Qwen3\.5-.*", "qwen3_5", False, False),
    (r"Qwen/Qwen3-Next-.*", "qwen3_next", False, True),
    (r"Qwen/Qwen3-(Coder-)?\d+B-A\d+B.*", "qwen3_moe", True, True),
    (r"Qwen/Qwen3-[\d.]+B.*", "qwen3", True, False),
    (r"Qwen/(Qwen1\.5-MoE|Qwen2-57B-A14B).*", "qwen2_moe", False, True),
    (r"Qwen/(Qwen2(\.5)?-|QwQ-).*", "qwen2", True, False),
    (r"deepseek-ai/DeepSeek-R1-Distill-Qwen-.*", "qwen2", True, False),
    (r"deepseek-ai/DeepSeek-R1-Distill-Llama-.*", "llama", True, False),
    (r"(agentica-org/DeepScaleR|nvidia/OpenMath-Nemotron|nvidia/AceReason-Nemotron)-.*", "qwen2", True, False),
    (r"deepseek-ai/DeepSeek-.*", "deepseek_v3", False, True),
    (r"moonshotai/Moonlight-.*", "deepseek_v3", False, True),
    (r"meta-llama/Llama-4-.*", "llama4", False, True),
    (r"(meta-llama/(Meta-)?Llama-[23]|TinyLlama/|nvidia/OpenMath2-Llama).*", "llama", True, False),
    (r"mistralai/Mixtral-.*", "mixtral", True, True),
    (r"mistralai/Mistral-(7B-(Instruct-)?v0\.[23]|Nemo-).*", "mistral", True, False),
    (r"mistralai/.*", "a newer family of Mistral", False, False),
    (r"google/gemma-.*", "gemma", False, False),
    (r"openai/gpt-oss-.*", "gpt_oss", False, True),
    (r"nvidia/(NVIDIA-)?Nemotron-.*", "nemotron_h", False, True),
    (r"zai-org/GLM-.*", "glm", False, True),
    (r"MiniMaxAI/.*", "minimax", False, True),
)
"""(name on the hub, model_type, supported, mixture), the first that fits."""


def model_by_name(name: str) -> KnownModel:
    """The family behind a name on the hub."""
    for pattern, *family in _FAMILIES:
        if re.fullmatch(pattern, name, re.IGNORECASE if pattern.startswith(".") else 0):
            return KnownModel(*family)
    return KnownModel("", False)


def supported_types() -> list[str]:
    """Model types that some name stands for and that can be built."""
    return sorted({family for _, family, supported, _ in _FAMILIES if supported})
