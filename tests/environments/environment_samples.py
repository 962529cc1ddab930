"""Hand-made trajectories for the environment tests."""

from pathlib import Path
from typing import Any, cast

import numpy as np

from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.data.replies import ReplyParser
from gdpo_nemo.environments.nemo_gym.rows import ROW, read_row

REPLIES = ReplyParser(cast(Any, object()), "hermes")
"""Reads calls in the format of Hermes."""

HOSTILE = str(Path(__file__).with_name("hostile_environments.py"))


def trajectory(
    text, environment="env", prompt_id="p", index=0, finish_reason="stop", tokens=None, messages=None, **fields
):
    """A completion `text` of `tokens` tokens (one per character by default) to a prompt with these columns."""
    prompt = Prompt(prompt_id, np.arange(3, dtype=np.int32), "prompt " + prompt_id, environment, fields, messages)
    count = len(text) if tokens is None else tokens
    made = Trajectory(
        prompt, index, np.arange(count, dtype=np.int32), np.zeros(count, np.float32), 0, text, finish_reason
    )
    if tools := read_row(fields[ROW]).get("tools") if ROW in fields else None:
        made.reply = REPLIES.parse(text, tools)
    return made


def trajectories(texts, environment="env", group=2):
    """One trajectory per text, `group` of them to a prompt."""
    return [trajectory(text, environment, f"p{i // group}", i % group) for i, text in enumerate(texts)]
