"""Reward models as folders that transformers can load as sequence classifiers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from gdpo_nemo.megatron.model_config import description_of
from gdpo_nemo.models.hf_folder import write_model


def classifier_config(config: PretrainedConfig, pad_token_id: int | None) -> PretrainedConfig:
    """Convert a reward model's configuration to that of transformers' sequence classifier with one label."""
    classifier = copy.deepcopy(config)
    architecture = description_of(config).family.architecture
    classifier.architectures = [architecture.replace("ForCausalLM", "ForSequenceClassification")]
    classifier.num_labels = 1
    classifier.pad_token_id = pad_token_id
    return classifier


def write_classifier(
    folder: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], config: PretrainedConfig, source: str | Path
) -> None:
    """Write a reward model to a folder that transformers can load as a sequence classifier.

    For the arguments, see ``hf_folder.write_model``.
    """
    tokenizer = _tokenizer_with_padding(Path(source))
    write_model(folder, tensors, classifier_config(config, tokenizer and tokenizer.pad_token_id), source)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _tokenizer_with_padding(folder: Path) -> Any:
    """Return the folder's tokenizer with a padding token other than the EOS token, or None if it has no tokenizer.

    transformers reads the score at the last token that is not padding. If the EOS token were also the padding token,
    transformers would read the score before the end of the answer. If the tokenizer has no other special token, no
    padding token is set, and the classifier accepts only one text at a time.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer  # loads torch's compiler, which a training rank does not need

    tokenizer = AutoTokenizer.from_pretrained(folder)
    candidates = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token)
    tokenizer.pad_token = next((t for t in candidates if t is not None and t != tokenizer.eos_token), None)
    return tokenizer
