"""Translation of NeMo-RL's recipes to gdpo_nemo configs, with a report on every key.

First, ``recipe.py`` resolves the recipe's parents (``defaults:``) and interpolations. Then the first matching rule in
``keys.py`` translates each key. Keys that depend on each other are translated in ``objective.py``, ``datasets.py`` and
``machines.py``. ``algorithms.py`` adds the keys of algorithms other than GRPO and GDPO. The report states whether the
translated run gives the same result, gives a different result, or cannot run. A key without a rule is reported as a
difference.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gdpo_nemo.tools.interop.nemo_rl.datasets import data
from gdpo_nemo.tools.interop.nemo_rl.keys import result_of
from gdpo_nemo.tools.interop.nemo_rl.machines import machines
from gdpo_nemo.tools.interop.nemo_rl.objective import learning
from gdpo_nemo.tools.interop.nemo_rl.recipe import Recipe, open_recipe, variables_of
from gdpo_nemo.tools.interop.translation import Findings, RuleResult, Translation, assemble
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import read_text, real_path


def translate(path: str | Path, gym_checkout: str | Path | None = None, release: str | None = None) -> Translation:
    """Translate the recipe at ``path``.

    Args:
        gym_checkout: folder of NeMo Gym, which defines the agents and rewards of recipes that use it. None searches for
            the submodule of a NeMo-RL checkout.
        release: NeMo-RL's release that the recipe belongs to. None determines it from the recipe's keys.

    Raises:
        ConfigError: if the recipe or one of its parents cannot be read, its algorithm is not supported, or
            ``gym_checkout`` is not a folder of NeMo Gym.
    """
    checkout = None if gym_checkout is None else Path(gym_checkout).absolute()
    if checkout is not None and not (checkout / "resources_servers").is_dir():
        raise ConfigError(f"--gym-checkout: {gym_checkout} does not contain the folder resources_servers of NeMo Gym")
    recipe = open_recipe(path, checkout, release)
    translation = assemble(*apply_rules(recipe), "NeMo-RL", "from-nemo-rl")
    translation.rename(recipe.as_written)
    translation.variables = sorted(variables_of(translation.content))
    how = "--release" if release else "by its keys"
    translation.source = f"read as a recipe of NeMo-RL {recipe.release} ({how})"
    return translation


def apply_rules(recipe: Recipe) -> tuple[dict[str, tuple[Any, RuleResult | None]], Findings]:
    """Return (key -> (value, result of its rule), findings on keys that depend on each other)."""
    findings = Findings()
    for part in (data, learning, machines, program):
        part(recipe, findings)
    return {key: (value, result_of(key, value, recipe)) for key, value in recipe.flat.items()}, findings


def program(recipe: Recipe, findings: Findings) -> None:
    """Record a blocker if the recipe belongs to a project whose programs do not train with the recipe's algorithm.

    The project is the nearest folder above the recipe with a ``pyproject.toml``. Recipes of NeMo-RL itself are
    accepted.
    """
    folders = real_path(recipe.path).parents
    project = next((folder for folder in folders if (folder / "pyproject.toml").is_file()), None)
    if project is None or (project / "nemo_rl").is_dir():
        return
    programs = {file.name: read_text(file) for file in sorted(project.glob("*.py")) if file.is_file()}
    using = [name for name, text in programs.items() if "nemo_rl" in text]
    # names of NeMo-RL's functions and actors
    trains = re.compile(rf"\w*{recipe.section}_train\w*|SingleController\w*")
    if using and not any(trains.search(programs[name]) for name in using):
        name = recipe.section.upper()
        findings.blocks("program", f"{', '.join(using)} in project {project.name} does not train with NeMo-RL's {name}")
