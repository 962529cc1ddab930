"""Rows of axolotl's supervised forms, as functions that ``data.<split>.type`` names.

The texts are Stanford Alpaca's, which axolotl 067b021c writes around instructions (``prompters.py``).
"""

from __future__ import annotations

from typing import Any, Mapping

_TASK = "Below is an instruction that describes a task"
_CONTEXT = ", paired with an input that provides further context"
_REQUEST = ". Write a response that appropriately completes the request."


def alpaca_chat(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the same with the names of two speakers (``type: alpaca:chat``)."""
    context = row.get("input") or ""
    asked = f"USER: {row['instruction']}\n" + (f"{context}\n" if context else "")
    prompt = f"SYSTEM: {_TASK}{_CONTEXT * bool(context)}{_REQUEST}\n{asked}ASSISTANT:"
    return {"prompt": prompt, "completion": str(row["output"])}


def alpaca(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the prompt and the completion of a row with instruction, input and output (``type: alpaca``)."""
    context = row.get("input") or ""
    asked = f"### Instruction:\n{row['instruction']}\n\n"
    if context:
        asked += f"### Input:\n{context}\n\n"
    head = f"{_TASK}{_CONTEXT * bool(context)}{_REQUEST}"
    return {"prompt": f"{head}\n\n{asked}### Response:\n", "completion": str(row["output"])}
