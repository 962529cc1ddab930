"""A reply of megabytes: neither its depth nor its values hold up the event loop, or the request's time limit."""

from __future__ import annotations

import asyncio
import random
import sys
import threading

import pytest

from gdpo_nemo.environments import server_replies
from gdpo_nemo.environments.http_client import HttpClient
from gdpo_nemo.environments.server_replies import Failure, FailureKind

DEADLINE_S = 20
BODY = b"[" + b",".join([b"0.5"] * 300_000) + b"]"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY))
    await writer.drain()
    writer.close()


async def _asked(timeout_s: float, then) -> object:
    """Ask a server that answers with ``BODY``; ``then`` runs on the loop meanwhile."""
    client = HttpClient(1, 1 << 24, 64)
    async with await asyncio.start_server(_answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        meanwhile = asyncio.create_task(then())
        try:
            return await client.get(f"http://127.0.0.1:{port}/", timeout_s)
        finally:
            meanwhile.cancel()
            await client.close()


def test_large_reply_is_parsed_while_the_loop_continues(monkeypatch):
    parsing, seen = threading.Event(), threading.Event()
    parse = server_replies.files.parse_json

    def slow(body, half_pairs):
        parsing.set()
        assert seen.wait(DEADLINE_S), "the loop waits for the parser"
        return parse(body, half_pairs)

    async def see():
        while not parsing.is_set():
            await asyncio.sleep(0.01)
        seen.set()

    monkeypatch.setattr(server_replies.files, "parse_json", slow)
    assert len(asyncio.run(_asked(DEADLINE_S, see))) == 300_000


def test_large_reply_that_is_parsed_for_too_long_is_a_timeout(monkeypatch):
    parsing, over = threading.Event(), threading.Event()

    def slow(body, half_pairs):
        parsing.set()
        over.wait(DEADLINE_S)

    async def ask():
        with pytest.raises(Failure) as failed:
            await _asked(2.0, asyncio.Event().wait)
        over.set()
        return failed.value.kind

    monkeypatch.setattr(server_replies.files, "parse_json", slow)
    assert asyncio.run(ask()) is FailureKind.TIMEOUT and parsing.is_set()


def test_depth_of_a_large_reply_is_found_without_a_loop_over_its_brackets():
    body = b"[" + b",".join([b'{"a":[]}'] * 20_000) + b"]"
    lines = []

    def count(frame, event, _):
        lines.append(event)
        return count

    sys.settrace(count)
    try:
        assert not server_replies.depth_exceeds(body, 3) and server_replies.depth_exceeds(body, 2)
    finally:
        sys.settrace(None)
    assert len(lines) < 200


def test_depth_is_that_of_brackets_outside_of_strings():
    draw = random.Random(0)
    for _ in range(300):
        body = bytes(draw.choices(b'[]{}"\\a', k=draw.randrange(60)))
        for limit in range(5):
            assert server_replies.depth_exceeds(body, limit) == _depth_exceeds(body, limit), (body, limit)


def _depth_exceeds(body: bytes, limit: int) -> bool:
    """The definition, byte by byte."""
    depth, text, escaped = 0, False, False
    for letter in body.decode():
        if text:
            text = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        elif letter == '"':
            text, escaped = True, False
        elif letter in "[{":
            depth += 1
            if depth > limit:
                return True
        elif letter in "]}":
            depth -= 1
    return False
