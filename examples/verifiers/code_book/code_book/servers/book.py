"""Tool server with the code book. verifiers starts it once per environment worker, as ``python -m`` of this module."""

from __future__ import annotations

import verifiers.v1 as vf


def code_of(key: str) -> str | None:
    """Return the three digits of a key's code, or None for anything but two digits."""
    if len(key) != 2 or not key.isascii() or not key.isdigit():
        return None
    return f"{(int(key) * 617 + 283) % 1000:03d}"


class BookToolset(vf.Toolset[vf.SharedToolsetConfig]):
    """The book. The model sees its tool as ``book_look_up``."""

    TOOL_PREFIX = "book"

    @vf.tool
    async def look_up(self, key: str) -> str:
        """Return the code of a key of two digits."""
        return code_of(key) or "0"


if __name__ == "__main__":
    BookToolset.run()
