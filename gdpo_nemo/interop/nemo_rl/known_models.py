"""What is known of a recipe's model: from its config.json where the folder is here, else from what its name on the hub
tells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from gdpo_nemo.config.architectures import check_model_content, num_experts
from gdpo_nemo.config.families import FAMILIES
from gdpo_nemo.config.files import may_be_on_the_hub, read_model_config
from gdpo_nemo.errors import ConfigError


class KnownModel(NamedTuple):
    """A model and whether the policy can be built of it."""

    model_type: str
    """As in config.json; empty where the name does not tell."""
    mixture: bool = False
    """Whether it has experts."""
    refusal: str = ""
    """Why it is not supported; empty where it is."""
    tied: bool | None = None
    """Whether the output layer is the embedding; None where the name does not tell."""
    question: str = ""
    """Facts about an unlisted hub name that only its config.json tells; empty if the model is known."""


_MULTIMODAL = re.compile(r".*(VL|Omni|Vision|Audio)(?![a-z]).*", re.IGNORECASE)
_UNSUPPORTED = (
    (r"Qwen/Qwen3\.5-.*", "qwen3_5", False),
    (r"Qwen/Qwen3-Next-.*", "qwen3_next", True),
    (r"Qwen/(Qwen1\.5-MoE|Qwen2-57B-A14B).*", "qwen2_moe", True),
    (r"deepseek-ai/DeepSeek-.*", "deepseek_v3", True),
    (r"moonshotai/Moonlight-.*", "deepseek_v3", True),
    (r"meta-llama/Llama-4-.*", "llama4", True),
    (r"mistralai/.*", "a newer family of Mistral", False),
    (r"google/gemma-.*", "gemma", False),
    (r"openai/gpt-oss-.*", "gpt_oss", True),
    (r"((openai-community/)?gpt2|distilbert/distilgpt2|distilgpt2)(-(medium|large|xl))?", "gpt2", False),
    (r"nvidia/(NVIDIA-)?Nemotron-.*", "nemotron_h", True),
    (r"zai-org/GLM-.*", "glm", True),
    (r"MiniMaxAI/.*", "minimax", True),
    (r"microsoft/Phi-4-mini-.*", "phi3 with a rotary embedding of a part of each head", False),
)
"""(name on the hub, model_type, mixture) of models that no declared family claims, the first that fits."""

_TIED = (
    (r"Qwen/Qwen3-(0\.6|1\.7|4)B.*", True),
    (r"Qwen/Qwen3-(8|14|30|32|235)B.*", False),
    (r"Qwen/Qwen2\.5-(0\.5|1\.5|3)B.*", True),
    (r"Qwen/Qwen2\.5-(7|14|32|72)B.*", False),
    (r"meta-llama/Llama-3\.2-[13]B.*", True),
    (r"meta-llama/(Meta-)?Llama-3(\.[13])?-(8|70|405)B.*", False),
    (r"mistralai/.*", False),
)
"""(name on the hub, whether config.json has tie_word_embeddings)."""


def known_model(name: str) -> KnownModel:
    """The model in a folder or of a name on the hub."""
    if (Path(name) / "config.json").is_file():
        return _of_folder(Path(name))
    if _MULTIMODAL.fullmatch(name):
        return _unsupported(name, "a model of images or sound")
    for family in FAMILIES.values():
        if re.fullmatch(family.hub_names, name):
            tied = next((tied for pattern, tied in _TIED if re.fullmatch(pattern, name)), None)
            return KnownModel(family.model_type, family.experts is not None, tied=tied)
    for pattern, kind, mixture in _UNSUPPORTED:
        if re.fullmatch(pattern, name):
            return _unsupported(name, kind, mixture)
    supported = f"supported: {', '.join(sorted(FAMILIES))}"
    if may_be_on_the_hub(name):
        asked = f"the family of {name} is known once its config.json is read; taken for a dense model; {supported}"
        return KnownModel("", question=asked)
    return KnownModel("", refusal=f"{name!r} is neither a folder here nor a name on the hub; {supported}")


def _unsupported(name: str, kind: str, mixture: bool = False) -> KnownModel:
    supported = ", ".join(sorted(FAMILIES))
    return KnownModel(kind, mixture, f"{name!r} is {kind}, which is not supported; supported: {supported}")


def _of_folder(folder: Path) -> KnownModel:
    try:
        content = read_model_config(folder / "config.json")
        check_model_content(content)
    except ConfigError as error:
        return KnownModel("", refusal=str(error).removeprefix("policy.model_name: "))
    return KnownModel(content["model_type"], num_experts(content) > 0, tied=bool(content.get("tie_word_embeddings")))
