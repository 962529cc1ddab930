"""The ways in which a server can fail to give a verdict. None of them is a reward."""

from __future__ import annotations

from enum import StrEnum


class FailureKind(StrEnum):
    """What went wrong; the first word of a failed trajectory's ``detail``."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    SERVER_ERROR = "server_error"
    RATE_LIMITED = "rate_limited"
    REJECTED = "rejected"
    """4xx: the request is wrong, and would be wrong again."""
    REDIRECT = "redirect"
    TOO_LARGE = "too_large"
    BAD_REPLY = "bad_reply"
    """Not JSON, too deep, or a reward that is no finite number."""
    MISSING_REWARD = "missing_reward"
    VERIFIER = "verifier"
    """The server says itself that its measurement is invalid."""
    NOT_TRIED = "not_tried"
    STRAGGLER = "straggler"


RETRIED = frozenset({FailureKind.TIMEOUT, FailureKind.CONNECTION, FailureKind.SERVER_ERROR, FailureKind.RATE_LIMITED})
"""Failures of the infrastructure. The others would only be repeated."""


class Failure(Exception):
    """No verdict, and why.

    Args:
        kind: what went wrong.
        detail: one line for a person; holds no secret and at most a few hundred characters of the server's reply.
        retry_after_s: seconds after which the server wants to be asked again.
        status: HTTP status, where there was one.
    """

    def __init__(
        self, kind: FailureKind, detail: str, *, retry_after_s: float | None = None, status: int | None = None
    ):
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.status = status

    @property
    def retried(self) -> bool:
        """Whether another attempt may end better."""
        return self.kind in RETRIED


def printable(text: str, limit: int = 200) -> str:
    """Text from outside as one line of printable characters, at most ``limit`` of them."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "?" for character in line[:limit])
