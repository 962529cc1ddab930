"""Small tokenizers of each kind, trained in memory."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = (
    "31524=12345 the sky is blue, isn't it?\nplaying  with words == 12 + 34\n\n",
    "reply: 7 8 9  abc\nDon't play; say hello world.",
    "à la carte — 你好 (x=5)",
)
_SPECIAL = ["<unk>", "</s>"]


def _bpe(pre_tokenizer: Any, decoder: Any, normalizer: Any = None) -> tuple[Tokenizer, Any]:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoder
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if isinstance(decoder, decoders.ByteLevel) else []
    return made, trainers.BpeTrainer(vocab_size=400, special_tokens=_SPECIAL, initial_alphabet=alphabet)


def _metaspace(scheme: str) -> tuple[Tokenizer, Any]:
    return _bpe(pre_tokenizers.Metaspace(prepend_scheme=scheme), decoders.Metaspace(prepend_scheme=scheme))


def _llama_2() -> tuple[Tokenizer, Any]:
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = pre_tokenizers.Split("▁", "merged_with_next")
    texts = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return _bpe(words, texts, spaces)


def _byte_level(prefix: bool) -> tuple[Tokenizer, Any]:
    return _bpe(pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel())


def _unigram() -> tuple[Tokenizer, Any]:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made, trainers.UnigramTrainer(vocab_size=200, special_tokens=_SPECIAL, unk_token="<unk>")


def _word_piece() -> tuple[Tokenizer, Any]:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return made, trainers.WordPieceTrainer(vocab_size=400, special_tokens=_SPECIAL)


_KINDS = {
    "metaspace first": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always"),
    "metaspace never": lambda: _metaspace("never"),
    "llama 2": _llama_2,
    "byte level": lambda: _byte_level(False),
    "byte level with a space before": lambda: _byte_level(True),
    "unigram": _unigram,
    "word piece": _word_piece,
}
KINDS = tuple(_KINDS)


@cache
def tokenizer_of_kind(kind: str) -> PreTrainedTokenizerFast:
    made, trainer = _KINDS[kind]()
    trainer.show_progress = False
    made.train_from_iterator(TEXTS * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")
