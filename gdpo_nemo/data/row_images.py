"""Images in the rows of a split: read from columns and messages, and put where a prompt has its placeholders.

TRL's conventions hold: a column ``images`` (or ``image``) belongs to the parts ``{"type": "image"}`` of the messages,
in order. If the messages have no such part, the images come before the text of the first user message. A part may also
contain its image itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from gdpo_nemo.config.data_files import data_paths, is_rows_function
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.config.sections import ImagesConfig
from gdpo_nemo.data.images import Image, read_image
from gdpo_nemo.data.messages import OTHER_MEDIA, content_parts, image_in, is_image, media_of, parts_of
from gdpo_nemo.data.rows import PROMPT_KEYS, Row
from gdpo_nemo.utils.errors import ConfigError

IMAGE_COLUMNS = ("images", "image")
"""Columns with images. If a row has both, its messages have those of the first."""
_ANSWERS = ("completion", "chosen", "rejected")


def rows_with_images(
    rows: Sequence[Row],
    dataset: DatasetConfig,
    split: str,
    limits: ImagesConfig,
    *,
    placeholder: str | None = None,
    kind: str | None = None,
) -> list[Row]:
    """Return the rows with ``Image`` objects in place of all images, each distinct image once.

    Messages get a part ``{"type": "image", "image": Image}`` for each image. A row that was already read is returned
    unchanged.

    Args:
        dataset: the section ``data.<split>``.
        limits: the section ``data.images``.
        placeholder: text of a placeholder in prompts, which rows must not contain (None if it is not known).
        kind: kind of rows that the algorithm reads (``AlgorithmSpec.rows``). None: prompts.

    Raises:
        ConfigError: if an image is invalid, or the number of images is not that of their places.
    """
    read = _RowReader(dataset, split, limits, placeholder, kind)
    found = []
    for index, row in enumerate(rows):
        try:
            found.append(read(row))
        except ValueError as error:
            raise ConfigError(f"data.{split}: row {index}: {error}") from None
    return found


class _RowReader:
    """Reads the images of one row after the other. For the arguments, see ``rows_with_images``."""

    def __init__(
        self, dataset: DatasetConfig, split: str, limits: ImagesConfig, placeholder: str | None, kind: str | None
    ):
        self._prompt_key = dataset.prompt_key
        self._limits = limits
        self._folder = _folder(dataset, split, limits)
        self._placeholder = placeholder
        self._kind = kind
        self._known: dict[str, Image] = {}

    def __call__(self, row: Row) -> Row:
        """Return the row with its images read. Raises ValueError."""
        paths = self._paths(row)
        names = list(dict.fromkeys(chain.from_iterable(paths)))
        for name in names:
            if media := media_of(row, name, OTHER_MEDIA):
                raise ValueError(f"contains {' and '.join(sorted(media))}, but only text and images are supported")
            self._check_texts(name, row[name])
        if any(isinstance(part.get("image"), Image) for name in names for part in parts_of(row[name])):
            return row
        found = dict(row)
        column, images = self._read_columns(found, names)
        read = {name: self._read_parts(name, row[name]) for name in names}
        for path in paths:
            self._fill(found, {name: read[name] for name in path}, column, images)
        return found

    def _paths(self, row: Row) -> list[list[str]]:
        """Return the columns of each conversation in a row: the prompt, and an answer that continues it."""
        if self._kind is None:
            key = self._prompt_key or next((key for key in PROMPT_KEYS if key in row), "")
            return [[key]] if key in row else []
        if self._kind == "sft":
            for name in ("messages", "conversations"):
                if name in row:
                    return [[name]]
        answers = [name for name in _ANSWERS if name in row]
        key = self._prompt_key or "prompt"
        repeats = isinstance(row.get(key), str) and any(isinstance(row[name], list) for name in answers)
        if key not in row or (repeats and self._kind != "sft"):  # see ``example_rows``
            return [[name] for name in answers]
        return [[key, name] for name in answers] or [[key]]

    def _check_texts(self, name: str, value: Any) -> None:
        """Raise ValueError if a text contains the placeholder of an image."""
        if self._placeholder is None:
            return
        messages = value if isinstance(value, list) else ()
        texts: list[Any] = [value, *(message.get("content") for message in messages if isinstance(message, Mapping))]
        texts += [part.get("text") for part in parts_of(value)]
        if any(isinstance(text, str) and self._placeholder in text for text in texts):
            raise ValueError(
                f"column {name!r}: a text contains the placeholder of an image, {self._placeholder}; remove it, or use "
                "a part of type image"
            )

    def _read_columns(self, row: Row, conversations: Sequence[str]) -> tuple[str, list[Image]]:
        """Replace the images in the image columns of a row. Return the column of the messages' images, and them."""
        found: dict[str, list[Image]] = {}
        for name in IMAGE_COLUMNS:
            value = row.get(name)
            if name in conversations or value is None or value == []:
                continue
            if isinstance(value, (list, tuple)):
                images = []
                for number, one in enumerate(value):
                    images.append(self._read(one, f"column {name!r}: image {number}"))
                row[name] = images
            else:
                row[name] = self._read(value, f"column {name!r}: the image")
                images = [row[name]]
            found[name] = images
        return next(iter(found.items()), ("", []))

    def _read_parts(self, name: str, value: Any) -> Any:
        """Return messages with the images in their parts read. Parts without an image get the value None."""
        if not any(map(is_image, parts_of(value))):
            return value

        def read(part: Any) -> Any:
            if not is_image(part):
                return part
            image = image_in(part)
            return {
                "type": "image",
                "image": None if image is None else self._read(image, f"column {name!r}: the image"),
            }

        return _changed(value, read)

    def _fill(self, row: Row, path: dict[str, Any], column: str, images: list[Image]) -> None:
        """Put images into a conversation's parts without an image. Raises ValueError if their numbers differ.

        Args:
            row: row to which the columns of the conversation are written.
            path: content of these columns.
            column: column of the images.
        """
        first = next(iter(path))
        if images and not any(any(map(is_image, parts_of(value))) for value in path.values()):
            path[first] = _with_places(path[first], len(images), first)
        parts = [part for value in path.values() for part in parts_of(value) if is_image(part)]
        places = sum(part["image"] is None for part in parts)
        source = f"column {column!r}" if column else f"no column {' or '.join(map(repr, IMAGE_COLUMNS))}"
        if places != len(images):
            raise ValueError(
                f"{_count(places, 'placeholder')} of images, but {_count(len(images), 'image')} ({source})"
            )
        limit = self._limits.max_per_prompt
        if len(parts) > limit:
            raise ValueError(
                f"{len(parts)} images (column {column or first!r}), but data.images.max_per_prompt is {limit}"
            )
        waiting = iter(images)

        def fill(part: Any) -> Any:
            return {**part, "image": next(waiting)} if is_image(part) and part["image"] is None else part

        for name, value in path.items():
            row[name] = _changed(value, fill) if any(map(is_image, parts_of(value))) else value

    def _read(self, value: Any, where: str) -> Image:
        try:
            image = read_image(value, self._limits, self._folder)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from None
        return self._known.setdefault(image.sha256, image)


def _with_places(value: Any, count: int, name: str) -> list[Any]:
    """Return messages with parts for images before the text of the first user message. Raises ValueError."""
    places = [{"type": "image", "image": None} for _ in range(count)]
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if content is not None and message.get("role") == "user" and isinstance(content, (str, list, tuple)):
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            messages[number] = {**message, "content": [*places, *parts]}
            return messages
    raise ValueError(f"column {name!r} has no user message for {_count(count, 'image')}")


def _changed(messages: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return messages with each part of their contents changed."""
    found = []
    for message in messages:
        parts = list(map(change, content_parts(message)))
        found.append({**message, "content": parts} if parts else message)
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _folder(dataset: DatasetConfig, split: str, limits: ImagesConfig) -> Path | None:
    """Return the folder of image paths: the configured folder, or the only folder of the split's files."""
    if limits.folder is not None:
        return Path(os.path.expanduser(limits.folder))
    folders = set()
    for entry in data_paths(f"data.{split}", dataset):
        path = Path(os.path.expanduser(entry.partition(":")[0] if is_rows_function(entry) else entry))
        folders.add(path.parent if path.is_file() else path)
    return folders.pop() if len(folders) == 1 and next(iter(folders)).is_dir() else None
