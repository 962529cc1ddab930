"""Translation of axolotl configs to gdpo_nemo configs, with a report on every key.

The first matching rule in ``keys.py`` translates a key. Keys that depend on each other are translated in
``objective.py``, ``machines.py`` and ``data.py``. Keys that are not set get axolotl's defaults, which are written if
they differ from gdpo_nemo's defaults. The translated config therefore behaves as in axolotl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpo_nemo.tools.interop.axolotl.config import AxolotlConfig, open_axolotl
from gdpo_nemo.tools.interop.axolotl.data import data
from gdpo_nemo.tools.interop.axolotl.keys import result_of
from gdpo_nemo.tools.interop.axolotl.machines import other_settings
from gdpo_nemo.tools.interop.axolotl.objective import learning
from gdpo_nemo.tools.interop.translation import Findings, RuleResult, Translation, assemble
from gdpo_nemo.utils.errors import ConfigError

DEFAULTS: dict[str, Any] = {
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "optimizer": "adamw_torch_fused",
    "seed": 42,
}
"""Default values in axolotl and transformers that differ from gdpo_nemo's."""


def translate_axolotl(path: str | Path, processes: int = 1) -> Translation:
    """Translate the config at ``path``.

    Args:
        processes: number of data-parallel processes with which axolotl would be launched.

    Raises:
        ConfigError: if the file cannot be read, or is not an axolotl config.
    """
    if processes < 1:
        raise ConfigError(f"--num-processes: must be at least 1, got {processes}")
    config = open_axolotl(path, processes)
    findings = Findings()
    for part in (learning, data, other_settings):
        part(config, findings)
    if config.get("learning_rate") is None:
        findings.blocks("learning_rate", "required by axolotl but not set")
    translation = assemble(_rule_results(config, findings), findings, "axolotl", "from-axolotl")
    translation.files = sorted(findings.files)
    return translation


def _rule_results(config: AxolotlConfig, findings: Findings) -> dict[str, tuple[Any, RuleResult | None]]:
    """Return the results of the rules for all keys of the config, and for axolotl's defaults that must be written."""
    results: dict[str, tuple[Any, RuleResult | None]] = {}
    for key, value in config.flat.items():
        if key in findings.blockers or key in findings.differences:
            why = findings.blockers.get(key) or findings.differences[key]
            results[key] = (value, RuleResult(text=why, matters=True))
        else:
            results[key] = (value, result_of(key, value, config))
    for key, value in DEFAULTS.items():
        outcome = result_of(key, value, config)
        if config.get(key) is None and outcome is not None and outcome.values:
            outcome.text = "axolotl's default"
            results[key] = (value, outcome)
    return results
