"""Parsing of replies from untrusted servers, with a limit on nesting, and the kinds of failures."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

import numpy as np

from gdpo_nemo.utils import files
from gdpo_nemo.utils.errors import without_secrets

# This pattern also matches an unterminated string, so that no input is scanned twice.
_STRING = re.compile(rb'"(?:[^"\\]|\\.|\\\Z)*+(?:"|\Z)', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_LARGE = 1 << 16
"""Minimum number of bytes for parsing in a thread. For smaller replies, starting a thread takes longer than parsing."""


async def parse_reply(body: bytes, max_depth: int) -> Any:
    """Run ``parse_json`` without blocking the event loop. Large replies are parsed in a thread, which is not awaited if
    the task is cancelled."""
    if len(body) < _LARGE:
        return parse_json(body, max_depth)
    return await asyncio.to_thread(parse_json, body, max_depth)


def parse_json(body: bytes, max_depth: int) -> Any:
    """Return the JSON value in ``body``.

    Raises:
        Failure: BAD_REPLY if the body is not valid JSON in UTF-8, contains a key twice in an object, or is nested more
            than ``max_depth`` levels deep.
    """
    if depth_exceeds(body, max_depth):
        raise Failure(FailureKind.BAD_REPLY, f"the reply is nested more than {max_depth} levels deep")
    try:
        return files.parse_json(body, half_pairs=True)
    except files.RepeatedKey as error:
        raise Failure(FailureKind.BAD_REPLY, f"the reply is ambiguous: {error}") from None
    except (ValueError, RecursionError):
        start = printable(body[:_LARGE].decode("utf-8", "replace"), 40)
        raise Failure(FailureKind.BAD_REPLY, f"the reply is not JSON: it begins with {start!r}") from None


def depth_exceeds(body: bytes, limit: int) -> bool:
    """Return whether JSON brackets outside strings are nested deeper than ``limit``. Takes linear time."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    brackets = np.frombuffer(_STRING.sub(b"", body).translate(None, _NO_BRACKETS), np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    depths = np.cumsum(np.where(opens, 1, -1))
    return bool(depths.max(initial=0) > limit)


def check_measurement(reply: Mapping[str, Any]) -> None:
    """Raise Failure(VERIFIER) if a NeMo Gym server marks the reward in its reply as invalid.

    The reply then has status 200 and a reward of 0. NeMo Gym marks it with ``mask_sample`` and ``failure_kind``
    (version 0.7), ``_ng_failure_class`` (from 0.5) or ``instance_config.mask_sample``.
    """
    kind = reply.get("failure_kind") or reply.get("_ng_failure_class")
    config = reply.get("instance_config")
    masked = reply.get("mask_sample") or (isinstance(config, Mapping) and config.get("mask_sample"))
    if not kind and not masked:
        return
    detail = str(kind or "mask_sample")
    reason = reply.get("failure_reason") or reply.get("_ng_failure_judge_error")
    if reason:
        detail += f": {reason}"
    raise Failure(FailureKind.VERIFIER, printable(detail))


def finite_number(value: Any, subject: str) -> float:
    """Convert a JSON number or boolean of a reply to float. Raises Failure(BAD_REPLY)."""
    if not isinstance(value, (int, float)):
        raise Failure(
            FailureKind.BAD_REPLY, f"{printable(subject, 60)} is of type {type(value).__name__}, not a number"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Failure(FailureKind.BAD_REPLY, f"{printable(subject, 60)} is not finite")
    return number


def error_text(body: Any) -> str:
    """Return the reason in the body of an error reply, as one line.

    The reason is the ``message`` of OpenAI's ``error``, or FastAPI's ``detail`` with the invalid fields of a request.
    Another body is returned as a short excerpt.
    """
    error = body.get("error", body) if isinstance(body, Mapping) else body
    if isinstance(error, Mapping) and isinstance(error.get("message"), str):
        return printable(error["message"])
    detail = body.get("detail") if isinstance(body, Mapping) else None
    if not isinstance(detail, list):
        return printable(str(detail if detail is not None else body))
    faults = []
    for entry in detail[:3]:
        if isinstance(entry, Mapping):
            location = entry.get("loc")
            path = "?"
            if isinstance(location, list):
                path = ".".join(str(part) for part in location if part != "body")
            faults.append(f"{path}: {entry.get('msg')}")
    more = f" and {len(detail) - 3} more" if len(detail) > 3 else ""
    return printable("; ".join(faults), 300) + more


def retry_after_s(value: str | None) -> float | None:
    """Return the seconds to wait from a ``Retry-After`` header, or None if it is missing or invalid."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = parsedate_to_datetime(value)
        except ValueError:
            return None
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        seconds = (when - datetime.now(UTC)).total_seconds()
    return None if seconds != seconds else max(0.0, seconds)


class FailureKind(StrEnum):
    """Kind of a failed verification, which is the first word of a failed trajectory's ``detail``."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    SERVER_ERROR = "server_error"
    RATE_LIMITED = "rate_limited"
    REJECTED = "rejected"
    """Status 4xx: the request is invalid. A retry would fail again."""
    REDIRECT = "redirect"
    TOO_LARGE = "too_large"
    BAD_REPLY = "bad_reply"
    """The reply is not JSON, is nested too deeply, or has a reward that is not a finite number."""
    MISSING_REWARD = "missing_reward"
    VERIFIER = "verifier"
    """The server reports that its reward is invalid."""
    NOT_TRIED = "not_tried"
    STRAGGLER = "straggler"


RETRIED = frozenset({FailureKind.TIMEOUT, FailureKind.CONNECTION, FailureKind.SERVER_ERROR, FailureKind.RATE_LIMITED})
"""Infrastructure failures, for which a retry may succeed."""


class Failure(Exception):
    """A verification failed and did not give a reward.

    Args:
        detail: message for the user: one line without secrets. The message quotes at most a few hundred characters of
            the server's reply.
        retry_after_s: seconds to wait before a retry, as requested by the server (None if the server did not request a
            delay).
        status: HTTP status of the reply (None without a reply).
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
        """True if a retry may succeed."""
        return self.kind in RETRIED


def printable(text: str, limit: int = 200) -> str:
    """Return untrusted text as one line of at most ``limit`` printable characters, without secrets."""
    # Secrets are masked before the text is cut, because a partial secret would not be found.
    line = without_secrets(" ".join(text.split()))
    return "".join(character if character.isprintable() else "?" for character in line[:limit])
