"""Output of a conversation: streamed on a terminal, plain text or JSON lines in a pipe."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from gdpo_nemo.data.records import Trajectory
from gdpo_nemo.tools.chat.speakers import Reply, RunRow, rewards_line

_REFRESH_S = 0.05
_WIDE = 100
"""Minimum width of a terminal, in columns, for two replies side by side."""
NO_REWARDS = "no rewards: this environment scores whole episodes, and this reply is only the first turn"


class Answer:
    """Finished reply, with its rewards if the run's environment has scored it."""

    def __init__(self, reply: Reply, verdict: Trajectory | None, weighted: list[str], of_a_row: bool):
        self.name = reply.speaker.name
        self.text = reply.text
        self.tokens = len(reply.tokens)
        self.finish_reason = reply.finish_reason
        self.verdict = verdict
        self._weighted = weighted
        self._expects_rewards = of_a_row and self.finish_reason != "stopped"

    @property
    def remarks(self) -> list[str]:
        """Lines to show below the reply."""
        found = {"length": ["(truncated by --max-new-tokens or by the context length)"], "stopped": ["(stopped)"]}
        lines = found.get(self.finish_reason, [])
        if self.verdict is not None:
            return [*lines, rewards_line(self.verdict, self._weighted)]
        return [*lines, NO_REWARDS] if self._expects_rewards else lines

    def record(self) -> dict[str, Any]:
        """Return the answer as a dictionary for JSON output."""
        trajectory = self.verdict
        rewards = {} if trajectory is None else {"rewards": trajectory.rewards, "outcome": trajectory.outcome.value}
        return {
            "model": self.name,
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            **rewards,
        }


class Screen(Protocol):
    """Output interface of a conversation."""

    def asked(self, text: str, row: RunRow | None) -> None:
        """Show the prompt of the next replies, or save it for later output."""

    def follow(self, replies: Sequence[Reply], stop: threading.Event) -> None:
        """Wait until the replies are complete, or stop them when ``stop`` is set. Raises RunError."""

    def show(self, answers: Sequence[Answer]) -> None:
        """Show finished replies and their remarks, except for text that ``follow`` has shown."""

    def note(self, line: str) -> None:
        """Show a line that is not part of a reply."""


class Plain:
    """Plain text output of complete replies. Lines that begin with ``# `` are model names and remarks."""

    def asked(self, text: str, row: RunRow | None) -> None:
        """Print the row's number, split and prompt. Prompts that the user typed are not repeated."""
        if row is not None:
            print(f"# row {row.number} of {row.split}: {text}", flush=True)

    def follow(self, replies: Sequence[Reply], stop: threading.Event) -> None:
        """Wait until the replies are complete."""
        _until_done(replies, stop)

    def show(self, answers: Sequence[Answer]) -> None:
        """Print the replies."""
        for answer in answers:
            if len(answers) > 1:
                print(f"# {answer.name}")
            print(answer.text)
            for line in answer.remarks:
                print(f"# {line}")
        sys.stdout.flush()

    def note(self, line: str) -> None:
        """Print a note to stderr."""
        print(line, file=sys.stderr, flush=True)


class JsonLines(Plain):
    """Output of one JSON object per prompt."""

    def __init__(self) -> None:
        self._asked: dict[str, Any] = {}

    def asked(self, text: str, row: RunRow | None) -> None:
        """Save the prompt for the JSON object that ``show`` prints."""
        row_fields = {} if row is None else {"split": row.split, "row": row.number, "id": row.content["id"]}
        self._asked = {"prompt": text, **row_fields}

    def show(self, answers: Sequence[Answer]) -> None:
        """Print the JSON object with the prompt and its replies."""
        replies = [answer.record() for answer in answers]
        print(json.dumps({**self._asked, "replies": replies}, ensure_ascii=False), flush=True)


class Terminal:
    """Streaming output. Two replies are shown in columns on a wide terminal, otherwise one after the other."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)

    def asked(self, text: str, row: RunRow | None) -> None:
        """Print the row's number, split and prompt."""
        if row is not None:
            self._dim(f"row {row.number} of {row.split}")
            self._say(text)

    def follow(self, replies: Sequence[Reply], stop: threading.Event) -> None:
        """Stream the replies."""
        if len(replies) > 1 and self._console.width >= _WIDE:
            self._columns(replies, stop)
            return
        for reply in replies:
            if len(replies) > 1:
                self._dim(reply.speaker.name)
            self._stream(reply, replies, stop)

    def show(self, answers: Sequence[Answer]) -> None:
        """Print two replies in columns. If the replies were streamed as text, print only the remarks."""
        if len(answers) > 1 and self._console.width >= _WIDE:
            self._console.print(_table([(a.name, a.text, a.remarks) for a in answers]))
            return
        for answer in answers:
            prefix = f"{answer.name}: " if len(answers) > 1 else ""
            for line in answer.remarks:
                self._dim(prefix + line)

    def note(self, line: str) -> None:
        """Print a line in dim style."""
        self._dim(line)

    def _stream(self, reply: Reply, replies: Sequence[Reply], stop: threading.Event) -> None:
        shown = ""
        while True:
            done = reply.done
            text = visible(reply.text)
            # Some tokenizers change a character when the next token is appended.
            if text.startswith(shown):
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
            if done:
                break
            _pause(replies, stop)
        sys.stdout.write("\n" if text == shown else f"\n{text}\n")
        reply.wait()

    def _columns(self, replies: Sequence[Reply], stop: threading.Event) -> None:
        from rich.live import Live

        with Live(console=self._console, transient=True, auto_refresh=False) as live:
            while not all(reply.done for reply in replies):
                live.update(_table([(r.speaker.name, r.text, []) for r in replies]), refresh=True)
                _pause(replies, stop)
        _until_done(replies, stop)

    def _dim(self, line: str) -> None:
        self._console.print(visible(line), style="dim", markup=False)

    def _say(self, text: str) -> None:
        self._console.print(visible(text), markup=False)


def visible(text: str) -> str:
    """Replace characters in a model's text that a terminal would interpret as commands."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)


def _table(columns: Sequence[tuple[str, str, list[str]]]) -> Any:
    """Return a table with one column per reply, given as (name, text, remarks)."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, expand=True)
    for name, _, _ in columns:
        table.add_column(Text(name), ratio=1, overflow="fold")
    table.add_row(*(Text(visible(text)) for _, text, _ in columns))
    if any(remarks for _, _, remarks in columns):
        table.add_row(*(Text(visible("\n".join(remarks)), style="dim") for _, _, remarks in columns))
    return table


def _until_done(replies: Sequence[Reply], stop: threading.Event) -> None:
    while not all(reply.done for reply in replies):
        _pause(replies, stop)
    for reply in replies:
        reply.wait()


def _pause(replies: Sequence[Reply], stop: threading.Event) -> None:
    """Wait briefly, then stop the replies if ``stop`` is set."""
    time.sleep(_REFRESH_S)
    if stop.is_set():
        for reply in replies:
            reply.stop()
