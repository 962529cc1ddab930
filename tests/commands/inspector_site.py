"""What a page of the inspector would be given: the scripts of a site, read back in Python."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

CALL = re.compile(r'gdpoData\("([\w-]+)",(.*)\);\n', re.DOTALL)


def script(site: Path, name: str) -> Any:
    """The value that ``data/NAME.js`` gives the page."""
    match = CALL.fullmatch((site / "data" / f"{name}.js").read_text("ascii"))
    assert match and match[1] == name
    return json.loads(match[2])


def unpacked(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def columns(site: Path) -> dict[str, np.ndarray]:
    return {name: unpacked(text, kind) for name, (kind, text) in script(site, "index")["columns"].items()}


def shards(site: Path, kind: str) -> list[Any]:
    """Every shard of a kind: ``text``, ``tokens`` or ``images``."""
    starts = script(site, "index")["starts"][("text", "tokens", "images").index(kind)]
    return [script(site, f"{kind}-{place:04d}") for place in range(len(starts))]


def texts(site: Path, key: str) -> list[Any]:
    """A column of all text shards."""
    return [value for shard in shards(site, "text") for value in shard[key]]


def tokens(site: Path, key: str, kind: str) -> np.ndarray:
    """A column of all token shards."""
    return np.concatenate([unpacked(shard[key], kind) for shard in shards(site, "tokens")])
