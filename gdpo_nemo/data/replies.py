"""Reading what a server sent. Its bytes are untrusted: limited in size, in depth, and in what is made of them."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Mapping

import numpy as np

from gdpo_nemo.data.failures import Failure, FailureKind, printable

# Matches wherever it is tried, unterminated strings included, so that no input makes it go over the same bytes twice.
_STRING = re.compile(rb'"(?:[^"\\]|\\.|\\\Z)*+(?:"|\Z)', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_LARGE = 1 << 16
"""Bytes from which a reply is parsed in a thread of its own: it takes longer than to start one."""


async def parse_reply(body: bytes, max_depth: int) -> Any:
    """``parse_json``, for the event loop: a large reply is parsed in a thread. Cancelling does not wait for it."""
    if len(body) < _LARGE:
        return parse_json(body, max_depth)
    return await asyncio.to_thread(parse_json, body, max_depth)


def parse_json(body: bytes, max_depth: int) -> Any:
    """The JSON value in ``body``.

    Raises:
        Failure: BAD_REPLY for what is not UTF-8 or not JSON, or is nested more than ``max_depth`` deep.
    """
    if depth_exceeds(body, max_depth):
        raise Failure(FailureKind.BAD_REPLY, f"the reply is nested more than {max_depth} levels deep")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        start = printable(body[:60].decode("utf-8", "replace"), 40)
        raise Failure(FailureKind.BAD_REPLY, f"the reply is not JSON: it begins with {start!r}") from None


def depth_exceeds(body: bytes, limit: int) -> bool:
    """Return whether brackets outside of strings are nested deeper than ``limit``. Linear, without a loop of
    Python over the brackets."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    brackets = np.frombuffer(_STRING.sub(b"", body).translate(None, _NO_BRACKETS), np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    depths = np.cumsum(np.where(opens, 1, -1))
    return bool(depths.max(initial=0) > limit)


def check_measurement(reply: Mapping[str, Any]) -> None:
    """Raise Failure(VERIFIER) where a server marks its own reply as no valid measurement.

    Newer servers answer 200 with a reward of 0 and say so in other fields: ``mask_sample`` and ``failure_kind`` (0.7),
    ``_ng_failure_class`` (0.5 on), ``instance_config.mask_sample``.
    """
    kind = reply.get("failure_kind") or reply.get("_ng_failure_class")
    config = reply.get("instance_config")
    masked = reply.get("mask_sample") or (isinstance(config, Mapping) and config.get("mask_sample"))
    if not kind and not masked:
        return
    said = str(kind or "mask_sample")
    reason = reply.get("failure_reason") or reply.get("_ng_failure_judge_error")
    if reason:
        said += f": {reason}"
    raise Failure(FailureKind.VERIFIER, printable(said))


def validation_errors(body: Any) -> str:
    """What a 422 complains about: each field and its fault, from FastAPI's ``detail`` list; else a short excerpt."""
    detail = body.get("detail") if isinstance(body, Mapping) else None
    if not isinstance(detail, list):
        return printable(str(detail if detail is not None else body))
    faults = []
    for entry in detail[:3]:
        if isinstance(entry, Mapping):
            place = entry.get("loc")
            path = ".".join(str(part) for part in place if part != "body") if isinstance(place, list) else "?"
            faults.append(f"{path}: {entry.get('msg')}")
    more = f" and {len(detail) - 3} more" if len(detail) > 3 else ""
    return printable("; ".join(faults), 300) + more


def retry_after_s(value: str | None) -> float | None:
    """Seconds to wait by a ``Retry-After`` header, a number or a date; None where it is absent or makes no sense."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = parsedate_to_datetime(value)
        except ValueError:
            return None
        when = when if when.tzinfo else when.replace(tzinfo=timezone.utc)
        seconds = (when - datetime.now(timezone.utc)).total_seconds()
    return None if seconds != seconds else max(0.0, seconds)
