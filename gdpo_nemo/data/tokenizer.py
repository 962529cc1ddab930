"""The tokenizer of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError


def load_tokenizer(config: Config, folder: str | Path) -> Any:
    """The tokenizer that ``policy.tokenizer_name`` names, else that of the model in ``folder``. Raises ConfigError."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    name = config.policy.tokenizer_name or folder
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # noqa: BLE001 - damaged files raise many kinds, the Rust library's among them
        raise ConfigError(f"policy.tokenizer_name: no tokenizer in {name} ({first_line(error)})") from None
