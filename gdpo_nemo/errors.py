"""The errors a user is meant to read: one sentence each, printed without a traceback.

The command line turns ``ConfigError`` into exit status 2 and ``RunError`` into exit status 1. Anything else that
escapes is a defect of the program and keeps its traceback.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import ClassVar, TypeVar

T = TypeVar("T")


def printable(text: str) -> str:
    """The text with escape sequences, and whatever else a terminal would act on, written out (``\\x1b``)."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def printable_lines(text: str) -> str:
    """Return the text with every line made printable; its line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


SHORTEST_SECRET = 6
"""Characters; shorter values of the environment are numbers, names and switches, which messages may show."""
_secrets: dict[str, str] = {}
"""Values of the environment that this process has read into a config -> the interpolation each came by."""
_USER = re.compile(r"(?<!ssh)(?<!sftp)(://)([^/\s:@?#]*)(:?)[^/\s@?#]*@")
_PARAMETER = re.compile(
    r"([?&][\w.-]*(?:key|token|secret|passw(?:or)?d|pwd|sig|signature|auth|credentials?)=)[^&\s#'\"]+", re.IGNORECASE
)


def remember_secret(value: str, written: str) -> None:
    """Have ``value``, which came from the environment, shown as it was ``written``: ``${oc.env:NAME}``."""
    if len(value) >= SHORTEST_SECRET:
        _secrets[value] = written


def without_secrets(text: str) -> str:
    """Return the text with values of the environment as they were written, and with credentials in URLs masked."""
    text = mask_urls(text)
    for value in sorted(_secrets, key=len, reverse=True):
        for form in (value, repr(value)[1:-1]):
            text = text.replace(form, _secrets[value])
    return text


def mask_urls(text: str) -> str:
    """Return the text with the credentials of URLs masked.

    Credentials are a password before the host, a token in its place, and query parameters named like a key. The user
    names of ssh are not secret.
    """
    if "://" in text:
        text = _USER.sub(lambda found: f"://{found[2] if found[3] else ''}{found[3]}***@", text)
    return _PARAMETER.sub(r"\1***", text)


class FailureKind(StrEnum):
    """Why a run failed, as far as that decides what helps."""

    INFRASTRUCTURE = "infrastructure"
    """Processes, devices, nodes or the network between them: the same run, started again, may get through."""
    CONFIG = "config"
    """Config or data: they have to be changed."""
    USER_CODE = "user code"
    """Environments, rewards, functions of the user's: they have to be changed."""
    NUMERICS = "numerics"
    """Loss, weights or a watched metric left their range; the same steps would lead there again."""


class GdpoError(Exception):
    """Base of the errors that are explained in one line."""

    kind: ClassVar[FailureKind | None] = None
    """None: that of the error it was raised from (``kind_of``), if any."""

    def __str__(self) -> str:
        return printable(" ".join(without_secrets(super().__str__()).split()))


class ConfigError(GdpoError):
    """The configuration cannot be run as written; the text names the key and what to change."""

    kind = FailureKind.CONFIG


class RunError(GdpoError):
    """A run failed after it had started; the text says what failed and where to look."""


START_AGAIN = "; start the run again to resume from its last checkpoint"
"""What the sentence of a lost process or node ends with, for those who have no supervisor."""


class InfrastructureFailed(RunError):
    """Processes, devices, nodes or the network failed, and not what they were given to do."""

    kind = FailureKind.INFRASTRUCTURE


class UserCodeFailed(RunError):
    """The user's own code broke its contract."""

    kind = FailureKind.USER_CODE


class NumericsFailed(RunError):
    """Numbers left their range."""

    kind = FailureKind.NUMERICS


class EngineFailed(InfrastructureFailed):
    """An engine broke for reasons of its own process or device; another one in its place may do."""


def kind_of(error: BaseException | None) -> FailureKind | None:
    """The kind of an error, or of the first one that has any among those that it was raised from; None: unknown."""
    while error is not None:
        if isinstance(error, GdpoError) and error.kind is not None:
            return error.kind
        error = error.__cause__
    return None


def present(value: T | None, what: str) -> T:
    """Return ``value``. Raises RuntimeError where it is None: an order that the program itself got wrong."""
    if value is None:
        raise RuntimeError(f"{what} was used before it was started")
    return value
