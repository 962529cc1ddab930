"""Environment package whose tasks need a tool."""

from code_book.taskset import CodeBookTaskset

__all__ = ["CodeBookTaskset"]
