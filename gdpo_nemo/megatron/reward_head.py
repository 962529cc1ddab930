"""The head of a reward model: where its weight comes from, and the Hugging Face classifier that it is written as."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Callable, Iterable

import torch
from transformers import PretrainedConfig

from gdpo_nemo.megatron.hf_files import write_model
from gdpo_nemo.megatron.hf_mapping import SCORE, family_of


def with_score_head(
    read: Callable[[str], torch.Tensor], config: PretrainedConfig, seed: int
) -> Callable[[str], torch.Tensor]:
    """``read``, with a head for a folder that has none: drawn from ``seed`` as transformers draws it, N(0,
    initializer_range), the same on every rank."""

    def read_or_draw(name: str) -> torch.Tensor:
        try:
            return read(name)
        except KeyError:
            if name != SCORE:
                raise
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(1, config.hidden_size, generator=generator) * config.initializer_range

    return read_or_draw


def classifier_config(config: PretrainedConfig, pad_token_id: int | None) -> PretrainedConfig:
    """The configuration of the sequence classifier with one label that has the weights of the reward model."""
    found = copy.deepcopy(config)
    found.architectures = [family_of(config).architecture.replace("ForCausalLM", "ForSequenceClassification")]
    found.num_labels = 1
    found.pad_token_id = pad_token_id
    return found


def write_classifier(
    folder: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], config: PretrainedConfig, source: str | Path
) -> None:
    """Write a reward model as a folder that transformers loads as a sequence classifier; arguments as of
    ``hf_files.write_model``."""
    tokenizer = _tokenizer_that_pads(Path(source))
    write_model(folder, tensors, classifier_config(config, tokenizer and tokenizer.pad_token_id), source)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _tokenizer_that_pads(folder: Path) -> Any:
    """The tokenizer in ``folder`` with a padding token that ends no answer; None where there is no tokenizer.

    transformers reads a score at the last token that is not padding. Where answers end with that token, too, it would
    read it before the end, so another special token pads; without any, the classifier takes one text at a time.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer  # imports torch's compiler, which a rank that only trains does without

    tokenizer = AutoTokenizer.from_pretrained(folder)
    candidates = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token)
    tokenizer.pad_token = next((t for t in candidates if t is not None and t != tokenizer.eos_token), None)
    return tokenizer
