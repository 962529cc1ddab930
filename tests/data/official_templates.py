"""Chat templates as models ship them, from the installed TRL, with a tokenizer of bytes that knows their tokens.

``python tests/data/official_templates.py`` prints which tokens of the rows of ``ROWS`` are trained, in ``«»``.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.examples import ExampleSource
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.utils.errors import ConfigError

OFFICIAL = (
    "llama3", "llama3_2", "gemma", "gemma3", "glm4moe", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_5_nothink", "phi3",
    "gptoss", "deepseekv3", "nemotron_3_nano", "nemotron_3_super",
)  # fmt: skip
"""The templates of supported families."""
_SPECIAL = re.compile(r"<\|[^|<> ]+\|?>|<[^|<> ]+\|>|<｜[^｜<> ]+｜>|</?think>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")
_END = {"deepseekv3": "<｜end▁of▁sentence｜>", "gptoss": "<|return|>", "phi3": "<|endoftext|>", "llama": "<|eot_id|>"}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


THOUGHT = "<think>\nhm\n</think>\n\n"
_ASKED = [turn("user", "q")]
ROWS = {
    "one turn": {"messages": [*_ASKED, turn("assistant", "yes")]},
    "two turns": {"messages": [*_ASKED, turn("assistant", "b"), turn("user", "c"), turn("assistant", "yes")]},
    "reasoning": {"messages": [*_ASKED, turn("assistant", THOUGHT + "yes")]},
    "two turns with reasoning": {
        "messages": [*_ASKED, turn("assistant", THOUGHT + "b"), turn("user", "c"), turn("assistant", THOUGHT + "yes")]
    },
    "pair": {
        "prompt": _ASKED,
        "chosen": [turn("assistant", THOUGHT + "yes")],
        "rejected": [turn("assistant", "no")],
    },
}


def folder() -> Path:
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "chat_templates"


@cache
def official_tokenizer(name: str, training: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the template and its special tokens, or with TRL's template for training."""
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    template = (folder() / f"{name}.jinja").read_text()
    chatml = "<|im_end|>" if "<|im_end|>" in template else "</s>"
    end = next((token for family, token in _END.items() if name.startswith(family)), chatml)
    made = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<bos>", eos_token=end)
    special = [AddedToken(token, special=True, normalized=False) for token in sorted({*_SPECIAL.findall(template)})]
    made.add_tokens(special, special_tokens=True)
    made.chat_template = (folder() / f"{name}_training.jinja").read_text() if training else template
    return made


def source_of(name: str, row: dict, **options) -> ExampleSource:
    dataset = DatasetConfig(path="rows.jsonl", **options)
    kind = "sft" if "messages" in row else "pairs"
    rows = [{"id": "train/0", **row}]
    tokenizer = official_tokenizer(name)
    return ExampleSource(dataset, {}, tokenizer, split="train", seed=0, max_prompt_tokens=9999, kind=kind, rows=rows)


def prompt_of(name: str, row: dict, **options) -> Prompt:
    return source_of(name, row, **options).head()[0]


def answers_of(name: str, row: dict, **options) -> list[str]:
    """The text of each answer with its context. Trained tokens are in ``«»``."""
    prompt = prompt_of(name, row, **options)
    decode = official_tokenizer(name).decode
    written = []
    for answer in prompt.fields["answers"]:
        mask = [True] * len(answer.token_ids) if answer.mask is None else answer.mask.tolist()
        text = decode(prompt.token_ids.tolist())
        for token, before, trained in zip(answer.token_ids.tolist(), [False, *mask], mask):
            text += ("«" if trained else "»") * (trained is not before) + decode([token])
        written.append(text + "»" * mask[-1])
    return written


def main() -> None:
    for name in OFFICIAL:
        for kind, row in ROWS.items():
            try:
                texts = answers_of(name, row)
            except ConfigError as error:
                texts = [str(error)]
            for text in texts:
                print(f"{name:17}{kind:26}{text[-150:]!r}")


if __name__ == "__main__":
    main()
