"""Rows of the datasets that NeMo-RL's recipes select by name, converted to the columns of ``docs/trainers.md``.

Translated configs name these functions in ``data.<split>.type``. They correspond to ``format_data`` of NeMo-RL's
classes in ``data/datasets``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}
