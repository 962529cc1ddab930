"""The architecture of a model in another format than Hugging Face's, and where the rest of it comes from. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from gdpo_nemo.config.architectures import check_model_content
from gdpo_nemo.config.dist_metadata import read_dist_metadata
from gdpo_nemo.config.gguf_model import read_gguf_model
from gdpo_nemo.config.json_files import read_json_object
from gdpo_nemo.config.megatron_keys import model_tensors
from gdpo_nemo.config.model_formats import Format, Source
from gdpo_nemo.config.peft_config import PeftAdapter, read_peft_adapter
from gdpo_nemo.config.reading import parse_yaml, read_text, real_path
from gdpo_nemo.errors import ConfigError

HUB_NAME = re.compile(r"(?!.*(?:--|\.\.|\.git$))(?=.{,96}$)[A-Za-z0-9]([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
"""organisation/name as the hub allows it; stricter than ``huggingface_hub``, which lets the server refuse some."""
COMPANION = "hf"
"""Folder beside a Megatron-core checkpoint of ours with config.json and tokenizer."""


def source_fields(source: Source, key: str, companion: str | None = None) -> dict[str, Any] | None:
    """The fields of config.json of the model that ``source`` is; None where they are on the hub.

    Args:
        key: what the user named the source by, for messages.
        companion: Hugging Face folder that describes a Megatron-core checkpoint, or the base of an adapter.

    Raises:
        ConfigError: the source cannot be read, for a reason that the message names.
    """
    if source.format is Format.GGUF:
        return read_gguf_model(source.path, key).fields
    folder = described_by(source, key, companion)
    if folder is None:
        return None
    fields = read_fields(folder / "config.json", key)
    if source.format in (Format.MEGATRON, Format.NEMO_2):
        model_tensors(read_dist_metadata(source.path, key), fields, source.path, key)
    return fields


def described_by(source: Source, key: str, companion: str | None = None) -> Path | None:
    """The Hugging Face folder whose config.json and tokenizer are those of ``source``; None: a name on the hub, or the
    source has all itself (GGUF).

    Args and errors: as ``source_fields``.
    """
    if source.format is Format.GGUF:
        return None
    if source.format is Format.PEFT:
        adapter = read_peft_adapter(source.path, key)
        if companion and (Path(companion) / "config.json").is_file():
            return Path(companion)
        folder = adapter.base_folder()
        if folder is None:
            _check_hub_name(adapter, key)
        return folder
    if source.format is Format.CHECKPOINT:
        return _folder(companion or _model_of_run(source.path), key, "the model that the run started from")
    places = [*([Path(companion)] if companion else []), source.path / COMPANION, source.root / COMPANION]
    found = next((place for place in places if (place / "config.json").is_file()), None)
    if found is None:
        raise ConfigError(
            f"{key}: {source.root} is {source.format.value}{_trained_as(source)}, which has no config.json; name a "
            f"Hugging Face folder of the same model ({_option(key)})"
        )
    return found


def _option(key: str) -> str:
    return "policy.tokenizer_name" if key.startswith("policy") else "--model"


def _folder(name: str, key: str, what: str) -> Path:
    if not (Path(name) / "config.json").is_file():
        raise ConfigError(f"{key}: {what}; {name} is no folder with config.json ({_option(key)})")
    return Path(name)


def _check_hub_name(adapter: PeftAdapter, key: str) -> None:
    """The base may be a name on the hub. Raises ConfigError: it is not."""
    if not HUB_NAME.fullmatch(adapter.base):
        raise ConfigError(
            f"{key}: the base model of the adapter {adapter.folder}, {adapter.base or 'which it does not name'}, is no "
            "folder here"
        )


def _model_of_run(checkpoint: Path) -> str:
    """``policy.model_name`` of the run that a checkpoint lies in, or nothing."""
    file = real_path(checkpoint).parent.parent / "config.yaml"
    try:
        return str(parse_yaml(read_text(file))["policy"]["model_name"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return ""


def _trained_as(source: Source) -> str:
    """What NeMo 2 says that the model is, in brackets: a name read as text, which imports and runs nothing."""
    try:
        content = parse_yaml(read_text(source.root / "context" / "model.yaml"))
        section = content.get("config", content)
        names = [str(part["_target_"]).rpartition(".")[2] for part in (content, section) if "_target_" in part]
    except (OSError, ValueError, AttributeError, TypeError, KeyError, yaml.YAMLError):
        return ""
    return f" ({names[-1]})" if names else ""


def read_fields(file: Path, key: str) -> dict[str, Any]:
    """The fields of a ``config.json``, of a model that is supported. Raises ConfigError."""
    content = read_json_object(file, key)
    check_model_content(content)
    return content
