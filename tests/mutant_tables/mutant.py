"""A mutant of the package: what `tests/mutants.py` changes, and which tests must fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One change of one file of the package."""

    file: str
    """Below gdpo_nemo."""
    text: str
    """Occurs exactly once in the file."""
    replacement: str
    tests: tuple[str, ...]
    """Node ids of pytest, of which one must fail at least."""
    why: str
    """The defect that a user would see."""

    @property
    def path(self) -> str:
        """Path from the root of the checkout."""
        return f"gdpo_nemo/{self.file}"

    def describe(self) -> str:
        """Return the mutant in one line."""
        return f"{self.path}: {' '.join(self.text.split())} -> {' '.join(self.replacement.split())} ({self.why})"


def mutant(file: str, text: str, replacement: str, tests: str, why: str) -> Mutant:
    """Make a mutant. `tests`: node ids below tests/, separated by blanks."""
    return Mutant(file, text, replacement, tuple(f"tests/{test}" for test in tests.split()), why)
