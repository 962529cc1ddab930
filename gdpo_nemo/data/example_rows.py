"""Rows of supervised and preference data as a prompt and its answers, from the forms that TRL and axolotl name.

TRL's forms are told by their columns: ``messages``; ``prompt`` and ``completion``, with ``label`` for KTO; ``chosen``
and ``rejected``, with a ``prompt`` or with one that both begin with. axolotl's are named by ``data.<split>.type``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

from gdpo_nemo.config.example_types import FIELDS, FORMATS, PROMPT_COLUMNS, is_transform
from gdpo_nemo.data.rows import Row
from gdpo_nemo.errors import ConfigError

Answer = Any
"""Text, or messages of which the first is the assistant's."""
_SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}

CHATML = ("<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>")
LLAMA3 = (
    "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|eot_id|>",
)
_LITERAL = {"chatml": CHATML, "llama3": LLAMA3}
"""(a message, what the assistant's turn begins with, what it ends with) of the prefixes that write a template out."""


@dataclass(frozen=True)
class RawExample:
    """A row read: what is asked and what is answered."""

    prompt: Any
    """Text, or messages that leave the assistant something to say."""
    answers: tuple[tuple[Answer, int], ...]
    """Each with 1, or -1 where it is the rejected or undesirable one."""


class _Wrong(Exception):
    """What is wrong with a row."""


class ExampleReader:
    """Reads the rows of one split for an algorithm.

    Args:
        kind: ``sft``, ``pairs`` or ``single`` (KTO).
        how: ``data.<split>.type``, checked by ``config.example_types``.
        prompt_key: column of the prompt in TRL's forms where it has another name.
    """

    def __init__(self, split: str, kind: str, how: Any, prompt_key: str | None = None):
        self._split = split
        self._kind = kind
        self._prompt_key = prompt_key
        self._read = self._reader(how)

    def __call__(self, index: int, row: Row) -> list[Row]:
        """The row with ``prompt`` and ``answers``, several where it holds several examples. Raises ConfigError."""
        try:
            found = self._read(row)
        except _Wrong as wrong:
            raise ConfigError(f"data.{self._split}: row {index}: {wrong}") from None
        rest: Row = {name: row[name] for name in ("tools", "chat_template_kwargs") if name in row}
        made: list[Row] = []
        for example in found:
            name = f"{row['id']}{'' if len(found) == 1 else ('/rejected', '/chosen')[example.answers[0][1] > 0]}"
            made.append({**rest, "id": name, "prompt": example.prompt, "answers": example.answers})
        return made

    def _reader(self, how: Any) -> Callable[[Row], list[RawExample]]:
        if isinstance(how, Mapping):
            return lambda row: self._examples(self._user_defined(row, how))
        if how is None or is_transform(how):  # which has been called: its rows have TRL's columns
            return lambda row: self._examples(_of_trl(self._with_prompt(row), self._kind))
        prefix, _, form = str(how).partition(".")
        return lambda row: self._examples(self._of_axolotl(row, prefix, form or "default"))

    def _with_prompt(self, row: Row) -> Row:
        if self._prompt_key is None:
            return row
        return {**row, "prompt": _needed(row, self._prompt_key, (str, list))}

    def _examples(self, row: Row) -> list[RawExample]:
        """From the columns of TRL."""
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
        """Columns that the config names, put into texts that it writes out."""
        names = FIELDS[self._kind]
        made: Row = {}
        prompt = _needed(row, how.get("field_prompt", "prompt"), str)
        system = row.get(how.get("field_system", "system")) or ""
        made["prompt"] = (
            str(how.get("prompt_format", "{prompt}")).replace("{prompt}", prompt).replace("{system}", str(system))
        )
        for name in names:
            value = row.get(how.get(f"field_{name}", name))
            if name == "label":
                made[name] = value
                continue
            if not isinstance(value, str):
                raise _Wrong(f"the column {how.get(f'field_{name}', name)!r} is {_kind(value)}, not text")
            made[name] = str(how.get(f"{name}_format", f"{{{name}}}")).replace(f"{{{name}}}", value)
        return made

    def _of_axolotl(self, row: Row, prefix: str, form: str) -> Row:
        if prefix == "chat_template" and form == "default":
            return self._continued(row)
        asked = PROMPT_COLUMNS[form]
        columns = FORMATS.get(form, {}) if self._kind != "single" else {}
        answers = {
            name: _needed(row, columns.get(name, name), (str, list)) for name in FIELDS[self._kind] if name != "label"
        }
        if asked is None or (asked not in row and form == "argilla" and prefix == "chat_template"):
            first = next(iter(answers.values()))
            prompt = [] if isinstance(first, str) else _asked(_messages(first, "chosen"))
        else:
            prompt = [{"role": "user", "content": _needed(row, asked, str)}]
        if not prompt:
            raise _Wrong("there is no user's turn in it")
        if row.get("system"):
            prompt = [{"role": "system", "content": str(row["system"])}, *prompt]
        made = {name: _last_turn(value, name) for name, value in answers.items()}
        if prefix in _LITERAL:
            each, start, end = _LITERAL[prefix]
            text = "".join(each.format_map(_Same(message)) for message in prompt) + start
            return {"prompt": text, "label": row.get("label"), **{name: value + end for name, value in made.items()}}
        spoken = {name: [{"role": "assistant", "content": value}] for name, value in made.items()}
        return {"prompt": prompt, "label": row.get("label"), **spoken}

    def _continued(self, row: Row) -> Row:
        """axolotl's chat_template.default: a conversation in ``messages``, and the turns that could follow it."""
        made: Row = {"prompt": _messages(_needed(row, "messages", list), "messages"), "label": row.get("label")}
        for name in (name for name in FIELDS[self._kind] if name != "label"):
            value = row.get(name)
            made[name] = _messages([value] if isinstance(value, Mapping) else value, name)
        return made


class _Same(dict[str, Any]):
    """A message whose missing parts are empty."""

    def __missing__(self, key: str) -> str:
        return ""


def _of_trl(row: Row, kind: str) -> Row:
    """TRL's columns, told by their names; the prompt made explicit."""
    if kind == "sft":
        return _supervised(row)
    if kind == "pairs" or "chosen" in row:
        for name in ("chosen", "rejected"):
            _needed(row, name, (str, list))
        if type(row["chosen"]) is not type(row["rejected"]):
            raise _Wrong("chosen and rejected are text and messages, not both the same")
        talked = isinstance(row["chosen"], list)
        # A prompt as text beside whole conversations is their first turn once more, as in ultrafeedback_binarized.
        if "prompt" not in row or (talked and isinstance(row["prompt"], str)):
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
            raise _Wrong(f"{column!r} has no assistant's turn behind another's")
        return {"prompt": messages[:first], "completion": messages[first:]}
    _needed(row, "prompt", (str, list))
    _needed(row, "completion", (str, list))
    return row


def _common_prompt(chosen: Any, rejected: Any) -> Row:
    """What both begin with, and what each goes on with, as TRL's ``extract_prompt`` has it."""
    if isinstance(chosen, list):
        chosen = _messages(chosen, "chosen")
        rejected = _messages(rejected, "rejected")
    shorter = min(len(chosen), len(rejected))
    cut = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    if isinstance(chosen, str) and cut and chosen[cut - 1] == " ":
        cut -= 1  # most tokenizers write a space together with the word behind it
    if not cut:
        raise _Wrong("there is no prompt, and chosen and rejected do not begin alike")
    if cut in (len(chosen), len(rejected)):
        raise _Wrong("chosen and rejected are the same, or one goes on where the other ends")
    return {"prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}


def _answer(row: Row, name: str) -> Answer:
    """An answer as text, or as messages that begin with the assistant's."""
    value = row.get(name)
    if isinstance(value, str):
        if not value:
            raise _Wrong(f"the column {name!r} is empty")
        return value
    messages = _messages(value, name)
    if messages[0]["role"] != "assistant":
        raise _Wrong(f"{name!r} begins with the turn of {messages[0]['role']!r}, not with the assistant's")
    return messages


def _messages(value: Any, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _Wrong(f"the column {name!r} is {_kind(value)}, not text or messages")
    messages = []
    for message in value:
        if isinstance(message, Mapping) and "from" in message and "role" not in message:
            who = str(message["from"])
            message = {"role": _SHAREGPT.get(who, who), "content": message.get("value")}
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _Wrong(f"a message in {name!r} lacks its role")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise _Wrong(f"a message in {name!r} has no text")
        messages.append(message)
    return messages


def _asked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What stands before the last turn."""
    return list(messages[:-1])


def _last_turn(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    return str(_messages(value, name)[-1].get("content") or "")


def _label(row: Row) -> bool:
    value = row.get("label")
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise _Wrong(f"the column 'label' is {_kind(value)}, not true or false")


def _needed(row: Row, name: Any, kinds: Any) -> Any:
    if name not in row:
        raise _Wrong(f"no column {name!r}; it has {', '.join(key for key in row if key != 'id') or 'none'}")
    value = row[name]
    if not isinstance(value, kinds):
        raise _Wrong(f"the column {name!r} is {_kind(value)}, not text{'' if kinds is str else ' or messages'}")
    if not value:
        raise _Wrong(f"the column {name!r} is empty")
    return value


def _kind(value: Any) -> str:
    return "empty" if value is None or value == [] else type(value).__name__
