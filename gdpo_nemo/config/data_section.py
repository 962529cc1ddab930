"""The section `data` and the sections in it: splits of prompts or examples, and how they are read. See `schema`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Dict, List, Optional

from omegaconf import MISSING

from gdpo_nemo.algorithms.ranges import Range


@dataclass
class StridedConfig:
    """Prompts cut out of raw text, each followed by its answer there (EBFT's strided mode)."""

    stride: Annotated[int, Range(1)] = MISSING
    """Tokens between two anchors of a text. The first is at token context_length, the last has a whole answer behind
    it, as in axolotl."""
    context_length: Annotated[int, Range(1)] = MISSING
    """Tokens before an anchor, which are its prompt."""
    generate_max_len: Annotated[int, Range(1)] = MISSING
    """Tokens behind an anchor that are the data's answer; the policy is asked for as many, so
    policy.generation.max_new_tokens has to be the same."""


@dataclass
class DatasetConfig:
    """One split of prompts: a file, a hub dataset, or an environment that makes them."""

    path: Any = None
    """JSONL, JSON, CSV, TSV or Parquet file, a pattern of such files (`rows-*.jsonl`, taken in the order of their
    names), a folder or hub name that Hugging Face's `datasets` reads, or `file.py:function`, which returns the rows;
    or a list of these, one after the other. One of several configurations of a dataset is written `name:configuration`,
    for instance openai/gsm8k:main."""
    split: Optional[str] = None
    """Split of a hub dataset, or the split name given to the environment."""
    environment: Optional[str] = None
    """Environment of `env` that makes the prompts (no path), or that verifies those of the file. Null: the only one."""
    environment_key: Optional[str] = None
    """Column that names the environment of `env` which verifies the row, so that several meet in one batch; rows
    without a value go to `environment`."""
    size: Annotated[Optional[int], Range(1)] = None
    """Rows: the first so many of a file, or how many the environment makes."""
    prompt_key: Optional[str] = None
    """Column with the prompt (text or chat messages). Null: the first of messages, prompt, question, problem. With
    strided, the column with the text; null: text."""
    columns: Dict[str, str] = field(default_factory=dict)
    """Renames columns on loading: {new: old}."""
    system_prompt: Optional[str] = None
    """System message put before each prompt. Null: the one the environment brings, if any; "": none."""
    prompt_template: Optional[str] = None
    """Text around each prompt, which stands in place of `{prompt}`. In a conversation the last message is the
    prompt."""
    chat: Optional[bool] = None
    """Render with the tokenizer's chat template. Null: when the tokenizer has one. False: prompts that are text go to
    the model as they are (as in TRL); messages are rendered all the same."""
    chat_template_kwargs: Dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as `{enable_thinking: false}`. A row may bring its own in a column
    of this name."""
    shuffle: bool = True
    """Shuffle the rows of every epoch anew."""
    remove_columns: List[str] = field(default_factory=list)
    """Columns that rows lose, as with `map` of Hugging Face's `datasets`: a transform (`type`) still sees them, and
    what it returns under such a name stays."""
    type: Any = None
    """A transform of your own, `file.py:function`, for prompts too: a row in, the row's new columns out, or axolotl's
    `function(cfg)`, which returns such a function and `{"remove_columns": [...]}`. Or the form of the rows of dpo, kto,
    orpo, simpo, cpo and reward_model by axolotl's name: chatml., llama3. or chat_template. (the tokenizer's own) before
    argilla, argilla_chat, icr, intel, prompt_pairs or ultra; or, for sft too, a mapping of field_prompt, field_chosen,
    prompt_format and so on. Null: TRL's columns."""
    train_on: str = "assistant"
    """What sft trains of a conversation: assistant (every turn of the assistant), last (its last one) or all (every
    token but the first)."""
    strided: Optional[StridedConfig] = None
    """Rows are raw text, and each of their anchors is a prompt of its own. Null: each row is a prompt."""


@dataclass
class DataConfig:
    """Training and held-out prompts."""

    train: DatasetConfig = field(default_factory=DatasetConfig)
    validation: Optional[DatasetConfig] = None
