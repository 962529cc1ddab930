"""Functions for ``data.<split>.type`` that convert rows to the columns of ``docs/trainers.md``.

Configs that are translated from NeMo-RL and axolotl name these functions. They correspond to ``format_data`` of
NeMo-RL's classes in ``data/datasets``, and to axolotl's instruction formats. Saved configs contain their names,
so a function that is renamed needs an entry in ``_RENAMED`` of ``utils``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GSM8K_PROMPT = (
    "Work through the problem step by step, with every calculation, before you give the result. The result must be an "
    "integer. Reply in exactly this form, with all of the reasoning in the first block and only the integer in the "
    "second:\n<think>the reasoning, step by step</think>\n<answer>the integer</answer>"
)
"""System prompt that requests the format of environment ``gsm8k`` with option ``strict``, including the line break."""
_TASK = "Below is an instruction that describes a task"
_CONTEXT = ", paired with an input that provides further context"
_REQUEST = ". Write a response that appropriately completes the request."


def squad(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of SQuAD to a conversation with the context as system message."""
    texts = (row["context"], row["question"], row["answers"]["text"][0])
    return {"messages": [_message(role, text) for role, text in zip(("system", "user", "assistant"), texts)]}


def helpsteer3(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of HelpSteer3 to a pair. Without a preference, both answers are the first response."""
    preference = row["overall_preference"]
    context = row["context"]
    return {
        "prompt": [_message("user", context)] if isinstance(context, str) else context,
        "chosen": [_message("assistant", row["response2" if preference > 0 else "response1"])],
        "rejected": [_message("assistant", row["response2" if preference < 0 else "response1"])],
    }


def tulu3_preference(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of Tulu 3's preferences, whose answers are conversations that include the prompt, to a pair."""
    chosen, rejected = row["chosen"], row["rejected"]
    return {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def preference(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row with a context and two ranked completions (NeMo-RL's ``PreferenceDataset``) to a pair."""
    chosen, rejected = sorted(row["completions"], key=lambda found: found["rank"])
    return {"prompt": row["context"], "chosen": chosen["completion"], "rejected": rejected["completion"]}


def alpaca_chat(row: Mapping[str, Any]) -> dict[str, str]:
    """Format a row as prompt and completion with speaker names, like axolotl's ``type: alpaca:chat``."""
    context = row.get("input") or ""
    question = f"USER: {row['instruction']}\n" + (f"{context}\n" if context else "")
    prompt = f"SYSTEM: {_TASK}{_CONTEXT * bool(context)}{_REQUEST}\n{question}ASSISTANT:"
    return {"prompt": prompt, "completion": str(row["output"])}


def alpaca(row: Mapping[str, Any]) -> dict[str, str]:
    """Format a row with instruction, input and output as prompt and completion, like axolotl's ``type: alpaca``."""
    context = row.get("input") or ""
    question = f"### Instruction:\n{row['instruction']}\n\n"
    if context:
        question += f"### Input:\n{context}\n\n"
    head = f"{_TASK}{_CONTEXT * bool(context)}{_REQUEST}"
    return {"prompt": f"{head}\n\n{question}### Response:\n", "completion": str(row["output"])}


def gsm8k(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of GSM8K to a prompt and a completion in the format of ``GSM8K_PROMPT``."""
    solution, _, gold = str(row["answer"]).rpartition("####")
    answer = gold.strip().replace(",", "")
    return {
        "prompt": [_message("system", GSM8K_PROMPT), _message("user", row["question"])],
        "completion": f"<think>{solution.strip()}</think>\n<answer>{answer}</answer>",
    }


def clevr(row: Mapping[str, Any]) -> dict[str, str]:
    """Convert a row of CLEVR-CoGenT, whose image remains in the column ``image``, to a prompt and an answer."""
    solution = str(row["solution"])
    tagged = re.search(r"<answer>(.*?)</answer>", solution)
    return {"prompt": str(row["problem"]), "answer": (tagged[1] if tagged else solution).strip()}


def geometry3k(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of Geometry3K to a prompt with the first image of the row, and an answer."""
    prompt = str(row["problem"]).replace("<image>", "")
    return {"prompt": prompt, "images": row["images"][:1], "answer": str(row["answer"])}


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}
