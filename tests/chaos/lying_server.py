"""A NeMo Gym resources server that adds two numbers, and lies about a sample now and then: about the same ones in every
run."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hostile_gym_server import Hosted, hostile_app

LIES = {
    "lie-nan": "is not finite",
    "lie-infinite": "is not finite",
    "lie-text": "is of type str, not a number",
    "lie-components_list": "is not in the reply",
    "lie-a_list": "expected a JSON object as the reply, got list",
    "lie-html": "not JSON",
    "lie-deep": "nested more than",
    "lie-big_unannounced": "max_reply_bytes",
    "lie-cut_short": "attempts",
    "lie-errors": "HTTP 500",
    "lie-redirect": "redirects are not followed",
    "lie-hang": "no reply within",
    "lie-mask_sample": "mask_sample",
}
"""Misdeeds of ``hostile_gym_server`` behind a prefix, and a part of the reason for which the sample is masked."""
_OF = 1040
"""One sample in so many meets each of the lies."""
_QUESTION = re.compile(r"What is (\d+) \+ (\d+)\?")
_ANSWER = re.compile(r"<answer>([^<]*)</answer>")
_TAGS = re.compile(r"\s*<think>[^<]*</think>\s*<answer>[^<]*</answer>\s*")
_RULES = "Think inside <think> and </think>. Then give one whole number inside <answer> and </answer>."


def lie_of(question: str, sample: int, text: str) -> str | None:
    """What the server says of this completion instead of the truth; None: it says that."""
    drawn = zlib.crc32(f"{question} {sample} {text}".encode()) % _OF
    return list(LIES)[drawn] if text and drawn < len(LIES) else None


def lie_about(sample: Mapping[str, Any]) -> str | None:
    """As ``lie_of``, of a record of a rollout."""
    asked = _QUESTION.search(sample["prompt"])
    return lie_of(asked.group(), sample["sample_index"], sample["completion"]) if asked else None


@contextmanager
def lying_server(folder: Path) -> Iterator[list[str]]:
    """Serve it, and yield what makes ``configs/gdpo_nemo_gym_plugin.yaml`` ask it."""
    rows = folder / "sums.jsonl"
    if not rows.exists():
        rows.write_text("".join(json.dumps(row) + "\n" for row in _rows(2000)))
    server = Hosted(hostile_app(judge=_judge))
    try:
        yield [
            f"env.sums.servers={{tagged_sum: '{server.url}'}}", "env.sums.request_timeout_s=3", "env.sums.retries=1",
            f"env.sums.max_reply_bytes={2**20}", f"data.train.path={rows}",
        ]  # fmt: skip
    finally:
        server.stop()


def _rows(count: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(0)
    for _ in range(count):
        first, second = draw.randrange(1000), draw.randrange(1000)
        system, user = {"role": "system", "content": _RULES}, {"role": "user"}
        asked = [system, {**user, "content": f"What is {first} + {second}?"}]
        yield {"responses_create_params": {"input": asked}, "expected_answer": first + second}


def _judge(body: Mapping[str, Any]) -> dict[str, Any]:
    """What ``hostile_app`` has to know: the misdeed, and the truth."""
    text = "".join(part["text"] for item in body["response"]["output"] for part in item.get("content", []))
    sample = int(body["response"]["id"].removeprefix("resp_"))
    question = body["responses_create_params"]["input"][-1]["content"]
    answers = _ANSWER.findall(text)
    number = (answers[-1] if answers else text.rpartition("\n")[2]).strip()
    whole = number.isdecimal() and number.isascii() and len(number) < 18
    truth = {
        "correctness": float(whole and int(number) == body["expected_answer"]),
        "whole_number": float(whole),
        "tags": float(bool(_TAGS.fullmatch(text))),
    }
    reply = {"reward": sum(truth.values()), "reward_components": truth}
    misdeed = (lie_of(question, sample, text) or "none").removeprefix("lie-")
    return {"misdeed": misdeed, "value": 0.0, "honest": reply}
