"""Data that the page loads on demand: texts and tokens of consecutive samples, one script file per shard.

Scripts are used because a page opened from disk cannot load other files. Each script calls one function with plain data
as arguments. Strings from samples are only used as list items, never as object keys. Non-ASCII characters are escaped,
including unpaired surrogates, which UTF-8 cannot encode.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.tools.inspect.rows import Tokens, rubric_of

FOLDER = "data"
CHARACTERS = 1 << 20
"""Maximum characters of texts per shard. A search loads one shard at a time."""
TOKENS = 1 << 17
"""Maximum tokens per shard, about 2 MB with their log-probs."""


class Scripts:
    """Writer of the page's scripts. New scripts replace the old scripts only after all new scripts are written.

    Args:
        folder: output folder, which is created if it does not exist.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._partial = folder.with_name(f"{folder.name}.partial")
        self._created_folders = [path for path in (folder.parent, folder) if not path.exists()]

    def __enter__(self) -> Scripts:
        shutil.rmtree(self._partial, ignore_errors=True)  # a killed process may leave this folder behind
        self._partial.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Move the scripts to the output folder. If the block failed, leave the folder unchanged."""
        try:
            if kind is None:
                self._put()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)
            if kind is not None:
                for path in reversed(self._created_folders):
                    with contextlib.suppress(OSError):
                        path.rmdir()

    def _put(self) -> None:
        self._folder.mkdir(exist_ok=True)
        # The index is moved last, because it refers to the shards.
        names = sorted(os.listdir(self._partial), key=lambda name: (name in ("index.js", "stamp.js"), name))
        for name in names:
            os.replace(self._partial / name, self._folder / name)
        for path in self._folder.glob("*.js"):
            if path.name not in names:
                path.unlink()

    def write(self, name: str, value: Any) -> None:
        """Write ``name``.js, which passes ``value`` to the page. Raises OSError."""
        # NaN and Infinity are valid in JavaScript, although not in JSON.
        content = f"gdpoData({json.dumps(name)},{json.dumps(value, separators=(',', ':'))});\n"
        (self._partial / f"{name}.js").write_text(content, "ascii")


def packed(values: np.ndarray) -> str:
    """Return the little-endian bytes of an array in base64."""
    return base64.b64encode(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes()).decode()


class TextShards:
    """Writer of shards with prompts, completions, and rewards in full precision."""

    KEYS = ("completion", "detail", "extra", "rewards", "terms", "verdicts", "advantage", "version", "spans", "images")

    def __init__(self, scripts: Scripts):
        self._scripts = scripts
        self.starts: list[int] = []
        """First row of each shard."""
        self._rows = 0
        self._open()

    def _open(self) -> None:
        self._prompts: dict[tuple[str, str], int] = {}
        self._prompt_of: list[int] = []
        self._rubrics: dict[str, int] = {}
        self._rubric_of: list[int] = []
        self._columns: dict[str, list[Any]] = {key: [] for key in self.KEYS}
        self._characters = 0
        self._start = self._rows

    def add(self, prompt_id: str, prompt: str, rubric: str, *row: Any) -> None:
        """Add a sample.

        Args:
            rubric: an entry of ``Components.rubrics``. Equal rubrics are written once per shard.
            row: values for ``KEYS`` in this order.
        """
        number = self._prompts.setdefault((prompt_id, prompt), len(self._prompts))
        if number == len(self._prompts) - 1:
            self._characters += len(prompt)
        self._prompt_of.append(number)
        if rubric not in self._rubrics:
            self._characters += len(rubric)
        self._rubric_of.append(self._rubrics.setdefault(rubric, len(self._rubrics)))
        for key, value in zip(self.KEYS, row, strict=True):
            self._columns[key].append(value)
        self._characters += len(row[0]) + len(row[1]) + len(row[2] or "") + 20 * len(row[5] or "") + 100
        self._rows += 1
        if self._characters >= CHARACTERS:
            self.close()

    def close(self) -> None:
        """Write the current shard, if it has rows."""
        if self._rows == self._start:
            return
        names, prompts = zip(*self._prompts)
        shard = {"ids": names, "prompts": prompts, "promptOf": self._prompt_of, **self._columns}
        shard |= {"rubrics": list(map(rubric_of, self._rubrics)), "rubricOf": self._rubric_of}
        self._scripts.write(f"text-{len(self.starts):04d}", shard)
        self.starts.append(self._start)
        self._open()


class TokenShards:
    """Writer of shards with token ids, log-probs, entropies and masks."""

    def __init__(self, scripts: Scripts):
        self._scripts = scripts
        self.starts: list[int] = []
        """First row of each shard."""
        self._rows = 0
        self._open()

    def _open(self) -> None:
        self._parts: list[Tokens] = []
        self._tokens = 0
        self._start = self._rows

    def add(self, tokens: Tokens) -> None:
        """Add the tokens of further samples."""
        ends = np.concatenate(([0], np.cumsum(tokens.lengths)))
        row = 0
        while row < len(tokens.lengths):
            room = ends[row] + TOKENS - self._tokens
            last = max(row + 1, int(np.searchsorted(ends, room, "right")) - 1)
            self._parts.append(_part(tokens, row, last, ends))
            self._tokens += int(ends[last] - ends[row])
            self._rows += last - row
            row = last
            if row < len(tokens.lengths) or self._tokens >= TOKENS:
                self.close()

    def _column(self, name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in self._parts])

    def _packed_where_known(self, name: str) -> str:
        """Pack a column, with NaN for parts without it. The text is empty if no part has the column."""
        columns = []
        for part in self._parts:
            values = getattr(part, name)
            columns.append(np.full(len(part.ids), np.nan, np.float32) if values is None else values)
        known = any(getattr(part, name) is not None for part in self._parts)
        return packed(np.concatenate(columns)) if known else ""

    def close(self) -> None:
        """Write the current shard, if it has tokens."""
        if self._rows == self._start:
            return
        shard = {
            "lengths": packed(self._column("lengths").astype(np.int32)),
            "ids": packed(self._column("ids")),
            "logprobs": packed(self._column("logprobs")),
            "trainer": self._packed_where_known("trainer"),
            "entropy": self._packed_where_known("entropies"),
            "written": packed(self._column("written").astype(np.uint8)),
        }
        self._scripts.write(f"tokens-{len(self.starts):04d}", shard)
        self.starts.append(self._start)
        self._open()


def _part(tokens: Tokens, first: int, last: int, ends: np.ndarray) -> Tokens:
    part = slice(ends[first], ends[last])
    trainer = None if tokens.trainer is None else tokens.trainer[part]
    entropies = None if tokens.entropies is None else tokens.entropies[part]
    lengths = tokens.lengths[first:last]
    return Tokens(lengths, tokens.ids[part], tokens.logprobs[part], trainer, entropies, tokens.written[part])


def spans_of(spans: Sequence[dict[str, int]] | None) -> list[int]:
    """Return [version, tokens, version, tokens, ...] of a sample's version spans."""
    numbers = []
    for span in spans or ():
        numbers += [span["version"], span["tokens"]]
    return numbers
