"""NeMo-RL's GRPO and GDPO recipes as configs of this project, with what became of every key.

A recipe's ``defaults:`` chain and its ``${...}`` are resolved first (``recipe.py``); then each leaf meets the
first rule of the table (``keys.py``) whose pattern fits. Keys that only make sense together are worked out in
``objective.py``, ``datasets.py`` and ``machines.py``. What comes out is one of three things: the same run, a run that
differs in named ways that change the result, or no run, with the reason. A key that no rule knows counts as a
difference.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gdpo_nemo.config.reading import read_text, real_path
from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.nemo_rl.datasets import data
from gdpo_nemo.interop.nemo_rl.keys import result_of
from gdpo_nemo.interop.nemo_rl.machines import machines
from gdpo_nemo.interop.nemo_rl.objective import learning
from gdpo_nemo.interop.nemo_rl.recipe import Recipe, open_recipe, variables_of
from gdpo_nemo.interop.rules import RuleResult
from gdpo_nemo.interop.translation import Translation, assembled


def translate(path: str | Path) -> Translation:
    """Translate the recipe at ``path``.

    Raises:
        ConfigError: the recipe or one of its parents cannot be read, or is no GRPO or GDPO recipe.
    """
    recipe = open_recipe(path)
    translation = assembled(*worked_out(recipe), "NeMo-RL", "from-nemo-rl")
    translation.variables = sorted(variables_of(translation.content))
    return translation


def worked_out(recipe: Recipe) -> tuple[dict[str, tuple[Any, RuleResult | None]], Account]:
    """Return what the rules answer for each key (key -> (value, answer)), and what keys make together."""
    account = Account()
    for part in (data, learning, machines, program):
        part(recipe, account)
    return {key: (value, result_of(key, value, recipe)) for key, value in recipe.flat.items()}, account


_TRAINS_BY_GRPO = re.compile(r"\w*grpo_train\w*|SingleController\w*")
"""NeMo-RL's functions and actors that train by GRPO."""


def program(recipe: Recipe, account: Account) -> None:
    """Block a recipe of a project whose own programs do not train by GRPO, although the recipe has the section.

    A project is the nearest folder above the recipe that has a ``pyproject.toml``. NeMo-RL itself is not one.
    """
    folders = real_path(recipe.path).parents
    project = next((folder for folder in folders if (folder / "pyproject.toml").is_file()), None)
    if project is None or (project / "nemo_rl").is_dir():
        return
    programs = {file.name: read_text(file) for file in sorted(project.glob("*.py")) if file.is_file()}
    own = [name for name, text in programs.items() if "nemo_rl" in text]
    if own and not any(_TRAINS_BY_GRPO.search(programs[name]) for name in own):
        account.blocks("program", f"{', '.join(own)} of its project {project.name} does not train by NeMo-RL's GRPO")
