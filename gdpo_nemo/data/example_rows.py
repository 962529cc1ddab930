"""Parsing of supervised and preference rows, in the formats of TRL and axolotl, into a prompt and its answers.

TRL's formats are detected by their columns:

* ``messages``
* ``prompt`` and ``completion``, with ``label`` for KTO
* ``chosen`` and ``rejected``, with a ``prompt`` or a common beginning

axolotl's formats are selected by ``data.<split>.type``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gdpo_nemo.config.algorithm_choice import FIELDS, FORMATS, PROMPT_COLUMNS, is_transform
from gdpo_nemo.data.messages import IMAGES, chat_messages, clean_columns, media_of
from gdpo_nemo.data.rows import Row
from gdpo_nemo.utils.errors import ConfigError

Answer = Any
"""Text, or messages that begin with an assistant message."""
_SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}

CHATML = ("<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>")
LLAMA3 = (
    "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|eot_id|>",
)
_LITERAL = {"chatml": CHATML, "llama3": LLAMA3}
"""Template name -> (format of a message, start of an assistant turn, end of an assistant turn)."""


@dataclass(frozen=True)
class RawExample:
    """A parsed row: the prompt and its answers."""

    prompt: Any
    """Text, or messages that do not end with an assistant turn."""
    answers: tuple[tuple[Answer, int], ...]
    """(answer, sign) pairs. The sign is -1 for a rejected or undesirable answer, otherwise 1."""


class _Wrong(ValueError):
    """Raised if a row is invalid."""


def _cleaned(row: Row) -> Row:
    """Return a row with its conversations in the form that chat templates expect. Raises ValueError."""
    clean = clean_columns(row)
    for name, value in row.items():
        is_conversation = isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value)
        if is_conversation and all(isinstance(message.get("role"), str) for message in value):
            try:
                clean[name] = chat_messages(value, clean.get("tools"), images=True)
            except ValueError as error:
                raise _Wrong(f"{name!r}: {error}") from None
    return clean


def _check_images(row: Row) -> None:
    """Raise ValueError if a row has images that were not read, which only vision-language models support."""
    for name in row:
        if media := media_of(row, name, IMAGES):
            raise _Wrong(f"contains {' and '.join(sorted(media))}, but only text is supported")


class ExampleReader:
    """Parses the rows of one split for an algorithm.

    Args:
        kind: kind of rows that the algorithm reads: ``sft``, ``pairs`` or ``single`` (KTO).
        how: value of ``data.<split>.type``, already validated by the config checks.
        prompt_key: column of the prompt in TRL's formats (None for ``prompt``).
    """

    def __init__(self, split: str, kind: str, how: Any, prompt_key: str | None = None):
        self._split = split
        self._kind = kind
        self._answers = [name for name in FIELDS[kind] if name != "label"]
        """Columns of the answers in TRL's formats."""
        self._prompt_key = prompt_key
        self._read = self._reader(how)

    def __call__(self, index: int, row: Row) -> list[Row]:
        """Return a row with ``prompt`` and ``answers`` for each example of this row. Raises ConfigError if invalid."""
        try:
            _check_images(row)
            row = _cleaned(row)
            found = self._read(row)
        except ValueError as wrong:
            raise ConfigError(f"data.{self._split}: row {index}: {wrong}") from None
        rest: Row = {name: row[name] for name in ("tools", "chat_template_kwargs") if name in row}
        examples: list[Row] = []
        for example in found:
            name = f"{row['id']}{'' if len(found) == 1 else ('/rejected', '/chosen')[example.answers[0][1] > 0]}"
            examples.append({**rest, "id": name, "prompt": example.prompt, "answers": example.answers})
        return examples

    def _reader(self, how: Any) -> Callable[[Row], list[RawExample]]:
        if isinstance(how, Mapping):
            return lambda row: self._examples(self._user_defined(row, how))
        if how is None or is_transform(how):  # a transform has already converted the rows to TRL's columns
            return lambda row: self._examples(_parse_trl(self._with_prompt(row), self._kind))
        prefix, _, form = str(how).partition(".")
        return lambda row: self._examples(self._parse_axolotl(row, prefix, form or "default"))

    def _with_prompt(self, row: Row) -> Row:
        if self._prompt_key is None:
            return row
        return {**row, "prompt": _needed(row, self._prompt_key, (str, list))}

    def _examples(self, row: Row) -> list[RawExample]:
        """Return the examples of a row that has TRL's columns."""
        prompt = row["prompt"]
        if self._kind == "sft":
            return [RawExample(prompt, ((_answer(row, "completion"), 1),))]
        if self._kind == "pairs" or "chosen" in row:
            chosen = (_answer(row, "chosen"), 1)
            rejected = (_answer(row, "rejected"), -1)
            if self._kind == "pairs":
                return [RawExample(prompt, (chosen, rejected))]
            return [RawExample(prompt, (chosen,)), RawExample(prompt, (rejected,))]
        return [RawExample(prompt, ((_answer(row, "completion"), 1 if _label(row) else -1),))]

    def _user_defined(self, row: Row, how: Mapping[str, Any]) -> Row:
        """Convert a row to TRL's columns according to a user-defined axolotl format of column names and format
        strings."""
        names = FIELDS[self._kind]
        formatted: Row = {}
        prompt = _needed(row, how.get("field_prompt", "prompt"), str)
        system = row.get(how.get("field_system", "system")) or ""
        formatted["prompt"] = (
            str(how.get("prompt_format", "{prompt}")).replace("{prompt}", prompt).replace("{system}", str(system))
        )
        for name in names:
            value = row.get(how.get(f"field_{name}", name))
            if name == "label":
                formatted[name] = value
                continue
            if not isinstance(value, str):
                raise _Wrong(f"the column {how.get(f'field_{name}', name)!r} must be text, got {_kind(value)}")
            formatted[name] = str(how.get(f"{name}_format", f"{{{name}}}")).replace(f"{{{name}}}", value)
        return formatted

    def _parse_axolotl(self, row: Row, prefix: str, form: str) -> Row:
        if prefix == "chat_template" and form == "default":
            return self._continued(row)
        prompt_column = PROMPT_COLUMNS[form]
        columns = FORMATS.get(form, {}) if self._kind != "single" else {}
        answers = {name: _needed(row, columns.get(name, name), (str, list)) for name in self._answers}
        if prompt_column is None or (prompt_column not in row and form == "argilla" and prefix == "chat_template"):
            first = next(iter(answers.values()))
            prompt = [] if isinstance(first, str) else list(_messages(first, "chosen")[:-1])
        else:
            prompt = [{"role": "user", "content": _needed(row, prompt_column, str)}]
        if not prompt:
            raise _Wrong("the row has no user turn")
        if row.get("system"):
            prompt = [{"role": "system", "content": str(row["system"])}, *prompt]
        turns = {name: _last_turn(value, name) for name, value in answers.items()}
        if prefix in _LITERAL:
            each, start, end = _LITERAL[prefix]
            text = "".join(each.format_map(_MessageFields(message)) for message in prompt) + start
            return {"prompt": text, "label": row.get("label"), **{name: value + end for name, value in turns.items()}}
        answer_messages = {name: [{"role": "assistant", "content": value}] for name, value in turns.items()}
        return {"prompt": prompt, "label": row.get("label"), **answer_messages}

    def _continued(self, row: Row) -> Row:
        """Parse axolotl's chat_template.default: a conversation in ``messages``, and answers that continue it."""
        example: Row = {"prompt": _messages(_needed(row, "messages", list), "messages"), "label": row.get("label")}
        for name in self._answers:
            value = row.get(name)
            example[name] = _messages([value] if isinstance(value, Mapping) else value, name)
        return example


class _MessageFields(dict[str, Any]):
    """Fields of a message for ``str.format_map``. Missing fields are empty."""

    def __missing__(self, key: str) -> str:
        return ""


def _parse_trl(row: Row, kind: str) -> Row:
    """Detect TRL's format by its columns, and return the row with an explicit prompt."""
    if kind == "sft":
        return _supervised(row)
    if kind == "pairs" or "chosen" in row:
        for name in ("chosen", "rejected"):
            _needed(row, name, (str, list))
        if type(row["chosen"]) is not type(row["rejected"]):
            raise _Wrong("chosen and rejected must both be text or both be messages")
        has_messages = isinstance(row["chosen"], list)
        # In ultrafeedback_binarized, the text prompt repeats the first turn of both conversations.
        if "prompt" not in row or (has_messages and isinstance(row["prompt"], str)):
            return {**row, **_common_prompt(row["chosen"], row["rejected"])}
        return row
    _needed(row, "completion", (str, list))
    _needed(row, "prompt", (str, list))
    return row


def _supervised(row: Row) -> Row:
    if "messages" in row or "conversations" in row:
        column = "messages" if "messages" in row else "conversations"
        messages = _messages(row[column], column)
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
        if not first:
            raise _Wrong(f"{column!r} has no assistant turn after another turn")
        return {"prompt": messages[:first], "completion": messages[first:]}
    _needed(row, "prompt", (str, list))
    _needed(row, "completion", (str, list))
    return row


def _common_prompt(chosen: Any, rejected: Any) -> Row:
    """Split off the common beginning of both answers as the prompt, as in TRL's ``extract_prompt``."""
    if isinstance(chosen, list):
        chosen = _messages(chosen, "chosen")
        rejected = _messages(rejected, "rejected")
    shorter = min(len(chosen), len(rejected))
    cut = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    if isinstance(chosen, str) and cut and chosen[cut - 1] == " ":
        cut -= 1  # most tokenizers merge a space with the following word
    if not cut:
        raise _Wrong("the row has no prompt, and chosen and rejected have no common beginning")
    if cut in (len(chosen), len(rejected)):
        raise _Wrong("chosen and rejected are equal, or one is the beginning of the other")
    return {"prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}


def _answer(row: Row, name: str) -> Answer:
    """Return an answer as text, or as messages that begin with an assistant message."""
    value = row.get(name)
    if isinstance(value, str):
        if not value:
            raise _Wrong(f"the column {name!r} is empty")
        return value
    messages = _messages(value, name)
    if messages[0]["role"] != "assistant":
        raise _Wrong(f"{name!r} must begin with an assistant turn, got {messages[0]['role']!r}")
    return messages


def _messages(value: Any, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _Wrong(f"the column {name!r} must be text or messages, got {_kind(value)}")
    messages = []
    for message in value:
        if isinstance(message, Mapping) and "from" in message and "role" not in message:
            role = str(message["from"])
            message = {"role": _SHAREGPT.get(role, role), "content": message.get("value")}
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _Wrong(f"a message in {name!r} has no role")
        # Only content with images is still a list.
        content = message.get("content")
        if not isinstance(content, str if message["role"] == "assistant" else (str, list)) and not message.get(
            "tool_calls"
        ):
            raise _Wrong(f"a message in {name!r} has no text")
        messages.append(message)
    return messages


def _last_turn(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    return str(_messages(value, name)[-1].get("content") or "")


def _label(row: Row) -> bool:
    value = row.get("label")
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise _Wrong(f"the column 'label' must be true or false, got {_kind(value)}")


def _needed(row: Row, name: Any, kinds: Any) -> Any:
    if name not in row:
        raise _Wrong(f"no column {name!r}; columns: {', '.join(key for key in row if key != 'id') or 'none'}")
    value = row[name]
    if not isinstance(value, kinds):
        raise _Wrong(f"the column {name!r} must be text{'' if kinds is str else ' or messages'}, got {_kind(value)}")
    if not value:
        raise _Wrong(f"the column {name!r} is empty")
    return value


def _kind(value: Any) -> str:
    return "empty" if value is None or value == [] else type(value).__name__
