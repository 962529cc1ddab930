"""What TRL's own example scripts come to here: ``python tests/compat/trl_scripts.py --scripts CHECKOUT/examples/scripts
[--reasons]``.

Every .py below the folder that calls a trainer is translated with the options of the first command in its heading that
starts it, as ``gdpo-nemo config from-trl SCRIPT --out FILE -- OPTIONS`` does it; see ``docs/from_trl.md``.
Scripts whose heading names `accelerate launch` have 8 processes.
"""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gdpo_nemo.tools.interop.translation import CANNOT_RUN, DIFFERS, SAME
from gdpo_nemo.tools.interop.trl.translate import translate_trl
from gdpo_nemo.utils.errors import ConfigError

REFUSED = "refused"
_PROCESSES = 8
"""Of the configs in TRL's examples/accelerate_configs that the headings name."""
_CALL = re.compile(r"\b(\w+Trainer)\(")


@dataclass
class Row:
    """One script and what it came to."""

    name: str
    trainer: str
    status: str
    reasons: dict[str, str]


def rows(folder: Path) -> Iterator[Row]:
    """The scripts below ``folder``, in order of their paths."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        calls = [name for name in _CALL.findall(text) if f"class {name}(" not in text]
        if not calls:
            continue
        name = str(path.relative_to(folder))
        with tempfile.TemporaryDirectory() as made:
            try:
                options = heading_options(text, path.name)
                processes = _PROCESSES if "accelerate launch" in text else 1
                found = translate_trl([str(path)], f"{made}/{path.stem}.yaml", processes, options)
                yield Row(name, calls[-1], found.status, found.blockers or found.differences)
            except ConfigError as error:
                yield Row(name, calls[-1], REFUSED, {"script": str(error).removeprefix(f"{path}: ")})


def heading_options(text: str, script: str) -> list[str]:
    """Return the options of the first command in the script's comments and docstrings that starts it with some."""
    for said in _headings(text):
        lines = iter(said.splitlines())
        for line in lines:
            if script not in line.split() and not any(word.endswith(f"/{script}") for word in line.split()):
                continue
            command = line
            while command.rstrip().endswith("\\"):
                command = command.rstrip().rstrip("\\") + " " + next(lines, "")
            words = shlex.split(command)
            place = next(i for i, word in enumerate(words) if word == script or word.endswith(f"/{script}"))
            if options := words[place + 1 :]:
                return options
    return []


def _headings(text: str) -> Iterator[str]:
    """Texts that stand as statements of their own, then the comments."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
    yield "\n".join(comments)


def report(found: list[Row], reasons: bool) -> str:
    """The table: a line a script, then how many came to what, then the reasons by frequency."""
    lines = []
    for row in found:
        lines.append(f"{row.status:<11} {len(row.reasons):>2}  {row.name} ({row.trainer})  {'; '.join(row.reasons)}")
        lines += [f"                {key}: {why}" for key, why in row.reasons.items()] if reasons else []
    lines.append("")
    for status in (SAME, DIFFERS, CANNOT_RUN, REFUSED):
        lines.append(f"{status:<12}{sum(row.status == status for row in found):>3}")
    lines.append(f"{'together':<12}{len(found):>3}")
    for status in (DIFFERS, CANNOT_RUN, REFUSED):
        counts = Counter(key for row in found if row.status == status for key in row.reasons)
        lines += ["", f"{status}, by reason:", *(f"{count:>4}  {key}" for key, count in counts.most_common())]
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--scripts", type=Path, required=True, metavar="DIR", help="examples/scripts of huggingface/trl"
    )
    parser.add_argument("--reasons", action="store_true", help="every reason in full")
    arguments = parser.parse_args()
    print(report(list(rows(arguments.scripts)), arguments.reasons))


if __name__ == "__main__":
    main()
