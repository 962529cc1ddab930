"""What a config names on this machine: model and tokenizer folders, the model factory, files of prompts."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from gdpo_nemo.config.layout import Layout
from gdpo_nemo.config.schema import Config, DatasetConfig
from gdpo_nemo.config.stages import check_stages
from gdpo_nemo.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def check_files(config: Config, layout: Layout) -> None:
    """Checks every local path; names that may live on the Hugging Face hub are left to the run.

    Raises:
        ConfigError: something is missing, incomplete, or does not fit the layout.
    """
    check_model(config, layout)
    _check_tokenizer(config.policy.tokenizer_name)
    _check_data("data.train", config.data.train)
    if config.data.validation:
        _check_data("data.validation", config.data.validation)


def find_function(key: str, reference: str) -> tuple[Path, str]:
    """Splits ``file.py:function``; the file is looked up from the working directory, then from the repository, and not run.

    Args:
        key: where the config has it.

    Raises:
        ConfigError: the file or the function in it does not exist.
    """
    name, colon, function = reference.rpartition(":")
    if not colon or not function.isidentifier():
        raise ConfigError(f"{key}: {reference!r} is not written file.py:function")
    path = next((p for p in (Path(name), REPOSITORY / name) if p.is_file()), None)
    if path is None:
        raise ConfigError(f"{key}: {name} does not exist")
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} is not valid Python ({error})") from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == function for node in body):
        raise ConfigError(f"{key}: {path} has no function {function}")
    return path, function


def local_model_config(config: Config) -> dict[str, Any] | None:
    """The model's ``config.json`` where model_name is a folder, else None.

    Raises:
        ConfigError: the file is missing or is not a JSON object.
    """
    folder = Path(config.policy.model_name)
    if not folder.is_dir():
        return None
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"policy.model_name: {folder} has no config.json{_remake(config)}") from None
    except ValueError as error:
        raise ConfigError(f"policy.model_name: {path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"policy.model_name: {path} is not a JSON object")
    return content


def check_model(config: Config, layout: Layout) -> None:
    """The model is there, and the layout divides it. Raises ConfigError."""
    name, folder = config.policy.model_name, Path(config.policy.model_name)
    if config.policy.model_factory:
        find_function("policy.model_factory", config.policy.model_factory)
    if folder.is_dir():
        content = local_model_config(config)
        if not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir()):
            raise ConfigError(
                f"policy.model_name: {folder} has no weights (*.safetensors or *.bin){_remake(config)}"
            )
        _check_shape(content, config, layout)
    elif not config.policy.model_factory and not _may_be_on_the_hub(name):
        raise ConfigError(
            f"policy.model_name: {name} is neither a folder nor a hub name (organisation/model); "
            "policy.model_factory can make it"
        )


def _check_shape(content: dict[str, Any], config: Config, layout: Layout) -> None:
    """The model's heads, layers, experts and context against the layout."""
    heads = content.get("num_attention_heads")
    groups = content.get("num_key_value_heads") or heads
    layers, experts = content.get("num_hidden_layers"), content.get("num_experts") or content.get("num_local_experts")
    megatron = "policy.megatron_cfg"
    _check_divides(f"{megatron}.tensor_model_parallel_size", layout.tensor, [(heads, "heads"), (groups, "key-value heads")])
    check_stages(layers, config.policy.megatron_cfg)
    _check_divides("policy.generation.vllm_cfg.tensor_parallel_size", layout.engine_tensor, [(heads, "heads")])
    if layout.expert > 1 and not experts:
        raise ConfigError(f"{megatron}.expert_model_parallel_size: the model in {config.policy.model_name} has no experts")
    _check_divides(f"{megatron}.expert_model_parallel_size", layout.expert, [(experts, "experts")])
    for name in ("freeze_moe_router", "moe_router_dtype"):
        if getattr(config.policy.megatron_cfg, name) and not experts:
            raise ConfigError(f"{megatron}.{name}: has no effect, the model in {config.policy.model_name} has no experts; remove it")
    if experts and config.policy.lora.rank and {"gate_proj", "up_proj", "down_proj"} & set(config.policy.lora.target_modules):
        raise ConfigError(
            "policy.lora.target_modules: the model's experts cannot be adapted; leave out gate_proj, up_proj, down_proj"
        )
    if experts and layout.tensor > 1 and not config.policy.megatron_cfg.sequence_parallel:
        raise ConfigError(f"{megatron}.sequence_parallel: must be on for a model with experts under tensor parallelism")
    longest, wanted = content.get("max_position_embeddings"), config.policy.max_total_sequence_length
    if isinstance(longest, int) and longest < wanted:
        raise ConfigError(f"policy.max_total_sequence_length: {wanted} exceeds the model's {longest} positions")


def _check_divides(key: str, size: int, counts: list[tuple[int | None, str]]) -> None:
    counts = [(count, what) for count, what in counts if isinstance(count, int)]
    for count, what in counts:
        if count % size:
            works = [n for n in range(1, count + 1) if all(c % n == 0 for c, _ in counts)]
            raise ConfigError(f"{key}: {size} does not divide the model's {count} {what}; possible: {', '.join(map(str, works))}")


def _check_tokenizer(name: str | None) -> None:
    if name is None:
        return
    folder = Path(name)
    if folder.is_dir():
        if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
            raise ConfigError(f"policy.tokenizer_name: {folder} holds no tokenizer")
    elif not _may_be_on_the_hub(name):
        raise ConfigError(f"policy.tokenizer_name: {name} is neither a folder nor a hub name (organisation/model)")


def _check_data(key: str, data: DatasetConfig) -> None:
    if data.path is None:
        return
    path = Path(data.path)
    if path.is_dir():
        raise ConfigError(f"{key}.path: {path} is a folder; give the file in it")
    if path.is_file():
        if path.stat().st_size == 0:
            raise ConfigError(f"{key}.path: {path} is empty")
    elif path.suffix in _DATA_SUFFIXES or not _may_be_on_the_hub(data.path.partition(":")[0]):
        raise ConfigError(f"{key}.path: {path} does not exist (looked in {Path.cwd()})")


def _may_be_on_the_hub(name: str) -> bool:
    """``organisation/name``, unless its first part is a folder here: then a missing folder was meant."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name.split("/")[0]).is_dir()


def _remake(config: Config) -> str:
    return "; remove the folder to have it made again" if config.policy.model_factory else ""
