"""Configs of axolotl as configs of this project, with what became of every key.

Each key meets the first rule of the table (``axolotl_keys.py``). Keys that only make sense together are worked out in
``axolotl_objective.py``, ``axolotl_machines.py`` and ``axolotl_data.py``. Axolotl's defaults stand for keys that are
absent, and are written where those here are others, so that the config means what axolotl would do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpo_nemo.errors import ConfigError
from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.axolotl.axolotl_config import AxolotlConfig, open_axolotl
from gdpo_nemo.interop.axolotl.axolotl_data import data
from gdpo_nemo.interop.axolotl.axolotl_keys import said_of
from gdpo_nemo.interop.axolotl.axolotl_machines import surroundings
from gdpo_nemo.interop.axolotl.axolotl_objective import learning
from gdpo_nemo.interop.rules import RuleResult
from gdpo_nemo.interop.translation import Translation, assembled

DEFAULTS: dict[str, Any] = {
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "optimizer": "adamw_torch_fused",
    "seed": 42,
}
"""Defaults of axolotl, or of transformers behind it, that differ from the defaults here."""


def translate_axolotl(path: str | Path, processes: int = 1) -> Translation:
    """Translate the config at ``path``.

    Args:
        processes: data-parallel processes that axolotl would be launched with.

    Raises:
        ConfigError: if it cannot be read, or is not a config of axolotl.
    """
    if processes < 1:
        raise ConfigError(f"--num-processes: must be at least 1, got {processes}")
    config = open_axolotl(path, processes)
    account = Account()
    for part in (learning, data, surroundings):
        part(config, account)
    if config.get("learning_rate") is None:
        account.blocks("learning_rate", "is not set; axolotl requires it")
    translation = assembled(_said(config, account), account, "axolotl", "from-axolotl")
    translation.files = sorted(account.files)
    return translation


def _said(config: AxolotlConfig, account: Account) -> dict[str, tuple[Any, RuleResult | None]]:
    """The rules' answers: all for what is given, and those defaults of axolotl's that have a value here."""
    said: dict[str, tuple[Any, RuleResult | None]] = {}
    for key, value in config.flat.items():
        if key in account.blockers or key in account.differences:
            why = account.blockers.get(key) or account.differences[key]
            said[key] = (value, RuleResult(text=why, matters=True))
        else:
            said[key] = (value, said_of(key, value, config))
    for key, value in DEFAULTS.items():
        outcome = said_of(key, value, config)
        if config.get(key) is None and outcome is not None and outcome.values:
            outcome.text = "axolotl's default"
            said[key] = (value, outcome)
    return said
