"""Chat messages and tool schemas of rows, in the form that chat templates expect, and their rendering.

Rows contain the same content in several forms. OpenAI's format has lists of parts as content, the role ``developer``,
and arguments as JSON text. Parquet gives each row the nested keys of all rows, with null as value. Templates render
such values as Python's text, or drop them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from gdpo_nemo.data.images import Image
from gdpo_nemo.data.replies import answer_of, parsed_arguments
from gdpo_nemo.utils.files import check_pairs

if TYPE_CHECKING:
    from gdpo_nemo.data.tokenizer import Tokenizer

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that contain text."""
_IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of content parts that contain an image, or are the place of an image in another column."""
_IMAGE_KEYS = ("image", "image_url", "url", "path", "base64")
"""Keys of an image in a content part."""

IMAGES = ("image", "images", "image_url")
"""Names of columns, and types of content parts, that contain images."""
OTHER_MEDIA = ("video", "videos", "audio")
"""Names of columns, and types of content parts, that contain neither text nor images."""


def chat_messages(
    messages: Sequence[Message], tools: Sequence[Tool] | None = None, images: bool = False
) -> list[dict[str, Any]]:
    """Return the messages with text as content, objects as arguments of tool calls, and without nulls.

    The role ``developer`` becomes ``system``. Content of a tool that is not text becomes JSON text. Content with images
    becomes a list of the parts ``{"type": "image", "image": ...}`` and ``{"type": "text", "text": ...}``.

    Args:
        tools: result of ``tool_schemas``. A null argument remains if its schema accepts null.
        images: True to accept images. The value of a part whose image is in another column is None.

    Raises:
        ValueError: if a message contains content of another kind, or an invalid tool call. The error names the message.
    """
    parameters = {}
    for tool in tools or ():
        function = tool.get("function") or tool
        parameters[function.get("name")] = function.get("parameters")
    found = []
    for index, message in enumerate(messages):
        try:
            plain = plain_message(message, images)
            if calls := plain.get("tool_calls"):
                plain["tool_calls"] = [_call(call, parameters) for call in calls]
        except ValueError as error:
            raise ValueError(f"message {index} ({message.get('role')}) {error}") from None
        found.append(plain)
    return found


def plain_message(message: Message, images: bool = False) -> dict[str, Any]:
    """Return a message as ``chat_messages`` does, but with its tool calls unchanged. Raises ValueError."""
    plain = _given(message)
    content: Any = message.get("content")
    is_text = isinstance(content, str) or not images or not _has_images(content)
    plain["content"] = _text(message) if is_text else list(map(_part, content))
    if plain.get("role") == "developer":
        plain["role"] = "system"
    if not plain.get("tool_calls", True):
        del plain["tool_calls"]
    return plain


def _given(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys whose value is not null."""
    return {key: value for key, value in mapping.items() if value is not None}


def _text(message: Message) -> str:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        return content
    if content is None and (role == "tool" or message.get("tool_calls")):
        return ""
    if isinstance(content, (list, tuple)) and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    if role == "tool":
        with suppress(TypeError):  # of values that are not JSON, such as images
            return json.dumps(without_nulls(content), ensure_ascii=False)
    raise ValueError("has no text" if content is None else "has content other than text")


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)


def is_image(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS


def media_of(row: Mapping[str, Any], key: str, kinds: Sequence[str]) -> set[str]:
    """Return the kinds of media in a row, in columns and in parts of the messages in column ``key``.

    Images that were read (``rows_with_images``) are left out.
    """
    found = set()
    for name in kinds:
        value = row.get(name)
        if value and name != key:
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(one, Image) for one in values):
                found.add(name)
    for part in parts_of(row.get(key)):
        if part.get("type") in kinds and not isinstance(part.get("image"), Image):
            found.add(part["type"])
    return found


def parts_of(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the content parts of all messages in a column."""
    for message in value if isinstance(value, list) else ():
        for part in content_parts(message):
            if isinstance(part, Mapping):
                yield part


def content_parts(message: Any) -> Sequence[Any]:
    """Return the parts of a message's content, or no parts if it is text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, (list, tuple)) else ()


def image_in(part: Mapping[str, Any]) -> Any:
    """Return the image in a content part, in any form that ``read_image`` accepts. None if it is in another column."""
    return next((part[key] for key in _IMAGE_KEYS if part.get(key) is not None), None)


def _has_images(content: Any) -> bool:
    """Return whether content consists of images and text."""
    if not isinstance(content, (list, tuple)) or not any(map(is_image, content)):
        return False
    return all(is_image(part) or _is_text(part) for part in content)


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if not is_image(part):
        return {"type": "text", "text": part["text"]}
    return {"type": "image", "image": image_in(part)}


def without_images(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Return plain messages in which images are ``{"type": "image"}``, as templates expect, and the images in order."""
    plain: list[Message] = []
    images = []
    for message in messages:
        if not isinstance(message["content"], str):
            parts = message["content"]
            images += [part["image"] for part in parts if part["type"] == "image"]
            message = {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in parts]}
        plain.append(message)
    return plain, images


def texts_in(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts of a plain message's content."""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def with_texts(message: Message, change: Callable[[str], str]) -> dict[str, Any]:
    """Return a plain message with the texts of its content changed."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": change(content)}
    changed = []
    for part in content:
        changed.append({**part, "text": change(part["text"])} if part["type"] == "text" else part)
    return {**message, "content": changed}


def _call(call: Any, parameters: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object."""
    function = call.get("function") or call if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError("has a tool call that is not an object with a function")
    arguments = parsed_arguments(function.get("arguments"))
    values = {} if arguments is None else _without_padding(arguments, parameters.get(function.get("name")))
    named = {**_given(function), "arguments": values}
    return {**_given(call), "function": named} if function is not call else named


def _without_padding(value: Any, schema: Any) -> Any:
    """Remove null arguments, except arguments whose schema accepts null."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, (list, tuple)):
        return [_without_padding(part, schema.get("items")) for part in value]
    if not isinstance(value, Mapping):
        return value
    properties = schema.get("properties") or {}
    return {
        key: _without_padding(part, properties.get(key))
        for key, part in value.items()
        if part is not None or _accepts_null(properties.get(key))
    }


def _accepts_null(schema: Any) -> bool:
    """Return whether null is valid for a JSON schema."""
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    if "null" in ([kinds] if isinstance(kinds, str) else kinds or ()) or schema.get("nullable") is True:
        return True
    if None in (schema.get("enum") or ()):
        return True
    return any(map(_accepts_null, chain(schema.get("anyOf") or (), schema.get("oneOf") or ())))


def without_nulls(value: Any) -> Any:
    """Remove the keys of nested mappings whose value is null. ``default`` remains in a schema that accepts null."""
    if isinstance(value, (list, tuple)):
        return list(map(without_nulls, value))
    if not isinstance(value, Mapping):
        return value
    return {
        key: without_nulls(part)
        for key, part in value.items()
        if part is not None or (key == "default" and _accepts_null(value))
    }


def tool_schemas(value: Any) -> list[dict[str, Any]] | None:
    """Return the schemas in a column ``tools`` without nulls: a list, a single schema, or JSON text of either.

    The result is None if the row has no tools.

    Raises:
        ValueError: if the value has another form.
    """
    given = parsed_arguments(value) or None
    tools = [given] if isinstance(given, Mapping) else given
    if tools is None:
        return None
    tools = list(map(parsed_arguments, tools)) if isinstance(tools, (list, tuple)) else [tools]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(
            f"tools must be a list of JSON schemas or its JSON text, got {str(value)[:40]!r}; rename another column"
        )
    return list(map(without_nulls, tools))


def clean_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its columns ``tools`` and ``chat_template_kwargs`` in the form that templates expect.

    Raises:
        ValueError: if a column has another form.
    """
    clean = dict(row)
    if "tools" in row:
        clean["tools"] = tool_schemas(row["tools"])
    options = row.get("chat_template_kwargs")
    if options is not None:
        if not isinstance(options, Mapping):
            raise ValueError(f"chat_template_kwargs must be a mapping, got {options!r}")
        clean["chat_template_kwargs"] = without_nulls(options)
    return clean


def rendered(tokenizer: Tokenizer, messages: Sequence[Message], prompts: bool, **options: Any) -> str:
    """Apply the chat template. A template that refuses objects as arguments of tool calls gets JSON text (DeepSeek).

    Args:
        prompts: True to add the beginning of the assistant's next turn.
        options: arguments of the template.

    Raises any exception, because a template may raise any exception. A text with a lone surrogate is refused.
    """
    forms = [list(messages)]
    if any(message.get("tool_calls") for message in messages):
        forms.append(_with_text_arguments(messages))
    failures: list[Exception] = []
    for form in forms:
        try:
            text = tokenizer.apply_chat_template(form, tokenize=False, add_generation_prompt=prompts, **options)
            check_pairs(text)
            return text
        except Exception as error:  # noqa: BLE001 - the caller reports the first failure
            failures.append(error)
    raise failures[0]


def _with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    changed: list[Message] = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = {**call["function"], "arguments": json.dumps(call["function"].get("arguments"))}
            calls.append({**call, "function": function})
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed


def lost_message(messages: Sequence[Message], text: str) -> int | None:
    """Return the index of a message whose content is not in the rendered text, or None.

    Templates may change white space, write content as a JSON string, and drop the reasoning of earlier turns.
    """
    for index, message in enumerate(messages):
        for content in texts_in(message["content"]):
            if _is_lost(content.strip(), message["role"], text):
                return index
    return None


def _is_lost(content: str, role: str, text: str) -> bool:
    if content in text:
        return False
    if role == "assistant":
        content = answer_of(content).strip()
    forms = (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
    return content not in text and not any(_compact(form) in _compact(text) for form in forms)


def lost_text(messages: Sequence[Message], lost: int, inserted: int = 0) -> str:
    """Describe the result of ``lost_message``. ``inserted`` is the number of messages before those of the row."""
    role, content = messages[lost]["role"], " ".join(texts_in(messages[lost]["content"])).strip()[:40]
    name = f"message {lost - inserted} ({role})" if lost >= inserted else "the system prompt"
    return (
        f"the chat template does not render the text of {name}, which begins with {content!r}; remove the text, or use "
        "another chat template"
    )


def _compact(text: str) -> str:
    return "".join(text.split())
