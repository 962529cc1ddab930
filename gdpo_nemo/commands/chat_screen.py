"""Where a conversation is shown: on a terminal as it comes, into a pipe as plain text or JSON lines."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any, Protocol, Sequence

from gdpo_nemo.commands.run_rows import RunRow, rewards_line
from gdpo_nemo.commands.speakers import Reply
from gdpo_nemo.data.records import Trajectory

_REFRESH_S = 0.05
_WIDE = 100
"""Columns of a terminal from which on two replies stand side by side."""
NO_REWARDS = "no rewards: this environment judges whole episodes, of which this is the first turn alone"


class Answer:
    """A reply that is there, with what the run's environment says of it."""

    def __init__(self, reply: Reply, verdict: Trajectory | None, weighted: list[str], of_a_row: bool):
        self.name = reply.speaker.name
        self.text = reply.text
        self.tokens = len(reply.tokens)
        self.finish_reason = reply.finish_reason
        self.verdict = verdict
        self._weighted = weighted
        self._judgeable = of_a_row and self.finish_reason != "stopped"

    @property
    def remarks(self) -> list[str]:
        """Lines to be shown below the reply."""
        found = {"length": ["(cut: --max-new-tokens, or the end of the context)"], "stopped": ["(stopped)"]}
        lines = found.get(self.finish_reason, [])
        if self.verdict is not None:
            return [*lines, rewards_line(self.verdict, self._weighted)]
        return [*lines, NO_REWARDS] if self._judgeable else lines

    def record(self) -> dict[str, Any]:
        """As JSON."""
        judged = self.verdict
        rewards = {} if judged is None else {"rewards": judged.rewards, "outcome": judged.outcome.value}
        return {
            "model": self.name,
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            **rewards,
        }


class Screen(Protocol):
    """What a conversation needs of the place where it is shown."""

    def asked(self, text: str, row: RunRow | None) -> None:
        """A prompt was taken up."""

    def follow(self, replies: Sequence[Reply], stop: threading.Event) -> None:
        """Return when the replies are done; they are cut once ``stop`` is set. Raises RunError."""

    def show(self, answers: Sequence[Answer]) -> None:
        """What is left to show of replies that are done."""

    def note(self, line: str) -> None:
        """Something to know that is no reply."""


class Plain:
    """Replies one after the other, whole; with several models each under its name. Remarks begin with ``# ``."""

    def asked(self, text: str, row: RunRow | None) -> None:
        """Name the row; other prompts are known to whoever wrote them."""
        if row is not None:
            print(f"# row {row.number} of {row.split}: {text}", flush=True)

    def follow(self, replies: Sequence[Reply], stop: threading.Event) -> None:
        """Wait."""
        _until_done(replies, stop)

    def show(self, answers: Sequence[Answer]) -> None:
        """Print them."""
        for answer in answers:
            if len(answers) > 1:
                print(f"# {answer.name}")
            print(answer.text)
            for line in answer.remarks:
                print(f"# {line}")
        sys.stdout.flush()

    def note(self, line: str) -> None:
        """Beside the replies."""
        print(line, file=sys.stderr, flush=True)


class JsonLines(Plain):
    """A JSON object for every prompt."""

    def __init__(self) -> None:
        self._asked: dict[str, Any] = {}

    def asked(self, text: str, row: RunRow | None) -> None:
        """Keep it for the object."""
        place = {} if row is None else {"split": row.split, "row": row.number, "id": row.content["id"]}
        self._asked = {"prompt": text, **place}

    def show(self, answers: Sequence[Answer]) -> None:
        """Print the object."""
        replies = [answer.record() for answer in answers]
        print(json.dumps({**self._asked, "replies": replies}, ensure_ascii=False), flush=True)


class Terminal:
    """Replies as they come: one as text, two in columns where the terminal is wide, else one after the other."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)

    def asked(self, text: str, row: RunRow | None) -> None:
        """Show the row."""
        if row is not None:
            self._dim(f"row {row.number} of {row.split}")
            self._say(text)

    def follow(self, replies: Sequence[Reply], stop: threading.Event) -> None:
        """Show what comes."""
        if len(replies) > 1 and self._console.width >= _WIDE:
            self._columns(replies, stop)
            return
        for reply in replies:
            if len(replies) > 1:
                self._dim(reply.speaker.name)
            self._stream(reply, replies, stop)

    def show(self, answers: Sequence[Answer]) -> None:
        """Two replies in columns for good, or what is to be said of those that were shown as they came."""
        if len(answers) > 1 and self._console.width >= _WIDE:
            self._console.print(_table([(a.name, a.text, a.remarks) for a in answers]))
            return
        for answer in answers:
            who = f"{answer.name}: " if len(answers) > 1 else ""
            for line in answer.remarks:
                self._dim(who + line)

    def note(self, line: str) -> None:
        """Between the replies."""
        self._dim(line)

    def _stream(self, reply: Reply, replies: Sequence[Reply], stop: threading.Event) -> None:
        shown = ""
        while True:
            done = reply.done
            text = visible(reply.text)
            # Some tokenizers write a character another way once the next token is there.
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
    """Text of a model without characters that a terminal would obey."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)


def _table(columns: Sequence[tuple[str, str, list[str]]]) -> Any:
    """(name, text, remarks) beside each other."""
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
    """A moment, at the end of which the replies are cut if somebody wants them to be."""
    time.sleep(_REFRESH_S)
    if stop.is_set():
        for reply in replies:
            reply.stop()
