"""Errors that are reported to users in one line without a traceback, and helpers for their messages."""

from __future__ import annotations

import re
from difflib import get_close_matches
from enum import StrEnum
from typing import ClassVar, Iterable


def printable(text: str) -> str:
    """Return the text with non-printable characters, such as terminal escape sequences, written as ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def printable_lines(text: str) -> str:
    """Apply ``printable`` to every line of the text. Line breaks are kept."""
    return "\n".join(map(printable, text.split("\n")))


SHORTEST_SECRET = 6
"""Minimum length of a secret. Messages show shorter values of environment variables, such as numbers."""
_secrets: dict[str, str] = {}
"""Interpolations in this process's configs, by the value of the environment variable that they read."""
# Bounded and possessive, because backtracking would take quadratic time for a long text from a server.
_USER = re.compile(r"(\w{0,12})(://)([^/\s:@?#]*+)(:?)[^/\s?#]*@")
_URL = re.compile(r"://[^\s'\"]+")
_PARAMETER = re.compile(r"([?&;#]([^=&;#?\s'\"]+)=)[^&;#\s'\"]+")
_HARMLESS = frozenset(
    "api-version config download format lang limit n offset page raw ref region revision split sslmode subset "
    "timeout type v version".split()
)
"""Names of query parameters whose values are shown in messages."""
_SECRET_PARAMETER = re.compile(
    r"([?&][\w.-]*(?:key|token|secret|passw(?:or)?d|pwd|sig|signature|auth|credentials?)=)[^&\s#'\"]+", re.IGNORECASE
)
"""Parameters to mask in texts without a scheme, which may be other things than URLs."""


def remember_secret(value: str, written: str) -> None:
    """Hide the value of an environment variable in messages, which show the interpolation ``written`` instead."""
    if len(value) >= SHORTEST_SECRET:
        _secrets[value] = written


def without_secrets(text: str) -> str:
    """Return the text with secrets (``remember_secret``) replaced by interpolations, and URL credentials masked."""
    text = mask_urls(text)
    for value in sorted(_secrets, key=len, reverse=True):
        for form in (value, repr(value)[1:-1]):
            text = text.replace(form, _secrets[value])
    return text


def mask_urls(text: str) -> str:
    """Return the text with the credentials in URLs masked.

    Credentials are a password or token before the host, and the values of all query and fragment parameters except
    those with harmless names. User names of ssh and sftp are not masked.
    """
    if "://" in text:
        text = _USER.sub(_masked_user, text)
        text = _URL.sub(lambda url: _PARAMETER.sub(_masked_parameter, url[0]), text)
    return _SECRET_PARAMETER.sub(r"\1***", text)


def _masked_user(found: re.Match[str]) -> str:
    scheme, border, user, colon = found.groups()
    if scheme in ("ssh", "sftp") and not colon:
        return found[0]
    return f"{scheme}{border}{user if colon else ''}{colon}***@"


def _masked_parameter(found: re.Match[str]) -> str:
    return found[0] if found[2].lower() in _HARMLESS else f"{found[1]}***"


class FailureKind(StrEnum):
    """Cause of a failed run, which determines the remedy."""

    INFRASTRUCTURE = "infrastructure"
    """Processes, devices, nodes or the network failed. The run may succeed if it is restarted."""
    CONFIG = "config"
    """Config or data must be changed."""
    USER_CODE = "user code"
    """Environments, rewards or user-defined functions must be changed."""
    NUMERICS = "numerics"
    """The loss, the weights or a monitored metric left the valid range. The same steps would fail again."""


class GdpoError(Exception):
    """Base class of errors that are reported in one line."""

    kind: ClassVar[FailureKind | None] = None
    """Kind of the failure. None means the kind of the error that caused this error (``kind_of``)."""

    def __str__(self) -> str:
        return printable(" ".join(without_secrets(super().__str__()).split()))


class ConfigError(GdpoError):
    """The config or an input file is invalid. The message has the form ``key: problem; remedy``.

    A problem without a key is raised where the key is not known. A caller that knows it adds it by ``within``.
    """

    kind = FailureKind.CONFIG

    @property
    def key(self) -> str:
        """Config key, command option or file at the start of the message. Empty if the message starts with none."""
        key, separator, _ = str(self).partition(": ")
        return key if separator and " " not in key else ""

    @property
    def problem(self) -> str:
        """The message without the key. It contains the remedy, if there is one."""
        return str(self).removeprefix(f"{self.key}: ")

    def within(self, key: str) -> ConfigError:
        """Return the error of ``key`` that has this error as its problem."""
        return ConfigError(f"{key}: {self}")


class RunError(GdpoError):
    """A run failed after its start. The message names the failed component and where to find details."""


START_AGAIN = "; restart the run to resume from its last checkpoint"
"""Suffix of messages about a lost process or node in runs without a supervisor."""


class InfrastructureFailed(RunError):
    """A process, a device, a node or the network failed for reasons unrelated to its task."""

    kind = FailureKind.INFRASTRUCTURE


class UserCodeFailed(RunError):
    """User code failed or violated its interface."""

    kind = FailureKind.USER_CODE


class NumericsFailed(RunError):
    """The loss, the weights or a monitored metric left the valid range."""

    kind = FailureKind.NUMERICS


class EngineFailed(InfrastructureFailed):
    """An engine's process or device failed. A replacement may succeed."""


def kind_of(error: BaseException | None) -> FailureKind | None:
    """Return the kind of the first error with a kind in the chain of causes, or None if no error has a kind."""
    while error is not None:
        if isinstance(error, GdpoError) and error.kind is not None:
            return error.kind
        error = error.__cause__
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the known name closest to ``name``, or a list of all known names."""
    known = sorted(known)
    match = get_close_matches(name, known, n=1)
    if match:
        return f"; did you mean {match[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def message_line(error: BaseException) -> str:
    """Return the first non-blank line of the exception's message, or the exception's type if the message is empty."""
    try:
        text = str(error)
    except Exception:  # the method of a user-defined exception may fail
        text = ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the exception's type and the first line of its message, which is cut to 300 characters."""
    name = type(error).__name__
    line = message_line(error)
    return name if line == name else f"{name}: {line[:300]}"
