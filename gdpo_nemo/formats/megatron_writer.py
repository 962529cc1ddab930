"""Write the policy's weights as a checkpoint that Megatron-core's GPTModel reads, by its own ranks in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    gpt_compatible_layer_maps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)

from gdpo_nemo.config.model_sources import COMPANION
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.megatron.checkpoint import sharded_weights
from gdpo_nemo.megatron.hf_files import copy_companions
from gdpo_nemo.megatron.hf_mapping import layer_symbols

_RELEASE = "release"
"""Megatron-LM's name for weights of no iteration, which it starts from with --finetune."""


def save_megatron(policy: Any, folder: str | Path) -> None:
    """Write ``folder``/release, the file that names it, and beside it config.json and tokenizer; collective.

    The model's layers are pairs of Hybrid layers here, attention and MLP; Megatron-core's own rule makes one of them.

    Raises:
        ConfigError: dense and mixture layers in one model, which GPTModel's format does not have. OSError.
    """
    folder = Path(folder)
    try:
        maps = gpt_compatible_layer_maps("".join(layer_symbols(policy.built.hf_config)))
    except ValueError as error:
        raise ConfigError(f"--to megatron: the model cannot be a GPTModel of Megatron-core ({error})") from None
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0}
    for number, (_, chunk) in enumerate(sharded_weights(policy)):
        retarget_sharded_state_dict_to_gpt_checkpoint(chunk, maps)
        state[f"chunk{number}"] = chunk
    inside = folder / _RELEASE
    if dist.get_rank() == 0:
        inside.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(inside), async_strategy="mcore")
    if dist.get_rank() == 0:
        companion = folder / COMPANION
        companion.mkdir()
        policy.built.hf_config.save_pretrained(companion)
        copy_companions(policy.folder, companion)
        (folder / "latest_checkpointed_iteration.txt").write_text(_RELEASE)
    dist.barrier()
