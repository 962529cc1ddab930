"""NeMo-RL's GRPO and GDPO recipes as configs of this project, with what became of every key.

A recipe's ``defaults:`` chain and its ``${...}`` are resolved first (``recipe.py``); then each leaf meets the
first rule of the table (``keys.py``) whose pattern fits. Keys that only make sense together are worked out in
``objective.py``, ``datasets.py`` and ``machines.py``. What comes out is one of three things: the same run, a run that
differs in named ways that change the result, or no run, with the reason. A key that no rule knows counts as a
difference.
"""

from __future__ import annotations

from pathlib import Path

from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.nemo_rl.datasets import data
from gdpo_nemo.interop.nemo_rl.keys import result_of
from gdpo_nemo.interop.nemo_rl.machines import machines
from gdpo_nemo.interop.nemo_rl.objective import learning
from gdpo_nemo.interop.nemo_rl.recipe import open_recipe, variables_of
from gdpo_nemo.interop.translation import Translation, assembled


def translate(path: str | Path) -> Translation:
    """Translate the recipe at ``path``.

    Raises:
        ConfigError: the recipe or one of its parents cannot be read, or is no GRPO or GDPO recipe.
    """
    recipe = open_recipe(path)
    account = Account()
    for part in (data, learning, machines):
        part(recipe, account)
    results = {key: (value, result_of(key, value, recipe)) for key, value in recipe.flat.items()}
    translation = assembled(results, account, "NeMo-RL", "from-nemo-rl")
    translation.variables = sorted(variables_of(translation.content))
    return translation
