"""What NeMo-RL's own recipes come to here: ``python tests/compat/nemo_rl_recipes.py --recipes CHECKOUT [--reasons]``.

Every YAML below the folder that has an algorithm's section once its ``defaults`` are merged in; see ``docs/plan.md``.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.tools.interop.nemo_rl.gym import uses_gym
from gdpo_nemo.tools.interop.nemo_rl.recipe import ALGORITHMS, open_recipe
from gdpo_nemo.tools.interop.nemo_rl.translate import translate
from gdpo_nemo.tools.interop.translation import ADDED, CANNOT_RUN, DIFFERS, SAME, Translation
from gdpo_nemo.utils.errors import ConfigError

UNREADABLE = "cannot be read"


@dataclass
class Row:
    """One recipe and what it came to."""

    name: str
    status: str
    reasons: dict[str, str]
    family: bool = False
    """True if the model's family and the sampling engine are supported."""
    gym: bool = False
    """True if the recipe uses NeMo Gym."""
    keys: Counter = field(default_factory=Counter)
    """Number of the recipe's keys by status in the report, and of keys without a line (``dropped``)."""
    release: str = ""
    section: str = ""
    """Section of the recipe's algorithm."""


def rows(folder: Path, gym: Path | None = None) -> Iterator[Row]:
    """The recipes below ``folder``, in order of their paths."""
    for path in sorted(folder.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "defaults" not in text and not any(section in text for section in ALGORITHMS):
            continue
        name = str(path.relative_to(folder))
        try:
            recipe = open_recipe(path)
            yield _row(name, translate(path, gym), recipe)
        except ConfigError as error:
            section = next((section for section in ALGORITHMS if f"\n{section}:" in f"\n{text}"), "")
            if section:
                yield Row(name, UNREADABLE, {"recipe": str(error)}, section=section)


def _row(name: str, translation: Translation, recipe) -> Row:
    exists = recipe.model.model_type in FAMILIES and recipe.get("policy.generation.backend", "vllm") == "vllm"
    keys = Counter(line.status for line in translation.lines if line.status != ADDED)
    keys["dropped"] = len(set(map(recipe.as_written, recipe.flat)) - {line.key for line in translation.lines})
    reasons = translation.blockers or translation.differences
    return Row(name, translation.status, reasons, exists, uses_gym(recipe), keys, recipe.release, recipe.section)


def report(found: list[Row], reasons: bool) -> str:
    """The table: a line a recipe, then how many came to what, then the reasons by frequency."""
    lines = []
    for row in found:
        lines.append(f"{row.status:<14} {len(row.reasons):>2}  {row.name}  {'; '.join(row.reasons)}")
        lines += [f"                    {key}: {why}" for key, why in row.reasons.items()] if reasons else []
    sections = [section for section in ALGORITHMS if any(row.section == section for row in found)]
    heads = "".join(f"{section:>14}" for section in sections)
    lines += ["", f"{'':<16}all  family and engine exist here  with NeMo Gym{heads}"]
    for status in (SAME, DIFFERS, CANNOT_RUN, UNREADABLE, "together"):
        chosen = [row for row in found if status in (row.status, "together")]
        counts = len(chosen), sum(row.family for row in chosen), sum(row.gym for row in chosen)
        by_section = "".join(f"{sum(row.section == section for row in chosen):>14}" for section in sections)
        lines.append(f"{status:<16}{counts[0]:>3}  {counts[1]:>29}  {counts[2]:>13}{by_section}")
    keys = sum((row.keys for row in found), Counter())
    lines += [
        "",
        f"releases: {dict(Counter(row.release for row in found))}",
        f"keys: {sum(keys.values())} {dict(keys)}",
    ]
    for status in (DIFFERS, CANNOT_RUN):
        counts = Counter(_short(*reason) for row in found if row.status == status for reason in row.reasons.items())
        lines += ["", f"{status}, by reason:", *(f"{count:>4}  {key}" for key, count in counts.most_common())]
    return "\n".join(lines)


def _short(key: str, why: str) -> str:
    """A reason without the recipe's values: models are counted by what they are."""
    is_what = re.search(r"' is (.+?), which is|' (is not .+?);", why) if key == "policy.model_name" else None
    return f"{key}: {is_what[1] or is_what[2]}" if is_what else key


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", type=Path, required=True, metavar="DIR", help="a checkout of NVIDIA-NeMo/RL")
    parser.add_argument("--gym-checkout", type=Path, metavar="DIR", help="a checkout of NVIDIA-NeMo/Gym")
    parser.add_argument("--reasons", action="store_true", help="every reason in full")
    arguments = parser.parse_args()
    print(report(list(rows(arguments.recipes, arguments.gym_checkout)), arguments.reasons))


if __name__ == "__main__":
    main()
