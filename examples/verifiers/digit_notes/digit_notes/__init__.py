"""Environment package with a harness that rewrites its history."""

from digit_notes.harness import NotesHarness
from digit_notes.taskset import DigitNotesTaskset

__all__ = ["DigitNotesTaskset", "NotesHarness"]
