"""Tools and reward functions of the tests of the environment ``tools``."""

import asyncio
import builtins
import threading


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def fetch(city: str) -> dict:
    """
    Fetches the weather.

    Args:
        city: Name of the city.
    """
    return {"city": city, "sky": "blue"}


def hang(seconds: float) -> str:
    """
    Waits for something that never comes.

    Args:
        seconds: Ignored.
    """
    try:
        threading.Event().wait()
    except Exception:
        return "swallowed"
    return "over"


def leave(status: int) -> str:
    """
    Calls sys.exit.

    Args:
        status: The status.
    """
    raise SystemExit(status)


def interrupt(how: str) -> str:
    """
    Raises what is not an Exception.

    Args:
        how: The exception.
    """
    raise getattr(builtins, how)("over")


async def where(nothing: str = "") -> int:
    """
    Names its event loop.

    Args:
        nothing: Ignored.
    """
    return id(asyncio.get_running_loop())


async def block(nothing: str = "") -> str:
    """
    Blocks the event loop.

    Args:
        nothing: Ignored.
    """
    threading.Event().wait()
    return "over"


def later(nothing: str = "") -> object:
    """
    Returns a coroutine.

    Args:
        nothing: Ignored.
    """
    return where()


def pour(characters: int) -> str:
    """
    Returns a long text.

    Args:
        characters: Its length.
    """
    return "x" * characters


def surrogate(nothing: str = "") -> str:
    """
    Returns half of a character.

    Args:
        nothing: Ignored.
    """
    return "\ud83d"


def undocumented(a: int) -> int:
    return a


def untyped(a):
    """
    Has no hint.

    Args:
        a: A thing.
    """
    return a


def right(completions, answer, **columns):
    """1 if the last message holds the answer."""
    return [float(str(a) in talk[-1]["content"]) for talk, a in zip(completions, answer)]


def called(completions, **columns):
    """Calls that succeeded."""
    said = [[m["content"] for m in talk if m["role"] == "tool"] for talk in completions]
    return [float(sum(not text.startswith("{'error'") for text in texts)) for texts in said]


def names(completions, log_extra, **columns):
    """Log the conversation."""
    log_extra("talk", completions)
    return [0.0] * len(completions)


def rows():
    """Return prompts."""
    return [{"prompt": "2+3?", "answer": 5}]
