"""What the site loads on demand: texts and tokens of consecutive samples, a script file each.

Scripts, because a page that was opened as a file may load nothing else. Each calls one function with plain values: the
strings of a sample stand in lists and are never keys, and everything beyond ASCII is escaped, half surrogate pairs,
which UTF-8 has no bytes for, among them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from gdpo_nemo.observe.inspector.site_rows import Tokens

FOLDER = "data"
CHARACTERS = 1 << 20
"""Of texts in a shard: a search reads one after the other and forgets it, so this is what it holds."""
TOKENS = 1 << 17
"""In a shard, some 2 MB with their log-probs."""


class Scripts:
    """The scripts of a site. They appear together, when all of them are written; until then those of before stay.

    Args:
        folder: is made where it is missing.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._partial = folder.with_name(f"{folder.name}.partial")
        self._made = [place for place in (folder.parent, folder) if not place.exists()]

    def __enter__(self) -> Scripts:
        shutil.rmtree(self._partial, ignore_errors=True)  # of one that was killed
        self._partial.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Put them in place; where the block failed, leave everything as it was."""
        try:
            if kind is None:
                self._put()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)
            if kind is not None:
                for place in reversed(self._made):
                    with contextlib.suppress(OSError):
                        place.rmdir()

    def _put(self) -> None:
        self._folder.mkdir(exist_ok=True)
        # The index after the shards that it counts on.
        names = sorted(os.listdir(self._partial), key=lambda name: (name in ("index.js", "stamp.js"), name))
        for name in names:
            os.replace(self._partial / name, self._folder / name)
        for path in self._folder.glob("*.js"):
            if path.name not in names:
                path.unlink()

    def write(self, name: str, value: Any) -> None:
        """Write ``name``.js, which gives ``value`` to the page. Raises OSError."""
        # NaN and Infinity, which JSON has not, are JavaScript's names for them.
        content = f"gdpoData({json.dumps(name)},{json.dumps(value, separators=(',', ':'))});\n"
        (self._partial / f"{name}.js").write_text(content, "ascii")


def packed(values: np.ndarray) -> str:
    """The bytes of an array, little-endian, in base64."""
    return base64.b64encode(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes()).decode()


class TextShards:
    """Prompts, completions and exact numbers, row by row."""

    KEYS = ("completion", "detail", "extra", "rewards", "terms", "advantage", "version", "spans")

    def __init__(self, scripts: Scripts):
        self._scripts = scripts
        self.starts: list[int] = []
        """First row of each shard."""
        self._rows = 0
        self._open()

    def _open(self) -> None:
        self._prompts: dict[tuple[str, str], int] = {}
        self._prompt_of: list[int] = []
        self._columns: dict[str, list[Any]] = {key: [] for key in self.KEYS}
        self._characters = 0
        self._start = self._rows

    def add(self, prompt_id: str, prompt: str, *row: Any) -> None:
        """Add a sample; ``row`` in the order of ``KEYS``."""
        number = self._prompts.setdefault((prompt_id, prompt), len(self._prompts))
        if number == len(self._prompts) - 1:
            self._characters += len(prompt)
        self._prompt_of.append(number)
        for key, value in zip(self.KEYS, row, strict=True):
            self._columns[key].append(value)
        self._characters += len(row[0]) + len(row[1]) + len(row[2] or "") + 100
        self._rows += 1
        if self._characters >= CHARACTERS:
            self.close()

    def close(self) -> None:
        """Write what is not written yet."""
        if self._rows == self._start:
            return
        names, prompts = zip(*self._prompts)
        shard = {"ids": names, "prompts": prompts, "promptOf": self._prompt_of, **self._columns}
        self._scripts.write(f"text-{len(self.starts):04d}", shard)
        self.starts.append(self._start)
        self._open()


class TokenShards:
    """Token ids, log-probs and masks, as arrays."""

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

    def close(self) -> None:
        """Write what is not written yet."""
        if self._rows == self._start:
            return
        parts = self._parts
        shard = {
            "lengths": packed(np.concatenate([p.lengths for p in parts]).astype(np.int32)),
            "ids": packed(np.concatenate([p.ids for p in parts])),
            "logprobs": packed(np.concatenate([p.logprobs for p in parts])),
            "trainer": _packed_where_known([p.trainer for p in parts], parts),
            "entropy": _packed_where_known([p.entropies for p in parts], parts),
            "written": packed(np.concatenate([p.written for p in parts]).astype(np.uint8)),
        }
        self._scripts.write(f"tokens-{len(self.starts):04d}", shard)
        self.starts.append(self._start)
        self._open()


def _packed_where_known(columns: Sequence[np.ndarray | None], parts: Sequence[Tokens]) -> str:
    """A column of which some parts, or all, have nothing: NaN there, or ""."""
    if all(values is None for values in columns):
        return ""
    return packed(
        np.concatenate(
            [np.full(len(p.ids), np.nan, np.float32) if values is None else values for values, p in zip(columns, parts)]
        )
    )


def _part(tokens: Tokens, first: int, last: int, ends: np.ndarray) -> Tokens:
    part = slice(ends[first], ends[last])
    trainer, entropies = (None if values is None else values[part] for values in (tokens.trainer, tokens.entropies))
    lengths = tokens.lengths[first:last]
    return Tokens(lengths, tokens.ids[part], tokens.logprobs[part], trainer, entropies, tokens.written[part])


def spans_of(rows: Sequence[Sequence[dict[str, int]]]) -> list[list[int]]:
    """Version and tokens in turn, for each sample."""
    return [[number for span in spans or () for number in (span["version"], span["tokens"])] for spans in rows]
