"""Models of a TRL script: adapters, reward models, quantisation, and what reads images."""

from __future__ import annotations

import ast
from typing import Any, Mapping

from gdpo_nemo.interop.trl.static_names import Resolver
from gdpo_nemo.interop.trl.trl_defaults import MODEL_CONFIG
from gdpo_nemo.interop.trl.trl_run import Reward

_OF_IMAGES = ("AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModelForMultimodalLM")
_IMAGE_COLUMNS = ("image", "images", "pixel_values")


def reward_model(name: str) -> Reward:
    """A reward model by its folder or its name on the hub."""
    return Reward(name.rpartition("/")[2], "reward_model", arguments={"model": name})


def lora_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the LoRA settings that ``get_peft_config`` makes of TRL's ``ModelConfig``."""
    model = {**MODEL_CONFIG, **arguments}
    if not model["use_peft"]:
        return None
    names = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora"}
    names |= {"use_dora": "use_dora", "modules_to_save": "lora_modules_to_save"}
    return {name: model[key] for name, key in names.items()} | {"target_modules": model["lora_target_modules"]}


def images_of(tree: ast.Module) -> str:
    """Return the part of a script that reads images, a class of transformers or a column; empty if none."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in _OF_IMAGES:
            return name
        column = node.slice if isinstance(node, ast.Subscript) else None
        if isinstance(column, ast.Constant) and column.value in _IMAGE_COLUMNS:
            return f"the column {column.value!r}"
        for key, value in zip(node.keys, node.values) if isinstance(node, ast.Dict) else ():
            pair = [part.value if isinstance(part, ast.Constant) else None for part in (key, value)]
            if pair == ["type", "image"]:
                return "messages with an image"
    return ""


def quantisation(call: ast.Call, names: Resolver) -> str:
    """The source of the ``quantization_config`` of ``from_pretrained(...)``; empty if the model is loaded as it is."""
    nodes = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in nodes:  # **kwargs
        nodes |= _keywords_of(nodes[None], names)
    node = nodes.get("quantization_config")
    if node is None or names.value(node) is None or _dequantised(node, names):
        return ""
    return ast.unparse(node)


def _keywords_of(node: ast.expr, names: Resolver) -> dict[str | None, ast.expr]:
    """The keywords of ``dict(...)`` or ``{...}`` behind a name."""
    made = _behind(node, names)
    if isinstance(made, ast.Call) and ast.unparse(made.func) == "dict":
        return {keyword.arg: keyword.value for keyword in made.keywords}
    if isinstance(made, ast.Dict):
        return {str(key.value): value for key, value in zip(made.keys, made.values) if isinstance(key, ast.Constant)}
    return {}


def _dequantised(node: ast.expr, names: Resolver) -> bool:
    """Return whether the weights are only stored in few bits, and loaded in full precision."""
    made = _behind(node, names)
    keywords = made.keywords if isinstance(made, ast.Call) else []
    return any(keyword.arg == "dequantize" and names.value(keyword.value) is True for keyword in keywords)


def _behind(node: ast.expr, names: Resolver) -> ast.expr:
    binding = names.binding(node.id, node.lineno) if isinstance(node, ast.Name) else None
    return binding.value if binding is not None and binding.value is not None else node
