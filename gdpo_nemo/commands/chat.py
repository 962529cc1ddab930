"""``gdpo-nemo chat``: talk to a run's weights, a checkpoint or any model, or to two of them at once.

Replies come from the engine that training uses, sampled as the run samples. On a terminal they are shown as they come;
in a pipe every line is a prompt, and replies are plain text or JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Iterator, Sequence

from gdpo_nemo.commands.arguments import add_overrides, add_verbosity, say, verbosity
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.observe.display import covered, shown
from gdpo_nemo.phases import phase

if TYPE_CHECKING:
    from gdpo_nemo.commands.chat_screen import Screen
    from gdpo_nemo.commands.run_rows import RunRow, RunRows
    from gdpo_nemo.commands.speakers import Reply, Source, Speaker
    from gdpo_nemo.data.records import Trajectory

HELP = (
    "/row [train|validation] [N]: ask a row of the run's data, or the next one; /reset: begin a new conversation; "
    "/quit or Ctrl-D: end; Ctrl-C: stop the reply"
)
SPLITS = ("train", "validation")


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("chat", help="talk to a run's weights, or any model, or two side by side")
    source = "the folder of a run, one of its checkpoints, or a Hugging Face folder"
    command.add_argument("source", metavar="SOURCE", help=source)
    command.add_argument("--against", metavar="SOURCE", help="a second model, which is asked the same")
    command.add_argument("--config", metavar="FILE", help="default: config.yaml of the run that SOURCE lies in")
    command.add_argument("--step", type=int, metavar="N", help="the run's checkpoint of that step; default: its newest")
    command.add_argument(
        "--row", type=int, metavar="N", help="begin with a row of the run's data, and show its rewards"
    )
    command.add_argument("--split", choices=SPLITS, help="of --row; default: validation where the run has one")
    command.add_argument("--temperature", type=float, metavar="T", help="default: the run's; 0 is greedy")
    command.add_argument("--max-new-tokens", type=int, metavar="N", help="of a reply; default: the run's")
    command.add_argument("--seed", type=int, metavar="N", help="default: the run's; equal seeds, equal replies")
    command.add_argument("--system", metavar="TEXT", help="system message; default: the run's; '': none")
    command.add_argument("--json", action="store_true", help="print a JSON object for every prompt")
    add_verbosity(command)
    add_overrides(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends."""
    _check_numbers(arguments)
    with contextlib.ExitStack() as stack:
        with shown(sys.stderr, verbosity(arguments)) as display:
            # Elsewhere than on a terminal a command that is refused writes its one line and nothing else.
            with contextlib.nullcontext() if sys.stderr.isatty() else covered():
                with phase("imports"):
                    from gdpo_nemo.commands.run_rows import RunRows
                    from gdpo_nemo.commands.speakers import on_this_machine
                with phase("model"):
                    sources = _sources(arguments)
                rows = RunRows(sources[0].config if sources[0].of_a_run else None)
                first = None if arguments.row is None else rows.row(arguments.split, arguments.row)
                on_this_machine(sources)
            talking = _started(arguments, sources, rows, stack)
            stack.callback(rows.close)  # before the session, which leaves nothing of this process in shared memory
            display.write(display.ready())
        screen = _screen(arguments.json)
        chat = Chat(talking, rows, screen, sources[0].config.run.seed if arguments.seed is None else arguments.seed)
        _greet(sources, screen)
        if first is not None:
            chat.ask(first)
        chat.answer(_lines())
    return 0


_MOST_TOKENS = 10**9
_LARGEST_SEED = 2**62


def _check_numbers(arguments: argparse.Namespace) -> None:
    if arguments.temperature is not None and not 0 <= arguments.temperature < float("inf"):
        raise ConfigError(f"--temperature: must be 0 (greedy) or more, not {arguments.temperature:g}")
    if arguments.max_new_tokens is not None and not 1 <= arguments.max_new_tokens <= _MOST_TOKENS:
        raise ConfigError(
            f"--max-new-tokens: must be at least 1 and at most {_MOST_TOKENS:,}, not {arguments.max_new_tokens}"
        )
    if arguments.seed is not None and not 0 <= arguments.seed <= _LARGEST_SEED:
        raise ConfigError(f"--seed: must be 0 or more and at most {_LARGEST_SEED:,}, not {arguments.seed}")
    if arguments.split is not None and arguments.row is None:
        raise ConfigError("--split: says of what --row is, which is not given")


def _sources(arguments: argparse.Namespace) -> list[Source]:
    """One model, or two."""
    from gdpo_nemo.commands.speakers import read_source

    sources = [read_source(Path(arguments.source), arguments.config, arguments.step, arguments.overrides)]
    if arguments.against is not None:
        sources.append(read_source(Path(arguments.against), None, None, arguments.overrides))
    return sources


def _started(
    arguments: argparse.Namespace,
    sources: Sequence[Source],
    rows: RunRows,
    stack: contextlib.ExitStack,
) -> list[Speaker]:
    """The models, ready to answer; gone when the stack is closed."""
    from gdpo_nemo.cluster.session import session
    from gdpo_nemo.commands.speakers import Speaker, sampling_of, weights_of

    sampling = sampling_of(sources[0].config, arguments.temperature, arguments.max_new_tokens)
    system = _system(arguments.system, sources[0], rows)
    stack.enter_context(session(sources[0].config.cluster))
    folders = [weights_of(source) for source in sources]
    talking = []
    for source, folder in zip(sources, folders):
        speaker = Speaker(source, folder, system, sampling, len(sources))
        stack.callback(speaker.close)
        talking.append(speaker)
    for speaker in talking:
        speaker.ready()
    return talking


def _system(given: str | None, source: Source, rows: RunRows) -> str | None:
    """The system message: what is given, else what the run put before its prompts."""
    dataset = source.config.data.train
    if given is not None or dataset.system_prompt is not None:
        return given if given is not None else dataset.system_prompt
    if not source.of_a_run:
        return None
    try:
        environments = rows.environments
    except ConfigError as error:  # the model can be talked to all the same
        say(f"note: without a system message of the run's environments: {error}", to_stderr=True)
        return None
    name = dataset.environment or (next(iter(environments)) if len(environments) == 1 else None)
    return environments[name].system_prompt if name is not None and name in environments else None


def _screen(as_json: bool) -> Screen:
    from gdpo_nemo.commands.chat_screen import JsonLines, Plain, Terminal

    if as_json:
        return JsonLines()
    return Terminal() if _interactive() else Plain()


def _interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _greet(sources: Sequence[Source], screen: Screen) -> None:
    for source in sources:
        if not source.chat:
            screen.note(f"{source.name}: no chat template, so it continues each text by itself, without a history")
    if _interactive():
        screen.note(HELP)


def _lines() -> Iterator[str]:
    """What is asked, line by line. On a terminal Ctrl-C gives up the line."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not _interactive():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() a history, where Python was built with it
    # What was started from a script's background inherits that Ctrl-C is ignored; who has a terminal types it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit ends)")


class Chat:
    """A conversation with one or two models.

    Args:
        seed: with the number of the prompt it determines a reply.
    """

    def __init__(self, speakers: Sequence[Speaker], rows: RunRows, screen: Screen, seed: int):
        self._speakers = speakers
        self._rows = rows
        self._screen = screen
        self._seed = seed
        self._asked = 0

    def answer(self, lines: Iterator[str]) -> None:
        """Answer prompts and commands until they end.

        Raises:
            GdpoError: a line that cannot be answered, where nobody sits at a terminal to try another.
        """
        for line in lines:
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            try:
                self._take(text)
            except ConfigError as error:
                if not _interactive():
                    raise
                self._screen.note(f"error: {error}")

    def _take(self, text: str) -> None:
        if not text:
            return
        if not text.startswith("/"):
            self.ask(text)
            return
        command, *words = text.split()
        if command == "/reset":
            for speaker in self._speakers:
                speaker.dialogue.reset()
        elif command == "/row":
            self.ask(self._rows.row(*_place(words)))
        elif command == "/help":
            self._screen.note(HELP)
        else:
            raise ConfigError(f"{command} is no command; {HELP}")

    def ask(self, asked: str | RunRow) -> None:
        """Show what the models say to a text, or to a row with its rewards. Raises GdpoError."""
        from gdpo_nemo.commands.chat_screen import Answer
        from gdpo_nemo.rollouts.rollout_batch import sample_seed

        row = None if isinstance(asked, str) else asked
        seed = sample_seed(self._seed, self._asked, 0)
        prompts = [
            asked if isinstance(asked, str) else self._rows.prompt(asked, speaker.tokenizer)
            for speaker in self._speakers
        ]
        questions = [speaker.question(prompt, seed) for speaker, prompt in zip(self._speakers, prompts)]
        self._asked += 1
        for speaker, question in zip(self._speakers, questions):
            if question.forgotten:
                self._screen.note(f"{speaker.name}: the context is full; it forgets {question.forgotten} of the oldest")
        self._screen.asked(asked if isinstance(asked, str) else asked.question, row)
        with _interruptible() as stop:
            replies = [speaker.ask(question) for speaker, question in zip(self._speakers, questions)]
            self._screen.follow(replies, stop)
        answers = []
        for reply in replies:
            reply.keep()
            answers.append(Answer(reply, self._verdict(reply), self._rows.weighted, row is not None))
        self._screen.show(answers)
        for line in [line for speaker in self._speakers for line in speaker.fleet.take_events()]:
            self._screen.note(line)

    def _verdict(self, reply: Reply) -> Trajectory | None:
        if isinstance(reply.asked, str) or reply.finish_reason == "stopped":
            return None
        return self._rows.verdict(reply.asked, reply.tokens, reply.text, reply.finish_reason)


def _place(words: Sequence[str]) -> tuple[str | None, int | None]:
    """(split, number) of ``/row [split] [N]``. Raises ConfigError."""
    splits = [word for word in words if word in SPLITS]
    numbers = [word for word in words if word.isdigit()]
    if len(splits) > 1 or len(numbers) > 1 or len(splits) + len(numbers) < len(words):
        raise ConfigError(f"/row {' '.join(words)}: expected /row [train|validation] [N]")
    return (splits[0] if splits else None), (int(numbers[0]) if numbers else None)


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets inside of the block on a terminal, instead of ending the program."""
    stop = threading.Event()
    if not _interactive():
        yield stop
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
