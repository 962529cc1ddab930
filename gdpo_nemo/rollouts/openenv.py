"""Substitute for ``trl.experimental.openenv``, which files with a rollout function of TRL import.

The import of a user file uses this module if TRL is not installed (``utils/import_path.py``). The sampling functions of
the ``trainer`` argument are those of ``rollouts/trl_functions.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Any],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """Sample a completion for each prompt.

    In rollout functions, this function replaces TRL's function of the same name.

    Args:
        trainer: trainer object that the rollout function receives.
        prompts: texts, or lists of messages.
        generation_overrides: sampling parameters for this call.
        as_chat: True if the prompts are messages. None decides by the type of the first prompt.

    Returns:
        ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``text`` for each prompt.
    """
    if not prompts:
        return []
    chat = as_chat if as_chat is not None else not isinstance(prompts[0], str)
    client = trainer.vllm_generation.vllm_client
    found = (client.chat if chat else client.generate)(list(prompts), **(generation_overrides or {}))
    texts = [trainer.processing_class.decode(ids, skip_special_tokens=True) for ids in found["completion_ids"]]
    return [
        {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs, "text": text}
        for prompt_ids, ids, logprobs, text in zip(
            found["prompt_ids"], found["completion_ids"], found["logprobs"], texts
        )
    ]
