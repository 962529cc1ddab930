"""``trl.experimental.openenv``, which files for TRL up to 1.15 import and TRL 1.16 no longer has."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Mapping, Sequence

_NAME = "trl.experimental.openenv"


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Any],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """A completion of each prompt, which is text or messages, by the trainer of a rollout function.

    Returns:
        prompt_ids, completion_ids, logprobs and text, of each.
    """
    if not prompts:
        return []
    chat = as_chat if as_chat is not None else not isinstance(prompts[0], str)
    client = trainer.vllm_generation.vllm_client
    found = (client.chat if chat else client.generate)(list(prompts), **(generation_overrides or {}))
    texts = [trainer.processing_class.decode(ids, skip_special_tokens=True) for ids in found["completion_ids"]]
    return [
        {"prompt_ids": asked, "completion_ids": ids, "logprobs": logprobs, "text": text}
        for asked, ids, logprobs, text in zip(found["prompt_ids"], found["completion_ids"], found["logprobs"], texts)
    ]


def offered(missing: ModuleNotFoundError) -> bool:
    """Make the module importable if its absence, or that of TRL, is what an import failed for."""
    if missing.name not in (_NAME, "trl") or _NAME in sys.modules:
        return False
    module = ModuleType(_NAME)
    module.generate_rollout_completions = generate_rollout_completions  # type: ignore[attr-defined]
    sys.modules[_NAME] = module
    return True
