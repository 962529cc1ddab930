"""The account that the parts of a translation fill together: our keys, what differs, and what stands in the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Account:
    """What several keys of a recipe make together."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Our key -> (value, why)."""
    differences: dict[str, str] = field(default_factory=dict)
    """Their key, or the name of the matter -> what differs, where that changes what is learnt or how it is judged."""
    blockers: dict[str, str] = field(default_factory=dict)
    """Name of the matter -> why the recipe cannot run here."""
    files: set[str] = field(default_factory=set)
    """Files of the recipe's author that the config names and that are not on this machine."""

    def set(self, key: str, value: Any, why: str) -> None:
        """Our ``key`` gets a value."""
        self.values[key] = (value, why)

    def differs(self, name: str, what: str) -> None:
        """Something that matters is not as there."""
        self.differences[name] = what

    def blocks(self, name: str, why: str) -> None:
        """Something that the recipe cannot do without is not here."""
        self.blockers[name] = why

    def needs(self, *files: str) -> None:
        """Name files that have to be there when the run starts."""
        self.files.update(files)
