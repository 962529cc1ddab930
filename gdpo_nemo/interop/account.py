"""The account that the parts of a translation fill together: our keys, what differs, and what stands in the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
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
    covered: dict[str, str] = field(default_factory=dict)
    """Pattern of their keys -> name of the blocker because of which nothing is written for them."""
    questions: dict[str, str] = field(default_factory=dict)
    """Our key -> what cannot be known before the run's files are read, which the dry run then checks."""
    files: set[str] = field(default_factory=set)
    """Files of the recipe's author that the config names and that are not on this machine."""

    def set(self, key: str, value: Any, why: str) -> None:
        """Our ``key`` gets a value."""
        self.values[key] = (value, why)

    def differs(self, name: str, what: str) -> None:
        """Something that matters is not as there."""
        self.differences[name] = what

    def asks(self, key: str, what: str) -> None:
        """The dry run has to answer what a name does not tell."""
        self.questions[key] = what

    def blocks(self, name: str, why: str, *keys: str) -> None:
        """Something that the recipe cannot do without is not here.

        Args:
            keys: patterns of their keys that are not taken over because of it.
        """
        self.blockers[name] = why
        self.covered |= dict.fromkeys(keys, name)

    def blocker_of(self, key: str) -> str:
        """Return the name of the blocker that keeps the recipe's ``key`` from being taken over; empty if none."""
        if key in self.blockers:
            return key
        return next((name for pattern, name in self.covered.items() if fnmatchcase(key, pattern)), "")

    def needs(self, *files: str) -> None:
        """Name files that have to be there when the run starts."""
        self.files.update(files)
